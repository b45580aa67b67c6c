/* tiles_avx512.h: expanded panels times tiles of activations. */
#ifndef MILAD_TILES_AVX512_H
#define MILAD_TILES_AVX512_H

#include "../mat_internal.h"

void tile_avx512(int32_t type, const mat_part *part, const mat_tile *x);
void tiles_avx512(int32_t type, const mat_part *part, const mat_tile *x, int32_t n_tiles, size_t x_step, size_t halves_step,
                  const mat_ahead *ahead);

#endif

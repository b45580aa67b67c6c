/* acts_avx512.h: activations as the AVX-512 tiles want them (acts_avx512.c); entries of mat_kernels. */
#ifndef MILAD_ACTS_AVX512_H
#define MILAD_ACTS_AVX512_H

#include "../mat_internal.h"

void quantise_avx512(const float *x, int64_t n_in, int64_t n_blocks, int32_t nt, int32_t t, uint8_t *q8, uint8_t *halves);
void prepare_tile_avx512(const mat_act *a, int32_t tile, const float *x, int64_t ld_x);

#endif

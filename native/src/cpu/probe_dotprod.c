/* probe_dotprod.c: probe kernels for aarch64 with the dot product instructions: sdot by element, as the matrix kernels use it. */
#include "probe_neon.h"

static double int8_dotprod(int64_t n_rounds, int64_t *n_ops)
{
    int32x4_t r[16];
    int8x16_t x = vdupq_n_s8((int8_t)n_rounds), y = vdupq_n_s8(5);
    for (int i = 0; i < 16; i++)
        r[i] = vdupq_n_s32(0);
    for (int64_t k = 0; k < n_rounds; k++) {
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++)
            r[i] = vdotq_laneq_s32(r[i], x, y, 0);
        __asm__ volatile("" : "+w"(x), "+w"(y));
    }
    *n_ops = n_rounds * 16 * 32;
    return probe_sum(r, 16);
}

const probe_kernels probe_kernels_dotprod = {probe_read_neon, {NULL, int8_dotprod, NULL, probe_f32_neon}};

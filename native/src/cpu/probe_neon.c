/* probe_neon.c: probe kernels for every aarch64 machine: 16-byte loads, smull + sadalp, fmla. */
#include <arm_neon.h>

#include "../probe.h"
#include "probe_neon.h"

static double int8_neon(int64_t n_rounds, int64_t *n_ops)
{
    int32x4_t r[12];
    int8x8_t x = vdup_n_s8((int8_t)n_rounds), y = vdup_n_s8(5);
    for (int i = 0; i < 12; i++)
        r[i] = vdupq_n_s32(0);
    for (int64_t k = 0; k < n_rounds; k++) {
#pragma GCC unroll 12
        for (int i = 0; i < 12; i++) {
            __asm__ volatile("" : "+w"(x)); /* or the product is taken out of the loop */
            r[i] = vpadalq_s16(r[i], vmull_s8(x, y));
        }
    }
    *n_ops = n_rounds * 12 * 16;
    return probe_sum(r, 12);
}

int64_t probe_read_neon(const void *data, size_t n_bytes)
{
    const uint8_t *p = data;
    uint8x16_t a[16];
    for (int i = 0; i < 16; i++)
        a[i] = vdupq_n_u8(0);
    for (size_t i = 0; i < n_bytes; i += 256)
#pragma GCC unroll 16
        for (int j = 0; j < 16; j++)
            a[j] |= vld1q_u8(p + i + 16 * (size_t)j);
    for (int i = 1; i < 16; i++)
        a[0] |= a[i];
    return vgetq_lane_s64(vreinterpretq_s64_u8(a[0]), 0) | vgetq_lane_s64(vreinterpretq_s64_u8(a[0]), 1);
}

double probe_f32_neon(int64_t n_rounds, int64_t *n_ops)
{
    const float32x4_t x = vdupq_n_f32(0.5f), y = vdupq_n_f32(0.25f);
    float32x4_t r[16];
    for (int i = 0; i < 16; i++)
        r[i] = vdupq_n_f32(0);
    for (int64_t k = 0; k < n_rounds; k++) {
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++)
            r[i] = vfmaq_f32(y, r[i], x);
        __asm__ volatile("" : : "w"(r[0]), "w"(r[15]));
    }
    double sum = 0;
    for (int i = 0; i < 16; i++)
        sum += (double)vgetq_lane_f32(r[i], 0);
    *n_ops = n_rounds * 16 * 8;
    return sum;
}

const probe_kernels probe_kernels_neon = {probe_read_neon, {NULL, int8_neon, NULL, probe_f32_neon}};

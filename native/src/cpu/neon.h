/* neon.h: packed units of every type as vectors of codes and scales, 4 rows at a time: what the NEON kernels share. Include only
 * in the kernels for aarch64. Layouts: ../mat_internal.h; a line of 64 bytes holds 4 values of 16 rows, `quarter` q picks rows
 * 4 q .. 4 q + 3. Codes keep the types' own bias, which fits in 7 bits, except Q8_0's and IQ4_NL's, which are signed.
 */
#ifndef MILAD_NEON_H
#define MILAD_NEON_H

#include <arm_neon.h>

#include "../mat_internal.h"

#define INLINE static inline __attribute__((always_inline))

typedef uint8x16_t vb;
typedef int32x4_t vi;
typedef float32x4_t vf;

INLINE vb load_b(const void *p) { return vld1q_u8(p); }
INLINE vf load_f(const float *p) { return vld1q_f32(p); }
INLINE vf load_half(const void *p) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p))); }
INLINE vi as_i(vb v) { return vreinterpretq_s32_u8(v); }
INLINE vb bytes(int v) { return vdupq_n_u8((uint8_t)v); }
INLINE vb low_nibble(vb v) { return v & bytes(15); }
INLINE vb high_nibble(vb v) { return v >> 4; }
INLINE vb shifted(vb v, const int n) { return n >= 0 ? v << (n >= 0 ? n : 0) : v >> (n < 0 ? -n : 0); }
INLINE vb or_bits(vb v, vb more, const int mask) { return v | (more & bytes(mask)); }

INLINE bool is_k(const int type) { return type >= MAT_Q2_K && type <= MAT_Q6_K; }
INLINE bool has_min(const int type)
{
    return type == MAT_Q4_1 || type == MAT_Q5_1 || type == MAT_Q4_K || type == MAT_Q5_K || type == MAT_Q2_K;
}
INLINE bool has_halves(const int type) { return type == MAT_Q2_K || type == MAT_Q3_K || type == MAT_Q6_K; }
INLINE int n_blocks_of(const int type) { return is_k(type) ? 8 : 2; }
INLINE int n_scales_of(const int type) { return (has_min(type) ? 2 : 1) * (has_halves(type) ? 2 : 1); }

INLINE int unit_of(const int type)
{
    switch (type) {
    case MAT_Q8_0: return 1088;
    case MAT_Q4_1: return 640;
    case MAT_Q5_0: return 704;
    case MAT_Q5_1: return 768;
    case MAT_Q2_K: return 1344;
    case MAT_Q3_K: return 1792;
    case MAT_Q4_K: return 2304;
    case MAT_Q5_K: return 2816;
    case MAT_Q6_K: return 3392;
    default: return 576;
    }
}

/* How far corrections for a bias of 128 go right for this type's bias; -1: no correction. */
INLINE int shift_of(const int type)
{
    return type == MAT_Q4_0 ? 4 : type == MAT_Q5_0 ? 3 : type == MAT_Q6_K ? 2 : type == MAT_Q3_K ? 5 : -1;
}

INLINE void add_fifth_bits(vb mask, vb *w)
{
    static const uint8_t first[16] = {0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12};
    const vb even = vreinterpretq_u8_u32(vdupq_n_u32(0x08040201)), odd = even << 4, pick = load_b(first);
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        const vb spread = vqtbl1q_u8(mask, pick + bytes(j));
        w[2 * j] = or_bits(w[2 * j], vtstq_u8(spread, even), 16);
        w[2 * j + 1] = or_bits(w[2 * j + 1], vtstq_u8(spread, odd), 16);
    }
}

/* Block b of the unit as codes of 4 rows. */
INLINE void codes_of(const int type, const uint8_t *unit, const int quarter, const int b, vb *w)
{
    const uint8_t *p = unit + 16 * quarter;
    if (type == MAT_Q8_0) {
#pragma GCC unroll 8
        for (int g = 0; g < 8; g++)
            w[g] = load_b(p + 64 + b * 512 + g * 64) ^ bytes(0x80);
    } else if (!is_k(type)) {
        static const int8_t iq4_nl[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
        const bool five = type == MAT_Q5_0 || type == MAT_Q5_1;
        const int head = has_min(type) ? 128 : 64;
        const vb table = load_b(iq4_nl);
#pragma GCC unroll 4
        for (int g = 0; g < 4; g++) {
            const vb v = load_b(p + head + (five ? 128 : 0) + b * 256 + g * 64);
            w[g] = low_nibble(v);
            w[g + 4] = high_nibble(v);
            if (type == MAT_IQ4_NL) {
                w[g] = vqtbl1q_u8(table, w[g]);
                w[g + 4] = vqtbl1q_u8(table, w[g + 4]);
            }
        }
        if (five)
            add_fifth_bits(load_b(p + head + b * 64), w);
    } else if (type == MAT_Q2_K || type == MAT_Q3_K) {
        const uint8_t *q = p + (type == MAT_Q2_K ? 320 + b * 128 : 256 + b * 192);
#pragma GCC unroll 8
        for (int g = 0; g < 8; g++) {
            w[g] = (load_b(q + g / 4 * 64) >> (g % 4 * 2)) & bytes(3);
            if (type == MAT_Q3_K)
                w[g] = or_bits(w[g], shifted(load_b(q + 128), 2 - g), 4);
        }
    } else {
        const int lines = type == MAT_Q4_K ? 4 : type == MAT_Q5_K ? 5 : 6;
        const uint8_t *q = p + (type == MAT_Q6_K ? 320 : 256) + b * lines * 64;
#pragma GCC unroll 8
        for (int g = 0; g < 8; g++) {
            const vb v = load_b(q + g % 4 * 64);
            w[g] = g < 4 ? low_nibble(v) : high_nibble(v);
            if (type == MAT_Q5_K)
                w[g] = or_bits(w[g], shifted(load_b(q + 256), 4 - g), 16);
            if (type == MAT_Q6_K)
                w[g] = or_bits(w[g], shifted(load_b(q + 256 + g / 4 * 64), 4 - g % 4 * 2), 0x30);
        }
    }
}

INLINE vf byte_of(vb v, const int i) { return vcvtq_f32_s32((as_i(v) >> (8 * i)) & 255); }
INLINE vf signed_byte_of(vb v, const int i) { return vcvtq_f32_s32((as_i(v) << (24 - 8 * i)) >> 24); }
INLINE vf negated(vf v) { return vsubq_f32(vdupq_n_f32(0.0f), v); } /* 0 stays 0, as in the other kernels */

/* The scales of block b, in the order of the type's class (mat_internal.h). */
INLINE void scales_of(const int type, const uint8_t *unit, const int quarter, const int b, vf *s)
{
    const uint8_t *p = unit + 16 * quarter, *h = unit + 8 * quarter;
    if (!is_k(type)) {
        s[0] = load_half(h + 32 * b);
        if (has_min(type))
            s[1] = load_half(h + 64 + 32 * b);
        return;
    }
    const vf d = load_half(h);
    if (type == MAT_Q4_K || type == MAT_Q5_K) {
        const vb w0 = load_b(p + 64), w1 = load_b(p + 128), w2 = load_b(p + 192);
        const vb sc = b < 4 ? w0 & bytes(63) : or_bits(low_nibble(w2), w0 >> 2, 0x30);
        const vb mn = b < 4 ? w1 & bytes(63) : or_bits(high_nibble(w2), w1 >> 2, 0x30);
        s[0] = vmulq_f32(d, byte_of(sc, b % 4));
        s[1] = negated(vmulq_f32(load_half(h + 32), byte_of(mn, b % 4)));
    } else if (type == MAT_Q6_K) {
        const vb v = load_b(p + 64 + b / 2 * 64);
        s[0] = vmulq_f32(d, signed_byte_of(v, b % 2 * 2));
        s[1] = vmulq_f32(d, signed_byte_of(v, b % 2 * 2 + 1));
    } else if (type == MAT_Q3_K) {
        const vb low = load_b(p + 64 + (b / 2 & 1) * 64);
        const vb sc = or_bits(b < 4 ? low_nibble(low) : high_nibble(low), shifted(load_b(p + 192), 4 - b / 2 * 2), 0x30) - bytes(32);
        s[0] = vmulq_f32(d, signed_byte_of(sc, b % 2 * 2));
        s[1] = vmulq_f32(d, signed_byte_of(sc, b % 2 * 2 + 1));
    } else { /* Q2_K */
        const vf dmin = negated(load_half(h + 32));
        const vb v = load_b(p + 64 + b / 2 * 64), sc = low_nibble(v), mn = high_nibble(v);
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            s[i] = vmulq_f32(d, byte_of(sc, b % 2 * 2 + i));
            s[2 + i] = vmulq_f32(dmin, byte_of(mn, b % 2 * 2 + i));
        }
    }
}

#endif

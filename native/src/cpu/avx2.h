/* avx2.h: packed units of every type as vectors of codes and scales, 8 rows at a time: what the AVX2 kernels share. Include only
 * in *_avx2.c. Layouts: ../mat_internal.h; a line of 64 bytes holds 4 values of 16 rows, `half` picks rows 0-7 or 8-15.
 *
 * vpmaddubsw adds two products in 16 bits and saturates, so codes stay small and unsigned (the bias of the file), except Q8_0's
 * and IQ4_NL's, which are signed and go through |w| * sign(x, w). joins_of() says how many of its results fit in 16 bits.
 */
#ifndef MILAD_AVX2_H
#define MILAD_AVX2_H

#include <immintrin.h>

#include "../mat_internal.h"

#define INLINE static inline __attribute__((always_inline))

typedef __m256i vi;
typedef __m256 vf;

INLINE vi load_i(const void *p) { return _mm256_load_si256(p); }
INLINE vf load_half(const void *p) { return _mm256_cvtph_ps(_mm_load_si128(p)); }
INLINE vi all_i(const void *p) { int32_t v; memcpy(&v, p, 4); return _mm256_set1_epi32(v); }
INLINE vf all_f(const float *p) { return _mm256_broadcast_ss(p); }
INLINE vi bytes(int v) { return _mm256_set1_epi8((char)v); }
INLINE vi low_nibble(vi v) { return _mm256_and_si256(v, bytes(15)); }
INLINE vi high_nibble(vi v) { return _mm256_and_si256(_mm256_srli_epi16(v, 4), bytes(15)); }
INLINE vi shifted(vi v, const int n) { return n >= 0 ? _mm256_slli_epi16(v, n >= 0 ? n : 0) : _mm256_srli_epi16(v, n < 0 ? -n : 0); }
INLINE vi or_bits(vi v, vi more, const int mask) { return _mm256_or_si256(v, _mm256_and_si256(more, bytes(mask))); }

INLINE bool is_k(const int type) { return type >= MAT_Q2_K && type <= MAT_Q6_K; }
INLINE bool is_signed(const int type) { return type == MAT_Q8_0 || type == MAT_IQ4_NL; }
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

INLINE int joins_of(const int type)
{
    switch (type) {
    case MAT_Q8_0:
    case MAT_IQ4_NL: return 1;  /* 2 * 128 * 127 */
    case MAT_Q6_K: return 2;    /* 2 * 63 * 127 * 2 */
    case MAT_Q5_0:
    case MAT_Q5_1:
    case MAT_Q5_K: return 4;    /* 2 * 31 * 127 * 4 */
    default: return 8;          /* 2 * 15 * 127 * 8 */
    }
}

INLINE void add_fifth_bits(vi mask, vi *w)
{
    const vi even = _mm256_set1_epi32(0x08040201), odd = _mm256_set1_epi32((int)0x80402010);
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        const vi pick = _mm256_add_epi8(_mm256_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c, 0, 0x04040404, 0x08080808, 0x0c0c0c0c),
                                        bytes(j));
        const vi spread = _mm256_shuffle_epi8(mask, pick);
        w[2 * j] = or_bits(w[2 * j], _mm256_cmpeq_epi8(_mm256_and_si256(spread, even), even), 16);
        w[2 * j + 1] = or_bits(w[2 * j + 1], _mm256_cmpeq_epi8(_mm256_and_si256(spread, odd), odd), 16);
    }
}

/* Block b of the unit at p as codes of 8 rows. */
INLINE void codes_of(const int type, const uint8_t *unit, const int half, const int b, vi *w)
{
    const uint8_t *p = unit + 32 * half;
    if (type == MAT_Q8_0) {
#pragma GCC unroll 8
        for (int g = 0; g < 8; g++)
            w[g] = _mm256_xor_si256(load_i(p + 64 + b * 512 + g * 64), bytes(0x80));
    } else if (!is_k(type)) {
        const bool five = type == MAT_Q5_0 || type == MAT_Q5_1;
        const int head = has_min(type) ? 128 : 64;
        const vi table = _mm256_broadcastsi128_si256(_mm_setr_epi8(-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113));
#pragma GCC unroll 4
        for (int g = 0; g < 4; g++) {
            const vi v = load_i(p + head + (five ? 128 : 0) + b * 256 + g * 64);
            w[g] = low_nibble(v);
            w[g + 4] = high_nibble(v);
            if (type == MAT_IQ4_NL) {
                w[g] = _mm256_shuffle_epi8(table, w[g]);
                w[g + 4] = _mm256_shuffle_epi8(table, w[g + 4]);
            }
        }
        if (five)
            add_fifth_bits(load_i(p + head + b * 64), w);
    } else if (type == MAT_Q2_K || type == MAT_Q3_K) {
        const uint8_t *q = p + (type == MAT_Q2_K ? 320 + b * 128 : 256 + b * 192);
#pragma GCC unroll 8
        for (int g = 0; g < 8; g++) {
            w[g] = _mm256_and_si256(_mm256_srli_epi16(load_i(q + g / 4 * 64), g % 4 * 2), bytes(3));
            if (type == MAT_Q3_K)
                w[g] = or_bits(w[g], shifted(load_i(q + 128), 2 - g), 4);
        }
    } else {
        const int lines = type == MAT_Q4_K ? 4 : type == MAT_Q5_K ? 5 : 6;
        const uint8_t *q = p + (type == MAT_Q6_K ? 320 : 256) + b * lines * 64;
#pragma GCC unroll 8
        for (int g = 0; g < 8; g++) {
            const vi v = load_i(q + g % 4 * 64);
            w[g] = g < 4 ? low_nibble(v) : high_nibble(v);
            if (type == MAT_Q5_K)
                w[g] = or_bits(w[g], shifted(load_i(q + 256), 4 - g), 16);
            if (type == MAT_Q6_K)
                w[g] = or_bits(w[g], shifted(load_i(q + 256 + g / 4 * 64), 4 - g % 4 * 2), 0x30);
        }
    }
}

INLINE vf byte_of(vi v, const int i)
{
    return _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(v, 8 * i), _mm256_set1_epi32(255)));
}

INLINE vf signed_byte_of(vi v, const int i)
{
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(v, 24 - 8 * i), 24));
}

/* The scales of block b, in the order of the type's class (mat_internal.h). */
INLINE void scales_of(const int type, const uint8_t *unit, const int half, const int b, vf *s)
{
    const uint8_t *p = unit + 32 * half, *h = unit + 16 * half;
    if (!is_k(type)) {
        s[0] = load_half(h + 32 * b);
        if (has_min(type))
            s[1] = load_half(h + 64 + 32 * b);
        return;
    }
    const vf d = load_half(h);
    if (type == MAT_Q4_K || type == MAT_Q5_K) {
        const vi w0 = load_i(p + 64), w1 = load_i(p + 128), w2 = load_i(p + 192);
        const vi sc = b < 4 ? _mm256_and_si256(w0, bytes(63)) : or_bits(low_nibble(w2), _mm256_srli_epi16(w0, 2), 0x30);
        const vi mn = b < 4 ? _mm256_and_si256(w1, bytes(63)) : or_bits(high_nibble(w2), _mm256_srli_epi16(w1, 2), 0x30);
        s[0] = _mm256_mul_ps(d, byte_of(sc, b % 4));
        s[1] = _mm256_sub_ps(_mm256_setzero_ps(), _mm256_mul_ps(load_half(h + 32), byte_of(mn, b % 4)));
    } else if (type == MAT_Q6_K) {
        const vi v = load_i(p + 64 + b / 2 * 64);
        s[0] = _mm256_mul_ps(d, signed_byte_of(v, b % 2 * 2));
        s[1] = _mm256_mul_ps(d, signed_byte_of(v, b % 2 * 2 + 1));
    } else if (type == MAT_Q3_K) {
        const vi low = load_i(p + 64 + (b / 2 & 1) * 64);
        const vi sc = _mm256_sub_epi8(or_bits(b < 4 ? low_nibble(low) : high_nibble(low), shifted(load_i(p + 192), 4 - b / 2 * 2), 0x30), bytes(32));
        s[0] = _mm256_mul_ps(d, signed_byte_of(sc, b % 2 * 2));
        s[1] = _mm256_mul_ps(d, signed_byte_of(sc, b % 2 * 2 + 1));
    } else { /* Q2_K */
        const vf dmin = _mm256_sub_ps(_mm256_setzero_ps(), load_half(h + 32));
        const vi v = load_i(p + 64 + b / 2 * 64), sc = low_nibble(v), mn = high_nibble(v);
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            s[i] = _mm256_mul_ps(d, byte_of(sc, b % 2 * 2 + i));
            s[2 + i] = _mm256_mul_ps(dmin, byte_of(mn, b % 2 * 2 + i));
        }
    }
}

/* Dot products of groups g0..g1-1 of 4 values, n tokens from token t0 on. */
INLINE void dot(const int type, const int g0, const int g1, const vi *w, const uint8_t *q, const int32_t nt, const int n, vi *i32)
{
    const int joins = joins_of(type) < g1 - g0 ? joins_of(type) : g1 - g0;
    const vi ones = _mm256_set1_epi16(1);
#pragma GCC unroll 8
    for (int g = g0; g < g1; g += joins) {
        vi sum[4];
#pragma GCC unroll 8
        for (int j = 0; j < joins; j++) {
            const vi v = w[g + j], magnitude = is_signed(type) ? _mm256_abs_epi8(v) : v;
#pragma GCC unroll 4
            for (int t = 0; t < n; t++) {
                const vi x = all_i(q + ((g + j) * nt + t) * 4);
                const vi two = _mm256_maddubs_epi16(magnitude, is_signed(type) ? _mm256_sign_epi8(x, v) : x);
                sum[t] = j == 0 ? two : _mm256_add_epi16(sum[t], two);
            }
        }
#pragma GCC unroll 4
        for (int t = 0; t < n; t++)
            i32[t] = _mm256_add_epi32(i32[t], _mm256_madd_epi16(sum[t], ones));
    }
}

/* One block of 32 of 8 rows into the accumulators of n <= 4 tokens, t0 .. of a tile of nt. */
INLINE void block_8(const int type, const vi *w, const vf *s, const uint8_t *q, const uint8_t *halves, const int32_t nt, const int32_t t0,
                    const int n, vf *acc)
{
    const float *dx = (const float *)(q + nt * 32) + t0, *sx = dx + nt;
    const int32_t *c = (const int32_t *)(sx + nt), *c_half = (const int32_t *)halves + t0;
    const float *sx_half = (const float *)(c_half + 2 * nt);
    vi i0[4], i1[4];
#pragma GCC unroll 4
    for (int t = 0; t < n; t++) {
        i0[t] = i1[t] = _mm256_setzero_si256();
        if (shift_of(type) >= 0) {
            i0[t] = _mm256_srai_epi32(all_i(has_halves(type) ? c_half + t : c + t), shift_of(type));
            if (has_halves(type))
                i1[t] = _mm256_srai_epi32(all_i(c_half + nt + t), shift_of(type));
        }
    }
    if (has_halves(type)) {
        dot(type, 0, 4, w, q + 4 * t0, nt, n, i0);
        dot(type, 4, 8, w, q + 4 * t0, nt, n, i1);
    } else {
        dot(type, 0, 8, w, q + 4 * t0, nt, n, i0);
    }
#pragma GCC unroll 4
    for (int t = 0; t < n; t++) {
        const vf f = _mm256_cvtepi32_ps(i0[t]);
        if (has_halves(type)) {
            const vf part = _mm256_fmadd_ps(_mm256_cvtepi32_ps(i1[t]), s[1], _mm256_mul_ps(f, s[0]));
            acc[t] = _mm256_fmadd_ps(part, all_f(dx + t), acc[t]);
            if (has_min(type)) {
                acc[t] = _mm256_fmadd_ps(s[2], all_f(sx_half + t), acc[t]);
                acc[t] = _mm256_fmadd_ps(s[3], all_f(sx_half + nt + t), acc[t]);
            }
        } else {
            acc[t] = _mm256_fmadd_ps(f, _mm256_mul_ps(s[0], all_f(dx + t)), acc[t]);
            if (has_min(type))
                acc[t] = _mm256_fmadd_ps(s[1], all_f(sx + t), acc[t]);
        }
    }
}

#endif

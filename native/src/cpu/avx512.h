/* avx512.h: packed units of every type as vectors of codes and scales: what the AVX-512 kernels share. Include only in
 * *_avx512.c. Layouts: ../mat_internal.h; a block's zmm g, lane r holds values 4 g .. 4 g + 3 of row r.
 */
#ifndef MILAD_AVX512_H
#define MILAD_AVX512_H

#include <immintrin.h>

#include "../mat_internal.h"

#define INLINE static inline __attribute__((always_inline))

typedef __m512i vi;
typedef __m512 vf;

INLINE vi load_i(const void *p) { return _mm512_load_si512(p); }
INLINE vf load_half(const void *p) { return _mm512_cvtph_ps(_mm256_load_si256((const __m256i *)p)); }
INLINE vi all_i(const void *p) { int32_t v; memcpy(&v, p, 4); return _mm512_set1_epi32(v); }
INLINE vf all_f(const float *p) { return _mm512_set1_ps(*p); }
INLINE vi bytes(int v) { return _mm512_set1_epi8((char)v); }
INLINE vi low_nibble(vi v) { return _mm512_and_si512(v, bytes(15)); }
INLINE vi high_nibble(vi v) { return _mm512_and_si512(_mm512_srli_epi16(v, 4), bytes(15)); }

/* How far ahead of the panels' bytes memory is asked for. Zen 5 foresees little of what these loops will read; Zen 4, which
 * has no vp2intersect, foresees it all and loses by being asked (../lab). */
INLINE size_t bytes_ahead(void) { return __builtin_cpu_supports("avx512vp2intersect") ? 7168 : 0; }

/* once: the bytes are read by one tile only, so they need not stay in the outer caches. */
INLINE void ask_ahead(size_t ahead, const bool once, const uint8_t *p, const int n_bytes)
{
    if (ahead)
#pragma GCC unroll 64
        for (int i = 0; i < n_bytes; i += 64) {
            if (once) _mm_prefetch((const char *)p + ahead + i, _MM_HINT_NTA); /* clang wants the hint as a constant */
            else _mm_prefetch((const char *)p + ahead + i, _MM_HINT_T0);
        }
}

/* What the codes of a type are above the value that they mean; 0: a type with minima. */
INLINE int bias_of(const int type)
{
    switch (type) {
    case MAT_Q8_0:
    case MAT_IQ4_NL: return 128;
    case MAT_Q4_0: return 8;
    case MAT_Q5_0: return 16;
    case MAT_Q6_K: return 32;
    case MAT_Q3_K: return 4;
    default: return 0;
    }
}

INLINE int class_of(const int type)
{
    switch (type) {
    case MAT_Q4_1:
    case MAT_Q5_1:
    case MAT_Q4_K:
    case MAT_Q5_K: return MAT_SM32;
    case MAT_Q3_K:
    case MAT_Q6_K: return MAT_S16;
    case MAT_Q2_K: return MAT_SM16;
    default: return MAT_S32;
    }
}

INLINE int n_blocks_of(const int type)
{
    return type == MAT_Q2_K || type == MAT_Q3_K || type == MAT_Q4_K || type == MAT_Q5_K || type == MAT_Q6_K ? 8 : 2;
}

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

/* Fifth bits of 32 values from a bit mask per lane (value j: bit j), added to the nibbles. */
INLINE void add_fifth_bits(vi mask, vi *w)
{
    const vi even = _mm512_set1_epi32(0x08040201), odd = _mm512_set1_epi32((int)0x80402010);
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        const vi pick = _mm512_add_epi8(_mm512_set4_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0), bytes(j));
        const vi spread = _mm512_shuffle_epi8(mask, pick);
        w[2 * j] = _mm512_mask_add_epi8(w[2 * j], _mm512_test_epi8_mask(spread, even), w[2 * j], bytes(16));
        w[2 * j + 1] = _mm512_mask_add_epi8(w[2 * j + 1], _mm512_test_epi8_mask(spread, odd), w[2 * j + 1], bytes(16));
    }
}

/* Left by n bits, or right by -n, across bytes: mask what counts. */
INLINE vi shifted(vi v, const int n) { return n >= 0 ? _mm512_slli_epi16(v, n >= 0 ? n : 0) : _mm512_srli_epi16(v, n < 0 ? -n : 0); }
INLINE vi or_bits(vi v, vi more, const int mask) { return _mm512_ternarylogic_epi32(v, more, bytes(mask), 0xf8); /* v | (more & mask) */ }

/* Block b of the unit at p as codes. */
INLINE void codes_of(const int type, const uint8_t *p, const int b, vi *w)
{
    const vi table = _mm512_broadcast_i32x4(_mm_setr_epi8(1, 24, 45, 63, 79, 93, 106, 118, (char)129, (char)141, (char)153, (char)166,
                                                          (char)181, (char)197, (char)217, (char)241));
    if (type == MAT_Q8_0) {
#pragma GCC unroll 8
        for (int g = 0; g < 8; g++)
            w[g] = load_i(p + 64 + b * 512 + g * 64);
    } else if (n_blocks_of(type) == 2) {
        const bool five = type == MAT_Q5_0 || type == MAT_Q5_1;
        const int scales = type == MAT_Q4_1 || type == MAT_Q5_1 ? 128 : 64;
        const uint8_t *q = p + scales + (five ? 128 : 0) + b * 256;
#pragma GCC unroll 4
        for (int g = 0; g < 4; g++) {
            const vi v = load_i(q + g * 64);
            w[g] = low_nibble(v);
            w[g + 4] = high_nibble(v);
            if (type == MAT_IQ4_NL) {
                w[g] = _mm512_shuffle_epi8(table, w[g]);
                w[g + 4] = _mm512_shuffle_epi8(table, w[g + 4]);
            }
        }
        if (five)
            add_fifth_bits(load_i(p + scales + b * 64), w);
    } else if (type == MAT_Q2_K || type == MAT_Q3_K) {
        const uint8_t *q = p + (type == MAT_Q2_K ? 320 + b * 128 : 256 + b * 192);
#pragma GCC unroll 8
        for (int g = 0; g < 8; g++) {
            w[g] = _mm512_and_si512(_mm512_srli_epi16(load_i(q + g / 4 * 64), g % 4 * 2), bytes(3));
            if (type == MAT_Q3_K)
                w[g] = or_bits(w[g], shifted(load_i(q + 128), 2 - g), 4);
        }
    } else {
        const int lines = type == MAT_Q4_K ? 4 : type == MAT_Q5_K ? 5 : 6;
        const uint8_t *q = p + (type == MAT_Q6_K ? 320 : 256) + b * lines * 64;
#pragma GCC unroll 4
        for (int g = 0; g < 4; g++) {
            const vi v = load_i(q + g * 64);
            w[g] = low_nibble(v);
            w[g + 4] = high_nibble(v);
        }
#pragma GCC unroll 8
        for (int g = 0; g < 8; g++) {
            if (type == MAT_Q5_K)
                w[g] = or_bits(w[g], shifted(load_i(q + 256), 4 - g), 16);
            if (type == MAT_Q6_K)
                w[g] = or_bits(w[g], shifted(load_i(q + 256 + g / 4 * 64), 4 - g % 4 * 2), 0x30);
        }
    }
}

INLINE vi byte_of(vi v, const int i) { return _mm512_and_si512(_mm512_srli_epi32(v, 8 * i), _mm512_set1_epi32(255)); }

INLINE vf signed_byte_of(vi v, const int i)
{
    return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(v, 24 - 8 * i), 24));
}

/* The scales of block b, in the order of the type's class (mat_internal.h). */
INLINE void scales_of(const int type, const uint8_t *p, const int b, vf *s)
{
    if (n_blocks_of(type) == 2) {
        s[0] = load_half(p + 32 * b);
        if (class_of(type) == MAT_SM32)
            s[1] = load_half(p + 64 + 32 * b);
        return;
    }
    const vf d = load_half(p);
    if (type == MAT_Q4_K || type == MAT_Q5_K) {
        const vf dmin = load_half(p + 32);
        const vi w0 = load_i(p + 64), w1 = load_i(p + 128), w2 = load_i(p + 192);
        const vi sc = b < 4 ? _mm512_and_si512(w0, bytes(63))
                            : _mm512_or_si512(low_nibble(w2), _mm512_and_si512(_mm512_srli_epi16(w0, 2), bytes(0x30)));
        const vi mn = b < 4 ? _mm512_and_si512(w1, bytes(63))
                            : _mm512_or_si512(high_nibble(w2), _mm512_and_si512(_mm512_srli_epi16(w1, 2), bytes(0x30)));
        const vf negative = _mm512_sub_ps(_mm512_setzero_ps(), _mm512_mul_ps(dmin, _mm512_cvtepi32_ps(byte_of(mn, b % 4))));
        s[0] = _mm512_mul_ps(d, _mm512_cvtepi32_ps(byte_of(sc, b % 4)));
        s[1] = negative;
    } else if (type == MAT_Q6_K) {
        const vi v = load_i(p + 64 + b / 2 * 64);
        s[0] = _mm512_mul_ps(d, signed_byte_of(v, b % 2 * 2));
        s[1] = _mm512_mul_ps(d, signed_byte_of(v, b % 2 * 2 + 1));
    } else if (type == MAT_Q3_K) {
        const vi low = load_i(p + 64 + (b / 2 & 1) * 64), high = load_i(p + 64 + 128);
        const vi high2 = b / 2 < 2 ? _mm512_slli_epi16(high, b / 2 < 2 ? 4 - b / 2 * 2 : 0)
                                   : _mm512_srli_epi16(high, b / 2 < 2 ? 0 : b / 2 * 2 - 4);
        const vi sc = _mm512_sub_epi8(_mm512_or_si512(b < 4 ? low_nibble(low) : high_nibble(low), _mm512_and_si512(high2, bytes(0x30))),
                                      bytes(32));
        s[0] = _mm512_mul_ps(d, signed_byte_of(sc, b % 2 * 2));
        s[1] = _mm512_mul_ps(d, signed_byte_of(sc, b % 2 * 2 + 1));
    } else { /* Q2_K */
        const vf dmin = _mm512_sub_ps(_mm512_setzero_ps(), load_half(p + 32));
        const vi v = load_i(p + 64 + b / 2 * 64), sc = low_nibble(v), mn = high_nibble(v);
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
            s[h] = _mm512_mul_ps(d, _mm512_cvtepi32_ps(byte_of(sc, b % 2 * 2 + h)));
            s[2 + h] = _mm512_mul_ps(dmin, _mm512_cvtepi32_ps(byte_of(mn, b % 2 * 2 + h)));
        }
    }
}

INLINE int n_scales_of(const int class) { return class == MAT_S32 ? 1 : class == MAT_SM16 ? 4 : 2; }

/* Vectors of scales of an expanded block: for one scale a block, its multiples first. */
INLINE bool has_multiples(const int class) { return class == MAT_S32 || class == MAT_SM32; }
INLINE int n_expanded_of(const int class) { return n_scales_of(class) + (has_multiples(class) ? MAT_MULTIPLES - 1 : 0); }

/* Where in them the multiple for a scale dx is, in bytes: by the first three bits of its fraction. */
INLINE size_t multiple_at(const float *dx)
{
    uint32_t u;
    memcpy(&u, dx, 4);
    return (u >> MAT_DX_BITS & (MAT_MULTIPLES - 1)) * 64;
}

/* The tile's block of activations: pointers into it (mat_internal.h). */
typedef struct act_block {
    const uint8_t *q;
    const float *dx, *sx;
    const int32_t *c;
    const int32_t *c_half;
    const float *sx_half;
} act_block;

INLINE act_block act_at(const uint8_t *q, const uint8_t *halves, const int nt)
{
    act_block a;
    a.q = q;
    a.dx = (const float *)(q + nt * 32);
    a.sx = a.dx + nt;
    a.c = (const int32_t *)(a.sx + nt);
    a.c_half = (const int32_t *)halves;
    a.sx_half = (const float *)(a.c_half + 2 * nt);
    return a;
}

/* One block of 32: n_p panels' codes and scales into their accumulators. shift: how far the tile's corrections (for codes
 * biased by 128) go right for these codes. Panel r's vectors are w + 8 r, s + 4 r, acc + r * nt; multiples: NULL, or where those of
 * panel r's s[4 r] are. */
INLINE void block_32(const int class, const int n_p, const int nt, const int shift, const vi *w, const vf *s, const float *const *multiples,
                     const act_block *a, vf *acc)
{
    vi i0[32], i1[32];
    const bool halves = class == MAT_S16 || class == MAT_SM16;
#pragma GCC unroll 12
    for (int t = 0; t < nt; t++) {
        vi c0 = _mm512_setzero_si512(), c1 = c0;
        if (class == MAT_S32)
            c0 = all_i(a->c + t);
        if (class == MAT_S16) {
            c0 = all_i(a->c_half + t);
            c1 = all_i(a->c_half + nt + t);
        }
        if (shift) {
            c0 = _mm512_srai_epi32(c0, shift);
            c1 = _mm512_srai_epi32(c1, shift);
        }
#pragma GCC unroll 2
        for (int r = 0; r < n_p; r++) {
            i0[r * nt + t] = c0;
            i1[r * nt + t] = c1;
        }
    }
#pragma GCC unroll 8
    for (int g = 0; g < 8; g++) {
#pragma GCC unroll 12
        for (int t = 0; t < nt; t++) {
            const vi x = all_i(a->q + (g * nt + t) * 4);
#pragma GCC unroll 2
            for (int r = 0; r < n_p; r++) {
                if (halves && g >= 4)
                    i1[r * nt + t] = _mm512_dpbusd_epi32(i1[r * nt + t], w[8 * r + g], x);
                else
                    i0[r * nt + t] = _mm512_dpbusd_epi32(i0[r * nt + t], w[8 * r + g], x);
            }
        }
    }
#pragma GCC unroll 2
    for (int r = 0; r < n_p; r++) {
#pragma GCC unroll 12
        for (int t = 0; t < nt; t++) {
            vf v = acc[r * nt + t];
            const vf f = _mm512_cvtepi32_ps(i0[r * nt + t]);
            if (halves) {
                const vf part = _mm512_fmadd_ps(_mm512_cvtepi32_ps(i1[r * nt + t]), s[4 * r + 1], _mm512_mul_ps(f, s[4 * r]));
                v = _mm512_fmadd_ps(part, all_f(a->dx + t), v);
                if (class == MAT_SM16) {
                    v = _mm512_fmadd_ps(s[4 * r + 2], all_f(a->sx_half + t), v);
                    v = _mm512_fmadd_ps(s[4 * r + 3], all_f(a->sx_half + nt + t), v);
                }
            } else {
                const vf scale = multiples ? _mm512_scalef_ps(_mm512_load_ps((const char *)multiples[r] + multiple_at(a->dx + t)),
                                                              _mm512_getexp_ps(all_f(a->dx + t)))
                                           : _mm512_mul_ps(s[4 * r], all_f(a->dx + t));
                v = _mm512_fmadd_ps(f, scale, v);
                if (class == MAT_SM32)
                    v = _mm512_fmadd_ps(s[4 * r + 1], all_f(a->sx + t), v);
            }
            acc[r * nt + t] = v;
        }
    }
}

#endif

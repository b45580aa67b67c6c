/* mat_avx512.c: AVX-512 VNNI kernels for packed panels and a few rows, the expansion of panels, and the choice of tiles. BF16
 * products use vdpbf16ps where the machine has it, else fma in F32 (other bits, the same on every machine of that
 * kind). Layouts and the order of additions: ../mat_internal.h. The tiles themselves are in tiles_avx512.c,
 * activations in acts_avx512.c.
 */
#include "acts_avx512.h"
#include "avx512.h"
#include "tiles_avx512.h"

/* ---- a few rows, straight from packed units ---- */

INLINE void direct_units(const int type, const int nt, const uint8_t *p, int64_t n_units, const mat_tile *x, float *c, int64_t ld)
{
    const int class = class_of(type), bias = bias_of(type), n_scales = n_scales_of(class), n_blocks = n_blocks_of(type);
    const int block_bytes = unit_of(type) / n_blocks;
    /* One row of Q8_0 is short enough a loop that the machine runs ahead by itself: 0.90 asked, 0.98 not (../lab). */
    const size_t ahead = type == MAT_Q8_0 && nt == 1 ? 0 : bytes_ahead();
    const int shift = bias == 0 || bias == 128 ? 0 : bias == 32 ? 2 : bias == 16 ? 3 : bias == 8 ? 4 : 5;
    const bool halves = class == MAT_S16 || class == MAT_SM16;
    const uint8_t *q = x->x, *h = x->halves;
    vf acc[12];
#pragma GCC unroll 12
    for (int t = 0; t < nt; t++)
        acc[t] = _mm512_setzero_ps();
    for (int64_t u = 0; u < n_units; u++, p += unit_of(type)) {
        /* A K type's scales first, then its blocks in a loop: a body of a whole unit hops too far for the machine to foresee. */
        vf s[8 * 4];
#pragma GCC unroll 8
        for (int b = 0; b < n_blocks; b++)
            scales_of(type, p, b, s + b * n_scales);
#pragma GCC unroll 1
        for (int b = 0; b < n_blocks; b++) {
            vi w[8];
            ask_ahead(ahead, nt <= 4, p + b * block_bytes, block_bytes);
            codes_of(type, p, b, w);
            const act_block a = act_at(q, h, nt);
            block_32(class, 1, nt, shift, w, s + b * n_scales, NULL, &a, acc);
            q += nt * 44;
            if (halves)
                h += nt * 16;
        }
    }
#pragma GCC unroll 12
    for (int t = 0; t < nt; t++)
        if (t < x->n_valid)
            _mm512_storeu_ps(c + t * ld, acc[t]);
}

INLINE void direct_f16(const int nt, const uint8_t *p, int64_t n_units, const mat_tile *x, float *c, int64_t ld)
{
    const float *v = (const float *)x->x;
    const size_t ahead = bytes_ahead();
    vf acc[4];
#pragma GCC unroll 4
    for (int t = 0; t < nt; t++)
        acc[t] = _mm512_setzero_ps();
    for (int64_t k = 0; k < n_units * 64; k++, p += 32, v += nt) {
        if (k % 2 == 0)
            ask_ahead(ahead, true, p, 64);
        const vf w = load_half(p);
#pragma GCC unroll 4
        for (int t = 0; t < nt; t++)
            acc[t] = _mm512_fmadd_ps(w, all_f(v + t), acc[t]);
    }
#pragma GCC unroll 4
    for (int t = 0; t < nt; t++)
        if (t < x->n_valid)
            _mm512_storeu_ps(c + t * ld, acc[t]);
}

#define DIRECT_CASE(type, n) case n: direct_units(MAT_##type, n, p, n_units, x, c, ld); break;
#define DIRECT_FEW(type) DIRECT_CASE(type, 1) DIRECT_CASE(type, 2) DIRECT_CASE(type, 3) DIRECT_CASE(type, 4)
#define DIRECT_MORE(type) \
    DIRECT_CASE(type, 6) DIRECT_CASE(type, 8) DIRECT_CASE(type, 10) DIRECT_CASE(type, 12)
#define DIRECT(type, cases) \
    static bool direct_##type(const uint8_t *p, int64_t n_units, const mat_tile *x, float *c, int64_t ld) \
    { \
        switch (x->nt) { \
            cases \
        default: return false; \
        } \
        return true; \
    }
DIRECT(Q4_0, DIRECT_FEW(Q4_0) DIRECT_MORE(Q4_0))
DIRECT(Q4_1, DIRECT_FEW(Q4_1) DIRECT_MORE(Q4_1))
DIRECT(Q5_0, DIRECT_FEW(Q5_0) DIRECT_MORE(Q5_0))
DIRECT(Q5_1, DIRECT_FEW(Q5_1) DIRECT_MORE(Q5_1))
DIRECT(Q8_0, DIRECT_FEW(Q8_0) DIRECT_MORE(Q8_0))
DIRECT(IQ4_NL, DIRECT_FEW(IQ4_NL) DIRECT_MORE(IQ4_NL))
DIRECT(Q2_K, DIRECT_FEW(Q2_K))
DIRECT(Q3_K, DIRECT_FEW(Q3_K))
DIRECT(Q4_K, DIRECT_FEW(Q4_K) DIRECT_MORE(Q4_K))
DIRECT(Q5_K, DIRECT_FEW(Q5_K) DIRECT_MORE(Q5_K))
DIRECT(Q6_K, DIRECT_FEW(Q6_K) DIRECT_MORE(Q6_K))

static bool direct_F16(const uint8_t *p, int64_t n, const mat_tile *x, float *c, int64_t ld)
{
    switch (x->nt) {
    case 1: direct_f16(1, p, n, x, c, ld); break;
    case 2: direct_f16(2, p, n, x, c, ld); break;
    case 3: direct_f16(3, p, n, x, c, ld); break;
    case 4: direct_f16(4, p, n, x, c, ld); break;
    default: return false;
    }
    return true;
}

static bool direct(int32_t type, const uint8_t *p, int64_t n, const mat_tile *x, float *c, int64_t ld)
{
    switch (type) {
    case MAT_Q4_0: return direct_Q4_0(p, n, x, c, ld);
    case MAT_Q4_1: return direct_Q4_1(p, n, x, c, ld);
    case MAT_Q5_0: return direct_Q5_0(p, n, x, c, ld);
    case MAT_Q5_1: return direct_Q5_1(p, n, x, c, ld);
    case MAT_Q8_0: return direct_Q8_0(p, n, x, c, ld);
    case MAT_IQ4_NL: return direct_IQ4_NL(p, n, x, c, ld);
    case MAT_Q2_K: return direct_Q2_K(p, n, x, c, ld);
    case MAT_Q3_K: return direct_Q3_K(p, n, x, c, ld);
    case MAT_Q4_K: return direct_Q4_K(p, n, x, c, ld);
    case MAT_Q5_K: return direct_Q5_K(p, n, x, c, ld);
    case MAT_Q6_K: return direct_Q6_K(p, n, x, c, ld);
    case MAT_F16: return direct_F16(p, n, x, c, ld);
    default: return false;
    }
}

/* ---- expansion ---- */

INLINE void expand_units(const int type, const uint8_t *p, int64_t n_units, uint8_t *out, float *scales)
{
    const int class = class_of(type), n_scales = n_scales_of(class);
    const bool biased = class == MAT_S32 || class == MAT_S16;
    const size_t ahead = bytes_ahead();
    for (int64_t u = 0; u < n_units; u++, p += unit_of(type)) {
        ask_ahead(ahead, false, p, unit_of(type));
#pragma GCC unroll 8
        for (int b = 0; b < n_blocks_of(type); b++, out += 512, scales += n_expanded_of(class) * MAT_LANES) {
            vi w[8];
            vf s[4];
            codes_of(type, p, b, w);
            scales_of(type, p, b, s);
#pragma GCC unroll 8
            for (int g = 0; g < 8; g++) {
                if (biased && bias_of(type) != 128)
                    w[g] = _mm512_add_epi8(w[g], bytes(128 - bias_of(type)));
                _mm512_store_si512(out + g * 64, w[g]);
            }
            const int first = has_multiples(class) ? MAT_MULTIPLES : 0; /* s[0] is one of them */
#pragma GCC unroll 8
            for (int i = 0; i < first; i++)
                _mm512_store_ps(scales + i * MAT_LANES, _mm512_mul_ps(s[0], _mm512_set1_ps(1.0f + (float)i / MAT_MULTIPLES)));
#pragma GCC unroll 4
            for (int i = first ? 1 : 0; i < n_scales; i++)
                _mm512_store_ps(scales + (first ? first - 1 + i : i) * MAT_LANES, s[i]);
        }
    }
}

static void expand(int32_t type, const uint8_t *p, int64_t n, uint8_t *w, float *s)
{
    switch (type) {
    case MAT_Q4_0: expand_units(MAT_Q4_0, p, n, w, s); break;
    case MAT_Q4_1: expand_units(MAT_Q4_1, p, n, w, s); break;
    case MAT_Q5_0: expand_units(MAT_Q5_0, p, n, w, s); break;
    case MAT_Q5_1: expand_units(MAT_Q5_1, p, n, w, s); break;
    case MAT_Q8_0: expand_units(MAT_Q8_0, p, n, w, s); break;
    case MAT_IQ4_NL: expand_units(MAT_IQ4_NL, p, n, w, s); break;
    case MAT_Q2_K: expand_units(MAT_Q2_K, p, n, w, s); break;
    case MAT_Q3_K: expand_units(MAT_Q3_K, p, n, w, s); break;
    case MAT_Q4_K: expand_units(MAT_Q4_K, p, n, w, s); break;
    case MAT_Q5_K: expand_units(MAT_Q5_K, p, n, w, s); break;
    case MAT_Q6_K: expand_units(MAT_Q6_K, p, n, w, s); break;
    default: /* F16 */
        for (int64_t k = 0; k < n * 64; k++)
            _mm512_store_ps((float *)w + k * MAT_LANES, load_half(p + k * 32));
    }
}

const mat_kernels mat_kernels_avx512 = {"avx512-vnni", 12, expand, tile_avx512, tiles_avx512, direct, quantise_avx512, prepare_tile_avx512};

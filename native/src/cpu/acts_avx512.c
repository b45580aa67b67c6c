/* acts_avx512.c: activations into tiles (layouts: ../mat_internal.h): one row at a time for few rows, MAT_TILE rows side by side for
 * many. The rows of a tile lie in one another's cache lines, so side by side a vector is stored where single rows store 4 bytes,
 * and one division serves all. Both ways give the same bits.
 */
#include <math.h>

#include "acts_avx512.h"
#include "avx512.h"

void quantise_avx512(const float *x, int64_t n_in, int64_t n_blocks, int32_t nt, int32_t t, uint8_t *q8, uint8_t *halves)
{
    const vi magnitude = _mm512_set1_epi32(0x7fffffff);
    for (int64_t b = 0; b < n_blocks; b++, q8 += nt * 44) {
        const bool some = 32 * b < n_in; /* n_in is a multiple of 32 for every quantised type */
        vf v0 = some ? _mm512_loadu_ps(x + 32 * b) : _mm512_setzero_ps();
        vf v1 = some ? _mm512_loadu_ps(x + 32 * b + 16) : _mm512_setzero_ps();
        const uint32_t top = _mm512_reduce_max_epu32(_mm512_max_epu32(_mm512_and_si512(_mm512_castps_si512(v0), magnitude),
                                                                      _mm512_and_si512(_mm512_castps_si512(v1), magnitude)));
        float amax;
        memcpy(&amax, &top, 4);
        float d = mat_act_scale(amax), inverse = amax > MAT_ACT_LEAST ? 1.0f / d : 0.0f;
        if (top >= 0x7f800000u) {
            d = NAN;
            v0 = v1 = _mm512_setzero_ps();
        }
        const vi i0 = _mm512_cvtps_epi32(_mm512_mul_ps(v0, _mm512_set1_ps(inverse)));
        const vi i1 = _mm512_cvtps_epi32(_mm512_mul_ps(v1, _mm512_set1_ps(inverse)));
        const __m256i q = _mm256_set_m128i(_mm512_cvtepi32_epi8(i1), _mm512_cvtepi32_epi8(i0));
        __m256i sums = _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(1), q); /* four of each half */
        sums = _mm256_add_epi32(sums, _mm256_shuffle_epi32(sums, 0x4e));
        sums = _mm256_add_epi32(sums, _mm256_shuffle_epi32(sums, 0xb1));
        const int32_t s0 = _mm256_extract_epi32(sums, 0), s1 = _mm256_extract_epi32(sums, 4);
        if (nt == 1) {
            _mm256_storeu_si256((__m256i *)q8, q);
        } else {
            _Alignas(32) int32_t words[8];
            _mm256_store_si256((__m256i *)words, q);
            for (int g = 0; g < 8; g++)
                ((int32_t *)q8)[g * nt + t] = words[g];
        }
        mat_act_put_sums(q8, halves, nt, t, d, s0, s1);
        halves += halves ? mat_act_half_block(nt) : 0;
    }
}

/* ---- MAT_TILE rows side by side ---- */

enum { NT = MAT_TILE };
_Static_assert(NT == 6, "the shuffles below are of 6 rows");

/* Element n of an output in [k][row] order: its k and its row. */
#define K(n) ((n) / NT)
#define R(n) ((n) % NT)
#define LANES(f, n) \
    _mm512_setr_epi32(f(n), f((n) + 1), f((n) + 2), f((n) + 3), f((n) + 4), f((n) + 5), f((n) + 6), f((n) + 7), f((n) + 8), \
                      f((n) + 9), f((n) + 10), f((n) + 11), f((n) + 12), f((n) + 13), f((n) + 14), f((n) + 15))

/* Rows 4 and 5 come from the third of three registers of two rows each. */
#define BIT(n, i) ((R((n) + (i)) >= 4) << (i))
#define THIRD(n) \
    (__mmask16)(BIT(n, 0) | BIT(n, 1) | BIT(n, 2) | BIT(n, 3) | BIT(n, 4) | BIT(n, 5) | BIT(n, 6) | BIT(n, 7) | BIT(n, 8) | \
                BIT(n, 9) | BIT(n, 10) | BIT(n, 11) | BIT(n, 12) | BIT(n, 13) | BIT(n, 14) | BIT(n, 15))

/* 48 dwords out of p[0], p[1], p[2], where `at` says (bit 4: p[1]). */
INLINE void spread(const vi *p, const vi at0, const vi at1, const vi at2, void *out)
{
    const vi o0 = _mm512_mask_permutexvar_epi32(_mm512_permutex2var_epi32(p[0], at0, p[1]), THIRD(0), at0, p[2]);
    const vi o1 = _mm512_mask_permutexvar_epi32(_mm512_permutex2var_epi32(p[0], at1, p[1]), THIRD(16), at1, p[2]);
    const vi o2 = _mm512_mask_permutexvar_epi32(_mm512_permutex2var_epi32(p[0], at2, p[1]), THIRD(32), at2, p[2]);
    _mm512_storeu_si512(out, o0);
    _mm512_storeu_si512((char *)out + 64, o1);
    _mm512_storeu_si512((char *)out + 128, o2);
}

/* 16 dwords of each row to [16][row]. */
INLINE void transpose(const vi *r, void *out)
{
    const vi low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const vi high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
#define AT(n) (R(n) / 2 % 2 * 16 + 2 * K(n) + R(n) % 2)
    const vi at0 = LANES(AT, 0), at1 = LANES(AT, 16), at2 = LANES(AT, 32);
#undef AT
    vi p[3];
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {
#pragma GCC unroll 3
        for (int j = 0; j < 3; j++)
            p[j] = _mm512_permutex2var_epi32(r[2 * j], h ? high : low, r[2 * j + 1]);
        spread(p, at0, at1, at2, (char *)out + h * 192);
    }
}

/* The greatest magnitude of each row, as bits, in lanes 0 to 5. */
INLINE __m256i tops(const float *x, int64_t ld)
{
    const vi magnitude = _mm512_set1_epi32(0x7fffffff);
    vi m[NT], two[3];
#pragma GCC unroll 6
    for (int r = 0; r < NT; r++)
        m[r] = _mm512_max_epu32(_mm512_and_si512(_mm512_loadu_si512(x + r * ld), magnitude),
                                _mm512_and_si512(_mm512_loadu_si512(x + r * ld + 16), magnitude));
#pragma GCC unroll 3
    for (int j = 0; j < 3; j++)
        two[j] = _mm512_max_epu32(_mm512_unpacklo_epi32(m[2 * j], m[2 * j + 1]), _mm512_unpackhi_epi32(m[2 * j], m[2 * j + 1]));
    const vi four = _mm512_max_epu32(_mm512_unpacklo_epi64(two[0], two[1]), _mm512_unpackhi_epi64(two[0], two[1]));
    const vi last = _mm512_max_epu32(two[2], _mm512_shuffle_epi32(two[2], 0x4e));
    const vi half = _mm512_max_epu32(_mm512_shuffle_i64x2(four, last, 0x44), _mm512_shuffle_i64x2(four, last, 0xee));
    const vi all = _mm512_shuffle_i64x2(half, half, 0xd8);
    return _mm256_max_epu32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
}

/* What a run of blocks is multiplied by, before any of them is quantised: a block's chain from its numbers to its scale is longer
 * than what the processor looks ahead over, so the chains of several blocks have to stand side by side. */
enum { RUN = 8 };
typedef struct run_scales {
    _Alignas(32) float d[RUN][8], inverse[RUN][8];
    bool bad; /* somewhere something is not finite */
} run_scales;

INLINE void scale_run(const float *x, int64_t ld, const int n, run_scales *run)
{
    const __m256 full = _mm256_set1_ps(127.0f), nothing = _mm256_set1_ps(MAT_ACT_NOTHING);
    const __m256i infinite = _mm256_set1_epi32(0x7f800000), below = _mm256_set1_epi32((1 << MAT_DX_BITS) - 1);
    __m256i highest = _mm256_setzero_si256();
    for (int b = 0; b < n; b++, x += 32) {
        const __m256i top = tops(x, ld);
        const __m256 amax = _mm256_castsi256_ps(top);
        const __mmask8 some = _mm256_cmp_ps_mask(amax, _mm256_set1_ps(MAT_ACT_LEAST), _CMP_GT_OQ);
        highest = _mm256_max_epu32(highest, top);
        const __m256i up = _mm256_add_epi32(_mm256_castps_si256(_mm256_mask_div_ps(nothing, some, amax, full)), below);
        const __m256 d = _mm256_castsi256_ps(_mm256_andnot_si256(below, up)); /* mat_act_scale */
        _mm256_store_ps(run->d[b], d);
        _mm256_store_ps(run->inverse[b], _mm256_maskz_div_ps(some, _mm256_set1_ps(1.0f), d));
    }
    run->bad = _mm256_cmpge_epu32_mask(highest, infinite) != 0;
}

/* A block of 32 of every row. */
INLINE void quantise_block(const float *x, int64_t ld, const float *scale, const float *inverse, uint8_t *q8, uint8_t *halves)
{
    const __m256i nothing = _mm256_setzero_si256();
    const __m256 d = _mm256_load_ps(scale);
    vi words[NT], p[3];
#pragma GCC unroll 6
    for (int r = 0; r < NT; r++) {
        const vf f = all_f(inverse + r);
        words[r] = _mm512_packs_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + r * ld), f)),
                                      _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + r * ld + 16), f)));
    }
    /* Quarter i of p[j]: groups i and 4 + i of row 2 j, the same of row 2 j + 1. */
#pragma GCC unroll 3
    for (int j = 0; j < 3; j++)
        p[j] = _mm512_packs_epi16(words[2 * j], words[2 * j + 1]);
#define AT(n) (R(n) / 2 % 2 * 16 + K(n) % 4 * 4 + R(n) % 2 * 2 + K(n) / 4)
    spread(p, LANES(AT, 0), LANES(AT, 16), LANES(AT, 32), q8);
#undef AT
    /* Sums of each half: quarters onto each other, four bytes to a sum on the way. */
    vi s = _mm512_dpbusd_epi32(_mm512_setzero_si512(), bytes(1), _mm512_shuffle_i64x2(p[0], p[1], 0x44));
    s = _mm512_dpbusd_epi32(s, bytes(1), _mm512_shuffle_i64x2(p[0], p[1], 0xee));
    s = _mm512_add_epi32(s, _mm512_shuffle_i32x4(s, s, 0xb1));
    __m256i z = _mm256_dpbusd_epi32(nothing, _mm256_set1_epi8(1), _mm512_castsi512_si256(p[2]));
    z = _mm256_dpbusd_epi32(z, _mm256_set1_epi8(1), _mm512_extracti64x4_epi64(p[2], 1));
    const vi last = _mm512_castsi128_si512(_mm_add_epi32(_mm256_castsi256_si128(z), _mm256_extracti128_si256(z, 1)));
    const vi both = _mm512_permutex2var_epi32(s, _mm512_setr_epi32(0, 2, 8, 10, 16, 18, 1, 3, 9, 11, 17, 19, 0, 0, 0, 0), last);
    const __m256i sum = _mm256_add_epi32(_mm512_castsi512_si256(both),
                                         _mm512_castsi512_si256(_mm512_alignr_epi32(both, both, NT)));
    float *dx = (float *)(q8 + NT * 32); /* 8 lanes stored for 6: the next field covers what is too much */
    _mm256_storeu_ps(dx, d);
    _mm256_storeu_ps(dx + NT, _mm256_mul_ps(d, _mm256_cvtepi32_ps(sum)));
    _mm256_mask_storeu_epi32(dx + 2 * NT, 0x3f, _mm256_sub_epi32(nothing, _mm256_slli_epi32(sum, 7)));
    if (halves) {
        const vf twice = _mm512_permutexvar_ps(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5, 0, 0, 0, 0), _mm512_castps256_ps512(d));
        _mm512_storeu_si512(halves, _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_slli_epi32(both, 7)));
        _mm512_mask_storeu_ps(halves + 2 * NT * 4, 0xfff, _mm512_mul_ps(twice, _mm512_cvtepi32_ps(both)));
    }
}

static void quantise_tile(const mat_act *a, int32_t tile, const float *x, int64_t ld)
{
    uint8_t *q8 = a->q8 + (size_t)tile * (size_t)a->n_blocks * mat_act_q8_block(NT);
    uint8_t *halves = a->halves ? a->halves + (size_t)tile * (size_t)a->n_blocks * mat_act_half_block(NT) : NULL;
    run_scales run;
    for (int64_t b0 = 0; b0 < a->n_blocks; b0 += RUN) {
        const int64_t some = a->n_in / 32 - b0, all = a->n_blocks - b0;
        const int n = some < RUN ? (int)some : RUN, n_all = all < RUN ? (int)all : RUN;
        scale_run(x + 32 * b0, ld, n, &run);
        for (int b = 0; b < n_all; b++, q8 += mat_act_q8_block(NT)) {
            const float *at = x + 32 * (b0 + b);
#pragma GCC unroll 5
            for (int i = 0; i < 5; i++)
                __builtin_prefetch(q8 + 4 * mat_act_q8_block(NT) + 64 * i, 1, 3);
            if (b < n && !run.bad)
                quantise_block(at, ld, run.d[b], run.inverse[b], q8, halves);
            else
                for (int32_t r = 0; r < NT; r++)
                    quantise_avx512(at + r * ld, b < n ? 32 : 0, 1, NT, r, q8, halves);
            halves += halves ? mat_act_half_block(NT) : 0;
        }
    }
}

/* To nearest even, in the upper halves; a NaN keeps its upper bits and becomes a quiet one. */
INLINE vi rounded(vi v)
{
    const vi odd = _mm512_and_si512(_mm512_srli_epi32(v, 16), _mm512_set1_epi32(1));
    const __mmask16 nan = _mm512_cmp_ps_mask(_mm512_castsi512_ps(v), _mm512_castsi512_ps(v), _CMP_UNORD_Q);
    const vi up = _mm512_add_epi32(v, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    return _mm512_mask_or_epi32(up, nan, v, _mm512_set1_epi32(1 << 22));
}

static void bf16_tile(const mat_act *a, int32_t tile, const float *x, int64_t ld)
{
    uint8_t *out = a->bf16 + (size_t)tile * (size_t)a->n_blocks * 64 * NT;
    const vi i = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const vi upper = _mm512_add_epi32(_mm512_mullo_epi32(i, _mm512_set1_epi32(0x00040004)), _mm512_set1_epi32(0x00030001));
    for (int64_t k = 0; k < a->n_blocks * 32; k += 32, out += 64 * NT) {
        const int64_t left = a->n_in - k;
        const uint32_t there = left >= 32 ? 0xffffffffu : left > 0 ? (1u << left) - 1 : 0;
        vi r[NT];
#pragma GCC unroll 6
        for (int t = 0; t < NT; t++) {
            const float *from = x + t * ld + k;
            r[t] = _mm512_permutex2var_epi16(rounded(_mm512_maskz_loadu_epi32((__mmask16)there, from)), upper,
                                             rounded(_mm512_maskz_loadu_epi32((__mmask16)(there >> 16), from + 16)));
        }
        transpose(r, out);
    }
}

static void f32_tile(const mat_act *a, int32_t tile, const float *x, int64_t ld)
{
    float *out = a->f32 + (size_t)tile * (size_t)a->n_blocks * 32 * NT;
    for (int64_t k = 0; k < a->n_blocks * 32; k += 16, out += 16 * NT) {
        const int64_t left = a->n_in - k;
        const uint32_t there = left >= 16 ? 0xffffu : left > 0 ? (1u << left) - 1 : 0;
        vi r[NT];
#pragma GCC unroll 6
        for (int t = 0; t < NT; t++)
            r[t] = _mm512_maskz_loadu_epi32((__mmask16)there, x + t * ld + k);
        transpose(r, out);
    }
}

void prepare_tile_avx512(const mat_act *a, int32_t tile, const float *x, int64_t ld_x)
{
    if (a->q8)
        quantise_tile(a, tile, x, ld_x);
    if (a->bf16)
        bf16_tile(a, tile, x, ld_x);
    if (a->f32)
        f32_tile(a, tile, x, ld_x);
}

/* mat_avx2.c: AVX2 + FMA + F16C kernels. Quantised types add up in the order of the AVX-512 kernels, so their bits are
 * equal; BF16 weights use fma in F32 here. Expanded panels keep the types' own codes (avx2.h), which is why tile() needs the
 * type. Layouts and the order of additions: ../mat_internal.h.
 */
#include <math.h>

#include "avx2.h"

/* n tokens from t0 on, both halves of a packed panel. */
INLINE void direct_units(const int type, const int n, const uint8_t *panel, int64_t n_units, const mat_tile *x, float *c, int64_t ld)
{
    for (int half = 0; half < 2; half++) {
        const uint8_t *p = panel, *q = x->x, *h = x->halves;
        vf acc[4];
#pragma GCC unroll 4
        for (int t = 0; t < n; t++)
            acc[t] = _mm256_setzero_ps();
        for (int64_t u = 0; u < n_units; u++, p += unit_of(type)) {
#pragma GCC unroll 8
            for (int b = 0; b < n_blocks_of(type); b++) {
                vi w[8];
                vf s[4];
                codes_of(type, p, half, b, w);
                scales_of(type, p, half, b, s);
                block_8(type, w, s, q, h, n, 0, n, acc);
                q += n * 44;
                h += has_halves(type) ? n * 16 : 0;
            }
        }
#pragma GCC unroll 4
        for (int t = 0; t < n; t++)
            if (t < x->n_valid)
                _mm256_storeu_ps(c + t * ld + 8 * half, acc[t]);
    }
}

INLINE void expand_units(const int type, const uint8_t *p, int64_t n_units, uint8_t *out, float *scales)
{
    for (int64_t u = 0; u < n_units; u++, p += unit_of(type)) {
#pragma GCC unroll 8
        for (int b = 0; b < n_blocks_of(type); b++) {
            for (int half = 0; half < 2; half++) {
                vi w[8];
                vf s[4];
                codes_of(type, p, half, b, w);
                scales_of(type, p, half, b, s);
#pragma GCC unroll 8
                for (int g = 0; g < 8; g++)
                    _mm256_store_si256((__m256i *)(out + g * 64 + half * 32), w[g]);
#pragma GCC unroll 4
                for (int i = 0; i < n_scales_of(type); i++)
                    _mm256_store_ps(scales + i * MAT_LANES + half * 8, s[i]);
            }
            out += 512;
            scales += n_scales_of(type) * MAT_LANES;
        }
    }
}

INLINE void load_acc(const mat_part *p, const mat_tile *x, const float *c, const int32_t t0, const int n, vf *acc)
{
#pragma GCC unroll 4
    for (int t = 0; t < n; t++)
        acc[t] = p->first || t0 + t >= x->n_valid ? _mm256_setzero_ps() : _mm256_loadu_ps(c + (t0 + t) * p->ld);
}

INLINE void store_acc(const mat_part *p, const mat_tile *x, float *c, const int32_t t0, const int n, const vf *acc)
{
#pragma GCC unroll 4
    for (int t = 0; t < n; t++)
        if (t0 + t < x->n_valid)
            _mm256_storeu_ps(c + (t0 + t) * p->ld, acc[t]);
}

/* 8 rows of an expanded panel times n tokens from t0 on. */
INLINE void blocks_8(const int type, const int n, const mat_part *p, const mat_tile *x, const uint8_t *w, const float *scales, float *c,
                     const int32_t t0)
{
    const uint8_t *q = x->x, *h = x->halves;
    vf acc[4];
    load_acc(p, x, c, t0, n, acc);
    for (int64_t b = p->n_values / 32; b > 0; b--) {
        vi codes[8];
        vf s[4];
#pragma GCC unroll 8
        for (int g = 0; g < 8; g++)
            codes[g] = load_i(w + g * 64);
#pragma GCC unroll 4
        for (int i = 0; i < n_scales_of(type); i++)
            s[i] = _mm256_load_ps(scales + i * MAT_LANES);
        block_8(type, codes, s, q, h, x->nt, t0, n, acc);
        w += 512;
        scales += n_scales_of(type) * MAT_LANES;
        q += x->nt * 44;
        h += has_halves(type) ? x->nt * 16 : 0;
    }
    store_acc(p, x, c, t0, n, acc);
}

/* 16 rows of F32 values or BF16 pairs times n <= 4 tokens from t0 on: two halves, so that there are enough chains. */
INLINE void floats_16(const int type, const int n, const mat_part *p, const mat_tile *x, const uint8_t *w, float *c, const int32_t t0)
{
    const vi high = _mm256_set1_epi32((int)0xffff0000u);
    vf a0[4], a1[4];
    load_acc(p, x, c, t0, n, a0);
    load_acc(p, x, c + 8, t0, n, a1);
    if (type == MAT_BF16) {
        const uint8_t *v = x->x + 4 * t0;
        for (int64_t k = p->n_values / 2; k > 0; k--, w += 64, v += 4 * x->nt) {
            const vi w0 = load_i(w), w1 = load_i(w + 32);
#pragma GCC unroll 4
            for (int t = 0; t < n; t++) {
                const vf b = _mm256_castsi256_ps(_mm256_slli_epi32(all_i(v + 4 * t), 16));
                a0[t] = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(w0, 16)), b, a0[t]);
                a1[t] = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(w1, 16)), b, a1[t]);
            }
#pragma GCC unroll 4
            for (int t = 0; t < n; t++) {
                const vf b = _mm256_castsi256_ps(_mm256_and_si256(all_i(v + 4 * t), high));
                a0[t] = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(w0, high)), b, a0[t]);
                a1[t] = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(w1, high)), b, a1[t]);
            }
        }
    } else {
        const float *v = (const float *)x->x + t0;
        for (int64_t k = p->n_values; k > 0; k--, w += 64, v += x->nt) {
            const vf w0 = _mm256_load_ps((const float *)w), w1 = _mm256_load_ps((const float *)w + 8);
#pragma GCC unroll 4
            for (int t = 0; t < n; t++) {
                const vf b = all_f(v + t);
                a0[t] = _mm256_fmadd_ps(w0, b, a0[t]);
                a1[t] = _mm256_fmadd_ps(w1, b, a1[t]);
            }
        }
    }
    store_acc(p, x, c, t0, n, a0);
    store_acc(p, x, c + 8, t0, n, a1);
}

/* Tokens of a tile in runs of 4 or 3: what 16 registers hold. Floats take both halves at once. */
INLINE void tile_of(const int type, const mat_part *p, const mat_tile *x)
{
    const bool is_float = type == MAT_F32 || type == MAT_BF16;
    const int32_t parts = is_float ? 1 : 2, run = x->nt % 4 == 0 || x->nt > 9 ? 4 : 3;
    for (int32_t r = 0; r < parts * p->n_panels; r++) {
        const uint8_t *w = p->w + (size_t)(r / parts) * p->step + (size_t)(r % parts) * 32;
        const float *s = p->scales + (size_t)(r / parts) * p->scale_step + (size_t)(r % parts) * 8;
        float *c = p->c + r * (MAT_LANES / parts);
        for (int32_t t0 = 0; t0 < x->n_valid;) {
            const int32_t left = x->nt - t0, n = left < run ? left : run;
            switch (n) {
#define TILE_CASE(n) \
    case n: \
        is_float ? floats_16(type, n, p, x, w, c, t0) : blocks_8(type, n, p, x, w, s, c, t0); \
        break;
                TILE_CASE(1)
                TILE_CASE(2)
                TILE_CASE(3)
                TILE_CASE(4)
            }
            t0 += n;
        }
    }
}

#define KERNELS(type) \
    static void expand_##type(const uint8_t *p, int64_t n, uint8_t *w, float *s) { expand_units(MAT_##type, p, n, w, s); } \
    static void tile_##type(const mat_part *p, const mat_tile *x) { tile_of(MAT_##type, p, x); } \
    static bool direct_##type(const uint8_t *p, int64_t n, const mat_tile *x, float *c, int64_t ld) \
    { \
        switch (x->nt) { \
        case 1: direct_units(MAT_##type, 1, p, n, x, c, ld); return true; \
        case 2: direct_units(MAT_##type, 2, p, n, x, c, ld); return true; \
        default: return false; \
        } \
    }
KERNELS(Q4_0)
KERNELS(Q4_1)
KERNELS(Q5_0)
KERNELS(Q5_1)
KERNELS(Q8_0)
KERNELS(IQ4_NL)
KERNELS(Q2_K)
KERNELS(Q3_K)
KERNELS(Q4_K)
KERNELS(Q5_K)
KERNELS(Q6_K)

static void expand_F16(const uint8_t *p, int64_t n, uint8_t *w, float *s)
{
    (void)s;
    for (int64_t k = 0; k < n * 128; k++)
        _mm256_store_ps((float *)w + k * 8, load_half(p + k * 16));
}

static void tile_F32(const mat_part *p, const mat_tile *x) { tile_of(MAT_F32, p, x); }
static void tile_BF16(const mat_part *p, const mat_tile *x) { tile_of(MAT_BF16, p, x); }

static bool no_direct(const uint8_t *p, int64_t n, const mat_tile *x, float *c, int64_t ld)
{
    (void)p, (void)n, (void)x, (void)c, (void)ld;
    return false;
}

static const struct {
    int32_t type;
    void (*expand)(const uint8_t *, int64_t, uint8_t *, float *);
    void (*tile)(const mat_part *, const mat_tile *);
    bool (*direct)(const uint8_t *, int64_t, const mat_tile *, float *, int64_t);
} table[] = {
#define ROW(type) {MAT_##type, expand_##type, tile_##type, direct_##type}
    ROW(Q4_0), ROW(Q4_1), ROW(Q5_0), ROW(Q5_1), ROW(Q8_0), ROW(IQ4_NL), ROW(Q2_K), ROW(Q3_K), ROW(Q4_K), ROW(Q5_K), ROW(Q6_K),
    {MAT_F16, expand_F16, tile_F32, no_direct},
    {MAT_BF16, NULL, tile_BF16, no_direct},
    {MAT_F32, NULL, tile_F32, no_direct},
};

static int32_t row_of(int32_t type)
{
    int32_t i = 0;
    while (table[i].type != type)
        i++;
    return i;
}

static void expand(int32_t type, const uint8_t *p, int64_t n, uint8_t *w, float *s) { table[row_of(type)].expand(p, n, w, s); }

static void tile(int32_t type, const mat_part *p, const mat_tile *x) { table[row_of(type)].tile(p, x); }

static bool direct(int32_t type, const uint8_t *p, int64_t n, const mat_tile *x, float *c, int64_t ld)
{
    return table[row_of(type)].direct(p, n, x, c, ld);
}

INLINE int32_t sum_of(vi v)
{
    const __m128i a = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    const __m128i b = _mm_add_epi32(a, _mm_shuffle_epi32(a, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(b, _mm_shuffle_epi32(b, 0xb1)));
}

INLINE uint32_t top_of(vi v)
{
    const __m128i a = _mm_max_epu32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    const __m128i b = _mm_max_epu32(a, _mm_shuffle_epi32(a, 0x4e));
    return (uint32_t)_mm_cvtsi128_si32(_mm_max_epu32(b, _mm_shuffle_epi32(b, 0xb1)));
}

static void quantise(const float *x, int64_t n_in, int64_t n_blocks, int32_t nt, int32_t t, uint8_t *q8, uint8_t *halves)
{
    const vi magnitude = _mm256_set1_epi32(0x7fffffff);
    for (int64_t b = 0; b < n_blocks; b++, q8 += nt * 44) {
        vf v[4];
        vi i[4], top = _mm256_setzero_si256();
        for (int j = 0; j < 4; j++) {
            v[j] = 32 * b < n_in ? _mm256_loadu_ps(x + 32 * b + 8 * j) : _mm256_setzero_ps();
            top = _mm256_max_epu32(top, _mm256_and_si256(_mm256_castps_si256(v[j]), magnitude));
        }
        const uint32_t bits = top_of(top);
        float amax;
        memcpy(&amax, &bits, 4);
        float d = mat_act_scale(amax), inverse = amax > MAT_ACT_LEAST ? 1.0f / d : 0.0f;
        for (int j = 0; j < 4; j++)
            i[j] = bits >= 0x7f800000u ? _mm256_setzero_si256() : _mm256_cvtps_epi32(_mm256_mul_ps(v[j], _mm256_set1_ps(inverse)));
        if (bits >= 0x7f800000u)
            d = NAN;
        const int32_t s0 = sum_of(_mm256_add_epi32(i[0], i[1])), s1 = sum_of(_mm256_add_epi32(i[2], i[3]));
        /* packs works within 128-bit halves: words come out as 0 2 4 6 1 3 5 7 */
        const vi packed = _mm256_packs_epi16(_mm256_packs_epi32(i[0], i[1]), _mm256_packs_epi32(i[2], i[3]));
        _Alignas(32) int32_t words[8];
        _mm256_store_si256((__m256i *)words, _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
        for (int g = 0; g < 8; g++)
            ((int32_t *)q8)[g * nt + t] = words[g];
        mat_act_put_sums(q8, halves, nt, t, d, s0, s1);
        halves += halves ? mat_act_half_block(nt) : 0;
    }
}

const mat_kernels mat_kernels_avx2 = {"avx2", 2, expand, tile, NULL, direct, quantise, NULL};

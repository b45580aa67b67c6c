/* mat_neon.h: the source of both NEON tables of matrix kernels, included once by mat_dotprod.c (DOTPROD 1: sdot) and once by
 * mat_neon.c (DOTPROD 0: any aarch64), with NAME and TABLE. Quantised types, F32 and F16 add up in the order of the AVX2
 * kernels, so their bits are equal to those; so are BF16's. Expanded panels keep the types' own codes (neon.h), which is why
 * tile() needs the type. Layouts and the order of additions: ../mat_internal.h.
 */
#include <math.h>

#include "neon.h"

enum {
    MOST = 6,                  /* tokens of a pass over a tile */
    VECTORS = DOTPROD ? 2 : 1  /* of 4 rows that a pass takes: accumulators of 6 tokens fill 32 registers */
};

/* A block loads what it needs: hoisted out of the blocks of a unit, the scales of all would not fit in the registers. */
#define REFRESH(p) __asm__ volatile("" : "+r"(p))

INLINE vf lane_f(vf v, const int lane)
{
    switch (lane) {
    case 0: return vdupq_laneq_f32(v, 0);
    case 1: return vdupq_laneq_f32(v, 1);
    case 2: return vdupq_laneq_f32(v, 2);
    default: return vdupq_laneq_f32(v, 3);
    }
}

/* n floats, nothing behind them. */
INLINE void load_n(const int n, const float *p, vf *v)
{
    if (n == 1)
        v[0] = vld1q_dup_f32(p);
    else if (n == 2)
        v[0] = vcombine_f32(vld1_f32(p), vdup_n_f32(0));
    else if (n == 3)
        v[0] = vcombine_f32(vld1_f32(p), vld1_dup_f32(p + 2));
    else
        v[0] = load_f(p);
    if (n == 6)
        v[1] = vcombine_f32(vld1_f32(p + 4), vdup_n_f32(0));
}

/* ---- integer products ---- */

#if DOTPROD
INLINE vi dot_lane(vi acc, vb w, vb x, uint8x8_t more, const int lane)
{
    const int8x16_t a = vreinterpretq_s8_u8(w), b = vreinterpretq_s8_u8(x);
    const int8x8_t c = vreinterpret_s8_u8(more);
    switch (lane) {
    case 4: return vdotq_lane_s32(acc, a, c, 0);
    case 5: return vdotq_lane_s32(acc, a, c, 1);
    case 0: return vdotq_laneq_s32(acc, a, b, 0);
    case 1: return vdotq_laneq_s32(acc, a, b, 1);
    case 2: return vdotq_laneq_s32(acc, a, b, 2);
    default: return vdotq_laneq_s32(acc, a, b, 3);
    }
}

/* i += w . x over groups g0..g1-1 of 4 values, n tokens. Codes come from `w`, or from the expanded panel at `e`. */
INLINE void dot(const int type, const int n_vec, const int n, const int g0, const int g1, const vb *w, const uint8_t *e,
                const uint8_t *q, const int32_t nt, vi i[][MOST])
{
    (void)type;
#pragma GCC unroll 8
    for (int g = g0; g < g1; g++) {
        const uint8_t *p = q + (n == 1 ? g / 4 * 16 : g * nt * 4); /* one token is the only one of its tile */
        const vb x = n == 2 ? vcombine_u8(vld1_u8(p), vdup_n_u8(0)) : load_b(p);
        const uint8x8_t more = vld1_u8(n > 4 ? p + 16 : p); /* tokens 4 and 5 */
#pragma GCC unroll 2
        for (int v = 0; v < n_vec; v++) {
            const vb codes = w ? w[g] : load_b(e + g * 64 + v * 16);
#pragma GCC unroll 6
            for (int t = 0; t < n; t++)
                i[v][t] = dot_lane(i[v][t], codes, x, more, n == 1 ? g % 4 : t);
        }
    }
}
#else
/* Groups whose products add up in 16 bits: twice the largest code x 127 x so many. */
INLINE int joins_of(const int type)
{
    switch (type) {
    case MAT_Q8_0:
    case MAT_IQ4_NL: return 1;  /* 128 */
    case MAT_Q6_K: return 2;    /* 63 */
    case MAT_Q5_0:
    case MAT_Q5_1:
    case MAT_Q5_K: return 4;    /* 31 */
    default: return 8;          /* 15 */
    }
}

INLINE void dot(const int type, const int n_vec, const int n, const int g0, const int g1, const vb *w, const uint8_t *e,
                const uint8_t *q, const int32_t nt, vi i[][MOST])
{
    const int joins = joins_of(type) < g1 - g0 ? joins_of(type) : g1 - g0;
    (void)n_vec; /* 1 */
#pragma GCC unroll 8
    for (int g = g0; g < g1; g += joins) {
#pragma GCC unroll 6
        for (int t = 0; t < n; t++) {
            int16x8_t low = vdupq_n_s16(0), high = low;
#pragma GCC unroll 8
            for (int j = 0; j < joins; j++) {
                const int8x16_t codes = vreinterpretq_s8_u8(w ? w[g + j] : load_b(e + (g + j) * 64));
                const int8x16_t x = vreinterpretq_s8_s32(vld1q_dup_s32((const int32_t *)(q + ((g + j) * nt + t) * 4)));
                low = j ? vmlal_s8(low, vget_low_s8(codes), vget_low_s8(x)) : vmull_s8(vget_low_s8(codes), vget_low_s8(x));
                high = j ? vmlal_high_s8(high, codes, x) : vmull_high_s8(codes, x);
            }
            i[0][t] = vpadalq_s16(i[0][t], vpaddq_s16(low, high));
        }
    }
}
#endif

INLINE void start(const int type, const int n_vec, const int n, const int32_t *c, vi i[][MOST])
{
#pragma GCC unroll 6
    for (int t = 0; t < n; t++)
#pragma GCC unroll 2
        for (int v = 0; v < n_vec; v++)
            i[v][t] = vdupq_n_s32(shift_of(type) >= 0 ? c[t] >> (shift_of(type) >= 0 ? shift_of(type) : 0) : 0);
}

/* One block of 32 of n_vec x 4 rows into the accumulators of n tokens, from t0 on in a tile of nt: codes and scales from w and s,
 * or from an expanded panel at e and es. */
INLINE void block_32(const int type, const int n_vec, const int n, const vb *w, const uint8_t *e, const vf *s, const float *es,
                     const uint8_t *q, const uint8_t *halves, const int32_t nt, const int32_t t0, vf acc[][MOST])
{
    const float *dx = (const float *)(q + nt * 32) + t0, *sx = dx + nt;
    const int32_t *c = (const int32_t *)(sx + nt), *c_half = (const int32_t *)halves + t0;
    const float *sx_half = (const float *)(c_half + 2 * nt);
    vi i[VECTORS][MOST];
    vf part[VECTORS][MOST], d[2], m[2];
    const int n_sums = has_halves(type) ? 2 : 1, n_mins = has_min(type) ? n_sums : 0;
#define SCALE(k) (s ? s[k] : load_f(es + (k) * MAT_LANES + v * 4))
#pragma GCC unroll 2
    for (int half = 0; half < n_sums; half++) {
        const int g0 = 4 * half, g1 = has_halves(type) ? g0 + 4 : 8;
        start(type, n_vec, n, has_halves(type) ? c_half + half * nt : c, i);
        dot(type, n_vec, n, g0, g1, w, e, q + 4 * t0, nt, i);
        load_n(n, dx, d);
#pragma GCC unroll 2
        for (int v = 0; v < n_vec; v++) {
            const vf scale = SCALE(half);
#pragma GCC unroll 6
            for (int t = 0; t < n; t++) {
                const vf f = vcvtq_f32_s32(i[v][t]);
                if (!has_halves(type))
                    acc[v][t] = vfmaq_f32(acc[v][t], f, vmulq_f32(scale, lane_f(d[t / 4], t % 4)));
                else
                    part[v][t] = half ? vfmaq_f32(part[v][t], f, scale) : vmulq_f32(f, scale);
            }
        }
    }
#pragma GCC unroll 2
    for (int v = 0; v < n_vec; v++)
#pragma GCC unroll 6
        for (int t = 0; t < n; t++)
            if (has_halves(type))
                acc[v][t] = vfmaq_f32(acc[v][t], part[v][t], lane_f(d[t / 4], t % 4));
#pragma GCC unroll 2
    for (int half = 0; half < n_mins; half++) {
        load_n(n, has_halves(type) ? sx_half + half * nt : sx, m);
#pragma GCC unroll 2
        for (int v = 0; v < n_vec; v++) {
            const vf scale = SCALE(has_halves(type) ? 2 + half : 1);
#pragma GCC unroll 6
            for (int t = 0; t < n; t++)
                acc[v][t] = vfmaq_f32(acc[v][t], scale, lane_f(m[t / 4], t % 4));
        }
    }
#undef SCALE
}

/* n <= 4 tokens of a tile, a whole packed panel: unit by unit, as memory delivers it, in each 4 rows at a time. */
INLINE void direct_units(const int type, const int n, const uint8_t *p, int64_t n_units, const mat_tile *x, float *c, int64_t ld)
{
    const size_t slots = (size_t)n_blocks_of(type) * (size_t)n, q_unit = slots * 44, h_unit = has_halves(type) ? slots * 16 : 0;
    const uint8_t *q = x->x, *h = x->halves;
    float sums[4][4][4] = {{{0}}}; /* quarter, token, row */
    for (int64_t u = 0; u < n_units; u++, p += unit_of(type), q += q_unit, h += h_unit) {
        for (int quarter = 0; quarter < 4; quarter++) {
            vf acc[1][MOST];
#pragma GCC unroll 4
            for (int t = 0; t < n; t++)
                acc[0][t] = load_f(sums[quarter][t]);
#pragma GCC unroll 8
            for (int b = 0; b < n_blocks_of(type); b++) {
                vb w[8];
                vf s[4];
                REFRESH(p);
                REFRESH(q);
                codes_of(type, p, quarter, b, w);
                scales_of(type, p, quarter, b, s);
                block_32(type, 1, n, w, NULL, s, NULL, q + b * n * 44, has_halves(type) ? h + b * n * 16 : NULL, n, 0, acc);
            }
#pragma GCC unroll 4
            for (int t = 0; t < n; t++)
                vst1q_f32(sums[quarter][t], acc[0][t]);
        }
    }
    for (int32_t t = 0; t < x->n_valid; t++)
        for (int quarter = 0; quarter < 4; quarter++)
            memcpy(c + t * ld + 4 * quarter, sums[quarter][t], 16);
}

INLINE void expand_units(const int type, const uint8_t *p, int64_t n_units, uint8_t *out, float *scales)
{
    for (int64_t u = 0; u < n_units; u++, p += unit_of(type)) {
#pragma GCC unroll 8
        for (int b = 0; b < n_blocks_of(type); b++) {
            for (int quarter = 0; quarter < 4; quarter++) {
                vb w[8];
                vf s[4];
                REFRESH(p);
                codes_of(type, p, quarter, b, w);
                scales_of(type, p, quarter, b, s);
#pragma GCC unroll 8
                for (int g = 0; g < 8; g++)
                    vst1q_u8(out + g * 64 + quarter * 16, w[g]);
#pragma GCC unroll 4
                for (int i = 0; i < n_scales_of(type); i++)
                    vst1q_f32(scales + i * MAT_LANES + quarter * 4, s[i]);
            }
            out += 512;
            scales += n_scales_of(type) * MAT_LANES;
        }
    }
}

INLINE void load_acc(const mat_part *p, const mat_tile *x, const float *c, const int32_t t0, const int n_vec, const int n,
                     vf acc[][MOST])
{
#pragma GCC unroll 6
    for (int t = 0; t < n; t++)
#pragma GCC unroll 4
        for (int v = 0; v < n_vec; v++)
            acc[v][t] = p->first || t0 + t >= x->n_valid ? vdupq_n_f32(0) : load_f(c + (t0 + t) * p->ld + 4 * v);
}

INLINE void store_acc(const mat_part *p, const mat_tile *x, float *c, const int32_t t0, const int n_vec, const int n,
                      vf acc[][MOST])
{
#pragma GCC unroll 6
    for (int t = 0; t < n; t++)
#pragma GCC unroll 4
        for (int v = 0; v < n_vec; v++)
            if (t0 + t < x->n_valid)
                vst1q_f32(c + (t0 + t) * p->ld + 4 * v, acc[v][t]);
}

/* VECTORS x 4 rows of an expanded panel times n tokens from t0 on. */
INLINE void blocks_of(const int type, const int n, const mat_part *p, const mat_tile *x, const uint8_t *w, const float *scales, float *c,
                      const int32_t t0)
{
    const uint8_t *q = x->x, *h = x->halves;
    vf acc[VECTORS][MOST];
    load_acc(p, x, c, t0, VECTORS, n, acc);
    for (int64_t b = p->n_values / 32; b > 0; b--) {
        block_32(type, VECTORS, n, NULL, w, NULL, scales, q, h, x->nt, t0, acc);
        w += 512;
        scales += n_scales_of(type) * MAT_LANES;
        q += x->nt * 44;
        h += has_halves(type) ? x->nt * 16 : 0;
    }
    store_acc(p, x, c, t0, VECTORS, n, acc);
}

/* 16 rows of F32 values, F16 values as packed, or BF16 pairs times n tokens from t0 on. */
INLINE void floats_16(const int type, const int n, const mat_part *p, const mat_tile *x, const uint8_t *w, float *c, const int32_t t0)
{
    const int step = type == MAT_BF16 ? 2 : 1, n_raw = n > 4 ? 2 : 1;
    const float *f = (const float *)x->x + t0; /* or pairs, of the same size */
    vf acc[4][MOST];
    load_acc(p, x, c, t0, 4, n, acc);
    for (int64_t k = p->n_values / step; k > 0; k--, w += type == MAT_F16 ? 32 : 64, f += x->nt) {
        vf raw[2], b[2];
        load_n(n, f, raw);
#pragma GCC unroll 2
        for (int odd = 0; odd < step; odd++) {
#pragma GCC unroll 2
            for (int i = 0; i < n_raw; i++) {
                const vi r = vreinterpretq_s32_f32(raw[i]);
                b[i] = type != MAT_BF16 ? raw[i] : vreinterpretq_f32_s32(odd ? r & (int32_t)0xffff0000 : r << 16);
            }
#pragma GCC unroll 4
            for (int v = 0; v < 4; v++) {
                const vi pair = type == MAT_BF16 ? as_i(load_b(w + 16 * v)) : vdupq_n_s32(0);
                const vf a = type == MAT_F16    ? load_half(w + 8 * v)
                             : type == MAT_F32 ? load_f((const float *)w + 4 * v)
                                               : vreinterpretq_f32_s32(odd ? pair & (int32_t)0xffff0000 : pair << 16);
#pragma GCC unroll 6
                for (int t = 0; t < n; t++)
                    acc[v][t] = vfmaq_f32(acc[v][t], a, lane_f(b[t / 4], t % 4));
            }
        }
    }
    store_acc(p, x, c, t0, 4, n, acc);
}

/* Tokens of a tile in runs of up to 6, or of 4 where both halves of a block have sums of their own. Floats take 16 rows at once. */
INLINE void tile_of(const int type, const mat_part *p, const mat_tile *x)
{
    const bool is_float = type == MAT_F32 || type == MAT_BF16;
    const int32_t parts = is_float ? 1 : 4 / VECTORS, rows = MAT_LANES / parts;
    const int32_t run = x->nt == 8 || (has_halves(type) && x->nt != 6) ? 4 : has_halves(type) ? 3 : 6;
    for (int32_t r = 0; r < parts * p->n_panels; r++) {
        const uint8_t *w = p->w + (size_t)(r / parts) * p->step + (size_t)(r % parts) * (size_t)rows * 4;
        const float *s = p->scales + (size_t)(r / parts) * p->scale_step + (size_t)(r % parts) * (size_t)rows;
        float *c = p->c + r * rows;
        for (int32_t t0 = 0; t0 < x->n_valid;) {
            const int32_t left = x->nt - t0, n = left < run ? left : run;
            switch (n) {
#define TILE_CASE(n) \
    case n: \
        is_float ? floats_16(type, n, p, x, w, c, t0) : blocks_of(type, n, p, x, w, s, c, t0); \
        break;
                TILE_CASE(1)
                TILE_CASE(2)
                TILE_CASE(3)
                TILE_CASE(4)
#undef TILE_CASE
            default:
                is_float ? floats_16(type, MOST, p, x, w, c, t0) : blocks_of(type, MOST, p, x, w, s, c, t0);
            }
            t0 += n;
        }
    }
}

#define KERNELS(type) \
    static void expand_##type(const uint8_t *p, int64_t n, uint8_t *w, float *s) { expand_units(MAT_##type, p, n, w, s); } \
    static bool direct_##type(const uint8_t *p, int64_t n, const mat_tile *x, float *c, int64_t ld) \
    { \
        switch (x->nt) { \
        case 1: direct_units(MAT_##type, 1, p, n, x, c, ld); return true; \
        case 2: direct_units(MAT_##type, 2, p, n, x, c, ld); return true; \
        case 3: direct_units(MAT_##type, 3, p, n, x, c, ld); return true; \
        case 4: direct_units(MAT_##type, 4, p, n, x, c, ld); return true; \
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

#define TILE(type) \
    static void tile_##type(const mat_part *p, const mat_tile *x) { tile_of(MAT_##type, p, x); }
TILE(Q4_0)
TILE(Q4_1)
TILE(Q5_0)
TILE(Q5_1)
TILE(Q8_0)
TILE(Q2_K)
TILE(Q3_K)
TILE(Q6_K)
TILE(F32)
TILE(BF16)

static void expand_F16(const uint8_t *p, int64_t n, uint8_t *w, float *s)
{
    (void)s;
    for (int64_t k = 0; k < n * 256; k++)
        vst1q_f32((float *)w + k * 4, load_half(p + k * 8));
}

static bool direct_F16(const uint8_t *w, int64_t n_units, const mat_tile *x, float *c, int64_t ld)
{
    const mat_part p = {.n_values = n_units * 64, .ld = ld, .first = true};
    switch (x->nt) {
    case 1: floats_16(MAT_F16, 1, &p, x, w, c, 0); return true;
    case 2: floats_16(MAT_F16, 2, &p, x, w, c, 0); return true;
    case 3: floats_16(MAT_F16, 3, &p, x, w, c, 0); return true;
    case 4: floats_16(MAT_F16, 4, &p, x, w, c, 0); return true;
    default: return false;
    }
}

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
#define ROW(type, same) {MAT_##type, expand_##type, tile_##same, direct_##type} /* same: expanded alike */
    ROW(Q4_0, Q4_0), ROW(Q4_1, Q4_1), ROW(Q5_0, Q5_0), ROW(Q5_1, Q5_1), ROW(Q8_0, Q8_0), ROW(IQ4_NL, Q8_0),
    ROW(Q2_K, Q2_K), ROW(Q3_K, Q3_K), ROW(Q4_K, Q4_1), ROW(Q5_K, Q5_1), ROW(Q6_K, Q6_K),
    {MAT_F16, expand_F16, tile_F32, direct_F16},
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

static void quantise(const float *x, int64_t n_in, int64_t n_blocks, int32_t nt, int32_t t, uint8_t *q8, uint8_t *halves)
{
    for (int64_t b = 0; b < n_blocks; b++, q8 += nt * 44) {
        vf v[8];
        vi i[8];
        uint32x4_t top = vdupq_n_u32(0);
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) {
            v[j] = 32 * b < n_in ? load_f(x + 32 * b + 4 * j) : vdupq_n_f32(0);
            top = vmaxq_u32(top, vreinterpretq_u32_f32(vabsq_f32(v[j])));
        }
        const uint32_t bits = vmaxvq_u32(top);
        float amax;
        memcpy(&amax, &bits, 4);
        float d = mat_act_scale(amax), inverse = amax > MAT_ACT_LEAST ? 1.0f / d : 0.0f;
        if (bits >= 0x7f800000u)
            d = NAN;
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) {
            i[j] = bits >= 0x7f800000u ? vdupq_n_s32(0) : vcvtnq_s32_f32(vmulq_n_f32(v[j], inverse));
            const int16x4_t words = vmovn_s32(i[j]);
            ((int32_t *)q8)[j * nt + t] = vget_lane_s32(vreinterpret_s32_s8(vmovn_s16(vcombine_s16(words, words))), 0);
        }
        const int32_t s0 = vaddvq_s32(i[0] + i[1] + (i[2] + i[3])), s1 = vaddvq_s32(i[4] + i[5] + (i[6] + i[7]));
        mat_act_put_sums(q8, halves, nt, t, d, s0, s1);
        halves += halves ? mat_act_half_block(nt) : 0;
    }
}

const mat_kernels TABLE = {NAME, 4, expand, tile, NULL, direct, quantise, NULL};

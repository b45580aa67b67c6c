/* ops_simd.h: the source of every ops table. Included once per instruction set, with
 *   VW       floats in a vector (4, 8, 16)
 *   TILE_R   query rows that one pass over a tile holds in registers
 *   OPS_NAME the table's name, OPS_TABLE its symbol
 *   VFMA(a, b, c), VMAX(a, b), VMIN(a, b) (b where either is NaN, as maxps), MAX_LANES(v), LOAD_F16(p), STORE_F16(p, v),
 *   and where there is better than what stands here or in attn_simd.h: LOAD_I8(p), STORE_BF16(p, v), SUM_LANES(v),
 *   DOT2(acc, pairs, q) (a sum of products of pairs of BF16), ROUND(x) (to nearest even) with SCALE(x, n) (x * 2^n)
 * defined by the includer after `vf`, i.e. as macros. GCC/Clang vector extensions do the rest.
 */
#include <math.h>
#include <string.h>

#include "../model.h"
#include "../ops.h"

typedef float vf __attribute__((vector_size(VW * 4)));
typedef int32_t vi __attribute__((vector_size(VW * 4)));
typedef float vf_u __attribute__((vector_size(VW * 4), aligned(4), may_alias));
typedef int32_t vi_u __attribute__((vector_size(VW * 4), aligned(4), may_alias));

/* BF16 by integer arithmetic, to nearest even; NaN stays one. */
typedef uint16_t vh_u __attribute__((vector_size(VW * 2), aligned(2), may_alias));

#define INLINE static inline __attribute__((always_inline))
enum { NT = ATTN_TILE / VW };

INLINE vf load(const float *p) { return *(const vf_u *)p; }
INLINE void store(float *p, vf v) { *(vf_u *)p = v; }
INLINE vf splat(float x) { return x - (vf){0}; }
INLINE vf select_f(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }
/* A NaN in x survives both. */
INLINE vf at_least(vf x, float c) { return VMAX(splat(c), x); }
INLINE vf at_most(vf x, float c) { return VMIN(splat(c), x); }

#ifndef LOAD_I8
typedef int8_t vb_u __attribute__((vector_size(VW), aligned(1), may_alias));
#define LOAD_I8(p) __builtin_convertvector(*(const vb_u *)(p), vf)
#endif

#ifndef STORE_BF16
INLINE void store_bf16(uint16_t *p, vf v) {
    vi u = (vi)v, odd = (u >> 16) & 1;
    vi rounded = (vi)((u + 0x7fff + odd) >> 16) & 0xffff;
    vi is_nan = v != v;
    *(vh_u *)p = __builtin_convertvector((rounded & ~is_nan) | (is_nan & 0x7fc0), vh_u);
}
#define STORE_BF16(p, v) store_bf16(p, v)
#endif

static const int32_t lane_index[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

#ifndef SUM_LANES
INLINE float sum_lanes(vf v) {
    float a[VW];
    store(a, v);
    for (int32_t w = VW / 2; w > 0; w /= 2)
        for (int32_t i = 0; i < w; i++) a[i] += a[i + w];
    return a[0];
}
#define SUM_LANES(v) sum_lanes(v)
#endif

/* 2^x, relative error below 2e-7: x = n + r, |r| <= 1/2, Taylor's polynomial of degree 6 in r ln 2. Adding 1.5 * 2^23 rounds to
 * the integer n and leaves it in the low bits. Never below 2^-125; exactly 1 at 0. */
INLINE vf exp2_v(vf x) {
    const vf magic = splat(12582912.0f);
    x = at_most(at_least(x, -125.0f), 127.0f);
    vf t = x + magic;
    vf r = x - (t - magic);
    vf p = splat(1.5403530e-4f);
    p = VFMA(p, r, splat(1.3333558e-3f));
    p = VFMA(p, r, splat(9.6181291e-3f));
    p = VFMA(p, r, splat(5.5504109e-2f));
    p = VFMA(p, r, splat(2.4022651e-1f));
    p = VFMA(p, r, splat(6.9314718e-1f));
    p = VFMA(p, r, splat(1.0f));
    return p * (vf)(((vi)t << 23) + 0x3f800000);
}

static void rms_norm(float *out, const float *x, const float *w, int32_t n, float eps) {
    vf acc[4] = {{0}, {0}, {0}, {0}};
    float tail = 0;
    int32_t i = 0;
    for (; i + 4 * VW <= n; i += 4 * VW)
        for (int32_t j = 0; j < 4; j++) {
            vf v = load(x + i + j * VW);
            acc[j] = VFMA(v, v, acc[j]);
        }
    for (; i < n; i++) tail += x[i] * x[i];
    float sum = SUM_LANES((acc[0] + acc[1]) + (acc[2] + acc[3])) + tail;
    float scale = 1.0f / sqrtf(sum / (float)n + eps);
    vf s = splat(scale);
    for (i = 0; i + VW <= n; i += VW) store(out + i, load(x + i) * s * load(w + i));
    for (; i < n; i++) out[i] = x[i] * scale * w[i];
}

static void add(float *x, const float *y, int32_t n) {
    int32_t i = 0;
    for (; i + VW <= n; i += VW) store(x + i, load(x + i) + load(y + i));
    for (; i < n; i++) x[i] += y[i];
}

INLINE vf silu_mul(vf g, vf u) {
    vf e = exp2_v(g * splat(-1.44269504f));
    return g / (splat(1.0f) + e) * u;
}

static void swiglu(float *gate, const float *up, int32_t n) {
    int32_t i = 0;
    for (; i + VW <= n; i += VW) store(gate + i, silu_mul(load(gate + i), load(up + i)));
    if (i < n) {
        float g[VW] = {0}, u[VW] = {0};
        memcpy(g, gate + i, (size_t)(n - i) * 4);
        memcpy(u, up + i, (size_t)(n - i) * 4);
        store(g, silu_mul(load(g), load(u)));
        memcpy(gate + i, g, (size_t)(n - i) * 4);
    }
}

static void rope(float *v, int32_t n_heads, int32_t head_dim, int32_t n_rot, int32_t style, const float *cs) {
    const int32_t half = n_rot / 2;
    const float *c = cs, *s = cs + half;
    for (int32_t h = 0; h < n_heads; h++, v += head_dim) {
        int32_t i = 0;
        if (style == ROPE_PAIRS) {
            for (; i < half; i++) {
                float a = v[2 * i], b = v[2 * i + 1];
                v[2 * i] = a * c[i] - b * s[i];
                v[2 * i + 1] = a * s[i] + b * c[i];
            }
            continue;
        }
        for (; i + VW <= half; i += VW) {
            vf a = load(v + i), b = load(v + half + i), cc = load(c + i), ss = load(s + i);
            store(v + i, a * cc - b * ss);
            store(v + half + i, a * ss + b * cc);
        }
        for (; i < half; i++) {
            float a = v[i], b = v[half + i];
            v[i] = a * c[i] - b * s[i];
            v[half + i] = a * s[i] + b * c[i];
        }
    }
}

static void f16_from_f32(uint16_t *out, const float *x, int32_t n) {
    int32_t i = 0;
    for (; i + VW <= n; i += VW) STORE_F16(out + i, at_most(at_least(load(x + i), -65504.0f), 65504.0f));
    if (i < n) {
        float t[VW] = {0};
        uint16_t h[VW];
        memcpy(t, x + i, (size_t)(n - i) * 4);
        STORE_F16(h, at_most(at_least(load(t), -65504.0f), 65504.0f));
        memcpy(out + i, h, (size_t)(n - i) * 2);
    }
}

static void f32_from_f16(float *out, const uint16_t *x, int32_t n) {
    int32_t i = 0;
    for (; i + VW <= n; i += VW) store(out + i, LOAD_F16(x + i));
    if (i < n) {
        uint16_t h[VW] = {0};
        float t[VW];
        memcpy(h, x + i, (size_t)(n - i) * 2);
        store(t, LOAD_F16(h));
        memcpy(out + i, t, (size_t)(n - i) * 4);
    }
}

static void f32_from_i8(float *out, const int8_t *x, int64_t ld, int32_t n_rows, int32_t n, const float *scale, int32_t by_row) {
    for (int32_t r = 0; r < n_rows; r++, out += ld, x += ld) {
        int32_t i = 0;
        for (; i + VW <= n; i += VW) store(out + i, LOAD_I8(x + i) * (by_row ? splat(scale[r]) : load(scale + i)));
        for (; i < n; i++) out[i] = (float)x[i] * scale[by_row ? r : i];
    }
}

static void bf16_from_f32(uint16_t *out, const float *x, int32_t n) {
    int32_t i = 0;
    for (; i + VW <= n; i += VW) STORE_BF16(out + i, load(x + i));
    if (i < n) {
        float t[VW] = {0};
        uint16_t h[VW];
        memcpy(t, x + i, (size_t)(n - i) * 4);
        STORE_BF16(h, load(t));
        memcpy(out + i, h, (size_t)(n - i) * 2);
    }
}

#include "attn_simd.h"

const ops OPS_TABLE = {
    .name = OPS_NAME,
    .rms_norm = rms_norm,
    .add = add,
    .swiglu = swiglu,
    .rope = rope,
    .f16_from_f32 = f16_from_f32,
    .f32_from_f16 = f32_from_f16,
    .f32_from_i8 = f32_from_i8,
    .bf16_from_f32 = bf16_from_f32,
    .attn_scores_f32 = attn_scores_f32,
    .attn_scores_f16 = attn_scores_f16,
    .attn_scores_bf16 = attn_scores_bf16,
    .attn_weights_f32 = attn_weights_f32,
    .attn_weights_bf16 = attn_weights_bf16,
    .attn_values_f32 = attn_values_f32,
    .attn_values_f16 = attn_values_f16,
    .attn_values_bf16 = attn_values_bf16,
#ifdef STORE_BF16_2
    .attn_weigh_bf16 = attn_weigh_bf16,
#endif
    .attn_join = attn_join,
};

/* ops_simd.h: the source of every ops table. Included once per instruction set, with
 *   VW       floats in a vector (4, 8, 16)
 *   TILE_R   query rows that one pass over a tile holds in registers
 *   OPS_NAME the table's name, OPS_TABLE its symbol
 *   VFMA(a, b, c), VMAX(a, b), VMIN(a, b) (b where either is NaN, as maxps), MAX_LANES(v), LOAD_F16(p), STORE_F16(p, v),
 *   and where there is better than what stands here or in attn_simd.h: STORE_BF16(p, v), STORE_I8(p, v) (the low bytes), SUM_LANES(v),
 *   MAX_INTEGER(v) (lanes are not negative), ROTATE_LANES(v) (a Walsh-Hadamard transform of a vector), DOT2(acc, pairs, q) (a sum
 *   of products of pairs of BF16), ROUND(x) (to nearest even) with SCALE(x, n) (x * 2^n)
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

#define PRAGMA(x) _Pragma(#x)
#define UNROLL(n) PRAGMA(GCC unroll n) /* GCC leaves loops of known length that hold much; their vectors must be registers */

INLINE vf load(const float *p) { return *(const vf_u *)p; }
INLINE void store(float *p, vf v) { *(vf_u *)p = v; }
INLINE vf splat(float x) { return x - (vf){0}; }
INLINE vf select_f(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }
/* A NaN in x survives both. */
INLINE vf at_least(vf x, float c) { return VMAX(splat(c), x); }
INLINE vf at_most(vf x, float c) { return VMIN(splat(c), x); }

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

static void scale(float *out, const float *x, int32_t n, float factor) {
    int32_t i = 0;
    for (; i + VW <= n; i += VW) store(out + i, load(x + i) * splat(factor));
    for (; i < n; i++) out[i] = x[i] * factor;
}

/* Stages whose partners lie in one vector. */
#ifndef ROTATE_LANES
INLINE vf rotate_lanes(vf v) {
    for (int32_t s = VW / 2; s; s /= 2) {
        vf partner, sign;
        for (int32_t i = 0; i < VW; i++) {
            partner[i] = v[i ^ s];
            sign[i] = i & s ? -1.0f : 1.0f;
        }
        v = partner + v * sign;
    }
    return v;
}
#define ROTATE_LANES(v) rotate_lanes(v)
#endif

enum { V64 = 64 / VW }; /* vectors of 64 values */

INLINE void rotate_64(vf v[V64]) {
    UNROLL(4)
    for (int s = V64 / 2; s; s /= 2)
        UNROLL(16)
        for (int i = 0; i < V64; i++)
            if (!(i & s)) {
                const vf a = v[i], b = v[i + s];
                v[i] = a + b;
                v[i + s] = a - b;
            }
    UNROLL(16)
    for (int i = 0; i < V64; i++) v[i] = ROTATE_LANES(v[i]) * splat(0.125f);
}

static void rotate(float *x, int32_t n) {
    for (; n >= 64; x += 64, n -= 64) {
        vf v[V64];
        for (int i = 0; i < V64; i++) v[i] = load(x + i * VW);
        rotate_64(v);
        for (int i = 0; i < V64; i++) store(x + i * VW, v[i]);
    }
    for (int32_t size = 32; n; size /= 2)
        for (; n >= size; x += size, n -= size) {
            for (int32_t s = size / 2; s; s /= 2)
                for (int32_t i = 0; i < size; i++)
                    if (!(i & s)) {
                        const float a = x[i], b = x[i + s];
                        x[i] = a + b;
                        x[i + s] = a - b;
                    }
            scale(x, x, size, 1.0f / sqrtf((float)size));
        }
}

/* As integers, so that NaN is above all. */
INLINE vi abs_bits(vf v) { return (vi)v & 0x7fffffff; }
INLINE vi max_i(vi a, vi b) { return ((vi)(a > b) & a) | (~(vi)(a > b) & b); }

#ifndef MAX_INTEGER
INLINE int32_t max_integer(vi v) {
    int32_t top = 0;
    for (int32_t i = 0; i < VW; i++) top = v[i] > top ? v[i] : top;
    return top;
}
#define MAX_INTEGER(v) max_integer(v)
#endif

INLINE float max_of_bits(vi v) {
    const int32_t top = MAX_INTEGER(v);
    float x;
    memcpy(&x, &top, 4);
    return x;
}

static float max_abs(const float *x, int32_t n) {
    vi top = {0};
    int32_t i = 0;
    for (; i + VW <= n; i += VW) top = max_i(top, abs_bits(load(x + i)));
    if (i < n) {
        float t[VW] = {0};
        memcpy(t, x + i, (size_t)(n - i) * 4);
        top = max_i(top, abs_bits(load(t)));
    }
    return max_of_bits(top);
}

#ifndef STORE_I8
typedef int8_t vb_u __attribute__((vector_size(VW), aligned(1), may_alias));
#define STORE_I8(p, v) (*(vb_u *)(p) = __builtin_convertvector(v, vb_u))
#endif

/* v * inverse to the nearest integer, whose low byte counts. */
INLINE void store_nearest(int8_t *p, vf v, float inverse) {
    STORE_I8(p, (vi)(at_most(at_least(v * splat(inverse), -127.0f), 127.0f) + splat(12582912.0f)));
}

static void i8_from_f32(int8_t *out, const float *x, int32_t n, float inverse) {
    int32_t i = 0;
    for (; i + VW <= n; i += VW) store_nearest(out + i, load(x + i), inverse);
    if (i < n) {
        float t[VW] = {0};
        memcpy(t, x + i, (size_t)(n - i) * 4);
        int8_t b[VW];
        store_nearest(b, load(t), inverse);
        memcpy(out + i, b, (size_t)(n - i));
    }
}

/* The scale of 127 steps, rounded to F16 before anything is divided by it, so that the greatest value still fits. */
INLINE float scale_f16(float top) {
    uint16_t half[VW];
    STORE_F16(half, at_most(splat(top / 127.0f), 65504.0f));
    return LOAD_F16(half)[0];
}

static float rotated_i8(int8_t *out, const float *x, int32_t n) {
    if (n == 64) {
        vf v[V64];
        vi top = {0};
        UNROLL(16)
        for (int i = 0; i < V64; i++) v[i] = load(x + i * VW);
        rotate_64(v);
        UNROLL(16)
        for (int i = 0; i < V64; i++) top = max_i(top, abs_bits(v[i]));
        const float d = scale_f16(max_of_bits(top)), inverse = d > 0 ? 1.0f / d : 0.0f;
        UNROLL(16)
        for (int i = 0; i < V64; i++) store_nearest(out + i * VW, v[i], inverse);
        return d;
    }
    float rotated[ATTN_Q8_GROUP];
    memcpy(rotated, x, (size_t)n * 4);
    rotate(rotated, n);
    const float d = scale_f16(max_abs(rotated, n));
    i8_from_f32(out, rotated, n, d > 0 ? 1.0f / d : 0.0f);
    for (int32_t i = n; i % 4; i++) out[i] = 0;
    return d;
}

static void f32_from_packs(float *out, const uint8_t *x, int32_t n_rows, int32_t n, const float *scale, int32_t by_row) {
    const int32_t flip = by_row ? 0 : (int32_t)0x80808080;
    for (int32_t r = 0; r < n_rows; r += 4, x += (int64_t)n * 4)
        for (int32_t i = 0; i < n; i += VW) {
            int32_t pad[VW] = {0};
            float scales[VW] = {0}, t[VW];
            const int32_t left = n - i < VW ? n - i : VW;
            if (left < VW) {
                memcpy(pad, x + (int64_t)i * 4, (size_t)left * 4);
                if (!by_row) memcpy(scales, scale + i, (size_t)left * 4);
            }
            const vi v = (left < VW ? *(const vi_u *)pad : *(const vi_u *)(const void *)(x + (int64_t)i * 4)) ^ flip;
            const vf of_columns = by_row ? (vf){0} : load(left < VW ? scales : scale + i);
            for (int32_t j = 0; j < 4 && r + j < n_rows; j++) {
                const vf f = __builtin_convertvector((vi)(v << (24 - 8 * j)) >> 24, vf) * (by_row ? splat(scale[r + j]) : of_columns);
                float *to = out + (int64_t)(r + j) * n + i;
                if (left == VW) {
                    store(to, f);
                    continue;
                }
                store(t, f);
                memcpy(to, t, (size_t)left * 4);
            }
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
#ifdef ATTN_Q8
#include ATTN_Q8
#endif

const ops OPS_TABLE = {
    .name = OPS_NAME,
    .rms_norm = rms_norm,
    .add = add,
    .swiglu = swiglu,
    .rope = rope,
    .f16_from_f32 = f16_from_f32,
    .f32_from_f16 = f32_from_f16,
    .scale = scale,
    .rotate = rotate,
    .rotated_i8 = rotated_i8,
    .max_abs = max_abs,
    .i8_from_f32 = i8_from_f32,
    .f32_from_packs = f32_from_packs,
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
#ifdef ATTN_Q8
    .attn_query_q8 = attn_query_q8,
    .attn_scores_q8 = attn_scores_q8,
    .attn_weights_q8 = attn_weights_q8,
    .attn_values_q8 = attn_values_q8,
    .attn_weigh_q8 = attn_weigh_q8,
#endif
    .attn_join = attn_join,
};

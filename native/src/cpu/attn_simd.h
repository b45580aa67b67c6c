/* attn_simd.h: attention over one tile of 32 keys, included by ops_simd.h.
 *
 * Lanes are keys in q.k and dimensions in p.v, so neither needs a reduction across lanes except the maximum, which has no
 * rounding. Per row: one chain of fused multiply-adds over d for each score, one over t for each output, whatever the
 * number of rows a pass holds. That makes decode and prefill equal bit by bit.
 *
 * BF16: keys lie as pairs of dimensions, values as pairs of tokens, 32 bits each; queries and weights are rounded to BF16
 * too and DOT2 adds two products at once.
 */

enum attn_mode { ATTN_F32, ATTN_F16, ATTN_BF16 };
/* 4 accumulator vectors per row in p.v; TILE_R x 4 of them fill the registers. */
enum { PV = 4 };

#define PRAGMA(x) _Pragma(#x)
#define UNROLL(n) PRAGMA(GCC unroll n) /* GCC leaves loops of known length that hold much; their vectors must be registers */

#ifndef DOT2
INLINE vf dot2(vf acc, vi pairs, vi q) {
    acc = VFMA((vf)(pairs << 16), (vf)(q << 16), acc);
    return VFMA((vf)(pairs & (int32_t)0xffff0000), (vf)(q & (int32_t)0xffff0000), acc);
}
#define DOT2(acc, pairs, q) dot2(acc, pairs, q)
#endif

INLINE vi load_i(const void *p, int64_t i) { return *(const vi_u *)((const int32_t *)p + i); }
INLINE vi splat_i(int32_t x) { return x - (vi){0}; }

/* q.k of R rows from r0 on: a[r][j] for tokens j * VW ... */
INLINE void tile_dots(const int R, const int mode, const attn_rows *x, int32_t r0, const void *k, vf a[TILE_R][NT]) {
    const int64_t ld_q = x->ld_q;
    const float *q = (const float *)x->q + r0 * ld_q;
    const int32_t n = mode == ATTN_BF16 ? (x->head_dim + 1) / 2 : x->head_dim;
    for (int r = 0; r < R; r++)
        for (int j = 0; j < NT; j++) a[r][j] = (vf){0};
    for (int32_t d = 0; d < n; d++) {
        const int64_t at = (int64_t)d * ATTN_TILE;
        if (mode == ATTN_BF16) {
            vi w[NT];
            for (int j = 0; j < NT; j++) w[j] = load_i(k, at + j * VW);
            for (int r = 0; r < R; r++) {
                vi qv = splat_i(((const int32_t *)(const void *)q)[r * ld_q + d]);
                for (int j = 0; j < NT; j++) a[r][j] = DOT2(a[r][j], w[j], qv);
            }
        } else {
            vf w[NT];
            for (int j = 0; j < NT; j++)
                w[j] = mode == ATTN_F16 ? LOAD_F16((const uint16_t *)k + at + j * VW) : load((const float *)k + at + j * VW);
            for (int r = 0; r < R; r++) {
                vf qv = splat(q[r * ld_q + d]);
                for (int j = 0; j < NT; j++) a[r][j] = VFMA(w[j], qv, a[r][j]);
            }
        }
    }
}

INLINE vi valid_lanes(int32_t n_valid, int j) { return (vi)*(const vi_u *)lane_index < splat_i(n_valid - j * VW); }

/* Greatest scores and what the sums so far shrink by, of all rows at once: each chain is long, so they run side by side. */
INLINE void tile_maxima(const int R, float *m, vf a[TILE_R][NT], float *alpha) {
    float old[VW] = {0}, new[VW] = {0}, shrink[VW];
    UNROLL(6)
    for (int r = 0; r < R; r++) {
        vf top = a[r][0];
        for (int j = 1; j < NT; j++) top = VMAX(top, a[r][j]);
        const float t = MAX_LANES(top);
        old[r] = m[r];
        new[r] = t > old[r] ? t : old[r];
    }
    const vf m_old = load(old), m_new = load(new);
    store(shrink, exp2_v(select_f((vi)(m_old == m_new), (vf){0}, m_old - m_new))); /* 1 where nothing changed, infinite or not */
    for (int r = 0; r < R; r++) {
        m[r] = new[r];
        alpha[r] = shrink[r];
    }
}

/* Scores turned into weights p[R][32], F32 or BF16; updates m and l; alpha[r]: what the sums so far shrink by. */
INLINE void tile_weights(const int R, const int mode, const attn_rows *x, int32_t r0, int32_t n_valid, vf a[TILE_R][NT],
                         void *p, float *alpha) {
    if (n_valid < ATTN_TILE)
        UNROLL(8)
        for (int j = 0; j < NT; j++)
            UNROLL(6)
            for (int r = 0; r < R; r++) a[r][j] = select_f(valid_lanes(n_valid, j), a[r][j], splat(-INFINITY));
    tile_maxima(R, x->m + r0, a, alpha);
    UNROLL(6)
    for (int r = 0; r < R; r++) {
        const vf m = splat(x->m[r0 + r]);
        UNROLL(8)
        for (int j = 0; j < NT; j++) a[r][j] = exp2_v(a[r][j] - m);
    }
    if (n_valid < ATTN_TILE)
        UNROLL(8)
        for (int j = 0; j < NT; j++)
            UNROLL(6)
            for (int r = 0; r < R; r++) a[r][j] = select_f(valid_lanes(n_valid, j), a[r][j], (vf){0});
    UNROLL(6)
    for (int r = 0; r < R; r++) {
        float *l = x->l + (int64_t)(r0 + r) * ATTN_LANES;
        const int lane_vecs = ATTN_LANES / VW;
        UNROLL(8)
        for (int j = 0; j < NT; j++) {
            if (mode == ATTN_BF16) STORE_BF16((uint16_t *)p + r * ATTN_TILE + j * VW, a[r][j]);
            else store((float *)p + r * ATTN_TILE + j * VW, a[r][j]);
        }
        for (int i = 0; i < lane_vecs; i++) {
            vf s = a[r][i];
            for (int j = i + lane_vecs; j < NT; j += lane_vecs) s = s + a[r][j];
            store(l + i * VW, VFMA(load(l + i * VW), splat(alpha[r]), s));
        }
    }
}

/* One token's (BF16: two tokens') share of p.v. */
INLINE void add_values(const int R, const int N, const int mode, vf o[TILE_R][PV], const void *v, int64_t at, const void *p,
                       int64_t t, int32_t mask) {
    if (mode == ATTN_BF16) {
        vi pv[TILE_R];
        for (int r = 0; r < R; r++) pv[r] = splat_i(((const int32_t *)p)[r * (ATTN_TILE / 2) + t]);
        for (int i = 0; i < N; i++) {
            vi w = load_i(v, at + i * VW) & mask;
            for (int r = 0; r < R; r++) o[r][i] = DOT2(o[r][i], w, pv[r]);
        }
        return;
    }
    vf pv[TILE_R];
    for (int r = 0; r < R; r++) pv[r] = splat(((const float *)p)[r * ATTN_TILE + t]);
    for (int i = 0; i < N; i++) {
        vf w = mode == ATTN_F16 ? LOAD_F16((const uint16_t *)v + at + i * VW) : load((const float *)v + at + i * VW);
        for (int r = 0; r < R; r++) o[r][i] = VFMA(w, pv[r], o[r][i]);
    }
}

/* o = o * alpha + p.v for N vectors of dimensions from d0 on; v has rows of ld_v. */
INLINE void tile_values(const int R, const int N, const int mode, float *out, int64_t ld_o, const void *v, int64_t ld_v, int32_t d0,
                        int32_t n_valid, const void *p, const float *alpha) {
    vf o[TILE_R][PV];
    const int32_t n = mode == ATTN_BF16 ? n_valid / 2 : n_valid;
    for (int r = 0; r < R; r++)
        for (int i = 0; i < N; i++) o[r][i] = load(out + r * ld_o + i * VW) * splat(alpha[r]);
    for (int32_t t = 0; t < n; t++) add_values(R, N, mode, o, v, t * ld_v + d0, p, t, -1);
    if (mode == ATTN_BF16 && n_valid % 2) add_values(R, N, mode, o, v, n * ld_v + d0, p, n, 0xffff);
    for (int r = 0; r < R; r++)
        for (int i = 0; i < N; i++) store(out + r * ld_o + i * VW, o[r][i]);
}

/* The dimensions that fill no vector: the same through padded copies. */
INLINE void tile_values_tail(const int R, const int mode, const attn_rows *x, int32_t r0, const void *v, int32_t d0,
                             int32_t n_valid, const void *p, const float *alpha) {
    const size_t width = mode == ATTN_F16 ? 2 : 4, n = (size_t)(x->head_dim - d0);
    const int32_t n_rows = mode == ATTN_BF16 ? (n_valid + 1) / 2 : n_valid;
    float pad[ATTN_TILE * VW] = {0}, o[TILE_R * VW] = {0}, *out = x->o + r0 * x->ld_o + d0;
    for (int32_t t = 0; t < n_rows; t++)
        memcpy((char *)pad + (size_t)t * VW * width, (const char *)v + ((size_t)t * (size_t)x->head_dim + (size_t)d0) * width, n * width);
    for (int r = 0; r < R; r++) memcpy(o + r * VW, out + r * x->ld_o, n * 4);
    tile_values(R, 1, mode, o, VW, pad, VW, 0, n_valid, p, alpha);
    for (int r = 0; r < R; r++) memcpy(out + r * x->ld_o, o + r * VW, n * 4);
}

INLINE void tile_pass(const int R, const int mode, const attn_rows *x, int32_t r0, const void *k, const void *v, int32_t n_valid) {
    float p[TILE_R * ATTN_TILE] __attribute__((aligned(64))), alpha[TILE_R];
    vf a[TILE_R][NT];
    float *out = x->o + r0 * x->ld_o;
    int32_t d = 0;
    tile_dots(R, mode, x, r0, k, a);
    tile_weights(R, mode, x, r0, n_valid, a, p, alpha);
    for (; d + PV * VW <= x->head_dim; d += PV * VW) tile_values(R, PV, mode, out + d, x->ld_o, v, x->head_dim, d, n_valid, p, alpha);
    for (; d + VW <= x->head_dim; d += VW) tile_values(R, 1, mode, out + d, x->ld_o, v, x->head_dim, d, n_valid, p, alpha);
    if (d < x->head_dim) tile_values_tail(R, mode, x, r0, v, d, n_valid, p, alpha);
}

INLINE void tile_rows(const int mode, const attn_rows *x, const void *k, const void *v, int32_t n_valid) {
    for (int32_t r = 0; r < x->n_rows;) {
        int32_t left = x->n_rows - r;
        /* 7 and 8 rows as 4 + the rest, not 6 + 1 or 2: a pass with few rows waits on loads. */
        int32_t take = left <= TILE_R ? left : left < TILE_R + 3 && TILE_R > 4 ? 4 : TILE_R;
        switch (take) {
        case 1: tile_pass(1, mode, x, r, k, v, n_valid); break;
#if TILE_R > 1
        case 2: tile_pass(2, mode, x, r, k, v, n_valid); break;
        case 3: tile_pass(3, mode, x, r, k, v, n_valid); break;
#endif
#if TILE_R > 3
        case 4: tile_pass(4, mode, x, r, k, v, n_valid); break;
        case 5: tile_pass(5, mode, x, r, k, v, n_valid); break;
        case 6: tile_pass(6, mode, x, r, k, v, n_valid); break;
#endif
        default: break;
        }
        r += take;
    }
}

static void attn_tile_f32(const attn_rows *x, const void *k, const void *v, int32_t n_valid) { tile_rows(ATTN_F32, x, k, v, n_valid); }
static void attn_tile_f16(const attn_rows *x, const void *k, const void *v, int32_t n_valid) { tile_rows(ATTN_F16, x, k, v, n_valid); }
static void attn_tile_bf16(const attn_rows *x, const void *k, const void *v, int32_t n_valid) { tile_rows(ATTN_BF16, x, k, v, n_valid); }

static void attn_join(float *total, const float *part, int32_t head_dim) {
    float m = total[head_dim], m_part = part[head_dim], m_new = m_part > m ? m_part : m;
    float a = exp2_v(splat(m - m_new))[0], b = exp2_v(splat(m_part - m_new))[0];
    total[head_dim] = m_new;
    total[head_dim + 1] = total[head_dim + 1] * a + part[head_dim + 1] * b;
    int32_t d = 0;
    for (; d + VW <= head_dim; d += VW) store(total + d, load(total + d) * splat(a) + load(part + d) * splat(b));
    for (; d < head_dim; d++) total[d] = total[d] * a + part[d] * b;
}

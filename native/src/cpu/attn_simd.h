/* attn_simd.h: attention over one tile of 32 keys, included by ops_simd.h.
 *
 * Lanes are keys in q.k and dimensions in p.v, so neither needs a reduction across lanes except the maximum, which has no
 * rounding. Per row: one chain of fused multiply-adds over d for each score, one over t for each output, whatever the
 * number of rows a pass holds. That makes decode and prefill equal bit by bit.
 */

/* 4 accumulator vectors per row in p.v; TILE_R x 4 of them fill the registers. */
enum { PV = 4 };

INLINE vf load_k(int f16, const void *p, int64_t i) {
    return f16 ? LOAD_F16((const uint16_t *)p + i) : load((const float *)p + i);
}

/* Scores of R rows, turned into weights p[R][32]; updates m and l; alpha[r]: what the sums so far shrink by. */
INLINE void tile_scores(const int R, const int f16, const attn_rows *x, int32_t r0, const void *k, int32_t n_valid,
                        float *p, float *alpha) {
    vf a[TILE_R][NT];
    const float *q = x->q + r0 * x->ld_q;
    const int64_t ld_q = x->ld_q;
    for (int r = 0; r < R; r++)
        for (int j = 0; j < NT; j++) a[r][j] = (vf){0};
    for (int32_t d = 0; d < x->head_dim; d++) {
        vf kv_[NT];
        for (int j = 0; j < NT; j++) kv_[j] = load_k(f16, k, (int64_t)d * ATTN_TILE + j * VW);
        for (int r = 0; r < R; r++) {
            vf qv = splat(q[r * ld_q + d]);
            for (int j = 0; j < NT; j++) a[r][j] = VFMA(kv_[j], qv, a[r][j]);
        }
    }
    if (n_valid < ATTN_TILE) {
        const vi lanes = (vi)*(const vi_u *)lane_index;
        for (int j = 0; j < NT; j++) {
            vi valid = lanes < (n_valid - j * VW - (vi){0});
            for (int r = 0; r < R; r++) a[r][j] = select_f(valid, a[r][j], splat(-INFINITY));
        }
    }
    for (int r = 0; r < R; r++) {
        vf top = a[r][0];
        for (int j = 1; j < NT; j++) top = VMAX(top, a[r][j]);
        float t = MAX_LANES(top), m_old = x->m[r0 + r];
        float m_new = t > m_old ? t : m_old;
        vf w = exp2_v(splat(m_old - m_new));
        alpha[r] = m_new == m_old ? 1.0f : w[0];
        x->m[r0 + r] = m_new;
        float *l = x->l + (int64_t)(r0 + r) * ATTN_LANES;
        for (int j = 0; j < NT; j++) {
            vf e = exp2_v(a[r][j] - splat(m_new));
            if (n_valid < ATTN_TILE) {
                vi valid = (vi)*(const vi_u *)lane_index < (n_valid - j * VW - (vi){0});
                e = select_f(valid, e, (vf){0});
            }
            store(p + r * ATTN_TILE + j * VW, e);
            a[r][j] = e;
        }
        const int lane_vecs = ATTN_LANES / VW;
        for (int i = 0; i < lane_vecs; i++) {
            vf s = a[r][i];
            for (int j = i + lane_vecs; j < NT; j += lane_vecs) s = s + a[r][j];
            store(l + i * VW, VFMA(load(l + i * VW), splat(alpha[r]), s));
        }
    }
}

/* o = o * alpha + p.v for N vectors of dimensions from d0 on. */
INLINE void tile_values(const int R, const int N, const int f16, const attn_rows *x, int32_t r0, const void *v, int32_t d0,
                        int32_t n_valid, const float *p, const float *alpha) {
    vf o[TILE_R][PV];
    float *out = x->o + r0 * x->ld_o + d0;
    for (int r = 0; r < R; r++)
        for (int i = 0; i < N; i++) o[r][i] = load(out + r * x->ld_o + i * VW) * splat(alpha[r]);
    for (int32_t t = 0; t < n_valid; t++) {
        vf pv[TILE_R];
        for (int r = 0; r < R; r++) pv[r] = splat(p[r * ATTN_TILE + t]);
        for (int i = 0; i < N; i++) {
            vf w = load_k(f16, v, (int64_t)t * x->head_dim + d0 + i * VW);
            for (int r = 0; r < R; r++) o[r][i] = VFMA(w, pv[r], o[r][i]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int i = 0; i < N; i++) store(out + r * x->ld_o + i * VW, o[r][i]);
}

/* The dimensions that fill no vector: through a padded copy, so the arithmetic is the same. */
INLINE void tile_values_tail(const int R, const int f16, const attn_rows *x, int32_t r0, const void *v, int32_t d0,
                             int32_t n_valid, const float *p, const float *alpha) {
    const int32_t n = x->head_dim - d0;
    float pad[ATTN_TILE][VW];
    for (int32_t t = 0; t < n_valid; t++) {
        uint16_t h[VW] = {0};
        const int64_t at = (int64_t)t * x->head_dim + d0;
        memset(pad[t], 0, sizeof pad[t]);
        if (f16) {
            memcpy(h, (const uint16_t *)v + at, (size_t)n * 2);
            store(pad[t], LOAD_F16(h));
        } else {
            memcpy(pad[t], (const float *)v + at, (size_t)n * 4);
        }
    }
    for (int r = 0; r < R; r++) {
        float *out = x->o + (r0 + r) * x->ld_o + d0, buf[VW] = {0};
        memcpy(buf, out, (size_t)n * 4);
        vf o = load(buf) * splat(alpha[r]);
        for (int32_t t = 0; t < n_valid; t++) o = VFMA(load(pad[t]), splat(p[r * ATTN_TILE + t]), o);
        store(buf, o);
        memcpy(out, buf, (size_t)n * 4);
    }
}

INLINE void tile_pass(const int R, const int f16, const attn_rows *x, int32_t r0, const void *k, const void *v, int32_t n_valid) {
    float p[TILE_R * ATTN_TILE] __attribute__((aligned(64))), alpha[TILE_R];
    int32_t d = 0;
    tile_scores(R, f16, x, r0, k, n_valid, p, alpha);
    for (; d + PV * VW <= x->head_dim; d += PV * VW) tile_values(R, PV, f16, x, r0, v, d, n_valid, p, alpha);
    for (; d + VW <= x->head_dim; d += VW) tile_values(R, 1, f16, x, r0, v, d, n_valid, p, alpha);
    if (d < x->head_dim) tile_values_tail(R, f16, x, r0, v, d, n_valid, p, alpha);
}

INLINE void tile_rows(const int f16, const attn_rows *x, const void *k, const void *v, int32_t n_valid) {
    for (int32_t r = 0; r < x->n_rows;) {
        int32_t left = x->n_rows - r;
        /* 7 and 8 rows as 4 + the rest, not 6 + 1 or 2: a pass with few rows waits on loads. */
        int32_t take = left <= TILE_R ? left : left < TILE_R + 3 && TILE_R > 4 ? 4 : TILE_R;
        switch (take) {
        case 1: tile_pass(1, f16, x, r, k, v, n_valid); break;
#if TILE_R > 1
        case 2: tile_pass(2, f16, x, r, k, v, n_valid); break;
        case 3: tile_pass(3, f16, x, r, k, v, n_valid); break;
#endif
#if TILE_R > 3
        case 4: tile_pass(4, f16, x, r, k, v, n_valid); break;
        case 5: tile_pass(5, f16, x, r, k, v, n_valid); break;
        case 6: tile_pass(6, f16, x, r, k, v, n_valid); break;
#endif
        default: break;
        }
        r += take;
    }
}

static void attn_tile_f16(const attn_rows *x, const uint16_t *k, const uint16_t *v, int32_t n_valid) {
    tile_rows(1, x, k, v, n_valid);
}

static void attn_tile_f32(const attn_rows *x, const float *k, const float *v, int32_t n_valid) {
    tile_rows(0, x, k, v, n_valid);
}

static void attn_join(float *total, const float *part, int32_t head_dim) {
    float m = total[head_dim], m_part = part[head_dim], m_new = m_part > m ? m_part : m;
    float a = exp2_v(splat(m - m_new))[0], b = exp2_v(splat(m_part - m_new))[0];
    total[head_dim] = m_new;
    total[head_dim + 1] = total[head_dim + 1] * a + part[head_dim + 1] * b;
    int32_t d = 0;
    for (; d + VW <= head_dim; d += VW) store(total + d, load(total + d) * splat(a) + load(part + d) * splat(b));
    for (; d < head_dim; d++) total[d] = total[d] * a + part[d] * b;
}

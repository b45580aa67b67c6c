/* attn_simd.h: attention over one segment of keys in three stages, included by ops_simd.h.
 *
 *   scores   s = q.k, lanes are keys
 *   weights  p = 2^(s - m), m the segment's greatest score
 *   values   o = p.v, lanes are dimensions
 *
 * Where the machine multiplies pairs of BF16, many rows take the weights of some between the values of others (weigh).
 *
 * Neither product needs a reduction across lanes. Per row: one chain of fused multiply-adds over d for each score, one over the
 * segment's keys for each output, whatever the number of rows a pass holds. That makes decode and prefill equal bit by bit.
 *
 * BF16: keys lie as pairs of dimensions, values as pairs of tokens, 32 bits each; queries and weights are rounded to BF16
 * too and DOT2 adds two products at once.
 */

enum attn_mode { ATTN_F32, ATTN_F16, ATTN_BF16 };
enum { PV = 4 };                                  /* accumulator vectors per row; TILE_R x 4 of them fill the registers */
enum { KEY_TILES = VW == 16 ? 2 : 1, NK = KEY_TILES * NT }; /* tiles whose scores a pass computes, in vectors */

#ifndef DOT2
INLINE vf dot2(vf acc, vi pairs, vi q) {
    acc = VFMA((vf)(pairs << 16), (vf)(q << 16), acc);
    return VFMA((vf)(pairs & (int32_t)0xffff0000), (vf)(q & (int32_t)0xffff0000), acc);
}
#define DOT2(acc, pairs, q) dot2(acc, pairs, q)
#endif

INLINE vi load_i(const void *p, int64_t i) { return *(const vi_u *)((const int32_t *)p + i); }
INLINE vi splat_i(int32_t x) { return x - (vi){0}; }

/* Bytes of a number; of a pair for BF16. */
INLINE int32_t width_of(const int mode) { return mode == ATTN_F16 ? 2 : 4; }

INLINE void ask(const void *p, int64_t at, const int32_t n_bytes) {
    for (int32_t i = 0; i < n_bytes; i += 64) __builtin_prefetch((const char *)p + at + i);
}

/* A pass: as many of n_rows rows as fit. 7 and 8 rows as 4 + the rest, not 6 + 1 or 2: few rows wait on loads. */
INLINE int32_t pass_rows(int32_t left) { return left <= TILE_R ? left : left < TILE_R + 3 && TILE_R > 4 ? 4 : TILE_R; }

#if TILE_R == 1
#define PASS(n, CALL) CALL(1)
#elif TILE_R == 3
#define PASS(n, CALL) switch (n) { case 1: CALL(1) break; case 2: CALL(2) break; default: CALL(3) break; }
#else
#define PASS(n, CALL) \
    switch (n) { \
    case 1: CALL(1) break; case 2: CALL(2) break; case 3: CALL(3) break; case 4: CALL(4) break; case 5: CALL(5) break; \
    default: CALL(6) break; \
    }
#endif

/* R rows from r0 on times T tiles of keys. The queries of a step stay in registers, vectors of keys pass by: 3 x 4 sums leave
 * 16 registers no room for the reverse. */
INLINE void pass_scores(const int R, const int T, const int mode, const attn_rows *x, int32_t r0, const void *const *k,
                        const void *const *ahead, float *s) {
    vf a[TILE_R][NK];
    const float *q = (const float *)x->q + r0 * x->ld_q;
    const int32_t n = mode == ATTN_BF16 ? (x->head_dim + 1) / 2 : x->head_dim;
    UNROLL(6)
    for (int r = 0; r < R; r++)
        UNROLL(8)
        for (int j = 0; j < T * NT; j++) a[r][j] = (vf){0};
    for (int32_t d = 0; d < n; d++) {
        vi qi[TILE_R];
        UNROLL(6)
        for (int r = 0; r < R; r++) qi[r] = splat_i(((const int32_t *)(const void *)q)[r * x->ld_q + d]);
        for (int t = 0; ahead && t < T; t++) ask(ahead[t], d * width_of(mode) * ATTN_TILE, width_of(mode) * ATTN_TILE);
        UNROLL(8)
        for (int j = 0; j < T * NT; j++) {
            const int64_t at = (int64_t)d * ATTN_TILE + j % NT * VW;
            const void *tile = k[j / NT];
            if (mode == ATTN_BF16) {
                const vi w = load_i(tile, at);
                UNROLL(6)
                for (int r = 0; r < R; r++) a[r][j] = DOT2(a[r][j], w, qi[r]);
            } else {
                const vf w = mode == ATTN_F16 ? LOAD_F16((const uint16_t *)tile + at) : load((const float *)tile + at);
                UNROLL(6)
                for (int r = 0; r < R; r++) a[r][j] = VFMA(w, (vf)qi[r], a[r][j]);
            }
        }
    }
    UNROLL(6)
    for (int r = 0; r < R; r++)
        UNROLL(8)
        for (int j = 0; j < T * NT; j++) store(s + (int64_t)r * ATTN_SEGMENT + j * VW, a[r][j]);
    if (x->n_keys < ATTN_SEGMENT) return;
    float *tops = x->o + r0 * x->ld_o;
    const int32_t first = s == x->s + (int64_t)r0 * ATTN_SEGMENT;
    UNROLL(6)
    for (int r = 0; r < R; r++) {
        vf top = a[r][0];
        UNROLL(8)
        for (int j = 1; j < T * NT; j++) top = VMAX(top, a[r][j]);
        if (!first) top = VMAX(top, load(tops + r * x->ld_o));
        store(tops + r * x->ld_o, top);
    }
}

INLINE void scores(const int mode, const attn_rows *x, const void *const *k, int32_t tile, int32_t n_tiles) {
    for (int32_t t = 0; t < n_tiles;) {
        const int32_t two = n_tiles - t >= KEY_TILES;
        for (int32_t r = 0, n; r < x->n_rows; r += n) {
            n = pass_rows(x->n_rows - r);
            float *s = x->s + (int64_t)r * ATTN_SEGMENT + (tile + t) * ATTN_TILE;
            const void *const *ahead = x->ahead && !r ? x->ahead + t : NULL;
#define CALL(R) \
    if (two) pass_scores(R, KEY_TILES, mode, x, r, k + t, ahead, s); \
    else pass_scores(R, 1, mode, x, r, k + t, ahead, s);
            PASS(n, CALL)
#undef CALL
        }
        t += two ? KEY_TILES : 1;
    }
}

#define STAGE(name, mode) \
    static void name(const attn_rows *x, const void *const *k, int32_t tile, int32_t n) { scores(mode, x, k, tile, n); }
STAGE(attn_scores_f32, ATTN_F32)
STAGE(attn_scores_f16, ATTN_F16)
STAGE(attn_scores_bf16, ATTN_BF16)
#undef STAGE

/* 2^x as exp2_v, but to 2e-4, a tenth of what rounding to BF16 changes. */
#ifndef ROUND
#define ROUND(x) ((x) + splat(12582912.0f) - splat(12582912.0f))
#define SCALE(x, n) ((x) * (vf)(((vi)((n) + splat(12582912.0f)) << 23) + 0x3f800000))
#endif

#ifdef EXP2_REST
INLINE vf exp2_short(vf x) {
    const vf r = EXP2_REST(x);
    return EXP2_VALUE(EXP2_SLOPE(r), r, x);
}
#else
INLINE vf exp2_short(vf x) {
    x = at_least(x, -125.0f);
    vf n = ROUND(x), r = x - n;
    vf p = splat(5.5754650e-2f);
    p = VFMA(p, r, splat(2.4203533e-1f));
    p = VFMA(p, r, splat(6.9314718e-1f));
    p = VFMA(p, r, splat(1.0f));
    return SCALE(p, n);
}
#endif

/* Keys of row r in this segment. */
INLINE int32_t keys_of(const attn_rows *x, int32_t r) {
    const int32_t n = x->n_keys + r / x->per_token;
    return n < ATTN_SEGMENT ? n : ATTN_SEGMENT;
}

INLINE void put_weights(const int mode, float *s, int32_t i, vf p) {
    if (mode == ATTN_BF16) STORE_BF16((uint16_t *)(void *)s + i, p);
    else store(s + i, p);
}

/* Greatest scores of all rows before the first weight: each is a long chain, and rows side by side hide it. */
INLINE void maxima(const attn_rows *x) {
    for (int32_t r = 0; x->n_keys >= ATTN_SEGMENT && r < x->n_rows; r++)
        x->o[r * x->ld_o + x->head_dim] = MAX_LANES(load(x->o + r * x->ld_o));
    for (int32_t r = 0; x->n_keys < ATTN_SEGMENT && r < x->n_rows; r++) {
        const int32_t n = keys_of(x, r), whole = n / VW * VW;
        const float *s = x->s + (int64_t)r * ATTN_SEGMENT;
        vf top = splat(-INFINITY), other = top;
        int32_t i = 0;
        for (; i + 2 * VW <= whole; i += 2 * VW) {
            top = VMAX(top, load(s + i));
            other = VMAX(other, load(s + i + VW));
        }
        top = VMAX(top, other);
        if (i < whole) top = VMAX(top, load(s + i));
        if (n > whole) top = VMAX(top, select_f((vi)*(const vi_u *)lane_index < splat_i(n - whole), load(s + whole), top));
        x->o[r * x->ld_o + x->head_dim] = MAX_LANES(top);
    }
}

/* Weights in place of scores (BF16: in the first half of their memory), zero for keys that only later rows see. */
INLINE void weights(const int mode, const attn_rows *x) {
    const int32_t n_all = keys_of(x, x->n_rows - 1);
    maxima(x);
    for (int32_t r = 0; r < x->n_rows; r++) {
        const int32_t n = keys_of(x, r), whole = n / VW * VW;
        const vi seen = (vi)*(const vi_u *)lane_index < splat_i(n - whole);
        float *s = x->s + (int64_t)r * ATTN_SEGMENT, *end = x->o + r * x->ld_o + x->head_dim;
        vf sum = {0}, m = splat(end[0]);
        int32_t i = 0;
        for (; i < whole; i += VW) {
            const vf p = mode == ATTN_BF16 ? exp2_short(load(s + i) - m) : exp2_v(load(s + i) - m);
            sum = sum + p;
            put_weights(mode, s, i, p);
        }
        if (n > whole) {
            const vf p = select_f(seen, mode == ATTN_BF16 ? exp2_short(load(s + i) - m) : exp2_v(load(s + i) - m), (vf){0});
            sum = sum + p;
            put_weights(mode, s, i, p);
            i += VW;
        }
        for (; i < n_all; i += VW) put_weights(mode, s, i, (vf){0});
        end[1] = SUM_LANES(sum);
    }
}

static void attn_weights_f32(const attn_rows *x) { weights(ATTN_F32, x); }
static void attn_weights_bf16(const attn_rows *x) { weights(ATTN_BF16, x); }

/* Where a tile's weights lie, in floats: BF16 ones take half. */
INLINE int32_t weights_at(const int mode, int32_t tile) { return tile * (mode == ATTN_BF16 ? ATTN_TILE / 2 : ATTN_TILE); }

/* One token's (BF16: two tokens') share of p.v. */
INLINE void add_values(const int R, const int N, const int mode, vf o[TILE_R][PV], const void *v, int64_t at, const float *p,
                       int32_t mask) {
    vi pv[TILE_R];
    UNROLL(6)
    for (int r = 0; r < R; r++) pv[r] = splat_i(((const int32_t *)(const void *)p)[r * ATTN_SEGMENT]);
    UNROLL(4)
    for (int i = 0; i < N; i++) {
        if (mode == ATTN_BF16) {
            vi w = load_i(v, at + i * VW) & mask;
            UNROLL(6)
            for (int r = 0; r < R; r++) o[r][i] = DOT2(o[r][i], w, pv[r]);
        } else {
            vf w = mode == ATTN_F16 ? LOAD_F16((const uint16_t *)v + at + i * VW) : load((const float *)v + at + i * VW);
            UNROLL(6)
            for (int r = 0; r < R; r++) o[r][i] = VFMA(w, (vf)pv[r], o[r][i]);
        }
    }
}

/* n tokens of a tile whose rows are ld_v apart; p: the first one's weights. */
INLINE void tile_values(const int R, const int N, const int mode, vf o[TILE_R][PV], const void *v, int64_t ld_v, int64_t d0,
                        const float *p, int32_t n, const void *ahead) {
    const int32_t steps = mode == ATTN_BF16 ? n / 2 : n;
    for (int32_t t = 0; t < steps; t++) {
        if (ahead) ask(ahead, (t * ld_v + d0) * width_of(mode), N * VW * width_of(mode));
        add_values(R, N, mode, o, v, t * ld_v + d0, p + t, -1);
    }
    if (mode == ATTN_BF16 && n % 2) add_values(R, N, mode, o, v, steps * ld_v + d0, p + steps, 0xffff);
}

/* N vectors of dimensions from d0 on. */
INLINE void pass_values(const int R, const int N, const int mode, const attn_rows *x, int32_t r0, const void *const *v,
                        int32_t tile, int32_t n_tiles, int32_t n_keys, int32_t d0) {
    vf o[TILE_R][PV];
    float *out = x->o + r0 * x->ld_o + d0;
    const float *p = x->s + (int64_t)r0 * ATTN_SEGMENT;
    UNROLL(6)
    for (int r = 0; r < R; r++)
        UNROLL(4)
        for (int i = 0; i < N; i++) o[r][i] = tile ? load(out + r * x->ld_o + i * VW) : (vf){0};
    for (int32_t t = tile; t < tile + n_tiles; t++) {
        const int32_t left = n_keys - t * ATTN_TILE, n = left < ATTN_TILE ? left : ATTN_TILE;
        tile_values(R, N, mode, o, v[t - tile], x->head_dim, d0, p + weights_at(mode, t), n, x->ahead && !r0 ? x->ahead[t - tile] : NULL);
    }
    UNROLL(6)
    for (int r = 0; r < R; r++)
        UNROLL(4)
        for (int i = 0; i < N; i++) store(out + r * x->ld_o + i * VW, o[r][i]);
}

/* The dimensions that fill no vector: the same through padded copies. */
INLINE void pass_values_tail(const int R, const int mode, const attn_rows *x, int32_t r0, const void *const *v, int32_t tile,
                             int32_t n_tiles, int32_t n_keys, int32_t d0) {
    const size_t width = mode == ATTN_F16 ? 2 : 4, n_bytes = (size_t)(x->head_dim - d0) * 4;
    float *out = x->o + r0 * x->ld_o + d0;
    vf o[TILE_R][PV];
    float part[VW] = {0};
    for (int r = 0; r < R; r++) {
        if (tile) memcpy(part, out + r * x->ld_o, n_bytes);
        o[r][0] = load(part);
    }
    for (int32_t t = tile; t < tile + n_tiles; t++) {
        const int32_t left = n_keys - t * ATTN_TILE, n = left < ATTN_TILE ? left : ATTN_TILE;
        const int32_t n_rows = mode == ATTN_BF16 ? (n + 1) / 2 : n;
        float pad[ATTN_TILE * VW] = {0};
        for (int32_t i = 0; i < n_rows; i++)
            memcpy((char *)pad + (size_t)i * VW * width,
                   (const char *)v[t - tile] + ((size_t)i * (size_t)x->head_dim + (size_t)d0) * width, n_bytes / 4 * width);
        tile_values(R, 1, mode, o, pad, VW, 0, x->s + (int64_t)r0 * ATTN_SEGMENT + weights_at(mode, t), n, NULL);
    }
    for (int r = 0; r < R; r++) {
        store(part, o[r][0]);
        memcpy(out + r * x->ld_o, part, n_bytes);
    }
}

/* From dimension d on: passes of n rows, WIDE, then NARROW, then the TAIL that fills no vector. */
#define DIMENSIONS(n) \
    for (; d + PV * VW <= x->head_dim; d += PV * VW) PASS(n, WIDE) \
    for (; d + VW <= x->head_dim; d += VW) PASS(n, NARROW) \
    if (d < x->head_dim) PASS(n, TAIL)

/* Of the dimensions from `first` on. */
INLINE void values(const int mode, const attn_rows *x, const void *const *v, int32_t tile, int32_t n_tiles, int32_t first) {
    const int32_t n_keys = keys_of(x, x->n_rows - 1);
    for (int32_t r = 0, n; r < x->n_rows; r += n) {
        int32_t d = first;
        n = pass_rows(x->n_rows - r);
#define WIDE(R) pass_values(R, PV, mode, x, r, v, tile, n_tiles, n_keys, d);
#define NARROW(R) pass_values(R, 1, mode, x, r, v, tile, n_tiles, n_keys, d);
#define TAIL(R) pass_values_tail(R, mode, x, r, v, tile, n_tiles, n_keys, d);
        DIMENSIONS(n)
    }
#undef WIDE
#undef NARROW
#undef TAIL
}

#define STAGE(name, mode) \
    static void name(const attn_rows *x, const void *const *v, int32_t tile, int32_t n) { values(mode, x, v, tile, n, 0); }
STAGE(attn_values_f32, ATTN_F32)
STAGE(attn_values_f16, ATTN_F16)
STAGE(attn_values_bf16, ATTN_BF16)
#undef STAGE

#ifdef STORE_BF16_2
/* Weights and values of a segment that all rows see whole: while WEIGH_R rows' values are added, the weights of the next rows are
 * computed. Products wait for two of the units that multiply, weights mostly for those that add, so they hide each other. */
enum { WEIGH_R = 4, WEIGH_STEPS = VW / WEIGH_R }; /* so many pairs of tokens for two vectors of weights */

INLINE const int32_t *weigh_step(vf o[TILE_R][PV], const int32_t *v, int64_t ld_v, const float *p) {
    add_values(WEIGH_R, PV, ATTN_BF16, o, v, 0, p, -1);
    v += ld_v;
    __asm__("" : "+r"(v)); /* or GCC keeps an address for each of the steps, on the stack */
    return v;
}

INLINE void weigh_pass(const attn_rows *x, int32_t r0, const void *const *v) {
    vf o[TILE_R][PV];
    const float *p = x->s + (int64_t)r0 * ATTN_SEGMENT;
    float *out = x->o + r0 * x->ld_o, *next_o = out + WEIGH_R * x->ld_o;
    float *s = x->s + (int64_t)(r0 + WEIGH_R) * ATTN_SEGMENT;
    const int64_t ld_v = x->head_dim;
    UNROLL(6)
    for (int r = 0; r < WEIGH_R; r++)
        UNROLL(4)
        for (int i = 0; i < PV; i++) o[r][i] = (vf){0};
    int32_t t = 0; /* pairs of tokens so far */
    const int32_t *values = v[0];
    for (int32_t r = 0; r < WEIGH_R; r++, s += ATTN_SEGMENT, next_o += x->ld_o) {
        const float top = MAX_LANES(load(next_o));
        const vf m = splat(top);
        vf sum = {0};
        for (int32_t i = 0; i < ATTN_SEGMENT; i += 2 * VW) {
            if (t % (ATTN_TILE / 2) == 0) values = v[t / (ATTN_TILE / 2)];
            const vf xa = load(s + i) - m, xb = load(s + i + VW) - m;
            const vf ra = EXP2_REST(xa), rb = EXP2_REST(xb);
            values = weigh_step(o, values, ld_v, p + t);
            vf a = EXP2_SLOPE(ra), b = EXP2_SLOPE(rb);
            values = weigh_step(o, values, ld_v, p + t + 1);
            a = EXP2_VALUE(a, ra, xa);
            b = EXP2_VALUE(b, rb, xb);
            values = weigh_step(o, values, ld_v, p + t + 2);
            sum = sum + a;
            sum = sum + b;
            values = weigh_step(o, values, ld_v, p + t + 3);
            STORE_BF16_2((uint16_t *)(void *)s + i, a, b);
            t += WEIGH_STEPS;
        }
        next_o[x->head_dim] = top;
        next_o[x->head_dim + 1] = SUM_LANES(sum);
    }
    UNROLL(6)
    for (int r = 0; r < WEIGH_R; r++)
        UNROLL(4)
        for (int i = 0; i < PV; i++) store(out + r * x->ld_o + i * VW, o[r][i]);
}

INLINE void values_bf16(const attn_rows *x, const void *const *v, int32_t tile, int32_t n_tiles, int32_t first) {
    values(ATTN_BF16, x, v, tile, n_tiles, first);
}

/* Rows in fours: BOTH where there are as many more, else WEIGHTS and VALUES. */
#define WEIGH(name, WEIGHTS, BOTH, VALUES) \
    static void name(const attn_rows *x, const void *const *v) { \
        attn_rows rows = *x; \
        for (int32_t r = 0; r < x->n_rows; r += rows.n_rows) { \
            const int32_t left = x->n_rows - r; \
            rows.n_rows = left < WEIGH_R ? left : WEIGH_R; \
            rows.s = x->s + (int64_t)r * ATTN_SEGMENT; \
            rows.o = x->o + r * x->ld_o; \
            const int32_t fits = left >= 2 * WEIGH_R && x->head_dim >= PV * VW; \
            if (!r) WEIGHTS(&rows); \
            if (fits) BOTH(x, r, v); \
            VALUES(&rows, v, 0, ATTN_SEGMENT_TILES, fits ? PV * VW : 0); \
            if (fits || left <= WEIGH_R) continue; \
            attn_rows next = rows; \
            next.n_rows = left - WEIGH_R < WEIGH_R ? left - WEIGH_R : WEIGH_R; \
            next.s += (int64_t)WEIGH_R * ATTN_SEGMENT; \
            next.o += WEIGH_R * x->ld_o; \
            WEIGHTS(&next); \
        } \
    }

WEIGH(attn_weigh_bf16, attn_weights_bf16, weigh_pass, values_bf16)
#endif

static void attn_join(float *total, const float *part, int32_t head_dim, int32_t n_rows, int64_t stride) {
    for (int32_t r0 = 0; r0 < n_rows; r0 += VW, total += VW * stride, part += VW * stride) {
        const int32_t n = n_rows - r0 < VW ? n_rows - r0 : VW;
        float m[VW] = {0}, m_part[VW] = {0}, of_total[VW], of_part[VW];
        for (int32_t r = 0; r < n; r++) {
            m[r] = total[r * stride + head_dim];
            m_part[r] = part[r * stride + head_dim];
        }
        const vf behind = load(m) - load(m_part), less = exp2_v(select_f(behind < splat(0), behind, -behind));
        store(of_total, select_f(behind < splat(0), less, splat(1)));
        store(of_part, select_f(behind < splat(0), splat(1), less));
        for (int32_t r = 0; r < n; r++) {
            float *t = total + r * stride;
            const float *p = part + r * stride, a = of_total[r], b = of_part[r];
            int32_t d = 0;
            for (; d + VW <= head_dim; d += VW) store(t + d, load(t + d) * splat(a) + load(p + d) * splat(b));
            for (; d < head_dim; d++) t[d] = t[d] * a + p[d] * b;
            t[head_dim] = m_part[r] > m[r] ? m_part[r] : m[r];
            t[head_dim + 1] = t[head_dim + 1] * a + p[head_dim + 1] * b;
        }
    }
}

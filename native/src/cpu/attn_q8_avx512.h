/* attn_q8_avx512.h: attention over Q8_0 tiles by products of bytes (VNNI), included by ops_simd.h after attn_simd.h.
 *
 *   queries  rounded to int8 like keys, 64 dimensions a scale
 *   scores   q.k in integers for each 64 dimensions, scaled and added in F32; then the log2 of the token's value scale, so
 *            that weights come out times that scale
 *   weights  255 * 2^(s - top of its 64 keys) as bytes; their sum from what was not rounded yet, over the values' scales
 *   values   p.v in integers for each 64 keys, scaled and added in F32
 *
 * Sums of integers are exact, so only the order of the few F32 operations counts: dimensions' groups, then groups of keys, both
 * from the first on, whatever the number of rows a pass holds.
 */

enum { Q8_KEYS = 2 * ATTN_TILE, Q8_GROUPS = ATTN_SEGMENT / Q8_KEYS, Q8_VECTORS = Q8_KEYS / VW }; /* keys that share a factor */

INLINE vi q8_load(const void *p, int64_t at) { return *(const vi_u *)(const void *)((const char *)p + at); }

/* acc += sums of 4 products. vi, not __m512i: between the two types GCC copies registers. */
INLINE vi q8_dot(vi acc, vi unsigned_bytes, vi signed_bytes) {
    return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)unsigned_bytes, (__m512i)signed_bytes);
}

INLINE __mmask16 q8_lanes(int32_t n) { return n >= VW ? 0xffff : n > 0 ? (__mmask16)((1u << n) - 1) : 0; }

static void attn_query_q8(void *q, const float *x, float scale, int32_t head_dim) {
    const int32_t n_groups = attn_q8_groups(head_dim), n_packs = (head_dim + 3) / 4;
    float *scales = (float *)q + n_packs;
    int32_t *corrections = (int32_t *)q + n_packs + n_groups;
    for (int32_t g = 0; g < n_groups; g++) {
        const int32_t first = g * ATTN_Q8_GROUP, left = head_dim - first, n = left < ATTN_Q8_GROUP ? left : ATTN_Q8_GROUP;
        scales[g] = rotated_i8((int8_t *)q + first, x + first, n) * scale;
        const __m512i bytes = _mm512_maskz_loadu_epi8(~0ull >> (64 - n), (int8_t *)q + first);
        /* keys lie 128 above what they mean */
        corrections[g] = -128 * _mm512_reduce_add_epi32(_mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), bytes));
    }
}

INLINE void q8_pass_scores(const int R, const int T, const attn_rows *x, int32_t r0, const void *const *k, const void *const *ahead,
                           float *s) {
    const int32_t n_groups = attn_q8_groups(x->head_dim), n_packs = (x->head_dim + 3) / 4;
    const int32_t *q = (const int32_t *)x->q + r0 * x->ld_q;
    const int64_t logs = n_groups * ATTN_TILE * 2, numbers = attn_q8_numbers(x->head_dim);
    for (int t = 0; ahead && t < T; t++) ask(ahead[t], 0, (int32_t)numbers);
    for (int32_t g = 0; g < n_groups; g++) {
        vi a[TILE_R][Q8_VECTORS];
        UNROLL(6)
        for (int r = 0; r < R; r++)
            UNROLL(4)
            for (int j = 0; j < T * NT; j++) a[r][j] = splat_i(q[r * x->ld_q + n_packs + n_groups + g]);
        const int32_t end = n_packs < (g + 1) * ATTN_Q8_GROUP / 4 ? n_packs : (g + 1) * ATTN_Q8_GROUP / 4;
        for (int32_t p = g * ATTN_Q8_GROUP / 4; p < end; p++) {
            vi qi[TILE_R];
            for (int t = 0; ahead && t < T; t++) ask(ahead[t], numbers + p * ATTN_TILE * 4, ATTN_TILE * 4);
            UNROLL(6)
            for (int r = 0; r < R; r++) qi[r] = splat_i(q[r * x->ld_q + p]);
            UNROLL(4)
            for (int j = 0; j < T * NT; j++) {
                const vi w = q8_load(k[j / NT], numbers + (p * ATTN_TILE + j % NT * VW) * 4);
                UNROLL(6)
                for (int r = 0; r < R; r++) a[r][j] = q8_dot(a[r][j], w, qi[r]);
            }
        }
        const int32_t last = g + 1 == n_groups && x->n_keys >= ATTN_SEGMENT;
        __m512 scale[Q8_VECTORS], sum[Q8_VECTORS];
        UNROLL(4)
        for (int j = 0; j < T * NT; j++) {
            scale[j] = (__m512)LOAD_F16((const uint16_t *)k[j / NT] + g * ATTN_TILE + j % NT * VW);
            sum[j] = _mm512_loadu_ps((const char *)k[j / NT] + logs + j % NT * VW * 4);
        }
        UNROLL(6)
        for (int r = 0; r < R; r++) {
            const __m512 of_row = _mm512_set1_ps(((const float *)q)[r * x->ld_q + n_packs + g]);
            float *to = s + (int64_t)r * ATTN_SEGMENT;
            __m512 top;
            UNROLL(4)
            for (int j = 0; j < T * NT; j++) {
                const __m512 so_far = g ? _mm512_loadu_ps(to + j * VW) : sum[j];
                const __m512 v = _mm512_fmadd_ps(_mm512_cvtepi32_ps((__m512i)a[r][j]), _mm512_mul_ps(scale[j], of_row), so_far);
                _mm512_storeu_ps(to + j * VW, v);
                top = j ? _mm512_max_ps(top, v) : v;
            }
            if (last) _mm512_storeu_ps(x->o + (r0 + r) * x->ld_o + (s - x->s) % ATTN_SEGMENT / Q8_KEYS * VW, top);
        }
    }
}

static void attn_scores_q8(const attn_rows *x, const void *const *k, int32_t tile, int32_t n_tiles) {
    const int64_t inverses = attn_q8_numbers(x->head_dim) - ATTN_TILE * 4;
    for (int32_t t = 0; t < n_tiles; t++) memcpy(x->inverse + (tile + t) * ATTN_TILE, (const char *)k[t] + inverses, ATTN_TILE * 4);
    for (int32_t t = 0; t < n_tiles;) {
        const int32_t two = n_tiles - t >= 2;
        for (int32_t r = 0, n; r < x->n_rows; r += n) {
            n = pass_rows(x->n_rows - r);
            float *s = x->s + (int64_t)r * ATTN_SEGMENT + (tile + t) * ATTN_TILE;
            const void *const *ahead = x->ahead && !r ? x->ahead + t : NULL;
#define CALL(R) \
    if (two) q8_pass_scores(R, 2, x, r, k + t, ahead, s); \
    else q8_pass_scores(R, 1, x, r, k + t, ahead, s);
            PASS(n, CALL)
#undef CALL
        }
        t += two ? 2 : 1;
    }
}

/* Greatest of 16 lanes of each of four vectors, as 4 numbers four times over. */
INLINE __m512 q8_tops(__m512 a, __m512 b, __m512 c, __m512 d) {
    const __m512 ab = _mm512_max_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const __m512 cd = _mm512_max_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    __m512 v = _mm512_max_ps((__m512)_mm512_unpacklo_pd((__m512d)ab, (__m512d)cd), (__m512)_mm512_unpackhi_pd((__m512d)ab, (__m512d)cd));
    v = _mm512_max_ps(v, _mm512_shuffle_f32x4(v, v, 0x4e));
    return _mm512_max_ps(v, _mm512_shuffle_f32x4(v, v, 0xb1));
}

INLINE __m512 q8_of_group(__m512 v, const int g) {
    return g == 0 ? _mm512_permute_ps(v, 0x00) : g == 1 ? _mm512_permute_ps(v, 0x55) : g == 2 ? _mm512_permute_ps(v, 0xaa) : _mm512_permute_ps(v, 0xff);
}

/* Of the keys that row r sees: the vector of tops of each group. */
INLINE __m512 q8_row_tops(const attn_rows *x, int32_t r, int32_t n) {
    const float *s = x->s + (int64_t)r * ATTN_SEGMENT;
    __m512 top[Q8_GROUPS];
    for (int g = 0; g < Q8_GROUPS; g++) {
        if (x->n_keys >= ATTN_SEGMENT) { /* scores left them there */
            top[g] = _mm512_loadu_ps(x->o + r * x->ld_o + g * VW);
            continue;
        }
        top[g] = _mm512_set1_ps(-INFINITY);
        for (int j = 0; j < Q8_VECTORS; j++) {
            const __mmask16 seen = q8_lanes(n - g * Q8_KEYS - j * VW);
            top[g] = _mm512_max_ps(_mm512_mask_loadu_ps(top[g], seen, s + g * Q8_KEYS + j * VW), top[g]);
        }
    }
    return q8_tops(top[0], top[1], top[2], top[3]);
}

/* 2^x to 1.7e-3, less than half a byte's step: a parabola in what floor leaves, scaled by 2^floor. The same goes into the sum. */
INLINE vf q8_exp2(vf x) {
    const vf r = EXP2_REST(x);
    return (vf)_mm512_scalef_ps((__m512)VFMA(VFMA(splat(0.3371884f), r, splat(0.65763666f)), r, splat(1.00172485f)), (__m512)x);
}

INLINE __m512 q8_greatest(__m512 tops) {
    const __m512 top = _mm512_max_ps(tops, _mm512_permute_ps(tops, 0xb1));
    return _mm512_max_ps(top, _mm512_permute_ps(top, 0x4e));
}

/* What a group's integers are multiplied with, and what is taken from its scores: weights are 255 at the most. */
INLINE __m512 q8_factors(__m512 tops, __m512 top) { return _mm512_mul_ps((__m512)q8_exp2((vf)_mm512_sub_ps(tops, top)), _mm512_set1_ps(1.0f / 255.0f)); }
INLINE __m512 q8_from(__m512 tops) { return _mm512_sub_ps(tops, _mm512_set1_ps(7.99672390f)); } /* where q8_exp2 is 255 */

enum { Q8_FACTORS = ATTN_SEGMENT / 4 }; /* where a row's groups' factors lie, in floats: behind its 256 bytes of weights */

INLINE void q8_row_weights(const attn_rows *x, int32_t r, const int whole) {
    const int32_t n = whole ? ATTN_SEGMENT : keys_of(x, r), n_all = whole ? ATTN_SEGMENT : keys_of(x, x->n_rows - 1);
    float *s = x->s + (int64_t)r * ATTN_SEGMENT, *end = x->o + r * x->ld_o + x->head_dim;
    const __m512 tops = q8_row_tops(x, r, n);
    const __m512 top = q8_greatest(tops), factors = q8_factors(tops, top), from = q8_from(tops);
    __m512 total = _mm512_setzero_ps();
    for (int g = 0; g < Q8_GROUPS; g++) {
        if (g * Q8_KEYS >= n_all) break;
        const __m512 base = q8_of_group(from, g);
        __m512 sum = _mm512_setzero_ps();
        __m512i w[Q8_VECTORS];
        UNROLL(4)
        for (int j = 0; j < Q8_VECTORS; j++) {
            const int32_t at = g * Q8_KEYS + j * VW;
            const __mmask16 seen = whole ? 0xffff : q8_lanes(n - at);
            const __m512 p = (__m512)q8_exp2((vf)_mm512_sub_ps(_mm512_loadu_ps(s + at), base));
            sum = _mm512_mask3_fmadd_ps(p, _mm512_loadu_ps(x->inverse + at), sum, seen);
            w[j] = _mm512_maskz_cvtps_epi32(seen, p);
        }
        total = _mm512_fmadd_ps(sum, q8_of_group(factors, g), total);
        _mm512_storeu_si512((char *)s + g * Q8_KEYS,
                            _mm512_packus_epi16(_mm512_packus_epi32(w[0], w[1]), _mm512_packus_epi32(w[2], w[3])));
    }
    _mm_storeu_ps(s + Q8_FACTORS, _mm512_castps512_ps128(factors));
    end[0] = _mm512_cvtss_f32(top);
    end[1] = SUM_LANES((vf)total);
}

static void attn_weights_q8(const attn_rows *x) {
    for (int32_t r = 0; r < x->n_rows; r++) {
        if (x->n_keys >= ATTN_SEGMENT) q8_row_weights(x, r, 1);
        else q8_row_weights(x, r, 0);
    }
}

/* Group g's integers, times the group's factors, to the rows' sums. */
INLINE void q8_add(const int R, const int N, const attn_rows *x, int32_t r0, int32_t g, int32_t d0, __mmask16 tail, vi a[][PV]) {
    const float *s = x->s + (int64_t)r0 * ATTN_SEGMENT;
    UNROLL(6)
    for (int r = 0; r < R; r++) {
        float *to = x->o + (r0 + r) * x->ld_o + d0;
        const __m512 factor = _mm512_set1_ps(s[r * ATTN_SEGMENT + Q8_FACTORS + g]);
        UNROLL(4)
        for (int i = 0; i < N; i++) {
            const __mmask16 m = N > 1 ? 0xffff : tail;
            const __m512 f = _mm512_cvtepi32_ps((__m512i)a[r][i]);
            const __m512 so_far = g ? _mm512_maskz_loadu_ps(m, to + i * VW) : _mm512_setzero_ps();
            _mm512_mask_storeu_ps(to + i * VW, m, _mm512_fmadd_ps(f, factor, so_far));
        }
    }
}

/* N vectors of dimensions from d0 on, the last of `tail` lanes, of the tiles of group g. */
INLINE void q8_pass_values(const int R, const int N, const attn_rows *x, int32_t r0, const void *const *v,
                           const void *const *ahead, int32_t g, int32_t n_tiles, int32_t d0, __mmask16 tail) {
    vi a[TILE_R][PV];
    const float *s = x->s + (int64_t)r0 * ATTN_SEGMENT;
    UNROLL(6)
    for (int r = 0; r < R; r++)
        UNROLL(4)
        for (int i = 0; i < N; i++) a[r][i] = (vi){0};
    const int32_t *w = (const int32_t *)(const void *)s + g * VW; /* in the order that packus left */
    const int64_t step = (int64_t)x->head_dim * 4;
    for (int32_t p = 0; p < n_tiles * 8; p++) {
        const char *vp = (const char *)v[p / 8] + (p % 8) * step + d0 * 4;
        const int32_t *pw = w + p % 4 * 4 + p / 4;
        vi pr[TILE_R];
        if (ahead) ask(ahead[p / 8], (p % 8) * step + d0 * 4, N * VW * 4);
        UNROLL(6)
        for (int r = 0; r < R; r++) pr[r] = splat_i(pw[r * ATTN_SEGMENT]);
        UNROLL(4)
        for (int i = 0; i < N; i++) {
            const vi vv = N > 1 ? q8_load(vp, i * VW * 4) : (vi)_mm512_maskz_loadu_epi32(tail, vp);
            UNROLL(6)
            for (int r = 0; r < R; r++) a[r][i] = q8_dot(a[r][i], pr[r], vv);
        }
    }
    q8_add(R, N, x, r0, g, d0, tail, a);
}

/* Of the dimensions from `first` on. */
INLINE void q8_values(const attn_rows *x, const void *const *v, int32_t tile, int32_t n_tiles, int32_t first) {
    for (int32_t t = 0; t < n_tiles; t += 2)
        for (int32_t r = 0, n; r < x->n_rows; r += n) {
            const int32_t g = (tile + t) / 2, two = n_tiles - t < 2 ? 1 : 2;
            const void *const *ahead = x->ahead && !r ? x->ahead + t : NULL;
            int32_t d = first;
            n = pass_rows(x->n_rows - r);
#define WIDE(R) q8_pass_values(R, PV, x, r, v + t, ahead, g, two, d, 0xffff);
#define NARROW(R) q8_pass_values(R, 1, x, r, v + t, ahead, g, two, d, 0xffff);
#define TAIL(R) q8_pass_values(R, 1, x, r, v + t, ahead, g, two, d, q8_lanes(x->head_dim - d));
            DIMENSIONS(n)
#undef WIDE
#undef NARROW
#undef TAIL
        }
}

static void attn_values_q8(const attn_rows *x, const void *const *v, int32_t tile, int32_t n_tiles) { q8_values(x, v, tile, n_tiles, 0); }

/* See attn_weigh_bf16: while a group of keys' values is added for WEIGH_R rows, the weights of one of the next rows are computed. */
_Static_assert((int)WEIGH_R == (int)Q8_GROUPS && (int)Q8_KEYS == 4 * VW, "one next row for each group, a vector of it for each pack of values");

INLINE const char *q8_step(vi a[WEIGH_R][PV], const char *values, int64_t step, const int32_t *w) {
    vi p[WEIGH_R];
    UNROLL(4)
    for (int i = 0; i < WEIGH_R; i++) p[i] = splat_i(w[i * ATTN_SEGMENT]);
    UNROLL(4)
    for (int i = 0; i < PV; i++) {
        const vi vv = q8_load(values, i * VW * 4);
        UNROLL(4)
        for (int k = 0; k < WEIGH_R; k++) a[k][i] = q8_dot(a[k][i], p[k], vv);
    }
    values += step;
    __asm__("" : "+r"(values));
    return values;
}

INLINE void q8_weigh_pass(const attn_rows *x, int32_t r0, const void *const *v) {
    const float *s = x->s + (int64_t)r0 * ATTN_SEGMENT;
    const int64_t step = (int64_t)x->head_dim * 4;
    for (int32_t g = 0; g < Q8_GROUPS; g++) {
        const int32_t r = r0 + WEIGH_R + g;
        float *next = x->s + (int64_t)r * ATTN_SEGMENT, *end = x->o + r * x->ld_o + x->head_dim, factor[VW], from[VW];
        const __m512 tops = q8_row_tops(x, r, ATTN_SEGMENT), top = q8_greatest(tops), factors = q8_factors(tops, top);
        _mm512_storeu_ps(factor, factors);
        _mm512_storeu_ps(from, q8_from(tops));
        vf total = {0};
        vi a[WEIGH_R][PV];
        UNROLL(4)
        for (int i = 0; i < WEIGH_R; i++)
            UNROLL(4)
            for (int j = 0; j < PV; j++) a[i][j] = (vi){0};
        for (int32_t n = 0; n < Q8_GROUPS; n++) {
            const char *values = (const char *)v[2 * g + n / 2] + n % 2 * 4 * step;
            const int32_t *w = (const int32_t *)(const void *)s + g * VW + n;
            const vf base = splat(from[n]);
            vf sum = {0};
            vi pair[2], odd;
            UNROLL(4)
            for (int j = 0; j < Q8_VECTORS; j++) {
                values = q8_step(a, values, step, w + j * 4);
                const vf e = q8_exp2(load(next + n * Q8_KEYS + j * VW) - base);
                sum = VFMA(e, load(x->inverse + n * Q8_KEYS + j * VW), sum);
                const vi b = (vi)_mm512_cvtps_epi32((__m512)e);
                if (j % 2) pair[j / 2] = (vi)_mm512_packus_epi32((__m512i)odd, (__m512i)b);
                else odd = b;
            }
            total = VFMA(sum, splat(factor[n]), total);
            _mm512_storeu_si512((char *)next + n * Q8_KEYS, _mm512_packus_epi16((__m512i)pair[0], (__m512i)pair[1]));
        }
        _mm_storeu_ps(next + Q8_FACTORS, _mm512_castps512_ps128(factors));
        end[0] = _mm512_cvtss_f32(top);
        end[1] = SUM_LANES(total);
        q8_add(WEIGH_R, PV, x, r0, g, 0, 0xffff, a);
    }
}

WEIGH(attn_weigh_q8, attn_weights_q8, q8_weigh_pass, q8_values)

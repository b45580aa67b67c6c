/* tiles_avx512.c: register tiles of 1 x nt and 2 x 6 (panels x tokens) over expanded panels, BF16 pairs and F32 values; of the
 * latter two also 4 x 6, whose chains are long and need to be many. One instance per class and width: accumulators must be
 * registers, so every size is a constant. */
#include "tiles_avx512.h"

#include "avx512.h"

INLINE void load_acc(const mat_part *p, const mat_tile *x, const int n_p, const int nt, vf *acc)
{
#pragma GCC unroll 4
    for (int r = 0; r < n_p; r++)
#pragma GCC unroll 12
        for (int t = 0; t < nt; t++)
            acc[r * nt + t] = p->first || t >= x->n_valid ? _mm512_setzero_ps() : _mm512_loadu_ps(p->c + t * p->ld + r * MAT_LANES);
    if (n_p == 1)
        return;
#pragma GCC unroll 12
    for (int t = 0; t < nt; t++) /* the next tile's, a row's width apart: often out of L2 */
#pragma GCC unroll 4
        for (int r = 0; r < n_p; r++)
            __builtin_prefetch(p->c + (nt + t) * p->ld + r * MAT_LANES, 1, 3);
}

INLINE void store_acc(const mat_part *p, const mat_tile *x, const int n_p, const int nt, const vf *acc)
{
#pragma GCC unroll 12
    for (int t = 0; t < nt; t++) {
        if (t >= x->n_valid)
            return;
#pragma GCC unroll 4
        for (int r = 0; r < n_p; r++)
            _mm512_storeu_ps(p->c + t * p->ld + r * MAT_LANES, acc[r * nt + t]);
    }
}

INLINE void blocks(const int class, const int n_p, const int nt, const mat_part *p, const mat_tile *x)
{
    const int n_scales = n_scales_of(class);
    const bool halves = class == MAT_S16 || class == MAT_SM16;
    const uint8_t *w = p->w, *q = x->x, *h = x->halves;
    const float *scales = p->scales;
    vf acc[32];
    load_acc(p, x, n_p, nt, acc);
    for (int64_t b = p->n_values / 32; b > 0; b--) {
        vi codes[16];
        vf s[8];
        const float *multiples[2];
#pragma GCC unroll 4
        for (int r = 0; r < n_p; r++) {
            multiples[r] = scales + (size_t)r * p->scale_step;
#pragma GCC unroll 8
            for (int g = 0; g < 8; g++)
                codes[8 * r + g] = load_i(w + (size_t)r * p->step + g * 64);
#pragma GCC unroll 4
            for (int i = has_multiples(class) ? 1 : 0; i < n_scales; i++)
                s[4 * r + i] = _mm512_load_ps(scales + (size_t)r * p->scale_step + (n_expanded_of(class) - n_scales + i) * MAT_LANES);
        }
        const act_block a = act_at(q, h, nt);
        block_32(class, n_p, nt, 0, codes, s, has_multiples(class) ? multiples : NULL, &a, acc);
        w += 512;
        scales += n_expanded_of(class) * MAT_LANES;
        q += nt * 44;
        if (halves)
            h += nt * 16;
    }
    store_acc(p, x, n_p, nt, acc);
}

INLINE void floats(const int n_p, const int nt, const mat_part *p, const mat_tile *x)
{
    const uint8_t *w = p->w;
    const float *v = (const float *)x->x;
    const size_t ahead = n_p == 1 ? bytes_ahead() : 0; /* two panels: many tiles read them */
    vf acc[32];
    load_acc(p, x, n_p, nt, acc);
    for (int64_t k = p->n_values; k > 0; k--, w += 64, v += nt) {
        ask_ahead(ahead, nt <= 4, w, 64);
        vf a[4];
#pragma GCC unroll 4
        for (int r = 0; r < n_p; r++)
            a[r] = _mm512_load_ps(w + (size_t)r * p->step);
#pragma GCC unroll 12
        for (int t = 0; t < nt; t++) {
            const vf b = all_f(v + t);
#pragma GCC unroll 4
            for (int r = 0; r < n_p; r++)
                acc[r * nt + t] = _mm512_fmadd_ps(a[r], b, acc[r * nt + t]);
        }
    }
    store_acc(p, x, n_p, nt, acc);
}

/* n_values counts single values: a step is a pair. has_dot: vdpbf16ps is there. */
INLINE void pairs(const bool has_dot, const int n_p, const int nt, const mat_part *p, const mat_tile *x)
{
    const uint8_t *w = p->w, *v = x->x;
    const size_t ahead = n_p == 1 ? bytes_ahead() : 0;
    const vi high = _mm512_set1_epi32((int)0xffff0000u);
    vf acc[32];
    load_acc(p, x, n_p, nt, acc);
    for (int64_t k = p->n_values / 2; k > 0; k--, w += 64, v += 4 * nt) {
        ask_ahead(ahead, nt <= 4, w, 64);
        vi a[4];
#pragma GCC unroll 4
        for (int r = 0; r < n_p; r++)
            a[r] = load_i(w + (size_t)r * p->step);
#pragma GCC unroll 12
        for (int t = 0; t < nt; t++) {
            const vi b = all_i(v + 4 * t);
#pragma GCC unroll 4
            for (int r = 0; r < n_p; r++) {
                vf s = acc[r * nt + t];
                if (has_dot) {
                    s = _mm512_dpbf16_ps(s, (__m512bh)a[r], (__m512bh)b);
                } else {
                    s = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(a[r], 16)),
                                        _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)), s);
                    s = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(a[r], high)),
                                        _mm512_castsi512_ps(_mm512_and_si512(b, high)), s);
                }
                acc[r * nt + t] = s;
            }
        }
    }
    store_acc(p, x, n_p, nt, acc);
}

/* What the tiles of a run have in common besides their part. */
typedef struct tile_run {
    int32_t n_tiles;
    size_t x_step, halves_step;
    const mat_ahead *ahead;
} tile_run;

/* Tile i's share of what comes after the run. */
INLINE void ask_for_share(const tile_run *run, const int32_t i)
{
    const mat_ahead *a = run->ahead;
    const int64_t all = (int64_t)a->n_runs * a->n_lines;
    int32_t at = (int32_t)(all * i / run->n_tiles);
    const int32_t end = (int32_t)(all * (i + 1) / run->n_tiles);
    for (int32_t r = a->n_lines ? at / a->n_lines : 0; at < end; r++)
        for (; at < end && at < (r + 1) * a->n_lines; at++)
            _mm_prefetch((const char *)a->p + (size_t)r * a->step + (size_t)(at - r * a->n_lines) * 64, _MM_HINT_T1);
}

/* kind: a class, or PLAIN_PAIRS for BF16 without vdpbf16ps. */
enum { PLAIN_PAIRS = MAT_N_CLASSES };

INLINE void run_of(const int kind, const int n_p, const int nt, const mat_part *p, const mat_tile *x, const tile_run *run)
{
    mat_part part = *p;
    mat_tile tile = *x;
    for (int32_t i = 0, left = x->n_valid; i < run->n_tiles; i++, left -= nt) {
        ask_for_share(run, i);
        tile.n_valid = left < nt ? left : nt;
        if (kind == MAT_PAIRS || kind == PLAIN_PAIRS)
            pairs(kind == MAT_PAIRS, n_p, nt, &part, &tile);
        else if (kind == MAT_FLOATS)
            floats(n_p, nt, &part, &tile);
        else
            blocks(kind, n_p, nt, &part, &tile);
        tile.x += run->x_step;
        tile.halves += tile.halves ? run->halves_step : 0;
        part.c += nt * part.ld;
    }
}

#define WIDTHS(X) X(1, 1) X(1, 2) X(1, 3) X(1, 4) X(1, 6) X(1, 8) X(1, 10) X(1, 12) X(2, 6)

#define RUN(name, kind, n_p, nt) \
    static void name##_##n_p##_##nt(const mat_part *p, const mat_tile *x, const tile_run *run) { run_of(kind, n_p, nt, p, x, run); }
#define FLOATS(n_p, nt) RUN(pairs, MAT_PAIRS, n_p, nt) RUN(floats, MAT_FLOATS, n_p, nt) RUN(plain, PLAIN_PAIRS, n_p, nt)
#define INSTANCES(n_p, nt) \
    RUN(s32, MAT_S32, n_p, nt) RUN(sm32, MAT_SM32, n_p, nt) RUN(s16, MAT_S16, n_p, nt) RUN(sm16, MAT_SM16, n_p, nt) FLOATS(n_p, nt)
WIDTHS(INSTANCES)
FLOATS(4, 6)

typedef void (*tiles_fn)(const mat_part *, const mat_tile *, const tile_run *);

#define ROW(n_p, nt) {s32_##n_p##_##nt, sm32_##n_p##_##nt, s16_##n_p##_##nt, sm16_##n_p##_##nt, pairs_##n_p##_##nt, floats_##n_p##_##nt, plain_##n_p##_##nt},
static const tiles_fn kernels[][MAT_N_CLASSES + 1] = { /* in order of WIDTHS: 1 .. 4, 6 .. 12 by two, 2 panels, 4 */
    WIDTHS(ROW) {NULL, NULL, NULL, NULL, pairs_4_6, floats_4_6, plain_4_6}};

void tiles_avx512(int32_t type, const mat_part *part, const mat_tile *x, int32_t n_tiles, size_t x_step, size_t halves_step,
                  const mat_ahead *ahead)
{
    static const mat_ahead nothing;
    const int32_t class = mat_layout_of(type)->class;
    const int32_t kind = class == MAT_PAIRS && !__builtin_cpu_supports("avx512bf16") ? PLAIN_PAIRS : class;
    tile_run run = {n_tiles, x_step, halves_step, ahead ? ahead : &nothing};
    mat_part p = *part;
    for (int32_t left = part->n_panels, n; left > 0; left -= n) {
        n = x->nt != MAT_TILE || left == 1 ? 1 : left >= MAT_WIDE && class >= MAT_PAIRS ? MAT_WIDE : 2;
        kernels[n == MAT_WIDE ? 9 : n == 2 ? 8 : x->nt <= 4 ? x->nt - 1 : x->nt / 2 + 1][kind](&p, x, &run);
        p.w += (size_t)n * part->step;
        p.scales += (size_t)n * part->scale_step;
        p.c += n * MAT_LANES;
        run.ahead = &nothing;
    }
}

void tile_avx512(int32_t type, const mat_part *part, const mat_tile *x) { tiles_avx512(type, part, x, 1, 0, 0, NULL); }

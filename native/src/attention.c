/* attention.c: who computes which part of attention, and in which order parts are added.
 *
 * One order for every row, fixed by its position: keys in segments of 256 (8 KV blocks), a softmax in each, segments joined
 * from the first to the last. So the bits of a row don't depend on the way it is worked off:
 *
 *   group    rows of one sequence at successive positions within one block: all see the same tiles, and only of the last
 *            one a different number of keys
 *   looped   item = (group, kv head): all segments, joined as they come
 *   split    item = (group, segment, kv head): parts go to memory, a second stage joins them. For few rows over many keys:
 *            more items than heads, and each thread reads one rising range of pages
 */
#include "attention.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "error.h"

enum { TILE = ATTN_TILE, SEGMENT_TILES = ATTN_SEGMENT_TILES, SEGMENT = ATTN_SEGMENT };
enum { KEY_TILES = 2 };                      /* whose scores are computed at once */
enum { FEW_TOKENS = 4 };                     /* groups up to here are split, and take several heads at once */
enum { FAR_TILES = 2 };                      /* how far few rows look beyond the tiles that come next */
enum { MAX_FETCH = 256 << 10 };              /* bytes asked for at once */
enum { MAX_PART_FLOATS = 4 << 20 };          /* of parts in memory; what doesn't fit is looped */

_Static_assert((int)ATTN_TILE == (int)MILAD_KV_BLOCK, "a tile is a KV block");

typedef struct group {
    int32_t row, n_tokens, position; /* of the first row */
    int32_t n_segments;
    const int32_t *blocks;
    int32_t first_item;
    int64_t part;                    /* where its parts begin, or -1: looped */
} group;

typedef struct scratch {
    float *q, *s, *o, *total, *k, *v, *inverse;
} scratch;

struct attention {
    const hparams *hp;
    const ops *ops;
    pool *pool;
    const kv *kv;
    int32_t n_groups, n_items, n_split, max_rows, per_head; /* per_head: query heads per kv head */
    int32_t bytes;                   /* tiles and queries are multiplied as bytes */
    int64_t ld_q;                    /* of gathered queries: head_dim, or pairs of BF16, or packs of bytes, their scales and sums */
    void (*weigh)(const attn_rows *x, const void *const *v); /* for whole segments; NULL: in two steps */
    int64_t stride;                  /* floats from part to part: o, m, l, padding */
    int64_t n_part_floats;
    group *groups;
    float *parts;
    scratch *threads;
    float *memory;                   /* of the threads' scratch */
    size_t n_bytes;
    int32_t layer;                   /* the run's arguments */
    const float *q;
    float *out;
};

static int64_t round16(int64_t n) { return (n + 15) / 16 * 16; }

int32_t attention_open(const hparams *hp, const ops *o, pool *p, const kv *c, int32_t max_rows, attention **out) {
    attention *a = calloc(1, sizeof *a);
    if (!a) return fail(MILAD_E_MEMORY, "out of memory");
    const int32_t n_threads = pool_threads(p);
    a->hp = hp;
    a->ops = o;
    a->pool = p;
    a->kv = c;
    a->max_rows = max_rows;
    a->per_head = hp->n_head / hp->n_head_kv;
    a->bytes = kv_type(c) == KV_Q8_0 && o->attn_scores_q8;
    a->ld_q = kv_type(c) == KV_BF16 ? (hp->head_dim + 1) / 2 : hp->head_dim;
    if (a->bytes) a->ld_q = (hp->head_dim + 3) / 4 + attn_q8_groups(hp->head_dim) * 2;
    a->weigh = a->bytes ? o->attn_weigh_q8 : kv_type(c) == KV_BF16 ? o->attn_weigh_bf16 : NULL;
    a->stride = round16((a->bytes && hp->head_dim < 64 ? 64 : hp->head_dim) + 2);
    const int64_t n_segments = ((int64_t)kv_n_blocks(c) + SEGMENT_TILES - 1) / SEGMENT_TILES;
    const int64_t row_floats = n_segments * hp->n_head * a->stride; /* at most 2^28 * 2^16 * 2^12: the model checks its sizes */
    const int64_t want = row_floats * (max_rows < 32 ? max_rows : 32);
    a->n_part_floats = want < MAX_PART_FLOATS ? want : MAX_PART_FLOATS;
    const int64_t head_rows = (int64_t)TILE * a->per_head, few_rows = (int64_t)FEW_TOKENS * hp->n_head;
    const int64_t rows = head_rows > few_rows ? head_rows : few_rows, tile = round16((int64_t)TILE * hp->head_dim);
    const int64_t row = round16(hp->head_dim);
    const int64_t per_thread = rows * (row + SEGMENT + 2 * a->stride) + (KEY_TILES + 1) * tile + (int64_t)hp->n_head_kv * SEGMENT;
    a->groups = calloc((size_t)max_rows, sizeof *a->groups);
    a->parts = aligned_alloc(64, (size_t)round16(a->n_part_floats) * 4);
    a->threads = calloc((size_t)n_threads, sizeof *a->threads);
    a->memory = aligned_alloc(64, (size_t)(per_thread * n_threads) * 4);
    a->n_bytes = (size_t)max_rows * sizeof *a->groups + (size_t)(a->n_part_floats + per_thread * n_threads) * 4;
    if (!a->groups || !a->parts || !a->threads || !a->memory) {
        attention_close(a);
        return fail(MILAD_E_MEMORY, "no memory for attention over %d rows", max_rows);
    }
    for (int32_t t = 0; t < n_threads; t++) {
        scratch *s = &a->threads[t];
        s->q = a->memory + per_thread * t;
        s->s = s->q + rows * row;
        s->o = s->s + rows * SEGMENT;
        s->total = s->o + rows * a->stride;
        s->k = s->total + rows * a->stride;
        s->v = s->k + KEY_TILES * tile;
        s->inverse = s->v + tile;
    }
    *out = a;
    return MILAD_OK;
}

void attention_close(attention *a) {
    if (!a) return;
    free(a->groups);
    free(a->parts);
    free(a->threads);
    free(a->memory);
    free(a);
}

size_t attention_bytes(const attention *a) { return a->n_bytes; }

void attention_plan(attention *a, const milad_row *rows, int32_t n_rows, const milad_sequence *sequences) {
    a->n_groups = 0;
    for (int32_t r = 0; r < n_rows; r++) {
        group *g = a->n_groups ? &a->groups[a->n_groups - 1] : NULL;
        const milad_row *prior = r ? &rows[r - 1] : NULL;
        if (prior && prior->sequence == rows[r].sequence && prior->position + 1 == rows[r].position && rows[r].position % TILE) {
            g->n_tokens++;
            continue;
        }
        g = &a->groups[a->n_groups++];
        *g = (group){.row = r, .n_tokens = 1, .position = rows[r].position, .n_segments = rows[r].position / SEGMENT + 1,
                     .blocks = sequences[rows[r].sequence].blocks, .part = -1};
    }
    const int32_t n_head_kv = a->hp->n_head_kv;
    const int32_t scarce = (int64_t)a->n_groups * n_head_kv < 4 * (int64_t)pool_threads(a->pool);
    int64_t used = 0;
    a->n_items = a->n_split = 0;
    for (int32_t i = 0; i < a->n_groups; i++) {
        group *g = &a->groups[i];
        const int64_t floats = (int64_t)g->n_segments * g->n_tokens * a->hp->n_head * a->stride;
        g->first_item = a->n_items;
        if (g->n_segments > 1 && (g->n_tokens <= FEW_TOKENS || scarce) && used + floats <= a->n_part_floats) {
            g->part = used;
            used += floats;
            a->n_split++;
        }
        a->n_items += n_head_kv * (g->part < 0 ? 1 : g->n_segments);
    }
}

/* Queries of heads h0..h1-1 of a group, scaled: s->q[h][token][query head of h]. */
static void gather_queries(const attention *a, const group *g, int32_t h0, int32_t h1, const scratch *s) {
    const int32_t d = a->hp->head_dim, n = a->per_head, bf16 = kv_type(a->kv) == KV_BF16, rotates = kv_type(a->kv) == KV_Q8_0;
    const float scale = a->hp->attn_scale * 1.44269504f; /* log2(e): weights are powers of 2 */
    float *q = s->q;
    for (int32_t h = h0; h < h1; h++)
        for (int32_t t = 0; t < g->n_tokens; t++)
            for (int32_t i = 0; i < n; i++, q += a->ld_q) {
                const float *from = a->q + ((int64_t)(g->row + t) * a->hp->n_head + (int64_t)h * n + i) * d;
                if (a->bytes) {
                    a->ops->attn_query_q8(q, from, scale, d);
                    continue;
                }
                float *scaled = bf16 ? s->k : q; /* no tile is expanded yet */
                a->ops->scale(scaled, from, d, scale);
                if (rotates) a->ops->rotate(scaled, d);
                if (!bf16) continue;
                q[a->ld_q - 1] = 0; /* the other half of an odd dimension's pair */
                a->ops->bf16_from_f32((uint16_t *)(void *)q, scaled, d);
            }
}

/* Whether tiles of this type are expanded to F32 first. */
static int32_t expands(const attention *a, int32_t n_rows) {
    const int32_t type = kv_type(a->kv);
    return (type == KV_Q8_0 && !a->bytes) || (type == KV_F16 && n_rows > ATTN_ROWS_DIRECT);
}

/* Scores of tiles i .. i + n - 1 of the segment that lies in `blocks`; n is at most KEY_TILES. */
static void tile_scores(const attention *a, const int32_t *blocks, int32_t i, int32_t n, int32_t head, const attn_rows *x,
                        const scratch *s) {
    const int32_t type = kv_type(a->kv), expand = expands(a, x->n_rows);
    const void *k[KEY_TILES];
    for (int32_t t = 0; t < n; t++) {
        float *expanded = s->k + t * round16((int64_t)TILE * x->head_dim);
        if (expand) kv_expand(a->kv, a->ops, a->layer, blocks[i + t], head, expanded, NULL);
        k[t] = expand ? expanded : kv_keys(a->kv, a->layer, blocks[i + t], head);
    }
    if (a->bytes) a->ops->attn_scores_q8(x, k, i, n);
    else if (type == KV_BF16) a->ops->attn_scores_bf16(x, k, i, n);
    else if (type == KV_F16 && !expand) a->ops->attn_scores_f16(x, k, i, n);
    else a->ops->attn_scores_f32(x, k, i, n);
}

/* Adds the values of those tiles; n is 1 where tiles are expanded. */
static void tile_values(const attention *a, const int32_t *blocks, int32_t i, int32_t n, int32_t head, const attn_rows *x,
                        const scratch *s) {
    const int32_t type = kv_type(a->kv), expand = expands(a, x->n_rows);
    const void *v[SEGMENT_TILES] = {s->v};
    if (expand) kv_expand(a->kv, a->ops, a->layer, blocks[i], head, NULL, s->v);
    for (int32_t t = 0; t < n && !expand; t++) v[t] = kv_values(a->kv, a->layer, blocks[i + t], head);
    if (a->bytes) a->ops->attn_values_q8(x, v, i, n);
    else if (type == KV_BF16) a->ops->attn_values_bf16(x, v, i, n);
    else if (type == KV_F16 && !expand) a->ops->attn_values_f16(x, v, i, n);
    else a->ops->attn_values_f32(x, v, i, n);
}

/* Into L2: what a core may wait for at its L1 is too little to have a tile and more under way (one thread, 4,096 tokens deep: 11 GB/s
 * into L1, 22 to 26 into L2). */
static void fetch(const void *p, size_t n_bytes) {
    for (size_t i = 0; i < n_bytes; i += 64) __builtin_prefetch((const char *)p + i, 0, 2);
}

/* The order in which few rows read a segment and then the next one: keys, `step` tiles at a time, all heads of those; values
 * likewise. */
typedef struct reader {
    const int32_t *blocks;
    int32_t n, n_beyond;             /* tiles of the segment, and after it */
    int32_t h0, h1, step;
    int32_t i, h, values;            /* what comes next */
} reader;

/* At the end of the sequence its last tile again. */
static const void *next_tile(const attention *a, reader *r) {
    const void *p = (r->values ? kv_values : kv_keys)(a->kv, a->layer, r->blocks[r->i], r->h);
    if (r->i + 1 < r->n && (r->i + 1) % r->step) {
        r->i++;
    } else if (r->h + 1 < r->h1) {
        r->i -= r->i % r->step;
        r->h++;
    } else if (r->i + 1 < r->n) {
        r->h = r->h0;
        r->i++;
    } else if (!r->values || r->n_beyond) {
        if (r->values) {
            r->blocks += r->n;
            r->n = r->n_beyond < SEGMENT_TILES ? r->n_beyond : SEGMENT_TILES;
            r->n_beyond -= r->n;
        }
        r->values = !r->values;
        r->h = r->h0;
        r->i = 0;
    }
    return p;
}

/* A tile further ahead in one go; returns the next one, to be asked for line by line. */
static const void *look_ahead(const attention *a, reader *near, reader *far) {
    const size_t n_bytes = far->values ? kv_value_bytes(a->kv) : kv_key_bytes(a->kv);
    fetch(next_tile(a, far), n_bytes);
    return next_tile(a, near);
}

/* The h-th head's rows. */
static attn_rows at_head(const attn_rows *all, const attention *a, const scratch *s, float *o, int32_t h) {
    attn_rows x = *all;
    const int64_t r = (int64_t)h * x.n_rows;
    x.q = s->q + r * a->ld_q;
    x.s = s->s + r * SEGMENT;
    x.o = o + r * a->stride;
    x.inverse = s->inverse + h * SEGMENT;
    return x;
}

/* Segment `segment` of heads h0..h1-1 into parts o[h][token][query head], queries gathered in s->q. Few rows wait for memory:
 * heads inside, tiles outside, as pages lie. A tile further ahead is asked for at once, the next one line by line while this one is
 * read. Many rows keep their sums in registers over all tiles of values. */
static void run_segment(const attention *a, const group *g, int32_t segment, int32_t h0, int32_t h1, float *o, const scratch *s) {
    const int32_t left = g->position / TILE + 1 - segment * SEGMENT_TILES, n = left < SEGMENT_TILES ? left : SEGMENT_TILES;
    const int32_t *blocks = g->blocks + segment * SEGMENT_TILES, few = g->n_tokens <= FEW_TOKENS;
    const attn_rows all = {.ld_q = a->ld_q, .ld_o = a->stride, .n_rows = g->n_tokens * a->per_head, .head_dim = a->hp->head_dim,
                           .n_keys = g->position + 1 - segment * SEGMENT, .per_token = a->per_head};
    const int32_t expand = expands(a, all.n_rows), asks = few && !expand;
    const int32_t together = a->bytes ? KEY_TILES : 1; /* tiles whose integers are summed in one */
    const int32_t k_step = asks ? together : KEY_TILES, v_step = few || expand ? together : n;
    reader near = {.blocks = blocks, .n = n, .n_beyond = left - n, .h0 = h0, .h1 = h1, .step = together, .h = h0}, far;
    const void *ahead[KEY_TILES];
    for (int32_t i = 0; i < together && asks; i++) next_tile(a, &near); /* what is read first */
    far = near;
    for (int32_t i = 0; i < FAR_TILES && asks; i++) next_tile(a, &far);
    for (int32_t i = 0; i < n; i += k_step)
        for (int32_t h = h0; h < h1; h++) {
            attn_rows x = at_head(&all, a, s, o, h - h0);
            for (int32_t t = i + KEY_TILES; few && expand && t < n && t < i + 2 * KEY_TILES; t++)
                fetch(kv_keys(a->kv, a->layer, blocks[t], h), kv_key_bytes(a->kv));
            const int32_t n_here = n - i < k_step ? n - i : k_step;
            for (int32_t t = 0; asks && t < n_here; t++) ahead[t] = look_ahead(a, &near, &far);
            if (asks) x.ahead = ahead;
            tile_scores(a, blocks, i, n_here, h, &x, s);
        }
    if (!few && all.n_keys >= SEGMENT && a->weigh) {
        for (int32_t h = h0; h < h1; h++) {
            const attn_rows x = at_head(&all, a, s, o, h - h0);
            const void *v[SEGMENT_TILES];
            for (int32_t i = 0; i < SEGMENT_TILES; i++) v[i] = kv_values(a->kv, a->layer, blocks[i], h);
            a->weigh(&x, v);
        }
        return;
    }
    for (int32_t h = h0; h < h1; h++) {
        const attn_rows x = at_head(&all, a, s, o, h - h0);
        if (a->bytes) a->ops->attn_weights_q8(&x);
        else if (kv_type(a->kv) == KV_BF16) a->ops->attn_weights_bf16(&x);
        else a->ops->attn_weights_f32(&x);
    }
    for (int32_t i = 0; i < n; i += v_step)
        for (int32_t h = h0; h < h1; h++) {
            attn_rows x = at_head(&all, a, s, o, h - h0);
            if (few && expand && i + 1 < n) fetch(kv_values(a->kv, a->layer, blocks[i + 1], h), kv_value_bytes(a->kv));
            const int32_t n_here = n - i < v_step ? n - i : v_step;
            for (int32_t t = 0; asks && t < n_here; t++) ahead[t] = look_ahead(a, &near, &far);
            if (asks) x.ahead = ahead;
            tile_values(a, blocks, i, n_here, h, &x, s);
        }
}

static void finish_row(const attention *a, int64_t row, int32_t head, const float *total) {
    const int32_t d = a->hp->head_dim;
    float *out = a->out + (row * a->hp->n_head + head) * d;
    a->ops->scale(out, total, d, 1.0f / total[d + 1]);
}

static void run_looped(const attention *a, const group *g, int32_t head, const scratch *s) {
    const int32_t n_rows = g->n_tokens * a->per_head;
    gather_queries(a, g, head, head + 1, s);
    run_segment(a, g, 0, head, head + 1, s->total, s);
    for (int32_t i = 1; i < g->n_segments; i++) {
        run_segment(a, g, i, head, head + 1, s->o, s);
        a->ops->attn_join(s->total, s->o, a->hp->head_dim, n_rows, a->stride);
    }
    for (int32_t r = 0; r < n_rows; r++)
        finish_row(a, g->row + r / a->per_head, head * a->per_head + r % a->per_head, s->total + r * a->stride);
}

static void run_items(void *arg, int32_t lo, int32_t hi, int32_t thread) {
    const attention *a = arg;
    const int32_t n_head_kv = a->hp->n_head_kv;
    int32_t first = 0, end = a->n_groups;
    while (end - first > 1) { /* the group that holds item lo */
        const int32_t middle = first + (end - first) / 2;
        if (a->groups[middle].first_item <= lo) first = middle;
        else end = middle;
    }
    for (const group *g = &a->groups[first]; lo < hi; g++) {
        int32_t gathered = 0; /* heads whose queries are there, from 0 on */
        const int32_t n = n_head_kv * (g->part < 0 ? 1 : g->n_segments);
        while (lo < hi && lo < g->first_item + n) {
            const int32_t i = lo - g->first_item, h0 = i % n_head_kv, segment = i / n_head_kv;
            if (g->part < 0) {
                run_looped(a, g, h0, &a->threads[thread]);
                lo++;
                continue;
            }
            int32_t h1 = g->n_tokens > FEW_TOKENS ? h0 + 1 : n_head_kv;
            if (h1 - h0 > hi - lo) h1 = h0 + (hi - lo);
            if (h0 || gathered < h1) gather_queries(a, g, h0, h1, &a->threads[thread]);
            gathered = h0 ? 0 : h1;
            run_segment(a, g, segment, h0, h1,
                        a->parts + g->part + ((int64_t)segment * n_head_kv + h0) * g->n_tokens * a->per_head * a->stride,
                        &a->threads[thread]);
            lo += h1 - h0;
        }
    }
}

/* Joins the parts of the split groups lo..hi-1 (looped ones have nothing to join). */
static void join_groups(void *arg, int32_t lo, int32_t hi, int32_t thread) {
    const attention *a = arg;
    (void)thread;
    for (int32_t i = lo; i < hi; i++) {
        const group *g = &a->groups[i];
        const int64_t segment = (int64_t)g->n_tokens * a->hp->n_head * a->stride;
        if (g->part < 0) continue;
        /* Segments outside: memory that other threads wrote is read as it lies, and rows' chains run side by side. */
        float *total = a->parts + g->part;
        const int32_t n_rows = g->n_tokens * a->hp->n_head, per_kv = g->n_tokens * a->per_head;
        const size_t n_bytes = (size_t)(g->n_segments * segment) * sizeof *total;
        if (g->n_tokens <= FEW_TOKENS) fetch(total, n_bytes < MAX_FETCH ? n_bytes : MAX_FETCH);
        for (int32_t s = 1; s < g->n_segments; s++) a->ops->attn_join(total, total + s * segment, a->hp->head_dim, n_rows, a->stride);
        for (int32_t r = 0; r < n_rows; r++)
            finish_row(a, g->row + r % per_kv / a->per_head, r / per_kv * a->per_head + r % a->per_head, total + r * a->stride);
    }
}

void attention_run(attention *a, int32_t layer, const float *q, float *out) {
    a->layer = layer;
    a->q = q;
    a->out = out;
    /* Many items: whole pages at a time. */
    const int32_t grain = a->n_items >= 8 * pool_threads(a->pool) * a->hp->n_head_kv && a->n_split == a->n_groups ? a->hp->n_head_kv : 1;
    pool_run(a->pool, a->n_items, grain, run_items, a);
    if (!a->n_split) return;
    if (a->n_groups > 1) pool_run(a->pool, a->n_groups, 1, join_groups, a);
    else join_groups(a, 0, 1, 0);
}

/* ops.h: the row-wise operations of a transformer and of attention, one table per instruction set.
 *
 * Rules
 * - Every function treats one row (or the rows of one segment) in an order that only its shape decides, so results
 *   never depend on which other rows a step has.
 * - NaN and infinity propagate; nothing here fails.
 * - One source, cpu/ops_simd.h, is compiled per instruction set with vectors of 4, 8 or 16 floats. ../ref holds the
 *   same operations with double accumulators: the oracle.
 */
#ifndef MILAD_OPS_H
#define MILAD_OPS_H

#include <stdint.h>

enum { ATTN_TILE = 32 };       /* keys of one KV block */
enum { ATTN_SEGMENT_TILES = 8, ATTN_SEGMENT = ATTN_TILE * ATTN_SEGMENT_TILES }; /* keys that share one softmax */
enum { ATTN_Q8_GROUP = 64 };   /* dimensions of a Q8_0 key, or a query, that share a scale */
enum { ATTN_ROWS_DIRECT = 6 }; /* up to here a tile is read in place; more rows pay for expanding it to F32 first */

static inline int32_t attn_q8_groups(int32_t head_dim) { return (head_dim + ATTN_Q8_GROUP - 1) / ATTN_Q8_GROUP; }
/* Where the bytes of a Q8_0 tile's keys begin: behind the scales and two F32 for each token (kv.h). */
static inline int64_t attn_q8_numbers(int32_t head_dim) { return (int64_t)attn_q8_groups(head_dim) * ATTN_TILE * 2 + ATTN_TILE * 8; }

/* n_rows queries and one segment of keys. Scores are in units of log2: queries carry attn_scale * log2(e). */
typedef struct attn_rows {
    const void *q;       /* [n_rows][ld_q] F32, head_dim used; for BF16 tiles [n_rows][ld_q] pairs of BF16; for Q8_0 tiles what
                          * attn_query_q8 wrote */
    float *s;            /* [n_rows][ATTN_SEGMENT] scores, then weights */
    float *o;            /* [n_rows][ld_o] weighted sum of values, not divided by the sum of weights; greatest score; that sum */
    float *inverse;      /* [ATTN_SEGMENT], Q8_0 tiles only: scores leaves there the inverses of the values' scales, for weights */
    int64_t ld_q, ld_o;  /* in units of 4 bytes; Q8_0 tiles: ld_o at least 64 + 2 */
    int32_t n_rows, head_dim;
    int32_t n_keys;      /* that row 0 sees of the segment; more than ATTN_SEGMENT: all */
    int32_t per_token;   /* so many rows see the same keys, the next so many one more */
    const void *const *ahead; /* NULL, or as many tiles as the call's own: to be read soon, so they are asked for line by line */
} attn_rows;

typedef struct ops {
    const char *name;
    /* out = x / sqrt(mean(x^2) + eps) * w. out may be x. */
    void (*rms_norm)(float *out, const float *x, const float *w, int32_t n, float eps);
    void (*add)(float *x, const float *y, int32_t n);
    /* gate = silu(gate) * up */
    void (*swiglu)(float *gate, const float *up, int32_t n);
    /* Rotates the first n_rot dimensions of n_heads vectors; cs[n_rot / 2] cosines, then as many sines. */
    void (*rope)(float *v, int32_t n_heads, int32_t head_dim, int32_t n_rot, int32_t style, const float *cs);
    /* F32 to F16, to nearest even, finite values saturate at +-65504; and back. */
    void (*f16_from_f32)(uint16_t *out, const float *x, int32_t n);
    void (*f32_from_f16)(float *out, const uint16_t *x, int32_t n);
    /* out = x * scale. out may be x. */
    void (*scale)(float *out, const float *x, int32_t n, float scale);
    /* Walsh-Hadamard transform of blocks of 64 values, of 32, 16 ... for what is left; orthonormal, so products stay as they were,
     * and twice gives the vector again. What one dimension held spreads over 64, which loses less when rounded to one scale. */
    void (*rotate)(float *x, int32_t n);
    /* At most ATTN_Q8_GROUP values, rotated, to the nearest multiples of a scale, which fits F16 and is returned; NaN where a value is.
     * The bytes up to the next multiple of 4 become zero. */
    float (*rotated_i8)(int8_t *out, const float *x, int32_t n);
    /* The greatest |x|; NaN where one is. */
    float (*max_abs)(const float *x, int32_t n);
    /* x * inverse to the nearest integer, to even, within +-127; NaN: anything. */
    void (*i8_from_f32)(int8_t *out, const float *x, int32_t n, float inverse);
    /* Packs of 4 rows of bytes, x[ceil(n_rows / 4)][n][4], as out[n_rows][n]. by_row: int8 * scale[row];
     * else (uint8 - 128) * scale[column]. */
    void (*f32_from_packs)(float *out, const uint8_t *x, int32_t n_rows, int32_t n, const float *scale, int32_t by_row);
    /* F32 to BF16, to nearest even; subnormals may become zero. */
    void (*bf16_from_f32)(uint16_t *out, const float *x, int32_t n);
    /* A segment's attention in three steps; tiles `tile` to tile + n_tiles - 1 of it lie at k[0], k[1] ..., v[0] ...
     * Keys past the last row's may be anything, NaN too; what only some rows see is multiplied by zero for the others.
     * F32, F16: k[head_dim][32], v[32][head_dim], and the same bits for the same numbers in either.
     * BF16: pairs k[(head_dim + 1) / 2][32][2], v[16][head_dim][2]; queries and weights are rounded to BF16 as well. */
    void (*attn_scores_f32)(const attn_rows *x, const void *const *k, int32_t tile, int32_t n_tiles);
    void (*attn_scores_f16)(const attn_rows *x, const void *const *k, int32_t tile, int32_t n_tiles);
    void (*attn_scores_bf16)(const attn_rows *x, const void *const *k, int32_t tile, int32_t n_tiles);
    void (*attn_weights_f32)(const attn_rows *x);
    void (*attn_weights_bf16)(const attn_rows *x);
    /* Tile 0 first; what follows is added to o. */
    void (*attn_values_f32)(const attn_rows *x, const void *const *v, int32_t tile, int32_t n_tiles);
    void (*attn_values_f16)(const attn_rows *x, const void *const *v, int32_t tile, int32_t n_tiles);
    void (*attn_values_bf16)(const attn_rows *x, const void *const *v, int32_t tile, int32_t n_tiles);
    /* Weights and values in one, for all tiles of a segment that every row sees whole; NULL: no faster here. */
    void (*attn_weigh_bf16)(const attn_rows *x, const void *const *v);
    /* The same over Q8_0 tiles by products of bytes; NULL: tiles must be expanded to F32. k, v: a tile's keys with what stands before
     * them, values (kv.h). A query is x * scale, rotated and rounded to int8: packs of 4, then a scale and a sum of bytes for each
     * group; weights are rounded to uint8. Two tiles at once unless the last is alone. */
    void (*attn_query_q8)(void *q, const float *x, float scale, int32_t head_dim);
    void (*attn_scores_q8)(const attn_rows *x, const void *const *k, int32_t tile, int32_t n_tiles);
    void (*attn_weights_q8)(const attn_rows *x);
    void (*attn_values_q8)(const attn_rows *x, const void *const *v, int32_t tile, int32_t n_tiles);
    void (*attn_weigh_q8)(const attn_rows *x, const void *const *v);
    /* Adds the next segment's results to the totals of those before it, for n_rows rows `stride` apart. Each is head_dim floats of
     * o, then m, then the sum l. */
    void (*attn_join)(float *total, const float *part, int32_t head_dim, int32_t n_rows, int64_t stride);
} ops;

/* The table for mat_isa(), so one switch (MILAD_ISA) lowers both. */
const ops *ops_get(void);
/* By name ("c", "avx2", "avx512", "neon"); NULL: not in this build or not on this machine (tests). */
const ops *ops_named(const char *name);

#endif

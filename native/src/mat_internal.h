/* mat_internal.h: what the rooms of mat share: panel layouts, activation tiles and the kernels' interface.
 *
 * Panels. 16 output rows lie together (lane = row). A row is a run of units: two blocks (64 values) for the types of 32
 * values a block, one block (256) for the K types, 64 values for F32, F16 and BF16. Inside a unit the file's bytes are kept
 * as they are, but transposed between the 16 rows: a field of 4 n bytes becomes n runs of 16 x 4 bytes, a field of 2 bytes
 * one run of 16 x 2. Fields stand in the order of mat_layout_of(), in which the kernels first touch them: several streams cost; Q8_0's values are stored as unsigned (q + 128). The K types' codes are regrouped so that each block of 32 has its own lines (mat_pack.c):
 * every byte is read once, at rising addresses. Units are multiples of 64 bytes; rows beyond n_out and values beyond n_in are zero.
 *
 * Expanded panels. For many rows of activations a stretch of a panel is expanded once: per 32 values 8 vectors of 16 x 4
 * bytes (vector g, lane r: values 4 g .. 4 g + 3 of row r, unsigned), and F32 scales of 16 lanes as the class says:
 * S32 d | SM32 d, m | S16 d0, d1 | SM16 d0, d1, m0, m1. The signed classes S32 and S16 are biased by 128
 * (AVX2 keeps the types' own codes: avx2.h). AVX-512 keeps d times 1, 9/8 ... 15/8 for d: dx is such a number times a power of two, so
 * d * dx is looked up and shifted (vscalefps), which waits for none of the units that products wait for.
 *
 * Activations, tiles of `nt` tokens: per 32 values q[8][nt][4] (int8), dx[nt], sx[nt] = dx * sum(q), c[nt] = -128 * sum(q);
 * a second plane has the sums of each half: c[2][nt], sx[2][nt]. BF16: [pair][nt][2]. F32: [k][nt]. dx is one of 8 numbers an octave, or NaN;
 * never 0, so that a damaged scale of the weights gives NaN however it is multiplied.
 *
 * The one order of additions, for every kernel (i = exact integer dot product):
 *   S32   acc = fma(i, d * dx, acc)          SM32  the same, then acc = fma(m, sx, acc)
 *   S16   acc = fma(fma(i1, d1, i0 * d0), dx, acc)
 *   SM16  the same, then acc = fma(m0, sx0, acc), acc = fma(m1, sx1, acc)
 *   F32   acc = fma(w, x, acc)               BF16  vdpbf16ps, or the same as F32 where the machine lacks it
 * Plain C rounds products (no fma), so its bits differ from the vector kernels'.
 */
#ifndef MILAD_MAT_INTERNAL_H
#define MILAD_MAT_INTERNAL_H

#include <stdbool.h>
#include <string.h>

#include "mat.h"

enum {
    MAT_LANES = 16,       /* rows of a panel */
    MAT_UNIT_MAX = 4096,  /* bytes of the largest unit */
    MAT_TILE = 6,         /* tokens of a tile when there are many */
    MAT_TILE_MAX = 12,    /* most tokens of a tile: up to so many rows are one tile, up to 16 are two */
    MAT_MULTIPLES = 8,    /* scales dx in an octave */
    MAT_DX_BITS = 20,     /* of dx's fraction that are zero: 23 less those that MAT_MULTIPLES needs */
    MAT_SCALES_MAX = MAT_MULTIPLES + 1, /* vectors of scales of an expanded block */
    MAT_CHUNK = 2048,     /* values expanded at once; a multiple of every unit */
    MAT_CHUNK_PAIRS = 2048, /* the same for BF16, whose values are kept as they are */
    MAT_CHUNK_PACKED = 512, /* and for those that have to be packed first */
    MAT_CHUNK_FEW = 256,  /* the same for few rows and where a value expands to 4 bytes */
    MAT_FEW = 16,         /* up to so many rows, panels are taken one by one as memory delivers them */
    MAT_WIDE = 4,         /* panels of a tile for many rows of BF16, F16 and F32; else MAT_PAIR */
    MAT_PAIR = 2,
    MAT_GROUP = 16        /* most panels that share a stretch of the activations while it lies in L2 */
};

enum mat_class { MAT_S32, MAT_SM32, MAT_S16, MAT_SM16, MAT_PAIRS, MAT_FLOATS, MAT_N_CLASSES };

/* More of enum mat_act_kind: planes that only some types need. */
enum { MAT_ACT_HALVES = 8 };

typedef struct mat_field { uint16_t offset, n_bytes; } mat_field; /* in the unit's source bytes, file order */

typedef struct mat_layout_info {
    int32_t type, block_values, block_bytes;
    int32_t unit_values, unit_bytes; /* of a row in the source; a panel's unit is panel_unit */
    int32_t panel_unit;
    int32_t class;
    int32_t word;                    /* bytes of a transposed element where there are no fields: 2 or 4 */
    int32_t n_fields;
    mat_field fields[10];
} mat_layout_info;

const mat_layout_info *mat_layout_of(int32_t type); /* NULL: unknown */

/* Units u0..u1-1 of the panel of rows o0..o0+15 into dst, which begins with unit u0. */
void mat_pack_units(const mat *src, int64_t o0, int64_t u0, int64_t u1, uint8_t *dst);
/* The inverse of packing: a unit with its codes in the file's order (in `room` of MAT_UNIT_MAX bytes, or the unit itself), and
 * of that the source bytes of one row. */
const uint8_t *mat_file_order(const mat_layout_info *l, const uint8_t *unit, uint8_t *room);
void mat_unpack_lane(const mat_layout_info *l, const uint8_t *unit, int32_t lane, uint8_t *out);

float mat_half_to_float(uint16_t h);

typedef struct mat_act {
    uint32_t kinds;
    int32_t n_rows, nt, n_tiles;
    int64_t n_in;
    int64_t n_blocks;  /* blocks of 32, even */
    int64_t n_pairs;
    size_t n_bytes;    /* header and planes */
    uint8_t *q8, *halves, *bf16;
    float *f32;
} mat_act;

static inline const mat_act *mat_act_header(const void *act)
{
    return (const mat_act *)(((uintptr_t)act + 63) & ~(uintptr_t)63);
}

static inline size_t mat_act_q8_block(int32_t nt) { return (size_t)nt * 44; }
static inline size_t mat_act_half_block(int32_t nt) { return (size_t)nt * 16; }

#define MAT_ACT_LEAST 1e-30f   /* blocks up to here are zeros */
#define MAT_ACT_NOTHING 0x1p-100f /* their dx */

/* dx of 32 values, the greatest of magnitude amax: a 127th of it, rounded up to three bits behind the first. */
static inline float mat_act_scale(float amax)
{
    const uint32_t below = (1u << MAT_DX_BITS) - 1;
    float d = amax / 127.0f;
    uint32_t u;
    if (!(amax > MAT_ACT_LEAST))
        return MAT_ACT_NOTHING;
    memcpy(&u, &d, 4);
    u = (u + below) & ~below;
    memcpy(&d, &u, 4);
    return d;
}

/* What goes with the 32 values of token t that lie in the block q8 (halves: its block in that plane, or NULL): the scale d and the
 * sums s0 of the first 16 values and s1 of the others, as above. */
static inline void mat_act_put_sums(uint8_t *q8, uint8_t *halves, int32_t nt, int32_t t, float d, int32_t s0, int32_t s1)
{
    float *dx = (float *)(q8 + (size_t)nt * 32);
    dx[t] = d;
    dx[nt + t] = d * (float)(s0 + s1);
    ((int32_t *)(dx + 2 * nt))[t] = -128 * (s0 + s1);
    if (halves) {
        int32_t *c = (int32_t *)halves;
        float *sx = (float *)(c + 2 * nt);
        c[t] = -128 * s0;
        c[nt + t] = -128 * s1;
        sx[t] = d * (float)s0;
        sx[nt + t] = d * (float)s1;
    }
}

/* A tile of activations from some value on. Only the pointer that the class needs is set. */
typedef struct mat_tile {
    const uint8_t *x;      /* q8 blocks, BF16 pairs or F32 values */
    const uint8_t *halves;
    int32_t nt;            /* tokens in the layout */
    int32_t n_valid;       /* tokens to store */
} mat_tile;

/* Part of a product: n_panels panels (`step` bytes apart, scales `scale_step` floats apart) times a tile, over n_values
 * values. c[token * ld + panel * 16 + lane]; first: c is not read. */
typedef struct mat_part {
    const uint8_t *w;
    size_t step;
    const float *scales;
    size_t scale_step;
    int32_t n_panels;
    int64_t n_values;
    float *c;
    int64_t ld;
    bool first;
} mat_part;

/* Tiles one after another, and the weights that come after them: each tile asks for its share of those, so that they lie in L2
 * when their turn comes. n_runs runs of n_lines x 64 bytes, `step` apart; none: n_lines is 0. */
typedef struct mat_ahead {
    const uint8_t *p;
    size_t step;
    int32_t n_runs, n_lines;
} mat_ahead;

typedef struct mat_kernels {
    const char *name;
    int32_t direct_max; /* up to so many rows of a tile, direct() is asked */
    /* n_units of one packed panel into w (512 bytes per 32 values; F16: 64 bytes per value) and scales. */
    void (*expand)(int32_t type, const uint8_t *panel, int64_t n_units, uint8_t *w, float *scales);
    void (*tile)(int32_t type, const mat_part *part, const mat_tile *x);
    /* The same for n_tiles tiles, x and part->c of the first; x->n_valid counts all tokens that are left. NULL: one by one. */
    void (*tiles)(int32_t type, const mat_part *part, const mat_tile *x, int32_t n_tiles, size_t x_step, size_t halves_step,
                  const mat_ahead *ahead);
    /* One whole packed panel times a tile; false: no such kernel for this type and width. */
    bool (*direct)(int32_t type, const uint8_t *panel, int64_t n_units, const mat_tile *x, float *c, int64_t ld);
    /* Row r of x[n_in] into token slot t of the tile at block 0 (see mat_act). */
    void (*quantise)(const float *x, int64_t n_in, int64_t n_blocks, int32_t nt, int32_t t, uint8_t *q8, uint8_t *halves);
    /* MAT_TILE rows, x on, into a tile of a, in every kind that it has: the same bits as row by row. NULL: row by row. */
    void (*prepare_tile)(const mat_act *a, int32_t tile, const float *x, int64_t ld_x);
} mat_kernels;

extern const mat_kernels mat_kernels_c;
extern const mat_kernels mat_kernels_avx2;
extern const mat_kernels mat_kernels_avx512;
extern const mat_kernels mat_kernels_neon;
extern const mat_kernels mat_kernels_dotprod;
bool mat_neon_dotprod(void); /* this aarch64 machine has the instructions of mat_kernels_dotprod */
const mat_kernels *mat_kernels_now(void);

#endif

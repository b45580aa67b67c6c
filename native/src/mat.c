/* mat.c: the products' driver: which kernel, which part of a product on which thread. Owns the choice of instruction set and
 * the activations' memory (layouts in mat_internal.h); must not know intrinsics or the formats' bits.
 *
 * A product is cut into groups of panels x runs of tiles. Each output value is computed by one thread in one order of
 * k, whatever the cut: chunks of k continue the accumulator that lies in y.
 */
#include <math.h>
#include <stdlib.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "mat_internal.h"

static const struct { int32_t type; const char *name; } type_names[] = {
    {MAT_F32, "F32"},   {MAT_F16, "F16"},   {MAT_Q4_0, "Q4_0"}, {MAT_Q4_1, "Q4_1"}, {MAT_Q5_0, "Q5_0"},
    {MAT_Q5_1, "Q5_1"}, {MAT_Q8_0, "Q8_0"}, {MAT_Q2_K, "Q2_K"}, {MAT_Q3_K, "Q3_K"}, {MAT_Q4_K, "Q4_K"},
    {MAT_Q5_K, "Q5_K"}, {MAT_Q6_K, "Q6_K"}, {MAT_IQ4_NL, "IQ4_NL"}, {MAT_BF16, "BF16"},
};

const char *mat_type_name(int32_t type)
{
    for (size_t i = 0; i < sizeof type_names / sizeof *type_names; i++)
        if (type_names[i].type == type)
            return type_names[i].name;
    return NULL;
}

int32_t mat_type_supported(int32_t type) { return mat_layout_of(type) != NULL; }

int32_t mat_block_values(int32_t type)
{
    const mat_layout_info *l = mat_layout_of(type);
    return l ? l->block_values : 0;
}

int32_t mat_block_bytes(int32_t type)
{
    const mat_layout_info *l = mat_layout_of(type);
    return l ? l->block_bytes : 0;
}

/* The best kernels that this machine can run and MILAD_ISA allows. */
static const mat_kernels *choose_kernels(void)
{
    const char *wish = getenv("MILAD_ISA");
    if (wish && strcmp(wish, "c") == 0)
        return &mat_kernels_c;
#if defined(__x86_64__)
    __builtin_cpu_init();
    uint32_t a, b, c = 0, d;
    __get_cpuid(1, &a, &b, &c, &d); /* F16C: a name that clang's __builtin_cpu_supports did not know until lately */
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && (c & bit_F16C);
#if defined(MILAD_HAVE_AVX512)
    bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")
                  && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
    if (avx512 && avx2 && !(wish && strcmp(wish, "avx2") == 0))
        return &mat_kernels_avx512;
#endif
#if defined(MILAD_HAVE_AVX2)
    if (avx2)
        return &mat_kernels_avx2;
#endif
    (void)avx2;
#elif defined(MILAD_HAVE_NEON)
#if defined(MILAD_HAVE_DOTPROD)
    if (mat_neon_dotprod() && !(wish && strcmp(wish, "neon") == 0))
        return &mat_kernels_dotprod;
#endif
    return &mat_kernels_neon;
#endif
    return &mat_kernels_c;
}

const mat_kernels *mat_kernels_now(void)
{
    static _Atomic(const mat_kernels *) chosen;
    const mat_kernels *k = chosen;
    if (k == NULL)
        chosen = k = choose_kernels();
    return k;
}

const char *mat_isa(void) { return mat_kernels_now()->name; }

/* ---- activations ---- */

uint32_t mat_act_kind(int32_t type)
{
    const mat_layout_info *l = mat_layout_of(type);
    if (l == NULL)
        return 0;
    switch (l->class) {
    case MAT_PAIRS: return MAT_ACT_BF16;
    case MAT_FLOATS: return MAT_ACT_F32;
    case MAT_S16:
    case MAT_SM16: return MAT_ACT_Q8 | MAT_ACT_HALVES;
    default: return MAT_ACT_Q8;
    }
}

/* Tokens of a tile: all rows, half of them or a fixed number; even beyond 4, which halves the number of kernels. */
static int32_t tile_width(int32_t n_rows)
{
    if (n_rows > MAT_FEW)
        return MAT_TILE;
    const int32_t n = n_rows <= MAT_TILE_MAX ? n_rows : (n_rows + 1) / 2;
    return n <= 4 ? n : (n + 1) / 2 * 2;
}

static size_t round64(size_t n) { return (n + 63) & ~(size_t)63; }

/* Fills the header (its pointers relative to `base`) and returns the bytes from base on. */
static size_t act_layout(mat_act *a, uintptr_t base, uint32_t kinds, int64_t n_in, int32_t n_rows)
{
    a->kinds = kinds;
    a->n_in = n_in;
    a->n_rows = n_rows;
    a->nt = tile_width(n_rows > 0 ? n_rows : 1);
    a->n_tiles = (n_rows + a->nt - 1) / a->nt;
    a->n_blocks = (n_in + 63) / 64 * 2;
    a->n_pairs = a->n_blocks * 16;
    const size_t slots = (size_t)a->n_tiles * (size_t)a->nt, blocks = (size_t)a->n_blocks;
    size_t at = round64(sizeof *a);
    a->q8 = kinds & MAT_ACT_Q8 ? (uint8_t *)(base + at) : NULL;
    at += kinds & MAT_ACT_Q8 ? round64(slots * blocks * 44) : 0;
    a->halves = kinds & MAT_ACT_HALVES ? (uint8_t *)(base + at) : NULL;
    at += kinds & MAT_ACT_HALVES ? round64(slots * blocks * 16) : 0;
    a->bf16 = kinds & MAT_ACT_BF16 ? (uint8_t *)(base + at) : NULL;
    at += kinds & MAT_ACT_BF16 ? round64(slots * blocks * 64) : 0;
    a->f32 = kinds & MAT_ACT_F32 ? (float *)(base + at) : NULL;
    at += kinds & MAT_ACT_F32 ? round64(slots * blocks * 128) : 0;
    a->n_bytes = at;
    return at;
}

size_t mat_act_bytes(int64_t n_in, int32_t n_rows)
{
    mat_act a;
    /* Fewer rows may take more slots (13 rows fill 14), so the bound is by slots. */
    int32_t n = n_rows <= MAT_FEW ? MAT_FEW : (n_rows + MAT_TILE - 1) / MAT_TILE * MAT_TILE;
    return act_layout(&a, 0, MAT_ACT_F32 | MAT_ACT_Q8 | MAT_ACT_BF16 | MAT_ACT_HALVES, n_in, n) + 64;
}

typedef struct prepare_job {
    mat_act *a;
    const float *x;
    int64_t ld_x;
    pool_fn make; /* NULL: x is there */
    void *arg;
} prepare_job;

static uint16_t to_bf16(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)(bits >> 16 | 64u);
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

/* Blocks b0 .. b1 - 1 of one token slot: slot = tile * nt + t. Slots beyond n_rows become zeros. */
static void prepare_slot(const prepare_job *job, int32_t slot, int64_t b0, int64_t b1)
{
    const mat_act *a = job->a;
    const int32_t nt = a->nt, t = slot % nt;
    const size_t at = (size_t)(slot / nt) * (size_t)a->n_blocks + (size_t)b0;
    const bool valid = slot < a->n_rows;
    const float *x = valid ? job->x + slot * job->ld_x + 32 * b0 : NULL;
    const int64_t all = (b1 - b0) * 32, left = valid ? a->n_in - 32 * b0 : 0, n = left < 0 ? 0 : left < all ? left : all;
    if (a->q8)
        mat_kernels_now()->quantise(x, n, b1 - b0, nt, t, a->q8 + at * mat_act_q8_block(nt),
                                    a->halves ? a->halves + at * mat_act_half_block(nt) : NULL);
    if (a->bf16) {
        uint16_t *to = (uint16_t *)a->bf16 + at * 32 * (size_t)nt;
        for (int64_t k = n / 2 * 2; k < all; k++)
            to[(k / 2 * nt + t) * 2 + k % 2] = 0;
        for (int64_t k = 0; k + 1 < n; k += 2) {
            uint32_t pair = (uint32_t)to_bf16(x[k]) | (uint32_t)to_bf16(x[k + 1]) << 16;
            memcpy(to + (k / 2 * nt + t) * 2, &pair, 4);
        }
        if (n % 2)
            to[((n - 1) / 2 * nt + t) * 2] = to_bf16(x[n - 1]);
    }
    if (a->f32) {
        float *to = a->f32 + at * 32 * (size_t)nt;
        for (int64_t k = 0; k < all; k++)
            to[k * nt + t] = k < n ? x[k] : 0.0f;
    }
}

/* Few rows: runs of blocks of every slot. By slots, threads would write into the same lines all the time. */
enum { BLOCK_RUN = 16 };

static void prepare_runs(void *arg, int32_t lo, int32_t hi, int32_t thread)
{
    const prepare_job *job = arg;
    const mat_act *a = job->a;
    const int64_t b0 = (int64_t)lo * BLOCK_RUN, end = (int64_t)hi * BLOCK_RUN;
    (void)thread;
    for (int32_t slot = 0; slot < a->n_tiles * a->nt; slot++)
        prepare_slot(job, slot, b0, end < a->n_blocks ? end : a->n_blocks);
}

static void prepare_tiles(void *arg, int32_t lo, int32_t hi, int32_t thread)
{
    const prepare_job *job = arg;
    const mat_kernels *k = mat_kernels_now();
    const int32_t nt = job->a->nt;
    for (int32_t i = lo; i < hi; i++) {
        const int32_t row = i * nt, end = row + nt < job->a->n_rows ? row + nt : job->a->n_rows;
        if (job->make)
            job->make(job->arg, row, end, thread);
        if (k->prepare_tile && end - row == nt)
            k->prepare_tile(job->a, i, job->x + (int64_t)row * job->ld_x, job->ld_x);
        else
            for (int32_t slot = row; slot < row + nt; slot++)
                prepare_slot(job, slot, 0, job->a->n_blocks);
    }
}

void mat_act_make(pool *p, void *act, uint32_t kinds, const float *x, int64_t ld_x, int64_t n_in, int32_t n_rows, pool_fn make,
                  void *arg)
{
    mat_act *a = (mat_act *)(uintptr_t)mat_act_header(act);
    act_layout(a, (uintptr_t)a, kinds, n_in, n_rows);
    prepare_job job = {a, x, ld_x, make, arg};
    if (n_rows > MAT_FEW) {
        pool_run(p, a->n_tiles, 1, prepare_tiles, &job);
        return;
    }
    const int32_t n_runs = (int32_t)((a->n_blocks + BLOCK_RUN - 1) / BLOCK_RUN);
    if (make && n_rows > 0)
        make(arg, 0, n_rows, 0);
    if (n_in * n_rows < 16384)
        prepare_runs(&job, 0, n_runs, 0);
    else
        pool_run(p, n_runs, 1, prepare_runs, &job);
}

void mat_act_prepare(pool *p, void *act, uint32_t kinds, const float *x, int64_t ld_x, int64_t n_in, int32_t n_rows)
{
    mat_act_make(p, act, kinds, x, ld_x, n_in, n_rows, NULL, NULL);
}

/* ---- products ---- */

enum { MAT_MAX_TOGETHER = 8 }; /* matrices of one stage: Q, K, V or gate, up */

typedef struct mul_one {
    mat w;             /* a copy: matrices' own lines were pushed out since the last step */
    const mat_layout_info *l;
    float *y;
    int64_t ld;
    const float *bias;
    int64_t n_units;   /* of a panel: divided once a stage, not once a panel */
} mul_one;

/* What threads read first is short and lies together: another die's lines come one by one. */
typedef struct mul_job {
    _Alignas(64) const mat_act *a;
    int32_t n_act_lines; /* of few rows, to ask for; 0: many */
    int32_t group;       /* panels of an item */
    int32_t n_cuts;      /* runs of tiles */
    int32_t first_group[MAT_MAX_TOGETHER + 1];
    mul_one m[MAT_MAX_TOGETHER];
} mul_job;

static mat_tile tile_at(const mat_act *a, const mat_layout_info *l, int32_t tile, int64_t k0)
{
    const int32_t left = a->n_rows - tile * a->nt;
    mat_tile x = {NULL, NULL, a->nt, left < a->nt ? left : a->nt};
    const size_t nt = (size_t)a->nt, values = (size_t)tile * (size_t)a->n_blocks * 32 + (size_t)k0;
    switch (l->class) {
    case MAT_PAIRS: x.x = a->bf16 + values * nt * 2; break;
    case MAT_FLOATS: x.x = (const uint8_t *)(a->f32 + values * nt); break;
    default:
        x.x = a->q8 + values / 32 * mat_act_q8_block(a->nt);
        if (a->halves)
            x.halves = a->halves + values / 32 * mat_act_half_block(a->nt);
    }
    return x;
}

static void add_bias(const float *bias, float *c, int64_t ld, int32_t n_tokens, int32_t n)
{
    for (int32_t t = 0; t < n_tokens; t++)
        for (int32_t i = 0; i < n; i++)
            c[t * ld + i] += bias[i];
}

/* The buffers of one thread's chunk: an expanded and, for matrices kept as in the file, a packed one. */
typedef struct chunk_room {
    _Alignas(64) uint8_t w[MAT_PAIR * MAT_CHUNK * MAT_LANES]; /* 1 byte a value, or 4 of MAT_WIDE * MAT_CHUNK_FEW */
    _Alignas(64) float scales[MAT_PAIR][MAT_CHUNK / 32 * MAT_SCALES_MAX * MAT_LANES];
    _Alignas(64) uint8_t packed[MAT_PAIR * MAT_CHUNK * (MAT_LANES + 1)]; /* Q8_0's; BF16's and F32's chunks are shorter */
} chunk_room;
_Static_assert(sizeof ((chunk_room *)0)->w >= MAT_WIDE * MAT_CHUNK_FEW * MAT_LANES * 4, "floats fit");
_Static_assert(sizeof ((chunk_room *)0)->packed >= MAT_WIDE * MAT_CHUNK_PACKED * MAT_LANES * 2, "pairs fit");
_Static_assert(sizeof ((chunk_room *)0)->packed >= MAT_WIDE * MAT_CHUNK_FEW * MAT_LANES * 4, "floats fit");

/* Panels p0 .. p0+n-1 over values k0 .. k0+n_k-1, ready for tile(). */
static mat_part chunk_of(const mat *w, const mat_layout_info *l, int64_t p0, int32_t n, int64_t k0, int64_t n_k, chunk_room *room)
{
    const int64_t u0 = k0 / l->unit_values, n_units = n_k / l->unit_values;
    const int64_t all_units = (w->n_in + l->unit_values - 1) / l->unit_values;
    mat_part part = {.n_panels = n, .n_values = n_k, .first = k0 == 0};
    const bool expands = l->class < MAT_PAIRS || w->type == MAT_F16;
    const size_t wide = l->class < MAT_PAIRS ? MAT_PAIR : MAT_WIDE, w_step = sizeof room->w / wide;
    part.step = (size_t)all_units * (size_t)l->panel_unit;
    part.w = (const uint8_t *)w->data + (size_t)p0 * part.step + (size_t)u0 * (size_t)l->panel_unit;
    if (w->layout == MAT_ROWS) {
        const size_t step = sizeof room->packed / wide;
        for (int32_t i = 0; i < n; i++)
            mat_pack_units(w, (p0 + i) * MAT_LANES, u0, u0 + n_units, room->packed + (size_t)i * step);
        part.w = room->packed;
        part.step = step;
    }
    if (expands) {
        for (int32_t i = 0; i < n; i++)
            mat_kernels_now()->expand(w->type, part.w + (size_t)i * part.step, n_units, room->w + (size_t)i * w_step,
                                      l->class < MAT_PAIRS ? room->scales[i] : NULL);
        part.w = room->w;
        part.step = w_step;
        part.scales = room->scales[0];
        part.scale_step = sizeof room->scales[0] / sizeof(float);
    }
    return part;
}

/* Where one group's results go. */
typedef struct mul_out {
    float *y;
    int64_t ld;
    const float *bias;
} mul_out;

/* Few rows, one packed panel, straight from its bytes; false: no kernel for that. */
static bool mul_direct(const mul_job *job, int32_t i, int64_t p0, int32_t tile0, int32_t tile1, const mul_out *out)
{
    const mat *w = &job->m[i].w;
    const mat_layout_info *l = job->m[i].l;
    const mat_act *a = job->a;
    const mat_kernels *k = mat_kernels_now();
    const int64_t n_units = job->m[i].n_units;
    const uint8_t *panel = (const uint8_t *)w->data + (size_t)p0 * (size_t)n_units * (size_t)l->panel_unit;
    if (a->n_rows > MAT_FEW || a->nt > k->direct_max || w->layout != MAT_PANELS)
        return false;
    for (int32_t tile = tile0; tile < tile1; tile++) {
        const mat_tile x = tile_at(a, l, tile, 0);
        float *c = out->y + (int64_t)(tile - tile0) * a->nt * out->ld;
        if (!k->direct(w->type, panel, n_units, &x, c, out->ld))
            return false;
        if (out->bias)
            add_bias(out->bias, c, out->ld, x.n_valid, MAT_LANES);
    }
    return true;
}

/* Values of a chunk: many rows want few passes over the results, few rows want memory to flow while they compute. */
static int64_t chunk_values(const mul_job *job, const mat *w, const mat_layout_info *l)
{
    if (w->layout == MAT_PANELS && (w->type == MAT_F32 || w->type == MAT_BF16) && job->a->n_tiles == 1)
        return INT64_MAX;
    if (l->class == MAT_FLOATS || job->a->n_rows <= MAT_FEW)
        return MAT_CHUNK_FEW;
    if (l->class == MAT_PAIRS)
        return w->layout == MAT_PANELS ? MAT_CHUNK_PAIRS : MAT_CHUNK_PACKED;
    return MAT_CHUNK;
}

/* Where the weights of n panels lie, if there are so many and they are packed. */
static mat_ahead ahead_at(const mat *w, const mat_layout_info *l, int64_t p0, int32_t n, int64_t k0, int64_t n_k)
{
    mat_ahead ahead = {0};
    const int64_t left = w->n_out / MAT_LANES - p0;
    const size_t unit = (size_t)l->panel_unit;
    if (w->layout != MAT_PANELS || left <= 0)
        return ahead;
    ahead.n_runs = n < left ? n : (int32_t)left;
    ahead.n_lines = (int32_t)((size_t)(n_k / l->unit_values) * unit / 64);
    ahead.step = (size_t)((w->n_in + l->unit_values - 1) / l->unit_values) * unit;
    ahead.p = (const uint8_t *)w->data + (size_t)p0 * ahead.step + (size_t)(k0 / l->unit_values) * unit;
    return ahead;
}

static void mul_tiles(const mul_job *job, int32_t i, const mat_part *first, int32_t tile0, int32_t tile1, int64_t k0, const mat_ahead *ahead)
{
    const mat_kernels *k = mat_kernels_now();
    const mat_layout_info *l = job->m[i].l;
    mat_tile x = tile_at(job->a, l, tile0, k0);
    if (k->tiles) {
        const mat_tile next = tile_at(job->a, l, tile0 + 1, k0);
        x.n_valid = job->a->n_rows - tile0 * job->a->nt;
        k->tiles(l->type, first, &x, tile1 - tile0, (size_t)(next.x - x.x), x.halves ? (size_t)(next.halves - x.halves) : 0, ahead);
        return;
    }
    mat_part part = *first;
    for (int32_t tile = tile0; tile < tile1; tile++, part.c += job->a->nt * part.ld) {
        x = tile_at(job->a, l, tile, k0);
        k->tile(l->type, &part, &x);
    }
}

static void mul_panels(const mul_job *job, int32_t i, int64_t p0, int32_t n, int32_t tile0, int32_t tile1, const mul_out *out)
{
    const mat *w = &job->m[i].w;
    const mat_layout_info *l = job->m[i].l;
    const mat_act *a = job->a;
    const int64_t all = a->n_blocks * 32, step = chunk_values(job, w, l);
    const int32_t wide = l->class < MAT_PAIRS ? MAT_PAIR : MAT_WIDE;
    const int32_t n_rows = a->n_rows - tile0 * a->nt, n_slots = (tile1 - tile0) * a->nt;
    chunk_room room;
    for (int64_t k0 = 0, n_k; k0 < all; k0 += n_k) {
        n_k = all - k0 < step ? all - k0 : step;
        for (int32_t from = 0; from < n; from += wide) {
            mat_ahead ahead = {0};
            mat_part part = chunk_of(w, l, p0 + from, n - from < wide ? n - from : wide, k0, n_k, &room);
            part.ld = out->ld;
            part.c = out->y + from * MAT_LANES;
            if (a->n_rows <= MAT_FEW)
                ; /* one or two tiles: the kernels look ahead for themselves */
            else if (from + wide < n)
                ahead = ahead_at(w, l, p0 + from + wide, wide, k0, n_k);
            else if (k0 + n_k < all)
                ahead = ahead_at(w, l, p0, wide, k0 + n_k, all - k0 - n_k < step ? all - k0 - n_k : step);
            else if (tile1 == a->n_tiles)
                ahead = ahead_at(w, l, p0 + n, wide, 0, all < step ? all : step);
            mul_tiles(job, i, &part, tile0, tile1, k0, &ahead);
            if (out->bias && k0 + n_k == all)
                add_bias(out->bias + from * MAT_LANES, part.c, out->ld, n_rows < n_slots ? n_rows : n_slots,
                         part.n_panels * MAT_LANES);
        }
    }
}

static void mul_group(const mul_job *job, int32_t i, int64_t p0, int32_t n, int32_t tile0, int32_t tile1, const mul_out *out)
{
    if (n != 1 || !mul_direct(job, i, p0, tile0, tile1, out))
        mul_panels(job, i, p0, n, tile0, tile1, out);
}

/* The last panel of a matrix whose n_out is no multiple of 16: through a buffer, tile by tile. */
static void mul_ragged(const mul_job *job, int32_t i, int64_t p0, int32_t tile0, int32_t tile1)
{
    const int32_t n = (int32_t)(job->m[i].w.n_out - p0 * MAT_LANES), nt = job->a->nt;
    _Alignas(64) float c[MAT_TILE_MAX * MAT_LANES], bias[MAT_LANES] = {0};
    if (job->m[i].bias)
        memcpy(bias, job->m[i].bias + p0 * MAT_LANES, (size_t)n * sizeof *bias);
    for (int32_t tile = tile0; tile < tile1; tile++) {
        mul_out out = {c, MAT_LANES, job->m[i].bias ? bias : NULL};
        mul_group(job, i, p0, 1, tile, tile + 1, &out);
        for (int32_t t = 0; t < nt && tile * nt + t < job->a->n_rows; t++)
            memcpy(job->m[i].y + (tile * nt + t) * job->m[i].ld + p0 * MAT_LANES, c + t * MAT_LANES, (size_t)n * sizeof *c);
    }
}

static void mul_item(const mul_job *job, int32_t item)
{
    const int32_t n_cuts = job->n_cuts, group = n_cuts > 1 ? item / n_cuts : item, cut = item - group * n_cuts;
    const int32_t n_tiles = job->a->n_tiles, tile0 = n_cuts > 1 ? (int32_t)((int64_t)n_tiles * cut / n_cuts) : 0;
    const int32_t tile1 = n_cuts > 1 ? (int32_t)((int64_t)n_tiles * (cut + 1) / n_cuts) : n_tiles;
    int32_t i = 0;
    while (group >= job->first_group[i + 1])
        i++;
    const int64_t n_full = job->m[i].w.n_out / MAT_LANES;
    const int64_t p0 = (int64_t)(group - job->first_group[i]) * job->group;
    const int64_t p1 = p0 + job->group < n_full ? p0 + job->group : n_full;
    if (p1 > p0) {
        mul_out out = {job->m[i].y + (int64_t)tile0 * job->a->nt * job->m[i].ld + p0 * MAT_LANES, job->m[i].ld,
                       job->m[i].bias ? job->m[i].bias + p0 * MAT_LANES : NULL};
        mul_group(job, i, p0, (int32_t)(p1 - p0), tile0, tile1, &out);
    }
    if (p0 + job->group > n_full && n_full * MAT_LANES < job->m[i].w.n_out)
        mul_ragged(job, i, n_full, tile0, tile1);
}

static void mul_items(void *arg, int32_t lo, int32_t hi, int32_t thread)
{
    const mul_job *job = arg;
    for (int32_t i = 0; i < job->n_act_lines && thread; i++)
        __builtin_prefetch((const char *)job->a + i * 64);
    for (int32_t i = lo; i < hi; i++)
        mul_item(arg, i);
}

static void mul_some(pool *p, const mat *const *w, int32_t n_w, const mat_act *a, float *const *y, const int64_t *ld_y,
                     const float *const *bias)
{
    enum { GRAIN_BYTES = 16384, CUT_TILES = 16, ACT_BYTES = 4096 };
    mul_job job;
    size_t bytes = 0;
    int64_t all_panels = 0;
    job.a = a;
    job.group = a->n_rows > MAT_FEW ? MAT_GROUP : 1;
    job.n_cuts = 1;
    job.n_act_lines = a->n_rows > MAT_FEW ? 0 : (int32_t)(a->n_bytes < ACT_BYTES ? a->n_bytes : ACT_BYTES) / 64;
    for (int32_t i = 0; i < n_w; i++)
        all_panels += (w[i]->n_out + MAT_LANES - 1) / MAT_LANES;
    if (a->n_rows > MAT_FEW && (a->kinds & (MAT_ACT_BF16 | MAT_ACT_F32)) == 0)
        job.group = MAT_PAIR; /* int8 activations are short: what more panels at once gain, their results' hops lose */
    while (job.group > MAT_WIDE && all_panels < 8 * (int64_t)job.group * pool_threads(p))
        job.group /= 2;
    job.first_group[0] = 0;
    for (int32_t i = 0; i < n_w; i++) {
        mul_one *m = &job.m[i];
        *m = (mul_one){*w[i], mat_layout_of(w[i]->type), y[i], ld_y[i], bias ? bias[i] : NULL, 0};
        m->n_units = (w[i]->n_in + m->l->unit_values - 1) / m->l->unit_values;
        int64_t n_panels = (w[i]->n_out + MAT_LANES - 1) / MAT_LANES;
        job.first_group[i + 1] = job.first_group[i] + (int32_t)((n_panels + job.group - 1) / job.group);
        bytes += (size_t)n_panels * (size_t)m->n_units * (size_t)m->l->panel_unit;
    }
    const int32_t n_groups = job.first_group[n_w], n_threads = pool_threads(p);
    if (n_groups == 0)
        return;
    while (n_groups * job.n_cuts < 8 * n_threads && a->n_tiles / (job.n_cuts + 1) >= CUT_TILES)
        job.n_cuts++;
    const size_t item_bytes = bytes / (size_t)n_groups + 1;
    int32_t grain = a->n_rows > MAT_FEW ? 1 : (int32_t)(GRAIN_BYTES / item_bytes);
    pool_run(p, n_groups * job.n_cuts, grain < 1 ? 1 : grain, mul_items, &job);
}

void mat_mul(pool *p, const mat *const *w, int32_t n_w, const void *act, int32_t n_rows, float *const *y, const int64_t *ld_y,
             const float *const *bias)
{
    const mat_act *a = mat_act_header(act);
    if (n_rows <= 0)
        return;
    for (int32_t i = 0; i < n_w; i += MAT_MAX_TOGETHER) {
        int32_t n = n_w - i < MAT_MAX_TOGETHER ? n_w - i : MAT_MAX_TOGETHER;
        mul_some(p, w + i, n, a, y + i, ld_y + i, bias ? bias + i : NULL);
    }
}

void mat_will_mul(pool *p, const mat *const *w, int32_t n_w)
{
    enum { AHEAD_BYTES = 49152 }; /* what a core reads in the 1-2 us between stages; a part of any L2 */
    const int32_t n_threads = p ? pool_threads(p) : 0;
    size_t all = 0, before = 0;
    for (int32_t i = 0; i < n_w; i++)
        all += w[i]->n_bytes;
    for (int32_t t = 0, i = 0; t < n_threads; t++) {
        const size_t begin = all / (size_t)n_threads * (size_t)t / 64 * 64; /* near enough to where the pool will cut */
        while (i + 1 < n_w && begin >= before + w[i]->n_bytes)
            before += w[i++]->n_bytes;
        const size_t left = before + w[i]->n_bytes - begin;
        pool_ahead(p, t, (const char *)w[i]->data + (begin - before), left < AHEAD_BYTES ? left : AHEAD_BYTES);
    }
}

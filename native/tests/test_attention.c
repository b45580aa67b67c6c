/* Row-wise operations and attention, each instruction set against the double-precision reference (../src/ref), and attention
 * against itself: the same bits however rows are grouped, split and threaded. */
#include <math.h>

#include "attention.h"
#include "milad.h"
#include "ref/ref.h"
#include "test.h"

static const char *const names[] = {"c", "avx2", "avx512", "neon"};

static void fill(uint64_t *seed, float *x, int64_t n, float size) {
    for (int64_t i = 0; i < n; i++)
        x[i] = test_uniform(seed) * size;
}

static double *widen(const float *x, int64_t n) {
    double *y = malloc((size_t)n * sizeof *y);
    for (int64_t i = 0; i < n; i++)
        y[i] = x[i];
    return y;
}

static void test_rows(const ops *o) {
    static const int32_t sizes[] = {1, 3, 16, 20, 64, 100, 576, 1536};
    uint64_t seed = 1;
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        const int32_t n = sizes[s];
        float x[1536], y[1536], w[1536], got[1536];
        double want[1536];
        fill(&seed, x, n, 8);
        fill(&seed, y, n, 2);
        fill(&seed, w, n, 1);
        double *dx = widen(x, n), *dy = widen(y, n);
        ref_rms_norm(want, dx, w, n, 1e-5);
        o->rms_norm(got, x, w, n, 1e-5f);
        CHECK(ref_nmse(got, want, n) <= 1e-12);
        ref_swiglu(want, dx, dy, n);
        memcpy(got, x, sizeof got);
        o->swiglu(got, y, n);
        CHECK(ref_nmse(got, want, n) <= 1e-12);
        memcpy(got, x, sizeof got);
        o->add(got, y, n);
        for (int32_t i = 0; i < n; i++)
            CHECK(got[i] == x[i] + y[i]);
        free(dx);
        free(dy);
    }
    float gate[4] = {-200, 200, NAN, -INFINITY}, up[4] = {1, 1, 1, 1};
    o->swiglu(gate, up, 4);
    CHECK(gate[0] <= 0 && gate[0] > -1e-30 && gate[1] == 200 && isnan(gate[2]));
}

static void test_rope(const ops *o) {
    static const struct { int32_t d, n_rot, style; int64_t position; } cases[] = {
        {64, 64, ROPE_PAIRS, 0}, {64, 64, ROPE_PAIRS, 8191}, {64, 64, ROPE_HALVES, 1000000}, {20, 12, ROPE_HALVES, 77},
        {80, 32, ROPE_PAIRS, 131071}};
    uint64_t seed = 2;
    for (size_t s = 0; s < sizeof cases / sizeof *cases; s++) {
        const int32_t d = cases[s].d, half = cases[s].n_rot / 2;
        float v[3 * 80], cs[80], inv_freq[40];
        fill(&seed, v, 3 * d, 3);
        double *want = widen(v, 3 * d);
        for (int32_t i = 0; i < half; i++) {
            inv_freq[i] = (float)pow(1e5, -2.0 * i / cases[s].n_rot);
            cs[i] = (float)cos((double)cases[s].position * inv_freq[i]);
            cs[half + i] = (float)sin((double)cases[s].position * inv_freq[i]);
        }
        o->rope(v, 3, d, cases[s].n_rot, cases[s].style, cs);
        for (int32_t h = 0; h < 3; h++)
            ref_rope(want + h * d, d, cases[s].n_rot, cases[s].style, cases[s].position, inv_freq, 1);
        CHECK(ref_nmse(v, want, 3 * d) <= 1e-13);
        free(want);
    }
}

/* Every F16 number comes back from F32, and what lies between two goes to the nearer, ties to even. */
static void test_f16(const ops *o) {
    for (uint32_t i = 0; i < 65536; i++) {
        uint16_t h = (uint16_t)i, again;
        float x, below, above;
        o->f32_from_f16(&x, &h, 1);
        const uint32_t exponent = i >> 10 & 31, fraction = i & 1023;
        if (exponent == 31) {
            CHECK(fraction ? isnan(x) : isinf(x));
            continue;
        }
        const double want = ldexp(exponent ? 1024 + fraction : fraction, (int)(exponent ? exponent : 1) - 25);
        CHECK(fabsf(x) == (float)want && !signbit(x) == !(i >> 15));
        o->f16_from_f32(&again, &x, 1);
        CHECK_INT(again, h);
        if ((i & 0x7fff) >= 0x7bff)
            continue;
        uint16_t next = (uint16_t)(i + 1);
        o->f32_from_f16(&above, &next, 1);
        below = (x + above) / 2; /* exact in F32 */
        o->f16_from_f32(&again, &below, 1);
        CHECK_INT(again, i & 1 ? next : h);
        below = nextafterf(below, above);
        o->f16_from_f32(&again, &below, 1);
        CHECK_INT(again, next);
    }
    float big[3] = {1e30f, -65520, NAN}, back[3];
    uint16_t h[3];
    o->f16_from_f32(h, big, 3);
    o->f32_from_f16(back, h, 3);
    CHECK(back[0] == 65504 && back[1] == -65504 && isnan(back[2]));
}

enum { N = 530, N_BLOCKS = 64 };

typedef struct bench {
    hparams hp;
    const ops *o;
    kv *c;
    float *q, *k, *v;    /* [N] rows */
    int32_t blocks[N_BLOCKS];
} bench;

static void bench_open(bench *b, const ops *o, int32_t n_head, int32_t n_head_kv, int32_t d, int32_t type, uint64_t seed) {
    *b = (bench){.o = o, .hp = {.n_layer = 2, .n_head = n_head, .n_head_kv = n_head_kv, .head_dim = d,
                                .attn_scale = (float)(1 / sqrt(d))}};
    CHECK_INT(kv_open(&b->hp, N_BLOCKS, type, &b->c), 0);
    /* Stale contents must not matter: everything is NaN before it is written. */
    void *page = malloc(kv_block_bytes(b->c));
    memset(page, 0xff, kv_block_bytes(b->c));
    for (int32_t i = 0; i < N_BLOCKS; i++) {
        kv_write(b->c, i, page);
        b->blocks[i] = (i * 37 + 11) % N_BLOCKS;
    }
    free(page);
    b->q = malloc((size_t)N * n_head * d * 4);
    b->k = malloc((size_t)N * n_head_kv * d * 4);
    b->v = malloc((size_t)N * n_head_kv * d * 4);
    fill(&seed, b->q, (int64_t)N * n_head * d, 4);
    fill(&seed, b->k, (int64_t)N * n_head_kv * d, 2);
    fill(&seed, b->v, (int64_t)N * n_head_kv * d, 2);
    for (int32_t t = 0; t < N; t++)
        kv_append(b->c, o, 1, b->blocks[t / 32], t % 32, b->k + (int64_t)t * n_head_kv * d, b->v + (int64_t)t * n_head_kv * d);
}

static void bench_close(bench *b) {
    kv_close(b->c);
    free(b->q);
    free(b->k);
    free(b->v);
}

/* All N rows in steps of `chunk`, and with `others`: one row of another sequence on either side. */
static float *run(bench *b, int32_t chunk, int32_t n_threads, int32_t others) {
    const int64_t width = (int64_t)b->hp.n_head * b->hp.head_dim;
    float *out = malloc((size_t)(N * width) * 4), *q = malloc((size_t)((chunk + 2) * width) * 4), *o = malloc((size_t)((chunk + 2) * width) * 4);
    milad_row *rows = calloc((size_t)chunk + 2, sizeof *rows);
    milad_sequence sequences[2] = {{.blocks = b->blocks, .n_blocks = N_BLOCKS}, {.blocks = b->blocks, .n_blocks = N_BLOCKS}};
    pool *p = pool_open(n_threads);
    attention *a;
    CHECK_INT(attention_open(&b->hp, b->o, p, b->c, chunk + 2, &a), 0);
    for (int32_t t = 0; t < N; t += chunk) {
        int32_t n = 0, first = others ? 1 : 0, count = N - t < chunk ? N - t : chunk;
        if (others)
            rows[n++] = (milad_row){.position = 300, .sequence = 1};
        for (int32_t i = 0; i < count; i++)
            rows[n++] = (milad_row){.position = t + i, .sequence = 0};
        if (others)
            rows[n++] = (milad_row){.position = 5, .sequence = 1};
        memcpy(q + first * width, b->q + t * width, (size_t)(count * width) * 4);
        if (others) {
            memcpy(q, b->q, (size_t)width * 4);
            memcpy(q + (n - 1) * width, b->q, (size_t)width * 4);
        }
        attention_plan(a, rows, n, sequences);
        attention_run(a, 1, q, o);
        memcpy(out + t * width, o + first * width, (size_t)(count * width) * 4);
    }
    attention_close(a);
    pool_close(p);
    free(q);
    free(o);
    free(rows);
    return out;
}

/* As BF16 tiles see it. */
static void round_query(const ops *o, const float *from, double *q, int32_t d, float attn_scale) {
    const float scale = attn_scale * 1.44269504f;
    for (int32_t i = 0; i < d; i++) {
        float x = from[i] * scale;
        uint16_t h;
        o->bf16_from_f32(&h, &x, 1);
        const uint32_t u = (uint32_t)h << 16;
        memcpy(&x, &u, 4);
        q[i] = (double)x / (double)scale;
    }
}

/* As Q8_0 tiles see it where bytes are multiplied: rotated and rounded, then rotated back. */
static void round_query_q8(const ops *o, const float *from, double *q, int32_t d) {
    float x[256];
    int8_t bytes[ATTN_Q8_GROUP];
    for (int32_t g = 0; g < d; g += ATTN_Q8_GROUP) {
        const int32_t n = d - g < ATTN_Q8_GROUP ? d - g : ATTN_Q8_GROUP;
        const float step = o->rotated_i8(bytes, from + g, n);
        for (int32_t i = 0; i < n; i++)
            x[g + i] = (float)bytes[i] * step;
    }
    o->rotate(x, d);
    for (int32_t i = 0; i < d; i++)
        q[i] = x[i];
}

/* Weights of Q8_0 tiles are bytes, 255 steps of the greatest of 64: each off by 1 / 510 of it. Elsewhere sums are the same but for F32's
 * rounding. */
static double nmse_bound(const ops *o, int32_t type) {
    if (type == KV_Q8_0)
        return o->attn_scores_q8 ? 3e-4 : 1e-11;
    return type == KV_BF16 ? 1e-5 : 1e-11; /* BF16: weights are rounded, some 2^-10 each */
}

static void check_reference(bench *b, const float *got, int32_t type) {
    static const double bounds[] = {[KV_F16] = 1e-3, [KV_Q8_0] = 4e-2, [KV_F32] = 0, [KV_BF16] = 4e-3};
    static const int32_t positions[] = {0, 1, 30, 31, 32, 100, 255, 256, 257, 511, 512, N - 1};
    const int32_t d = b->hp.head_dim, n_kv = b->hp.n_head_kv, per_head = b->hp.n_head / n_kv;
    double *k = malloc((size_t)N * d * sizeof *k), *v = malloc((size_t)N * d * sizeof *v), *want = malloc((size_t)d * sizeof *want);
    float *tile_k = malloc((size_t)d * 32 * 4), *tile_v = malloc((size_t)d * 32 * 4);
    for (int32_t h = 0; h < n_kv; h++) {
        for (int32_t t = 0; t < N; t++) {
            float key[256];
            if (t % 32 == 0)
                kv_expand(b->c, b->o, 1, b->blocks[t / 32], h, tile_k, tile_v);
            for (int32_t i = 0; i < d; i++)
                key[i] = tile_k[i * 32 + t % 32];
            if (type == KV_Q8_0)
                b->o->rotate(key, d);
            for (int32_t i = 0; i < d; i++) {
                k[(int64_t)t * d + i] = key[i];
                v[(int64_t)t * d + i] = tile_v[t % 32 * d + i];
                CHECK_NEAR(k[(int64_t)t * d + i], b->k[((int64_t)t * n_kv + h) * d + i], bounds[type]);
                CHECK_NEAR(v[(int64_t)t * d + i], b->v[((int64_t)t * n_kv + h) * d + i], bounds[type]);
            }
        }
        for (size_t p = 0; p < sizeof positions / sizeof *positions; p++)
            for (int32_t g = 0; g < per_head; g++) {
                const int64_t at = ((int64_t)positions[p] * b->hp.n_head + h * per_head + g) * d;
                double *q = widen(b->q + at, d);
                if (type == KV_BF16)
                    round_query(b->o, b->q + at, q, d, b->hp.attn_scale);
                else if (type == KV_Q8_0 && b->o->attn_scores_q8)
                    round_query_q8(b->o, b->q + at, q, d);
                ref_attention(want, q, k, v, d, positions[p] + 1, d, b->hp.attn_scale);
                double nmse = ref_nmse(got + at, want, d);
                CHECK(nmse <= nmse_bound(b->o, type));
                free(q);
            }
    }
    free(k);
    free(v);
    free(want);
    free(tile_k);
    free(tile_v);
}

static void test_shape(const ops *o, int32_t n_head, int32_t n_head_kv, int32_t d, int32_t type) {
    static const struct { int32_t chunk, n_threads, others; } ways[] = {
        {1, 1, 0}, {1, 2, 1}, {7, 2, 0}, {3, 1, 1}, {32, 2, 0}, {33, 1, 1}, {200, 3, 0}, {N, 1, 0}};
    bench b;
    bench_open(&b, o, n_head, n_head_kv, d, type, 3);
    float *want = run(&b, N, 2, 1);
    check_reference(&b, want, type);
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        float *got = run(&b, ways[i].chunk, ways[i].n_threads, ways[i].others);
        CHECK(memcmp(got, want, (size_t)N * n_head * d * 4) == 0);
        free(got);
    }
    free(want);
    bench_close(&b);
}

/* What is no number in a damaged model's keys or values reaches the rows that see it, and no other (products of floats: none before
 * its block of 32, whose values are multiplied by zero). */
static void test_not_a_number(const ops *o, int32_t type) {
    enum { TOKEN = 300 };
    const int32_t first = type == KV_Q8_0 && o->attn_scores_q8 ? TOKEN : TOKEN / 32 * 32;
    static const float bad[] = {NAN, INFINITY};
    for (int32_t way = 0; way < 4; way++) {
        bench b;
        bench_open(&b, o, 6, 2, 64, type, 5);
        float *want = run(&b, N, 2, 0), k[128], v[128];
        memcpy(k, b.k + TOKEN * 128, sizeof k);
        memcpy(v, b.v + TOKEN * 128, sizeof v);
        (way < 2 ? k : v)[70] = bad[way % 2]; /* in the second head */
        kv_append(b.c, o, 1, b.blocks[TOKEN / 32], TOKEN % 32, k, v);
        float *got = run(&b, N, 2, 0), *single = run(&b, 1, 1, 0);
        for (int32_t t = 0; t < N; t++)
            for (int32_t h = 0; h < 6; h++) {
                const float *row = got + (t * 6 + h) * 64, *alone = single + (t * 6 + h) * 64;
                int32_t finite = 1, all = 1;
                for (int32_t i = 0; i < 64; i++) {
                    finite &= isfinite(row[i]) && isfinite(alone[i]);
                    all &= !isfinite(row[i]) && !isfinite(alone[i]);
                }
                if (t < first || h < 3)
                    CHECK(finite && memcmp(row, want + (t * 6 + h) * 64, 256) == 0);
                else if (t >= TOKEN && way % 2 == 0)
                    CHECK(way == 0 || type == KV_Q8_0 ? all : isnan(row[6]) && isnan(alone[6]));
            }
        free(want);
        free(got);
        free(single);
        bench_close(&b);
    }
}

/* Arguments: the instruction sets to test; none: all. */
int main(int argc, char **argv) {
    static const struct { int32_t n_head, n_head_kv, d; } shapes[] = {
        {9, 3, 64}, {8, 1, 20}, {3, 3, 7}, {14, 2, 64}, {4, 4, 16}, {2, 1, 128}, {5, 1, 80}, {4, 2, 65}, {3, 1, 130}, {2, 2, 63}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        int32_t wanted = argc == 1;
        for (int k = 1; k < argc; k++) wanted |= strcmp(argv[k], names[i]) == 0;
        if (!wanted) continue;
        const ops *o = ops_named(names[i]);
        if (!o) {
            fprintf(stderr, "%s: not on this machine, not tested\n", names[i]);
            continue;
        }
        test_rows(o);
        test_rope(o);
        test_f16(o);
        for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
            for (int32_t type = KV_F16; type <= (s < (i ? 3 : 1) ? KV_BF16 : i ? KV_Q8_0 : KV_F16); type++) /* plain C is slow */
                test_shape(o, shapes[s].n_head, shapes[s].n_head_kv, shapes[s].d, type);
        for (int32_t type = KV_F16; type <= KV_BF16; type++)
            test_not_a_number(o, type);
    }
    return test_done();
}

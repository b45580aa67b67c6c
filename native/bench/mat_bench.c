/* mat_bench.c: matrix products as shares of the machine's limits, measured in the same process, interleaved.
 *
 *   mat_bench [decode|prefill|batch] [threads] [type ...]
 *
 * decode: one row through a model's matrices, bytes/s over the read probe of the same bytes just before and after;
 * batch: 1..16 rows likewise; prefill: 512 rows, operations/s over the int8 probe (BF16, F32: their own).
 * Medians of ratios (MAT_BENCH_BEST=1: ratio of the bests, for work on a busy machine). A figure counts only while nothing else runs; the probes show when something does.
 */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "mat.h"
#include "pool.h"
#include "probe.h"

enum { ROUNDS = 15, MAX_MATS = 512 };

typedef struct shape { int32_t n_out, n_in; } shape;
static const shape one_b[] = {{2048, 2048}, {512, 2048}, {512, 2048}, {2048, 2048}, {8192, 2048}, {8192, 2048}, {2048, 8192}};
static const shape smol[] = {{576, 576}, {192, 576}, {192, 576}, {576, 576}, {1536, 576}, {1536, 576}, {576, 1536}};
static const int32_t all_types[] = {MAT_Q8_0, MAT_Q4_0, MAT_Q4_1, MAT_BF16, MAT_Q4_K, MAT_Q6_K, MAT_Q5_0, MAT_Q5_1, MAT_Q5_K,
                                    MAT_Q2_K, MAT_Q3_K, MAT_IQ4_NL, MAT_F16, MAT_F32};

static double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double median(double *v, int n)
{
    qsort(v, (size_t)n, sizeof *v, by_value);
    return v[n / 2];
}

static double best(const double *v, int n)
{
    double top = v[0];
    for (int i = 1; i < n; i++)
        top = v[i] > top ? v[i] : top;
    return top;
}

typedef struct model {
    mat m[MAX_MATS];
    int32_t n;
    char *data;
    size_t n_bytes, room;
} model;

/* Layers of random bytes (scales made small), up to about max_bytes. */
static void build(model *w, int32_t type, const shape *s, int32_t n_layers, int32_t n_head, size_t max_bytes)
{
    memset(w, 0, sizeof *w);
    for (int32_t l = 0; l <= n_layers; l++) {
        for (int i = 0; i < (l < n_layers ? 7 : 1); i++) {
            mat m = {type, MAT_PANELS, l < n_layers ? s[i].n_in : s[0].n_in, l < n_layers ? s[i].n_out : n_head, NULL, 0};
            m.n_bytes = m.n_out ? mat_panel_bytes(&m) : 0;
            if (m.n_bytes == 0 || w->n_bytes + m.n_bytes > max_bytes)
                continue;
            w->m[w->n++] = m;
            w->n_bytes += m.n_bytes;
        }
    }
    w->room = (w->n_bytes + (4u << 20)) & ~(size_t)((2u << 20) - 1);
    char *raw = mmap(NULL, w->room + (2u << 20), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    w->data = (char *)(((uintptr_t)raw + (2u << 20) - 1) & ~(uintptr_t)((2u << 20) - 1));
    madvise(w->data, w->room, MADV_HUGEPAGE);
    uint64_t x = 88172645463325252u;
    for (size_t i = 0; i + 8 <= w->n_bytes; i += 8) {
        x ^= x << 13, x ^= x >> 7, x ^= x << 17;
        uint64_t v = x & 0x2fff2fff2fff2fffu; /* as halves: finite and small */
        memcpy(w->data + i, &v, 8);
    }
    size_t at = 0;
    for (int32_t i = 0; i < w->n; i++) {
        w->m[i].data = w->data + at;
        at += w->m[i].n_bytes;
    }
}

static float *x_of(int64_t n)
{
    float *x = aligned_alloc(64, (size_t)n * sizeof *x);
    for (int64_t i = 0; i < n; i++)
        x[i] = (float)((i * 2654435761u >> 7) % 2001) * 1e-3f - 1.0f;
    return x;
}

static void pass(pool *p, const model *w, void **acts, int32_t n_rows, float *y)
{
    for (int32_t i = 0; i < w->n; i++) {
        const mat *m = &w->m[i];
        mat_mul(p, &m, 1, acts[m->n_in > 2048 || m->n_in == 1536], n_rows, &y, &m->n_out, NULL);
    }
}

static void prepare(pool *p, void **acts, int32_t type, const float *x, const shape *s, int32_t n_rows)
{
    const int64_t widths[2] = {s[0].n_in, s[6].n_in};
    for (int i = 0; i < 2; i++) {
        acts[i] = malloc(mat_act_bytes(widths[i], n_rows));
        mat_act_prepare(p, acts[i], mat_act_kind(type), x, widths[i], widths[i], n_rows);
    }
}

static void bench_rows(pool *p, int32_t type, bool big, const int32_t *counts, int n_counts)
{
    const shape *s = big ? one_b : smol;
    model w;
    build(&w, type, s, big ? 16 : 30, big ? 0 : 49152, 320u << 20);
    float *x = x_of(16 * 8192), *y = aligned_alloc(64, 16 * 49152 * 4);
    printf("%-5s %-6s %d threads, %4.0f MB:", big ? "1B" : "Smol", mat_type_name(type), (int)pool_threads(p), (double)w.n_bytes / 1e6);
    for (int c = 0; c < n_counts; c++) {
        void *acts[2];
        double share[ROUNDS], rate[ROUNDS], probe[ROUNDS];
        prepare(p, acts, type, x, s, counts[c]);
        double before = probe_read_once(p, w.data, w.n_bytes);
        for (int r = 0; r < ROUNDS; r++) {
            double begin = now_s();
            pass(p, &w, acts, counts[c], y);
            double took = now_s() - begin, after = probe_read_once(p, w.data, w.n_bytes);
            share[r] = 0.5 * (before + after) / took;
            rate[r] = (double)w.n_bytes / took / 1e9;
            probe[r] = (double)w.n_bytes / after / 1e9;
            before = after;
        }
        printf("  n%d %.3f", (int)counts[c], getenv("MAT_BENCH_BEST") ? best(rate, ROUNDS) / best(probe, ROUNDS) : median(share, ROUNDS));
        if (c == 0)
            printf(" (%.1f of %.1f GB/s)", median(rate, ROUNDS), median(probe, ROUNDS));
        fflush(stdout);
        free(acts[0]), free(acts[1]);
    }
    printf("\n");
    munmap(w.data, w.room);
    free(x), free(y);
}

static void bench_prefill(pool *p, int32_t type)
{
    static const shape shapes[] = {{2048, 2048}, {8192, 2048}, {2048, 8192}, {576, 576}, {1536, 576}, {576, 1536}};
    enum { N_ROWS = 512, N_ROUNDS = 7 };
    const enum probe_kind kind = mat_act_kind(type) == MAT_ACT_F32 ? PROBE_F32 : mat_act_kind(type) == MAT_ACT_BF16 ? PROBE_BF16 : PROBE_INT8;
    float *x = x_of((int64_t)N_ROWS * 8192), *y = aligned_alloc(64, (size_t)N_ROWS * 8192 * 4);
    printf("%-6s %d threads, 512 rows:", mat_type_name(type), (int)pool_threads(p));
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        model w;
        const shape s[7] = {shapes[i], shapes[i], shapes[i], shapes[i], shapes[i], shapes[i], shapes[i]};
        build(&w, type, s, 0, shapes[i].n_out, 1u << 30);
        double share[N_ROUNDS], quant[N_ROUNDS], probe[N_ROUNDS];
        void *act = malloc(mat_act_bytes(shapes[i].n_in, N_ROWS));
        const mat *m = &w.m[0];
        const double ops = 2.0 * shapes[i].n_in * shapes[i].n_out * N_ROWS;
        for (int r = 0; r < N_ROUNDS; r++) {
            double t0 = now_s();
            mat_act_prepare(p, act, mat_act_kind(type), x, shapes[i].n_in, shapes[i].n_in, N_ROWS);
            double t1 = now_s();
            const int n = shapes[i].n_in < 2048 ? 8 : 1;
            for (int k = 0; k < n; k++)
                mat_mul(p, &m, 1, act, N_ROWS, &y, &m->n_out, NULL);
            double t2 = now_s();
            probe[r] = probe_ops_once(p, kind);
            share[r] = ops * n / (t2 - t1) / probe[r];
            quant[r] = (t1 - t0) * n / (t2 - t1);
        }
        printf("  %dx%d %.3f (+%.0f%% prepare)", (int)shapes[i].n_out, (int)shapes[i].n_in, median(share, N_ROUNDS), 100 * median(quant, N_ROUNDS));
        if (i == 0)
            printf(" [peak %.0f G]", median(probe, N_ROUNDS) / 1e9);
        fflush(stdout);
        free(act);
        munmap(w.data, w.room);
    }
    printf("\n");
    free(x), free(y);
}

int main(int argc, char **argv)
{
    static const int32_t one[] = {1}, few[] = {1, 2, 3, 4, 6, 8, 12, 16};
    const char *what = argc > 1 ? argv[1] : "decode";
    pool *p = pool_open(argc > 2 ? atoi(argv[2]) : pool_usable_cores());
    for (size_t i = 0; i < sizeof all_types / sizeof *all_types; i++) {
        bool wanted = argc <= 3;
        for (int a = 3; a < argc; a++)
            wanted = wanted || strcmp(argv[a], mat_type_name(all_types[i])) == 0;
        if (!wanted)
            continue;
        if (strcmp(what, "prefill") == 0) {
            bench_prefill(p, all_types[i]);
            continue;
        }
        const bool batch = strcmp(what, "batch") == 0;
        for (int big = 1; big >= 0; big--)
            bench_rows(p, all_types[i], big, batch ? few : one, batch ? 8 : 1);
    }
    pool_close(p);
    return 0;
}

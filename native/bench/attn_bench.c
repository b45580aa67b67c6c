/* attn_bench.c: attention as shares of the machine's limits, measured in the same process, interleaved.
 *
 *   attn_bench [decode|prefill] [threads] [depth] [kv type] [heads] [kv heads] [head_dim] [layers]
 *
 * decode: one row at the depth through all layers, bytes/s over the read probe; prefill: 512 rows from the depth on in one layer,
 * operations/s over the BF16 probe. Medians of ratios. Default: SmolLM2-135M 4,096 deep, BF16.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "attention.h"
#include "milad.h"
#include "probe.h"

enum { ROUNDS = 9, ROWS = 512 };

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static int by_value(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double median(double *v, int n) {
    qsort(v, (size_t)n, sizeof *v, by_value);
    return v[n / 2];
}

static float *numbers(int64_t n, float size) {
    float *x = malloc((size_t)n * sizeof *x);
    uint64_t state = 1;
    for (int64_t i = 0; x && i < n; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        x[i] = ((float)(state >> 40) / 8388608.0f - 1) * size;
    }
    return x;
}

int main(int argc, char **argv) {
    const char *mode = argc > 1 ? argv[1] : "decode";
    int32_t arg[] = {2, 4096, KV_BF16, 9, 3, 64, 30};
    for (int i = 2; i < argc && i < 9; i++) arg[i - 2] = atoi(argv[i]);
    const int32_t prefill = strcmp(mode, "prefill") == 0, depth = arg[1], n_layer = prefill ? 1 : arg[6];
    const hparams hp = {.n_layer = n_layer, .n_head = arg[3], .n_head_kv = arg[4], .head_dim = arg[5], .attn_scale = 0.125f};
    const int32_t n_rows = prefill ? ROWS : 1, n_tokens = depth + n_rows, n_blocks = (n_tokens + 31) / 32;
    const ops *o = ops_get();
    pool *p = pool_open(arg[0]);
    kv *c = NULL;
    attention *a = NULL;
    if (!p || kv_open(&hp, n_blocks, arg[2], &c) || attention_open(&hp, o, p, c, n_rows, &a)) return 1;
    const int64_t width = (int64_t)hp.n_head * hp.head_dim, kv_width = (int64_t)hp.n_head_kv * hp.head_dim;
    float *q = numbers(n_rows * width, 2), *k = numbers(4099 + 2 * kv_width, 2), *out = numbers(n_rows * width, 0);
    int32_t *blocks = malloc((size_t)n_blocks * sizeof *blocks);
    milad_row *rows = calloc((size_t)n_rows, sizeof *rows);
    if (!q || !k || !out || !blocks || !rows) return 1;
    for (int32_t i = 0; i < n_blocks; i++) blocks[i] = i;
    for (int32_t l = 0; l < n_layer; l++)
        for (int32_t t = 0; t < n_tokens; t++) kv_append(c, o, l, t / 32, t % 32, k + t * 7 % 4099, k + t * 13 % 4099 + kv_width);
    for (int32_t r = 0; r < n_rows; r++) rows[r].position = depth + r;
    const milad_sequence sequence = {.blocks = blocks, .n_blocks = n_blocks};
    double share[ROUNDS], rate[ROUNDS], limit[ROUNDS];
    double work = 0; /* operations of a layer, or bytes of all */
    for (int32_t r = 0; r < n_rows; r++) work += (depth + r + 1.0) * (double)width * 4;
    if (!prefill) work = (double)kv_block_bytes(c) * n_tokens / 32;
    const int32_t times = (int32_t)((prefill ? 4e10 : 2e9) / work) + 1;
    double before = 0, after;
    for (int r = -1; r < ROUNDS; r++, before = after) {
        const double start = now_s();
        for (int32_t i = 0; i < times; i++) {
            attention_plan(a, rows, n_rows, &sequence);
            for (int32_t l = 0; l < n_layer; l++) attention_run(a, l, q, out);
        }
        const double took = now_s() - start;
        if (milad_probe(prefill ? PROBE_BF16 : PROBE_READ, arg[0], &after)) return 1;
        if (r < 0) continue;
        limit[r] = before > after ? before : after;
        rate[r] = work * times / took;
        share[r] = rate[r] / limit[r];
    }
    uint64_t bits = 0;
    for (int64_t i = 0; i < n_rows * width; i++) {
        uint32_t u;
        memcpy(&u, out + i, 4);
        bits = (bits ^ u) * 1099511628211u;
    }
    const double m = median(share, ROUNDS);
    printf("%s %d threads depth %d: %.1f G/s of %.1f, share %.3f", mode, arg[0], depth, median(rate, ROUNDS) / 1e9,
           median(limit, ROUNDS) / 1e9, m);
    if (prefill) printf(" (%.1f cycles where the products need 64)", 64 / m);
    printf("; bits %08x\n", (unsigned)(bits >> 32));
    attention_close(a);
    kv_close(c);
    pool_close(p);
    return 0;
}

/* test_mat.c: every type's products against ref_mat.c, packing and back, and batch invariance bit by bit: rows alone or
 * together, matrices alone or in one stage, one thread or several, panels or rows as in the file.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "mat.h"
#include "mat_internal.h"
#include "ref/ref_mat.h"
#include "test.h"

static const int32_t types[] = {MAT_F32, MAT_F16, MAT_BF16, MAT_Q4_0, MAT_Q4_1, MAT_Q5_0, MAT_Q5_1, MAT_Q8_0,
                                MAT_Q2_K, MAT_Q3_K, MAT_Q4_K, MAT_Q5_K, MAT_Q6_K, MAT_IQ4_NL};
enum { N_TYPES = sizeof types / sizeof *types };

static uint64_t state = 4;

static uint32_t draw(void)
{
    return (uint32_t)(test_random(&state) >> 32);
}

static float draw_float(void)
{
    return (float)(int32_t)draw() * 0x1p-31f;
}

static uint16_t half_of(float f) /* of normal values only, truncated */
{
    uint32_t b;
    memcpy(&b, &f, 4);
    return (uint16_t)((b >> 16 & 0x8000u) | (((b >> 13) - (112u << 10)) & 0x7fffu));
}

static void put_half(uint8_t *p, float f)
{
    uint16_t h = half_of(f);
    memcpy(p, &h, 2);
}

/* Random blocks with scales of a model's size. */
static void fill(int32_t type, uint8_t *data, size_t n_bytes)
{
    static const struct { int32_t type; int d, m; } scale_at[] = {
        {MAT_Q4_0, 0, -1}, {MAT_Q4_1, 0, 2}, {MAT_Q5_0, 0, -1}, {MAT_Q5_1, 0, 2}, {MAT_Q8_0, 0, -1}, {MAT_IQ4_NL, 0, -1},
        {MAT_Q2_K, 80, 82}, {MAT_Q3_K, 108, -1}, {MAT_Q4_K, 0, 2}, {MAT_Q5_K, 0, 2}, {MAT_Q6_K, 208, -1}};
    const size_t block = (size_t)mat_block_bytes(type);
    for (size_t i = 0; i < n_bytes; i++)
        data[i] = (uint8_t)draw();
    for (size_t b = 0; b + block <= n_bytes; b += block) {
        float f = draw_float();
        if (type == MAT_F32)
            memcpy(data + b, &f, 4);
        else if (type == MAT_F16)
            put_half(data + b, f * 0.5f + (f < 0 ? -0.01f : 0.01f));
        else if (type == MAT_BF16)
            memcpy(data + b, (uint8_t *)&f + 2, 2);
        for (size_t i = 0; i < sizeof scale_at / sizeof *scale_at; i++) {
            if (scale_at[i].type != type)
                continue;
            put_half(data + b + scale_at[i].d, 0.001f + 0.01f * fabsf(f));
            if (scale_at[i].m >= 0)
                put_half(data + b + scale_at[i].m, 0.002f + 0.03f * fabsf(draw_float()));
        }
    }
}

typedef struct weights {
    mat rows, panels;
} weights;

static weights make(int32_t type, int64_t n_in, int64_t n_out)
{
    weights w = {{type, MAT_ROWS, n_in, n_out, NULL, 0}, {0}};
    w.rows.n_bytes = (size_t)(n_in / mat_block_values(type) * mat_block_bytes(type) * n_out);
    uint8_t *data = malloc(w.rows.n_bytes);
    fill(type, data, w.rows.n_bytes);
    w.rows.data = data;
    w.panels = w.rows;
    w.panels.layout = MAT_PANELS;
    w.panels.n_bytes = mat_panel_bytes(&w.rows);
    void *panels = aligned_alloc(64, w.panels.n_bytes);
    /* In two parts, as the loader's threads do. */
    int64_t cut = n_out / 2 / 16 * 16;
    mat_pack_rows(&w.rows, panels, cut, n_out);
    mat_pack_rows(&w.rows, panels, 0, cut);
    w.panels.data = panels;
    return w;
}

static void drop(weights *w)
{
    free((void *)(uintptr_t)w->rows.data);
    free((void *)(uintptr_t)w->panels.data);
}

/* y[n_rows][n_out] of one matrix. */
static void product(pool *p, const mat *w, const float *x, int64_t ld_x, int32_t n_rows, float *y, const float *bias)
{
    void *act = malloc(mat_act_bytes(w->n_in, n_rows));
    mat_act_prepare(p, act, mat_act_kind(w->type), x, ld_x, w->n_in, n_rows);
    mat_mul(p, &w, 1, act, n_rows, &y, &w->n_out, &bias);
    free(act);
}

static double nmse(const float *y, const double *want, int64_t n)
{
    double error = 0, power = 0;
    for (int64_t i = 0; i < n; i++) {
        error += ((double)y[i] - want[i]) * ((double)y[i] - want[i]);
        power += want[i] * want[i];
    }
    return error / power;
}

static float *draw_x(int64_t n)
{
    float *x = malloc((size_t)n * sizeof *x);
    for (int64_t i = 0; i < n; i++)
        x[i] = draw_float() * (float)(1 + (i / 32) % 7);
    return x;
}

static bool fits(int32_t type, int64_t n_in)
{
    return n_in % mat_block_values(type) == 0;
}

static void test_reference(void)
{
    static const struct { int64_t n_in, n_out; int32_t n_rows; } shapes[] = {
        {256, 16, 1}, {512, 40, 3}, {2304, 33, 14}, {32, 16, 2}, {96, 5, 1}, {608, 70, 7}, {576, 64, 5}, {7, 20, 2}, {65, 17, 13}};
    for (int i = 0; i < N_TYPES; i++) {
        for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
            if (!fits(types[i], shapes[s].n_in))
                continue;
            weights w = make(types[i], shapes[s].n_in, shapes[s].n_out);
            int64_t n = shapes[s].n_out * shapes[s].n_rows;
            float *x = draw_x(shapes[s].n_in * shapes[s].n_rows), *y = malloc((size_t)n * sizeof *y);
            double *want = malloc((size_t)n * sizeof *want);
            ref_mat_mul(&w.rows, x, shapes[s].n_rows, want);
            product(NULL, &w.panels, x, shapes[s].n_in, shapes[s].n_rows, y, NULL);
            double e = nmse(y, want, n);
            if (!(e <= 1e-6))
                fprintf(stderr, "%s %ldx%ld, %d rows: NMSE %g\n", mat_type_name(types[i]), (long)shapes[s].n_out,
                        (long)shapes[s].n_in, (int)shapes[s].n_rows, e);
            CHECK(e <= 1e-6);
            free(x), free(y), free(want), drop(&w);
        }
    }
    float nan_y = NAN;
    double one = 1;
    CHECK(!(nmse(&nan_y, &one, 1) <= 1e-6));
}

static void test_rows_survive_packing(void)
{
    for (int i = 0; i < N_TYPES; i++) {
        int64_t n_in = mat_block_values(types[i]) == 256 ? 512 : mat_block_values(types[i]) == 32 ? 96 : 37;
        weights w = make(types[i], n_in, 21);
        float a[512], b[512], c[512];
        for (int64_t o = 0; o < 21; o++) {
            mat_row_f32(&w.rows, o, a);
            mat_row_f32(&w.panels, o, b);
            mat_dequantize(types[i], (const uint8_t *)w.rows.data + (size_t)o * (w.rows.n_bytes / 21), c, n_in);
            CHECK(memcmp(a, b, (size_t)n_in * 4) == 0);
            CHECK(memcmp(a, c, (size_t)n_in * 4) == 0);
        }
        drop(&w);
    }
}

static void test_same_bits(void)
{
    static const struct { int64_t n_in, n_out; } shapes[] = {{2304, 80}, {96, 37}, {256, 600}, {64, 16}};
    static const int32_t counts[] = {2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 16, 25, 97, 230};
    pool *pools[] = {NULL, pool_open(2), pool_open(3)};
    for (int i = 0; i < N_TYPES; i++) {
        for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
            const int64_t n_in = shapes[s].n_in, n_out = shapes[s].n_out;
            const int32_t n_max = n_in > 1000 && strcmp(mat_isa(), "c") == 0 ? 25 : 230;
            if (!fits(types[i], n_in))
                continue;
            weights w = make(types[i], n_in, n_out);
            float *x = draw_x(n_in * n_max), *bias = draw_x(n_out);
            float *want = malloc((size_t)(n_out * n_max) * 4), *y = malloc((size_t)(n_out * n_max) * 4);
            for (int32_t r = 0; r < n_max; r++)
                product(pools[r % 2], &w.panels, x + r * n_in, n_in, 1, want + r * n_out, bias);
            for (size_t c = 0; c < sizeof counts / sizeof *counts && counts[c] <= n_max; c++) {
                const int32_t r = n_max - counts[c];
                product(pools[c % 3], &w.panels, x + r * n_in, n_in, counts[c], y, bias);
                CHECK(memcmp(y, want + r * n_out, (size_t)(n_out * counts[c]) * 4) == 0);
                if (c % 5 == 0) {
                    memset(y, 0xff, (size_t)(n_out * counts[c]) * 4);
                    product(pools[1], &w.rows, x + r * n_in, n_in, counts[c], y, bias);
                    CHECK(memcmp(y, want + r * n_out, (size_t)(n_out * counts[c]) * 4) == 0);
                }
            }
            free(x), free(y), free(want), free(bias), drop(&w);
        }
    }
    pool_close(pools[1]);
    pool_close(pools[2]);
}

static void test_together(void)
{
    enum { N = 9, N_IN = 256 };
    pool *p = pool_open(2);
    for (int32_t n_rows = 1; n_rows <= 20; n_rows += 6) {
        weights w[N];
        const mat *ptr[N];
        float *y[N], *want[N];
        int64_t ld[N];
        uint32_t kinds = 0;
        float *x = draw_x(n_rows * 300);
        for (int i = 0; i < N; i++) {
            w[i] = make(types[(i * 3 + 2) % N_TYPES], N_IN, 16 + 19 * i);
            ptr[i] = &w[i].panels;
            ld[i] = w[i].rows.n_out + i;
            y[i] = malloc((size_t)(ld[i] * n_rows) * 4);
            want[i] = malloc((size_t)(ld[i] * n_rows) * 4);
            kinds |= mat_act_kind(w[i].rows.type);
            product(NULL, &w[i].panels, x, 300, n_rows, want[i], NULL);
        }
        void *act = malloc(mat_act_bytes(N_IN, n_rows));
        mat_act_prepare(p, act, kinds, x, 300, N_IN, n_rows);
        mat_mul(p, ptr, N, act, n_rows, y, ld, NULL);
        for (int i = 0; i < N; i++) {
            for (int32_t r = 0; r < n_rows; r++)
                CHECK(memcmp(y[i] + r * ld[i], want[i] + r * w[i].rows.n_out, (size_t)w[i].rows.n_out * 4) == 0);
            free(y[i]), free(want[i]), drop(&w[i]);
        }
        free(act), free(x);
    }
    pool_close(p);
}

/* n bytes that end at a page that can't be touched; 64-byte aligned when n is a multiple of 64. */
static uint8_t *guarded(size_t n, void **base, size_t *n_all)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    *n_all = (n + page - 1) / page * page + page;
    *base = mmap(NULL, *n_all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    mprotect((char *)*base + *n_all - page, page, PROT_NONE);
    return (uint8_t *)*base + *n_all - page - n;
}

/* No kernel reads or writes beyond the panels, the activations, the rows of x or the results. */
static void test_guarded(void)
{
    static const int32_t counts[] = {1, 2, 3, 4, 5, 7, 9, 11, 12, 13, 15, 16, 17, 29};
    for (int i = 0; i < N_TYPES; i++) {
        const int64_t n_in = mat_block_values(types[i]) == 256 ? 256 : mat_block_values(types[i]) == 32 ? 96 : 37;
        for (int64_t n_out = 32; n_out <= 41; n_out += 9) {
            weights w = make(types[i], n_in, n_out);
            for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
                const size_t n[] = {w.panels.n_bytes, (size_t)(counts[c] * n_in) * 4, (size_t)(counts[c] * n_out) * 4,
                                    (mat_act_bytes(n_in, counts[c]) + 63) / 64 * 64};
                void *base[4];
                size_t all[4];
                uint8_t *at[4];
                for (int k = 0; k < 4; k++)
                    at[k] = guarded(n[k], &base[k], &all[k]);
                memcpy(at[0], w.panels.data, n[0]);
                for (size_t k = 0; k < n[1] / 4; k++)
                    ((float *)at[1])[k] = draw_float();
                mat m = w.panels;
                const mat *pm = &m;
                float *y = (float *)at[2];
                m.data = at[0];
                mat_act_prepare(NULL, at[3], mat_act_kind(m.type), (float *)at[1], n_in, n_in, counts[c]);
                mat_mul(NULL, &pm, 1, at[3], counts[c], &y, &n_out, NULL);
                CHECK(isfinite(y[n_out * counts[c] - 1]));
                for (int k = 0; k < 4; k++)
                    munmap(base[k], all[k]);
            }
            drop(&w);
        }
    }
}

/* Scales that are NaN or infinite, as a hostile file may have them, and activations that are: no crash, NaN shows, in a row alone as in
 * many, where activations are zero too. */
static void test_not_finite(void)
{
    for (int i = 0; i < N_TYPES; i++) {
        weights w = make(types[i], 512, 24);
        uint8_t *data = (uint8_t *)(uintptr_t)w.panels.data;
        for (size_t b = 0; b < w.panels.n_bytes; b++)
            data[b] = (uint8_t)draw();
        for (int32_t n_rows = 1; n_rows < 40; n_rows += 7) {
            float *x = draw_x(512 * n_rows), *y = malloc((size_t)(24 * n_rows) * 4), alone[24];
            memset(x + 512 * (n_rows / 2) + 64, 0, 128 * 4);
            product(NULL, &w.panels, x, 512, n_rows, y, NULL);
            for (int32_t r = 0; r < n_rows; r++) {
                product(NULL, &w.panels, x + 512 * r, 512, 1, alone, NULL);
                for (int32_t o = 0; o < 24; o++)
                    CHECK(isnan(alone[o]) ? isnan(y[24 * r + o]) : memcmp(alone + o, y + 24 * r + o, 4) == 0);
            }
            free(y), free(x);
        }
        drop(&w);
        w = make(types[i], 512, 16);
        static const float bad[] = {NAN, INFINITY, -INFINITY};
        for (int k = 0; k < 3; k++) {
            float *x = draw_x(512), y[16];
            x[300 + k] = bad[k];
            product(NULL, &w.panels, x, 512, 1, y, NULL);
            for (int o = 0; o < 16; o++)
                CHECK(!isfinite(y[o]));
            memset(x, 0, 512 * 4);
            product(NULL, &w.panels, x, 512, 1, y, NULL);
            for (int o = 0; o < 16; o++)
                CHECK(y[o] == 0);
            free(x);
        }
        drop(&w);
    }
}

#if defined(MILAD_HAVE_AVX512)
/* The instruction sets agree to the bit: activations and expanded codes with plain C, quantised products AVX2 with AVX-512. */
static void test_instruction_sets_agree(void)
{
    enum { N_IN = 512 };
    const size_t act_bytes = N_IN / 32 * 44, half_bytes = N_IN / 32 * 16;
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx512vnni") || !__builtin_cpu_supports("avx512bw"))
        return;
    for (int i = 0; i < N_TYPES; i++) {
        if (mat_block_values(types[i]) == 1)
            continue;
        const int64_t n_units = N_IN / (mat_block_values(types[i]) == 256 ? 256 : 64);
        weights w = make(types[i], N_IN, 16);
        float *x = draw_x(N_IN), c[2][16];
        memset(x + 64, 0, 32 * 4);
        _Alignas(64) uint8_t q[3][N_IN / 32 * 44], h[3][N_IN / 32 * 16], codes[2][N_IN * 16];
        _Alignas(64) float scales[2][N_IN / 32 * MAT_SCALES_MAX * 16];
        mat_kernels_c.quantise(x, N_IN, N_IN / 32, 1, 0, q[0], h[0]);
        mat_kernels_avx2.quantise(x, N_IN, N_IN / 32, 1, 0, q[1], h[1]);
        mat_kernels_avx512.quantise(x, N_IN, N_IN / 32, 1, 0, q[2], h[2]);
        CHECK(memcmp(q[0], q[1], act_bytes) == 0 && memcmp(q[0], q[2], act_bytes) == 0);
        CHECK(memcmp(h[0], h[1], half_bytes) == 0 && memcmp(h[0], h[2], half_bytes) == 0);
        memset(scales, 0, sizeof scales);
        mat_kernels_c.expand(types[i], w.panels.data, n_units, codes[0], scales[0]);
        mat_kernels_avx512.expand(types[i], w.panels.data, n_units, codes[1], scales[1]);
        CHECK(memcmp(codes[0], codes[1], sizeof codes[0]) == 0);
        const int32_t class = mat_layout_of(types[i])->class, multiples = class == MAT_S32 || class == MAT_SM32 ? 8 : 1;
        const int32_t n_scales = class == MAT_S32 ? 1 : class == MAT_SM16 ? 4 : 2;
        for (int32_t k = 0; k < N_IN / 32 * n_scales * 16; k++) { /* -0 may be 0 */
            const int32_t block = k / 16 / n_scales, which = k / 16 % n_scales, at = block * (n_scales + multiples - 1);
            for (int32_t m = 0; m < (which ? 1 : multiples); m++)
                CHECK(scales[0][k] * (1 + (float)m / 8) == scales[1][(at + (which ? multiples - 1 + which : m)) * 16 + k % 16]);
        }
        mat_tile tile = {q[0], h[0], 1, 1};
        CHECK(mat_kernels_avx2.direct(types[i], w.panels.data, n_units, &tile, c[0], 16));
        CHECK(mat_kernels_avx512.direct(types[i], w.panels.data, n_units, &tile, c[1], 16));
        CHECK(memcmp(c[0], c[1], sizeof c[0]) == 0);
        free(x), drop(&w);
    }
}
#endif

static uint16_t bf16_of(float f)
{
    uint32_t b;
    memcpy(&b, &f, 4);
    return (b & 0x7fffffffu) > 0x7f800000u ? (uint16_t)(b >> 16 | 64u) : (uint16_t)((b + 0x7fffu + ((b >> 16) & 1u)) >> 16);
}

/* Tiles of many rows hold what the rows alone give, to the bit, in every plane: rounding's ties, numbers too small for a scale,
 * subnormals, NaN and infinity included. */
static void test_prepared_tiles(void)
{
    enum { N_ROWS = 29, LD = 200 };
    static const int64_t widths[] = {192, 160, 32, 37, 7};
    static const uint32_t odd[] = {0x7fc00001, 0x7f800001, 0xff812345, 0x7f800000, 0xff800000, 0x7f7fffff, 0x00000001, 0x807fffff,
                                   0x3f808000, 0x3f818000, 0x0d000000, 0x80000000};
    for (size_t i = 0; i < sizeof widths / sizeof *widths; i++) {
        for (int with_odd = 0; with_odd < 2; with_odd++) {
            const int64_t n = widths[i];
            const uint32_t kinds = mat_act_kind(MAT_F32) | mat_act_kind(MAT_BF16) | (n % 32 ? 0 : mat_act_kind(MAT_Q6_K));
            float *x = draw_x(N_ROWS * LD);
            for (int64_t k = 0; k < 32 && k < n; k++) { /* row 3 has a block too small for a scale, row 4 one of zeros */
                x[3 * LD + k] *= 1e-31f;
                x[4 * LD + k] = 0;
            }
            for (int k = 0; with_odd && k < 60; k++)
                memcpy(x + (draw() % N_ROWS) * LD + draw() % n, &odd[k % 12], 4);
            void *act = malloc(mat_act_bytes(n, N_ROWS));
            mat_act_prepare(NULL, act, kinds, x, LD, n, N_ROWS);
            const mat_act *a = mat_act_header(act);
            const size_t nt = (size_t)a->nt, blocks = (size_t)a->n_blocks, q_bytes = blocks * mat_act_q8_block(a->nt),
                         h_bytes = blocks * mat_act_half_block(a->nt);
            uint8_t *q = calloc(1, q_bytes), *h = calloc(1, h_bytes);
            bool same = true;
            for (int32_t tile = 0; tile < a->n_tiles; tile++) {
                for (int32_t t = 0; t < a->nt; t++) {
                    const int32_t row = tile * a->nt + t;
                    const float *v = row < N_ROWS ? x + row * LD : NULL;
                    if (a->q8)
                        mat_kernels_now()->quantise(v, v ? n : 0, a->n_blocks, a->nt, t, q, h);
                    for (size_t k = 0; k < blocks * 32; k++) {
                        const float want = v && k < (size_t)n ? v[k] : 0;
                        const uint16_t pair = bf16_of(want);
                        same = same && memcmp(a->f32 + ((size_t)tile * blocks * 32 + k) * nt + (size_t)t, &want, 4) == 0;
                        same = same && memcmp((uint16_t *)a->bf16 + (((size_t)tile * blocks * 16 + k / 2) * nt + (size_t)t) * 2 + k % 2,
                                              &pair, 2) == 0;
                    }
                }
                if (a->q8)
                    same = same && memcmp(a->q8 + (size_t)tile * q_bytes, q, q_bytes) == 0
                           && memcmp(a->halves + (size_t)tile * h_bytes, h, h_bytes) == 0;
            }
            CHECK(same);
            free(q), free(h), free(act), free(x);
        }
    }
}

static void test_sizes(void)
{
    CHECK(mat_type_name(4) == NULL && mat_block_values(4) == 0 && mat_type_supported(4) == 0);
    for (int i = 0; i < N_TYPES; i++) {
        mat m = {types[i], MAT_ROWS, 2048, 2048, NULL, 0};
        size_t file = (size_t)(2048 / mat_block_values(types[i]) * mat_block_bytes(types[i])) * 2048;
        CHECK(mat_panel_bytes(&m) >= file && (double)mat_panel_bytes(&m) <= 1.03 * (double)file);
    }
}

int main(void)
{
    fprintf(stderr, "kernels: %s\n", mat_isa());
    test_sizes();
    test_rows_survive_packing();
    test_reference();
    test_same_bits();
    test_together();
    test_not_finite();
    test_guarded();
    test_prepared_tiles();
#if defined(MILAD_HAVE_AVX512)
    test_instruction_sets_agree();
#endif
    return test_done();
}

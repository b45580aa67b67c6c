/* probe_c.c: probe kernels in plain C (what the compiler makes of them for the baseline instruction set). */
#include "../probe.h"

static int64_t read_c(const void *p, size_t n_bytes)
{
    const uint64_t *v = p;
    uint64_t a[8] = {0};
    for (size_t i = 0; i < n_bytes / 8; i += 8)
        for (int j = 0; j < 8; j++)
            a[j] |= v[i + (size_t)j];
    return (int64_t)(a[0] | a[1] | a[2] | a[3] | a[4] | a[5] | a[6] | a[7]);
}

static double int8_c(int64_t n_rounds, int64_t *n_ops)
{
    int32_t acc[64] = {0};
    int8_t x[64], y[64];
    for (int i = 0; i < 64; i++) {
        x[i] = (int8_t)(i + n_rounds);
        y[i] = (int8_t)(3 * i - 7);
    }
    for (int64_t k = 0; k < n_rounds; k++) {
        for (int i = 0; i < 64; i++)
            acc[i] += x[i] * y[i];
        __asm__ volatile("" : : "r"(acc) : "memory");
    }
    *n_ops = n_rounds * 128;
    return acc[0];
}

static double f32_c(int64_t n_rounds, int64_t *n_ops)
{
    float acc[32] = {0}, x = 1.0f + (float)n_rounds * 1e-9f;
    for (int64_t k = 0; k < n_rounds; k++) {
        for (int i = 0; i < 32; i++)
            acc[i] = acc[i] * x + x;
        __asm__ volatile("" : : "r"(acc) : "memory");
    }
    *n_ops = n_rounds * 64;
    return acc[0];
}

const probe_kernels probe_kernels_c = {read_c, {NULL, int8_c, NULL, f32_c}};

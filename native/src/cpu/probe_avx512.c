/* probe_avx512.c: probe kernels: 64-byte loads, vpdpbusd, vdpbf16ps, fma. 16 independent chains cover every latency. */
#include <immintrin.h>

#include "../probe.h"

static int64_t read_512(const void *data, size_t n_bytes)
{
    const char *p = data;
    __m512i a[8];
    for (int i = 0; i < 8; i++)
        a[i] = _mm512_setzero_si512();
    for (size_t i = 0; i < n_bytes; i += 512)
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++)
            a[j] = _mm512_or_si512(a[j], _mm512_load_si512(p + i + 64 * (size_t)j));
    for (int i = 1; i < 8; i++)
        a[0] = _mm512_or_si512(a[0], a[i]);
    return _mm512_reduce_or_epi64(a[0]);
}

#define ROUNDS(type, zero, operation, per_op, reduce) \
    type r[16]; \
    for (int i = 0; i < 16; i++) \
        r[i] = zero; \
    for (int64_t k = 0; k < n_rounds; k++) { \
        _Pragma("GCC unroll 16") for (int i = 0; i < 16; i++) r[i] = operation; \
        __asm__ volatile("" : : "v"(r[0]), "v"(r[15])); \
    } \
    double sum = 0; \
    for (int i = 0; i < 16; i++) \
        sum += (double)reduce(r[i]); \
    *n_ops = n_rounds * 16 * (per_op); \
    return sum;

static double int8_512(int64_t n_rounds, int64_t *n_ops)
{
    const __m512i x = _mm512_set1_epi8((char)n_rounds), y = _mm512_set1_epi8(5);
    ROUNDS(__m512i, _mm512_setzero_si512(), _mm512_dpbusd_epi32(r[i], x, y), 128, _mm512_reduce_add_epi32)
}

static double bf16_512(int64_t n_rounds, int64_t *n_ops)
{
    if (!__builtin_cpu_supports("avx512bf16")) {
        *n_ops = 0;
        return 0;
    }
    const __m512bh x = (__m512bh)_mm512_set1_epi32(0x3f803f80), y = (__m512bh)_mm512_set1_epi32(0x3f003f00);
    ROUNDS(__m512, _mm512_setzero_ps(), _mm512_dpbf16_ps(r[i], x, y), 64, _mm512_reduce_add_ps)
}

static double f32_512(int64_t n_rounds, int64_t *n_ops)
{
    const __m512 x = _mm512_set1_ps(0.5f), y = _mm512_set1_ps(0.25f);
    ROUNDS(__m512, _mm512_setzero_ps(), _mm512_fmadd_ps(r[i], x, y), 32, _mm512_reduce_add_ps)
}

const probe_kernels probe_kernels_avx512 = {read_512, {NULL, int8_512, bf16_512, f32_512}};

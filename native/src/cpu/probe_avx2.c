/* probe_avx2.c: probe kernels: 32-byte loads, vpmaddubsw + vpmaddwd + vpaddd, fma. */
#include <immintrin.h>

#include "../probe.h"

static int64_t read_256(const void *data, size_t n_bytes)
{
    const char *p = data;
    __m256i a[8];
    for (int i = 0; i < 8; i++)
        a[i] = _mm256_setzero_si256();
    for (size_t i = 0; i < n_bytes; i += 256)
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++)
            a[j] = _mm256_or_si256(a[j], _mm256_load_si256((const __m256i *)(p + i + 32 * (size_t)j)));
    for (int i = 1; i < 8; i++)
        a[0] = _mm256_or_si256(a[0], a[i]);
    return _mm256_extract_epi64(a[0], 0) | _mm256_extract_epi64(a[0], 1) | _mm256_extract_epi64(a[0], 2)
           | _mm256_extract_epi64(a[0], 3);
}

static double int8_256(int64_t n_rounds, int64_t *n_ops)
{
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i r[8], x = _mm256_set1_epi8((char)n_rounds), y = _mm256_set1_epi8(5);
    for (int i = 0; i < 8; i++)
        r[i] = _mm256_setzero_si256();
    for (int64_t k = 0; k < n_rounds; k++) {
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            __asm__ volatile("" : "+x"(x)); /* or the product is taken out of the loop */
            r[i] = _mm256_add_epi32(r[i], _mm256_madd_epi16(_mm256_maddubs_epi16(x, y), ones));
        }
    }
    double sum = 0;
    for (int i = 0; i < 8; i++)
        sum += _mm256_extract_epi32(r[i], 0);
    *n_ops = n_rounds * 8 * 64;
    return sum;
}

static double f32_256(int64_t n_rounds, int64_t *n_ops)
{
    const __m256 x = _mm256_set1_ps(0.5f), y = _mm256_set1_ps(0.25f);
    __m256 r[12];
    for (int i = 0; i < 12; i++)
        r[i] = _mm256_setzero_ps();
    for (int64_t k = 0; k < n_rounds; k++) {
#pragma GCC unroll 12
        for (int i = 0; i < 12; i++)
            r[i] = _mm256_fmadd_ps(r[i], x, y);
        __asm__ volatile("" : : "x"(r[0]), "x"(r[11]));
    }
    double sum = 0;
    for (int i = 0; i < 12; i++)
        sum += (double)_mm256_cvtss_f32(r[i]);
    *n_ops = n_rounds * 12 * 16;
    return sum;
}

const probe_kernels probe_kernels_avx2 = {read_256, {NULL, int8_256, NULL, f32_256}};

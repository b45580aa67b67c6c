/* The row-wise operations in vectors of 16 floats. */
#include <immintrin.h>

#define VW 16
#define TILE_R 6
#define OPS_NAME "avx512"
#define OPS_TABLE ops_avx512
#define VFMA(a, b, c) ((vf)_mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(c)))
#define VMAX(a, b) ((vf)_mm512_max_ps((__m512)(a), (__m512)(b)))
#define VMIN(a, b) ((vf)_mm512_min_ps((__m512)(a), (__m512)(b)))
#define MAX_LANES(v) _mm512_reduce_max_ps((__m512)(v))
#define ROUND(x) ((vf)_mm512_roundscale_ps((__m512)(x), 0))
#define SCALE(x, n) ((vf)_mm512_scalef_ps((__m512)(x), (__m512)(n)))
#define SUM_LANES(v) _mm512_reduce_add_ps((__m512)(v))
#define LOAD_F16(p) ((vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)(p))))
#define STORE_F16(p, v) \
    _mm256_storeu_si256((__m256i *)(void *)(p), _mm512_cvtps_ph((__m512)(v), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC))

#define LOAD_I8(p) ((vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(const void *)(p)))))
#define STORE_BF16(p, v) _mm256_storeu_si256((__m256i *)(void *)(p), (__m256i)_mm512_cvtneps_pbh((__m512)(v)))
#define DOT2(acc, pairs, q) ((vf)_mm512_dpbf16_ps((__m512)(acc), (__m512bh)(pairs), (__m512bh)(q)))

#include "ops_simd.h"

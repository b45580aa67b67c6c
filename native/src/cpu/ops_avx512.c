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
#define MAX_INTEGER(v) _mm512_reduce_max_epi32((__m512i)(v))
#define SUM_LANES(v) _mm512_reduce_add_ps((__m512)(v))
#define LOAD_F16(p) ((vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)(p))))
#define STORE_F16(p, v) \
    _mm256_storeu_si256((__m256i *)(void *)(p), _mm512_cvtps_ph((__m512)(v), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC))

#define STORE_I8(p, v) _mm_storeu_si128((__m128i *)(void *)(p), _mm512_cvtepi32_epi8((__m512i)(v)))
#define STORE_BF16(p, v) _mm256_storeu_si256((__m256i *)(void *)(p), (__m256i)_mm512_cvtneps_pbh((__m512)(v)))
#define STORE_BF16_2(p, a, b) _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh((__m512)(b), (__m512)(a)))
#define DOT2(acc, pairs, q) ((vf)_mm512_dpbf16_ps((__m512)(acc), (__m512bh)(pairs), (__m512bh)(q)))

/* 2^x to 9e-5 for x <= 0: a polynomial in what floor leaves, scaled by 2^floor. In three parts, for who has other work between. */
#define EXP2_REST(x) ((vf)_mm512_reduce_ps((__m512)(x), 9))
#define EXP2_SLOPE(r) VFMA(VFMA(splat(7.706705e-2f), r, splat(2.2764498e-1f)), r, splat(6.9511679e-1f))
#define EXP2_VALUE(slope, r, x) ((vf)_mm512_scalef_ps((__m512)VFMA(slope, r, splat(1.0f)), (__m512)(x)))

/* Each lane its partner, plus or minus itself. */
static inline __m512 rotate_lanes16(__m512 v) {
    const __m512 one = _mm512_set1_ps(1);
    v = _mm512_fmadd_ps(v, _mm512_mask_sub_ps(one, 0xff00, one, _mm512_set1_ps(2)), _mm512_shuffle_f32x4(v, v, 0x4e));
    v = _mm512_fmadd_ps(v, _mm512_mask_sub_ps(one, 0xf0f0, one, _mm512_set1_ps(2)), _mm512_shuffle_f32x4(v, v, 0xb1));
    v = _mm512_fmadd_ps(v, _mm512_mask_sub_ps(one, 0xcccc, one, _mm512_set1_ps(2)), _mm512_permute_ps(v, 0x4e));
    return _mm512_fmadd_ps(v, _mm512_mask_sub_ps(one, 0xaaaa, one, _mm512_set1_ps(2)), _mm512_permute_ps(v, 0xb1));
}
#define ROTATE_LANES(v) ((vf)rotate_lanes16((__m512)(v)))
#define ATTN_Q8 "attn_q8_avx512.h"
#include "ops_simd.h"

/* The row-wise operations in vectors of 4 floats with fused multiply-add and F16 conversion, which every aarch64 machine has. */
#include <arm_neon.h>

#define VW 4
#define TILE_R 3
#define OPS_NAME "neon"
#define OPS_TABLE ops_neon
#define VFMA(a, b, c) ((vf)vfmaq_f32((float32x4_t)(c), (float32x4_t)(a), (float32x4_t)(b)))
/* fmax and fmin give NaN where either is, which is more than ops_simd.h asks for. */
#define VMAX(a, b) ((vf)vmaxq_f32((float32x4_t)(a), (float32x4_t)(b)))
#define VMIN(a, b) ((vf)vminq_f32((float32x4_t)(a), (float32x4_t)(b)))
#define MAX_LANES(v) vmaxvq_f32((float32x4_t)(v))
#define LOAD_F16(p) ((vf)vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8((const uint8_t *)(const void *)(p)))))
#define STORE_F16(p, v) vst1_u8((uint8_t *)(void *)(p), vreinterpret_u8_f16(vcvt_f16_f32((float32x4_t)(v))))

#include "ops_simd.h"

/* ops.c: picks the table of row-wise operations, and holds the one for any machine: vectors of 4 floats without
 * fused multiply-add, and F16 by integer arithmetic. */
#include "ops.h"

#include <string.h>

#include "mat.h"

typedef float f4 __attribute__((vector_size(16)));
typedef int32_t i4 __attribute__((vector_size(16)));

static inline f4 pick(i4 mask, f4 a, f4 b) { return (f4)((mask & (i4)a) | (~mask & (i4)b)); }
static inline f4 max4(f4 a, f4 b) { return pick(a > b, a, b); }
static inline f4 min4(f4 a, f4 b) { return pick(a < b, a, b); }

static inline float max_lanes4(f4 v) {
    float a = v[0] > v[1] ? v[0] : v[1], b = v[2] > v[3] ? v[2] : v[3];
    return a > b ? a : b;
}

/* IEEE 754 binary16, subnormals included: shift the exponent by a multiplication, which is exact. */
static inline f4 load_f16(const uint16_t *p) {
    i4 h = {p[0], p[1], p[2], p[3]};
    i4 sign = (h & 0x8000) << 16, rest = (h & 0x7fff) << 13;
    f4 scaled = (f4)rest * 0x1p112f;
    i4 special = rest >= 0x0f800000; /* exponent 31: infinity or NaN */
    return (f4)(sign | (special & (rest | 0x7f800000)) | (~special & (i4)scaled));
}

/* To nearest even: adding the power of two whose last place is the wanted one rounds in hardware. */
static inline uint16_t f16_bits(float x) {
    uint32_t u, r;
    memcpy(&u, &x, 4);
    uint32_t sign = u >> 16 & 0x8000;
    u &= 0x7fffffff;
    if (u > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (u >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    if (u < 0x38800000) { /* below 2^-14: subnormal in units of 2^-24 */
        float a;
        memcpy(&a, &u, 4);
        a += 0.5f;
        memcpy(&r, &a, 4);
        return (uint16_t)(sign | (r - 0x3f000000));
    }
    u += 0xfff + (u >> 13 & 1);
    return (uint16_t)(sign | ((u - 0x38000000) >> 13));
}

static inline void store_f16(uint16_t *p, f4 v) {
    for (int i = 0; i < 4; i++) p[i] = f16_bits(v[i]);
}

#define VW 4
#define TILE_R 1
#define OPS_NAME "c"
#define OPS_TABLE ops_c
#define VFMA(a, b, c) ((a) * (b) + (c))
#define VMAX(a, b) max4(a, b)
#define VMIN(a, b) min4(a, b)
#define MAX_LANES(v) max_lanes4(v)
#define LOAD_F16(p) load_f16(p)
#define STORE_F16(p, v) store_f16(p, v)

#include "cpu/ops_simd.h"

#ifdef MILAD_HAVE_AVX2
extern const ops ops_avx2;
#endif
#ifdef MILAD_HAVE_AVX512
extern const ops ops_avx512;
#endif
#ifdef MILAD_HAVE_NEON
extern const ops ops_neon;
#endif

const ops *ops_named(const char *name) {
#ifdef MILAD_HAVE_AVX512
    if (!strncmp(name, "avx512", 6) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni") &&
        __builtin_cpu_supports("avx512bf16"))
        return &ops_avx512;
#endif
#ifdef MILAD_HAVE_AVX2
    if (!strncmp(name, "avx2", 4) && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return &ops_avx2;
#endif
#ifdef MILAD_HAVE_NEON
    if (!strncmp(name, "neon", 4)) return &ops_neon;
#endif
    return strcmp(name, "c") ? NULL : &ops_c;
}

const ops *ops_get(void) {
    const ops *o = ops_named(mat_isa());
    return o ? o : &ops_c;
}

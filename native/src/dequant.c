/* dequant.c: blocks of GGUF files as F32. Owns the block formats' arithmetic; must not know panels.
 *
 * Formats: ggml-common.h and ggml-quants.c of llama.cpp (structure and packing), checked against the `gguf` package on random
 * blocks (tests/test_quants.py). Everything is little-endian; `h` is an F16.
 *   Q8_0  h d, i8 q[32]: d q                      Q4_0  h d, u4[32]: d (q - 8)        Q4_1  h d, h m: d q + m
 *   Q5_0  h d, u32 high bits, u4[32]: d (q - 16)  Q5_1  h d, h m, u32, u4[32]         IQ4_NL  h d, u4[32] into a table
 *   Q2_K  u8 sc[16], u2[256], h d, h dmin         Q3_K  u8 high[32], u2[256], u6 sc[16], h d
 *   Q4_K  h d, h dmin, u6 sc[8] m[8], u4[256]     Q5_K  the same with u8 high[32] before the nibbles
 *   Q6_K  u4[256], u2 high[256], i8 sc[16], h d
 * Nibbles: a byte's low half is value j, its high half value j + 16 (32-value types) or j + 32 (K types).
 */
#include "mat_internal.h"

float mat_half_to_float(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, exponent = (h >> 10) & 31u, fraction = h & 1023u, bits;
    if (exponent == 31) {
        bits = sign | 0x7f800000u | (fraction << 13) | (fraction ? 0x400000u : 0u);
    } else if (exponent) {
        bits = sign | ((exponent + 112u) << 23) | (fraction << 13);
    } else {
        float f = (float)fraction * 0x1p-24f;
        memcpy(&bits, &f, 4);
        bits |= sign;
    }
    float out;
    memcpy(&out, &bits, 4);
    return out;
}

static float half_at(const uint8_t *p)
{
    return mat_half_to_float((uint16_t)(p[0] | p[1] << 8));
}

static const int8_t iq4_nl_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

static void block_32(int32_t type, const uint8_t *p, float *y)
{
    const float d = half_at(p);
    const bool with_min = type == MAT_Q4_1 || type == MAT_Q5_1, five = type == MAT_Q5_0 || type == MAT_Q5_1;
    const float m = with_min ? half_at(p + 2) : 0.0f;
    const uint8_t *q = p + (with_min ? 4 : 2);
    uint32_t high = 0;
    if (five) {
        memcpy(&high, q, 4);
        q += 4;
    }
    for (int j = 0; j < 32; j++) {
        int v = (j < 16 ? q[j] & 15 : q[j - 16] >> 4) | (int)((high >> j) & 1u) << 4;
        if (type == MAT_IQ4_NL)
            y[j] = d * (float)iq4_nl_values[v];
        else if (with_min)
            y[j] = d * (float)v + m;
        else
            y[j] = d * (float)(v - (five ? 16 : 8));
    }
}

static void block_q2_k(const uint8_t *p, float *y)
{
    const float d = half_at(p + 80), dmin = half_at(p + 82);
    for (int i = 0; i < 256; i++) {
        uint8_t sc = p[i / 16];
        int v = (p[16 + (i / 128) * 32 + i % 32] >> (2 * ((i % 128) / 32))) & 3;
        y[i] = (d * (float)(sc & 15)) * (float)v - dmin * (float)(sc >> 4);
    }
}

static void block_q3_k(const uint8_t *p, float *y)
{
    const uint8_t *s = p + 96;
    const float d = half_at(p + 108);
    for (int i = 0; i < 256; i++) {
        int b = i / 16;
        int sc = (b < 8 ? s[b] & 15 : s[b - 8] >> 4) | ((s[8 + b % 4] >> (2 * (b / 4))) & 3) << 4;
        int v = (p[32 + (i / 128) * 32 + i % 32] >> (2 * ((i % 128) / 32))) & 3;
        v |= ((p[i % 32] >> (i / 32)) & 1) << 2;
        y[i] = (d * (float)(sc - 32)) * (float)(v - 4);
    }
}

static void block_q45_k(const uint8_t *p, bool five, float *y)
{
    const float d = half_at(p), dmin = half_at(p + 2);
    const uint8_t *s = p + 4, *high = p + 16, *q = p + (five ? 48 : 16);
    for (int b = 0; b < 8; b++) {
        int sc = b < 4 ? s[b] & 63 : (s[b + 4] & 15) | (s[b - 4] >> 6) << 4;
        int mn = b < 4 ? s[b + 4] & 63 : (s[b + 4] >> 4) | (s[b] >> 6) << 4;
        const float ds = d * (float)sc, ms = dmin * (float)mn;
        for (int l = 0; l < 32; l++) {
            int v = b & 1 ? q[b / 2 * 32 + l] >> 4 : q[b / 2 * 32 + l] & 15;
            if (five)
                v |= ((high[l] >> b) & 1) << 4;
            y[b * 32 + l] = ds * (float)v - ms;
        }
    }
}

static void block_q6_k(const uint8_t *p, float *y)
{
    const float d = half_at(p + 208);
    for (int i = 0; i < 256; i++) {
        int n = i / 128, quarter = (i % 128) / 32, l = i % 32;
        int low = p[n * 64 + (quarter & 1) * 32 + l], high = p[128 + n * 32 + l] >> (2 * quarter);
        int v = (quarter < 2 ? low & 15 : low >> 4) | (high & 3) << 4;
        y[i] = (d * (float)(int8_t)p[192 + i / 16]) * (float)(v - 32);
    }
}

static void block_any(int32_t type, const uint8_t *p, float *y)
{
    switch (type) {
    case MAT_F32:
        memcpy(y, p, 4);
        break;
    case MAT_F16:
        *y = half_at(p);
        break;
    case MAT_BF16: {
        uint32_t bits = (uint32_t)(p[0] | p[1] << 8) << 16;
        memcpy(y, &bits, 4);
        break;
    }
    case MAT_Q8_0: {
        float d = half_at(p);
        for (int j = 0; j < 32; j++)
            y[j] = d * (float)(int8_t)p[2 + j];
        break;
    }
    case MAT_Q2_K: block_q2_k(p, y); break;
    case MAT_Q3_K: block_q3_k(p, y); break;
    case MAT_Q4_K: block_q45_k(p, false, y); break;
    case MAT_Q5_K: block_q45_k(p, true, y); break;
    case MAT_Q6_K: block_q6_k(p, y); break;
    default: block_32(type, p, y); break;
    }
}

void mat_dequantize(int32_t type, const void *src, float *dst, int64_t n_values)
{
    const int32_t values = mat_block_values(type), bytes = mat_block_bytes(type);
    const uint8_t *p = src;
    if (values == 0)
        return;
    for (int64_t i = 0; i + values <= n_values; i += values, p += bytes)
        block_any(type, p, dst + i);
}

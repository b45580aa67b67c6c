/* mat_c.c: the matrix kernels in plain C: for machines without vector kernels, and the model of what the others do (layouts and
 * classes in mat_internal.h). Products are rounded before they are added, so bits differ from the fma kernels'.
 */
#include <math.h>

#include "../mat_internal.h"

static float half_at(const uint8_t *p)
{
    return mat_half_to_float((uint16_t)(p[0] | p[1] << 8));
}

/* One row's unit as unsigned codes and scales; scales[b][k]: block b of 32, k-th scale of its class. */
static void codes_32(int32_t type, const uint8_t *p, uint8_t *u, float *scales)
{
    static const uint8_t iq4_nl[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
    const bool with_min = type == MAT_Q4_1 || type == MAT_Q5_1, five = type == MAT_Q5_0 || type == MAT_Q5_1;
    scales[0] = half_at(p);
    scales[1] = with_min ? half_at(p + 2) : 0.0f;
    const uint8_t *q = p + (with_min ? 4 : 2);
    if (type == MAT_Q8_0) {
        for (int j = 0; j < 32; j++)
            u[j] = q[j] ^ 0x80;
        return;
    }
    uint32_t high = 0;
    if (five) {
        memcpy(&high, q, 4);
        q += 4;
    }
    for (int j = 0; j < 32; j++) {
        int v = (j < 16 ? q[j] & 15 : q[j - 16] >> 4) | (int)((high >> j) & 1u) << 4;
        u[j] = (uint8_t)(type == MAT_IQ4_NL ? iq4_nl[v] : type == MAT_Q4_0 ? v + 120 : type == MAT_Q5_0 ? v + 112 : v);
    }
}

static void codes_q2_k(const uint8_t *p, uint8_t *u, float *scales)
{
    const float d = half_at(p + 80), dmin = half_at(p + 82);
    for (int i = 0; i < 256; i++)
        u[i] = (p[16 + (i / 128) * 32 + i % 32] >> (2 * ((i % 128) / 32))) & 3;
    for (int b = 0; b < 16; b++) {
        scales[b / 2 * 4 + b % 2] = d * (float)(p[b] & 15);
        scales[b / 2 * 4 + 2 + b % 2] = -(dmin * (float)(p[b] >> 4));
    }
}

static void codes_q3_k(const uint8_t *p, uint8_t *u, float *scales)
{
    const float d = half_at(p + 108);
    const uint8_t *s = p + 96;
    for (int i = 0; i < 256; i++) {
        int v = (p[32 + (i / 128) * 32 + i % 32] >> (2 * ((i % 128) / 32))) & 3;
        u[i] = (uint8_t)((v | ((p[i % 32] >> (i / 32)) & 1) << 2) + 124);
    }
    for (int b = 0; b < 16; b++) {
        int sc = (b < 8 ? s[b] & 15 : s[b - 8] >> 4) | ((s[8 + b % 4] >> (2 * (b / 4))) & 3) << 4;
        scales[b] = d * (float)(sc - 32);
    }
}

static void codes_q45_k(const uint8_t *p, bool five, uint8_t *u, float *scales)
{
    const float d = half_at(p), dmin = half_at(p + 2);
    const uint8_t *s = p + 4, *high = p + 16, *q = p + (five ? 48 : 16);
    for (int b = 0; b < 8; b++) {
        int sc = b < 4 ? s[b] & 63 : (s[b + 4] & 15) | (s[b - 4] >> 6) << 4;
        int mn = b < 4 ? s[b + 4] & 63 : (s[b + 4] >> 4) | (s[b] >> 6) << 4;
        scales[2 * b] = d * (float)sc;
        scales[2 * b + 1] = -(dmin * (float)mn);
        for (int l = 0; l < 32; l++) {
            int v = b & 1 ? q[b / 2 * 32 + l] >> 4 : q[b / 2 * 32 + l] & 15;
            u[b * 32 + l] = (uint8_t)(five ? v | ((high[l] >> b) & 1) << 4 : v);
        }
    }
}

static void codes_q6_k(const uint8_t *p, uint8_t *u, float *scales)
{
    const float d = half_at(p + 208);
    for (int i = 0; i < 256; i++) {
        int n = i / 128, quarter = (i % 128) / 32, l = i % 32;
        int low = p[n * 64 + (quarter & 1) * 32 + l], high = p[128 + n * 32 + l] >> (2 * quarter);
        u[i] = (uint8_t)(((quarter < 2 ? low & 15 : low >> 4) | (high & 3) << 4) + 96);
    }
    for (int b = 0; b < 16; b++)
        scales[b] = d * (float)(int8_t)p[192 + b];
}

static const int scales_of_class[MAT_N_CLASSES] = {1, 2, 2, 4, 0, 0};

void mat_expand_c(int32_t type, const uint8_t *panel, int64_t n_units, uint8_t *w, float *scales)
{
    const mat_layout_info *l = mat_layout_of(type);
    if (type == MAT_F16) {
        float *f = (float *)w;
        for (int64_t i = 0; i < n_units * 64 * MAT_LANES; i++)
            f[i] = half_at(panel + 2 * i);
        return;
    }
    const int n_blocks = l->unit_values / 32, n_scales = scales_of_class[l->class];
    for (int64_t n = 0; n < n_units; n++, panel += l->panel_unit) {
        uint8_t room[MAT_UNIT_MAX];
        const uint8_t *unit = mat_file_order(l, panel, room);
        for (int lane = 0; lane < MAT_LANES; lane++) {
            uint8_t raw[256], u[256];
            float s[32];
            mat_unpack_lane(l, unit, lane, raw);
            switch (type) {
            case MAT_Q2_K: codes_q2_k(raw, u, s); break;
            case MAT_Q3_K: codes_q3_k(raw, u, s); break;
            case MAT_Q4_K: codes_q45_k(raw, false, u, s); break;
            case MAT_Q5_K: codes_q45_k(raw, true, u, s); break;
            case MAT_Q6_K: codes_q6_k(raw, u, s); break;
            default:
                for (int b = 0; b < n_blocks; b++) {
                    float pair[2];
                    codes_32(type, raw + b * l->block_bytes, u + 32 * b, pair);
                    memcpy(s + b * n_scales, pair, (size_t)n_scales * sizeof *s);
                }
            }
            for (int i = 0; i < n_blocks * 32; i++)
                w[i / 4 * 64 + lane * 4 + i % 4] = u[i];
            for (int i = 0; i < n_blocks * n_scales; i++)
                scales[i * MAT_LANES + lane] = s[i];
        }
        w += n_blocks * 512;
        scales += n_blocks * n_scales * MAT_LANES;
    }
}

/* The four partial sums of a block of 32: dot products of each half, one lane and token. */
static void dot_halves(const uint8_t *w, const uint8_t *q, int32_t nt, int32_t out[2])
{
    for (int h = 0; h < 2; h++) {
        int32_t sum = 0;
        for (int g = 4 * h; g < 4 * h + 4; g++)
            for (int i = 0; i < 4; i++)
                sum += (int32_t)w[g * 64 + i] * (int8_t)q[(size_t)g * 4 * (size_t)nt + (size_t)i];
        out[h] = sum;
    }
}

static float dot_blocks(int32_t class, const uint8_t *w, const float *s, int64_t n_blocks, const uint8_t *q, const uint8_t *halves,
                        int32_t nt, int32_t t, float acc)
{
    const int n_scales = scales_of_class[class];
    for (int64_t b = 0; b < n_blocks; b++, w += 512, s += n_scales * MAT_LANES) {
        const float *dx = (const float *)(q + (size_t)nt * 32);
        const int32_t *c = (const int32_t *)(dx + 2 * nt);
        int32_t i[2];
        dot_halves(w, q + 4 * t, nt, i);
        if (class == MAT_S32 || class == MAT_SM32) {
            acc += (float)(i[0] + i[1] + (class == MAT_S32 ? c[t] : 0)) * (s[0] * dx[t]);
            if (class == MAT_SM32)
                acc += s[MAT_LANES] * dx[nt + t];
        } else {
            const int32_t *ch = (const int32_t *)halves;
            const float *sx = (const float *)(ch + 2 * nt);
            if (class == MAT_S16) {
                i[0] += ch[t];
                i[1] += ch[nt + t];
            }
            acc += ((float)i[0] * s[0] + (float)i[1] * s[MAT_LANES]) * dx[t];
            if (class == MAT_SM16) {
                acc += s[2 * MAT_LANES] * sx[t];
                acc += s[3 * MAT_LANES] * sx[nt + t];
            }
            halves += mat_act_half_block(nt);
        }
        q += mat_act_q8_block(nt);
    }
    return acc;
}

static float dot_floats(int32_t class, const uint8_t *w, int64_t n, const uint8_t *x, int32_t nt, int32_t t, float acc)
{
    if (class == MAT_FLOATS) {
        for (int64_t k = 0; k < n; k++)
            acc += ((const float *)w)[k * MAT_LANES] * ((const float *)x)[k * nt + t];
        return acc;
    }
    for (int64_t k = 0; k < n; k++) {
        uint32_t a = (uint32_t)((const uint16_t *)w)[k / 2 * 2 * MAT_LANES + k % 2] << 16;
        uint32_t b = (uint32_t)((const uint16_t *)x)[(k / 2 * nt + t) * 2 + k % 2] << 16;
        float fa, fb;
        memcpy(&fa, &a, 4);
        memcpy(&fb, &b, 4);
        acc += fa * fb;
    }
    return acc;
}

static void tile_c(int32_t type, const mat_part *p, const mat_tile *x)
{
    const int32_t class = mat_layout_of(type)->class;
    for (int32_t r = 0; r < p->n_panels; r++) {
        const uint8_t *w = p->w + (size_t)r * p->step;
        const float *s = p->scales + (size_t)r * p->scale_step;
        for (int32_t t = 0; t < x->n_valid; t++) {
            float *c = p->c + t * p->ld + r * MAT_LANES;
            for (int lane = 0; lane < MAT_LANES; lane++) {
                float acc = p->first ? 0.0f : c[lane];
                if (class == MAT_PAIRS || class == MAT_FLOATS)
                    c[lane] = dot_floats(class, w + 4 * lane, p->n_values, x->x, x->nt, t, acc);
                else
                    c[lane] = dot_blocks(class, w + 4 * lane, s + lane, p->n_values / 32, x->x, x->halves, x->nt, t, acc);
            }
        }
    }
}

static bool direct_c(int32_t type, const uint8_t *panel, int64_t n_units, const mat_tile *x, float *c, int64_t ld)
{
    (void)type, (void)panel, (void)n_units, (void)x, (void)c, (void)ld;
    return false;
}

/* A block of 32: codes q and the scale. What is not finite makes the scale NaN, so that it shows in the result. */
float mat_quantise_block_c(const float *x, int64_t n, int8_t q[32])
{
    uint32_t top = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, 4);
        bits &= 0x7fffffffu;
        top = bits > top ? bits : top;
    }
    float amax;
    memcpy(&amax, &top, 4);
    memset(q, 0, 32);
    if (top >= 0x7f800000u)
        return NAN;
    const float d = mat_act_scale(amax), inverse = 1.0f / d;
    if (!(amax > MAT_ACT_LEAST))
        return d;
    for (int64_t i = 0; i < n; i++)
        q[i] = (int8_t)lrintf(x[i] * inverse);
    return d;
}

static void quantise_c(const float *x, int64_t n_in, int64_t n_blocks, int32_t nt, int32_t t, uint8_t *q8, uint8_t *halves)
{
    for (int64_t b = 0; b < n_blocks; b++, q8 += mat_act_q8_block(nt)) {
        int64_t n = n_in - 32 * b;
        int8_t q[32];
        float d = mat_quantise_block_c(x + 32 * b, n < 0 ? 0 : n < 32 ? n : 32, q);
        int32_t sum[2] = {0, 0};
        for (int i = 0; i < 32; i++) {
            sum[i / 16] += q[i];
            q8[(i / 4 * nt + t) * 4 + i % 4] = (uint8_t)q[i];
        }
        mat_act_put_sums(q8, halves, nt, t, d, sum[0], sum[1]);
        halves += halves ? mat_act_half_block(nt) : 0;
    }
}

const mat_kernels mat_kernels_c = {"c", 0, mat_expand_c, tile_c, NULL, direct_c, quantise_c, NULL};

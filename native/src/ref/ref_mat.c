/* ref_mat.c: the definition of a matrix product: dequantised weights times rounded activations, summed in double. */
#include "ref_mat.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static float bf16_rounded(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, 4);
    bits = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
    memcpy(&f, &bits, 4);
    return f;
}

static void round_activations(int32_t type, const float *x, int64_t n, double *out)
{
    for (int64_t i = 0; i < n; i++)
        out[i] = type == MAT_BF16 ? bf16_rounded(x[i]) : x[i];
    if (type == MAT_F32 || type == MAT_F16 || type == MAT_BF16)
        return;
    for (int64_t b = 0; b < n; b += 32) {
        float amax = 0;
        for (int64_t i = b; i < b + 32; i++)
            amax = fmaxf(amax, fabsf(x[i]));
        const float exact = amax / 127.0f, octave = ldexpf(1, ilogbf(exact) - 3);
        const float d = amax > 0 ? ceilf(exact / octave) * octave : 0, inverse = amax > 0 ? 1.0f / d : 0;
        for (int64_t i = b; i < b + 32; i++)
            out[i] = (double)d * (double)lrintf(x[i] * inverse);
    }
}

void ref_mat_mul(const mat *w, const float *x, int32_t n_rows, double *y)
{
    float *row = malloc((size_t)w->n_in * sizeof *row);
    double *a = malloc((size_t)w->n_in * (size_t)n_rows * sizeof *a);
    for (int32_t r = 0; r < n_rows; r++)
        round_activations(w->type, x + r * w->n_in, w->n_in, a + r * w->n_in);
    for (int64_t o = 0; o < w->n_out; o++) {
        mat_row_f32(w, o, row);
        for (int32_t r = 0; r < n_rows; r++) {
            double sum = 0;
            for (int64_t i = 0; i < w->n_in; i++)
                sum += (double)row[i] * a[r * w->n_in + i];
            y[r * w->n_out + o] = sum;
        }
    }
    free(row);
    free(a);
}

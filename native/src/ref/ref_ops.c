/* ref_ops.c: see ref.h. Plain loops, no cleverness: speed is nothing here. */
#include "ref.h"

#include <math.h>
#include <stdlib.h>

#include "model.h"

void ref_rms_norm(double *out, const double *x, const float *w, int32_t n, double eps) {
    double sum = 0;
    for (int32_t i = 0; i < n; i++) sum += x[i] * x[i];
    const double scale = 1 / sqrt(sum / n + eps);
    for (int32_t i = 0; i < n; i++) out[i] = x[i] * scale * w[i];
}

void ref_swiglu(double *out, const double *gate, const double *up, int32_t n) {
    for (int32_t i = 0; i < n; i++) out[i] = gate[i] / (1 + exp(-gate[i])) * up[i];
}

void ref_rope(double *v, int32_t head_dim, int32_t n_rot, int32_t style, int64_t position, const float *inv_freq, double mscale) {
    (void)head_dim;
    for (int32_t i = 0; i < n_rot / 2; i++) {
        const int32_t at = style == ROPE_PAIRS ? 2 * i : i, other = style == ROPE_PAIRS ? 2 * i + 1 : i + n_rot / 2;
        const double angle = (double)position * inv_freq[i], a = v[at], b = v[other];
        v[at] = (a * cos(angle) - b * sin(angle)) * mscale;
        v[other] = (a * sin(angle) + b * cos(angle)) * mscale;
    }
}

void ref_attention(double *out, const double *q, const double *k, const double *v, int64_t ld, int32_t n_keys, int32_t head_dim,
                   double scale) {
    double *p = malloc((size_t)n_keys * sizeof *p), top = -INFINITY, sum = 0;
    for (int32_t t = 0; t < n_keys; t++) {
        p[t] = 0;
        for (int32_t d = 0; d < head_dim; d++) p[t] += q[d] * k[t * ld + d];
        p[t] *= scale;
        top = p[t] > top ? p[t] : top;
    }
    for (int32_t t = 0; t < n_keys; t++) sum += p[t] = exp(p[t] - top);
    for (int32_t d = 0; d < head_dim; d++) {
        out[d] = 0;
        for (int32_t t = 0; t < n_keys; t++) out[d] += p[t] / sum * v[t * ld + d];
    }
    free(p);
}

double ref_nmse(const float *got, const double *want, int64_t n) {
    double difference = 0, size = 0;
    for (int64_t i = 0; i < n; i++) {
        difference += (got[i] - want[i]) * (got[i] - want[i]);
        size += want[i] * want[i];
    }
    return difference / size;
}

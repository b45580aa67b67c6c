/* ref.h: the row-wise operations and attention as their definitions read, with double accumulators: the oracle of the
 * kernels' tests. Never in the shared library. */
#ifndef MILAD_REF_H
#define MILAD_REF_H

#include <stdint.h>

void ref_rms_norm(double *out, const double *x, const float *w, int32_t n, double eps);
void ref_swiglu(double *out, const double *gate, const double *up, int32_t n);
/* Rotates dimension pair i of n_rot / 2 by position * inv_freq[i]; style as enum rope_style. */
void ref_rope(double *v, int32_t head_dim, int32_t n_rot, int32_t style, int64_t position, const float *inv_freq, double mscale);
/* One query head over n_keys keys and values, both [n_keys][ld] with head_dim used. */
void ref_attention(double *out, const double *q, const double *k, const double *v, int64_t ld, int32_t n_keys, int32_t head_dim,
                   double scale);
/* Sum of squared differences over sum of squares of `want`; NaN anywhere gives NaN, so test it with !(nmse <= bound). */
double ref_nmse(const float *got, const double *want, int64_t n);

#endif

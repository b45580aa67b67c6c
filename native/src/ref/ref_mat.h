/* ref_mat.h: matrix products in double precision, the oracle of the kernels. Test builds only. */
#ifndef MILAD_REF_MAT_H
#define MILAD_REF_MAT_H

#include "mat.h"

/* y[r * n_out + o] of n_rows rows of x[n_in], the activations rounded as the kernels for w's type round them. w: MAT_ROWS. */
void ref_mat_mul(const mat *w, const float *x, int32_t n_rows, double *y);

#endif

/* mat.h: weight matrices and their products. The only room that knows how weights lie in memory.
 *
 * y[r][o] = sum_i W[o][i] x[r][i]. For quantised weights x is quantised to int8 per 32 values first (Q8: d = amax / 127, rounded up
 * to three bits behind the first); for BF16 weights x is rounded to BF16; for F16 and F32 x stays F32. One-row and many-row
 * kernels add in the same order, so a row's result never depends on how many rows there are.
 */
#ifndef MILAD_MAT_H
#define MILAD_MAT_H

#include <stddef.h>
#include <stdint.h>

#include "pool.h"

/* Numbers as in GGUF files. */
enum mat_type {
    MAT_F32 = 0, MAT_F16 = 1, MAT_Q4_0 = 2, MAT_Q4_1 = 3, MAT_Q5_0 = 6, MAT_Q5_1 = 7, MAT_Q8_0 = 8,
    MAT_Q2_K = 10, MAT_Q3_K = 11, MAT_Q4_K = 12, MAT_Q5_K = 13, MAT_Q6_K = 14, MAT_IQ4_NL = 20, MAT_BF16 = 30
};

enum mat_layout { MAT_ROWS = 0 /* as in the file */, MAT_PANELS = 1 /* repacked for the kernels */ };

typedef struct mat {
    int32_t type;        /* enum mat_type */
    int32_t layout;      /* enum mat_layout */
    int64_t n_in, n_out;
    const void *data;    /* mapped file (MAT_ROWS) or memory of mat_pack (MAT_PANELS) */
    size_t n_bytes;
} mat;

const char *mat_type_name(int32_t type);       /* "Q4_1"; NULL: unknown */
int32_t mat_type_supported(int32_t type);      /* 1: there are kernels */
int32_t mat_block_values(int32_t type);        /* values per block: 1, 32 or 256; 0: unknown type */
int32_t mat_block_bytes(int32_t type);
const char *mat_isa(void);                     /* the kernels chosen at run time. MILAD_ISA=c|avx2|avx512-vnni|neon lowers it (tests) */

/* Bytes that `m` (MAT_ROWS) takes as panels. */
size_t mat_panel_bytes(const mat *m);
/* Writes panels of rows o0..o1-1 (o0 a multiple of 16) of src (MAT_ROWS) into dst (64-byte aligned). Thread-safe on disjoint rows. */
void mat_pack_rows(const mat *src, void *dst, int64_t o0, int64_t o1);

/* One row as F32 (token embedding lookup), either layout. */
void mat_row_f32(const mat *m, int64_t row, float *out);
/* n_values values in the file's format as F32 (norms, biases, tests). */
void mat_dequantize(int32_t type, const void *src, float *dst, int64_t n_values);

/* Activations prepared once for several matrices. `kinds`: or of mat_act_kind of those matrices' types (which may have bits
 * beyond this enum, so never write the constants yourself). act: mat_act_bytes of memory, any alignment. */
enum mat_act_kind { MAT_ACT_F32 = 1, MAT_ACT_Q8 = 2, MAT_ACT_BF16 = 4 };
uint32_t mat_act_kind(int32_t type);
size_t mat_act_bytes(int64_t n_in, int32_t n_rows);
/* x[n_rows][ld_x], ld_x >= n_in. */
void mat_act_prepare(pool *p, void *act, uint32_t kinds, const float *x, int64_t ld_x, int64_t n_in, int32_t n_rows);
/* The same in one stage with what computes x: make(arg, lo, hi, thread) writes rows lo .. hi - 1 just before they are read. */
void mat_act_make(pool *p, void *act, uint32_t kinds, const float *x, int64_t ld_x, int64_t n_in, int32_t n_rows, pool_fn make,
                  void *arg);

/* n_w matrices of one n_in over the same activations, in one stage. y[w][r * ld_y[w] + o]; bias[w]: NULL or n_out floats,
 * added last. bias itself may be NULL. */
void mat_mul(pool *p, const mat *const *w, int32_t n_w, const void *act, int32_t n_rows, float *const *y,
             const int64_t *ld_y, const float *const *bias);

/* Before a stage of few rows: the matrices of the product that will follow it. Threads that wait at the stage's end ask for the
 * beginning of their part. */
void mat_will_mul(pool *p, const mat *const *w, int32_t n_w);

#endif

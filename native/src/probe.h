/* probe.h: the machine's limits, measured: what a benchmark divides by. The kernels are in cpu/probe_*.c. */
#ifndef MILAD_PROBE_H
#define MILAD_PROBE_H

#include <stddef.h>
#include <stdint.h>

#include "pool.h"

enum probe_kind { PROBE_READ = 0, PROBE_INT8 = 1, PROBE_BF16 = 2, PROBE_F32 = 3 };

/* Instructions of one kind in a loop; the result keeps the compiler from dropping them. */
typedef struct probe_kernels {
    int64_t (*read)(const void *p, size_t n_bytes); /* n_bytes a multiple of 512, p 64-byte aligned */
    double (*ops[4])(int64_t n_rounds, int64_t *n_ops); /* by kind; NULL: no such instruction here, use F32's */
} probe_kernels;

extern const probe_kernels probe_kernels_c, probe_kernels_avx2, probe_kernels_avx512, probe_kernels_neon, probe_kernels_dotprod;

/* One pass: seconds for reading n_bytes with all threads. */
double probe_read_once(pool *p, const void *data, size_t n_bytes);
/* One burst of about 10 ms: operations a second (a multiply and an addition count as two). */
double probe_ops_once(pool *p, enum probe_kind kind);

#endif

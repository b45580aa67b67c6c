/* probe_neon.h: what the probe kernels for aarch64 share. */
#ifndef MILAD_PROBE_NEON_H
#define MILAD_PROBE_NEON_H

#include <arm_neon.h>

#include "../probe.h"

int64_t probe_read_neon(const void *data, size_t n_bytes);
double probe_f32_neon(int64_t n_rounds, int64_t *n_ops);

static inline double probe_sum(const int32x4_t *r, int n)
{
    double sum = 0;
    for (int i = 0; i < n; i++)
        sum += vgetq_lane_s32(r[i], 0);
    return sum;
}

#endif

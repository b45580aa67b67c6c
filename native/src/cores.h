/* cores.h: which cores this process may use. */
#ifndef MILAD_CORES_H
#define MILAD_CORES_H

#include <stdint.h>

enum { CORES_MAX = 1024 };

/* Logical processors of the affinity mask: one of each physical core first, then their SMT siblings. */
typedef struct core_list {
    int32_t n, n_physical;
    int32_t core[CORES_MAX];
} core_list;

void cores_list(core_list *out);

#endif

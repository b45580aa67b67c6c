/* mat_neon.c: the matrix kernels for every aarch64 machine, and what a machine has beyond that. */
#include <sys/auxv.h>

#define DOTPROD 0
#define NAME "neon"
#define TABLE mat_kernels_neon

#include "mat_neon.h"

#ifndef HWCAP_ASIMDDP
#define HWCAP_ASIMDDP (1 << 20) /* Linux, arch/arm64/include/uapi/asm/hwcap.h */
#endif

bool mat_neon_dotprod(void) { return getauxval(AT_HWCAP) & HWCAP_ASIMDDP; }

/* mat_dotprod.c: the matrix kernels for aarch64 with the dot product instructions (Armv8.2 FEAT_DotProd; Armv8.4 on: always). */
#define DOTPROD 1
#define NAME "neon-dotprod"
#define TABLE mat_kernels_dotprod

#include "mat_neon.h"

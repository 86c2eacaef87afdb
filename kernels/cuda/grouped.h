// Grouped products by this program's own tiles (tile.cuh): what matmul.c calls when GROUPED_OWN is chosen.
#ifndef MOK_KERNELS_CUDA_GROUPED_H
#define MOK_KERNELS_CUDA_GROUPED_H

#include <stdbool.h>

#include "kernels/types.h"

#ifdef __cplusplus
extern "C" {
#endif

// Arguments as those of grouped_matmul_nt and so on; widths are multiples of GROUPED_UNIT, arrays at multiples of 16 bytes.
enum { GROUPED_UNIT = 8 };
// Whether the GPU that this is compiled for has the instructions.
bool grouped_own_available(void);
void grouped_own_nt(real *y, const real *x, const real *w, const int *offsets, int E, int N, int K);
void grouped_own_nn(real *y, const real *x, const real *w, const int *offsets, int E, int N, int K);
// An expert without rows keeps its dw, with add or not.
void grouped_own_tn(accum *dw, const real *a, const real *b, const int *offsets, int E, int M, int N, bool add);

#ifdef __cplusplus
}
#endif

#endif

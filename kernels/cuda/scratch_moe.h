// Bytes of scratch memory that placement takes. None shrinks when a size grows.
#ifndef MOK_KERNELS_CUDA_SCRATCH_MOE_H
#define MOK_KERNELS_CUDA_SCRATCH_MOE_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

// experts: of the whole model
size_t scratch_moe_place(int rows, int top_k, int experts);
size_t scratch_moe_regroup(int experts);

#ifdef __cplusplus
}
#endif

#endif

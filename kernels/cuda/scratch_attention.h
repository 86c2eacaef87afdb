// Bytes of scratch memory that attention takes. They do not shrink when a size grows.
#ifndef MOK_KERNELS_CUDA_SCRATCH_ATTENTION_H
#define MOK_KERNELS_CUDA_SCRATCH_ATTENTION_H

#include "kernels/kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

size_t scratch_attention_backward(struct attention_shape shape);

#ifdef __cplusplus
}
#endif

#endif

// Bytes of scratch memory that the router's operations take. None shrinks when rows or sequences grow.
#ifndef MOK_KERNELS_CUDA_SCRATCH_ROUTER_H
#define MOK_KERNELS_CUDA_SCRATCH_ROUTER_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

// rows = sequences * length
size_t scratch_router_balance(int rows, int experts, int sequences);
size_t scratch_router_backward(int rows, int hidden, int experts, int sequences);

#ifdef __cplusplus
}
#endif

#endif

// Tensor maps: what TMA knows of an array in memory.
#ifndef MOK_KERNELS_CUDA_TENSOR_MAP_H
#define MOK_KERNELS_CUDA_TENSOR_MAP_H

#include <cuda.h>

#include "kernels/cuda/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

// Rows of the heads of sequences: element (b, t, h, c) at x + b sequence_stride + t row_stride + h head_stride + c.
struct head_array {
    const real *x;
    int columns, length, heads, batch;
    size_t row_stride, head_stride, sequence_stride; // elements, multiples of 8; x is at a multiple of 16 bytes
};

// Loads boxes of 64 columns and `rows` rows of one head, coordinates (c, h, t, b), each row in 128 swizzled bytes. What
// lies outside of the array is zero.
CUtensorMap tensor_map_heads(struct head_array a, int rows);

#ifdef __cplusplus
}
#endif

#endif

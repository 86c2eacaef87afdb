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

// A matrix of rows row_stride elements apart, a multiple of 8; x is at a multiple of 16 bytes. Boxes of 64 columns and
// 64 rows, coordinates (column, row), each row in 128 swizzled bytes; outside of the matrix zeros are loaded and nothing is
// stored.
enum { MATRIX_BOX = 64 };
CUtensorMap tensor_map_matrix(const real *x, size_t rows, size_t columns, size_t row_stride);

// `count` matrices, one after the other; columns is a multiple of 8. Boxes as those of tensor_map_matrix of one matrix,
// coordinates (column, row, matrix): what lies outside of it is zero.
CUtensorMap tensor_map_matrices(const real *x, size_t count, size_t rows, size_t columns);

// The same of sums; columns is a multiple of 4. Boxes of 32 columns and 64 rows of one matrix; nothing is stored outside of
// a matrix.
enum { ACCUM_BOX_COLUMNS = 32 };
CUtensorMap tensor_map_matrices_accum(accum *x, size_t count, size_t rows, size_t columns);

#ifdef __cplusplus
}
#endif

#endif

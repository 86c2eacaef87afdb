// Copies of rows to where an index says, in units of 16 bytes where everything is aligned to them. A warp copies a part
// of a row that its registers hold: it loads all of it before it stores.
#ifndef MOK_KERNELS_CUDA_ROWS_CUH
#define MOK_KERNELS_CUDA_ROWS_CUH

#include "kernels/cuda/columns.cuh"

enum { ROWS_WARPS = 8, ROWS_LOADS = 8, ROWS_PART = 32 * ROWS_LOADS }; // of a block; of a thread; units of a part

// Threads cover `count` rows of `width` units: x runs over rows, y over their parts.
static inline dim3 rows_grid(int count, int width) {
    return dim3(cuda_blocks((size_t)count, ROWS_WARPS), cuda_blocks((size_t)width, ROWS_PART));
}

// Which row, and which unit of it comes first, a thread has; the others are 32 units apart.
static __device__ __forceinline__ int rows_own_row(void) { return blockIdx.x * ROWS_WARPS + threadIdx.x / 32; }
static __device__ __forceinline__ int rows_own_unit(void) { return blockIdx.y * ROWS_PART + threadIdx.x % 32; }

template <typename UNIT>
static __device__ __forceinline__ void rows_load(UNIT *units, const UNIT *row, int first, int width) {
#pragma unroll
    for (int n = 0; n < ROWS_LOADS; n++) units[n] = first + 32 * n < width ? row[first + 32 * n] : UNIT{};
}

template <typename UNIT>
static __device__ __forceinline__ void rows_store(UNIT *row, const UNIT *units, int first, int width) {
#pragma unroll
    for (int n = 0; n < ROWS_LOADS; n++)
        if (first + 32 * n < width) row[first + 32 * n] = units[n];
}

template <typename UNIT>
static __global__ void rows_gather_kernel(UNIT *to, const UNIT *from, const int *index, int count, int width) {
    int row = rows_own_row(), first = rows_own_unit();
    if (row >= count) return;
    int source = index[row];
    UNIT units[ROWS_LOADS] = {};
    if (source >= 0) rows_load(units, from + (size_t)source * width, first, width);
    rows_store(to + (size_t)row * width, units, first, width);
}

// Rows of H numbers, one after the other, can be moved in units of 16 bytes. NULL can.
static inline bool rows_aligned(const real *rows, int H) { return columns_aligned(rows, sizeof(real) * (size_t)H); }

// to[i] = from[index[i]]; an index of -1 gives a row of zeros.   to [count, H]
static inline void rows_gather(real *to, const real *from, const int *index, int count, int H) {
    if (count == 0 || H == 0) return;
    if (rows_aligned(to, H) && rows_aligned(from, H))
        rows_gather_kernel<<<rows_grid(count, H / 8), 32 * ROWS_WARPS, 0, cuda_stream()>>>(
            (uint4 *)to, (const uint4 *)from, index, count, H / 8);
    else
        rows_gather_kernel<<<rows_grid(count, H), 32 * ROWS_WARPS, 0, cuda_stream()>>>(
            (uint16_t *)to, (const uint16_t *)from, index, count, H);
    cuda_check_launch();
}

#endif

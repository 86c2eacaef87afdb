// Sums over whole arrays in double. An array is cut into pieces whose size depends on its length alone; a block sums a
// piece, and one block the pieces.
#include "kernels/cuda/columns.cuh"
#include "kernels/cuda/scratch.h"

enum { THREADS = 256, TOTAL_THREADS = 1024 };
enum { PIECE = 1 << 14 }; // values in a piece, or a multiple of it

// Sum over the block, in thread 0; 0 in the others. sums: a double for each thread.
static __device__ double block_total(double value, double *sums) {
    sums[threadIdx.x] = value;
    for (int half = blockDim.x / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    return threadIdx.x == 0 ? sums[0] : 0;
}

template <bool SQUARES> static __device__ __forceinline__ void add_value(double &sum, float value) {
    if constexpr (SQUARES)
        sum = fma((double)value, (double)value, sum);
    else
        sum += (double)value;
}

// A thread has every THREADS-th group of four of the piece, however it is read: the same bits at every alignment.
template <bool SQUARES, bool ALIGNED>
static __global__ void __launch_bounds__(THREADS)
    sum_pieces(double *partials, const accum *values, size_t n, int piece) {
    __shared__ double shared[THREADS];
    size_t first = (size_t)blockIdx.x * piece;
    int count = (int)min((size_t)piece, n - first), groups = count / 4;
    values += first;
    double sums[4] = {};
#pragma unroll 4
    for (int i = threadIdx.x; i < groups; i += THREADS) {
        float four[4];
        if constexpr (ALIGNED)
            columns_read<4>(four, values + 4 * (size_t)i);
        else
            for (int k = 0; k < 4; k++) four[k] = values[4 * (size_t)i + k];
        for (int k = 0; k < 4; k++) add_value<SQUARES>(sums[k], four[k]);
    }
    if (4 * groups + (int)threadIdx.x < count) add_value<SQUARES>(sums[0], values[4 * groups + threadIdx.x]);
    double total = block_total((sums[0] + sums[1]) + (sums[2] + sums[3]), shared);
    if (threadIdx.x == 0) partials[blockIdx.x] = total;
}

// *total = the sum, or with add += it.
static __global__ void __launch_bounds__(TOTAL_THREADS)
    sum_partials(double *total, const double *partials, int count, bool add) {
    __shared__ double shared[TOTAL_THREADS];
    double sum = 0;
    for (int i = threadIdx.x; i < count; i += TOTAL_THREADS) sum += partials[i];
    sum = block_total(sum, shared);
    if (threadIdx.x == 0) *total = add ? *total + sum : sum;
}

// partials [SUM_PIECES]
template <bool SQUARES>
static void sum_values(double *total, double *partials, const accum *values, size_t n, bool add) {
    size_t largest = (size_t)PIECE * SUM_PIECES;
    int piece = PIECE * (int)((n + largest - 1) / largest); // as many pieces as there is room for, at most
    unsigned count = cuda_blocks(n, piece);
    if (columns_aligned(values, 0))
        sum_pieces<SQUARES, true><<<count, THREADS, 0, cuda_stream()>>>(partials, values, n, piece);
    else
        sum_pieces<SQUARES, false><<<count, THREADS, 0, cuda_stream()>>>(partials, values, n, piece);
    cuda_check_launch();
    sum_partials<<<1, TOTAL_THREADS, 0, cuda_stream()>>>(total, partials, (int)count, add);
    cuda_check_launch();
}

extern "C" void device_add_sum(double *sum, const accum *values, size_t n) {
    OPERATION();
    if (n) sum_values<false>(sum, (double *)cuda_scratch(scratch_sum()), values, n, true);
}

extern "C" double device_sum_squares(const accum *values, size_t n) {
    OPERATION();
    if (n == 0) return 0;
    double *partials = (double *)cuda_scratch(scratch_sum()), *total = partials + SUM_PIECES, result;
    sum_values<true>(total, partials, values, n, false);
    device_copy_out(&result, total, sizeof result);
    return result;
}

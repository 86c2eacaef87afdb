// The one matrix product behind every operation of the CPU backend.
#ifndef MOK_KERNELS_CPU_GEMM_H
#define MOK_KERNELS_CPU_GEMM_H

#include "kernels/types.h"

// A matrix seen through two strides, so that a transpose is a view: element (i, j) is data[i * row + j * col].
struct view {
    const real *data;
    size_t row, col;
};

// One product c = a b + init. c [M, N] has rows c_row elements apart; init likewise, NULL for zero, may be c.
// a [M, K]   b [K, N]
struct gemm {
    int M, N, K;
    struct view a, b;
    real *c;
    size_t c_row;
    const real *init;
    size_t init_row;
};

// Every c[i][j] is a chain of fused multiply-adds that starts from init and takes k in ascending order: the same bits
// whatever the block sizes, the other rows and columns, and the number of threads.
void gemm_parallel(const struct gemm *products, int count); // all threads share the tiles of all products
void gemm_serial(const struct gemm *product);               // the calling thread alone

// Multiply-adds per second of the inner loop's instruction, on all threads, measured for a few milliseconds.
double gemm_measure_peak_flops(void);
// "AVX2", "AVX-512", ...: what the inner loop was compiled for.
const char *gemm_vector_name(void);

#endif

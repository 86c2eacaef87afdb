// Kernels of tests/gpu_symm.c.
#include "kernels/cuda/cuda.h"
#include "tests/gpu_symm.h"

static __device__ uint32_t pattern(int rank, size_t i) {
    return (uint32_t)i * 2654435761u + (uint32_t)rank * 40503u + 1;
}

static __global__ void fill(uint32_t *words, int rank, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) words[i] = pattern(rank, i);
}

static __global__ void count(unsigned long long *wrong, const uint32_t *words, int rank, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n && words[i] != (rank < 0 ? 0 : pattern(rank, i))) atomicAdd(wrong, 1ull);
}

void fill_pattern(uint32_t *words, int rank, size_t n) {
    if (n) fill<<<cuda_blocks(n, 256), 256, 0, cuda_stream()>>>(words, rank, n);
    cuda_check_launch();
}

void count_wrong(uint64_t *wrong, const uint32_t *words, int rank, size_t n) {
    if (n) count<<<cuda_blocks(n, 256), 256, 0, cuda_stream()>>>((unsigned long long *)wrong, words, rank, n);
    cuda_check_launch();
}

// The two number types every other file is written in.
//
//   real    weights and activations: float on the CPU, BF16 on the GPU
//   accum   everything that must not lose bits: router scores, gradients, master weights, moments, sums
//
// With -DMOK_DOUBLE both are double: the same sources then check their own gradients by finite differences. With -DMOK_CUDA
// real is BF16, whose numbers only the kernels read: to host code it is two bytes.
#ifndef MOK_KERNELS_TYPES_H
#define MOK_KERNELS_TYPES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined MOK_CUDA && defined __CUDACC__
#include <cuda_bf16.h>
typedef __nv_bfloat16 real;
typedef float accum;
#elif defined MOK_CUDA
typedef struct {
    uint16_t bits;
} real;
typedef float accum;
#elif defined MOK_DOUBLE
typedef double real;
typedef double accum;
#else
typedef float real;
typedef float accum;
#endif

#endif

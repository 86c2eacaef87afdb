// SwiGLU of single numbers, and the order in which a gate's gradient is summed. Every kernel that computes it goes
// through these functions, and no operation in them may be fused with another: all get the same bits.
#ifndef MOK_KERNELS_CUDA_SWIGLU_CUH
#define MOK_KERNELS_CUDA_SWIGLU_CUH

#include "kernels/cuda/cuda.h"

// The fast exponential and reciprocal are right to 2^-20 for |g| < 10 and to 2^-17 for all others that leave a number
// above zero: far below the rounding to BF16, 2^-9, of what is made of it.
static __device__ __forceinline__ float swiglu_sigmoid(float g) {
    const float minus_log2_e = -1.4426950408889634f;
    float power, sigmoid;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(__fmul_rn(g, minus_log2_e)));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(sigmoid) : "f"(__fadd_rn(1.0f, power)));
    return sigmoid;
}

// hidden = weight * silu(g) * u
static __device__ __forceinline__ float swiglu_hidden(float g, float u, float weight) {
    float silu = __fmul_rn(g, swiglu_sigmoid(g));
    return __fmul_rn(weight, __fmul_rn(silu, u));
}

struct swiglu_gradient {
    float dg, du, hidden;
    float activation; // hidden without the weight: the weight's gradient is the sum of d_hidden times this
};

static __device__ __forceinline__ struct swiglu_gradient swiglu_gradient_of(float d_hidden, float g, float u,
                                                                            float weight) {
    float sigma = swiglu_sigmoid(g), silu = __fmul_rn(g, sigma);
    float d_activation = __fmul_rn(weight, d_hidden);
    // silu' = sigma (1 + g (1 - sigma)) = sigma + silu - silu sigma
    float slope = __fmaf_rn(-silu, sigma, __fadd_rn(silu, sigma));
    struct swiglu_gradient result;
    result.activation = __fmul_rn(silu, u);
    result.du = __fmul_rn(d_activation, silu);
    result.dg = __fmul_rn(__fmul_rn(d_activation, u), slope);
    result.hidden = __fmul_rn(weight, result.activation);
    return result;
}

// What two neighbouring columns, the even one first, add to the weight's gradient.
static __device__ __forceinline__ float swiglu_pair(const struct swiglu_gradient &even, float d_even,
                                                    const struct swiglu_gradient &odd, float d_odd) {
    return __fmaf_rn(d_odd, odd.activation, __fmul_rn(d_even, even.activation));
}

// The order of a gate gradient's sum over one chunk of GATE_GRADIENT_COLUMNS (128) columns, that of a tensor core's
// accumulator, where lane q of four has columns 8 j + 2 q and 8 j + 2 q + 1:
//   1. pair (j, q) = these two columns (swiglu_pair)
//   2. for every q, the 16 pairs by halves: j + (j + 8), then + 4, + 2, + 1
//   3. (q0 + q1) + (q2 + q3)
// Columns beyond the row count as zeros. The chunks' sums are then added to 0 in ascending order.

// Step 2, by 16 neighbouring lanes of which each has one j. In every lane of the 16.
static __device__ __forceinline__ float swiglu_sum_pairs_of_lanes(float pair) {
#pragma unroll
    for (int half = 8; half > 0; half /= 2) pair = __fadd_rn(pair, __shfl_xor_sync(ALL_LANES, pair, half));
    return pair;
}

// Step 3. quads [4]
static __device__ __forceinline__ float swiglu_sum_quads(const float *quads) {
    return __fadd_rn(__fadd_rn(quads[0], quads[1]), __fadd_rn(quads[2], quads[3]));
}

#endif

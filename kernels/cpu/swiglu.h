// SwiGLU along a piece of one row. Everyone who computes it goes through these functions: all get the same bits.
#ifndef MOK_KERNELS_CPU_SWIGLU_H
#define MOK_KERNELS_CPU_SWIGLU_H

#include "kernels/cpu/rowmath.h"

// hidden = weight * silu(g) * u, n columns
static inline void swiglu_row_forward(real *hidden, const real *g, const real *u, real weight, int n) {
#pragma omp simd
    for (int i = 0; i < n; i++) hidden[i] = weight * (g[i] * row_sigmoid(g[i]) * u[i]);
}

// dg, du and hidden of n columns, n <= GATE_GRADIENT_COLUMNS. Returns these columns' part of the weight's gradient.
static inline accum swiglu_row_backward(real *dg, real *du, real *hidden, const real *d_hidden, const real *g,
                                        const real *u, real weight, int n) {
#pragma omp simd
    for (int i = 0; i < n; i++) {
        real sigma = row_sigmoid(g[i]), silu = g[i] * sigma;
        real d_activation = weight * d_hidden[i];
        du[i] = d_activation * silu;
        dg[i] = d_activation * u[i] * (sigma * (1 + g[i] * (1 - sigma)));
        hidden[i] = silu * u[i];
    }
    accum part = row_dot(d_hidden, hidden, n);
#pragma omp simd
    for (int i = 0; i < n; i++) hidden[i] = weight * hidden[i];
    return part;
}

#endif

// SwiGLU with the gate weight inside: the same product before the down projection for dense, shared and routed experts.
#include <string.h>

#include "kernels/cpu/rowmath.h"
#include "kernels/kernels.h"

void swiglu_forward(real *hidden, const real *gate_up, const accum *gates, const int *slot_of_row, int rows, int I) {
#pragma omp parallel for
    for (int r = 0; r < rows; r++) {
        const real *g = gate_up + (size_t)r * 2 * I, *u = g + I;
        real *out = hidden + (size_t)r * I;
        if (gates && slot_of_row[r] < 0) {
            memset(out, 0, sizeof(real) * (size_t)I);
            continue;
        }
        real weight = gates ? gates[slot_of_row[r]] : 1;
#pragma omp simd
        for (int i = 0; i < I; i++) out[i] = weight * (g[i] * row_sigmoid(g[i]) * u[i]);
    }
}

void swiglu_backward(real *d_gate_up, real *hidden, accum *d_gates, const real *d_hidden, const real *gate_up,
                     const accum *gates, const int *slot_of_row, int rows, int I) {
#pragma omp parallel for
    for (int r = 0; r < rows; r++) {
        const real *g = gate_up + (size_t)r * 2 * I, *u = g + I, *d = d_hidden + (size_t)r * I;
        real *dg = d_gate_up + (size_t)r * 2 * I, *du = dg + I, *out = hidden + (size_t)r * I;
        if (gates && slot_of_row[r] < 0) {
            memset(dg, 0, sizeof(real) * 2 * (size_t)I);
            memset(out, 0, sizeof(real) * (size_t)I);
            continue;
        }
        real weight = gates ? gates[slot_of_row[r]] : 1;
#pragma omp simd
        for (int i = 0; i < I; i++) {
            real sigma = row_sigmoid(g[i]), silu = g[i] * sigma;
            real d_activation = weight * d[i];
            du[i] = d_activation * silu;
            dg[i] = d_activation * u[i] * (sigma * (1 + g[i] * (1 - sigma)));
            out[i] = silu * u[i];
        }
        if (gates) {
            d_gates[slot_of_row[r]] = row_dot(d, out, I);
            for (int i = 0; i < I; i++) out[i] = weight * out[i];
        }
    }
}

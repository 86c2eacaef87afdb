// SwiGLU with the gate weight inside: the same product before the down projection for dense, shared and routed experts.
#include "kernels/cpu/swiglu.h"

#include <string.h>

#include "kernels/kernels.h"
#include "kernels/operation.h"

void swiglu_forward(real *hidden, const real *gate_up, const accum *gates, const int *slot_of_row, int rows, int I) {
    OPERATION();
#pragma omp parallel for
    for (int r = 0; r < rows; r++) {
        const real *g = gate_up + (size_t)r * 2 * I, *u = g + I;
        real *out = hidden + (size_t)r * I;
        if (gates && slot_of_row[r] < 0)
            memset(out, 0, sizeof(real) * (size_t)I);
        else
            swiglu_row_forward(out, g, u, gates ? gates[slot_of_row[r]] : 1, I);
    }
}

void swiglu_backward(real *d_gate_up, real *hidden, accum *d_gates, const real *d_hidden, const real *gate_up,
                     const accum *gates, const int *slot_of_row, int rows, int I) {
    OPERATION();
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
        accum d_weight = 0;
        for (int i = 0; i < I; i += GATE_GRADIENT_COLUMNS) {
            int n = I - i < GATE_GRADIENT_COLUMNS ? I - i : GATE_GRADIENT_COLUMNS;
            d_weight += swiglu_row_backward(dg + i, du + i, out + i, d + i, g + i, u + i, weight, n);
        }
        if (gates) d_gates[slot_of_row[r]] = d_weight;
    }
}

// RMSNorm, forward and backward.
#include "kernels/cpu/rowmath.h"
#include "kernels/kernels.h"
#include "kernels/operation.h"

enum { COLUMN_BLOCK = 64 }; // columns whose weight gradient one thread sums, rows ascending

void rmsnorm_forward(real *y, int y_stride, accum *rstd, const real *x, int x_stride, const real *w, int N, int C,
                     double eps) {
    OPERATION();
#pragma omp parallel for
    for (int i = 0; i < N; i++) {
        const real *xi = x + (size_t)i * x_stride;
        real *yi = y + (size_t)i * y_stride;
        accum r = 1 / accum_sqrt(row_dot(xi, xi, C) / C + (accum)eps);
        for (int c = 0; c < C; c++) yi[c] = w[c] * (xi[c] * r);
        rstd[i] = r;
    }
}

void rmsnorm_backward(real *dx, int dx_stride, bool add, accum *dw, const real *dy, int dy_stride, const real *x,
                      int x_stride, const real *w, const accum *rstd, int N, int C) {
    OPERATION();
    // dw first: dx may be the same memory as dy.
#pragma omp parallel for
    for (int first = 0; first < C; first += COLUMN_BLOCK) {
        int last = first + COLUMN_BLOCK < C ? first + COLUMN_BLOCK : C;
        for (int i = 0; i < N; i++) {
            const real *xi = x + (size_t)i * x_stride, *dyi = dy + (size_t)i * dy_stride;
            for (int c = first; c < last; c++) dw[c] += dyi[c] * (xi[c] * rstd[i]);
        }
    }
#pragma omp parallel for
    for (int i = 0; i < N; i++) {
        const real *xi = x + (size_t)i * x_stride, *dyi = dy + (size_t)i * dy_stride;
        real *dxi = dx + (size_t)i * dx_stride;
        accum r = rstd[i];
        accum mean = row_dot3(w, dyi, xi, C) * r / C; // of t xhat
        for (int c = 0; c < C; c++) {
            real value = r * (w[c] * dyi[c] - xi[c] * r * mean);
            dxi[c] = add ? dxi[c] + value : value;
        }
    }
}

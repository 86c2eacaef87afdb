// Rotary positions.
#include "kernels/kernels.h"
#include "kernels/operation.h"

void rope_rotate(real *x, int row_stride, int heads, int head_stride, int first, int rope_dim, const accum *angles,
                 int N, int T, bool inverse) {
    OPERATION();
#pragma omp parallel for
    for (int i = 0; i < N; i++) {
        const accum *angle = angles + (size_t)(i % T) * rope_dim;
        for (int h = 0; h < heads; h++) {
            real *pair = x + (size_t)i * row_stride + (size_t)h * head_stride + first;
            for (int j = 0; j < rope_dim; j += 2) {
                accum c = angle[j], s = inverse ? -angle[j + 1] : angle[j + 1];
                real u = pair[j], v = pair[j + 1];
                pair[j] = u * c - v * s;
                pair[j + 1] = u * s + v * c;
            }
        }
    }
}

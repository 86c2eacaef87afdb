// Token embedding.
#include <string.h>

#include "kernels/kernels.h"
#include "kernels/operation.h"

enum { COLUMN_BLOCK = 64 }; // columns one thread owns in the backward pass, so that rows add up in order

void embedding_forward(real *x, const real *table, const int32_t *ids, int N, int H) {
    OPERATION();
#pragma omp parallel for
    for (int i = 0; i < N; i++) {
        real *row = x + (size_t)i * H;
        if (ids[i] < 0)
            memset(row, 0, sizeof(real) * (size_t)H);
        else
            memcpy(row, table + (size_t)ids[i] * H, sizeof(real) * (size_t)H);
    }
}

void embedding_backward(accum *dtable, const real *dx, const int32_t *ids, int N, int H) {
    OPERATION();
#pragma omp parallel for
    for (int first = 0; first < H; first += COLUMN_BLOCK) {
        int last = first + COLUMN_BLOCK < H ? first + COLUMN_BLOCK : H;
        for (int i = 0; i < N; i++) {
            if (ids[i] < 0) continue;
            accum *row = dtable + (size_t)ids[i] * H;
            for (int h = first; h < last; h++) row[h] += dx[(size_t)i * H + h];
        }
    }
}

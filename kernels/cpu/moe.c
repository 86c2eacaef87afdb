// Dispatch and combine where all experts are on this device: counting, placement, gather, and the sum over a token's
// slots.
#include <string.h>

#include "kernels/kernels.h"

void moe_place(int *offsets, int *slot_of_row, int *row_of_slot, const int32_t *ids, int N, int K, int E) {
    int slots = N * K;
    memset(offsets, 0, sizeof(int) * ((size_t)E + 1));
    for (int s = 0; s < slots; s++)
        if (ids[s] >= 0) offsets[ids[s] + 1]++;
    for (int e = 0; e < E; e++) offsets[e + 1] += offsets[e];
    // offsets[e] is used as the next free row of expert e, which leaves the first row of e + 1 in it.
    for (int s = 0; s < slots; s++) {
        int row = ids[s] < 0 ? -1 : offsets[ids[s]]++;
        row_of_slot[s] = row;
        if (row >= 0) slot_of_row[row] = s;
    }
    memmove(offsets + 1, offsets, sizeof(int) * (size_t)E);
    offsets[0] = 0;
    for (int row = offsets[E]; row < slots; row++) slot_of_row[row] = -1;
}

void moe_gather(real *rows, const real *x, const int *slot_of_row, int R, int K, int H) {
    size_t bytes = sizeof(real) * (size_t)H;
#pragma omp parallel for
    for (int r = 0; r < R; r++) {
        if (slot_of_row[r] < 0)
            memset(rows + (size_t)r * H, 0, bytes);
        else
            memcpy(rows + (size_t)r * H, x + (size_t)(slot_of_row[r] / K) * H, bytes);
    }
}

void moe_combine(real *y, const real *rows, const int *row_of_slot, const real *shared, const real *residual, int N,
                 int K, int H) {
#pragma omp parallel for
    for (int t = 0; t < N; t++) {
        real *out = y + (size_t)t * H;
        const real *s = shared ? shared + (size_t)t * H : NULL, *x = residual ? residual + (size_t)t * H : NULL;
        for (int h = 0; h < H; h++) {
            accum sum = 0;
            for (int k = 0; k < K; k++) {
                int row = row_of_slot[(size_t)t * K + k];
                if (row >= 0) sum += rows[(size_t)row * H + h];
            }
            if (s) sum += s[h];
            if (x) sum += x[h];
            out[h] = sum;
        }
    }
}

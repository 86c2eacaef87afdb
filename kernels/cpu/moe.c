// Dispatch and combine: counting, placement, gathers, and the sum over a token's slots.
#include <string.h>

#include "kernels/cpu/scratch.h"
#include "kernels/kernels.h"
#include "kernels/operation.h"

void moe_place(int *offsets, int *slot_of_row, int *row_of_slot, const int32_t *ids, const int *order, int N, int K,
               int E) {
    OPERATION();
    int slots = N * K;
    memset(offsets, 0, sizeof(int) * ((size_t)E + 1));
    for (int s = 0; s < slots; s++)
        if (ids[s] >= 0) offsets[(order ? order[ids[s]] : ids[s]) + 1]++;
    for (int e = 0; e < E; e++) offsets[e + 1] += offsets[e];
    // offsets[e] is used as the next free row of expert e, which leaves the first row of e + 1 in it.
    for (int s = 0; s < slots; s++) {
        int row = ids[s] < 0 ? -1 : offsets[order ? order[ids[s]] : ids[s]]++;
        row_of_slot[s] = row;
        if (row >= 0) slot_of_row[row] = s;
    }
    memmove(offsets + 1, offsets, sizeof(int) * (size_t)E);
    offsets[0] = 0;
    for (int row = offsets[E]; row < slots; row++) slot_of_row[row] = -1;
}

void moe_regroup(int *arrival_of_row, int *row_of_arrival, const int *offsets, int S, int stride, int E, int first,
                 int rows) {
    OPERATION();
    (void)rows;
    int *next = scratch_alloc(sizeof(int) * (size_t)S); // arrival of the next row of every source
    for (int s = 0, arrival = first; s < S; s++) {
        next[s] = arrival;
        arrival += offsets[(size_t)s * stride + E] - offsets[(size_t)s * stride];
    }
    int row = first;
    for (int e = 0; e < E; e++)
        for (int s = 0; s < S; s++)
            for (int i = offsets[(size_t)s * stride + e]; i < offsets[(size_t)s * stride + e + 1]; i++) {
                arrival_of_row[row] = next[s];
                row_of_arrival[next[s]++] = row++;
            }
    scratch_free(next);
}

void moe_gather_gates(accum *out, const accum *gates, const int *index, int n) {
    OPERATION();
    for (int i = 0; i < n; i++) out[i] = index[i] < 0 ? 0 : gates[index[i]];
}

void moe_scatter(real *rows, const real *x, const int *row_of_slot, int N, int K, int H) {
    OPERATION();
    size_t slots = (size_t)N * K;
#pragma omp parallel for
    for (size_t slot = 0; slot < slots; slot++)
        if (row_of_slot[slot] >= 0)
            memcpy(rows + (size_t)row_of_slot[slot] * H, x + slot / K * H, sizeof(real) * (size_t)H);
}

void moe_gather(real *rows, const real *x, const int *index, int R, int H) {
    OPERATION();
    size_t bytes = sizeof(real) * (size_t)H;
#pragma omp parallel for
    for (int r = 0; r < R; r++) {
        if (index[r] < 0)
            memset(rows + (size_t)r * H, 0, bytes);
        else
            memcpy(rows + (size_t)r * H, x + (size_t)index[r] * H, bytes);
    }
}

// out [H] = sum of `count` rows in their order
static void sum_rows(real *out, const real *const *rows, int count, int H) {
    enum { COLUMNS = 64 }; // sums that stay in registers
    for (int first = 0; first < H; first += COLUMNS) {
        int n = H - first < COLUMNS ? H - first : COLUMNS;
        accum sums[COLUMNS] = {0};
        for (int r = 0; r < count; r++)
            for (int h = 0; h < n; h++) sums[h] += rows[r][first + h];
        for (int h = 0; h < n; h++) out[first + h] = sums[h];
    }
}

// y = the rows of a token's slots, then shared, then residual. Of two ways to find a slot's row one is NULL:
// row_of_slot, or ids with one row per slot.
static void sum_tokens(real *y, const real *rows, const int *row_of_slot, const int32_t *ids, const real *shared,
                       const real *residual, int N, int K, int H) {
#pragma omp parallel
    {
        const real **terms = scratch_alloc(sizeof *terms * ((size_t)K + 2));
#pragma omp for
        for (int t = 0; t < N; t++) {
            int count = 0;
            for (size_t slot = (size_t)t * K; slot < (size_t)(t + 1) * K; slot++) {
                if ((row_of_slot ? row_of_slot[slot] : ids[slot]) < 0) continue;
                terms[count++] = rows + (row_of_slot ? (size_t)row_of_slot[slot] : slot) * H;
            }
            if (shared) terms[count++] = shared + (size_t)t * H;
            if (residual) terms[count++] = residual + (size_t)t * H;
            sum_rows(y + (size_t)t * H, terms, count, H);
        }
        scratch_free(terms);
    }
}

void moe_combine(real *y, const real *rows, const int *row_of_slot, const real *shared, const real *residual, int N,
                 int K, int H) {
    OPERATION();
    sum_tokens(y, rows, row_of_slot, NULL, shared, residual, N, K, H);
}

void moe_sum_slots(real *y, const real *slots, const int32_t *ids, const real *shared, const real *residual, int N,
                   int K, int H) {
    OPERATION();
    sum_tokens(y, slots, NULL, ids, shared, residual, N, K, H);
}

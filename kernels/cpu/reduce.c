// Sums over whole arrays, for any number of threads in the same order.
#include "kernels/cpu/scratch.h"
#include "kernels/kernels.h"
#include "kernels/operation.h"

void device_add_sum(double *sum, const accum *values, size_t n) {
    OPERATION();
    double all = 0;
    for (size_t i = 0; i < n; i++) all += (double)values[i];
    *sum += all;
}

enum { NORM_BLOCK = 4096 }; // elements of one partial sum; the partial sums are added in order

double device_sum_squares(const accum *values, size_t n) {
    OPERATION();
    size_t blocks = (n + NORM_BLOCK - 1) / NORM_BLOCK;
    double *partial = scratch_alloc(sizeof(double) * blocks);
#pragma omp parallel for
    for (size_t b = 0; b < blocks; b++) {
        size_t last = (b + 1) * NORM_BLOCK < n ? (b + 1) * NORM_BLOCK : n;
        double sum = 0;
        for (size_t i = b * NORM_BLOCK; i < last; i++) sum += (double)values[i] * (double)values[i];
        partial[b] = sum;
    }
    double total = 0;
    for (size_t b = 0; b < blocks; b++) total += partial[b];
    scratch_free(partial);
    return total;
}

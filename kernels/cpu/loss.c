// Softmax cross-entropy, loss and gradient in one pass over the logits.
#include "kernels/cpu/rowmath.h"
#include "kernels/kernels.h"
#include "kernels/operation.h"

void cross_entropy(real *logits, accum *loss, const int32_t *targets, int rows, int V, bool want_gradient,
                   double scale) {
    OPERATION();
#pragma omp parallel for
    for (int r = 0; r < rows; r++) {
        real *row = logits + (size_t)r * V;
        int target = targets[r];
        if (target < 0) {
            loss[r] = 0;
            for (int v = 0; want_gradient && v < V; v++) row[v] = 0;
            continue;
        }
        real largest = row_max(row, V), at_target = row[target];
        for (int v = 0; v < V; v++) row[v] = row_exp(row[v] - largest);
        accum sum = row_sum(row, V);
        loss[r] = accum_log(sum) + (largest - at_target);
        if (!want_gradient) continue;
        real factor = (accum)scale / sum;
        for (int v = 0; v < V; v++) row[v] *= factor;
        row[target] -= (real)scale;
    }
}

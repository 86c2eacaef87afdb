// AdamW.
#include "kernels/cpu/rowmath.h"
#include "kernels/kernels.h"
#include "kernels/operation.h"

void adamw_update(accum *master, accum *m, accum *v, real *weight, const accum *grad, size_t n, struct adamw a) {
    OPERATION();
    const accum beta1 = (accum)a.beta1, beta2 = (accum)a.beta2;
    const accum rest1 = (accum)(1 - a.beta1), rest2 = (accum)(1 - a.beta2); // not from the rounded betas
    const accum eps = (accum)a.eps, scale = (accum)a.grad_scale;
    const accum step_size = (accum)(a.lr / (1 - pow(a.beta1, (double)a.step)));
    const accum correction2 = (accum)(1 / (1 - pow(a.beta2, (double)a.step)));
    const accum keep = (accum)(1 - a.lr * a.weight_decay);
#pragma omp parallel for simd
    for (size_t i = 0; i < n; i++) {
        accum g = grad[i] * scale;
        m[i] = beta1 * m[i] + rest1 * g;
        v[i] = beta2 * v[i] + rest2 * g * g;
        master[i] = keep * master[i] - step_size * m[i] / (accum_sqrt(v[i] * correction2) + eps);
        weight[i] = (real)master[i];
    }
}

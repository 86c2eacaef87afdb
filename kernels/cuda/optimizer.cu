// AdamW.
#include <cmath>

#include "kernels/cuda/columns.cuh"

enum { THREADS = 256 };

struct factors {
    float beta1, beta2, rest1, rest2, eps, grad_scale, step_size, correction2, keep;
};

// One number. No operation is fused with another, so that every way to reach it has the same bits.
static __device__ __forceinline__ void update(float &master, float &m, float &v, float grad, const struct factors &f) {
    float g = __fmul_rn(grad, f.grad_scale);
    m = __fadd_rn(__fmul_rn(f.beta1, m), __fmul_rn(f.rest1, g));
    v = __fadd_rn(__fmul_rn(f.beta2, v), __fmul_rn(__fmul_rn(f.rest2, g), g));
    float root = __fsqrt_rn(__fmul_rn(v, f.correction2));
    float step = __fdiv_rn(__fmul_rn(f.step_size, m), __fadd_rn(root, f.eps));
    master = __fsub_rn(__fmul_rn(f.keep, master), step);
}

static __device__ __forceinline__ void update_one(accum *master, accum *m, accum *v, real *weight, const accum *grad,
                                                  size_t i, const struct factors &f) {
    update(master[i], m[i], v[i], grad[i], f);
    weight[i] = __float2bfloat16_rn(master[i]);
}

// Four numbers a thread; the last thread may have fewer.
template <bool ALIGNED>
static __global__ void __launch_bounds__(THREADS)
    update_all(accum *master, accum *m, accum *v, real *weight, const accum *grad, size_t n, struct factors f) {
    size_t first = ((size_t)blockIdx.x * THREADS + threadIdx.x) * 4;
    if (!ALIGNED || first + 4 > n) {
        for (size_t i = first; i < first + 4 && i < n; i++) update_one(master, m, v, weight, grad, i, f);
        return;
    }
    float4 w = *(const float4 *)(master + first), ms = *(const float4 *)(m + first), vs = *(const float4 *)(v + first);
    const float4 g = *(const float4 *)(grad + first);
    update(w.x, ms.x, vs.x, g.x, f);
    update(w.y, ms.y, vs.y, g.y, f);
    update(w.z, ms.z, vs.z, g.z, f);
    update(w.w, ms.w, vs.w, g.w, f);
    *(float4 *)(master + first) = w;
    *(float4 *)(m + first) = ms;
    *(float4 *)(v + first) = vs;
    __nv_bfloat162 pairs[2] = {__floats2bfloat162_rn(w.x, w.y), __floats2bfloat162_rn(w.z, w.w)};
    *(uint2 *)(weight + first) = make_uint2(*(const unsigned *)&pairs[0], *(const unsigned *)&pairs[1]);
}

extern "C" void adamw_update(accum *master, accum *m, accum *v, real *weight, const accum *grad, size_t n,
                             struct adamw a) {
    OPERATION();
    if (n == 0) return;
    struct factors f;
    f.beta1 = (float)a.beta1, f.beta2 = (float)a.beta2;
    f.rest1 = (float)(1 - a.beta1), f.rest2 = (float)(1 - a.beta2); // not from the rounded betas
    f.eps = (float)a.eps, f.grad_scale = (float)a.grad_scale;
    f.step_size = (float)(a.lr / (1 - pow(a.beta1, (double)a.step)));
    f.correction2 = (float)(1 / (1 - pow(a.beta2, (double)a.step)));
    f.keep = (float)(1 - a.lr * a.weight_decay);
    unsigned blocks = cuda_blocks(n, 4 * THREADS);
    bool aligned = columns_aligned(master, 0) && columns_aligned(m, 0) && columns_aligned(v, 0) &&
                   columns_aligned(grad, 0) && (uintptr_t)weight % 8 == 0;
    if (aligned)
        update_all<true><<<blocks, THREADS, 0, cuda_stream()>>>(master, m, v, weight, grad, n, f);
    else
        update_all<false><<<blocks, THREADS, 0, cuda_stream()>>>(master, m, v, weight, grad, n, f);
    cuda_check_launch();
}

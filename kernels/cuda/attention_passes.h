// The passes of attention, of which there are two implementations: attention_wgmma_* for the tensor cores of Hopper and
// heads whose rows TMA can load, attention_mma_* for all others. kernels/cuda/attention.cu chooses, and does what both
// share.
#ifndef MOK_KERNELS_CUDA_ATTENTION_PASSES_H
#define MOK_KERNELS_CUDA_ATTENTION_PASSES_H

#include "kernels/cuda/cuda.h"

// Inputs of both passes as in kernels.h; d_o and terms are the backward pass's.
struct attention_operands {
    const real *q, *kv, *kr; // [N, n*(dn+dr)], [N, n*(dn+dv)], [N, kr_stride]
    int kr_stride;
    const real *d_o;    // [N, n*dv]
    const float *terms; // what dq, dk and dv take of a query besides its row, see below
    struct attention_shape shape;
};

static const float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

// terms [B, n, blocks, 2, 64]: of every 64 queries the log of the denominator in units of log 2, then D = <do, o>. Rows
// are tiled in 128: there are blocks up to a multiple of that, and behind the last query +infinity, which makes
// probabilities 0, and D = 0.
enum { TERM_BLOCK = 64 };
static inline __host__ __device__ int attention_term_blocks(int length) {
    return (length / 128 + (length % 128 > 0)) * (128 / TERM_BLOCK);
}
// Floats of one head's terms.
static inline __host__ __device__ size_t attention_term_stride(int length) {
    return (size_t)attention_term_blocks(length) * 2 * TERM_BLOCK;
}

// Whether every row of every head begins at a multiple of 16 bytes, in all inputs.
static inline bool attention_rows_aligned(const struct attention_operands *a) {
    const struct attention_shape *s = &a->shape;
    uintptr_t addresses = (uintptr_t)a->q | (uintptr_t)a->kv | (uintptr_t)a->kr | (uintptr_t)a->d_o;
    return (s->nope_dim | s->rope_dim | s->value_dim | a->kr_stride) % 8 == 0 && addresses % 16 == 0;
}

// Widest heads that attention_mma_* take, of queries and of values.
enum { ATTENTION_MMA_COLUMNS = 256 };

void attention_mma_forward(real *o, accum *lse, const struct attention_operands *a);
// dk's first dn columns and dv into dkv, and its rope columns, which the caller sums over heads, into rope [n, N, dr].
void attention_mma_keys(real *dkv, real *rope, const struct attention_operands *a);
void attention_mma_queries(real *dq, const struct attention_operands *a);

// Whether these operands, and an output of the given address, can be taken by the passes below.
bool attention_wgmma_takes(const struct attention_operands *a, const void *output);
void attention_wgmma_forward(real *o, accum *lse, const struct attention_operands *a);
void attention_wgmma_keys(real *dkv, real *rope, const struct attention_operands *a);
void attention_wgmma_queries(real *dq, const struct attention_operands *a);

// ---- what kernels of both use ----

// 2^x with an error of 2 units in the last place and tiny results as 0: BF16, to which probabilities are rounded, keeps
// 16 bits less.
static __device__ __forceinline__ float exp2_short(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Two numbers rounded to BF16, the first in the lower half.
static __device__ __forceinline__ uint32_t pack_pair(float first, float second) {
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(second), "f"(first));
    return packed;
}

#endif

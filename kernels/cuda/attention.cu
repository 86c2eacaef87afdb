// Attention's operations: which implementation makes a pass (attention_passes.h), and what both have in common:
//   terms_kernel    per query, the log of its denominator and D = <do, o>
//   sum_rope_kernel the gradient of the rope keys, which all heads share
// No atomics on data, so that every sum has one order.
#include <math.h>

#include "kernels/cuda/attention_passes.h"
#include "kernels/cuda/columns.cuh"
#include "kernels/cuda/scratch_attention.h"

extern "C" int attention_most_columns(void) { return ATTENTION_MMA_COLUMNS; }

// Ends the program if heads are larger than they can be.
static void require_widths(struct attention_shape s) {
    int query = s.nope_dim + s.rope_dim, most = ATTENTION_MMA_COLUMNS;
    if (s.nope_dim < 1 || s.rope_dim < 1 || s.value_dim < 1 || query > most || s.value_dim > most)
        fail_user("attention",
                  "found heads of %d + %d columns for keys and %d for values, wanted 1 to %d of each on a GPU; lower "
                  "--nope-dim, --rope-dim or --value-dim",
                  s.nope_dim, s.rope_dim, s.value_dim, most);
}

// ---- terms ----

// With at least so many lanes a query, a thread block takes 128 queries or a fraction of that: all of one sequence, since
// terms of a sequence are a multiple of 128.
enum { TERMS_THREADS = 256, LEAST_LANES = TERMS_THREADS / (2 * TERM_BLOCK) };

// terms [B, n, blocks, 2, 64]; d_o, o [N, n, value]; lse [B, n, T]. `lanes` threads, a power of two, for each query;
// blockIdx.x counts `parts` blocks for each sequence, blockIdx.y is the head.
static __global__ void __launch_bounds__(TERMS_THREADS)
    terms_kernel(float *terms, const real *d_o, const real *o, const accum *lse, int lanes, unsigned parts,
                 size_t term_stride, int length, int value, bool vectors) {
    size_t heads = gridDim.y, h = blockIdx.y, b = blockIdx.x / parts;
    int lane = (int)threadIdx.x % lanes;
    int t = (int)(blockIdx.x % parts) * (TERMS_THREADS / lanes) + (int)threadIdx.x / lanes;
    bool there = t < length;
    float log = there ? lse[(b * heads + h) * (size_t)length + (size_t)t] : INFINITY, sum = 0;
    if (there) {
        size_t row = ((b * (size_t)length + (size_t)t) * heads + h) * (size_t)value;
        const real *d_o_row = d_o + row, *o_row = o + row;
        if (vectors) {
            for (int c = lane * 8; c < value; c += lanes * 8) {
                float x[8], y[8];
                columns_read<8>(x, d_o_row + c);
                columns_read<8>(y, o_row + c);
#pragma unroll
                for (int i = 0; i < 8; i++) sum = fmaf(x[i], y[i], sum);
            }
        } else {
            for (int c = lane; c < value; c += lanes)
                sum = fmaf(__bfloat162float(d_o_row[c]), __bfloat162float(o_row[c]), sum);
        }
    }
    for (int distance = lanes / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, distance);
    if (lane > 0) return;
    float *place =
        terms + (b * heads + h) * term_stride + (unsigned)t / TERM_BLOCK * (2 * TERM_BLOCK) + (unsigned)t % TERM_BLOCK;
    place[0] = log * LOG2_E;
    place[TERM_BLOCK] = sum;
}

static void launch_terms(float *terms, const real *d_o, const real *o, const accum *lse, struct attention_shape s) {
    size_t row_bytes = sizeof(real) * (size_t)s.value_dim;
    bool vectors = columns_aligned(d_o, row_bytes) && columns_aligned(o, row_bytes);
    int lanes = LEAST_LANES;
    while (lanes < 32 && lanes * (vectors ? 8 : 1) < s.value_dim) lanes *= 2;
    unsigned parts = (unsigned)(attention_term_blocks(s.length) * lanes / (TERMS_THREADS / TERM_BLOCK));
    dim3 grid(parts * (unsigned)s.batch, (unsigned)s.heads);
    terms_kernel<<<grid, TERMS_THREADS, 0, cuda_stream()>>>(
        terms, d_o, o, lse, lanes, parts, attention_term_stride(s.length), s.length, s.value_dim, vectors);
    cuda_check_launch();
}

// ---- the shared rope keys ----

// dkr [N, dkr_stride] = the sum of rope [n, N, dr] over the heads, in their order. A thread sums WIDTH columns of a row;
// there are `parts` such.
template <int WIDTH>
static __global__ void __launch_bounds__(256)
    sum_rope_kernel(real *dkr, int dkr_stride, const real *rope, size_t parts, int dr, int heads) {
    size_t part = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (part >= parts) return;
    float sums[WIDTH] = {};
#pragma unroll 8
    for (int h = 0; h < heads; h++) {
        float values[WIDTH];
        columns_read<WIDTH>(values, rope + ((size_t)h * parts + part) * WIDTH);
#pragma unroll
        for (int c = 0; c < WIDTH; c++) sums[c] += values[c];
    }
    unsigned in_row = (unsigned)dr / WIDTH;
    columns_write<WIDTH>(dkr + part / in_row * (size_t)dkr_stride + part % in_row * WIDTH, sums);
}

static void launch_sum_rope(real *dkr, int dkr_stride, const real *rope, struct attention_shape s) {
    size_t columns = (size_t)s.batch * (size_t)s.length * (size_t)s.rope_dim;
    bool vectors = s.rope_dim % 8 == 0 && columns_aligned(dkr, sizeof(real) * (size_t)dkr_stride);
    size_t parts = vectors ? columns / 8 : columns;
    auto kernel = vectors ? sum_rope_kernel<8> : sum_rope_kernel<1>;
    kernel<<<cuda_blocks(parts, 256), 256, 0, cuda_stream()>>>(dkr, dkr_stride, rope, parts, s.rope_dim, s.heads);
    cuda_check_launch();
}

// ---- scratch memory of the backward pass ----

// Bytes to each array, and of all.
struct backward_scratch {
    size_t terms; // [B, n, blocks, 2, 64]
    size_t rope;  // [n, N, dr]: gradients of rope keys, of each head
    size_t bytes;
};

static size_t append(size_t *bytes, size_t more) {
    size_t begin = *bytes;
    *bytes += (more + 255) / 256 * 256;
    return begin;
}

static struct backward_scratch backward_scratch_layout(struct attention_shape s) {
    size_t pairs = (size_t)s.batch * (size_t)s.heads;
    struct backward_scratch w = {};
    w.terms = append(&w.bytes, sizeof(float) * pairs * attention_term_stride(s.length));
    w.rope = append(&w.bytes, sizeof(real) * pairs * (size_t)s.length * (size_t)s.rope_dim);
    return w;
}

extern "C" size_t scratch_attention_backward(struct attention_shape shape) {
    return backward_scratch_layout(shape).bytes;
}

// ---- the operations ----

extern "C" void attention_forward(real *o, accum *lse, const real *q, const real *kv, const real *kr, int kr_stride,
                                  struct attention_shape shape) {
    OPERATION();
    if (shape.batch == 0 || shape.length == 0 || shape.heads == 0) return;
    require_widths(shape);
    struct attention_operands a = {q, kv, kr, kr_stride, NULL, NULL, shape};
    if (attention_wgmma_takes(&a, o))
        attention_wgmma_forward(o, lse, &a);
    else
        attention_mma_forward(o, lse, &a);
}

extern "C" void attention_backward(real *dq, real *dkv, real *dkr, int dkr_stride, const real *d_o, const real *q,
                                   const real *kv, const real *kr, int kr_stride, const real *o, const accum *lse,
                                   struct attention_shape shape) {
    OPERATION();
    if (shape.batch == 0 || shape.length == 0 || shape.heads == 0) return;
    require_widths(shape);
    struct backward_scratch layout = backward_scratch_layout(shape);
    char *memory = (char *)cuda_scratch(layout.bytes);
    float *terms = (float *)(memory + layout.terms);
    real *rope = (real *)(memory + layout.rope);
    launch_terms(terms, d_o, o, lse, shape);
    struct attention_operands a = {q, kv, kr, kr_stride, d_o, terms, shape};
    if (attention_wgmma_takes(&a, dkv))
        attention_wgmma_keys(dkv, rope, &a);
    else
        attention_mma_keys(dkv, rope, &a);
    launch_sum_rope(dkr, dkr_stride, rope, shape);
    if (attention_wgmma_takes(&a, dq))
        attention_wgmma_queries(dq, &a);
    else
        attention_mma_queries(dq, &a);
}

// Softmax cross-entropy, loss and gradient in place. A row is needed twice: for its largest logit and the sum of
// exponentials, then for the gradient. Between the two its beginning stays in shared memory; the rest is read once
// more, backwards, since its end is still in the L2 cache.
//
// Exponentials are the fast ones. In the sum they are right to 2^-21 where they count (near the largest logit), which
// moves the loss less than its own rounding; in the gradient BF16's 2^-9 follows.
#include <cfloat>

#include "kernels/cuda/columns.cuh"

enum { THREADS = 1024, MOST_CACHED = 12 * THREADS }; // pieces of eight logits in shared memory, 192 KiB

// A sum of exponentials so far: sum of e^(x - largest).
struct softmax_sum {
    float largest, sum;
};

static __device__ __forceinline__ void add_logit(struct softmax_sum &s, float x) {
    float largest = fmaxf(s.largest, x);
    s.sum = s.sum * __expf(s.largest - largest) + __expf(x - largest);
    s.largest = largest;
}

static __device__ __forceinline__ void add_eight(struct softmax_sum &s, const uint4 &packed) {
    float x[8], largest = s.largest;
    columns_unpack(x, packed);
    for (int i = 0; i < 8; i++) largest = fmaxf(largest, x[i]);
    float sum = s.sum * __expf(s.largest - largest);
    for (int i = 0; i < 8; i++) sum += __expf(x[i] - largest);
    s.largest = largest;
    s.sum = sum;
}

// Largest value of the block, in every thread. values: 32 floats of shared memory.
static __device__ float block_max(float value, float *values) {
    for (int lanes = 16; lanes > 0; lanes /= 2) value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, lanes));
    if (threadIdx.x % 32 == 0) values[threadIdx.x / 32] = value;
    __syncthreads();
    value = values[threadIdx.x % 32];
    for (int lanes = 16; lanes > 0; lanes /= 2) value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, lanes));
    return value;
}

// A row in three parts, since V may be odd: up to 7 numbers before the first 16-byte boundary, pieces of eight, and up
// to 7 more. A thread has every THREADS-th piece.
struct row_parts {
    real *row;
    uint4 *pieces, *cache;            // cache: the first `cached` pieces
    int head, count, cached, tail, V; // the tail is where it begins
};

static __device__ struct row_parts part_row(real *row, int V, uint4 *cache, int room) {
    struct row_parts p;
    int misaligned = (int)((uintptr_t)row % 16 / sizeof(real));
    p.row = row;
    p.head = min((8 - misaligned) % 8, V);
    p.pieces = (uint4 *)(row + p.head);
    p.count = (V - p.head) / 8;
    p.cache = cache;
    p.cached = min(p.count, room);
    p.tail = p.head + p.count * 8;
    p.V = V;
    return p;
}

static __device__ struct softmax_sum sum_row(const struct row_parts &p) {
    const int thread = threadIdx.x;
    struct softmax_sum s = {-FLT_MAX, 0}; // a number, so that the difference of two such is 0
    if (thread < p.head) add_logit(s, __bfloat162float(p.row[thread]));
    int i = thread;
#pragma unroll 4
    for (; i < p.cached; i += THREADS) {
        uint4 packed = p.pieces[i];
        p.cache[i] = packed;
        add_eight(s, packed);
    }
#pragma unroll 4
    for (; i < p.count; i += THREADS) add_eight(s, p.pieces[i]);
    if (p.tail + thread < p.V) add_logit(s, __bfloat162float(p.row[p.tail + thread]));
    return s;
}

// factor * e^(x - largest)
static __device__ __forceinline__ real scale_one(real x, float largest, float factor) {
    return __float2bfloat16_rn(factor * __expf(__bfloat162float(x) - largest));
}

static __device__ __forceinline__ uint4 scale_eight(const uint4 &packed, float largest, float factor) {
    float x[8];
    columns_unpack(x, packed);
    for (int i = 0; i < 8; i++) x[i] = factor * __expf(x[i] - largest);
    return columns_pack(x);
}

static __device__ void scale_row(const struct row_parts &p, float largest, float factor) {
    const int thread = threadIdx.x;
    if (p.tail + thread < p.V) p.row[p.tail + thread] = scale_one(p.row[p.tail + thread], largest, factor);
    int i = (p.count - 1 - thread) / THREADS * THREADS + thread; // this thread's last piece, where it has one
    if (thread >= p.count) i = -1;
    // Four pieces are read before the first is written.
    for (; i >= p.cached + 3 * THREADS; i -= 4 * THREADS) {
        uint4 packed[4];
        for (int k = 0; k < 4; k++) packed[k] = p.pieces[i - k * THREADS];
        for (int k = 0; k < 4; k++) p.pieces[i - k * THREADS] = scale_eight(packed[k], largest, factor);
    }
    for (; i >= p.cached; i -= THREADS) p.pieces[i] = scale_eight(p.pieces[i], largest, factor);
    for (i = thread; i < p.cached; i += THREADS) p.pieces[i] = scale_eight(p.cache[i], largest, factor);
    if (thread < p.head) p.row[thread] = scale_one(p.row[thread], largest, factor);
}

static __device__ void zero_row(real *row, int V) {
    for (int v = threadIdx.x; v < V; v += THREADS) row[v] = __float2bfloat16_rn(0.0f);
}

// room: pieces that shared memory has room for; none without a gradient.
static __global__ void __launch_bounds__(THREADS)
    row_loss(real *logits, accum *loss, const int32_t *targets, int V, bool want_gradient, float scale, int room) {
    extern __shared__ uint4 cache[];
    __shared__ float largest_of_warps[32], sums[33];
    real *row = logits + (size_t)blockIdx.x * V;
    int target = targets[blockIdx.x];
    if (target < 0) {
        if (want_gradient) zero_row(row, V);
        if (threadIdx.x == 0) loss[blockIdx.x] = 0;
        return;
    }
    float at_target = __bfloat162float(row[target]);
    const struct row_parts parts = part_row(row, V, cache, room);
    struct softmax_sum s = sum_row(parts);
    float largest = block_max(s.largest, largest_of_warps);
    float sum = block_sum(s.sum * __expf(s.largest - largest), sums);
    if (threadIdx.x == 0) loss[blockIdx.x] = logf(sum) + (largest - at_target);
    if (!want_gradient) return;
    float factor = scale / sum;
    scale_row(parts, largest, factor);
    __syncthreads();
    if (threadIdx.x == 0) row[target] = __float2bfloat16_rn(factor * __expf(at_target - largest) - scale);
}

extern "C" void cross_entropy(real *logits, accum *loss, const int32_t *targets, int rows, int V, bool want_gradient,
                              double scale) {
    OPERATION();
    if (rows == 0) return;
    cuda_allow_shared<row_loss>(sizeof(uint4) * MOST_CACHED);
    int room = want_gradient ? (V / 8 < MOST_CACHED ? V / 8 : MOST_CACHED) : 0;
    row_loss<<<(unsigned)rows, THREADS, sizeof(uint4) * (size_t)room, cuda_stream()>>>(
        logits, loss, targets, V, want_gradient, (float)scale, room);
    cuda_check_launch();
}

// The router's matrix products, with what belongs to them: scores, and the gradient back to inputs and weights.
//
// Everything is FP32 on plain multiply-adds: tensor cores would round the operands or the sums, and a choice between
// two experts hangs on the last bits. Which sums are made, and in which order, depends on sizes alone.
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/experts.h"
#include "kernels/cuda/scratch_router.h"

// ---- the product of two tiles ----

// A block makes TILE x TILE sums, a thread 8 x 4 of them. DEPTH terms at a time stand in shared memory as
// [DEPTH][PITCH]: the pitch keeps rows 16-byte aligned.
enum { TILE = 64, DEPTH = 32, PITCH = TILE + 4, THREADS = 128, ROWS = 8, COLUMNS = 4 };
enum { BLOCKS = 4 }; // of a multiprocessor, so that some multiply while others load: at most 128 registers of a thread
// A thread loads GROUP consecutive numbers, GROUPS times. RUNS of them make the depth.
enum { GROUP = 8, GROUPS = TILE * DEPTH / GROUP / THREADS, RUNS = DEPTH / GROUP };
static_assert(THREADS == TILE / ROWS * (TILE / COLUMNS), "threads cover the tile");
static_assert(DEPTH <= TILE, "places that are exchanged stay in the tile");

// A group as it lies in memory. It is widened when it goes to shared memory, not before: that would wait for the load.
template <typename T> struct group;

template <> struct group<float> {
    float4 low, high;
    __device__ __forceinline__ void load(const float *from) {
        low = *(const float4 *)from;
        high = *(const float4 *)(from + 4);
    }
    // The first `there` numbers, then zeros.
    __device__ __forceinline__ void load(const float *from, int there) {
        float numbers[GROUP];
#pragma unroll
        for (int n = 0; n < GROUP; n++) numbers[n] = n < there ? from[n] : 0.0f;
        low = make_float4(numbers[0], numbers[1], numbers[2], numbers[3]);
        high = make_float4(numbers[4], numbers[5], numbers[6], numbers[7]);
    }
    __device__ __forceinline__ void widen(float4 *two) const {
        two[0] = low;
        two[1] = high;
    }
};

template <> struct group<real> {
    uint4 words;
    __device__ __forceinline__ void load(const real *from) { words = *(const uint4 *)from; }
    __device__ __forceinline__ void load(const real *from, int there) {
        bf16x8 eight;
#pragma unroll
        for (int p = 0; p < 4; p++) {
            eight.pairs[p].x = 2 * p < there ? from[2 * p] : __float2bfloat16_rn(0.0f);
            eight.pairs[p].y = 2 * p + 1 < there ? from[2 * p + 1] : __float2bfloat16_rn(0.0f);
        }
        words = eight.words;
    }
    __device__ __forceinline__ void widen(float4 *two) const {
        bf16x8 eight;
        eight.words = words;
        float2 a = __bfloat1622float2(eight.pairs[0]), b = __bfloat1622float2(eight.pairs[1]);
        float2 c = __bfloat1622float2(eight.pairs[2]), d = __bfloat1622float2(eight.pairs[3]);
        two[0] = make_float4(a.x, a.y, b.x, b.y);
        two[1] = make_float4(c.x, c.y, d.x, d.y);
    }
};

// A matrix whose element (i, d) is term d of the sums of row, or column, i of the product. ALONG_DEPTH: it lies at
// data[i * stride + d], else at data[d * stride + i]. There are `count` values of i. Nothing outside is read.
template <typename T, bool ALONG_DEPTH> struct operand {
    typedef group<T> loaded;
    const T *data;
    int stride, count;
    bool aligned; // groups begin at 16 bytes

    operand(const T *matrix, int row_stride, int rows)
        : data(matrix), stride(row_stride), count(rows),
          aligned((uintptr_t)matrix % 16 == 0 && (size_t)row_stride * sizeof(T) % 16 == 0) {}

    // This thread's groups of the tile that begins at (first, depth). Zeros stand for what is not there.
    __device__ __forceinline__ void load(loaded out[GROUPS], int first, int depth, int depth_end) const {
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            int number = threadIdx.x + THREADS * g;
            int i = first + (ALONG_DEPTH ? number / RUNS : number % (TILE / GROUP) * GROUP);
            int d = depth + (ALONG_DEPTH ? number % RUNS * GROUP : number / (TILE / GROUP));
            int there = ALONG_DEPTH ? depth_end - d : count - i;
            if (ALONG_DEPTH ? i >= count : d >= depth_end) there = 0;
            size_t at = ALONG_DEPTH ? (size_t)i * stride + d : (size_t)d * stride + i;
            if (aligned && there >= GROUP)
                out[g].load(data + at);
            else
                out[g].load(data + at, there);
        }
    }

    // Where i of the tile stands in row d of shared memory. Lanes that store numbers of one row each, from several runs
    // of the depth, would meet in the same banks without the exchange of places.
    static __device__ __forceinline__ int place(int i, int d) { return ALONG_DEPTH ? i ^ (d / GROUP * GROUP) : i; }

    // The same groups into shared memory.
    static __device__ __forceinline__ void store(float *tile, const loaded in[GROUPS]) {
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            int number = threadIdx.x + THREADS * g;
            float4 two[2];
            in[g].widen(two);
            if (ALONG_DEPTH) {
                int d = number % RUNS * GROUP;
                float *to = tile + d * PITCH + place(number / RUNS, d);
                to[0 * PITCH] = two[0].x, to[1 * PITCH] = two[0].y, to[2 * PITCH] = two[0].z, to[3 * PITCH] = two[0].w;
                to[4 * PITCH] = two[1].x, to[5 * PITCH] = two[1].y, to[6 * PITCH] = two[1].z, to[7 * PITCH] = two[1].w;
            } else {
                float4 *to = (float4 *)(tile + number / (TILE / GROUP) * PITCH + number % (TILE / GROUP) * GROUP);
                to[0] = two[0];
                to[1] = two[1];
            }
        }
    }
};

// Rows of the tile that this thread sums: two runs of four, half a tile apart. Columns: four from first_column.
static __device__ __forceinline__ int row_of_sum(int r) {
    return r / 4 * (TILE / 2) + threadIdx.x / (TILE / COLUMNS) * 4 + r % 4;
}
static __device__ __forceinline__ int first_column() { return threadIdx.x % (TILE / COLUMNS) * COLUMNS; }

template <class A, class B>
static __device__ __forceinline__ void multiply_add(float sums[ROWS][COLUMNS], const float *tile_a,
                                                    const float *tile_b) {
#pragma unroll
    for (int run = 0; run < DEPTH; run += GROUP) {
        const float *low = tile_a + run * PITCH + A::place(row_of_sum(0), run);
        const float *high = tile_a + run * PITCH + A::place(row_of_sum(4), run);
        const float *right = tile_b + run * PITCH + B::place(first_column(), run);
#pragma unroll
        for (int d = 0; d < GROUP; d++) {
            float a[ROWS], b[COLUMNS];
            *(float4 *)a = *(const float4 *)(low + d * PITCH);
            *(float4 *)(a + 4) = *(const float4 *)(high + d * PITCH);
            *(float4 *)b = *(const float4 *)(right + d * PITCH);
#pragma unroll
            for (int r = 0; r < ROWS; r++)
#pragma unroll
                for (int c = 0; c < COLUMNS; c++) sums[r][c] = fmaf(a[r], b[c], sums[r][c]);
        }
    }
}

// sums = the block's tile of a b^T at (first_a, first_b), over terms begin .. end - 1 in ascending order. All threads
// of the block call it.
template <class A, class B>
static __device__ __forceinline__ void multiply(float sums[ROWS][COLUMNS], const A &a, int first_a, const B &b,
                                                int first_b, int begin, int end) {
    __shared__ __align__(16) float tile_a[DEPTH * PITCH], tile_b[DEPTH * PITCH];
    typename A::loaded next_a[GROUPS];
    typename B::loaded next_b[GROUPS];
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) sums[r][c] = 0.0f;
    if (begin >= end) return;
    a.load(next_a, first_a, begin, end);
    b.load(next_b, first_b, begin, end);
    for (int depth = begin; depth < end; depth += DEPTH) {
        __syncthreads(); // the tiles before have been read
        a.store(tile_a, next_a);
        b.store(tile_b, next_b);
        __syncthreads();
        if (depth + DEPTH < end) { // the next ones are on their way during the multiply-adds
            a.load(next_a, first_a, depth + DEPTH, end);
            b.load(next_b, first_b, depth + DEPTH, end);
        }
        multiply_add<A, B>(sums, tile_a, tile_b);
    }
}

// Four neighbours of a row to memory, or as many of them as there are.
static __device__ __forceinline__ void store_four(float *to, const float *four, int there, bool aligned) {
    if (aligned && there >= COLUMNS)
        *(float4 *)to = make_float4(four[0], four[1], four[2], four[3]);
    else
#pragma unroll
        for (int c = 0; c < COLUMNS; c++)
            if (c < there) to[c] = four[c];
}

static int tiles_of(int n) { return n / TILE + (n % TILE != 0); }

// ---- scores ----

static __device__ __forceinline__ float sigmoid(float z) { return 1.0f / (1.0f + expf(-z)); }

// One tile of tokens by experts. Blocks that share tokens are neighbours, so that x is read from memory once.
static __global__ void __launch_bounds__(THREADS, BLOCKS)
    score_kernel(float *scores, operand<real, true> x, operand<real, true> w, int H, int expert_tiles, bool aligned) {
    int N = x.count, E = w.count;
    int token = (int)(blockIdx.x / expert_tiles) * TILE, expert = (int)(blockIdx.x % expert_tiles) * TILE;
    float sums[ROWS][COLUMNS];
    multiply(sums, x, token, w, expert, 0, H);
    int e = expert + first_column();
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        int t = token + row_of_sum(r);
        if (t >= N) continue;
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) sums[r][c] = sigmoid(sums[r][c]);
        store_four(scores + (size_t)t * E + e, sums[r], E - e, aligned);
    }
}

extern "C" void router_score(accum *scores, const real *x, const real *w, int N, int E, int H) {
    OPERATION();
    if (N == 0 || E == 0) return;
    unsigned tiles = (unsigned)tiles_of(N) * (unsigned)tiles_of(E);
    score_kernel<<<tiles, THREADS, 0, cuda_stream()>>>(scores, operand<real, true>(x, H, N),
                                                       operand<real, true>(w, H, E), H, tiles_of(E),
                                                       (uintptr_t)scores % 16 == 0 && E % 4 == 0);
    cuda_check_launch();
}

// ---- gradient of the logits ----

enum { COUNT_THREADS = 256, TOKEN_WARPS = 4 };

// What balance_scale is for one token of a sequence: divided by its tokens that are not masked. A block per sequence.
static __global__ void scale_per_token_kernel(float *scales, const int32_t *ids, double balance_scale, int T, int K) {
    __shared__ int count;
    if (threadIdx.x == 0) count = 0;
    __syncthreads();
    ids += (size_t)blockIdx.x * T * K;
    int mine = 0;
    for (int t = threadIdx.x; t < T; t += COUNT_THREADS) mine += ids[(size_t)t * K] >= 0;
    if (mine) atomicAdd(&count, mine);
    __syncthreads();
    if (threadIdx.x == 0) scales[blockIdx.x] = (float)(balance_scale / (count > 0 ? count : 1));
}

// ds of one token through gates and balance loss, then through the sigmoid into dz. A warp per token.
static __global__ void token_backward_kernel(float *dz, const float *d_gates, const float *scores, const int32_t *ids,
                                             const float *f, const float *scales, int N, int T,
                                             struct router_shape shape) {
    extern __shared__ int words[];
    int E = shape.experts, K = shape.top_k, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int t = blockIdx.x * TOKEN_WARPS + warp;
    if (t >= N) return;
    int *chosen = words + (size_t)warp * 3 * K;
    float *s_chosen = (float *)(chosen + K), *d_chosen = s_chosen + K;
    const float *s = scores + (size_t)t * E;
    dz += (size_t)t * E;
    if (ids[(size_t)t * K] < 0) { // masked
        for (int e = lane; e < E; e += 32) dz[e] = 0.0f;
        return;
    }
    for (int k = lane; k < K; k += 32) {
        chosen[k] = ids[(size_t)t * K + k];
        s_chosen[k] = s[chosen[k]];
        d_chosen[k] = d_gates[(size_t)t * K + k];
    }
    __syncwarp();
    float sum = GATE_EPS, mean = 0.0f, scale = (float)shape.scale;
    for (int k = 0; k < K; k++) {
        sum += s_chosen[k];
        mean += d_chosen[k] * s_chosen[k];
    }
    if (shape.normalize)
        scale /= sum, mean /= sum;
    else
        mean = 0.0f;

    const float *f_here = f + (size_t)(t / T) * E;
    float all = 0.0f, f_mean = 0.0f;
    for (int e = lane; e < E; e += 32) {
        all += s[e];
        f_mean += f_here[e] * s[e];
    }
    all = warp_sum(all);
    f_mean = warp_sum(f_mean) / all;
    float balance_scale = scales[t / T];
    for (int e = lane; e < E; e += 32) {
        float ds = 0.0f;
        for (int k = 0; k < K; k++)
            if (chosen[k] == e) ds += scale * (d_chosen[k] - mean);
        ds += balance_scale * (f_here[e] - f_mean) / all;
        dz[e] = ds * s[e] * (1.0f - s[e]);
    }
}

// ---- gradients of inputs and weights ----

static __device__ __forceinline__ uint2 add_four(uint2 words, const float *four) {
    union {
        uint2 words;
        __nv_bfloat162 pairs[2];
    } x;
    x.words = words;
    float2 low = __bfloat1622float2(x.pairs[0]), high = __bfloat1622float2(x.pairs[1]);
    x.pairs[0] = __floats2bfloat162_rn(low.x + four[0], low.y + four[1]);
    x.pairs[1] = __floats2bfloat162_rn(high.x + four[2], high.y + four[3]);
    return x.words;
}

// dx += dz w, one tile of tokens by columns. What dx holds is loaded all at once, before the first store.
static __global__ void __launch_bounds__(THREADS, BLOCKS)
    input_gradient_kernel(real *dx, operand<float, true> dz, operand<real, false> w, int E, int column_tiles,
                          bool aligned) {
    int N = dz.count, H = w.count;
    int token = (int)(blockIdx.x / column_tiles) * TILE, column = (int)(blockIdx.x % column_tiles) * TILE;
    int h = column + first_column();
    bool whole = aligned && H - h >= COLUMNS;
    float sums[ROWS][COLUMNS];
    multiply(sums, dz, token, w, column, 0, E);
    uint2 before[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        int t = token + row_of_sum(r);
        if (whole && t < N) before[r] = *(const uint2 *)(dx + (size_t)t * H + h);
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        int t = token + row_of_sum(r);
        if (t >= N) continue;
        real *to = dx + (size_t)t * H + h;
        if (whole)
            *(uint2 *)to = add_four(before[r], sums[r]);
        else
#pragma unroll
            for (int c = 0; c < COLUMNS; c++)
                if (h + c < H) to[c] = __float2bfloat16_rn(__bfloat162float(to[c]) + sums[r][c]);
    }
}

// The sum over tokens is long and the matrix is small, so tokens are split into chunks, each with a sum of its own in
// scratch memory. As many as give every multiprocessor of any GPU something to do, and no shorter than is worth it.
enum { WANTED_BLOCKS = 1024, LEAST_TOKENS = 256 };

static int most_chunks(int N, int E, int H) {
    size_t tiles = (size_t)tiles_of(E) * (size_t)tiles_of(H);
    size_t wanted = tiles ? (WANTED_BLOCKS + tiles - 1) / tiles : 1;
    size_t worth = ((size_t)N + LEAST_TOKENS - 1) / LEAST_TOKENS;
    return (int)(wanted < worth ? wanted : worth);
}

static int chunk_tokens(int N, int E, int H) {
    int chunks = most_chunks(N, E, H), tokens = N / chunks + (N % chunks != 0);
    return (tokens + DEPTH - 1) / DEPTH * DEPTH;
}

// partials [chunks, E, H]
static __global__ void __launch_bounds__(THREADS, BLOCKS)
    weight_gradient_kernel(float *partials, operand<float, false> dz, operand<real, false> x, int N, int tokens,
                           int column_tiles, bool aligned) {
    int E = dz.count, H = x.count;
    int expert = (int)(blockIdx.x / column_tiles) * TILE, column = (int)(blockIdx.x % column_tiles) * TILE;
    int begin = (int)blockIdx.y * tokens, end = N - begin < tokens ? N : begin + tokens;
    float sums[ROWS][COLUMNS];
    multiply(sums, dz, expert, x, column, begin, end);
    int h = column + first_column();
    partials += (size_t)blockIdx.y * E * H;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        int e = expert + row_of_sum(r);
        if (e < E) store_four(partials + (size_t)e * H + h, sums[r], H - h, aligned);
    }
}

// dw += the chunks' sums, added up in ascending order.
static __global__ void add_chunks_kernel(float *dw, const float *partials, int chunks, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float sum = 0.0f;
#pragma unroll 8
    for (int c = 0; c < chunks; c++) sum += partials[(size_t)c * n + i];
    dw[i] += sum;
}

static size_t scales_bytes(int B) { return ((size_t)B * sizeof(float) + 255) / 256 * 256; }

extern "C" size_t scratch_router_backward(int rows, int hidden, int experts, int sequences) {
    size_t partials = (size_t)most_chunks(rows, experts, hidden) * (size_t)experts * (size_t)hidden;
    return scales_bytes(sequences) + partials * sizeof(float);
}

static void weight_gradient(accum *dw, float *partials, const accum *dz, const real *x, int N, int E, int H) {
    int tokens = chunk_tokens(N, E, H), chunks = N / tokens + (N % tokens != 0);
    size_t n = (size_t)E * (size_t)H;
    dim3 grid((unsigned)tiles_of(E) * (unsigned)tiles_of(H), (unsigned)chunks);
    weight_gradient_kernel<<<grid, THREADS, 0, cuda_stream()>>>(
        partials, operand<float, false>(dz, E, E), operand<real, false>(x, H, H), N, tokens, tiles_of(H), H % 4 == 0);
    cuda_check_launch();
    add_chunks_kernel<<<cuda_blocks(n, COUNT_THREADS), COUNT_THREADS, 0, cuda_stream()>>>(dw, partials, chunks, n);
    cuda_check_launch();
}

static void input_gradient(real *dx, const accum *dz, const real *w, int N, int E, int H) {
    unsigned tiles = (unsigned)tiles_of(N) * (unsigned)tiles_of(H);
    input_gradient_kernel<<<tiles, THREADS, 0, cuda_stream()>>>(dx, operand<float, true>(dz, E, N),
                                                                operand<real, false>(w, H, H), E, tiles_of(H),
                                                                (uintptr_t)dx % 8 == 0 && H % 4 == 0);
    cuda_check_launch();
}

extern "C" void router_backward(real *dx, accum *dw, accum *dz, const accum *d_gates, const accum *scores,
                                const int32_t *ids, const accum *f, double balance_scale, const real *x, const real *w,
                                int B, int T, int H, struct router_shape shape) {
    OPERATION();
    int N = B * T, E = shape.experts, K = shape.top_k;
    experts_check(E);
    if (N == 0 || E == 0 || H == 0) return;
    char *scratch = (char *)cuda_scratch(scratch_router_backward(N, H, E, B));
    float *scales = (float *)scratch, *partials = (float *)(scratch + scales_bytes(B));
    scale_per_token_kernel<<<(unsigned)B, COUNT_THREADS, 0, cuda_stream()>>>(scales, ids, balance_scale, T, K);
    cuda_check_launch();
    size_t bytes = TOKEN_WARPS * 3 * (size_t)K * sizeof(float);
    token_backward_kernel<<<cuda_blocks((size_t)N, TOKEN_WARPS), TOKEN_WARPS * 32, bytes, cuda_stream()>>>(
        dz, d_gates, scores, ids, f, scales, N, T, shape);
    cuda_check_launch();
    weight_gradient(dw, partials, dz, x, N, E, H);
    input_gradient(dx, dz, w, N, E, H);
}

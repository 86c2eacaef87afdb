// The router's matrix products, with what belongs to them: scores, and the gradient back to inputs and weights.
//
// A choice between two experts hangs on the last bits of a score, so all of this is as exact as in FP32, though on
// tensor cores. They multiply BF16 numbers exactly: x and w are such numbers, and an FP32 number, of the logits'
// gradient, is the sum of three. But they cut sums where FP32 rounds them, always towards zero. So only 16 or 32 terms
// are summed there, and these sums are added up in FP32. Which sums are made, and in which order, depends on sizes
// alone.
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/experts.h"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/scratch_router.h"

// ---- operands ----

// A block makes TILE x TILE sums. DEPTH terms at a time stand in shared memory, in a ring of STAGES.
enum { TILE = 128, DEPTH = 64, STAGES = 2, THREADS = 256 };
enum { BLOCKS = 2 }; // of a multiprocessor, so that some multiply while others load: at most 128 registers of a thread

// Left operands: BF16 numbers are one piece, FP32 numbers three, the largest first. Tensor cores sum STEPS of 16 terms
// at a time: two where a step is only one product, as adding up takes nearly as long as a product.
template <typename T> struct pieces;
template <> struct pieces<real> {
    enum { COUNT = 1, STEPS = 2 };
};
template <> struct pieces<float> {
    enum { COUNT = 3, STEPS = 1 };
};

// threadIdx.x, of which the compiler cannot know that it stays what it is: what follows from it is computed anew where
// it is needed, not kept in registers that products need.
static __device__ __forceinline__ int thread_again() {
    int thread = threadIdx.x;
    asm volatile("" : "+r"(thread));
    return thread;
}

// A matrix whose element (i, d) is term d of the sums of row, or column, i of the product. ALONG_DEPTH: it lies at
// data[i * stride + d], else at data[d * stride + i]; rows have no gaps. There are `count` values of i. Nothing outside
// is read.
template <typename T, bool ALONG_DEPTH> struct operand {
    // Tiles lie as the matrix does: LINES of LENGTH elements, PITCH apart in shared memory, copied in units of 16
    // bytes. With these pitches, the places of a fragment that are read at once are in different banks.
    enum { LINES = ALONG_DEPTH ? TILE : DEPTH, LENGTH = ALONG_DEPTH ? DEPTH : TILE, UNIT = 16 / sizeof(T) };
    enum {
        PITCH = LENGTH + (ALONG_DEPTH || sizeof(T) == 2 ? 8 : 4),
        UNITS = LENGTH / UNIT,
        TURNS = LINES * UNITS / THREADS
    };
    static_assert(LINES * LENGTH % (UNIT * THREADS) == 0, "every thread has the same number of units");

    typedef T element;
    typedef T tile[LINES * PITCH];

    const T *data;
    int stride, count;
    bool aligned; // units begin at 16 bytes; they are then whole or not there

    operand(const T *matrix, int row_stride, int rows)
        : data(matrix), stride(row_stride), count(rows),
          aligned((uintptr_t)matrix % 16 == 0 && (size_t)row_stride * sizeof(T) % 16 == 0) {}

    // The tile `to` = what begins at (first, depth), zeros where nothing is. Complete after copy_wait_but and
    // __syncthreads.
    __device__ __forceinline__ void load(T *to, int first, int depth, int depth_end) const {
        int first_line = ALONG_DEPTH ? first : depth, lines = (ALONG_DEPTH ? count : depth_end) - first_line;
        int first_column = ALONG_DEPTH ? depth : first, columns = (ALONG_DEPTH ? depth_end : count) - first_column;
        const T *from = data + (size_t)first_line * stride + first_column;
        int thread = thread_again(), line = thread / UNITS, column = thread % UNITS * UNIT;
        if (aligned) {
            to += line * PITCH + column;
            from += (size_t)line * stride + column;
#pragma unroll
            for (int turn = 0; turn < TURNS; turn++) {
                bool there = line + turn * (LINES / TURNS) < lines && column < columns;
                copy_async_16(to + turn * (LINES / TURNS) * PITCH, there ? from : data, there);
                from += (size_t)(LINES / TURNS) * stride;
            }
            return;
        }
#pragma unroll 1
        for (int i = threadIdx.x; i < LINES * LENGTH; i += THREADS) {
            line = i / LENGTH, column = i % LENGTH;
            bool there = line < lines && column < columns;
            to[line * PITCH + column] = there ? from[(size_t)line * stride + column] : (T)0.0f;
        }
    }

    // Elements (i, d) and (i, d + 1) of a tile.
    static __device__ __forceinline__ float2 pair(const T *tile, int i, int d) {
        if constexpr (ALONG_DEPTH)
            return *(const float2 *)(tile + i * PITCH + d);
        else
            return make_float2(tile[d * PITCH + i], tile[(d + 1) * PITCH + i]);
    }

    // The 16 rows from i, 16 terms from d of a tile as the left factor of multiply_fragment.
    static __device__ __forceinline__ void left(uint32_t (&a)[pieces<T>::COUNT][4], const T *tile, int i, int d) {
        int lane = threadIdx.x % 32;
        if constexpr (pieces<T>::COUNT == 1) {
            static_assert(ALONG_DEPTH, "nobody has the other one");
            load_matrices(a[0], tile + (i + lane % 16) * PITCH + d + lane / 16 * 8);
        } else {
#pragma unroll
            for (int m = 0; m < 4; m++) {
                float2 two = pair(tile, i + lane / 4 + m % 2 * 8, d + lane % 4 * 2 + m / 2 * 8);
#pragma unroll
                for (int p = 0; p < pieces<T>::COUNT; p++) a[p][m] = take_piece(two);
            }
        }
    }

    // The 16 columns from i, 16 terms from d of a tile as right factors: b[0] and b[1] of the first 8 columns, b[2] and
    // b[3] of the others.
    static __device__ __forceinline__ void right(uint32_t (&b)[4], const T *tile, int i, int d) {
        int lane = threadIdx.x % 32;
        if constexpr (ALONG_DEPTH)
            load_matrices(b, tile + (i + lane / 16 * 8 + lane % 8) * PITCH + d + lane / 8 % 2 * 8);
        else
            load_matrices_transposed(b, tile + (d + lane % 16) * PITCH + i + lane / 16 * 8);
    }

    // Takes the first 8 of their bits from two numbers, the first one's into the lower half. What is left is exact:
    // three pieces have all 24 bits (the last ones of numbers below 2^-110 are lost). Of infinity what is left is NaN.
    static __device__ __forceinline__ uint32_t take_piece(float2 &two) {
        unsigned x = __float_as_uint(two.x), y = __float_as_uint(two.y);
        two.x -= __uint_as_float(x & 0xffff0000u);
        two.y -= __uint_as_float(y & 0xffff0000u);
        return __byte_perm(x, y, 0x7632);
    }
};

// ---- the product of two tiles ----

// A warp makes WARP_ROWS x WARP_COLUMNS of the sums. A lane has RUNS of four neighbours.
enum { WARP_ROWS = 32, WARP_COLUMNS = 64, RUNS = WARP_ROWS * WARP_COLUMNS / 32 / 4, RUNS_WIDE = WARP_COLUMNS / 8 };
static_assert(TILE / WARP_ROWS == 4 && TILE / WARP_COLUMNS == 2 && THREADS == 8 * 32, "warps cover the tile");

// Where this warp's sums begin. Warp w has the multiprocessor's tensor core w % 4. Where there are 64 experts, only the
// warps of the first 64 rows, or columns, have something to do: either half has one warp on each tensor core.
static __device__ __forceinline__ int warp_row() {
    int warp = threadIdx.x / 32;
    return (warp + warp / 4 * 2) % 4 * WARP_ROWS;
}
static __device__ __forceinline__ int warp_column() { return (int)threadIdx.x / 128 * WARP_COLUMNS; }

// Row and first column of a run, once the sums are in runs.
static __device__ __forceinline__ int run_row(int run) {
    return warp_row() + run / RUNS_WIDE * 16 + run % 2 * 8 + (int)threadIdx.x % 32 / 4;
}
static __device__ __forceinline__ int run_column(int run) {
    int lane = threadIdx.x % 32;
    return warp_column() + run % RUNS_WIDE / 2 * 16 + lane % 2 * 8 + lane % 4 / 2 * 4;
}

// From fragments, where a lane has two neighbours in each of two rows, to runs: of the lanes that share a row, even
// ones give what they have of right fragments for what odd ones have of left fragments.
static __device__ __forceinline__ void gather_runs(float (&sums)[RUNS][4]) {
    bool odd = threadIdx.x % 2;
#pragma unroll
    for (int n = 0; n < RUNS; n += 2) {
        float *left = sums[n], *right = sums[n + 1];
#pragma unroll
        for (int row = 0; row < 4; row += 2) {
            float first = __shfl_xor_sync(ALL_LANES, odd ? left[row] : right[row], 1);
            float second = __shfl_xor_sync(ALL_LANES, odd ? left[row + 1] : right[row + 1], 1);
            if (odd)
                left[row] = first, left[row + 1] = second;
            else
                right[row] = first, right[row + 1] = second;
        }
        // Now the first row's four are left[0, 1] and right[0, 1], the second row's the others.
        float x = left[2], y = left[3];
        left[2] = right[0], left[3] = right[1];
        right[0] = x, right[1] = y;
    }
}

// Tiles that are multiplied with each other.
template <class A, class B> struct stage {
    typename A::tile a;
    typename B::tile b;
};

// Adds a stage's products to this warp's sums. The smallest pieces come first, so that a step's sum is cut at its full
// size only once.
template <class A, class B>
static __device__ __forceinline__ void multiply_stage(float (&sums)[RUNS][4], const stage<A, B> &now) {
    typedef pieces<typename A::element> of_a;
    constexpr int PIECES = of_a::COUNT, STEPS = of_a::STEPS, HIGH = WARP_ROWS / 16;
#pragma unroll 1 // fragments of the next terms would need registers that are not there
    for (int d = 0; d < DEPTH; d += 16 * STEPS) {
        uint32_t a[STEPS][HIGH][PIECES][4];
#pragma unroll
        for (int step = 0; step < STEPS; step++)
#pragma unroll
            for (int m = 0; m < HIGH; m++) A::left(a[step][m], now.a, warp_row() + m * 16, d + step * 16);
#pragma unroll
        for (int n = 0; n < RUNS_WIDE; n += 2) {
            float few[HIGH][2][4] = {};
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
                uint32_t b[4];
                B::right(b, now.b, warp_column() + n * 8, d + step * 16);
#pragma unroll
                for (int p = PIECES - 1; p >= 0; p--)
#pragma unroll
                    for (int m = 0; m < HIGH; m++) {
                        multiply_fragment(few[m][0], a[step][m][p], b[0], b[1]);
                        multiply_fragment(few[m][1], a[step][m][p], b[2], b[3]);
                    }
            }
#pragma unroll
            for (int m = 0; m < HIGH; m++)
#pragma unroll
                for (int side = 0; side < 2; side++)
#pragma unroll
                    for (int e = 0; e < 4; e++) sums[m * RUNS_WIDE + n + side][e] += few[m][side][e];
        }
    }
}

// What begins at `depth`, as a group of copies, which is empty if there is nothing.
template <class A, class B>
static __device__ __forceinline__ void load_stage(stage<A, B> &next, const A &a, int first_a, const B &b, int first_b,
                                                  int depth, int depth_end) {
    if (depth < depth_end) {
        a.load(next.a, first_a, depth, depth_end);
        b.load(next.b, first_b, depth, depth_end);
    }
    copy_group();
}

template <class A, class B> static size_t ring_bytes() { return STAGES * sizeof(stage<A, B>); }

// sums = the block's tile of a b^T at (first_a, first_b), over terms begin .. end - 1 in ascending order, in runs. All
// threads of the block call it. Shared memory: ring_bytes.
template <class A, class B>
static __device__ __forceinline__ void multiply(float (&sums)[RUNS][4], const A &a, int first_a, const B &b,
                                                int first_b, int begin, int end) {
    extern __shared__ __align__(16) unsigned char memory[];
    stage<A, B> *ring = (stage<A, B> *)memory;
    bool idle = first_a + warp_row() >= a.count || first_b + warp_column() >= b.count;
#pragma unroll
    for (int run = 0; run < RUNS; run++)
#pragma unroll
        for (int e = 0; e < 4; e++) sums[run][e] = 0.0f;

#pragma unroll 1
    for (int place = 0; place < STAGES; place++)
        load_stage(ring[place], a, first_a, b, first_b, begin + place * DEPTH, end);
#pragma unroll 1
    for (int depth = begin; depth < end; depth += DEPTH) {
        stage<A, B> &now = ring[(depth - begin) / DEPTH % STAGES];
        copy_wait_but<STAGES - 1>();
        __syncthreads(); // everyone's part of the stage is there
        if (!idle) multiply_stage<A, B>(sums, now);
        __syncthreads(); // everyone has read it
        load_stage(now, a, first_a, b, first_b, depth + STAGES * DEPTH, end);
    }
    gather_runs(sums);
}

// A run to memory, or as many of it as there are.
static __device__ __forceinline__ void store_run(float *to, const float (&run)[4], int there, bool aligned) {
    if (aligned && there >= 4)
        *(float4 *)to = make_float4(run[0], run[1], run[2], run[3]);
    else
#pragma unroll
        for (int c = 0; c < 4; c++)
            if (c < there) to[c] = run[c];
}

static int tiles_of(int n) { return n / TILE + (n % TILE != 0); }

// ---- scores ----

static __device__ __forceinline__ float sigmoid(float z) { return 1.0f / (1.0f + expf(-z)); }

// One tile of tokens by experts. Blocks that share tokens are neighbours, so that x is read from memory once.
static __global__ void __launch_bounds__(THREADS, BLOCKS)
    score_kernel(float *scores, operand<real, true> x, operand<real, true> w, int H, int expert_tiles, bool aligned) {
    int N = x.count, E = w.count;
    int token = (int)(blockIdx.x / expert_tiles) * TILE, expert = (int)(blockIdx.x % expert_tiles) * TILE;
    float sums[RUNS][4];
    multiply(sums, x, token, w, expert, 0, H);
#pragma unroll
    for (int run = 0; run < RUNS; run++) {
        int t = token + run_row(run), e = expert + run_column(run);
        if (t >= N) continue;
#pragma unroll
        for (int c = 0; c < 4; c++) sums[run][c] = sigmoid(sums[run][c]);
        store_run(scores + (size_t)t * E + e, sums[run], E - e, aligned);
    }
}

extern "C" void router_score(accum *scores, const real *x, const real *w, int N, int E, int H) {
    OPERATION();
    if (N == 0 || E == 0) return;
    unsigned tiles = (unsigned)tiles_of(N) * (unsigned)tiles_of(E);
    cuda_launch_shared<score_kernel>(tiles, THREADS, ring_bytes<operand<real, true>, operand<real, true>>(), scores,
                                     operand<real, true>(x, H, N), operand<real, true>(w, H, E), H, tiles_of(E),
                                     (uintptr_t)scores % 16 == 0 && E % 4 == 0);
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

static __device__ __forceinline__ uint2 add_run(uint2 words, const float (&run)[4]) {
    union {
        uint2 words;
        __nv_bfloat162 pairs[2];
    } x;
    x.words = words;
    float2 low = __bfloat1622float2(x.pairs[0]), high = __bfloat1622float2(x.pairs[1]);
    x.pairs[0] = __floats2bfloat162_rn(low.x + run[0], low.y + run[1]);
    x.pairs[1] = __floats2bfloat162_rn(high.x + run[2], high.y + run[3]);
    return x.words;
}

// dx += dz w, one tile of tokens by columns. What dx holds is loaded for many runs at once, before the first store.
static __global__ void __launch_bounds__(THREADS, BLOCKS)
    input_gradient_kernel(real *dx, operand<float, true> dz, operand<real, false> w, int E, int column_tiles,
                          bool aligned) {
    int N = dz.count, H = w.count;
    int token = (int)(blockIdx.x / column_tiles) * TILE, column = (int)(blockIdx.x % column_tiles) * TILE;
    float sums[RUNS][4];
    multiply(sums, dz, token, w, column, 0, E);
#pragma unroll
    for (int first = 0; first < RUNS; first += RUNS_WIDE) {
        uint2 before[RUNS_WIDE];
#pragma unroll
        for (int n = 0; n < RUNS_WIDE; n++) {
            int t = token + run_row(first + n), h = column + run_column(first + n);
            if (aligned && t < N && h < H) before[n] = *(const uint2 *)(dx + (size_t)t * H + h);
        }
#pragma unroll
        for (int n = 0; n < RUNS_WIDE; n++) {
            int t = token + run_row(first + n), h = column + run_column(first + n);
            if (t >= N || h >= H) continue;
            real *to = dx + (size_t)t * H + h;
            if (aligned)
                *(uint2 *)to = add_run(before[n], sums[first + n]);
            else
#pragma unroll
                for (int c = 0; c < 4; c++)
                    if (h + c < H) to[c] = __float2bfloat16_rn(__bfloat162float(to[c]) + sums[first + n][c]);
        }
    }
}

// The sum over tokens is long and the matrix is small, so tokens are split into chunks, each with a sum of its own in
// scratch memory. As many as a GPU of 128 multiprocessors or more has places for at once, and no shorter than is worth
// it.
enum { MOST_BLOCKS = 128 * BLOCKS, LEAST_TOKENS = 256 };

static int most_chunks(int N, int E, int H) {
    size_t tiles = (size_t)tiles_of(E) * (size_t)tiles_of(H);
    size_t wanted = tiles > 0 && tiles < MOST_BLOCKS ? MOST_BLOCKS / tiles : 1;
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
    float sums[RUNS][4];
    multiply(sums, dz, expert, x, column, begin, end);
    partials += (size_t)blockIdx.y * E * H;
#pragma unroll
    for (int run = 0; run < RUNS; run++) {
        int e = expert + run_row(run), h = column + run_column(run);
        if (e < E) store_run(partials + (size_t)e * H + h, sums[run], H - h, aligned);
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
    cuda_launch_shared<weight_gradient_kernel>(grid, THREADS, ring_bytes<operand<float, false>, operand<real, false>>(),
                                               partials, operand<float, false>(dz, E, E), operand<real, false>(x, H, H),
                                               N, tokens, tiles_of(H), H % 4 == 0);
    add_chunks_kernel<<<cuda_blocks(n, COUNT_THREADS), COUNT_THREADS, 0, cuda_stream()>>>(dw, partials, chunks, n);
    cuda_check_launch();
}

static void input_gradient(real *dx, const accum *dz, const real *w, int N, int E, int H) {
    unsigned tiles = (unsigned)tiles_of(N) * (unsigned)tiles_of(H);
    cuda_launch_shared<input_gradient_kernel>(tiles, THREADS, ring_bytes<operand<float, true>, operand<real, false>>(),
                                              dx, operand<float, true>(dz, E, N), operand<real, false>(w, H, H), E,
                                              tiles_of(H), (uintptr_t)dx % 8 == 0 && H % 4 == 0);
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

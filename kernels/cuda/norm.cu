// RMSNorm, forward and backward. A group of threads keeps a whole row in registers, so that it is read once; rows that
// are too long for that, or not aligned to 16 bytes, take a slower way.
#include "kernels/cuda/columns.cuh"
#include "kernels/cuda/scratch.h"

enum { LONGEST_ROW = 16384, SLOW_THREADS = 256 };

struct forward_pass {
    real *y;
    accum *rstd;
    const real *x, *w;
    size_t y_stride, x_stride;
    int N, C;
    float eps;
};

struct backward_pass {
    real *dx;
    accum *partial; // [blocks, C], each block's part of dw
    const real *dy, *x, *w;
    const accum *rstd;
    size_t dx_stride, dy_stride, x_stride;
    int N, C, chunk; // chunk: rows of a block
    bool add;
};

// Threads of a block, and how many rows it works on at a time, for groups of GROUP threads per row: a part of a warp,
// or the whole block.
template <int GROUP> constexpr int block_threads = GROUP <= 32 ? 128 : GROUP;
template <int GROUP> constexpr int block_rows = block_threads<GROUP> / GROUP;
// And in all of the backward pass, at least. Where a block has many at a time, it takes fewer turns, so that there are
// more blocks.
template <int GROUP> constexpr int least_chunk = GROUP <= 32 ? 4 * block_rows<GROUP> : NORM_CHUNK_ROWS;
static_assert(NORM_CHUNK_ROWS % block_rows<8> == 0, "a block has whole turns");

// Sum over the threads of a row, in each of them. All threads of the block take part.
template <int GROUP> static __device__ __forceinline__ float row_sum(float value, float *sums) {
    if constexpr (GROUP > 32) {
        return block_sum(value, sums);
    } else {
        for (int lanes = GROUP / 2; lanes > 0; lanes /= 2) value += __shfl_xor_sync(ALL_LANES, value, lanes);
        return value;
    }
}

// Makes the compiler unpack a value once more where it is used next, rather than keep eight registers for it until
// then.
static __device__ __forceinline__ void forget_unpacked(uint4 &packed) {
    asm("" : "+r"(packed.x), "+r"(packed.y), "+r"(packed.z), "+r"(packed.w));
}

// ---- forward ----

template <int GROUP, int VECTORS>
static __global__ void __launch_bounds__(block_threads<GROUP>) forward_rows(struct forward_pass p) {
    __shared__ float sums[33];
    int lane = threadIdx.x % GROUP, row = blockIdx.x * block_rows<GROUP> + threadIdx.x / GROUP;
    const real *xi = p.x + (size_t)row * p.x_stride;
    real *yi = p.y + (size_t)row * p.y_stride;
    uint4 x[VECTORS], w[VECTORS];
    for (int v = 0; v < VECTORS; v++) {
        int c = (v * GROUP + lane) * 8;
        bool here = row < p.N && c < p.C;
        x[v] = here ? columns_read_packed(xi + c) : columns_packed_zeros();
        w[v] = here ? columns_read_packed(p.w + c) : columns_packed_zeros();
    }
    float squares = 0, values[8], weights[8];
    for (int v = 0; v < VECTORS; v++) {
        columns_unpack(values, x[v]);
        for (int i = 0; i < 8; i++) squares += values[i] * values[i];
    }
    float r = 1 / sqrtf(row_sum<GROUP>(squares, sums) / p.C + p.eps);
    if (row >= p.N) return;
    for (int v = 0; v < VECTORS; v++) {
        int c = (v * GROUP + lane) * 8;
        if (c >= p.C) break;
        columns_unpack(values, x[v]);
        columns_unpack(weights, w[v]);
        for (int i = 0; i < 8; i++) values[i] = weights[i] * (values[i] * r);
        columns_write<8>(yi + c, values);
    }
    if (lane == 0) p.rstd[row] = r;
}

static __global__ void __launch_bounds__(SLOW_THREADS) forward_slowly(struct forward_pass p) {
    __shared__ float sums[33];
    size_t row = blockIdx.x;
    const real *xi = p.x + row * p.x_stride;
    real *yi = p.y + row * p.y_stride;
    float squares = 0;
    for (int c = threadIdx.x; c < p.C; c += SLOW_THREADS) {
        float value = __bfloat162float(xi[c]);
        squares += value * value;
    }
    float r = 1 / sqrtf(block_sum(squares, sums) / p.C + p.eps);
    for (int c = threadIdx.x; c < p.C; c += SLOW_THREADS)
        yi[c] = __float2bfloat16_rn(__bfloat162float(p.w[c]) * (__bfloat162float(xi[c]) * r));
    if (threadIdx.x == 0) p.rstd[row] = r;
}

// ---- backward ----

// Blocks that a multiprocessor is to have room for, 1024 threads in all: some load while others wait for their sums.
template <int GROUP, int VECTORS> constexpr int resident_blocks = VECTORS == 4 ? 1 : 1024 / block_threads<GROUP>;

// A block works on a chunk of rows, and sums dy xhat over them in registers.
template <int GROUP, int VECTORS>
static __global__ void __launch_bounds__(block_threads<GROUP>, resident_blocks<GROUP, VECTORS>)
    backward_rows(struct backward_pass p) {
    constexpr int ROWS = block_rows<GROUP>;
    __shared__ float sums[33];
    int lane = threadIdx.x % GROUP, group = threadIdx.x / GROUP;
    int first = blockIdx.x * p.chunk;
    uint4 w[VECTORS];
    float dw[VECTORS][8] = {};
    for (int v = 0; v < VECTORS; v++) {
        int c = (v * GROUP + lane) * 8;
        w[v] = c < p.C ? columns_read_packed(p.w + c) : columns_packed_zeros();
    }
    for (int step = first; step < first + p.chunk && step < p.N; step += ROWS) {
        int row = step + group;
        const real *xi = p.x + (size_t)row * p.x_stride, *dyi = p.dy + (size_t)row * p.dy_stride;
        real *dxi = p.dx + (size_t)row * p.dx_stride;
        float r = row < p.N ? p.rstd[row] : 0.0f;
        uint4 x[VECTORS], dy[VECTORS], before[VECTORS];
        for (int v = 0; v < VECTORS; v++) {
            int c = (v * GROUP + lane) * 8;
            bool here = row < p.N && c < p.C;
            x[v] = here ? columns_read_packed(xi + c) : columns_packed_zeros();
            dy[v] = here ? columns_read_packed(dyi + c) : columns_packed_zeros();
            before[v] = here && p.add ? columns_read_packed(dxi + c) : columns_packed_zeros();
        }
        float dot = 0;
        for (int v = 0; v < VECTORS; v++) {
            float xs[8], dys[8], ws[8];
            columns_unpack(xs, x[v]);
            columns_unpack(dys, dy[v]);
            columns_unpack(ws, w[v]);
            for (int i = 0; i < 8; i++) dot += ws[i] * dys[i] * xs[i];
        }
        float mean = row_sum<GROUP>(dot, sums) * r / p.C; // of t xhat
        for (int v = 0; v < VECTORS; v++) {
            int c = (v * GROUP + lane) * 8;
            float xs[8], dys[8], ws[8], values[8];
            forget_unpacked(x[v]);
            forget_unpacked(dy[v]);
            forget_unpacked(w[v]);
            columns_unpack(xs, x[v]);
            columns_unpack(dys, dy[v]);
            columns_unpack(ws, w[v]);
            columns_unpack(values, before[v]);
            for (int i = 0; i < 8; i++) {
                float xhat = xs[i] * r;
                values[i] += r * (ws[i] * dys[i] - xhat * mean);
                dw[v][i] += dys[i] * xhat;
            }
            if (row < p.N && c < p.C) columns_write<8>(dxi + c, values);
        }
    }
    // The groups' sums, in the order of the groups.
    accum *partial = p.partial + (size_t)blockIdx.x * p.C;
    if constexpr (ROWS > 1) {
        __shared__ float total[GROUP * VECTORS * 8];
        for (int turn = 0; turn < ROWS; turn++) {
            for (int v = 0; v < VECTORS && group == turn; v++)
                for (int i = 0; i < 8; i++) {
                    int c = (v * GROUP + lane) * 8 + i;
                    if (turn > 0) dw[v][i] += total[c];
                    total[c] = dw[v][i];
                }
            __syncthreads();
        }
        for (int c = threadIdx.x; c < p.C; c += block_threads<GROUP>) partial[c] = total[c];
    } else {
        for (int v = 0; v < VECTORS; v++) {
            int c = (v * GROUP + lane) * 8;
            if (c < p.C) columns_write<8>(partial + c, dw[v]);
        }
    }
}

// A chunk of rows a block. A thread has the same columns in both loops, since dx may be dy.
static __global__ void __launch_bounds__(SLOW_THREADS) backward_slowly(struct backward_pass p) {
    __shared__ float sums[33];
    accum *partial = p.partial + (size_t)blockIdx.x * p.C;
    int first = blockIdx.x * p.chunk;
    for (int row = first; row < first + p.chunk && row < p.N; row++) {
        const real *xi = p.x + (size_t)row * p.x_stride, *dyi = p.dy + (size_t)row * p.dy_stride;
        real *dxi = p.dx + (size_t)row * p.dx_stride;
        float r = p.rstd[row], dot = 0;
        for (int c = threadIdx.x; c < p.C; c += SLOW_THREADS)
            dot += __bfloat162float(p.w[c]) * __bfloat162float(dyi[c]) * __bfloat162float(xi[c]);
        float mean = block_sum(dot, sums) * r / p.C; // of t xhat
        for (int c = threadIdx.x; c < p.C; c += SLOW_THREADS) {
            float dy = __bfloat162float(dyi[c]), xhat = __bfloat162float(xi[c]) * r;
            float value = p.add ? __bfloat162float(dxi[c]) : 0.0f;
            value += r * (__bfloat162float(p.w[c]) * dy - xhat * mean);
            partial[c] = (row == first ? 0.0f : partial[c]) + dy * xhat;
            dxi[c] = __float2bfloat16_rn(value);
        }
    }
}

// dw += sum of `count` partials. Each of 32 warps adds every 32nd partial of 32 columns, then the warps' sums are
// added.
static __global__ void __launch_bounds__(1024) add_partials(accum *dw, const accum *partial, int count, int C) {
    __shared__ float sums[32][32];
    int column = blockIdx.x * 32 + threadIdx.x;
    float sum = 0;
    cudaGridDependencySynchronize();
    if (column < C) {
#pragma unroll 8
        for (int i = threadIdx.y; i < count; i += 32) sum += partial[(size_t)i * C + column];
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0 || column >= C) return;
    float total = 0;
    for (int i = 0; i < 32; i++) total += sums[i][threadIdx.x];
    dw[column] += total;
}

// ---- launches ----

template <int GROUP, int VECTORS> static unsigned launch_rows(struct forward_pass p) {
    unsigned blocks = cuda_blocks((size_t)p.N, block_rows<GROUP>);
    forward_rows<GROUP, VECTORS><<<blocks, block_threads<GROUP>, 0, cuda_stream()>>>(p);
    return blocks;
}

template <int GROUP, int VECTORS> static unsigned launch_rows(struct backward_pass p) {
    if (p.chunk < least_chunk<GROUP>) p.chunk = least_chunk<GROUP>;
    unsigned blocks = cuda_blocks((size_t)p.N, p.chunk);
    backward_rows<GROUP, VECTORS><<<blocks, block_threads<GROUP>, 0, cuda_stream()>>>(p);
    return blocks;
}

// The smallest group of threads that holds a row in a few 16-byte pieces each. Returns the number of blocks.
template <typename Pass> static unsigned launch_width(const Pass &p) {
    if (p.C <= 64) return launch_rows<8, 1>(p);
    if (p.C <= 256) return launch_rows<32, 1>(p);
    if (p.C <= 512) return launch_rows<32, 2>(p);
    if (p.C <= 1024) return launch_rows<128, 1>(p);
    if (p.C <= 2048) return launch_rows<128, 2>(p);
    if (p.C <= 4096) return launch_rows<256, 2>(p);
    if (p.C <= 8192) return launch_rows<512, 2>(p);
    return launch_rows<512, 4>(p);
}

static bool rows_aligned(const real *memory, size_t stride) { return columns_aligned(memory, sizeof(real) * stride); }

extern "C" void rmsnorm_forward(real *y, int y_stride, accum *rstd, const real *x, int x_stride, const real *w, int N,
                                int C, double eps) {
    OPERATION();
    if (N == 0) return;
    struct forward_pass p = {y, rstd, x, w, (size_t)y_stride, (size_t)x_stride, N, C, (float)eps};
    bool aligned = C % 8 == 0 && rows_aligned(y, p.y_stride) && rows_aligned(x, p.x_stride) && rows_aligned(w, 0);
    if (aligned && C <= LONGEST_ROW)
        launch_width(p);
    else
        forward_slowly<<<(unsigned)N, SLOW_THREADS, 0, cuda_stream()>>>(p);
    cuda_check_launch();
}

extern "C" void rmsnorm_backward(real *dx, int dx_stride, bool add, accum *dw, const real *dy, int dy_stride,
                                 const real *x, int x_stride, const real *w, const accum *rstd, int N, int C) {
    OPERATION();
    if (N == 0 || C == 0) return;
    accum *partial = (accum *)cuda_scratch(scratch_rmsnorm_backward(N, C));
    struct backward_pass p = {
        dx, partial, dy, x, w, rstd, (size_t)dx_stride, (size_t)dy_stride, (size_t)x_stride, N, C, norm_chunk_rows(N),
        add};
    bool aligned = C % 8 == 0 && rows_aligned(dx, p.dx_stride) && rows_aligned(dy, p.dy_stride) &&
                   rows_aligned(x, p.x_stride) && rows_aligned(w, 0);
    unsigned count = cuda_blocks((size_t)N, p.chunk);
    if (aligned && C <= LONGEST_ROW)
        count = launch_width(p);
    else
        backward_slowly<<<count, SLOW_THREADS, 0, cuda_stream()>>>(p);
    cuda_check_launch();
    cuda_launch_early(add_partials, cuda_blocks((size_t)C, 32), dim3(32, 32), dw, partial, (int)count, C);
}

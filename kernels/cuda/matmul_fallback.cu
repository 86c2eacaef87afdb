// Matrix products in plain FP32 arithmetic, of any size and stride.
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/matmul.h"

// A block of 16 x 16 threads makes a tile of 64 x 64; a thread has the 4 x 4 elements that are 16 apart, so that its
// neighbours write next to it.
enum { TILE = 64, DEPTH = 16, SIDE = 16, EACH = TILE / SIDE };

static __device__ float load(const float *x) { return *x; }
static __device__ float load(const real *x) { return __bfloat162float(*x); }
static __device__ void store(float *x, float value) { *x = value; }
static __device__ void store(real *x, float value) { *x = __float2bfloat16_rn(value); }

// tile[k][i] = element (first_line + i, first_k + k), zero outside [lines, K]. Neighbouring threads read along the
// dimension that lies together in memory.
static __device__ void load_tile(float (*tile)[TILE + 1], const real *x, size_t line_stride, size_t k_stride,
                                 size_t first_line, int lines, int first_k, int K) {
    int thread = threadIdx.y * SIDE + threadIdx.x;
    for (int n = thread; n < TILE * DEPTH; n += SIDE * SIDE) {
        int i = k_stride == 1 ? n / DEPTH : n % TILE, k = k_stride == 1 ? n % DEPTH : n / TILE;
        bool inside = first_line + i < (size_t)lines && first_k + k < K;
        tile[k][i] = inside ? load(x + (first_line + i) * line_stride + (size_t)(first_k + k) * k_stride) : 0.0f;
    }
}

template <typename Out> static __global__ void __launch_bounds__(SIDE *SIDE) multiply(struct matmul_fallback p) {
    __shared__ float first[DEPTH][TILE + 1], second[DEPTH][TILE + 1];
    size_t tiles_across = ((size_t)p.N + TILE - 1) / TILE;
    size_t row = blockIdx.x / tiles_across * TILE, col = blockIdx.x % tiles_across * TILE;
    const Out *add = (const Out *)p.add;
    Out *out = (Out *)p.out;

    float sum[EACH][EACH];
    for (int i = 0; i < EACH; i++)
        for (int j = 0; j < EACH; j++) {
            size_t r = row + threadIdx.y + i * SIDE, c = col + threadIdx.x + j * SIDE;
            bool inside = r < (size_t)p.M && c < (size_t)p.N;
            sum[i][j] = add && inside ? load(add + r * p.N + c) : 0.0f;
        }
    for (int k = 0; k < p.K; k += DEPTH) {
        load_tile(first, p.first, p.first_row, p.first_col, row, p.M, k, p.K);
        load_tile(second, p.second, p.second_col, p.second_row, col, p.N, k, p.K);
        __syncthreads();
        for (int d = 0; d < DEPTH; d++)
            for (int i = 0; i < EACH; i++)
                for (int j = 0; j < EACH; j++)
                    sum[i][j] += first[d][threadIdx.y + i * SIDE] * second[d][threadIdx.x + j * SIDE];
        __syncthreads();
    }
    for (int i = 0; i < EACH; i++)
        for (int j = 0; j < EACH; j++) {
            size_t r = row + threadIdx.y + i * SIDE, c = col + threadIdx.x + j * SIDE;
            if (r < (size_t)p.M && c < (size_t)p.N) store(out + r * p.N + c, sum[i][j]);
        }
}

extern "C" void matmul_fallback(const struct matmul_fallback *product) {
    struct matmul_fallback p = *product;
    size_t blocks = ((size_t)p.M + TILE - 1) / TILE * (((size_t)p.N + TILE - 1) / TILE);
    if (blocks == 0) return;
    if (blocks > INT32_MAX)
        fail_internal("matmul", "found M %d, N %d, wanted fewer than 2^31 tiles of %d x %d", p.M, p.N, TILE, TILE);
    dim3 threads(SIDE, SIDE);
    if (p.out_accum)
        multiply<accum><<<(unsigned)blocks, threads, 0, cuda_stream()>>>(p);
    else
        multiply<real><<<(unsigned)blocks, threads, 0, cuda_stream()>>>(p);
    cuda_check_launch();
}

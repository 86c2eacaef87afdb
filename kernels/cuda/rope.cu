// Rotary positions.
#include "kernels/cuda/columns.cuh"

enum { THREADS = 256 };

struct rotation {
    real *x; // where the first head's rotated columns begin
    const accum *angles;
    size_t row_stride;
    int heads, head_stride, rope_dim, N, T;
    bool inverse;
};

// A thread rotates WIDTH columns of one head of one token.
template <int WIDTH> static __global__ void rotate(struct rotation p) {
    int i = blockIdx.x * blockDim.y + threadIdx.y;
    if (i >= p.N) return;
    int per_head = p.rope_dim / WIDTH;
    const accum *angles = p.angles + (size_t)(i % p.T) * p.rope_dim;
    for (int item = threadIdx.x; item < p.heads * per_head; item += blockDim.x) {
        int head = item / per_head, column = (item - head * per_head) * WIDTH;
        real *columns = p.x + (size_t)i * p.row_stride + (size_t)head * p.head_stride + column;
        float values[WIDTH], angle[WIDTH];
        columns_read<WIDTH>(values, columns);
        columns_read<WIDTH>(angle, angles + column);
        for (int j = 0; j < WIDTH; j += 2) {
            float c = angle[j], s = p.inverse ? -angle[j + 1] : angle[j + 1];
            float u = values[j], v = values[j + 1];
            values[j] = u * c - v * s;
            values[j + 1] = u * s + v * c;
        }
        columns_write<WIDTH>(columns, values);
    }
}

template <int WIDTH> static void launch(const struct rotation &p) {
    int items = p.heads * (p.rope_dim / WIDTH), along = items < THREADS ? items : (int)THREADS;
    dim3 block((unsigned)along, (unsigned)(THREADS / along)); // tokens with fewer items than threads share a block
    rotate<WIDTH><<<cuda_blocks((size_t)p.N, (int)block.y), block, 0, cuda_stream()>>>(p);
    cuda_check_launch();
}

extern "C" void rope_rotate(real *x, int row_stride, int heads, int head_stride, int first, int rope_dim,
                            const accum *angles, int N, int T, bool inverse) {
    OPERATION();
    if (N == 0 || heads == 0 || rope_dim == 0) return;
    struct rotation p = {x + first, angles, (size_t)row_stride, heads, head_stride, rope_dim, N, T, inverse};
    bool aligned = rope_dim % 8 == 0 && columns_aligned(p.x, sizeof(real) * p.row_stride) && head_stride % 8 == 0 &&
                   columns_aligned(angles, sizeof(accum) * (size_t)rope_dim);
    if (aligned)
        launch<8>(p);
    else
        launch<2>(p);
}

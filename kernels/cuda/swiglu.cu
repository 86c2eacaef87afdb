// SwiGLU with the gate weight inside: the same product before the down projection for dense, shared and routed experts.
//
// A warp has a row and 256 columns of it at a time, two chunks of a gate's gradient; a thread eight of them.
#include "kernels/cuda/swiglu.cuh"

#include "kernels/cuda/columns.cuh"

enum { WARPS = 8, COLUMNS = 256, CHUNK_LANES = GATE_GRADIENT_COLUMNS / 8 };
static_assert(CHUNK_LANES == 16 && COLUMNS == 2 * GATE_GRADIENT_COLUMNS, "half a warp has a chunk");

// Eight columns of a row of I. Without ALIGNED, one by one, and those beyond the row are zeros and not written.
template <bool ALIGNED>
static __device__ __forceinline__ void read_eight(float *values, const real *row, int column, int I) {
    if constexpr (ALIGNED) {
        columns_read<8>(values, row + column);
    } else {
        for (int i = 0; i < 8; i++) values[i] = column + i < I ? __bfloat162float(row[column + i]) : 0.0f;
    }
}

template <bool ALIGNED>
static __device__ __forceinline__ void write_eight(real *row, const float *values, int column, int I) {
    if constexpr (ALIGNED) {
        columns_write<8>(row + column, values);
    } else {
        for (int i = 0; i < 8; i++)
            if (column + i < I) row[column + i] = __float2bfloat16_rn(values[i]);
    }
}

// ---- forward ----

// Blocks run along a row first: block b has rows (b / pieces) * WARPS on, and piece b % pieces of their columns.
template <bool ALIGNED>
static __global__ void __launch_bounds__(WARPS * 32) forward(real *hidden, const real *gate_up, const accum *gates,
                                                             const int *slot_of_row, int rows, int I, int pieces) {
    int row = blockIdx.x / pieces * WARPS + threadIdx.x / 32;
    int column = blockIdx.x % pieces * COLUMNS + threadIdx.x % 32 * 8;
    if (row >= rows || column >= I) return;
    real *out = hidden + (size_t)row * I;
    float g[8], u[8], values[8] = {};
    int slot = gates ? slot_of_row[row] : 0;
    if (slot >= 0) {
        const real *from = gate_up + (size_t)row * 2 * I;
        read_eight<ALIGNED>(g, from, column, I);
        read_eight<ALIGNED>(u, from + I, column, I);
        float weight = gates ? gates[slot] : 1.0f;
        for (int i = 0; i < 8; i++) values[i] = swiglu_hidden(g[i], u[i], weight);
    }
    write_eight<ALIGNED>(out, values, column, I);
}

extern "C" void swiglu_forward(real *hidden, const real *gate_up, const accum *gates, const int *slot_of_row, int rows,
                               int I) {
    OPERATION();
    if (rows == 0 || I == 0) return;
    size_t row = sizeof(real) * (size_t)I;
    unsigned pieces = cuda_blocks((size_t)I, COLUMNS), blocks = cuda_blocks((size_t)rows, WARPS) * pieces;
    if (columns_aligned(hidden, row) && columns_aligned(gate_up, row))
        forward<true>
            <<<blocks, WARPS * 32, 0, cuda_stream()>>>(hidden, gate_up, gates, slot_of_row, rows, I, (int)pieces);
    else
        forward<false>
            <<<blocks, WARPS * 32, 0, cuda_stream()>>>(hidden, gate_up, gates, slot_of_row, rows, I, (int)pieces);
    cuda_check_launch();
}

// ---- backward ----

struct backward_pass {
    real *d_gate_up, *hidden;
    accum *d_gates;
    const real *d_hidden, *gate_up;
    const accum *gates;
    const int *slot_of_row;
    int rows, I;
};

// Eight columns of a row. pairs [4] receives their sums of two of the weight's gradient.
template <bool ALIGNED>
static __device__ __forceinline__ void backward_eight(const struct backward_pass &p, size_t row, int column,
                                                      float weight, float *pairs) {
    const real *from = p.gate_up + row * 2 * p.I;
    real *to = p.d_gate_up + row * 2 * p.I;
    float g[8], u[8], d[8];
    read_eight<ALIGNED>(g, from, column, p.I);
    read_eight<ALIGNED>(u, from + p.I, column, p.I);
    read_eight<ALIGNED>(d, p.d_hidden + row * p.I, column, p.I);
    for (int i = 0; i < 8; i += 2) {
        struct swiglu_gradient even = swiglu_gradient_of(d[i], g[i], u[i], weight);
        struct swiglu_gradient odd = swiglu_gradient_of(d[i + 1], g[i + 1], u[i + 1], weight);
        pairs[i / 2] = swiglu_pair(even, d[i], odd, d[i + 1]);
        g[i] = even.dg;
        u[i] = even.du;
        d[i] = even.hidden;
        g[i + 1] = odd.dg;
        u[i + 1] = odd.du;
        d[i + 1] = odd.hidden;
    }
    write_eight<ALIGNED>(to, g, column, p.I);
    write_eight<ALIGNED>(to + p.I, u, column, p.I);
    write_eight<ALIGNED>(p.hidden + row * p.I, d, column, p.I);
}

template <bool ALIGNED>
static __device__ __forceinline__ void zero_eight(const struct backward_pass &p, size_t row, int column) {
    const float zeros[8] = {};
    real *to = p.d_gate_up + row * 2 * p.I;
    write_eight<ALIGNED>(to, zeros, column, p.I);
    write_eight<ALIGNED>(to + p.I, zeros, column, p.I);
    write_eight<ALIGNED>(p.hidden + row * p.I, zeros, column, p.I);
}

// Without gates rows have no sum, and blocks are cut as in the forward pass.
template <bool ALIGNED>
static __global__ void __launch_bounds__(WARPS * 32) backward_plain(struct backward_pass p, int pieces) {
    int row = blockIdx.x / pieces * WARPS + threadIdx.x / 32;
    int column = blockIdx.x % pieces * COLUMNS + threadIdx.x % 32 * 8;
    float pairs[4];
    if (row < p.rows && column < p.I) backward_eight<ALIGNED>(p, (size_t)row, column, 1.0f, pairs);
}

// With gates a warp has a whole row.
template <bool ALIGNED> static __global__ void __launch_bounds__(WARPS * 32) backward_gated(struct backward_pass p) {
    int row = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= p.rows) return;
    int slot = p.slot_of_row[row];
    float weight = slot < 0 ? 0.0f : p.gates[slot], d_weight = 0;
    for (int first = 0; first < p.I; first += COLUMNS) {
        int column = first + lane * 8;
        float pairs[4] = {};
        if (slot < 0) {
            if (column < p.I) zero_eight<ALIGNED>(p, (size_t)row, column);
            continue;
        }
        if (column < p.I) backward_eight<ALIGNED>(p, (size_t)row, column, weight, pairs);
        for (int q = 0; q < 4; q++) pairs[q] = swiglu_sum_pairs_of_lanes(pairs[q]);
        float sum = swiglu_sum_quads(pairs);
        d_weight = __fadd_rn(d_weight, __shfl_sync(ALL_LANES, sum, 0));
        if (first + GATE_GRADIENT_COLUMNS < p.I)
            d_weight = __fadd_rn(d_weight, __shfl_sync(ALL_LANES, sum, CHUNK_LANES));
    }
    if (slot >= 0 && lane == 0) p.d_gates[slot] = d_weight;
}

template <bool ALIGNED> static void launch_backward(const struct backward_pass &p) {
    unsigned row_blocks = cuda_blocks((size_t)p.rows, WARPS), pieces = cuda_blocks((size_t)p.I, COLUMNS);
    if (p.gates)
        backward_gated<ALIGNED><<<row_blocks, WARPS * 32, 0, cuda_stream()>>>(p);
    else if (pieces > 0)
        backward_plain<ALIGNED><<<row_blocks * pieces, WARPS * 32, 0, cuda_stream()>>>(p, (int)pieces);
    cuda_check_launch();
}

extern "C" void swiglu_backward(real *d_gate_up, real *hidden, accum *d_gates, const real *d_hidden,
                                const real *gate_up, const accum *gates, const int *slot_of_row, int rows, int I) {
    OPERATION();
    if (rows == 0) return;
    struct backward_pass p = {d_gate_up, hidden, d_gates, d_hidden, gate_up, gates, slot_of_row, rows, I};
    size_t row = sizeof(real) * (size_t)I;
    if (columns_aligned(d_gate_up, row) && columns_aligned(hidden, row) && columns_aligned(d_hidden, row) &&
        columns_aligned(gate_up, row))
        launch_backward<true>(p);
    else
        launch_backward<false>(p);
}

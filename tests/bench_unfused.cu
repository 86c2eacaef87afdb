// Kernels of the arm "unfused" of bench_layer: every warp moves rows, and nothing is multiplied beside them.
#include "tests/bench_unfused.h"

#include "kernels/cuda/mok_pull.cuh"

// ---- pulling ----

static __global__ void __launch_bounds__(UNFUSED_WARPS * 32, 1)
    pull_kernel(const __grid_constant__ struct mok_parameters p) {
    pull_all<MOK_FORWARD>(p, 0);
}

void unfused_pull(const struct mok_parameters *q, int32_t *counters, int warps) {
    OPERATION();
    cuda_check(cudaMemsetAsync(counters, 0, sizeof *counters * mok_counter_total(&q->shape), cuda_stream()));
    pull_kernel<<<(unsigned)cuda_multiprocessors(), 32 * (unsigned)warps, 0, cuda_stream()>>>(*q);
    cuda_check_launch();
}

// ---- pushing ----

// Where a row goes; NULL: nowhere.
static __device__ __forceinline__ uint4 *push_target(const struct mok_parameters &p, struct mok_row row) {
    if (row.source < 0) return NULL;
    return (uint4 *)((real *)(p.peers.base[row.source] + p.slots_at) + (size_t)row.slot * (size_t)p.shape.hidden);
}

// Copies consecutive rows of `units` times 16 bytes, AT_ONCE of them at a time. Lane r knows where row r goes.
template <int AT_ONCE>
static __device__ __forceinline__ void push_rows(const uint4 *from, uint4 *to, int rows, int units) {
    const int each = PULL_LOADS / AT_ONCE;
    int lane = (int)threadIdx.x % 32;
#pragma unroll 1
    for (int row = 0; row < rows; row += AT_ONCE) {
        uint4 *targets[AT_ONCE];
#pragma unroll
        for (int r = 0; r < AT_ONCE; r++) targets[r] = (uint4 *)__shfl_sync(ALL_LANES, (unsigned long long)to, row + r);
#pragma unroll 1
        for (int first = lane; first - lane < units; first += 32 * each) {
            uint4 words[PULL_LOADS];
#pragma unroll
            for (int i = 0; i < PULL_LOADS; i++) {
                int unit = first + i % each * 32;
                bool there = targets[i / each] && unit < units;
                words[i] = load_or_zeros(there ? from + (row + i / each) * units + unit : NULL);
            }
#pragma unroll
            for (int i = 0; i < PULL_LOADS; i++) {
                int unit = first + i % each * 32;
                if (targets[i / each] && unit < units) targets[i / each][unit] = words[i];
            }
        }
    }
}

// By the pull's tickets in the order of the walk, which spreads over the links. They are counted where the megakernel counts
// tasks.
static __global__ void __launch_bounds__(UNFUSED_WARPS * 32, 1)
    push_kernel(const __grid_constant__ struct mok_parameters p, const real *out) {
    const struct mok_plan plan = mok_plan_of(p);
    int lane = (int)threadIdx.x % 32, total = mok_move_total(&p.shape, &plan), units = p.shape.hidden / 8;
    for (;;) {
        int ticket = lane == 0 ? atomicAdd(p.tickets[MOK_NEXT_TASK], 1) : 0;
        ticket = __shfl_sync(ALL_LANES, ticket, 0);
        if (ticket >= total) return;
        struct mok_move move = mok_move_at(&p.shape, &plan, MOK_FORWARD, ticket);
        int row = move.block * MOK_BLOCK_ROWS + move.first;
        uint4 *to = lane < p.shape.move_rows ? push_target(p, p.plan.rows[row + lane]) : NULL;
        const uint4 *from = (const uint4 *)out + (size_t)row * (size_t)units;
        if (units > 32 * PULL_LOADS / 2)
            push_rows<1>(from, to, p.shape.move_rows, units);
        else
            push_rows<2>(from, to, p.shape.move_rows, units);
    }
}

void unfused_push(const struct mok_parameters *q, const real *out) {
    OPERATION();
    push_kernel<<<(unsigned)cuda_multiprocessors(), 32 * UNFUSED_WARPS, 0, cuda_stream()>>>(*q, out);
    cuda_check_launch();
}

static __global__ void push_gates_kernel(const __grid_constant__ struct mok_parameters p, size_t d_gates_at,
                                         const accum *d_gates) {
    int rows = p.plan.device->blocks * MOK_BLOCK_ROWS, each = (int)(gridDim.x * blockDim.x);
    for (int r = (int)(blockIdx.x * blockDim.x + threadIdx.x); r < rows; r += each) {
        struct mok_row row = p.plan.rows[r];
        if (row.source >= 0) ((accum *)(p.peers.base[row.source] + d_gates_at))[row.slot] = d_gates[r];
    }
}

void unfused_push_gates(const struct mok_parameters *q, size_t d_gates_at, const accum *d_gates) {
    OPERATION();
    push_gates_kernel<<<(unsigned)cuda_multiprocessors(), 32 * UNFUSED_WARPS, 0, cuda_stream()>>>(*q, d_gates_at,
                                                                                                  d_gates);
    cuda_check_launch();
}

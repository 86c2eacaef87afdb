// Dispatch and combine: placement, copies of rows, and the sum over a token's slots.
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/experts.h"
#include "kernels/cuda/rows.cuh"
#include "kernels/cuda/scratch_moe.h"

// ---- placement: rows in the order of (expert's place, slot) ----

// Slots are cut into tiles. Per tile and expert a count; their sums over the tiles before; then every tile numbers its
// own slots.
enum { TILE_SLOTS = 1024, PLACE_WARPS = 8, PLACE_THREADS = PLACE_WARPS * 32, ROUNDS = TILE_SLOTS / PLACE_THREADS };

static int place_tiles(size_t slots) { return (int)((slots + TILE_SLOTS - 1) / TILE_SLOTS); }

extern "C" size_t scratch_moe_place(int rows, int top_k, int experts) {
    return sizeof(int) * (size_t)experts * ((size_t)place_tiles((size_t)rows * (size_t)top_k) + 1);
}

// Place of a slot's expert in the order, -1 for none.
static __device__ __forceinline__ int place_of(const int32_t *ids, const int *order, int slot, int slots) {
    int id = slot < slots ? ids[slot] : -1;
    return id >= 0 && order ? order[id] : id;
}

// counts [E, tiles]
static __global__ void count_tiles_kernel(int *counts, const int32_t *ids, const int *order, int slots, int E) {
    extern __shared__ int count[];
    for (int e = threadIdx.x; e < E; e += PLACE_THREADS) count[e] = 0;
    __syncthreads();
#pragma unroll
    for (int round = 0; round < ROUNDS; round++) {
        int place = place_of(ids, order, blockIdx.x * TILE_SLOTS + round * PLACE_THREADS + threadIdx.x, slots);
        if (place >= 0) atomicAdd(&count[place], 1);
    }
    __syncthreads();
    for (int e = threadIdx.x; e < E; e += PLACE_THREADS) counts[(size_t)e * gridDim.x + blockIdx.x] = count[e];
}

// Sum of the values of the lanes below.
static __device__ __forceinline__ int warp_sum_below(int value, int lane) {
    int sum = value;
    for (int step = 1; step < 32; step *= 2) {
        int other = __shfl_up_sync(ALL_LANES, sum, step);
        if (lane >= step) sum += other;
    }
    return sum - value;
}

// counts become sums over the tiles before; totals [E] the sums over all. A warp per expert.
static __global__ void sum_tiles_kernel(int *counts, int *totals, int tiles, int E) {
    int e = blockIdx.x * PLACE_WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (e >= E) return;
    counts += (size_t)e * tiles;
    int before = 0;
    for (int first = 0; first < tiles; first += 32) {
        int tile = first + lane, count = tile < tiles ? counts[tile] : 0, below = warp_sum_below(count, lane);
        if (tile < tiles) counts[tile] = before + below;
        before += __shfl_sync(ALL_LANES, below + count, 31);
    }
    if (lane == 0) totals[e] = before;
}

// first [E + 1] = sums of the totals before; of one warp.
static __device__ void sum_totals(int *first, const int *totals, int E, int lane) {
    int before = 0;
    for (int begin = 0; begin < E; begin += 32) {
        int e = begin + lane, total = e < E ? totals[e] : 0, below = warp_sum_below(total, lane);
        if (e < E) first[e] = before + below;
        before += __shfl_sync(ALL_LANES, below + total, 31);
    }
    if (lane == 0) first[E] = before;
}

// Shared memory: first [E + 1], then for each warp the number of its slots per expert, which become their first row.
static __global__ void place_kernel(int *offsets, int *slot_of_row, int *row_of_slot, const int *counts,
                                    const int *totals, const int32_t *ids, const int *order, int slots, int E) {
    extern __shared__ int first[];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int *rows = first + E + 1, *own = rows + (size_t)warp * E;
    for (int e = lane; e < E; e += 32) own[e] = 0;
    if (warp == 0) sum_totals(first, totals, E, lane);
    __syncwarp();

    // A warp has consecutive slots, so that ranks among its own and the order of the warps give the order of the slots.
    int begin = blockIdx.x * TILE_SLOTS + warp * (TILE_SLOTS / PLACE_WARPS), place[ROUNDS], rank[ROUNDS];
#pragma unroll
    for (int round = 0; round < ROUNDS; round++) place[round] = place_of(ids, order, begin + round * 32 + lane, slots);
#pragma unroll
    for (int round = 0; round < ROUNDS; round++) {
        unsigned same = __match_any_sync(ALL_LANES, place[round]);
        int below = __popc(same & ((1u << lane) - 1));
        int before = place[round] < 0 ? 0 : own[place[round]];
        __syncwarp();
        if (place[round] >= 0 && below == 0) own[place[round]] = before + __popc(same);
        __syncwarp();
        rank[round] = before + below;
    }
    __syncthreads();
    for (int e = threadIdx.x; e < E; e += PLACE_THREADS) {
        int row = first[e] + counts[(size_t)e * gridDim.x + blockIdx.x];
        for (int w = 0; w < PLACE_WARPS; w++) {
            int count = rows[(size_t)w * E + e];
            rows[(size_t)w * E + e] = row;
            row += count;
        }
    }
    __syncthreads();

    int placed = first[E];
#pragma unroll
    for (int round = 0; round < ROUNDS; round++) {
        int slot = begin + round * 32 + lane;
        if (slot >= slots) break;
        int row = place[round] < 0 ? -1 : own[place[round]] + rank[round];
        row_of_slot[slot] = row;
        if (row >= 0) slot_of_row[row] = slot;
        if (slot >= placed) slot_of_row[slot] = -1; // the last rows, each by the slot of the same number
    }
    if (blockIdx.x == 0)
        for (int e = threadIdx.x; e <= E; e += PLACE_THREADS) offsets[e] = first[e];
}

extern "C" void moe_place(int *offsets, int *slot_of_row, int *row_of_slot, const int32_t *ids, const int *order, int N,
                          int K, int E) {
    OPERATION();
    experts_check(E);
    int slots = N * K, tiles = place_tiles((size_t)slots);
    cudaStream_t stream = cuda_stream();
    if (slots == 0) {
        cuda_check(cudaMemsetAsync(offsets, 0, sizeof(int) * ((size_t)E + 1), stream));
        return;
    }
    int *counts = (int *)cuda_scratch(scratch_moe_place(N, K, E)), *totals = counts + (size_t)E * (size_t)tiles;
    size_t bytes = sizeof(int) * (size_t)E, place_bytes = bytes * (PLACE_WARPS + 1) + sizeof(int);
    count_tiles_kernel<<<(unsigned)tiles, PLACE_THREADS, bytes, stream>>>(counts, ids, order, slots, E);
    cuda_check_launch();
    sum_tiles_kernel<<<cuda_blocks((size_t)E, PLACE_WARPS), PLACE_THREADS, 0, stream>>>(counts, totals, tiles, E);
    cuda_check_launch();
    place_kernel<<<(unsigned)tiles, PLACE_THREADS, place_bytes, stream>>>(offsets, slot_of_row, row_of_slot, counts,
                                                                          totals, ids, order, slots, E);
    cuda_check_launch();
}

// ---- regrouping of what arrived ----

// There are no more sources S than experts, and a source has at most ceil(experts / S) of them here.
extern "C" size_t scratch_moe_regroup(int experts) { return 3 * sizeof(int) * (size_t)experts; }

// rows [E, S] first row of (expert, source) in the new order   arrivals [S] first arrival of each source
// A warp per expert, and a last one for the arrivals.
static __global__ void regroup_starts_kernel(int *rows, int *arrivals, const int *offsets, int S, int stride, int E) {
    int e = blockIdx.x, lane = threadIdx.x, before = 0;
    if (e < E) {
        for (int s = lane; s < S; s += 32) before += offsets[(size_t)s * stride + e] - offsets[(size_t)s * stride];
        before = __reduce_add_sync(ALL_LANES, before);
    }
    int *starts = e < E ? rows + (size_t)e * S : arrivals;
    for (int first = 0; first < S; first += 32) {
        int s = first + lane, count = 0;
        if (s < S) {
            const int *o = offsets + (size_t)s * stride;
            count = e < E ? o[e + 1] - o[e] : o[E] - o[0];
        }
        int below = warp_sum_below(count, lane);
        if (s < S) starts[s] = before + below;
        before += __shfl_sync(ALL_LANES, below + count, 31);
    }
}

// The last i below n with starts[i] <= value; starts[0] is not above it. Of equal starts all but the last one are those
// of empty ranges.
static __device__ __forceinline__ int range_of(const int *starts, int n, int value) {
    int low = 0, high = n; // starts[low] <= value < starts[high]
    while (high - low > 1) {
        int middle = low + (high - low) / 2;
        if (starts[middle] <= value)
            low = middle;
        else
            high = middle;
    }
    return low;
}

static __global__ void regroup_kernel(int *arrival_of_row, int *row_of_arrival, const int *rows, const int *arrivals,
                                      const int *offsets, int S, int stride, int E, int first, int count) {
    int arrival = blockIdx.x * blockDim.x + threadIdx.x;
    if (arrival >= count) return;
    int s = range_of(arrivals, S, arrival);
    const int *o = offsets + (size_t)s * stride;
    int sent = o[0] + arrival - arrivals[s], e = range_of(o, E, sent);
    int row = rows[(size_t)e * S + s] + sent - o[e];
    arrival_of_row[first + row] = first + arrival;
    row_of_arrival[first + arrival] = first + row;
}

extern "C" void moe_regroup(int *arrival_of_row, int *row_of_arrival, const int *offsets, int S, int stride, int E,
                            int first, int rows) {
    OPERATION();
    if (rows == 0) return;
    const int threads = 256;
    int *starts = (int *)cuda_scratch(sizeof(int) * ((size_t)E + 1) * (size_t)S), *arrivals = starts + (size_t)E * S;
    regroup_starts_kernel<<<(unsigned)E + 1, 32, 0, cuda_stream()>>>(starts, arrivals, offsets, S, stride, E);
    cuda_check_launch();
    regroup_kernel<<<cuda_blocks((size_t)rows, threads), threads, 0, cuda_stream()>>>(
        arrival_of_row, row_of_arrival, starts, arrivals, offsets, S, stride, E, first, rows);
    cuda_check_launch();
}

// ---- rows and gates to their places ----

static __global__ void gather_gates_kernel(float *out, const float *gates, const int *index, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    int from = index[i];
    out[i] = from < 0 ? 0.0f : gates[from];
}

extern "C" void moe_gather_gates(accum *out, const accum *gates, const int *index, int n) {
    OPERATION();
    if (n == 0) return;
    const int threads = 256;
    gather_gates_kernel<<<cuda_blocks((size_t)n, threads), threads, 0, cuda_stream()>>>(out, gates, index, n);
    cuda_check_launch();
}

extern "C" void moe_gather(real *rows, const real *x, const int *index, int R, int H) {
    OPERATION();
    rows_gather(rows, x, index, R, H);
}

// A warp reads its part of a token's row once, and writes it for each slot.
template <typename UNIT>
static __global__ void scatter_kernel(UNIT *rows, const UNIT *x, const int *row_of_slot, int N, int K, int width) {
    int token = rows_own_row(), first = rows_own_unit(), lane = threadIdx.x % 32;
    if (token >= N) return;
    UNIT units[ROWS_LOADS];
    rows_load(units, x + (size_t)token * width, first, width);
    row_of_slot += (size_t)token * K;
    for (int begin = 0; begin < K; begin += 32) {
        int own = begin + lane < K ? row_of_slot[begin + lane] : -1;
        for (int k = 0; k < 32 && begin + k < K; k++) {
            int row = __shfl_sync(ALL_LANES, own, k);
            if (row >= 0) rows_store(rows + (size_t)row * width, units, first, width);
        }
    }
}

extern "C" void moe_scatter(real *rows, const real *x, const int *row_of_slot, int N, int K, int H) {
    OPERATION();
    if (N == 0 || H == 0) return;
    if (rows_aligned(rows, H) && rows_aligned(x, H))
        scatter_kernel<<<rows_grid(N, H / 8), 32 * ROWS_WARPS, 0, cuda_stream()>>>((uint4 *)rows, (const uint4 *)x,
                                                                                   row_of_slot, N, K, H / 8);
    else
        scatter_kernel<<<rows_grid(N, H), 32 * ROWS_WARPS, 0, cuda_stream()>>>((uint16_t *)rows, (const uint16_t *)x,
                                                                               row_of_slot, N, K, H);
    cuda_check_launch();
}

// ---- the sum over a token's slots ----

// One or eight numbers that a thread sums.
template <int WIDTH> struct terms;

template <> struct terms<1> {
    real number;
    __device__ __forceinline__ void add_to(float *sums) const { sums[0] += __bfloat162float(number); }
    __device__ __forceinline__ void round(const float *sums) { number = __float2bfloat16_rn(sums[0]); }
};

template <> struct terms<8> {
    uint4 words;
    __device__ __forceinline__ void add_to(float *sums) const {
        bf16x8 eight;
        eight.words = words;
#pragma unroll
        for (int p = 0; p < 4; p++) {
            float2 pair = __bfloat1622float2(eight.pairs[p]);
            sums[2 * p] += pair.x;
            sums[2 * p + 1] += pair.y;
        }
    }
    __device__ __forceinline__ void round(const float *sums) {
        bf16x8 eight;
#pragma unroll
        for (int p = 0; p < 4; p++) eight.pairs[p] = __floats2bfloat162_rn(sums[2 * p], sums[2 * p + 1]);
        words = eight.words;
    }
};

static __device__ __forceinline__ terms<1> load_if(bool there, const terms<1> *from) {
    return there ? *from : terms<1>{};
}

// Zeros when not there. A predicate in place of the compiler's branch, which would let only one load at a time be under
// way.
static __device__ __forceinline__ terms<8> load_if(bool there, const terms<8> *from) {
    terms<8> to;
    asm volatile("{\n"
                 ".reg .pred there;\n"
                 "setp.ne.s32 there, %4, 0;\n"
                 "mov.b32 %0, 0;\n"
                 "mov.b32 %1, 0;\n"
                 "mov.b32 %2, 0;\n"
                 "mov.b32 %3, 0;\n"
                 "@there ld.global.v4.u32 {%0, %1, %2, %3}, [%5];\n"
                 "}"
                 : "=&r"(to.words.x), "=&r"(to.words.y), "=&r"(to.words.z), "=&r"(to.words.w)
                 : "r"((int)there), "l"(from));
    return to;
}

// Without a number of blocks per multiprocessor the compiler would save registers by loading and adding in turns.
enum { SUM_THREADS = 256, SUM_BLOCKS = 3, SLOTS_IN_FLIGHT = 8 };

// A block sums a token's row, or SUM_THREADS units of it. OWN_ROWS: index holds ids and slot s has row s; else index
// holds the slots' rows. Rows below 0 are not read; the zeros in their place change no bit of a sum that began at zero.
// y may be shared or residual: each unit is read before it is written.
template <int WIDTH, bool OWN_ROWS>
static __global__ void __launch_bounds__(SUM_THREADS, SUM_BLOCKS)
    sum_kernel(terms<WIDTH> *y, const terms<WIDTH> *rows, const int *index, const terms<WIDTH> *shared,
               const terms<WIDTH> *residual, int K, int width) {
    size_t token = blockIdx.x;
    int unit = blockIdx.y * SUM_THREADS + threadIdx.x;
    if (unit >= width) return;
    size_t here = token * width + unit;
    terms<WIDTH> last[2];
    if (shared) last[0] = shared[here];
    if (residual) last[1] = residual[here];
    float sums[WIDTH] = {};
    for (int first = 0; first < K; first += SLOTS_IN_FLIGHT) {
        int row[SLOTS_IN_FLIGHT];
        terms<WIDTH> loaded[SLOTS_IN_FLIGHT];
#pragma unroll
        for (int n = 0; n < SLOTS_IN_FLIGHT; n++) row[n] = first + n < K ? index[token * K + first + n] : -1;
#pragma unroll
        for (int n = 0; n < SLOTS_IN_FLIGHT; n++) {
            size_t from = OWN_ROWS ? token * K + first + n : (size_t)row[n];
            loaded[n] = load_if(row[n] >= 0, rows + from * width + unit);
        }
#pragma unroll
        for (int n = 0; n < SLOTS_IN_FLIGHT; n++) loaded[n].add_to(sums);
    }
    if (shared) last[0].add_to(sums);
    if (residual) last[1].add_to(sums);
    terms<WIDTH> sum;
    sum.round(sums);
    y[here] = sum;
}

template <int WIDTH, bool OWN_ROWS>
static void sum_units(real *y, const real *rows, const int *index, const real *shared, const real *residual, int N,
                      int K, int H) {
    typedef terms<WIDTH> unit;
    int width = H / WIDTH, threads = width < SUM_THREADS ? (width + 31) / 32 * 32 : (int)SUM_THREADS;
    dim3 grid((unsigned)N, cuda_blocks((size_t)width, SUM_THREADS));
    sum_kernel<WIDTH, OWN_ROWS><<<grid, threads, 0, cuda_stream()>>>(
        (unit *)y, (const unit *)rows, index, (const unit *)shared, (const unit *)residual, K, width);
    cuda_check_launch();
}

template <bool OWN_ROWS>
static void sum_tokens(real *y, const real *rows, const int *index, const real *shared, const real *residual, int N,
                       int K, int H) {
    if (N == 0 || H == 0) return;
    if (rows_aligned(y, H) && rows_aligned(rows, H) && rows_aligned(shared, H) && rows_aligned(residual, H))
        sum_units<8, OWN_ROWS>(y, rows, index, shared, residual, N, K, H);
    else
        sum_units<1, OWN_ROWS>(y, rows, index, shared, residual, N, K, H);
}

extern "C" void moe_combine(real *y, const real *rows, const int *row_of_slot, const real *shared, const real *residual,
                            int N, int K, int H) {
    OPERATION();
    sum_tokens<false>(y, rows, row_of_slot, shared, residual, N, K, H);
}

extern "C" void moe_sum_slots(real *y, const real *slots, const int32_t *ids, const real *shared, const real *residual,
                              int N, int K, int H) {
    OPERATION();
    sum_tokens<true>(y, slots, ids, shared, residual, N, K, H);
}

// The plan: count the routes to this rank's experts, turn counts into places, place the rows; then what follows from the
// places. Four kernels, integers alone, every place from sums of counts: the same plan on every run.
//
// All ranks' routes are cut into tiles of tokens. A tile's routes to one expert stand together, tile behind tile in the
// order of ranks and tokens; so the first row of every (tile, expert) follows from sums of counts, and tiles can be counted
// and placed at the same time by any block. The host knows no number that depends on routes: grids follow from capacities.
#include <cstdlib>

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/experts.h"
#include "kernels/cuda/mok_header.h"

// ---- memory ----

static size_t most_size(size_t a, size_t b) { return a > b ? a : b; }

// Tasks of a pass, whatever the routes. Macrobatches share at most one expert with the next one.
static size_t most_tasks(const struct mok_shape *s, enum mok_pass pass) {
    size_t blocks = mok_capacity_blocks(s), ring = (size_t)mok_ring_blocks(s);
    struct mok_plan full = {};
    full.tokens = s->max_tokens;
    size_t first_stage =
        most_size((size_t)mok_first_stage(s, pass, 0), (size_t)mok_first_stage(s, pass, 1)); // 1: with a replay
    size_t tasks = (size_t)mok_shared_tasks(s, &full, pass) + blocks * (first_stage + (size_t)mok_out_tiles(s));
    if (pass == MOK_FORWARD) return tasks;
    size_t macrobatches = blocks / ring + 1;
    return tasks + ((size_t)mok_most_experts(s) + macrobatches) * (size_t)mok_expert_d_weight_tiles(s);
}

// Appends n things of `size` bytes, each group of them 16-byte aligned; returns where they begin, NULL where base is.
static void *append(char *base, size_t *bytes, size_t n, size_t size) {
    size_t begin = *bytes;
    *bytes = (begin + n * size + 15) / 16 * 16;
    return base ? base + begin : NULL;
}

// What the host may copy, behind each other in one piece of memory; with base NULL it only counts.
static size_t lay_out_arrays(struct mok_plan *p, const struct mok_shape *s, char *base) {
    size_t experts = (size_t)mok_most_experts(s), blocks = mok_capacity_blocks(s), rows = blocks * MOK_BLOCK_ROWS;
    size_t bytes = 0;
    p->rows = (struct mok_row *)append(base, &bytes, rows, sizeof *p->rows);
    p->expert_block = (int *)append(base, &bytes, experts + 1, sizeof(int));
    p->expert_rows = (int *)append(base, &bytes, experts, sizeof(int));
    p->block_expert = (int *)append(base, &bytes, blocks, sizeof(int));
    p->walk = (int *)append(base, &bytes, blocks, sizeof(int));
    p->source_rows = (int *)append(base, &bytes, experts * (size_t)s->ranks, sizeof(int));
    p->twin = (int *)append(base, &bytes, rows, sizeof(int));
    return bytes;
}

// All of it.
static size_t lay_out(struct mok_plan *p, const struct mok_shape *s, char *base) {
    size_t bytes = lay_out_arrays(p, s, base);
    p->tasks[MOK_FORWARD] =
        (struct mok_task *)append(base, &bytes, most_tasks(s, MOK_FORWARD), sizeof(struct mok_task));
    p->tasks[MOK_BACKWARD] =
        (struct mok_task *)append(base, &bytes, most_tasks(s, MOK_BACKWARD), sizeof(struct mok_task));
    p->device = (struct mok_plan *)append(base, &bytes, 1, sizeof *p->device);
    return bytes;
}

extern "C" size_t mok_plan_bytes(const struct mok_shape *s) {
    struct mok_plan p;
    return lay_out(&p, s, NULL);
}

extern "C" void mok_plan_free(struct mok_plan *p) {
    device_free(p->rows);
    *p = {};
}

extern "C" void mok_plan_read(struct mok_plan *host, const struct mok_plan *p, const struct mok_shape *s) {
    struct mok_plan arrays;
    size_t bytes = lay_out_arrays(&arrays, s, NULL);
    char *copy = (char *)malloc(bytes);
    if (!copy) fail_internal("megakernel", "found no host memory for a plan of %zu bytes", bytes);
    device_copy_out(copy, p->rows, bytes);
    device_copy_out(host, p->device, sizeof *host);
    lay_out_arrays(host, s, copy);
    host->device = NULL;
    for (int pass = 0; pass < MOK_PASSES; pass++) host->tasks[pass] = NULL;
}

// ---- what the kernels share ----

// Tiles of at most TILE_SLOTS routes: a token has no more, as it has at most MOST_EXPERTS experts.
enum { TILE_SLOTS = 1024, WARPS = 8, THREADS = WARPS * 32, ROUNDS = TILE_SLOTS / THREADS };
static_assert((int)TILE_SLOTS >= (int)MOST_EXPERTS, "a token's routes fit into a tile");

struct plan_call {
    struct mok_shape s;
    struct mok_plan p; // where the arrays are; what routes decide is not known
    struct mok_peers peers;
    size_t ids, gates;    // from where a rank's symmetric memory begins
    int tokens, tiles;    // of a tile; of a source
    int *counts;          // [ranks, tiles, experts] of routes, then of the routes in the source's tiles before
    int32_t *row_of_slot; // [ranks, max_tokens * K] first the expert's number on this rank; -1: no row here
    int *turn;            // [blocks] the place in the walk at which a block comes
};

static int tile_tokens(const struct mok_shape *s) { return TILE_SLOTS / s->top_k; }
// At least one, since a grid is never empty.
static int source_tiles(const struct mok_shape *s) { return mok_ceil(s->max_tokens + !s->max_tokens, tile_tokens(s)); }

// Scratch memory, of which the call's arrays are made where there is a call.
static size_t lay_out_scratch(struct plan_call *c, const struct mok_shape *s, char *base) {
    size_t ranks = (size_t)s->ranks, bytes = 0;
    c->counts = (int *)append(base, &bytes, ranks * (size_t)source_tiles(s) * (size_t)mok_most_experts(s), sizeof(int));
    c->row_of_slot = (int32_t *)append(base, &bytes, ranks * (size_t)s->max_tokens * (size_t)s->top_k, sizeof(int32_t));
    c->turn = (int *)append(base, &bytes, mok_capacity_blocks(s), sizeof(int));
    return bytes;
}

extern "C" void mok_plan_alloc(struct mok_plan *p, const struct mok_shape *s) {
    struct plan_call c;
    experts_check(s->experts);
    *p = {};
    lay_out(p, s, (char *)device_alloc(mok_plan_bytes(s)));
    p->tokens = p->blocks = -1;
    cuda_scratch(lay_out_scratch(&c, s, NULL)); // now, since no memory can be taken while a graph is captured
}

static __device__ __forceinline__ const struct mok_header *header_of(const struct plan_call &c, int rank) {
    return (const struct mok_header *)c.peers.base[rank];
}

// The slots of the tile of this block, as many as a source may have: tiles are the grid's x, sources its y.
struct tile {
    int source, begin, end;
    int32_t *rows; // row_of_slot of the source
};
static __device__ __forceinline__ struct tile own_tile(const struct plan_call &c) {
    int K = c.s.top_k, first = blockIdx.x * c.tokens, source = blockIdx.y;
    int end = mok_min(first + c.tokens, c.s.max_tokens);
    return {source, first * K, end * K, c.row_of_slot + (size_t)source * c.s.max_tokens * K};
}

// ---- counts ----

static __global__ void __launch_bounds__(THREADS) count_kernel(const __grid_constant__ struct plan_call c) {
    __shared__ int count[MOST_EXPERTS];
    cudaTriggerProgrammaticLaunchCompletion(); // the next kernel may take its place and wait
    int E = c.p.experts, first_expert = mok_first_expert(&c.s, c.p.rank), expert[ROUNDS];
    struct tile t = own_tile(c);
    int slots = header_of(c, t.source)->tokens * c.s.top_k; // that the source has
    const int32_t *ids = (const int32_t *)(c.peers.base[t.source] + c.ids);
    for (int e = threadIdx.x; e < E; e += THREADS) count[e] = 0;
    __syncthreads();
#pragma unroll
    for (int round = 0; round < ROUNDS; round++) {
        int slot = t.begin + round * THREADS + threadIdx.x;
        expert[round] = slot < t.end && slot < slots ? ids[slot] - first_expert : -1; // negative for id -1 too
    }
#pragma unroll
    for (int round = 0; round < ROUNDS; round++) {
        int slot = t.begin + round * THREADS + threadIdx.x, e = expert[round];
        bool here = e >= 0 && e < E;
        if (here) atomicAdd(&count[e], 1);
        if (slot < t.end) t.rows[slot] = here ? e : -1;
    }
    __syncthreads();
    int *counts = c.counts + ((size_t)t.source * c.tiles + blockIdx.x) * E;
    for (int e = threadIdx.x; e < E; e += THREADS) counts[e] = count[e];
}

// ---- sums, and all that is of blocks ----

enum { SUM_THREADS = 1024, SUM_WARPS = SUM_THREADS / 32, SUM_ROUND = 16 };
static_assert((int)SUM_THREADS >= (int)MOST_EXPERTS, "a thread per expert");

// counts [tiles, E] of one source and expert become sums over the tiles before; returns the sum over all.
static __device__ __forceinline__ int sum_tiles(int *counts, int tiles, int E) {
    int sum = 0;
    for (int first = 0; first < tiles; first += SUM_ROUND, counts += SUM_ROUND * E) {
        int count[SUM_ROUND]; // all on their way at once
        const int *from = counts;
#pragma unroll
        for (int i = 0; i < SUM_ROUND; i++, from += E) count[i] = first + i < tiles ? *from : 0;
        int *to = counts;
#pragma unroll
        for (int i = 0; i < SUM_ROUND; i++, to += E) {
            if (first + i < tiles) *to = sum;
            sum += count[i];
        }
    }
    return sum;
}

// Sum of the values of this block's threads up to and with this one. sums [SUM_WARPS] in shared memory.
static __device__ __forceinline__ int block_sum_up_to(int value, int *sums) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int step = 1; step < 32; step *= 2) {
        int other = __shfl_up_sync(ALL_LANES, value, step);
        if (lane >= step) value += other;
    }
    if (lane == 31) sums[warp] = value;
    __syncthreads();
    for (int w = 0; w < warp; w++) value += sums[w];
    return value;
}

// The expert of a block: the last one whose first block is not above it. Of equal ones all but the last have no rows.
static __device__ __forceinline__ int expert_of(const int *first_block, int E, int block) {
    int low = 0, high = E; // first_block[low] <= block < first_block[high]
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (first_block[middle] <= block)
            low = middle;
        else
            high = middle;
    }
    return low;
}

// One block. There are at most ranks * ceil(experts / ranks) sums over tiles, a thread for each, and that takes as long
// as a few loads: 64 tiles of 8192 tokens with 8 experts each are four rounds, for any number of ranks.
static __global__ void __launch_bounds__(SUM_THREADS) sum_kernel(const __grid_constant__ struct plan_call c) {
    __shared__ int totals[MOST_EXPERTS + MOK_MOST_RANKS]; // [ranks, experts]
    __shared__ int first_block[MOST_EXPERTS + 1], sums[SUM_WARPS];
    cudaTriggerProgrammaticLaunchCompletion();
    cudaGridDependencySynchronize();
    int E = c.p.experts, ranks = c.s.ranks, e = threadIdx.x;
    for (int i = threadIdx.x; i < ranks * E; i += SUM_THREADS)
        totals[i] = sum_tiles(c.counts + (size_t)(i / E) * c.tiles * E + i % E, c.tiles, E);
    __syncthreads();

    int rows = 0;
    if (e < E) {
        for (int source = 0; source < ranks; source++) {
            c.p.source_rows[(size_t)e * ranks + source] = rows;
            rows += totals[source * E + e];
        }
        c.p.expert_rows[e] = rows;
    }
    int blocks = block_sum_up_to(mok_ceil(rows, MOK_BLOCK_ROWS), sums);
    if (e == 0) first_block[0] = c.p.expert_block[0] = 0;
    if (e < E) first_block[e + 1] = c.p.expert_block[e + 1] = blocks;
    __syncthreads();

    struct mok_plan p = c.p;
    p.tokens = header_of(c, p.rank)->tokens;
    p.blocks = first_block[E];
    for (int block = threadIdx.x; block < p.blocks; block += SUM_THREADS)
        p.block_expert[block] = expert_of(first_block, E, block);
    __syncthreads();
    for (int at = threadIdx.x; at < p.blocks; at += SUM_THREADS) {
        int block = mok_walk_at(&c.s, &p, at);
        p.walk[at] = block;
        c.turn[block] = at;
    }
    if (threadIdx.x != SUM_THREADS - 1) return; // this one has the least to do above
    for (int pass = 0; pass < MOK_PASSES; pass++) p.task_total[pass] = mok_task_total(&c.s, &p, (enum mok_pass)pass);
    *p.device = p;
}

// ---- rows ----

static __global__ void __launch_bounds__(THREADS) place_kernel(const __grid_constant__ struct plan_call c) {
    __shared__ int rows[WARPS * MOST_EXPERTS]; // [warps, experts] of a warp's routes the number, then the first row
    cudaTriggerProgrammaticLaunchCompletion();
    cudaGridDependencySynchronize();
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, E = c.p.experts, *own = rows + (size_t)warp * E;
    struct tile t = own_tile(c);
    const accum *gates = (const accum *)(c.peers.base[t.source] + c.gates);
    // A warp has consecutive slots, so that ranks among its own and the order of the warps give the order of the slots.
    int begin = t.begin + warp * (TILE_SLOTS / WARPS) + lane, expert[ROUNDS], rank[ROUNDS];
    accum gate[ROUNDS];
#pragma unroll
    for (int round = 0; round < ROUNDS; round++)
        expert[round] = begin + round * 32 < t.end ? t.rows[begin + round * 32] : -1;
#pragma unroll
    for (int round = 0; round < ROUNDS; round++) gate[round] = expert[round] >= 0 ? gates[begin + round * 32] : 0.0f;
    for (int e = lane; e < E; e += 32) own[e] = 0;
    __syncwarp();
#pragma unroll
    for (int round = 0; round < ROUNDS; round++) {
        unsigned same = __match_any_sync(ALL_LANES, expert[round]);
        int below = __popc(same & ((1u << lane) - 1)), before = expert[round] < 0 ? 0 : own[expert[round]];
        __syncwarp();
        if (expert[round] >= 0 && below == 0) own[expert[round]] = before + __popc(same);
        __syncwarp();
        rank[round] = before + below;
    }
    __syncthreads();
    const int *counts = c.counts + ((size_t)t.source * c.tiles + blockIdx.x) * E;
    for (int e = threadIdx.x; e < E; e += THREADS) {
        int row = c.p.expert_block[e] * MOK_BLOCK_ROWS + c.p.source_rows[(size_t)e * c.s.ranks + t.source] + counts[e];
        for (int w = 0; w < WARPS; w++) {
            int count = rows[(size_t)w * E + e];
            rows[(size_t)w * E + e] = row;
            row += count;
        }
    }
    __syncthreads();
#pragma unroll
    for (int round = 0; round < ROUNDS; round++) {
        int slot = begin + round * 32;
        if (expert[round] < 0) continue; // its -1 stays
        int row = own[expert[round]] + rank[round];
        t.rows[slot] = row;
        c.p.rows[row] = {t.source, slot, gate[round]};
    }
}

// ---- what follows from the places ----

enum { FINISH_BLOCKS = 264 }; // for each thing to do; two for a multiprocessor of an H200

// Of the rows of a token from another rank, the one that comes first in the walk, unless that is this row or one of its
// block.
static __device__ __forceinline__ int twin_of(const struct plan_call &c, const struct mok_row &row, int block) {
    int K = c.s.top_k, turn = c.turn[block], twin = -1;
    const int32_t *rows = c.row_of_slot + (size_t)row.source * c.s.max_tokens * K + (size_t)(row.slot / K) * K;
#pragma unroll 4
    for (int k = 0; k < K; k++) {
        int other = rows[k];
        if (other < 0) continue;
        int other_turn = c.turn[other / MOK_BLOCK_ROWS];
        if (other_turn >= turn) continue;
        turn = other_turn;
        twin = other;
    }
    return twin;
}

// Twins and padding, a row block at a time.
static __device__ __forceinline__ void finish_rows(const struct plan_call &c, const struct mok_plan *p) {
    bool twins = mok_macrobatches(&c.s, p) == 1;
    for (int block = blockIdx.x; block < p->blocks; block += gridDim.x) {
        size_t at = (size_t)block * MOK_BLOCK_ROWS + threadIdx.x;
        int twin = -1;
        if ((int)threadIdx.x >= mok_block_rows(p, block)) {
            p->rows[at] = {-1, 0, 0.0f};
        } else {
            struct mok_row row = p->rows[at];
            if (twins && row.source != p->rank) twin = twin_of(c, row, block);
        }
        p->twin[at] = twin;
    }
}

static __device__ __forceinline__ void write_tasks(const struct plan_call &c, const struct mok_plan *p,
                                                   enum mok_pass pass) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < p->task_total[pass]; i += gridDim.x * blockDim.x)
        p->tasks[pass][i] = mok_task_at(&c.s, p, pass, i);
}

// A thread per row of a block. The grid's y is a pass whose tasks are written, or behind them says rows.
static __global__ void __launch_bounds__(MOK_BLOCK_ROWS) finish_kernel(const __grid_constant__ struct plan_call c) {
    cudaGridDependencySynchronize();
    if (blockIdx.y < MOK_PASSES)
        write_tasks(c, c.p.device, (enum mok_pass)blockIdx.y);
    else
        finish_rows(c, c.p.device);
}

// ---- the whole ----

extern "C" void mok_plan_make(struct mok_plan *p, const struct mok_shape *s, const struct mok_group *g,
                              const int32_t *ids, const accum *gates) {
    OPERATION();
    p->rank = g->rank;
    p->experts = mok_local_experts(s, g->rank);
    if (g->tokens < 0 || g->tokens > s->max_tokens)
        fail_internal("megakernel", "found %d tokens on rank %d, wanted 0 to %d", g->tokens, g->rank, s->max_tokens);
    p->tokens = g->tokens;
    p->blocks = -1; // known in *device alone

    struct plan_call c;
    c.s = *s;
    c.p = *p;
    c.peers = mok_peers_of(g);
    c.ids = (size_t)((const char *)ids - g->base[g->rank]);
    c.gates = (size_t)((const char *)gates - g->base[g->rank]);
    c.tokens = tile_tokens(s);
    c.tiles = source_tiles(s);
    lay_out_scratch(&c, s, (char *)cuda_scratch(lay_out_scratch(&c, s, NULL)));

    dim3 tiles((unsigned)c.tiles, (unsigned)s->ranks);
    count_kernel<<<tiles, THREADS, 0, cuda_stream()>>>(c);
    cuda_check_launch();
    cuda_launch_early(sum_kernel, dim3(1), dim3(SUM_THREADS), c);
    cuda_launch_early(place_kernel, tiles, dim3(THREADS), c);
    cuda_launch_early(finish_kernel, dim3(FINISH_BLOCKS, MOK_PASSES + 1), dim3(MOK_BLOCK_ROWS), c);
}

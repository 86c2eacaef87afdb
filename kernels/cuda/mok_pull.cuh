// Moving: rows of tokens from the ranks that have them into the ring of the one that has their experts. Any number of
// warps take groups of rows in order.
//
// Rows are stored by plain accesses and loaded by TMA, in other blocks: those, having seen the counter, put a fence between
// (copies_fence).
#ifndef MOK_KERNELS_CUDA_MOK_PULL_CUH
#define MOK_KERNELS_CUDA_MOK_PULL_CUH

#include "kernels/cuda/mok_wait.cuh"

// Loads that a lane has under way: with a warp on each multiprocessor, half a megabyte on the link.
enum { PULL_LOADS = 8 };

// 16 bytes from L2, or zeros if from is NULL. A predicate in place of the compiler's branch, which would let only one
// load at a time be under way.
static __device__ __forceinline__ uint4 load_or_zeros(const uint4 *from) {
    uint4 words;
    asm volatile("{\n"
                 ".reg .pred there;\n"
                 "setp.ne.u64 there, %4, 0;\n"
                 "mov.b32 %0, 0;\n"
                 "mov.b32 %1, 0;\n"
                 "mov.b32 %2, 0;\n"
                 "mov.b32 %3, 0;\n"
                 "@there ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];\n"
                 "}"
                 : "=&r"(words.x), "=&r"(words.y), "=&r"(words.z), "=&r"(words.w)
                 : "l"(from)
                 : "memory");
    return words;
}

// Copies `rows` rows of `units` times 16 bytes to consecutive rows, AT_ONCE of them at a time. Lane r knows where row r
// comes from; NULL: zeros. loading() is called when the first loads are under way, between() behind the first rows.
template <int AT_ONCE, class Loading, class Between>
static __device__ __forceinline__ void copy_rows(uint4 *to, const uint4 *from, int rows, int units,
                                                 const Loading &loading, const Between &between) {
    const int each = PULL_LOADS / AT_ONCE;
    int lane = (int)threadIdx.x % 32;
#pragma unroll 1
    for (int row = 0; row < rows; row += AT_ONCE) {
        const uint4 *sources[AT_ONCE];
#pragma unroll
        for (int r = 0; r < AT_ONCE; r++)
            sources[r] = (const uint4 *)__shfl_sync(ALL_LANES, (unsigned long long)from, row + r);
#pragma unroll 1
        for (int first = lane; first - lane < units; first += 32 * each) {
            uint4 words[PULL_LOADS];
#pragma unroll
            for (int i = 0; i < PULL_LOADS; i++) {
                const uint4 *source = sources[i / each];
                int unit = first + i % each * 32;
                words[i] = load_or_zeros(source && unit < units ? source + unit : NULL);
            }
            if (row == 0 && first == lane) loading();
#pragma unroll
            for (int i = 0; i < PULL_LOADS; i++) {
                int unit = first + i % each * 32, r = row + i / each;
                if (unit < units && r < rows) to[r * units + unit] = words[i];
            }
        }
        if (row == 0) between();
    }
}

// ---- groups of rows ----

// Where a row of the plan comes from. A token that another row of this rank has brought already is copied from there.
static __device__ __forceinline__ const uint4 *pull_source(const struct mok_parameters &p, struct mok_row row,
                                                           int twin) {
    size_t H = (size_t)p.shape.hidden;
    if (row.source < 0) return NULL;
    if (twin >= 0) {
        int block = twin / MOK_BLOCK_ROWS;
        size_t at = mok_ring_row(&p.shape, block) + (size_t)(twin % MOK_BLOCK_ROWS);
        if (counter_read(p.counters[MOK_READY] + block) >= mok_groups(&p.shape))
            return (const uint4 *)(p.x_rows + at * H);
    }
    size_t token = (size_t)(row.slot / p.shape.top_k);
    return (const uint4 *)((const real *)(p.peers.base[row.source] + p.x_at) + token * H);
}

// A warp that moves. While it copies the rows of one ticket, what it needs for the next one comes in, step by step: the
// ticket, its row block, its rows' sources; and the counter of the one before is raised, which waits until all its rows
// are in memory.
struct puller {
    const struct mok_parameters &p;
    const enum mok_pass pass;
    const int lane, total;
    int ahead;            // lane 0: the ticket behind move
    struct mok_move move; // of the next ticket; block -1: none is left
    struct mok_row row;   // of this lane
    int twin;
    int32_t *unraised; // NULL: none

    __device__ __forceinline__ puller(const struct mok_parameters &p, enum mok_pass pass)
        : p(p), pass(pass), lane((int)threadIdx.x % 32), total(mok_move_total(&p.shape, p.plan)),
          ahead(0), move{-1, 0}, row{-1, 0, 0}, twin(-1), unraised(NULL) {}

    __device__ __forceinline__ void take() {
        if (lane == 0) ahead = atomicAdd(p.tickets[MOK_NEXT_PULL], 1);
    }
    __device__ __forceinline__ void find_block() {
        int ticket = __shfl_sync(ALL_LANES, ahead, 0);
        move = {-1, 0};
        if (ticket >= total) return;
        move = mok_move_at(&p.shape, p.plan, pass, ticket);
        take();
    }
    __device__ __forceinline__ void find_rows() {
        row.source = twin = -1;
        if (move.block < 0 || lane >= p.shape.move_rows) return;
        int r = move.block * MOK_BLOCK_ROWS + move.first + lane;
        row = p.rows[r];
        if (p.twin) twin = p.twin[r];
    }

    // Behind what all lanes have stored.
    __device__ __forceinline__ void raise() {
        __syncwarp();
        if (lane == 0 && unraised) counter_raise(unraised);
        unraised = NULL;
    }

    // Until the rows' places in the ring are free: rows before these there have been pushed, by their down tiles. Others may
    // wait for the rows that this warp has moved last.
    __device__ __forceinline__ void wait_for_room(int block) {
        int before = mok_block_before(&p.shape, p.plan, pass, block);
        if (before < 0) return;
        raise();
        if (lane == 0) mok_wait_for(p, mok_push_wait(&p.shape, before));
        __syncwarp();
    }

    template <int AT_ONCE> __device__ __forceinline__ void copy(uint4 *to, const uint4 *from) {
        copy_rows<AT_ONCE>(
            to, from, p.shape.move_rows, p.shape.hidden / 8, [&] { raise(); }, [&] { find_rows(); });
    }

    // Until no rows are left. It waits only for rows before these in their places, whose tiles come earlier.
    __device__ __forceinline__ void run() {
        take();
        find_block();
        find_rows();
        while (move.block >= 0) {
            int block = move.block;
            wait_for_room(block);
            size_t H = (size_t)p.shape.hidden, at = mok_ring_row(&p.shape, block) + (size_t)move.first;
            const uint4 *from = pull_source(p, row, twin);
            __syncwarp(); // what one lane has found ready, all read
            mok_delay(p, (unsigned)(block * 128 + move.first));
            find_block();
            if (H / 8 > 32 * PULL_LOADS / 2)
                copy<1>((uint4 *)(p.x_rows + at * H), from);
            else
                copy<2>((uint4 *)(p.x_rows + at * H), from);
            unraised = p.counters[MOK_READY] + block;
        }
        raise();
    }
};

static __device__ __forceinline__ void pull_all(const struct mok_parameters &p, enum mok_pass pass) {
    puller(p, pass).run();
}

#endif

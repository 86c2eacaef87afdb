// Moving: rows of tokens from the ranks that have them into the ring of the one that has their experts. Any number of
// warps take groups of rows in order.
//
// Rows are stored by plain accesses and loaded by TMA, in other blocks: those, having seen the counter, put a fence between
// (copies_fence).
#ifndef MOK_KERNELS_CUDA_MOK_PULL_CUH
#define MOK_KERNELS_CUDA_MOK_PULL_CUH

#include "kernels/cuda/mok_record.cuh"
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

// Copies `rows` rows of `units` times 16 bytes to consecutive rows. Lane r knows where row r comes from; NULL: zeros. Half
// of a lane's loads are of the second piece of a row; of short rows, which have none, of the next row. loading() is called
// when the first loads are under way, between() behind the first rows.
template <class Loading, class Between>
static __device__ __forceinline__ void copy_rows(uint4 *to, const uint4 *from, int rows, int units,
                                                 const Loading &loading, const Between &between) {
    const int each = PULL_LOADS / 2, piece = 32 * each;
    int lane = (int)threadIdx.x % 32, pair = units <= piece; // 1: of rows
#pragma unroll 1
    for (int row = 0; row < rows; row += 1 + pair) {
        const uint4 *one = (const uint4 *)__shfl_sync(ALL_LANES, (unsigned long long)from, row);
        const uint4 *other = (const uint4 *)__shfl_sync(ALL_LANES, (unsigned long long)from, row + pair);
#pragma unroll 1
        for (int first = lane; first - lane < units; first += 2 * piece) {
            int second = pair ? first : first + piece;
            uint4 words[2][each];
#pragma unroll
            for (int i = 0; i < each; i++)
                words[0][i] = load_or_zeros(one && first + 32 * i < units ? one + first + 32 * i : NULL);
#pragma unroll
            for (int i = 0; i < each; i++)
                words[1][i] = load_or_zeros(other && second + 32 * i < units ? other + second + 32 * i : NULL);
            if (row == 0 && first == lane) loading();
#pragma unroll
            for (int i = 0; i < each; i++)
                if (first + 32 * i < units) to[row * units + first + 32 * i] = words[0][i];
#pragma unroll
            for (int i = 0; i < each; i++)
                if (second + 32 * i < units && row + pair < rows)
                    to[(row + pair) * units + second + 32 * i] = words[1][i];
        }
        if (row == 0) between();
    }
}

// ---- groups of rows ----

// A warp that moves. While it copies the rows of one ticket, what it needs for the next one comes in, step by step: the
// ticket, its row block, its rows' sources; and the counter of the one before is raised, which waits until all its rows
// are in memory.
template <enum mok_pass PASS> struct puller {
    const struct mok_parameters &p;
    const struct mok_plan plan;
    const int lane;
    int ahead;         // lane 0: the ticket behind next
    int next;          // first row of the next ticket; -1: none is left
    int source, token; // of this lane's row; source -1: zeros
    int twin;
    int unraised;     // row block of the ticket before; -1: its counter has been raised
    const int number; // among those that pull (mok_lane)

    __device__ __forceinline__ puller(const struct mok_parameters &p, int number)
        : p(p), plan(mok_plan_of(p)), lane((int)threadIdx.x % 32), ahead(0), next(-1), source(-1), token(0), twin(-1),
          unraised(-1), number(number) {}

    __device__ __forceinline__ void take() {
        if (lane == 0) ahead = atomicAdd(p.tickets[MOK_NEXT_PULL], 1);
    }
    __device__ __forceinline__ void find_block() {
        int ticket = __shfl_sync(ALL_LANES, ahead, 0);
        next = -1;
        if (ticket >= mok_move_total(&p.shape, &plan)) return;
        struct mok_move move = mok_move_at(&p.shape, &plan, PASS, ticket);
        next = move.block * MOK_BLOCK_ROWS + move.first;
        take();
    }
    __device__ __forceinline__ void find_rows() {
        source = twin = -1;
        if (next < 0 || lane >= p.shape.move_rows) return;
        struct mok_row row = p.plan.rows[next + lane];
        source = row.source;
        token = row.slot / p.shape.top_k;
        if (p.plan.twin) twin = p.plan.twin[next + lane];
    }

    // Behind what all lanes have stored.
    __device__ __forceinline__ void raise() {
        __syncwarp();
        if (lane == 0 && unraised >= 0) counter_raise(p.counters[MOK_READY] + unraised);
        unraised = -1;
    }

    // Until the rows' places in the ring are free. Rows before these there have been pushed by their output tiles; in
    // backward weight gradients have read them too. Others may wait for the rows that this warp has moved last.
    __device__ __forceinline__ void wait_for_room(int block) {
        int before = mok_block_before(&p.shape, &plan, PASS, block);
        if (before < 0) return;
        raise();
        if (lane == 0) {
            struct mok_wait waits[MOK_MOST_WAITS];
            int count = mok_pull_waits(&p.shape, &plan, PASS, block, waits);
            mok_wait_for(p, mok_push_wait(&p.shape, before));
            for (int i = 0; i < count; i++)
                if (waits[i].kind != MOK_PUSHED) mok_wait_for(p, waits[i]);
        }
        __syncwarp();
    }

    // If another row of this rank has brought the token already, that one's copy in the ring is where it comes from.
    __device__ __forceinline__ void look_for_twin() {
        int block = twin / MOK_BLOCK_ROWS;
        if (twin >= 0 && counter_read(p.counters[MOK_READY] + block) >= mok_groups(&p.shape)) {
            source = p.shape.ranks;
            token = (int)mok_ring_row(&p.shape, block) + twin % MOK_BLOCK_ROWS;
        }
        __syncwarp(); // what one lane has found ready, all read
    }

    // Where this lane's row comes from: `at` of its rank's symmetric memory, or the ring.
    __device__ __forceinline__ const uint4 *row_at(const real *ring, size_t at) const {
        if (source < 0) return NULL;
        const real *rows = source == p.shape.ranks ? ring : (const real *)(p.peers.base[source] + at);
        return (const uint4 *)(rows + (size_t)token * (size_t)p.shape.hidden);
    }

    // The ticket's rows of x or dy, which are at `at` of a rank's symmetric memory, to the ring.
    template <class Between>
    __device__ __forceinline__ void copy(real *ring, size_t at, int first, const Between &between) {
        size_t to = mok_ring_row(&p.shape, first / MOK_BLOCK_ROWS) + (size_t)(first % MOK_BLOCK_ROWS);
        copy_rows((uint4 *)(ring + to * (size_t)p.shape.hidden), row_at(ring, at), p.shape.move_rows,
                  p.shape.hidden / 8, [&] { raise(); }, between);
    }

    // The ticket's rows, of which this lane has one, are about to come.
    __device__ __forceinline__ void record_begin(int first) const {
        int block = first / MOK_BLOCK_ROWS, matrices = 1 + mok_pull_replays(&p.shape, PASS, block);
        bool far = source >= 0 && source != plan.rank && source != p.shape.ranks;
        int rows = __popc(__ballot_sync(ALL_LANES, far));
        struct mok_task task = {-1, block, first % MOK_BLOCK_ROWS, plan.block_expert[block]};
        int bytes = rows * matrices * p.shape.hidden * (int)sizeof(real);
        if (lane == 0) mok_record_begin(p, mok_own_lane(MOK_PULLER, number), task, bytes);
    }

    // Until no rows are left. It waits only for rows before these in their places, whose tiles come earlier.
    __device__ __forceinline__ void run() {
        take();
        find_block();
        find_rows();
        while (next >= 0) {
            int first = next, block = first / MOK_BLOCK_ROWS;
            wait_for_room(block);
            look_for_twin();
            mok_delay(p, (unsigned)first);
            if (MOK_RECORDED) record_begin(first);
            find_block();
            auto find_next = [&] { find_rows(); };
            if (PASS == MOK_FORWARD) {
                copy(p.x_rows, p.x_at, first, find_next);
            } else {
                if (mok_pull_replays(&p.shape, PASS, block)) copy(p.x_rows, p.x_at, first, [] {});
                copy(p.dy_rows, p.dy_at, first, find_next);
            }
            unraised = block;
            if (MOK_RECORDED && lane == 0) mok_record_end(p, mok_own_lane(MOK_PULLER, number));
        }
        raise();
    }
};

// number: of this warp among those that pull (mok_lane).
template <enum mok_pass PASS>
static __device__ __forceinline__ void pull_all(const struct mok_parameters &p, int number) {
    puller<PASS>(p, number).run();
}

#endif

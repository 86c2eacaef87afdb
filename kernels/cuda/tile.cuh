// Products by tiles of 128 rows and 256 columns on Hopper: the core of the megakernel and of the grouped products.
//
// One block per multiprocessor takes tasks, tiles of some product, from a counter until none is left. Of its three
// warpgroups the first feeds: warp 0 takes tasks and loads their factors by TMA, 64 terms of the sums at a time, into a
// ring; warp 1 is the kernel's own; warps 2 and 3 store results, one for each of the other two warpgroups, the
// multipliers, which have 64 rows of the tile each. Results leave the multipliers' registers through a ring of staging
// slots of 64 rows and 128 bytes, 64 columns rounded or 32 as they are, so that the next tile is multiplied while they
// are stored.
//
//   loader --tasks--> multipliers, storers       loader --factors--> multipliers --results--> storers
//
// Every element is summed in ascending order of its terms in one accumulator: the same bits whatever tile it is in.
#ifndef MOK_KERNELS_CUDA_TILE_CUH
#define MOK_KERNELS_CUDA_TILE_CUH

#include <string.h>

#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/tensor_map.h"
#include "kernels/cuda/wgmma.cuh"

enum { TILE_ROWS = 128, TILE_COLUMNS = 256, TILE_DEPTH = 64, TILE_STAGES = 3, HALF_ROWS = 64 };
enum { BOX_ROWS = MATRIX_BOX, BOX_BYTES = BOX_ROWS * CHUNK_ROW_BYTES };
enum { STAGING_SLOTS = 5, TASK_SLOTS = 2 };
enum { TILE_THREADS = 3 * WARPGROUP, MULTIPLIER_WARPS = 8, TASK_READERS = MULTIPLIER_WARPS + 2 };
enum { MULTIPLIERS_BARRIER = 1 }; // of the block's hardware

// 64 terms of a tile: of a, boxes of 64 rows (or, where a is read along its rows, 64 columns); of b, four such.
struct tile_stage {
    char a[TILE_ROWS / BOX_ROWS][BOX_BYTES], b[TILE_COLUMNS / BOX_ROWS][BOX_BYTES];
};

// Task: 16 bytes, of which the first are an int, below 0 in the task that says that none is left. The whole begins at a
// multiple of 1024 bytes where a kernel has no other shared memory.
template <class Task> struct tile_shared {
    alignas(1024) struct tile_stage stages[TILE_STAGES];
    char staging[2][STAGING_SLOTS][BOX_BYTES];
    int4 tasks[TASK_SLOTS];
    struct ring_barriers<TASK_SLOTS> task_barriers;
    struct ring_barriers<TILE_STAGES> stage_barriers;
    struct ring_barriers<STAGING_SLOTS> staging_barriers[2];

    __device__ void init() {
        task_barriers.init(TASK_READERS);
        stage_barriers.init(MULTIPLIER_WARPS);
        for (int half = 0; half < 2; half++) staging_barriers[half].init(1, MULTIPLIER_WARPS / 2);
    }
};

// ---- tasks ----

template <class Task> static __device__ __forceinline__ Task task_of(int4 words) {
    Task task;
    static_assert(sizeof task == sizeof words, "a task is read in one load");
    memcpy(&task, &words, sizeof task);
    return task;
}

template <class Task> struct tile_reader {
    struct ring_place<TASK_SLOTS> place;

    // false: none is left. By a whole warp.
    __device__ __forceinline__ bool next(struct tile_shared<Task> *shared, struct lost_wait *lost, Task *task) {
        barrier_wait(shared_address(&shared->task_barriers.full[place.stage]), place.phase, lost, WAIT_TILE_TASK);
        uint4 words = {};
        __syncwarp(); // none of the warp looks at the barrier any more
        if (threadIdx.x % 32 == 0) {
            words = shared_load_uint4(shared_address(&shared->tasks[place.stage]));
            barrier_arrive(shared_address(&shared->task_barriers.empty[place.stage]));
        }
        int4 told = {(int)__shfl_sync(ALL_LANES, words.x, 0), (int)__shfl_sync(ALL_LANES, words.y, 0),
                     (int)__shfl_sync(ALL_LANES, words.z, 0), (int)__shfl_sync(ALL_LANES, words.w, 0)};
        place.next();
        *task = task_of<Task>(told);
        return told.x >= 0;
    }
};

// ---- loading ----

// Where the factors of a tile begin. a is read along its columns, of 128 rows from a_row on; or along its rows from a_row
// on, 128 columns from a_column on. b is read along its columns, of two times 128 rows, from b_row and b_row_2 on; or
// along its rows from b_row on, 256 columns from b_column on. Terms of the last step that a does not have are zeros there;
// in b they may be rows of the next matrix, which must be finite.
struct tile_factors {
    const CUtensorMap *a, *b;
    int a_row, b_row, b_row_2, b_column;
    int steps; // of TILE_DEPTH terms, at least one
    bool b_rows;
    bool a_rows = false;
    int a_column = 0;
};

static __device__ __forceinline__ void tile_load_step(struct tile_stage *stage, const struct tile_factors &f, int step,
                                                      uint32_t full) {
    int term = step * TILE_DEPTH;
#pragma unroll
    for (int i = 0; i < TILE_ROWS / BOX_ROWS; i++)
        tma_load(shared_address(stage->a[i]), f.a, f.a_rows ? f.a_column + BOX_ROWS * i : term,
                 f.a_row + (f.a_rows ? term : BOX_ROWS * i), full);
#pragma unroll
    for (int i = 0; i < TILE_COLUMNS / BOX_ROWS; i++) {
        int row = (i < 2 ? f.b_row : f.b_row_2) + BOX_ROWS * (i % 2);
        tma_load(shared_address(stage->b[i]), f.b, f.b_rows ? f.b_column + BOX_ROWS * i : term,
                 f.b_rows ? f.b_row + term : row, full);
    }
}

// The loader, one thread. look(number) is task `number`; wait(task) waits until its factors are there, factors(task)
// says where. The next task is taken while one is loaded.
template <class Task, class Look, class Wait, class Factors>
static __device__ __forceinline__ void tile_load_all(struct tile_shared<Task> *shared, int32_t *tickets,
                                                     struct lost_wait *lost, const Look &look, const Wait &wait,
                                                     const Factors &factors) {
    const int look_step = 3; // by then its number has come
    struct ring_place<TASK_SLOTS> place;
    struct ring_place<TILE_STAGES> stage;
    int4 next = look(atomicAdd(tickets, 1));
    for (;;) {
        barrier_wait(shared_address(&shared->task_barriers.empty[place.stage]), place.phase ^ 1, lost,
                     WAIT_TILE_TASK_ROOM);
        shared->tasks[place.stage] = next;
        barrier_arrive(shared_address(&shared->task_barriers.full[place.stage]));
        place.next();
        if (next.x < 0) return;
        int number = atomicAdd(tickets, 1);
        Task task = task_of<Task>(next);
        wait(task);
        struct tile_factors f = factors(task);
#pragma unroll 1
        for (int step = 0; step < f.steps; step++) {
            uint32_t full = shared_address(&shared->stage_barriers.full[stage.stage]);
            barrier_wait(shared_address(&shared->stage_barriers.empty[stage.stage]), stage.phase ^ 1, lost,
                         WAIT_TILE_ROOM);
            barrier_arrive_expect(full, sizeof(struct tile_stage));
            tile_load_step(&shared->stages[stage.stage], f, step, full);
            stage.next();
            if (step == min(look_step, f.steps - 1)) next = look(number);
        }
    }
}

// ---- multiplying ----

// A multiplier warpgroup's part of a product, in registers as wgmma.cuh has them.
template <class Task> struct tile_multiplier {
    struct tile_shared<Task> *const shared;
    struct lost_wait *const lost;
    const int half, warp, lane;
    struct ring_place<TILE_STAGES> stage;
    struct ring_place<STAGING_SLOTS> slot;
    float d[TILE_COLUMNS / 2];

    __device__ __forceinline__ tile_multiplier(struct tile_shared<Task> *shared, struct lost_wait *lost, int half,
                                               int warp)
        : shared(shared), lost(lost), half(half), warp(warp), lane((int)threadIdx.x % 32) {}

    // This thread's upper row of the tile; the lower one is 8 below.
    __device__ __forceinline__ int row() const { return half * HALF_ROWS + warp * 16 + lane / 4; }

    // Zeros in place of a stage's terms from `first` on; both factors are read along their rows. By both multipliers, each
    // of which has its part of a to itself and clears one half of b.
    __device__ __forceinline__ void clear_terms(struct tile_stage *s, int first) {
        uint32_t a = shared_address(s->a[half]), b = shared_address(s->b[2 * half]);
#pragma unroll 1
        for (int at = first * CHUNK_ROW_BYTES + (warp * 32 + lane) * 16; at < BOX_BYTES; at += WARPGROUP * 16) {
            shared_store_zeros(a + at);
            shared_store_zeros(b + at);
            shared_store_zeros(b + BOX_BYTES + at);
        }
        copies_fence_shared();
        __syncwarp();
        block_barrier_wait(MULTIPLIERS_BARRIER, 2 * WARPGROUP);
    }

    // d = the tile's sums over so many steps. Where both factors are read along their rows, only the first last_terms
    // terms of the last step count: behind them may lie anything.
    template <bool A_ROWS, bool B_ROWS>
    __device__ __forceinline__ void multiply(int steps, int last_terms = TILE_DEPTH) {
        const uint32_t stage_size = sizeof(struct tile_stage) >> 4;
        const uint32_t a_first = wgmma_descriptor(shared_address(shared->stages[0].a[half]), A_ROWS ? BOX_ROWS : 0);
        const uint32_t b_first = wgmma_descriptor(shared_address(shared->stages[0].b[0]), BOX_ROWS);
        const uint32_t a_step = A_ROWS ? WGMMA_ROW_STEP : WGMMA_COLUMN_STEP;
        const uint32_t b_step = B_ROWS ? WGMMA_ROW_STEP : WGMMA_COLUMN_STEP;
        const int part_step = A_ROWS && B_ROWS && last_terms < TILE_DEPTH ? steps - 1 : -1;
        uint32_t read = 0; // barrier of the stage before
        int step = 0;
        do {
            barrier_wait(shared_address(&shared->stage_barriers.full[stage.stage]), stage.phase, lost, WAIT_TILE_FULL);
            if (A_ROWS && B_ROWS && step == part_step) clear_terms(&shared->stages[stage.stage], last_terms);
            uint32_t a = a_first + stage.stage * stage_size, b = b_first + stage.stage * stage_size;
            wgmma_read(d);
            wgmma_begin();
#pragma unroll
            for (int i = 0; i < TILE_DEPTH / 16; i++)
                wgmma_wide<A_ROWS, B_ROWS>(d, a + i * a_step, b + i * b_step, step | i);
            wgmma_commit();
            wgmma_read(d);
            wgmma_wait<1>();
            if (step && lane == 0) barrier_arrive(read);
            read = shared_address(&shared->stage_barriers.empty[stage.stage]);
            stage.next();
        } while (++step < steps);
        wgmma_wait<0>();
        wgmma_read(d);
        if (lane == 0) barrier_arrive(read);
    }

    // The next staging slot, when it is free.
    __device__ __forceinline__ uint32_t staging_room() {
        barrier_wait(shared_address(&shared->staging_barriers[half].empty[slot.stage]), slot.phase ^ 1, lost,
                     WAIT_TILE_STAGING_ROOM);
        return shared_address(shared->staging[half][slot.stage]);
    }
    // This warp's rows are in it.
    __device__ __forceinline__ void staged() {
        copies_fence_shared();
        __syncwarp();
        if (lane == 0) barrier_arrive(shared_address(&shared->staging_barriers[half].full[slot.stage]));
        slot.next();
    }

    // 64 columns, rounded, into the next staging slot: pairs of columns in the order of d.
    __device__ __forceinline__ void stage_result(const uint32_t (&pairs)[HALF_ROWS / 4]) {
        int piece = lane % 8, quarter = lane / 8;
        uint32_t row = staging_room() + (16 * warp + quarter % 2 * 8 + piece) * CHUNK_ROW_BYTES;
#pragma unroll
        for (int j = 0; j < 4; j++)
            shared_store_matrices(row + (((2 * j + quarter / 2) ^ piece) << 4), pairs[4 * j], pairs[4 * j + 1],
                                  pairs[4 * j + 2], pairs[4 * j + 3]);
        staged();
    }

    // Columns first .. first + 63 of d, rounded.
    __device__ __forceinline__ void round(uint32_t (&pairs)[HALF_ROWS / 4], int first) const {
#pragma unroll
        for (int i = 0; i < HALF_ROWS / 4; i++) {
            const float *e = d + first / 2 + 2 * i;
            __nv_bfloat162 pair = __floats2bfloat162_rn(e[0], e[1]);
            pairs[i] = *(const uint32_t *)&pair;
        }
    }

    // All of d, rounded.
    __device__ __forceinline__ void stage_all() {
#pragma unroll
        for (int first = 0; first < TILE_COLUMNS; first += CHUNK_COLUMNS) {
            uint32_t pairs[HALF_ROWS / 4];
            round(pairs, first);
            stage_result(pairs);
        }
    }

    // 32 columns of d from `first` on, not rounded, into the next staging slot. Rows of odd number store their groups of
    // eight columns in the order 2 3 0 1: then half a warp, which stores at once, meets every bank once.
    __device__ __forceinline__ void stage_sums(int first) {
        bool odd = lane / 4 % 2;
        int piece = lane % 4 / 2 ^ lane / 4 ^ (odd ? 4 : 0);
        uint32_t row = staging_room() + (16 * warp + lane / 4) * CHUNK_ROW_BYTES + lane % 2 * 8;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float *even_row = d + first / 2 + 4 * i, *odd_row = d + first / 2 + 4 * (i ^ 2);
            uint32_t to = row + ((2 * i ^ piece) << 4);
            shared_store_float2(to, odd ? odd_row[0] : even_row[0], odd ? odd_row[1] : even_row[1]);
            shared_store_float2(to + 8 * CHUNK_ROW_BYTES, odd ? odd_row[2] : even_row[2],
                                odd ? odd_row[3] : even_row[3]);
        }
        staged();
    }

    // All of d, not rounded.
    __device__ __forceinline__ void stage_all_sums() {
#pragma unroll
        for (int first = 0; first < TILE_COLUMNS; first += ACCUM_BOX_COLUMNS) stage_sums(first);
    }
};

// ---- storing: a warp for each multiplier ----

template <class Task> struct tile_storer {
    struct tile_shared<Task> *const shared;
    struct lost_wait *const lost;
    const int half, lane;
    struct ring_place<STAGING_SLOTS> slot;

    __device__ __forceinline__ tile_storer(struct tile_shared<Task> *shared, struct lost_wait *lost, int half)
        : shared(shared), lost(lost), half(half), lane((int)threadIdx.x % 32) {}

    __device__ __forceinline__ uint32_t wait_staged() {
        barrier_wait(shared_address(&shared->staging_barriers[half].full[slot.stage]), slot.phase, lost,
                     WAIT_TILE_STAGED);
        return shared_address(shared->staging[half][slot.stage]);
    }
    __device__ __forceinline__ void release(int stage) {
        barrier_arrive(shared_address(&shared->staging_barriers[half].empty[stage]));
    }

    // The tile's next `chunks` results by TMA: store(chunk, from), by lane 0. As many copies are under way as there are
    // slots but one. Later the lane may wait for what it has stored.
    template <class Store> __device__ __forceinline__ void store_boxes(int chunks, const Store &store) {
        const int most = STAGING_SLOTS - 1;
        int oldest = slot.stage, under_way = 0;
        auto release_oldest = [&] {
            release(oldest);
            oldest = oldest + 1 == STAGING_SLOTS ? 0 : oldest + 1;
            under_way--;
        };
#pragma unroll 1
        for (int chunk = 0; chunk < chunks; chunk++) {
            uint32_t from = wait_staged();
            slot.next();
            if (lane == 0) {
                store(chunk, from);
                bulk_commit();
                if (++under_way > most) {
                    bulk_wait_read<most>();
                    release_oldest();
                }
            }
            __syncwarp(); // no lane runs ahead of the slots
        }
        if (lane == 0) bulk_wait_read<0>();
        while (lane == 0 && under_way) release_oldest();
        __syncwarp();
    }

    // The tile's next `chunks` results row by row, 128 bytes each: row(r) is where row r of this half goes, NULL: nowhere;
    // by the lane r % 32. 64 columns further at the next chunk, of `columns` in all.
    template <class Row> __device__ __forceinline__ void store_rows(int chunks, int columns, const Row &row) {
        unsigned long long upper = (unsigned long long)row(lane), lower = (unsigned long long)row(lane + 32);
#pragma unroll 1
        for (int chunk = 0; chunk < chunks; chunk++) {
            uint32_t from = wait_staged();
            int piece = lane % 8, column = chunk * CHUNK_COLUMNS + 8 * piece;
#pragma unroll 4
            for (int i = 0; i < HALF_ROWS / 4; i++) {
                int r = 4 * i + lane / 8;
                real *to = (real *)__shfl_sync(ALL_LANES, i < 8 ? upper : lower, r % 32);
                uint4 words = shared_load_uint4(from + r * CHUNK_ROW_BYTES + ((piece ^ (r & 7)) << 4));
                if (to && column < columns) *(uint4 *)(to + column) = words;
            }
            __syncwarp();
            if (lane == 0) release(slot.stage);
            slot.next();
        }
    }
};

// ---- the block ----

// load() by one thread, own() by a warp, store(half) by a warp, multiply(half, warp) by a warpgroup.
template <int FEEDER_REGISTERS, int MULTIPLIER_REGISTERS, class Task, class Load, class Own, class Store,
          class Multiply>
static __device__ __forceinline__ void tile_block_run(struct tile_shared<Task> *shared, const Load &load,
                                                      const Own &own, const Store &store, const Multiply &multiply) {
    // As many registers as the launch has taken for all. More, and a warpgroup would wait for them for ever.
    static_assert(2 * MULTIPLIER_REGISTERS + FEEDER_REGISTERS <= 3 * 168, "65536 registers for 384 threads");
    // Through a shuffle, so that the compiler knows them to be the same in all lanes.
    int warpgroup = __shfl_sync(ALL_LANES, (int)threadIdx.x / WARPGROUP, 0);
    int warp = __shfl_sync(ALL_LANES, (int)threadIdx.x / 32 % 4, 0);
    if (threadIdx.x == 0) {
        shared->init();
        barrier_init_fence();
    }
    __syncthreads();
    if (warpgroup == 0) {
        registers_give<FEEDER_REGISTERS>();
        if (warp == 0 && threadIdx.x % 32 == 0) load();
        if (warp == 1) own();
        if (warp >= 2) store(warp - 2);
    } else {
        registers_take<MULTIPLIER_REGISTERS>();
        multiply(warpgroup - 1, warp);
    }
}

#endif

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
// A tile may have its first 64 rows only. Then the others are not loaded, their multipliers let its stages go by, and their
// storer skips it.
//
// Every element is summed in ascending order of its terms in one accumulator: the same bits whatever tile it is in.
#ifndef MOK_KERNELS_CUDA_TILE_CUH
#define MOK_KERNELS_CUDA_TILE_CUH

#include <string.h>

#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/tensor_map.h"
#include "kernels/cuda/wgmma.cuh"

enum { TILE_ROWS = 128, TILE_COLUMNS = 256, TILE_DEPTH = 64, TILE_STAGES = 3, HALF_ROWS = 64 };
// From so many terms on a wave of tiles had better read few rows and columns, with fewer write what lies together: on an H200
// the order row by row was as fast or faster up to 768 terms, that by columns of blocks at 1024.
enum { TILE_MANY_TERMS = 1024 };
enum { BOX_ROWS = MATRIX_BOX, BOX_BYTES = BOX_ROWS * CHUNK_ROW_BYTES };
enum { STAGING_SLOTS = 5, TASK_SLOTS = 2 };
enum { TILE_THREADS = 3 * WARPGROUP, MULTIPLIER_WARPS = 8, TASK_READERS = MULTIPLIER_WARPS + 2 };
enum { MULTIPLIERS_BARRIER = 1 }; // of the block's hardware

// 64 terms of a tile: of a, boxes of 64 rows (or, where a is read along its rows, 64 columns); of b, four such.
struct tile_stage {
    char a[TILE_ROWS / BOX_ROWS][BOX_BYTES], b[TILE_COLUMNS / BOX_ROWS][BOX_BYTES];
};

// Task: a multiple of 16 bytes, of which the first are an int, below 0 in the task that says that none is left. The whole
// begins at a multiple of 1024 bytes where a kernel has no other shared memory.
template <class Task> struct tile_shared {
    static_assert(sizeof(Task) % 16 == 0, "a task is read in pieces of 16 bytes");
    alignas(1024) struct tile_stage stages[TILE_STAGES];
    char staging[2][STAGING_SLOTS][BOX_BYTES];
    alignas(16) Task tasks[TASK_SLOTS];
    struct ring_barriers<TASK_SLOTS> task_barriers;
    struct ring_barriers<TILE_STAGES> stage_barriers;
    struct ring_barriers<STAGING_SLOTS> staging_barriers[2];

    __device__ void init() {
        task_barriers.init(TASK_READERS);
        stage_barriers.init(MULTIPLIER_WARPS); // or storers for them: tile_storer::release_stage
        for (int half = 0; half < 2; half++) staging_barriers[half].init(1, MULTIPLIER_WARPS / 2);
    }
};

// ---- pairs of rounded numbers ----

static __device__ __forceinline__ uint32_t pack(float x, float y) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
    return *(const uint32_t *)&pair;
}
static __device__ __forceinline__ float2 unpack(uint32_t pair) {
    return __bfloat1622float2(*(const __nv_bfloat162 *)&pair);
}

// ---- tasks ----

template <class Task> struct tile_reader {
    struct ring_place<TASK_SLOTS> place;

    // false: none is left. By a whole warp.
    __device__ __forceinline__ bool next(struct tile_shared<Task> *shared, struct lost_wait *lost, Task *task) {
        const int pieces = sizeof(Task) / sizeof(uint4);
        barrier_wait(shared_address(&shared->task_barriers.full[place.stage]), place.phase, lost, WAIT_TILE_TASK);
        uint4 told[pieces];
#pragma unroll
        for (int i = 0; i < pieces; i++)
            told[i] = shared_load_uint4(shared_address(&shared->tasks[place.stage]) + i * (int)sizeof(uint4));
        __syncwarp(); // all lanes have read it
        if (threadIdx.x % 32 == 0) barrier_arrive(shared_address(&shared->task_barriers.empty[place.stage]));
        place.next();
        memcpy(task, told, sizeof *task);
        return (int)told[0].x >= 0;
    }
};

// ---- loading ----

// How the factors of a tile are read: along the columns of both; along the columns of a and the rows of b; along the rows
// of both.
enum tile_read { READ_COLUMNS, READ_ROWS_OF_B, READ_ROWS };

// Where they begin. a is read along its columns, of 128 rows from a_row on; or along its rows from a_row on, 128 columns
// from a_column on. b is read along its columns, of two times 128 rows, from b_row and b_row_2 on; or along its rows from
// b_row on, 256 columns from b_column on. b is matrix b_matrix of several (tensor_map_matrices) unless both are read along
// their rows. Terms of the last step that a matrix does not have are zeros.
struct tile_factors {
    const CUtensorMap *a, *b;
    int steps; // of TILE_DEPTH terms
    int a_row, a_column;
    int b_row, b_row_2, b_column, b_matrix;
    bool half; // only the first 64 rows of a, which is read along its columns
};

// Sums that a tile goes on from come before its factors, 32 columns of all rows in two boxes, three times in a stage.
enum { SUMS_IN_STAGE = 3, SUMS_PIECES = TILE_COLUMNS / ACCUM_BOX_COLUMNS };
enum { SUMS_STAGES = (SUMS_PIECES + SUMS_IN_STAGE - 1) / SUMS_IN_STAGE };

static __device__ __forceinline__ uint32_t sums_box(struct tile_stage *stage, int piece, int half) {
    return shared_address(stage) + (2 * (piece % SUMS_IN_STAGE) + half) * BOX_BYTES;
}

// By one thread.
template <class Task> struct tile_loader {
    struct tile_shared<Task> *const shared;
    struct lost_wait *const lost;
    struct ring_place<TILE_STAGES> place;

    __device__ __forceinline__ tile_loader(struct tile_shared<Task> *shared, struct lost_wait *lost)
        : shared(shared), lost(lost) {}

    // The next stage, when it is empty, for so many bytes, which full waits for.
    __device__ __forceinline__ struct tile_stage *begin(int bytes, uint32_t *full) {
        struct tile_stage *stage = &shared->stages[place.stage];
        *full = shared_address(&shared->stage_barriers.full[place.stage]);
        barrier_wait(shared_address(&shared->stage_barriers.empty[place.stage]), place.phase ^ 1, lost, WAIT_TILE_ROOM);
        barrier_arrive_expect(*full, bytes);
        place.next();
        return stage;
    }

    // For one way of reading alone: the loader has no time for a branch at every box.
    template <enum tile_read READ>
    static __device__ __forceinline__ void load_step(struct tile_stage *stage, const struct tile_factors &f, int term,
                                                     uint32_t full) {
        uint32_t a = shared_address(stage->a), b = shared_address(stage->b);
#pragma unroll
        for (int i = 0; i < TILE_ROWS / BOX_ROWS; i++, a += BOX_BYTES) {
            if (READ != READ_ROWS && i > 0 && f.half) break;
            if constexpr (READ == READ_ROWS)
                tma_load(a, f.a, f.a_column + BOX_ROWS * i, f.a_row + term, full);
            else
                tma_load(a, f.a, term, f.a_row + BOX_ROWS * i, full);
        }
#pragma unroll
        for (int i = 0; i < TILE_COLUMNS / BOX_ROWS; i++, b += BOX_BYTES) {
            if constexpr (READ == READ_COLUMNS)
                tma_load(b, f.b, term, (i < 2 ? f.b_row : f.b_row_2) + BOX_ROWS * (i % 2), f.b_matrix, full);
            else if constexpr (READ == READ_ROWS_OF_B)
                tma_load(b, f.b, f.b_column + BOX_ROWS * i, f.b_row + term, f.b_matrix, full);
            else
                tma_load(b, f.b, f.b_column + BOX_ROWS * i, f.b_row + term, full);
        }
    }

    // All steps of a tile, at least one; between() when some of them have been loaded.
    template <enum tile_read READ, class Between>
    __device__ __forceinline__ void load(const struct tile_factors &f, const Between &between) {
        const int between_step = min(3, f.steps - 1);
        const int bytes = sizeof(struct tile_stage) - (READ != READ_ROWS && f.half ? BOX_BYTES : 0);
#pragma unroll 1
        for (int step = 0; step < f.steps; step++) {
            uint32_t full;
            struct tile_stage *stage = begin(bytes, &full);
            load_step<READ>(stage, f, step * TILE_DEPTH, full);
            if (step == between_step) between();
        }
    }

    // The sums that the tile at row, column of a matrix goes on from.
    __device__ __forceinline__ void load_sums(const CUtensorMap *sums, int matrix, int row, int column) {
#pragma unroll 1
        for (int first = 0; first < SUMS_PIECES; first += SUMS_IN_STAGE) {
            uint32_t full;
            int end = min(first + SUMS_IN_STAGE, (int)SUMS_PIECES);
            struct tile_stage *stage = begin((end - first) * 2 * BOX_BYTES, &full);
            for (int piece = first; piece < end; piece++)
                for (int half = 0; half < 2; half++)
                    tma_load(sums_box(stage, piece, half), sums, column + piece * ACCUM_BOX_COLUMNS,
                             row + half * HALF_ROWS, matrix, full);
        }
    }
};

// Loads all tasks that there are. look(number) is task `number`; load(loader, task, between) waits for a task's factors
// and loads them, and calls between() once: then the next task is looked up, while loads are under way.
template <class Task, class Look, class Load>
static __device__ __forceinline__ void tile_load_all(struct tile_shared<Task> *shared, int32_t *tickets,
                                                     struct lost_wait *lost, const Look &look, const Load &load) {
    struct ring_place<TASK_SLOTS> place;
    struct tile_loader<Task> loader(shared, lost);
    Task next = look(atomicAdd(tickets, 1));
    for (;;) {
        barrier_wait(shared_address(&shared->task_barriers.empty[place.stage]), place.phase ^ 1, lost,
                     WAIT_TILE_TASK_ROOM);
        memcpy(&shared->tasks[place.stage], &next, sizeof next);
        barrier_arrive(shared_address(&shared->task_barriers.full[place.stage]));
        place.next();
        int first;
        memcpy(&first, &next, sizeof first);
        if (first < 0) return;
        int number = atomicAdd(tickets, 1); // which has come by the time it is looked up
        Task task = next;
        load(loader, task, [&] { next = look(number); });
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

    // The next stage, when it is full.
    __device__ __forceinline__ void wait_stage() const {
        barrier_wait(shared_address(&shared->stage_barriers.full[stage.stage]), stage.phase, lost, WAIT_TILE_FULL);
    }
    // This warp has read it.
    __device__ __forceinline__ void release_stage() {
        __syncwarp();
        if (lane == 0) barrier_arrive(shared_address(&shared->stage_barriers.empty[stage.stage]));
        stage.next();
    }

    // Lets so many stages go by, of a tile that has no rows in this half. It waits for each: a barrier tells two phases apart,
    // and not more.
    __device__ __forceinline__ void pass(int stages) {
#pragma unroll 1
        for (int i = 0; i < stages; i++) {
            wait_stage();
            release_stage();
        }
    }

    // Zeros in place of a stage's terms from `first` on; both factors are read along their rows. By both multipliers, each
    // of which has its part of a to itself and clears one half of b.
    __device__ __forceinline__ void clear_terms(struct tile_stage *s, int first) {
        uint32_t a = shared_address(s->a[half]), b = shared_address(s->b[2 * half]);
        block_barrier_wait(MULTIPLIERS_BARRIER, 2 * WARPGROUP); // both have read what was in the stage before
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

    // d = the tile's sums over so many steps, at least one; or, where it goes on from sums in d, those and these. Where both
    // factors are read along their rows, only the first last_terms terms of the last step count: behind them may lie
    // anything.
    template <bool A_ROWS, bool B_ROWS>
    __device__ __forceinline__ void multiply(int steps, bool goes_on = false, int last_terms = TILE_DEPTH) {
        const uint32_t stage_size = sizeof(struct tile_stage) >> 4;
        const uint32_t a_first = wgmma_descriptor(shared_address(shared->stages[0].a[half]), A_ROWS ? BOX_ROWS : 0);
        const uint32_t b_first = wgmma_descriptor(shared_address(shared->stages[0].b[0]), BOX_ROWS);
        const uint32_t a_step = A_ROWS ? WGMMA_ROW_STEP : WGMMA_COLUMN_STEP;
        const uint32_t b_step = B_ROWS ? WGMMA_ROW_STEP : WGMMA_COLUMN_STEP;
        const int part_step = A_ROWS && B_ROWS && last_terms < TILE_DEPTH ? steps - 1 : -1;
        uint32_t read = 0; // barrier of the stage before
        int step = 0;
        do {
            wait_stage();
            if (A_ROWS && B_ROWS && step == part_step) clear_terms(&shared->stages[stage.stage], last_terms);
            uint32_t a = a_first + stage.stage * stage_size, b = b_first + stage.stage * stage_size;
            wgmma_read(d);
            wgmma_begin();
#pragma unroll
            for (int i = 0; i < TILE_DEPTH / 16; i++)
                wgmma_wide<A_ROWS, B_ROWS>(d, a + i * a_step, b + i * b_step, goes_on | step | i);
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

    // The next staging slot, or one behind it, when it is free.
    __device__ __forceinline__ uint32_t staging_room() { return staging_room(slot); }
    __device__ __forceinline__ uint32_t staging_room(const struct ring_place<STAGING_SLOTS> &at) {
        barrier_wait(shared_address(&shared->staging_barriers[half].empty[at.stage]), at.phase ^ 1, lost,
                     WAIT_TILE_STAGING_ROOM);
        return shared_address(shared->staging[half][at.stage]);
    }
    // This warp's rows are in the next one.
    __device__ __forceinline__ void staged() {
        copies_fence_shared();
        __syncwarp();
        if (lane == 0) barrier_arrive(shared_address(&shared->staging_barriers[half].full[slot.stage]));
        slot.next();
    }

    // Pairs of rounded numbers, of 64 columns in the order of d, are rows of this warp's in a box. Where this lane's part of
    // the j-th 16 columns is.
    __device__ __forceinline__ uint32_t pairs_address(uint32_t box, int j) const {
        int piece = lane % 8, quarter = lane / 8;
        return box + (16 * warp + quarter % 2 * 8 + piece) * CHUNK_ROW_BYTES + (((2 * j + quarter / 2) ^ piece) << 4);
    }
    __device__ __forceinline__ void load_pairs(uint32_t *pairs, uint32_t box, int j) const {
        shared_load_matrices(pairs_address(box, j), pairs[0], pairs[1], pairs[2], pairs[3]);
    }
    __device__ __forceinline__ void store_pairs(uint32_t box, int j, const uint32_t *pairs) const {
        shared_store_matrices(pairs_address(box, j), pairs[0], pairs[1], pairs[2], pairs[3]);
    }

    // 64 columns, rounded, into the next staging slot.
    __device__ __forceinline__ void stage_result(const uint32_t (&pairs)[HALF_ROWS / 4]) {
        uint32_t box = staging_room();
#pragma unroll
        for (int j = 0; j < 4; j++) store_pairs(box, j, pairs + 4 * j);
        staged();
    }

    // Columns first .. first + 63 of d, rounded.
    __device__ __forceinline__ void round(uint32_t (&pairs)[HALF_ROWS / 4], int first) const {
#pragma unroll
        for (int i = 0; i < HALF_ROWS / 4; i++) {
            const float *e = d + first / 2 + 2 * i;
            pairs[i] = pack(e[0], e[1]);
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

    // 32 columns of sums are boxes too. Rows of odd number take their groups of eight columns in the order 2 3 0 1: then
    // half a warp, which reads or stores at once, meets every bank once. Where this lane's part of the i-th group is.
    __device__ __forceinline__ bool is_odd_row() const { return lane / 4 % 2; }
    __device__ __forceinline__ uint32_t sums_address(uint32_t box, int i) const {
        int piece = lane % 4 / 2 ^ lane / 4 ^ (is_odd_row() ? 4 : 0);
        return box + (16 * warp + lane / 4) * CHUNK_ROW_BYTES + lane % 2 * 8 + ((2 * i ^ piece) << 4);
    }

    // 32 columns of d from `first` on, not rounded, into a box.
    __device__ __forceinline__ void store_sums(uint32_t box, int first) {
        bool odd = is_odd_row();
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float *even_row = d + first / 2 + 4 * i, *odd_row = d + first / 2 + 4 * (i ^ 2);
            uint32_t to = sums_address(box, i);
            shared_store_float2(to, odd ? odd_row[0] : even_row[0], odd ? odd_row[1] : even_row[1]);
            shared_store_float2(to + 8 * CHUNK_ROW_BYTES, odd ? odd_row[2] : even_row[2],
                                odd ? odd_row[3] : even_row[3]);
        }
    }

    // All of d, not rounded.
    __device__ __forceinline__ void stage_all_sums() {
#pragma unroll
        for (int first = 0; first < TILE_COLUMNS; first += ACCUM_BOX_COLUMNS) {
            store_sums(staging_room(), first);
            staged();
        }
    }

    // Two groups of eight columns of d, upper and lower row, from where store_sums would have put them.
    __device__ __forceinline__ void read_sums(float *one, float *other, uint32_t box, int i) {
        bool odd = is_odd_row();
        uint32_t from = sums_address(box, i), from_other = sums_address(box, i ^ 2);
#pragma unroll
        for (int lower = 0; lower < 2; lower++) {
            float2 v = shared_load_float2(from + lower * 8 * CHUNK_ROW_BYTES);
            float2 w = shared_load_float2(from_other + lower * 8 * CHUNK_ROW_BYTES);
            one[2 * lower] = odd ? w.x : v.x;
            one[2 * lower + 1] = odd ? w.y : v.y;
            other[2 * lower] = odd ? v.x : w.x;
            other[2 * lower + 1] = odd ? v.y : w.y;
        }
    }

    // d = the sums that the loader has put before the tile's factors.
    __device__ __forceinline__ void read_all_sums() {
#pragma unroll
        for (int piece = 0; piece < SUMS_PIECES; piece++) {
            if (piece % SUMS_IN_STAGE == 0) wait_stage();
            uint32_t box = sums_box(&shared->stages[stage.stage], piece, half);
            float *to = d + piece * ACCUM_BOX_COLUMNS / 2;
            read_sums(to, to + 8, box, 0);
            read_sums(to + 4, to + 12, box, 1);
            if (piece % SUMS_IN_STAGE == SUMS_IN_STAGE - 1 || piece == SUMS_PIECES - 1) release_stage();
        }
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
    // A stage of the ring, in place of this storer's multiplier.
    __device__ __forceinline__ void release_stage(int stage) {
        barrier_arrive_many(shared_address(&shared->stage_barriers.empty[stage]), MULTIPLIER_WARPS / 2);
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
        if (warp == 0) {
            if (threadIdx.x % 32 == 0) load();
        } else if (warp == 1) {
            own();
        } else {
            store(warp - 2);
        }
    } else {
        registers_take<MULTIPLIER_REGISTERS>();
        multiply(warpgroup - 1, warp);
    }
}

#endif

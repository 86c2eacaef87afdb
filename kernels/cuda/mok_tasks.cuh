// What the megakernel's two passes have in common: where a task's rows are and what it waits for, gate and up, rows that
// are pushed, and how a pass begins.
#ifndef MOK_KERNELS_CUDA_MOK_TASKS_CUH
#define MOK_KERNELS_CUDA_MOK_TASKS_CUH

#include "kernels/cuda/mok_pull.cuh"
#include "kernels/cuda/tile.cuh"

// A task of the plan, with what its loader finds out for all who work on it.
struct alignas(16) mok_work {
    struct mok_task task;
    int32_t row;    // first one in the task's matrices: of the ring, or of own tokens
    int32_t steps;  // of TILE_DEPTH terms, a stage each
    int32_t chunks; // of a d hidden tile: stages behind them, with 64 columns of gate and up each; else 0
    bool added;     // a weight gradient that goes on from the present one
    bool half;      // the last 64 rows of the task's block are padding
};

static_assert((int)MOK_BLOCK_ROWS == (int)TILE_ROWS && (int)MOK_D_WEIGHT_ROWS == (int)TILE_ROWS,
              "a block is a tile's rows");
static_assert(2 * (int)MOK_GATE_UP_COLUMNS == (int)TILE_COLUMNS && (int)MOK_D_HIDDEN_COLUMNS == (int)TILE_COLUMNS &&
                  (int)MOK_OUT_COLUMNS == (int)TILE_COLUMNS && (int)MOK_D_WEIGHT_COLUMNS == (int)TILE_COLUMNS,
              "the plan's columns are a tile's");
static_assert((int)MOK_BLOCK_ROWS % (int)TILE_DEPTH == 0, "a block's rows are whole steps of a weight gradient");
static_assert((int)MOK_MANY_TERMS == (int)TILE_MANY_TERMS, "weight gradients come in the order of grouped products");

enum { RESULT_CHUNKS = TILE_COLUMNS / CHUNK_COLUMNS };

static __device__ __forceinline__ bool is_gate_up(const struct mok_task &task) {
    return task.kind == MOK_TASK_GATE_UP || task.kind == MOK_TASK_SHARED_GATE_UP;
}
static __device__ __forceinline__ bool is_d_hidden(const struct mok_task &task) {
    return task.kind == MOK_TASK_D_HIDDEN || task.kind == MOK_TASK_SHARED_D_HIDDEN;
}
static __device__ __forceinline__ bool is_d_w2(const struct mok_task &task) {
    return task.kind == MOK_TASK_D_W2 || task.kind == MOK_TASK_SHARED_D_W2;
}
static __device__ __forceinline__ bool is_d_weights(const struct mok_task &task) {
    return is_d_w2(task) || task.kind == MOK_TASK_D_W13 || task.kind == MOK_TASK_SHARED_D_W13;
}

// Whether a half of the task's rows has any that are no padding.
static __device__ __forceinline__ bool has_rows(const struct mok_work &w, int half) { return half == 0 || !w.half; }

static __device__ __forceinline__ const struct mok_maps &maps_of(const struct mok_parameters &p,
                                                                 const struct mok_task &task) {
    return task.expert < 0 ? p.shared : p.routed;
}

// ---- by the loader ----

// Of a weight gradient: the rows that it sums over. Where there are none and zeros are to be stored, a step of rows behind
// the last, which are loaded as zeros.
static __device__ __forceinline__ void find_terms(const struct mok_parameters &p, const struct mok_plan &plan,
                                                  struct mok_work *w) {
    int e = w->task.expert;
    w->added = !p.first_use;
    if (e < 0) {
        w->row = 0;
        w->steps = mok_ceil(plan.tokens, TILE_DEPTH);
    } else {
        struct mok_stretch blocks = mok_expert_stretch(&p.shape, &plan, e, w->task.block);
        w->row = (int)mok_ring_row(&p.shape, blocks.first);
        w->steps = mok_ceil(mok_stretch_rows(&plan, e, blocks), TILE_DEPTH); // padding behind them is zeros
        if (w->steps > 0 && blocks.first > plan.expert_block[e]) w->added = true;
    }
    if (w->steps > 0 || w->added) return;
    w->row = e < 0 ? 1 : p.shape.ring_rows; // without tokens their matrices have one row (mok_run.c)
    w->steps = 1;
}

static __device__ __forceinline__ struct mok_work
mok_work_at(const struct mok_parameters &p, const struct mok_plan &plan, enum mok_pass pass, int number) {
    if (number >= plan.task_total[pass]) return {{-1, 0, 0, 0}, 0, 0, 0, false, false};
    int4 words = __ldg((const int4 *)plan.tasks[pass] + number);
    struct mok_work w = {{words.x, words.y, words.z, words.w}, 0, 0, 0, false, false};
    if (is_d_weights(w.task)) {
        find_terms(p, plan, &w);
        return w;
    }
    int I = maps_of(p, w.task).inner, H = p.shape.hidden;
    w.row = w.task.expert < 0 ? w.task.block * MOK_BLOCK_ROWS : (int)mok_ring_row(&p.shape, w.task.block);
    w.steps = mok_ceil(is_gate_up(w.task) || is_d_hidden(w.task) ? H : pass == MOK_FORWARD ? I : 2 * I, TILE_DEPTH);
    if (is_d_hidden(w.task))
        w.chunks = mok_min(RESULT_CHUNKS, mok_ceil(I - w.task.tile * MOK_D_HIDDEN_COLUMNS, CHUNK_COLUMNS));
    int second = w.task.block * MOK_BLOCK_ROWS + HALF_ROWS;
    w.half = w.task.expert < 0 ? second >= plan.tokens : plan.rows[second].source < 0;
    return w;
}

// Until a task's factors are there.
static __device__ __forceinline__ void wait_for_factors(const struct mok_parameters &p, const struct mok_plan &plan,
                                                        enum mok_pass pass, const struct mok_task &task) {
    struct mok_wait waits[MOK_MOST_WAITS];
    int count = mok_task_waits(&p.shape, &plan, pass, task, waits);
    mok_delay(p, (unsigned)(task.kind * 31 + task.block * 7 + task.tile));
    bool recorded = false;
    for (int i = 0; MOK_RECORDED && i < count; i++) recorded = recorded || !mok_is_reached(p, waits[i]);
    if (recorded) mok_record_begin(p, mok_own_lane(MOK_LOADER, (int)blockIdx.x), task, 0);
    for (int i = 0; i < count; i++) mok_wait_for(p, waits[i]);
    if (recorded) mok_record_end(p, mok_own_lane(MOK_LOADER, (int)blockIdx.x));
    copies_fence();
}

// Gate and up of the same columns, side by side.
static __device__ __forceinline__ struct tile_factors gate_up_factors(const struct mok_maps &maps,
                                                                      const struct mok_work &w) {
    struct tile_factors f = {&maps.x, &maps.w13, w.steps, w.row};
    f.half = w.half;
    f.b_row = w.task.tile * MOK_GATE_UP_COLUMNS;
    f.b_row_2 = f.b_row + maps.inner;
    f.b_matrix = max(w.task.expert, 0);
    return f;
}

// Of y = hidden W2, or dx = d_gate_up W13.
static __device__ __forceinline__ struct tile_factors out_factors(const CUtensorMap *rows, const CUtensorMap *weights,
                                                                  const struct mok_work &w) {
    struct tile_factors f = {rows, weights, w.steps, w.row};
    f.half = w.half;
    f.b_column = w.task.tile * MOK_OUT_COLUMNS;
    f.b_matrix = max(w.task.expert, 0);
    return f;
}

// ---- by a multiplier ----

static_assert((int)MOK_MULTIPLIER_HALVES == (int)TILE_HALVES && (int)MOK_MOVER_WARPS == (int)TILE_THREADS / 32,
              "those who record are a block's");

// Tasks are recorded for both halves by one of their warps, from where the first factors are there to where all results
// are staged.
static __device__ __forceinline__ void record_task_begin(const struct mok_parameters &p,
                                                         const struct tile_multiplier<struct mok_work> &tile,
                                                         const struct mok_work &w) {
    if (w.steps > 0) tile.wait_stage();
    if (tile.lane == 0) mok_record_begin(p, mok_own_lane(MOK_MULTIPLIER, (int)blockIdx.x), w.task, 0);
    __syncwarp(); // products are the whole warp's
}

// The next task, at which the one before has ended; false: none is left.
static __device__ __forceinline__ bool next_task(const struct mok_parameters &p,
                                                 const struct tile_multiplier<struct mok_work> &tile,
                                                 struct tile_reader<struct mok_work> &reader, struct mok_work *w) {
    const bool recorded = MOK_RECORDED && tile.half == 0 && tile.warp == 0;
    if (recorded && tile.lane == 0) mok_record_end(p, mok_own_lane(MOK_MULTIPLIER, (int)blockIdx.x));
    bool there = reader.next(tile.shared, p.lost, w);
    if (recorded && there) record_task_begin(p, tile, *w);
    return there;
}

// ---- by a storer ----

struct mok_storer {
    const struct mok_parameters &p;
    struct tile_storer<struct mok_work> tile;
    const bool rings; // rows' places in the ring are used again: others wait until these are done

    __device__ __forceinline__ mok_storer(const struct mok_parameters &p, struct tile_shared<struct mok_work> *shared,
                                          int half)
        : p(p), tile(shared, p.lost, half), rings(p.plan.device->blocks > mok_ring_blocks(&p.shape)) {}

    // Counters count halves. A half without rows could raise them before the task's factors are there, and so ahead of
    // those who wait for another task's: the first one raises them for both.
    __device__ __forceinline__ void raise(const struct mok_work &w) {
        struct mok_wait signals[MOK_MOST_WAITS];
        int count = mok_task_signals(w.task, signals), halves = w.half ? TILE_HALVES : 1;
        for (int i = 0; i < count; i++) counter_raise(p.counters[signals[i].kind] + signals[i].index, halves);
    }

    // When all that this lane has stored is in memory.
    __device__ __forceinline__ void raise_written(const struct mok_work &w) {
        if (tile.lane > 0) return;
        bulk_wait_written();
        copies_fence();
        raise(w);
    }

    // Of each 64 columns gate and up, and in forward hidden.
    template <bool HIDDEN> __device__ __forceinline__ void gate_up(const struct mok_work &w) {
        const int each = HIDDEN ? 3 : 2;
        const struct mok_maps &maps = maps_of(p, w.task);
        int row = w.row + tile.half * HALF_ROWS;
        tile.store_boxes(each * MOK_GATE_UP_COLUMNS / CHUNK_COLUMNS, [&](int chunk, uint32_t from) {
            const CUtensorMap *map = chunk % each == 0 ? &maps.gate : chunk % each == 1 ? &maps.up : &maps.hidden;
            tma_store(map, w.task.tile * MOK_GATE_UP_COLUMNS + chunk / each * CHUNK_COLUMNS, row, from);
        });
        raise_written(w);
    }

    // Of the shared expert.
    __device__ __forceinline__ void own_rows(const struct mok_work &w) {
        tile.store_boxes(RESULT_CHUNKS, [&](int chunk, uint32_t from) {
            tma_store(&p.shared.out, w.task.tile * MOK_OUT_COLUMNS + chunk * CHUNK_COLUMNS,
                      w.row + tile.half * HALF_ROWS, from);
        });
    }

    __device__ __forceinline__ const struct mok_row *rows_of(const struct mok_task &task) const {
        return p.plan.rows + (size_t)task.block * MOK_BLOCK_ROWS + tile.half * HALF_ROWS;
    }

    __device__ __forceinline__ int record_lane() const {
        return mok_own_lane(MOK_STORER, tile.half * (int)gridDim.x + (int)blockIdx.x);
    }
    // When its first results are staged.
    __device__ __forceinline__ void record_begin(const struct mok_task &task, int columns) {
        const struct mok_row *rows = rows_of(task);
        int far = 0;
        for (int r = tile.lane; r < HALF_ROWS; r += 32)
            far += __popc(__ballot_sync(ALL_LANES, rows[r].source >= 0 && rows[r].source != p.plan.rank));
        tile.wait_staged();
        if (tile.lane == 0) mok_record_begin(p, record_lane(), task, far * columns * (int)sizeof(real));
    }

    // Rows to the slots of their tokens.
    __device__ __forceinline__ void push(const struct mok_task &task) {
        const struct mok_row *rows = rows_of(task);
        int H = p.shape.hidden, column = task.tile * MOK_OUT_COLUMNS;
        if (MOK_RECORDED) record_begin(task, mok_min(MOK_OUT_COLUMNS, H - column));
        tile.store_rows(RESULT_CHUNKS, H - column, [&](int r) -> real * {
            struct mok_row row = rows[r];
            if (row.source < 0) return NULL;
            return (real *)(p.peers.base[row.source] + p.slots_at) + (size_t)row.slot * (size_t)H + column;
        });
        if (MOK_RECORDED && tile.lane == 0) mok_record_end(p, record_lane());
    }
};

// ---- the kernel ----

// Pulls by all warps of a block that is one of those that pull before they multiply: by the order in which blocks begin, so
// that those that do are there.
template <enum mok_pass PASS>
static __device__ __forceinline__ void pull_first(const struct mok_parameters &p,
                                                  struct tile_shared<struct mok_work> *shared) {
    int *arrival = &shared->tasks[0].row; // nobody uses it yet
    if (threadIdx.x == 0) *arrival = atomicAdd(p.tickets[MOK_ARRIVED], 1);
    __syncthreads();
    int mover = *arrival;
    if (mover < p.comm_workers) pull_all<PASS>(p, mover * MOK_MOVER_WARPS + (int)threadIdx.x / 32);
    __syncthreads(); // Here, and not before the pulls, where ptxas would have 4 bytes spilled in backward.
}

// Asking for a kernel's attributes loads it: else CUDA would at its first launch, in the middle of a step.
template <auto KERNEL> static void prepare_pass(void) {
    struct cudaFuncAttributes attributes;
    cuda_allow_shared<KERNEL>(sizeof(struct tile_shared<struct mok_work>));
    cuda_check(cudaFuncGetAttributes(&attributes, KERNEL));
}

template <auto KERNEL> static void launch_pass(const struct mok_parameters *p, int blocks) {
    cuda_launch_shared<KERNEL>((unsigned)blocks, TILE_THREADS, sizeof(struct tile_shared<struct mok_work>), *p);
}

#endif

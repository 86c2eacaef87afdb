// The megakernel's forward pass: rows are pulled from their ranks, multiplied by their experts, and pushed to their
// tokens' slots, while the shared expert multiplies this rank's own tokens.
//
// The blocks are those of tile.cuh. Warp 1 of every block pulls rows; or, with comm_workers, whole blocks do, those that
// begin first, and multiply when all rows are there. Tasks come from the plan's table. A storer sends the rows of a down
// tile straight to their slots; that of a gate/up tile raises the counter that its down tiles wait for, when all of the
// hidden rows are in memory.
#include "kernels/cuda/mok_pull.cuh"
#include "kernels/cuda/swiglu.cuh"
#include "kernels/cuda/tile.cuh"

using Task = struct mok_task;
using Shared = struct tile_shared<Task>;

enum { RESULT_CHUNKS = TILE_COLUMNS / CHUNK_COLUMNS, GATE_UP_CHUNKS = 3 * MOK_GATE_UP_COLUMNS / CHUNK_COLUMNS };

static __device__ __forceinline__ bool is_gate_up(const Task &task) {
    return task.kind == MOK_TASK_GATE_UP || task.kind == MOK_TASK_SHARED_GATE_UP;
}

static __device__ __forceinline__ const struct mok_maps &maps_of(const struct mok_parameters &p, const Task &task) {
    return task.expert < 0 ? p.shared : p.routed;
}

// First row of a task in its matrices.
static __device__ __forceinline__ int row_of(const struct mok_parameters &p, const Task &task) {
    return task.expert < 0 ? task.block * MOK_BLOCK_ROWS : (int)mok_ring_row(&p.shape, task.block);
}

// ---- loading ----

static __device__ void load_tasks(const struct mok_parameters &p, Shared *shared) {
    const int total = p.plan->task_total[MOK_FORWARD];
    auto look = [&](int number) {
        return number < total ? __ldg((const int4 *)p.tasks + number) : make_int4(-1, 0, 0, 0);
    };
    auto wait = [&](const Task &task) {
        struct mok_wait waits[MOK_MOST_WAITS];
        int count = mok_task_waits(&p.shape, p.plan, MOK_FORWARD, task, waits);
        mok_delay(p, (unsigned)(task.kind * 31 + task.block * 7 + task.tile));
        if (count) mok_wait_for(p, waits[0]);
        copies_fence();
    };
    auto factors = [&](const Task &task) -> struct tile_factors {
        const struct mok_maps &maps = maps_of(p, task);
        int expert = max(task.expert, 0), row = row_of(p, task), I = maps.inner;
        if (is_gate_up(task)) {
            int gate = expert * 2 * I + task.tile * MOK_GATE_UP_COLUMNS, steps = mok_ceil(p.shape.hidden, TILE_DEPTH);
            return {&maps.x, &maps.w13, row, gate, gate + I, 0, steps, false};
        }
        int w2 = expert * I, column = task.tile * MOK_OUT_COLUMNS, steps = mok_ceil(I, TILE_DEPTH);
        return {&maps.hidden, &maps.w2, row, w2, 0, column, steps, true};
    };
    tile_load_all(shared, p.tickets[MOK_NEXT_TASK], p.lost, look, wait, factors);
}

// ---- multiplying ----

struct forward_multiplier {
    const struct mok_parameters &p;
    struct tile_multiplier<Task> tile;

    __device__ __forceinline__ forward_multiplier(const struct mok_parameters &p, Shared *shared, int half, int warp)
        : p(p), tile(shared, p.lost, half, warp) {}

    // Gate, up and hidden of 64 columns each, twice. As everywhere, hidden is made of gate and up as they are rounded.
    __device__ __forceinline__ void gate_up(const Task &task) {
        float gates[2] = {1, 1}; // of this thread's two rows
        if (task.expert >= 0) {
            const struct mok_row *row = p.rows + (size_t)task.block * MOK_BLOCK_ROWS + tile.row();
            gates[0] = row[0].gate;
            gates[1] = row[8].gate;
        }
        tile.template multiply<false, false>(mok_ceil(p.shape.hidden, TILE_DEPTH));
#pragma unroll
        for (int first = 0; first < MOK_GATE_UP_COLUMNS; first += CHUNK_COLUMNS) {
            uint32_t g[HALF_ROWS / 4], u[HALF_ROWS / 4];
            tile.round(g, first);
            tile.stage_result(g);
            tile.round(u, MOK_GATE_UP_COLUMNS + first);
            tile.stage_result(u);
#pragma unroll
            for (int i = 0; i < HALF_ROWS / 4; i++) {
                float2 gate = __bfloat1622float2(*(const __nv_bfloat162 *)&g[i]);
                float2 up = __bfloat1622float2(*(const __nv_bfloat162 *)&u[i]);
                __nv_bfloat162 hidden = __floats2bfloat162_rn(swiglu_hidden(gate.x, up.x, gates[i % 2]),
                                                              swiglu_hidden(gate.y, up.y, gates[i % 2]));
                g[i] = *(const uint32_t *)&hidden;
            }
            tile.stage_result(g);
        }
    }

    __device__ __forceinline__ void run() {
        struct tile_reader<Task> reader;
        Task task;
        while (reader.next(tile.shared, p.lost, &task)) {
            if (is_gate_up(task)) {
                gate_up(task);
            } else {
                tile.template multiply<false, true>(mok_ceil(maps_of(p, task).inner, TILE_DEPTH));
                tile.stage_all();
            }
        }
    }
};

// ---- storing ----

struct forward_storer {
    const struct mok_parameters &p;
    struct tile_storer<Task> tile;

    __device__ __forceinline__ forward_storer(const struct mok_parameters &p, Shared *shared, int half)
        : p(p), tile(shared, p.lost, half) {}

    __device__ __forceinline__ void gate_up(const Task &task) {
        const struct mok_maps &maps = maps_of(p, task);
        int row = row_of(p, task) + tile.half * HALF_ROWS;
        tile.store_boxes(GATE_UP_CHUNKS, [&](int chunk, uint32_t from) {
            const CUtensorMap *map = chunk % 3 == 0 ? &maps.gate : chunk % 3 == 1 ? &maps.up : &maps.hidden;
            tma_store(map, task.tile * MOK_GATE_UP_COLUMNS + chunk / 3 * CHUNK_COLUMNS, row, from);
        });
        if (tile.lane > 0) return;
        bulk_wait_written();
        copies_fence();
        raise(task);
    }

    __device__ __forceinline__ void raise(const Task &task) {
        struct mok_wait signals[MOK_MOST_WAITS];
        int count = mok_task_signals(task, signals);
        for (int i = 0; i < count; i++) counter_raise(p.counters[signals[i].kind] + signals[i].index);
    }

    __device__ __forceinline__ void shared_down(const Task &task) {
        int row = row_of(p, task) + tile.half * HALF_ROWS;
        tile.store_boxes(RESULT_CHUNKS, [&](int chunk, uint32_t from) {
            tma_store(&p.shared.out, task.tile * MOK_OUT_COLUMNS + chunk * CHUNK_COLUMNS, row, from);
        });
    }

    // Rows to the slots of their tokens. Others wait for that only where the rows' places in the ring are used again.
    __device__ __forceinline__ void down(const Task &task, bool raised) {
        const struct mok_row *rows = p.rows + (size_t)task.block * MOK_BLOCK_ROWS + tile.half * HALF_ROWS;
        int H = p.shape.hidden, column = task.tile * MOK_OUT_COLUMNS;
        tile.store_rows(RESULT_CHUNKS, H - column, [&](int r) -> real * {
            struct mok_row row = rows[r];
            if (row.source < 0) return NULL;
            return (real *)(p.peers.base[row.source] + p.slots_at) + (size_t)row.slot * (size_t)H + column;
        });
        if (raised && tile.lane == 0) raise(task);
    }

    __device__ __forceinline__ void run() {
        bool raised = mok_macrobatches(&p.shape, p.plan) > 1;
        struct tile_reader<Task> reader;
        Task task;
        while (reader.next(tile.shared, p.lost, &task)) {
            if (is_gate_up(task))
                gate_up(task);
            else if (task.expert < 0)
                shared_down(task);
            else
                down(task, raised);
        }
        if (tile.lane == 0) bulk_wait_written();
    }
};

// ---- the kernel ----

// Whether this block is one of those that pull before they multiply: by the order in which blocks begin, so that those
// that do are there.
static __device__ __forceinline__ bool pulls_first(const struct mok_parameters &p, Shared *shared) {
    int *arrival = &shared->tasks[0].x; // nobody uses it yet
    if (threadIdx.x == 0) *arrival = atomicAdd(p.tickets[MOK_ARRIVED], 1);
    __syncthreads();
    bool first = *arrival < p.comm_workers;
    __syncthreads();
    return first;
}

// MIXED: every block has a warp that pulls, for which multipliers leave some registers. Else comm_workers whole blocks do.
template <bool MIXED>
static __global__ void __launch_bounds__(TILE_THREADS, 1)
    forward_kernel(const __grid_constant__ struct mok_parameters p) {
    if constexpr (WGMMA) {
        extern __shared__ __align__(1024) char shared_memory[];
        Shared *shared = (Shared *)shared_memory;
        if (!MIXED && pulls_first(p, shared)) pull_all(p, MOK_FORWARD);
        auto own = [&] {
            if (MIXED) pull_all(p, MOK_FORWARD);
        };
        tile_block_run<72, 216>(
            shared, [&] { load_tasks(p, shared); }, own, [&](int half) { forward_storer(p, shared, half).run(); },
            [&](int half, int warp) { forward_multiplier(p, shared, half, warp).run(); });
    }
}

template <bool MIXED> static void launch(const struct mok_parameters *p, int blocks) {
    const size_t bytes = sizeof(Shared);
    static bool prepared;
    if (!prepared)
        cuda_check(cudaFuncSetAttribute(forward_kernel<MIXED>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    prepared = true;
    forward_kernel<MIXED><<<(unsigned)blocks, TILE_THREADS, bytes, cuda_stream()>>>(*p);
    cuda_check_launch();
}

void mok_forward_launch(const struct mok_parameters *p, int blocks) {
    if (p->comm_workers == 0)
        launch<true>(p, blocks);
    else
        launch<false>(p, blocks);
}

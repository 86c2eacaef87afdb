// The megakernel's forward pass: rows are pulled from their ranks, multiplied by their experts, and pushed to their
// tokens' slots, while the shared expert multiplies this rank's own tokens.
//
// The blocks are those of tile.cuh. Warp 1 of every block pulls rows; or, with comm_workers, whole blocks do, those that
// begin first, and multiply when all rows are there. Tasks come from the plan's table. A storer sends the rows of a down
// tile straight to their slots; that of a gate/up tile raises the counter that its down tiles wait for, when all of the
// hidden rows are in memory.
#include "kernels/cuda/mok_tasks.cuh"
#include "kernels/cuda/swiglu.cuh"

using Work = struct mok_work;
using Shared = struct tile_shared<Work>;

static __device__ void load_tasks(const struct mok_parameters &p, Shared *shared) {
    const struct mok_plan plan = mok_plan_of(p);
    tile_load_all(
        shared, p.tickets[MOK_NEXT_TASK], p.lost, [&](int number) { return mok_work_at(p, plan, MOK_FORWARD, number); },
        [&](struct tile_loader<Work> &loader, const Work &w, const auto &between) {
            const struct mok_maps &maps = maps_of(p, w.task);
            wait_for_factors(p, plan, MOK_FORWARD, w.task);
            if (is_gate_up(w.task))
                loader.template load<READ_COLUMNS>(gate_up_factors(maps, w), between);
            else
                loader.template load<READ_ROWS_OF_B>(out_factors(&maps.hidden, &maps.w2, w), between);
        });
}

// ---- multiplying ----

struct forward_multiplier {
    const struct mok_parameters &p;
    struct tile_multiplier<Work> tile;

    __device__ __forceinline__ forward_multiplier(const struct mok_parameters &p, Shared *shared, int half, int warp)
        : p(p), tile(shared, p.lost, half, warp) {}

    // Gate, up and hidden of 64 columns each, twice. As everywhere, hidden is made of gate and up as they are rounded.
    __device__ __forceinline__ void gate_up(const Work &w) {
        float gates[2] = {1, 1}; // of this thread's two rows
        if (w.task.expert >= 0) {
            const struct mok_row *row = p.plan.rows + (size_t)w.task.block * MOK_BLOCK_ROWS + tile.row();
            gates[0] = row[0].gate;
            gates[1] = row[8].gate;
        }
        tile.template multiply<false, false>(w.steps);
#pragma unroll
        for (int first = 0; first < MOK_GATE_UP_COLUMNS; first += CHUNK_COLUMNS) {
            uint32_t g[HALF_ROWS / 4], u[HALF_ROWS / 4];
            tile.round(g, first);
            tile.stage_result(g);
            tile.round(u, MOK_GATE_UP_COLUMNS + first);
            tile.stage_result(u);
#pragma unroll
            for (int i = 0; i < HALF_ROWS / 4; i++) {
                float2 gate = unpack(g[i]), up = unpack(u[i]);
                g[i] = pack(swiglu_hidden(gate.x, up.x, gates[i % 2]), swiglu_hidden(gate.y, up.y, gates[i % 2]));
            }
            tile.stage_result(g);
        }
    }

    __device__ __forceinline__ void run() {
        struct tile_reader<Work> reader;
        Work w;
        while (next_task(p, tile, reader, &w)) {
            if (!has_rows(w, tile.half)) {
                tile.pass(w.steps);
            } else if (is_gate_up(w.task)) {
                gate_up(w);
            } else {
                tile.template multiply<false, true>(w.steps);
                tile.stage_all();
            }
        }
    }
};

// ---- storing ----

static __device__ __forceinline__ void store_tasks(const struct mok_parameters &p, Shared *shared, int half) {
    struct mok_storer storer(p, shared, half);
    struct tile_reader<Work> reader;
    Work w;
    while (reader.next(shared, p.lost, &w)) {
        if (!has_rows(w, half)) continue;
        if (is_gate_up(w.task)) {
            storer.gate_up<true>(w);
        } else if (w.task.expert < 0) {
            storer.own_rows(w);
        } else {
            storer.push(w.task);
            if (storer.rings && storer.tile.lane == 0) storer.raise(w);
        }
    }
    if (storer.tile.lane == 0) bulk_wait_written();
}

// ---- the kernel ----

// MIXED: every block has a warp that pulls, for which multipliers leave some registers. Else comm_workers whole blocks do.
template <bool MIXED>
static __global__ void __launch_bounds__(TILE_THREADS, 1)
    forward_kernel(const __grid_constant__ struct mok_parameters p) {
    if constexpr (WGMMA) {
        extern __shared__ __align__(1024) char shared_memory[];
        Shared *shared = (Shared *)shared_memory;
        if (!MIXED) pull_first<MOK_FORWARD>(p, shared);
        auto own = [&] {
            if (MIXED) pull_all<MOK_FORWARD>(p, (int)blockIdx.x);
        };
        tile_block_run<72, 216>(
            shared, [&] { load_tasks(p, shared); }, own, [&](int half) { store_tasks(p, shared, half); },
            [&](int half, int warp) { forward_multiplier(p, shared, half, warp).run(); });
    }
}

void mok_forward_prepare(void) {
    prepare_pass<forward_kernel<true>>();
    prepare_pass<forward_kernel<false>>();
}

void mok_forward_launch(const struct mok_parameters *p, int blocks) {
    if (p->comm_workers == 0)
        launch_pass<forward_kernel<true>>(p, blocks);
    else
        launch_pass<forward_kernel<false>>(p, blocks);
}

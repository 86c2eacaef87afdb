// The megakernel's backward pass: gradients of routes' outputs are pulled, go through the experts, and are pushed to their
// tokens' slots; meanwhile the shared expert does its own tokens, and last come the gradients of the experts' weights.
//
//   d hidden      dy W2^T, and at once through SwiGLU: d gate, d up, hidden, partial gradients of the gates
//   d x           [d gate, d up] W13, to the slots; tiles of column 0 add a gate's partial gradients up and send them too
//   d w2, d w13   hidden^T dy, [d gate, d up]^T x: FP32, over an expert's rows in their order
//   gate/up       again, of a macrobatch that is no longer in the ring
//
// Blocks are those of the forward pass. What SwiGLU needs of a d hidden tile, gate and up, comes through the ring behind the
// last factors, 64 columns of each in a stage. d gate and d up take their places there, and are stored from there; only
// those of a tile's fourth 64 columns go through staging slots, so that the stage is free for the next tile.
#include "kernels/cuda/mok_tasks.cuh"
#include "kernels/cuda/swiglu.cuh"

using Work = struct mok_work;
using Shared = struct tile_shared<Work>;

static_assert((int)MOK_PARTIAL_COLUMNS == 2 * (int)CHUNK_COLUMNS, "a partial sum is over two chunks");
static_assert((int)MOK_PARTIAL_COLUMNS == (int)GATE_GRADIENT_COLUMNS, "and the same columns as by separate operations");

// Of a weight gradient: nothing to do, since there are no rows to add.
static __device__ __forceinline__ bool adds_nothing(const Work &w) { return w.steps == 0 && w.added; }

static __device__ __forceinline__ struct mok_corner d_weight_corner(const struct mok_parameters &p, const Work &w) {
    int rows = (is_d_w2(w.task) ? 1 : 2) * maps_of(p, w.task).inner;
    return mok_d_weight_corner(&p.shape, rows, w.steps * TILE_DEPTH, w.task.tile);
}

// ---- loading ----

struct backward_loader {
    const struct mok_parameters &p;
    struct tile_loader<Work> &tile;

    template <class Between> __device__ __forceinline__ void d_hidden(const Work &w, const Between &between) {
        const struct mok_maps &maps = maps_of(p, w.task);
        struct tile_factors f = {&maps.dy, &maps.w2, w.steps, w.row};
        f.half = w.half;
        f.b_row = w.task.tile * MOK_D_HIDDEN_COLUMNS;
        f.b_row_2 = f.b_row + TILE_COLUMNS / 2;
        f.b_matrix = max(w.task.expert, 0);
        tile.template load<READ_COLUMNS>(f, between);
#pragma unroll 1
        for (int chunk = 0; chunk < w.chunks; chunk++) {
            uint32_t full;
            struct tile_stage *stage = tile.begin((f.half ? 1 : TILE_HALVES) * 2 * BOX_BYTES, &full);
#pragma unroll
            for (int half = 0; half < TILE_HALVES; half++) {
                if (half > 0 && f.half) break;
                int column = f.b_row + chunk * CHUNK_COLUMNS, row = w.row + half * HALF_ROWS;
                tma_load(shared_address(stage->a[half]), &maps.gate, column, row, full);
                tma_load(shared_address(stage->b[half]), &maps.up, column, row, full);
            }
        }
    }

    template <class Between> __device__ __forceinline__ void d_weights(const Work &w, const Between &between) {
        const struct mok_maps &maps = maps_of(p, w.task);
        if (adds_nothing(w)) {
            between();
            return;
        }
        bool w2 = is_d_w2(w.task);
        struct mok_corner corner = d_weight_corner(p, w);
        if (w.added) tile.load_sums(w2 ? &maps.d_w2 : &maps.d_w13, max(w.task.expert, 0), corner.row, corner.column);
        struct tile_factors f = {w2 ? &maps.hidden : &maps.d_gate_up, w2 ? &maps.dy : &maps.x, w.steps, w.row,
                                 corner.row};
        f.b_row = w.row;
        f.b_column = corner.column;
        tile.template load<READ_ROWS>(f, between);
    }
};

static __device__ void load_tasks(const struct mok_parameters &p, Shared *shared) {
    const struct mok_plan plan = mok_plan_of(p);
    // Whose rows the last weight gradient was of: what it has waited for is there for others of them. Where experts have few
    // rows and tiles are short, a look at a counter before each of them would show.
    int expert = -1, macrobatch = -1;
    tile_load_all(
        shared, p.tickets[MOK_NEXT_TASK], p.lost,
        [&](int number) { return mok_work_at(p, plan, MOK_BACKWARD, number); },
        [&](struct tile_loader<Work> &loader, const Work &w, const auto &between) {
            const struct mok_maps &maps = maps_of(p, w.task);
            struct backward_loader backward = {p, loader};
            bool known = is_d_weights(w.task) && w.task.expert == expert && w.task.block == macrobatch;
            if (!known) wait_for_factors(p, plan, MOK_BACKWARD, w.task);
            if (is_d_weights(w.task)) expert = w.task.expert, macrobatch = w.task.block;
            if (is_d_hidden(w.task))
                backward.d_hidden(w, between);
            else if (is_d_weights(w.task))
                backward.d_weights(w, between);
            else if (is_gate_up(w.task))
                loader.template load<READ_COLUMNS>(gate_up_factors(maps, w), between);
            else
                loader.template load<READ_ROWS_OF_B>(out_factors(&maps.d_gate_up, &maps.w13, w), between);
        });
}

// ---- multiplying ----

struct backward_multiplier {
    const struct mok_parameters &p;
    struct tile_multiplier<Work> tile;

    __device__ __forceinline__ backward_multiplier(const struct mok_parameters &p, Shared *shared, int half, int warp)
        : p(p), tile(shared, p.lost, half, warp) {}

    // SwiGLU of 16 columns from `first` on of d hidden, which is rounded first, as separate operations do: gate and up become
    // d gate and d up. sums [2 rows][8]: the pairs of a gate's partial gradient that are 64 columns apart, added
    // (swiglu.cuh has the order of that sum).
    __device__ __forceinline__ void swiglu(uint32_t *g, uint32_t *u, uint32_t *hidden, int first,
                                           const float (&gates)[2], float (&sums)[2][8]) const {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float *e = tile.d + first / 2 + 2 * i;
            float2 d = unpack(pack(e[0], e[1])), gate = unpack(g[i]), up = unpack(u[i]);
            struct swiglu_gradient even = swiglu_gradient_of(d.x, gate.x, up.x, gates[i % 2]);
            struct swiglu_gradient odd = swiglu_gradient_of(d.y, gate.y, up.y, gates[i % 2]);
            g[i] = pack(even.dg, odd.dg);
            u[i] = pack(even.du, odd.du);
            hidden[i] = pack(even.hidden, odd.hidden);
            float pair = swiglu_pair(even, d.x, odd, d.y), *sum = &sums[i % 2][first % CHUNK_COLUMNS / 8 + i / 2];
            *sum = first % MOK_PARTIAL_COLUMNS < CHUNK_COLUMNS ? pair : __fadd_rn(*sum, pair);
        }
    }

    // The rest of the sum, for both rows, to its place among the partial sums.
    __device__ __forceinline__ void store_partials(const Work &w, int first, float (&sums)[2][8]) const {
        if (w.task.expert < 0) return;
        int chunk = (w.task.tile * MOK_D_HIDDEN_COLUMNS + first) / MOK_PARTIAL_COLUMNS;
        accum *to = p.partials + (size_t)chunk * (size_t)p.shape.ring_rows + (size_t)(w.row + tile.row());
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float *s = sums[r];
#pragma unroll
            for (int half = 4; half > 0; half /= 2)
#pragma unroll
                for (int j = 0; j < half; j++) s[j] = __fadd_rn(s[j], s[j + half]);
            float sum = __fadd_rn(s[0], __shfl_xor_sync(ALL_LANES, s[0], 1));
            sum = __fadd_rn(sum, __shfl_xor_sync(ALL_LANES, sum, 2));
            if (tile.lane % 4 == 0) to[8 * r] = sum;
        }
    }

    __device__ __forceinline__ void load_gate_up(uint32_t *g, uint32_t *u, uint32_t gate, uint32_t up, int j) const {
        tile.load_pairs(g, gate, j);
        tile.load_pairs(u, up, j);
    }

    // 64 columns from `first` on. d gate and d up take the places of gate and up, hidden a staging slot, and the storer frees
    // both; or, without IN_PLACE, all three are staged, and the stage is free at once.
    template <bool IN_PLACE>
    __device__ __forceinline__ void d_hidden_chunk(const Work &w, int first, bool last, const float (&gates)[2],
                                                   float (&sums)[2][8]) {
        struct tile_stage *stage = &tile.shared->stages[tile.stage.stage];
        const uint32_t gate = shared_address(stage->a[tile.half]), up = shared_address(stage->b[tile.half]);
        uint32_t g[4][4], u[4][4], to[3] = {gate, up};
        tile.wait_stage();
        if (!IN_PLACE) {
#pragma unroll
            for (int j = 0; j < 4; j++) load_gate_up(g[j], u[j], gate, up, j);
            tile.release_stage();
        }
        struct ring_place<STAGING_SLOTS> slot = tile.slot;
#pragma unroll
        for (int i = IN_PLACE ? 2 : 0; i < 3; i++, slot.next()) to[i] = tile.staging_room(slot);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            uint32_t hidden[4];
            if (IN_PLACE) load_gate_up(g[j], u[j], gate, up, j);
            swiglu(g[j], u[j], hidden, first + 16 * j, gates, sums);
            tile.store_pairs(to[0], j, g[j]);
            tile.store_pairs(to[1], j, u[j]);
            tile.store_pairs(to[2], j, hidden);
        }
        // Before the last results are handed over, behind which the counters are raised.
        if (last || first % MOK_PARTIAL_COLUMNS > 0) store_partials(w, first, sums);
#pragma unroll
        for (int i = IN_PLACE ? 2 : 0; i < 3; i++) tile.staged();
        if (IN_PLACE) tile.stage.next();
    }

    __device__ __forceinline__ void d_hidden(const Work &w, const float (&gates)[2]) {
        float sums[2][8];
#pragma unroll
        for (int chunk = 0; chunk < RESULT_CHUNKS - 1; chunk++)
            if (chunk < w.chunks) d_hidden_chunk<true>(w, chunk * CHUNK_COLUMNS, chunk == w.chunks - 1, gates, sums);
        if (w.chunks == RESULT_CHUNKS) d_hidden_chunk<false>(w, (RESULT_CHUNKS - 1) * CHUNK_COLUMNS, true, gates, sums);
    }

    // Gate and up of 64 columns each, twice.
    __device__ __forceinline__ void gate_up() {
#pragma unroll
        for (int chunk = 0; chunk < RESULT_CHUNKS; chunk++) {
            uint32_t pairs[HALF_ROWS / 4];
            tile.round(pairs, chunk % 2 * MOK_GATE_UP_COLUMNS + chunk / 2 * CHUNK_COLUMNS);
            tile.stage_result(pairs);
        }
    }

    __device__ __forceinline__ void d_weights(const Work &w) {
        if (adds_nothing(w)) return;
        if (w.added) tile.read_all_sums();
        tile.template multiply<true, true>(w.steps, w.added);
        tile.stage_all_sums();
    }

    // This thread's two rows' gates.
    __device__ __forceinline__ void find_gates(const Work &w, float (&gates)[2]) const {
        gates[0] = gates[1] = 1;
        if (w.task.kind != MOK_TASK_D_HIDDEN) return;
        const struct mok_row *row = p.plan.rows + (size_t)w.task.block * MOK_BLOCK_ROWS + tile.row();
        gates[0] = row[0].gate;
        gates[1] = row[8].gate;
    }

    __device__ __forceinline__ void run() {
        struct tile_reader<Work> reader;
        Work w;
        while (next_task(p, tile, reader, &w)) {
            if (!has_rows(w, tile.half)) {
                tile.pass(w.steps + w.chunks);
            } else if (is_d_weights(w.task)) {
                d_weights(w);
            } else if (is_d_hidden(w.task) || is_gate_up(w.task)) {
                float gates[2];
                find_gates(w, gates);
                tile.template multiply<false, false>(w.steps);
                if (is_d_hidden(w.task))
                    d_hidden(w, gates);
                else
                    gate_up();
            } else {
                tile.template multiply<false, true>(w.steps);
                tile.stage_all();
            }
        }
    }
};

// ---- storing ----

struct backward_storer {
    const struct mok_parameters &p;
    struct mok_storer common;
    int stage; // of the ring, that the tile begins with

    __device__ __forceinline__ backward_storer(const struct mok_parameters &p, Shared *shared, int half)
        : p(p), common(p, shared, half), stage(0) {}

    // What one stage and one staging slot have of 64 columns; then both are free.
    __device__ __forceinline__ void d_hidden_in_place(const struct mok_maps &maps, int column, int row, int at) {
        struct tile_stage *from = &common.tile.shared->stages[at];
        uint32_t hidden = common.tile.wait_staged();
        __syncwarp(); // all lanes have seen it staged
        if (common.tile.lane == 0) {
            tma_store(&maps.d_gate, column, row, shared_address(from->a[common.tile.half]));
            tma_store(&maps.d_up, column, row, shared_address(from->b[common.tile.half]));
            tma_store(&maps.hidden, column, row, hidden);
            bulk_commit();
            bulk_wait_read<0>();
            common.tile.release(common.tile.slot.stage);
            common.tile.release_stage(at);
        }
        __syncwarp();
        common.tile.slot.next();
    }

    __device__ __forceinline__ void d_hidden(const Work &w) {
        const struct mok_maps &maps = maps_of(p, w.task);
        int first = w.task.tile * MOK_D_HIDDEN_COLUMNS, last = first + (RESULT_CHUNKS - 1) * CHUNK_COLUMNS;
        int row = w.row + common.tile.half * HALF_ROWS;
#pragma unroll 1
        for (int chunk = 0; chunk < mok_min(w.chunks, RESULT_CHUNKS - 1); chunk++)
            d_hidden_in_place(maps, first + chunk * CHUNK_COLUMNS, row, (stage + w.steps + chunk) % TILE_STAGES);
        if (w.chunks == RESULT_CHUNKS)
            common.tile.store_boxes(3, [&](int result, uint32_t from) {
                tma_store(result == 0 ? &maps.d_gate : result == 1 ? &maps.d_up : &maps.hidden, last, row, from);
            });
        common.raise_written(w);
    }

    // The chunks' sums in ascending order.
    __device__ __forceinline__ void push_gate(const struct mok_row &row, size_t ring_row) const {
        if (row.source < 0) return;
        int chunks = mok_ceil(p.shape.intermediate, MOK_PARTIAL_COLUMNS);
        const accum *from = p.partials + ring_row;
        accum *to = (accum *)(p.peers.base[row.source] + p.d_gates_at), sum = 0;
#pragma unroll 4
        for (int chunk = 0; chunk < chunks; chunk++, from += p.shape.ring_rows) sum = __fadd_rn(sum, __ldcg(from));
        to[row.slot] = sum;
    }

    __device__ __forceinline__ void d_x(const Work &w) {
        common.push(w.task);
        if (w.task.tile == 0) {
            const struct mok_row *rows = common.rows_of(w.task);
            for (int r = common.tile.lane; r < HALF_ROWS; r += 32)
                push_gate(rows[r], (size_t)(w.row + common.tile.half * HALF_ROWS + r));
            __syncwarp();
        }
        if (common.rings && common.tile.lane == 0) common.raise(w);
    }

    __device__ __forceinline__ void d_weights(const Work &w) {
        const struct mok_maps &maps = maps_of(p, w.task);
        const CUtensorMap *map = is_d_w2(w.task) ? &maps.d_w2 : &maps.d_w13;
        struct mok_corner corner = d_weight_corner(p, w);
        int expert = max(w.task.expert, 0), row = corner.row + common.tile.half * HALF_ROWS;
        if (!adds_nothing(w))
            common.tile.store_boxes(SUMS_PIECES, [&](int piece, uint32_t from) {
                tma_store(map, corner.column + piece * ACCUM_BOX_COLUMNS, row, expert, from);
            });
        if (common.rings && w.task.expert >= 0) common.raise_written(w);
    }

    __device__ __forceinline__ void store(const Work &w) {
        if (is_d_hidden(w.task))
            d_hidden(w);
        else if (is_d_weights(w.task))
            d_weights(w);
        else if (is_gate_up(w.task))
            common.gate_up<false>(w);
        else if (w.task.expert < 0)
            common.own_rows(w);
        else
            d_x(w);
    }

    __device__ __forceinline__ void run() {
        struct tile_reader<Work> reader;
        Work w;
        while (reader.next(common.tile.shared, p.lost, &w)) {
            if (has_rows(w, common.tile.half)) store(w);
            stage = (stage + w.steps + w.chunks + (w.added && w.steps > 0 ? SUMS_STAGES : 0)) % TILE_STAGES;
        }
        if (common.tile.lane == 0) bulk_wait_written();
    }
};

// ---- the kernel ----

// MIXED: every block has a warp that pulls, for which multipliers leave some registers. Else comm_workers whole blocks do, and
// multipliers need not.
template <bool MIXED>
static __global__ void __launch_bounds__(TILE_THREADS, 1)
    backward_kernel(const __grid_constant__ struct mok_parameters p) {
    if constexpr (WGMMA) {
        extern __shared__ __align__(1024) char shared_memory[];
        Shared *shared = (Shared *)shared_memory;
        if (!MIXED) pull_first<MOK_BACKWARD>(p, shared);
        auto own = [&] {
            if (MIXED) pull_all<MOK_BACKWARD>(p, (int)blockIdx.x);
        };
        tile_block_run<MIXED ? 72 : 56, MIXED ? 216 : 224>(
            shared, [&] { load_tasks(p, shared); }, own, [&](int half) { backward_storer(p, shared, half).run(); },
            [&](int half, int warp) { backward_multiplier(p, shared, half, warp).run(); });
    }
}

void mok_backward_prepare(void) {
    prepare_pass<backward_kernel<true>>();
    prepare_pass<backward_kernel<false>>();
}

void mok_backward_launch(const struct mok_parameters *p, int blocks) {
    if (p->comm_workers == 0)
        launch_pass<backward_kernel<true>>(p, blocks);
    else
        launch_pass<backward_kernel<false>>(p, blocks);
}

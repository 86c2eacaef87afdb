// Grouped products by tiles (tile.cuh), all experts in one launch. Rows of an expert begin anywhere. Where they are rows
// of the result, its last tile reads rows of the next one too; they are multiplied and not stored. Where sums run over
// them, the multipliers clear what is not the expert's.
#include "kernels/cuda/grouped.h"

#include "kernels/cuda/device.h"
#include "kernels/cuda/experts.h"
#include "kernels/cuda/tile.cuh"

// Tiles of an expert's result are in columns of `tiles` and in blocks of 128 rows. So many blocks are multiplied by one
// column of tiles before the next: what a wave of tiles loads is then about as many rows as columns. (Sums of few terms,
// gradients of weights, come row by row instead: TILE_MANY_TERMS.)
enum { GROUP_BLOCKS = 8 };

struct grouped_place {
    int block, tile;
};

// Of tile `number` of an expert's.
static __device__ __forceinline__ struct grouped_place grouped_place_of(int number, int blocks, int tiles) {
    int group = number / (GROUP_BLOCKS * tiles) * GROUP_BLOCKS, here = min((int)GROUP_BLOCKS, blocks - group);
    int at = number - group * tiles;
    return {group + at % here, at / here};
}

// ---- y = x w^T and y = x w ----

// A tile of expert `expert`: `rows` rows from row on, columns from column on.
struct grouped_task {
    int expert, row, rows, column;
};

struct grouped_parameters {
    CUtensorMap x, w, y_map;
    real *y;
    int experts, N, K;
    int tiles; // of one block of 128 rows
    int32_t *ticket;
    struct lost_wait *lost;
    int first_row[MOST_EXPERTS + 1], first_block[MOST_EXPERTS + 1]; // of each expert; the last one: of all
};

// expert: that of an earlier task, or 0; becomes this one's.
static __device__ __forceinline__ struct grouped_task grouped_task_at(const struct grouped_parameters &p, int number,
                                                                      int *expert) {
    if (number >= p.first_block[p.experts] * p.tiles) return {-1, 0, 0, 0};
    int e = *expert, block = number / p.tiles;
    while (p.first_block[e + 1] <= block) e++;
    *expert = e;
    int first = p.first_block[e];
    struct grouped_place at = grouped_place_of(number - first * p.tiles, p.first_block[e + 1] - first, p.tiles);
    int row = p.first_row[e] + at.block * TILE_ROWS;
    return {e, row, min((int)TILE_ROWS, p.first_row[e + 1] - row), at.tile * TILE_COLUMNS};
}

template <bool B_ROWS>
static __global__ void __launch_bounds__(TILE_THREADS, 1)
    grouped_kernel(const __grid_constant__ struct grouped_parameters p) {
    if constexpr (WGMMA) {
        extern __shared__ __align__(1024) char shared_memory[];
        using Task = struct grouped_task;
        struct tile_shared<Task> *shared = (struct tile_shared<Task> *)shared_memory;
        int steps = (p.K + TILE_DEPTH - 1) / TILE_DEPTH;

        auto load = [&] {
            tma_prefetch(&p.x);
            tma_prefetch(&p.w);
            int expert = 0; // tickets ascend
            tile_load_all(
                shared, p.ticket, p.lost, [&](int number) { return grouped_task_at(p, number, &expert); },
                [&](struct tile_loader<Task> &loader, const Task &task, const auto &between) {
                    struct tile_factors f = {&p.x, &p.w, steps, task.row};
                    f.half = task.rows <= HALF_ROWS;
                    f.b_matrix = task.expert;
                    f.b_column = task.column; // either this or rows
                    if (!B_ROWS) f.b_row = task.column, f.b_row_2 = task.column + TILE_COLUMNS / 2;
                    loader.template load<B_ROWS ? READ_ROWS_OF_B : READ_COLUMNS>(f, between);
                });
        };
        auto store = [&](int half) {
            struct tile_storer<Task> storer(shared, p.lost, half);
            struct tile_reader<Task> reader;
            Task task;
            while (reader.next(shared, p.lost, &task)) {
                int row = task.row + half * HALF_ROWS, rows = task.rows - half * HALF_ROWS;
                const int chunks = TILE_COLUMNS / CHUNK_COLUMNS;
                if (rows <= 0) continue;
                if (rows >= HALF_ROWS)
                    storer.store_boxes(chunks, [&](int chunk, uint32_t from) {
                        tma_store(&p.y_map, task.column + chunk * CHUNK_COLUMNS, row, from);
                    });
                else
                    storer.store_rows(chunks, p.N - task.column, [&](int r) {
                        return r < rows ? p.y + (size_t)(row + r) * (size_t)p.N + task.column : (real *)NULL;
                    });
            }
            bulk_wait_written();
        };
        auto multiply = [&](int half, int warp) {
            struct tile_multiplier<Task> multiplier(shared, p.lost, half, warp);
            struct tile_reader<Task> reader;
            Task task;
            while (reader.next(shared, p.lost, &task)) {
                if (task.rows <= half * HALF_ROWS) {
                    multiplier.pass(steps);
                    continue;
                }
                multiplier.template multiply<false, B_ROWS>(steps);
                multiplier.stage_all();
            }
        };
        tile_block_run<40, 232>(
            shared, load, [] {}, store, multiply);
    }
}

// ---- dw = a^T b, or dw + a^T b: then a tile's sums go on from those that are there ----

// A tile of dw of the expert at `place` among those with rows: rows from row on, columns from column on, sums over `terms`
// rows of the factors.
struct sums_task {
    int place, row, column, terms;
};

struct sums_parameters {
    CUtensorMap a, b, dw;
    bool add;
    int used, blocks, tiles; // experts with rows, and the tiles of each
    int32_t *ticket;
    struct lost_wait *lost;
    int expert[MOST_EXPERTS], first_row[MOST_EXPERTS + 1]; // of each of those; the last one: behind all
};

static __device__ __forceinline__ struct sums_task sums_task_at(const struct sums_parameters &p, int number) {
    int each = p.blocks * p.tiles, place = number / each;
    if (place >= p.used) return {-1, 0, 0, 0};
    int terms = p.first_row[place + 1] - p.first_row[place], here = number - place * each;
    struct grouped_place at = {here / p.tiles, here % p.tiles};
    if (terms >= TILE_MANY_TERMS) at = grouped_place_of(here, p.blocks, p.tiles);
    return {place, at.block * TILE_ROWS, at.tile * TILE_COLUMNS, terms};
}

static __device__ __forceinline__ int sums_steps(const struct sums_task &task) {
    return (task.terms + TILE_DEPTH - 1) / TILE_DEPTH;
}

static __global__ void __launch_bounds__(TILE_THREADS, 1)
    grouped_sums_kernel(const __grid_constant__ struct sums_parameters p) {
    if constexpr (WGMMA) {
        extern __shared__ __align__(1024) char shared_memory[];
        using Task = struct sums_task;
        struct tile_shared<Task> *shared = (struct tile_shared<Task> *)shared_memory;

        auto load = [&] {
            tma_prefetch(&p.a);
            tma_prefetch(&p.b);
            tile_load_all(
                shared, p.ticket, p.lost, [&](int number) { return sums_task_at(p, number); },
                [&](struct tile_loader<Task> &loader, const Task &task, const auto &between) {
                    struct tile_factors f = {&p.a, &p.b, sums_steps(task)};
                    f.a_row = f.b_row = p.first_row[task.place];
                    f.a_column = task.row;
                    f.b_column = task.column;
                    if (p.add) loader.load_sums(&p.dw, p.expert[task.place], task.row, task.column);
                    loader.template load<READ_ROWS>(f, between);
                });
        };
        auto store = [&](int half) {
            struct tile_storer<Task> storer(shared, p.lost, half);
            struct tile_reader<Task> reader;
            Task task;
            while (reader.next(shared, p.lost, &task)) {
                int expert = p.expert[task.place], row = task.row + half * HALF_ROWS;
                storer.store_boxes(SUMS_PIECES, [&](int piece, uint32_t from) {
                    tma_store(&p.dw, task.column + piece * ACCUM_BOX_COLUMNS, row, expert, from);
                });
            }
            bulk_wait_written();
        };
        auto multiply = [&](int half, int warp) {
            struct tile_multiplier<Task> multiplier(shared, p.lost, half, warp);
            struct tile_reader<Task> reader;
            Task task;
            while (reader.next(shared, p.lost, &task)) {
                int steps = sums_steps(task);
                if (p.add) multiplier.read_all_sums();
                multiplier.template multiply<true, true>(steps, p.add, task.terms - (steps - 1) * TILE_DEPTH);
                multiplier.stage_all_sums();
            }
        };
        tile_block_run<40, 232>(
            shared, load, [] {}, store, multiply);
    }
}

// ---- host ----

bool grouped_own_available(void) { return cuda_compiled_capability() == 90; }

// Row blocks of each expert; returns their number.
static int grouped_blocks(struct grouped_parameters *p, const int *offsets, int E) {
    int blocks = 0;
    for (int e = 0; e < E; e++) {
        p->first_row[e] = offsets[e];
        p->first_block[e] = blocks;
        blocks += (offsets[e + 1] - offsets[e] + TILE_ROWS - 1) / TILE_ROWS;
    }
    p->first_row[E] = offsets[E];
    return p->first_block[E] = blocks;
}

// The parameters' experts with rows; returns their number.
static int sums_experts(struct sums_parameters *p, const int *offsets, int E) {
    int used = 0;
    for (int e = 0; e < E; e++) {
        if (offsets[e + 1] == offsets[e]) continue;
        p->expert[used] = e;
        p->first_row[used++] = offsets[e];
    }
    p->first_row[used] = offsets[E];
    return p->used = used;
}

static void check_unit(const char *name, int width) {
    if (width % GROUPED_UNIT)
        fail_internal("grouped products", "found %s %d, wanted a multiple of %d", name, width, (int)GROUPED_UNIT);
}

// One block for each multiprocessor, or for each task where those are fewer.
template <auto KERNEL, class Task, class Parameters> static void launch_tiles(Parameters *p, long long tasks) {
    const size_t bytes = sizeof(struct tile_shared<Task>);
    p->ticket = (int32_t *)cuda_scratch(sizeof *p->ticket);
    p->lost = lost_wait_record();
    cuda_check(cudaMemsetAsync(p->ticket, 0, sizeof *p->ticket, cuda_stream()));
    long long most = cuda_multiprocessors();
    cuda_launch_shared<KERNEL>((unsigned)(tasks < most ? tasks : most), TILE_THREADS, bytes, *p);
}

template <bool B_ROWS>
static void grouped_run(real *y, const real *x, const real *w, const int *offsets, int E, int N, int K) {
    struct grouped_parameters p = {};
    experts_check(E);
    check_unit("width", N);
    check_unit("depth", K);
    int blocks = grouped_blocks(&p, offsets, E);
    if (blocks == 0 || N == 0) return;
    size_t rows = (size_t)offsets[E], width = (size_t)N, depth = (size_t)K;
    if (K == 0) { // sums of nothing
        size_t first = (size_t)offsets[0];
        device_zero(y + first * width, sizeof(real) * (rows - first) * width);
        return;
    }
    p.x = tensor_map_matrix(x, rows, depth, depth);
    p.w = B_ROWS ? tensor_map_matrices(w, (size_t)E, depth, width) : tensor_map_matrices(w, (size_t)E, width, depth);
    p.y_map = tensor_map_matrix(y, rows, width, width);
    p.y = y;
    p.experts = E;
    p.N = N;
    p.K = K;
    p.tiles = (N + TILE_COLUMNS - 1) / TILE_COLUMNS;
    launch_tiles<grouped_kernel<B_ROWS>, struct grouped_task>(&p, (long long)blocks * p.tiles);
}

void grouped_own_nt(real *y, const real *x, const real *w, const int *offsets, int E, int N, int K) {
    grouped_run<false>(y, x, w, offsets, E, N, K);
}

void grouped_own_nn(real *y, const real *x, const real *w, const int *offsets, int E, int N, int K) {
    grouped_run<true>(y, x, w, offsets, E, N, K);
}

void grouped_own_tn(accum *dw, const real *a, const real *b, const int *offsets, int E, int M, int N, bool add) {
    struct sums_parameters p = {};
    experts_check(E);
    check_unit("height", M);
    check_unit("width", N);
    int used = sums_experts(&p, offsets, E);
    if (used == 0 || M == 0 || N == 0) return;
    size_t rows = (size_t)offsets[E], height = (size_t)M, width = (size_t)N;
    p.a = tensor_map_matrix(a, rows, height, height);
    p.b = tensor_map_matrix(b, rows, width, width);
    p.dw = tensor_map_matrices_accum(dw, (size_t)E, height, width);
    p.add = add;
    p.blocks = (M + TILE_ROWS - 1) / TILE_ROWS;
    p.tiles = (N + TILE_COLUMNS - 1) / TILE_COLUMNS;
    launch_tiles<grouped_sums_kernel, struct sums_task>(&p, (long long)used * p.blocks * p.tiles);
}

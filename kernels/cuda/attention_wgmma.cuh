// What the passes of attention by WGMMA share: how heads lie in shared memory, the order of the tiles, how the warps of
// a block hear of the next one, and how results leave registers.
//
// One block per multiprocessor takes tiles of 128 rows (queries or keys) of one head until none is left. It has three
// warpgroups. The first only loads: its warp 0 takes tiles from a counter and loads what a tile's rows meet, block by
// block, into a ring; its warp 1 loads the rows of the tile. The other two multiply, each for 64 of the rows. They
// take most registers, and keep one or two products running while they do exponentials. A tile's results are written
// while the first product of the next one runs.
#ifndef MOK_KERNELS_CUDA_ATTENTION_WGMMA_CUH
#define MOK_KERNELS_CUDA_ATTENTION_WGMMA_CUH

#include "kernels/cuda/attention_passes.h"
#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/tensor_map.h"
#include "kernels/cuda/wgmma.cuh"

enum { TILE_ROWS = 128, HALF_ROWS = 64, WARP_ROWS = 16, ATTENTION_THREADS = 3 * WARPGROUP };
enum { LOADER_REGISTERS = 24, WORKER_REGISTERS = 240 };
// Results on their way out, of each worker warp: 16 rows of 64 columns.
enum { STAGING_BYTES = WARP_ROWS * CHUNK_ROW_BYTES };
// A tile's number is read by eight worker warps and the loader of its rows.
enum { WORKER_WARPS = 8, TILE_READERS = WORKER_WARPS + 1 };

// ---- heads in shared memory ----

static constexpr __host__ __device__ int chunks_of(int columns) {
    return (columns + CHUNK_COLUMNS - 1) / CHUNK_COLUMNS;
}

// Columns that are multiplied. In tiles of queries and keys the rope columns begin a chunk of their own, since those of
// keys come from elsewhere; behind a head's own columns there are zeros. Sizes are multiples of 16.
template <int NOPE_, int ROPE_, int VALUE_> struct head_sizes {
    static constexpr int NOPE = NOPE_, ROPE = ROPE_, VALUE = VALUE_;
    static constexpr int NOPE_CHUNKS = chunks_of(NOPE), QUERY_CHUNKS = NOPE_CHUNKS + 1, VALUE_CHUNKS = chunks_of(VALUE);
    // Of gradients of queries and keys in registers: all columns of the nope chunks, then rope columns.
    static constexpr int QUERY_COLUMNS = NOPE_CHUNKS * CHUNK_COLUMNS + ROPE;
    static constexpr __host__ __device__ int query_bytes(int rows) { return QUERY_CHUNKS * rows * CHUNK_ROW_BYTES; }
    static constexpr __host__ __device__ int value_bytes(int rows) { return VALUE_CHUNKS * rows * CHUNK_ROW_BYTES; }
    static_assert(ROPE <= CHUNK_COLUMNS, "rope columns are one chunk");
};

// What passes by WGMMA take at most.
using largest_heads = struct head_sizes<128, 64, 128>;

// The two parts of a head's queries or keys. The rope columns of keys are the same for all heads.
struct query_maps {
    CUtensorMap nope, rope;
    bool shared_rope;
};

struct attention_tile {
    int b, h, index; // sequence, head, which 128 rows
};

static __device__ __forceinline__ void prefetch_queries(const struct query_maps *maps) {
    tma_prefetch(&maps->nope);
    tma_prefetch(&maps->rope);
}

template <class Heads, int ROWS>
static __device__ __forceinline__ void load_queries(uint32_t to, const struct query_maps *maps, int row,
                                                    const struct attention_tile &tile, uint32_t barrier) {
#pragma unroll
    for (int c = 0; c < Heads::NOPE_CHUNKS; c++)
        tma_load(to + c * ROWS * CHUNK_ROW_BYTES, &maps->nope, c * CHUNK_COLUMNS, tile.h, row, tile.b, barrier);
    tma_load(to + Heads::NOPE_CHUNKS * ROWS * CHUNK_ROW_BYTES, &maps->rope, 0, maps->shared_rope ? 0 : tile.h, row,
             tile.b, barrier);
}

template <class Heads, int ROWS>
static __device__ __forceinline__ void load_values(uint32_t to, const CUtensorMap *map, int row,
                                                   const struct attention_tile &tile, uint32_t barrier) {
#pragma unroll
    for (int c = 0; c < Heads::VALUE_CHUNKS; c++)
        tma_load(to + c * ROWS * CHUNK_ROW_BYTES, map, c * CHUNK_COLUMNS, tile.h, row, tile.b, barrier);
}

// s [64, N] = a b^T over the columns of queries and keys; a's tile has 64 rows, b's N.
template <class Heads, int N>
static __device__ __forceinline__ void multiply_queries(float (&s)[N / 2], uint32_t a, uint32_t b) {
#pragma unroll
    for (int i = 0; i < Heads::NOPE / 16; i++)
        wgmma_columns<N>(s, a + i / 4 * (HALF_ROWS * CHUNK_ROW_BYTES >> 4) + i % 4 * WGMMA_COLUMN_STEP,
                         b + i / 4 * (N * CHUNK_ROW_BYTES >> 4) + i % 4 * WGMMA_COLUMN_STEP, i);
    constexpr int CHUNK = Heads::NOPE_CHUNKS;
#pragma unroll
    for (int i = 0; i < Heads::ROPE / 16; i++)
        wgmma_columns<N>(s, a + CHUNK * (HALF_ROWS * CHUNK_ROW_BYTES >> 4) + i * WGMMA_COLUMN_STEP,
                         b + CHUNK * (N * CHUNK_ROW_BYTES >> 4) + i * WGMMA_COLUMN_STEP, 1);
}

// s [64, N] = a b^T over the columns of values.
template <class Heads, int N>
static __device__ __forceinline__ void multiply_values(float (&s)[N / 2], uint32_t a, uint32_t b) {
#pragma unroll
    for (int i = 0; i < Heads::VALUE / 16; i++)
        wgmma_columns<N>(s, a + i / 4 * (HALF_ROWS * CHUNK_ROW_BYTES >> 4) + i % 4 * WGMMA_COLUMN_STEP,
                         b + i / 4 * (N * CHUNK_ROW_BYTES >> 4) + i % 4 * WGMMA_COLUMN_STEP, i);
}

// d [64, N] = (add ? d : 0) + a b over ROWS rows of b; a in registers.
template <int N, int ROWS>
static __device__ __forceinline__ void multiply_rows(float (&d)[N / 2], const uint32_t (&a)[ROWS / 4], uint32_t b,
                                                     int add) {
#pragma unroll
    for (int i = 0; i < ROWS / 16; i++) wgmma_rows<N>(d, &a[4 * i], b + i * WGMMA_ROW_STEP, add | i);
}

// ---- the order of tiles ----

// Heads of all sequences go in sections whose rows stay in the L2 cache while other blocks read them too; in a section
// the tiles with most work go first. Which block takes which tile changes nothing in the results.
struct tile_order {
    int tiles, count;   // of a head; of all
    int pairs, section; // (sequence, head) in all; in a section
    int heads;          // of a sequence
};

// Counters in device memory: the next tile; blocks that found none left, of which the last sets both back to 0.
struct tile_counters {
    int next, finished;
};
// Those of a pass, at 0 whenever none of its kernels runs.
enum attention_pass { ATTENTION_FORWARD, ATTENTION_KEYS, ATTENTION_QUERIES, ATTENTION_PASSES };
struct tile_counters *attention_wgmma_counters(enum attention_pass pass);

// LATE_FIRST: the last rows of a sequence have most work.
template <bool LATE_FIRST>
static __device__ __forceinline__ struct attention_tile tile_at(const struct tile_order &o, int number) {
    int per_section = o.section * o.tiles, first_pair = number / per_section * o.section;
    int place = number % per_section, pairs = min(o.section, o.pairs - first_pair);
    int pair = first_pair + place % pairs, index = place / pairs;
    return {pair / o.heads, pair % o.heads, LATE_FIRST ? o.tiles - 1 - index : index};
}

// In shared memory: numbers of tiles on their way from the block's warp 0 to all others, -1: none is left.
struct tile_queue {
    struct ring_barriers<2> barriers;
    int number[2];
};

// Warp 0, one thread: takes tiles, tells them, and calls load(tile). The next tile is taken while one is loaded.
template <bool LATE_FIRST, class Load>
static __device__ __forceinline__ void tiles_take(struct tile_counters *counters, const struct tile_order &order,
                                                  struct tile_queue *queue, struct lost_wait *lost, const Load &load) {
    struct ring_place<2> place;
    int next = atomicAdd(&counters->next, 1);
    for (;;) {
        int number = next < order.count ? next : -1;
        barrier_wait(shared_address(&queue->barriers.empty[place.stage]), place.phase ^ 1, lost,
                     WAIT_ATTENTION_TILE_ROOM);
        shared_store_int(shared_address(&queue->number[place.stage]), number);
        barrier_arrive(shared_address(&queue->barriers.full[place.stage]));
        place.next();
        if (number < 0) break;
        next = atomicAdd(&counters->next, 1);
        load(tile_at<LATE_FIRST>(order, number));
    }
    __threadfence();
    if (atomicAdd(&counters->finished, 1) < (int)gridDim.x - 1) return;
    counters->next = 0;
    counters->finished = 0;
}

// The others. A warp, or one thread alone, is a reader.
struct tile_reader {
    struct ring_place<2> place;

    template <bool WARP> __device__ __forceinline__ int next(struct tile_queue *queue, struct lost_wait *lost) {
        barrier_wait(shared_address(&queue->barriers.full[place.stage]), place.phase, lost, WAIT_ATTENTION_TILE);
        int number = 0;
        if (WARP) __syncwarp(); // none of the warp looks at the barrier any more
        if (!WARP || threadIdx.x % 32 == 0) {
            number = shared_load_int(shared_address(&queue->number[place.stage]));
            barrier_arrive(shared_address(&queue->barriers.empty[place.stage]));
        }
        place.next();
        return WARP ? __shfl_sync(ALL_LANES, number, 0) : number;
    }
};

// Warp 1, one thread: loads the rows of every tile. load(tile, half, row, full) those of a worker, from `row` on,
// `bytes` in all.
template <bool LATE_FIRST, class Load>
static __device__ __forceinline__ void tiles_load_rows(const struct tile_order &order, struct tile_queue *queue,
                                                       struct ring_barriers<1> *barriers, int bytes,
                                                       struct lost_wait *lost, const Load &load) {
    struct tile_reader reader;
    struct ring_place<1> place;
    for (;;) {
        int number = reader.next<false>(queue, lost);
        if (number < 0) return;
        struct attention_tile tile = tile_at<LATE_FIRST>(order, number);
        for (int half = 0; half < 2; half++) {
            uint32_t full = shared_address(&barriers[half].full[0]);
            barrier_wait(shared_address(&barriers[half].empty[0]), place.phase ^ 1, lost, WAIT_ATTENTION_FIXED_ROOM);
            barrier_arrive_expect(full, bytes);
            load(tile, half, tile.index * TILE_ROWS + half * HALF_ROWS, full);
        }
        place.next();
    }
}

// ---- the block ----

// init() by one thread, then each thread what it is for: stream() takes tiles and loads what their rows meet, rows()
// loads the tiles' rows, work(half, warp) multiplies.
template <class Init, class Stream, class Rows, class Work>
static __device__ __forceinline__ void block_run(const Init &init, const Stream &stream, const Rows &rows,
                                                 const Work &work) {
    // Through a shuffle, so that the compiler knows them to be the same in all lanes.
    int warpgroup = __shfl_sync(ALL_LANES, (int)threadIdx.x / WARPGROUP, 0);
    int warp = __shfl_sync(ALL_LANES, (int)threadIdx.x / 32 % 4, 0);
    if (threadIdx.x == 0) {
        init();
        barrier_init_fence();
    }
    __syncthreads();
    if (warpgroup == 0) {
        registers_give<LOADER_REGISTERS>();
        bool one = threadIdx.x % 32 == 0;
        if (one && warp == 0) stream();
        if (one && warp == 1) rows();
    } else {
        registers_take<WORKER_REGISTERS>();
        work(warpgroup - 1, warp);
    }
}

// ---- results ----

// A warp's 16 rows of COLUMNS columns from registers into memory, by its staging: whole lines of 128 bytes, and no copy
// engine to wait for. A thread's upper row is multiplied by `upper`, its lower one by `lower`. out: the first row; the
// first `rows` rows and `columns` columns, a multiple of 8, are written.
template <int COLUMNS>
static __device__ __forceinline__ void store_rows(uint32_t staging, const float *d, float upper, float lower, real *out,
                                                  size_t stride, int rows, int columns) {
    int lane = (int)threadIdx.x % 32, piece = lane % 8, quarter = lane / 8;
    uint32_t matrix_row = staging + (quarter % 2 * 8 + piece) * CHUNK_ROW_BYTES;
#pragma unroll
    for (int first = 0; first < COLUMNS; first += CHUNK_COLUMNS) {
        __syncwarp();
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (first + 16 * j < COLUMNS) {
                const float *e = d + first / 2 + 8 * j;
                shared_store_matrices(matrix_row + (((2 * j + quarter / 2) ^ piece) << 4),
                                      pack_pair(e[0] * upper, e[1] * upper), pack_pair(e[2] * lower, e[3] * lower),
                                      pack_pair(e[4] * upper, e[5] * upper), pack_pair(e[6] * lower, e[7] * lower));
            }
        __syncwarp();
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int row = 4 * j + quarter;
            uint4 words = shared_load_uint4(staging + row * CHUNK_ROW_BYTES + ((piece ^ (row & 7)) << 4));
            if (row < rows && first + 8 * piece < columns) *(uint4 *)(out + row * stride + first + 8 * piece) = words;
        }
    }
}

// ---- host ----

// Elements from one row to the next, of arrays in which a row has all heads.
static inline size_t query_stride(const struct attention_shape *s) {
    return (size_t)s->heads * (size_t)(s->nope_dim + s->rope_dim);
}
static inline size_t kv_stride(const struct attention_shape *s) {
    return (size_t)s->heads * (size_t)(s->nope_dim + s->value_dim);
}
static inline size_t value_stride(const struct attention_shape *s) { return (size_t)s->heads * (size_t)s->value_dim; }

static inline CUtensorMap head_map(const real *x, size_t row_stride, int head_stride, int columns, int rows,
                                   const struct attention_shape *s) {
    struct head_array a = {x,        columns,    s->length,           s->heads,
                           s->batch, row_stride, (size_t)head_stride, row_stride * (size_t)s->length};
    return tensor_map_heads(a, rows);
}

static inline struct query_maps maps_of_queries(const struct attention_operands *a, int rows) {
    const struct attention_shape *s = &a->shape;
    int width = s->nope_dim + s->rope_dim;
    return {head_map(a->q, query_stride(s), width, s->nope_dim, rows, s),
            head_map(a->q + s->nope_dim, query_stride(s), width, s->rope_dim, rows, s), false};
}

static inline struct query_maps maps_of_keys(const struct attention_operands *a, int rows) {
    const struct attention_shape *s = &a->shape;
    struct attention_shape one_head = *s;
    one_head.heads = 1;
    return {head_map(a->kv, kv_stride(s), s->nope_dim + s->value_dim, s->nope_dim, rows, s),
            head_map(a->kr, (size_t)a->kr_stride, a->kr_stride, s->rope_dim, rows, &one_head), true};
}

static inline CUtensorMap map_of_values(const struct attention_operands *a, int rows) {
    const struct attention_shape *s = &a->shape;
    return head_map(a->kv + s->nope_dim, kv_stride(s), s->nope_dim + s->value_dim, s->value_dim, rows, s);
}

static inline CUtensorMap map_of_output_gradients(const struct attention_operands *a, int rows) {
    const struct attention_shape *s = &a->shape;
    return head_map(a->d_o, value_stride(s), s->value_dim, s->value_dim, rows, s);
}

// Bytes of a section's keys and values, or queries and output gradients: half of the L2 cache.
static inline struct tile_order tile_order_of(const struct attention_shape *s) {
    const double section_bytes = 24e6;
    double pair_bytes = (double)s->length * (s->nope_dim + s->rope_dim + s->value_dim) * sizeof(real);
    int tiles = attention_term_blocks(s->length) / (TILE_ROWS / TERM_BLOCK), pairs = s->batch * s->heads;
    int most = (int)fmin(fmax(section_bytes / pair_bytes, 1), pairs), sections = (pairs + most - 1) / most;
    // Evened out: a last section of one head would leave most blocks without work.
    return {tiles, tiles * pairs, pairs, (pairs + sections - 1) / sections, s->heads};
}

// Calls launch(heads) with the smallest of the head_sizes that hold the heads: those of the presets.
template <class Launch> static inline void with_head_sizes(const struct attention_shape *s, const Launch &launch) {
    if (s->nope_dim <= 32 && s->rope_dim <= 16 && s->value_dim <= 32)
        launch(head_sizes<32, 16, 32>{});
    else if (s->nope_dim <= 64 && s->rope_dim <= 32 && s->value_dim <= 64)
        launch(head_sizes<64, 32, 64>{});
    else if (s->nope_dim <= 64)
        launch(head_sizes<64, 64, 128>{});
    else
        launch(largest_heads{});
}

// A block on each multiprocessor, if there are as many tiles.
template <auto kernel, class Parameters>
static inline void launch_persistent(size_t shared_bytes, const Parameters &parameters) {
    int tiles = parameters.order.count, most = cuda_multiprocessors();
    cuda_launch_shared<kernel>((unsigned)(tiles < most ? tiles : most), ATTENTION_THREADS, shared_bytes, parameters);
}

#endif

// Forward pass of attention by WGMMA: a tile of 128 queries meets the keys it sees in blocks of 128, the last ones
// first, with the softmax's maximum and denominator kept up as keys come by (online softmax).
//
// A worker warpgroup has scores of block j running while it adds P V of the block before, and does the softmax of block
// j while P V runs. The two workers take turns at issuing products, so that one does exponentials while the other
// multiplies.
#include <math.h>

#include "kernels/cuda/attention_wgmma.cuh"

enum { KEY_BLOCK = 128, KEY_STAGES = 2 };
static_assert((int)KEY_BLOCK == (int)TILE_ROWS, "a tile's last block has its own keys");

struct forward_parameters {
    struct query_maps q, k;
    CUtensorMap v;
    real *o;
    accum *lse;
    struct tile_order order;
    struct tile_counters *counters;
    struct lost_wait *lost;
    int length, heads, value;
    float scale; // of scores, into units of log 2
};

template <class Heads> struct forward_shared {
    static constexpr int Q_BYTES = Heads::query_bytes(HALF_ROWS), K_BYTES = Heads::query_bytes(KEY_BLOCK);
    static constexpr int V_BYTES = Heads::value_bytes(KEY_BLOCK);

    alignas(1024) char q[2][Q_BYTES]; // of each worker
    char k[KEY_STAGES][K_BYTES], v[KEY_STAGES][V_BYTES];
    char staging[WORKER_WARPS][STAGING_BYTES];
    struct ring_barriers<KEY_STAGES> k_barriers, v_barriers;
    struct ring_barriers<1> q_barriers[2];
    struct tile_queue tiles;

    __device__ void init() {
        k_barriers.init(WORKER_WARPS);
        v_barriers.init(WORKER_WARPS);
        for (int half = 0; half < 2; half++) q_barriers[half].init(WORKER_WARPS / 2);
        tiles.barriers.init(TILE_READERS);
    }
};

// ---- loading ----

template <class Heads>
static __device__ void load_keys_and_values(const struct forward_parameters &p, struct forward_shared<Heads> *shared) {
    using Shared = struct forward_shared<Heads>;
    struct ring_place<KEY_STAGES> k, v;
    prefetch_queries(&p.k);
    tma_prefetch(&p.v);
    // Values are needed one block later than keys.
    tiles_take<true>(p.counters, p.order, &shared->tiles, p.lost, [&](const struct attention_tile &tile) {
#pragma unroll 1
        for (int block = tile.index; block >= -1; block--) {
            if (block >= 0) {
                uint32_t full = shared_address(&shared->k_barriers.full[k.stage]);
                barrier_wait(shared_address(&shared->k_barriers.empty[k.stage]), k.phase ^ 1, p.lost,
                             WAIT_ATTENTION_STREAM_ROOM);
                barrier_arrive_expect(full, Shared::K_BYTES);
                load_queries<Heads, KEY_BLOCK>(shared_address(shared->k[k.stage]), &p.k, block * KEY_BLOCK, tile, full);
                k.next();
            }
            if (block < tile.index) {
                uint32_t full = shared_address(&shared->v_barriers.full[v.stage]);
                barrier_wait(shared_address(&shared->v_barriers.empty[v.stage]), v.phase ^ 1, p.lost,
                             WAIT_ATTENTION_STREAM_ROOM);
                barrier_arrive_expect(full, Shared::V_BYTES);
                load_values<Heads, KEY_BLOCK>(shared_address(shared->v[v.stage]), &p.v, (block + 1) * KEY_BLOCK, tile,
                                              full);
                v.next();
            }
        }
    });
}

template <class Heads>
static __device__ void load_tile_queries(const struct forward_parameters &p, struct forward_shared<Heads> *shared) {
    prefetch_queries(&p.q);
    tiles_load_rows<true>(p.order, &shared->tiles, shared->q_barriers, forward_shared<Heads>::Q_BYTES, p.lost,
                          [&](const struct attention_tile &tile, int half, int row, uint32_t full) {
                              load_queries<Heads, HALF_ROWS>(shared_address(shared->q[half]), &p.q, row, tile, full);
                          });
}

// ---- multiplying ----

// One worker warpgroup. Of arrays with two elements, the first is of a thread's upper row, the other of its lower one.
template <class Heads> struct forward_worker {
    using Shared = struct forward_shared<Heads>;
    const struct forward_parameters &p;
    Shared *const shared;
    const int half, warp, lane; // which worker; in it
    const uint32_t q_tile, k_tiles, v_tiles;

    struct ring_place<KEY_STAGES> k, v;
    struct ring_place<1> q;
    struct tile_reader reader;

    float o[Heads::VALUE / 2], s[KEY_BLOCK / 2];
    uint32_t probabilities[KEY_BLOCK / 4];
    float largest[2], sum[2]; // score so far; denominator so far, of this lane's columns
    float correction[2];      // for what was accumulated before the last softmax step

    __device__ __forceinline__ forward_worker(const struct forward_parameters &p, Shared *shared, int half, int warp)
        : p(p), shared(shared), half(half), warp(warp), lane((int)threadIdx.x % 32),
          q_tile(wgmma_descriptor(shared_address(shared->q[half]), 0)),
          k_tiles(wgmma_descriptor(shared_address(shared->k), 0)),
          v_tiles(wgmma_descriptor(shared_address(shared->v), KEY_BLOCK)) {}

    __device__ __forceinline__ bool next_tile(struct attention_tile *tile) {
        int number = reader.next<true>(&shared->tiles, p.lost);
        if (number >= 0) *tile = tile_at<true>(p.order, number);
        return number >= 0;
    }

    // Turns: worker 0 waits at barrier 1, worker 1 at barrier 2.
    __device__ __forceinline__ void take_turn() { block_barrier_wait(1 + half, 2 * WARPGROUP); }
    __device__ __forceinline__ void pass_turn() { block_barrier_arrive(2 - half, 2 * WARPGROUP); }

    __device__ __forceinline__ void arrive(uint64_t *barrier) {
        if (lane == 0) barrier_arrive(shared_address(barrier));
    }
    __device__ __forceinline__ void wait_queries() {
        barrier_wait(shared_address(&shared->q_barriers[half].full[0]), q.phase, p.lost, WAIT_ATTENTION_FIXED);
        q.next();
    }
    __device__ __forceinline__ void wait_values() {
        barrier_wait(shared_address(&shared->v_barriers.full[v.stage]), v.phase, p.lost, WAIT_ATTENTION_STREAM);
    }
    __device__ __forceinline__ void release_queries() { arrive(&shared->q_barriers[half].empty[0]); }
    __device__ __forceinline__ void release_keys() {
        arrive(&shared->k_barriers.empty[k.stage]);
        k.next();
    }
    __device__ __forceinline__ void release_values() {
        arrive(&shared->v_barriers.empty[v.stage]);
        v.next();
    }

    // s = q k^T, begun.
    __device__ __forceinline__ void begin_scores() {
        barrier_wait(shared_address(&shared->k_barriers.full[k.stage]), k.phase, p.lost, WAIT_ATTENTION_STREAM);
        take_turn();
        wgmma_begin();
        multiply_queries<Heads, KEY_BLOCK>(s, q_tile, k_tiles + k.stage * (Shared::K_BYTES >> 4));
        wgmma_commit();
    }

    // o (+)= P v, begun. first: of the tile.
    __device__ __forceinline__ void begin_output(bool first) {
        wgmma_begin();
        multiply_rows<Heads::VALUE, KEY_BLOCK>(o, probabilities, v_tiles + v.stage * (Shared::V_BYTES >> 4), !first);
        wgmma_commit();
    }

    // Keys behind their query, in the block that begins with the tile's first query.
    __device__ __forceinline__ void mask_later_keys() {
        int row = half * HALF_ROWS + warp * WARP_ROWS + lane / 4, column = lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < KEY_BLOCK / 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (8 * j + column + e % 2 > row + e / 2 * 8) s[4 * j + e] = -INFINITY;
    }

    __device__ __forceinline__ void softmax_begin() {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            largest[r] = -INFINITY;
            sum[r] = 0;
        }
    }

    // Scores -> 2^(score - largest). The first keys of a row always hold one it sees: largest is finite from then on.
    __device__ __forceinline__ void softmax_step() {
        float shift[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float most = largest[r];
#pragma unroll
            for (int j = 0; j < KEY_BLOCK / 8; j++) most = fmaxf(most, fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
            // A row's columns are with four neighbouring lanes.
            most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, 1));
            most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, 2));
            correction[r] = exp2_short((largest[r] - most) * p.scale);
            largest[r] = most;
            shift[r] = most * p.scale;
            sum[r] *= correction[r];
        }
        float odd[2] = {0, 0};
#pragma unroll
        for (int j = 0; j < KEY_BLOCK / 8; j++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float *pair = &s[4 * j + 2 * r];
                pair[0] = exp2_short(pair[0] * p.scale - shift[r]);
                pair[1] = exp2_short(pair[1] * p.scale - shift[r]);
                sum[r] += pair[0];
                odd[r] += pair[1];
            }
        sum[0] += odd[0];
        sum[1] += odd[1];
    }

    __device__ __forceinline__ void round_probabilities() {
#pragma unroll
        for (int i = 0; i < KEY_BLOCK / 4; i++) probabilities[i] = pack_pair(s[2 * i], s[2 * i + 1]);
    }

    __device__ __forceinline__ void correct_output() {
#pragma unroll
        for (int j = 0; j < Heads::VALUE / 2; j++) o[j] *= correction[j / 2 % 2];
    }

    // The denominators of a tile's rows: writes their logs, and returns what o is to be multiplied by in inverse.
    __device__ __forceinline__ void softmax_finish(const struct attention_tile &tile, float (&inverse)[2]) {
        int row = tile.index * TILE_ROWS + half * HALF_ROWS + warp * WARP_ROWS + lane / 4;
        accum *head = p.lse + ((size_t)tile.b * (size_t)p.heads + (size_t)tile.h) * (size_t)p.length;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float all = sum[r] + __shfl_xor_sync(ALL_LANES, sum[r], 1);
            all += __shfl_xor_sync(ALL_LANES, all, 2);
            // From 1 to length, where this log's error is 2^-22.
            if (lane % 4 == 0 && row + 8 * r < p.length)
                head[row + 8 * r] = (largest[r] * p.scale + __log2f(all)) * LN_2;
            inverse[r] = 1 / all;
        }
    }

    __device__ __forceinline__ void store_output(const struct attention_tile &tile, const float (&inverse)[2]) {
        int row = tile.index * TILE_ROWS + half * HALF_ROWS + warp * WARP_ROWS;
        size_t stride = (size_t)p.heads * (size_t)p.value;
        real *out = p.o + ((size_t)tile.b * (size_t)p.length + (size_t)row) * stride + (size_t)tile.h * (size_t)p.value;
        store_rows<Heads::VALUE>(shared_address(shared->staging[4 * half + warp]), o, inverse[0], inverse[1], out,
                                 stride, p.length - row, p.value);
    }

    __device__ __forceinline__ void run() {
        struct attention_tile tile;
        float inverse[2];
        if (half == 1) block_barrier_arrive(1, 2 * WARPGROUP); // the first turn is worker 0's
        if (!next_tile(&tile)) return;
        wait_queries();
        begin_scores();
        pass_turn();
        wgmma_wait<0>();
        wgmma_read(s);
        release_keys();
        if (tile.index == 0) release_queries();
        mask_later_keys();
        softmax_begin();
        softmax_step();
        round_probabilities();
        for (;;) {
            // The probabilities of the block with the tile's own keys are there; blocks before it follow.
#pragma unroll 1
            for (int block = tile.index - 1; block >= 0; block--) {
                begin_scores();
                wait_values();
                begin_output(block == tile.index - 1);
                pass_turn();
                wgmma_wait<1>();
                wgmma_read(s);
                release_keys();
                if (block == 0) release_queries();
                softmax_step();
                wgmma_wait<0>();
                wgmma_read(o);
                release_values();
                correct_output();
                round_probabilities();
            }
            struct attention_tile next;
            if (!next_tile(&next)) break;
            wait_queries();
            begin_scores(); // of the next tile
            wait_values();
            begin_output(tile.index == 0);
            pass_turn();
            softmax_finish(tile, inverse);
            wgmma_wait<1>();
            wgmma_read(s);
            release_keys();
            if (next.index == 0) release_queries();
            mask_later_keys();
            softmax_begin();
            softmax_step();
            wgmma_wait<0>();
            wgmma_read(o);
            release_values();
            store_output(tile, inverse);
            round_probabilities();
            tile = next;
        }
        wait_values();
        take_turn();
        begin_output(tile.index == 0);
        pass_turn();
        softmax_finish(tile, inverse);
        wgmma_wait<0>();
        wgmma_read(o);
        release_values();
        store_output(tile, inverse);
    }
};

template <class Heads>
static __global__ void __launch_bounds__(ATTENTION_THREADS, 1)
    forward_kernel(const __grid_constant__ struct forward_parameters p) {
    if constexpr (WGMMA) {
        extern __shared__ __align__(1024) char shared_memory[];
        struct forward_shared<Heads> *shared = (struct forward_shared<Heads> *)shared_memory;
        block_run([&] { shared->init(); }, [&] { load_keys_and_values<Heads>(p, shared); },
                  [&] { load_tile_queries<Heads>(p, shared); },
                  [&](int half, int warp) { forward_worker<Heads>(p, shared, half, warp).run(); });
    }
}

// ---- host ----

static struct forward_parameters forward_parameters_of(real *o, accum *lse, const struct attention_operands *a) {
    const struct attention_shape *s = &a->shape;
    struct forward_parameters p = {};
    p.q = maps_of_queries(a, HALF_ROWS);
    p.k = maps_of_keys(a, KEY_BLOCK);
    p.v = map_of_values(a, KEY_BLOCK);
    p.o = o;
    p.lse = lse;
    p.order = tile_order_of(s);
    p.counters = attention_wgmma_counters(ATTENTION_FORWARD);
    p.lost = lost_wait_record();
    p.length = s->length;
    p.heads = s->heads;
    p.value = s->value_dim;
    p.scale = (float)s->scale * LOG2_E;
    return p;
}

static void forward_launch(const struct forward_parameters &p, const struct attention_shape *s) {
    with_head_sizes(s, [&](auto heads) {
        using Heads = decltype(heads);
        launch_persistent<forward_kernel<Heads>>(sizeof(struct forward_shared<Heads>), p);
    });
}

void attention_wgmma_forward(real *o, accum *lse, const struct attention_operands *a) {
    forward_launch(forward_parameters_of(o, lse, a), &a->shape);
}

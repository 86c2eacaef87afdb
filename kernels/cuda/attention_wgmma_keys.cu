// Gradients of keys and values by WGMMA: a tile of 128 keys meets the queries that see it in blocks of 64, the first
// ones first. Scores are computed transposed, keys in rows:
//   P^T = exp2(scale K Q^T - lse)     dV += P^T dO      dP^T = V dO^T
//   dS^T = P^T (dP^T - D)             dK += dS^T Q
// so that P^T and dS^T leave one product's registers as they enter the next, and never lie in memory. A tile's sums have
// one owner and one order.
//
// Registers are the limit: S^T and dP^T take turns in one array, rounded P^T and dS^T in another. A worker's
// exponentials run under its own dK product of the block before. The two workers take turns at issuing (S^T, dK) and
// (dP^T, dV); without turns ptxas finds no room.
#include <math.h>

#include "kernels/cuda/attention_wgmma.cuh"

enum { QUERY_BLOCK = 64, QUERY_STAGES = 3 };
static_assert((int)QUERY_BLOCK == (int)HALF_ROWS && (int)QUERY_BLOCK == (int)TERM_BLOCK,
              "a block of queries is as large as a worker's keys");

struct keys_parameters {
    struct query_maps q, k;
    CUtensorMap v, d_o;
    const float *terms;
    real *dkv;
    real *rope; // [n, N, dr]
    struct tile_order order;
    struct tile_counters *counters;
    struct lost_wait *lost;
    int length, batch, heads, nope_dim, rope_dim, value_dim;
    float scale, scale_log2; // of scores; into units of log 2

    __device__ int query_blocks() const { return (length + QUERY_BLOCK - 1) / QUERY_BLOCK; }
};

template <class Heads> struct keys_shared {
    static constexpr int Q_BYTES = Heads::query_bytes(HALF_ROWS), V_BYTES = Heads::value_bytes(HALF_ROWS);
    static constexpr int BYTES = Q_BYTES + V_BYTES, TERM_BYTES = 2 * TERM_BLOCK * (int)sizeof(float);

    struct rows {
        char q[Q_BYTES], v[V_BYTES];
    };
    alignas(1024) struct rows keys[2]; // keys and values of each worker
    struct rows queries[QUERY_STAGES]; // queries and output gradients
    char staging[WORKER_WARPS][STAGING_BYTES];
    float terms[QUERY_STAGES][2][TERM_BLOCK]; // logs of denominators, D
    struct ring_barriers<QUERY_STAGES> query_barriers;
    struct ring_barriers<1> key_barriers[2];
    struct tile_queue tiles;

    __device__ void init() {
        query_barriers.init(WORKER_WARPS);
        for (int half = 0; half < 2; half++) key_barriers[half].init(WORKER_WARPS / 2);
        tiles.barriers.init(TILE_READERS);
    }
};

// ---- loading ----

template <class Heads>
static __device__ void load_query_blocks(const struct keys_parameters &p, struct keys_shared<Heads> *shared) {
    using Shared = struct keys_shared<Heads>;
    struct ring_place<QUERY_STAGES> place;
    int blocks = p.query_blocks();
    prefetch_queries(&p.q);
    tma_prefetch(&p.d_o);
    tiles_take<false>(p.counters, p.order, &shared->tiles, p.lost, [&](const struct attention_tile &tile) {
        int first_terms = (tile.b * p.heads + tile.h) * attention_term_blocks(p.length);
#pragma unroll 1
        for (int block = tile.index * (TILE_ROWS / QUERY_BLOCK); block < blocks; block++) {
            typename Shared::rows *rows = &shared->queries[place.stage];
            uint32_t full = shared_address(&shared->query_barriers.full[place.stage]);
            barrier_wait(shared_address(&shared->query_barriers.empty[place.stage]), place.phase ^ 1, p.lost,
                         WAIT_ATTENTION_STREAM_ROOM);
            barrier_arrive_expect(full, Shared::BYTES + Shared::TERM_BYTES);
            load_queries<Heads, QUERY_BLOCK>(shared_address(rows->q), &p.q, block * QUERY_BLOCK, tile, full);
            bulk_load(shared_address(shared->terms[place.stage]),
                      p.terms + (size_t)(first_terms + block) * 2 * TERM_BLOCK, Shared::TERM_BYTES, full);
            load_values<Heads, QUERY_BLOCK>(shared_address(rows->v), &p.d_o, block * QUERY_BLOCK, tile, full);
            place.next();
        }
    });
}

template <class Heads>
static __device__ void load_tile_keys(const struct keys_parameters &p, struct keys_shared<Heads> *shared) {
    prefetch_queries(&p.k);
    tma_prefetch(&p.v);
    tiles_load_rows<false>(
        p.order, &shared->tiles, shared->key_barriers, keys_shared<Heads>::BYTES, p.lost,
        [&](const struct attention_tile &tile, int half, int row, uint32_t full) {
            load_queries<Heads, HALF_ROWS>(shared_address(shared->keys[half].q), &p.k, row, tile, full);
            load_values<Heads, HALF_ROWS>(shared_address(shared->keys[half].v), &p.v, row, tile, full);
        });
}

// ---- multiplying ----

// One worker warpgroup: a thread's rows are keys, its columns queries.
template <class Heads> struct keys_worker {
    using Shared = struct keys_shared<Heads>;
    const struct keys_parameters &p;
    Shared *const shared;
    const int half, warp, lane; // which worker; in it
    const uint32_t k_tile, v_tile, q_tiles, d_o_tiles;

    struct ring_place<QUERY_STAGES> place;
    struct ring_place<1> keys;
    struct tile_reader reader;
    struct attention_tile tile;
    int blocks; // of queries that this worker's keys meet
    int gap;    // from the first block's first query to this worker's first key: 0 or 64 rows

    float dk[Heads::QUERY_COLUMNS / 2], dv[Heads::VALUE / 2];
    float s[QUERY_BLOCK / 2];          // S^T, then dP^T
    uint32_t factors[QUERY_BLOCK / 4]; // P^T, then dS^T

    __device__ __forceinline__ keys_worker(const struct keys_parameters &p, Shared *shared, int half, int warp)
        : p(p), shared(shared), half(half), warp(warp), lane((int)threadIdx.x % 32),
          k_tile(wgmma_descriptor(shared_address(shared->keys[half].q), 0)),
          v_tile(wgmma_descriptor(shared_address(shared->keys[half].v), 0)),
          q_tiles(wgmma_descriptor(shared_address(shared->queries[0].q), QUERY_BLOCK)),
          d_o_tiles(wgmma_descriptor(shared_address(shared->queries[0].v), QUERY_BLOCK)) {}

    // Turns: worker 0 waits at barrier 1, worker 1 at barrier 2. Both take two a block.
    __device__ __forceinline__ void take_turn() { block_barrier_wait(1 + half, 2 * WARPGROUP); }
    __device__ __forceinline__ void pass_turn() { block_barrier_arrive(2 - half, 2 * WARPGROUP); }

    __device__ __forceinline__ void wait_keys() {
        barrier_wait(shared_address(&shared->key_barriers[half].full[0]), keys.phase, p.lost, WAIT_ATTENTION_FIXED);
        keys.next();
    }
    __device__ __forceinline__ void release_keys() {
        if (lane == 0) barrier_arrive(shared_address(&shared->key_barriers[half].empty[0]));
    }
    __device__ __forceinline__ void wait_queries() {
        barrier_wait(shared_address(&shared->query_barriers.full[place.stage]), place.phase, p.lost,
                     WAIT_ATTENTION_STREAM);
    }
    __device__ __forceinline__ void release_queries(int stage) {
        if (lane == 0) barrier_arrive(shared_address(&shared->query_barriers.empty[stage]));
    }

    __device__ __forceinline__ bool next_tile() {
        int number = reader.next<true>(&shared->tiles, p.lost);
        if (number < 0) return false;
        tile = tile_at<false>(p.order, number);
        blocks = p.query_blocks() - tile.index * (TILE_ROWS / QUERY_BLOCK);
        gap = 0;
        if (half == 0) return true;
        // All queries of the first block are before this worker's keys. Where there is no other block there are no such
        // keys either, and everything is masked.
        if (blocks == 1) {
            gap = HALF_ROWS;
            return true;
        }
        blocks--;
        wait_queries();
        __syncwarp();
        release_queries(place.stage);
        place.next();
        for (int turn = 0; turn < 2; turn++) {
            take_turn();
            pass_turn();
        }
        return true;
    }

    // S^T = K Q^T, begun.
    __device__ __forceinline__ void begin_scores() {
        wgmma_begin();
        multiply_queries<Heads, QUERY_BLOCK>(s, k_tile, q_tiles + place.stage * (Shared::BYTES >> 4));
        wgmma_commit();
    }

    // dK (+)= dS^T Q of the queries in that stage, begun. first: of the tile.
    __device__ __forceinline__ void begin_dk(int stage, bool first) {
        wgmma_begin();
        multiply_rows<Heads::QUERY_COLUMNS, QUERY_BLOCK>(dk, factors, q_tiles + stage * (Shared::BYTES >> 4), !first);
        wgmma_commit();
    }

    // S^T -> P^T, zero where the key is behind the query; in a tile's first block.
    __device__ __forceinline__ void probabilities(bool masked) {
        uint32_t logs = shared_address(shared->terms[place.stage][0]) + lane % 4 * sizeof(float2);
#pragma unroll
        for (int j = 0; j < QUERY_BLOCK / 8; j++) {
            float2 log = shared_load_float2(logs + 8 * j * sizeof(float));
#pragma unroll
            for (int r = 0; r < 2; r++) {
                s[4 * j + 2 * r] = exp2_short(s[4 * j + 2 * r] * p.scale_log2 - log.x);
                s[4 * j + 2 * r + 1] = exp2_short(s[4 * j + 2 * r + 1] * p.scale_log2 - log.y);
            }
        }
        if (!masked) return;
        int distance = gap + warp * WARP_ROWS + lane / 4 - lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < QUERY_BLOCK / 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (distance + e / 2 * 8 > 8 * j + e % 2) s[4 * j + e] = 0;
    }

    // (P^T, dP^T) -> dS^T, rounded
    __device__ __forceinline__ void score_gradients() {
        uint32_t terms = shared_address(shared->terms[place.stage][1]) + lane % 4 * sizeof(float2);
#pragma unroll
        for (int j = 0; j < QUERY_BLOCK / 8; j++) {
            float2 d = shared_load_float2(terms + 8 * j * sizeof(float));
#pragma unroll
            for (int r = 0; r < 2; r++) {
                uint32_t pair = factors[2 * j + r];
                float first = __uint_as_float(pair << 16), second = __uint_as_float(pair & 0xffff0000u);
                factors[2 * j + r] = pack_pair(first * (s[4 * j + 2 * r] - d.x), second * (s[4 * j + 2 * r + 1] - d.y));
            }
        }
    }

    // From S^T of the stage's queries to their dS^T, with dV added. FIRST: in a tile; else dK of the block before is
    // running, whose registers dS^T is in. Nothing runs at the end.
    template <bool FIRST> __device__ __forceinline__ void block() {
        wgmma_read(s);
        probabilities(FIRST);
        if (!FIRST) {
            wgmma_read(s);
            wgmma_wait<0>();
            release_queries(place.stage ? place.stage - 1 : QUERY_STAGES - 1);
        }
#pragma unroll
        for (int i = 0; i < QUERY_BLOCK / 4; i++) factors[i] = pack_pair(s[2 * i], s[2 * i + 1]);
        uint32_t d_o = d_o_tiles + place.stage * (Shared::BYTES >> 4);
        take_turn();
        wgmma_begin();
        multiply_values<Heads, QUERY_BLOCK>(s, v_tile, d_o);
        wgmma_commit();
        multiply_rows<Heads::VALUE, QUERY_BLOCK>(dv, factors, d_o, !FIRST);
        wgmma_commit();
        pass_turn();
        wgmma_wait<0>();
        wgmma_read(s);
        score_gradients();
    }

    __device__ __forceinline__ void first_block() {
        wait_keys();
        wait_queries();
        take_turn();
        begin_scores();
        pass_turn();
    }

    __device__ __forceinline__ int first_row(const struct attention_tile &t) {
        return t.index * TILE_ROWS + half * HALF_ROWS + warp * WARP_ROWS;
    }
    __device__ __forceinline__ real *output_row(const struct attention_tile &t, size_t *stride) {
        size_t width = (size_t)(p.nope_dim + p.value_dim);
        *stride = (size_t)p.heads * width;
        return p.dkv + ((size_t)t.b * (size_t)p.length + (size_t)first_row(t)) * *stride + (size_t)t.h * width;
    }

    __device__ __forceinline__ void store_dv(const struct attention_tile &t) {
        size_t stride;
        real *out = output_row(t, &stride) + p.nope_dim;
        wgmma_read(dv);
        store_rows<Heads::VALUE>(shared_address(shared->staging[4 * half + warp]), dv, 1, 1, out, stride,
                                 p.length - first_row(t), p.value_dim);
    }

    // The rope columns go into this head's [N, dr].
    __device__ __forceinline__ void store_dk(const struct attention_tile &t) {
        size_t stride, sequence = (size_t)t.h * (size_t)p.batch + (size_t)t.b, dr = (size_t)p.rope_dim;
        real *out = output_row(t, &stride);
        real *rope = p.rope + (sequence * (size_t)p.length + (size_t)first_row(t)) * dr;
        uint32_t staging = shared_address(shared->staging[4 * half + warp]);
        int rows = p.length - first_row(t);
        wgmma_read(dk);
        store_rows<Heads::NOPE>(staging, dk, p.scale, p.scale, out, stride, rows, p.nope_dim);
        store_rows<Heads::ROPE>(staging, dk + Heads::NOPE_CHUNKS * CHUNK_COLUMNS / 2, p.scale, p.scale, rope, dr, rows,
                                p.rope_dim);
    }

    __device__ __forceinline__ void run() {
        if (half == 1) block_barrier_arrive(1, 2 * WARPGROUP); // the first turn is worker 0's
        if (!next_tile()) return;
        first_block();
        wgmma_wait<0>();
        block<true>();
        for (;;) {
#pragma unroll 1
            for (int n = 1; n < blocks; n++) {
                int before = place.stage;
                place.next();
                wait_queries();
                take_turn();
                begin_scores();
                begin_dk(before, n == 1);
                pass_turn();
                wgmma_wait<1>();
                block<false>();
            }
            release_keys();
            int last = place.stage;
            bool only = blocks == 1;
            struct attention_tile done = tile;
            place.next();
            if (!next_tile()) {
                begin_dk(last, only);
                store_dv(done);
                wgmma_wait<0>();
                store_dk(done);
                return;
            }
            begin_dk(last, only);
            store_dv(done);
            first_block(); // of the next tile
            wgmma_wait<1>();
            release_queries(last);
            store_dk(done);
            wgmma_wait<0>();
            block<true>();
        }
    }
};

template <class Heads>
static __global__ void __launch_bounds__(ATTENTION_THREADS, 1)
    keys_kernel(const __grid_constant__ struct keys_parameters p) {
    if constexpr (WGMMA) {
        extern __shared__ __align__(1024) char shared_memory[];
        struct keys_shared<Heads> *shared = (struct keys_shared<Heads> *)shared_memory;
        block_run([&] { shared->init(); }, [&] { load_query_blocks<Heads>(p, shared); },
                  [&] { load_tile_keys<Heads>(p, shared); },
                  [&](int half, int warp) { keys_worker<Heads>(p, shared, half, warp).run(); });
    }
}

// ---- host ----

void attention_wgmma_keys(real *dkv, real *rope, const struct attention_operands *a) {
    const struct attention_shape *s = &a->shape;
    struct keys_parameters p = {};
    p.q = maps_of_queries(a, QUERY_BLOCK);
    p.k = maps_of_keys(a, HALF_ROWS);
    p.v = map_of_values(a, HALF_ROWS);
    p.d_o = map_of_output_gradients(a, QUERY_BLOCK);
    p.terms = a->terms;
    p.dkv = dkv;
    p.rope = rope;
    p.order = tile_order_of(s);
    p.counters = attention_wgmma_counters(ATTENTION_KEYS);
    p.lost = lost_wait_record();
    p.length = s->length;
    p.batch = s->batch;
    p.heads = s->heads;
    p.nope_dim = s->nope_dim;
    p.rope_dim = s->rope_dim;
    p.value_dim = s->value_dim;
    p.scale = (float)s->scale;
    p.scale_log2 = p.scale * LOG2_E;
    with_head_sizes(s, [&](auto heads) {
        using Heads = decltype(heads);
        launch_persistent<keys_kernel<Heads>>(sizeof(struct keys_shared<Heads>), p);
    });
}

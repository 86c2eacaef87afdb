// Gradients of queries by WGMMA: a tile of 128 queries meets the keys it sees in blocks of 64, the last ones first:
//   P = exp2(scale Q K^T - lse)     dP = dO V^T     dS = P (dP - D)     dQ += dS K
// dS leaves the registers of one product as it enters the next. A tile's sums have one owner and one order.
//
// A worker has three products running at once: scores of a block, dQ of the block before, dP of the block. The
// exponentials run under the last two.
#include <math.h>

#include "kernels/cuda/attention_wgmma.cuh"

enum { KEY_BLOCK = 64, KEY_STAGES = 3 };
static_assert((int)KEY_BLOCK == (int)HALF_ROWS, "a block of keys is as large as a worker's queries");

struct queries_parameters {
    struct query_maps q, k;
    CUtensorMap v, d_o;
    const float *terms;
    real *dq;
    struct tile_order order;
    struct tile_counters *counters;
    struct lost_wait *lost;
    int length, heads, nope_dim, rope_dim;
    float scale, scale_log2; // of scores; into units of log 2

    // Block with the last keys that a tile's queries see.
    __device__ int last_key_block(const struct attention_tile &tile) const {
        return (min((tile.index + 1) * TILE_ROWS, length) - 1) / KEY_BLOCK;
    }
};

template <class Heads> struct queries_shared {
    static constexpr int Q_BYTES = Heads::query_bytes(HALF_ROWS), D_O_BYTES = Heads::value_bytes(HALF_ROWS);
    static constexpr int K_BYTES = Heads::query_bytes(KEY_BLOCK), V_BYTES = Heads::value_bytes(KEY_BLOCK);

    struct rows {
        char q[Q_BYTES], d_o[D_O_BYTES];
    };
    alignas(1024) struct rows queries[2]; // of each worker
    char k[KEY_STAGES][K_BYTES], v[KEY_STAGES][V_BYTES];
    char staging[WORKER_WARPS][STAGING_BYTES];
    struct ring_barriers<KEY_STAGES> k_barriers, v_barriers;
    struct ring_barriers<1> query_barriers[2];
    struct tile_queue tiles;

    __device__ void init() {
        k_barriers.init(WORKER_WARPS);
        v_barriers.init(WORKER_WARPS);
        for (int half = 0; half < 2; half++) query_barriers[half].init(WORKER_WARPS / 2);
        tiles.barriers.init(TILE_READERS);
    }
};

// ---- loading ----

template <class Heads>
static __device__ void load_keys_and_values(const struct queries_parameters &p, struct queries_shared<Heads> *shared) {
    using Shared = struct queries_shared<Heads>;
    struct ring_place<KEY_STAGES> place; // of both rings, which move together
    prefetch_queries(&p.k);
    tma_prefetch(&p.v);
    tiles_take<true>(p.counters, p.order, &shared->tiles, p.lost, [&](const struct attention_tile &tile) {
#pragma unroll 1
        for (int block = p.last_key_block(tile); block >= 0; block--) {
            uint32_t full = shared_address(&shared->k_barriers.full[place.stage]);
            barrier_wait(shared_address(&shared->k_barriers.empty[place.stage]), place.phase ^ 1, p.lost,
                         WAIT_ATTENTION_STREAM_ROOM);
            barrier_arrive_expect(full, Shared::K_BYTES);
            load_queries<Heads, KEY_BLOCK>(shared_address(shared->k[place.stage]), &p.k, block * KEY_BLOCK, tile, full);
            full = shared_address(&shared->v_barriers.full[place.stage]);
            barrier_wait(shared_address(&shared->v_barriers.empty[place.stage]), place.phase ^ 1, p.lost,
                         WAIT_ATTENTION_STREAM_ROOM);
            barrier_arrive_expect(full, Shared::V_BYTES);
            load_values<Heads, KEY_BLOCK>(shared_address(shared->v[place.stage]), &p.v, block * KEY_BLOCK, tile, full);
            place.next();
        }
    });
}

template <class Heads>
static __device__ void load_tile_queries(const struct queries_parameters &p, struct queries_shared<Heads> *shared) {
    prefetch_queries(&p.q);
    tma_prefetch(&p.d_o);
    tiles_load_rows<true>(
        p.order, &shared->tiles, shared->query_barriers,
        queries_shared<Heads>::Q_BYTES + queries_shared<Heads>::D_O_BYTES, p.lost,
        [&](const struct attention_tile &tile, int half, int row, uint32_t full) {
            load_queries<Heads, HALF_ROWS>(shared_address(shared->queries[half].q), &p.q, row, tile, full);
            load_values<Heads, HALF_ROWS>(shared_address(shared->queries[half].d_o), &p.d_o, row, tile, full);
        });
}

// ---- multiplying ----

// One worker warpgroup. Of arrays with two elements, the first is of a thread's upper row, the other of its lower one.
template <class Heads> struct queries_worker {
    using Shared = struct queries_shared<Heads>;
    const struct queries_parameters &p;
    Shared *const shared;
    const int half, warp, lane; // which worker; in it
    const uint32_t q_tile, d_o_tile, k_tiles, v_tiles;

    struct ring_place<KEY_STAGES> k, v;
    struct ring_place<1> queries;
    struct tile_reader reader;
    struct attention_tile tile;
    int last;                  // block of keys that this worker's queries see
    float logs[2], d_terms[2]; // of denominators; D

    float dq[Heads::QUERY_COLUMNS / 2], s[KEY_BLOCK / 2], dp[KEY_BLOCK / 2]; // s: scores, then P
    uint32_t ds[KEY_BLOCK / 4];

    __device__ __forceinline__ queries_worker(const struct queries_parameters &p, Shared *shared, int half, int warp)
        : p(p), shared(shared), half(half), warp(warp), lane((int)threadIdx.x % 32),
          q_tile(wgmma_descriptor(shared_address(shared->queries[half].q), 0)),
          d_o_tile(wgmma_descriptor(shared_address(shared->queries[half].d_o), 0)),
          k_tiles(wgmma_descriptor(shared_address(shared->k), KEY_BLOCK)),
          v_tiles(wgmma_descriptor(shared_address(shared->v), 0)) {}

    __device__ __forceinline__ void wait_queries() {
        barrier_wait(shared_address(&shared->query_barriers[half].full[0]), queries.phase, p.lost,
                     WAIT_ATTENTION_FIXED);
        queries.next();
    }
    __device__ __forceinline__ void wait_keys() {
        barrier_wait(shared_address(&shared->k_barriers.full[k.stage]), k.phase, p.lost, WAIT_ATTENTION_STREAM);
    }
    __device__ __forceinline__ void wait_values() {
        barrier_wait(shared_address(&shared->v_barriers.full[v.stage]), v.phase, p.lost, WAIT_ATTENTION_STREAM);
    }
    __device__ __forceinline__ void arrive(uint64_t *barrier) {
        if (lane == 0) barrier_arrive(shared_address(barrier));
    }
    __device__ __forceinline__ void release_queries() { arrive(&shared->query_barriers[half].empty[0]); }
    __device__ __forceinline__ void release_keys(int stage) { arrive(&shared->k_barriers.empty[stage]); }
    __device__ __forceinline__ void release_values() {
        arrive(&shared->v_barriers.empty[v.stage]);
        v.next();
    }

    __device__ __forceinline__ int first_row(const struct attention_tile &t) {
        return t.index * TILE_ROWS + half * HALF_ROWS + warp * WARP_ROWS;
    }

    __device__ __forceinline__ bool next_tile() {
        int number = reader.next<true>(&shared->tiles, p.lost);
        if (number < 0) return false;
        tile = tile_at<true>(p.order, number);
        int row = first_row(tile) + lane / 4;
        const float *terms = p.terms + (size_t)(tile.b * p.heads + tile.h) * attention_term_stride(p.length) +
                             row / TERM_BLOCK * 2 * TERM_BLOCK + row % TERM_BLOCK;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            logs[r] = __ldg(terms + 8 * r);
            d_terms[r] = __ldg(terms + 8 * r + TERM_BLOCK);
        }
        last = p.last_key_block(tile);
        // All keys of the last block may be behind this worker's queries.
        if (last > tile.index * (TILE_ROWS / KEY_BLOCK) + half) {
            wait_keys();
            wait_values();
            __syncwarp();
            release_keys(k.stage);
            release_values();
            k.next();
            last--;
        }
        return true;
    }

    // S = Q K^T and dP = dO V^T, begun.
    __device__ __forceinline__ void begin_scores() {
        wait_keys();
        wgmma_begin();
        multiply_queries<Heads, KEY_BLOCK>(s, q_tile, k_tiles + k.stage * (Shared::K_BYTES >> 4));
        wgmma_commit();
    }
    __device__ __forceinline__ void begin_dp() {
        wait_values();
        wgmma_begin();
        multiply_values<Heads, KEY_BLOCK>(dp, d_o_tile, v_tiles + v.stage * (Shared::V_BYTES >> 4));
        wgmma_commit();
    }

    // dQ (+)= dS K of the keys in that stage, begun. first: of the tile.
    __device__ __forceinline__ void begin_dq(int stage, bool first) {
        wgmma_begin();
        multiply_rows<Heads::QUERY_COLUMNS, KEY_BLOCK>(dq, ds, k_tiles + stage * (Shared::K_BYTES >> 4), !first);
        wgmma_commit();
    }

    // S -> P, zero where the key is behind the query; in a tile's first block.
    __device__ __forceinline__ void probabilities(bool masked) {
        wgmma_read(s);
#pragma unroll
        for (int j = 0; j < KEY_BLOCK / 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) s[4 * j + e] = exp2_short(s[4 * j + e] * p.scale_log2 - logs[e / 2]);
        if (!masked) return;
        int distance = first_row(tile) + lane / 4 - last * KEY_BLOCK - lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < KEY_BLOCK / 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (8 * j + e % 2 > distance + e / 2 * 8) s[4 * j + e] = 0;
    }

    // (P, dP) -> dS, rounded
    __device__ __forceinline__ void score_gradients() {
        wgmma_read(dp);
        release_values();
#pragma unroll
        for (int i = 0; i < KEY_BLOCK / 4; i++)
            ds[i] = pack_pair(s[2 * i] * (dp[2 * i] - d_terms[i % 2]), s[2 * i + 1] * (dp[2 * i + 1] - d_terms[i % 2]));
    }

    // From a tile's first products to dS. Nothing runs at the end.
    __device__ __forceinline__ void first_block() {
        wgmma_wait<1>();
        probabilities(true);
        wgmma_wait<0>();
        if (last == 0) release_queries();
        score_gradients();
    }

    __device__ __forceinline__ void store_dq(const struct attention_tile &t) {
        size_t width = (size_t)(p.nope_dim + p.rope_dim), stride = (size_t)p.heads * width;
        int row = first_row(t);
        real *out = p.dq + ((size_t)t.b * (size_t)p.length + (size_t)row) * stride + (size_t)t.h * width;
        uint32_t staging = shared_address(shared->staging[4 * half + warp]);
        wgmma_read(dq);
        store_rows<Heads::NOPE>(staging, dq, p.scale, p.scale, out, stride, p.length - row, p.nope_dim);
        store_rows<Heads::ROPE>(staging, dq + Heads::NOPE_CHUNKS * CHUNK_COLUMNS / 2, p.scale, p.scale,
                                out + p.nope_dim, stride, p.length - row, p.rope_dim);
    }

    __device__ __forceinline__ void run() {
        if (!next_tile()) return;
        wait_queries();
        begin_scores();
        begin_dp();
        first_block();
        for (;;) {
#pragma unroll 1
            for (int block = last - 1; block >= 0; block--) {
                int before = k.stage;
                k.next();
                begin_scores();
                begin_dq(before, block == last - 1);
                begin_dp();
                wgmma_wait<2>();
                probabilities(false);
                wgmma_wait<0>();
                release_keys(before);
                if (block == 0) release_queries();
                score_gradients();
            }
            int before = k.stage;
            bool only = last == 0;
            struct attention_tile done = tile;
            k.next();
            if (!next_tile()) {
                begin_dq(before, only);
                wgmma_wait<0>();
                store_dq(done);
                return;
            }
            begin_dq(before, only);
            wait_queries();
            begin_scores(); // of the next tile
            begin_dp();
            wgmma_wait<2>();
            release_keys(before);
            store_dq(done);
            first_block();
        }
    }
};

template <class Heads>
static __global__ void __launch_bounds__(ATTENTION_THREADS, 1)
    queries_kernel(const __grid_constant__ struct queries_parameters p) {
    if constexpr (WGMMA) {
        extern __shared__ __align__(1024) char shared_memory[];
        struct queries_shared<Heads> *shared = (struct queries_shared<Heads> *)shared_memory;
        block_run([&] { shared->init(); }, [&] { load_keys_and_values<Heads>(p, shared); },
                  [&] { load_tile_queries<Heads>(p, shared); },
                  [&](int half, int warp) { queries_worker<Heads>(p, shared, half, warp).run(); });
    }
}

// ---- host ----

void attention_wgmma_queries(real *dq, const struct attention_operands *a) {
    const struct attention_shape *s = &a->shape;
    struct queries_parameters p = {};
    p.q = maps_of_queries(a, HALF_ROWS);
    p.k = maps_of_keys(a, KEY_BLOCK);
    p.v = map_of_values(a, KEY_BLOCK);
    p.d_o = map_of_output_gradients(a, HALF_ROWS);
    p.terms = a->terms;
    p.dq = dq;
    p.order = tile_order_of(s);
    p.counters = attention_wgmma_counters(ATTENTION_QUERIES);
    p.lost = lost_wait_record();
    p.length = s->length;
    p.heads = s->heads;
    p.nope_dim = s->nope_dim;
    p.rope_dim = s->rope_dim;
    p.scale = (float)s->scale;
    p.scale_log2 = p.scale * LOG2_E;
    with_head_sizes(s, [&](auto heads) {
        using Heads = decltype(heads);
        launch_persistent<queries_kernel<Heads>>(sizeof(struct queries_shared<Heads>), p);
    });
}

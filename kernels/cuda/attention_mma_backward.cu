// attention_mma_keys, dk and dv of 128 keys from all queries that see them, and attention_mma_queries, dq of 128 queries
// from all keys that they see: without atomics, so that every sum has one order. Probabilities are computed again, in
// both, from the stored logs: P = exp(S - lse), dP = do V^T, dS = P (dP - D); dV = P^T do, dQ = scale dS K,
// dK = scale dS^T Q.
#include "kernels/cuda/attention_mma.cuh"

// Rows that come by at a time, and how many shares of columns the gradients of keys are split into, each with a block
// of its own, because registers hold no more than 320 columns of gradients.
template <int DQ, int DV> static constexpr __host__ __device__ int backward_step() { return DQ + DV <= 320 ? 64 : 32; }
template <int DQ, int DV> static constexpr __host__ __device__ int backward_shares() { return DQ + DV <= 320 ? 1 : 2; }
// Queries whose scores a warp of keys_kernel has at once.
enum { QUERIES_AT_ONCE = 32 };

template <int DQ, int DV> static constexpr size_t backward_shared_bytes() {
    constexpr int step = backward_step<DQ, DV>();
    return sizeof(real) * (TILE_ROWS + 2 * step) * tile_pitch(DQ + DV) + 2 * 2 * step * sizeof(float);
}

// ---- terms ----

static __device__ __forceinline__ const float *head_terms(const struct mma_operands &a, int b, int h) {
    return a.terms + (size_t)((unsigned)b * (unsigned)a.heads + (unsigned)h) * a.term_stride;
}

// Where a query's log lies in its head's terms; its D is TERM_BLOCK floats behind.
static __device__ __forceinline__ unsigned term_place(unsigned query) {
    return query / TERM_BLOCK * (2 * TERM_BLOCK) + query % TERM_BLOCK;
}

// tile [2, STEP] = logs, then Ds, of the queries of step j. Complete after copy_wait and __syncthreads. There are terms
// behind the last query too, up to a multiple of 128.
template <int STEP> static __device__ __forceinline__ void load_terms(float *tile, const float *terms, int j) {
    static_assert(TERM_BLOCK % STEP == 0, "a step's terms are in one block");
    unsigned i = threadIdx.x * 4, place = term_place((unsigned)j * STEP) + i / STEP * TERM_BLOCK + i % STEP;
    if (i < 2 * STEP) copy_async_16(tile + i, terms + place, true);
}

// ---- dk and dv ----

// S^T of keys (rows) and queries (columns) -> P^T; zero where the key is behind the query. logs: of the first query on.
template <int TILES>
static __device__ __forceinline__ void probabilities_of_keys(float (&s)[TILES][4], const float *logs, float scale,
                                                             bool masked, int first_key, int first_query) {
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int query = fragment_column(t, e);
            s[t][e] = exp2_short(fmaf(s[t][e], scale, -logs[query]));
            if (masked && first_key + fragment_row(e) > first_query + query) s[t][e] = 0;
        }
}

// The columns of dk from `nope` on into rope [N, dr] of this head; c's first column is column `from` of dk.
template <int TILES>
static __device__ __forceinline__ void store_rope(real *rope, const struct mma_operands &a, int first, int from,
                                                  const float (&c)[TILES][4]) {
#pragma unroll
    for (int e = 0; e < 4; e++) {
        int row = first + fragment_row(e);
        if (row >= a.length) continue;
        real *rope_row = rope + (size_t)row * (size_t)a.rope;
#pragma unroll
        for (int t = 0; t < TILES; t++) {
            int column = from + fragment_column(t, e) - a.nope;
            if (column >= 0 && column < a.rope) rope_row[column] = __float2bfloat16_rn(c[t][e]);
        }
    }
}

// blockIdx.y is the head. rope [n, N, dr]: dk's rope columns of each head.
template <int DQ, int DV>
static __global__ void __launch_bounds__(TILE_THREADS, 1)
    keys_kernel(real *dkv, real *rope, struct mma_operands a, int tiles, int batch) {
    constexpr int STEP = backward_step<DQ, DV>(), SHARES = backward_shares<DQ, DV>(), PITCH = tile_pitch(DQ + DV);
    constexpr int KEY_TILES = DQ / SHARES / 8, VALUE_TILES = DV / SHARES / 8, SCORE_TILES = QUERIES_AT_ONCE / 8;
    extern __shared__ uint4 shared_memory[];
    real *kv_tile = (real *)shared_memory;                      // [128, DQ + DV]: keys, then values
    real *qg_tiles = kv_tile + TILE_ROWS * PITCH;               // two of [STEP, DQ + DV]: queries, then d_o
    float *term_tiles = (float *)(qg_tiles + 2 * STEP * PITCH); // two of [2, STEP]: logs, then D

    // Early keys are seen by most queries: they go first.
    int share = (int)blockIdx.x % SHARES, tile = (int)blockIdx.x / SHARES % tiles, b = (int)blockIdx.x / SHARES / tiles;
    int h = (int)blockIdx.y;
    int first = tile * TILE_ROWS, warp_first = first + warp_row();
    int first_step = first / STEP, steps = (a.length - 1) / STEP + 1;
    struct head_rows queries = head_queries(a, b, h), gradients = head_output_gradients(a, b, h);
    const float *terms = head_terms(a, b, h);

    auto load_step = [&](int j) {
        real *to = qg_tiles + j % 2 * STEP * PITCH;
        load_tile<STEP, DQ, PITCH>(to, queries, j * STEP);
        load_tile<STEP, DV, PITCH>(to + DQ, gradients, j * STEP);
        load_terms<STEP>(term_tiles + j % 2 * 2 * STEP, terms, j);
    };

    load_tile<TILE_ROWS, DQ, PITCH>(kv_tile, head_keys(a, b, h), first);
    load_tile<TILE_ROWS, DV, PITCH>(kv_tile + DQ, head_values(a, b, h), first);
    load_step(first_step);
    float dk[KEY_TILES][4] = {}, dv[VALUE_TILES][4] = {};
    for (int j = first_step; j < steps; j++) {
        copy_wait();
        // This step's tiles are complete, and nobody reads the other ones any more.
        __syncthreads();
        if (j + 1 < steps) load_step(j + 1);
        const real *kv = kv_tile + warp_row() * PITCH, *qg_tile = qg_tiles + j % 2 * STEP * PITCH;
        const float *logs = term_tiles + j % 2 * 2 * STEP, *d = logs + STEP;
#pragma unroll 1
        for (int part = 0; part < STEP; part += QUERIES_AT_ONCE) {
            int first_query = j * STEP + part;
            if (first_query + QUERIES_AT_ONCE - 1 < warp_first) continue;
            bool masked = first_query < warp_first + WARP_ROWS - 1;
            const real *q = qg_tile + part * PITCH, *g = q + DQ;
            float p[SCORE_TILES][4], ds[SCORE_TILES][4];
            uint32_t factor[SCORE_TILES / 2][4];
            multiply_transposed<DQ, PITCH, PITCH>(p, kv, q);
            probabilities_of_keys(p, logs + part, a.scale * LOG2_E, masked, warp_first, first_query);
            round_to_fragments(factor, p);
            multiply_add<PITCH>(dv, factor, g + share * VALUE_TILES * 8);
            multiply_transposed<DV, PITCH, PITCH>(ds, kv + DQ, g);
#pragma unroll
            for (int t = 0; t < SCORE_TILES; t++)
#pragma unroll
                for (int e = 0; e < 4; e++) ds[t][e] = p[t][e] * (ds[t][e] - d[part + fragment_column(t, e)]);
            round_to_fragments(factor, ds);
            multiply_add<PITCH>(dk, factor, q + share * KEY_TILES * 8);
        }
    }

    int stride = a.heads * (a.nope + a.value), key_from = share * KEY_TILES * 8, value_from = share * VALUE_TILES * 8;
    real *out = head_begin(dkv, a, b, h, a.nope + a.value);
    store_rows(out + a.nope + value_from, stride, a.value - value_from, a.length, warp_first, dv);
    scale_all(dk, a.scale);
    store_rows(out + key_from, stride, a.nope - key_from, a.length, warp_first, dk);
    size_t sequence = (size_t)h * (size_t)batch + (size_t)b;
    store_rope(rope + sequence * (size_t)a.length * (size_t)a.rope, a, warp_first, key_from, dk);
}

// ---- dq ----

template <int DQ, int DV>
static __global__ void __launch_bounds__(TILE_THREADS, 1)
    queries_kernel(real *dq_out, struct mma_operands a, int tiles) {
    constexpr int STEP = backward_step<DQ, DV>(), PITCH = tile_pitch(DQ + DV);
    extern __shared__ uint4 shared_memory[];
    real *qg_tile = (real *)shared_memory;        // [128, DQ + DV]: queries, then d_o
    real *kv_tiles = qg_tile + TILE_ROWS * PITCH; // two of [STEP, DQ + DV]: keys, then values

    int tile = tiles - 1 - (int)blockIdx.x % tiles, h = (int)blockIdx.y, b = (int)blockIdx.x / tiles;
    int first = tile * TILE_ROWS, warp_first = first + warp_row();
    int last = min(first + TILE_ROWS, a.length) - 1, steps = last / STEP + 1;
    struct head_rows keys = head_keys(a, b, h), values = head_values(a, b, h);

    auto load_step = [&](int j) {
        real *to = kv_tiles + j % 2 * STEP * PITCH;
        load_tile<STEP, DQ, PITCH>(to, keys, j * STEP);
        load_tile<STEP, DV, PITCH>(to + DQ, values, j * STEP);
    };

    load_tile<TILE_ROWS, DQ, PITCH>(qg_tile, head_queries(a, b, h), first);
    load_tile<TILE_ROWS, DV, PITCH>(qg_tile + DQ, head_output_gradients(a, b, h), first);
    load_step(0);
    const float *terms = head_terms(a, b, h);
    float logs[2], d[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float *term = terms + term_place((unsigned)(warp_first + fragment_row(2 * r)));
        logs[r] = term[0];
        d[r] = term[TERM_BLOCK];
    }

    float dq[DQ / 8][4] = {};
    for (int j = 0; j < steps; j++) {
        copy_wait();
        __syncthreads();
        if (j + 1 < steps) load_step(j + 1);
        int first_key = j * STEP;
        if (first_key > warp_first + WARP_ROWS - 1) continue;
        bool masked = first_key + STEP - 1 > warp_first;
        const real *qg = qg_tile + warp_row() * PITCH, *kv = kv_tiles + j % 2 * STEP * PITCH;
        float s[STEP / 8][4], dp[STEP / 8][4];
        multiply_transposed<DQ, PITCH, PITCH>(s, qg, kv);
        multiply_transposed<DV, PITCH, PITCH>(dp, qg + DQ, kv + DQ);
#pragma unroll
        for (int t = 0; t < STEP / 8; t++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float p = exp2_short(fmaf(s[t][e], a.scale * LOG2_E, -logs[e / 2]));
                if (masked && first_key + fragment_column(t, e) > warp_first + fragment_row(e)) p = 0;
                dp[t][e] = p * (dp[t][e] - d[e / 2]);
            }
        uint32_t ds[STEP / 16][4];
        round_to_fragments(ds, dp);
        multiply_add<PITCH>(dq, ds, kv);
    }
    scale_all(dq, a.scale);
    int width = a.nope + a.rope;
    store_rows(head_begin(dq_out, a, b, h, width), a.heads * width, width, a.length, warp_first, dq);
}

// ---- host ----

void attention_mma_keys(real *dkv, real *rope, const struct attention_operands *a) {
    const struct attention_shape *s = &a->shape;
    int tiles = mma_tiles(*s);
    with_mma_sizes(s, [&](auto sizes) {
        constexpr int DQ = decltype(sizes)::DQ, DV = decltype(sizes)::DV;
        dim3 grid((unsigned)(tiles * s->batch * backward_shares<DQ, DV>()), (unsigned)s->heads);
        cuda_launch_shared<keys_kernel<DQ, DV>>(grid, TILE_THREADS, backward_shared_bytes<DQ, DV>(), dkv, rope,
                                                mma_operands_of(a), tiles, s->batch);
    });
}

void attention_mma_queries(real *dq, const struct attention_operands *a) {
    const struct attention_shape *s = &a->shape;
    int tiles = mma_tiles(*s);
    dim3 grid((unsigned)(tiles * s->batch), (unsigned)s->heads);
    with_mma_sizes(s, [&](auto sizes) {
        constexpr int DQ = decltype(sizes)::DQ, DV = decltype(sizes)::DV;
        cuda_launch_shared<queries_kernel<DQ, DV>>(grid, TILE_THREADS, backward_shared_bytes<DQ, DV>(), dq,
                                                   mma_operands_of(a), tiles);
    });
}

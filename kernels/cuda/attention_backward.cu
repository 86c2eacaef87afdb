// Gradients of causal attention, in passes without atomics, so that every sum has one order:
//   terms_kernel    per query, the log of its denominator and D = <do, o>
//   keys_kernel     dk and dv of 128 keys, from all queries that see them
//   sum_rope_kernel the gradient of the rope keys, which all heads share
//   queries_kernel  dq of 128 queries, from all keys that they see
// Probabilities are computed again, in both passes, from the stored logs: P = exp(S - lse), dP = do V^T,
// dS = P (dP - D); dV = P^T do, dQ = scale dS K, dK = scale dS^T Q.
#include "kernels/cuda/attention.cuh"
#include "kernels/cuda/scratch_attention.h"

// Heads whose rope gradients are in scratch memory at once, FP32: 16384 tokens of 128 heads with 64 rope columns would
// take 537 MB together, and take 134 MB so.
enum { HEADS_AT_ONCE = 32 };

// Rows that come by at a time, and how many shares of columns the gradients of keys are split into, each with a block
// of its own, because registers hold no more than 320 columns of gradients.
template <int DQ, int DV> static constexpr __host__ __device__ int backward_step() { return DQ + DV <= 320 ? 64 : 32; }
template <int DQ, int DV> static constexpr __host__ __device__ int backward_shares() { return DQ + DV <= 320 ? 1 : 2; }
// Queries whose scores a warp of keys_kernel has at once.
enum { QUERIES_AT_ONCE = 32 };

template <int DQ, int DV> static constexpr size_t backward_shared_bytes() {
    constexpr int step = backward_step<DQ, DV>();
    return sizeof(real) * (TILE_ROWS + 2 * step) * tile_pitch(DQ + DV) + 2 * step * sizeof(float2);
}

// ---- terms ----

enum { TERMS_THREADS = 256 };

// terms [B, n, T]: x = lse in units of log 2, y = <d_o, o>. d_o, o [N, n, value]. `lanes` threads, a power of two, for
// each token; blockIdx.y is the head.
static __global__ void __launch_bounds__(TERMS_THREADS)
    terms_kernel(float2 *terms, const real *d_o, const real *o, const accum *lse, int tokens, int lanes, int length,
                 int value, bool vectors) {
    int heads = (int)gridDim.y, h = (int)blockIdx.y, lane = (int)threadIdx.x % lanes;
    int token = (int)blockIdx.x * (TERMS_THREADS / lanes) + (int)threadIdx.x / lanes;
    float sum = 0;
    if (token < tokens) {
        size_t row = ((size_t)token * (size_t)heads + (size_t)h) * (size_t)value;
        const real *d_o_row = d_o + row, *o_row = o + row;
        if (vectors) {
            for (int c = lane * 8; c < value; c += lanes * 8) {
                union bf16x8 x, y;
                x.words = *(const uint4 *)(d_o_row + c);
                y.words = *(const uint4 *)(o_row + c);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float2 u = __bfloat1622float2(x.pairs[i]), v = __bfloat1622float2(y.pairs[i]);
                    sum = fmaf(u.x, v.x, sum);
                    sum = fmaf(u.y, v.y, sum);
                }
            }
        } else {
            for (int c = lane; c < value; c += lanes)
                sum = fmaf(__bfloat162float(d_o_row[c]), __bfloat162float(o_row[c]), sum);
        }
    }
    for (int distance = lanes / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, distance);
    if (token >= tokens || lane > 0) return;
    int b = token / length, t = token % length;
    size_t place = ((size_t)b * (size_t)heads + (size_t)h) * (size_t)length + (size_t)t;
    terms[place] = make_float2(lse[place] * LOG2_E, sum);
}

// ---- dk and dv ----

// STEP terms from `first` into shared memory, zeros behind length: with queries and d_o of zeros, they add nothing.
template <int STEP>
static __device__ __forceinline__ void load_terms(float2 *tile, const float2 *terms, int first, int length) {
    int i = (int)threadIdx.x;
    if (i >= STEP) return;
    bool there = first + i < length;
    copy_async_8(tile + i, terms + (there ? first + i : 0), there);
}

// S^T of keys (rows) and queries (columns) -> P^T; zero where the key is behind the query.
template <int TILES>
static __device__ __forceinline__ void probabilities_of_keys(float (&s)[TILES][4], const float2 *terms, float scale,
                                                             bool masked, int first_key, int first_query) {
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int query = fragment_column(t, e);
            s[t][e] = exp2_short(fmaf(s[t][e], scale, -terms[query].x));
            if (masked && first_key + fragment_row(e) > first_query + query) s[t][e] = 0;
        }
}

// The columns of dk from `nope` on, FP32, into rope [N, dr] of this head; c's first column is column `from` of dk.
template <int TILES>
static __device__ __forceinline__ void store_rope(float *rope, const struct attention_operands &a, int first, int from,
                                                  const float (&c)[TILES][4]) {
#pragma unroll
    for (int e = 0; e < 4; e++) {
        int row = first + fragment_row(e);
        if (row >= a.length) continue;
        float *rope_row = rope + (size_t)row * (size_t)a.rope;
#pragma unroll
        for (int t = 0; t < TILES; t++) {
            int column = from + fragment_column(t, e) - a.nope;
            if (column >= 0 && column < a.rope) rope_row[column] = c[t][e];
        }
    }
}

// blockIdx.y counts heads from first_head. rope [gridDim.y, N, dr]: dk's rope columns of each of them.
template <int DQ, int DV>
static __global__ void __launch_bounds__(TILE_THREADS, 1)
    keys_kernel(real *dkv, float *rope, const float2 *terms, struct attention_operands a, int tiles, int batch,
                int first_head) {
    constexpr int STEP = backward_step<DQ, DV>(), SHARES = backward_shares<DQ, DV>(), PITCH = tile_pitch(DQ + DV);
    constexpr int KEY_TILES = DQ / SHARES / 8, VALUE_TILES = DV / SHARES / 8, SCORE_TILES = QUERIES_AT_ONCE / 8;
    extern __shared__ uint4 shared_memory[];
    real *kv_tile = (real *)shared_memory;                        // [128, DQ + DV]: keys, then values
    real *qg_tiles = kv_tile + TILE_ROWS * PITCH;                 // two of [STEP, DQ + DV]: queries, then d_o
    float2 *term_tiles = (float2 *)(qg_tiles + 2 * STEP * PITCH); // two of [STEP]

    // Early keys are seen by most queries: they go first.
    int share = (int)blockIdx.x % SHARES, tile = (int)blockIdx.x / SHARES % tiles, b = (int)blockIdx.x / SHARES / tiles;
    int h = first_head + (int)blockIdx.y;
    int first = tile * TILE_ROWS, warp_first = first + warp_row();
    int first_step = first / STEP, steps = (a.length - 1) / STEP + 1;
    struct head_rows queries = head_queries(a, b, h), gradients = head_output_gradients(a, b, h);
    const float2 *head_terms = terms + ((size_t)b * (size_t)a.heads + (size_t)h) * (size_t)a.length;

    auto load_step = [&](int j) {
        real *to = qg_tiles + j % 2 * STEP * PITCH;
        load_tile<STEP, DQ, PITCH>(to, queries, j * STEP);
        load_tile<STEP, DV, PITCH>(to + DQ, gradients, j * STEP);
        load_terms<STEP>(term_tiles + j % 2 * STEP, head_terms, j * STEP, a.length);
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
        const float2 *term_tile = term_tiles + j % 2 * STEP;
#pragma unroll 1
        for (int part = 0; part < STEP; part += QUERIES_AT_ONCE) {
            int first_query = j * STEP + part;
            if (first_query + QUERIES_AT_ONCE - 1 < warp_first) continue;
            bool masked = first_query < warp_first + WARP_ROWS - 1;
            const real *q = qg_tile + part * PITCH, *g = q + DQ;
            float p[SCORE_TILES][4], ds[SCORE_TILES][4];
            uint32_t factor[SCORE_TILES / 2][4];
            multiply_transposed<DQ, PITCH, PITCH>(p, kv, q);
            probabilities_of_keys(p, term_tile + part, a.scale * LOG2_E, masked, warp_first, first_query);
            round_to_fragments(factor, p);
            multiply_add<PITCH>(dv, factor, g + share * VALUE_TILES * 8);
            multiply_transposed<DV, PITCH, PITCH>(ds, kv + DQ, g);
#pragma unroll
            for (int t = 0; t < SCORE_TILES; t++)
#pragma unroll
                for (int e = 0; e < 4; e++) ds[t][e] = p[t][e] * (ds[t][e] - term_tile[part + fragment_column(t, e)].y);
            round_to_fragments(factor, ds);
            multiply_add<PITCH>(dk, factor, q + share * KEY_TILES * 8);
        }
    }

    int stride = a.heads * (a.nope + a.value), key_from = share * KEY_TILES * 8, value_from = share * VALUE_TILES * 8;
    real *out = head_begin(dkv, a, b, h, a.nope + a.value);
    store_rows(out + a.nope + value_from, stride, a.value - value_from, a.length, warp_first, dv);
    scale_all(dk, a.scale);
    store_rows(out + key_from, stride, a.nope - key_from, a.length, warp_first, dk);
    size_t sequence = (size_t)blockIdx.y * (size_t)batch + (size_t)b;
    store_rope(rope + sequence * (size_t)a.length * (size_t)a.rope, a, warp_first, key_from, dk);
}

// ---- dq ----

template <int DQ, int DV>
static __global__ void __launch_bounds__(TILE_THREADS, 1)
    queries_kernel(real *dq_out, const float2 *terms, struct attention_operands a, int tiles) {
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
    const float2 *head_terms = terms + ((size_t)b * (size_t)a.heads + (size_t)h) * (size_t)a.length;
    float2 row_terms[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int row = warp_first + fragment_row(2 * r);
        row_terms[r] = row < a.length ? head_terms[row] : make_float2(0, 0);
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
                float p = exp2_short(fmaf(s[t][e], a.scale * LOG2_E, -row_terms[e / 2].x));
                if (masked && first_key + fragment_column(t, e) > warp_first + fragment_row(e)) p = 0;
                dp[t][e] = p * (dp[t][e] - row_terms[e / 2].y);
            }
        uint32_t ds[STEP / 16][4];
        round_to_fragments(ds, dp);
        multiply_add<PITCH>(dq, ds, kv);
    }
    scale_all(dq, a.scale);
    int width = a.nope + a.rope;
    store_rows(head_begin(dq_out, a, b, h, width), a.heads * width, width, a.length, warp_first, dq);
}

// ---- the shared rope keys ----

// sums [N, dr] = (sums +) rope [group, N, dr] over the heads of the group, in their order; those of the last group go,
// rounded, into dkr [N, dkr_stride].
static __global__ void __launch_bounds__(256) sum_rope_kernel(real *dkr, int dkr_stride, float *sums, const float *rope,
                                                              size_t n, int dr, int group, bool first, bool last) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float sum = first ? 0 : sums[i];
#pragma unroll 8
    for (int h = 0; h < group; h++) sum += rope[(size_t)h * n + i];
    if (last)
        dkr[i / (unsigned)dr * (size_t)dkr_stride + i % (unsigned)dr] = __float2bfloat16_rn(sum);
    else
        sums[i] = sum;
}

// ---- host ----

// Scratch memory, one part after the other.
struct backward_scratch {
    float2 *terms; // [B, n, T]
    float *rope;   // [heads at once, N, dr]
    float *sums;   // [N, dr]; none where all heads go at once
    size_t bytes;
};

static struct backward_scratch backward_scratch_at(char *memory, struct attention_shape s) {
    size_t tokens = (size_t)s.batch * (size_t)s.length, at_once = (size_t)min(s.heads, HEADS_AT_ONCE);
    size_t terms = sizeof(float2) * tokens * (size_t)s.heads, sums = sizeof(float) * tokens * (size_t)s.rope_dim;
    size_t rope = at_once * sums;
    return {(float2 *)memory, (float *)(memory + terms), (float *)(memory + terms + rope),
            terms + rope + (s.heads > HEADS_AT_ONCE ? sums : 0)};
}

extern "C" size_t scratch_attention_backward(struct attention_shape shape) {
    return backward_scratch_at(NULL, shape).bytes;
}

static void launch_terms(float2 *terms, const real *d_o, const real *o, const accum *lse, struct attention_shape s) {
    bool vectors = s.value_dim % 8 == 0 && ((uintptr_t)d_o | (uintptr_t)o) % 16 == 0;
    int lanes = 1;
    while (lanes < 32 && lanes * (vectors ? 8 : 1) < s.value_dim) lanes *= 2;
    int tokens = s.batch * s.length;
    dim3 grid(cuda_blocks((size_t)tokens * (size_t)lanes, TERMS_THREADS), (unsigned)s.heads);
    terms_kernel<<<grid, TERMS_THREADS, 0, cuda_stream()>>>(terms, d_o, o, lse, tokens, lanes, s.length, s.value_dim,
                                                            vectors);
    cuda_check_launch();
}

static void launch_sum_rope(real *dkr, int dkr_stride, struct backward_scratch w, int first_head, int group,
                            struct attention_shape s) {
    size_t n = (size_t)s.batch * (size_t)s.length * (size_t)s.rope_dim;
    sum_rope_kernel<<<cuda_blocks(n, 256), 256, 0, cuda_stream()>>>(
        dkr, dkr_stride, w.sums, w.rope, n, s.rope_dim, group, first_head == 0, first_head + group == s.heads);
    cuda_check_launch();
}

struct backward_launch {
    real *dq, *dkr, *dkv;
    int dkr_stride;
    struct attention_operands operands;
    struct backward_scratch scratch;
    struct attention_shape shape;

    template <int DQ, int DV> void run() const {
        constexpr size_t bytes = backward_shared_bytes<DQ, DV>();
        static bool ready;
        if (!ready) {
            cudaFuncAttribute attribute = cudaFuncAttributeMaxDynamicSharedMemorySize;
            cuda_check(cudaFuncSetAttribute(keys_kernel<DQ, DV>, attribute, bytes));
            cuda_check(cudaFuncSetAttribute(queries_kernel<DQ, DV>, attribute, bytes));
        }
        ready = true;
        int tiles = attention_tiles(shape);
        for (int first_head = 0; first_head < shape.heads; first_head += HEADS_AT_ONCE) {
            int group = min(HEADS_AT_ONCE, shape.heads - first_head);
            dim3 grid((unsigned)(tiles * shape.batch * backward_shares<DQ, DV>()), (unsigned)group);
            keys_kernel<DQ, DV><<<grid, TILE_THREADS, bytes, cuda_stream()>>>(dkv, scratch.rope, scratch.terms,
                                                                              operands, tiles, shape.batch, first_head);
            cuda_check_launch();
            launch_sum_rope(dkr, dkr_stride, scratch, first_head, group, shape);
        }
        dim3 grid((unsigned)(tiles * shape.batch), (unsigned)shape.heads);
        queries_kernel<DQ, DV><<<grid, TILE_THREADS, bytes, cuda_stream()>>>(dq, scratch.terms, operands, tiles);
        cuda_check_launch();
    }
};

extern "C" void attention_backward(real *dq, real *dkv, real *dkr, int dkr_stride, const real *d_o, const real *q,
                                   const real *kv, const real *kr, int kr_stride, const real *o, const accum *lse,
                                   struct attention_shape shape) {
    OPERATION();
    if (shape.batch == 0 || shape.length == 0 || shape.heads == 0) return;
    struct attention_operands operands = attention_operands_of(q, kv, kr, kr_stride, d_o, shape);
    char *memory = (char *)cuda_scratch(scratch_attention_backward(shape));
    struct backward_scratch scratch = backward_scratch_at(memory, shape);
    launch_terms(scratch.terms, d_o, o, lse, shape);
    struct backward_launch launch = {dq, dkr, dkv, dkr_stride, operands, scratch, shape};
    attention_choose(shape, launch);
}

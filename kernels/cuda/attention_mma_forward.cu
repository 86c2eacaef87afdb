// attention_mma_forward: causal softmax attention for MLA heads. A block takes 128 queries of one head through all keys
// that they see, 64 at a time, with the softmax's maximum and denominator kept up as keys come by (online softmax).
#include <math.h>

#include "kernels/cuda/attention_mma.cuh"

enum { KEY_STEP = 64 };

template <int DQ, int DV> static constexpr size_t forward_shared_bytes() {
    return sizeof(real) * (TILE_ROWS * tile_pitch(DQ) + 2 * KEY_STEP * tile_pitch(DQ + DV));
}

// Scores of keys behind their query become -infinity. first_query, first_key: of s[0].
template <int TILES>
static __device__ __forceinline__ void mask_later_keys(float (&s)[TILES][4], int first_query, int first_key) {
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (first_key + fragment_column(t, e) > first_query + fragment_row(e)) s[t][e] = -INFINITY;
}

// The softmax of one lane's two rows (fragment_row(0), fragment_row(2)), so far.
struct softmax_rows {
    float largest[2]; // score, in units of log 2
    float sum[2];     // of this lane's columns
};

// Scores -> 2^(score - largest); what was summed before is scaled to the new maximum. scale: into units of log 2.
// The first keys of a row always hold one it sees, so largest is finite from then on.
template <int TILES, int OUT>
static __device__ __forceinline__ void softmax_step(struct softmax_rows *rows, float (&s)[TILES][4],
                                                    float (&acc)[OUT][4], float scale) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float largest = -INFINITY;
#pragma unroll
        for (int t = 0; t < TILES; t++) largest = fmaxf(largest, fmaxf(s[t][2 * r], s[t][2 * r + 1]));
        // A row's columns are with four neighbouring lanes.
        largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, 2));
        largest = fmaxf(rows->largest[r], largest * scale);
        float correction = exp2_short(rows->largest[r] - largest), sum = 0;
        rows->largest[r] = largest;
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
            for (int e = 2 * r; e < 2 * r + 2; e++) {
                s[t][e] = exp2_short(fmaf(s[t][e], scale, -largest));
                sum += s[t][e];
            }
        rows->sum[r] = fmaf(rows->sum[r], correction, sum);
#pragma unroll
        for (int t = 0; t < OUT; t++) {
            acc[t][2 * r] *= correction;
            acc[t][2 * r + 1] *= correction;
        }
    }
}

// Output rows become means; returns the logs of the denominators in logs.
template <int OUT>
static __device__ __forceinline__ void softmax_finish(float (&logs)[2], const struct softmax_rows *rows,
                                                      float (&acc)[OUT][4]) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float sum = rows->sum[r];
        sum += __shfl_xor_sync(ALL_LANES, sum, 1);
        sum += __shfl_xor_sync(ALL_LANES, sum, 2);
        logs[r] = fmaf(rows->largest[r], LN_2, logf(sum));
        float inverse = 1.0f / sum;
#pragma unroll
        for (int t = 0; t < OUT; t++) {
            acc[t][2 * r] *= inverse;
            acc[t][2 * r + 1] *= inverse;
        }
    }
}

template <int DQ, int DV>
static __global__ void __launch_bounds__(TILE_THREADS, DQ <= 96 ? 2 : 1)
    forward_kernel(real *o, accum *lse, struct mma_operands a, int tiles) {
    extern __shared__ uint4 shared_memory[];
    constexpr int Q_PITCH = tile_pitch(DQ), KV_PITCH = tile_pitch(DQ + DV);
    real *q_tile = (real *)shared_memory;          // [128, DQ]
    real *kv_tiles = q_tile + TILE_ROWS * Q_PITCH; // two of [64, DQ + DV]: keys, then values

    // Late queries see most keys: they go first.
    int tile = tiles - 1 - (int)blockIdx.x % tiles, h = (int)blockIdx.y, b = (int)blockIdx.x / tiles;
    int first = tile * TILE_ROWS, warp_first = first + warp_row();
    int last = min(first + TILE_ROWS, a.length) - 1, steps = last / KEY_STEP + 1;
    struct head_rows keys = head_keys(a, b, h), values = head_values(a, b, h);

    auto load_step = [&](int j) {
        real *to = kv_tiles + j % 2 * KEY_STEP * KV_PITCH;
        load_tile<KEY_STEP, DQ, KV_PITCH>(to, keys, j * KEY_STEP);
        load_tile<KEY_STEP, DV, KV_PITCH>(to + DQ, values, j * KEY_STEP);
    };

    load_tile<TILE_ROWS, DQ, Q_PITCH>(q_tile, head_queries(a, b, h), first);
    load_step(0);
    float acc[DV / 8][4] = {};
    struct softmax_rows rows = {{-INFINITY, -INFINITY}, {0, 0}};
    for (int j = 0; j < steps; j++) {
        copy_wait();
        // This step's tiles are complete, and nobody reads the other ones any more.
        __syncthreads();
        if (j + 1 < steps) load_step(j + 1);
        int first_key = j * KEY_STEP;
        if (first_key > warp_first + WARP_ROWS - 1) continue;
        const real *kv_tile = kv_tiles + j % 2 * KEY_STEP * KV_PITCH;
        float s[KEY_STEP / 8][4];
        multiply_transposed<DQ, Q_PITCH, KV_PITCH>(s, q_tile + warp_row() * Q_PITCH, kv_tile);
        if (first_key + KEY_STEP - 1 > warp_first) mask_later_keys(s, warp_first, first_key);
        softmax_step(&rows, s, acc, a.scale * LOG2_E);
        uint32_t p[KEY_STEP / 16][4];
        round_to_fragments(p, s);
        multiply_add<KV_PITCH>(acc, p, kv_tile + DQ);
    }

    float logs[2], *head_lse = lse + ((size_t)b * (size_t)a.heads + (size_t)h) * (size_t)a.length;
    softmax_finish(logs, &rows, acc);
    store_rows(head_begin(o, a, b, h, a.value), a.heads * a.value, a.value, a.length, warp_first, acc);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int row = warp_first + fragment_row(2 * r);
        if (threadIdx.x % 4 == 0 && row < a.length) head_lse[row] = logs[r];
    }
}

void attention_mma_forward(real *o, accum *lse, const struct attention_operands *a) {
    const struct attention_shape *s = &a->shape;
    int tiles = mma_tiles(*s);
    dim3 grid((unsigned)(tiles * s->batch), (unsigned)s->heads);
    with_mma_sizes(s, [&](auto sizes) {
        constexpr int DQ = decltype(sizes)::DQ, DV = decltype(sizes)::DV;
        cuda_launch_shared<forward_kernel<DQ, DV>>(grid, TILE_THREADS, forward_shared_bytes<DQ, DV>(), o, lse,
                                                   mma_operands_of(a), tiles);
    });
}

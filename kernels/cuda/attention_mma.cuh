// What the attention_mma_* passes share: tiles in shared memory, products of fragments (mma.cuh), and where rows of
// heads lie in memory. They take heads of any widths up to ATTENTION_MMA_COLUMNS, at any address.
//
// A block has eight warps and works for 128 rows, 16 a warp, which stay in shared memory; the rows they meet (keys for
// queries, queries for keys) come by in steps, the next step being copied while one is multiplied. Products of scores
// are taken from the accumulators straight into the next product's fragments: scores never lie in memory.
#ifndef MOK_KERNELS_CUDA_ATTENTION_MMA_CUH
#define MOK_KERNELS_CUDA_ATTENTION_MMA_CUH

#include "kernels/cuda/attention_passes.h"
#include "kernels/cuda/mma.cuh"

enum { TILE_ROWS = 128, WARP_ROWS = 16, TILE_THREADS = TILE_ROWS / WARP_ROWS * 32 };

// Elements from one row of a tile to the next. The 16 bytes more than needed put the eight rows of an 8x8 matrix into
// different banks, since widths are multiples of 32 bytes.
static constexpr __host__ __device__ int tile_pitch(int columns) { return columns + 8; }

// ---- rows of one head, as they go into a tile ----

// Columns below `joint` lie at left, those from joint to width at right (the shared part of keys); both point to row 0
// of the sequence. Behind length and width there are zeros.
struct head_rows {
    const real *left, *right;
    int left_stride, right_stride;
    int joint, width, length;
    bool vectors; // eight columns are one aligned 16-byte access
};

// Without a branch: the choice of side is different from lane to lane.
static __device__ __forceinline__ const real *head_element(const struct head_rows &rows, int row, int column) {
    bool left = column < rows.joint;
    const real *side = left ? rows.left : rows.right;
    int stride = left ? rows.left_stride : rows.right_stride, from = left ? 0 : rows.joint;
    return side + (size_t)(unsigned)row * (unsigned)stride + (unsigned)(column - from);
}

// tile [ROWS, COLUMNS], its rows PITCH apart, = rows from `first`. Complete after copy_wait and __syncthreads.
template <int ROWS, int COLUMNS, int PITCH>
static __device__ __forceinline__ void load_tile(real *tile, const struct head_rows &rows, int first) {
    constexpr int CHUNKS = COLUMNS / 8, TURNS = ROWS * CHUNKS / TILE_THREADS;
    static_assert(COLUMNS % 16 == 0 && ROWS * CHUNKS % TILE_THREADS == 0, "every thread has the same number of chunks");
    if (rows.vectors) {
#pragma unroll
        for (int turn = 0; turn < TURNS; turn++) {
            int i = turn * TILE_THREADS + (int)threadIdx.x, row = i / CHUNKS, column = i % CHUNKS * 8;
            bool there = first + row < rows.length && column < rows.width;
            const real *from = head_element(rows, there ? first + row : 0, there ? column : 0);
            copy_async_16(tile + row * PITCH + column, from, there);
        }
        return;
    }
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < ROWS * COLUMNS; i += TILE_THREADS) {
        int row = i / COLUMNS, column = i % COLUMNS;
        bool there = first + row < rows.length && column < rows.width;
        tile[row * PITCH + column] = there ? *head_element(rows, first + row, column) : (real)0.0f;
    }
}

// ---- products of one warp ----

// s [16, 8 TILES] = a [16, COLUMNS] b [8 TILES, COLUMNS]^T, both in shared memory, rows A_PITCH and B_PITCH apart.
template <int COLUMNS, int A_PITCH, int B_PITCH, int TILES>
static __device__ __forceinline__ void multiply_transposed(float (&s)[TILES][4], const real *a, const real *b) {
    static_assert(COLUMNS % 16 == 0 && TILES % 2 == 0, "fragments are whole");
    int lane = threadIdx.x % 32;
    const real *a_row = a + lane % 16 * A_PITCH + lane / 16 * 8;
    const real *b_row = b + (lane / 16 * 8 + lane % 8) * B_PITCH + lane / 8 % 2 * 8;
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int e = 0; e < 4; e++) s[t][e] = 0;
#pragma unroll
    for (int k = 0; k < COLUMNS; k += 16) {
        uint32_t a_part[4];
        load_matrices(a_part, a_row + k);
#pragma unroll
        for (int t = 0; t < TILES; t += 2) {
            uint32_t b_part[4];
            load_matrices(b_part, b_row + t * 8 * B_PITCH + k);
            multiply_fragment(s[t], a_part, b_part[0], b_part[1]);
            multiply_fragment(s[t + 1], a_part, b_part[2], b_part[3]);
        }
    }
}

// c [16, 8 TILES] += a [16, 16 STEPS] b [16 STEPS, 8 TILES]; a as fragments, b in shared memory, rows PITCH apart.
template <int PITCH, int TILES, int STEPS>
static __device__ __forceinline__ void multiply_add(float (&c)[TILES][4], const uint32_t (&a)[STEPS][4],
                                                    const real *b) {
    static_assert(TILES % 2 == 0, "fragments are whole");
    int lane = threadIdx.x % 32;
    const real *b_row = b + lane % 16 * PITCH + lane / 16 * 8;
#pragma unroll
    for (int k = 0; k < STEPS; k++)
#pragma unroll
        for (int t = 0; t < TILES; t += 2) {
            uint32_t b_part[4];
            load_matrices_transposed(b_part, b_row + k * 16 * PITCH + t * 8);
            multiply_fragment(c[t], a[k], b_part[0], b_part[1]);
            multiply_fragment(c[t + 1], a[k], b_part[2], b_part[3]);
        }
}

// Accumulators [16, 8 TILES] rounded to BF16, as the first factor of multiply_add: two 8-column tiles are one step.
template <int TILES>
static __device__ __forceinline__ void round_to_fragments(uint32_t (&a)[TILES / 2][4], const float (&s)[TILES][4]) {
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        a[t / 2][t % 2 * 2] = pack_pair(s[t][0], s[t][1]);
        a[t / 2][t % 2 * 2 + 1] = pack_pair(s[t][2], s[t][3]);
    }
}

template <int TILES> static __device__ __forceinline__ void scale_all(float (&c)[TILES][4], float factor) {
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int e = 0; e < 4; e++) c[t][e] *= factor;
}

// Where accumulator e of tile t of this lane stands.
static __device__ __forceinline__ int fragment_row(int e) { return (int)threadIdx.x % 32 / 4 + e / 2 * 8; }
static __device__ __forceinline__ int fragment_column(int t, int e) { return t * 8 + (int)threadIdx.x % 4 * 2 + e % 2; }
// First row of this warp in the tile.
static __device__ __forceinline__ int warp_row() { return (int)threadIdx.x / 32 * WARP_ROWS; }

// Writes rows first .. first + 15 of a head, those below length, columns below width. out: row 0 of the sequence.
template <int TILES>
static __device__ __forceinline__ void store_rows(real *out, int stride, int width, int length, int first,
                                                  const float (&c)[TILES][4]) {
    bool pairs = (stride | width) % 2 == 0 && (uintptr_t)out % 4 == 0;
#pragma unroll
    for (int e = 0; e < 4; e += 2) {
        int row = first + fragment_row(e);
        if (row >= length) continue;
        real *out_row = out + (size_t)row * (size_t)stride;
#pragma unroll
        for (int t = 0; t < TILES; t++) {
            int column = fragment_column(t, 0);
            if (pairs) {
                if (column < width) *(__nv_bfloat162 *)(out_row + column) = __floats2bfloat162_rn(c[t][e], c[t][e + 1]);
            } else {
                if (column < width) out_row[column] = __float2bfloat16_rn(c[t][e]);
                if (column + 1 < width) out_row[column + 1] = __float2bfloat16_rn(c[t][e + 1]);
            }
        }
    }
}

// ---- the operands ----

// attention_operands as the kernels take them.
struct mma_operands {
    const real *q, *kv, *kr, *d_o;
    const float *terms;
    size_t term_stride; // floats of one head's terms
    int kr_stride;
    int length, heads, nope, rope, value;
    float scale;
    bool vectors; // every row of every head begins at a multiple of 16 bytes, in all operands
};

// First element of a head's columns of width `columns` in row 0 of sequence b; rows have the columns of all heads.
template <class Element>
static __device__ __forceinline__ Element *head_begin(Element *x, const struct mma_operands &a, int b, int h,
                                                      int columns) {
    return x + ((size_t)b * (size_t)a.length * (size_t)a.heads + (size_t)h) * (size_t)columns;
}

static __device__ __forceinline__ struct head_rows head_plain(const real *x, const struct mma_operands &a, int stride,
                                                              int width) {
    return {x, x, stride, stride, width, width, a.length, a.vectors};
}

static __device__ __forceinline__ struct head_rows head_queries(const struct mma_operands &a, int b, int h) {
    int width = a.nope + a.rope;
    return head_plain(head_begin(a.q, a, b, h, width), a, a.heads * width, width);
}

static __device__ __forceinline__ struct head_rows head_keys(const struct mma_operands &a, int b, int h) {
    const real *kr = a.kr + (size_t)b * (size_t)a.length * (size_t)a.kr_stride;
    return {head_begin(a.kv, a, b, h, a.nope + a.value),
            kr,
            a.heads * (a.nope + a.value),
            a.kr_stride,
            a.nope,
            a.nope + a.rope,
            a.length,
            a.vectors};
}

static __device__ __forceinline__ struct head_rows head_values(const struct mma_operands &a, int b, int h) {
    int width = a.nope + a.value;
    return head_plain(head_begin(a.kv, a, b, h, width) + a.nope, a, a.heads * width, a.value);
}

static __device__ __forceinline__ struct head_rows head_output_gradients(const struct mma_operands &a, int b, int h) {
    return head_plain(head_begin(a.d_o, a, b, h, a.value), a, a.heads * a.value, a.value);
}

// ---- host ----

static inline struct mma_operands mma_operands_of(const struct attention_operands *a) {
    struct attention_shape s = a->shape;
    return {a->q,           a->kv,
            a->kr,          a->d_o,
            a->terms,       attention_term_stride(s.length),
            a->kr_stride,   s.length,
            s.heads,        s.nope_dim,
            s.rope_dim,     s.value_dim,
            (float)s.scale, attention_rows_aligned(a)};
}

static inline int mma_tiles(struct attention_shape s) { return s.length / TILE_ROWS + (s.length % TILE_ROWS > 0); }

// Columns of queries and keys, and of values, in tiles.
template <int DQ_, int DV_> struct mma_sizes { static constexpr int DQ = DQ_, DV = DV_; };

// Calls launch(sizes) with the smallest of the mma_sizes that hold the heads. Few sizes, since each one is three kernels
// to compile: the presets' heads are 24/16, 32/24, 96/64, 128/128 and 192/128.
template <class Launch> static inline void with_mma_sizes(const struct attention_shape *s, const Launch &launch) {
    int query = s->nope_dim + s->rope_dim, value = s->value_dim;
    if (query <= 32 && value <= 32)
        launch(mma_sizes<32, 32>{});
    else if (query <= 96 && value <= 64)
        launch(mma_sizes<96, 64>{});
    else if (query <= 192 && value <= 128)
        launch(mma_sizes<192, 128>{});
    else
        launch(mma_sizes<ATTENTION_MMA_COLUMNS, ATTENTION_MMA_COLUMNS>{});
}

#endif

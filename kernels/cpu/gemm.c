// Matrix product for the CPU: cache blocks, packed panels, and an inner loop whose accumulators stay in registers.
//
// The loop nest, from outside in: tiles of C are shared between threads; a tile walks k in blocks of KC; for each, the
// tile's part of B is packed into panels of NR columns; then the inner loop multiplies MR rows of A with one panel of B
// into MR x NR elements of C. Panels at an edge are padded with zeros, so every element of C goes through the same
// instructions.
#include "kernels/cpu/gemm.h"

#include <omp.h>
#include <string.h>

#include "kernels/clock.h"

#if defined(__AVX512F__)
enum { VECTOR_BYTES = 64 };
#elif defined(__AVX__)
enum { VECTOR_BYTES = 32 };
#else
enum { VECTOR_BYTES = 16 };
#endif

enum {
    LANES = VECTOR_BYTES / sizeof(real),
    MR = 6,         // rows of the inner loop: MR x 2 accumulators and 3 operands fill 15 of 16 registers
    NR = 2 * LANES, // its columns
    KC = 256,       // k block: one panel of A and one of B stay in the first-level cache
    TILE_M = 64 * MR,
    TILE_N = 8 * NR, // KC x TILE_N of packed B stays in the second-level cache
};

typedef real vector __attribute__((vector_size(VECTOR_BYTES)));

static _Thread_local real packed_a[MR * KC] __attribute__((aligned(64)));
static _Thread_local real packed_b[TILE_N * KC] __attribute__((aligned(64)));

static int min_int(int a, int b) { return a < b ? a : b; }
static int round_up(int value, int unit) { return (value + unit - 1) / unit * unit; }

// Copies `rows` rows of m, at most width, into a panel [depth][width]; missing rows are zero. Inlined, so that width is
// a constant in every copy.
static inline __attribute__((always_inline)) void pack_panel(real *restrict out, struct view m, int rows, int depth,
                                                             const int width) {
    const real *restrict from = m.data;
    if (rows == width && m.row == 1) {
        for (int k = 0; k < depth; k++)
            for (int i = 0; i < width; i++) out[k * width + i] = from[k * m.col + i];
    } else if (rows == width) {
        for (int i = 0; i < width; i++)
            for (int k = 0; k < depth; k++) out[k * width + i] = from[i * m.row + k * m.col];
    } else {
        for (int k = 0; k < depth; k++)
            for (int i = 0; i < width; i++) out[k * width + i] = i < rows ? from[i * m.row + k * m.col] : 0;
    }
}

// The columns [0, cols) of b as panels of NR.
static void pack_columns(real *out, struct view b, int cols, int depth) {
    struct view columns = {b.data, b.col, b.row};
    for (int j = 0; j < cols; j += NR, out += (size_t)NR * depth, columns.data += NR * columns.row)
        pack_panel(out, columns, min_int(NR, cols - j), depth, NR);
}

static inline vector load(const real *from) {
    vector v;
    memcpy(&v, from, sizeof v);
    return v;
}

// c [MR, NR] = init + sum over k of a[i][k] b[k][j], with a[i][k] at a[i * a_row + k * a_col]; init NULL is zero. Never
// inlined: one copy of the code means one allocation of registers for every caller.
static __attribute__((noinline)) void multiply_panels(real *c, size_t c_row, const real *init, size_t init_row,
                                                      const real *a, size_t a_row, size_t a_col, const real *b,
                                                      int depth) {
    vector sum[MR][2];
    for (int i = 0; i < MR; i++)
        for (int j = 0; j < 2; j++) sum[i][j] = init ? load(init + i * init_row + j * LANES) : (vector){0};
    for (int k = 0; k < depth; k++, a += a_col, b += NR) {
        vector b0 = load(b), b1 = load(b + LANES);
#pragma GCC unroll 6
        for (int i = 0; i < MR; i++) {
            sum[i][0] += a[i * a_row] * b0;
            sum[i][1] += a[i * a_row] * b1;
        }
    }
    for (int i = 0; i < MR; i++)
        for (int j = 0; j < 2; j++) memcpy(c + i * c_row + j * LANES, &sum[i][j], sizeof(vector));
}

// The same at the right or lower edge of C, through a buffer of full size.
static void multiply_panels_edge(real *c, size_t c_row, const real *init, size_t init_row, struct view a, const real *b,
                                 int depth, int rows, int cols) {
    real tile[MR * NR] = {0};
    for (int i = 0; init && i < rows; i++)
        for (int j = 0; j < cols; j++) tile[i * NR + j] = init[i * init_row + j];
    multiply_panels(tile, NR, tile, NR, a.data, a.row, a.col, b, depth);
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < cols; j++) c[i * c_row + j] = tile[i * NR + j];
}

// MR rows of A from row i on. Rows that lie one behind the other in k are read where they are; a transposed matrix, and
// rows that are not all there, go through a packed panel.
static struct view panel_of_rows(struct view a, int rows, int depth) {
    if (a.col == 1 && rows >= MR) return a;
    pack_panel(packed_a, a, min_int(rows, MR), depth, MR);
    return (struct view){packed_a, 1, MR};
}

// One tile of C: rows [i0, i1), columns [j0, j1).
static void multiply_tile(const struct gemm *g, int i0, int i1, int j0, int j1) {
    const real *init = g->init;
    size_t init_row = g->init_row;
    int k0 = 0;
    do { // at least once, so that a product with K = 0 writes init
        int depth = min_int(KC, g->K - k0);
        struct view b = {g->b.data + k0 * g->b.row + j0 * g->b.col, g->b.row, g->b.col};
        pack_columns(packed_b, b, j1 - j0, depth);
        for (int i = i0; i < i1; i += MR) {
            struct view rows = {g->a.data + i * g->a.row + k0 * g->a.col, g->a.row, g->a.col};
            struct view a = panel_of_rows(rows, i1 - i, depth);
            for (int j = j0; j < j1; j += NR) {
                const real *panel_b = packed_b + (size_t)(j - j0) * depth;
                real *c = g->c + i * g->c_row + j;
                const real *from = init ? init + i * init_row + j : NULL;
                int height = min_int(MR, i1 - i), width = min_int(NR, j1 - j);
                if (height == MR && width == NR)
                    multiply_panels(c, g->c_row, from, init_row, a.data, a.row, a.col, panel_b, depth);
                else
                    multiply_panels_edge(c, g->c_row, from, init_row, a, panel_b, depth, height, width);
            }
        }
        init = g->c; // later blocks of k go on from what is there
        init_row = g->c_row;
        k0 += KC;
    } while (k0 < g->K);
}

// How a product is cut into tiles: not larger than the packed panels allow, small enough to feed every thread.
struct tiling {
    int rows, cols;   // of one tile
    int across, down; // tiles
};

static struct tiling tiling_choose(const struct gemm *g, int wanted_tiles) {
    struct tiling t = {min_int(TILE_M, round_up(g->M, MR)), min_int(TILE_N, round_up(g->N, NR)), 0, 0};
    for (;;) {
        t.down = (g->M + t.rows - 1) / t.rows;
        t.across = (g->N + t.cols - 1) / t.cols;
        if (t.down * t.across >= wanted_tiles) return t;
        if (t.rows > 4 * MR && (t.rows >= t.cols || t.cols <= 2 * NR))
            t.rows = round_up(t.rows / 2, MR);
        else if (t.cols > 2 * NR)
            t.cols = round_up(t.cols / 2, NR);
        else
            return t;
    }
}

static void multiply_nth_tile(const struct gemm *g, struct tiling t, int tile) {
    int i = tile / t.across * t.rows, j = tile % t.across * t.cols;
    multiply_tile(g, i, min_int(i + t.rows, g->M), j, min_int(j + t.cols, g->N));
}

void gemm_serial(const struct gemm *product) {
    if (product->M == 0 || product->N == 0) return;
    struct tiling t = tiling_choose(product, 1);
    for (int tile = 0; tile < t.down * t.across; tile++) multiply_nth_tile(product, t, tile);
}

void gemm_parallel(const struct gemm *products, int count) {
    int threads = omp_get_max_threads();
    int wanted = (2 * threads + count - 1) / (count > 0 ? count : 1);
#pragma omp parallel if (threads > 1)
    for (int p = 0; p < count; p++) {
        const struct gemm *g = &products[p];
        if (g->M == 0 || g->N == 0) continue;
        struct tiling t = tiling_choose(g, wanted);
#pragma omp for schedule(dynamic) nowait
        for (int tile = 0; tile < t.down * t.across; tile++) multiply_nth_tile(g, t, tile);
    }
}

double gemm_measure_peak_flops(void) {
    enum { REPEATS = 256, ATTEMPTS = 60 };
    static const real a[KC * MR] __attribute__((aligned(64))), b[KC * NR] __attribute__((aligned(64)));
    double total = 0;
    // Every thread takes its own best while the others are busy too: other programs then disturb little.
#pragma omp parallel reduction(+ : total)
    {
        real c[MR * NR] = {0};
        for (int attempt = 0; attempt < ATTEMPTS; attempt++) {
            double start = clock_seconds();
            for (int r = 0; r < REPEATS; r++) multiply_panels(c, NR, c, NR, a, 1, MR, b, KC);
            double flops = 2.0 * MR * NR * KC * REPEATS / (clock_seconds() - start);
            if (flops > total) total = flops;
        }
    }
    return total;
}

const char *gemm_vector_name(void) {
#if defined(__AVX512F__)
    return "AVX-512";
#elif defined(__AVX2__) && defined(__FMA__)
    return "AVX2";
#elif defined(__AVX__)
    return "AVX";
#elif defined(__ARM_NEON)
    return "NEON";
#else
    return "128-bit vectors";
#endif
}

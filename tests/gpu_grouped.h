// Products of the experts' rows, for tests/gpu_operations.c: odd widths, experts without rows and rows around a tile's edges,
// and gradients of weights that are summed in one call or in two.
#ifndef MOK_TESTS_GPU_GROUPED_H
#define MOK_TESTS_GPU_GROUPED_H

#include "tests/scene.h"

// Rows of the experts of one grouped product. EDGES: around the height of tiles, whatever `rows` is.
enum spread { SPREAD_RANDOM, SPREAD_ONE, SPREAD_NONE, SPREAD_FEW, SPREADS, SPREAD_EDGES = SPREADS };
static const int edges[] = {64, 0, 128, 129, 0, 63, 1, 127, 65, 257, 0};
enum { EDGE_ROWS = 64 + 128 + 129 + 63 + 1 + 127 + 65 + 257 };

// offsets [E + 1], their first one `first`.
static inline void fill_offsets(int *offsets, int E, int rows, int first, enum spread spread) {
    offsets[0] = first;
    for (int e = 0; e < E; e++) offsets[e + 1] = spread == SPREAD_EDGES ? edges[e] : 0;
    for (int r = 0; r < rows && spread < SPREADS && spread != SPREAD_NONE; r++) {
        int expert = spread == SPREAD_ONE ? E / 2 : scene_below(spread == SPREAD_FEW ? (E + 7) / 8 : E);
        offsets[expert + 1]++;
    }
    for (int e = 0; e < E; e++) offsets[e + 1] += offsets[e];
}

enum { OWN_UNIT = 8 }; // widths that the own core takes are multiples of it

// Three rows more than the experts have, of which `first` come before theirs. Which core a build has is its own matter:
// all are recorded.
static inline void case_grouped(enum grouped_core core, int form, int E, int rows, int N, int K, enum spread spread,
                                int first) {
    static const char *const names[][4] = {
        {"grouped_matmul_nt", "grouped_matmul_nn", "grouped_matmul_tn", "grouped_matmul_tn"}, // the last one stores
        {"grouped_matmul_nt own", "grouped_matmul_nn own", "grouped_matmul_tn own", "grouped_matmul_tn own"}};
    if (core == GROUPED_OWN && (N % OWN_UNIT || K % OWN_UNIT)) return;
    if (core == GROUPED_OWN && !scene.recording && !grouped_matmul_available(core)) return;
    grouped_matmul_choose(core);
    if (!scene_begin(names[core == GROUPED_OWN][form], (double)rows * N * K,
                     "E %d rows %d N %d K %d spread %d first %d%s", E, rows, N, K, spread, first,
                     form == 3 ? " stored" : ""))
        return;
    int *offsets = malloc(sizeof *offsets * (size_t)(E + 1));
    fill_offsets(offsets, E, rows, first, spread);
    size_t all = (size_t)rows + 3, experts = (size_t)E, n = (size_t)N, k = (size_t)K;
    if (form >= 2) {
        const real *a = in_real(all, n, 1), *b = in_real(all, k, 1);
        accum *dw = form == 2 ? change_accum("dw", experts * n, k, 3, SUMMED) : out_accum("dw", experts * n, k, SUMMED);
        while (scene_run()) grouped_matmul_tn(dw, a, b, offsets, E, N, K, form == 2);
    } else {
        const real *x = in_real(all, k, 1), *w = form == 0 ? in_real(experts * n, k, 1) : in_real(experts * k, n, 1);
        real *y = out_real("y", all, n, ROUNDED);
        while (scene_run()) (form == 0 ? grouped_matmul_nt : grouped_matmul_nn)(y, x, w, offsets, E, N, K);
    }
    free(offsets);
}

// Every expert's rows cut at a multiple of 64: of the whole, those before the cut or those behind it, one expert behind
// the other. offsets [E + 1] receives where they begin.
enum cut { CUT_WHOLE, CUT_BEFORE, CUT_BEHIND };
static inline const real *in_cut(const float *rows, int *offsets, enum cut cut, int columns) {
    int first = 0;
    size_t width = (size_t)columns, count = 0;
    float *values = malloc(sizeof *values * ((size_t)EDGE_ROWS * width + 1));
    for (int e = 0; e < COUNT_OF(edges); first += edges[e++]) {
        int at = (edges[e] / 64 + 1) / 2 * 64, begin = cut == CUT_BEHIND ? at : 0,
            end = cut == CUT_BEFORE ? at : edges[e];
        offsets[e] = (int)count;
        memcpy(values + count * width, rows + (size_t)(first + begin) * width,
               sizeof *values * (size_t)(end - begin) * width);
        count += (size_t)(end - begin);
    }
    offsets[COUNT_OF(edges)] = (int)count;
    const real *array = in_values(KIND_REAL, values, count * width);
    free(values);
    return array;
}

static inline float *normal_values(size_t n, double deviation) {
    float *values = malloc(sizeof *values * (n + 1));
    for (size_t i = 0; i < n; i++) values[i] = round_to_bf16((float)(deviation * scene_normal()));
    return values;
}

// Sums that go on from what is there give the bits of one sum; an expert without rows keeps what it had, or gets
// zeros.
static inline void case_grouped_cut(int M, int N, bool add) {
    enum { E = COUNT_OF(edges) };
    if (!scene.recording && !grouped_matmul_available(GROUPED_OWN)) return;
    if (!scene_begin("grouped_matmul_tn own", (double)EDGE_ROWS * M * N, "cut M %d N %d%s", M, N, add ? "" : " stored"))
        return;
    grouped_matmul_choose(GROUPED_OWN);
    int offsets[3][E + 1];
    size_t n = (size_t)E * (size_t)M * (size_t)N, each = (size_t)M * (size_t)N;
    const real *a[3], *b[3];
    float *rows_a = normal_values((size_t)EDGE_ROWS * (size_t)M, 1),
          *rows_b = normal_values((size_t)EDGE_ROWS * (size_t)N, 1);
    float *start = normal_values(n, 3);
    for (int cut = CUT_WHOLE; cut <= CUT_BEHIND; cut++) {
        a[cut] = in_cut(rows_a, offsets[cut], cut, M);
        b[cut] = in_cut(rows_b, offsets[cut], cut, N);
    }
    accum *dw = change_values("dw", KIND_ACCUM, start, n, SUMMED),
          *parts = change_values("dw in parts", KIND_ACCUM, start, n, SUMMED);
    accum *one = malloc(sizeof *one * (n + 1)), *two = malloc(sizeof *two * (n + 1));
    while (scene_run()) {
        grouped_matmul_tn(dw, a[CUT_WHOLE], b[CUT_WHOLE], offsets[CUT_WHOLE], E, M, N, add);
        grouped_matmul_tn(parts, a[CUT_BEFORE], b[CUT_BEFORE], offsets[CUT_BEFORE], E, M, N, add);
        grouped_matmul_tn(parts, a[CUT_BEHIND], b[CUT_BEHIND], offsets[CUT_BEHIND], E, M, N, true);
        device_copy_out(one, dw, sizeof *one * n);
        device_copy_out(two, parts, sizeof *two * n);
        if (memcmp(one, two, sizeof *one * n) != 0) scene_fail("dw in parts", "found other bits than in one call");
        for (size_t i = 0; i < n; i++)
            if (edges[i / each] == 0 && one[i] != (accum)(add ? start[i] : 0)) {
                scene_fail("dw", "element %zu of expert %zu, which has no rows: found %g", i % each, i / each,
                           (double)one[i]);
                break;
            }
    }
    void *used[] = {rows_a, rows_b, start, one, two};
    for (size_t i = 0; i < sizeof used / sizeof *used; i++) free(used[i]);
}

static inline void all_grouped(void) {
    static const int grouped[][4] = {// E, rows, N, K
                                     {1, 17, 24, 40},    {3, 14, 7, 5},      {3, 100, 64, 128},    {8, 300, 96, 72},
                                     {64, 1000, 32, 64}, {257, 900, 16, 24}, {2, 513, 130, 65},    {4, 0, 16, 16},
                                     {5, 40, 0, 16},     {5, 40, 16, 0},     {64, 8192, 256, 128}, {8, 4096, 512, 256},
                                     {4, 2048, 264, 520}};
    static const int widths[][2] = {{8, 8}, {136, 264}, {264, 136}, {384, 520}, {520, 72}, {256, 1032}};
    static const enum grouped_core cores[] = {GROUPED_CUBLASLT, GROUPED_OWN};
    for (int i = 0; i < COUNT_OF(cores); i++) {
        for (int c = 0; c < COUNT_OF(grouped); c++)
            for (int spread = 0; spread < SPREADS; spread++)
                for (int form = 0; form < 4; form++)
                    case_grouped(cores[i], form, grouped[c][0], grouped[c][1], grouped[c][2], grouped[c][3], spread,
                                 spread % 3);
        for (int c = 0; c < COUNT_OF(widths); c++)
            for (int form = 0; form < 4; form++)
                case_grouped(cores[i], form, COUNT_OF(edges), EDGE_ROWS, widths[c][0], widths[c][1], SPREAD_EDGES,
                             c % 3);
    }
    for (int c = 0; c < COUNT_OF(widths); c++)
        for (int add = 0; add < 2; add++) case_grouped_cut(widths[c][0], widths[c][1], add);
    grouped_matmul_choose(GROUPED_CUBLASLT);
}

#endif

// Every operation of kernels/kernels.h in two builds: the CPU build records, the GPU build compares (tests/scene.h).
//
//   build/cpu/tests/gpu_operations --record FILE
//   build/cuda/tests/gpu_operations --compare FILE
//
// Cases are odd on purpose: single rows, tails of every vector width and tile, rows nobody has, gaps between rows,
// addresses that are not aligned.
#include "tests/gpu_grouped.h"
#include "tests/scene.h"

#include "kernels/comm.h"

// Work of n elements beside that of n multiplications in a product.
static double elements(double n) { return 16 * n; }

// ---- device ----

// What a conversion must give, from the host's own rounding.
static void case_conversions(int n, int shift) {
    if (!scene_begin("conversions", elements(n), "n %d shift %d", n, shift)) return;
    float *in = malloc(sizeof *in * (size_t)(n + 1)), *out = malloc(sizeof *out * (size_t)(n + 1));
    static const float special[] = {
        0,           -0.0f,       INFINITY,     -INFINITY,    NAN,   1e-40f,    -1e-45f,  3.4028235e38f, 3.3961775e38f,
        1.00390625f, 1.01171875f, -1.00390625f, 1.003906369f, 65504, 0x1p-126f, 0x1p-133f};
    for (int i = 0; i < n; i++) in[i] = i < COUNT_OF(special) ? special[i] : (float)scene_normal();
    real *r = (real *)device_alloc(sizeof(real) * (size_t)(n + shift)) + shift;
    accum *a = (accum *)device_alloc(sizeof(accum) * (size_t)(n + shift)) + shift;
    device_real_from_float(r, in, (size_t)n);
    device_real_to_float(out, r, (size_t)n);
    int failures = scene.operation->failures;
    for (int i = 0; i < n && scene.operation->failures == failures; i++) {
        float wanted = sizeof(real) == 2 ? round_to_bf16(in[i]) : in[i];
        bool same = memcmp(&wanted, &out[i], sizeof wanted) == 0 || (isnan(wanted) && isnan(out[i]));
        if (!same)
            scene_fail("real", "element %d: %.9g became %.9g, wanted %.9g", i, (double)in[i], (double)out[i],
                       (double)wanted);
    }
    memset(out, 0xff, sizeof *out * (size_t)n);
    device_accum_from_float(a, in, (size_t)n);
    device_accum_to_float(out, a, (size_t)n);
    failures = scene.operation->failures;
    for (int i = 0; i < n && scene.operation->failures == failures; i++) {
        bool same = memcmp(&in[i], &out[i], sizeof *in) == 0 || (isnan(in[i]) && isnan(out[i]));
        if (!same) scene_fail("accum", "element %d: %.9g became %.9g", i, (double)in[i], (double)out[i]);
    }
    device_free(r - shift);
    device_free(a - shift);
    free(in);
    free(out);
}

static void case_memory(size_t bytes) {
    if (!scene_begin("memory and copies", (double)bytes, "bytes %zu", bytes)) return;
    unsigned char *host = malloc(bytes + 1), *back = malloc(bytes + 1);
    for (int round = 0; round < 2; round++) { // the second may get the memory that the first one filled
        unsigned char *device = device_alloc(bytes);
        scene_check((uintptr_t)device % 256 == 0);
        device_copy_out(back, device, bytes);
        size_t other = 0;
        for (size_t i = 0; i < bytes; i++) other += back[i] != 0;
        scene_check(other == 0);
        for (size_t i = 0; i < bytes; i++) host[i] = (unsigned char)random_next(&scene.seed);
        device_copy_in(device, host, bytes);
        memset(back, 0, bytes);
        size_t part = bytes < DEVICE_READ_BYTES ? bytes : DEVICE_READ_BYTES;
        device_read_begin(device, part);
        device_read_finish(back, part);
        scene_check(memcmp(back, host, part) == 0);
        device_copy_out(back, device, bytes);
        scene_check(memcmp(back, host, bytes) == 0);
        size_t first = bytes / 3, zeros = bytes / 5;
        device_zero(device + first, zeros);
        memset(host + first, 0, zeros);
        device_finish();
        device_copy_out(back, device, bytes);
        scene_check(memcmp(back, host, bytes) == 0);
        device_free(device);
    }
    free(host);
    free(back);
}

// ---- matrix products ----

enum { ADD_NOTHING, ADD_OTHER, ADD_ITSELF };

static void case_matmul(bool transposed, int M, int N, int K, int add, int shift) {
    const char *operation = transposed ? "matmul_nt" : "matmul_nn";
    if (!scene_begin(operation, (double)M * N * K, "M %d N %d K %d add %d shift %d", M, N, K, add, shift)) return;
    scene.shift = shift;
    const real *x = in_real((size_t)M, (size_t)K, 1);
    const real *w = transposed ? in_real((size_t)N, (size_t)K, 1) : in_real((size_t)K, (size_t)N, 1);
    double size = sqrt(K + 1.0); // of y
    const real *other = add == ADD_OTHER ? in_real((size_t)M, (size_t)N, size) : NULL;
    struct tolerance t = add == ADD_NOTHING ? ROUNDED : ROUNDED_TWICE;
    real *y =
        add == ADD_ITSELF ? change_real("y", (size_t)M, (size_t)N, size, t) : out_real("y", (size_t)M, (size_t)N, t);
    while (scene_run()) (transposed ? matmul_nt : matmul_nn)(y, x, w, M, N, K, add == ADD_ITSELF ? y : other);
}

static void case_matmul_tn(int M, int N, int K, bool add, int shift) {
    if (!scene_begin("matmul_tn", (double)M * N * K, "M %d N %d K %d shift %d%s", M, N, K, shift, add ? "" : " stored"))
        return;
    scene.shift = shift;
    const real *a = in_real((size_t)K, (size_t)M, 1), *b = in_real((size_t)K, (size_t)N, 1);
    accum *dw = add ? change_accum("dw", (size_t)M, (size_t)N, sqrt(K + 1.0), SUMMED)
                    : out_accum("dw", (size_t)M, (size_t)N, SUMMED);
    while (scene_run()) matmul_tn(dw, a, b, M, N, K, add);
}

static void all_matmuls(void) {
    static const int sizes[][3] = {
        {1, 1, 1},       {1, 8, 16},         {3, 5, 7},        {16, 16, 16},    {17, 33, 65},    {64, 128, 128},
        {127, 129, 63},  {130, 257, 100},    {1, 257, 333},    {333, 1, 64},    {128, 576, 256}, {0, 16, 16},
        {16, 0, 16},     {16, 24, 0},        {2, 2, 4099},     {65, 250, 1000}, {1000, 24, 8},   {64, 300, 7168},
        {5, 129280, 64}, {2048, 1024, 1024}, {4096, 520, 264}, {1, 7168, 2048},
    };
    for (int c = 0; c < COUNT_OF(sizes); c++)
        for (int add = ADD_NOTHING; add <= ADD_ITSELF; add++)
            for (int transposed = 0; transposed < 2; transposed++)
                case_matmul(transposed, sizes[c][0], sizes[c][1], sizes[c][2], add, (c + add) % 5 == 4);
    for (int c = 0; c < COUNT_OF(sizes); c++)
        for (int add = 0; add < 2; add++)
            case_matmul_tn(sizes[c][1], sizes[c][2], sizes[c][0], add, (c + add) % 4 == 3);
    for (int add = 0; add < 2; add++) {
        case_matmul_tn(24, 40, 100003, add, 0);
        case_matmul_tn(1, 1, 100000, add, 0);
    }
}

// ---- embedding, norm, rotary position ----

// n ids below limit, about one in ten -1; or, with same, all alike.
static const int *in_ids(int n, int limit, bool same) {
    int *ids = malloc(sizeof *ids * (size_t)(n + 1));
    for (int i = 0; i < n; i++) ids[i] = same ? limit / 2 : scene_below(10) == 0 ? -1 : scene_below(limit);
    const int *device = in_int(ids, (size_t)n);
    free(ids);
    return device;
}

static void case_embedding(int N, int H, int V, bool same, int shift) {
    if (scene_begin("embedding_forward", elements((double)N * H + (double)V * H), "N %d H %d V %d same %d shift %d", N,
                    H, V, same, shift)) {
        scene.shift = shift;
        const real *table = in_real((size_t)V, (size_t)H, 1);
        const int *ids = in_ids(N, V, same);
        real *x = out_real("x", (size_t)N, (size_t)H, EXACT);
        while (scene_run()) embedding_forward(x, table, ids, N, H);
    }
    if (scene_begin("embedding_backward", elements((double)N * H + (double)V * H), "N %d H %d V %d same %d shift %d", N,
                    H, V, same, shift)) {
        scene.shift = shift;
        const real *dx = in_real((size_t)N, (size_t)H, 1);
        const int *ids = in_ids(N, V, same);
        accum *dtable = change_accum("dtable", (size_t)V, (size_t)H, 1, SUMMED);
        while (scene_run()) embedding_backward(dtable, dx, ids, N, H);
    }
}

static void case_rmsnorm(int N, int C, int gap, int shift) {
    double work = elements((double)N * C);
    if (scene_begin("rmsnorm_forward", work, "N %d C %d gap %d shift %d", N, C, gap, shift)) {
        scene.shift = shift;
        const real *x = in_rows((size_t)N, (size_t)C, (size_t)(C + gap), 3), *w = in_real(1, (size_t)C, 1);
        real *y = out_real("y", (size_t)N, (size_t)(C + 2 * gap), ROUNDED);
        accum *rstd = out_accum("rstd", (size_t)N, 1, SUMMED);
        while (scene_run()) rmsnorm_forward(y, C + 2 * gap, rstd, x, C + gap, w, N, C, 1e-6);
    }
    for (int way = 0; way < 3; way++) { // dx written, added to, or in the place of dy
        if (!scene_begin("rmsnorm_backward", work, "N %d C %d gap %d shift %d way %d", N, C, gap, shift, way)) continue;
        scene.shift = shift;
        size_t n = (size_t)N, c = (size_t)C, g = (size_t)gap;
        const real *x = in_rows(n, c, c + g, 1), *w = in_real(1, c, 1);
        float *r = malloc(sizeof *r * (n + 1));
        for (int i = 0; i < N; i++) r[i] = (float)(0.5 + scene_uniform());
        const accum *rstd = in_values(KIND_ACCUM, r, n);
        free(r);
        real *dx = way == 0 ? out_real("dx", n, c + 3 * g, ROUNDED) : change_rows("dx", n, c, c + 3 * g, 1, ROUNDED);
        const real *dy = way == 2 ? dx : in_rows(n, c, c + 2 * g, 1);
        accum *dw = change_accum("dw", 1, c, sqrt(N + 1.0), SUMMED);
        while (scene_run())
            rmsnorm_backward(dx, C + 3 * gap, way == 1, dw, dy, way == 2 ? C + 3 * gap : C + 2 * gap, x, C + gap, w,
                             rstd, N, C);
    }
}

// heads of `width` columns, rope_dim of them from `first` on; heads 1 and head_stride 0 as for the one key of a token.
static void case_rope(int B, int T, int heads, int width, int first, int rope_dim, bool inverse, int shift) {
    if (!scene_begin("rope_rotate", elements((double)B * T * heads * width),
                     "B %d T %d heads %d width %d first %d rope %d inverse %d shift %d", B, T, heads, width, first,
                     rope_dim, inverse, shift))
        return;
    scene.shift = shift;
    float *angles = malloc(sizeof *angles * (size_t)(T * rope_dim + 2));
    for (int i = 0; i < T * rope_dim / 2; i++) {
        double angle = 6.283185307179586 * scene_uniform();
        angles[2 * i] = (float)cos(angle);
        angles[2 * i + 1] = (float)sin(angle);
    }
    const accum *device_angles = in_values(KIND_ACCUM, angles, (size_t)T * (size_t)rope_dim);
    free(angles);
    real *x = change_real("x", (size_t)B * (size_t)T, (size_t)(heads * width), 1, ROUNDED);
    while (scene_run())
        rope_rotate(x, heads * width, heads, heads == 1 ? 0 : width, first, rope_dim, device_angles, B * T, T, inverse);
}

static void all_rows(void) {
    static const int embeddings[][3] = {{1, 1, 1},     {5, 7, 3},         {64, 128, 257}, {333, 65, 100},
                                        {1000, 24, 7}, {4096, 256, 1000}, {0, 16, 10},    {200, 8, 129280},
                                        {129, 8, 40},  {2048, 1024, 512}, {300, 2056, 50}};
    for (int c = 0; c < COUNT_OF(embeddings); c++)
        for (int same = 0; same < 2; same++)
            case_embedding(embeddings[c][0], embeddings[c][1], embeddings[c][2], same, (c + same) % 3 == 2);

    static const int norms[][2] = {{1, 1},     {1, 7},       {3, 8},     {5, 33},     {64, 64},     {129, 127},
                                   {100, 512}, {7, 1536},    {33, 2047}, {8, 7168},   {1000, 24},   {4097, 96},
                                   {0, 64},    {1024, 2048}, {3, 16385}, {9000, 136}, {2500, 2056}, {600, 8192}};
    for (int c = 0; c < COUNT_OF(norms); c++)
        for (int gap = 0; gap <= 64; gap = gap == 0 ? 5 : gap == 5 ? 64 : 65)
            case_rmsnorm(norms[c][0], norms[c][1], gap, c % 4 == 3 && gap != 64);

    static const int ropes[][6] = {{1, 1, 1, 64, 0, 64},    {2, 5, 3, 12, 8, 4},   {1, 33, 4, 24, 17, 6},
                                   {3, 7, 1, 576, 512, 64}, {1, 65, 1, 37, 29, 8}, {2, 64, 16, 192, 128, 64},
                                   {1, 9, 2, 2, 0, 2},      {0, 4, 2, 8, 4, 4},    {1, 1000, 3, 22, 17, 4},
                                   {1, 70, 5, 72, 8, 64}};
    for (int c = 0; c < COUNT_OF(ropes); c++)
        for (int inverse = 0; inverse < 2; inverse++)
            for (int shift = 0; shift < 2; shift++)
                case_rope(ropes[c][0], ropes[c][1], ropes[c][2], ropes[c][3], ropes[c][4], ropes[c][5], inverse, shift);
}

// ---- attention ----

// What the scores are: normal numbers of deviation 1; of 64, so that one key has nearly all of a query's probability;
// or, since all tokens have the same keys, one number for all keys of a query.
enum scores { SCORES_NORMAL, SCORES_PEAKED, SCORES_EQUAL };

struct attention_case {
    int B, T, heads, nope, rope, value, key_gap, shift;
    enum scores scores;
};

// Rows of `pairs` times `period` columns: in each period keys of the given deviation up to `columns`, then values of
// deviation 1 up to `used`, then poison. equal: every row has the first one's keys.
static const real *in_keys(size_t rows, size_t period, size_t pairs, size_t columns, size_t used, double deviation,
                           bool equal) {
    size_t row = period * pairs;
    struct array *a = array_add(NULL, KIND_REAL, false, rows * row, row, EXACT);
    float *first = malloc(sizeof *first * (row + 1));
    for (size_t i = 0; i < a->n; i++) {
        if (i % period >= used) continue;
        bool key = i % period < columns;
        float value = (float)((key ? deviation : 1) * scene_normal());
        if (i < row) first[i] = value;
        array_set(a, i, (double)(key && equal ? first[i % row] : value));
    }
    free(first);
    return array_pointer(a);
}

static void case_attention_of_work(struct attention_case c, double work) {
    static const char *const kinds[] = {"", " peaked", " equal"};
    struct attention_shape s = {c.B, c.T, c.heads, c.nope, c.rope, c.value, 1 / sqrt(c.nope + c.rope)};
    size_t N = (size_t)c.B * (size_t)c.T, heads = (size_t)c.heads, dn = (size_t)c.nope, dv = (size_t)c.value;
    size_t dr = (size_t)c.rope, dq = dn + dr, stride = dr + (size_t)c.key_gap;
    // Equal keys are small: dq is then their product with score gradients that sum to 0, only rounding, which must stay
    // below its floor.
    bool equal = c.scores == SCORES_EQUAL;
    // Rope gradients are written in vectors where every row is aligned, else one by one.
    size_t out_stride = stride + (c.shift || c.key_gap == 7 ? 3 : 8);
    double query = c.scores == SCORES_PEAKED ? 8 : equal ? 512 : 1, key = equal ? 1.0 / 512 : query;
    for (int backward = 0; backward < 2; backward++) {
        if (!scene_begin(backward ? "attention_backward" : "attention_forward", work * (backward ? 3 : 1),
                         "B %d T %d n %d dn %d dr %d dv %d gap %d shift %d%s", c.B, c.T, c.heads, c.nope, c.rope,
                         c.value, c.key_gap, c.shift, kinds[c.scores]))
            continue;
        scene.shift = c.shift;
        const real *q = in_real(N, heads * dq, query);
        const real *kv = in_keys(N, dn + dv, heads, dn, dn + dv, key, equal);
        const real *kr = in_keys(N, stride, 1, dr, dr, key, equal);
        if (!backward) {
            real *o = out_real("o", N, heads * dv, ROUNDED_INSIDE);
            accum *lse = out_accum("lse", (size_t)c.B * heads, (size_t)c.T, with_floor(SUMMED, 0.1));
            while (scene_run()) attention_forward(o, lse, q, kv, kr, (int)stride, s);
            continue;
        }
        // Both builds go backward from the CPU's forward pass.
        size_t o_n = N * heads * dv, lse_n = N * heads;
        real *o_made = device_alloc(sizeof(real) * (o_n + 1));
        accum *lse_made = device_alloc(sizeof(accum) * (lse_n + 1));
        if (scene.recording) {
            for (int i = 0; i < scene.arrays_count; i++)
                device_copy_in(scene.arrays[i].device, scene.arrays[i].initial, scene.arrays[i].bytes);
            attention_forward(o_made, lse_made, q, kv, kr, (int)stride, s);
        }
        const real *o = in_recorded("o", KIND_REAL, o_n, o_made);
        const accum *lse = in_recorded("lse", KIND_ACCUM, lse_n, lse_made);
        device_free(o_made);
        device_free(lse_made);
        const real *d_o = in_real(N, heads * dv, 1);
        // The first token's score has no gradient: what is left there is rounding.
        struct tolerance t = with_floor(ROUNDED_INSIDE, 0.02);
        real *d_q = out_real("dq", N, heads * dq, t), *d_kv = out_real_pair("dk", dn, "dv", dv, N, heads, t);
        real *d_kr = out_real("dkr", N, out_stride, t);
        while (scene_run())
            attention_backward(d_q, d_kv, d_kr, (int)out_stride, d_o, q, kv, kr, (int)stride, o, lse, s);
    }
}

static void case_attention(struct attention_case c) {
    case_attention_of_work(c, (double)c.B * c.T * c.T * c.heads * (c.nope + c.rope + c.value));
}

// On Hopper two implementations share the work: one takes sizes and strides that are multiples of 8 at aligned addresses
// (key gaps of 0 and 512, no shift), in tiles of 128 queries and blocks of 64 or 128 keys, the other takes the rest and
// short sequences of the narrowest heads. Lengths are those around the multiples of both.
static void all_attention(void) {
    enum { ALIGNED = 11 }; // of the sizes below, the first ones; the others are odd or too wide
    static const int dims[][3] = {{128, 64, 128}, {64, 64, 128}, {64, 32, 64}, {32, 16, 32},   {16, 16, 24},
                                  {16, 8, 16},    {24, 8, 24},   {96, 32, 96}, {120, 64, 128}, {40, 8, 56},
                                  {128, 64, 64},  {17, 6, 9},    {40, 10, 50}, {192, 64, 256}};
    static const int lengths[] = {1, 2, 3, 16, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 320, 333};
    static const int heads[] = {1, 2, 3, 4, 16, 5, 8}, gaps[] = {0, 512, 7};
    for (int l = 0; l < COUNT_OF(lengths); l++) {
        int T = lengths[l];
        for (int d = 0; d < COUNT_OF(dims); d++) {
            int B = 1 + (d + l) % 3, n = heads[(d + 2 * l) % COUNT_OF(heads)], most = 1 + 500 / (B * T);
            struct attention_case c = {B, T, n < most ? n : most, dims[d][0], dims[d][1], dims[d][2], 0, 0, 0};
            c.key_gap = gaps[(d + l) % (d < ALIGNED ? 2 : 3)];
            case_attention(c);
            c.shift = 1;
            if ((d + l) % 4 == 3) case_attention(c);
        }
    }
    // Many blocks, few heads: the CPU gives each head to one core.
    static const struct attention_case longer[] = {
        {1, 1000, 2, 128, 64, 128, 512, 0, 0}, {2, 1000, 3, 32, 16, 32, 8, 0, 0},
        {1, 1000, 2, 24, 8, 24, 0, 1, 0},      {2, 1023, 4, 64, 32, 64, 0, 0, 0},
        {1, 1023, 2, 17, 6, 9, 0, 0, 0},       {1, 1025, 4, 120, 64, 128, 512, 0, 0},
        {1, 1025, 2, 64, 32, 64, 7, 1, 0},     {1, 2048, 4, 128, 64, 128, 512, 0, 0},
        {3, 2048, 1, 16, 8, 16, 0, 1, 0},      {1, 2049, 4, 64, 64, 128, 0, 0, 0},
        {2, 2049, 2, 16, 16, 24, 512, 0, 0},   {1, 2049, 1, 40, 10, 50, 0, 0, 0},
        {1, 4096, 1, 128, 64, 128, 512, 0, 0}, {1, 4096, 1, 32, 16, 32, 0, 1, 0},
        {1, 4097, 2, 96, 32, 96, 0, 0, 0},     {1, 4097, 1, 17, 6, 9, 512, 0, 0},
        {1, 8191, 1, 64, 32, 64, 512, 0, 0},   {1, 8191, 1, 16, 8, 16, 0, 1, 0},
        {1, 8192, 1, 128, 64, 128, 0, 0, 0},   {1, 8192, 1, 16, 8, 16, 7, 0, 0},
    };
    for (int c = 0; c < COUNT_OF(longer); c++) case_attention(longer[c]);
    // More tiles than a GPU has multiprocessors.
    case_attention((struct attention_case){2, 641, 16, 128, 64, 128, 512, 0, 0});
    case_attention((struct attention_case){3, 385, 16, 64, 64, 128, 0, 0, 0});
    case_attention((struct attention_case){3, 1025, 16, 16, 8, 16, 512, 0, 0});
    case_attention((struct attention_case){0, 16, 2, 16, 8, 16, 0, 0, 0});
    case_attention((struct attention_case){3, 70, 16, 16, 8, 16, 0, 0, 0});
    // Several tiles and blocks with --tiny too, for compute-sanitizer.
    case_attention_of_work((struct attention_case){1, 200, 1, 64, 32, 64, 0, 0, 0}, 0);
    case_attention_of_work((struct attention_case){1, 140, 1, 128, 64, 128, 512, 0, 0}, 0);
    for (enum scores scores = SCORES_PEAKED; scores <= SCORES_EQUAL; scores++)
        for (int shift = 0; shift < 2; shift++) {
            case_attention((struct attention_case){2, 35, 2, 16, 8, 16, 0, shift, scores});
            case_attention((struct attention_case){2, 323, 3, 128, 64, 128, 512, shift, scores});
            case_attention((struct attention_case){1, 1030, 2, 64, 32, 64, 0, shift, scores});
        }
}

// ---- SwiGLU ----

static void case_swiglu(int rows, int I, bool gated, int shift) {
    enum { K = 3 };
    int slots = rows + 4;
    int *slot_of_row = malloc(sizeof(int) * (size_t)(rows + 1));
    for (int backward = 0; backward < 2; backward++) {
        if (!scene_begin(backward ? "swiglu_backward" : "swiglu_forward", elements((double)rows * I),
                         "rows %d I %d gated %d shift %d", rows, I, gated, shift))
            continue;
        scene.shift = shift;
        // Every row a slot of its own, in a scattered order; some rows none. One weight is zero.
        int step = slots % 7 == 0 ? 5 : 7;
        for (int r = 0; r < rows; r++) slot_of_row[r] = r % 6 == 4 ? -1 : (int)((int64_t)r * step % slots);
        float *weights = malloc(sizeof *weights * (size_t)slots);
        for (int i = 0; i < slots; i++) weights[i] = i == 0 ? 0 : (float)(2 * scene_uniform());
        const accum *gates = gated ? in_values(KIND_ACCUM, weights, (size_t)slots) : NULL;
        const int *places = gated ? in_int(slot_of_row, (size_t)rows) : NULL;
        free(weights);
        size_t n = (size_t)rows, i = (size_t)I;
        const real *gate_up = in_real(n, 2 * i, 2);
        if (!backward) {
            real *hidden = out_real("hidden", n, i, ROUNDED);
            while (scene_run()) swiglu_forward(hidden, gate_up, gates, places, rows, I);
            continue;
        }
        const real *d_hidden = in_real(n, i, 1);
        real *d_gate_up = out_real("d_gate_up", n, 2 * i, ROUNDED), *hidden = out_real("hidden", n, i, ROUNDED);
        accum *d_gates = gated ? out_accum("d_gates", 1, (size_t)slots, with_floor(SUMMED, 0.1)) : NULL;
        while (scene_run()) swiglu_backward(d_gate_up, hidden, d_gates, d_hidden, gate_up, gates, places, rows, I);
    }
    free(slot_of_row);
}

static void all_swiglu(void) {
    static const int sizes[][2] = {{1, 1},    {2, 7},    {5, 8},     {16, 127},  {17, 128},    {33, 129}, {64, 256},
                                   {9, 1000}, {3, 2048}, {4096, 24}, {1000, 64}, {2048, 1408}, {0, 64},   {7, 18432}};
    for (int c = 0; c < COUNT_OF(sizes); c++)
        for (int gated = 0; gated < 2; gated++)
            for (int shift = 0; shift < 2; shift++) case_swiglu(sizes[c][0], sizes[c][1], gated, shift);
}

// ---- router ----

struct router_case {
    int B, T, E, K, groups, top_groups, H;
    bool masked, normalize, ties;
};

// Scores as a sigmoid gives them. With ties they are multiples of 1/256: many are alike, and sums with the bias exact.
static const accum *in_scores(size_t n, bool ties) {
    float *scores = malloc(sizeof *scores * (n + 1));
    for (size_t i = 0; i < n; i++)
        scores[i] = ties ? (float)(1 + scene_below(255)) / 256 : (float)(1 / (1 + exp(-scene_normal())));
    const accum *device = in_values(KIND_ACCUM, scores, n);
    free(scores);
    return device;
}

static const int32_t *in_tokens(int n, bool masked) {
    int *tokens = malloc(sizeof *tokens * (size_t)(n + 1));
    for (int i = 0; i < n; i++) tokens[i] = masked && scene_below(4) == 0 ? -1 : scene_below(1000);
    const int *device = masked ? in_int(tokens, (size_t)n) : NULL;
    free(tokens);
    return device;
}

// K different experts for each of n tokens, or none. (host)
static void fill_routes(int *ids, int n, int E, int K, bool masked) {
    for (int t = 0; t < n; t++) {
        int first = scene_below(E), none = masked && scene_below(5) == 0;
        for (int k = 0; k < K; k++) ids[(size_t)t * (size_t)K + (size_t)k] = none ? -1 : (first + k) % E;
    }
}

static bool begin_router(const char *operation, struct router_case c) {
    return scene_begin(operation, (double)c.B * c.T * c.E * (c.H ? c.H : 1),
                       "B %d T %d E %d K %d groups %d/%d H %d masked %d norm %d ties %d", c.B, c.T, c.E, c.K,
                       c.top_groups, c.groups, c.H, c.masked, c.normalize, c.ties);
}

static void case_router(struct router_case c) {
    int N = c.B * c.T, E = c.E, K = c.K, H = c.H;
    size_t n = (size_t)N, e = (size_t)E, k = (size_t)K, h = (size_t)H;
    struct router_shape shape = {E, K, c.groups, c.top_groups, c.normalize, 2.5};
    if (begin_router("router_score", c)) {
        const real *x = in_real(n, h, 1), *w = in_real(e, h, 1 / sqrt(H));
        accum *scores = out_accum("scores", n, e, SUMMED);
        while (scene_run()) router_score(scores, x, w, N, E, H);
    }
    if (begin_router("router_select", c)) {
        const accum *scores = in_scores(n * e, c.ties);
        float *biases = malloc(sizeof *biases * e);
        for (int i = 0; i < E; i++)
            biases[i] = c.ties ? (float)(scene_below(65) - 32) / 256 : (float)(0.2 * scene_normal());
        const accum *bias = in_values(KIND_ACCUM, biases, e);
        free(biases);
        const int32_t *tokens = in_tokens(N, c.masked);
        int32_t *ids = out_int("ids", n * k);
        accum *gates = out_accum("gates", n, k, SUMMED);
        while (scene_run()) router_select(ids, gates, scores, bias, tokens, N, shape);
    }
    int *routes = malloc(sizeof *routes * (n * k + 1));
    float *values = malloc(sizeof *values * (n * k + 1));
    if (begin_router("router_gates", c)) {
        const accum *scores = in_scores(n * e, c.ties);
        const int32_t *tokens = in_tokens(N, c.masked);
        fill_routes(routes, N, E, K, c.masked);
        for (size_t i = 0; i < n * k; i++) values[i] = (float)routes[i];
        int32_t *ids = change_values("ids", KIND_INT32, values, n * k, EXACT);
        accum *gates = out_accum("gates", n, k, SUMMED);
        while (scene_run()) router_gates(ids, gates, scores, tokens, N, shape);
    }
    if (begin_router("router_balance", c)) {
        const accum *scores = in_scores(n * e, c.ties);
        const int32_t *tokens = in_tokens(N, c.masked);
        accum *f = out_accum("f", (size_t)c.B, e, SUMMED), *loss = out_accum("loss", 1, (size_t)c.B, SUMMED);
        while (scene_run()) router_balance(f, loss, scores, tokens, c.B, c.T, shape);
    }
    if (begin_router("router_backward", c)) {
        const accum *scores = in_scores(n * e, c.ties), *d_gates = in_accum(n * k, 1),
                    *f = in_accum((size_t)c.B * e, 1);
        const real *x = in_real(n, h, 1), *w = in_real(e, h, 1);
        fill_routes(routes, N, E, K, c.masked);
        const int32_t *ids = in_int(routes, n * k);
        // With one expert and normalized gates nothing is left of the gates' gradient but rounding.
        accum *dz = out_accum("dz", n, e, with_floor(SUMMED, 0.1));
        real *dx = change_real("dx", n, h, 1, ROUNDED);
        accum *dw = change_accum("dw", e, h, 1, with_floor(SUMMED, 0.1));
        while (scene_run()) router_backward(dx, dw, dz, d_gates, scores, ids, f, 0.5, x, w, c.B, c.T, H, shape);
    }
    free(routes);
    free(values);
}

static void case_router_count(int n, int E, bool same) {
    if (scene_begin("router_count", n, "n %d E %d same %d", n, E, same)) {
        const int *ids = in_ids(n, E, same);
        float *before = malloc(sizeof *before * (size_t)E);
        for (int e = 0; e < E; e++) before[e] = (float)scene_below(1000);
        int64_t *counts = change_values("counts", KIND_INT64, before, (size_t)E, EXACT);
        free(before);
        while (scene_run()) router_count(counts, ids, (size_t)n, E);
    }
    if (scene_begin("router_update_bias", E, "n %d E %d same %d", n, E, same)) {
        float *numbers = malloc(sizeof *numbers * (size_t)E);
        for (int e = 0; e < E; e++)
            numbers[e] = same ? 7 : (float)scene_below(E < 8 ? 3 : 1000) * (n % 2 ? 1 : 0x1p33f);
        struct array *counts = array_add(NULL, KIND_INT64, false, (size_t)E, (size_t)E, EXACT);
        for (int e = 0; e < E; e++) array_set(counts, (size_t)e, (double)numbers[e]);
        free(numbers);
        accum *bias = change_accum("bias", 1, (size_t)E, 0.1, SUMMED);
        while (scene_run()) router_update_bias(bias, array_pointer(counts), E, 0.001);
    }
}

static void all_router(void) {
    static const struct router_case cases[] = {
        {1, 1, 3, 1, 1, 1, 5, false, true, false},       {2, 5, 3, 3, 1, 1, 8, true, true, true},
        {1, 33, 8, 2, 1, 1, 64, false, true, true},      {3, 65, 64, 6, 1, 1, 33, true, false, true},
        {2, 100, 64, 8, 8, 4, 40, true, true, true},     {1, 129, 256, 8, 8, 4, 128, false, true, true},
        {1, 64, 257, 8, 1, 1, 24, true, true, false},    {2, 127, 64, 64, 1, 1, 16, false, false, true},
        {1, 50, 12, 1, 3, 1, 7, true, true, true},       {4, 16, 16, 4, 16, 4, 16, true, true, true},
        {1, 1000, 6, 2, 2, 1, 512, true, true, true},    {1, 64, 256, 8, 8, 4, 7168, true, true, false},
        {2, 1024, 128, 8, 4, 2, 256, true, true, false}, {0, 16, 8, 2, 1, 1, 16, false, true, false},
        {1, 40, 512, 10, 16, 3, 65, true, true, true},
    };
    for (int c = 0; c < COUNT_OF(cases); c++) case_router(cases[c]);
    static const int counts[][2] = {{1, 1}, {7, 3}, {1000, 64}, {100001, 257}, {4096, 256}, {0, 8}, {640000, 12}};
    for (int c = 0; c < COUNT_OF(counts); c++)
        for (int same = 0; same < 2; same++) case_router_count(counts[c][0], counts[c][1], same);
}

// ---- dispatch and combine ----

static bool begin_moe(const char *operation, int N, int K, int E, int H, int way) {
    return scene_begin(operation, elements((double)N * K * (H ? H : 1)), "N %d K %d E %d H %d way %d", N, K, E, H, way);
}

// way 0: no order, 1: an order, 2: all routes to the first K experts, 3: no routes.
static void case_moe(int N, int K, int E, int H, int way, int shift) {
    size_t n = (size_t)N, k = (size_t)K, h = (size_t)H, slots = n * k;
    int *ids = malloc(sizeof *ids * (slots + 1)), *order = malloc(sizeof *order * (size_t)E);
    if (begin_moe("moe_place", N, K, E, H, way)) {
        fill_routes(ids, N, E, K, true);
        for (size_t i = 0; i < slots && way >= 2; i++) ids[i] = way == 2 ? (int)(i % k) : -1;
        for (int e = 0; e < E; e++) order[e] = e;
        for (int e = E - 1; e > 0; e--) {
            int other = scene_below(e + 1), kept = order[e];
            order[e] = order[other];
            order[other] = kept;
        }
        const int *device_ids = in_int(ids, slots), *device_order = way == 1 ? in_int(order, (size_t)E) : NULL;
        int *offsets = out_int("offsets", (size_t)E + 1);
        int *slot_of_row = out_int("slot_of_row", slots), *row_of_slot = out_int("row_of_slot", slots);
        while (scene_run()) moe_place(offsets, slot_of_row, row_of_slot, device_ids, device_order, N, K, E);
    }
    // Rows in a scattered order; about one slot in ten has none.
    int step = slots % 7919 == 0 ? 7907 : 7919;
    int rows = way == 3 ? 0 : (int)slots;
    if (begin_moe("moe_gather", N, K, E, H, way)) {
        scene.shift = shift;
        for (int r = 0; r < rows; r++) ids[r] = scene_below(10) == 0 ? -1 : scene_below(N);
        const int *index = in_int(ids, (size_t)rows);
        const real *x = in_real(n, h, 1);
        real *out = out_real("rows", (size_t)rows, h, EXACT);
        while (scene_run()) moe_gather(out, x, index, rows, H);
    }
    if (begin_moe("moe_scatter", N, K, E, H, way)) {
        scene.shift = shift;
        for (size_t s = 0; s < slots; s++)
            ids[s] = way == 3 || scene_below(10) == 0 ? -1 : (int)((int64_t)s * step % (int64_t)slots);
        const int *row_of_slot = in_int(ids, slots);
        const real *x = in_real(n, h, 1);
        real *out = change_real("rows", slots, h, 1, EXACT); // rows of no slot keep what they had
        while (scene_run()) moe_scatter(out, x, row_of_slot, N, K, H);
    }
    if (begin_moe("moe_gather_gates", N, K, E, 0, way)) {
        for (int r = 0; r < rows; r++) ids[r] = scene_below(10) == 0 ? -1 : (int)((int64_t)r * step % (int64_t)slots);
        const int *index = in_int(ids, (size_t)rows);
        const accum *gates = in_accum(slots, 1);
        accum *out = out_accum("out", 1, (size_t)rows, EXACT);
        while (scene_run()) moe_gather_gates(out, gates, index, rows);
    }
    for (int sum = 0; sum < 2; sum++) {
        if (!begin_moe(sum ? "moe_sum_slots" : "moe_combine", N, K, E, H, way)) continue;
        scene.shift = shift;
        for (size_t s = 0; s < slots; s++)
            ids[s] = way == 3 || scene_below(10) == 0 ? -1 : (int)((int64_t)s * step % (int64_t)slots);
        const int *places = in_int(ids, slots);
        const real *values = in_real(slots, h, 1);
        const real *shared = way % 2 ? in_real(n, h, 1) : NULL, *residual = way >= 2 ? in_real(n, h, 1) : NULL;
        real *y = out_real("y", n, h, ROUNDED);
        while (scene_run()) (sum ? moe_sum_slots : moe_combine)(y, values, places, shared, residual, N, K, H);
    }
    free(ids);
    free(order);
}

static void case_regroup(int S, int E, int stride, int first, int mean) {
    if (!scene_begin("moe_regroup", S * E, "S %d E %d stride %d first %d mean %d", S, E, stride, first, mean)) return;
    // A source's offsets are a part of a longer list: they begin anywhere.
    int *offsets = malloc(sizeof(int) * (size_t)(S * stride)), rows = 0;
    for (int s = 0; s < S; s++) {
        int at = scene_below(50);
        for (int e = 0; e < stride; e++) {
            offsets[s * stride + e] = at;
            int here = scene_below(3) == 0 ? 0 : scene_below(2 * mean + 1);
            if (e < E) rows += here;
            at += here;
        }
    }
    const int *device_offsets = in_int(offsets, (size_t)(S * stride));
    free(offsets);
    int *arrival_of_row = out_int("arrival_of_row", (size_t)(first + rows + 5));
    int *row_of_arrival = out_int("row_of_arrival", (size_t)(first + rows + 5));
    while (scene_run()) moe_regroup(arrival_of_row, row_of_arrival, device_offsets, S, stride, E, first, rows);
}

static void all_moe(void) {
    static const int sizes[][4] = {{1, 1, 1, 1},       {5, 3, 3, 7},      {64, 2, 8, 64},      {127, 8, 64, 33},
                                   {333, 6, 257, 128}, {1000, 4, 12, 24}, {1024, 8, 256, 256}, {0, 4, 8, 16},
                                   {9, 8, 8, 7168},    {4099, 1, 3, 8}};
    for (int c = 0; c < COUNT_OF(sizes); c++)
        for (int way = 0; way < 4; way++)
            case_moe(sizes[c][0], sizes[c][1], sizes[c][2], sizes[c][3], way, (c + way) % 3 == 2);
    case_regroup(1, 1, 2, 0, 3);
    case_regroup(2, 3, 4, 0, 5);
    case_regroup(3, 8, 65, 17, 20);
    case_regroup(8, 32, 257, 4096, 30);
    case_regroup(4, 64, 65, 1, 0);
    case_regroup(64, 4, 9, 3, 50);
}

// ---- loss ----

static void case_cross_entropy(int rows, int V, bool want_gradient, double size, int shift) {
    if (!scene_begin("cross_entropy", elements((double)rows * V), "rows %d V %d gradient %d size %g shift %d", rows, V,
                     want_gradient, size, shift))
        return;
    scene.shift = shift;
    const int *targets = in_ids(rows, V, false);
    // Undefined without the gradient.
    real *logits = change_real(want_gradient ? "logits" : NULL, (size_t)rows, (size_t)V, size, ROUNDED);
    accum *loss = out_accum("loss", 1, (size_t)rows, with_floor(SUMMED, 0.1));
    while (scene_run()) cross_entropy(logits, loss, targets, rows, V, want_gradient, 0.125);
}

static void all_loss(void) {
    static const int sizes[][2] = {{1, 1},     {1, 2},     {3, 7},      {5, 8},      {17, 257},
                                   {64, 1000}, {9, 4096},  {4, 129280}, {3, 129281}, {1000, 320},
                                   {0, 100},   {5, 57352}, {3, 100003}, {2, 480003}};
    for (int c = 0; c < COUNT_OF(sizes); c++)
        for (int gradient = 0; gradient < 2; gradient++)
            for (int large = 0; large < 2; large++)
                case_cross_entropy(sizes[c][0], sizes[c][1], gradient, large ? 30 : 2, (c + large) % 2);
}

// ---- sums, optimizer ----

// device_add_sum to what is `before`.
static double sum_after(double before, const accum *values, size_t n) {
    double *sum = device_alloc(sizeof *sum), result;
    device_copy_in(sum, &before, sizeof before);
    device_add_sum(sum, values, n);
    device_copy_out(&result, sum, sizeof result);
    device_free(sum);
    return result;
}

static void case_sums(size_t n, int shift) {
    if (!scene_begin("device_add_sum", elements((double)n), "n %zu shift %d", n, shift)) return;
    scene.shift = shift;
    float *values = malloc(sizeof *values * (n + 1));
    for (size_t i = 0; i < n; i++) values[i] = (float)(1 + scene_normal());
    const accum *device = in_values(KIND_ACCUM, values, n);
    free(values);
    double sums[2] = {0}, squares[2] = {0};
    for (int run = 0; scene_run(); run++) {
        sums[run] = sum_after(3, device, n);
        squares[run] = device_sum_squares(device, n);
    }
    scene_check(scene.recording || memcmp(&sums[0], &sums[1], sizeof(double)) == 0);
    scene_check(scene.recording || memcmp(&squares[0], &squares[1], sizeof(double)) == 0);
    // Sums in double: 2^-53 sqrt(n) and more room than that.
    scene_number("sum", sums[0], 1e-11);
    scene_number("sum of squares", squares[0], 1e-11);
}

static void case_sums_that_are_no_number(size_t n, float value) {
    if (!scene_begin("device_sum_squares", elements((double)n), "n %zu with %g", n, (double)value)) return;
    float *values = calloc(n, sizeof *values);
    values[n - 1] = value;
    const accum *device = in_values(KIND_ACCUM, values, n);
    free(values);
    double squares = 0;
    while (scene_run()) squares = device_sum_squares(device, n);
    scene_check(isnan(value) ? isnan(squares) : isinf(squares));
}

static void case_adamw(size_t n, int steps, struct adamw a, int shift) {
    if (!scene_begin("adamw_update", elements((double)n), "n %zu steps %d from %lld decay %g shift %d", n, steps,
                     (long long)a.step, a.weight_decay, shift))
        return;
    scene.shift = shift;
    accum *master = change_accum("master", 1, n, 0.02, SUMMED);
    float *first = malloc(sizeof *first * (n + 1)), *second = malloc(sizeof *second * (n + 1));
    for (size_t i = 0; i < n; i++) {
        first[i] = a.step == 1 ? 0 : (float)(0.01 * scene_normal());
        second[i] = a.step == 1 ? 0 : (float)(1e-4 * (0.1 + scene_uniform()));
    }
    accum *m = change_values("m", KIND_ACCUM, first, n, SUMMED);
    accum *v = change_values("v", KIND_ACCUM, second, n, SUMMED);
    free(first);
    free(second);
    real *weight = out_real("weight", 1, n, ROUNDED);
    const accum *grads[4];
    for (int s = 0; s < steps; s++) grads[s] = in_accum(n, 0.01);
    while (scene_run())
        for (int s = 0; s < steps; s++) {
            struct adamw now = a;
            now.step += s;
            adamw_update(master, m, v, weight, grads[s], n, now);
        }
}

static void all_sums(void) {
    static const size_t sizes[] = {0, 1, 2, 31, 33, 1000, 4096, 4097, 100003, 1 << 20, 5000001};
    for (int c = 0; c < COUNT_OF(sizes); c++) {
        struct adamw a = {3e-4, 0.9, 0.95, 1e-8, c % 2 ? 0.1 : 0, c % 3 ? 1 : 0.37, c % 2 ? 1 : 1000};
        for (int shift = 0; shift < 2; shift++) {
            case_sums(sizes[c], shift);
            if (c < 10) case_adamw(sizes[c], c < 8 ? 4 : 2, a, shift);
        }
    }
    case_sums_that_are_no_number(100001, NAN);
    case_sums_that_are_no_number(7, INFINITY);
    case_sums_that_are_no_number(5000, -INFINITY);
}

int main(int argc, char **argv) {
    device_start(argv);
    comm_start(&argc, &argv);
    scene_start(argc, argv);
    device_open(0, 1);
    printf("# %s\n", device_name());
    static const int counts[] = {0, 1, 16, 17, 255, 4099, 1000001};
    for (int c = 0; c < COUNT_OF(counts); c++)
        for (int shift = 0; shift < 2; shift++) case_conversions(counts[c], shift);
    static const size_t bytes[] = {0, 1, 255, 4097, DEVICE_READ_BYTES, 3000001};
    for (int c = 0; c < COUNT_OF(bytes); c++) case_memory(bytes[c]);
    all_matmuls();
    all_grouped();
    all_rows();
    all_attention();
    all_swiglu();
    all_router();
    all_moe();
    all_loss();
    all_sums();
    int code = scene_finish();
    comm_stop();
    return code;
}

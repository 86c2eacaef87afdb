// Attention's two passes alone, at the head sizes of the presets and lengths of a training run, in short bursts and under
// a load that lasts, where power limits the clock. scripts/bench_attention.py does the same with cuDNN by torch.
//
//   bench_attention                      all rows
//   bench_attention DN/DR/DV BxT         one size, as bench_attention 128/64/128 4x4096
//
// Operations are those of the causal half, B heads T^2 (dn + dr + dv), and backward 2.5 times as many. A row that
// ends in "host" is one where the GPU waited for the host: it could be faster.
#include <unistd.h>

#include "tests/gpu_bench.h"

enum { HEADS = 16, IDLE_MS = 60, LOAD_MS = 100, BALLASTS = 4 };

static const struct attention_shape rows[] = {
    {.batch = 4, .length = 4096, .nope_dim = 128, .rope_dim = 64, .value_dim = 128},
    {.batch = 16, .length = 1024, .nope_dim = 128, .rope_dim = 64, .value_dim = 128},
    {.batch = 2, .length = 8192, .nope_dim = 128, .rope_dim = 64, .value_dim = 128},
    {.batch = 4, .length = 4096, .nope_dim = 64, .rope_dim = 32, .value_dim = 64},
    {.batch = 16, .length = 1024, .nope_dim = 64, .rope_dim = 32, .value_dim = 64},
    {.batch = 4, .length = 4096, .nope_dim = 32, .rope_dim = 16, .value_dim = 32},
    {.batch = 16, .length = 1024, .nope_dim = 32, .rope_dim = 16, .value_dim = 32},
    {.batch = 4, .length = 4096, .nope_dim = 64, .rope_dim = 64, .value_dim = 128},
    {.batch = 16, .length = 1024, .nope_dim = 64, .rope_dim = 64, .value_dim = 128},
};

// Of the row in work.
static struct {
    struct attention_shape shape;
    struct buffer q, kv, kr, o, lse, d_o, d_q, d_kv, d_kr;
} row;

static void row_take(struct attention_shape s) {
    size_t N = (size_t)s.batch * (size_t)s.length, n = (size_t)s.heads, dr = (size_t)s.rope_dim;
    size_t q = N * n * ((size_t)s.nope_dim + dr), o = N * n * (size_t)s.value_dim, kv = N * n * (size_t)s.nope_dim + o;
    bench_begin((double)BENCH_ROTATED_BYTES); // one copy: the rows' inputs alone are larger than the L2 cache
    row.shape = s;
    row.q = buffer_normals(q), row.kv = buffer_normals(kv), row.kr = buffer_normals(N * dr);
    row.o = buffer_reals(o), row.lse = buffer_accums(N * n), row.d_o = buffer_normals(o);
    row.d_q = buffer_reals(q), row.d_kv = buffer_reals(kv), row.d_kr = buffer_reals(N * dr);
}

static void pass_forward(void) {
    attention_forward(at(row.o), at(row.lse), at(row.q), at(row.kv), at(row.kr), row.shape.rope_dim, row.shape);
}

static void pass_backward(void) {
    attention_backward(at(row.d_q), at(row.d_kv), at(row.d_kr), row.shape.rope_dim, at(row.d_o), at(row.q), at(row.kv),
                       at(row.kr), row.shape.rope_dim, at(row.o), at(row.lse), row.shape);
}

static void calls(void (*pass)(void), int count) {
    for (int i = 0; i < count; i++) pass();
}

// Median of calls one right after the other. What was queued before them keeps the GPU busy until they are queued.
static struct sample calls_timed(void (*pass)(void)) {
    for (int i = 0; i < BENCH_REPEATS; i++) {
        cuda_check(cudaEventRecord(bench.starts[i], cuda_stream()));
        pass();
        cuda_check(cudaEventRecord(bench.ends[i], cuda_stream()));
    }
    return sample_read(BENCH_REPEATS);
}

static struct sample measure_burst(void (*pass)(void)) {
    pass(); // the first call loads the kernels
    device_finish();
    usleep(1000 * IDLE_MS);
    for (int i = 0; i < BALLASTS; i++) queue_ballast();
    calls(pass, BENCH_WARMUPS);
    return calls_timed(pass);
}

static struct sample measure_sustained(void (*pass)(void), double seconds_of_a_call) {
    calls(pass, 1 + (int)(1e-3 * LOAD_MS / seconds_of_a_call));
    return calls_timed(pass);
}

static void print_row(const char *pass, const char *load, double flops, struct sample t) {
    const struct attention_shape *s = &row.shape;
    char heads[32], mhz[16] = "-";
    snprintf(heads, sizeof heads, "%d/%d/%d", s->nope_dim, s->rope_dim, s->value_dim);
    if (t.mhz) snprintf(mhz, sizeof mhz, "%u", t.mhz);
    printf("%-11s %4d %6d  %-8s %-9s %9.4f %8.1f %5s%s\n", heads, s->batch, s->length, pass, load, 1e3 * t.seconds,
           1e-12 * flops / t.seconds, mhz, t.waited ? "  host" : "");
    fflush(stdout);
}

// Bursts first: a load leaves the GPU warm, and its clock low.
static void bench_row(struct attention_shape s) {
    s.heads = HEADS;
    s.scale = 1 / sqrt(s.nope_dim + s.rope_dim);
    double pairs = (double)s.batch * s.heads * s.length * s.length;
    double flops = pairs * (s.nope_dim + s.rope_dim + s.value_dim);
    row_take(s);
    struct sample forward = measure_burst(pass_forward);
    struct sample backward = measure_burst(pass_backward); // of the forward pass's o and lse
    print_row("forward", "burst", flops, forward);
    print_row("backward", "burst", 2.5 * flops, backward);
    print_row("forward", "sustained", flops, measure_sustained(pass_forward, forward.seconds));
    print_row("backward", "sustained", 2.5 * flops, measure_sustained(pass_backward, backward.seconds));
}

static struct attention_shape shape_asked_for(const char *heads, const char *tokens) {
    struct attention_shape s = {0};
    char end;
    bool read = sscanf(heads, "%d/%d/%d%c", &s.nope_dim, &s.rope_dim, &s.value_dim, &end) == 3 &&
                sscanf(tokens, "%dx%d%c", &s.batch, &s.length, &end) == 2;
    if (!read || s.nope_dim < 1 || s.rope_dim < 0 || s.value_dim < 1 || s.batch < 1 || s.length < 1)
        fail_user("bench_attention", "found %s %s, wanted sizes of heads and tokens, as 128/64/128 4x4096", heads,
                  tokens);
    return s;
}

int main(int argc, char **argv) {
    if (argc != 1 && argc != 3) fail_user("bench_attention", "found %d words, wanted none, or DN/DR/DV BxT", argc - 1);
    struct attention_shape asked = argc == 3 ? shape_asked_for(argv[1], argv[2]) : (struct attention_shape){0};
    device_start(argv);
    device_open(0, 1);
    bench_open();
    printf("%s, %d heads, medians of %d calls\n%-11s %4s %6s  %-8s %-9s %9s %8s %5s\n", device_name(), HEADS,
           BENCH_REPEATS, "dn/dr/dv", "B", "T", "pass", "load", "ms", "TFLOP/s", "MHz");
    for (size_t i = 0; argc == 1 && i < sizeof rows / sizeof *rows; i++) bench_row(rows[i]);
    if (argc == 3) bench_row(asked);
    return 0;
}

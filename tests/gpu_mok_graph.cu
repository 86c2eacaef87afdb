// Both passes of the megakernel in a CUDA graph: nothing in them waits for the host or takes numbers from it that routes
// decide. Captured once, replayed with other routes in the same buffers, they must give the bits of the calls themselves.
// Prints TAP.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "kernels/comm.h"
#include "kernels/cuda/cuda.h"
#include "kernels/mok.h"
#include "kernels/random.h"

enum { TOKENS = 200, EXPERTS = 6, TOP_K = 2, HIDDEN = 256, INNER = 128, SHARED = 192, MINIBATCH = 128, RING = 384 };
enum { REPLAYS = 3, SLOTS = TOKENS * TOP_K };

static uint64_t seed = 1;

struct buffer {
    void *memory;
    size_t bytes;
};

// Poisoned before every call.
enum { MOST_BUFFERS = 24 };
static struct buffer buffers[MOST_BUFFERS];
static int buffer_count;

static void *remember(void *memory, size_t bytes) {
    if (buffer_count == MOST_BUFFERS) abort();
    buffers[buffer_count++] = {memory, bytes};
    return memory;
}

static void *take(size_t bytes) { return remember(device_alloc(bytes), bytes); }

static real *take_reals(size_t n) { return (real *)take(n * sizeof(real)); }

static void poison() {
    for (int i = 0; i < buffer_count; i++) {
        unsigned char *bytes = (unsigned char *)malloc(buffers[i].bytes + 1);
        memset(bytes, 0xff, buffers[i].bytes + 1); // NaN as a float, -1 as an integer
        device_copy_in(buffers[i].memory, bytes, buffers[i].bytes);
        free(bytes);
    }
}

// Uniform numbers of deviation `deviation`, which stay.
static void fill(real *device, size_t n, double deviation) {
    float *values = (float *)malloc((n + 1) * sizeof(float));
    for (size_t i = 0; i < n; i++)
        values[i] = (float)(deviation * sqrt(12.0) * (random_uniform(random_next(&seed)) - 0.5));
    device_real_from_float(device, values, n);
    free(values);
}

static real *filled(size_t n, double deviation) {
    real *device = (real *)device_alloc(n * sizeof(real));
    fill(device, n, deviation);
    return device;
}

enum { MOST_RESULTS = 7 };
struct passes {
    struct mok_shape shape;
    struct mok_plan plan;
    struct mok_group group;
    struct mok_layer layer;
    struct mok_workspace work;
    struct mok_crew crew;
    char *base[1];
    int32_t *ids;
    accum *gates;
    real *y, *dx;
    struct buffer results[MOST_RESULTS]; // y, then what backward gives
    int results_count;
};

static size_t aligned(size_t bytes) { return (bytes + 255) / 256 * 256; }

static void open_symmetric(struct passes *p) {
    const size_t header = aligned(mok_header_bytes(1)), rows = aligned(TOKENS * HIDDEN * sizeof(real)),
                 slots = (size_t)SLOTS * HIDDEN * sizeof(real), numbers = aligned(SLOTS * sizeof(float));
    p->base[0] = (char *)device_alloc(header + 2 * rows + aligned(slots) + 3 * numbers);
    char *at = p->base[0] + header;
    p->layer.x = (const real *)at;
    p->layer.dy = (const real *)(at + rows);
    p->layer.slots = (real *)(at + 2 * rows);
    at += 2 * rows + aligned(slots);
    p->ids = (int32_t *)at;
    p->gates = (accum *)(at + numbers);
    p->layer.d_gates = (accum *)(at + 2 * numbers);
    fill((real *)p->layer.x, (size_t)TOKENS * HIDDEN, 1);
    fill((real *)p->layer.dy, (size_t)TOKENS * HIDDEN, 1);
    float gates[SLOTS];
    for (int i = 0; i < SLOTS; i++) gates[i] = (float)(0.1 + random_uniform(random_next(&seed)));
    device_accum_from_float(p->gates, gates, SLOTS);
    remember(p->layer.slots, slots);
    remember(p->layer.d_gates, SLOTS * sizeof(accum));
}

static void add_result(struct passes *p, void *memory, size_t bytes) {
    p->results[p->results_count++] = {memory, bytes};
}

// A gradient of weights, which is stored.
static accum *take_gradient(struct passes *p, size_t n) {
    accum *gradient = (accum *)take(n * sizeof(accum));
    add_result(p, gradient, n * sizeof(accum));
    return gradient;
}

static void open_passes(struct passes *p) {
    const size_t H = HIDDEN, I = INNER, S = SHARED, R = RING, N = TOKENS;
    p->shape.ranks = 1, p->shape.experts = EXPERTS, p->shape.top_k = TOP_K;
    p->shape.hidden = HIDDEN, p->shape.intermediate = INNER, p->shape.shared = SHARED;
    p->shape.max_tokens = TOKENS, p->shape.minibatch_rows = MINIBATCH, p->shape.ring_rows = RING;
    p->shape.lag = mok_default_workers(), p->shape.move_rows = 8;
    p->group.ranks = 1, p->group.base = p->base, p->group.timeout = 20;
    p->crew.workers = mok_default_workers(), p->crew.timeout = 20;
    open_symmetric(p);
    p->layer.w13 = filled(EXPERTS * 2 * I * H, 1 / 16.0), p->layer.w2 = filled(EXPERTS * I * H, 1 / 11.0);
    p->layer.shared_w13 = filled(2 * S * H, 1 / 16.0), p->layer.shared_w2 = filled(S * H, 1 / 14.0);
    p->layer.x_rows = take_reals(R * H), p->layer.gate_up = take_reals(R * 2 * I);
    p->layer.shared_gate_up = take_reals(N * 2 * S);
    p->work.hidden = take_reals(R * I), p->work.dy_rows = take_reals(R * H), p->work.d_gate_up = take_reals(R * 2 * I);
    p->work.out = mok_keeps_out() ? take_reals(R * H) : NULL;
    p->work.partials = (accum *)take((I + MOK_PARTIAL_COLUMNS - 1) / MOK_PARTIAL_COLUMNS * R * sizeof(accum));
    p->work.shared_hidden = take_reals(N * S), p->work.shared_d_gate_up = take_reals(N * 2 * S);
    p->work.shared_out = take_reals(N * H);
    p->work.counters = (int32_t *)take(mok_counter_total(&p->shape) * sizeof(int32_t));
    p->y = take_reals(N * H), p->dx = take_reals(N * H);
    add_result(p, p->y, N * H * sizeof(real));
    add_result(p, p->dx, N * H * sizeof(real));
    add_result(p, p->layer.d_gates, SLOTS * sizeof(accum));
    p->layer.first_use = true;
    p->layer.d_w13 = take_gradient(p, EXPERTS * 2 * I * H), p->layer.d_w2 = take_gradient(p, EXPERTS * I * H);
    p->layer.d_shared_w13 = take_gradient(p, 2 * S * H), p->layer.d_shared_w2 = take_gradient(p, S * H);
    mok_plan_alloc(&p->plan, &p->shape);
    mok_crew_open(&p->crew);
}

static void write_routes(struct passes *p) {
    int32_t ids[SLOTS];
    for (int t = 0; t < TOKENS; t++) {
        int first = (int)random_below(&seed, EXPERTS);
        bool masked = random_below(&seed, 8) == 0;
        for (int k = 0; k < TOP_K; k++) ids[t * TOP_K + k] = masked ? -1 : (first + k) % EXPERTS;
    }
    device_copy_in(p->ids, ids, sizeof ids);
}

static void forward(struct passes *p) {
    mok_set_tokens(&p->group, TOKENS);
    mok_barrier(&p->group, "before forward");
    mok_plan_make(&p->plan, &p->shape, &p->group, p->ids, p->gates);
    mok_run(&p->shape, &p->plan, &p->group, &p->layer, &p->work, &p->crew, MOK_FORWARD);
    mok_barrier(&p->group, "after forward");
    moe_sum_slots(p->y, p->layer.slots, p->ids, p->work.shared_out, NULL, TOKENS, TOP_K, HIDDEN);
}

static void backward(struct passes *p) {
    mok_barrier(&p->group, "before backward");
    mok_run(&p->shape, &p->plan, &p->group, &p->layer, &p->work, &p->crew, MOK_BACKWARD);
    mok_barrier(&p->group, "after backward");
    moe_sum_slots(p->dx, p->layer.slots, p->ids, p->work.shared_out, NULL, TOKENS, TOP_K, HIDDEN);
}

static void run(struct passes *p) {
    forward(p);
    backward(p);
}

// Called once before, so that what an operation takes at its first call is there.
static cudaGraphExec_t capture(struct passes *p) {
    cudaGraph_t graph;
    cudaGraphExec_t replayed;
    cuda_check(cudaStreamBeginCapture(cuda_stream(), cudaStreamCaptureModeThreadLocal));
    run(p);
    cuda_check(cudaStreamEndCapture(cuda_stream(), &graph));
    cuda_check(cudaGraphInstantiate(&replayed, graph, 0));
    cuda_check(cudaGraphDestroy(graph));
    return replayed;
}

static size_t result_bytes(const struct passes *p) {
    size_t bytes = 0;
    for (int i = 0; i < p->results_count; i++) bytes += p->results[i].bytes;
    return bytes;
}

// One behind the other.
static unsigned char *results_of(const struct passes *p) {
    unsigned char *bytes = (unsigned char *)malloc(result_bytes(p)), *at = bytes;
    for (int i = 0; i < p->results_count; at += p->results[i++].bytes)
        device_copy_out(at, p->results[i].memory, p->results[i].bytes);
    return bytes;
}

int main(int argc, char **argv) {
    device_start(argv);
    comm_start(&argc, &argv);
    device_open(0, 1);
    printf("1..1\n");
    if (!mok_available()) {
        printf("ok 1 - megakernel in a graph # SKIP this build has none\n");
        comm_stop();
        return 0;
    }
    static struct passes p; // zeros
    open_passes(&p);
    poison();
    write_routes(&p);
    run(&p);
    unsigned char *before = results_of(&p);
    cudaGraphExec_t graph = capture(&p);
    bool same = true, changed = true;
    for (int i = 0; i < REPLAYS; i++) {
        write_routes(&p);
        poison();
        run(&p);
        unsigned char *wanted = results_of(&p);
        poison();
        cuda_check(cudaGraphLaunch(graph, cuda_stream()));
        unsigned char *found = results_of(&p);
        if (memcmp(found, wanted, result_bytes(&p)) != 0) {
            printf("# replay %d: found other bits than those of the calls\n", i);
            same = false;
        }
        changed = changed && memcmp(wanted, before, result_bytes(&p)) != 0; // other routes, another result
        free(before);
        free(found);
        before = wanted;
    }
    free(before);
    cuda_check(cudaGraphExecDestroy(graph));
    if (!changed) printf("# other routes gave the same result\n");
    printf("%s 1 - megakernel in a graph, %d replays\n", same && changed ? "ok" : "not ok", (int)REPLAYS);
    comm_stop();
    return same && changed ? 0 : 1;
}

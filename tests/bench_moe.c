// Speed of the MoE layer alone on CPU ranks: the megakernel, its plan, and the all-to-all layer, forward (from the router's
// output to the layer's) and backward (from dy to dx and all gradients). Arms are interleaved A/B/C/C/B/A in one run; each
// sample is that of the slowest rank; medians of all samples. Started alone or by mpirun.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "kernels/clock.h"
#include "kernels/comm.h"
#include "kernels/kernels.h"
#include "model/model.h"
#include "model/moe.h"
#include "model/moe_mok.h"
#include "model/presets.h"
#include "model/route.h"

enum { ROUNDS = 15, BATCH = 8 };

struct arm {
    const char *name;
    struct moe_settings settings;
    struct model model;
    double forward[2 * ROUNDS], backward[2 * ROUNDS], plan[2 * ROUNDS];
};

static double uniform(void) {
    static uint32_t state = 1;
    state = state * 1664525u + 1013904223u;
    return (state >> 8) * 0x1p-24;
}

static void fill(real *x, size_t n, double scale) {
    for (size_t i = 0; i < n; i++) x[i] = (real)(scale * (2 * uniform() - 1));
}

static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *samples, int count) {
    qsort(samples, (size_t)count, sizeof *samples, compare_doubles);
    return samples[count / 2];
}

// Of the slowest rank.
static double slowest(struct comm *world, double seconds) {
    double all[256] = {0}, most = 0;
    comm_gather_all(world, all, &seconds, sizeof seconds);
    for (int r = 0; r < comm_size(world); r++) most = fmax(most, all[r]);
    return most;
}

static void arm_open(struct arm *a, struct config c, int tokens, const struct parallel *p, enum moe_route route) {
    model_open(&a->model, &c, BATCH, tokens / BATCH, true, p, &a->settings);
    struct model *m = &a->model;
    struct block_activations *b = &m->acts.blocks[c.dense_layers];
    size_t N = (size_t)tokens, H = (size_t)c.hidden;
    fill(m->weights, m->params.size, 1 / sqrt(c.hidden));
    fill(b->ffn_norm, N * H, 1);
    fill(m->acts.dx, N * H, 1);
    route_fill(b->ids, route, (struct route_place){1, 0, 0}, (int64_t)p->rank * tokens, tokens, c.experts, c.top_k);
    for (size_t i = 0; i < N * (size_t)c.top_k; i++) b->gates[i] = (accum)uniform();
    m->first_use = true;
}

// One forward and backward pass; sample number i.
static void arm_sample(struct arm *a, struct comm *world, int tokens, int i) {
    struct model *m = &a->model;
    const struct config *c = &m->config;
    struct block_activations *b = &m->acts.blocks[c->dense_layers];
    comm_barrier(world);
    double start = clock_seconds();
    moe_forward(m, c->dense_layers, m->acts.output, NULL, tokens);
    a->forward[i] = slowest(world, clock_seconds() - start);
    comm_barrier(world);
    start = clock_seconds();
    moe_backward(m, c->dense_layers, m->acts.d_norm, m->acts.d_gates, m->acts.dx, tokens);
    a->backward[i] = slowest(world, clock_seconds() - start);
    if (!m->mok) return;
    comm_barrier(world);
    start = clock_seconds();
    mok_plan_make(&m->mok->blocks[0].plan, &m->mok->shape, &m->mok->group, b->ids, b->gates);
    a->plan[i] = slowest(world, clock_seconds() - start);
}

static void print_arm(const struct config *c, int tokens, int ep, const char *workload, struct arm *a, double peak) {
    double forward = median(a->forward, 2 * ROUNDS), backward = median(a->backward, 2 * ROUNDS);
    double flops = 6.0 * tokens * (c->top_k + c->shared_experts) * c->hidden * c->expert_intermediate;
    printf("T %d, H %d, I %d, E %d, K %d, EP %d, %-8s %-18s forward %8.3f ms (%4.1f %% of peak)  backward %8.3f ms "
           "(%4.1f %%)",
           tokens, c->hidden, c->expert_intermediate, c->experts, c->top_k, ep, workload, a->name, 1e3 * forward,
           100 * flops / forward / peak, 1e3 * backward, 200 * flops / backward / peak);
    if (a->model.mok) {
        double plan = median(a->plan, 2 * ROUNDS);
        printf("  plan %6.3f ms, %.1f %% of both", 1e3 * plan, 100 * plan / (forward + backward));
    }
    putchar('\n');
    fflush(stdout);
}

static void bench_layer(const char *preset, int tokens, const struct parallel *p, enum moe_route route,
                        const char *workload, double peak) {
    struct config c = preset_find(preset)->model;
    c.layers = c.dense_layers + 1;
    c.vocab = 16;
    c.mtp_depth = 0;
    struct arm arms[] = {{.name = "mok", .settings = {.kind = MOE_MOK}},
                         {.name = "alltoall", .settings = {.kind = MOE_ALLTOALL, .alltoall_chunks = 1}},
                         {.name = "alltoall, 2 chunks", .settings = {.kind = MOE_ALLTOALL, .alltoall_chunks = 2}},
                         {.name = "mok, 1 mover", .settings = {.kind = MOE_MOK, .comm_workers = 1}}};
    int count = mok_default_workers() > 1 ? 4 : 3;
    for (int i = 0; i < count; i++) arm_open(&arms[i], c, tokens, p, route);
    for (int i = 0; i < count; i++) arm_sample(&arms[i], p->world, tokens, 0); // warm
    for (int round = 0; round < ROUNDS; round++) {
        for (int i = 0; i < count; i++) arm_sample(&arms[i], p->world, tokens, 2 * round);
        for (int i = count - 1; i >= 0; i--) arm_sample(&arms[i], p->world, tokens, 2 * round + 1);
    }
    for (int i = 0; i < count; i++) {
        if (p->rank == 0) print_arm(&c, tokens, p->ep, workload, &arms[i], peak);
        model_close(&arms[i].model);
    }
}

int main(int argc, char **argv) {
    device_start(argv);
    comm_start(&argc, &argv);
    struct parallel p;
    parallel_open(&p, 0, 16);
    double peak = device_peak_flops();
    if (p.rank == 0) printf("%s, %d ranks, peak %.1f GFLOP/s a rank\n", device_name(), p.ranks, peak / 1e9);
    bench_layer("tiny", 2048, &p, ROUTE_BALANCED, "W0", peak);
    bench_layer("tiny", 2048, &p, ROUTE_W2, "W2", peak);
    bench_layer("small", 2048, &p, ROUTE_BALANCED, "W0", peak);
    parallel_close(&p);
    comm_stop();
    return 0;
}

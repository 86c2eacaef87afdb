// Random inputs and the routes of a workload.
#ifndef MOK_TESTS_BENCH_LAYER_INPUTS_H
#define MOK_TESTS_BENCH_LAYER_INPUTS_H

#include <math.h>

#include "kernels/comm.h"
#include "kernels/kernels.h"
#include "kernels/random.h"
#include "model/route.h"
#include "tests/bench_layer.h"

// ---- random inputs ----

enum { POOL_ROWS = 2048, NORMALS = 1000003 };

// Rows of normal numbers, of which all others are copies in random order. H numbers each.
static real *pool_make(int H, double scale, uint64_t seed) {
    float *normals = host_alloc(NORMALS, sizeof *normals), *rows = host_alloc((size_t)POOL_ROWS * H, sizeof *rows);
    for (int i = 0; i < NORMALS; i++) {
        double u = random_uniform(random_next(&seed)), v = random_uniform(random_next(&seed));
        normals[i] = (float)(scale * sqrt(-2 * log(1 - u)) * cos(6.283185307179586 * v));
    }
    for (size_t i = 0; i < (size_t)POOL_ROWS * H; i++) rows[i] = normals[i % NORMALS];
    real *pool = device_alloc(sizeof *pool * POOL_ROWS * H);
    device_real_from_float(pool, rows, (size_t)POOL_ROWS * H);
    free(rows);
    free(normals);
    return pool;
}

static void fill_rows(real *to, const real *pool, int rows, int H, uint64_t seed) {
    int *index = host_alloc((size_t)rows + 1, sizeof *index);
    for (int i = 0; i < rows; i++) index[i] = (int)random_below(&seed, POOL_ROWS);
    int *device = device_alloc(sizeof *device * ((size_t)rows + 1));
    device_copy_in(device, index, sizeof *index * (size_t)rows);
    moe_gather(to, pool, device, rows, H);
    device_finish();
    device_free(device);
    free(index);
}

static void fill_weights(const struct bench *b, const real *pool, uint64_t seed) {
    const struct layer_shape *s = &b->shape;
    const struct block_offsets *o = &b->model.params.blocks[0];
    struct expert_range experts = parallel_experts(&b->parallel, s->E);
    int inner = (experts.end - experts.first) * s->I;
    fill_rows(b->model.weights + o->expert_w13, pool, 2 * inner, s->H, seed);
    fill_rows(b->model.weights + o->expert_w2, pool, inner, s->H, seed + 1);
    if (s->S == 0) return;
    fill_rows(b->model.weights + o->shared_w13, pool, 2 * s->S, s->H, seed + 2);
    fill_rows(b->model.weights + o->shared_w2, pool, s->S, s->H, seed + 3);
}

static void fill_gates(const struct bench *b, uint64_t seed) {
    size_t count = (size_t)SETS * b->shape.T * b->shape.K;
    float *gates = host_alloc(count, sizeof *gates);
    for (size_t i = 0; i < count; i++) gates[i] = (float)random_uniform(random_next(&seed));
    device_accum_from_float(b->first.gates, gates, count);
    free(gates);
}

static void fill(const struct bench *b) {
    const struct layer_shape *s = &b->shape;
    uint64_t seed = random_mix((uint64_t)b->parallel.rank);
    real *inputs = pool_make(s->H, 1, 11), *weights = pool_make(s->H, 1 / sqrt(s->H), 12);
    fill_weights(b, weights, seed);
    fill_rows(b->first.ffn_norm, inputs, SETS * s->T, s->H, seed + 4);
    if (b->options->backward) fill_rows(b->model.acts.dx, inputs, SETS * s->T, s->H, seed + 5);
    fill_gates(b, seed + 6);
    device_free(inputs);
    device_free(weights);
}

// ---- routes ----

// Rows of every expert, all ranks' tokens together, from those that this rank's tokens choose.
static int64_t *count_rows(const struct bench *b, const int32_t *ids) {
    int64_t *rows = host_alloc((size_t)b->shape.E, sizeof *rows);
    for (size_t i = 0; i < (size_t)b->shape.T * b->shape.K; i++)
        if (ids[i] >= 0) rows[ids[i]]++;
    comm_sum_int64(b->parallel.world, rows, (size_t)b->shape.E);
    return rows;
}

static void add_loads(struct bench *b, const int64_t *rows) {
    int ranks = b->parallel.ep, E = b->shape.E;
    int64_t most = 0;
    for (int r = 0; r < ranks; r++) {
        int64_t here = 0;
        for (int e = parallel_first_expert(E, ranks, r); e < parallel_first_expert(E, ranks, r + 1); e++)
            here += rows[e];
        b->routes += (double)here / ranks / SETS;
        if (here > most) most = here;
    }
    b->busiest += (double)most / SETS;
}

static int *offsets_of(const struct bench *b, const int64_t *rows) {
    struct expert_range here = parallel_experts(&b->parallel, b->shape.E);
    int *offsets = host_alloc((size_t)(here.end - here.first) + 1, sizeof *offsets);
    for (int e = here.first; e < here.end; e++) offsets[e - here.first + 1] = offsets[e - here.first] + (int)rows[e];
    return offsets;
}

// The last step is the burst of W7.
static void route(struct bench *b) {
    const struct layer_shape *s = &b->shape;
    size_t count = (size_t)s->T * s->K;
    int32_t *ids = host_alloc(count, sizeof *ids);
    for (int i = 0; i < SETS; i++) {
        struct route_place place = {.seed = 1, .step = ROUTE_BURST - SETS + i};
        route_fill(ids, route_of_workload(b->workload), place, (int64_t)b->parallel.rank * s->T, s->T, s->E, s->K);
        device_copy_in(b->first.ids + (size_t)i * count, ids, sizeof *ids * count);
        int64_t *rows = count_rows(b, ids);
        add_loads(b, rows);
        b->offsets[i] = offsets_of(b, rows);
        free(rows);
    }
    free(ids);
}

#endif

// Gradients of weights from the very rows that the megakernel multiplied: summed again in double, they must come out as
// FP32 sums do. Against the record they are off by what the rows' rounding brings, which would hide a lost row.
#ifndef MOK_TESTS_GPU_MOK_GRADIENTS_H
#define MOK_TESTS_GPU_MOK_GRADIENTS_H

#include "tests/gpu_mok_checks.h"

// Multiplications in double for one gradient at most: of a larger one every so many rows are looked at.
#define MOST_MULTIPLICATIONS 1e7

// dw [M, H] = a^T b over `rows` rows; a [rows, M], b [rows, H] in host memory.
static inline void check_sums(const char *name, const accum *dw, const real *a, const real *b, size_t rows, size_t M,
                              size_t H) {
    size_t step = (size_t)((double)rows * (double)M * (double)H / MOST_MULTIPLICATIONS) + 1, count = 0;
    size_t n = (M + step - 1) / step * H;
    double *found = malloc(sizeof *found * (n + 1)), *sums = calloc(n + 1, sizeof *sums),
           *wide = malloc(sizeof *wide * (rows * H + 1));
    float *wanted = malloc(sizeof *wanted * (n + 1));
    if (!found || !sums || !wide || !wanted) abort();
    for (size_t i = 0; i < rows * H; i++) wide[i] = host_double(b[i]);
    for (size_t i = 0; i < M; i += step, count++)
        for (size_t r = 0; r < rows; r++) {
            double factor = host_double(a[r * M + i]), *sum = sums + count * H;
            for (size_t h = 0; h < H; h++) sum[h] += factor * wide[r * H + h];
        }
    for (size_t i = 0; i < n; i++) {
        wanted[i] = (float)sums[i];
        found[i] = (double)dw[i / H * step * H + i % H];
    }
    compare_floats(name, found, wanted, n, H, SUMMED);
    free(found);
    free(sums);
    free(wide);
    free(wanted);
}

// Row blocks stand one behind the other in the ring, from a multiple of its length on: an expert whose rows are all in it
// may begin anew at its start. Its rows one behind the other.
static inline real *rows_of_expert(const struct place *me, const struct mok_plan *plan, int e, const real *device,
                                   int columns) {
    const real *ring = memory_of(&me->own, device);
    size_t width = (size_t)columns, count = 0;
    real *rows = malloc(sizeof *rows * ((size_t)plan->expert_rows[e] * width + 1));
    if (!rows) abort();
    for (int b = plan->expert_block[e]; b < plan->expert_block[e + 1]; b++) {
        size_t here = (size_t)mok_block_rows(plan, b);
        memcpy(rows + count * width, ring + mok_ring_row(&me->shape, b) * width, sizeof *rows * here * width);
        count += here;
    }
    return rows;
}

static inline bool is_whole_in_ring(const struct place *me, const struct mok_plan *plan, int e) {
    for (int b = plan->expert_block[e]; b < plan->expert_block[e + 1]; b++)
        if (!is_in_ring(me, plan, MOK_BACKWARD, b)) return false;
    return true;
}

static inline void check_expert(const struct place *me, int l, const struct mok_plan *plan, int e) {
    const struct mok_layer *layer = &me->layers[l].layer;
    const struct mok_workspace *w = &me->work;
    int H = me->shape.hidden, I = me->shape.intermediate;
    size_t count = (size_t)plan->expert_rows[e], size = (size_t)e * (size_t)I * (size_t)H;
    const accum *d_w13 = memory_of(&me->gradients, layer->d_w13), *d_w2 = memory_of(&me->gradients, layer->d_w2);
    real *x = rows_of_expert(me, plan, e, layer->x_rows, H), *dy = rows_of_expert(me, plan, e, w->dy_rows, H),
         *hidden = rows_of_expert(me, plan, e, w->hidden, I),
         *d_gate_up = rows_of_expert(me, plan, e, w->d_gate_up, 2 * I);
    check_sums("d w2 from kept rows", d_w2 + size, hidden, dy, count, (size_t)I, (size_t)H);
    check_sums("d w13 from kept rows", d_w13 + 2 * size, d_gate_up, x, count, 2 * (size_t)I, (size_t)H);
    free(x);
    free(dy);
    free(hidden);
    free(d_gate_up);
}

// Behind a backward pass with first_use and its check. Experts of whom rows have left the ring are left out, which none
// have in one macrobatch.
static inline void check_gradients(const struct place *me, int l) {
    const struct own_layer *own = &me->layers[l];
    const struct mok_layer *layer = &own->layer;
    const struct memory *m = &me->own, *g = &me->gradients;
    size_t N = (size_t)own->tokens, H = (size_t)me->shape.hidden, S = (size_t)me->shape.shared;
    struct mok_plan plan;
    int looked = 0;
    mok_plan_read(&plan, &own->plan, &me->shape);
    for (int e = 0; e < plan.experts; e++)
        if (is_whole_in_ring(me, &plan, e)) {
            check_expert(me, l, &plan, e);
            looked++;
        }
    if (S) {
        check_sums("d shared w2 from kept rows", memory_of(g, layer->d_shared_w2), memory_of(m, me->work.shared_hidden),
                   memory_of(&me->symmetric, me->dy), N, S, H);
        check_sums("d shared w13 from kept rows", memory_of(g, layer->d_shared_w13),
                   memory_of(m, me->work.shared_d_gate_up), memory_of(&me->symmetric, own->x), N, 2 * S, H);
    }
    if (mok_macrobatches(&me->shape, &plan) == 1) scene_check(looked == plan.experts);
    free(plan.rows);
}

#endif

// The same layer by separate operations on one rank, with the megakernel's own core for all products: the results must be
// the same bits.
#ifndef MOK_TESTS_GPU_MOK_SEPARATE_H
#define MOK_TESTS_GPU_MOK_SEPARATE_H

#include "tests/gpu_mok_checks.h"

// One gated unit for E experts: rows in the order of offsets, or all tokens for the shared one.
struct unit {
    int E, rows, H, I;
    int *offsets; // [E + 1] host
    const real *w13, *w2;
    const accum *gates;     // NULL: of weight 1
    const int *slot_of_row; // NULL likewise
    real *x, *dy;           // [rows, H]
    real *gate_up, *d_gate_up;
    real *hidden, *d_hidden;
    real *out, *dx; // [rows, H]
    accum *d_gates, *d_w13, *d_w2;
};

// Host and device memory of one comparison, closed together.
enum { MOST_PIECES = 40 };
struct pieces {
    void *list[MOST_PIECES];
    int count;
};

static inline void *piece(struct pieces *all, size_t bytes) {
    if (all->count == MOST_PIECES) abort();
    void *memory = all->list[all->count++] = device_alloc(bytes);
    poison_device(memory, bytes);
    return memory;
}

static inline void *piece_of(struct pieces *all, const void *host, size_t bytes) {
    void *memory = piece(all, bytes);
    device_copy_in(memory, host, bytes);
    return memory;
}

static inline void pieces_close(struct pieces *all) {
    for (int i = 0; i < all->count; i++) device_free(all->list[i]);
}

static inline accum *piece_of_start(struct pieces *all, int which, size_t n) {
    accum *values = malloc(sizeof *values * (n + 1));
    if (!values) abort();
    for (size_t i = 0; i < n; i++) values[i] = start_value(which, i);
    accum *device = piece_of(all, values, sizeof *values * n);
    free(values);
    return device;
}

// Gradients of weights, poisoned or with the values that are added to.
static inline void unit_open(struct unit *u, struct pieces *all, bool add, int d_w13, int d_w2) {
    size_t rows = (size_t)u->rows, H = (size_t)u->H, I = (size_t)u->I, w = (size_t)u->E * I * H;
    real **inner[] = {&u->gate_up, &u->d_gate_up, &u->hidden, &u->d_hidden}, **outer[] = {&u->out, &u->dx};
    for (size_t i = 0; i < 4; i++) *inner[i] = piece(all, sizeof(real) * rows * I * (i < 2 ? 2 : 1));
    for (size_t i = 0; i < 2; i++) *outer[i] = piece(all, sizeof(real) * rows * H);
    u->d_w13 = add ? piece_of_start(all, d_w13, 2 * w) : piece(all, sizeof(accum) * 2 * w);
    u->d_w2 = add ? piece_of_start(all, d_w2, w) : piece(all, sizeof(accum) * w);
}

static inline void unit_forward(const struct unit *u) {
    grouped_matmul_nt(u->gate_up, u->x, u->w13, u->offsets, u->E, 2 * u->I, u->H);
    swiglu_forward(u->hidden, u->gate_up, u->gates, u->slot_of_row, u->offsets[u->E], u->I);
    grouped_matmul_nn(u->out, u->hidden, u->w2, u->offsets, u->E, u->H, u->I);
}

static inline void unit_backward(const struct unit *u, bool add) {
    grouped_matmul_nt(u->d_hidden, u->dy, u->w2, u->offsets, u->E, u->I, u->H);
    swiglu_backward(u->d_gate_up, u->hidden, u->d_gates, u->d_hidden, u->gate_up, u->gates, u->slot_of_row,
                    u->offsets[u->E], u->I);
    grouped_matmul_nn(u->dx, u->d_gate_up, u->w13, u->offsets, u->E, u->H, 2 * u->I);
    grouped_matmul_tn(u->d_w2, u->hidden, u->dy, u->offsets, u->E, u->I, u->H, add);
    grouped_matmul_tn(u->d_w13, u->d_gate_up, u->x, u->offsets, u->E, 2 * u->I, u->H, add);
}

// ---- gates' gradients ----

static inline real *host_copy(const real *device, size_t n) {
    real *host = malloc(sizeof *host * (n + 1));
    if (!host) abort();
    device_copy_out(host, device, sizeof *host * n);
    return host;
}

// <d hidden, silu(gate) up> in double, from the numbers as they are rounded.
static inline void check_gate_gradients(const struct unit *u, const accum *found, int slots) {
    size_t rows = (size_t)u->offsets[u->E], I = (size_t)u->I;
    real *d_hidden = host_copy(u->d_hidden, rows * I), *gate_up = host_copy(u->gate_up, rows * 2 * I);
    int *slot = malloc(sizeof *slot * (rows + 1));
    double *here = malloc(sizeof *here * (rows + 1));
    float *wanted = malloc(sizeof *wanted * (rows + 1));
    device_copy_out(slot, u->slot_of_row, sizeof *slot * rows);
    for (size_t r = 0; r < rows; r++) {
        double sum = 0;
        for (size_t i = 0; i < I; i++) {
            double g = host_double(gate_up[r * 2 * I + i]), up = host_double(gate_up[r * 2 * I + I + i]);
            sum += host_double(d_hidden[r * I + i]) * g / (1 + exp(-g)) * up;
        }
        wanted[r] = (float)sum;
        here[r] = slot[r] >= 0 && slot[r] < slots ? (double)found[slot[r]] : NAN;
    }
    compare_floats("d gates from kept rows", here, wanted, rows, rows ? rows : 1, SUMMED);
    free(d_hidden);
    free(gate_up);
    free(slot);
    free(here);
    free(wanted);
}

// ---- the layer ----

// As a dealing to one rank with this `add` and so many calls.
static inline void separate_passes(const struct problem *p, bool add, int calls, struct results *r) {
    struct pieces all = {0};
    size_t N = (size_t)p->tokens, H = (size_t)p->H, K = (size_t)p->K, slots = N * K, E = (size_t)p->E;
    const int32_t *ids = piece_of(&all, p->ids, sizeof *ids * slots);
    const accum *gates = piece_of(&all, p->gates, sizeof *gates * slots);
    int *offsets = piece(&all, sizeof(int) * (E + 1)), *slot_of_row = piece(&all, sizeof(int) * slots),
        *row_of_slot = piece(&all, sizeof(int) * slots), *host = malloc(sizeof(int) * (E + 1));
    real *x = piece_of(&all, p->x, sizeof(real) * N * H), *dy = piece_of(&all, p->dy, sizeof(real) * N * H);
    real *sum = piece(&all, sizeof(real) * N * H), *rows = piece(&all, sizeof(real) * slots * H);
    real *dy_rows = piece(&all, sizeof(real) * slots * H);
    accum *d_gates = piece(&all, sizeof(accum) * slots);
    int tokens[] = {0, p->tokens};
    struct unit routed = {.E = p->E,
                          .rows = (int)slots,
                          .H = p->H,
                          .I = p->I,
                          .offsets = host,
                          .w13 = p->w13,
                          .w2 = p->w2,
                          .gates = gates,
                          .slot_of_row = slot_of_row,
                          .x = rows,
                          .dy = dy_rows,
                          .d_gates = d_gates};
    struct unit shared = {.E = 1,
                          .rows = p->tokens,
                          .H = p->H,
                          .I = p->S,
                          .offsets = tokens,
                          .w13 = p->shared_w13,
                          .w2 = p->shared_w2,
                          .x = x,
                          .dy = dy};
    unit_open(&routed, &all, add, RESULT_D_W13, RESULT_D_W2);
    unit_open(&shared, &all, add, RESULT_D_SHARED_W13, RESULT_D_SHARED_W2);
    grouped_matmul_choose(GROUPED_OWN);
    moe_place(offsets, slot_of_row, row_of_slot, ids, NULL, p->tokens, p->K, p->E);
    device_copy_out(host, offsets, sizeof(int) * (E + 1));
    moe_scatter(rows, x, row_of_slot, p->tokens, p->K, p->H);
    unit_forward(&routed);
    if (p->S) unit_forward(&shared);
    moe_combine(sum, routed.out, row_of_slot, p->S ? shared.out : NULL, p->residual, p->tokens, p->K, p->H);
    device_copy_out(r->y, sum, sizeof(real) * N * H);
    for (int call = 0; call < calls; call++) {
        moe_scatter(dy_rows, dy, row_of_slot, p->tokens, p->K, p->H);
        unit_backward(&routed, add || call > 0);
        if (p->S) unit_backward(&shared, add || call > 0);
    }
    moe_combine(sum, routed.dx, row_of_slot, p->S ? shared.dx : NULL, NULL, p->tokens, p->K, p->H);
    const void *from[RESULTS] = {NULL, sum, d_gates, routed.d_w13, routed.d_w2, shared.d_w13, shared.d_w2};
    for (int i = RESULT_DX; i < RESULTS; i++) {
        struct result one = result_of(r, p, i);
        device_copy_out(one.memory, from[i], one.n * one.bytes);
    }
    check_gate_gradients(&routed, r->d_gates, (int)slots);
    pieces_close(&all);
    free(host);
}

static inline void against_separate(const struct problem *p, bool add, int calls, const struct results *wanted) {
    struct results r = results_open(p);
    scene_check(grouped_matmul_available(GROUPED_OWN));
    separate_passes(p, add, calls, &r);
    same_results(add ? "by separate operations, added" : "by separate operations", 1, p, &r, wanted);
    results_close(&r);
}

#endif

// The megakernel's passes as the host starts them. Nothing here waits for the GPU.
#include <limits.h>

#include "kernels/cuda/device.h"
#include "kernels/cuda/mok_parameters.h"
#include "kernels/cuda/mok_record.h"
#include "kernels/cuda/tensor_map.h"

enum { HOPPER = 90, COLUMN_UNIT = 8, LEAST_MOVE_ROWS = 8, MOST_MOVE_ROWS = 32, MOVE_ELEMENTS = 1 << 14 };

bool mok_available(void) { return cuda_compiled_capability() == HOPPER; }

// TMA's: rows begin at multiples of 16 bytes.
int mok_column_unit(void) { return COLUMN_UNIT; }

int mok_most_ranks(void) { return MOK_MOST_RANKS; }

bool mok_keeps_out(void) { return false; }

// Where there is no GPU, what a plan of a run on one would have: those of an H200.
static int multiprocessors(void) {
    int gpus = 0;
    if (cudaGetDeviceCount(&gpus) == cudaSuccess && gpus) return cuda_multiprocessors();
    cudaGetLastError(); // not to be found again by a later check
    return 132;
}

int mok_default_workers(void) { return multiprocessors(); }

int mok_most_workers(void) { return multiprocessors(); }

// About 32 KB, which come in some ten microseconds.
int mok_default_move_rows(int hidden) {
    int rows = LEAST_MOVE_ROWS;
    while (rows < MOST_MOVE_ROWS && rows * hidden < MOVE_ELEMENTS) rows *= 2;
    return rows;
}

// All workers must be there at once if some only move: those may wait for one that multiplies.
void mok_crew_open(struct mok_crew *c) {
    if (c->workers < 1 || c->comm_workers >= c->workers || c->workers > mok_most_workers())
        fail_internal("megakernel",
                      "found %d workers, %d of them only moving rows; wanted one more than those, and at most %d",
                      c->workers, c->comm_workers, mok_most_workers());
    mok_forward_prepare();
    mok_backward_prepare();
}

void mok_crew_close(struct mok_crew *c) { (void)c; }

// ---- parameters ----

// Matrices of an expert, or of several: weights and their gradients are one behind the other.
struct ffn {
    size_t rows, experts, H, I;
    const real *x, *dy, *gate_up, *hidden, *d_gate_up, *out, *w13, *w2;
    accum *d_w13, *d_w2;
};

// Rows end the matrices: a last block of fewer is filled up with zeros, and stores no more than those. A matrix cannot be
// empty; without rows only what lies behind all of them is asked for.
static void map_rows(struct mok_maps *maps, const struct ffn *f, enum mok_pass pass) {
    size_t R = f->rows ? f->rows : 1, H = f->H, I = f->I;
    maps->x = tensor_map_matrix(f->x, R, H, H);
    maps->gate = tensor_map_matrix(f->gate_up, R, I, 2 * I);
    maps->up = tensor_map_matrix(f->gate_up + I, R, I, 2 * I);
    maps->hidden = tensor_map_matrix(f->hidden, R, I, I);
    if (f->out) maps->out = tensor_map_matrix(f->out, R, H, H);
    if (pass == MOK_FORWARD) return;
    maps->dy = tensor_map_matrix(f->dy, R, H, H);
    maps->d_gate = tensor_map_matrix(f->d_gate_up, R, I, 2 * I);
    maps->d_up = tensor_map_matrix(f->d_gate_up + I, R, I, 2 * I);
    maps->d_gate_up = tensor_map_matrix(f->d_gate_up, R, 2 * I, 2 * I);
}

static struct mok_maps maps_of(const struct ffn *f, enum mok_pass pass) {
    struct mok_maps maps = {.inner = (int)f->I};
    if (f->I == 0) return maps; // no task asks for them
    map_rows(&maps, f, pass);
    maps.w13 = tensor_map_matrices(f->w13, f->experts, 2 * f->I, f->H);
    maps.w2 = tensor_map_matrices(f->w2, f->experts, f->I, f->H);
    if (pass == MOK_FORWARD) return maps;
    maps.d_w13 = tensor_map_matrices_accum(f->d_w13, f->experts, 2 * f->I, f->H);
    maps.d_w2 = tensor_map_matrices_accum(f->d_w2, f->experts, f->I, f->H);
    return maps;
}

static struct ffn routed_ffn(const struct mok_shape *s, int experts, const struct mok_layer *l,
                             const struct mok_workspace *w) {
    return (struct ffn){.rows = (size_t)s->ring_rows,
                        .experts = (size_t)experts,
                        .H = (size_t)s->hidden,
                        .I = (size_t)s->intermediate,
                        .x = l->x_rows,
                        .dy = w->dy_rows,
                        .gate_up = l->gate_up,
                        .hidden = w->hidden,
                        .d_gate_up = w->d_gate_up,
                        .w13 = l->w13,
                        .w2 = l->w2,
                        .d_w13 = l->d_w13,
                        .d_w2 = l->d_w2};
}

static struct ffn shared_ffn(const struct mok_shape *s, int tokens, const struct mok_layer *l,
                             const struct mok_workspace *w) {
    return (struct ffn){.rows = (size_t)tokens,
                        .experts = 1,
                        .H = (size_t)s->hidden,
                        .I = (size_t)s->shared,
                        .x = l->x,
                        .dy = l->dy,
                        .gate_up = l->shared_gate_up,
                        .hidden = w->shared_hidden,
                        .d_gate_up = w->shared_d_gate_up,
                        .out = w->shared_out,
                        .w13 = l->shared_w13,
                        .w2 = l->shared_w2,
                        .d_w13 = l->d_shared_w13,
                        .d_w2 = l->d_shared_w2};
}

// Where something in this rank's symmetric memory lies from its beginning.
static size_t symmetric_at(const struct mok_group *g, const void *mine) {
    return (size_t)((const char *)mine - g->base[g->rank]);
}

struct mok_parameters mok_parameters_of(const struct mok_shape *s, const struct mok_plan *p, const struct mok_group *g,
                                        const struct mok_layer *l, const struct mok_workspace *w,
                                        const struct mok_crew *crew, enum mok_pass pass) {
    bool backward = pass == MOK_BACKWARD;
    struct ffn routed = routed_ffn(s, p->experts, l, w), shared = shared_ffn(s, p->tokens, l, w);
    struct mok_parameters q = {.routed = maps_of(&routed, pass),
                               .shared = maps_of(&shared, pass),
                               .shape = *s,
                               .plan = *p,
                               .x_rows = l->x_rows,
                               .dy_rows = w->dy_rows,
                               .partials = w->partials,
                               .peers = mok_peers_of(g),
                               .x_at = symmetric_at(g, l->x),
                               .dy_at = backward ? symmetric_at(g, l->dy) : 0,
                               .slots_at = symmetric_at(g, l->slots),
                               .d_gates_at = backward ? symmetric_at(g, l->d_gates) : 0,
                               .first_use = l->first_use,
                               .lost = lost_wait_record(),
                               .comm_workers = crew->comm_workers,
                               .delays = crew->delays};
    if (g->ranks == 1 || s->top_k == 1) q.plan.twin = NULL; // no token comes twice from another rank
    for (int kind = 0; kind < MOK_TICKETS; kind++)
        q.counters[kind] = w->counters + mok_counter(s, (enum mok_counter_kind)kind, 0);
    for (int ticket = 0; ticket < MOK_TICKET_KINDS; ticket++)
        q.tickets[ticket] = w->counters + mok_counter(s, MOK_TICKETS, ticket);
    return q;
}

void mok_run(const struct mok_shape *s, const struct mok_plan *p, const struct mok_group *g,
             const struct mok_layer *layer, const struct mok_workspace *w, const struct mok_crew *crew,
             enum mok_pass pass) {
    OPERATION();
    if (!mok_available())
        fail_internal("megakernel", "found a build for another GPU, wanted one for Hopper (CUDA_ARCH=90a)");
    if (s->move_rows > MOST_MOVE_ROWS)
        fail_internal("megakernel", "found tickets of %d rows, wanted at most %d", s->move_rows, MOST_MOVE_ROWS);
    struct mok_parameters q = mok_parameters_of(s, p, g, layer, w, crew, pass);
    q.log = mok_record_pass(s, crew, pass);
    cuda_check(cudaMemsetAsync(w->counters, 0, sizeof *w->counters * mok_counter_total(s), cuda_stream()));
    if (pass == MOK_FORWARD)
        (q.log.records ? mok_forward_launch_recorded : mok_forward_launch)(&q, crew->workers);
    else
        (q.log.records ? mok_backward_launch_recorded : mok_backward_launch)(&q, crew->workers);
}

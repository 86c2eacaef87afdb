// The megakernel's passes as the host starts them. Nothing here waits for the GPU.
#include <limits.h>

#include "kernels/cuda/device.h"
#include "kernels/cuda/mok_parameters.h"
#include "kernels/cuda/tensor_map.h"

enum { HOPPER = 90, COLUMN_UNIT = 8, LEAST_MOVE_ROWS = 8, MOST_MOVE_ROWS = 32, MOVE_ELEMENTS = 1 << 14 };

bool mok_available(enum mok_pass pass) { return pass == MOK_FORWARD && cuda_compiled_capability() == HOPPER; }

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

int mok_traced_workers(int workers) {
    (void)workers;
    return 0;
}

// All workers must be there at once if some only move: those may wait for one that multiplies.
void mok_crew_open(struct mok_crew *c) {
    if (c->workers < 1 || c->comm_workers >= c->workers || c->workers > mok_most_workers())
        fail_internal("megakernel",
                      "found %d workers, %d of them only moving rows; wanted one more than those, and at most %d",
                      c->workers, c->comm_workers, mok_most_workers());
}

void mok_crew_close(struct mok_crew *c) { (void)c; }

// ---- parameters ----

static struct mok_maps routed_maps(const struct mok_shape *s, int experts, const struct mok_layer *l,
                                   const struct mok_workspace *w) {
    size_t R = (size_t)s->ring_rows, H = (size_t)s->hidden, I = (size_t)s->intermediate, E = (size_t)experts;
    return (struct mok_maps){.x = tensor_map_matrix(l->x_rows, R, H, H),
                             .w13 = tensor_map_matrix(l->w13, E * 2 * I, H, H),
                             .gate = tensor_map_matrix(l->gate_up, R, I, 2 * I),
                             .up = tensor_map_matrix(l->gate_up + I, R, I, 2 * I),
                             .hidden = tensor_map_matrix(w->hidden, R, I, I),
                             .w2 = tensor_map_matrix(l->w2, E * I, H, H),
                             .inner = s->intermediate};
}

// Tokens end the matrices: a last block of fewer is filled up with zeros, and stores no more than those.
static struct mok_maps shared_maps(const struct mok_shape *s, int tokens, const struct mok_layer *l,
                                   const struct mok_workspace *w) {
    size_t T = (size_t)tokens, H = (size_t)s->hidden, S = (size_t)s->shared;
    if (T == 0 || S == 0) return (struct mok_maps){.inner = s->shared}; // no task asks for them
    return (struct mok_maps){.x = tensor_map_matrix(l->x, T, H, H),
                             .w13 = tensor_map_matrix(l->shared_w13, 2 * S, H, H),
                             .gate = tensor_map_matrix(l->shared_gate_up, T, S, 2 * S),
                             .up = tensor_map_matrix(l->shared_gate_up + S, T, S, 2 * S),
                             .hidden = tensor_map_matrix(w->shared_hidden, T, S, S),
                             .w2 = tensor_map_matrix(l->shared_w2, S, H, H),
                             .out = tensor_map_matrix(w->shared_out, T, H, H),
                             .inner = s->shared};
}

struct mok_parameters mok_parameters_of(const struct mok_shape *s, const struct mok_plan *p, const struct mok_group *g,
                                        const struct mok_layer *l, const struct mok_workspace *w,
                                        const struct mok_crew *crew, enum mok_pass pass) {
    struct mok_parameters q = {.routed = routed_maps(s, p->experts, l, w),
                               .shared = shared_maps(s, p->tokens, l, w),
                               .shape = *s,
                               .plan = p->device,
                               .tasks = p->tasks[pass],
                               .rows = p->rows,
                               .twin = g->ranks > 1 && s->top_k > 1 ? p->twin : NULL,
                               .x_rows = l->x_rows,
                               .peers = mok_peers_of(g),
                               .x_at = (size_t)((const char *)l->x - g->base[g->rank]),
                               .slots_at = (size_t)((const char *)l->slots - g->base[g->rank]),
                               .lost = lost_wait_record(),
                               .comm_workers = crew->comm_workers,
                               .delays = crew->delays};
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
    if (!mok_available(pass)) fail_internal("megakernel", "found a call for pass %d, wanted one that is there", pass);
    if (s->move_rows > MOST_MOVE_ROWS)
        fail_internal("megakernel", "found tickets of %d rows, wanted at most %d", s->move_rows, MOST_MOVE_ROWS);
    struct mok_parameters q = mok_parameters_of(s, p, g, layer, w, crew, pass);
    cuda_check(cudaMemsetAsync(w->counters, 0, sizeof *w->counters * mok_counter_total(s), cuda_stream()));
    mok_forward_launch(&q, crew->workers);
}

// What the megakernel of a pass is told.
#ifndef MOK_KERNELS_CUDA_MOK_PARAMETERS_H
#define MOK_KERNELS_CUDA_MOK_PARAMETERS_H

#include <cuda.h>

#include "kernels/cuda/lost_wait.h"
#include "kernels/cuda/mok_header.h"
#include "kernels/mok_events.h"

// The routed experts' matrices, whose rows are those of the ring, or the shared expert's, whose rows are tokens.
struct mok_maps {
    CUtensorMap x, w13, gate, up, hidden, w2;
    CUtensorMap out; // of the shared expert alone: rows of routed ones are pushed
    // backward
    CUtensorMap dy, d_gate, d_up, d_gate_up, d_w13, d_w2;
    int inner; // I
};

struct mok_parameters {
    struct mok_maps routed, shared;
    struct mok_shape shape;
    struct mok_plan plan; // blocks and totals are in *plan.device alone; twin NULL: all rows are pulled
    real *x_rows, *dy_rows;
    accum *partials;
    struct mok_peers peers;
    size_t x_at, dy_at, slots_at, d_gates_at; // where they are in a rank's symmetric memory
    bool first_use;
    int32_t *counters[MOK_TICKETS], *tickets[MOK_TICKET_KINDS];
    struct lost_wait *lost;
    int comm_workers;
    uint64_t delays;
    struct mok_log log; // records NULL: nothing is recorded
};

#ifdef __cplusplus
extern "C" {
#endif

// Of a pass with a plan that this rank has made. x, dy, slots and d_gates of the layer lie in this rank's symmetric memory.
struct mok_parameters mok_parameters_of(const struct mok_shape *s, const struct mok_plan *p, const struct mok_group *g,
                                        const struct mok_layer *l, const struct mok_workspace *w,
                                        const struct mok_crew *crew, enum mok_pass pass);

// Loads the kernels of a pass, before the first one.
void mok_forward_prepare(void);
void mok_backward_prepare(void);
void mok_forward_prepare_recorded(void);
void mok_backward_prepare_recorded(void);

// A pass by so many blocks.
void mok_forward_launch(const struct mok_parameters *p, int blocks);
void mok_backward_launch(const struct mok_parameters *p, int blocks);
// The same with its blocks recording what they do, in log.
void mok_forward_launch_recorded(const struct mok_parameters *p, int blocks);
void mok_backward_launch_recorded(const struct mok_parameters *p, int blocks);

#ifdef __cplusplus
}
#endif

#endif

// What the megakernel of a pass is told.
#ifndef MOK_KERNELS_CUDA_MOK_PARAMETERS_H
#define MOK_KERNELS_CUDA_MOK_PARAMETERS_H

#include <cuda.h>

#include "kernels/cuda/lost_wait.h"
#include "kernels/cuda/mok_header.h"

// The routed experts' matrices, whose rows are those of the ring, or the shared expert's, whose rows are tokens.
struct mok_maps {
    CUtensorMap x, w13, gate, up, hidden, w2;
    CUtensorMap out; // of the shared expert alone: rows of routed ones are pushed
    int inner;       // I
};

struct mok_parameters {
    struct mok_maps routed, shared;
    struct mok_shape shape;
    const struct mok_plan *plan; // in device memory
    const struct mok_task *tasks;
    const struct mok_row *rows;
    const int *twin; // NULL: all rows are pulled
    real *x_rows;
    struct mok_peers peers;
    size_t x_at, slots_at; // where x and slots are in a rank's symmetric memory
    int32_t *counters[MOK_TICKETS], *tickets[MOK_TICKET_KINDS];
    struct lost_wait *lost;
    int comm_workers;
    uint64_t delays;
};

#ifdef __cplusplus
extern "C" {
#endif

// Of a pass with a plan that this rank has made. x and slots of the layer lie in this rank's symmetric memory.
struct mok_parameters mok_parameters_of(const struct mok_shape *s, const struct mok_plan *p, const struct mok_group *g,
                                        const struct mok_layer *l, const struct mok_workspace *w,
                                        const struct mok_crew *crew, enum mok_pass pass);

// The forward pass by so many blocks.
void mok_forward_launch(const struct mok_parameters *p, int blocks);

#ifdef __cplusplus
}
#endif

#endif

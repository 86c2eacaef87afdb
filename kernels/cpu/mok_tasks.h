// What a multiplier does in one task and a mover with one ticket, without the waiting.
#ifndef MOK_KERNELS_CPU_MOK_TASKS_H
#define MOK_KERNELS_CPU_MOK_TASKS_H

#include "kernels/mok.h"

// What a pass works on.
struct mok_job {
    const struct mok_shape *s;
    const struct mok_plan *p;
    const struct mok_group *g;
    const struct mok_layer *layer;
    const struct mok_workspace *w;
    enum mok_pass pass;
};

void mok_do_task(const struct mok_job *j, struct mok_task task);
// Both return the bytes that came from, or went to, other ranks.
size_t mok_do_pull(const struct mok_job *j, struct mok_move move);
size_t mok_do_push(const struct mok_job *j, struct mok_move move);

#endif

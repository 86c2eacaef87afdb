// What all ranks do alike, rank 0 does first: what is wrong is said once, and ends the job while the others wait.
#ifndef MOK_MODEL_LEADER_H
#define MOK_MODEL_LEADER_H

#include "kernels/comm.h"
#include "kernels/fail.h"

static inline bool leader_is_here(struct comm *world) { return comm_rank(world) == 0; }

// Around work that all ranks do, each for itself; warnings are printed by rank 0 alone. Collective.
static inline void leader_begin(struct comm *world) {
    if (leader_is_here(world)) return;
    comm_barrier(world);
    fail_hold_warnings(true);
}
static inline void leader_end(struct comm *world) {
    if (leader_is_here(world)) comm_barrier(world);
    fail_hold_warnings(false);
}

#endif

// How the ranks of a job share a model: data parallel x expert parallel.
//
// `ep` consecutive ranks form an EP group: together they hold every routed expert once. Ranks with the same place in
// their groups hold the same experts: replicas. Every rank has its own tokens and all dense parameters.
#ifndef MOK_MODEL_PARALLEL_H
#define MOK_MODEL_PARALLEL_H

#include <stddef.h>

#include "kernels/comm.h"
#include "model/params.h"

struct parallel {
    int rank, ranks;                       // in the job
    int ep, ep_rank;                       // ranks of an EP group, this rank's place in its own
    int dp, dp_rank;                       // EP groups, which one this rank is in
    struct comm *world, *group, *replicas; // all; the EP group; the ranks with the same experts, one of each group
};

// One process that has everything, without MPI.
extern const struct parallel parallel_alone;

// Forms the groups, collective over all ranks. ep 0: the largest size that divides the ranks, lies on one host, and is not
// larger than the number of experts. Ends the program (exit 2) when ep does not divide the ranks or exceeds the experts.
void parallel_open(struct parallel *p, int ep, int experts);
void parallel_close(struct parallel *p);

// A job of so many ranks on one host that is only planned: what its last rank would have, without the groups. ep and errors
// as above.
struct parallel parallel_suppose(int ranks, int ep, int experts);

// First expert of a place in an EP group; the last one is in front of the next place's first. E need not divide by ep.
static inline int parallel_first_expert(int experts, int ep, int ep_rank) {
    return (int)((long long)ep_rank * experts / ep);
}

// The experts that this rank holds.
static inline struct expert_range parallel_experts(const struct parallel *p, int experts) {
    return (struct expert_range){parallel_first_expert(experts, p->ep, p->ep_rank),
                                 parallel_first_expert(experts, p->ep, p->ep_rank + 1)};
}

// Piece r of n elements in `pieces` pieces begins here. All are equally long, a multiple of 64 elements, so that one
// collective moves them and ZeRO-1 shards are aligned; the last one also has what is left.
static inline size_t parallel_piece(size_t n, int pieces, int r) {
    return r == pieces ? n : n / 64 / (size_t)pieces * 64 * (size_t)r;
}

#endif

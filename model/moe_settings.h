// How the MoE layers of a run are computed, and what blocks keep for their backward pass.
#ifndef MOK_MODEL_MOE_SETTINGS_H
#define MOK_MODEL_MOE_SETTINGS_H

#include "kernels/kernels.h"

enum moe_kind { MOE_MOK, MOE_ALLTOALL };

// learned: the router's choice. Others are forced for benchmarks: they depend on the name, the seed, the step and the
// token's place in the global batch alone.
enum moe_route {
    ROUTE_LEARNED,
    ROUTE_BALANCED, // W0: every expert equally often
    ROUTE_W1,       // a hot set of experts
    ROUTE_W2,       // one hot rank
    ROUTE_W3,       // the same heat spread over all ranks
    ROUTE_W4,       // ragged numbers of tokens
    ROUTE_W5,       // experts, and a rank, without load
    ROUTE_W6,       // a hot spot that moves every step
    ROUTE_W7        // a burst after steady steps
};

// What a block computes again in its backward pass instead of keeping it. The bits of all results are the same.
enum recompute {
    RECOMPUTE_NONE,
    RECOMPUTE_MOE,  // rows at the routed experts, their gates and ups
    RECOMPUTE_BLOCK // everything but the block's input
};

struct moe_settings {
    enum moe_kind kind;
    enum moe_route route;
    enum recompute recompute;
    // alltoall:
    int alltoall_chunks;           // pieces of the local experts whose exchanges overlap with computing; 1: none
    enum grouped_core expert_gemm; // of the experts' products
    // mok:
    int workers;        // threads of a rank, or thread blocks of its GPU; 0: mok_default_workers
    int comm_workers;   // of them, those that only move rows; 0: every worker moves and multiplies
    int minibatch_rows; // rows of one phase, a multiple of 128; 0: chosen
    int ring_rows;      // rows that are in memory at once, a multiple of minibatch_rows; 0: chosen
};

#endif

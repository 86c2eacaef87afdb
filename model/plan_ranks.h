// What the experts of one layer do on every rank, for one micro-batch: rows, tasks, and what goes over the links,
// counted from the routes. Nothing is multiplied, and neither a GPU nor any rank but this one is needed.
#ifndef MOK_MODEL_PLAN_RANKS_H
#define MOK_MODEL_PLAN_RANKS_H

#include <stdint.h>
#include <stdio.h>

#include "model/options.h"
#include "model/parallel.h"

struct rank_load {
    int experts, tokens;
    int64_t rows; // routes to its experts
    // Of its rows those of other ranks' tokens, and routes of its tokens to experts of other ranks; replayed: those of them
    // whose x is pulled again in backward by a replay.
    int64_t from_others, to_others;
    int64_t replayed_from_others, replayed_to_others;
    int64_t shown, seen; // numbers that every other rank reads here, and that this one reads of all others
    // of the megakernel
    int64_t padding; // rows that only fill up row blocks
    int macrobatches;
    int tasks_forward, tasks_backward; // with RECOMPUTE_BLOCK backward begins with forward's
};

struct plan_ranks {
    enum moe_route route; // learned routes are planned as balanced ones
    int groups;           // EP groups that were planned: as many of the first ones as take some seconds, at least one
    int ranks;            // in them
    struct rank_load *loads; // [ranks]
};

// For a model with experts, on the first micro-batch of a run. Ends the program (exit 2) when settings do not fit.
void plan_ranks_make(struct plan_ranks *plan, const struct options *o, const struct parallel *parallel);
void plan_ranks_free(struct plan_ranks *plan);

// Over the ranks: experts, rows, tasks; bytes on the links of the one with the most; and the memory behind it. Prints
// nothing for a model without experts.
void plan_ranks_print(FILE *file, const struct options *o, const struct parallel *parallel);

#endif

// ZeRO-1: who keeps which part of the optimizer's state, and whose gradients are summed.
//
// Weights and gradients are whole on every rank (its own experts only). Master weights and the two moments exist once:
// of the dense parameters every rank of the job keeps a piece, of a rank's experts every replica of it keeps a piece.
// Gradients of dense parameters are summed over all ranks, those of experts over their replicas: the tokens of the other
// ranks of the EP group are in them already.
#ifndef MOK_MODEL_SHARDING_H
#define MOK_MODEL_SHARDING_H

#include "model/parallel.h"
#include "model/params.h"

// Elements begin .. end - 1 of the flat arrays; the first one is element `state` of master, m and v.
struct shard {
    size_t begin, end, state;
};

struct sharding {
    struct shard dense, experts;
    size_t size;            // elements of master, m and v on this rank
    size_t *dense_offsets;  // [ranks + 1] pieces of the flat arrays, by rank of the job
    size_t *expert_offsets; // [dp + 1] the same by replica, from dense_size on
};

void sharding_build(struct sharding *s, const struct params *p, const struct parallel *parallel);
void sharding_free(struct sharding *s);

// Elements first .. first + count - 1 of a stretch of the flat arrays, or of a tensor as it lies in memory, are element
// `state` of master, m and v and those behind it.
struct piece {
    size_t first, count, state;
};

// What a shard has of the stretch of `size` elements from `offset` on; count 0: nothing.
struct piece sharding_cut(const struct shard *shard, size_t offset, size_t size);

// What this rank keeps of a tensor; count 0: nothing.
struct piece sharding_piece(const struct sharding *s, const struct param *tensor);

// Who keeps what on all ranks, for one that collects the whole state.
struct layout {
    int ep;
    size_t *offsets;         // [tensors] in the flat arrays of those that hold the tensor
    int *holders;            // [tensors] place of an expert's holder in its EP group; -1: all ranks hold the tensor
    struct sharding *places; // [ep] the sharding of the first replica of each place
};

// p is this rank's table of the model. parallel may be any rank's of the job: only its sizes matter.
void layout_build(struct layout *l, const struct config *c, const struct params *p, const struct parallel *parallel);
void layout_free(struct layout *l);

// What a rank of the job keeps of tensor p->list[i].
struct piece layout_piece(const struct layout *l, const struct params *p, int i, int rank);

#endif

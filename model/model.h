// The model: weights, gradients and activations, and the passes over one micro-batch.
//
// A pass works on B sequences of T tokens. Its tokens come from the host as [B, T + 1 + D], D the MTP depth: column t
// is the input at position t, column t + 1 its target, column t + 1 + k the target of MTP depth k. A token of -1 is
// masked: as an input it embeds as zero and goes to no expert, as a target it does not count.
#ifndef MOK_MODEL_MODEL_H
#define MOK_MODEL_MODEL_H

#include "kernels/kernels.h"
#include "model/activations.h"
#include "model/config.h"
#include "model/moe_settings.h"
#include "model/parallel.h"
#include "model/params.h"

struct model {
    struct config config;
    const struct parallel *parallel;
    struct moe_settings moe;
    struct params params; // all dense tensors and this rank's experts
    real *weights;        // [params.size]
    accum *grads;         // [params.size], NULL without training
    bool first_use;       // the next backward pass is the first of its step: it stores gradients that products make
    accum *bias;          // [MoE blocks, E] selection bias
    int64_t *counts;      // [MoE blocks, E] this rank's routes since the counts were zeroed
    double *sums;         // [mtp_depth + 2] of losses since they were taken: main model, MTP depths, balance
    int64_t step;         // optimizer steps taken, and the run's seed: forced routes depend on both
    uint64_t seed;
    struct activations acts;
    int computed; // the block that computed last: with RECOMPUTE_BLOCK its activations are there
    // memory of the MoE layers: of the kind that is used; both NULL without MoE blocks
    struct moe_alltoall *alltoall;
    struct moe_mok *mok;
    struct trace *trace; // records what happens when; NULL: nobody does
    int32_t *ids;        // host [N], tokens on their way to the device
    int64_t first_token; // of the micro-batch in work, counted over the global batch of the step
    int32_t *routes;     // host [N, K] forced routes on their way to the device, NULL when the router chooses
};

// Allocates everything for micro-batches of at most batch sequences of at most seq tokens. Weights are zero until they
// are set. Collective over the EP group of parallel, which must outlive the model; NULL: alone. moe NULL: the defaults.
void model_open(struct model *m, const struct config *c, int batch, int seq, bool training,
                const struct parallel *parallel, const struct moe_settings *moe);
void model_close(struct model *m);

static inline int model_moe_blocks(const struct config *c) {
    return config_blocks(c) > c->dense_layers ? config_blocks(c) - c->dense_layers : 0;
}
// Of the MoE blocks, those that keep routes, and rows, of their own from forward to backward; the others use the first
// one's.
static inline int model_kept_routes(const struct config *c, bool training, enum recompute recompute) {
    return training && recompute != RECOMPUTE_BLOCK ? model_moe_blocks(c) : model_moe_blocks(c) > 0;
}
static inline int model_kept_rows(const struct config *c, bool training, enum recompute recompute) {
    return training && recompute == RECOMPUTE_NONE ? model_moe_blocks(c) : model_moe_blocks(c) > 0;
}
static inline size_t model_bias_size(const struct config *c) {
    return (size_t)model_moe_blocks(c) * (size_t)c->experts;
}
// Bias and counts of one MoE block.
static inline accum *model_bias(const struct model *m, int block) {
    return m->bias + (size_t)(block - m->config.dense_layers) * (size_t)m->config.experts;
}
static inline int64_t *model_counts(const struct model *m, int block) {
    return m->counts + (size_t)(block - m->config.dense_layers) * (size_t)m->config.experts;
}
struct router_shape model_router_shape(const struct config *c);
// What the operations of a model's passes are called with at most.
struct scratch_sizes model_scratch_sizes(const struct config *c, int batch, int seq, bool training);

// One micro-batch in host memory. B = 0: this rank has no tokens; it takes part for the others of its EP group.
struct batch {
    const int32_t *tokens; // [B, T + 1 + D]
    int B, T;
    int64_t first; // place of its first sequence among those of the step, of all ranks
};

// What the losses of a whole optimizer step are divided by: sums over all its micro-batches and ranks.
struct step_totals {
    int64_t targets[MTP_MAX + 1]; // valid targets of the main model and of each MTP depth
    int64_t sequences;
};
void model_add_totals(struct step_totals *totals, const struct config *c, struct batch batch);

// Sums over micro-batches, not divided.
struct losses {
    double cross_entropy[MTP_MAX + 1]; // over valid targets; main model, then MTP depths
    double balance;                    // sum of f P over sequences and MoE blocks, without alpha
};

// Forward pass only; leaves counts alone.
struct losses model_evaluate(struct model *m, struct batch batch);

// Forward pass of the main model alone: the cross-entropy of every target, 0 where it is masked.   losses (host) [B, T]
void model_score(struct model *m, struct batch batch, float *losses);

// A step begins. Gradients that are stored (params.h) are left to the next call of model_gradient, whatever is in their
// memory; the others are zeroed.
void model_begin_gradients(struct model *m);

// Forward and backward pass: adds to grads, or stores in them, the gradient of
//   CE + (lambda / D) sum_k CE_k + alpha * balance,   each divided by the step's totals,
// and adds every MoE block's routes to counts. Its losses are among those of model_take_losses.
void model_gradient(struct model *m, struct batch batch, const struct step_totals *totals);
// The losses of all calls of model_gradient since this or model_evaluate was called. Waits for them.
struct losses model_take_losses(struct model *m);

// Logits of positions first..T-1 of one sequence of T tokens. tokens (host) [T]   logits (host) [T - first, V]
// T = 0: this rank has none and takes part for the others of its EP group.
void model_logits(struct model *m, const int32_t *tokens, int T, int first, float *logits);

#endif

// Training state and the optimizer step.
//
// A step takes the next tokens_per_step / seq sequences of the training data in their global order. Each rank takes a
// stretch of them, in micro-batches of at most `batch`. Losses are divided by the counts of the whole step, so gradients
// are plain sums over micro-batches and ranks, and the cut does not change the result.
//
// What says "collective" is called by all ranks alike; what it reports is the same on all of them.
#ifndef MOK_MODEL_TRAINER_H
#define MOK_MODEL_TRAINER_H

#include <stdio.h>

#include "data/data.h"
#include "data/prefetch.h"
#include "model/checkpoint.h"
#include "model/evaluate.h"
#include "model/model.h"
#include "model/options.h"
#include "model/parallel.h"
#include "model/share.h"
#include "model/sharding.h"

struct trainer {
    struct options options;
    const struct data *data;
    const struct tokenizer *tokenizer; // of the data's ids; NULL: not known
    struct cJSON *identity;            // of the training data, as a checkpoint keeps it
    const struct parallel *parallel;
    struct model model;
    struct sharding sharding;
    accum *master, *m, *v; // [sharding.size] FP32 weights and AdamW moments, this rank's part
    int64_t step;          // optimizer steps taken
    int64_t sequences;     // sequences taken from the training data: the next global sequence number
    int64_t tokens;        // tokens trained on
    struct share share;    // this rank's sequences of a step
    struct prefetch *prefetch;
    const int32_t *window; // [share.count, T + 1 + D] what the last step trained on here; prefetch's
};

// Balance of one MoE block in one step.
struct moe_load {
    double max_over_mean, min_over_mean, entropy; // entropy of the load, 1 for perfect balance
    int dead;                                     // experts without a token
    double bias_min, bias_max;
};

struct step_report {
    int64_t step;              // 1 for the first
    double loss, mtp, balance; // mean cross-entropy (nats); mean over MTP depths; alpha * sum over blocks
    double norm;               // of the gradient before clipping
    bool finite;               // false: loss or norm is not finite and nothing was updated
    double lr;
    double load_max_over_mean; // of the worst MoE block
    int dead;                  // over all MoE blocks
    double data_seconds;       // spent waiting for data that was not read ahead in time
};

// Allocates the state and initialises weights from the seed, on all layouts the same. The options must be settled; data,
// tokenizer and parallel must outlive the trainer. parallel NULL: alone. Collective.
void trainer_open(struct trainer *t, const struct options *o, const struct data *data,
                  const struct tokenizer *tokenizer, const struct parallel *parallel);
void trainer_close(struct trainer *t);

// Goes on from a checkpoint of this run: everything is as it was when it was saved. Other training data than before is
// printed, and refused (exit 2) unless the options say override. Collective.
void trainer_restore(struct trainer *t, const char *folder);

// Begins a new run with the weights and selection bias of a checkpoint or a Hugging Face folder; moments, step and data
// are those of a new run. Collective.
void trainer_start_from(struct trainer *t, const char *folder);

// Sequences of one optimizer step.
int64_t trainer_sequences_per_step(const struct options *o);

// One optimizer step: accumulate gradients over micro-batches, clip, update weights and selection bias. Collective.
struct step_report trainer_step(struct trainer *t);

// The two halves of it, collective. accumulate fills the gradients of this rank's shards with the sums over all ranks (the
// others are left as they may be), and counts with those of all ranks; update applies them, or with a loss or gradient
// norm that is not finite leaves weights, moments, bias and step as they were.
void trainer_accumulate(struct trainer *t, struct step_report *report);
void trainer_update(struct trainer *t, struct step_report *report);

// Whether every weight is a finite number. Collective.
bool trainer_is_finite(const struct trainer *t);

// Loss and bits per byte over the first sequences of the eval split. Collective.
struct evaluation trainer_evaluate(struct trainer *t, int sequences);

// Loads of all MoE blocks from the counts of the last step, for the caller to free.
struct moe_load *trainer_loads(const struct trainer *t);

// The state as checkpoint.h wants it.
struct checkpoint trainer_checkpoint(struct trainer *t);

#endif

// Training state and the optimizer step.
//
// A step takes the next tokens_per_step / seq sequences of the training data in their global order, in micro-batches of
// `batch`. Losses are divided by the counts of the whole step, so the cut into micro-batches does not change the
// result.
#ifndef MOK_MODEL_TRAINER_H
#define MOK_MODEL_TRAINER_H

#include <stdio.h>

#include "data/data.h"
#include "data/prefetch.h"
#include "model/checkpoint.h"
#include "model/model.h"
#include "model/options.h"

struct trainer {
    struct options options;
    const struct data *data;
    struct model model;
    accum *master, *m, *v; // [params.size] FP32 weights and AdamW moments
    int64_t step;          // optimizer steps taken
    int64_t sequences;     // sequences taken from the training data: the next global sequence number
    int64_t tokens;        // tokens trained on
    struct prefetch *prefetch;
    const int32_t *window; // [sequences of a step, T + 1 + D] what the last step trained on; prefetch's
    int32_t *eval_window;  // [batch, T + 1 + D]
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

// Allocates the state and initialises weights from the seed.
void trainer_open(struct trainer *t, const struct options *o, const struct data *data);
void trainer_close(struct trainer *t);

// Goes on from a checkpoint of this run: everything is as it was when it was saved.
void trainer_restore(struct trainer *t, const char *folder);

// Begins a new run with the weights and selection bias of a checkpoint or a Hugging Face folder; moments, step and data
// are those of a new run.
void trainer_start_from(struct trainer *t, const char *folder);

// Sequences of one optimizer step.
int64_t trainer_sequences_per_step(const struct options *o);

// One optimizer step: zero gradients, accumulate over micro-batches, clip, update weights and selection bias.
struct step_report trainer_step(struct trainer *t);

// The two halves of it. accumulate fills gradients and counts; update applies them, or with a loss or gradient norm
// that is not finite leaves weights, moments, bias and step as they were.
void trainer_accumulate(struct trainer *t, struct step_report *report);
void trainer_update(struct trainer *t, struct step_report *report);

// Whether every weight is a finite number.
bool trainer_is_finite(const struct trainer *t);

// Mean cross-entropy of the main model over the first sequences of the eval split.
double trainer_evaluate(struct trainer *t, int sequences);

// Loads of all MoE blocks from the counts of the last step, for the caller to free.
struct moe_load *trainer_loads(const struct trainer *t);

// The state as checkpoint.h wants it.
struct checkpoint trainer_checkpoint(struct trainer *t);

#endif

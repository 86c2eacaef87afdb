// Named starting points: the sizes of a model and the training settings that suit it.
#ifndef MOK_MODEL_PRESETS_H
#define MOK_MODEL_PRESETS_H

#include <stdint.h>

#include "model/config.h"

struct preset {
    const char *name, *purpose; // purpose: one line for the help
    struct config model;        // vocab 0: as the data has
    int batch, seq;
    int64_t tokens_per_step, steps, warmup; // tokens_per_step 0: one micro-batch of each rank
    double lr, min_lr;
    int64_t save_every, eval_every, sample_every;
    int sample_tokens; // every sampled token costs a forward pass over its context
};

extern const struct preset presets[];
extern const int preset_count;

// NULL if there is no preset of that name.
const struct preset *preset_find(const char *name);

#endif

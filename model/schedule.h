// Learning rate over the steps of a run.
#ifndef MOK_MODEL_SCHEDULE_H
#define MOK_MODEL_SCHEDULE_H

#include "model/options.h"

// Learning rate of a step (0 is the first). Rises linearly over the warmup, never from zero; then
//   cosine, linear  fall from lr to min_lr at the last step
//   wsd             lr until the last decay_steps, which fall linearly to min_lr
//   constant        lr
// A fall needs two steps after the warmup; a single one has lr.
double schedule_lr(const struct options *o, int64_t step);

#endif

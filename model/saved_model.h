// A model from a checkpoint, for use without training.
#ifndef MOK_MODEL_SAVED_MODEL_H
#define MOK_MODEL_SAVED_MODEL_H

#include "model/model.h"
#include "model/options.h"

// Opens the model of --from: a checkpoint, a Hugging Face folder, or a run folder, which stands for its newest
// checkpoint. MTP modules are left out. It takes `batch` sequences of --seq tokens; without --seq as many as the run was
// trained with, or else as the model is meant for, within reason. folder [size] receives where the weights came from.
// Collective over the ranks of parallel, which share the model; NULL: alone. Ends the program (exit 2) when there is no
// model to read.
void saved_model_open(struct model *m, const struct options *o, const struct parallel *parallel, int batch,
                      char *folder, size_t size);

#endif

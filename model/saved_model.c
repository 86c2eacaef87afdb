#include "model/saved_model.h"

#include "data/files.h"
#include "kernels/fail.h"
#include "model/checkpoint.h"
#include "model/plan.h"

// Tokens that the model is shown at once.
static int context_of(const struct options *o, const struct config *c, const char *folder) {
    enum { REASONABLE = 1024 };
    int seq = o->seq, trained = checkpoint_trained_length(folder);
    if (seq == 0) seq = trained > 0 ? trained : c->max_positions < REASONABLE ? c->max_positions : REASONABLE;
    if (seq > c->max_positions)
        fail_user("--seq", "found %d, wanted at most the %d positions of the model in %s", seq, c->max_positions,
                  folder);
    return seq;
}

void saved_model_open(struct model *m, const struct options *o, int batch, char *folder, size_t size) {
    struct config c = o->model;
    char error[FILE_ERROR];
    checkpoint_find(o->from, folder, size);
    if (!checkpoint_read_config(folder, &c, error, sizeof error))
        fail_user("--from", "%s; name a checkpoint, a Hugging Face folder, or a run folder that holds one", error);
    c.mtp_depth = 0;
    config_validate(&c);
    int seq = context_of(o, &c, folder);
    model_open(m, &c, batch, seq, false);
    struct checkpoint checkpoint = {.config = &c, .params = &m->params, .weights = m->weights, .bias = m->bias};
    checkpoint_load_weights(folder, &checkpoint);
}

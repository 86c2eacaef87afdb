#include "model/saved_model.h"

#include <limits.h>

#include "data/files.h"
#include "kernels/fail.h"
#include "model/checkpoint.h"
#include "model/moe.h"

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

// The sizes of the model in a folder, and the tokens that it is shown at once.
static int read_sizes(struct config *c, const struct options *o, const char *folder) {
    char error[FILE_ERROR];
    *c = o->model;
    if (!checkpoint_read_config(folder, c, error, sizeof error))
        fail_user("--from", "%s; name a checkpoint, a Hugging Face folder, or a run folder that holds one", error);
    c->mtp_depth = 0;
    config_validate(c);
    return context_of(o, c, folder);
}

// Whether the layers can take so many sequences at once, and are set up in a way that fits the model.
static void check_layers(const struct config *c, const struct options *o, int ep, int batch, int seq) {
    int routes = c->top_k > 0 ? c->top_k : 1, most = INT_MAX / routes;
    if ((int64_t)batch * seq > most)
        fail_user("--batch", "found %d with --seq %d, wanted a product of at most %d tokens; lower --batch", batch, seq,
                  most);
    moe_check(c, &o->moe, ep, batch * seq);
}

void saved_model_open(struct model *m, const struct options *o, const struct parallel *parallel, int batch,
                      char *folder, size_t size) {
    struct config c;
    struct comm *world = parallel ? parallel->world : NULL;
    double timeout = comm_timeout();
    // Rank 0 alone complains of what is wrong: the others wait for the folder's name, as long as the hashes take.
    if (parallel) comm_set_timeout(timeout + checkpoint_seconds(checkpoint_bytes_on_disk(o->from)));
    if (!parallel || parallel->rank == 0) {
        checkpoint_find(o->from, folder, size);
        int seq = read_sizes(&c, o, folder);
        check_layers(&c, o, parallel ? parallel->ep : 1, batch, seq);
    }
    comm_broadcast(world, folder, size, 0);
    comm_set_timeout(timeout);
    int seq = read_sizes(&c, o, folder);
    model_open(m, &c, batch, seq, false, parallel, &o->moe);
    struct checkpoint checkpoint = {
        .config = &c, .params = &m->params, .parallel = parallel, .weights = m->weights, .bias = m->bias};
    checkpoint_load_weights(folder, &checkpoint);
}

// A model with a state, to be saved and loaded.
#ifndef MOK_TESTS_SAVED_MODEL_H
#define MOK_TESTS_SAVED_MODEL_H

#include "tests/configs.h"
#include "tests/folder.h"

#include "kernels/kernels.h"
#include "model/checkpoint.h"

enum { BIASES = 3 * 6 }; // three MoE blocks

struct model {
    struct params params;
    struct checkpoint c;
};

static inline accum *zeros(size_t n) { return device_alloc(n * sizeof(accum)); }

static inline void model_init(struct model *m, const struct config *config) {
    params_build(&m->params, config);
    size_t n = m->params.size;
    m->c = (struct checkpoint){.config = config, .params = &m->params, .weights = device_alloc(n * sizeof(real))};
    m->c.master = zeros(n);
    m->c.m = zeros(n);
    m->c.v = zeros(n);
    m->c.bias = zeros(BIASES);
}

// Numbers of every size, but padding stays zero as in training. Biases near 7 differ in their last bits: saved in 16
// bits they would become a handful of values (sglang pull 31213).
static inline void model_fill(struct model *m, uint64_t seed) {
    accum *arrays[] = {m->c.master, m->c.m, m->c.v};
    for (int i = 0; i < m->params.count; i++) {
        const struct param *p = &m->params.list[i];
        for (int a = 0; a < 3; a++)
            for (size_t j = 0; j < param_size(p); j++)
                arrays[a][p->offset + j] = (accum)(float)(test_normal(&seed) * exp(8 * test_normal(&seed)));
        for (size_t j = 0; j < param_size(p); j++) m->c.weights[p->offset + j] = (real)m->c.master[p->offset + j];
    }
    float bias = 7;
    for (int i = 0; i < BIASES; i++) m->c.bias[i] = bias = nextafterf(bias, i % 2 ? 8 : 9);
    m->c.step = 100;
    m->c.sequences = 12345;
    m->c.tokens = 9007199254740991; // 2^53 - 1
    m->c.seed = 0xfedcba9876543210; // more than a double holds
}

static inline void model_free(struct model *m) {
    device_free(m->c.weights);
    device_free(m->c.master);
    device_free(m->c.m);
    device_free(m->c.v);
    device_free(m->c.bias);
    params_free(&m->params);
}

static inline void save_step(struct model *m, int64_t step, int keep) {
    m->c.step = step;
    checkpoint_save(&m->c, root, keep);
}

#endif

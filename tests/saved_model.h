// A model with a state, to be saved and loaded.
#ifndef MOK_TESTS_SAVED_MODEL_H
#define MOK_TESTS_SAVED_MODEL_H

#include "tests/configs.h"
#include "tests/folder.h"

#include "data/hash.h"
#include "kernels/kernels.h"
#include "model/checkpoint.h"

enum { BIASES = 3 * 6 }; // three MoE blocks

struct model {
    struct params params;
    struct sharding sharding; // empty without parallel
    struct checkpoint c;
};

static inline accum *zeros(size_t n) { return device_alloc(n * sizeof(accum)); }

// What a rank has of a model.
static inline void model_init_share(struct model *m, const struct config *config, const struct parallel *parallel) {
    *m = (struct model){0};
    params_build_share(&m->params, config, parallel_experts(parallel, config->experts));
    sharding_build(&m->sharding, &m->params, parallel);
    size_t n = m->sharding.size;
    m->c = (struct checkpoint){.config = config,
                               .params = &m->params,
                               .parallel = parallel,
                               .sharding = &m->sharding,
                               .weights = device_alloc(m->params.size * sizeof(real)),
                               .master = zeros(n),
                               .m = zeros(n),
                               .v = zeros(n),
                               .bias = zeros(BIASES)};
}

// All of it in a process that knows of no other.
static inline void model_init(struct model *m, const struct config *config) {
    model_init_share(m, config, &parallel_alone);
    sharding_free(&m->sharding);
    m->c.parallel = NULL;
    m->c.sharding = NULL;
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
    sharding_free(&m->sharding);
    params_free(&m->params);
}

// ---- a state that is spread over ranks ----

enum state_array { WEIGHTS, MASTER, FIRST_MOMENT, SECOND_MOMENT, STATE_ARRAYS };

// A finite number of any size and sign that depends on the tensor's name, the array and the element, as it lies in
// memory, and on nothing else.
static inline float value_of(const struct param *p, enum state_array array, size_t element) {
    struct hash name = hash_begin();
    hash_add(&name, p->name, strlen(p->name));
    uint64_t mixed = random_mix(random_mix(hash_end(&name) + (uint64_t)array) + element);
    uint32_t bits = (uint32_t)mixed & 0x807fffff, exponent = 96 + (uint32_t)(mixed >> 32) % 64;
    bits |= exponent << 23;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline accum bias_value(int i) { return (accum)(7 + (float)i * 0x1p-20f); }

// Everything that this rank has gets its value.
static inline void model_fill_share(struct model *m, int64_t step) {
    accum *arrays[STATE_ARRAYS] = {NULL, m->c.master, m->c.m, m->c.v};
    for (int i = 0; i < m->params.count; i++) {
        const struct param *p = &m->params.list[i];
        struct piece piece = sharding_piece(&m->sharding, p);
        for (size_t k = 0; p->offset != PARAM_ELSEWHERE && k < param_size(p); k++)
            m->c.weights[p->offset + k] = (real)value_of(p, WEIGHTS, k);
        for (int a = MASTER; a < STATE_ARRAYS; a++)
            for (size_t k = 0; k < piece.count; k++)
                arrays[a][piece.state + k] = (accum)value_of(p, (enum state_array)a, piece.first + k);
    }
    for (int i = 0; i < BIASES; i++) m->c.bias[i] = bias_value(i);
    m->c.step = step;
    m->c.sequences = 12345;
    m->c.tokens = 9007199254740991;
    m->c.seed = 0xfedcba9876543210;
}

static inline void save_step(struct model *m, int64_t step, int keep) {
    m->c.step = step;
    checkpoint_save(&m->c, root, keep);
}

#endif

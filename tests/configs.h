// Sizes for tests of tables and files; what whole models begin with.
#ifndef MOK_TESTS_CONFIGS_H
#define MOK_TESTS_CONFIGS_H

#include <stdlib.h>
#include <string.h>

#include "kernels/kernels.h"
#include "model/config.h"
#include "model/params.h"

// Every branch (a dense layer, query compression, groups, shared experts, MTP), and no two sizes alike.
static const struct config uneven = {
    .vocab = 257,
    .hidden = 24,
    .layers = 3,
    .dense_layers = 1,
    .heads = 4,
    .q_rank = 20,
    .kv_rank = 12,
    .nope_dim = 16,
    .rope_dim = 8,
    .value_dim = 10,
    .intermediate = 40,
    .expert_intermediate = 9,
    .experts = 6,
    .shared_experts = 2,
    .top_k = 2,
    .groups = 2,
    .top_groups = 1,
    .normalize_gates = true,
    .route_scale = 2.5,
    .mtp_depth = 1,
    .max_positions = 64,
    .rms_eps = 1e-6,
    .rope_theta = 10000,
    .init_std = 0.02,
    .balance_alpha = 1e-4,
    .bias_rate = 1e-3,
    .mtp_weight = 0.3,
};

// First weights of a whole model in a flat host array.
static inline void init_weights(float *flat, const struct params *p, double std, uint64_t seed) {
    float *file = malloc(sizeof *file * params_largest(p));
    for (int i = 0; i < p->count; i++) {
        params_init(file, &p->list[i], std, seed);
        params_import(flat + p->list[i].offset, file, &p->list[i]);
    }
    free(file);
}

// NaN in the gradients (device) of every tensor that is here. Padding stays as it is: nobody clears it.
static inline void poison_gradients(accum *grads, const struct params *p) {
    size_t bytes = sizeof *grads * params_largest(p);
    void *poison = malloc(bytes);
    memset(poison, 0xff, bytes);
    for (int i = 0; i < p->count; i++)
        if (p->list[i].offset != PARAM_ELSEWHERE)
            device_copy_in(grads + p->list[i].offset, poison, sizeof *grads * param_size(&p->list[i]));
    free(poison);
}

#endif

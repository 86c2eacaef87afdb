// What a run will need before it starts: parameters, memory, floating-point operations.
#ifndef MOK_MODEL_PLAN_H
#define MOK_MODEL_PLAN_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "model/config.h"
#include "model/params.h"

struct plan {
    // Parameters. The MTP modules count in mtp and by_kind alone.
    double total, mtp;
    double active, active_without_embedding; // what one token uses: top_k of the experts in every MoE layer
    double by_kind[PARAM_KINDS];

    // Bytes in device memory; gradients, master weights and the two moments are accum each.
    size_t weight_bytes, master_bytes, moment_bytes, gradient_bytes, activation_bytes, total_bytes;

    // Floating-point operations of one training token, MTP included: forward, gradients of activations and of weights,
    // 6 per weight that the token meets. Attention counts the causal half of the scores; recomputation never counts.
    double flops_per_token, attention_flops_per_token;
};

// c must be valid and its vocabulary known. batch sequences of seq tokens are in memory at once.
void plan_make(struct plan *plan, const struct config *c, int batch, int seq);

// Only the parameter counts and the bytes that follow from them; the other members become 0.
void plan_count(struct plan *plan, const struct config *c);

double plan_flops_per_token(const struct config *c, int seq);

// Parameters by kind, memory beside what this machine has, operations per token and per optimizer step.
// tokens_per_step 0: one micro-batch.
void plan_print(FILE *file, const struct config *c, int batch, int seq, int64_t tokens_per_step);

// Ends the program (exit 2) when a run needs more memory than this machine has: an operating system may promise more than
// there is and kill the run later.
void plan_check_memory(const struct config *c, int batch, int seq);

// Every buffer of a forward and backward pass over batch sequences of seq tokens, largest first.
void plan_print_activations(FILE *file, const struct config *c, int batch, int seq);

// "671.03B", "43.1M", "960": text receives at most 16 bytes and is returned.
const char *plan_format_count(char text[16], double count);

#endif

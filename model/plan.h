// What a run will need before it starts: parameters, memory, floating-point operations. What its experts do on every rank is
// in model/plan_ranks.h.
//
// A plan is of a job of several ranks, which need not be there: of parallel only the sizes matter.
#ifndef MOK_MODEL_PLAN_H
#define MOK_MODEL_PLAN_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "model/config.h"
#include "model/options.h"
#include "model/parallel.h"
#include "model/params.h"

struct plan {
    // Parameters of the whole model. The MTP modules count in mtp and by_kind alone.
    double total, mtp;
    double active, active_without_embedding; // what one token uses: top_k of the experts in every MoE layer
    double by_kind[PARAM_KINDS];

    // Bytes in the device memory of the rank that has the most: the last one, as many experts and as large shards as any.
    int experts;                         // of them in every MoE layer
    size_t weight_bytes, gradient_bytes; // all dense parameters and its experts
    size_t master_bytes, moment_bytes;   // its shards (model/sharding.h), accum each
    size_t activation_bytes;             // of one micro-batch
    size_t symmetric_bytes;              // the activations that other ranks reach; 0: none
    size_t moe_bytes;     // the MoE layers' own; with --moe alltoall, for routes that are nearly balanced
    size_t scratch_bytes; // what operations need beside their arguments
    size_t library_bytes; // of driver and libraries, estimated
    size_t total_bytes;

    // Floating-point operations of one training token, MTP included: forward, gradients of activations and of weights,
    // 6 per weight that the token meets. Attention counts the causal half of the scores; recomputation never counts.
    double flops_per_token, attention_flops_per_token;
};

// The options' sizes must be valid and the vocabulary known.
void plan_make(struct plan *plan, const struct options *o, const struct parallel *parallel);

// Only the parameters; the other members become 0.
void plan_count(struct plan *plan, const struct config *c);

double plan_flops_per_token(const struct config *c, int seq);

// Parameters by kind, memory of a rank beside what there is here or --memory says, operations per token and per optimizer
// step. ranks_here: how many ranks of the job are on this machine; 0: the job is not here, and one rank is compared.
void plan_print(FILE *file, const struct options *o, const struct parallel *parallel, int ranks_here);

// Ends the program (exit 2) when the ranks on this machine need more memory than it has, or a rank more than its GPU: an
// operating system may promise more than there is and kill the run later.
void plan_check_memory(const struct options *o, const struct parallel *parallel, int ranks_here);

// What a run took beside what was planned for it, which tests compare: "memory: planned 1.00 GiB, used 1.01 GiB (101.0 %)".
// Nothing where used is 0: not known.
void plan_print_used(FILE *file, size_t planned, size_t used);

// Every buffer of a forward and backward pass of a rank over one micro-batch, largest first.
void plan_print_activations(FILE *file, const struct options *o, const struct parallel *parallel);

// The numbers that activations are made of: "BF16".
const char *plan_real_name(void);

// One line of a plan: "  label     12.5 MiB".
void plan_print_bytes(FILE *file, const char *label, double bytes);

// "671.03B", "43.1M", "960": text receives at most 16 bytes and is returned.
const char *plan_format_count(char text[16], double count);

#endif

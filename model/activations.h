// Every buffer that a forward and backward pass needs, laid out by one table; those of the routed experts are the MoE
// layer's own (moe_alltoall.h, moe_mok.h). They lie in one arena, and those marked (s) in the rank's symmetric memory if the
// layer wants one: other ranks of the EP group then reach them at the same place.
#ifndef MOK_MODEL_ACTIVATIONS_H
#define MOK_MODEL_ACTIVATIONS_H

#include "kernels/comm.h"
#include "kernels/types.h"
#include "model/config.h"
#include "model/moe_settings.h"

// What one block keeps from its forward to its backward pass. N tokens, B sequences; other letters as in config.h:
// H hidden, n heads, dq/dv head sizes, rq/rk ranks, E experts, K top-k, m expert intermediate. With RECOMPUTE_BLOCK,
// and without training, attention and FFN of all blocks are in the same memory: those of the block that computed last.
struct block_activations {
    real *input; // [N, H] residual stream; for an MTP module what eh_proj gave
    // attention
    real *attention_norm;  // [N, H]
    accum *attention_rstd; // [N]
    real *q_a, *q_a_norm;  // [N, rq], with q compression only
    accum *q_a_rstd;       // [N]
    real *q;               // [N, n*dq], rotated
    real *kv_a;            // [N, rk + dr]: latent, then the shared rope key, rotated
    real *latent;          // [N, rk] normed
    accum *latent_rstd;    // [N]
    real *kv;              // [N, n*(dn + dv)]
    real *o;               // [N, n*dv]
    accum *lse;            // [B, n, T]
    // FFN
    real *middle;     // [N, H] residual stream after attention
    real *ffn_norm;   // [N, H] (s) of a MoE block
    accum *ffn_rstd;  // [N]
    real *gate_up;    // [N, 2I] dense FFN, or [N, 2Sm] shared expert
    accum *scores;    // [N, E]
    int32_t *ids;     // [N, K] (s)
    accum *gates;     // [N, K] (s)
    accum *balance_f; // [B, E]
    // MTP module
    real *embedded;                     // [N, H] embedding of the token k ahead
    real *concat;                       // [N, 2H]: its norm, then the norm of the hidden state
    accum *embedded_rstd, *hidden_rstd; // [N]
    real *output;                       // [N, H]
};

// One output of the model that meets the head: the main model (0) or MTP depth k.
struct head_activations {
    real *normed;   // [N, H]
    accum *rstd;    // [N]
    real *d_normed; // [N, H]
    int32_t *ids;   // [N] tokens this many positions ahead of the input: inputs of depth k, targets of depth k - 1
};

struct activations {
    void *arena;
    size_t bytes;                     // of both
    struct symm symm;                 // this layer's own header first; bytes 0: none
    int batch, seq;                   // capacity: at most batch sequences of at most seq tokens
    struct block_activations *blocks; // [config_blocks]
    struct head_activations *heads;   // [mtp_depth + 2]; the last one has ids only
    real *output;                     // [N, H] residual stream after the last layer
    accum *angles;                    // [T, dr]
    int logit_rows;                   // rows of one chunk of logits
    real *logits;                     // [logit_rows, V]
    accum *losses;                    // [heads, N]
    accum *balance;                   // [MoE blocks, B]
    // used and used again by every block
    real *ffn_hidden; // [N, max(I, Sm)]
    real *shared_out; // [N, H]
    real *slots;      // [N*K, H] (s) with symmetric memory only: every route's output, or input gradient
    // backward only
    real *dx;                   // [N, H] (s)
    real *d_norm;               // [N, H]
    real *d_q, *d_kv, *d_o;     // like q, kv, o
    real *d_kv_a, *d_latent;    // like kv_a, latent
    real *d_q_a, *d_q_a_norm;   // like q_a
    real *d_gate_up, *d_hidden; // [N, 2 max(I, Sm)], [N, max(I, Sm)]
    accum *d_gates;             // [N, K] (s)
    accum *d_scores;            // [N, E]
    real *d_concat;             // [N, 2H]
};

// One row of the printed table: all buffers of one name, over all blocks.
struct activation_row {
    const char *name;
    size_t bytes;
    int copies;
};

struct activation_table {
    struct activation_row rows[96];
    int count;
    size_t bytes;           // of the arena, alignment included
    size_t symmetric_bytes; // of the symmetric memory
};

// What the buffers are for.
struct activation_use {
    int batch, seq;
    bool training; // false leaves out what only the backward pass needs
    enum recompute recompute;
    size_t header; // bytes at the beginning of the symmetric memory for the MoE layer's own use; 0: no symmetric memory
};

// Rows of one chunk of logits.
int activations_logit_rows(int vocab, size_t tokens);

// Sizes without allocating.
void activations_tabulate(struct activation_table *table, const struct config *c, struct activation_use use);

// Allocates everything and fills in the rotary angles. With a header collective over group.
void activations_alloc(struct activations *a, const struct config *c, struct activation_use use, struct comm *group);
void activations_free(struct activations *a);

#endif

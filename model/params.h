// The parameter table: every tensor of the model under its Hugging Face name, in the order in which it lies in memory.
//
// Weights, gradients, master weights and the two moments are five flat arrays of the same length and order, so one
// table describes them all. Dense tensors come first, routed experts last, because they are reduced and sharded over
// different ranks. For the matrix products, the gate and up rows of one FFN stand behind each other (W13 [2I, H]) and
// the down projection is stored transposed (W2 [I, H]), one expert behind the other; a file has them in Hugging Face's
// orientation ([H, I]), which params_export and params_import take care of.
#ifndef MOK_MODEL_PARAMS_H
#define MOK_MODEL_PARAMS_H

#include "kernels/types.h"
#include "model/config.h"

// What a parameter belongs to, for the printed table.
enum param_kind {
    PARAM_EMBEDDING,
    PARAM_HEAD,
    PARAM_NORM,
    PARAM_ATTENTION,
    PARAM_DENSE_FFN,
    PARAM_ROUTER,
    PARAM_SHARED_EXPERT,
    PARAM_EXPERT,
    PARAM_MTP,
    PARAM_KINDS
};
extern const char *const param_kind_names[PARAM_KINDS];

struct param {
    char name[96];   // Hugging Face name
    int rows, cols;  // shape in the file; cols 0 for a vector of rows elements
    bool transposed; // in memory [cols, rows]
    bool decay;      // weight decay applies: matrices yes, norms no
    bool stored;     // its gradient is a product: the first pass of a step stores it; else zeroed, and passes only add
    enum param_kind kind;
    int block;     // layer or MTP module it belongs to; -1 for embedding, head and the last norm
    int expert;    // routed expert it belongs to; -1 for none
    size_t offset; // first element in the flat arrays; PARAM_ELSEWHERE: of an expert that another rank holds
};
#define PARAM_ELSEWHERE SIZE_MAX

static inline size_t param_size(const struct param *p) { return (size_t)p->rows * (size_t)(p->cols ? p->cols : 1); }

// Where one block's tensors begin in the flat arrays. Tensors that a block does not have are SIZE_MAX.
struct block_offsets {
    size_t input_norm, q, q_a, q_a_norm, q_b, kv_a, kv_a_norm, kv_b, o, post_norm;
    size_t w13, w2;                          // dense FFN
    size_t router;                           // [E, H]
    size_t shared_w13, shared_w2;            // [2Sm, H], [Sm, H]
    size_t expert_w13, expert_w2;            // [experts here, 2m, H], [experts here, m, H]
    size_t enorm, hnorm, eh_proj, head_norm; // MTP: [H], [H], [H, 2H], [H]
};

struct params {
    struct param *list; // [count] in memory order, if all of them were here
    int count;
    size_t size;       // elements of each flat array here, padding included
    size_t dense_size; // routed experts begin here
    size_t embedding, final_norm, head;
    struct block_offsets *blocks; // [config_blocks]
};

// Experts first .. end - 1.
struct expert_range {
    int first, end;
};

// Lays out the parameters of a valid configuration. Allocates the table only.
void params_build(struct params *p, const struct config *c);
// The same for a rank that holds some of the experts: the table has all tensors, those of other experts are
// PARAM_ELSEWHERE. Dense tensors have the same offsets on every rank.
void params_build_share(struct params *p, const struct config *c, struct expert_range experts);
void params_free(struct params *p);

// Parameters that exist on all ranks together, without padding.
size_t params_total(const struct params *p);

// Elements of the largest tensor.
size_t params_largest(const struct params *p);

// One tensor (host, contiguous) between its orientation in memory and in a file. The two may not overlap.
void params_export(float *file, const float *memory, const struct param *p);
void params_import(float *memory, const float *file, const struct param *p);

// First values of one tensor (host, contiguous) in the file's orientation: matrices normal with standard deviation std,
// norms one. Every element depends on (seed, name, position) alone, not on other tensors or the number of ranks.
void params_init(float *file, const struct param *p, double std, uint64_t seed);

#endif

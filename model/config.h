// The sizes of one model, named as in Hugging Face's DeepseekV3Config (the comment has the key), and what is checked
// before anything is allocated.
#ifndef MOK_MODEL_CONFIG_H
#define MOK_MODEL_CONFIG_H

#include <stdbool.h>
#include <stddef.h>

// YaRN extension of the rotary positions (arXiv 2309.00071). factor 0: off.
struct yarn {
    double factor;
    int original_length; // original_max_position_embeddings
    double beta_fast, beta_slow;
    double mscale, mscale_all_dim;
};

enum { MTP_MAX = 4 }; // modules at most

struct config {
    int vocab;               // vocab_size; 0 until the data has said it
    int hidden;              // hidden_size
    int layers;              // num_hidden_layers
    int dense_layers;        // first_k_dense_replace: this many layers first have a dense FFN
    int heads;               // num_attention_heads
    int q_rank;              // q_lora_rank, 0 for none (null in the file)
    int kv_rank;             // kv_lora_rank
    int nope_dim;            // qk_nope_head_dim
    int rope_dim;            // qk_rope_head_dim
    int value_dim;           // v_head_dim
    int intermediate;        // intermediate_size of the dense FFN
    int expert_intermediate; // moe_intermediate_size
    int experts;             // n_routed_experts
    int shared_experts;      // n_shared_experts: one SwiGLU of this many times expert_intermediate
    int top_k;               // num_experts_per_tok
    int groups;              // n_group
    int top_groups;          // topk_group
    bool normalize_gates;    // norm_topk_prob
    double route_scale;      // routed_scaling_factor
    int mtp_depth;           // num_nextn_predict_layers
    int max_positions;       // max_position_embeddings
    double rms_eps;          // rms_norm_eps; the two norms inside MLA always use 1e-6, as released checkpoints do
    double rope_theta;
    struct yarn yarn; // rope_scaling
    double init_std;  // initializer_range
    // The training objective's own constants.
    double balance_alpha; // sequence balance loss
    double bias_rate;     // selection bias step, gamma
    double mtp_weight;    // lambda
};

// Ends the program (exit 2) at the first rule that the sizes break, naming both flags and their values.
void config_validate(const struct config *c);

static inline int config_query_dim(const struct config *c) { return c->nope_dim + c->rope_dim; }
static inline int config_shared_intermediate(const struct config *c) {
    return c->shared_experts * c->expert_intermediate;
}
// Blocks = layers + MTP modules; block l is a MoE block from dense_layers on.
static inline int config_blocks(const struct config *c) { return c->layers + c->mtp_depth; }
static inline bool config_is_moe(const struct config *c, int block) { return block >= c->dense_layers; }
// Softmax scale of the scores, YaRN's factor included.
double config_attention_scale(const struct config *c);

#endif

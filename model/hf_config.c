#include "model/hf_config.h"

#include <cjson/cJSON.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/fail.h"
#include "data/files.h"

// ---- the keys ----

// What is the same for every model that this program can train. A file from elsewhere must agree, or leave out what
// not every version of transformers writes.
static const struct fixed_key {
    const char *name, *json;
    bool may_be_missing;
} fixed_keys[] = {
    {"architectures", "[\"DeepseekV3ForCausalLM\"]", true},
    {"model_type", "\"deepseek_v3\"", false},
    {"hidden_act", "\"silu\"", false},
    {"attention_bias", "false", true},
    {"attention_dropout", "0.0", true},
    {"tie_word_embeddings", "false", true},
    {"moe_layer_freq", "1", true},
    {"scoring_func", "\"sigmoid\"", true},
    {"topk_method", "\"noaux_tc\"", true},
    {"seq_aux", "true", true},
    {"rope_interleave", "true", true},
};

static const struct int_key {
    const char *name;
    size_t offset;
    int least;
} int_keys[] = {
    {"vocab_size", offsetof(struct config, vocab), 1},
    {"hidden_size", offsetof(struct config, hidden), 1},
    {"num_hidden_layers", offsetof(struct config, layers), 1},
    {"first_k_dense_replace", offsetof(struct config, dense_layers), 0},
    {"num_attention_heads", offsetof(struct config, heads), 1},
    {"kv_lora_rank", offsetof(struct config, kv_rank), 1},
    {"qk_nope_head_dim", offsetof(struct config, nope_dim), 1},
    {"qk_rope_head_dim", offsetof(struct config, rope_dim), 1},
    {"v_head_dim", offsetof(struct config, value_dim), 1},
    {"intermediate_size", offsetof(struct config, intermediate), 0},
    {"moe_intermediate_size", offsetof(struct config, expert_intermediate), 0},
    {"n_routed_experts", offsetof(struct config, experts), 0},
    {"n_shared_experts", offsetof(struct config, shared_experts), 0},
    {"num_experts_per_tok", offsetof(struct config, top_k), 0},
    {"n_group", offsetof(struct config, groups), 0},
    {"topk_group", offsetof(struct config, top_groups), 0},
    {"max_position_embeddings", offsetof(struct config, max_positions), 1},
};

static const struct real_key {
    const char *name;
    size_t offset;
    bool may_be_missing;
} real_keys[] = {
    {"routed_scaling_factor", offsetof(struct config, route_scale), false},
    {"rms_norm_eps", offsetof(struct config, rms_eps), false},
    {"rope_theta", offsetof(struct config, rope_theta), true}, // see read_rope
    {"initializer_range", offsetof(struct config, init_std), false},
    {"aux_loss_alpha", offsetof(struct config, balance_alpha), true},
};

// Of rope_scaling, beside original_max_position_embeddings. What is missing is as yarn_defaults has it.
static const struct real_key yarn_keys[] = {
    {"factor", offsetof(struct yarn, factor), false},
    {"beta_fast", offsetof(struct yarn, beta_fast), true},
    {"beta_slow", offsetof(struct yarn, beta_slow), true},
    {"mscale", offsetof(struct yarn, mscale), true},
    {"mscale_all_dim", offsetof(struct yarn, mscale_all_dim), true},
};
static const struct yarn yarn_defaults = {.beta_fast = 32, .beta_slow = 1, .mscale = 1, .mscale_all_dim = 0};
static const struct int_key mtp_depth = {"num_nextn_predict_layers", offsetof(struct config, mtp_depth), 0};
static const struct int_key yarn_length = {"original_max_position_embeddings", offsetof(struct yarn, original_length),
                                           1};

enum {
    FIXED_KEYS = sizeof fixed_keys / sizeof *fixed_keys,
    INT_KEYS = sizeof int_keys / sizeof *int_keys,
    REAL_KEYS = sizeof real_keys / sizeof *real_keys,
    YARN_KEYS = sizeof yarn_keys / sizeof *yarn_keys,
};

// ---- writing ----

static void add_int(struct cJSON *json, const struct int_key *key, const void *object) {
    cJSON_AddNumberToObject(json, key->name, *(const int *)((const char *)object + key->offset));
}

// As many digits as it takes to read back as the same double, with a point or an exponent among them.
static void add_real(struct cJSON *json, const struct real_key *key, const void *object) {
    double value = *(const double *)((const char *)object + key->offset);
    char text[40];
    for (int digits = 15; digits <= 17; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, value);
        if (strtod(text, NULL) == value) break;
    }
    if (!strpbrk(text, ".e")) strcat(text, ".0");
    cJSON_AddRawToObject(json, key->name, text);
}

static struct cJSON *yarn_to_json(const struct yarn *yarn) {
    struct cJSON *json = cJSON_CreateObject();
    cJSON_AddStringToObject(json, "type", "yarn");
    add_int(json, &yarn_length, yarn);
    for (int i = 0; i < YARN_KEYS; i++) add_real(json, &yarn_keys[i], yarn);
    return json;
}

struct cJSON *hf_config_to_json(const struct config *c, int end_of_text, const char *dtype) {
    struct cJSON *json = cJSON_CreateObject();
    if (!json) fail_internal("config.json", "no memory");
    for (int i = 0; i < FIXED_KEYS; i++) cJSON_AddRawToObject(json, fixed_keys[i].name, fixed_keys[i].json);
    for (int i = 0; i < INT_KEYS; i++) add_int(json, &int_keys[i], c);
    add_int(json, &mtp_depth, c);
    cJSON_AddNumberToObject(json, "num_key_value_heads", c->heads);
    if (c->q_rank)
        cJSON_AddNumberToObject(json, "q_lora_rank", c->q_rank);
    else
        cJSON_AddNullToObject(json, "q_lora_rank");
    cJSON_AddBoolToObject(json, "norm_topk_prob", c->normalize_gates);
    for (int i = 0; i < REAL_KEYS; i++) add_real(json, &real_keys[i], c);
    cJSON_AddItemToObject(json, "rope_scaling", c->yarn.factor != 0 ? yarn_to_json(&c->yarn) : cJSON_CreateNull());
    cJSON_AddNumberToObject(json, "bos_token_id", end_of_text);
    cJSON_AddNumberToObject(json, "eos_token_id", end_of_text);
    cJSON_AddStringToObject(json, "torch_dtype", dtype);
    // Expected by readers, of no meaning here.
    cJSON_AddNumberToObject(json, "ep_size", 1);
    cJSON_AddNumberToObject(json, "pretraining_tp", 1);
    cJSON_AddBoolToObject(json, "use_cache", true);
    return json;
}

struct cJSON *hf_generation_config_to_json(int end_of_text) {
    struct cJSON *json = cJSON_CreateObject();
    if (!json) fail_internal("generation_config.json", "no memory");
    cJSON_AddNumberToObject(json, "bos_token_id", end_of_text);
    cJSON_AddNumberToObject(json, "eos_token_id", end_of_text);
    cJSON_AddBoolToObject(json, "do_sample", true);
    return json;
}

// ---- reading ----

static bool wrong_key(const char *name, const struct cJSON *found, const char *wanted, char *error, size_t error_size) {
    char *text = found ? cJSON_PrintUnformatted(found) : NULL;
    file_error(error, error_size, "key \"%s\": found %.80s, wanted %s", name, text ? text : "nothing", wanted);
    cJSON_free(text);
    return false;
}

static bool check_fixed(const struct cJSON *json, const struct fixed_key *key, char *error, size_t error_size) {
    const struct cJSON *found = cJSON_GetObjectItemCaseSensitive(json, key->name);
    if (!found && key->may_be_missing) return true;
    struct cJSON *wanted = cJSON_Parse(key->json);
    bool same = cJSON_Compare(found, wanted, true);
    cJSON_Delete(wanted);
    return same || wrong_key(key->name, found, key->json, error, error_size);
}

static bool read_int(const struct cJSON *json, const struct int_key *key, void *object, char *error,
                     size_t error_size) {
    const struct cJSON *found = cJSON_GetObjectItemCaseSensitive(json, key->name);
    uint64_t value;
    char wanted[64];
    if (!file_json_integer(found, &value) || value > INT_MAX || (int)value < key->least) {
        snprintf(wanted, sizeof wanted, "an integer from %d to %d", key->least, INT_MAX);
        return wrong_key(key->name, found, wanted, error, error_size);
    }
    *(int *)((char *)object + key->offset) = (int)value;
    return true;
}

static bool read_real(const struct cJSON *json, const struct real_key *key, void *object, char *error,
                      size_t error_size) {
    const struct cJSON *found = cJSON_GetObjectItemCaseSensitive(json, key->name);
    if (!found && key->may_be_missing) return true;
    if (!cJSON_IsNumber(found) || !isfinite(found->valuedouble))
        return wrong_key(key->name, found, "a finite number", error, error_size);
    *(double *)((char *)object + key->offset) = found->valuedouble;
    return true;
}

static bool read_q_rank(struct config *c, const struct cJSON *json, char *error, size_t error_size) {
    const struct int_key key = {"q_lora_rank", offsetof(struct config, q_rank), 1};
    c->q_rank = 0;
    return cJSON_IsNull(cJSON_GetObjectItemCaseSensitive(json, key.name)) || read_int(json, &key, c, error, error_size);
}

static bool read_yarn(struct yarn *yarn, const struct cJSON *json, char *error, size_t error_size) {
    *yarn = yarn_defaults;
    if (!read_int(json, &yarn_length, yarn, error, error_size)) return false;
    for (int i = 0; i < YARN_KEYS; i++)
        if (!read_real(json, &yarn_keys[i], yarn, error, error_size)) return false;
    return true;
}

// Up to version 4 of transformers: rope_theta, and rope_scaling, which is null or of a type. From 5 on: both in
// rope_parameters, whose type is "default" without scaling.
static bool read_rope(struct config *c, const struct cJSON *json, char *error, size_t error_size) {
    static const struct real_key theta = {"rope_theta", offsetof(struct config, rope_theta), false};
    const struct cJSON *both = cJSON_GetObjectItemCaseSensitive(json, "rope_parameters");
    const char *name = both ? "rope_parameters" : "rope_scaling";
    const struct cJSON *scaling = cJSON_GetObjectItemCaseSensitive(json, name);
    if (!read_real(both ? both : json, &theta, c, error, error_size)) return false;

    c->yarn.factor = 0; // off, and then the other values are of no meaning
    if (!both && cJSON_IsNull(scaling)) return true;
    const struct cJSON *type = cJSON_GetObjectItemCaseSensitive(scaling, "rope_type");
    if (!type) type = cJSON_GetObjectItemCaseSensitive(scaling, "type");
    if (both && cJSON_IsString(type) && strcmp(type->valuestring, "default") == 0) return true;
    if (cJSON_IsString(type) && strcmp(type->valuestring, "yarn") == 0)
        return read_yarn(&c->yarn, scaling, error, error_size);
    return wrong_key(name, scaling,
                     both ? "an object of rope_type \"default\" or \"yarn\"" : "null or an object of type \"yarn\"",
                     error, error_size);
}

bool hf_config_from_json(struct config *c, const struct cJSON *json, char *error, size_t error_size) {
    for (int i = 0; i < FIXED_KEYS; i++)
        if (!check_fixed(json, &fixed_keys[i], error, error_size)) return false;
    for (int i = 0; i < INT_KEYS; i++)
        if (!read_int(json, &int_keys[i], c, error, error_size)) return false;
    for (int i = 0; i < REAL_KEYS; i++)
        if (!read_real(json, &real_keys[i], c, error, error_size)) return false;
    if (!read_q_rank(c, json, error, error_size) || !read_rope(c, json, error, error_size)) return false;
    c->mtp_depth = 0;
    if (cJSON_HasObjectItem(json, mtp_depth.name) && !read_int(json, &mtp_depth, c, error, error_size)) return false;

    const struct cJSON *normalize = cJSON_GetObjectItemCaseSensitive(json, "norm_topk_prob");
    if (!cJSON_IsBool(normalize)) return wrong_key("norm_topk_prob", normalize, "true or false", error, error_size);
    c->normalize_gates = cJSON_IsTrue(normalize);

    const struct cJSON *kv_heads = cJSON_GetObjectItemCaseSensitive(json, "num_key_value_heads");
    if (!cJSON_IsNumber(kv_heads) || kv_heads->valuedouble != c->heads)
        return wrong_key("num_key_value_heads", kv_heads, "the value of num_attention_heads", error, error_size);
    const struct cJSON *quantization = cJSON_GetObjectItemCaseSensitive(json, "quantization_config");
    if (quantization && !cJSON_IsNull(quantization))
        return wrong_key("quantization_config", quantization, "none: weights in F32, F16 or BF16", error, error_size);
    return true;
}

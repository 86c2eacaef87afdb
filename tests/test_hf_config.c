// Hugging Face's config.json: a round trip, what other readers need in it, and what is refused.
#include "tests/configs.h"
#include "tests/folder.h"

#include <cjson/cJSON.h>

#include "data/files.h"
#include "model/hf_config.h"

// What config.json says after a trip through text, with one key replaced (value NULL: removed).
static bool config_trip(struct config *out, const struct config *in, const char *key, const char *value, char *error) {
    struct cJSON *json = hf_config_to_json(in, 256, "float32");
    if (key && value && cJSON_HasObjectItem(json, key))
        cJSON_ReplaceItemInObjectCaseSensitive(json, key, cJSON_Parse(value));
    else if (key && value)
        cJSON_AddItemToObject(json, key, cJSON_Parse(value));
    else if (key)
        cJSON_DeleteItemFromObjectCaseSensitive(json, key);
    char *text = cJSON_Print(json);
    struct cJSON *parsed = cJSON_Parse(text);
    assert_non_null(parsed);
    bool read = hf_config_from_json(out, parsed, error, FILE_ERROR);
    cJSON_Delete(parsed);
    cJSON_free(text);
    cJSON_Delete(json);
    return read;
}

static void config_comes_back_from_json(void **state) {
    (void)state;
    char error[FILE_ERROR];
    struct config c = uneven;
    for (int variant = 0; variant < 2; variant++) {
        // Members that have no key keep what the caller had.
        struct config back = {.bias_rate = uneven.bias_rate, .mtp_weight = uneven.mtp_weight};
        if (!config_trip(&back, &c, NULL, NULL, error)) fail_msg("%s", error);
        assert_memory_equal(&back, &c, sizeof c);
        c.q_rank = 0;
        c.normalize_gates = false;
        c.route_scale = 2.446;
        c.rms_eps = 1.0 / 3;
        c.rope_theta = 1e300;
        c.yarn = (struct yarn){40, 4096, 32, 1, 1, 0.707};
    }
}

static void config_json_has_what_transformers_wants(void **state) {
    (void)state;
    struct config c = uneven;
    struct cJSON *json = hf_config_to_json(&c, 256, "float32");
    char *text = cJSON_PrintUnformatted(json);
    const char *parts[] = {"\"architectures\":[\"DeepseekV3ForCausalLM\"]",
                           "\"model_type\":\"deepseek_v3\"",
                           "\"rope_scaling\":null",
                           "\"rope_theta\":10000.0",
                           "\"rms_norm_eps\":1e-06",
                           "\"torch_dtype\":\"float32\"",
                           "\"num_key_value_heads\":4",
                           "\"bos_token_id\":256",
                           "\"eos_token_id\":256",
                           "\"num_nextn_predict_layers\":1",
                           "\"aux_loss_alpha\":0.0001",
                           "\"hidden_act\":\"silu\"",
                           "\"attention_dropout\":0.0",
                           "\"ep_size\":1",
                           "\"rope_interleave\":true",
                           "\"pretraining_tp\":1",
                           "\"use_cache\":true"};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) assert_contains(text, parts[i]);
    cJSON_free(text);
    cJSON_Delete(json);
    c.q_rank = 0;
    c.yarn.factor = 40;
    json = hf_config_to_json(&c, 256, "float32");
    text = cJSON_PrintUnformatted(json);
    assert_contains(text, "\"q_lora_rank\":null");
    assert_contains(text, "\"rope_scaling\":{\"type\":\"yarn\",");
    cJSON_free(text);
    cJSON_Delete(json);
}

static void config_refuses_what_this_model_is_not(void **state) {
    (void)state;
    const struct {
        const char *key, *value, *part;
    } cases[] = {
        {"hidden_size", NULL, "key \"hidden_size\": found nothing, wanted an integer from 1"},
        {"hidden_size", "\"64\"", "key \"hidden_size\": found \"64\", wanted an integer"},
        {"hidden_size", "64.5", "key \"hidden_size\": found 64.5"},
        {"hidden_size", "0", "key \"hidden_size\": found 0"},
        {"num_hidden_layers", "-3", "key \"num_hidden_layers\": found -3"},
        {"n_routed_experts", "4294967304", "key \"n_routed_experts\": found 4294967304"},
        {"n_group", "null", "key \"n_group\": found null"},
        {"q_lora_rank", NULL, "key \"q_lora_rank\": found nothing"},
        {"q_lora_rank", "0", "key \"q_lora_rank\": found 0"},
        {"rms_norm_eps", "true", "key \"rms_norm_eps\": found true, wanted a finite number"},
        {"norm_topk_prob", "1", "key \"norm_topk_prob\": found 1, wanted true or false"},
        {"scoring_func", "\"softmax\"", "key \"scoring_func\": found \"softmax\", wanted \"sigmoid\""},
        {"topk_method", "\"greedy\"", "key \"topk_method\": found \"greedy\", wanted \"noaux_tc\""},
        {"architectures", "[\"DeepseekV2ForCausalLM\"]", "wanted [\"DeepseekV3ForCausalLM\"]"},
        {"model_type", NULL, "key \"model_type\": found nothing"},
        {"rope_theta", NULL, "key \"rope_theta\": found nothing"},
        {"rope_parameters", "{\"rope_type\": \"default\"}", "key \"rope_theta\": found nothing"},
        {"rope_parameters", "{\"rope_type\": \"linear\", \"rope_theta\": 10000}", "wanted an object of rope_type"},
        {"rope_parameters", "null", "key \"rope_theta\": found nothing"},
        {"model_type", "\"llama\"", "key \"model_type\": found \"llama\""},
        {"hidden_act", "\"gelu\"", "key \"hidden_act\": found \"gelu\", wanted \"silu\""},
        {"tie_word_embeddings", "true", "key \"tie_word_embeddings\": found true, wanted false"},
        {"attention_bias", "true", "key \"attention_bias\": found true, wanted false"},
        {"attention_dropout", "0.1", "key \"attention_dropout\": found 0.1"},
        {"moe_layer_freq", "2", "key \"moe_layer_freq\": found 2, wanted 1"},
        {"rope_interleave", "false", "key \"rope_interleave\": found false"},
        {"num_key_value_heads", "2", "key \"num_key_value_heads\": found 2"},
        {"rope_scaling", NULL, "key \"rope_scaling\": found nothing"},
        {"rope_scaling", "{\"type\": \"linear\", \"factor\": 2}", "wanted null or an object of type \"yarn\""},
        {"rope_scaling", "{\"type\": \"yarn\", \"factor\": 2}",
         "key \"original_max_position_embeddings\": found nothing"},
        {"quantization_config", "{\"quant_method\": \"fp8\"}", "key \"quantization_config\": found {"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char error[FILE_ERROR] = "";
        struct config c = {0};
        if (config_trip(&c, &uneven, cases[i].key, cases[i].value, error))
            fail_msg("accepted %s %s", cases[i].key, cases[i].value ? cases[i].value : "removed");
        assert_contains(error, cases[i].part);
    }
    // Some that released models or versions of transformers do not have.
    const char *optional[] = {"rope_interleave", "seq_aux",      "attention_dropout", "aux_loss_alpha",
                              "architectures",   "scoring_func", "topk_method",       "moe_layer_freq"};
    for (size_t i = 0; i < sizeof optional / sizeof *optional; i++) {
        char error[FILE_ERROR];
        struct config c = {0};
        if (!config_trip(&c, &uneven, optional[i], NULL, error)) fail_msg("%s", error);
    }
}

// The keys that transformers 5.24 writes for a model that it made itself.
static const char transformers_5[] =
    "{\"architectures\": [\"DeepseekV3ForCausalLM\"], \"attention_bias\": false, \"attention_dropout\": 0.0,"
    "\"bos_token_id\": 0, \"dtype\": \"float32\", \"eos_token_id\": 1, \"first_k_dense_replace\": 3, \"head_dim\": 64,"
    "\"hidden_act\": \"silu\", \"hidden_size\": 7168, \"initializer_range\": 0.02, \"intermediate_size\": 18432,"
    "\"kv_lora_rank\": 512, \"max_position_embeddings\": 163840, \"model_type\": \"deepseek_v3\","
    "\"moe_intermediate_size\": 2048, \"n_group\": 8, \"n_routed_experts\": 256, \"n_shared_experts\": 1,"
    "\"norm_topk_prob\": true, \"num_attention_heads\": 128, \"num_experts_per_tok\": 8, \"num_hidden_layers\": 61,"
    "\"num_key_value_heads\": 128, \"output_router_logits\": false, \"pad_token_id\": null, \"pretraining_tp\": 1,"
    "\"q_lora_rank\": 1536, \"qk_head_dim\": 192, \"qk_nope_head_dim\": 128, \"qk_rope_head_dim\": 64,"
    "\"rms_norm_eps\": 1e-06, \"rope_interleave\": true, \"rope_parameters\": %s, \"routed_scaling_factor\": 2.5,"
    "\"tie_word_embeddings\": false, \"topk_group\": 4, \"transformers_version\": \"5.24.0\", \"use_cache\": true,"
    "\"v_head_dim\": 128, \"vocab_size\": 129280}";

static struct config read_transformers_5(const char *rope_parameters) {
    char text[4096], error[FILE_ERROR];
    snprintf(text, sizeof text, transformers_5, rope_parameters);
    struct cJSON *json = cJSON_Parse(text);
    struct config c = {.mtp_depth = 3, .yarn = {.factor = 7}};
    if (!hf_config_from_json(&c, json, error, sizeof error)) fail_msg("%s", error);
    cJSON_Delete(json);
    return c;
}

static void config_of_transformers_5_is_read(void **state) {
    (void)state;
    struct config c = read_transformers_5("{\"rope_theta\": 50000.0, \"rope_type\": \"default\"}");
    assert_true(c.rope_theta == 50000 && c.yarn.factor == 0 && c.mtp_depth == 0);
    assert_true(c.hidden == 7168 && c.q_rank == 1536 && c.experts == 256 && c.normalize_gates);

    c = read_transformers_5("{\"rope_theta\": 10000.0, \"rope_type\": \"yarn\", \"factor\": 40, "
                            "\"original_max_position_embeddings\": 4096}");
    struct yarn wanted = {.factor = 40, .original_length = 4096, .beta_fast = 32, .beta_slow = 1, .mscale = 1};
    assert_memory_equal(&c.yarn, &wanted, sizeof wanted);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(config_of_transformers_5_is_read),
        cmocka_unit_test(config_comes_back_from_json),
        cmocka_unit_test(config_json_has_what_transformers_wants),
        cmocka_unit_test(config_refuses_what_this_model_is_not),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

// model/hf_config.c and config_validate: a Hugging Face config.json.
#include "model/hf_config.h"

#include <cjson/cJSON.h>

#include "tests/fuzz/fuzz.h"

static char *print_config(const struct config *c) {
    struct cJSON *json = hf_config_to_json(c, 0, "float32");
    char *text = cJSON_Print(json);
    cJSON_Delete(json);
    return text;
}

// What was read is written and read again as the same.
static void check_round_trip(const struct config *c) {
    char error[FILE_ERROR] = "";
    struct config again = {0};
    char *text = print_config(c);
    struct cJSON *json = cJSON_Parse(text);
    if (!hf_config_from_json(&again, json, error, sizeof error)) {
        fprintf(stderr, "%s\n%s\n", error, text);
        abort();
    }
    char *text_again = print_config(&again);
    fuzz_require(strcmp(text, text_again) == 0);
    cJSON_free(text);
    cJSON_free(text_again);
    cJSON_Delete(json);
}

static void check_number(const struct cJSON *json, const char *key, int value) {
    fuzz_require(cJSON_GetObjectItemCaseSensitive(json, key)->valuedouble == value);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    char error[FILE_ERROR] = "";
    struct config c = {0};
    struct cJSON *json = file_parse_json((const char *)data, size, "config.json", error, sizeof error);
    if (!json) return 0;
    bool read = hf_config_from_json(&c, json, error, sizeof error);
    if (read) {
        check_number(json, "vocab_size", c.vocab);
        check_number(json, "hidden_size", c.hidden);
        check_number(json, "n_routed_experts", c.experts);
        check_number(json, "max_position_embeddings", c.max_positions);
    }
    cJSON_Delete(json);
    if (!read) {
        fuzz_check_error(error, sizeof error, "key \"");
        return 0;
    }
    check_round_trip(&c);
    fuzz_arm();
    if (setjmp(fuzz_stop) == 0) {
        config_validate(&c);
        fuzz_require(config_attention_scale(&c) > 0);
    }
    fuzz_disarm();
    return 0;
}

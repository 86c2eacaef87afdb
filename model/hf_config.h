// Between struct config and Hugging Face's config.json of a DeepseekV3ForCausalLM.
#ifndef MOK_MODEL_HF_CONFIG_H
#define MOK_MODEL_HF_CONFIG_H

#include <stdbool.h>
#include <stddef.h>

#include "model/config.h"

struct cJSON;

// The content of config.json. end_of_text: the token id of both bos and eos, -1 for none. dtype: of the weights beside
// it, "float32" or "bfloat16". balance_alpha goes in as aux_loss_alpha; bias_rate and mtp_weight have no key. The result is for
// printing: its real numbers are raw text, so that 1.0 stays a real number for a strict reader. Free with cJSON_Delete.
struct cJSON *hf_config_to_json(const struct config *c, int end_of_text, const char *dtype);
// The content of generation_config.json.
struct cJSON *hf_generation_config_to_json(int end_of_text);

// Sets the members of c that json, as parsed from a file, has keys for; bias_rate and mtp_weight stay as they are, and
// so does balance_alpha when aux_loss_alpha is missing. Returns false, with the key and what was found and wanted in
// error, when a key is missing or wrong or asks for something that this model is not. The sizes may still contradict
// each other: config_validate.
bool hf_config_from_json(struct config *c, const struct cJSON *json, char *error, size_t error_size);

#endif

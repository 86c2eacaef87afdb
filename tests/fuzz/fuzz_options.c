// model/options.c: the command line of a new run, one argument per line of the input; then what a run asks about the
// sizes. With --from it begins with the weights of a model that has two MTP modules.
#include "model/options.h"

#include <cjson/cJSON.h>

#include "model/plan.h"
#include "tests/fuzz/fuzz.h"

// The resolved options survive config.json.
static void check_round_trip(const struct options *o) {
    struct options again;
    options_set_preset(&again, "tiny");
    struct cJSON *raw = options_to_json(o);
    char *text = cJSON_Print(raw);
    struct cJSON *json = cJSON_Parse(text);
    fuzz_require(json && !options_from_json(&again, json));
    fuzz_require(!options_compare(stdout, o, &again, false));
    cJSON_Delete(raw);
    cJSON_Delete(json);
    cJSON_free(text);
}

// Sizes that pass the checks can be counted: no sum or product overflows on the way. Large tables would only be slow.
static void count_sizes(struct options *o) {
    struct plan plan;
    if (!o->model.vocab) o->model.vocab = 257;
    config_validate(&o->model);
    if ((int64_t)config_blocks(&o->model) * (1 + o->model.experts) > 4096) return;
    plan_make(&plan, o, &parallel_alone);
    // Weights, gradients, masters and two moments of 4 bytes; a double is not exact, the table is padded.
    fuzz_require(plan.total > 0 && (double)plan.total_bytes >= 0.999 * 20 * (plan.total + plan.mtp));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct fuzz_arguments a = fuzz_cut_arguments(data, size);
    struct options o;
    fuzz_arm();
    if (setjmp(fuzz_stop) == 0) {
        options_parse(&o, a.argc, a.argv);
        if (!o.help && !o.generate) {
            struct options other;
            options_set_preset(&other, "tiny");
            other.model.mtp_depth = 2;
            if (o.from[0]) options_take_model(&o, &other.model, o.from, a.argc, a.argv);
            options_settle(&o, 2, a.argc, a.argv);
            check_round_trip(&o);
            count_sizes(&o);
        }
    }
    fuzz_disarm();
    free(a.text);
    return 0;
}

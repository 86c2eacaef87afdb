// model/options.c: saved options, as a checkpoint and config.json hold them. A second part of the input is the command
// line of a run that goes on with them.
#include "model/options.h"

#include <cjson/cJSON.h>

#include "tests/fuzz/fuzz.h"

static void read_saved(const struct cJSON *saved) {
    struct options defaults, read, again;
    options_set_preset(&defaults, "tiny");
    read = again = defaults;
    const char *wrong = options_from_json(&read, saved);
    if (wrong) {
        fuzz_require(wrong[0] && strlen(wrong) < 256);
        fuzz_require(memcmp(&read, &defaults, sizeof read) == 0); // unchanged
        return;
    }
    fuzz_require(read.lr >= 0 && read.beta1 < 1 && read.adam_eps > 0 && read.steps >= 1 && read.model.hidden >= 1);
    struct cJSON *json = options_to_json(&read);
    fuzz_require(!options_from_json(&again, json));
    fuzz_require(!options_compare(stdout, &read, &again, false));
    cJSON_Delete(json);
}

static void go_on(const struct cJSON *saved, int argc, char **argv) {
    struct options o;
    fuzz_arm();
    if (setjmp(fuzz_stop) == 0) {
        options_parse(&o, argc, argv);
        options_resume(&o, saved, "folder", 2, argc, argv);
        fuzz_require(o.batch > 0 && o.seq > 0 && o.warmup <= o.steps);
    }
    fuzz_disarm();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    char error[FILE_ERROR];
    struct fuzz_part parts[2];
    size_t count = fuzz_cut(data, size, parts, 2);
    struct cJSON *saved = file_parse_json((const char *)parts[0].data, parts[0].size, "", error, sizeof error);
    if (!saved) return 0;
    read_saved(saved);
    if (count == 2) {
        struct fuzz_arguments a = fuzz_cut_arguments(parts[1].data, parts[1].size);
        go_on(saved, a.argc, a.argv);
        free(a.text);
    }
    cJSON_Delete(saved);
    return 0;
}

// model/log.c: the log.jsonl of a run that goes on. The first line of the input is the step it goes on from, the rest
// is the log that was left.
#include "model/log.h"

#include <cjson/cJSON.h>

#include "tests/fuzz/fuzz.h"

// Every line that was kept is an object with a step up to the last one, and stood in the old log.
static void check_kept(const char *path, const uint8_t *old, size_t old_size, int64_t last) {
    FILE *file = fopen(path, "r");
    char *line = NULL;
    size_t capacity = 0;
    fuzz_require(file);
    for (ssize_t length; (length = getline(&line, &capacity, file)) > 0;) {
        fuzz_require(line[length - 1] == '\n');
        struct cJSON *json = cJSON_Parse(line), *step = cJSON_GetObjectItemCaseSensitive(json, "step");
        fuzz_require(cJSON_IsNumber(step) && step->valuedouble <= (double)last);
        cJSON_Delete(json);
        fuzz_require(memmem(old, old_size, line, (size_t)length - 1));
    }
    free(line);
    fclose(file);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static struct trainer t;
    const uint8_t *end = memchr(data, '\n', size);
    if (!end || end - data > 18) return -1;
    char number[20] = "";
    memcpy(number, data, (size_t)(end - data));
    options_set_preset(&t.options, "tiny");
    t.parallel = &parallel_alone;
    t.step = strtoll(number, NULL, 10);
    if (t.step < 1) return -1;
    size -= (size_t)(end - data) + 1;
    const char *path = fuzz_write("log.jsonl", end + 1, size);

    struct run_log log;
    log_open(&log, &t, fuzz_folder);
    log_close(&log);
    check_kept(path, end + 1, size, t.step);
    return 0;
}

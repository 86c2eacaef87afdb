// data/identity.c: what a checkpoint says its data was, against data that is there.
#include "data/data.h"

#include <cjson/cJSON.h>

#include "tests/fuzz/fuzz.h"

static const char *const present[] = {
    "{\"files\":[{\"name\":\"a.bin\",\"bytes\":1424,\"hash\":\"0123456789abcdef\"},{\"name\":\"b.bin\",\"bytes\":1224,"
    "\"hash\":\"fedcba9876543210\"}],\"tokens\":300,\"length\":8,\"first\":0,\"windows\":35}",
    "{\"files\":[{\"name\":\"a.bin\",\"bytes\":1424,\"hash\":\"0123456789abcdef\"}],\"tokens\":200,\"shards\":true,"
    "\"tokenizer\":\"0011223344556677\",\"length\":8,\"windows\":24}",
    "{\"stories\":\"0123456789abcdef\",\"tokenizer\":\"0011223344556677\"}",
};

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    char error[FILE_ERROR];
    struct cJSON *before = file_parse_json((const char *)data, size, "checkpoint", error, sizeof error);
    if (!before) return 0;
    for (size_t i = 0; i < sizeof present / sizeof *present; i++) {
        char difference[64] = "";
        struct cJSON *now = cJSON_Parse(present[i]);
        bool equal = data_identity_equal(before, now, difference, sizeof difference);
        fuzz_require(equal || difference[0]);
        fuzz_require(data_identity_equal(now, now, difference, sizeof difference));
        cJSON_Delete(now);
    }
    cJSON_Delete(before);
    return 0;
}

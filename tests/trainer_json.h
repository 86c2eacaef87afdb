// Checkpoints that were changed on purpose and whose trainer.json vouches for the change: what a hash cannot tell must be
// noticed by other means.
#ifndef MOK_TESTS_TRAINER_JSON_H
#define MOK_TESTS_TRAINER_JSON_H

#include "tests/folder.h"

#include <cjson/cJSON.h>
#include <inttypes.h>

#include "data/hash.h"

static inline uint64_t hash_of(const void *data, size_t bytes) {
    struct hash hash = hash_begin();
    hash_add(&hash, data, bytes);
    return hash_end(&hash);
}

// A JSON object that lacks its end, followed by its hash and that end.
static inline void write_hashed(const char *name, const char *text) {
    char *whole;
    int bytes = asprintf(&whole, "%s,\n\t\"hash\":\t\"%016" PRIx64 "\"\n}\n", text, hash_of(text, strlen(text)));
    assert_true(bytes > 0);
    write_file(name, whole, (size_t)bytes);
    free(whole);
}

// Makes trainer.json of a checkpoint say that one of its files is as it should be.
static inline void vouch_for(const char *checkpoint, const char *file) {
    char name[180], text[17];
    size_t bytes;
    snprintf(name, sizeof name, "%s/%s", checkpoint, file);
    char *data = read_bytes(at(name), &bytes);
    snprintf(text, sizeof text, "%016" PRIx64, hash_of(data, bytes));
    free(data);

    snprintf(name, sizeof name, "%s/trainer.json", checkpoint);
    data = read_bytes(at(name), &bytes);
    cJSON *json = cJSON_Parse(data), *files = cJSON_GetObjectItemCaseSensitive(json, "files");
    cJSON *entry = cJSON_GetObjectItemCaseSensitive(files, file);
    assert_non_null(entry);
    cJSON_SetValuestring(cJSON_GetObjectItemCaseSensitive(entry, "hash"), text);
    cJSON_DeleteItemFromObjectCaseSensitive(json, "hash");
    char *changed = cJSON_Print(json);
    changed[strlen(changed) - strlen("\n}")] = 0;
    write_hashed(name, changed);
    free(changed);
    free(data);
    cJSON_Delete(json);
}

#endif

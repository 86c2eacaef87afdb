// data/files.c: one JSON object from text and from a file, and its integers.
//
// The text ends at a page that may not be read. cJSON is not built with the address sanitizer, so this is what notices
// that it reads on behind the end.
#include <cjson/cJSON.h>
#include <sys/mman.h>

#include "tests/fuzz/fuzz.h"

enum { ROOM = 1 << 16 };

static const char *place_before_guard(const uint8_t *data, size_t size) {
    static char *room;
    if (!room) {
        room = mmap(NULL, 2 * ROOM, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        fuzz_require(room != MAP_FAILED && mprotect(room + ROOM, ROOM, PROT_NONE) == 0);
    }
    return size ? memcpy(room + ROOM - size, data, size) : room + ROOM;
}

// An integer keeps its value when it is written and read again.
static void check_integer(const struct cJSON *item) {
    uint64_t value, again;
    char error[FILE_ERROR];
    if (!file_json_integer(item, &value)) return;
    fuzz_require(value <= 1ull << 53 && (double)value == item->valuedouble);
    struct cJSON *object = cJSON_CreateObject();
    file_json_add_integer(object, "n", value);
    char *text = cJSON_Print(object);
    struct cJSON *parsed = file_parse_json(text, strlen(text), "n", error, sizeof error);
    fuzz_require(file_json_integer(cJSON_GetObjectItemCaseSensitive(parsed, "n"), &again) && again == value);
    cJSON_Delete(parsed);
    cJSON_Delete(object);
    cJSON_free(text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    char error[FILE_ERROR] = "";
    if (size > ROOM) return -1;
    struct cJSON *json = file_parse_json(place_before_guard(data, size), size, "text", error, sizeof error);
    if (json) {
        const struct cJSON *item;
        fuzz_require(cJSON_IsObject(json));
        cJSON_ArrayForEach(item, json) check_integer(item);
    } else {
        fuzz_check_error(error, sizeof error, "text: ");
    }

    const char *path = fuzz_write("object.json", data, size);
    struct cJSON *read = file_read_json(path, error, sizeof error);
    fuzz_require(!read == !json); // the file and the text are one and the same
    if (!read) fuzz_check_error(error, sizeof error, path);
    cJSON_Delete(read);
    cJSON_Delete(json);
    return 0;
}

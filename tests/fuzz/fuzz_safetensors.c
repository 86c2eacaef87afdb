// model/safetensors.c: header and data of one file (fuzz_write_safetensors says how an input becomes one).
#include "model/safetensors.h"

#include "tests/fuzz/fuzz.h"

static uint64_t elements_of(const struct safetensors_tensor *t) {
    uint64_t elements = 1;
    fuzz_require(t->rank <= SAFETENSORS_RANK);
    for (int d = 0; d < t->rank; d++) elements *= t->shape[d];
    return elements;
}

// Every element of a tensor can be read, and none behind it.
static void check_tensor(const struct safetensors *s, const struct safetensors_tensor *t) {
    char error[FILE_ERROR] = "", shape[64];
    uint64_t elements = elements_of(t), size = t->type == SAFETENSORS_I64 ? 8 : t->type == SAFETENSORS_F32 ? 4 : 2;
    fuzz_require(safetensors_find(s, t->name) == t);
    fuzz_require(t->begin <= t->end && t->end <= s->data_bytes);
    fuzz_require(strlen(safetensors_shape_text(shape, sizeof shape, t->shape, t->rank)) < sizeof shape);

    fuzz_require(elements * size == t->end - t->begin);
    float *values = malloc((elements + 1) * sizeof *values);
    bool read = safetensors_read_f32(s, t, 0, elements, values, error, sizeof error);
    fuzz_require(read == (t->type != SAFETENSORS_I64));
    if (!read) fuzz_check_error(error, sizeof error, s->path);
    fuzz_require(!safetensors_read_f32(s, t, 1, elements, values, error, sizeof error));
    fuzz_require(!safetensors_read_f32(s, t, UINT64_MAX, 2, values, error, sizeof error));
    free(values);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct safetensors s;
    char error[FILE_ERROR] = "";
    const char *path = fuzz_write_safetensors("weights.safetensors", data, size);
    if (!safetensors_open(&s, path, error, sizeof error)) {
        fuzz_check_error(error, sizeof error, path);
        return 0;
    }
    uint64_t bytes = 0;
    for (int i = 0; i < s.count; i++) {
        check_tensor(&s, &s.list[i]);
        bytes += s.list[i].end - s.list[i].begin;
    }
    fuzz_require(bytes == s.data_bytes); // all of the data belongs to one tensor
    safetensors_close(&s);
    return 0;
}

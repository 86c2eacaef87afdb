// The safetensors container: 8 bytes of header length, a JSON header that names every tensor's type, shape and place,
// then the data. All little-endian, as are the machines this runs on. The reader checks every length before it uses it;
// both sides return false with one line in error that begins with the path.
#ifndef MOK_MODEL_SAFETENSORS_H
#define MOK_MODEL_SAFETENSORS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "data/files.h"

enum safetensors_type { SAFETENSORS_F32, SAFETENSORS_F16, SAFETENSORS_BF16, SAFETENSORS_I64, SAFETENSORS_TYPES };
extern const char *const safetensors_type_names[SAFETENSORS_TYPES];

enum { SAFETENSORS_RANK = 8 }; // dimensions at most

struct safetensors_tensor {
    const char *name;
    enum safetensors_type type;
    int rank;
    uint64_t shape[SAFETENSORS_RANK];
    uint64_t begin, end; // bytes, counted from the end of the header; the writer fills them in
};

// Writes "[2, 3]" and returns text.
char *safetensors_shape_text(char *text, size_t size, const uint64_t *shape, int rank);

// ---- writing: begin, append the tensors' bytes in the order of the list, finish ----

struct safetensors_writer {
    FILE *file;
    char path[FILE_PATH];
    uint64_t wanted, written; // bytes of data
};

// Creates the file and writes the header. Names may not hold characters that JSON escapes.
bool safetensors_begin(struct safetensors_writer *w, const char *path, struct safetensors_tensor *list, int count,
                       char *error, size_t error_size);
// out [n] = values [n], rounded to nearest even; they may begin at the same address.
void safetensors_bf16_from_f32(uint16_t *out, const float *values, size_t n);
bool safetensors_append(struct safetensors_writer *w, const void *data, size_t bytes, char *error, size_t error_size);
// On disk on return. To be called after a failed append too, since it closes the file.
bool safetensors_finish(struct safetensors_writer *w, char *error, size_t error_size);

// ---- reading ----

struct safetensors {
    FILE *file;
    char path[FILE_PATH];
    struct cJSON *header; // owns the names
    uint64_t data_start, data_bytes;
    struct safetensors_tensor *list; // [count] in order of name
    int count;
};

// On failure there is nothing to close.
bool safetensors_open(struct safetensors *s, const char *path, char *error, size_t error_size);
void safetensors_close(struct safetensors *s);
// NULL if there is no tensor of that name.
const struct safetensors_tensor *safetensors_find(const struct safetensors *s, const char *name);
// Elements first .. first + count - 1 of an F32, F16 or BF16 tensor.
bool safetensors_read_f32(const struct safetensors *s, const struct safetensors_tensor *t, uint64_t first,
                          uint64_t count, float *out, char *error, size_t error_size);

#endif

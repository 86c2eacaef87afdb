#include "model/safetensors.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/bf16.h"
#include "kernels/fail.h"

const char *const safetensors_type_names[SAFETENSORS_TYPES] = {
    [SAFETENSORS_F32] = "F32", [SAFETENSORS_F16] = "F16", [SAFETENSORS_BF16] = "BF16", [SAFETENSORS_I64] = "I64"};
static const uint64_t type_bytes[SAFETENSORS_TYPES] = {
    [SAFETENSORS_F32] = 4, [SAFETENSORS_F16] = 2, [SAFETENSORS_BF16] = 2, [SAFETENSORS_I64] = 8};

static const uint64_t header_most = 100 << 20; // the cap that other readers have too

char *safetensors_shape_text(char *text, size_t size, const uint64_t *shape, int rank) {
    size_t used = (size_t)snprintf(text, size, "[");
    for (int d = 0; d < rank && used < size; d++)
        used += (size_t)snprintf(text + used, size - used, "%s%ju", d ? ", " : "", (uintmax_t)shape[d]);
    if (used < size) snprintf(text + used, size - used, "]");
    return text;
}

// Bytes that type and shape ask for; false when that does not fit 64 bits.
static bool shape_bytes(const struct safetensors_tensor *t, uint64_t *bytes) {
    *bytes = type_bytes[t->type];
    for (int d = 0; d < t->rank; d++)
        if (__builtin_mul_overflow(*bytes, t->shape[d], bytes)) return false;
    return true;
}

// ---- writing ----

// The JSON header, padded with spaces so that the data begins at a multiple of 8. Fills in begin and end.
static char *format_header(struct safetensors_tensor *list, int count, size_t *length) {
    char *header = NULL, shape[256];
    FILE *text = open_memstream(&header, length);
    if (!text) fail_internal("safetensors header", "no memory");
    fprintf(text, "{\"__metadata__\":{\"format\":\"pt\"}");
    uint64_t end = 0;
    for (int i = 0; i < count; i++) {
        struct safetensors_tensor *t = &list[i];
        uint64_t bytes;
        if (!shape_bytes(t, &bytes)) fail_internal(t->name, "its shape has no size in 64 bits");
        t->begin = end;
        t->end = end = end + bytes;
        fprintf(text, ",\"%s\":{\"dtype\":\"%s\",\"shape\":%s,\"data_offsets\":[%ju,%ju]}", t->name,
                safetensors_type_names[t->type], safetensors_shape_text(shape, sizeof shape, t->shape, t->rank),
                (uintmax_t)t->begin, (uintmax_t)t->end);
    }
    fputc('}', text);
    while (ftello(text) % 8) fputc(' ', text);
    if (fclose(text) != 0) fail_internal("safetensors header", "no memory");
    return header;
}

static bool write_bytes(const struct safetensors_writer *w, const void *data, size_t bytes, char *error,
                        size_t error_size) {
    if (fwrite(data, 1, bytes, w->file) == bytes) return true;
    return file_error(error, error_size, "%s: cannot write %zu bytes after %ju of %ju bytes of data: %s", w->path,
                      bytes, (uintmax_t)w->written, (uintmax_t)w->wanted, strerror(errno));
}

bool safetensors_begin(struct safetensors_writer *w, const char *path, struct safetensors_tensor *list, int count,
                       char *error, size_t error_size) {
    *w = (struct safetensors_writer){0};
    snprintf(w->path, sizeof w->path, "%s", path);
    size_t length;
    char *header = format_header(list, count, &length);
    w->wanted = count ? list[count - 1].end : 0;

    unsigned char prefix[8];
    for (int i = 0; i < 8; i++) prefix[i] = (unsigned char)((uint64_t)length >> (8 * i));
    w->file = fopen(path, "wb");
    bool written = w->file ? write_bytes(w, prefix, sizeof prefix, error, error_size) &&
                                 write_bytes(w, header, length, error, error_size)
                           : file_error(error, error_size, "%s: cannot create: %s", path, strerror(errno));
    if (!written && w->file) fclose(w->file);
    free(header);
    return written;
}

// From the front: element i is written at 2i and was read from 4i, which is never below it.
void safetensors_bf16_from_f32(uint16_t *out, const float *values, size_t n) {
    for (size_t i = 0; i < n; i++) {
        float value;
        memcpy(&value, (const char *)values + i * sizeof value, sizeof value);
        uint16_t half = bf16_from_float(value);
        memcpy((char *)out + i * sizeof half, &half, sizeof half);
    }
}

bool safetensors_append(struct safetensors_writer *w, const void *data, size_t bytes, char *error, size_t error_size) {
    if (!write_bytes(w, data, bytes, error, error_size)) return false;
    w->written += bytes;
    return true;
}

bool safetensors_finish(struct safetensors_writer *w, char *error, size_t error_size) {
    if (!file_close_synced(w->file, w->path, error, error_size)) return false;
    if (w->written == w->wanted) return true;
    return file_error(error, error_size, "%s: found %ju bytes of data, wanted %ju", w->path, (uintmax_t)w->written,
                      (uintmax_t)w->wanted);
}

// ---- reading ----

static bool parse_type(const struct cJSON *item, struct safetensors_tensor *t) {
    for (int type = 0; cJSON_IsString(item) && type < SAFETENSORS_TYPES; type++)
        if (strcmp(item->valuestring, safetensors_type_names[type]) == 0) {
            t->type = (enum safetensors_type)type;
            return true;
        }
    return false;
}

static bool parse_shape(const struct cJSON *item, struct safetensors_tensor *t) {
    if (!cJSON_IsArray(item)) return false;
    const struct cJSON *size;
    cJSON_ArrayForEach(size, item) {
        if (t->rank == SAFETENSORS_RANK || !file_json_integer(size, &t->shape[t->rank])) return false;
        t->rank++;
    }
    return true;
}

// One member of the header; data_bytes is what the file has behind it.
static bool parse_tensor(struct safetensors_tensor *t, const struct cJSON *item, uint64_t data_bytes, const char *path,
                         char *error, size_t error_size) {
    *t = (struct safetensors_tensor){.name = item->string};
    const struct cJSON *type = cJSON_GetObjectItemCaseSensitive(item, "dtype");
    if (!parse_type(type, t))
        return file_error(error, error_size, "%s: tensor %.96s: found dtype %.32s, wanted F32, F16, BF16 or I64", path,
                          t->name, cJSON_IsString(type) ? type->valuestring : "that is no text");
    if (!parse_shape(cJSON_GetObjectItemCaseSensitive(item, "shape"), t))
        return file_error(error, error_size, "%s: tensor %.96s: found a bad shape, wanted up to %d integers", path,
                          t->name, SAFETENSORS_RANK);
    const struct cJSON *offsets = cJSON_GetObjectItemCaseSensitive(item, "data_offsets");
    if (!cJSON_IsArray(offsets) || cJSON_GetArraySize(offsets) != 2 ||
        !file_json_integer(cJSON_GetArrayItem(offsets, 0), &t->begin) ||
        !file_json_integer(cJSON_GetArrayItem(offsets, 1), &t->end))
        return file_error(error, error_size, "%s: tensor %.96s: found bad data_offsets, wanted [begin, end]", path,
                          t->name);
    if (t->begin > t->end || t->end > data_bytes)
        return file_error(error, error_size,
                          "%s: tensor %.96s: found data_offsets [%ju, %ju], wanted them ascending and at most %ju",
                          path, t->name, (uintmax_t)t->begin, (uintmax_t)t->end, (uintmax_t)data_bytes);
    uint64_t bytes;
    char shape[256];
    safetensors_shape_text(shape, sizeof shape, t->shape, t->rank);
    if (!shape_bytes(t, &bytes))
        return file_error(error, error_size, "%s: tensor %.96s: found shape %s, wanted one whose size fits 64 bits",
                          path, t->name, shape);
    if (bytes != t->end - t->begin)
        return file_error(error, error_size, "%s: tensor %.96s: found %ju bytes, wanted %ju for %s %s", path, t->name,
                          (uintmax_t)(t->end - t->begin), (uintmax_t)bytes, safetensors_type_names[t->type], shape);
    return true;
}

static int by_offset(const void *a, const void *b) {
    const struct safetensors_tensor *x = a, *y = b;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    return (x->end > y->end) - (x->end < y->end);
}

static int by_name(const void *a, const void *b) {
    const struct safetensors_tensor *x = a, *y = b;
    return strcmp(x->name, y->name);
}

// The data belongs to the tensors without gap or overlap, and no name comes twice. Leaves the list in order of name.
static bool check_list(struct safetensors *s, char *error, size_t error_size) {
    uint64_t end = 0;
    qsort(s->list, (size_t)s->count, sizeof *s->list, by_offset);
    for (int i = 0; i < s->count; i++) {
        if (s->list[i].begin != end)
            return file_error(error, error_size, "%s: tensor %.96s: found it at byte %ju, wanted %ju (%s)", s->path,
                              s->list[i].name, (uintmax_t)s->list[i].begin, (uintmax_t)end,
                              s->list[i].begin < end ? "tensors overlap" : "a gap before it");
        end = s->list[i].end;
    }
    if (end != s->data_bytes)
        return file_error(error, error_size, "%s: found %ju bytes of data, wanted %ju as its tensors say", s->path,
                          (uintmax_t)s->data_bytes, (uintmax_t)end);
    qsort(s->list, (size_t)s->count, sizeof *s->list, by_name);
    for (int i = 1; i < s->count; i++)
        if (strcmp(s->list[i - 1].name, s->list[i].name) == 0)
            return file_error(error, error_size, "%s: found tensor %.96s twice, wanted it once", s->path,
                              s->list[i].name);
    return true;
}

// Reads and parses the JSON header of an open file.
static bool read_header(struct safetensors *s, char *error, size_t error_size) {
    uint64_t bytes, length = 0;
    unsigned char prefix[8];
    if (!file_size(s->path, &bytes, error, error_size)) return false;
    if (bytes < 8 || fread(prefix, 1, sizeof prefix, s->file) != sizeof prefix)
        return file_error(error, error_size, "%s: found %ju bytes, wanted at least 8", s->path, (uintmax_t)bytes);
    for (int i = 0; i < 8; i++) length |= (uint64_t)prefix[i] << (8 * i);
    uint64_t most = bytes - 8 < header_most ? bytes - 8 : header_most;
    if (length < 2 || length > most)
        return file_error(error, error_size, "%s: found header length %ju, wanted 2 to %ju", s->path, (uintmax_t)length,
                          (uintmax_t)most);
    s->data_start = 8 + length;
    s->data_bytes = bytes - s->data_start;

    char *text = malloc(length);
    if (!text || fread(text, 1, length, s->file) != length)
        file_error(error, error_size, "%s: cannot read a header of %ju bytes", s->path, (uintmax_t)length);
    else
        s->header = file_parse_json(text, length, s->path, error, error_size);
    free(text);
    return s->header != NULL;
}

static bool read_list(struct safetensors *s, char *error, size_t error_size) {
    if (!read_header(s, error, error_size)) return false;
    s->list = calloc((size_t)cJSON_GetArraySize(s->header) + 1, sizeof *s->list);
    if (!s->list) return file_error(error, error_size, "%s: no memory for its tensors", s->path);
    const struct cJSON *item;
    cJSON_ArrayForEach(item, s->header) {
        if (strcmp(item->string, "__metadata__") == 0) continue;
        if (!parse_tensor(&s->list[s->count++], item, s->data_bytes, s->path, error, error_size)) return false;
    }
    return check_list(s, error, error_size);
}

bool safetensors_open(struct safetensors *s, const char *path, char *error, size_t error_size) {
    uint64_t bytes;
    *s = (struct safetensors){0};
    snprintf(s->path, sizeof s->path, "%s", path);
    if (!file_size(path, &bytes, error, error_size)) return false; // before fopen, which would wait on a pipe
    s->file = fopen(path, "rb");
    if (!s->file) return file_error(error, error_size, "%s: cannot open: %s", path, strerror(errno));
    if (read_list(s, error, error_size)) return true;
    safetensors_close(s);
    return false;
}

void safetensors_close(struct safetensors *s) {
    if (s->file) fclose(s->file);
    cJSON_Delete(s->header);
    free(s->list);
    *s = (struct safetensors){0};
}

const struct safetensors_tensor *safetensors_find(const struct safetensors *s, const char *name) {
    struct safetensors_tensor key = {.name = name};
    return bsearch(&key, s->list, (size_t)s->count, sizeof key, by_name);
}

static float float_from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static float float_from_half(uint16_t half) {
    uint32_t sign = (uint32_t)(half >> 15) << 31, exponent = half >> 10 & 31, fraction = half & 1023;
    if (exponent == 31) return float_from_bits(sign | 0x7f800000 | fraction << 13); // infinity, NaN
    if (exponent) return float_from_bits(sign | (exponent + 112) << 23 | fraction << 13);
    float small = (float)fraction * 0x1p-24f; // zero and subnormals
    return sign ? -small : small;
}

bool safetensors_read_f32(const struct safetensors *s, const struct safetensors_tensor *t, uint64_t first,
                          uint64_t count, float *out, char *error, size_t error_size) {
    if (t->type == SAFETENSORS_I64)
        return file_error(error, error_size, "%s: tensor %.96s: found I64, wanted F32, F16 or BF16", s->path, t->name);
    uint64_t size = type_bytes[t->type], elements = (t->end - t->begin) / size;
    if (first > elements || count > elements - first)
        return file_error(error, error_size, "%s: tensor %.96s: wanted elements %ju to %ju, found %ju", s->path,
                          t->name, (uintmax_t)first, (uintmax_t)(first + count), (uintmax_t)elements);
    // 16-bit elements are read into the upper half of out and widened from the front: element i is written at 4i and
    // was read from 2 (count + i), which is never below it.
    unsigned char *raw = (unsigned char *)out + count * (sizeof *out - size);
    if (fseeko(s->file, (off_t)(s->data_start + t->begin + first * size), SEEK_SET) != 0 ||
        fread(raw, size, count, s->file) != count)
        return file_error(error, error_size, "%s: tensor %.96s: cannot read %ju elements: %s", s->path, t->name,
                          (uintmax_t)count, ferror(s->file) ? strerror(errno) : "the file has become shorter");
    for (uint64_t i = 0; size == 2 && i < count; i++) {
        uint16_t bits;
        memcpy(&bits, raw + 2 * i, sizeof bits);
        out[i] = t->type == SAFETENSORS_BF16 ? bf16_to_float(bits) : float_from_half(bits);
    }
    return true;
}

// Outputs of one build kept in a file, and those of another build compared with them: how the GPU's results are held
// against the CPU's. A record is a list of arrays, each with a name of its own.
#ifndef MOK_TESTS_RECORD_H
#define MOK_TESTS_RECORD_H

#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ---- how far two builds may be apart ----

// norm: of the difference, relative to the norm of what was recorded. worst: of one element, relative to the largest of
// its row (or a tenth of the root mean square, if that is more: rows that are zero but for rounding). floor: root mean
// square that is taken as the least, for outputs that may cancel to nothing.
struct tolerance {
    double norm, worst, floor;
};

// Integers and copies.
static const struct tolerance EXACT = {0, 0, 0};
// Results in FP32. Both builds sum in FP32 but in other orders: with up to 1e5 terms some 2^-24 sqrt(terms) of the
// terms' size, which is that of the sum or somewhat more.
static const struct tolerance SUMMED = {1e-5, 1e-4, 0};
// FP32 results rounded to BF16 once. An element is off by 2^-8 of itself at most and, over many, by 1.6e-3 in the mean
// square; twice that is the limit, so that a second rounding in between (2.3e-3) still passes and a lost term of a sum
// does not.
static const struct tolerance ROUNDED = {3e-3, 6e-3, 0};
// The same with a second rounding in between, as some of cuBLASLt's kernels do before they add: an element is off by up
// to 2^-8 twice.
static const struct tolerance ROUNDED_TWICE = {3e-3, 8e-3, 0};
// The same where values inside are rounded to BF16 by design, before they are multiplied and summed: probabilities and
// score gradients of attention. Two or three independent roundings make 2.3e-3 to 2.8e-3; twice that. One element may
// gather many terms that are larger than itself.
static const struct tolerance ROUNDED_INSIDE = {6e-3, 2.4e-2, 0};

static inline struct tolerance with_floor(struct tolerance t, double floor) {
    t.floor = floor;
    return t;
}

// One rounding to BF16 is up to 2^-8 of an element, so that few elements may all be further off than the mean of many.
enum { FEW_ELEMENTS = 256 };
static inline double norm_limit(struct tolerance t, size_t n) {
    return n < FEW_ELEMENTS && t.norm == ROUNDED.norm ? t.worst : t.norm;
}

// ---- the file ----

enum element { ELEMENT_FLOAT, ELEMENT_DOUBLE, ELEMENT_INT32, ELEMENT_INT64 };

struct record_header {
    char name[128];
    int32_t element;
    int32_t row; // elements of one row
    uint64_t n;
};

static const char RECORD_MAGIC[8] = "mokrec1";

struct record {
    FILE *file; // recording: being written, else NULL
    const char *path;
    unsigned char *bytes;                 // comparing: the whole file
    const struct record_header **entries; // in it, sorted by name
    size_t count;
};

static inline _Noreturn void record_fail(const char *path, const char *what) {
    fprintf(stderr, "%s: %s\n", path, what);
    exit(2);
}

static inline size_t record_element_bytes(int element) {
    return element == ELEMENT_FLOAT || element == ELEMENT_INT32 ? 4 : 8;
}

// Data of an entry follows its header, filled up to a multiple of 8 bytes.
static inline size_t record_data_bytes(const struct record_header *h) {
    return (h->n * record_element_bytes(h->element) + 7) / 8 * 8;
}

static inline const void *record_data(const struct record_header *h) { return h + 1; }

static inline void record_create(struct record *r, const char *path) {
    *r = (struct record){.file = fopen(path, "wb"), .path = path};
    if (!r->file || fwrite(RECORD_MAGIC, sizeof RECORD_MAGIC, 1, r->file) != 1) record_fail(path, "cannot be written");
}

static inline void record_write(struct record *r, const struct record_header *h, const void *data) {
    static const unsigned char filling[8];
    size_t bytes = h->n * record_element_bytes(h->element), rest = record_data_bytes(h) - bytes;
    bool written = fwrite(h, sizeof *h, 1, r->file) == 1 && (bytes == 0 || fwrite(data, bytes, 1, r->file) == 1) &&
                   (rest == 0 || fwrite(filling, rest, 1, r->file) == 1);
    if (!written) record_fail(r->path, "cannot be written");
}

static inline int record_compare_names(const void *a, const void *b) {
    const struct record_header *const *x = a, *const *y = b;
    return strcmp((*x)->name, (*y)->name);
}

static inline void record_open(struct record *r, const char *path) {
    *r = (struct record){.path = path};
    FILE *file = fopen(path, "rb");
    long size = -1;
    if (file && fseek(file, 0, SEEK_END) == 0) size = ftell(file);
    if (!file) record_fail(path, "cannot be read");
    if (size < (long)sizeof RECORD_MAGIC) record_fail(path, "is no record");
    rewind(file);
    r->bytes = malloc((size_t)size);
    if (!r->bytes || fread(r->bytes, (size_t)size, 1, file) != 1) record_fail(path, "cannot be read");
    fclose(file);
    if (memcmp(r->bytes, RECORD_MAGIC, sizeof RECORD_MAGIC) != 0) record_fail(path, "is no record");
    for (size_t at = sizeof RECORD_MAGIC; at < (size_t)size;) {
        const struct record_header *h = (const void *)(r->bytes + at);
        if (at + sizeof *h > (size_t)size || at + sizeof *h + record_data_bytes(h) > (size_t)size)
            record_fail(path, "ends in the middle of an array");
        if ((r->count & (r->count - 1)) == 0)
            r->entries = realloc(r->entries, sizeof *r->entries * (r->count ? 2 * r->count : 1));
        r->entries[r->count++] = h;
        at += sizeof *h + record_data_bytes(h);
    }
    qsort(r->entries, r->count, sizeof *r->entries, record_compare_names);
}

// NULL: there is none of this name.
static inline const struct record_header *record_find(const struct record *r, const char *name) {
    struct record_header key;
    snprintf(key.name, sizeof key.name, "%s", name);
    const struct record_header *wanted = &key, **found;
    found = bsearch(&wanted, r->entries, r->count, sizeof *r->entries, record_compare_names);
    return found ? *found : NULL;
}

static inline void record_close(struct record *r) {
    if (r->file && (ferror(r->file) || fclose(r->file) != 0)) record_fail(r->path, "cannot be written");
    free(r->bytes);
    free(r->entries);
    *r = (struct record){0};
}

// ---- comparing numbers ----

// What was found about one array, relative to what was recorded.
struct difference {
    double norm, worst;
    size_t at; // element that is furthest off
};

// NaN in what was recorded stands for an element that nobody wrote; it is not looked at here.
static inline struct difference record_difference(const double *found, const float *wanted, size_t n, size_t row,
                                                  double floor) {
    struct difference d = {0};
    double error = 0, size = 0;
    size_t written = 0;
    for (size_t i = 0; i < n; i++) {
        if (isnan(wanted[i])) continue;
        double e = found[i] - (double)wanted[i];
        error += e * e;
        size += (double)wanted[i] * wanted[i];
        written++;
    }
    size = fmax(sqrt(size), floor * sqrt((double)written));
    error = sqrt(error);
    if (written == 0 || error == 0) return d;
    d.norm = size > 0 ? error / size : INFINITY;
    double least = 0.1 * size / sqrt((double)written);
    for (size_t first = 0; first < n; first += row) {
        size_t end = first + row < n ? first + row : n;
        double scale = least;
        for (size_t i = first; i < end; i++) scale = fmax(scale, isnan(wanted[i]) ? 0 : fabs((double)wanted[i]));
        for (size_t i = first; i < end; i++) {
            if (isnan(wanted[i])) continue;
            double e = fabs(found[i] - (double)wanted[i]) / scale;
            if (!(e <= d.worst)) d.worst = isnan(e) ? INFINITY : e, d.at = i;
        }
    }
    return d;
}

// ---- BF16 ----

// The nearest BF16 number, ties to even, as a float. NaN stays NaN. Its own, since kernels/bf16.h is what it checks.
static inline float round_to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (isnan(value)) return value;
    bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
    memcpy(&value, &bits, sizeof value);
    return value;
}

#endif

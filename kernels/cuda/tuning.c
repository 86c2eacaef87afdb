#include "kernels/cuda/tuning.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "kernels/fail.h"

static const char *const kind_names[] = {"nt", "nn", "tn"};
enum { KINDS = 3, FILE_BYTES = 1 << 24 };

static int compare_products(const void *a, const void *b) {
    const struct tuned_product *x = a, *y = b;
    return memcmp(&x->key, &y->key, sizeof x->key);
}

const struct matmul_algorithm *tuning_find(const struct tuning *t, const struct matmul_key *key) {
    if (t->count == 0) return NULL;
    struct tuned_product wanted = {.key = *key};
    const struct tuned_product *found =
        bsearch(&wanted, t->products, (size_t)t->count, sizeof wanted, compare_products);
    return found ? &found->algorithm : NULL;
}

// FNV-1a.
static uint64_t hash_bytes(const char *bytes, size_t n) {
    uint64_t hash = 14695981039346656037u;
    for (size_t i = 0; i < n; i++) hash = (hash ^ (unsigned char)bytes[i]) * 1099511628211u;
    return hash;
}

// ---- reading ----

// Where the reader is; every take moves on if what it wants is next, else stays.
struct cursor {
    const char *next, *path;
    int line;
};

static bool take_text(struct cursor *c, const char *text) {
    size_t length = strlen(text);
    if (strncmp(c->next, text, length) != 0) return false;
    c->next += length;
    return true;
}

// Digits alone: no sign, no space, no zero before others.
static bool take_number(struct cursor *c, uint64_t most, uint64_t *value) {
    const char *digits = c->next;
    uint64_t sum = 0;
    if (*digits < '0' || *digits > '9' || (*digits == '0' && digits[1] >= '0' && digits[1] <= '9')) return false;
    for (; *digits >= '0' && *digits <= '9'; digits++) {
        uint64_t digit = (uint64_t)(*digits - '0');
        if (sum > (most - digit) / 10) return false;
        sum = 10 * sum + digit;
    }
    c->next = digits;
    *value = sum;
    return true;
}

static bool take_line_end(struct cursor *c) {
    if (!take_text(c, "\n")) return false;
    c->line++;
    return true;
}

static _Noreturn void refuse(const struct cursor *c, const char *wanted) {
    int length = (int)strcspn(c->next, "\n");
    if (length > 60) length = 60;
    fail_user(c->path, "line %d: found '%.*s', wanted %s; remove the file, or make it again with make tune", c->line,
              length, c->next, wanted);
}

static void read_head(struct tuning *t, struct cursor *c) {
    if (!take_text(c, "mok-tune 1") || !take_line_end(c)) refuse(c, "'mok-tune 1'");
    size_t length = take_text(c, "machine ") ? strcspn(c->next, "\n") : 0;
    if (length == 0 || length >= TUNING_MACHINE || !c->next[length]) refuse(c, "'machine ' and a GPU's name");
    memcpy(t->machine, c->next, length);
    t->machine[length] = 0;
    c->next += length;
    take_line_end(c);
    if (!take_text(c, "cublaslt ") || !take_number(c, INT64_MAX, &t->version) || !take_line_end(c))
        refuse(c, "'cublaslt ' and its version");
    uint64_t count;
    if (!take_text(c, "products ") || !take_number(c, TUNING_PRODUCTS, &count) || !take_line_end(c))
        refuse(c, "'products ' and how many lines follow, at most 65536");
    t->count = (int)count;
}

// One of a key's alignments, and the space before it.
static bool take_alignment(struct cursor *c, bool may_be_none, int32_t *bytes) {
    uint64_t value;
    if (!take_text(c, " ") || !take_number(c, 16, &value)) return false;
    *bytes = (int32_t)value;
    return value == 2 || value == 4 || value == 8 || value == 16 || (may_be_none && value == 0);
}

static void read_product(struct tuned_product *p, struct cursor *c) {
    struct matmul_key *key = &p->key;
    for (key->kind = 0; key->kind < KINDS; key->kind++)
        if (take_text(c, kind_names[key->kind])) break;
    if (key->kind == KINDS) refuse(c, "nt, nn or tn");
    int32_t *const sizes[] = {&key->M, &key->N, &key->K};
    for (int i = 0; i < 3; i++) {
        uint64_t size;
        if (!take_text(c, " ") || !take_number(c, INT_MAX, &size) || size == 0)
            refuse(c, "M, N and K from 1 to 2^31 - 1");
        *sizes[i] = (int32_t)size;
    }
    if (!take_alignment(c, false, &key->first_bytes) || !take_alignment(c, false, &key->second_bytes) ||
        !take_alignment(c, true, &key->add_bytes) || !take_alignment(c, false, &key->out_bytes))
        refuse(c, "alignments of 2, 4, 8 or 16 bytes");
    if (!take_text(c, " =")) refuse(c, "' = ' and an algorithm");
    for (int i = 0; i < ALGORITHM_FIELDS; i++) {
        uint64_t value;
        bool wide = i != ALGORITHM_INNER_SHAPE && i != ALGORITHM_CLUSTER_SHAPE;
        if (!take_text(c, " ") || !take_number(c, wide ? INT32_MAX : UINT16_MAX, &value))
            refuse(c, "nine numbers of an algorithm");
        p->algorithm.fields[i] = (uint32_t)value;
    }
    if (!matmul_algorithm_allowed(&p->algorithm)) refuse(c, "the end of an algorithm whose sums have a fixed order");
    if (!take_line_end(c)) refuse(c, "the end of the line");
}

// The whole text and a final zero; NULL: no such file.
static char *read_text(const char *path, size_t *length) {
    FILE *file = fopen(path, "rb");
    if (!file && (errno == ENOENT || errno == ENOTDIR)) return NULL;
    if (!file) fail_user(path, "cannot be read: %s", strerror(errno));
    char *text = malloc(FILE_BYTES + 1);
    if (!text) fail_internal(path, "no memory to read it");
    *length = fread(text, 1, FILE_BYTES + 1, file);
    if (ferror(file)) fail_user(path, "cannot be read: %s", strerror(errno));
    fclose(file);
    if (*length > FILE_BYTES) fail_user(path, "found more than 16 MiB, wanted a table that make tune wrote");
    text[*length] = 0;
    return text;
}

bool tuning_read(struct tuning *t, const char *path) {
    size_t length;
    char *text = read_text(path, &length);
    if (!text) return false;
    struct cursor c = {.next = text, .path = path, .line = 1};
    *t = (struct tuning){.hash = hash_bytes(text, length)};
    read_head(t, &c);
    t->products = calloc((size_t)t->count + 1, sizeof *t->products);
    if (!t->products) fail_internal(path, "no memory for %d products", t->count);
    for (int i = 0; i < t->count; i++) read_product(&t->products[i], &c);
    if (c.next != text + length) refuse(&c, "the end of the file");
    qsort(t->products, (size_t)t->count, sizeof *t->products, compare_products);
    for (int i = 1; i < t->count; i++)
        if (compare_products(&t->products[i - 1], &t->products[i]) == 0)
            fail_user(path, "found the product %s %d %d %d twice, wanted it once; make it again with make tune",
                      kind_names[t->products[i].key.kind], t->products[i].key.M, t->products[i].key.N,
                      t->products[i].key.K);
    free(text);
    return true;
}

// ---- writing ----

static void make_folder_of(const char *path) {
    const char *slash = strrchr(path, '/');
    if (!slash || slash == path) return;
    char *folder = strndup(path, (size_t)(slash - path));
    if (!folder) fail_internal(path, "no memory for its folder's name");
    if (mkdir(folder, 0777) != 0 && errno != EEXIST) fail_user(folder, "cannot be made: %s", strerror(errno));
    free(folder);
}

static void write_product(FILE *file, const struct tuned_product *p) {
    const struct matmul_key *k = &p->key;
    fprintf(file, "%s %d %d %d %d %d %d %d =", kind_names[k->kind], k->M, k->N, k->K, k->first_bytes, k->second_bytes,
            k->add_bytes, k->out_bytes);
    for (int i = 0; i < ALGORITHM_FIELDS; i++) fprintf(file, " %" PRIu32, p->algorithm.fields[i]);
    fputc('\n', file);
}

// Under another name first: a reader finds the old table or the new one, whole.
void tuning_write(struct tuning *t, const char *path) {
    char temporary[PATH_MAX];
    if (snprintf(temporary, sizeof temporary, "%s.new", path) >= (int)sizeof temporary)
        fail_user(path, "found too long a path, wanted fewer than %d bytes", PATH_MAX - 4);
    make_folder_of(path);
    qsort(t->products, (size_t)t->count, sizeof *t->products, compare_products);
    FILE *file = fopen(temporary, "wb");
    if (!file) fail_user(temporary, "cannot be written: %s", strerror(errno));
    fprintf(file, "mok-tune 1\nmachine %s\ncublaslt %" PRIu64 "\nproducts %d\n", t->machine, t->version, t->count);
    for (int i = 0; i < t->count; i++) write_product(file, &t->products[i]);
    bool written = !ferror(file);
    written &= fclose(file) == 0;
    if (!written || rename(temporary, path) != 0) {
        int reason = errno;
        remove(temporary);
        fail_user(path, "cannot be written: %s", strerror(reason));
    }
}

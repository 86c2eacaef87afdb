#include "data/choices.h"

#include <endian.h>
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "data/tokenizer.h"
#include "kernels/fail.h"

enum { MAGIC = 20240522, VERSION = 1, HEADER_INTS = CHOICES_HEADER / 4 };
enum { START, BYTES, INDEX, LABEL, COMPLETIONS, FIELDS }; // what an example begins with
enum { START_MARK = 65535 };

// The shortest example: its fields, a context of one id and two completions of one id.
enum { SHORTEST = 2 * (FIELDS + 2 + 2 * CHOICES_LEAST) };

// ---- reading ----

bool choices_is(const char *path) {
    struct stat info;
    if (stat(path, &info) != 0 || !S_ISREG(info.st_mode)) return false;
    FILE *file = fopen(path, "rb");
    uint32_t magic = 0;
    bool is = file && fread(&magic, sizeof magic, 1, file) == 1 && le32toh(magic) == MAGIC;
    if (file) fclose(file);
    return is;
}

// The header's numbers in host order, checked against the file's size.
static bool read_header(FILE *file, const char *path, uint64_t bytes, uint32_t *header, char *error,
                        size_t error_size) {
    if (bytes < CHOICES_HEADER)
        return file_error(error, error_size, "%s: found %ju bytes, wanted at least the %d of a multiple-choice header",
                          path, (uintmax_t)bytes, CHOICES_HEADER);
    if (fread(header, 4, HEADER_INTS, file) != HEADER_INTS)
        return file_error(error, error_size, "%s: cannot read its header: %s", path,
                          ferror(file) ? strerror(errno) : "it became shorter");
    for (int i = 0; i < HEADER_INTS; i++) header[i] = le32toh(header[i]);
    if (header[0] != MAGIC || header[1] != VERSION)
        return file_error(error, error_size,
                          "%s: found magic 0x%08x and version %u, wanted 0x%08x and %d, a multiple-choice file; make "
                          "one with ./tokenize --choices",
                          path, header[0], header[1], MAGIC, VERSION);
    uint64_t body = bytes - CHOICES_HEADER;
    if (header[2] < 1 || header[2] > CHOICES_EXAMPLES || (uint64_t)header[2] * SHORTEST > body)
        return file_error(error, error_size,
                          "%s: found %u examples in its header and %ju bytes behind it, wanted 1 to %d examples of at "
                          "least %d bytes",
                          path, header[2], (uintmax_t)body, CHOICES_EXAMPLES, SHORTEST);
    if (body % 2)
        return file_error(error, error_size, "%s: found %ju bytes, wanted an even number: it is cut off", path,
                          (uintmax_t)bytes);
    return true;
}

static bool check_tokenizer(const struct choices *c, const struct tokenizer *tokenizer, char *error,
                            size_t error_size) {
    if (!tokenizer || !c->tokenizer || c->tokenizer == tokenizer_hash(tokenizer)) return true;
    return file_error(error, error_size,
                      "%s: found ids of another tokenizer, %016" PRIx64
                      ", wanted those of the run's tokenizer, %016" PRIx64
                      "; make it again with ./tokenize --choices and that one",
                      c->path, c->tokenizer, tokenizer_hash(tokenizer));
}

// One list of ids of example number `index`: its length, then the ids. *next moves behind it.
static bool read_ids(struct choices *c, int index, const char *what, const uint16_t **next, const uint16_t *end,
                     int id_limit, struct choice_ids *list, char *error, size_t error_size) {
    ptrdiff_t left = end - *next - 1;
    int count = left >= 0 ? **next : 0;
    if (count < 1 || count > left)
        return file_error(error, error_size,
                          "%s: example %d: found a %s of %d ids with %td numbers left in the example, wanted at least "
                          "one id and no more than are left",
                          c->path, index, what, count, left > 0 ? left : 0);
    *list = (struct choice_ids){*next + 1, count};
    *next += 1 + count;
    for (int i = 0; i < count; i++) {
        int id = list->ids[i];
        if (id >= id_limit)
            return file_error(error, error_size,
                              "%s: example %d: found id %d in its %s, wanted less than %d; use the tokenizer that the "
                              "file was made with",
                              c->path, index, id, what, id_limit);
        if (id > c->largest_id) c->largest_id = id;
    }
    return true;
}

// Example number `index`, which begins at *next; *next moves behind it.
static bool read_example(struct choices *c, int index, uint32_t longest, const uint16_t **next, const uint16_t *end,
                         int id_limit, char *error, size_t error_size) {
    const uint16_t *start = *next;
    ptrdiff_t left = end - start;
    if (left < FIELDS || start[START] != START_MARK)
        return file_error(error, error_size, "%s: example %d: found %s, wanted the mark %d that an example begins with",
                          c->path, index, left < FIELDS ? "the end of the file" : "another number", START_MARK);
    int bytes = start[BYTES];
    if (bytes < SHORTEST || bytes % 2 || bytes / 2 > left || (uint32_t)bytes > longest)
        return file_error(error, error_size,
                          "%s: example %d: found a length of %d bytes, wanted an even number from %d to %ju, what is "
                          "left of the file, and at most %u, the longest in the header",
                          c->path, index, bytes, SHORTEST, (uintmax_t)left * 2, longest);
    struct choice_example *e = &c->examples[index];
    e->label = start[LABEL];
    e->completions = start[COMPLETIONS];
    if (start[INDEX] != index)
        return file_error(error, error_size, "%s: example %d: found index %d, wanted %d", c->path, index, start[INDEX],
                          index);
    if (e->completions < CHOICES_LEAST || e->completions > CHOICES_MOST || e->label >= e->completions)
        return file_error(error, error_size,
                          "%s: example %d: found label %d and %d completions, wanted %d to %d completions and a label "
                          "below their number",
                          c->path, index, e->label, e->completions, CHOICES_LEAST, CHOICES_MOST);
    *next = start + FIELDS;
    end = start + bytes / 2;
    if (!read_ids(c, index, "context", next, end, id_limit, &e->context, error, error_size)) return false;
    for (int i = 0; i < e->completions; i++)
        if (!read_ids(c, index, "completion", next, end, id_limit, &e->completion[i], error, error_size)) return false;
    if (*next != end)
        return file_error(error, error_size,
                          "%s: example %d: found %td numbers behind its last completion, wanted none", c->path, index,
                          end - *next);
    return true;
}

static bool read_content(struct choices *c, FILE *file, uint64_t bytes, const struct tokenizer *tokenizer, int id_limit,
                         char *error, size_t error_size) {
    uint32_t header[HEADER_INTS];
    if (!read_header(file, c->path, bytes, header, error, error_size)) return false;
    c->tokenizer = header[4] | (uint64_t)header[5] << 32;
    if (!check_tokenizer(c, tokenizer, error, error_size)) return false;
    size_t numbers = (size_t)(bytes - CHOICES_HEADER) / 2;
    c->count = (int)header[2];
    c->examples = calloc((size_t)c->count, sizeof *c->examples);
    c->content = malloc(numbers * 2);
    if (!c->examples || !c->content) fail_internal(c->path, "found no memory for its %ju bytes", (uintmax_t)bytes);
    if (fread(c->content, 2, numbers, file) != numbers)
        return file_error(error, error_size, "%s: cannot read %ju bytes: %s", c->path, (uintmax_t)bytes,
                          ferror(file) ? strerror(errno) : "it became shorter");
    for (size_t i = 0; i < numbers; i++) c->content[i] = le16toh(c->content[i]);

    const uint16_t *next = c->content, *end = c->content + numbers;
    for (int i = 0; i < c->count; i++)
        if (!read_example(c, i, header[3], &next, end, id_limit, error, error_size)) return false;
    if (next != end)
        return file_error(error, error_size, "%s: found %td bytes behind the last of its %d examples, wanted none",
                          c->path, 2 * (end - next), c->count);
    return true;
}

bool choices_open(struct choices *c, const char *path, const struct tokenizer *tokenizer, int vocab, char *error,
                  size_t error_size) {
    const uint64_t most = 1ull << 30;
    *c = (struct choices){0};
    uint64_t bytes;
    if (!file_size(path, &bytes, error, error_size)) return false;
    if (bytes > most)
        return file_error(error, error_size, "%s: found %ju bytes, wanted at most %ju", path, (uintmax_t)bytes,
                          (uintmax_t)most);
    FILE *file = fopen(path, "rb");
    if (!file) return file_error(error, error_size, "%s: cannot open: %s", path, strerror(errno));
    c->path = strdup(path);
    if (!c->path) fail_internal(path, "found no memory for its name");
    int id_limit = vocab > 0 && vocab < CHOICES_ID_LIMIT ? vocab : CHOICES_ID_LIMIT;
    bool read = read_content(c, file, bytes, tokenizer, id_limit, error, error_size);
    fclose(file);
    if (!read) choices_close(c);
    return read;
}

void choices_close(struct choices *c) {
    free(c->path);
    free(c->examples);
    free(c->content);
    *c = (struct choices){0};
}

// ---- writing ----

static bool write_numbers(struct choices_writer *w, const void *numbers, size_t bytes, char *error, size_t error_size) {
    if (fwrite(numbers, 1, bytes, w->file) == bytes) return true;
    return file_error(error, error_size, "%s: cannot write %zu bytes: %s", w->temporary, bytes, strerror(errno));
}

static bool write_header(struct choices_writer *w, char *error, size_t error_size) {
    uint32_t header[HEADER_INTS] = {htole32(MAGIC),
                                    htole32(VERSION),
                                    htole32((uint32_t)w->count),
                                    htole32((uint32_t)w->longest),
                                    htole32((uint32_t)w->tokenizer),
                                    htole32((uint32_t)(w->tokenizer >> 32))};
    return write_numbers(w, header, sizeof header, error, error_size);
}

void choices_writer_abandon(struct choices_writer *w) {
    if (!w->file) return;
    fclose(w->file);
    unlink(w->temporary);
    w->file = NULL;
}

bool choices_writer_begin(struct choices_writer *w, const char *path, uint64_t tokenizer, char *error,
                          size_t error_size) {
    *w = (struct choices_writer){.tokenizer = tokenizer};
    if (strlen(path) + sizeof ".tmp" > sizeof w->path)
        return file_error(error, error_size, "%s: found a path of %zu bytes, wanted at most %zu", path, strlen(path),
                          sizeof w->path - sizeof ".tmp");
    strcpy(w->path, path);
    sprintf(w->temporary, "%s.tmp", path);
    w->file = fopen(w->temporary, "wb");
    if (!w->file) return file_error(error, error_size, "%s: cannot create: %s", w->temporary, strerror(errno));
    if (write_header(w, error, error_size)) return true; // its numbers come at the end
    choices_writer_abandon(w);
    return false;
}

// Appends the list's length and ids to example; false with the reason in error.
static bool put_ids(struct choices_writer *w, uint16_t *example, int *used, const char *what, struct choice_list list,
                    char *error, size_t error_size) {
    if (list.count < 1)
        return file_error(error, error_size, "%s: example %d: found an empty %s, wanted ids", w->path, w->count, what);
    if (list.count >= (size_t)(CHOICES_EXAMPLE_MAX / 2 - *used))
        return file_error(error, error_size,
                          "%s: example %d: found more than %d bytes, wanted at most that: the format cannot hold more",
                          w->path, w->count, CHOICES_EXAMPLE_MAX);
    example[(*used)++] = htole16((uint16_t)list.count);
    for (size_t i = 0; i < list.count; i++) {
        if (list.ids[i] < 0 || list.ids[i] >= CHOICES_ID_LIMIT)
            return file_error(error, error_size,
                              "%s: example %d: found id %d in its %s, wanted 0 to %d: the format cannot hold others",
                              w->path, w->count, list.ids[i], what, CHOICES_ID_LIMIT - 1);
        example[(*used)++] = htole16((uint16_t)list.ids[i]);
    }
    return true;
}

// Fills example with the numbers of the next one and returns how many; 0 with the reason in error.
static int make_example(struct choices_writer *w, uint16_t *example, int label, struct choice_list context,
                        const struct choice_list *completions, int count, char *error, size_t error_size) {
    int used = 0;
    if (w->count == CHOICES_EXAMPLES)
        file_error(error, error_size,
                   "%s: found more than %d examples, wanted at most that: the format cannot hold more", w->path,
                   CHOICES_EXAMPLES);
    else if (count < CHOICES_LEAST || count > CHOICES_MOST || label < 0 || label >= count)
        file_error(error, error_size,
                   "%s: example %d: found label %d and %d completions, wanted %d to %d completions and a label below "
                   "their number",
                   w->path, w->count, label, count, CHOICES_LEAST, CHOICES_MOST);
    else
        used = FIELDS;
    if (!used || !put_ids(w, example, &used, "context", context, error, error_size)) return 0;
    for (int i = 0; i < count; i++)
        if (!put_ids(w, example, &used, "completion", completions[i], error, error_size)) return 0;
    example[START] = htole16(START_MARK);
    example[BYTES] = htole16((uint16_t)(2 * used));
    example[INDEX] = htole16((uint16_t)w->count);
    example[LABEL] = htole16((uint16_t)label);
    example[COMPLETIONS] = htole16((uint16_t)count);
    return used;
}

bool choices_writer_append(struct choices_writer *w, int label, struct choice_list context,
                           const struct choice_list *completions, int count, char *error, size_t error_size) {
    uint16_t example[CHOICES_EXAMPLE_MAX / 2];
    int used = make_example(w, example, label, context, completions, count, error, error_size);
    if (!used || !write_numbers(w, example, 2 * (size_t)used, error, error_size)) {
        choices_writer_abandon(w);
        return false;
    }
    w->count++;
    if (2 * used > w->longest) w->longest = 2 * used;
    return true;
}

static bool complete_header(struct choices_writer *w, char *error, size_t error_size) {
    if (w->count < 1) return file_error(error, error_size, "%s: found no example, wanted one at least", w->path);
    if (fseek(w->file, 0, SEEK_SET) != 0)
        return file_error(error, error_size, "%s: cannot write: %s", w->temporary, strerror(errno));
    return write_header(w, error, error_size);
}

bool choices_writer_finish(struct choices_writer *w, char *error, size_t error_size) {
    if (!complete_header(w, error, error_size)) {
        choices_writer_abandon(w);
        return false;
    }
    FILE *file = w->file;
    w->file = NULL;
    return file_publish(file, w->temporary, w->path, error, error_size);
}

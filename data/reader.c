#include "data/reader.h"

#include <cjson/cJSON.h>
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "data/files.h"
#include "data/token_file.h"
#include "kernels/fail.h"

enum { READ_BYTES = 1 << 20 };

bool reader_is_standard_input(const char *name) { return strcmp(name, "-") == 0; }

static void allocate(struct reader *r, size_t capacity) {
    r->capacity = capacity;
    r->data = realloc(r->data, capacity);
    if (!r->data) fail_internal(r->name, "found no memory for %zu bytes of it", capacity);
}

void reader_open(struct reader *r, const char *name) {
    bool standard = reader_is_standard_input(name);
    *r = (struct reader){.name = standard ? "standard input" : name, .fd = STDIN_FILENO};
    if (!standard) r->fd = open(name, O_RDONLY | O_CLOEXEC);
    if (r->fd < 0) fail_user(name, "cannot be opened (%s), wanted a file to read", strerror(errno));
    allocate(r, 2 * READ_BYTES);
}

void reader_close(struct reader *r) {
    if (r->fd != STDIN_FILENO) close(r->fd); // only read from: nothing can be lost
    free(r->data);
    r->data = NULL;
}

// For READ_BYTES behind what is held, which moves to the front.
static void make_room(struct reader *r) {
    memmove(r->data, r->data + r->start, reader_held(r));
    r->end -= r->start;
    r->start = 0;
    if (r->capacity - r->end >= READ_BYTES) return;
    if (r->end >= READER_HELD_MAX)
        fail_user(r->name,
                  "found %zu bytes behind line %" PRIu64 " without a line end or another place to cut them, wanted at "
                  "most %d; break its lines",
                  r->end, r->line, READER_HELD_MAX);
    allocate(r, 2 * r->capacity);
}

// Such files would be encoded without complaint and teach nothing.
static void refuse_binary(const struct reader *r) {
    const char *kind = token_file_guess(r->data, r->end);
    bool control = false;
    for (size_t i = 0; i < r->end && i < 64; i++)
        control |= (unsigned char)r->data[i] < ' ' && !isspace((unsigned char)r->data[i]);
    if (kind && control)
        fail_user(r->name, "found %s, wanted plain text; unpack it first (as in zcat FILE | ./tokenize ... -)", kind);
}

bool reader_more(struct reader *r) {
    if (r->ended) return false;
    if (r->capacity - r->end < READ_BYTES) make_room(r);
    ssize_t got;
    do got = read(r->fd, r->data + r->end, READ_BYTES);
    while (got < 0 && errno == EINTR);
    if (got < 0 && errno == EISDIR) fail_user(r->name, "found a folder, wanted a text file");
    if (got < 0) fail_internal(r->name, "cannot be read at byte %" PRIu64 ": %s", r->bytes, strerror(errno));
    r->end += (size_t)got;
    if (r->bytes == 0 && got > 0) refuse_binary(r);
    r->bytes += (size_t)got;
    r->ended = got == 0;
    return !r->ended;
}

bool reader_line(struct reader *r, char **line, size_t *length) {
    size_t seen = 0;
    char *end;
    while (!(end = memchr(r->data + r->start + seen, '\n', reader_held(r) - seen))) {
        seen = reader_held(r);
        if (!reader_more(r)) break;
    }
    if (!end && !reader_held(r)) return false;
    *line = r->data + r->start;
    *length = end ? (size_t)(end - *line) : reader_held(r);
    r->start += *length + (end != NULL);
    r->line++;
    if (end && *length && end[-1] == '\r') --*length;
    if (r->line == 1 && *length >= 3 && memcmp(*line, "\xef\xbb\xbf", 3) == 0) { // a byte order mark is no text
        *line += 3;
        *length -= 3;
    }
    return true;
}

// ---- JSON lines ----

const char *reader_place(const struct reader *r) {
    static char place[FILE_PATH + 32];
    snprintf(place, sizeof place, "%s:%" PRIu64, r->name, r->line);
    return place;
}

static bool is_blank(const char *line, size_t length) {
    for (size_t i = 0; i < length; i++)
        if (line[i] != ' ' && line[i] != '\t' && line[i] != '\r') return false;
    return true;
}

// C strings end at a zero, so text behind one would be lost: the byte itself, or its escape \u0000.
static bool holds_zero(const char *text, size_t length) {
    for (size_t i = 0; i < length; i++) {
        if (!text[i]) return true;
        if (text[i] != '\\') continue;
        if (length - i >= 6 && memcmp(text + i, "\\u0000", 6) == 0) return true;
        i++; // the escaped character, which may be a backslash
    }
    return false;
}

struct cJSON *reader_json_line(struct reader *r) {
    char *line, error[FILE_ERROR];
    size_t length;
    do
        if (!reader_line(r, &line, &length)) return NULL;
    while (is_blank(line, length));
    const char *place = reader_place(r);
    if (holds_zero(line, length)) fail_user(place, "found a character zero, wanted text without; remove it");
    cJSON *object = file_parse_json(line, length, place, error, sizeof error);
    if (!object) fail_user(place, "%s", error + strlen(place) + 2); // without the place that it begins with
    return object;
}

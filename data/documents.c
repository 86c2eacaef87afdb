#include "data/documents.h"

#include <cjson/cJSON.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/fail.h"

enum { BATCH_BYTES = 16 << 20, BATCH_PIECES = 8192 }; // full at either
enum { PIECE_BYTES = 1 << 20 };                       // of a file that is one document, at least

void documents_open(struct documents *d) {
    *d = (struct documents){.pieces = calloc(BATCH_PIECES, sizeof *d->pieces)};
    if (!d->pieces) fail_internal("documents", "found no memory for %d of them", BATCH_PIECES);
}

void documents_close(struct documents *d) {
    for (int i = 0; i < BATCH_PIECES; i++) free(d->pieces[i].list.ids);
    free(d->pieces);
    free(d->text);
    *d = (struct documents){0};
}

// ---- a long document is cut where its ids do not change ----

// Whether the text around a cut has the same ids in two pieces as in one. The window begins and ends in the middle of
// words, but on both sides of the comparison alike.
static bool cut_is_free(const struct tokenizer *t, const char *text, size_t left, size_t right) {
    struct token_list whole = {0}, parts = {0};
    tokenizer_encode(t, text, left + right, false, &whole);
    tokenizer_encode(t, text, left, false, &parts);
    tokenizer_encode(t, text + left, right, false, &parts);
    bool same = whole.count == parts.count && memcmp(whole.ids, parts.ids, sizeof *whole.ids * whole.count) == 0;
    free(whole.ids);
    free(parts.ids);
    return same;
}

// The patterns of GPT-2, Llama 3, DeepSeek and their like end a word behind a letter or digit where white space
// follows, and look at nothing before a word to find its end. So a cut there leaves all words, and with them all ids, as
// they are. Behind a line end it would not do: GPT-2 splits "  \nx" into "  ", "\n", "x", but makes one word of a last
// "  \n". Nor in front of any line end: others join "." and the line ends behind it. Here every byte of a character
// beyond ASCII passes for a letter, and patterns may differ; therefore the tokenizer itself is asked about the text
// around the cut.
size_t documents_find_cut(const struct tokenizer *t, const char *text, size_t bytes) {
    enum { WINDOW = 512, TRIES = 100 };
    int tries = 0;
    for (size_t cut = bytes > WINDOW ? bytes - WINDOW : 0; cut > 0 && tries < TRIES; cut--) {
        unsigned char before = (unsigned char)text[cut - 1], after = (unsigned char)text[cut];
        bool letter =
            (before >= '0' && before <= '9') || ((before | 32) >= 'a' && (before | 32) <= 'z') || before >= 128;
        if (!letter || !(after == ' ' || after == '\n' || after == '\r')) continue;
        size_t left = cut < WINDOW ? cut : WINDOW;
        if (cut_is_free(t, text + cut - left, left, WINDOW)) return cut;
        tries++;
    }
    return 0;
}

// ---- filling ----

static void add(struct documents *d, const char *text, size_t bytes, bool begins) {
    if (d->capacity - d->used < bytes) {
        d->capacity = 2 * d->capacity + bytes;
        d->text = realloc(d->text, d->capacity);
        if (!d->text) fail_internal("documents", "found no memory for %zu bytes of text", d->capacity);
    }
    memcpy(d->text + d->used, text, bytes);
    struct document_piece *p = &d->pieces[d->count++];
    p->start = d->used;
    p->bytes = bytes;
    p->begins = begins;
    d->used += bytes;
}

static bool read_file_piece(struct documents *d, struct reader *r, const struct tokenizer *t) {
    bool begins = r->bytes == 0;
    size_t cut = 0;
    for (size_t wanted = PIECE_BYTES; !cut; wanted = 2 * reader_held(r)) {
        while (reader_held(r) < wanted && reader_more(r)) continue;
        if (!reader_held(r)) return false;
        bool anywhere = r->ended || tokenizer_is_bytes(t);
        cut = anywhere ? reader_held(r) : documents_find_cut(t, r->data + r->start, reader_held(r));
    }
    add(d, r->data + r->start, cut, begins);
    r->start += cut;
    return true;
}

static bool read_line(struct documents *d, struct reader *r) {
    char *line;
    size_t length;
    do
        if (!reader_line(r, &line, &length)) return false;
    while (!length);
    add(d, line, length, true);
    return true;
}

static bool read_json_line(struct documents *d, struct reader *r) {
    cJSON *object = reader_json_line(r);
    if (!object) return false;
    const char *text = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(object, "text"));
    if (!text) fail_user(reader_place(r), "found no string member \"text\", wanted one");
    if (*text) add(d, text, strlen(text), true);
    cJSON_Delete(object);
    return true;
}

bool documents_read(struct documents *d, struct reader *r, const struct tokenizer *t, enum document_kind kind) {
    if (kind == DOCUMENTS_FILE) return read_file_piece(d, r, t);
    return kind == DOCUMENTS_LINES ? read_line(d, r) : read_json_line(d, r);
}

bool documents_full(const struct documents *d) { return d->used >= BATCH_BYTES || d->count == BATCH_PIECES; }

// ---- encoding ----

void documents_encode(struct documents *d, const struct tokenizer *t) {
#pragma omp parallel for schedule(guided)
    for (int i = 0; i < d->count; i++) {
        struct document_piece *p = &d->pieces[i];
        p->list.count = 0;
        tokenizer_encode(t, d->text + p->start, p->bytes, false, &p->list);
    }
}

void documents_clear(struct documents *d) {
    d->used = 0;
    d->count = 0;
}

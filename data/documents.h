// Documents on their way from text to ids: a batch is filled with pieces of text, encoded by all threads, and its ids
// are taken out in the order of the text.
#ifndef MOK_DATA_DOCUMENTS_H
#define MOK_DATA_DOCUMENTS_H

#include "data/reader.h"
#include "data/tokenizer.h"

// What one document is: a whole file, a line of it (empty lines are none), or the "text" of a line's JSON object.
enum document_kind { DOCUMENTS_FILE, DOCUMENTS_LINES, DOCUMENTS_JSONL };

struct document_piece {
    size_t start, bytes; // in the batch's text
    bool begins;         // the first piece of its document
    struct token_list list;
};

struct documents {
    char *text;
    size_t used, capacity;
    struct document_piece *pieces; // their lists are used again
    int count;
};

void documents_open(struct documents *d);
void documents_close(struct documents *d);

// Adds the next piece that the reader gives; false at its end. A file that is one document comes in several pieces, cut
// where that does not change ids.
bool documents_read(struct documents *d, struct reader *r, const struct tokenizer *t, enum document_kind kind);

// Whether it is time to encode and clear.
bool documents_full(const struct documents *d);

// Fills the list of every piece.
void documents_encode(struct documents *d, const struct tokenizer *t);
void documents_clear(struct documents *d);

// The last place well inside text [bytes] where the ids of the two parts, one behind the other, are those of the whole;
// 0 if none was found.
size_t documents_find_cut(const struct tokenizer *t, const char *text, size_t bytes);

#endif

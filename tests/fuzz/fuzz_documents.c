// data/reader.c and data/documents.c: the text files of ./tokenize. The first byte of the input chooses the vocabulary
// and what one document is: the file, a line, or a line of JSON.
#include "data/documents.h"

#include "tests/fuzz/vocabularies.h"

// The ids of a piece are those of its text.
static void check_piece(const struct documents *d, const struct document_piece *p, const struct tokenizer *t) {
    size_t room = tokenizer_decode_room(t, p->list.ids, p->list.count);
    char *out = malloc(room + 1);
    fuzz_require(p->start + p->bytes <= d->used && room == p->bytes);
    fuzz_require(tokenizer_decode(t, out, room, p->list.ids, p->list.count) == room);
    fuzz_require(memcmp(out, d->text + p->start, room) == 0);
    free(out);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < 1) return -1;
    const struct tokenizer *t = fuzz_vocabulary(data[0] % FUZZ_VOCABULARIES);
    enum document_kind kind = data[0] / FUZZ_VOCABULARIES % 3;
    const char *path = fuzz_write("text", data + 1, size - 1);
    struct documents d;
    struct reader r;

    fuzz_arm();
    if (setjmp(fuzz_stop) == 0) {
        size_t documents = 0;
        documents_open(&d);
        reader_open(&r, path);
        while (!documents_full(&d) && documents_read(&d, &r, t, kind)) continue;
        documents_encode(&d, t);
        for (int i = 0; i < d.count; i++) {
            documents += d.pieces[i].begins;
            check_piece(&d, &d.pieces[i], t);
        }
        if (kind == DOCUMENTS_FILE) fuzz_require(documents == (size > 1) && d.used == size - 1);
        reader_close(&r);
        documents_close(&d);
    }
    fuzz_disarm();
    return 0;
}

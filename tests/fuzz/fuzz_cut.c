// data/documents.c: a long document is cut where its ids stay the same.
//
// The first byte of an input chooses the vocabulary. Its two parts are repeated until each is longer than what
// documents_find_cut looks at on either side.
#include "data/documents.h"

#include "tests/fuzz/vocabularies.h"

enum { LONG = 700 };

static size_t repeat(char *text, struct fuzz_part part) {
    size_t length = 0;
    while (length < LONG) {
        memcpy(text + length, part.data, part.size);
        length += part.size;
    }
    return length;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct fuzz_part parts[2] = {0};
    if (size < 3 || fuzz_cut(data + 1, size - 1, parts, 2) < 2 || !parts[0].size || !parts[1].size) return -1;
    const struct tokenizer *t = fuzz_vocabulary(data[0] % FUZZ_VOCABULARIES);
    char *text = malloc(2 * (LONG + size));
    size_t bytes = repeat(text, parts[0]);
    bytes += repeat(text + bytes, parts[1]);

    size_t cut = documents_find_cut(t, text, bytes);
    if (cut) {
        struct token_list whole = {0}, halves = {0};
        fuzz_require(cut < bytes);
        tokenizer_encode(t, text, bytes, false, &whole);
        tokenizer_encode(t, text, cut, false, &halves);
        tokenizer_encode(t, text + cut, bytes - cut, false, &halves);
        fuzz_require(whole.count == halves.count);
        fuzz_require(memcmp(whole.ids, halves.ids, whole.count * sizeof *whole.ids) == 0);
        free(whole.ids);
        free(halves.ids);
    }
    free(text);
    return 0;
}

// data/bpe.c and data/pretokenizer.c: any bytes through real vocabularies and back. The first byte of the input chooses
// the vocabulary, and whether the texts of special tokens count.
#include "tests/fuzz/vocabularies.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < 1) return -1;
    const struct tokenizer *t = fuzz_vocabulary(data[0] % FUZZ_VOCABULARIES);
    bool special = data[0] / FUZZ_VOCABULARIES % 2, ended = false;
    const char *text = (const char *)data + 1;
    struct token_list list = {0};
    tokenizer_encode(t, text, --size, special, &list);

    size_t sum = 0;
    for (size_t i = 0; i < list.count; i++) {
        fuzz_require(list.ids[i] >= 0 && list.ids[i] < tokenizer_vocab(t));
        ended = ended || list.ids[i] == tokenizer_end_of_text(t);
        sum += tokenizer_token_bytes(t, list.ids[i]);
    }
    fuzz_require(special ? sum <= size : sum == size && !ended);
    if (!ended) { // else a newline stands for it
        char *out = malloc(size + 1);
        fuzz_require(tokenizer_decode_room(t, list.ids, list.count) == size);
        fuzz_require(tokenizer_decode(t, out, size + 1, list.ids, list.count) == size);
        fuzz_require(memcmp(out, text, size) == 0);
        free(out);
    }
    free(list.ids);
    return 0;
}

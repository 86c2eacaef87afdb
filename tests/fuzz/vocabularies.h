// The tokenizers that texts are encoded with: bytes, and the small vocabularies that other tests compare with Hugging
// Face's. A target that uses them is started in the root of the tree.
#ifndef MOK_TESTS_FUZZ_VOCABULARIES_H
#define MOK_TESTS_FUZZ_VOCABULARIES_H

#include "data/tokenizer.h"
#include "tests/fuzz/fuzz.h"

enum { FUZZ_VOCABULARIES = 4 };

// Opened when it is first asked for, and never closed. Not to be called between fuzz_arm and fuzz_disarm.
static inline const struct tokenizer *fuzz_vocabulary(int which) {
    static const struct tokenizer *all[FUZZ_VOCABULARIES];
    static const char *const names[FUZZ_VOCABULARIES] = {NULL, "gpt2", "llama3", "deepseek"};
    if (!all[which]) {
        char path[64], error[FILE_ERROR] = "";
        snprintf(path, sizeof path, "tests/reference/tokenizer_%s.json", which ? names[which] : "");
        all[which] = which ? tokenizer_open(path, error, sizeof error) : tokenizer_open_bytes();
        if (!all[which]) fprintf(stderr, "%s; start this in the root of the tree\n", error);
        fuzz_require(all[which]);
    }
    return all[which];
}

#endif

// For tests/reference_tokenizers.py: writes the ids of a file to standard output as int32, and the seconds that took to
// standard error.
//
//     tokenize_ids TOKENIZER.json FILE [special]
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/files.h"
#include "data/tokenizer.h"
#include "kernels/clock.h"
#include "kernels/fail.h"

int main(int argc, char **argv) {
    char error[FILE_ERROR];
    if (argc < 3) fail_user("tokenize_ids", "found %d arguments, wanted a tokenizer and a file", argc - 1);
    struct tokenizer *t = tokenizer_open(argv[1], error, sizeof error);
    size_t bytes;
    char *text = t ? file_read(argv[2], &bytes, error, sizeof error) : NULL;
    if (!text) fail_user("tokenize_ids", "%s", error);
    struct token_list ids = {0};
    double start = clock_seconds();
    tokenizer_encode(t, text, bytes, argc > 3 && strcmp(argv[3], "special") == 0, &ids);
    fprintf(stderr, "%.6f\n", clock_seconds() - start);
    if (fwrite(ids.ids, sizeof *ids.ids, ids.count, stdout) != ids.count || fflush(stdout) != 0)
        fail_internal("tokenize_ids", "cannot write %zu ids", ids.count);
    free(ids.ids);
    free(text);
    tokenizer_close(t);
    return 0;
}

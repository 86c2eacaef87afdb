// data/tokenizer.c and what it reads with: a tokenizer.json, and a text that it encodes if it opens.
//
// Parts of an input: tokenizer.json, in which '@' stands for the 256 bytes of a vocabulary with ids 0 to 255, then
// tokenizer_config.json (empty: there is none), then the text.
#include "data/tokenizer.h"

#include <sys/stat.h>

#include "tests/fuzz/fuzz.h"

enum { TEXT = 256 };

// The members of "vocab": each byte under the printable character that GPT-2 gave it.
static void print_bytes(FILE *file) {
    int moved = 0;
    for (int byte = 0; byte < 256; byte++) {
        bool printable =
            (byte >= '!' && byte <= '~') || (byte >= 0xa1 && byte <= 0xac) || (byte >= 0xae && byte <= 0xff);
        fprintf(file, "%s\"\\u%04x\":%d", byte ? "," : "", printable ? byte : 0x100 + moved++, byte);
    }
}

static void write_tokenizer(struct fuzz_part json) {
    static char *bytes;
    static size_t bytes_size;
    if (!bytes) {
        FILE *all = open_memstream(&bytes, &bytes_size);
        print_bytes(all);
        fclose(all);
    }
    char *text = NULL;
    size_t size;
    FILE *file = open_memstream(&text, &size);
    for (size_t i = 0; i < json.size; i++)
        if (json.data[i] == '@')
            fwrite(bytes, 1, bytes_size, file);
        else
            fputc(json.data[i], file);
    fclose(file);
    fuzz_write("tokenizer.json", text, size);
    free(text);
}

// What must hold whatever the vocabulary is; a pattern may drop text, so that text need not come back.
static void check_encode(const struct tokenizer *t, const char *text, size_t bytes, bool special) {
    struct token_list list = {0};
    tokenizer_encode(t, text, bytes, special, &list);
    size_t room = tokenizer_decode_room(t, list.ids, list.count), sum = 0;
    for (size_t i = 0; i < list.count; i++) {
        fuzz_require(list.ids[i] >= 0 && list.ids[i] < tokenizer_vocab(t));
        if (list.ids[i] != tokenizer_end_of_text(t)) sum += tokenizer_token_bytes(t, list.ids[i]);
    }
    char *out = malloc(room + 1);
    fuzz_require(sum <= room && tokenizer_decode(t, out, room + 1, list.ids, list.count) == room);
    fuzz_require(tokenizer_decode(t, out, room / 2, list.ids, list.count) == room / 2);
    free(out);
    free(list.ids);
}

// The files that it writes open as the same tokenizer.
static void check_write(const struct tokenizer *t) {
    char error[FILE_ERROR] = "";
    const char *folder = fuzz_path("again");
    mkdir(folder, 0777);
    fuzz_require(tokenizer_write(t, folder, error, sizeof error));
    struct tokenizer *again = tokenizer_open(folder, error, sizeof error);
    fuzz_require(again && tokenizer_hash(again) == tokenizer_hash(t));
    fuzz_require(tokenizer_vocab(again) == tokenizer_vocab(t));
    fuzz_require(tokenizer_is_bytes(again) == tokenizer_is_bytes(t));
    fuzz_require(tokenizer_end_of_text(again) == tokenizer_end_of_text(t));
    tokenizer_close(again);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct fuzz_part parts[3] = {0};
    char error[FILE_ERROR] = "";
    fuzz_cut(data, size, parts, 3);
    write_tokenizer(parts[0]);
    if (parts[1].size)
        fuzz_write("tokenizer_config.json", parts[1].data, parts[1].size);
    else
        unlink(fuzz_path("tokenizer_config.json"));

    struct tokenizer *t = tokenizer_open(fuzz_folder, error, sizeof error);
    if (!t) {
        fuzz_check_error(error, sizeof error, fuzz_folder);
        return 0;
    }
    fuzz_require(tokenizer_end_of_text(t) < tokenizer_vocab(t));
    size_t bytes = parts[2].size < TEXT ? parts[2].size : TEXT;
    const char *text = bytes ? (const char *)parts[2].data : "";
    for (int special = 0; special < 2; special++) check_encode(t, text, bytes, special);
    check_write(t);
    tokenizer_close(t);
    return 0;
}

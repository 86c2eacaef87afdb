// data/choices.c: a multiple-choice file.
//
// An input is a byte of switches, the six ints of the header that are used, and the examples. FIX_LENGTHS puts in the
// numbers that mutations would hardly ever keep right: every mark begins an example, whose bytes and index follow from
// where the next one is, and the header's two numbers from them all.
#include "data/choices.h"

#include "tests/fuzz/fuzz.h"

enum { FIX_LENGTHS = 1, INTS = 24, MARK = 65535 };

static void fix_lengths(uint32_t *header, uint16_t *body, size_t numbers) {
    header[2] = header[3] = 0;
    for (size_t i = 0, end; i < numbers; i = end) {
        for (end = i + 1; end < numbers && body[end] != MARK;) end++;
        uint32_t bytes = (uint32_t)(2 * (end - i));
        if (end - i > 1) body[i + 1] = (uint16_t)bytes;
        if (end - i > 2) body[i + 2] = (uint16_t)header[2];
        if (bytes > header[3]) header[3] = bytes;
        header[2]++;
    }
}

static void append_again(struct choices_writer *w, const struct choice_example *e) {
    char error[FILE_ERROR] = "";
    struct choice_list lists[1 + CHOICES_MOST];
    int32_t *copies[1 + CHOICES_MOST];
    for (int i = 0; i <= e->completions; i++) {
        const struct choice_ids *from = i ? &e->completion[i - 1] : &e->context;
        copies[i] = malloc((size_t)from->count * sizeof *copies[i]);
        for (int j = 0; j < from->count; j++) copies[i][j] = from->ids[j];
        lists[i] = (struct choice_list){copies[i], (size_t)from->count};
    }
    fuzz_require(choices_writer_append(w, e->label, lists[0], lists + 1, e->completions, error, sizeof error));
    for (int i = 0; i <= e->completions; i++) free(copies[i]);
}

// The writer makes the same examples of what was read.
static void check_writer(const struct choices *c, const uint16_t *body, size_t bytes) {
    char error[FILE_ERROR] = "";
    struct choices_writer w;
    const char *path = fuzz_path("again.bin");
    fuzz_require(choices_writer_begin(&w, path, c->tokenizer, error, sizeof error));
    for (int i = 0; i < c->count; i++) {
        fuzz_require(c->examples[i].label < c->examples[i].completions);
        append_again(&w, &c->examples[i]);
    }
    fuzz_require(choices_writer_finish(&w, error, sizeof error));

    int file = open(path, O_RDONLY | O_CLOEXEC);
    char *again = malloc(CHOICES_HEADER + bytes + 1);
    fuzz_require(read(file, again, CHOICES_HEADER + bytes + 1) == (ssize_t)(CHOICES_HEADER + bytes));
    fuzz_require(memcmp(again + 16, &c->tokenizer, 8) == 0); // little-endian, as every machine this runs on
    fuzz_require(memcmp(again + CHOICES_HEADER, body, bytes) == 0);
    free(again);
    close(file);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < 1 + INTS) return -1;
    uint32_t header[CHOICES_HEADER / 4] = {0};
    size_t bytes = size - 1 - INTS;
    uint16_t *body = malloc(bytes + 1);
    memcpy(header, data + 1, INTS);
    memcpy(body, data + 1 + INTS, bytes);
    if (data[0] & FIX_LENGTHS) fix_lengths(header, body, bytes / 2);
    const char *path = fuzz_write_two("choices.bin", header, sizeof header, body, bytes);

    struct choices c;
    char error[FILE_ERROR] = "";
    bool is = choices_is(path);
    if (choices_open(&c, path, NULL, data[0] >> 1, error, sizeof error)) {
        fuzz_require(is && (data[0] < 2 || c.largest_id < data[0] >> 1));
        check_writer(&c, body, bytes);
        choices_close(&c);
    } else {
        fuzz_check_error(error, sizeof error, path);
    }
    free(body);
    return 0;
}

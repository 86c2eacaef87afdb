// Multiple-choice files: llm.c's bytes, every number in them checked, and files that are whole or not there.
#include "tests/folder.h"

#include "data/choices.h"
#include "data/tokenizer.h"

#include <signal.h>
#include <sys/resource.h>

#define TEST(function) cmocka_unit_test_setup_teardown(function, make_root, remove_root)

static char error[FILE_ERROR];

static void expect(bool ok) {
    if (!ok) fail_msg("%s", error);
}

// ---- files ----

// Two examples as llm.c's script would write them, number by number. Their places: the first begins at 0 and is 15
// numbers long, the second has three completions.
static const uint16_t two[] = {
    65535, 30, 0,     1,  2,       // 15 numbers, example 0, label 1, two completions
    3,     11, 12,    13,          // context
    2,     21, 22,                 // completion 0
    2,     31, 65534,              // completion 1
    65535, 26, 1,     2,  3, 1, 7, // 13 numbers, example 1, label 2, three completions of one id
    1,     1,  1,     2,  1, 3,
};
enum { NUMBERS = sizeof two / sizeof *two, FIRST_NUMBERS = 15 };

static void write_choices(const char *name, uint32_t examples, uint32_t longest, const uint16_t *numbers,
                          size_t bytes) {
    char content[CHOICES_HEADER + 2 * NUMBERS + 2] = {0};
    uint32_t header[4] = {20240522, 1, examples, longest};
    memcpy(content, header, sizeof header);
    memcpy(content + CHOICES_HEADER, numbers, bytes);
    write_file(name, content, CHOICES_HEADER + bytes);
}

static void assert_choices_refused(const char *name, const char *reason) {
    struct choices c;
    error[0] = 0;
    if (choices_open(&c, at(name), NULL, 0, error, sizeof error)) fail_msg("%s was read, wanted: %s", name, reason);
    assert_int_equal(strncmp(error, at(name), strlen(at(name))), 0); // the line begins with the path
    assert_contains(error, reason);
    assert_null(strchr(error, '\n'));
}

static void file_as_llmc_writes_it_is_read(void **state) {
    (void)state;
    write_choices("two.bin", 2, 30, two, sizeof two);
    assert_true(choices_is(at("two.bin")));
    struct choices c;
    expect(choices_open(&c, at("two.bin"), NULL, 0, error, sizeof error));
    assert_int_equal(c.count, 2);
    assert_int_equal(c.largest_id, 65534);
    const struct choice_example *e = &c.examples[0];
    assert_int_equal(e->label, 1);
    assert_int_equal(e->completions, 2);
    assert_int_equal(e->context.count, 3);
    assert_memory_equal(e->context.ids, two + 6, 3 * 2);
    assert_int_equal(e->completion[1].count, 2);
    assert_memory_equal(e->completion[1].ids, two + 13, 2 * 2);
    e = &c.examples[1];
    assert_int_equal(e->label, 2);
    assert_int_equal(e->completions, 3);
    assert_int_equal(e->completion[2].count, 1);
    assert_int_equal(e->completion[2].ids[0], 3);
    choices_close(&c);
}

static void write_two(struct choices_writer *w) {
    const int32_t context[] = {11, 12, 13}, first[] = {21, 22}, second[] = {31, 65534}, ids[] = {7, 1, 2, 3};
    struct choice_list of_first[] = {{first, 2}, {second, 2}};
    struct choice_list of_second[] = {{ids + 1, 1}, {ids + 2, 1}, {ids + 3, 1}};
    expect(choices_writer_begin(w, at("out.bin"), 0, error, sizeof error));
    expect(choices_writer_append(w, 1, (struct choice_list){context, 3}, of_first, 2, error, sizeof error));
    expect(choices_writer_append(w, 2, (struct choice_list){ids, 1}, of_second, 3, error, sizeof error));
}

static void writer_gives_the_same_bytes(void **state) {
    (void)state;
    write_choices("two.bin", 2, 30, two, sizeof two);
    struct choices_writer w;
    write_two(&w);
    assert_false(exists("out.bin")); // not before it is whole
    expect(choices_writer_finish(&w, error, sizeof error));
    assert_false(exists("out.bin.tmp"));
    size_t bytes, wanted_bytes;
    char *found = read_bytes(at("out.bin"), &bytes), *wanted = read_bytes(at("two.bin"), &wanted_bytes);
    assert_int_equal(bytes, wanted_bytes);
    assert_memory_equal(found, wanted, bytes);
    free(found);
    free(wanted);
}

static void tokenizer_in_the_header_must_be_the_run_s(void **state) {
    (void)state;
    struct tokenizer *t = tokenizer_open_bytes();
    const int32_t one = 1;
    const struct choice_list list = {&one, 1}, both[] = {list, list};
    const uint64_t hashes[] = {tokenizer_hash(t), tokenizer_hash(t) ^ 1, tokenizer_hash(t) ^ 1ull << 63, 0};
    for (int i = 0; i < 4; i++) {
        struct choices_writer w;
        struct choices c;
        expect(choices_writer_begin(&w, at("out.bin"), hashes[i], error, sizeof error));
        expect(choices_writer_append(&w, 0, list, both, 2, error, sizeof error));
        expect(choices_writer_finish(&w, error, sizeof error));
        expect(choices_open(&c, at("out.bin"), NULL, 0, error, sizeof error)); // nobody knows
        assert_true(c.tokenizer == hashes[i]);
        choices_close(&c);
        bool foreign = i == 1 || i == 2;
        assert_int_equal(choices_open(&c, at("out.bin"), t, 0, error, sizeof error), !foreign);
        if (!foreign) {
            choices_close(&c);
            continue;
        }
        assert_int_equal(strncmp(error, at("out.bin"), strlen(at("out.bin"))), 0);
        assert_contains(error, "found ids of another tokenizer");
        assert_contains(error, "./tokenize --choices");
    }
    size_t bytes;
    char *content = read_bytes(at("out.bin"), &bytes);
    for (int i = 16; i < CHOICES_HEADER; i++) assert_int_equal(content[i], 0); // as llm.c writes it
    free(content);
    tokenizer_close(t);
}

// ---- the reader trusts nothing ----

// (A file shorter than its header says: vmlx-swift pull 217.)
static void file_cut_anywhere_is_refused(void **state) {
    (void)state;
    write_choices("two.bin", 2, 30, two, sizeof two);
    for (off_t bytes = CHOICES_HEADER + sizeof two - 1; bytes >= CHOICES_HEADER - 4; bytes--) {
        assert_int_equal(truncate(at("two.bin"), bytes), 0);
        assert_choices_refused("two.bin", "wanted");
    }
    assert_int_equal(truncate(at("two.bin"), 0), 0);
    assert_choices_refused("two.bin", "found 0 bytes");
    assert_false(choices_is(at("two.bin")));
}

static void header_that_disagrees_with_the_file_is_refused(void **state) {
    (void)state;
    write_choices("f.bin", 1, 30, two, sizeof two);
    assert_choices_refused("f.bin", "found 26 bytes behind the last of its 1 examples");
    write_choices("f.bin", 3, 30, two, sizeof two);
    assert_choices_refused("f.bin", "found 3 examples in its header and 56 bytes behind it");
    write_choices("f.bin", 0, 30, two, sizeof two);
    assert_choices_refused("f.bin", "found 0 examples");
    write_choices("f.bin", UINT32_MAX, 30, two, sizeof two);
    assert_choices_refused("f.bin", "found 4294967295 examples");
    write_choices("f.bin", 2, 28, two, sizeof two);
    assert_choices_refused("f.bin", "example 0: found a length of 30 bytes");
    assert_contains(error, "at most 28");
    write_choices("f.bin", 2, UINT32_MAX, two, sizeof two);
    struct choices c;
    expect(choices_open(&c, at("f.bin"), NULL, 0, error, sizeof error)); // a bound that is too high does no harm
    choices_close(&c);
}

// (A text file, a folder, another kind of llm.c's files: llama.cpp issue 662.)
static void other_files_are_refused(void **state) {
    (void)state;
    char text[2048];
    memset(text, 'x', sizeof text);
    write_file("text", text, sizeof text);
    assert_choices_refused("text", "found magic 0x78787878");
    uint32_t shard[512] = {20240520, 1, 512};
    write_file("shard.bin", shard, sizeof shard);
    assert_choices_refused("shard.bin", "found magic 0x0134d888 and version 1, wanted 0x0134d88a and 1");
    shard[0] = 20240522, shard[1] = 2;
    write_file("later.bin", shard, sizeof shard);
    assert_choices_refused("later.bin", "version 2");
    assert_choices_refused(".", "found a folder");
    assert_choices_refused("missing", "No such file");
    assert_false(choices_is(at("text")));
    assert_false(choices_is(root));
    assert_false(choices_is(at("missing")));
}

static void assert_number_refused(int place, uint16_t value, const char *reason) {
    uint16_t numbers[NUMBERS];
    memcpy(numbers, two, sizeof two);
    numbers[place] = value;
    write_choices("n.bin", 2, 30, numbers, sizeof numbers);
    assert_choices_refused("n.bin", reason);
}

static void every_number_of_an_example_is_checked(void **state) {
    (void)state;
    assert_number_refused(0, 65534, "example 0: found another number, wanted the mark 65535");
    assert_number_refused(1, 0, "example 0: found a length of 0 bytes");
    assert_number_refused(1, 31, "example 0: found a length of 31 bytes");
    assert_number_refused(1, 28, "example 0: found a completion of 2 ids with 1 numbers left");
    assert_number_refused(2, 1, "example 0: found index 1, wanted 0");
    assert_number_refused(3, 2, "example 0: found label 2 and 2 completions");
    assert_number_refused(4, 1, "found label 1 and 1 completions");
    assert_number_refused(4, 17, "and 17 completions, wanted 2 to 16");
    assert_number_refused(5, 0, "example 0: found a context of 0 ids");
    assert_number_refused(5, 65535, "example 0: found a context of 65535 ids with 9 numbers left");
    assert_number_refused(7, 65535, "example 0: found id 65535 in its context, wanted less than 65535");
    assert_number_refused(12, 1, "example 0: found 1 numbers behind its last completion");
    assert_number_refused(12, 3, "example 0: found a completion of 3 ids with 2 numbers left");
    assert_number_refused(FIRST_NUMBERS + 1, 30, "example 1: found a length of 30 bytes");
    assert_number_refused(FIRST_NUMBERS + 2, 0, "example 1: found index 0, wanted 1");
    assert_number_refused(NUMBERS - 2, 0, "example 1: found a completion of 0 ids with 1 numbers left");
}

// Any number in any place: refused, or every list lies inside the file (the sanitizers watch the reads).
static void any_number_anywhere_does_no_harm(void **state) {
    (void)state;
    static const uint16_t values[] = {0, 1, 2, 3, 4, 13, 14, 15, 16, 17, 28, 30, 32, 255, 32767, 32768, 65534, 65535};
    unsigned sum = 0;
    for (int place = 0; place < NUMBERS; place++)
        for (size_t v = 0; v < sizeof values / sizeof *values; v++) {
            uint16_t numbers[NUMBERS];
            memcpy(numbers, two, sizeof two);
            numbers[place] = values[v];
            write_choices("n.bin", 2, 30, numbers, sizeof numbers);
            struct choices c;
            if (!choices_open(&c, at("n.bin"), NULL, 0, error, sizeof error)) continue;
            for (int i = 0; i < c.count; i++)
                for (int k = 0; k < c.examples[i].completions; k++) {
                    struct choice_ids list = c.examples[i].completion[k];
                    assert_true(list.ids > c.content && list.ids + list.count <= c.content + NUMBERS);
                    sum += list.ids[list.count - 1];
                }
            choices_close(&c);
        }
    assert_true(sum > 0);
}

// (Ids at the vocabulary or above it: torchtitan pull 1495.)
static void ids_outside_the_vocabulary_are_refused(void **state) {
    (void)state;
    write_choices("two.bin", 2, 30, two, sizeof two);
    struct choices c;
    assert_false(choices_open(&c, at("two.bin"), NULL, 65534, error, sizeof error));
    assert_contains(error, "example 0: found id 65534 in its completion, wanted less than 65534");
    assert_false(choices_open(&c, at("two.bin"), NULL, 13, error, sizeof error));
    assert_contains(error, "example 0: found id 13 in its context, wanted less than 13");
    expect(choices_open(&c, at("two.bin"), NULL, 128256, error, sizeof error));
    choices_close(&c);
}

static void file_above_the_bound_is_refused_unread(void **state) {
    (void)state;
    write_choices("two.bin", 2, 30, two, sizeof two);
    assert_int_equal(truncate(at("two.bin"), (1ll << 30) + 2), 0); // sparse
    assert_choices_refused("two.bin", "found 1073741826 bytes, wanted at most 1073741824");
}

// ---- the writer ----

static int32_t many[CHOICES_EXAMPLE_MAX / 2];

static void assert_append_refused(int label, struct choice_list context, const struct choice_list *completions,
                                  int count, const char *reason) {
    struct choices_writer w;
    expect(choices_writer_begin(&w, at("out.bin"), 0, error, sizeof error));
    assert_false(choices_writer_append(&w, label, context, completions, count, error, sizeof error));
    assert_contains(error, reason);
    assert_false(exists("out.bin.tmp") || exists("out.bin"));
    choices_writer_abandon(&w); // harmless
}

static void writer_refuses_what_the_format_cannot_hold(void **state) {
    (void)state;
    const int32_t good[] = {1, 2}, mark[] = {1, 65535}, negative[] = {-1};
    struct choice_list one = {good, 1}, both[CHOICES_MOST + 1] = {{good, 1}, {good, 2}};
    assert_append_refused(2, one, both, 2, "example 0: found label 2 and 2 completions");
    assert_append_refused(-1, one, both, 2, "found label -1");
    assert_append_refused(0, one, both, 1, "and 1 completions, wanted 2 to 16");
    assert_append_refused(0, one, both, CHOICES_MOST + 1, "and 17 completions");
    assert_append_refused(0, (struct choice_list){good, 0}, both, 2, "found an empty context");
    both[1] = (struct choice_list){good, 0};
    assert_append_refused(0, one, both, 2, "found an empty completion");
    both[1] = (struct choice_list){mark, 2};
    assert_append_refused(0, one, both, 2, "found id 65535 in its completion, wanted 0 to 65534");
    both[1] = (struct choice_list){negative, 1};
    assert_append_refused(0, one, both, 2, "found id -1 in its completion");
}

// 5 fields, three lengths, and ids up to 65534 bytes. One id more does not fit, wherever it is.
static void longest_example_fits_and_one_id_more_is_refused(void **state) {
    (void)state;
    const int32_t good[] = {1};
    size_t room = CHOICES_EXAMPLE_MAX / 2 - 5 - 3;
    struct choice_list one = {good, 1}, both[] = {{good, 1}, {many, room - 1}};
    assert_append_refused(0, one, both, 2, "found more than 65534 bytes");
    assert_append_refused(0, (struct choice_list){many, room + 2}, both, 2,
                          "found more than 65534 bytes"); // no more room
    assert_append_refused(0, (struct choice_list){many, room + 3}, both, 2, "found more than 65534 bytes");
    assert_append_refused(0, (struct choice_list){many, SIZE_MAX}, both, 2, "found more than 65534 bytes");
    both[1].count = room - 2;
    struct choices_writer w;
    expect(choices_writer_begin(&w, at("out.bin"), 0, error, sizeof error));
    expect(choices_writer_append(&w, 0, one, both, 2, error, sizeof error));
    expect(choices_writer_finish(&w, error, sizeof error));
    struct choices c;
    expect(choices_open(&c, at("out.bin"), NULL, 0, error, sizeof error));
    assert_int_equal(c.examples[0].completion[1].count, room - 2);
    choices_close(&c);
}

static void most_examples_fit_and_one_more_is_refused(void **state) {
    (void)state;
    struct choices_writer w;
    const int32_t id = 9;
    struct choice_list one = {&id, 1}, both[] = {one, one};
    expect(choices_writer_begin(&w, at("out.bin"), 0, error, sizeof error));
    for (int i = 0; i < CHOICES_EXAMPLES; i++)
        expect(choices_writer_append(&w, i % 2, one, both, 2, error, sizeof error));
    struct choices_writer full = w;
    expect(choices_writer_finish(&w, error, sizeof error));
    struct choices c;
    expect(choices_open(&c, at("out.bin"), NULL, 10, error, sizeof error));
    assert_int_equal(c.count, CHOICES_EXAMPLES);
    assert_int_equal(c.examples[CHOICES_EXAMPLES - 1].label, 0);
    choices_close(&c);
    full.file = fopen(full.temporary, "wb");
    assert_false(choices_writer_append(&full, 0, one, both, 2, error, sizeof error));
    assert_contains(error, "found more than 65535 examples");
    assert_false(exists("out.bin.tmp"));
}

static void abandoned_and_failed_writers_leave_nothing(void **state) {
    (void)state;
    struct choices_writer w;
    write_two(&w);
    choices_writer_abandon(&w);
    assert_false(exists("out.bin.tmp") || exists("out.bin"));

    expect(choices_writer_begin(&w, at("out.bin"), 0, error, sizeof error));
    assert_false(choices_writer_finish(&w, error, sizeof error)); // no example
    assert_false(exists("out.bin.tmp") || exists("out.bin"));

    assert_false(choices_writer_begin(&w, at("missing/out.bin"), 0, error, sizeof error));
    assert_contains(error, "missing/out.bin.tmp: cannot create");
}

// A file size limit stands for a full disk. What was there before stays.
static void full_disk_leaves_the_old_file(void **state) {
    (void)state;
    write_file("out.bin", "old", 3);
    struct rlimit before, small;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    small = (struct rlimit){CHOICES_HEADER + 20, before.rlim_max};
    void (*handler)(int) = signal(SIGXFSZ, SIG_IGN);
    struct choices_writer w;
    write_two(&w);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    bool finished = choices_writer_finish(&w, error, sizeof error);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
    signal(SIGXFSZ, handler);
    assert_false(finished);
    assert_contains(error, "out.bin.tmp: cannot");
    assert_false(exists("out.bin.tmp"));
    size_t bytes;
    char *old = read_bytes(at("out.bin"), &bytes);
    assert_string_equal(old, "old");
    free(old);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(file_as_llmc_writes_it_is_read),
        TEST(writer_gives_the_same_bytes),
        TEST(tokenizer_in_the_header_must_be_the_run_s),
        TEST(file_cut_anywhere_is_refused),
        TEST(header_that_disagrees_with_the_file_is_refused),
        TEST(other_files_are_refused),
        TEST(every_number_of_an_example_is_checked),
        TEST(any_number_anywhere_does_no_harm),
        TEST(ids_outside_the_vocabulary_are_refused),
        TEST(file_above_the_bound_is_refused_unread),
        TEST(writer_refuses_what_the_format_cannot_hold),
        TEST(longest_example_fits_and_one_id_more_is_refused),
        TEST(most_examples_fit_and_one_more_is_refused),
        TEST(abandoned_and_failed_writers_leave_nothing),
        TEST(full_disk_leaves_the_old_file),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

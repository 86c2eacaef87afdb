// Token shards: what is read, what is refused and how, what the writer leaves behind.
#include "tests/shards.h"
#include "tests/test.h"

#include <errno.h>
#include <signal.h>
#include <sys/resource.h>

#include "data/token_file.h"

static char error[FILE_ERROR];

// root/name as llm.c would write it, with the ids 7 i + 3.
static void write_llmc(const char *name, int id_bytes, uint32_t count) { write_shard(name, id_bytes, 0, count, 3, 7); }

// A header of another kind.
static void write_header(const char *name, uint32_t magic, uint32_t version, uint32_t vocab) {
    unsigned char header[TOKEN_FILE_HEADER] = {0};
    store(header, magic, 4);
    store(header + 4, version, 4);
    store(header + 12, vocab, 4);
    write_file(name, header, sizeof header);
}

static void assert_open_refused(const char *name, const char *const words[]) {
    struct token_file f;
    strcpy(error, "");
    assert_false(token_file_open(&f, at(name), error, sizeof error));
    assert_int_equal(strncmp(error, at(name), strlen(at(name))), 0);
    assert_null(strchr(error, '\n'));
    for (int i = 0; words[i]; i++) assert_contains(error, words[i]);
    token_file_close(&f); // harmless
}
#define WORDS(...) ((const char *const[]){__VA_ARGS__, NULL})

static void open_file(struct token_file *f, const char *name) {
    if (!token_file_open(f, at(name), error, sizeof error)) fail_msg("%s", error);
}

// ---- reading ----

static void files_of_llmc_are_read(void **state) {
    (void)state;
    for (int id_bytes = 2; id_bytes <= 4; id_bytes += 2) {
        enum { COUNT = 9000 };
        write_llmc("shard.bin", id_bytes, COUNT);
        assert_true(token_file_is(at("shard.bin")));
        struct token_file f;
        open_file(&f, "shard.bin");
        assert_int_equal(f.count, COUNT);
        assert_int_equal(f.id_bytes, id_bytes);
        assert_int_equal(f.vocab, 0);
        assert_true(f.hash == 0 && f.tokenizer == 0);
        assert_string_equal(f.path, at("shard.bin"));
        static const size_t cuts[][2] = {{0, COUNT}, {0, 1}, {COUNT - 1, 1}, {4095, 2}, {17, 8800}, {COUNT, 0}};
        for (size_t k = 0; k < sizeof cuts / sizeof *cuts; k++) {
            int32_t ids[COUNT + 1];
            memset(ids, 0xff, sizeof ids);
            assert_true(token_file_read(&f, cuts[k][0], cuts[k][1], 0, ids, error, sizeof error));
            for (size_t i = 0; i < cuts[k][1]; i++) assert_int_equal(ids[i], 7 * (cuts[k][0] + i) + 3);
            assert_int_equal(ids[cuts[k][1]], -1);
        }
        int32_t one[2];
        assert_false(token_file_read(&f, COUNT, 1, 0, one, error, sizeof error));
        assert_contains(error, "asked for 1 ids from 9000 on, where there are 9000");
        assert_false(token_file_read(&f, UINT64_MAX, 2, 0, one, error, sizeof error));
        assert_true(token_file_check(&f, &(int32_t){0}, error, sizeof error));
        token_file_close(&f);
    }
}

static void all_16_and_31_bits_of_an_id_are_read(void **state) {
    (void)state;
    unsigned char bytes[TOKEN_FILE_HEADER + 8];
    make_header(bytes, 2, 2);
    memcpy(bytes + TOKEN_FILE_HEADER, "\xff\xff\x00\x80", 4);
    write_file("two.bin", bytes, TOKEN_FILE_HEADER + 4);
    make_header(bytes, 4, 2);
    memcpy(bytes + TOKEN_FILE_HEADER, "\xff\xff\xff\x7f\x00\x00\x00\x80", 8);
    write_file("four.bin", bytes, TOKEN_FILE_HEADER + 8);
    struct token_file f;
    int32_t ids[2];
    open_file(&f, "two.bin");
    assert_true(token_file_read(&f, 0, 2, 0, ids, error, sizeof error));
    assert_int_equal(ids[0], 0xffff);
    assert_int_equal(ids[1], 0x8000);
    token_file_close(&f);
    open_file(&f, "four.bin");
    assert_true(token_file_read(&f, 0, 1, 0, ids, error, sizeof error));
    assert_int_equal(ids[0], INT32_MAX);
    assert_false(token_file_read(&f, 0, 2, 0, ids, error, sizeof error)); // would be negative
    assert_contains(error, "found id 2147483648 at position 1");
    assert_int_equal(errno, 0);
    token_file_close(&f);
}

// 32-bit counts that overflow (Megatron-LM issues 1672 and 1056). The file is a hole with one id at its end.
static void more_than_2_to_31_ids_are_read(void **state) {
    (void)state;
    const uint32_t count = (1u << 31) + 10;
    off_t end = TOKEN_FILE_HEADER + 2 * (off_t)count;
    if (!write_sparse_shard("large.bin", count, 12345)) skip();
    struct token_file f;
    open_file(&f, "large.bin");
    assert_true(f.count == count);
    int32_t ids[3];
    assert_true(token_file_read(&f, count - 3, 3, 0, ids, error, sizeof error));
    assert_int_equal(ids[0], 0);
    assert_int_equal(ids[1], 0);
    assert_int_equal(ids[2], 12345);
    token_file_close(&f);
    assert_int_equal(truncate(at("large.bin"), end - 1), 0);
    assert_open_refused("large.bin", WORDS("expected 4294968340 bytes", "found 4294968339"));
}

// A shard shorter than its header says, whose mapped tail would read as zeros (vmlx-swift pull 217).
static void cut_and_longer_files_are_refused(void **state) {
    (void)state;
    for (int id_bytes = 2; id_bytes <= 4; id_bytes += 2) {
        off_t whole = TOKEN_FILE_HEADER + 1000 * id_bytes;
        const off_t sizes[] = {whole - 1, whole - id_bytes, whole / 2, TOKEN_FILE_HEADER, whole + 1, whole + 4096};
        for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
            write_llmc("shard.bin", id_bytes, 1000);
            assert_int_equal(truncate(at("shard.bin"), sizes[k]), 0);
            char expected[64], found[64];
            snprintf(expected, sizeof expected, "expected %lld bytes", (long long)whole);
            snprintf(found, sizeof found, "found %lld", (long long)sizes[k]);
            assert_open_refused("shard.bin", WORDS(expected, found, sizes[k] < whole ? "cut" : "appended"));
        }
        for (off_t size = 4; size < TOKEN_FILE_HEADER; size += 255) {
            write_llmc("shard.bin", id_bytes, 1000);
            assert_int_equal(truncate(at("shard.bin"), size), 0);
            assert_open_refused("shard.bin", WORDS("expected at least the 1024", "cut"));
        }
    }
}

static void shards_without_ids_are_whole(void **state) {
    (void)state;
    write_llmc("none.bin", 2, 0);
    struct token_file f;
    open_file(&f, "none.bin");
    assert_int_equal(f.count, 0);
    assert_true(token_file_check(&f, &(int32_t){0}, error, sizeof error));
    token_file_close(&f);
}

// A wrong file is called by its name, with the number found and those wanted (llama.cpp issue 662).
static void other_files_are_named(void **state) {
    (void)state;
    static const struct {
        const char *bytes;
        size_t length;
        const char *what;
    } files[] = {
        {"Once upon a time.\n", 18, "a text file"},
        {"<!DOCTYPE html><html>404", 24, "an HTML or XML page"},
        {"version https://git-lfs.github.com/spec/v1\n", 43, "a Git LFS pointer"},
        {"\x1f\x8b\x08\0\0\0", 6, "a gzip file"},
        {"PK\x03\x04", 4, "a zip file"},
        {"\x10\0\0\0\0\0\0\0{\"a\":{}}   ", 19, "a safetensors file"},
        {"\x01\x35\xd8\x34\0\0\0\1", 8, "a file of an unknown kind"},
        {"\x01\x34\xd8\x88\0\0\0\1", 8, "an llm.c file with swapped bytes"},
        {"ab", 2, "too short for a magic number"},
        {"\x01", 1, "too short for a magic number"},
    };
    for (size_t k = 0; k < sizeof files / sizeof *files; k++) {
        write_file("x.bin", files[k].bytes, files[k].length);
        assert_false(token_file_is(at("x.bin")));
        assert_open_refused("x.bin", WORDS(files[k].what, "wanted a token shard", "0x0134d888 = 20240520",
                                           "0x0134d9a1 = 20240801", "./tokenize"));
    }
    write_header("model.bin", 20240326, 3, 0);
    assert_open_refused("model.bin", WORDS("an llm.c GPT-2 model", "0x0134d7c6 = 20240326"));
    write_header("choices.bin", 20240522, 1, 0);
    assert_open_refused("choices.bin", WORDS("multiple-choice", "20240522"));
}

static void paths_that_are_no_files_are_refused(void **state) {
    (void)state;
    write_file("empty", "", 0);
    assert_int_equal(mkfifo(at("pipe"), 0600), 0);
    assert_int_equal(mkdir(at("folder"), 0700), 0);
    assert_open_refused("empty", WORDS("found an empty file"));
    assert_open_refused("pipe", WORDS("found a pipe or device")); // and nobody waits for a writer
    assert_open_refused("folder", WORDS("found a directory"));
    assert_open_refused("missing", WORDS("No such file"));
    static const char *const names[] = {"empty", "pipe", "folder", "missing"};
    for (int i = 0; i < 4; i++) assert_false(token_file_is(at(names[i])));
}

// Linux's own settings say that they are a page long.
static void a_file_shorter_than_its_size_is_refused(void **state) {
    (void)state;
    static const char path[] = "/sys/devices/system/cpu/online";
    struct stat info;
    if (stat(path, &info) != 0 || info.st_size < TOKEN_FILE_HEADER) skip();
    struct token_file f;
    assert_false(token_file_open(&f, path, error, sizeof error));
    assert_contains(error, "/sys/devices/system/cpu/online: found ");
    assert_contains(error, " of its size");
}

static void wrong_headers_are_refused(void **state) {
    (void)state;
    write_header("x.bin", 20240520, 7, 0);
    assert_open_refused("x.bin", WORDS("version 0x00000007 = 7", "20240520", "wanted 1"));
    write_header("x.bin", 20240801, 1, 0);
    assert_open_refused("x.bin", WORDS("version 0x00000001 = 1", "20240801", "wanted 7"));
    write_header("x.bin", 20240801, 7, 1u << 31);
    assert_open_refused("x.bin", WORDS("vocabulary of 2147483648", "at most 2147483647"));
}

// Ids above the vocabulary (torchtitan pull 1495): caught on reading, with file and position.
static void ids_above_the_vocabulary_are_refused(void **state) {
    (void)state;
    enum { COUNT = 20000, LAST = 7 * (COUNT - 1) + 3 };
    for (int own = 0; own <= 1; own++) { // the limit is the header's or the caller's
        write_shard("shard.bin", 4, own ? LAST : 0, COUNT, 3, 7);
        uint32_t limit = own ? 0 : LAST;
        struct token_file f;
        open_file(&f, "shard.bin");
        static int32_t ids[COUNT];
        assert_true(token_file_read(&f, 0, COUNT - 1, limit, ids, error, sizeof error));
        assert_false(token_file_read(&f, 100, COUNT - 100, limit, ids, error, sizeof error));
        assert_contains(error, at("shard.bin"));
        assert_contains(error, "found id 139996 at position 19999, wanted less than the vocabulary of 139996");
        assert_int_equal(errno, 0);
        assert_true(token_file_read(&f, 0, COUNT, LAST + 1, ids, error, sizeof error));
        assert_int_equal(token_file_check(&f, &(int32_t){0}, error, sizeof error), !own);
        token_file_close(&f);
    }
}

static void files_that_change_while_open_are_noticed(void **state) {
    (void)state;
    static const off_t sizes[] = {TOKEN_FILE_HEADER + 1999, TOKEN_FILE_HEADER, 0, TOKEN_FILE_HEADER + 2001};
    for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
        write_llmc("shard.bin", 2, 1000);
        struct token_file f;
        open_file(&f, "shard.bin");
        assert_int_equal(truncate(at("shard.bin"), sizes[k]), 0);
        int32_t ids[10];
        errno = EIO;
        assert_false(token_file_read(&f, 0, 10, 0, ids, error, sizeof error));
        assert_int_equal(errno, 0);
        assert_contains(error, "wanted the 3024 it had");
        assert_contains(error, "do not change it during a run");
        assert_false(token_file_check(&f, &(int32_t){0}, error, sizeof error));
        token_file_close(&f);
    }
}

// ---- writing ----

static void fill(int32_t *ids, size_t n, int vocab) {
    uint64_t rng = 5;
    for (size_t i = 0; i < n; i++) ids[i] = (int32_t)(test_uniform(&rng) * vocab);
    ids[n / 2] = vocab - 1;
}

static const uint64_t tokenizer_hash = 0xfedcba9876543210;

static void write_ids(const char *name, int vocab, const int32_t *ids, size_t n, size_t step) {
    struct token_writer w;
    bool written = token_writer_begin(&w, at(name), vocab, tokenizer_hash, error, sizeof error);
    for (size_t i = 0; written && i < n; i += step)
        written = token_writer_append(&w, ids + i, n - i < step ? n - i : step, error, sizeof error);
    if (!written || !token_writer_finish(&w, error, sizeof error)) fail_msg("%s", error);
}

static void what_is_written_is_read(void **state) {
    (void)state;
    enum { N = 40001 };
    static int32_t ids[N], back[N];
    static const int vocabs[] = {1, 257, 50257, 65536, 65537, 128256, INT32_MAX};
    for (size_t k = 0; k < sizeof vocabs / sizeof *vocabs; k++) {
        fill(ids, N, vocabs[k]);
        write_ids("shard.bin", vocabs[k], ids, N, 12345);
        assert_false(exists("shard.bin.tmp"));
        struct token_file f;
        open_file(&f, "shard.bin");
        assert_int_equal(f.id_bytes, vocabs[k] <= 65536 ? 2 : 4);
        assert_int_equal(f.vocab, vocabs[k]);
        assert_int_equal(f.count, N);
        assert_true(f.hash != 0);
        assert_true(f.tokenizer == tokenizer_hash);
        assert_true(token_file_check(&f, &(int32_t){0}, error, sizeof error));
        assert_true(token_file_read(&f, 0, N, 0, back, error, sizeof error));
        assert_memory_equal(back, ids, sizeof ids);
        token_file_close(&f);
    }
}

// The same header and ids as llm.c's, but for the five ints it leaves 0.
static void written_bytes_are_those_of_llmc(void **state) {
    (void)state;
    for (int id_bytes = 2; id_bytes <= 4; id_bytes += 2) {
        int32_t ids[100];
        for (int i = 0; i < 100; i++) ids[i] = 7 * i + 3;
        write_llmc("theirs.bin", id_bytes, 100);
        write_ids("ours.bin", id_bytes == 2 ? 50257 : 128256, ids, 100, 1);
        size_t theirs_bytes, ours_bytes;
        char *theirs = read_bytes(at("theirs.bin"), &theirs_bytes), *ours = read_bytes(at("ours.bin"), &ours_bytes);
        assert_memory_equal(ours + 24, "\x10\x32\x54\x76\x98\xba\xdc\xfe", 8); // the tokenizer, low half first
        memset(ours + 12, 0, 20);
        assert_int_equal(ours_bytes, theirs_bytes);
        assert_memory_equal(ours, theirs, ours_bytes);
        free(theirs);
        free(ours);
    }
}

static void shards_are_like_those_of_the_same_tokenizer(void **state) {
    (void)state;
    static const struct {
        int id_bytes;
        uint32_t vocab;
        uint64_t tokenizer;
        const char *words; // NULL: alike
    } others[] = {{2, 300, 7, NULL},
                  {4, 300, 7, "found ids of 32 bits, wanted 16 as in"},
                  {2, 0, 7, "found a vocabulary of 0 in the header, wanted 300 as in"},
                  {2, 300, 7ull << 32, "found ids of the tokenizer 0000000700000000, wanted those of 0000000000000007"},
                  {2, 300, 0, "found ids of the tokenizer 0000000000000000, wanted"}};
    write_shard("first.bin", 2, 300, 10, 0, 1);
    set_tokenizer("first.bin", 7);
    for (size_t k = 0; k < sizeof others / sizeof *others; k++) {
        struct token_file first, other;
        write_shard("other.bin", others[k].id_bytes, others[k].vocab, 20, 5, 1);
        set_tokenizer("other.bin", others[k].tokenizer);
        open_file(&first, "first.bin");
        open_file(&other, "other.bin");
        assert_int_equal(token_file_is_like(&other, &first, error, sizeof error), !others[k].words);
        if (others[k].words) {
            assert_int_equal(strncmp(error, other.path, strlen(other.path)), 0);
            assert_contains(error, others[k].words);
            assert_contains(error, first.path);
        }
        token_file_close(&first);
        token_file_close(&other);
    }
}

static void one_changed_byte_is_noticed(void **state) {
    (void)state;
    static int32_t ids[30000];
    fill(ids, 30000, 50257);
    for (off_t place = 0; place < 60000; place += 7499) {
        write_ids("shard.bin", 50257, ids, 30000, 30000);
        change_byte("shard.bin", TOKEN_FILE_HEADER + place);
        struct token_file f;
        open_file(&f, "shard.bin");
        assert_false(token_file_check(&f, &(int32_t){0}, error, sizeof error));
        assert_contains(error, "found ids with the hash");
        token_file_close(&f);
    }
}

// A writer that wraps at 2^32 bytes (streaming issue 659). The count is set by hand: 4 GiB are slow to write.
static void more_ids_than_the_header_counts_are_refused(void **state) {
    (void)state;
    struct token_writer w;
    assert_true(token_writer_begin(&w, at("shard.bin"), 257, 0, error, sizeof error));
    w.count = INT32_MAX - 2;
    int32_t ids[3] = {1, 2, 3};
    assert_true(token_writer_append(&w, ids, 2, error, sizeof error));
    assert_false(token_writer_append(&w, ids, 1, error, sizeof error));
    assert_contains(error, "found 2147483647 ids and 1 more, wanted at most 2147483647");
    assert_null(w.file);
    assert_false(exists("shard.bin") || exists("shard.bin.tmp"));
    assert_true(token_writer_begin(&w, at("shard.bin"), 257, 0, error, sizeof error));
    assert_false(token_writer_append(&w, ids, (size_t)1 << 33, error, sizeof error)); // refused before any is read
}

static void ids_outside_the_vocabulary_are_not_written(void **state) {
    (void)state;
    static const int32_t wrong[] = {257, -1, 65536 + 1, INT32_MIN};
    for (size_t k = 0; k < sizeof wrong / sizeof *wrong; k++) {
        struct token_writer w;
        assert_true(token_writer_begin(&w, at("shard.bin"), 257, 0, error, sizeof error));
        int32_t ids[] = {1, 256, wrong[k]};
        assert_true(token_writer_append(&w, ids, 2, error, sizeof error));
        assert_false(token_writer_append(&w, ids, 3, error, sizeof error));
        char found[64];
        snprintf(found, sizeof found, "found id %d for position 4, wanted 0 to 256", wrong[k]);
        assert_contains(error, found);
        assert_false(exists("shard.bin") || exists("shard.bin.tmp"));
        token_writer_abandon(&w); // harmless
    }
    struct token_writer w;
    assert_false(token_writer_begin(&w, at("shard.bin"), 0, 0, error, sizeof error));
    assert_contains(error, "found a vocabulary of 0");
}

static void abandoned_and_unwritable_files_leave_nothing(void **state) {
    (void)state;
    struct token_writer w;
    int32_t id = 1;
    write_ids("old.bin", 257, &id, 1, 1);
    assert_true(token_writer_begin(&w, at("old.bin"), 300, 0, error, sizeof error));
    assert_true(token_writer_append(&w, &id, 1, error, sizeof error));
    assert_true(exists("old.bin.tmp"));
    token_writer_abandon(&w);
    assert_false(exists("old.bin.tmp"));
    struct token_file f;
    open_file(&f, "old.bin"); // the old one is as it was
    assert_int_equal(f.vocab, 257);
    token_file_close(&f);
    assert_false(token_writer_begin(&w, at("missing/new.bin"), 257, 0, error, sizeof error));
    assert_contains(error, "missing/new.bin.tmp: cannot create: No such file");
    assert_int_equal(mkdir(at("taken.bin"), 0700), 0);
    assert_true(token_writer_begin(&w, at("taken.bin"), 257, 0, error, sizeof error));
    assert_false(token_writer_finish(&w, error, sizeof error));
    assert_contains(error, "taken.bin.tmp: cannot be renamed");
    assert_false(exists("taken.bin.tmp"));
}

// A file size limit stands for the full disk, at sizes from the header's to the last id's.
static void a_full_disk_leaves_nothing_under_the_name(void **state) {
    (void)state;
    enum { N = 30000 };
    static int32_t ids[N];
    struct rlimit before, limit;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    void (*old)(int) = signal(SIGXFSZ, SIG_IGN); // an error instead of the end
    for (rlim_t bytes = 0; bytes < TOKEN_FILE_HEADER + 2 * N; bytes += 10001) {
        struct token_writer w;
        limit = (struct rlimit){bytes, before.rlim_max};
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
        bool written = token_writer_begin(&w, at("shard.bin"), 257, 0, error, sizeof error) &&
                       token_writer_append(&w, ids, N, error, sizeof error) &&
                       token_writer_finish(&w, error, sizeof error);
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
        assert_false(written);
        assert_contains(error, "shard.bin.tmp");
        assert_contains(error, "File too large");
        assert_false(exists("shard.bin") || exists("shard.bin.tmp"));
    }
    signal(SIGXFSZ, old);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, make_root, remove_root)
int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(files_of_llmc_are_read),
        TEST(all_16_and_31_bits_of_an_id_are_read),
        TEST(more_than_2_to_31_ids_are_read),
        TEST(cut_and_longer_files_are_refused),
        TEST(shards_without_ids_are_whole),
        TEST(other_files_are_named),
        TEST(paths_that_are_no_files_are_refused),
        TEST(a_file_shorter_than_its_size_is_refused),
        TEST(wrong_headers_are_refused),
        TEST(ids_above_the_vocabulary_are_refused),
        TEST(files_that_change_while_open_are_noticed),
        TEST(what_is_written_is_read),
        TEST(written_bytes_are_those_of_llmc),
        TEST(shards_are_like_those_of_the_same_tokenizer),
        TEST(one_changed_byte_is_noticed),
        TEST(more_ids_than_the_header_counts_are_refused),
        TEST(ids_outside_the_vocabulary_are_not_written),
        TEST(abandoned_and_unwritable_files_leave_nothing),
        TEST(a_full_disk_leaves_nothing_under_the_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

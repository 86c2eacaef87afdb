// The data room: windows, order, splits, errors; the stories.
#include "tests/test.h"

#include <fcntl.h>
#include <stdbool.h>
#include <strings.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cjson/cJSON.h>

#include "data/data.h"
#include "data/stories.h"
#include "data/tokenizer.h"

// ---- files ----

static char folder[] = "/tmp/mok_test_data_XXXXXX";

static int make_folder(void **state) {
    (void)state;
    return mkdtemp(folder) ? 0 : -1;
}

static int remove_folder(void **state) {
    (void)state;
    return rmdir(folder); // fails when a test left something behind
}

// The path of a name in the test folder, until the fourth next call.
static const char *in_folder(const char *name) {
    static char paths[4][256];
    static int next = 0;
    char *path = paths[next++ % 4];
    snprintf(path, sizeof paths[0], "%s/%s", folder, name);
    return path;
}

static const char *write_bytes(const char *name, const void *bytes, size_t n) {
    const char *path = in_folder(name);
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, n, file), n);
    assert_int_equal(fclose(file), 0);
    return path;
}

// Bytes 2k and 2k + 1 spell k, so that a window that begins at an even position says where it begins.
static const char *write_positions(const char *name, size_t n) {
    unsigned char *bytes = malloc(n);
    for (size_t i = 0; i < n; i++) bytes[i] = (unsigned char)(i / 2 >> (i % 2 ? 0 : 8));
    const char *path = write_bytes(name, bytes, n);
    free(bytes);
    return path;
}

static size_t position_of(const int32_t *tokens) { return 2 * ((size_t)tokens[0] * 256 + (size_t)tokens[1]); }

// ---- windows and order ----

enum { T = 16 };

static void test_read_depends_on_seed_and_sequence_only(void **state) {
    (void)state;
    const char *path = write_positions("positions", 9000);
    const char *specs[] = {path, "stories"};
    for (int k = 0; k < 2; k++) {
        enum { COUNT = 300, WIDTH = T + 2 };
        struct data *a = data_open(specs[k], NULL, NULL, 7, T, 2), *b = data_open(specs[k], "", NULL, 7, T, 2);
        struct data *other = data_open(specs[k], NULL, NULL, 8, T, 2);
        static int32_t forward[2][COUNT][WIDTH];
        int different = 0;
        for (int s = 0; s < COUNT; s++) {
            data_read_or_fail(a, DATA_TRAIN, (uint64_t)s, forward[DATA_TRAIN][s]);
            data_read_or_fail(a, DATA_EVAL, (uint64_t)s, forward[DATA_EVAL][s]);
        }
        for (int i = 0; i < COUNT; i++) {
            int s = (i * 7 + 150) % COUNT; // 7 and 300 have no common factor: every sequence, in another order
            int32_t tokens[WIDTH];
            for (int split = DATA_EVAL; split >= DATA_TRAIN; split--) {
                data_read_or_fail(b, (enum data_split)split, (uint64_t)s, tokens);
                assert_memory_equal(tokens, forward[split][s], sizeof tokens);
            }
            data_read_or_fail(other, DATA_TRAIN, (uint64_t)s, tokens);
            different += memcmp(tokens, forward[DATA_TRAIN][s], sizeof tokens) != 0;
        }
        // 533 windows: a shuffle agrees with another in one place on average.
        assert_true(different > COUNT - 10);
        data_close(a);
        data_close(b);
        data_close(other);
    }
    unlink(path);
}

static void test_epoch_visits_every_window_once(void **state) {
    (void)state;
    static const size_t sizes[] = {2 * T + 1, 3 * T, 5 * T, 300, 4096, 33333};
    for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
        const char *path = write_positions("positions", sizes[k]);
        struct data *d = data_open(path, NULL, NULL, 3, T, 1);
        uint64_t windows = data_windows(d, DATA_TRAIN);
        size_t tokens_in_all = sizes[k] + 1, held = tokens_in_all / 20 > T + 1 ? tokens_in_all / 20 : T + 1;
        assert_int_equal(windows, (tokens_in_all - held - 1) / T);
        for (uint64_t epoch = 0; epoch < 4; epoch++) {
            unsigned char *seen = calloc(windows, 1);
            for (uint64_t i = 0; i < windows; i++) {
                int32_t tokens[T + 1];
                uint64_t sequence = epoch * windows + i;
                data_read_or_fail(d, DATA_TRAIN, sequence, tokens);
                size_t position = position_of(tokens);
                assert_int_equal(position % T, 0);
                assert_true(position / T < windows);
                assert_int_equal(seen[position / T]++, 0);
                assert_int_equal(data_epoch(d, DATA_TRAIN, sequence), epoch);
            }
            free(seen);
        }
        data_close(d);
        unlink(path);
    }
}

static void test_epochs_and_seeds_shuffle_differently(void **state) {
    (void)state;
    const char *path = write_positions("positions", 4096);
    struct data *a = data_open(path, NULL, NULL, 1, T, 1), *b = data_open(path, NULL, NULL, 2, T, 1);
    uint64_t windows = data_windows(a, DATA_TRAIN);
    int same_epoch = 0, same_seed = 0, in_place = 0;
    for (uint64_t i = 0; i < windows; i++) {
        int32_t first[T + 1], second[T + 1], other[T + 1];
        data_read_or_fail(a, DATA_TRAIN, i, first);
        data_read_or_fail(a, DATA_TRAIN, windows + i, second);
        data_read_or_fail(b, DATA_TRAIN, i, other);
        same_epoch += position_of(first) == position_of(second);
        same_seed += position_of(first) == position_of(other);
        in_place += position_of(first) == i * T;
    }
    // Unrelated shuffles agree in one place on average, in more than 10 of any number with probability 1e-8.
    assert_true(same_epoch <= 10 && same_seed <= 10 && in_place <= 10);
    data_close(a);
    data_close(b);
    unlink(path);
}

static void test_shuffle_favours_no_window(void **state) {
    (void)state;
    static const size_t sizes[] = {3 * T + 1, 4 * T + 1, 300};
    for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
        const char *path = write_positions("positions", sizes[k]);
        struct data *d = data_open(path, NULL, NULL, 11, T, 1);
        uint64_t windows = data_windows(d, DATA_TRAIN), count[32] = {0};
        assert_true(windows <= 32);
        enum { EPOCHS = 4000 };
        for (uint64_t epoch = 0; epoch < EPOCHS; epoch++) {
            int32_t tokens[T + 1];
            data_read_or_fail(d, DATA_TRAIN, epoch * windows, tokens);
            count[position_of(tokens) / T]++;
        }
        double expected = EPOCHS / (double)windows, chi_squared = 0;
        for (uint64_t w = 0; w < windows; w++) {
            chi_squared += ((double)count[w] - expected) * ((double)count[w] - expected) / expected;
        }
        // Chi squared has mean f and variance 2 f; six standard deviations are far beyond chance.
        double freedom = (double)windows - 1;
        assert_true(chi_squared < freedom + 6 * sqrt(2 * freedom));
        data_close(d);
        unlink(path);
    }
}

static void test_ranks_together_read_the_whole_epoch(void **state) {
    (void)state;
    static const uint64_t rank_counts[] = {1, 2, 3, 4, 7};
    const char *path = write_positions("positions", 5000);
    for (size_t k = 0; k < 5; k++) {
        uint64_t ranks = rank_counts[k];
        unsigned char seen[5000 / T] = {0};
        uint64_t windows = 0;
        for (uint64_t rank = 0; rank < ranks; rank++) {
            struct data *d = data_open(path, NULL, NULL, 5, T, 1);
            windows = data_windows(d, DATA_TRAIN);
            for (uint64_t s = rank; s < windows; s += ranks) {
                int32_t tokens[T + 1];
                data_read_or_fail(d, DATA_TRAIN, s, tokens);
                seen[position_of(tokens) / T]++;
            }
            data_close(d);
        }
        for (uint64_t w = 0; w < windows; w++) assert_int_equal(seen[w], 1);
    }
    unlink(path);
}

static void test_evaluated_targets_are_never_trained_on(void **state) {
    (void)state;
    static const struct {
        size_t bytes;
        int length, lookahead;
    } cases[] = {{300, 16, 1}, {301, 16, 2}, {300, 16, 3}, {5001, 16, 17}, {5001, 16, 18}, {401, 2, 7}, {9001, 8, 2}};
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        size_t n = cases[k].bytes, reach = (size_t)(cases[k].length + cases[k].lookahead);
        const char *path = write_positions("positions", n);
        struct data *d = data_open(path, NULL, NULL, 1, cases[k].length, cases[k].lookahead);
        uint64_t train = data_windows(d, DATA_TRAIN), eval = data_windows(d, DATA_EVAL);
        size_t held = (n + 1) / 20 > reach ? (n + 1) / 20 : reach; // the last twentieth of the tokens, or one window
        assert_int_equal(eval, (held - (size_t)cases[k].lookahead) / (size_t)cases[k].length);
        assert_int_equal(train, (n + 1 - held - (size_t)cases[k].lookahead) / (size_t)cases[k].length);
        unsigned char *trained = calloc(n + 1, 1);
        int32_t tokens[64];
        for (uint64_t s = 0; s < train; s++) {
            data_read_or_fail(d, DATA_TRAIN, s, tokens);
            size_t start = position_of(tokens);
            assert_true(start + reach <= n + 1);
            memset(trained + start, 1, reach);
        }
        size_t previous = 0;
        for (uint64_t s = 0; s < eval; s++) {
            data_read_or_fail(d, DATA_EVAL, s, tokens);
            size_t start = position_of(tokens);
            assert_true(start > previous && start + reach <= n + 1);
            previous = start;
            for (size_t i = start; i < start + reach; i++) assert_int_equal(trained[i], 0);
        }
        // Less than one window is wasted at the end.
        assert_true(previous + (size_t)cases[k].length + reach > n + 1);
        free(trained);
        data_close(d);
        unlink(path);
    }
}

// A checkpoint may be evaluated with longer sequences, or without the MTP modules it was trained with.
static void test_what_is_held_out_does_not_depend_on_the_windows(void **state) {
    (void)state;
    const char *path = write_positions("positions", 59999);
    static const int lengths[] = {4, 16, 62}, lookaheads[] = {1, 2, 3};
    size_t first_held[9], last_trained = 0;
    for (int k = 0; k < 9; k++) {
        struct data *d = data_open(path, NULL, NULL, 1, lengths[k / 3], lookaheads[k % 3]);
        int32_t tokens[65];
        data_read_or_fail(d, DATA_EVAL, 0, tokens);
        first_held[k] = position_of(tokens);
        assert_int_equal(first_held[k], first_held[0]);
        for (uint64_t s = 0; s < data_windows(d, DATA_TRAIN); s++) {
            data_read_or_fail(d, DATA_TRAIN, s, tokens);
            size_t last = position_of(tokens) + (size_t)(lengths[k / 3] + lookaheads[k % 3]) - 1;
            if (last > last_trained) last_trained = last;
        }
        data_close(d);
    }
    assert_int_equal(first_held[0], 60000 - 3000);
    assert_true(last_trained < first_held[0]);
    unlink(path);
}

static void test_lookahead_is_the_start_of_the_next_window(void **state) {
    (void)state;
    enum { N = 20 * T + 3, AHEAD = 4 };
    const char *path = write_positions("positions", N);
    const char *eval_path = write_positions("eval", N);
    struct data *d = data_open(path, eval_path, NULL, 1, T, AHEAD); // evaluation reads the file in order
    assert_int_equal(data_windows(d, DATA_EVAL), 20);
    assert_int_equal(data_windows(d, DATA_TRAIN), 20);
    int32_t tokens[T + AHEAD], next[T + AHEAD];
    data_read_or_fail(d, DATA_EVAL, 0, tokens);
    assert_int_equal(position_of(tokens), 0);
    for (uint64_t s = 1; s < 20; s++) {
        data_read_or_fail(d, DATA_EVAL, s, next);
        assert_memory_equal(tokens + T, next, AHEAD * sizeof *next);
        memcpy(tokens, next, sizeof tokens);
    }
    assert_int_equal(next[T + AHEAD - 1], TOKENIZER_END_OF_TEXT); // the file fits its windows exactly
    data_close(d);
    unlink(path);
    unlink(eval_path);
}

// nanochat issues 358, 360, 371: a loader that spins at the end of a small corpus.
static void test_small_file_wraps_and_counts_epochs(void **state) {
    (void)state;
    const char *path = write_positions("positions", 300);
    struct data *d = data_open(path, NULL, NULL, 1, T, 1);
    assert_int_equal(data_windows(d, DATA_TRAIN), 17);
    assert_int_equal(data_windows(d, DATA_EVAL), 1);
    int32_t first[T + 1], later[T + 1];
    for (uint64_t s = 0; s < 200; s++) {
        data_read_or_fail(d, DATA_TRAIN, s, later);
        assert_int_equal(data_epoch(d, DATA_TRAIN, s), s / 17);
    }
    data_read_or_fail(d, DATA_EVAL, 0, first);
    data_read_or_fail(d, DATA_EVAL, 123456789, later);
    assert_memory_equal(first, later, sizeof first);
    data_read_or_fail(d, DATA_TRAIN, UINT64_MAX, later); // the last number there is
    data_close(d);
    unlink(path);
}

static void test_every_byte_value_and_the_end_are_read(void **state) {
    (void)state;
    unsigned char bytes[511];
    for (int i = 0; i < 511; i++) bytes[i] = (unsigned char)(i * 5);
    const char *path = write_bytes("bytes", bytes, sizeof bytes), *same;
    memset(bytes, 'a', sizeof bytes);
    same = write_bytes("same", bytes, sizeof bytes);
    struct data *d = data_open(path, same, NULL, 1, 510, 2);
    int32_t tokens[512];
    data_read_or_fail(d, DATA_TRAIN, 0, tokens);
    for (int i = 0; i < 511; i++) assert_int_equal(tokens[i], (i * 5) & 255);
    assert_int_equal(tokens[511], TOKENIZER_END_OF_TEXT);
    data_read_or_fail(d, DATA_EVAL, 0, tokens); // one byte repeated is a text too
    for (int i = 0; i < 511; i++) assert_int_equal(tokens[i], 'a');
    assert_int_equal(data_settle_vocab(d, 0), 257);
    data_close(d);
    unlink(path);
    unlink(same);
}

static void test_windows_longer_than_the_read_buffer(void **state) {
    (void)state;
    const char *path = write_positions("positions", 30001);
    struct data *d = data_open(path, NULL, NULL, 1, 10000, 2);
    static int32_t tokens[10002];
    data_read_or_fail(d, DATA_EVAL, 0, tokens);
    size_t start = position_of(tokens);
    for (size_t i = 0; i < 10002 && start + i < 30001; i++) {
        assert_int_equal(tokens[i], ((start + i) / 2 >> ((start + i) % 2 ? 0 : 8)) & 255);
    }
    data_close(d);
    unlink(path);
}

// Megatron-LM issues 1672 and 1056: positions kept in 32 bits. The file is a hole with a few bytes at its end.
static void test_files_beyond_4_gib(void **state) {
    (void)state;
    const char *path = write_bytes("large", "x", 1), *tail = "the last sixteen";
    uint64_t size = (5ull << 30) + T;
    int fd = open(path, O_WRONLY);
    bool made = fd >= 0 && ftruncate(fd, (off_t)size) == 0 && pwrite(fd, tail, T, (off_t)(size - T)) == T;
    close(fd);
    if (!made) {
        unlink(path);
        skip();
    }
    struct data *d = data_open(path, path, NULL, 1, T, 1);
    assert_true(data_windows(d, DATA_EVAL) == size / T);
    int32_t tokens[T + 1];
    data_read_or_fail(d, DATA_EVAL, data_windows(d, DATA_EVAL) - 1, tokens);
    for (int i = 0; i < T; i++) assert_int_equal(tokens[i], tail[i]);
    assert_int_equal(tokens[T], TOKENIZER_END_OF_TEXT);
    data_close(d);
    unlink(path);
}

static void test_description_names_sources_and_windows(void **state) {
    (void)state;
    const char *path = write_positions("positions", 300);
    struct data *d = data_open("stories", path, NULL, 1, T, 1);
    char text[1024] = "";
    FILE *file = fmemopen(text, sizeof text, "w");
    data_describe(d, file);
    fclose(file);
    assert_non_null(strstr(text, "stories"));
    assert_non_null(strstr(text, path));
    assert_non_null(strstr(text, "301 byte tokens"));
    assert_non_null(strstr(text, "18 from token 0"));
    assert_int_equal(data_windows(d, DATA_TRAIN), 0);
    assert_int_equal(data_epoch(d, DATA_TRAIN, 1000), 0);
    data_close(d);
    unlink(path);
}

// ---- errors ----

// Opens the data in a child, reads one training sequence after `spoil` (may be NULL), and wants exit code 2 with every
// one of the words in one line of stderr.
static void assert_refused(const char *spec, const char *eval_spec, int length, int lookahead,
                           void (*spoil)(const char *spec), const char *const words[]) {
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        dup2(ends[1], 2);
        struct data *d = data_open(spec, eval_spec, NULL, 1, length, lookahead);
        int32_t *tokens = malloc((size_t)(length + lookahead) * sizeof *tokens);
        if (spoil) spoil(spec);
        data_read_or_fail(d, DATA_TRAIN, 0, tokens);
        _exit(0);
    }
    close(ends[1]);
    char text[4096];
    size_t used = 0;
    for (ssize_t got; (got = read(ends[0], text + used, sizeof text - 1 - used)) > 0;) used += (size_t)got;
    text[used] = 0;
    close(ends[0]);
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 2) fail_msg("status %#x, wanted exit code 2: %s", status, text);
    assert_ptr_equal(strchr(text, '\n'), text + used - 1);
    for (int i = 0; words[i]; i++) {
        if (!strstr(text, words[i])) fail_msg("\"%s\" is missing from: %s", words[i], text);
    }
}
#define WORDS(...) ((const char *const[]){__VA_ARGS__, NULL})

static void test_unusable_paths_are_refused(void **state) {
    (void)state;
    const char *missing = in_folder("missing"), *text = write_positions("text", 300);
    assert_refused("", NULL, T, 1, NULL, WORDS("--data", "nothing"));
    assert_refused(missing, NULL, T, 1, NULL, WORDS(missing, "No such file", "--data"));
    assert_refused(text, missing, T, 1, NULL, WORDS(missing, "No such file", "--eval-data"));
    assert_refused(folder, NULL, T, 1, NULL, WORDS(folder, "directory"));
    const char *empty = write_bytes("empty", "", 0);
    assert_refused(empty, NULL, T, 1, NULL, WORDS(empty, "empty file"));
    unlink(empty);
    const char *fifo = in_folder("fifo");
    assert_int_equal(mkfifo(fifo, 0600), 0);
    assert_refused(fifo, NULL, T, 1, NULL, WORDS(fifo, "pipe or device", "regular file"));
    unlink(fifo);
    unlink(text);
}

static void test_unreadable_file_is_refused(void **state) {
    (void)state;
    const char *path = write_positions("secret", 300);
    assert_int_equal(chmod(path, 0), 0);
    bool root = geteuid() == 0; // root reads everything: be nobody for a while
    if (root && seteuid(65534) != 0) {
        unlink(path);
        skip();
    }
    assert_refused(path, NULL, T, 1, NULL, WORDS(path, "Permission denied"));
    if (root) assert_int_equal(seteuid(0), 0);
    unlink(path);
}

static void test_short_files_are_refused_with_both_sizes(void **state) {
    (void)state;
    const char *path = write_positions("short", 31); // 32 tokens; two windows of 16 and their lookahead are 34
    assert_refused(path, NULL, T, 1, NULL, WORDS(path, "found 32 tokens", "at least 34", "--seq 16", "smaller --seq"));
    assert_refused(path, NULL, T, 2, NULL, WORDS(path, "found 32 tokens", "at least 36"));
    assert_refused(path, "stories", 32, 1, NULL, WORDS(path, "found 32 tokens", "at least 33", "to train"));
    assert_refused("stories", path, 32, 1, NULL, WORDS(path, "found 32 tokens", "at least 33", "to evaluate"));
    struct data *d = data_open(path, path, NULL, 31, 1, 1); // one window is enough for a split of its own
    data_close(d);
    unlink(path);
    path = write_positions("short", 33);
    d = data_open(path, NULL, NULL, 1, T, 1);
    assert_int_equal(data_windows(d, DATA_TRAIN), 1);
    assert_int_equal(data_windows(d, DATA_EVAL), 1);
    data_close(d);
    unlink(path);
}

// A wrong file is called by its name (llama.cpp issue 662). Token shards are read: tests/test_source.c.
static void test_llmc_files_are_refused(void **state) {
    (void)state;
    static const int32_t magics[] = {20240522, 20240326, 20240803, 20240327, 20240328, 20240527};
    for (size_t i = 0; i < sizeof magics / sizeof *magics; i++) {
        unsigned char bytes[2048] = {0};
        for (int k = 0; k < 4; k++) bytes[k] = (unsigned char)(magics[i] >> (8 * k));
        char number[16];
        snprintf(number, sizeof number, "%d", magics[i]);
        const char *path = write_bytes("llmc.bin", bytes, sizeof bytes);
        assert_refused(path, NULL, T, 1, NULL, WORDS(path, "llm.c", number, "wanted a token shard"));
        unlink(path);
    }
}

static void cut_file(const char *spec) {
    if (truncate(spec, 3) != 0) _exit(9);
}

static void test_file_cut_during_the_run_is_noticed(void **state) {
    (void)state;
    const char *path = write_positions("cut", 300);
    assert_refused(path, NULL, T, 1, cut_file, WORDS(path, "wanted the 300 bytes", "do not change it"));
    unlink(path);
}

// ---- stories ----

static uint64_t hash_tokens(uint64_t hash, const int32_t *tokens, size_t n) { // FNV-1a
    for (size_t i = 0; i < n; i++) hash = (hash ^ (uint64_t)tokens[i]) * 0x100000001b3ull;
    return hash;
}

static void test_stories_are_the_same_on_every_machine(void **state) {
    (void)state;
    enum { N = 8192 }; // 16 stories a window, so that every plot is in
    struct data *d = data_open("stories", NULL, NULL, 42, N, 1);
    // Made by this test. Any change of a word or plot changes them; then put the new values here.
    static const uint64_t expected[] = {[DATA_TRAIN] = 0xe09a8e242acf760aull, [DATA_EVAL] = 0xe9b54a88200e134aull};
    for (int split = DATA_TRAIN; split <= DATA_EVAL; split++) {
        uint64_t hash = 0xcbf29ce484222325ull;
        for (uint64_t s = 0; s < 16; s++) {
            static int32_t tokens[N + 1];
            data_read_or_fail(d, (enum data_split)split, s * s * s * 1000003, tokens);
            hash = hash_tokens(hash, tokens, N + 1);
        }
        if (hash != expected[split]) print_error("split %d: found %#llx\n", split, (unsigned long long)hash);
        assert_true(hash == expected[split]);
    }
    data_close(d);
}

// Half of the windows begin with a story (behind its end of text), the others somewhere inside one; after that come
// whole stories.
static void test_story_windows_begin_with_a_story_or_inside_one(void **state) {
    (void)state;
    enum { N = 4000, WINDOWS = 200 };
    struct data *d = data_open("stories", NULL, NULL, 1, N, 1), *shorter = data_open("stories", NULL, NULL, 1, 100, 1);
    int32_t tokens[N + 1], begin[101], eval[N + 1];
    int whole = 0;
    for (uint64_t s = 0; s < WINDOWS; s++) {
        data_read_or_fail(d, DATA_TRAIN, s, tokens);
        data_read_or_fail(shorter, DATA_TRAIN, s, begin);
        data_read_or_fail(d, DATA_EVAL, s, eval);
        assert_memory_equal(tokens, begin, sizeof begin); // the length only cuts
        assert_memory_not_equal(tokens, eval, 1000);
        whole += tokens[0] == TOKENIZER_END_OF_TEXT;
        int ends = 0;
        for (int i = 0; i < N; i++) {
            if (tokens[i] != TOKENIZER_END_OF_TEXT) continue;
            ends++;
            assert_true(tokens[i + 1] >= 'A' && tokens[i + 1] <= 'Z');
        }
        assert_true(ends >= 4); // a story has about 500 bytes
    }
    assert_in_range(whole, WINDOWS * 2 / 5, WINDOWS * 3 / 5); // three standard deviations around a half
    data_close(d);
    data_close(shorter);
}

static const char *const boys[] = {"Ben",  "Tom",  "Sam",  "Max",   "Leo",   "Jack", "Tim",  "Finn",  "Oscar", "Paul",
                                   "Hugo", "Noah", "Adam", "Peter", "Felix", "Theo", "Luke", "Henry", NULL};
static const char *const girls[] = {"Anna", "Lily", "Mia",   "Ella", "Rosa", "Emma",  "Nina", "Lucy",  "Ida", "Clara",
                                    "Zoe",  "Ruth", "Molly", "Jane", "Eva",  "Alice", "Sara", "Grace", NULL};
static const char *const for_boys[] = {"he", "him", "his", "himself", "boy", NULL};
static const char *const for_girls[] = {"she", "her", "herself", "girl", NULL};
static const char *const colors[] = {"red",    "blue",   "green",  "yellow", "white", "black", "orange",
                                     "purple", "golden", "silver", "pink",   "brown", NULL};

static int find(const char *const list[], const char *word, bool any_case) {
    for (int i = 0; list[i]; i++) {
        if ((any_case ? strcasecmp : strcmp)(list[i], word) == 0) return i;
    }
    return -1;
}

// A story cut into words, each with the character before it.
struct words {
    int count;
    char text[256][24], before[256];
};

static void split_words(struct words *w, const char *story) {
    w->count = 0;
    for (const char *c = story; *c;) {
        size_t n = strspn(c, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ'");
        if (n == 0) {
            c++;
            continue;
        }
        assert_true(n < sizeof w->text[0] && w->count < 256);
        memcpy(w->text[w->count], c, n);
        w->text[w->count][n] = 0;
        w->before[w->count++] = c >= story + 2 ? (c[-1] == '"' ? '"' : c[-2]) : '.';
        c += n;
    }
}

static void check_typography(const char *story) {
    size_t n = strlen(story);
    int quotes = 0;
    for (size_t i = 0; i < n; i++) {
        char c = story[i], next = story[i + 1];
        if (c < ' ' || c > '~' || strchr("{}[]|:_", c)) fail_msg("character %d in: %s", c, story);
        quotes += c == '"';
        if (c == ' ' && strchr(" .,!?", next)) fail_msg("a space before '%c' in: %s", next, story);
        if (strchr(".,!?", c) && next && next != ' ' && next != '"') fail_msg("no space after '%c' in: %s", c, story);
        if (strchr(".!?", c) && next == ' ' && !strchr("\"ABCDEFGHIJKLMNOPQRSTUVWXYZ", story[i + 2])) {
            fail_msg("a sentence begins small in: %s", story);
        }
    }
    if (quotes % 2) fail_msg("an open quotation in: %s", story);
    if (!strchr(".!?\"", story[n - 1])) fail_msg("no punctuation at the end of: %s", story);
    if (story[0] < 'A' || story[0] > 'Z') fail_msg("a small beginning: %s", story);
}

static void check_articles(const struct words *w, const char *story) {
    for (int i = 0; i + 1 < w->count; i++) {
        bool vowel = strchr("aeiou", w->text[i + 1][0]) != NULL;
        bool a = strcasecmp(w->text[i], "a") == 0, an = strcasecmp(w->text[i], "an") == 0;
        bool silent = strcmp(w->text[i + 1], "honest") == 0 || strcmp(w->text[i + 1], "hour") == 0;
        if ((a && (vowel || silent)) || (an && !vowel && !silent)) {
            fail_msg("\"%s %s\" in: %s", w->text[i], w->text[i + 1], story);
        }
    }
}

static void check_people(const struct words *w, const char *story) {
    int seen_boys[32] = {0}, seen_girls[32] = {0}, boy_words = 0, girl_words = 0;
    for (int i = 0; i < w->count; i++) {
        const char *word = w->text[i];
        int boy = find(boys, word, false), girl = find(girls, word, false);
        if (boy >= 0) seen_boys[boy]++;
        if (girl >= 0) seen_girls[girl]++;
        boy_words += find(for_boys, word, true) >= 0;
        girl_words += find(for_girls, word, true) >= 0;
        bool inside = !strchr(".!?\"", w->before[i]);
        if (inside && word[0] <= 'Z' && strcmp(word, "I") != 0 && boy < 0 && girl < 0) {
            fail_msg("the capital of \"%s\" in: %s", word, story);
        }
        if ((boy >= 0 || girl >= 0) && i + 2 < w->count) {
            const char *wrong = boy >= 0 ? "She" : "He", *next = w->text[i + 1];
            if (w->before[i + 1] == '.' && strcmp(next, wrong) == 0) fail_msg("\"%s. %s\" in: %s", word, next, story);
            if (strcmp(next, "and") == 0 && strcmp(w->text[i + 2], word) == 0) fail_msg("twice %s in: %s", word, story);
        }
    }
    int boy_names = 0, girl_names = 0;
    for (int i = 0; i < 32; i++) {
        boy_names += seen_boys[i] > 0, girl_names += seen_girls[i] > 0;
        if (seen_boys[i] == 1 || seen_girls[i] == 1) fail_msg("a name that comes only once in: %s", story);
    }
    if (boy_names + girl_names < 1 || boy_names + girl_names > 2)
        fail_msg("%d names in: %s", boy_names + girl_names, story);
    if (boy_words > 0 && boy_names == 0) fail_msg("a boy's pronoun without a boy in: %s", story);
    if (girl_words > 0 && girl_names == 0) fail_msg("a girl's pronoun without a girl in: %s", story);
}

// What is red stays red.
static void check_colors(const struct words *w, const char *story) {
    for (int i = 0; i + 1 < w->count; i++) {
        int color = find(colors, w->text[i], false);
        for (int k = i + 1; color >= 0 && k + 1 < w->count; k++) {
            int other = find(colors, w->text[k], false);
            if (other < 0 || other == color || strcmp(w->text[i + 1], w->text[k + 1]) != 0) continue;
            fail_msg("two colors of %s in: %s", w->text[i + 1], story);
        }
    }
}

static void test_stories_are_clean_english(void **state) {
    (void)state;
    uint64_t rng = 2024;
    int shortest = 1000, longest = 0;
    for (int i = 0; i < 5000; i++) {
        char story[STORIES_MAX_BYTES + 1];
        story[stories_write(&rng, story)] = 0;
        static struct words w;
        split_words(&w, story);
        check_typography(story);
        check_articles(&w, story);
        check_people(&w, story);
        check_colors(&w, story);
        if (w.count < shortest) shortest = w.count;
        if (w.count > longest) longest = w.count;
    }
    assert_true(shortest >= 60);
    assert_true(longest <= 150);
}

static void test_stories_vary(void **state) {
    (void)state;
    // No two of 400 stories, from two streams, are the same.
    uint64_t a = 1, b = 2, hashes[400];
    for (int i = 0; i < 400; i++) {
        char story[STORIES_MAX_BYTES];
        size_t n = stories_write(i % 2 ? &a : &b, story);
        int32_t tokens[STORIES_MAX_BYTES];
        for (size_t k = 0; k < n; k++) tokens[k] = (unsigned char)story[k];
        hashes[i] = hash_tokens(0xcbf29ce484222325ull, tokens, n);
        for (int k = 0; k < i; k++) assert_true(hashes[i] != hashes[k]);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_read_depends_on_seed_and_sequence_only),
        cmocka_unit_test(test_epoch_visits_every_window_once),
        cmocka_unit_test(test_epochs_and_seeds_shuffle_differently),
        cmocka_unit_test(test_shuffle_favours_no_window),
        cmocka_unit_test(test_ranks_together_read_the_whole_epoch),
        cmocka_unit_test(test_evaluated_targets_are_never_trained_on),
        cmocka_unit_test(test_what_is_held_out_does_not_depend_on_the_windows),
        cmocka_unit_test(test_lookahead_is_the_start_of_the_next_window),
        cmocka_unit_test(test_small_file_wraps_and_counts_epochs),
        cmocka_unit_test(test_every_byte_value_and_the_end_are_read),
        cmocka_unit_test(test_windows_longer_than_the_read_buffer),
        cmocka_unit_test(test_files_beyond_4_gib),
        cmocka_unit_test(test_description_names_sources_and_windows),
        cmocka_unit_test(test_unusable_paths_are_refused),
        cmocka_unit_test(test_unreadable_file_is_refused),
        cmocka_unit_test(test_short_files_are_refused_with_both_sizes),
        cmocka_unit_test(test_llmc_files_are_refused),
        cmocka_unit_test(test_file_cut_during_the_run_is_noticed),
        cmocka_unit_test(test_stories_are_the_same_on_every_machine),
        cmocka_unit_test(test_story_windows_begin_with_a_story_or_inside_one),
        cmocka_unit_test(test_stories_are_clean_english),
        cmocka_unit_test(test_stories_vary),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}

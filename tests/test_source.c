// What is behind a spec: shards as one stream, patterns, text and stories with a tokenizer, vocabularies, refusals.
#include "tests/child.h"
#include "tests/shards.h"
#include "tests/test.h"

#include <locale.h>
#include <sys/resource.h>

#include "data/data.h"
#include "data/token_file.h"
#include "data/tokenizer.h"

enum { T = 16, AHEAD = 2, WIDTH = T + AHEAD };

static struct data *open_data(const char *spec, const char *eval_spec, int lookahead) {
    struct data *d = data_open(at(spec), eval_spec ? at(eval_spec) : NULL, NULL, 5, T, lookahead);
    data_settle_vocab(d, 0);
    return d;
}

// ---- one stream ----

// Three shards of 37, 5 and 101 ids that count on from shard to shard, and an empty one between them.
enum { STREAM = 37 + 5 + 101, STREAM_WINDOWS = (STREAM - AHEAD) / T };
static void write_stream(void) {
    write_shard("s1.bin", 2, 0, 37, 100, 1);
    write_shard("s2.bin", 2, 0, 5, 137, 1);
    write_shard("s2_none.bin", 2, 0, 0, 0, 1);
    write_shard("s3.bin", 2, 0, 101, 142, 1);
}

// The window that tokens are, which must be whole.
static int window_of(const int32_t *tokens, int width) {
    for (int i = 0; i < width; i++) assert_int_equal(tokens[i], tokens[0] + i);
    assert_int_equal((tokens[0] - 100) % T, 0);
    assert_in_range(tokens[0], 100, 100 + STREAM - width);
    return (tokens[0] - 100) / T;
}

// Against the list of windows that the stream has, written down by hand: nothing but the last partial window is lost.
static void windows_are_those_of_the_shards_end_to_end(void **state) {
    (void)state;
    write_stream();
    struct data *d = open_data("s*.bin", "s*.bin", AHEAD);
    assert_int_equal(STREAM_WINDOWS, 8);
    assert_int_equal(data_windows(d, DATA_TRAIN), STREAM_WINDOWS);
    assert_int_equal(data_windows(d, DATA_EVAL), STREAM_WINDOWS);
    int order[2][STREAM_WINDOWS];
    for (int epoch = 0; epoch < 2; epoch++) {
        int seen[STREAM_WINDOWS] = {0};
        for (int i = 0; i < STREAM_WINDOWS; i++) {
            uint64_t sequence = (uint64_t)(epoch * STREAM_WINDOWS + i);
            int32_t tokens[WIDTH + 1];
            tokens[WIDTH] = -7;
            data_read_or_fail(d, DATA_EVAL, sequence, tokens); // in order, and again
            assert_int_equal(window_of(tokens, WIDTH), i);
            data_read_or_fail(d, DATA_TRAIN, sequence, tokens); // in any order, each once
            order[epoch][i] = window_of(tokens, WIDTH);
            assert_int_equal(seen[order[epoch][i]]++, 0);
            assert_int_equal(data_epoch(d, DATA_TRAIN, sequence), epoch);
            assert_int_equal(tokens[WIDTH], -7);
        }
    }
    assert_memory_not_equal(order[0], order[1], sizeof order[0]);
    data_close(d);
}

static void the_lookahead_reaches_into_the_next_shard(void **state) {
    (void)state;
    write_shard("a.bin", 2, 0, T, 1, 1); // the border is where the windows meet
    write_shard("b.bin", 2, 0, T + 1, 500, 1);
    write_shard("c.bin", 2, 0, T + AHEAD - 1, 900, 1);
    struct data *d = open_data("?.bin", "?.bin", AHEAD);
    assert_int_equal(data_windows(d, DATA_EVAL), 3);
    int32_t tokens[3][WIDTH];
    for (uint64_t i = 0; i < 3; i++) data_read_or_fail(d, DATA_EVAL, i, tokens[i]);
    for (int i = 0; i < 2; i++) assert_memory_equal(tokens[i] + T, tokens[i + 1], AHEAD * sizeof **tokens);
    assert_int_equal(tokens[0][T - 1], T);
    assert_int_equal(tokens[0][T], 500);
    assert_int_equal(tokens[2][0], 516);
    assert_int_equal(tokens[2][1], 900);
    assert_int_equal(tokens[2][WIDTH - 1], 900 + WIDTH - 2); // the very last one
    data_close(d);
}

static void ranks_together_read_every_window_of_the_shards(void **state) {
    (void)state;
    static const uint64_t rank_counts[] = {1, 2, 3, 4, 7};
    write_stream();
    for (size_t k = 0; k < sizeof rank_counts / sizeof *rank_counts; k++) {
        int seen[STREAM_WINDOWS] = {0};
        for (uint64_t rank = 0; rank < rank_counts[k]; rank++) {
            struct data *d = open_data("s*.bin", "s1.bin", AHEAD);
            for (uint64_t s = rank; s < STREAM_WINDOWS; s += rank_counts[k]) {
                int32_t tokens[WIDTH];
                data_read_or_fail(d, DATA_TRAIN, s, tokens);
                seen[window_of(tokens, WIDTH)]++;
            }
            data_close(d);
        }
        for (int w = 0; w < STREAM_WINDOWS; w++) assert_int_equal(seen[w], 1);
    }
}

static void how_shards_are_cut_changes_nothing(void **state) {
    (void)state;
    write_stream();
    write_shard("whole.bin", 4, 0, STREAM, 100, 1); // one shard, and 32 bits an id
    struct data *cut = open_data("s*.bin", NULL, AHEAD), *whole = open_data("whole.bin", NULL, AHEAD);
    for (uint64_t s = 0; s < 40; s++) {
        for (int split = DATA_TRAIN; split <= DATA_EVAL; split++) {
            int32_t a[WIDTH], b[WIDTH];
            data_read_or_fail(cut, (enum data_split)split, s, a);
            data_read_or_fail(whole, (enum data_split)split, s, b);
            assert_memory_equal(a, b, sizeof a);
        }
    }
    data_close(cut);
    data_close(whole);
}

// A loader that spins for ever at the end of the corpus (nanochat issues 358, 360 and 371).
static void one_shard_of_one_batch_wraps(void **state) {
    (void)state;
    enum { B = 4, STEPS = 50 };
    write_shard("small.bin", 2, 0, B * T + 1, 100, 1);
    struct data *d = open_data("small.bin", "small.bin", 1);
    assert_int_equal(data_windows(d, DATA_TRAIN), B);
    for (uint64_t step = 0; step < STEPS; step++) {
        int seen[B] = {0};
        for (uint64_t b = 0; b < B; b++) {
            int32_t tokens[T + 1];
            data_read_or_fail(d, DATA_TRAIN, step * B + b, tokens);
            assert_int_equal(data_epoch(d, DATA_TRAIN, step * B + b), step);
            assert_int_equal(seen[(tokens[0] - 100) / T]++, 0);
        }
    }
    data_close(d);
}

// Positions kept in 32 bits (Megatron-LM issues 1672 and 1056): in one shard, and over several that are each below the
// limit.
static void more_than_2_to_31_tokens_are_addressed(void **state) {
    (void)state;
    const uint32_t large = (1u << 31) + 10;
    if (!write_sparse_shard("large1.bin", large, 11) || !write_sparse_shard("large2.bin", large, 22)) skip();
    write_shard("large3.bin", 2, 0, 40, 1, 1);
    struct data *one = open_data("large1.bin", "large1.bin", 1), *three = open_data("large*.bin", "large*.bin", 1);
    int32_t tokens[T + 1];
    assert_true(data_windows(one, DATA_EVAL) == (large - 1ull) / T);
    data_read_or_fail(one, DATA_EVAL, data_windows(one, DATA_EVAL) - 1, tokens);
    assert_int_equal(tokens[T], 0);                         // 2^31 + 10 is 16 n + 10: the last id is in no window
    data_read_or_fail(three, DATA_EVAL, large / T, tokens); // 10 ids of the first, 7 of the second
    for (int i = 0; i <= T; i++) assert_int_equal(tokens[i], i == 9 ? 11 : 0);
    assert_true(data_windows(three, DATA_EVAL) == (2ull * large + 40 - 1) / T);
    data_read_or_fail(three, DATA_EVAL, 2ull * large / T, tokens); // behind 2^32: 2 * (2^31 + 10) is 16 n + 4
    for (int i = 0; i <= T; i++) assert_int_equal(tokens[i], i < 3 ? 0 : i == 3 ? 22 : i - 3);
    data_close(one);
    data_close(three);
}

// ---- patterns ----

static void shards_follow_each_other_in_the_order_of_their_bytes(void **state) {
    (void)state;
    static const char *const names[] = {"d/B.bin", "d/a10.bin", "d/a2.bin", "d/a_.bin", "d/b.bin", "e/A.bin"};
    enum { NAMES = sizeof names / sizeof *names };
    assert_int_equal(mkdir(at("d"), 0700) | mkdir(at("e"), 0700), 0);
    for (int i = NAMES - 1; i >= 0; i--) write_shard(names[i], 2, 0, T, (uint32_t)i, 0);
    write_shard("d/.hidden.bin", 2, 0, T, 99, 0); // as in a shell
    char *before = strdup(setlocale(LC_ALL, NULL));
    setlocale(LC_ALL, "en_US.UTF-8"); // where there is one, small and large letters mix
    struct data *d = open_data("[de]/*.bin", "[de]/*.bin", 1);
    setlocale(LC_ALL, before);
    free(before);
    int32_t tokens[T + 1];
    assert_int_equal(data_windows(d, DATA_EVAL), NAMES - 1);
    for (int i = 0; i < NAMES - 1; i++) {
        data_read_or_fail(d, DATA_EVAL, (uint64_t)i, tokens);
        assert_int_equal(tokens[0], i);
        assert_int_equal(tokens[T], i + 1);
    }
    data_close(d);
}

static void a_file_named_like_a_pattern_is_itself(void **state) {
    (void)state;
    write_shard("x[1].bin", 2, 0, 50, 100, 1);
    write_shard("x1.bin", 2, 0, 90, 200, 1);
    struct data *d = open_data("x[1].bin", "x[1]*.bin", 1); // the second is no file, and matches x1.bin
    int32_t tokens[T + 1];
    data_read_or_fail(d, DATA_TRAIN, 0, tokens);
    assert_true(tokens[0] < 200);
    data_read_or_fail(d, DATA_EVAL, 0, tokens);
    assert_int_equal(tokens[0], 200);
    data_close(d);
}

static void more_shards_than_files_may_be_open_by_default(void **state) {
    (void)state;
    enum { SHARDS = 100 };
    struct rlimit before, few;
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
    few = (struct rlimit){40, before.rlim_max};
    for (uint32_t i = 0; i < SHARDS; i++) {
        char name[32];
        snprintf(name, sizeof name, "n%03u.bin", i);
        write_shard(name, 2, 0, T, i, 0);
    }
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &few), 0);
    struct data *d = open_data("n*.bin", "n*.bin", 1);
    int32_t tokens[T + 1];
    data_read_or_fail(d, DATA_EVAL, SHARDS - 2, tokens);
    assert_int_equal(tokens[T], SHARDS - 1);
    data_close(d);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
}

static void description_counts_shards_and_tokens(void **state) {
    (void)state;
    write_stream();
    struct data *d = open_data("s*.bin", NULL, 1);
    char text[2048] = "";
    FILE *file = fmemopen(text, sizeof text, "w");
    data_describe(d, file);
    fclose(file);
    assert_contains(text, at("s*.bin"));
    assert_contains(text, "4 shards, 143 tokens of 16 bits | windows of 16: 7 from token 0 on\n");
    assert_contains(text, "windows of 16: 1 from token 126 on, held out\n");
    data_close(d);
}

// ---- text and stories with a tokenizer ----

static const char TOKENIZER[] = "tests/reference/tokenizer_gpt2.json";

static struct tokenizer *open_tokenizer(const char *path) {
    char error[FILE_ERROR];
    struct tokenizer *t = tokenizer_open(path, error, sizeof error);
    if (!t) fail_msg("%s", error);
    return t;
}

static const char TALE[] = "The cat sat on the mat, and the dog of the house said: \"I've seen 1234 of them!\"\n\n"
                           "Then both of them went to the river, <|endoftext|> and there they slept until noon.\n";

static void text_is_encoded_once_and_ends_with_the_end_of_text(void **state) {
    (void)state;
    struct tokenizer *t = open_tokenizer(TOKENIZER);
    struct token_list ids = {0};
    tokenizer_encode(t, TALE, sizeof TALE - 1, false, &ids);
    write_file("text", TALE, sizeof TALE - 1);
    struct data *d = data_open(at("text"), at("text"), t, 5, T, 1);
    assert_int_equal(data_settle_vocab(d, 0), tokenizer_vocab(t));
    assert_int_equal(data_windows(d, DATA_EVAL), ids.count / T);
    int32_t tokens[T + 1];
    for (size_t w = 0; w < ids.count / T; w++) {
        data_read_or_fail(d, DATA_EVAL, w, tokens);
        size_t inside = ids.count - w * T < T + 1 ? ids.count - w * T : T + 1;
        assert_memory_equal(tokens, ids.ids + w * T, inside * sizeof *tokens);
    }
    char description[2048] = "", wanted[64];
    FILE *file = fmemopen(description, sizeof description, "w");
    data_describe(d, file);
    fclose(file);
    snprintf(wanted, sizeof wanted, "%zu tokens of %zu bytes of text", ids.count + 1, sizeof TALE - 1);
    assert_contains(description, wanted);
    data_close(d);

    d = data_open(at("text"), at("text"), t, 5, (int)ids.count, 1); // one window, whose last target is the end
    int32_t *all = malloc(sizeof *all * (ids.count + 1));
    data_read_or_fail(d, DATA_TRAIN, 7, all);
    assert_memory_equal(all, ids.ids, sizeof *all * ids.count);
    assert_int_equal(all[ids.count], tokenizer_end_of_text(t));
    free(all);
    data_close(d);
    free(ids.ids);
    tokenizer_close(t);
}

// The same tales as in bytes, from the same random states.
static void stories_are_encoded_by_the_tokenizer(void **state) {
    (void)state;
    enum { LONG = 4000 };
    struct tokenizer *t = open_tokenizer(TOKENIZER);
    struct data *encoded = data_open("stories", NULL, t, 5, LONG, 1),
                *bytes = data_open("stories", NULL, NULL, 5, LONG, 1);
    assert_int_equal(data_settle_vocab(encoded, 0), tokenizer_vocab(t));
    static int32_t ids[LONG + 1], byte_ids[LONG + 1];
    int same = 0;
    for (uint64_t s = 0; s < 40; s++) {
        data_read_or_fail(encoded, DATA_TRAIN, s, ids);
        data_read_or_fail(bytes, DATA_TRAIN, s, byte_ids);
        char *told = calloc(1, tokenizer_decode_room(t, ids, LONG) + 1), plain[LONG + 1];
        size_t length = tokenizer_decode(t, told, tokenizer_decode_room(t, ids, LONG), ids, LONG);
        assert_true(length > LONG); // most tokens are more than one byte
        for (int i = 0; i < LONG; i++) plain[i] = byte_ids[i] == 256 ? '\n' : (char)byte_ids[i];
        same += memcmp(told, plain, LONG) == 0; // where both begin with a story
        free(told);
    }
    assert_in_range(same, 10, 30); // half of 40, three standard deviations around it
    data_close(encoded);
    data_close(bytes);
    tokenizer_close(t);
}

static void the_byte_tokenizer_is_none(void **state) {
    (void)state;
    struct tokenizer *t = tokenizer_open_bytes();
    write_file("text", TALE, sizeof TALE - 1);
    const char *specs[] = {"stories", at("text")};
    for (int k = 0; k < 2; k++) {
        struct data *with = data_open(specs[k], NULL, t, 5, T, 1), *without = data_open(specs[k], NULL, NULL, 5, T, 1);
        assert_int_equal(data_settle_vocab(with, 0), 257);
        for (uint64_t s = 0; s < 20; s++) {
            int32_t a[T + 1], b[T + 1];
            data_read_or_fail(with, DATA_TRAIN, s, a);
            data_read_or_fail(without, DATA_TRAIN, s, b);
            assert_memory_equal(a, b, sizeof a);
        }
        data_close(with);
        data_close(without);
    }
    tokenizer_close(t);
}

// ---- vocabularies ----

static int settled(const char *spec, const char *eval_spec, int wanted) {
    struct data *d = data_open(spec, eval_spec, NULL, 5, T, 1);
    int vocab = data_settle_vocab(d, wanted);
    data_close(d);
    return vocab;
}

static void the_vocabulary_is_that_of_the_header_or_a_common_one(void **state) {
    (void)state;
    write_shard("two.bin", 2, 0, 90, 0, 1);
    write_shard("four.bin", 4, 0, 90, 0, 1);
    write_shard("header.bin", 2, 1000, 90, 0, 1);
    assert_int_equal(settled(at("two.bin"), NULL, 0), 50257);
    assert_int_equal(settled(at("four.bin"), NULL, 0), 128256);
    assert_int_equal(settled(at("header.bin"), NULL, 0), 1000);
    assert_int_equal(settled("stories", at("header.bin"), 0), 1000);
    assert_int_equal(settled("stories", NULL, 0), 257);
    assert_int_equal(settled(at("two.bin"), NULL, 90), 90); // the header says nothing: reading will tell
    assert_int_equal(settled(at("header.bin"), NULL, 1024), 1024);
    struct tokenizer *t = open_tokenizer(TOKENIZER);
    struct data *two = data_open(at("two.bin"), NULL, t, 5, T, 1),
                *header = data_open(at("header.bin"), NULL, t, 5, T, 1);
    assert_int_equal(data_settle_vocab(two, 0), tokenizer_vocab(t));
    assert_int_equal(data_settle_vocab(header, 0), 1000);
    data_close(two);
    data_close(header);
    tokenizer_close(t);
}

// ---- errors ----

struct call {
    const char *spec, *eval_spec;
    int vocab;
    const char *changed; // NULL, or the file that gets another size after opening
    off_t size;
    const struct tokenizer *tokenizer;
};

static void read_all(void *argument) {
    const struct call *c = argument;
    struct data *d = data_open(c->spec, c->eval_spec, c->tokenizer, 5, T, 1);
    data_settle_vocab(d, c->vocab);
    if (c->changed && truncate(c->changed, c->size) != 0) _exit(9);
    int32_t tokens[T + 1];
    for (uint64_t i = 0; i < data_windows(d, DATA_TRAIN); i++) data_read_or_fail(d, DATA_TRAIN, i, tokens);
}

static void assert_refused(struct call call, const char *const words[]) {
    char text[8192];
    int code = run_child(read_all, &call, text, sizeof text);
    if (code != 2) fail_msg("exit code %d, wanted 2: %s", code, text);
    assert_ptr_equal(strchr(text, '\n'), text + strlen(text) - 1);
    assert_int_equal(strncmp(text, "mok: error: ", 12), 0);
    for (int i = 0; words[i]; i++) assert_contains(text, words[i]);
}
#define WORDS(...) ((const char *const[]){__VA_ARGS__, NULL})

static void patterns_without_a_match_are_refused(void **state) {
    (void)state;
    write_shard("x.bin", 2, 0, 90, 0, 1);
    assert_refused((struct call){.spec = at("y*.bin")}, WORDS(at("y*.bin"), "found no file", root, "--data"));
    assert_refused((struct call){.spec = "stories", .eval_spec = at("y*.bin")}, WORDS(at("y*.bin"), "--eval-data"));
    assert_refused((struct call){.spec = at("none/?.bin")}, WORDS(at("none/ (No such file or directory)")));
    assert_refused((struct call){.spec = "no_such_shard_*.bin"}, WORDS("no_such_shard_*.bin: found no file"));
    assert_refused((struct call){.spec = root}, WORDS("found a directory", "pattern"));
}

static void matches_that_are_no_shards_are_refused_by_name(void **state) {
    (void)state;
    write_shard("m1.bin", 2, 0, 90, 0, 1);
    write_file("m2.bin", "Once upon a time", 16);
    assert_refused((struct call){.spec = at("m*.bin")}, WORDS(at("m2.bin"), "a text file", "wanted a token shard"));
    assert_int_equal(unlink(at("m2.bin")) | mkdir(at("m3.bin"), 0700), 0);
    assert_refused((struct call){.spec = at("m*.bin")}, WORDS(at("m3.bin"), "found a directory"));
    write_shard("m0.bin", 2, 0, 90, 0, 1);
    assert_int_equal(truncate(at("m0.bin"), 1024 + 100), 0); // (vmlx-swift pull 217)
    assert_refused((struct call){.spec = at("m*.bin")}, WORDS(at("m0.bin"), "expected 1204 bytes", "found 1124"));
}

// One of them given as such was trained on as bytes, without a word (llama.cpp issue 662).
static void files_named_like_shards_that_are_none_are_refused(void **state) {
    (void)state;
    static const struct {
        const char *bytes, *what;
        size_t length;
    } files[] = {
        {"<!DOCTYPE html>\n<html><title>404 Not Found</title></html>\n", "found an HTML or XML page", 57},
        {"\x1f\x8b\x08\0\0\0\0\0\0\x03", "found a gzip file (it begins with 0x00088b1f = 559903)", 10},
        {"Once upon a time there was a long text.\n", "found a text file", 40},
        {"\1\2\3\4\5\6\7\0", "found a file of an unknown kind (it begins with 0x04030201 = 67305985)", 8},
        {"ab", "found a text file (too short for a magic number)", 2},
    };
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        write_file("x.bin", files[i].bytes, files[i].length);
        assert_true(source_is_shards(at("x.bin")));
        const char *const words[] = {at("x.bin"),      files[i].what, "wanted a token shard: 0x0134d888 = 20240520",
                                     "./tokenize, or", "FILE.txt",    NULL};
        assert_refused((struct call){.spec = at("x.bin")}, words);
        assert_refused((struct call){.spec = "stories", .eval_spec = at("x.bin")}, words);
    }
    write_file("x.bin", TALE, sizeof TALE - 1);
    assert_int_equal(rename(at("x.bin"), at("x.bin.txt")), 0); // as the message says
    assert_false(source_is_shards(at("x.bin.txt")));
    data_close(data_open(at("x.bin.txt"), NULL, NULL, 5, T, 1));
    assert_true(source_is_shards(at("*.txt")));
    assert_false(source_is_shards("stories") || source_is_shards("bin") || source_is_shards(at("missing")));
}

static void shards_of_two_tokenizers_are_refused(void **state) {
    (void)state;
    write_shard("a2.bin", 2, 0, 90, 0, 1);
    write_shard("b4.bin", 4, 0, 90, 0, 1);
    write_shard("c2.bin", 2, 1000, 90, 0, 1);
    assert_refused((struct call){.spec = at("[ab]*.bin")},
                   WORDS(at("b4.bin"), "found ids of 32 bits, wanted 16 as in", at("a2.bin")));
    assert_refused((struct call){.spec = at("[ac]*.bin")},
                   WORDS(at("c2.bin"), "vocabulary of 1000", "wanted 0 as in", at("a2.bin")));
    assert_refused((struct call){.spec = at("a2.bin"), .eval_spec = at("b4.bin")},
                   WORDS(at("b4.bin"), at("a2.bin"), "give shards of one tokenizer"));
    assert_refused((struct call){.spec = at("a2.bin"), .eval_spec = at("c2.bin")}, WORDS(at("c2.bin"), at("a2.bin")));
    // Two vocabularies of one size.
    write_shard("c3.bin", 2, 1000, 90, 0, 1);
    set_tokenizer("c2.bin", 0x22);
    set_tokenizer("c3.bin", 0x33);
    assert_refused((struct call){.spec = at("c*.bin")},
                   WORDS(at("c3.bin"), "found ids of the tokenizer 0000000000000033, wanted those of 0000000000000022",
                         at("c2.bin")));
    assert_refused((struct call){.spec = at("c2.bin"), .eval_spec = at("c3.bin")}, WORDS(at("c3.bin"), at("c2.bin")));
}

static void shards_of_another_tokenizer_than_the_run_s_are_refused(void **state) {
    (void)state;
    struct tokenizer *t = open_tokenizer(TOKENIZER);
    uint32_t vocab = (uint32_t)tokenizer_vocab(t);
    write_shard("a1.bin", 2, vocab, 90, 0, 1);
    write_shard("a2.bin", 2, vocab, 90, 0, 1);
    set_tokenizer("a1.bin", tokenizer_hash(t));
    set_tokenizer("a2.bin", tokenizer_hash(t));
    data_close(data_open(at("a*.bin"), at("a1.bin"), t, 5, T, 1));
    set_tokenizer("a1.bin", tokenizer_hash(t) ^ 1ull << 63);
    set_tokenizer("a2.bin", tokenizer_hash(t) ^ 1ull << 63);
    data_close(data_open(at("a*.bin"), NULL, NULL, 5, T, 1)); // the run does not know
    assert_refused((struct call){.spec = at("a*.bin"), .tokenizer = t},
                   WORDS(at("a1.bin"), "found ids of another tokenizer", "the run's tokenizer", "give --tokenizer"));
    assert_refused((struct call){.spec = "stories", .eval_spec = at("a2.bin"), .tokenizer = t},
                   WORDS(at("a2.bin"), "found ids of another tokenizer"));
    tokenizer_close(t);
}

// Ids above the vocabulary end in the middle of a step elsewhere (torchtitan pull 1495).
static void ids_above_the_vocabulary_name_file_and_position(void **state) {
    (void)state;
    write_shard("v1.bin", 2, 0, 40, 0, 0);
    write_shard("v2.bin", 2, 0, 40, 0, 0);
    unsigned char id[1024 + 80];
    make_header(id, 2, 40);
    memset(id + 1024, 0, 80);
    store(id + 1024 + 2 * 24, 300, 2); // the last id of a window's lookahead: 40 + 24 = 4 * 16
    write_file("v2.bin", id, sizeof id);
    assert_refused((struct call){.spec = at("v*.bin"), .eval_spec = "stories", .vocab = 300},
                   WORDS(at("v2.bin"), "found id 300 at position 24, wanted less than the vocabulary of 300"));
    write_shard("h.bin", 2, 80, 81, 0, 1); // above the header's own: the shard is damaged, whatever --vocab is
    assert_refused((struct call){.spec = at("h.bin"), .eval_spec = "stories", .vocab = 500},
                   WORDS(at("h.bin"), "found id 80 at position 80, wanted less than the vocabulary of 80"));
}

static void a_vocabulary_below_that_of_the_data_is_refused(void **state) {
    (void)state;
    write_shard("h.bin", 2, 1000, 90, 0, 1);
    assert_refused((struct call){.spec = at("h.bin"), .vocab = 999},
                   WORDS("--vocab: found 999, wanted at least 1000", "--data", at("h.bin")));
    assert_refused((struct call){.spec = "stories", .eval_spec = at("h.bin"), .vocab = 999},
                   WORDS("--vocab: found 999, wanted at least 1000", "--eval-data", at("h.bin")));
}

static void a_file_that_changes_during_the_run_is_noticed(void **state) {
    (void)state;
    write_stream();
    assert_refused((struct call){.spec = at("s*.bin"), .changed = at("s2.bin"), .size = 1033},
                   WORDS(at("s2.bin"), "found 1033 bytes, wanted the 1034", "do not change it during a run"));
    write_file("text", TALE, sizeof TALE - 1);
    assert_refused((struct call){.spec = at("text"), .changed = at("text"), .size = 1000}, // longer is another one too
                   WORDS(at("text"), "found 1000 bytes, wanted the", "do not change it during a run"));
}

static void text_that_the_tokenizer_cannot_take_is_refused(void **state) {
    (void)state;
    size_t bytes;
    char *json = read_bytes(TOKENIZER, &bytes);
    for (char *name; (name = strstr(json, "<|endoftext|>"));) memcpy(name, "<|something|>", 13);
    write_file("tokenizer.json", json, bytes);
    free(json);
    struct tokenizer *none = open_tokenizer(at("tokenizer.json")), *t = open_tokenizer(TOKENIZER);
    write_file("text", TALE, sizeof TALE - 1);
    assert_refused((struct call){.spec = at("text"), .tokenizer = none},
                   WORDS(at("text"), "names no end of text", "eos_token"));
    assert_refused((struct call){.spec = "stories", .tokenizer = none}, WORDS("names no end of text"));
    assert_int_equal(truncate(at("text"), (1 << 30) + 1), 0);
    assert_refused((struct call){.spec = at("text"), .tokenizer = t},
                   WORDS(at("text"), "found 1073741825 bytes", "at most 1073741824", "./tokenize"));
    assert_refused((struct call){.spec = "stories", .tokenizer = t, .vocab = 257},
                   WORDS("--vocab: found 257, wanted at least", "stories"));
    tokenizer_close(none);
    tokenizer_close(t);
}

static void assert_warned(const char *spec, const char *eval_spec, const char *path) {
    struct call call = {.spec = spec, .eval_spec = eval_spec};
    char text[8192], wanted[512] = "";
    if (path)
        snprintf(wanted, sizeof wanted,
                 "mok: warning: %s: found in --data and in --eval-data, wanted in one of them: what is evaluated is "
                 "trained on\n",
                 path);
    int code = run_child(read_all, &call, text, sizeof text);
    if (code != 0) fail_msg("exit code %d, wanted 0: %s", code, text);
    assert_string_equal(text, wanted);
}

// A pattern that matches the evaluation shard too, and other names of one file.
static void what_is_trained_on_and_evaluated_is_noticed(void **state) {
    (void)state;
    write_shard("s_train_1.bin", 2, 0, 90, 0, 1);
    write_shard("s_train_2.bin", 2, 0, 90, 0, 1);
    write_shard("s_val_0.bin", 2, 0, 90, 0, 1); // the same ids, but its own
    assert_warned(at("s_train_*.bin"), at("s_val_0.bin"), NULL);
    assert_warned(at("s_train_*.bin"), NULL, NULL);
    assert_warned(at("s_*.bin"), at("s_val_0.bin"), at("s_val_0.bin"));
    assert_warned(at("s_train_2.bin"), at("s_*.bin"), at("s_train_2.bin"));
    assert_int_equal(symlink("s_train_1.bin", at("soft.bin")) | link(at("s_train_1.bin"), at("hard.bin")), 0);
    assert_warned(at("s_train_*.bin"), at("soft.bin"), at("soft.bin"));
    assert_warned(at("s_train_*.bin"), at("hard.bin"), at("hard.bin"));
    write_file("text", TALE, sizeof TALE - 1);
    write_file("copy", TALE, sizeof TALE - 1);
    assert_warned(at("text"), at("text"), at("text"));
    assert_warned(at("text"), at("copy"), NULL);
    assert_warned("stories", "stories", NULL); // evaluated are others
    assert_warned("stories", at("text"), NULL);
}

static void a_failed_read_is_returned(void **state) {
    (void)state;
    write_stream();
    struct data *d = open_data("s3.bin", NULL, 1);
    assert_int_equal(truncate(at("s3.bin"), 1024), 0);
    struct data_error e = {.internal = true};
    int32_t tokens[T + 1];
    assert_false(data_read(d, DATA_TRAIN, 0, tokens, &e));
    assert_false(e.internal);
    assert_contains(e.line, at("s3.bin"));
    assert_int_equal(strncmp(e.line, root, strlen(root)), 0); // no prefix
    data_close(d);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, make_root, remove_root)
int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(windows_are_those_of_the_shards_end_to_end),
        TEST(the_lookahead_reaches_into_the_next_shard),
        TEST(ranks_together_read_every_window_of_the_shards),
        TEST(how_shards_are_cut_changes_nothing),
        TEST(one_shard_of_one_batch_wraps),
        TEST(more_than_2_to_31_tokens_are_addressed),
        TEST(shards_follow_each_other_in_the_order_of_their_bytes),
        TEST(a_file_named_like_a_pattern_is_itself),
        TEST(more_shards_than_files_may_be_open_by_default),
        TEST(description_counts_shards_and_tokens),
        TEST(text_is_encoded_once_and_ends_with_the_end_of_text),
        TEST(stories_are_encoded_by_the_tokenizer),
        TEST(the_byte_tokenizer_is_none),
        TEST(the_vocabulary_is_that_of_the_header_or_a_common_one),
        TEST(patterns_without_a_match_are_refused),
        TEST(matches_that_are_no_shards_are_refused_by_name),
        TEST(files_named_like_shards_that_are_none_are_refused),
        TEST(shards_of_two_tokenizers_are_refused),
        TEST(shards_of_another_tokenizer_than_the_run_s_are_refused),
        TEST(ids_above_the_vocabulary_name_file_and_position),
        TEST(a_vocabulary_below_that_of_the_data_is_refused),
        TEST(a_file_that_changes_during_the_run_is_noticed),
        TEST(text_that_the_tokenizer_cannot_take_is_refused),
        TEST(what_is_trained_on_and_evaluated_is_noticed),
        TEST(a_failed_read_is_returned),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

// ./tokenize as its users run it: build/cpu/tokenize, or what MOK_TOKENIZE names. And the cuts of long documents.
#include "tests/program.h"

#include "data/choices.h"
#include "data/documents.h"
#include "data/token_file.h"

static char error[FILE_ERROR];

static void expect(bool ok) {
    if (!ok) fail_msg("%s", error);
}

static void write_text(const char *name, const char *text) { write_file(name, text, strlen(text)); }

// What stands for standard input of the runs that follow.
static void feed(const char *name) {
    int file = open(at(name), O_RDONLY);
    assert_true(file >= 0);
    assert_int_equal(dup2(file, STDIN_FILENO), STDIN_FILENO);
    close(file);
}

#define BYTES "--tokenizer", "bytes"

enum { END = 256 }; // of text, of the byte tokenizer

// The ids of a shard that --check finds good, for the caller to free.
static struct token_list read_shard(const char *name) {
    struct token_file f;
    expect(token_file_open(&f, at(name), error, sizeof error) &&
           token_file_check(&f, &(int32_t){0}, error, sizeof error));
    struct token_list list = {malloc(sizeof *list.ids * (size_t)f.count), (size_t)f.count, (size_t)f.count};
    expect(token_file_read(&f, 0, list.count, 0, list.ids, error, sizeof error));
    token_file_close(&f);
    return list;
}

// The shard holds this text in bytes, "\xff" standing for an end of text.
static void assert_shard(const char *name, const char *text) {
    struct token_list found = read_shard(name);
    assert_int_equal(found.count, strlen(text));
    for (size_t i = 0; i < found.count; i++) {
        int wanted = (unsigned char)text[i] == 0xff ? END : (unsigned char)text[i];
        if (found.ids[i] != wanted) fail_msg("%s: id %zu is %d, wanted %d", name, i, found.ids[i], wanted);
    }
    free(found.ids);
}

static int files_in_root(void) {
    char command[128];
    snprintf(command, sizeof command, "ls %s | grep -vc 'stdout\\|stderr'", root);
    FILE *list = popen(command, "r");
    int count = -1;
    assert_int_equal(fscanf(list, "%d", &count), 1);
    pclose(list);
    return count;
}

// ---- text to shards ----

static void a_file_is_one_document(void **state) {
    (void)state;
    write_text("a.txt", "one\n\ntwo <|endoftext|>\n"); // the name of a special token is plain text
    assert_runs(BYTES, "--out", at("t"), at("a.txt"));
    assert_shard("t_train_000001.bin", "\xff"
                                       "one\n\ntwo <|endoftext|>\n");
    assert_contains(out, "1 documents, 23 bytes, 24 tokens, 0.958 bytes per token, 1 files, ");
    assert_string_equal(err, "");
    assert_int_equal(files_in_root(), 4); // the text, the shard, and the tokenizer's two files
    struct token_file f;
    expect(token_file_open(&f, at("t_train_000001.bin"), error, sizeof error));
    assert_int_equal(f.vocab, 257);
    assert_int_equal(f.id_bytes, 2);
    assert_true(f.hash != 0);
    token_file_close(&f);
}

static void lines_and_json_lines_are_documents(void **state) {
    (void)state;
    write_text("a.txt", "one\n\ntwo \n three"); // empty lines are none, and nothing else is taken away
    assert_runs(BYTES, "--documents", "lines", "--out", at("l"), at("a.txt"));
    assert_shard("l_train_000001.bin", "\xff"
                                       "one\xff"
                                       "two \xff three");
    write_text("a.jsonl",
               "{\"text\": \"a\\nb\", \"id\": 1}\n \t\r\n{\"id\": {\"text\": 0}, \"text\": \"\\u00e9\\\\u0000\"}\n"
               "{\"text\": \"\"}\n{\"text\":\"z\"}");
    assert_runs(BYTES, "--documents=jsonl", "--out", at("j"), at("a.jsonl"));
    assert_shard("j_train_000001.bin", "\xff"
                                       "a\nb\xff\xc3\xa9\\u0000\xff"
                                       "z");
    assert_contains(out, "3 documents, 12 bytes, 15 tokens");
}

// Of Windows: what its editors put around the text of a line is none.
static void line_ends_and_byte_order_marks_are_no_text(void **state) {
    (void)state;
    write_text("a.txt", "\xef\xbb\xbfone\r\n\r\n\xef\xbb\xbftwo\r\r\nth\rree\r"); // one \r belongs to a \n
    write_text("b.txt", "\xef\xbb\xbf\r\nfour\r\n");
    assert_runs(BYTES, "--documents", "lines", "--out", at("l"), at("a.txt"), at("b.txt"));
    assert_shard("l_train_000001.bin", "\xff"
                                       "one\xff\xef\xbb\xbftwo\r\xffth\rree\r\xff"
                                       "four");
    write_text("a.jsonl", "\xef\xbb\xbf{\"text\": \"a\"}\r\n\r\n{\"text\": \"b\"}\r\n");
    assert_runs(BYTES, "--documents", "jsonl", "--out", at("j"), at("a.jsonl"));
    assert_shard("j_train_000001.bin", "\xff"
                                       "a\xff"
                                       "b");
    write_text("c.txt", "\xef\xbb\xbf");
    assert_refused(BYTES, "--documents", "lines", "--out", at("c"), at("c.txt"));
    assert_contains(err, "found no text");
}

static void inputs_follow_one_another(void **state) {
    (void)state;
    write_text("a.txt", "one");
    write_text("b.txt", "two");
    write_text("empty", "");
    feed("b.txt");
    assert_runs(BYTES, "--out", at("t"), at("a.txt"), at("empty"), "-", at("a.txt"));
    assert_shard("t_train_000001.bin", "\xff"
                                       "one\xff"
                                       "two\xff"
                                       "one");
    assert_contains(out, "3 documents");
}

static void shards_are_cut_at_the_token(void **state) {
    (void)state;
    write_text("a.txt", "abcdefghijklm");
    assert_runs(BYTES, "--out", at("t"), "--shard-tokens", "5", "--eval-tokens", "3", at("a.txt"));
    assert_shard("t_val_000000.bin", "\xff"
                                     "ab");
    assert_shard("t_train_000001.bin", "cdefg");
    assert_shard("t_train_000002.bin", "hijkl");
    assert_shard("t_train_000003.bin", "m");
    assert_contains(out, "14 tokens, 0.929 bytes per token, 4 files");
    assert_runs(BYTES, "--out", at("u"), "--shard-tokens", "7", at("a.txt")); // no empty shard behind the last
    assert_shard("u_train_000002.bin", "ghijklm");
    assert_false(exists("u_train_000003.bin") || exists("u_val_000000.bin"));
}

static void end_of_text_can_be_named(void **state) {
    (void)state;
    write_text("a.txt", "x");
    assert_runs(BYTES, "--end-of-text", "<|endoftext|>", "--out", at("t"), at("a.txt"));
    assert_shard("t_train_000001.bin", "\xff"
                                       "x");
    assert_refused(BYTES, "--end-of-text", "<eos>", "--out", at("u"), at("a.txt"));
    assert_error("--end-of-text: found '<eos>'");
}

// Else ./train would refuse the shards beside the very tokenizer that lies there.
static void the_tokenizer_beside_the_shards_is_the_one_in_their_headers(void **state) {
    (void)state;
    static const char *const tokenizers[] = {"bytes", "tests/reference/tokenizer_gpt2.json", "config", "bare"};
    char command[512];
    assert_int_equal(mkdir(at("config"), 0777) | mkdir(at("bare"), 0777), 0);
    snprintf(command, sizeof command, "cp tests/reference/tokenizer_llama3.json %s && cp %s %s",
             at("config/tokenizer.json"), at("config/tokenizer.json"), at("bare/tokenizer.json"));
    assert_int_equal(system(command), 0);
    write_text("config/tokenizer_config.json", "{\"eos_token\": \"<|begin_of_text|>\"}");
    write_text("a.txt", "Ein Satz\n");
    for (int i = 0; i < 8; i++) {
        const char *tokenizer = i / 2 < 2 ? tokenizers[i / 2] : at(tokenizers[i / 2]);
        const char *end = i % 2 == 0  ? NULL
                          : i / 2 < 2 ? "--end-of-text=<|endoftext|>"
                                      : "--end-of-text=<|end_of_text|>";
        assert_runs("--tokenizer", tokenizer, "--overwrite", "--out", at("new/t"), at("a.txt"), end);
        struct token_file f;
        expect(token_file_open(&f, at("new/t_train_000001.bin"), error, sizeof error));
        struct tokenizer *t = tokenizer_open(at("new"), error, sizeof error);
        expect(t != NULL);
        assert_true(f.tokenizer && f.tokenizer == tokenizer_hash(t));
        tokenizer_close(t);
        token_file_close(&f);
        assert_runs("--tokenizer", at("new"), "--decode", at("new/t_train_000001.bin"));
        assert_contains(out, "Ein Satz");
        assert_int_equal(remove(at("new/tokenizer_config.json")), 0); // not the next one's
    }
}

// ---- what is there already ----

static void shards_are_replaced_only_when_asked(void **state) {
    (void)state;
    write_text("a.txt", "abcdefghijklm");
    write_text("b.txt", "xyz");
    write_text("t_train_7.bin", "not a shard's name");
    assert_runs(BYTES, "--out", at("t"), "--shard-tokens", "3", "--eval-tokens", "3", at("a.txt"));
    assert_refused(BYTES, "--out", at("t"), at("b.txt"));
    assert_error("--out: found /tmp/");
    assert_contains(err, "--overwrite");
    assert_shard("t_train_000001.bin", "cde");
    assert_runs(BYTES, "--out", at("t"), "--overwrite", at("b.txt"));
    assert_shard("t_train_000001.bin", "\xff"
                                       "xyz");
    // Older shards would be read between the new ones.
    assert_false(exists("t_train_000002.bin") || exists("t_val_000000.bin"));
    assert_true(exists("t_train_7.bin"));
    assert_runs(BYTES, "--out", at("other"), at("b.txt")); // another prefix, the same tokenizer
}

static void another_tokenizer_is_replaced_only_when_asked(void **state) {
    (void)state;
    write_text("a.txt", "abc");
    write_text("tokenizer_config.json", "{}");
    assert_refused(BYTES, "--out", at("t"), at("a.txt"));
    assert_error("--out: found another tokenizer in");
    assert_int_equal(files_in_root(), 2);
    assert_runs(BYTES, "--out", at("t"), "--overwrite", at("a.txt"));
    struct tokenizer *t = tokenizer_open(root, error, sizeof error);
    expect(t != NULL);
    assert_true(tokenizer_is_bytes(t));
    tokenizer_close(t);
    // The tokenizer that lies there already, by its folder.
    assert_runs("--tokenizer", root, "--out", at("u"), at("a.txt"));
    assert_shard("u_train_000001.bin", "\xff"
                                       "abc");
    assert_refused("--tokenizer", "tests/reference/tokenizer_gpt2.json", "--out", at("v"), at("a.txt"));
    assert_error("--out: found another tokenizer in");
}

static void folder_of_the_shards_is_made(void **state) {
    (void)state;
    write_text("a.txt", "abc");
    assert_runs(BYTES, "--out", at("new/t"), at("a.txt"));
    assert_shard("new/t_train_000001.bin", "\xff"
                                           "abc");
    assert_refused(BYTES, "--out", at("no/such/t"), at("a.txt"));
    assert_error("--out: cannot make the folder");
    assert_refused(BYTES, "--out", at("a.txt/t"), at("a.txt"));
    assert_error("--out: ");
    assert_refused(BYTES, "--out", at("new/"), at("a.txt"));
    assert_error("--out: found '");
}

// ---- bad input leaves nothing ----

static void bad_json_lines_are_refused_by_number(void **state) {
    (void)state;
    static const struct {
        const char *line, *reason;
    } bad[] = {
        {"{\"text\": \"a\"", "found no JSON at byte"},
        {"{\"text\": \"a\"} x", "found no JSON at byte"},
        {"[\"text\"]", "found no JSON"},
        {"{\"text\": 5}", "found no string member \"text\""},
        {"{\"Text\": \"a\"}", "found no string member \"text\""},
        {"{\"text\": \"a\\u0000b\"}", "found a character zero"},
        {"plain", "found no JSON"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        char text[256];
        snprintf(text, sizeof text, "{\"text\": \"good\"}\n\n%s\n{\"text\": \"good\"}\n", bad[i].line);
        write_text("a.jsonl", text);
        assert_refused(BYTES, "--documents", "jsonl", "--shard-tokens", "2", "--out", at("t"), at("a.jsonl"));
        char place[256];
        snprintf(place, sizeof place, "%s:3: %s", at("a.jsonl"), bad[i].reason);
        assert_error(place);
        assert_int_equal(files_in_root(), 1);
    }
}

// Thousands of good documents have been written to shards before the bad one comes.
static void shards_before_a_bad_line_are_removed(void **state) {
    (void)state;
    FILE *file = fopen(at("a.jsonl"), "w");
    for (int i = 0; i < 20000; i++) fprintf(file, "{\"text\": \"good %d\"}\n", i);
    fprintf(file, "bad\n");
    fclose(file);
    assert_refused(BYTES, "--documents", "jsonl", "--shard-tokens", "50000", "--eval-tokens", "10", "--out", at("t"),
                   at("a.jsonl"));
    assert_contains(err, ".jsonl:20001: found no JSON");
    assert_int_equal(files_in_root(), 1);
}

// (A model, an archive, a folder given as text: llama.cpp issue 662.)
static void files_that_are_no_text_are_refused(void **state) {
    (void)state;
    uint32_t shard[300] = {20240326, 3};
    write_file("model.bin", shard, sizeof shard);
    assert_refused(BYTES, "--out", at("t"), at("model.bin"));
    assert_contains(err, "model.bin: found an llm.c GPT-2 model, wanted plain text");
    write_file("a.gz", "\x1f\x8b\x08\x00\x00\x00\x00\x00", 8);
    assert_refused(BYTES, "--out", at("t"), at("a.gz"));
    assert_contains(err, "a.gz: found a gzip file");
    assert_refused(BYTES, "--out", at("t"), root);
    assert_contains(err, ": found a folder, wanted a text file");
    assert_refused(BYTES, "--out", at("t"), at("missing"));
    assert_contains(err, "/missing: cannot be opened (No such file or directory)");
    write_text("empty", "");
    assert_refused(BYTES, "--out", at("t"), at("empty"));
    assert_error(at("empty"));
    assert_contains(err, "/empty: found no text, wanted some\n");
    assert_refused(BYTES, "--out", at("t"), at("empty"), at("empty"));
    assert_contains(err, "/empty: found no text in it and in the other files, wanted some\n");
    feed("empty");
    assert_refused(BYTES, "--out", at("t"), "-");
    assert_error("standard input: found no text, wanted some");
    write_text("a.txt", "abc");
    assert_refused(BYTES, "--out", at("t"), "--eval-tokens", "4", at("a.txt"));
    assert_error("--eval-tokens: found 4 tokens in all, wanted more than 4");
    assert_int_equal(files_in_root(), 4);
}

// A limit on file sizes stands for a full disk.
static void full_disk_leaves_no_shard(void **state) {
    (void)state;
    char text[30000];
    memset(text, 'x', sizeof text);
    write_file("a.txt", text, sizeof text);
    struct rlimit before, small;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    small = (struct rlimit){40000, before.rlim_max};
    void (*handler)(int) = signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    int code = run(BYTES, "--out", at("t"), "--eval-tokens", "9", at("a.txt"));
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
    signal(SIGXFSZ, handler);
    assert_code(code, 1);
    assert_error("--out: /tmp/");
    assert_contains(err, "File too large");
    assert_int_equal(files_in_root(), 1);
}

static void wait_for(const char *name) {
    for (int i = 0; i < 5000 && !exists(name); i++) usleep(10000);
    assert_true(exists(name));
}

// Killed while it waits for more input: whatever has a final name is whole.
static void killed_run_leaves_whole_shards(void **state) {
    (void)state;
    int ends[2];
    assert_int_equal(pipe2(ends, O_CLOEXEC), 0);
    int old = dup(STDIN_FILENO);
    assert_int_equal(dup2(ends[0], STDIN_FILENO), STDIN_FILENO);
    pid_t pid = start(BYTES, "--documents", "lines", "--shard-tokens", "5000", "--out", at("t"), "-");
    close(ends[0]);
    for (int i = 0; i < 30000; i++) assert_int_equal(write(ends[1], "line\n", 5), 5);
    wait_for("t_train_000003.bin");
    kill(pid, SIGKILL);
    assert_int_equal(finish_program(pid), -SIGKILL);
    close(ends[1]);
    assert_int_equal(dup2(old, STDIN_FILENO), STDIN_FILENO);
    close(old);
    for (int i = 1; i < 100; i++) {
        char name[64];
        snprintf(name, sizeof name, "t_train_%06d.bin", i);
        if (exists(name)) assert_runs("--check", at(name));
    }
    write_text("a.txt", "abc");
    assert_runs(BYTES, "--out", at("t"), "--overwrite", at("a.txt")); // and what it left behind goes
    assert_int_equal(files_in_root(), 4);
}

// ---- long documents ----

static const char *const references[] = {"tests/reference/tokenizer_gpt2.json", "tests/reference/tokenizer_llama3.json",
                                         "tests/reference/tokenizer_deepseek.json"};

// Text with every kind of white space, sentence ends before line ends, and letters of several scripts.
static char *make_text(size_t bytes, uint64_t random) {
    static const char *const parts[] = {"word",    " the",     " and",  "a",    "123",  " 7",     ".",    ",",
                                        "!",       "\n",       "\n\n",  "\r\n", "  ",   "\t",     " ",    "\n  ",
                                        "。",      "これは",   "人",    "é",    "это",  " слово", "　",   "\u00a0",
                                        "don't",   " I'll",    "/",     "//",   "\n/x", "x\n",    ".\n",  ".\r\n",
                                        "   \n\n", "\xe2\x80", " \xff", "😀",    "#\n",  "  \n",   "）\n", "end"};
    char *text = malloc(bytes + 16);
    size_t used = 0;
    while (used < bytes) {
        const char *part = parts[(size_t)(test_uniform(&random) * (sizeof parts / sizeof *parts))];
        memcpy(text + used, part, strlen(part));
        used += strlen(part);
    }
    text[bytes] = 0;
    return text;
}

static bool cut_keeps_ids(const struct tokenizer *t, const char *text, size_t bytes, size_t cut) {
    struct token_list whole = {0}, parts = {0};
    tokenizer_encode(t, text, bytes, false, &whole);
    tokenizer_encode(t, text, cut, false, &parts);
    tokenizer_encode(t, text + cut, bytes - cut, false, &parts);
    bool same = whole.count == parts.count && memcmp(whole.ids, parts.ids, sizeof *whole.ids * whole.count) == 0;
    free(whole.ids);
    free(parts.ids);
    return same;
}

static void cuts_of_a_document_keep_its_ids(void **state) {
    (void)state;
    enum { TEXT = 2500 };
    for (int i = 0; i < 3; i++) {
        struct tokenizer *t = tokenizer_open(references[i], error, sizeof error);
        expect(t != NULL);
        int careless = 0;
        for (uint64_t seed = 0; seed < 200; seed++) {
            char *text = make_text(TEXT, seed);
            size_t cut = documents_find_cut(t, text, TEXT);
            assert_true(cut > TEXT / 2 && cut < TEXT); // there is always one
            if (!cut_keeps_ids(t, text, TEXT, cut)) fail_msg("%s, text %d: cut at %zu", references[i], (int)seed, cut);
            size_t line_end = (size_t)(strchr(text + TEXT / 2, '\n') - text);
            careless += !cut_keeps_ids(t, text, TEXT, line_end) + !cut_keeps_ids(t, text, TEXT, line_end + 1);
            free(text);
        }
        assert_true(careless > 20); // in front of any line end, or behind it, would not do
        tokenizer_close(t);
    }
}

static void text_that_cannot_be_cut_is_not(void **state) {
    (void)state;
    enum { TEXT = 4000 };
    struct tokenizer *t = tokenizer_open(references[1], error, sizeof error);
    expect(t != NULL);
    char text[TEXT];
    memset(text, 'x', sizeof text);
    assert_int_equal(documents_find_cut(t, text, TEXT), 0);
    memset(text, '\n', sizeof text);
    assert_int_equal(documents_find_cut(t, text, TEXT), 0);
    assert_int_equal(documents_find_cut(t, text, 3), 0);
    assert_int_equal(documents_find_cut(t, text, 0), 0);
    tokenizer_close(t);
}

// The tokenizer of bytes with one id more, for two bytes. It does not split text into words before it merges.
static void write_pair_tokenizer(const char *first, const char *second, int id) {
    struct tokenizer *bytes = tokenizer_open_bytes();
    expect(tokenizer_write(bytes, root, error, sizeof error));
    tokenizer_close(bytes);
    cJSON *json = read_json("tokenizer.json");
    cJSON *model = cJSON_GetObjectItem(json, "model");
    char text[32];
    snprintf(text, sizeof text, "%s%s", first, second);
    cJSON_AddNumberToObject(cJSON_GetObjectItem(model, "vocab"), text, id);
    snprintf(text, sizeof text, "%s %s", first, second);
    cJSON_AddItemToArray(cJSON_GetObjectItem(model, "merges"), cJSON_CreateString(text));
    expect(file_write_json(at("pair.json"), json, error, sizeof error));
    cJSON_Delete(json);
}

// A token that begins with a letter and ends with a space: no pattern keeps them apart, and only asking the tokenizer
// shows it.
static void cuts_follow_the_tokenizer_where_words_do_not_matter(void **state) {
    (void)state;
    enum { TEXT = 4096 };
    write_pair_tokenizer("x", "\u0120", 300); // how tokenizer.json writes a space
    struct tokenizer *t = tokenizer_open(at("pair.json"), error, sizeof error);
    expect(t != NULL);
    char text[TEXT];
    for (size_t i = 0; i < TEXT; i++) text[i] = "xx xx xx\nx xx x "[i % 16];
    size_t cut = documents_find_cut(t, text, TEXT);
    assert_true(cut > TEXT / 2);
    assert_int_equal(text[cut], '\n');
    assert_true(cut_keeps_ids(t, text, TEXT, cut));
    tokenizer_close(t);
}

// Several pieces, encoded by several threads: the ids of the whole text at once.
static void long_file_has_the_ids_of_one_piece(void **state) {
    (void)state;
    enum { TEXT = 3 << 20 };
    char *text = make_text(TEXT, 77);
    memset(text + TEXT / 2, 'y', 1 << 20); // and a stretch without a place to cut
    write_file("a.txt", text, TEXT);
    setenv("OMP_NUM_THREADS", "2", 1);
    for (int i = 0; i < 3; i++) {
        struct tokenizer *t = tokenizer_open(references[i], error, sizeof error);
        expect(t != NULL);
        struct token_list wanted = {0};
        tokenizer_encode(t, text, TEXT, false, &wanted);
        assert_runs("--tokenizer", references[i], "--out", at("t"), "--overwrite", at("a.txt"));
        struct token_list found = read_shard("t_train_000001.bin");
        assert_int_equal(found.count, 1 + wanted.count);
        assert_int_equal(found.ids[0], tokenizer_end_of_text(t));
        assert_memory_equal(found.ids + 1, wanted.ids, sizeof *wanted.ids * wanted.count);
        free(found.ids);
        free(wanted.ids);
        tokenizer_close(t);
    }
    use_one_thread();
    free(text);
}

// ---- questions ----

#define GPT2 "--tokenizer", "tests/reference/tokenizer_gpt2.json"

static void assert_list(const struct tokenizer *t, struct choice_ids list, const char *text) {
    struct token_list wanted = {0};
    tokenizer_encode(t, text, strlen(text), false, &wanted);
    assert_int_equal(list.count, wanted.count);
    for (int i = 0; i < list.count; i++) assert_int_equal(list.ids[i], wanted.ids[i]);
    free(wanted.ids);
}

static void questions_become_choices(void **state) {
    (void)state;
    write_text("q.jsonl", "{\"ind\": 1, \"ctx\": \"The cat\", \"endings\": [\"sat there\", \"flew\"], \"label\": 0}\n"
                          "{\"label\": 2, \"endings\": [\"a\", \"b\", \"die Ente\"], \"ctx\": \"So geht das\"}\n\n");
    assert_runs("--choices", at("q.jsonl"), GPT2, "--out", at("q.bin"));
    assert_string_equal(out + strlen(out) - 7, " bytes\n");
    assert_contains(out, "2 examples, the longest of ");
    struct tokenizer *t = tokenizer_open(references[0], error, sizeof error);
    expect(t != NULL);
    struct choices c;
    expect(choices_open(&c, at("q.bin"), t, tokenizer_vocab(t), error, sizeof error));
    assert_int_equal(c.count, 2);
    assert_true(c.tokenizer == tokenizer_hash(t));
    assert_int_equal(c.examples[0].label, 0);
    assert_int_equal(c.examples[0].completions, 2);
    assert_list(t, c.examples[0].context, "The cat");
    assert_list(t, c.examples[0].completion[0], " sat there");
    assert_list(t, c.examples[0].completion[1], " flew");
    assert_int_equal(c.examples[1].label, 2);
    assert_list(t, c.examples[1].completion[2], " die Ente");
    choices_close(&c);
    tokenizer_close(t);

    assert_refused("--choices", at("q.jsonl"), BYTES, "--out", at("q.bin"));
    assert_error("--out: found /tmp/");
    feed("q.jsonl");
    assert_runs("--choices", "-", BYTES, "--out", at("q.bin"), "--overwrite");
    assert_int_equal(files_in_root(), 2);
}

static void assert_question_refused(const char *line, const char *reason) {
    size_t size = strlen(line) + 200;
    char *text = malloc(size);
    snprintf(text, size, "{\"ctx\": \"a\", \"endings\": [\"b\", \"c\"], \"label\": 1}\n%s\n", line);
    write_text("q.jsonl", text);
    free(text);
    assert_refused("--choices", at("q.jsonl"), BYTES, "--out", at("q.bin"));
    char place[64];
    snprintf(place, sizeof place, "%s:2: ", at("q.jsonl"));
    assert_error(place);
    assert_contains(err, reason);
    assert_int_equal(files_in_root(), 1);
}

static void bad_questions_are_refused_by_number(void **state) {
    (void)state;
    static const struct {
        const char *ctx, *endings, *label, *reason; // JSON; NULL: left out
    } bad[] = {
        {NULL, "[\"b\", \"c\"]", "1", "found nothing as \"ctx\", wanted a string"},
        {"7", "[\"b\", \"c\"]", "1", "found a number as \"ctx\", wanted a string"},
        {"null", "[\"b\", \"c\"]", "1", "found null as \"ctx\", wanted a string"},
        {"\"a\"", NULL, "1", "found nothing as \"endings\", wanted an array of 2 to 16 strings"},
        {"\"a\"", "\"b\"", "1", "found a string as \"endings\", wanted an array"},
        {"\"a\"", "{\"0\": \"b\"}", "1", "found an object as \"endings\", wanted an array"},
        {"\"a\"", "[\"b\"]", "0", "found 1 \"endings\", wanted 2 to 16"},
        {"\"a\"", "[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17]", "0", "found 17 \"endings\", wanted 2 to 16"},
        {"\"a\"", "[\"b\", 3]", "0", "found a number as number 1 of \"endings\", wanted strings"},
        {"\"a\"", "[true, \"b\"]", "0", "found true or false as number 0 of \"endings\", wanted strings"},
        {"\"a\"", "[\"b\", \"c\"]", NULL, "found nothing as \"label\", wanted a whole number from 0 to 1"},
        {"\"a\"", "[\"b\", \"c\"]", "\"1\"",
         "found the string \"1\" as \"label\", wanted a whole number from 0 to 1; "},
        {"\"a\"", "[\"b\", \"c\"]", "[1]", "found an array as \"label\", wanted a whole number from 0 to 1"},
        {"\"a\"", "[\"b\", \"c\"]", "-1", "found -1 as \"label\", wanted a whole number from 0 to 1"},
        {"\"a\"", "[\"b\", \"c\"]", "0.5", "found 0.5 as \"label\", wanted a whole number from 0 to 1"},
        {"\"a\"", "[\"b\", \"c\"]", "2", "found 2 as \"label\", wanted a whole number from 0 to 1"},
        {"\"a\"", "[\"b\", \"c\"]", "1e300", "found 1e+300 as \"label\", wanted a whole number from 0 to 1"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        char line[256];
        int used = snprintf(line, sizeof line, "{\"id\": 1");
        const char *const names[] = {"ctx", "endings", "label"};
        const char *const values[] = {bad[i].ctx, bad[i].endings, bad[i].label};
        for (int k = 0; k < 3; k++)
            if (values[k])
                used += snprintf(line + used, sizeof line - (size_t)used, ", \"%s\": %s", names[k], values[k]);
        snprintf(line + used, sizeof line - (size_t)used, "}");
        assert_question_refused(line, bad[i].reason);
    }
    assert_question_refused("{\"ctx\": \"\", \"endings\": [\"b\", \"c\"], \"label\": 0}", "found an empty context");
    assert_question_refused("nonsense", "found no JSON");
    char *longest = malloc(40100);
    int used = sprintf(longest, "{\"endings\": [\"b\", \"c\"], \"label\": 0, \"ctx\": \"");
    memset(longest + used, 'x', 40000);
    strcpy(longest + used + 40000, "\"}");
    assert_question_refused(longest, "found more than 65534 bytes, wanted at most that: the format cannot hold more");
    free(longest);
    write_text("q.jsonl", "\n");
    assert_refused("--choices", at("q.jsonl"), BYTES, "--out", at("q.bin"));
    assert_contains(err, "q.jsonl: found no line with a question");
}

static void questions_the_format_cannot_number_are_refused(void **state) {
    (void)state;
    FILE *file = fopen(at("q.jsonl"), "w");
    for (int i = 0; i < 65536; i++) fputs("{\"ctx\":\"a\",\"endings\":[\"b\",\"c\"],\"label\":1}\n", file);
    fclose(file);
    assert_refused("--choices", at("q.jsonl"), BYTES, "--out", at("q.bin"));
    assert_contains(err, "q.jsonl:65536: ");
    assert_contains(err, "found more than 65535 examples");
    assert_int_equal(files_in_root(), 1);
}

static void wide_ids_fit_shards_but_not_choices(void **state) {
    (void)state;
    write_pair_tokenizer("a", "b", 70000);
    write_text("a.txt", "xab");
    assert_runs("--tokenizer", at("pair.json"), "--out", at("new/t"), at("a.txt"));
    struct token_list ids = read_shard("new/t_train_000001.bin");
    assert_int_equal(ids.count, 3);
    assert_int_equal(ids.ids[2], 70000);
    free(ids.ids);
    write_text("q.jsonl", "{\"ctx\": \"a\", \"endings\": [\"b\", \"ab\"], \"label\": 1}\n");
    assert_refused("--choices", at("q.jsonl"), "--tokenizer", at("pair.json"), "--out", at("q.bin"));
    assert_contains(err, "q.jsonl:1: ");
    assert_contains(err, "found id 70000 in its completion, wanted 0 to 65534: the format cannot hold others");
    assert_false(exists("q.bin") || exists("q.bin.tmp"));
}

// ---- a look at files ----

static void check_tells_of_good_files_and_stops_at_a_bad_one(void **state) {
    (void)state;
    write_text("a.txt", "abcz");
    write_text("q.jsonl", "{\"ctx\": \"a\", \"endings\": [\"b\", \"c\"], \"label\": 1}\n");
    assert_runs(BYTES, "--out", at("t"), "--shard-tokens", "3", at("a.txt"));
    assert_runs(BYTES, "--out", at("q.bin"), "--choices", at("q.jsonl"));
    assert_runs("--check", at("t_train_000001.bin"), at("q.bin"), at("t_train_000002.bin"));
    assert_contains(out, "t_train_000001.bin: 3 tokens of 2 bytes, largest id 256, vocabulary 257, tokenizer ");
    assert_contains(out, ", hash as in the header\n");
    assert_contains(out, "q.bin: 1 multiple-choice examples, largest id 99, tokenizer ");
    assert_contains(out, "t_train_000002.bin: 2 tokens of 2 bytes, largest id 122,");

    size_t bytes;
    char *content = read_bytes(at("t_train_000002.bin"), &bytes);
    content[bytes - 2] ^= 1; // another id, still in the vocabulary
    write_file("damaged.bin", content, bytes);
    memset(content + 12, 0, 20); // as llm.c writes it: no vocabulary, no hash, no tokenizer
    write_file("plain.bin", content, bytes);
    free(content);
    assert_refused("--check", at("plain.bin"), at("damaged.bin"), at("q.bin"));
    assert_error("--check: /tmp/");
    assert_contains(err, "damaged.bin: found ids with the hash");
    assert_contains(out, "plain.bin: 2 tokens of 2 bytes, largest id 123, no hash in the header\n");
    assert_lacks(out, "q.bin");
    content = read_bytes(at("plain.bin"), &bytes);
    memset(content + 8, 0, 4);
    write_file("none.bin", content, 1024);
    free(content);
    assert_runs("--check", at("none.bin"));
    assert_contains(out, "none.bin: no tokens, no hash in the header\n");
    shorten("q.bin", 1);
    assert_refused("--check", at("q.bin"));
    assert_contains(err, "q.bin: found ");
    shorten("t_train_000001.bin", 1);
    assert_refused("--check", at("t_train_000001.bin"));
    assert_refused("--check", at("a.txt"));
    assert_contains(err, "a.txt: found a text file");
    assert_refused("--check", root);
    assert_refused("--check", at("missing"));
}

static void decode_prints_the_text(void **state) {
    (void)state;
    write_text("a.txt", "Ein Satz\n");
    assert_runs(GPT2, "--out", at("t"), at("a.txt"));
    assert_runs(GPT2, "--decode", at("t_train_000001.bin"));
    assert_string_equal(out, "\nEin Satz\n");
    assert_runs(GPT2, "--decode", at("t_train_000001.bin"), "--tokens", "1");
    assert_string_equal(out, "\n");
    assert_runs("--tokenizer", root, "--decode", at("t_train_000001.bin"), "--tokens=2147483647");
    assert_string_equal(out, "\nEin Satz\n");
    assert_refused(BYTES, "--decode", at("t_train_000001.bin")); // another tokenizer's ids
    assert_error("--decode: /tmp/");
    assert_contains(err, "t_train_000001.bin: found ids of another tokenizer than bytes");
    assert_runs(BYTES, "--out", at("bytes/t"), at("a.txt")); // in the other, these ids are text as well
    assert_refused(GPT2, "--decode", at("bytes/t_train_000001.bin"));
    assert_contains(err, "found ids of another tokenizer than tests/reference/tokenizer_gpt2.json");
    remove_tree(at("bytes"));
    assert_refused(BYTES, "--decode", at("a.txt"));
    output_path = "/dev/full";
    assert_code(run(GPT2, "--decode", at("t_train_000001.bin")), 1);
    assert_error("standard output: cannot be written");
    output_path = ""; // a closed one: the text must not end in a file
    assert_code(run(GPT2, "--decode", at("t_train_000001.bin")), 1);
    assert_int_equal(files_in_root(), 4);
}

// ---- flags ----

static void assert_mistake(const char *place, const char *const *arguments) {
    assert_code(finish_program(start_program(arguments)), 2);
    assert_error(place);
    assert_int_equal(files_in_root(), 1);
}

#define mistake(place, ...) assert_mistake(place, (const char *const[]){"tokenize", __VA_ARGS__, NULL})

// (Shards of more ids than their header can count: streaming issue 659.)
static void mistakes_in_flags_are_refused(void **state) {
    (void)state;
    write_text("a.txt", "abc");
    const char *t = at("t"), *a = at("a.txt");
    mistake("command line: found unknown flag --nothing", "--nothing");
    mistake("command line: found unknown flag --outs", "--outs=x");
    mistake("command line: found unknown flag -o", "-o", t);
    mistake("command line: found unknown flag --", "--", t);
    mistake("--out: found twice", BYTES, "--out", t, "--out=u", a);
    mistake("--overwrite: found twice", "--overwrite", "--overwrite");
    mistake("--overwrite: found value 'yes'", BYTES, "--out", t, "--overwrite=yes", a);
    mistake("--out: found no value", BYTES, "--out");
    mistake("--out: found no value", BYTES, "--out", "--overwrite", a);
    mistake("--out: found an empty value", BYTES, "--out=", a);
    mistake("--out: found nothing", BYTES, a);
    mistake("--tokenizer: found nothing", "--out", t, a);
    mistake("--tokenizer: /tmp/", "--tokenizer", at("missing"), "--out", t, a);
    mistake("--tokenizer: ", "--tokenizer", a, "--out", t, a);
    mistake("command line: found no file to read", BYTES, "--out", t);
    mistake("command line: found no file to read", "--check");
    mistake("command line: found several of", "--check", "--decode", a, BYTES);
    mistake("command line: found several of", "--choices", a, "--decode", a, BYTES);
    mistake("command line: found 'x' where a flag should be", BYTES, "--choices", a, "--out", t, "x");
    mistake("command line: found - twice", BYTES, "--out", t, "-", "-");
    mistake("--documents: found 'words', wanted one of file|lines|jsonl", BYTES, "--out", t, "--documents", "words", a);
    mistake("--tokens: found where it does nothing", BYTES, "--out", t, "--tokens", "3", a);
    mistake("--shard-tokens: found where it does nothing", BYTES, "--choices", a, "--out", t, "--shard-tokens", "3");
    mistake("--out: found where it does nothing", "--check", "--out", t, a);
    static const char *const numbers[] = {
        "0", "-1", "1e6", "x", " 5", "+5", "5 ", "2147483648", "99999999999999999999"};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        mistake("--shard-tokens: found '", BYTES, "--out", t, "--shard-tokens", numbers[i], a);
        if (i > 0) mistake("--eval-tokens: found '", BYTES, "--out", t, "--eval-tokens", numbers[i], a);
    }
}

static void help_lists_every_flag(void **state) {
    (void)state;
    assert_runs("--help");
    static const char *const names[] = {"tokenizer",   "out",         "documents", "shard-tokens",
                                        "eval-tokens", "end-of-text", "overwrite", "choices",
                                        "check",       "decode",      "tokens",    "help"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char flag[64];
        snprintf(flag, sizeof flag, "\n  --%s ", names[i]);
        assert_contains(out, flag);
    }
    assert_runs("--check", "--help", "--nonsense"); // wherever it stands
    assert_contains(out, "usage: tokenize");
    assert_string_equal(err, "");
}

int main(void) {
    const char *path = getenv("MOK_TOKENIZE");
    setenv("MOK_TRAIN", path ? path : "build/cpu/tokenize", 1); // the program that run() runs
    const struct CMUnitTest tests[] = {
        TEST(a_file_is_one_document),
        TEST(lines_and_json_lines_are_documents),
        TEST(line_ends_and_byte_order_marks_are_no_text),
        TEST(inputs_follow_one_another),
        TEST(shards_are_cut_at_the_token),
        TEST(end_of_text_can_be_named),
        TEST(the_tokenizer_beside_the_shards_is_the_one_in_their_headers),
        TEST(shards_are_replaced_only_when_asked),
        TEST(another_tokenizer_is_replaced_only_when_asked),
        TEST(folder_of_the_shards_is_made),
        TEST(bad_json_lines_are_refused_by_number),
        TEST(shards_before_a_bad_line_are_removed),
        TEST(files_that_are_no_text_are_refused),
        TEST(full_disk_leaves_no_shard),
        TEST(killed_run_leaves_whole_shards),
        TEST(cuts_of_a_document_keep_its_ids),
        TEST(cuts_follow_the_tokenizer_where_words_do_not_matter),
        TEST(text_that_cannot_be_cut_is_not),
        TEST(long_file_has_the_ids_of_one_piece),
        TEST(questions_become_choices),
        TEST(bad_questions_are_refused_by_number),
        TEST(questions_the_format_cannot_number_are_refused),
        TEST(wide_ids_fit_shards_but_not_choices),
        TEST(check_tells_of_good_files_and_stops_at_a_bad_one),
        TEST(decode_prints_the_text),
        TEST(mistakes_in_flags_are_refused),
        TEST(help_lists_every_flag),
    };
    return run_program_tests(tests);
}

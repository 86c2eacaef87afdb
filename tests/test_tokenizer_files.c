// The files of a tokenizer: patterns and broken files that are refused, what names the end of text, and what is written.
// Run from the root of the repository.
#include "tests/tokenizers.h"

#include "data/pattern.h"
#include "kernels/clock.h"

// ---- patterns ----

static bool compiles(const char *pattern, char error[256]) {
    *error = 0;
    pcre2_code *code = pattern_compile(pattern, false, error, 256);
    pcre2_code_free(code);
    return code != NULL;
}

// What Oniguruma and PCRE2 read differently, or only one of them.
static void patterns_with_two_meanings_are_refused(void **state) {
    (void)state;
    static const char *const patterns[] = {
        "",          "\\w+",       "\\b",        "\\h",      "\\R",      "\\X",      "\\K",         "\\1",
        "\\G",       "(?i)a",      "(?m:.)",     "(?<n>a)",  "(?#c)",    "(?(1)a)",  "(?~a)",       "(*ACCEPT)",
        "[a&&b]",    "[a[b]]",     "[[:L:]]",    "[]a]",     "[^]a]",    "[\\w]",    "[a-\\s]",     "[\\s-z]",
        "[b-a]",     "[a-\\p{L}]", "a{1,2}+",    "a{2}?",    "a{,3}",    "a{",       "a**",         "a{2}{3}",
        "*a",        "(|*)",       "\\p{",       "\\pL",     "\\p{}",    "\\p{Nix}", "\\p{sc:Han}", "\\x{110000}",
        "\\x{d800}", "\\xff",      "\\u12",      "\\x{}",    "\\",       "[a",       "(a",          "a)",
        "[\\",       "a\xff",      "[\xe3\x81]", "(?<=a+)b", "a{99999}", "\\p{L",
    };
    char error[256];
    for (size_t i = 0; i < sizeof patterns / sizeof *patterns; i++) {
        if (compiles(patterns[i], error)) fail_msg("%s: compiles, wanted a refusal", patterns[i]);
        assert_contains(error, "found ");
        assert_contains(error, ", wanted ");
    }
    static const char *const good[] = {"a|b", "(a(?:b)?)*+", "[^\\S\\d\\]a-z-]{2,}?", "\\p{Han}+(?!\\S)",
                                       "\\x{10ffff}|[\\u3042]"};
    for (size_t i = 0; i < sizeof good / sizeof *good; i++)
        if (!compiles(good[i], error)) fail_msg("%s: %s", good[i], error);
}

static cJSON *make_split(const char *pattern) {
    cJSON *json =
        cJSON_Parse("{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Split\",\"pattern\":{},\"behavior\":"
                    "\"Isolated\",\"invert\":false},{\"type\":\"ByteLevel\",\"add_prefix_space\":false,"
                    "\"use_regex\":false}]}");
    cJSON *split = cJSON_GetArrayItem(cJSON_GetObjectItem(json, "pretokenizers"), 0);
    cJSON_AddStringToObject(cJSON_GetObjectItem(split, "pattern"), "Regex", pattern);
    return json;
}

// Patterns whose matching takes exponential time or a stack as deep as the text: the text still comes back whole.
static void no_pattern_hangs(void **state) {
    (void)state;
    static const char *const patterns[] = {"(?:a+)+[bc]", "(?:a|a|b)*[cd]", "(?:a?){100}(?:a){100}[bc]", "(?:ab|a|b)*",
                                           "(?=(?:a|ab|b)+$)"};
    char text[3000];
    for (size_t i = 0; i < sizeof text; i++) text[i] = i % 7 ? 'a' : 'b';
    for (size_t i = 0; i < sizeof patterns / sizeof *patterns; i++) {
        write_changed("hard.json", "pre_tokenizer", make_split(patterns[i]));
        struct tokenizer *t = open_or_fail(at("hard.json"));
        check_round_trip(t, text, sizeof text);
        tokenizer_close(t);
    }
}

// Every word alone meets the limit of the pattern; after the first one it is given up, or this would take minutes.
static void a_hard_pattern_is_given_up_once(void **state) {
    (void)state;
    enum { WORDS = 3000, LETTERS = 40 };
    cJSON *steps = make_split("(?:a+)+[bc]");
    cJSON *space = cJSON_Parse("{\"type\":\"Split\",\"pattern\":{\"String\":\" \"},\"behavior\":\"Isolated\"}");
    cJSON_InsertItemInArray(cJSON_GetObjectItem(steps, "pretokenizers"), 0, space);
    write_changed("hard.json", "pre_tokenizer", steps);
    struct tokenizer *t = open_or_fail(at("hard.json"));
    char *text = malloc(WORDS * LETTERS);
    assert_non_null(text);
    memset(text, 'a', WORDS * LETTERS);
    for (size_t i = 0; i < WORDS; i++) text[i * LETTERS] = ' ';
    double start = clock_seconds();
    check_round_trip(t, text, WORDS * LETTERS);
    assert_true(clock_seconds() - start < 30); // takes 0.1 s
    free(text);
    tokenizer_close(t);
}

// A name with characters outside the alphabet of bytes is no word, although it is spelled like one.
static void names_outside_the_alphabet_are_no_words(void **state) {
    (void)state;
    size_t bytes;
    char *text = read_bytes(reference_path("llama3"), &bytes); // takes words from the vocabulary without merging
    char *changed = replace(text, "\"vocab\":{", "\"vocab\":{\"日\":7000,\"æĹ¥æľ¬\":7001,");
    write_file("tokenizer.json", changed, strlen(changed));
    struct tokenizer *t = open_or_fail(at("tokenizer.json"));
    struct token_list ids = encode(t, "日", 3, true), both = encode(t, "日本", 6, true);
    for (size_t i = 0; i < ids.count; i++) assert_int_not_equal(ids.ids[i], 7000);
    assert_int_equal(both.count, 1);
    assert_int_equal(both.ids[0], 7001);
    assert_int_equal(tokenizer_token_bytes(t, 7000), 3); // but it is text
    free(ids.ids);
    free(both.ids);
    tokenizer_close(t);
    free(changed);
    free(text);
}

// ---- broken files ----

static void assert_refused(const char *file, const char *part) {
    char error[FILE_ERROR] = "";
    struct tokenizer *t = tokenizer_open(at(file), error, sizeof error);
    if (t) fail_msg("opens, wanted an error with \"%s\"", part);
    assert_contains(error, part);
    if (strncmp(error, root, strlen(root)) != 0) fail_msg("found \"%s\", wanted it to begin with the path", error);
    assert_null(strchr(error, '\n'));
}

static void hostile_files_are_refused(void **state) {
    (void)state;
    static const struct {
        const char *from, *to, *error;
    } changes[] = {
        {"\"BPE\"", "\"Unigram\"", "found a model of type Unigram, wanted BPE"},
        {"\"BPE\"", "\"WordPiece\"", "found a model of type WordPiece"},
        {"\"BPE\"", "7", "(not a string)"},
        {"\"model\":{", "\"other\":{", "no object named model"},
        {"\"model\":{", "\"model\":null,\"other\":{", "no object named model"},
        {"\"dropout\":null", "\"dropout\":0.1", "dropout"},
        {"\"continuing_subword_prefix\":null", "\"continuing_subword_prefix\":\"##\"", "continuing_subword_prefix"},
        {"\"end_of_word_suffix\":null", "\"end_of_word_suffix\":\"</w>\"", "end_of_word_suffix"},
        {"\"byte_fallback\":false", "\"byte_fallback\":true", "byte_fallback"},
        {"\"ignore_merges\":false", "\"ignore_merges\":[]", "ignore_merges"},
        {"\"normalizer\":null", "\"normalizer\":{\"type\":\"NFC\"}", "normalizer NFC"},
        {"\"normalizer\":null", "\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"Lowercase\"}]}",
         "normalizer Lowercase"},
        {"\"normalizer\":null", "\"normalizer\":{}", "normalizer (no type)"},
        {"\"normalizer\":null", "\"normalizer\":\"NFC\"", "normalizer (no type)"},
        {"\"decoder\":{\"type\":\"ByteLevel\"", "\"decoder\":{\"type\":\"Metaspace\"", "decoder Metaspace"},
        {"\"decoder\":{", "\"decoder\":null,\"x\":{", "decoder (none)"},
        {"\"pre_tokenizer\":{\"type\":\"ByteLevel\"", "\"pre_tokenizer\":{\"type\":\"Metaspace\"", "found Metaspace"},
        {"\"pre_tokenizer\":{", "\"pre_tokenizer\":null,\"x\":{", "no ByteLevel in pre_tokenizer"},
        {"\"pre_tokenizer\":{", "\"pre_tokenizer\":{\"type\":\"Sequence\"},\"x\":{", "without pretokenizers"},
        {"\"use_regex\":true", "\"use_regex\":\"yes\"", "use_regex"},
        {"\"!\":1,", "", "no token for the byte 33"},
        {"\"!\":1,", "\"!\":2,", "the id 2 twice"},
        {"\"!\":1,", "\"!\":1,\"!\":1499999,", "the token ! twice"},
        {"\"!\":1,", "\"!\":2147483648,", "id of the token ! outside 0 to 16777215"},
        {"\"!\":1,", "\"!\":16777216,", "outside"},
        {"\"!\":1,", "\"!\":-1,", "outside"},
        {"\"!\":1,", "\"!\":1.5,", "outside"},
        {"\"!\":1,", "\"!\":1e300,", "outside"},
        {"\"!\":1,", "\"!\":\"1\",", "outside"},
        {"\"!\":1,", "\"!\":null,", "outside"},
        {"\"vocab\":{", "\"vocab\":[],\"x\":{", "vocab"},
        {"\"merges\":[", "\"merges\":{},\"x\":[", "merges"},
        {"\"merges\":[", "\"merges\":[\"! qqqqq\",", "found ! and qqqqq to merge (0 of merges)"},
        {"\"merges\":[", "\"merges\":[\"! \\\"\",", "to merge"}, // both are tokens, but not !"
        {"\"merges\":[", "\"merges\":[\"日 本\",", "to merge"},
        {"\"merges\":[", "\"merges\":[\"! \",", "to merge"},
        {"\"merges\":[", "\"merges\":[\"a b c\",", "at 0 of merges"},
        {"\"merges\":[", "\"merges\":[\"ab\",", "at 0 of merges"},
        {"\"merges\":[", "\"merges\":[7,", "at 0 of merges"},
        {"\"merges\":[", "\"merges\":[[\"a\"],", "at 0 of merges"},
        {"\"merges\":[", "\"merges\":[[\"a\",1],", "at 0 of merges"},
        {"\"added_tokens\":[", "\"added_tokens\":{},\"x\":[", "added_tokens"},
        {"\"added_tokens\":[", "\"added_tokens\":[3,", "added token without content"},
        {"\"added_tokens\":[", "\"added_tokens\":[{\"id\":9000,\"content\":\"\"},", "added token without content"},
        {"\"added_tokens\":[", "\"added_tokens\":[{\"content\":\"<x>\"},", "id of the added token <x>"},
        {"\"added_tokens\":[", "\"added_tokens\":[{\"id\":99999999999,\"content\":\"<x>\"},",
         "id of the added token <x>"},
        {"\"added_tokens\":[", "\"added_tokens\":[{\"id\":5,\"content\":\"<x>\"},", "the id 5 of the added token <x>"},
        {"\"added_tokens\":[", "\"added_tokens\":[{\"id\":0,\"content\":\"<x>\"},", "the id 0 for the added tokens"},
        {"\"added_tokens\":[", "\"added_tokens\":[{\"id\":9000,\"content\":\"<|endoftext|>\"},", "<|endoftext|> twice"},
        {"\"added_tokens\":[", "\"added_tokens\":[{\"id\":9000,\"content\":\"!\"},", "wanted one id"},
        {"\"added_tokens\":[", "\"added_tokens\":[{\"id\":9000,\"content\":\"<x>\",\"special\":1},", "special"},
        {"\"lstrip\":false", "\"lstrip\":true", "lstrip"},
        {"\"rstrip\":false", "\"rstrip\":true", "rstrip"},
        {"\"single_word\":false", "\"single_word\":true", "single_word"},
    };
    size_t bytes;
    char *text = read_bytes(reference_path("gpt2"), &bytes);
    for (size_t i = 0; i < sizeof changes / sizeof *changes; i++) {
        char *changed = replace(text, changes[i].from, changes[i].to);
        write_file("tokenizer.json", changed, strlen(changed));
        free(changed);
        assert_refused("tokenizer.json", changes[i].error);
    }
    free(text);
}

static void wrong_ways_to_cut_words_are_refused(void **state) {
    (void)state;
#define BYTE_LEVEL  "{\"type\":\"ByteLevel\",\"add_prefix_space\":false}"
#define SPLIT(rest) "{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Split\"," rest "}," BYTE_LEVEL "]}"
    static const char *const steps[][2] = {
        {"{\"type\":\"Sequence\",\"pretokenizers\":[" BYTE_LEVEL ",{\"type\":\"Digits\"}]}", "Digits behind ByteLevel"},
        {"{\"type\":\"Sequence\",\"pretokenizers\":[" BYTE_LEVEL "," BYTE_LEVEL "]}", "ByteLevel behind ByteLevel"},
        {"{\"type\":\"Sequence\",\"pretokenizers\":[]}", "no ByteLevel"},
        {"{\"type\":\"Sequence\",\"pretokenizers\":[3]}", "(no type)"},
        {"{\"type\":\"Digits\",\"individual_digits\":true}", "no ByteLevel"},
        {SPLIT("\"behavior\":\"Isolated\""), "a Regex or String pattern"},
        {SPLIT("\"pattern\":\"a\",\"behavior\":\"Isolated\""), "a Regex or String pattern"},
        {SPLIT("\"pattern\":{\"Regex\":1},\"behavior\":\"Isolated\""), "a Regex or String pattern"},
        {SPLIT("\"pattern\":{\"String\":\"\"},\"behavior\":\"Isolated\""), "a pattern of 0 bytes"},
        {SPLIT("\"pattern\":{\"Regex\":\"a\"},\"behavior\":\"MergedWithNext\""), "MergedWithNext"},
        {SPLIT("\"pattern\":{\"Regex\":\"a\"}"), "behavior (no string)"},
        {SPLIT("\"pattern\":{\"Regex\":\"(a\"},\"behavior\":\"Isolated\""), "does not compile"},
        {SPLIT("\"pattern\":{\"Regex\":\"a\"},\"behavior\":\"Removed\",\"invert\":3"), "invert"},
    };
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
        cJSON *json = cJSON_Parse(steps[i][0]);
        assert_non_null(json);
        write_changed("tokenizer.json", "pre_tokenizer", json);
        assert_refused("tokenizer.json", steps[i][1]);
    }
    cJSON *many = cJSON_Parse("{\"type\":\"Sequence\",\"pretokenizers\":[]}");
    for (int i = 0; i < 40; i++)
        cJSON_AddItemToArray(cJSON_GetObjectItem(many, "pretokenizers"), cJSON_Parse("{\"type\":\"Digits\"}"));
    write_changed("tokenizer.json", "pre_tokenizer", many);
    assert_refused("tokenizer.json", "more than 32 steps");

    char *long_pattern = calloc(1 << 20, 1);
    memset(long_pattern, '(', (1 << 20) - 1);
    write_changed("tokenizer.json", "pre_tokenizer", make_split(long_pattern));
    assert_refused("tokenizer.json", "found a pattern of 1048575 bytes");
    long_pattern[10000] = 0;
    write_changed("tokenizer.json", "pre_tokenizer", make_split(long_pattern));
    assert_refused("tokenizer.json", "does not compile");
    free(long_pattern);
}

static void truncated_and_deep_files_are_refused(void **state) {
    (void)state;
    size_t bytes;
    char *text = read_bytes(reference_path("llama3"), &bytes);
    for (size_t cut = 0; cut + 2 < bytes; cut += cut < 1500 ? 31 : 997) {
        write_file("tokenizer.json", text, cut);
        assert_refused("tokenizer.json", "found no JSON");
    }
    free(text);
    enum { DEEP = 1000000 };
    char *deep = malloc(DEEP + 32);
    assert_non_null(deep);
    size_t start = (size_t)sprintf(deep, "{\"pre_tokenizer\":");
    memset(deep + start, '[', DEEP);
    write_file("tokenizer.json", deep, start + DEEP);
    assert_refused("tokenizer.json", "found no JSON");
    free(deep);
    write_file("tokenizer.json", "{}", 2);
    assert_refused("tokenizer.json", "no object named model");
    unlink(at("tokenizer.json"));
    assert_refused("tokenizer.json", "No such file");
    assert_int_equal(mkdir(at("folder"), 0777), 0);
    assert_refused("folder", "folder/tokenizer.json: No such file");
}

// One wrong byte anywhere ends in an error line, or in a tokenizer that works.
// Linux's own settings say that they are a page long.
static void a_file_shorter_than_its_size_is_refused(void **state) {
    (void)state;
    static const char path[] = "/sys/devices/system/cpu/online";
    char error[FILE_ERROR] = "", wanted[128];
    struct stat info;
    if (stat(path, &info) != 0 || info.st_size < 100) skip();
    assert_null(tokenizer_open(path, error, sizeof error));
    assert_contains(error, "/sys/devices/system/cpu/online: found ");
    snprintf(wanted, sizeof wanted, " bytes, wanted the %lld of its size", (long long)info.st_size);
    assert_contains(error, wanted);
}

static void damaged_files_are_read_or_refused(void **state) {
    (void)state;
    static const char replacements[] = "\"{}[],:\\019-tfn \x80\xff";
    uint64_t seed = 7;
    size_t bytes;
    char error[FILE_ERROR], back[64], *text = read_bytes(reference_path("deepseek"), &bytes);
    for (int i = 0; i < 300; i++) {
        // Half of the damage is where the settings are.
        size_t place = (size_t)(test_uniform(&seed) * (i % 2 ? 1600 : (double)bytes));
        char kept = text[place];
        text[place] = replacements[(size_t)(test_uniform(&seed) * (sizeof replacements - 1))];
        write_file("tokenizer.json", text, bytes);
        text[place] = kept;
        struct tokenizer *t = tokenizer_open(at("tokenizer.json"), error, sizeof error);
        if (!t) {
            assert_contains(error, "tokenizer.json: ");
            continue;
        }
        struct token_list ids = encode(t, "The child\r\n 日本 123 \xff<think>", 31, true);
        assert_true(tokenizer_decode_room(t, ids.ids, ids.count) <= sizeof back);
        tokenizer_decode(t, back, sizeof back, ids.ids, ids.count);
        free(ids.ids);
        tokenizer_close(t);
    }
    free(text);
}

// A token of 64 KiB and more, and the largest id: refused or read, without gigabytes.
static void large_tokens_and_ids(void **state) {
    (void)state;
    size_t bytes;
    char *text = read_bytes(reference_path("gpt2"), &bytes);
    char *changed = replace(text, "\"!\":1,", "\"!\":16777215,");
    write_file("tokenizer.json", changed, strlen(changed));
    free(changed);
    struct tokenizer *t = open_or_fail(at("tokenizer.json"));
    assert_int_equal(tokenizer_vocab(t), 1 << 24);
    struct token_list ids = encode(t, "!", 1, true);
    assert_int_equal(ids.ids[0], 16777215);
    assert_int_equal(tokenizer_token_bytes(t, 16777215), 1);
    assert_int_equal(tokenizer_token_bytes(t, 1), 0); // the hole
    char hole;
    assert_int_equal(tokenizer_decode(t, &hole, 1, (int32_t[]){1}, 1), 1);
    assert_int_equal(hole, '?');
    free(ids.ids);
    tokenizer_close(t);

    enum { LONG = 70000 };
    char *entry = calloc(LONG + 32, 1);
    size_t start = (size_t)sprintf(entry, "\"vocab\":{\"");
    memset(entry + start, 'a', LONG);
    strcat(entry, "\":5000,");
    changed = replace(text, "\"vocab\":{", entry);
    write_file("tokenizer.json", changed, strlen(changed));
    assert_refused("tokenizer.json", "found a token of 70000 bytes");
    free(changed);
    free(entry);
    free(text);
}

// ---- the end of text ----

static void write_config(const char *eos) {
    char config[256];
    int bytes = snprintf(config, sizeof config, "{\"eos_token\":%s}", eos);
    write_file("tokenizer_config.json", config, (size_t)bytes);
}

static void end_of_text_is_what_the_config_says(void **state) {
    (void)state;
    size_t bytes;
    char *text = read_bytes(reference_path("llama3"), &bytes);
    write_file("tokenizer.json", text, bytes);
    free(text);
    struct tokenizer *t = open_or_fail(at("tokenizer.json"));
    int32_t begin = tokenizer_find(t, "<|begin_of_text|>"), end = tokenizer_find(t, "<|end_of_text|>");
    assert_true(begin >= 0 && end >= 0 && begin != end);
    assert_int_equal(tokenizer_end_of_text(t), end); // no config: a usual name
    uint64_t hash = tokenizer_hash(t);
    tokenizer_close(t);
    static const char *const configs[] = {"\"<|begin_of_text|>\"",
                                          "{\"content\":\"<|begin_of_text|>\",\"lstrip\":false}", "null"};
    for (int i = 0; i < 3; i++) {
        write_config(configs[i]);
        t = open_or_fail(root); // the folder
        assert_int_equal(tokenizer_end_of_text(t), i < 2 ? begin : end);
        assert_true((tokenizer_hash(t) == hash) == (i == 2));
        tokenizer_close(t);
    }
    write_config("\"<|nowhere|>\"");
    assert_refused("", "tokenizer_config.json: found the eos_token <|nowhere|>");
    write_config("7");
    assert_refused("", "tokenizer_config.json: found something else as eos_token");
    write_file("tokenizer_config.json", "[]", 2);
    assert_refused("", "tokenizer_config.json: found no JSON");
    unlink(at("tokenizer_config.json"));

    cJSON *none = cJSON_CreateArray();
    write_changed("tokenizer.json", "added_tokens", none);
    t = open_or_fail(root);
    assert_int_equal(tokenizer_end_of_text(t), -1);
    tokenizer_close(t);
}

// ---- bytes ----

static void bytes_are_their_own_ids(void **state) {
    (void)state;
    struct tokenizer *t = tokenizer_open_bytes();
    char text[256], back[300];
    for (int i = 0; i < 256; i++) text[i] = (char)(unsigned char)i;
    struct token_list ids = encode(t, text, 256, false);
    assert_int_equal(ids.count, 256);
    for (int i = 0; i < 256; i++) assert_int_equal(ids.ids[i], i);
    assert_int_equal(tokenizer_decode(t, back, sizeof back, ids.ids, 256), 256);
    assert_memory_equal(back, text, 256);
    free(ids.ids);

    const int32_t odd[] = {'a', TOKENIZER_END_OF_TEXT, 'b', 257, -1, INT32_MAX};
    assert_int_equal(tokenizer_decode(t, back, sizeof back, odd, 6), 6);
    assert_memory_equal(back, "a\nb???", 6);
    back[2] = '#';
    assert_int_equal(tokenizer_decode(t, back, 2, odd, 6), 2);
    assert_int_equal(back[2], '#');
    assert_int_equal(tokenizer_decode(t, back, sizeof back, odd, 0), 0);

    assert_true(tokenizer_is_bytes(t));
    assert_int_equal(tokenizer_vocab(t), TOKENIZER_BYTE_VOCAB);
    assert_int_equal(tokenizer_end_of_text(t), TOKENIZER_END_OF_TEXT);
    ids = encode(t, "a<|endoftext|>b", 15, false); // its name is plain bytes
    assert_int_equal(ids.count, 15);
    free(ids.ids);
    tokenizer_close(t);
}

static void files_of_bytes_have_every_byte(void **state) {
    (void)state;
    char error[FILE_ERROR] = "";
    struct tokenizer *t = tokenizer_open_bytes();
    if (!tokenizer_write(t, root, error, sizeof error)) fail_msg("%s", error);
    cJSON *json = file_read_json(at("tokenizer.json"), error, sizeof error);
    assert_non_null(json);
    cJSON *vocab = cJSON_GetObjectItem(cJSON_GetObjectItem(json, "model"), "vocab");
    assert_int_equal(cJSON_GetArraySize(vocab), 257);
    static const struct {
        const char *name;
        int id;
    } known[] = {{"A", 'A'},       {"\"", '"'},      {"\u0120", ' '},  {"\u010a", '\n'},      {"\u0100", 0},
                 {"\u0121", 0x7f}, {"\u0143", 0xad}, {"\u00ff", 0xff}, {"<|endoftext|>", 256}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        cJSON *item = cJSON_GetObjectItemCaseSensitive(vocab, known[i].name);
        assert_non_null(item);
        assert_int_equal(item->valueint, known[i].id);
    }
    cJSON *added = cJSON_GetArrayItem(cJSON_GetObjectItem(json, "added_tokens"), 0);
    assert_int_equal(cJSON_GetObjectItem(added, "id")->valueint, 256);
    assert_true(cJSON_IsTrue(cJSON_GetObjectItem(added, "special")));
    cJSON_Delete(json);
    json = file_read_json(at("tokenizer_config.json"), error, sizeof error);
    assert_non_null(json);
    assert_string_equal(cJSON_GetObjectItem(json, "tokenizer_class")->valuestring, "PreTrainedTokenizerFast");
    cJSON_Delete(json);

    struct tokenizer *again = open_or_fail(root);
    assert_true(tokenizer_is_bytes(again));
    assert_true(tokenizer_hash(again) == tokenizer_hash(t));
    tokenizer_close(again);

    // Cut into words or not: single bytes are not merged. Another id for a byte, and they are not bytes.
    size_t bytes;
    char *text = read_bytes(at("tokenizer.json"), &bytes);
    char *changed = replace(text, "\"use_regex\":\tfalse", "\"use_regex\":true");
    write_file("tokenizer.json", changed, strlen(changed));
    free(changed);
    again = open_or_fail(root);
    assert_true(tokenizer_is_bytes(again));
    assert_true(tokenizer_hash(again) == tokenizer_hash(t));
    tokenizer_close(again);
    changed = replace(text, "\"A\":\t65", "\"A\":66");
    char *swapped = replace(changed, "\"B\":\t66", "\"B\":65");
    write_file("tokenizer.json", swapped, strlen(swapped));
    again = open_or_fail(root);
    assert_false(tokenizer_is_bytes(again));
    assert_true(tokenizer_hash(again) != tokenizer_hash(t));
    tokenizer_close(again);
    tokenizer_close(t);
    free(swapped);
    free(changed);
    free(text);
}

static void files_are_written_as_they_were_read(void **state) {
    (void)state;
    char error[FILE_ERROR] = "";
    assert_int_equal(mkdir(at("to"), 0777), 0);
    if (!tokenizer_write(trained[DEEPSEEK], at("to"), error, sizeof error)) fail_msg("%s", error);
    size_t read, written;
    char *before = read_bytes(reference_path("deepseek"), &read),
         *after = read_bytes(at("to/tokenizer.json"), &written);
    assert_int_equal(written, read);
    assert_memory_equal(after, before, read);
    free(before);
    free(after);
    struct tokenizer *again = open_or_fail(at("to")); // with the config that was made for it
    assert_int_equal(tokenizer_end_of_text(again), tokenizer_end_of_text(trained[DEEPSEEK]));
    assert_true(tokenizer_hash(again) == tokenizer_hash(trained[DEEPSEEK]));
    assert_false(tokenizer_is_bytes(again));
    tokenizer_close(again);

    const char config[] = "{\"eos_token\": \"<think>\",   \"other\": [1, 2]}\n";
    write_file("to/tokenizer_config.json", config, strlen(config));
    again = open_or_fail(at("to/tokenizer.json"));
    if (!tokenizer_write(again, root, error, sizeof error)) fail_msg("%s", error);
    after = read_bytes(at("tokenizer_config.json"), &written);
    assert_string_equal(after, config);
    free(after);
    struct tokenizer *third = open_or_fail(root);
    assert_int_equal(tokenizer_end_of_text(third), tokenizer_find(third, "<think>"));
    assert_true(tokenizer_hash(third) == tokenizer_hash(again));
    tokenizer_close(third);
    tokenizer_close(again);
}

static void a_full_disk_is_reported(void **state) {
    (void)state;
    static const char *const names[] = {"tokenizer.json", "tokenizer_config.json"};
    struct tokenizer *t = tokenizer_open_bytes();
    for (int i = 0; i < 2; i++) {
        char error[FILE_ERROR] = "";
        assert_int_equal(symlink("/dev/full", at(names[i])), 0);
        assert_false(tokenizer_write(t, root, error, sizeof error));
        assert_contains(error, names[i]);
        assert_contains(error, "No space left");
        unlink(at(names[0]));
        unlink(at(names[1]));
    }
    char error[FILE_ERROR] = "";
    assert_false(tokenizer_write(t, at("missing"), error, sizeof error));
    assert_contains(error, "missing/tokenizer.json");
    assert_contains(error, "No such file");
    tokenizer_close(t);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(patterns_with_two_meanings_are_refused),
        in_folder(no_pattern_hangs),
        in_folder(a_hard_pattern_is_given_up_once),
        in_folder(names_outside_the_alphabet_are_no_words),
        in_folder(hostile_files_are_refused),
        in_folder(wrong_ways_to_cut_words_are_refused),
        in_folder(truncated_and_deep_files_are_refused),
        cmocka_unit_test(a_file_shorter_than_its_size_is_refused),
        in_folder(damaged_files_are_read_or_refused),
        in_folder(large_tokens_and_ids),
        in_folder(end_of_text_is_what_the_config_says),
        cmocka_unit_test(bytes_are_their_own_ids),
        in_folder(files_of_bytes_have_every_byte),
        in_folder(files_are_written_as_they_were_read),
        in_folder(a_full_disk_is_reported),
    };
    return cmocka_run_group_tests(tests, open_trained, close_trained);
}

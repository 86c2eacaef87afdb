// ./tokenize: text to token shards, questions to multiple-choice files, and a look at both.
//
// In this order: flags, output files, inputs, and the four things that the program does.
#include <cjson/cJSON.h>
#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "data/choices.h"
#include "data/documents.h"
#include "data/files.h"
#include "data/progress.h"
#include "data/reader.h"
#include "data/token_file.h"
#include "data/tokenizer.h"
#include "kernels/clock.h"
#include "kernels/fail.h"

// ---- flags ----

enum mode { MODE_TEXT = 1, MODE_CHOICES = 2, MODE_CHECK = 4, MODE_DECODE = 8 };

enum flag {
    FLAG_TOKENIZER,
    FLAG_OUT,
    FLAG_DOCUMENTS,
    FLAG_SHARD_TOKENS,
    FLAG_EVAL_TOKENS,
    FLAG_END_OF_TEXT,
    FLAG_OVERWRITE,
    FLAG_CHOICES,
    FLAG_CHECK,
    FLAG_DECODE,
    FLAG_TOKENS,
    FLAG_HELP,
    FLAGS
};

// clang-format off
static const struct {
    const char *name, *value; // value NULL: a switch
    int modes;                // where it may be given
    const char *help;
} flags[FLAGS] = {
    [FLAG_TOKENIZER] = {"tokenizer", "bytes|FILE", MODE_TEXT | MODE_CHOICES | MODE_DECODE, "bytes, or a tokenizer.json (or its folder) of byte-level BPE"},
    [FLAG_OUT] = {"out", "PREFIX", MODE_TEXT | MODE_CHOICES, "of the shards, as in data/tales; with --choices: the file"},
    [FLAG_DOCUMENTS] = {"documents", "file|lines|jsonl", MODE_TEXT, "what one text is: a file, a line, or the \"text\" of a JSON line [file]"},
    [FLAG_SHARD_TOKENS] = {"shard-tokens", "N", MODE_TEXT, "tokens of one shard [100000000]"},
    [FLAG_EVAL_TOKENS] = {"eval-tokens", "N", MODE_TEXT, "the first N tokens go to PREFIX_val_000000.bin [0: none]"},
    [FLAG_END_OF_TEXT] = {"end-of-text", "TOKEN", MODE_TEXT, "special token that every document begins with [the tokenizer's own]"},
    [FLAG_OVERWRITE] = {"overwrite", NULL, MODE_TEXT | MODE_CHOICES, "replace files that are there"},
    [FLAG_CHOICES] = {"choices", "FILE", MODE_CHOICES, "JSON lines with ctx, endings and label, as HellaSwag has them"},
    [FLAG_CHECK] = {"check", NULL, MODE_CHECK, "read shards and multiple-choice files, and stop at the first bad one"},
    [FLAG_DECODE] = {"decode", "FILE", MODE_DECODE, "print the text of a shard"},
    [FLAG_TOKENS] = {"tokens", "N", MODE_DECODE, "how many of its tokens [256]"},
    [FLAG_HELP] = {"help", NULL, MODE_TEXT | MODE_CHOICES | MODE_CHECK | MODE_DECODE, "print this, and stop"},
};
// clang-format on

struct arguments {
    const char *values[FLAGS]; // NULL: not given
    const char **inputs;       // what is no flag
    int input_count;
    enum mode mode;
};

static void print_help(void) {
    puts("usage: tokenize --tokenizer bytes|FILE --out PREFIX [FLAGS] TEXT...   (- is standard input)\n"
         "       tokenize --tokenizer FILE --out FILE.bin --choices FILE.jsonl\n"
         "       tokenize --check FILE...\n"
         "       tokenize --decode FILE --tokenizer bytes|FILE [--tokens N]\n"
         "Writes PREFIX_train_000001.bin and so on in llm.c's format, and the tokenizer beside them.\n");
    for (int i = 0; i < FLAGS; i++) {
        char name[64];
        snprintf(name, sizeof name, "--%s %s", flags[i].name, flags[i].value ? flags[i].value : "");
        printf("  %-30s%s\n", name, flags[i].help);
    }
}

// "--name", in one of a few buffers that are used in turn.
static const char *place_of(enum flag flag) {
    static char places[4][64];
    static int next;
    char *place = places[next++ % 4];
    snprintf(place, sizeof places[0], "--%s", flags[flag].name);
    return place;
}

static enum flag find_flag(const char *argument) {
    size_t length = strcspn(argument, "=");
    for (int i = 0; i < FLAGS && length > 2; i++)
        if (strlen(flags[i].name) == length - 2 && memcmp(flags[i].name, argument + 2, length - 2) == 0)
            return (enum flag)i;
    fail_user("command line", "found unknown flag %.*s, wanted one that --help lists", (int)length, argument);
}

static void collect_arguments(struct arguments *a, int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        const char *argument = argv[i], *equals = strchr(argument, '=');
        if (argument[0] != '-' || argument[1] == 0) { // "-" alone is standard input
            a->inputs[a->input_count++] = argument;
            continue;
        }
        if (argument[1] != '-')
            fail_user("command line", "found unknown flag %s, wanted one that --help lists (a file: ./%s)", argument,
                      argument);
        enum flag flag = find_flag(argument);
        const char **value = &a->values[flag], *wanted = flags[flag].value;
        if (*value) fail_user(place_of(flag), "found twice, wanted once");
        if (!wanted && equals) fail_user(place_of(flag), "found value '%s', wanted none: it is a switch", equals + 1);
        if (!wanted)
            *value = "";
        else if (equals)
            *value = equals + 1;
        else if (i + 1 < argc && strncmp(argv[i + 1], "--", 2) != 0)
            *value = argv[++i];
        else
            fail_user(place_of(flag), "found no value, wanted %s", wanted);
        if (wanted && !**value) fail_user(place_of(flag), "found an empty value, wanted %s", wanted);
    }
}

static enum mode find_mode(const struct arguments *a) {
    static const struct {
        enum flag flag;
        enum mode mode;
    } modes[] = {{FLAG_CHOICES, MODE_CHOICES}, {FLAG_CHECK, MODE_CHECK}, {FLAG_DECODE, MODE_DECODE}};
    enum mode mode = MODE_TEXT;
    for (int i = 0; i < 3; i++)
        if (a->values[modes[i].flag]) mode |= modes[i].mode;
    mode = mode == MODE_TEXT ? mode : mode & ~MODE_TEXT;
    if (mode & (mode - 1))
        fail_user("command line", "found several of --choices, --check and --decode, wanted one of them");
    return mode;
}

static void require_flag(const struct arguments *a, enum flag flag) {
    if (!a->values[flag])
        fail_user(place_of(flag), "found nothing, wanted --%s %s", flags[flag].name, flags[flag].value);
}

static void parse_arguments(struct arguments *a, int argc, char **argv) {
    collect_arguments(a, argc, argv);
    a->mode = find_mode(a);
    for (int i = 0; i < FLAGS; i++)
        if (a->values[i] && !(flags[i].modes & a->mode))
            fail_user(place_of((enum flag)i),
                      "found where it does nothing, wanted none; --help shows what goes together");
    bool takes_files = a->mode == MODE_TEXT || a->mode == MODE_CHECK;
    if (a->input_count && !takes_files)
        fail_user("command line", "found '%s' where a flag should be, wanted --flag value; --help lists the flags",
                  a->inputs[0]);
    if (a->mode != MODE_CHECK) require_flag(a, FLAG_TOKENIZER);
    if (a->mode == MODE_TEXT || a->mode == MODE_CHOICES) require_flag(a, FLAG_OUT);
    if (!a->input_count && takes_files) fail_user("command line", "found no file to read, wanted one at least");
}

static int64_t number_of(const struct arguments *a, enum flag flag, int64_t usual, int64_t least) {
    const char *text = a->values[flag];
    if (!text) return usual;
    char *end;
    errno = 0;
    long long value = *text >= '0' && *text <= '9' ? strtoll(text, &end, 10) : -1;
    if (value < least || value > INT32_MAX || errno || *end)
        fail_user(place_of(flag), "found '%s', wanted a whole number from %" PRId64 " to %d", text, least, INT32_MAX);
    return value;
}

static struct tokenizer *open_tokenizer(const char *name) {
    if (strcmp(name, "bytes") == 0) return tokenizer_open_bytes();
    char error[FILE_ERROR];
    struct tokenizer *t = tokenizer_open(name, error, sizeof error);
    if (!t) fail_user("--tokenizer", "%s", error);
    return t;
}

// ---- output files ----

// The shards of this run. Until it is complete, leaving the program removes them, so that a run that failed does not
// look like one that was shorter.
static struct {
    const char *prefix;
    int vocab;
    uint64_t tokenizer; // its hash
    int64_t shard_tokens, eval_tokens;
    struct token_writer writer; // of the shard that is being filled
    bool eval_begun;
    int train_shards; // begun
    uint64_t tokens;
    char folder[FILE_PATH], waiting[FILE_PATH]; // of the shards; where the tokenizer waits to be put beside them
    bool complete;
} output;

static const char *output_path(const char *split, int number) {
    static char path[FILE_PATH];
    if (snprintf(path, sizeof path, "%s_%s_%06d.bin", output.prefix, split, number) >= (int)sizeof path)
        fail_user("--out", "found a path of more than %d bytes, wanted a shorter one", FILE_PATH - 1);
    return path;
}

static void remove_unfinished(void) {
    char error[FILE_ERROR];
    if (output.complete) return;
    token_writer_abandon(&output.writer);
    if (output.eval_begun) unlink(output_path("val", 0));
    for (int i = 1; i <= output.train_shards; i++) unlink(output_path("train", i));
    if (output.waiting[0]) file_remove_folder(output.waiting, error, sizeof error);
}

static int64_t output_limit(void) { return output.train_shards ? output.shard_tokens : output.eval_tokens; }

static void output_begin_shard(void) {
    char error[FILE_ERROR];
    const char *path;
    if (output.eval_tokens && !output.eval_begun) {
        output.eval_begun = true;
        path = output_path("val", 0);
    } else {
        path = output_path("train", ++output.train_shards);
    }
    if (!token_writer_begin(&output.writer, path, output.vocab, output.tokenizer, error, sizeof error))
        fail_internal("--out", "%s", error);
}

static void output_finish_shard(void) {
    char error[FILE_ERROR];
    if (!token_writer_finish(&output.writer, error, sizeof error)) fail_internal("--out", "%s", error);
}

static void output_append(const int32_t *ids, size_t n) {
    char error[FILE_ERROR];
    output.tokens += n;
    while (n > 0) {
        if (!output.writer.file) output_begin_shard();
        uint64_t room = (uint64_t)output_limit() - output.writer.count;
        size_t taken = n < room ? n : (size_t)room;
        if (!token_writer_append(&output.writer, ids, taken, error, sizeof error)) fail_internal("--out", "%s", error);
        if (taken == room) output_finish_shard();
        ids += taken;
        n -= taken;
    }
}

// folder [FILE_PATH] of a path, and the name in it.
static const char *split_path(const char *path, char *folder) {
    const char *slash = strrchr(path, '/');
    if (strlen(path) >= FILE_PATH - 64)
        fail_user("--out", "found a path of %zu bytes, wanted less than %d", strlen(path), FILE_PATH - 64);
    size_t length = !slash ? 0 : slash == path ? 1 : (size_t)(slash - path);
    memcpy(folder, slash ? path : ".", length ? length : 1);
    folder[length ? length : 1] = 0;
    const char *name = slash ? slash + 1 : path;
    if (!*name) fail_user("--out", "found '%s', wanted a file name behind the folder", path);
    return name;
}

static void make_folder(const char *folder) {
    struct stat info;
    if (mkdir(folder, 0777) != 0 && errno != EEXIST)
        fail_user("--out", "cannot make the folder %s: %s; make it first", folder, strerror(errno));
    if (stat(folder, &info) != 0 || !S_ISDIR(info.st_mode))
        fail_user("--out", "found that %s is not a folder; name another one", folder);
}

// name = base_train_000001.bin or base_val_000000.bin, or with .tmp behind it.
static bool is_shard_name(const char *name, const char *base) {
    size_t length = strlen(base);
    if (strncmp(name, base, length) != 0) return false;
    name += length;
    if (strncmp(name, "_train_", 7) == 0)
        name += 7;
    else if (strncmp(name, "_val_", 5) == 0)
        name += 5;
    else
        return false;
    size_t digits = strspn(name, "0123456789");
    return digits >= 6 && (strcmp(name + digits, ".bin") == 0 || strcmp(name + digits, ".bin.tmp") == 0);
}

// All shards of an earlier run: one that made more of them must not leave some between the new ones.
static void clear_shards(const char *folder, const char *base, bool overwrite) {
    DIR *entries = opendir(folder);
    if (!entries) fail_user("--out", "cannot read the folder %s: %s", folder, strerror(errno));
    for (struct dirent *entry; (entry = readdir(entries));) {
        if (!is_shard_name(entry->d_name, base)) continue;
        bool temporary = strcmp(entry->d_name + strlen(entry->d_name) - 4, ".tmp") == 0;
        if (!overwrite && !temporary)
            fail_user("--out",
                      "found %s/%s, wanted no shards there; name another prefix, or replace them with --overwrite",
                      folder, entry->d_name);
        if (overwrite && unlinkat(dirfd(entries), entry->d_name, 0) != 0)
            fail_internal(entry->d_name, "cannot be removed: %s", strerror(errno));
    }
    closedir(entries);
}

static bool same_content(const char *a, const char *b) {
    FILE *first = fopen(a, "rb"), *second = fopen(b, "rb");
    bool same = first && second;
    for (int byte = 0; same && byte != EOF;) same = (byte = getc(first)) == getc(second);
    if (first) fclose(first);
    if (second) fclose(second);
    return same;
}

// ---- the tokenizer beside the shards, so that samples of a model trained on them can be read ----

// Whole or not at all: it waits in a folder of its own until the shards are complete.
static const char *const tokenizer_names[] = {"tokenizer.json", "tokenizer_config.json"};
enum { TOKENIZER_FILES = 2 };

static void write_tokenizer(const struct tokenizer *t, bool overwrite) {
    char error[FILE_ERROR], made[FILE_PATH], placed[FILE_PATH];
    snprintf(output.waiting, sizeof output.waiting, "%s.tokenizer.tmp", output.prefix);
    if (!file_remove_folder(output.waiting, error, sizeof error)) fail_internal("--out", "%s", error);
    if (mkdir(output.waiting, 0777) != 0)
        fail_user("--out", "cannot make the folder %s: %s", output.waiting, strerror(errno));
    if (!tokenizer_write(t, output.waiting, error, sizeof error)) fail_internal("--out", "%s", error);
    for (int i = 0; i < TOKENIZER_FILES; i++) {
        file_path(made, output.waiting, tokenizer_names[i]);
        file_path(placed, output.folder, tokenizer_names[i]);
        if (access(placed, F_OK) == 0 && !overwrite && !same_content(made, placed))
            fail_user("--out",
                      "found another tokenizer in %s, wanted the same or none; name another folder, or replace it with "
                      "--overwrite",
                      placed);
    }
}

static void place_tokenizer(void) {
    char error[FILE_ERROR], made[FILE_PATH], placed[FILE_PATH];
    for (int i = 0; i < TOKENIZER_FILES; i++) {
        file_path(made, output.waiting, tokenizer_names[i]);
        file_path(placed, output.folder, tokenizer_names[i]);
        if (rename(made, placed) != 0 && errno != ENOENT) // a tokenizer may have no second file
            fail_internal("--out", "cannot rename %s to %s: %s", made, placed, strerror(errno));
    }
    if (!file_remove_folder(output.waiting, error, sizeof error)) fail_internal("--out", "%s", error);
}

static void output_finish(const struct arguments *a) {
    if (!output.tokens)
        fail_user(reader_is_standard_input(a->inputs[0]) ? "standard input" : a->inputs[0],
                  "found no text%s, wanted some", a->input_count > 1 ? " in it and in the other files" : "");
    if (!output.train_shards)
        fail_user("--eval-tokens",
                  "found %" PRIu64 " tokens in all, wanted more than %" PRId64 " to have some to train on",
                  output.tokens, output.eval_tokens);
    place_tokenizer();
    if (output.writer.file) output_finish_shard();
    output.complete = true;
}

// ---- inputs ----

// Looks at the inputs before anything is written. Returns the sum of their sizes, 0 if one has none.
static uint64_t check_inputs(const struct arguments *a) {
    uint64_t total = 0;
    bool known = true;
    int standard = 0;
    for (int i = 0; i < a->input_count; i++) {
        const char *name = a->inputs[i];
        struct stat info;
        if (reader_is_standard_input(name)) {
            known = false;
            if (++standard > 1) fail_user("command line", "found - twice, wanted standard input once");
            continue;
        }
        if (stat(name, &info) != 0 || access(name, R_OK) != 0)
            fail_user(name, "cannot be opened (%s), wanted a text file", strerror(errno));
        if (S_ISDIR(info.st_mode)) fail_user(name, "found a folder, wanted a text file");
        if (!S_ISREG(info.st_mode)) known = false;
        total += (uint64_t)info.st_size;
    }
    return known ? total : 0;
}

// ---- text to shards ----

static enum document_kind find_documents(const struct arguments *a) {
    static const char *const words[] = {"file", "lines", "jsonl"};
    const char *value = a->values[FLAG_DOCUMENTS];
    for (int i = 0; i < 3; i++)
        if (!value || strcmp(value, words[i]) == 0) return (enum document_kind)i;
    fail_user("--documents", "found '%s', wanted one of %s", value, flags[FLAG_DOCUMENTS].value);
}

static int32_t find_end_of_text(const struct arguments *a, const struct tokenizer *t) {
    const char *name = a->values[FLAG_END_OF_TEXT];
    int32_t id = name ? tokenizer_find(t, name) : tokenizer_end_of_text(t);
    if (id >= 0) return id;
    if (name) fail_user("--end-of-text", "found '%s', wanted a special token of the tokenizer", name);
    fail_user("--tokenizer", "found none of its special tokens named as the end of text, wanted one; name it with "
                             "--end-of-text TOKEN");
}

struct counts {
    uint64_t documents, bytes;
};

static void write_documents(struct documents *d, const struct tokenizer *t, int32_t end_of_text,
                            struct counts *counts) {
    documents_encode(d, t);
    for (int i = 0; i < d->count; i++) {
        const struct document_piece *p = &d->pieces[i];
        if (p->begins) output_append(&end_of_text, 1);
        output_append(p->list.ids, p->list.count);
        counts->documents += p->begins;
    }
    counts->bytes += d->used;
    documents_clear(d);
}

static void open_output(const struct arguments *a, const struct tokenizer *t) {
    bool overwrite = a->values[FLAG_OVERWRITE] != NULL;
    output.prefix = a->values[FLAG_OUT];
    output.vocab = tokenizer_vocab(t);
    output.tokenizer = tokenizer_hash(t);
    output.shard_tokens = number_of(a, FLAG_SHARD_TOKENS, 100000000, 1);
    output.eval_tokens = number_of(a, FLAG_EVAL_TOKENS, 0, 0);
    const char *base = split_path(output.prefix, output.folder);
    make_folder(output.folder);
    clear_shards(output.folder, base, overwrite);
    atexit(remove_unfinished);
    write_tokenizer(t, overwrite);
}

static void tokenize_text(const struct arguments *a) {
    enum document_kind kind = find_documents(a);
    struct tokenizer *t = open_tokenizer(a->values[FLAG_TOKENIZER]);
    int32_t end_of_text = find_end_of_text(a, t);
    uint64_t total = check_inputs(a), done = 0; // bytes of all inputs, and of those that are done with
    open_output(a, t);
    struct counts counts = {0};
    struct documents documents;
    documents_open(&documents);
    struct progress progress = progress_begin("text", "B", total);
    double start = progress.start;
    for (int i = 0; i < a->input_count; i++) {
        struct reader r;
        reader_open(&r, a->inputs[i]);
        while (documents_read(&documents, &r, t, kind)) {
            if (documents_full(&documents)) write_documents(&documents, t, end_of_text, &counts);
            progress_show(&progress, done + r.bytes - reader_held(&r));
        }
        done += r.bytes;
        reader_close(&r);
    }
    write_documents(&documents, t, end_of_text, &counts);
    output_finish(a);
    documents_close(&documents);
    tokenizer_close(t);
    progress_end(&progress);
    printf("%" PRIu64 " documents, %" PRIu64 " bytes, %" PRIu64 " tokens, %.3f bytes per token, %d files, %.1f s\n",
           counts.documents, counts.bytes, output.tokens, (double)counts.bytes / (double)output.tokens,
           output.train_shards + output.eval_begun, clock_seconds() - start);
}

// ---- questions to a multiple-choice file ----

static struct choices_writer questions; // leaving the program before its end removes its file

static void abandon_questions(void) { choices_writer_abandon(&questions); }

// What a member of an object is, for messages; NULL: it is not there.
static const char *kind_of(const cJSON *item) {
    if (!item) return "nothing";
    if (cJSON_IsString(item)) return "a string";
    if (cJSON_IsNumber(item)) return "a number";
    if (cJSON_IsArray(item)) return "an array";
    if (cJSON_IsObject(item)) return "an object";
    return cJSON_IsNull(item) ? "null" : "true or false";
}

static const char *context_of(const char *place, const cJSON *question) {
    const cJSON *context = cJSON_GetObjectItemCaseSensitive(question, "ctx");
    if (!cJSON_IsString(context)) fail_user(place, "found %s as \"ctx\", wanted a string", kind_of(context));
    return context->valuestring;
}

static const cJSON *endings_of(const char *place, const cJSON *question) {
    const cJSON *endings = cJSON_GetObjectItemCaseSensitive(question, "endings"), *ending;
    if (!cJSON_IsArray(endings))
        fail_user(place, "found %s as \"endings\", wanted an array of %d to %d strings", kind_of(endings),
                  CHOICES_LEAST, CHOICES_MOST);
    int count = cJSON_GetArraySize(endings), number = 0;
    if (count < CHOICES_LEAST || count > CHOICES_MOST)
        fail_user(place, "found %d \"endings\", wanted %d to %d", count, CHOICES_LEAST, CHOICES_MOST);
    cJSON_ArrayForEach(ending, endings) {
        if (!cJSON_IsString(ending))
            fail_user(place, "found %s as number %d of \"endings\", wanted strings", kind_of(ending), number);
        number++;
    }
    return endings;
}

static int label_of(const char *place, const cJSON *question, int endings) {
    const cJSON *label = cJSON_GetObjectItemCaseSensitive(question, "label");
    uint64_t value;
    if (cJSON_IsString(label))
        fail_user(
            place,
            "found the string \"%.40s\" as \"label\", wanted a whole number from 0 to %d; write it without quotes",
            label->valuestring, endings - 1);
    if (!cJSON_IsNumber(label))
        fail_user(place, "found %s as \"label\", wanted a whole number from 0 to %d", kind_of(label), endings - 1);
    if (!file_json_integer(label, &value) || value >= (uint64_t)endings)
        fail_user(place, "found %.10g as \"label\", wanted a whole number from 0 to %d: there are %d endings",
                  label->valuedouble, endings - 1, endings);
    return (int)value;
}

// Encodes one question and appends it. The space before an ending belongs to it, as in llm.c's files.
static void append_question(const struct tokenizer *t, const char *place, const cJSON *object) {
    const char *context = context_of(place, object);
    const cJSON *endings = endings_of(place, object), *ending;
    int count = cJSON_GetArraySize(endings), label = label_of(place, object, count);

    struct token_list ids[CHOICES_MOST + 1] = {0}; // the context, then the endings
    tokenizer_encode(t, context, strlen(context), false, &ids[0]);
    int used = 1;
    cJSON_ArrayForEach(ending, endings) {
        char *text;
        if (asprintf(&text, " %s", ending->valuestring) < 0) fail_internal(place, "found no memory for an ending");
        tokenizer_encode(t, text, strlen(text), false, &ids[used++]);
        free(text);
    }
    struct choice_list lists[CHOICES_MOST + 1];
    for (int i = 0; i < used; i++) lists[i] = (struct choice_list){ids[i].ids, ids[i].count};
    char error[FILE_ERROR];
    if (!choices_writer_append(&questions, label, lists[0], lists + 1, count, error, sizeof error))
        fail_user(place, "%s", error);
    for (int i = 0; i < used; i++) free(ids[i].ids);
}

static void write_choices(const struct arguments *a) {
    char folder[FILE_PATH], error[FILE_ERROR];
    const char *path = a->values[FLAG_OUT];
    struct tokenizer *t = open_tokenizer(a->values[FLAG_TOKENIZER]);
    struct reader r;
    reader_open(&r, a->values[FLAG_CHOICES]);
    split_path(path, folder);
    if (access(path, F_OK) == 0 && !a->values[FLAG_OVERWRITE])
        fail_user("--out", "found %s, wanted no file there; name another, or replace it with --overwrite", path);
    make_folder(folder);
    if (!choices_writer_begin(&questions, path, tokenizer_hash(t), error, sizeof error))
        fail_internal("--out", "%s", error);
    atexit(abandon_questions);
    for (cJSON *object; (object = reader_json_line(&r)); cJSON_Delete(object))
        append_question(t, reader_place(&r), object);
    if (!questions.count) fail_user(r.name, "found no line with a question, wanted some");
    int count = questions.count, longest = questions.longest;
    if (!choices_writer_finish(&questions, error, sizeof error)) fail_internal("--out", "%s", error);
    printf("%d examples, the longest of %d bytes\n", count, longest);
    reader_close(&r);
    tokenizer_close(t);
}

// ---- a look at files ----

static void check_shard(const char *path) {
    char error[FILE_ERROR];
    struct token_file f;
    int32_t largest;
    if (!token_file_open(&f, path, error, sizeof error) || !token_file_check(&f, &largest, error, sizeof error))
        fail_user("--check", "%s", error);
    if (f.count)
        printf("%s: %" PRIu64 " tokens of %d bytes, largest id %d, ", path, f.count, f.id_bytes, largest);
    else
        printf("%s: no tokens, ", path);
    if (f.vocab) printf("vocabulary %" PRIu32 ", ", f.vocab);
    if (f.tokenizer) printf("tokenizer %016" PRIx64 ", ", f.tokenizer);
    puts(f.hash ? "hash as in the header" : "no hash in the header");
    token_file_close(&f);
}

static void check_choices(const char *path) {
    char error[FILE_ERROR];
    struct choices c;
    if (!choices_open(&c, path, NULL, 0, error, sizeof error)) fail_user("--check", "%s", error);
    printf("%s: %d multiple-choice examples, largest id %d", path, c.count, c.largest_id);
    if (c.tokenizer) printf(", tokenizer %016" PRIx64, c.tokenizer);
    putchar('\n');
    choices_close(&c);
}

static void check_files(const struct arguments *a) {
    for (int i = 0; i < a->input_count; i++) {
        if (choices_is(a->inputs[i]))
            check_choices(a->inputs[i]);
        else
            check_shard(a->inputs[i]);
    }
}

static void decode_shard(const struct arguments *a) {
    enum { CHUNK = 1 << 16 }; // ids
    char error[FILE_ERROR];
    struct tokenizer *t = open_tokenizer(a->values[FLAG_TOKENIZER]);
    struct token_file f;
    if (!token_file_open(&f, a->values[FLAG_DECODE], error, sizeof error)) fail_user("--decode", "%s", error);
    if (f.tokenizer && f.tokenizer != tokenizer_hash(t))
        fail_user("--decode",
                  "%s: found ids of another tokenizer than %s, %016" PRIx64 ", wanted those of %016" PRIx64
                  "; give --tokenizer the one that made the shard",
                  f.path, a->values[FLAG_TOKENIZER], f.tokenizer, tokenizer_hash(t));
    uint64_t wanted = (uint64_t)number_of(a, FLAG_TOKENS, 256, 1), end = wanted < f.count ? wanted : f.count;
    for (uint64_t start = 0; start < end; start += CHUNK) {
        static int32_t ids[CHUNK];
        size_t n = end - start < CHUNK ? (size_t)(end - start) : CHUNK;
        if (!token_file_read(&f, start, n, (uint32_t)tokenizer_vocab(t), ids, error, sizeof error))
            fail_user("--decode", "%s", error);
        size_t room = tokenizer_decode_room(t, ids, n);
        char *text = malloc(room + 1);
        if (!text) fail_internal("--decode", "found no memory for %zu bytes of text", room);
        fwrite(text, 1, tokenizer_decode(t, text, room, ids, n), stdout);
        free(text);
    }
    token_file_close(&f);
    tokenizer_close(t);
}

// ---- the program ----

int main(int argc, char **argv) {
    file_hold_closed_streams();
    struct arguments a = {.inputs = calloc((size_t)argc + 1, sizeof *a.inputs)};
    if (!a.inputs) fail_internal("command line", "found no memory");
    for (int i = 1; i < argc; i++)
        if (strcmp(argv[i], "--help") == 0) a.values[FLAG_HELP] = "";
    if (a.values[FLAG_HELP]) {
        print_help();
    } else {
        parse_arguments(&a, argc, argv);
        switch (a.mode) {
        case MODE_TEXT:
            tokenize_text(&a);
            break;
        case MODE_CHOICES:
            write_choices(&a);
            break;
        case MODE_CHECK:
            check_files(&a);
            break;
        case MODE_DECODE:
            decode_shard(&a);
            break;
        }
    }
    free(a.inputs);
    file_check_standard_output();
    return 0;
}

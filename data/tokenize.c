// ./tokenize: text to token shards, questions to multiple-choice files, and a look at both.
//
// In this order: flags, input, documents, output files, progress, and the four things that the program does.
#include <cjson/cJSON.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "data/choices.h"
#include "data/files.h"
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
        if (!wanted && equals)
            fail_user(place_of(flag), "found value '%s', wanted none: it is a switch", equals + 1);
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
    if (!a->values[flag]) fail_user(place_of(flag), "found nothing, wanted --%s %s", flags[flag].name, flags[flag].value);
}

static void parse_arguments(struct arguments *a, int argc, char **argv) {
    collect_arguments(a, argc, argv);
    a->mode = find_mode(a);
    for (int i = 0; i < FLAGS; i++)
        if (a->values[i] && !(flags[i].modes & a->mode))
            fail_user(place_of((enum flag)i), "found where it does nothing, wanted none; --help shows what goes together");
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

// ---- input: a file or standard input through one buffer ----

enum { READ_BYTES = 1 << 20, HELD_MAX = 256 << 20 };

struct reader {
    const char *name;
    int fd;
    char *data;
    size_t start, end, capacity; // what is held lies at data[start .. end - 1]
    bool ended;                  // there is nothing behind it
    uint64_t bytes, line;        // read so far; number of the last line that was taken
};

static bool is_standard_input(const char *name) { return strcmp(name, "-") == 0; }

static void reader_open(struct reader *r, const char *name) {
    *r = (struct reader){.name = is_standard_input(name) ? "standard input" : name, .fd = STDIN_FILENO};
    if (!is_standard_input(name)) r->fd = open(name, O_RDONLY | O_CLOEXEC);
    if (r->fd < 0) fail_user(name, "cannot be opened (%s), wanted a file to read", strerror(errno));
}

static void reader_close(struct reader *r) {
    if (r->fd != STDIN_FILENO) close(r->fd); // only read from: nothing can be lost
    free(r->data);
}

static size_t reader_held(const struct reader *r) { return r->end - r->start; }

static void make_room(struct reader *r) {
    memmove(r->data, r->data + r->start, reader_held(r));
    r->end -= r->start;
    r->start = 0;
    if (r->capacity - r->end >= READ_BYTES) return;
    if (r->end >= HELD_MAX)
        fail_user(r->name,
                  "found %zu bytes behind line %" PRIu64 " in one piece, wanted at most %d of a line, or between places "
                  "where words end; give --documents lines or break its lines",
                  r->end, r->line, HELD_MAX);
    r->capacity = 2 * r->capacity + READ_BYTES;
    r->data = realloc(r->data, r->capacity);
    if (!r->data) fail_internal(r->name, "found no memory for %zu bytes of it", r->capacity);
}

// What is no text: bytes of it would be encoded without complaint and teach nothing.
static void refuse_binary(const struct reader *r) {
    const char *kind = token_file_guess(r->data, r->end);
    if (kind && strcmp(kind, "text") != 0)
        fail_user(r->name, "found %s, wanted plain text; unpack it first (zcat FILE | ./tokenize ... -)", kind);
}

// Holds more bytes than before, or returns false at the end.
static bool reader_more(struct reader *r) {
    if (r->ended) return false;
    if (r->capacity - r->end < READ_BYTES) make_room(r);
    ssize_t got;
    do got = read(r->fd, r->data + r->end, READ_BYTES);
    while (got < 0 && errno == EINTR);
    if (got < 0 && errno == EISDIR) fail_user(r->name, "found a folder, wanted a text file");
    if (got < 0) fail_internal(r->name, "cannot be read at byte %" PRIu64 ": %s", r->bytes, strerror(errno));
    r->end += (size_t)got;
    if (r->bytes == 0 && got > 0) refuse_binary(r);
    r->bytes += (size_t)got;
    r->ended = got == 0;
    return !r->ended;
}

// The next line without its end, valid until the next call; the last one may lack its end.
static bool reader_line(struct reader *r, char **line, size_t *length) {
    size_t seen = 0;
    char *end = NULL;
    while (!(end = memchr(r->data + r->start + seen, '\n', reader_held(r) - seen))) {
        seen = reader_held(r);
        if (!reader_more(r)) break;
    }
    if (!end && !reader_held(r)) return false;
    *line = r->data + r->start;
    *length = end ? (size_t)(end - *line) : reader_held(r);
    r->start += *length + (end != NULL);
    r->line++;
    return true;
}

// ---- JSON lines ----

// A place for messages: "name:line", a static text.
static const char *place_of_line(const struct reader *r) {
    static char place[FILE_PATH + 32];
    snprintf(place, sizeof place, "%s:%" PRIu64, r->name, r->line);
    return place;
}

// C strings end at a zero, so text behind one would be lost: the byte itself, or its escape \u0000.
static bool holds_zero(const char *text, size_t length) {
    for (size_t i = 0; i < length; i++) {
        if (!text[i]) return true;
        if (text[i] != '\\') continue;
        if (length - i >= 6 && memcmp(text + i, "\\u0000", 6) == 0) return true;
        i++; // the escaped character, which may be a backslash
    }
    return false;
}

// The line's JSON object, for cJSON_Delete.
static cJSON *parse_line(const struct reader *r, const char *line, size_t length) {
    const char *place = place_of_line(r);
    char error[FILE_ERROR];
    if (holds_zero(line, length)) fail_user(place, "found a character zero, wanted text without; remove the line");
    cJSON *object = file_parse_json(line, length, place, error, sizeof error);
    if (!object) fail_user(place, "%s", error + strlen(place) + 2); // without the place that it begins with
    return object;
}

static bool is_blank(const char *line, size_t length) {
    for (size_t i = 0; i < length; i++)
        if (!strchr(" \t\r", line[i]) || !line[i]) return false;
    return true;
}

// ---- documents: text that waits to be encoded ----

// Texts are encoded a batch at a time, by all threads, and written in their order.
enum { BATCH_BYTES = 16 << 20, BATCH_PIECES = 8192 };
enum { PIECE_BYTES = 1 << 20 }; // of a file that is one document

struct piece {
    size_t start, bytes; // in the batch's text
    bool begins;         // a document: the end of text comes first
    struct token_list list;
};

struct batch {
    char *text;
    size_t used, capacity;
    struct piece *pieces; // [BATCH_PIECES]; their lists are used again
    int count;
};

static struct batch batch_open(void) {
    struct batch b = {.pieces = calloc(BATCH_PIECES, sizeof *b.pieces)};
    if (!b.pieces) fail_internal("batch", "found no memory");
    return b;
}

static void batch_close(struct batch *b) {
    for (int i = 0; i < BATCH_PIECES; i++) free(b->pieces[i].list.ids);
    free(b->pieces);
    free(b->text);
}

static bool batch_is_full(const struct batch *b) { return b->used >= BATCH_BYTES || b->count == BATCH_PIECES; }

static void batch_add(struct batch *b, const char *text, size_t bytes, bool begins) {
    if (b->capacity - b->used < bytes) {
        b->capacity = 2 * b->capacity + bytes;
        b->text = realloc(b->text, b->capacity);
        if (!b->text) fail_internal("batch", "found no memory for %zu bytes of text", b->capacity);
    }
    memcpy(b->text + b->used, text, bytes);
    struct piece *p = &b->pieces[b->count++];
    p->start = b->used;
    p->bytes = bytes;
    p->begins = begins;
    b->used += bytes;
}

static void batch_encode(struct batch *b, const struct tokenizer *t) {
#pragma omp parallel for schedule(dynamic)
    for (int i = 0; i < b->count; i++) {
        struct piece *p = &b->pieces[i];
        p->list.count = 0;
        tokenizer_encode(t, b->text + p->start, p->bytes, false, &p->list);
    }
}

// ---- a long document is cut where its ids do not change ----

// Whether the text around a cut has the same ids in two pieces as in one. The window starts and ends in the middle of
// words, but on both sides of the comparison alike.
static bool cut_is_free(const struct tokenizer *t, const char *text, size_t left, size_t right) {
    struct token_list whole = {0}, parts = {0};
    tokenizer_encode(t, text, left + right, false, &whole);
    tokenizer_encode(t, text, left, false, &parts);
    tokenizer_encode(t, text + left, right, false, &parts);
    bool same = whole.count == parts.count && memcmp(whole.ids, parts.ids, sizeof *whole.ids * whole.count) == 0;
    free(whole.ids);
    free(parts.ids);
    return same;
}

// The patterns of GPT-2, Llama 3, DeepSeek and their like end a word behind a letter or digit where white space
// follows, and look at nothing before a word to find its end. So a cut there leaves all words, and with them all ids, as
// they are. It would not do to cut behind a line end: GPT-2 splits "  \nx" into "  ", "\n", "x" but makes one word of a
// last "  \n"; nor in front of any: others join "." and the line ends behind it. Every byte of a character beyond ASCII
// passes for a letter here, and patterns may differ; therefore the tokenizer itself is asked about the text around the
// cut. Returns the last such place in text, 0 if there is none.
static size_t find_cut(const struct tokenizer *t, const char *text, size_t bytes) {
    enum { WINDOW = 512, TRIES = 100 };
    int tries = 0;
    for (size_t cut = bytes > WINDOW ? bytes - WINDOW : 0; cut > 0 && tries < TRIES; cut--) {
        unsigned char before = (unsigned char)text[cut - 1], after = (unsigned char)text[cut];
        bool letter = (before >= '0' && before <= '9') || (before | 32) - 'a' < 26u || before >= 0x80;
        if (!letter || !(after == ' ' || after == '\n' || after == '\r')) continue;
        size_t left = cut < WINDOW ? cut : WINDOW;
        if (cut_is_free(t, text + cut - left, left, WINDOW)) return cut;
        tries++;
    }
    return 0;
}

// The next piece of a file that is one document.
static bool add_file_piece(struct batch *b, struct reader *r, const struct tokenizer *t) {
    bool begins = r->bytes == 0;
    size_t cut = 0;
    for (size_t wanted = PIECE_BYTES; !cut; wanted = 2 * reader_held(r)) {
        while (reader_held(r) < wanted && reader_more(r)) continue;
        if (!reader_held(r)) return false;
        bool anywhere = r->ended || tokenizer_is_bytes(t);
        cut = anywhere ? reader_held(r) : find_cut(t, r->data + r->start, reader_held(r));
    }
    batch_add(b, r->data + r->start, cut, begins);
    r->start += cut;
    return true;
}

static bool add_line(struct batch *b, struct reader *r) {
    char *line;
    size_t length;
    do
        if (!reader_line(r, &line, &length)) return false;
    while (!length);
    batch_add(b, line, length, true);
    return true;
}

static bool add_json_line(struct batch *b, struct reader *r) {
    char *line;
    size_t length;
    do
        if (!reader_line(r, &line, &length)) return false;
    while (is_blank(line, length));
    cJSON *object = parse_line(r, line, length);
    const char *text = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(object, "text"));
    if (!text) fail_user(place_of_line(r), "found no string member \"text\", wanted one");
    if (*text) batch_add(b, text, strlen(text), true);
    cJSON_Delete(object);
    return true;
}

// ---- output files ----

// The shards of this run. Until it is complete, leaving the program removes them, so that a run that failed does not
// look like one that was shorter.
static struct {
    const char *prefix;
    int vocab;
    int64_t shard_tokens, eval_tokens;
    struct token_writer writer; // of the shard that is being filled
    bool eval_begun;
    int train_shards; // begun
    uint64_t tokens;
    char tokenizer_folder[FILE_PATH]; // where the tokenizer waits to be put in place; empty: nothing waits
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
    if (output.tokenizer_folder[0]) file_remove_folder(output.tokenizer_folder, error, sizeof error);
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
    if (!token_writer_begin(&output.writer, path, output.vocab, error, sizeof error))
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

static void output_finish(void) {
    if (!output.tokens) fail_user("command line", "found no text in the files, wanted some");
    if (!output.train_shards)
        fail_user("--eval-tokens", "found %" PRIu64 " tokens in all, wanted more than %" PRId64 " to have some to train on",
                  output.tokens, output.eval_tokens);
    if (output.writer.file) output_finish_shard();
    output.complete = true;
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
            fail_user("--out", "found %s/%s, wanted no shards there; name another prefix, or replace them with --overwrite",
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

// The tokenizer beside the shards, so that samples of a model trained on them can be read. Whole or not at all: it is
// written to a folder of its own first.
static void place_tokenizer(const struct tokenizer *t, const char *folder, bool overwrite) {
    static const char *const names[] = {"tokenizer.json", "tokenizer_config.json"};
    char error[FILE_ERROR], made[2][FILE_PATH], placed[2][FILE_PATH];
    snprintf(output.tokenizer_folder, sizeof output.tokenizer_folder, "%s.tokenizer.tmp", output.prefix);
    const char *waiting = output.tokenizer_folder;
    if (!file_remove_folder(waiting, error, sizeof error)) fail_internal("--out", "%s", error);
    if (mkdir(waiting, 0777) != 0) fail_user("--out", "cannot make the folder %s: %s", waiting, strerror(errno));
    if (!tokenizer_write(t, waiting, error, sizeof error)) fail_internal("--out", "%s", error);
    for (int i = 0; i < 2; i++) {
        file_path(made[i], waiting, names[i]);
        file_path(placed[i], folder, names[i]);
        if (access(placed[i], F_OK) == 0 && !overwrite && !same_content(made[i], placed[i]))
            fail_user("--out", "found another tokenizer in %s, wanted the same or none; name another folder, or replace "
                               "it with --overwrite",
                      placed[i]);
    }
    for (int i = 0; i < 2; i++)
        if (rename(made[i], placed[i]) != 0 && errno != ENOENT) // a tokenizer may have no second file
            fail_internal("--out", "cannot rename %s to %s: %s", made[i], placed[i], strerror(errno));
    if (!file_remove_folder(waiting, error, sizeof error)) fail_internal("--out", "%s", error);
    output.tokenizer_folder[0] = 0;
}

// ---- progress ----

static struct {
    bool shown;              // standard error is a terminal
    uint64_t total;          // bytes of the inputs, 0: not known
    uint64_t done;           // bytes of the inputs before the present one
    double start, last_line; // times
} progress;

static void progress_show(const struct reader *r) {
    double now = clock_seconds(), seconds = now - progress.start;
    if (!progress.shown || now - progress.last_line < 0.2) return;
    progress.last_line = now;
    double done = (double)(progress.done + r->bytes - reader_held(r)), rate = done / seconds;
    char bar[31] = "", eta[32] = "";
    if (progress.total) {
        double share = done / (double)progress.total < 1 ? done / (double)progress.total : 1;
        memset(bar, '.', sizeof bar - 1);
        memset(bar, '#', (size_t)(share * (sizeof bar - 1)));
        snprintf(eta, sizeof eta, " | eta %.0f s", ((double)progress.total - done) / rate);
    }
    fprintf(stderr, "\r%s %.1f/%.1f MB | %.1f MB/s | %.1fM tokens%s\033[K", bar, done / 1e6, (double)progress.total / 1e6,
            rate / 1e6, (double)output.tokens / 1e6, eta);
}

static void progress_clear(void) {
    if (progress.shown && progress.last_line > 0) fputs("\r\033[K", stderr);
}

// Looks at the inputs before anything is written, and adds up their sizes.
static void check_inputs(const struct arguments *a) {
    bool known = true;
    int standard = 0;
    for (int i = 0; i < a->input_count; i++) {
        const char *name = a->inputs[i];
        struct stat info;
        if (is_standard_input(name)) {
            known = false;
            if (++standard > 1) fail_user("command line", "found - twice, wanted standard input once");
            continue;
        }
        if (stat(name, &info) != 0 || access(name, R_OK) != 0)
            fail_user(name, "cannot be opened (%s), wanted a text file", strerror(errno));
        if (S_ISDIR(info.st_mode)) fail_user(name, "found a folder, wanted a text file");
        if (!S_ISREG(info.st_mode)) known = false;
        progress.total += (uint64_t)info.st_size;
    }
    if (!known) progress.total = 0;
    progress.shown = isatty(STDERR_FILENO);
    progress.start = clock_seconds();
}

// ---- text to shards ----

enum documents { DOCUMENTS_FILE, DOCUMENTS_LINES, DOCUMENTS_JSONL };

static enum documents find_documents(const struct arguments *a) {
    static const char *const words[] = {"file", "lines", "jsonl"};
    const char *value = a->values[FLAG_DOCUMENTS];
    for (int i = 0; i < 3; i++)
        if (!value || strcmp(value, words[i]) == 0) return (enum documents)i;
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

static void write_batch(struct batch *b, const struct tokenizer *t, int32_t end_of_text, struct counts *counts) {
    batch_encode(b, t);
    for (int i = 0; i < b->count; i++) {
        const struct piece *p = &b->pieces[i];
        if (p->begins) output_append(&end_of_text, 1);
        output_append(p->list.ids, p->list.count);
        counts->documents += p->begins;
    }
    counts->bytes += b->used;
    b->used = 0;
    b->count = 0;
}

static bool add_document(struct batch *b, struct reader *r, const struct tokenizer *t, enum documents documents) {
    if (documents == DOCUMENTS_FILE) return add_file_piece(b, r, t);
    return documents == DOCUMENTS_LINES ? add_line(b, r) : add_json_line(b, r);
}

static void open_output(const struct arguments *a, const struct tokenizer *t) {
    char folder[FILE_PATH];
    bool overwrite = a->values[FLAG_OVERWRITE] != NULL;
    output.prefix = a->values[FLAG_OUT];
    output.vocab = tokenizer_vocab(t);
    output.shard_tokens = number_of(a, FLAG_SHARD_TOKENS, 100000000, 1);
    output.eval_tokens = number_of(a, FLAG_EVAL_TOKENS, 0, 0);
    const char *base = split_path(output.prefix, folder);
    make_folder(folder);
    clear_shards(folder, base, overwrite);
    atexit(remove_unfinished);
    place_tokenizer(t, folder, overwrite);
}

static void tokenize_text(const struct arguments *a) {
    enum documents documents = find_documents(a);
    struct tokenizer *t = open_tokenizer(a->values[FLAG_TOKENIZER]);
    int32_t end_of_text = find_end_of_text(a, t);
    check_inputs(a);
    open_output(a, t);
    struct counts counts = {0};
    struct batch batch = batch_open();
    for (int i = 0; i < a->input_count; i++) {
        struct reader r;
        reader_open(&r, a->inputs[i]);
        while (add_document(&batch, &r, t, documents)) {
            if (batch_is_full(&batch)) write_batch(&batch, t, end_of_text, &counts);
            progress_show(&r);
        }
        progress.done += r.bytes;
        reader_close(&r);
    }
    write_batch(&batch, t, end_of_text, &counts);
    output_finish();
    batch_close(&batch);
    tokenizer_close(t);
    progress_clear();
    printf("%" PRIu64 " documents, %" PRIu64 " bytes, %" PRIu64 " tokens, %.3f bytes per token, %d files, %.1f s\n",
           counts.documents, counts.bytes, output.tokens, (double)counts.bytes / (double)output.tokens,
           output.train_shards + output.eval_begun, clock_seconds() - progress.start);
}

// ---- questions to a multiple-choice file ----

static struct choice_list list_of(const struct token_list *list) { return (struct choice_list){list->ids, list->count}; }

// Encodes one question and appends it. The space before an ending belongs to it, as in llm.c's files.
static void append_question(struct choices_writer *w, const struct tokenizer *t, const char *place, const cJSON *object) {
    const char *context = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(object, "ctx"));
    const cJSON *endings = cJSON_GetObjectItemCaseSensitive(object, "endings"), *ending;
    uint64_t label;
    int count = cJSON_GetArraySize(endings);
    if (!context || !cJSON_IsArray(endings) ||
        !file_json_integer(cJSON_GetObjectItemCaseSensitive(object, "label"), &label))
        fail_user(place, "found an object without one of them, wanted ctx (a string), endings (an array) and label (a "
                         "whole number)");
    if (count < CHOICES_LEAST || count > CHOICES_MOST || label >= (uint64_t)count)
        fail_user(place, "found %d endings and label %ju, wanted %d to %d endings and a label below their number", count,
                  (uintmax_t)label, CHOICES_LEAST, CHOICES_MOST);

    struct token_list ids[CHOICES_MOST + 1] = {0}; // the context comes first
    struct choice_list completions[CHOICES_MOST];
    tokenizer_encode(t, context, strlen(context), false, &ids[0]);
    int k = 0;
    cJSON_ArrayForEach(ending, endings) {
        if (!cJSON_IsString(ending)) fail_user(place, "found an ending that is no string, wanted strings");
        tokenizer_encode(t, " ", 1, false, &ids[k + 1]);
        ids[k + 1].count = 0;
        k++;
    }
    (void)completions;
    (void)w;
}

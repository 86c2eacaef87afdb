#include "data/token_file.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

// The ints of the header that are used.
enum { HEADER_MAGIC, HEADER_VERSION, HEADER_COUNT, HEADER_VOCAB, HEADER_HASH, HEADER_TOKENIZER = HEADER_HASH + 2 };

static const struct layout {
    uint32_t magic, version;
    int id_bytes;
} layouts[] = {{20240520, 1, 2}, {20240801, 7, 4}};
enum { LAYOUTS = sizeof layouts / sizeof *layouts };

static const struct layout *find_layout(uint32_t magic) {
    for (int i = 0; i < LAYOUTS; i++)
        if (layouts[i].magic == magic) return &layouts[i];
    return NULL;
}

static uint32_t load_u32(const unsigned char *b) {
    return b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 | (uint32_t)b[3] << 24;
}

static void store_u32(unsigned char *b, uint32_t value) {
    for (int i = 0; i < 4; i++) b[i] = (unsigned char)(value >> (8 * i));
}

// Of two ints, the low half first.
static uint64_t load_u64(const unsigned char *b) { return load_u32(b) | (uint64_t)load_u32(b + 4) << 32; }

static void store_u64(unsigned char *b, uint64_t value) {
    store_u32(b, (uint32_t)value);
    store_u32(b + 4, (uint32_t)(value >> 32));
}

// ---- what a file seems to be ----

static const char *guess_llmc(uint32_t magic) {
    static const struct {
        uint32_t magic;
        const char *what;
    } kinds[] = {
        {20240520, "an llm.c token shard (uint16)"},
        {20240801, "an llm.c token shard (uint32)"},
        {20240522, "an llm.c multiple-choice file"},
        {20240326, "an llm.c GPT-2 model"},
        {20240803, "an llm.c Llama 3 model"},
        {20240327, "an llm.c GPT-2 debug state"},
        {20240328, "an llm.c tokenizer"},
        {20240527, "an llm.c optimizer state"},
    };
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (kinds[i].magic == magic) return kinds[i].what;
    return NULL;
}

// No control characters in the bytes that there are.
static bool looks_like_text(const unsigned char *begin, size_t bytes) {
    for (size_t i = 0; i < bytes; i++)
        if (begin[i] == 127 || (begin[i] < ' ' && !strchr("\t\n\r\f", begin[i]))) return false;
    return bytes > 0;
}

static bool begins_with(const unsigned char *begin, size_t bytes, const char *with, size_t length) {
    return bytes >= length && memcmp(begin, with, length) == 0;
}

const char *token_file_guess(const void *data, size_t bytes) {
    static const struct {
        const char *with;
        size_t length;
        const char *what;
    } kinds[] = {
        {"\x1f\x8b", 2, "a gzip file"},
        {"\x28\xb5\x2f\xfd", 4, "a zstd file"},
        {"PK\x03\x04", 4, "a zip file or PyTorch checkpoint"},
        {"PAR1", 4, "a parquet file"},
        {"\x93NUMPY", 6, "a NumPy array"},
        {"GGUF", 4, "a GGUF model"},
        {"MMIDIDX", 7, "a Megatron index"},
        {"<!", 2, "an HTML or XML page"},
        {"<html", 5, "an HTML page"},
        {"version https://git-lfs", 23, "a Git LFS pointer, whose file was not downloaded"},
    };
    const unsigned char *begin = data;
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (begins_with(begin, bytes, kinds[i].with, kinds[i].length)) return kinds[i].what;
    if (bytes >= 10 && begins_with(begin + 8, bytes - 8, "{\"", 2)) return "a safetensors file";
    if (looks_like_text(begin, bytes)) return "a text file";
    if (bytes < 4) return NULL;
    const char *llmc = guess_llmc(load_u32(begin));
    if (llmc) return llmc;
    return guess_llmc(__builtin_bswap32(load_u32(begin))) ? "an llm.c file with swapped bytes (big-endian)" : NULL;
}

// ---- opening ----

bool token_file_is(const char *path) {
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); // not blocking: a pipe must not be waited for
    if (fd < 0) return false;
    struct stat status;
    unsigned char magic[4];
    bool is = fstat(fd, &status) == 0 && S_ISREG(status.st_mode) && file_read_at(fd, magic, 4, 0) == 4 &&
              find_layout(load_u32(magic));
    close(fd);
    return is;
}

static bool refuse_kind(const char *path, const unsigned char *begin, size_t bytes, char *error, size_t error_size) {
    const char *guess = token_file_guess(begin, bytes);
    char found[64] = "too short for a magic number";
    if (bytes >= 4)
        snprintf(found, sizeof found, "it begins with 0x%08" PRIx32 " = %" PRIu32, load_u32(begin), load_u32(begin));
    return file_error(error, error_size,
                      "%s: found %s (%s), wanted a token shard: 0x%08" PRIx32 " = %" PRIu32
                      " (uint16 ids) or 0x%08" PRIx32 " = %" PRIu32 " (uint32 ids); make shards with ./tokenize",
                      path, guess ? guess : "a file of an unknown kind", found, layouts[0].magic, layouts[0].magic,
                      layouts[1].magic, layouts[1].magic);
}

uint64_t token_file_bytes(const struct token_file *f) {
    return TOKEN_FILE_HEADER + f->count * (uint64_t)f->id_bytes; // at most 2^34
}

// bytes: of the whole file; begin holds the first of them, as many as a header has if there are so many.
static bool parse_header(struct token_file *f, const unsigned char *begin, uint64_t bytes, char *error,
                         size_t error_size) {
    const struct layout *layout = bytes >= 4 ? find_layout(load_u32(begin)) : NULL;
    if (!layout) {
        size_t held = bytes < TOKEN_FILE_HEADER ? (size_t)bytes : TOKEN_FILE_HEADER;
        return refuse_kind(f->path, begin, held, error, error_size);
    }
    if (bytes < TOKEN_FILE_HEADER)
        return file_error(
            error, error_size,
            "%s: found %ju bytes, expected at least the %d of a token shard's header: it was cut; copy or "
            "make it again",
            f->path, (uintmax_t)bytes, TOKEN_FILE_HEADER);
    uint32_t version = load_u32(begin + 4 * HEADER_VERSION), vocab = load_u32(begin + 4 * HEADER_VOCAB);
    if (version != layout->version)
        return file_error(error, error_size,
                          "%s: found version 0x%08" PRIx32 " = %" PRIu32 " behind the magic number %" PRIu32
                          ", wanted %" PRIu32 "; make it again with ./tokenize",
                          f->path, version, version, layout->magic, layout->version);
    if (vocab > INT32_MAX)
        return file_error(error, error_size,
                          "%s: found a vocabulary of %" PRIu32 " in the header, wanted at most %d; make it again with "
                          "./tokenize",
                          f->path, vocab, INT32_MAX);
    f->id_bytes = layout->id_bytes;
    f->count = load_u32(begin + 4 * HEADER_COUNT);
    f->vocab = vocab;
    f->hash = load_u64(begin + 4 * HEADER_HASH);
    f->tokenizer = load_u64(begin + 4 * HEADER_TOKENIZER);
    if (token_file_bytes(f) != bytes)
        return file_error(
            error, error_size,
            "%s: expected %ju bytes (a header of %d and %ju ids of %d), found %ju: it was %s; copy or make "
            "it again",
            f->path, (uintmax_t)token_file_bytes(f), TOKEN_FILE_HEADER, (uintmax_t)f->count, f->id_bytes,
            (uintmax_t)bytes, bytes < token_file_bytes(f) ? "cut" : "appended to");
    return true;
}

static bool open_regular(struct token_file *f, uint64_t *bytes, char *error, size_t error_size) {
    f->fd = open(f->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); // not blocking: a pipe is refused, not waited for
    if (f->fd < 0)
        return file_error(error, error_size, "%s: cannot be opened (%s), wanted a token shard", f->path,
                          strerror(errno));
    struct stat status;
    if (fstat(f->fd, &status) != 0)
        return file_error(error, error_size, "%s: cannot be examined: %s", f->path, strerror(errno));
    if (!S_ISREG(status.st_mode))
        return file_error(error, error_size, "%s: found a %s, wanted a token shard, a regular file", f->path,
                          S_ISDIR(status.st_mode) ? "directory" : "pipe or device");
    if (status.st_size == 0)
        return file_error(error, error_size, "%s: found an empty file, wanted a token shard; copy or make it again",
                          f->path);
    *bytes = (uint64_t)status.st_size;
    f->id = (struct file_id){status.st_dev, status.st_ino};
    return true;
}

// As much of a header as a file of so many bytes has.
static bool read_header(const struct token_file *f, unsigned char *header, uint64_t bytes, char *error,
                        size_t error_size) {
    size_t wanted = bytes < TOKEN_FILE_HEADER ? (size_t)bytes : TOKEN_FILE_HEADER;
    ssize_t got = file_read_at(f->fd, header, wanted, 0);
    if (got < 0) return file_error(error, error_size, "%s: cannot be read: %s", f->path, strerror(errno));
    return (size_t)got == wanted ||
           file_error(error, error_size, "%s: found %zd bytes, wanted the %ju of its size; copy or make it again",
                      f->path, got, (uintmax_t)bytes);
}

bool token_file_open(struct token_file *f, const char *path, char *error, size_t error_size) {
    *f = (struct token_file){.path = strdup(path), .fd = -1};
    if (!f->path) return file_error(error, error_size, "%s: found no memory for its name", path);
    unsigned char header[TOKEN_FILE_HEADER];
    uint64_t bytes = 0;
    bool opened = open_regular(f, &bytes, error, error_size) && read_header(f, header, bytes, error, error_size) &&
                  parse_header(f, header, bytes, error, error_size);
    if (!opened) token_file_close(f);
    return opened;
}

void token_file_close(struct token_file *f) {
    if (f->path && f->fd >= 0) close(f->fd); // only read from: nothing can be lost
    free(f->path);
    *f = (struct token_file){.fd = -1};
}

bool token_file_is_like(const struct token_file *f, const struct token_file *first, char *error, size_t error_size) {
    if (f->id_bytes != first->id_bytes)
        return file_error(error, error_size,
                          "%s: found ids of %d bits, wanted %d as in %s; give shards of one tokenizer", f->path,
                          8 * f->id_bytes, 8 * first->id_bytes, first->path);
    if (f->vocab != first->vocab)
        return file_error(error, error_size,
                          "%s: found a vocabulary of %" PRIu32 " in the header, wanted %" PRIu32
                          " as in %s (0: not there); give shards of one tokenizer",
                          f->path, f->vocab, first->vocab, first->path);
    if (f->tokenizer != first->tokenizer)
        return file_error(error, error_size,
                          "%s: found ids of the tokenizer %016" PRIx64 ", wanted those of %016" PRIx64
                          " as in %s (0: not in the header); give shards of one tokenizer",
                          f->path, f->tokenizer, first->tokenizer, first->path);
    return true;
}

// ---- reading ----

enum { PIECE = 16384 }; // ids at a time

static bool refuse_changed(const struct token_file *f, uint64_t bytes, char *error, size_t error_size) {
    errno = 0;
    return file_error(error, error_size,
                      "%s: found %ju bytes, wanted the %ju it had when it was opened; do not change it during a run",
                      f->path, (uintmax_t)bytes, (uintmax_t)token_file_bytes(f));
}

static bool check_size(const struct token_file *f, char *error, size_t error_size) {
    struct stat status;
    if (fstat(f->fd, &status) != 0)
        return file_error(error, error_size, "%s: cannot be examined: %s", f->path, strerror(errno));
    return (uint64_t)status.st_size == token_file_bytes(f) ||
           refuse_changed(f, (uint64_t)status.st_size, error, error_size);
}

// The bytes of n <= PIECE ids from position start on.
static bool read_piece(const struct token_file *f, uint64_t start, size_t n, unsigned char *bytes, char *error,
                       size_t error_size) {
    size_t wanted = n * (size_t)f->id_bytes;
    uint64_t offset = TOKEN_FILE_HEADER + start * (uint64_t)f->id_bytes;
    ssize_t got = file_read_at(f->fd, bytes, wanted, offset);
    if (got < 0) {
        int reason = errno;
        file_error(error, error_size, "%s: cannot be read at byte %ju: %s", f->path, (uintmax_t)offset,
                   strerror(reason));
        errno = reason;
        return false;
    }
    return (size_t)got == wanted || refuse_changed(f, offset + (uint64_t)got, error, error_size);
}

// Each loop is simple enough for the compiler to unroll; comparing with the limit comes after.
static void decode(int32_t *ids, const unsigned char *bytes, size_t n, int id_bytes) {
    if (id_bytes == 2)
        for (size_t i = 0; i < n; i++) ids[i] = bytes[2 * i] | bytes[2 * i + 1] << 8;
    else
        for (size_t i = 0; i < n; i++) ids[i] = (int32_t)load_u32(bytes + 4 * i);
}

static bool check_ids(const struct token_file *f, uint64_t start, const int32_t *ids, size_t n, uint32_t limit,
                      char *error, size_t error_size) {
    for (size_t i = 0; i < n; i++) {
        if ((uint32_t)ids[i] < limit) continue;
        errno = 0;
        return file_error(error, error_size,
                          "%s: found id %" PRIu32 " at position %ju, wanted less than the vocabulary of %" PRIu32
                          "; give the --vocab or the tokenizer that the shard was made with, or make it again",
                          f->path, (uint32_t)ids[i], (uintmax_t)(start + i), limit);
    }
    return true;
}

static uint32_t limit_of(const struct token_file *f, uint32_t vocab_limit) {
    if (!vocab_limit) vocab_limit = f->vocab;
    return vocab_limit ? vocab_limit : 1u << 31; // what an int32 id holds
}

bool token_file_read(const struct token_file *f, uint64_t start, size_t n, uint32_t vocab_limit, int32_t *ids,
                     char *error, size_t error_size) {
    if (start > f->count || n > f->count - start) {
        errno = EINVAL;
        return file_error(error, error_size, "%s: asked for %zu ids from %ju on, where there are %ju", f->path, n,
                          (uintmax_t)start, (uintmax_t)f->count);
    }
    if (!check_size(f, error, error_size)) return false;
    for (size_t piece; n > 0; start += piece, ids += piece, n -= piece) {
        unsigned char bytes[4 * PIECE];
        piece = n < PIECE ? n : PIECE;
        if (!read_piece(f, start, piece, bytes, error, error_size)) return false;
        decode(ids, bytes, piece, f->id_bytes);
        if (!check_ids(f, start, ids, piece, limit_of(f, vocab_limit), error, error_size)) return false;
    }
    return true;
}

bool token_file_check(const struct token_file *f, int32_t *largest, char *error, size_t error_size) {
    *largest = -1;
    if (!check_size(f, error, error_size)) return false;
    struct hash hash = hash_begin();
    size_t piece;
    for (uint64_t start = 0; start < f->count; start += piece) {
        unsigned char bytes[4 * PIECE];
        int32_t ids[PIECE];
        piece = f->count - start < PIECE ? (size_t)(f->count - start) : PIECE;
        if (!read_piece(f, start, piece, bytes, error, error_size)) return false;
        hash_add(&hash, bytes, piece * (size_t)f->id_bytes);
        decode(ids, bytes, piece, f->id_bytes);
        if (!check_ids(f, start, ids, piece, limit_of(f, 0), error, error_size)) return false;
        for (size_t i = 0; i < piece; i++)
            if (ids[i] > *largest) *largest = ids[i];
    }
    if (f->hash && hash_end(&hash) != f->hash)
        return file_error(error, error_size,
                          "%s: found ids with the hash %016" PRIx64 ", wanted %016" PRIx64
                          " as the header says: it was damaged; copy or make it again",
                          f->path, hash_end(&hash), f->hash);
    return true;
}

// ---- writing ----

void token_writer_abandon(struct token_writer *w) {
    if (!w->file) return;
    fclose(w->file); // whatever it says: the file goes
    unlink(w->temporary);
    w->file = NULL;
}

// For "return refuse(w, file_error(...))".
static bool refuse(struct token_writer *w, bool never) {
    token_writer_abandon(w);
    return never;
}

static bool write_header(struct token_writer *w) {
    unsigned char header[TOKEN_FILE_HEADER] = {0};
    const struct layout *layout = &layouts[w->id_bytes == 4];
    store_u32(header + 4 * HEADER_MAGIC, layout->magic);
    store_u32(header + 4 * HEADER_VERSION, layout->version);
    store_u32(header + 4 * HEADER_COUNT, (uint32_t)w->count);
    store_u32(header + 4 * HEADER_VOCAB, w->vocab);
    store_u64(header + 4 * HEADER_HASH, hash_end(&w->hash));
    store_u64(header + 4 * HEADER_TOKENIZER, w->tokenizer);
    return fseeko(w->file, 0, SEEK_SET) == 0 && fwrite(header, 1, sizeof header, w->file) == sizeof header;
}

bool token_writer_begin(struct token_writer *w, const char *path, int vocab, uint64_t tokenizer, char *error,
                        size_t error_size) {
    *w = (struct token_writer){
        .vocab = (uint32_t)vocab, .tokenizer = tokenizer, .id_bytes = vocab <= 65536 ? 2 : 4, .hash = hash_begin()};
    if (vocab < 1) return file_error(error, error_size, "%s: found a vocabulary of %d, wanted at least 1", path, vocab);
    int length = snprintf(w->temporary, sizeof w->temporary, "%s.tmp", path);
    if (length >= (int)sizeof w->temporary)
        return file_error(error, error_size, "%s: found a path of %d bytes, wanted less than %d; use a shorter one",
                          path, length, FILE_PATH);
    memcpy(w->path, w->temporary, (size_t)length - strlen(".tmp"));
    w->file = fopen(w->temporary, "wb");
    if (!w->file) return file_error(error, error_size, "%s: cannot create: %s", w->temporary, strerror(errno));
    return write_header(w) || // its place; finish writes it again
           refuse(w, file_error(error, error_size, "%s: cannot write its header: %s", w->temporary, strerror(errno)));
}

static void encode(unsigned char *bytes, const int32_t *ids, size_t n, int id_bytes) {
    for (size_t i = 0; i < n; i++)
        for (int k = 0; k < id_bytes; k++) *bytes++ = (unsigned char)((uint32_t)ids[i] >> (8 * k));
}

bool token_writer_append(struct token_writer *w, const int32_t *ids, size_t n, char *error, size_t error_size) {
    if (n > INT32_MAX - w->count)
        return refuse(w, file_error(error, error_size,
                                    "%s: found %ju ids and %zu more, wanted at most %d in one shard; write several",
                                    w->path, (uintmax_t)w->count, n, INT32_MAX));
    for (size_t i = 0; i < n; i++)
        if ((uint32_t)ids[i] >= w->vocab)
            return refuse(w, file_error(error, error_size, "%s: found id %d for position %ju, wanted 0 to %u", w->path,
                                        ids[i], (uintmax_t)(w->count + i), w->vocab - 1));
    for (size_t piece; n > 0; ids += piece, n -= piece) {
        unsigned char bytes[4 * PIECE];
        piece = n < PIECE ? n : PIECE;
        size_t size = piece * (size_t)w->id_bytes;
        encode(bytes, ids, piece, w->id_bytes);
        if (fwrite(bytes, 1, size, w->file) != size)
            return refuse(w, file_error(error, error_size, "%s: cannot write id %ju: %s", w->temporary,
                                        (uintmax_t)w->count, strerror(errno)));
        hash_add(&w->hash, bytes, size);
        w->count += piece;
    }
    return true;
}

bool token_writer_finish(struct token_writer *w, char *error, size_t error_size) {
    if (!write_header(w))
        return refuse(w,
                      file_error(error, error_size, "%s: cannot write its header: %s", w->temporary, strerror(errno)));
    FILE *file = w->file;
    w->file = NULL;
    return file_publish(file, w->temporary, w->path, error, error_size);
}

// Text of any length through one buffer: a file, a pipe or standard input, by lines or in pieces. What cannot be read
// ends the program (exit 2; 1 where the machine is to blame).
#ifndef MOK_DATA_READER_H
#define MOK_DATA_READER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { READER_HELD_MAX = 256 << 20 }; // bytes that are held at most, so a line cannot be longer

struct cJSON;

struct reader {
    const char *name;
    int fd;
    char *data;
    size_t start, end, capacity; // what is held lies at data[start .. end - 1]
    bool ended;                  // there is nothing behind it
    uint64_t bytes, line;        // read so far; number of the last line that was taken
};

// Whether the name means standard input: "-".
bool reader_is_standard_input(const char *name);

void reader_open(struct reader *r, const char *name);
void reader_close(struct reader *r);

static inline size_t reader_held(const struct reader *r) { return r->end - r->start; }

// Holds more bytes than before, perhaps elsewhere; false at the end. A file of a kind that is no text, but that
// token_file_guess knows, is refused.
bool reader_more(struct reader *r);

// The next line without its end (\n or \r\n) and, at the beginning, without a UTF-8 byte order mark. Valid until the
// next call; the last line of a file may lack its end.
bool reader_line(struct reader *r, char **line, size_t *length);

// The object of the next line that is not blank, for cJSON_Delete; NULL at the end. A line that is no JSON object or
// holds a character zero is refused with its number.
struct cJSON *reader_json_line(struct reader *r);

// "name:line" of the last line, for messages. A static text.
const char *reader_place(const struct reader *r);

#endif

// The regular expressions of tokenizer.json. They are written for Oniguruma and run here by PCRE2, which reads some of
// them differently: those are translated, and what has no counterpart is refused.
#ifndef MOK_DATA_PATTERN_H
#define MOK_DATA_PATTERN_H

#include <stdbool.h>
#include <stddef.h>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

// Compiles text, a plain string if literal. NULL with "found ..., wanted ..." in error. Free with pcre2_code_free.
pcre2_code *pattern_compile(const char *text, bool literal, char *error, size_t error_size);

// Reads one character of UTF-8 at text [bytes > 0]: its length, or 0 if there is none.
size_t pattern_read_utf8(const char *text, size_t bytes, unsigned *character);

#endif

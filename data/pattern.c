#include "data/pattern.h"

#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/fail.h"

// ---- UTF-8 ----

size_t pattern_read_utf8(const char *text, size_t bytes, unsigned *character) {
    unsigned first = (unsigned char)text[0];
    if (first < 0x80) {
        *character = first;
        return 1;
    }
    size_t length = first >= 0xc2 && first < 0xe0   ? 2
                    : first >= 0xe0 && first < 0xf0 ? 3
                    : first >= 0xf0 && first < 0xf5 ? 4
                                                    : 0;
    if (length == 0 || length > bytes) return 0;
    unsigned value = first & (0xffu >> (length + 1));
    for (size_t i = 1; i < length; i++) {
        unsigned next = (unsigned char)text[i];
        if ((next & 0xc0) != 0x80) return 0;
        value = value << 6 | (next & 0x3f);
    }
    static const unsigned least[] = {0, 0, 0x80, 0x800, 0x10000};
    if (value < least[length] || value > 0x10ffff || (value >= 0xd800 && value < 0xe000)) return 0;
    *character = value;
    return length;
}

// ---- translation ----

// Unicode's White_Space, which is what Oniguruma's \s matches (PCRE2's also matches U+180E), and everything else.
#define SPACE                                                                                                          \
    "\\x{9}-\\x{d}\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{3000}"
#define NOT_SPACE                                                                                                      \
    "\\x{0}-\\x{8}\\x{e}-\\x{1f}\\x{21}-\\x{84}\\x{86}-\\x{9f}\\x{a1}-\\x{167f}\\x{1681}-\\x{1fff}\\x{200b}-"          \
    "\\x{2027}\\x{202a}-\\x{202e}\\x{2030}-\\x{205e}\\x{2060}-\\x{2fff}\\x{3001}-\\x{10ffff}"

enum { MOST_PATTERN = 1 << 14 }; // bytes

struct translator {
    const char *at, *end;
    char *out;
    size_t used, capacity;
    char *error;
    size_t error_size;
};

static bool refuse(struct translator *t, const char *format, ...) __attribute__((format(printf, 2, 3)));
static bool refuse(struct translator *t, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(t->error, t->error_size, format, args);
    va_end(args);
    return false;
}

static void emit(struct translator *t, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void emit(struct translator *t, const char *format, ...) {
    va_list args;
    va_start(args, format);
    int length = vsnprintf(t->out + t->used, t->capacity - t->used, format, args);
    va_end(args);
    if (length < 0 || (size_t)length >= t->capacity - t->used) fail_internal("tokenizer", "no room for a pattern");
    t->used += (size_t)length;
}

static bool starts_with(const struct translator *t, const char *text) {
    size_t length = strlen(text);
    return (size_t)(t->end - t->at) >= length && memcmp(t->at, text, length) == 0;
}

static bool take(struct translator *t, const char *text) {
    if (!starts_with(t, text)) return false;
    t->at += strlen(text);
    return true;
}

static bool take_character(struct translator *t, unsigned *character) {
    size_t length = t->at < t->end ? pattern_read_utf8(t->at, (size_t)(t->end - t->at), character) : 0;
    t->at += length;
    return length > 0 || refuse(t, "found its end, or bytes that are not UTF-8, inside a pattern, wanted a character");
}

// The number in \xHH, \x{H...} and \uHHHH, behind the letter.
static bool take_hexadecimal(struct translator *t, char letter, unsigned *character) {
    char digits[8] = "";
    bool braces = letter == 'x' && take(t, "{");
    size_t most = braces ? 6 : letter == 'x' ? 2 : 4, length = 0;
    while (length < most && t->at < t->end && strchr("0123456789abcdefABCDEF", *t->at) && *t->at)
        digits[length++] = *t->at++;
    *character = (unsigned)strtoul(digits, NULL, 16);
    bool complete = length > 0 && (letter == 'x' || length == 4) && (!braces || take(t, "}"));
    // A byte above 127 in \xHH would be part of a character.
    bool allowed = *character <= 0x10ffff && !(*character >= 0xd800 && *character < 0xe000) &&
                   (braces || letter == 'u' || *character < 0x80);
    return (complete && allowed) ||
           refuse(t, "found a bad \\%c in a pattern, wanted the number of a character", letter);
}

// Behind a backslash: a single character, unless it is a letter or digit with a meaning of its own.
static bool take_escaped_character(struct translator *t, unsigned *character) {
    static const char letters[] = "tnrfvae", values[] = "\t\n\r\f\v\a\033";
    if (!take_character(t, character)) return false;
    if (*character == 'x' || *character == 'u') return take_hexadecimal(t, (char)*character, character);
    const char *letter = *character < 0x80 ? memchr(letters, (int)*character, sizeof letters - 1) : NULL;
    if (letter) *character = (unsigned)values[letter - letters];
    bool has_meaning =
        !letter && ((*character >= 'a' && *character <= 'z') || (*character >= 'A' && *character <= 'Z') ||
                    (*character >= '0' && *character <= '9'));
    return !has_meaning ||
           refuse(t, "found \\%c in a pattern, which is not supported, wanted another way to say it", (int)*character);
}

// \p{...}: general categories mean the same to both. Longer names are scripts to Oniguruma; PCRE2 would also match
// characters that a script shares with others. With an unknown name the pattern does not compile.
static bool take_property(struct translator *t, bool negated) {
    char name[32];
    size_t length = 0;
    if (!take(t, "{")) return refuse(t, "found \\p without {, wanted \\p{name} in a pattern");
    if (take(t, "^")) negated = !negated;
    for (; t->at < t->end && *t->at != '}' && length + 1 < sizeof name; length++) name[length] = *t->at++;
    name[length] = 0;
    bool word = length > 0 && strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_") == length;
    if (!word || !take(t, "}")) return refuse(t, "found a bad \\p{...} in a pattern, wanted \\p{name}");
    emit(t, "\\%c{%s%s}", negated ? 'P' : 'p', length > 2 ? "sc:" : "", name);
    return true;
}

// A backslash and what stands for many characters, as it is written inside brackets. False: it is something else.
static bool take_class(struct translator *t, bool *failed) {
    *failed = false;
    if (take(t, "\\s"))
        emit(t, SPACE);
    else if (take(t, "\\S"))
        emit(t, NOT_SPACE);
    else if (take(t, "\\d"))
        emit(t, "\\p{Nd}");
    else if (take(t, "\\D"))
        emit(t, "\\P{Nd}");
    else if (take(t, "\\p"))
        *failed = !take_property(t, false);
    else if (take(t, "\\P"))
        *failed = !take_property(t, true);
    else
        return false;
    return true;
}

static bool take_set_character(struct translator *t, unsigned *character) {
    if (take(t, "\\")) return take_escaped_character(t, character);
    if (starts_with(t, "["))
        return refuse(t, "found [ inside [...] in a pattern, which is not supported, wanted single characters");
    if (starts_with(t, "&&"))
        return refuse(t, "found && in a pattern, which is not supported, wanted a set without intersections");
    return take_character(t, character);
}

// One character or a range.
static bool take_set_range(struct translator *t) {
    unsigned first, last;
    if (!take_set_character(t, &first)) return false;
    emit(t, "\\x{%x}", first);
    if (!starts_with(t, "-") || starts_with(t, "-]")) return true;
    t->at++;
    if (starts_with(t, "\\p") || starts_with(t, "\\P"))
        return refuse(t, "found a range that ends with \\p in a pattern, wanted a character");
    if (!take_set_character(t, &last)) return false;
    if (last < first)
        return refuse(t, "found a range from U+%04X down to U+%04X in a pattern, wanted it up", first, last);
    emit(t, "-\\x{%x}", last);
    return true;
}

// Behind [.
static bool take_set(struct translator *t) {
    emit(t, take(t, "^") ? "[^" : "[");
    if (starts_with(t, "]")) return refuse(t, "found an empty [] in a pattern, wanted \\] for the bracket itself");
    while (!take(t, "]")) {
        bool failed;
        if (take_class(t, &failed)) {
            if (failed) return false;
            if (starts_with(t, "-") && !starts_with(t, "-]"))
                return refuse(t, "found a range that begins with a set in a pattern, wanted \\- for the character");
        } else if (!take_set_range(t)) {
            return false;
        }
    }
    emit(t, "]");
    return true;
}

// Behind (. Nothing refers back to groups, so they need not be remembered.
static bool take_group(struct translator *t) {
    static const char *const kinds[] = {"?:", "?=", "?!", "?<=", "?<!", "?>", "?i:"};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        if (!take(t, kinds[i])) continue;
        emit(t, "(%s", kinds[i]);
        return true;
    }
    if (starts_with(t, "?") || starts_with(t, "*"))
        return refuse(t, "found (%.3s in a pattern, which is not supported, wanted a plain group", t->at);
    emit(t, "(?:");
    return true;
}

static bool take_number(struct translator *t, unsigned *number) {
    const char *start = t->at;
    for (*number = 0; t->at < t->end && *t->at >= '0' && *t->at <= '9' && *number < 100000; t->at++)
        *number = 10 * *number + (unsigned)(*t->at - '0');
    return t->at > start;
}

// {n}, {n,} and {n,m}, behind {. Oniguruma has no possessive form of them, and its {n}? is not a lazy one.
static bool take_braces(struct translator *t) {
    unsigned number;
    if (!take_number(t, &number))
        return refuse(t, "found { without a number in a pattern, wanted \\{ for the brace itself");
    emit(t, "{%u", number);
    bool exact = !take(t, ",");
    if (!exact) emit(t, ",");
    if (!exact && take_number(t, &number)) emit(t, "%u", number);
    if (!take(t, "}")) return refuse(t, "found a bad {...} in a pattern, wanted {n}, {n,} or {n,m}");
    emit(t, "}");
    if (starts_with(t, "+") || (exact && starts_with(t, "?")))
        return refuse(t, "found a sign behind {...} in a pattern, which is not supported, wanted none");
    if (take(t, "?")) emit(t, "?");
    return true;
}

// What may follow a character, set or group: at most one repetition.
static bool take_repetition(struct translator *t) {
    if (take(t, "{")) {
        if (!take_braces(t)) return false;
    } else if (t->at < t->end && strchr("?*+", *t->at) && *t->at) {
        emit(t, "%c", *t->at++);
        if (t->at < t->end && strchr("?+", *t->at) && *t->at) emit(t, "%c", *t->at++);
    }
    if (t->at < t->end && strchr("?*+{", *t->at) && *t->at)
        return refuse(t, "found a repetition of a repetition in a pattern, wanted a group around the first");
    return true;
}

// Everything that may not be repeated: |, ^, $, \A, \z, \Z and the beginnings of groups.
static bool take_mark(struct translator *t, bool *failed) {
    static const char *const marks[] = {"|", "^", "$", "\\A", "\\z", "\\Z"};
    *failed = false;
    for (size_t i = 0; i < sizeof marks / sizeof *marks; i++) {
        if (!take(t, marks[i])) continue;
        emit(t, "%s", marks[i]);
        return true;
    }
    if (!take(t, "(")) return false;
    *failed = !take_group(t);
    return true;
}

static bool take_single(struct translator *t) {
    bool failed;
    if (take(t, "[")) return take_set(t);
    emit(t, "[");
    if (take_class(t, &failed)) {
        emit(t, "]");
        return !failed;
    }
    t->used--;
    if (take(t, ")") || take(t, ".")) {
        emit(t, "%c", t->at[-1]);
        return true;
    }
    unsigned character;
    if (strchr("?*+{", *t->at) && *t->at)
        return refuse(t, "found %c without something to repeat in a pattern, wanted \\%c for the character", *t->at,
                      *t->at);
    if (!(take(t, "\\") ? take_escaped_character(t, &character) : take_character(t, &character))) return false;
    emit(t, "\\x{%x}", character);
    return true;
}

static bool translate(struct translator *t) {
    while (t->at < t->end) {
        bool failed;
        if (take_mark(t, &failed)) {
            if (failed) return false;
        } else if (!take_single(t) || !take_repetition(t)) {
            return false;
        }
    }
    return true;
}

// ---- compilation ----

// For Oniguruma ^ and $ stand at every line, and only \n ends one.
static pcre2_code *compile(const char *text, size_t bytes, uint32_t options, char *error, size_t error_size) {
    pcre2_compile_context *context = pcre2_compile_context_create(NULL);
    if (!context) fail_internal("tokenizer", "no memory for a pattern");
    pcre2_set_newline(context, PCRE2_NEWLINE_LF);
    int number;
    size_t place;
    pcre2_code *code = pcre2_compile((PCRE2_SPTR)text, bytes, options, &number, &place, context);
    pcre2_compile_context_free(context);
    if (!code) {
        PCRE2_UCHAR message[256] = "";
        pcre2_get_error_message(number, message, sizeof message);
        snprintf(error, error_size, "found a pattern that PCRE2 does not compile (%s), wanted one that it does",
                 (const char *)message);
        return NULL;
    }
    pcre2_jit_compile(code, PCRE2_JIT_COMPLETE); // where that is not to be had, the interpreter finds the same
    return code;
}

pcre2_code *pattern_compile(const char *text, bool literal, char *error, size_t error_size) {
    size_t bytes = strlen(text);
    if (bytes == 0 || bytes > MOST_PATTERN) {
        snprintf(error, error_size, "found a pattern of %zu bytes, wanted 1 to %d", bytes, MOST_PATTERN);
        return NULL;
    }
    if (literal) return compile(text, bytes, PCRE2_UTF | PCRE2_LITERAL, error, error_size);
    struct translator t = {.at = text, .end = text + bytes, .error = error, .error_size = error_size};
    t.capacity = (bytes + 1) * sizeof NOT_SPACE; // nothing gets longer than \S does
    t.out = malloc(t.capacity);
    if (!t.out) fail_internal("tokenizer", "no memory for a pattern of %zu bytes", bytes);
    bool translated = translate(&t);
    pcre2_code *code =
        translated ? compile(t.out, t.used, PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE, error, error_size) : NULL;
    free(t.out);
    return code;
}

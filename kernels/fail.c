#include "kernels/fail.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

enum { LINE = 12288, PLACE = 4096 }; // bytes at most; what is longer is cut

static char rank_name[32]; // "rank 3: ", or nothing
static void (*end_job)(int code);
static bool warnings_held;

void fail_set_rank(int rank, void (*end)(int code)) {
    if (end)
        snprintf(rank_name, sizeof rank_name, "rank %d: ", rank);
    else
        *rank_name = 0;
    end_job = end;
}

char *fail_hide_controls(char *text) {
    for (unsigned char *c = (unsigned char *)text; *c; c++) {
        if (*c < 32 || *c == 127) *c = '?';
        if (c[0] == 0xc2 && c[1] >= 0x80 && c[1] < 0xa0) c[0] = c[1] = '?';
    }
    return text;
}

// In one call, so that the lines of two processes do not mix.
static void print_line(const char *kind, const char *place, const char *message, va_list args) {
    char line[LINE];
    size_t head = (size_t)snprintf(line, sizeof line, "mok: %s: %s%.*s: ", kind, rank_name, PLACE, place);
    vsnprintf(line + head, sizeof line - head, message, args);
    fflush(stdout);
    fprintf(stderr, "%s\n", fail_hide_controls(line));
    fflush(stderr);
}

static _Noreturn void end_program(int code) {
    if (end_job) end_job(code);
    exit(code);
}

_Noreturn void fail_user(const char *place, const char *message, ...) {
    va_list args;
    va_start(args, message);
    print_line("error", place, message, args);
    va_end(args);
    end_program(2);
}

_Noreturn void fail_internal(const char *place, const char *message, ...) {
    va_list args;
    va_start(args, message);
    print_line("error", place, message, args);
    va_end(args);
    end_program(1);
}

void fail_hold_warnings(bool hold) { warnings_held = hold; }

void fail_warn(const char *place, const char *message, ...) {
    if (warnings_held) return;
    va_list args;
    va_start(args, message);
    print_line("warning", place, message, args);
    va_end(args);
}

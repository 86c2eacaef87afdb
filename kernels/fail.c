#include "kernels/fail.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

static void print_line(const char *place, const char *message, va_list args) {
    fflush(stdout);
    fprintf(stderr, "mok: error: %s: ", place);
    vfprintf(stderr, message, args);
    fputc('\n', stderr);
    fflush(stderr);
}

_Noreturn void fail_user(const char *place, const char *message, ...) {
    va_list args;
    va_start(args, message);
    print_line(place, message, args);
    va_end(args);
    exit(2);
}

_Noreturn void fail_internal(const char *place, const char *message, ...) {
    va_list args;
    va_start(args, message);
    print_line(place, message, args);
    va_end(args);
    exit(1);
}

// kernels/fail.c for fuzz targets: its own code, but for the two ends. The line goes to memory, where it is checked,
// and a user error, which is what hostile input should end in, goes back to the target. An internal error says that a
// check is missing, or that too much memory was asked for.
#include <sanitizer/allocator_interface.h>
#include <stdarg.h>

#include "tests/fuzz/fuzz.h"

static FILE *fuzz_stderr;
static _Noreturn void fuzz_exit(int status);

#undef stderr // the C library has it as a macro of its own name
#define stderr fuzz_stderr
#define exit   fuzz_exit
#include "kernels/fail.c"
#undef stderr
#undef exit

jmp_buf fuzz_stop;

// ---- what the code got since fuzz_arm ----

enum { POINTERS = 1 << 16, DESCRIPTORS = 32 };
static const volatile void *pointers[POINTERS];
static size_t pointer_count;
static int first_descriptor;
static bool armed;

static void note_malloc(const volatile void *pointer, size_t size) {
    (void)size;
    if (armed && pointer && pointer_count < POINTERS) pointers[pointer_count++] = pointer;
}

// The last ones got are mostly the first to go.
static void note_free(const volatile void *pointer) {
    for (size_t i = armed && pointer ? pointer_count : 0; i-- > 0;)
        if (pointers[i] == pointer) {
            pointers[i] = pointers[--pointer_count];
            return;
        }
}

static void give_back(void) {
    while (pointer_count > 0) free((void *)(uintptr_t)pointers[--pointer_count]);
    for (int d = first_descriptor; d < first_descriptor + DESCRIPTORS; d++) close(d);
}

// ---- the line ----

static char line[1 << 15];

__attribute__((constructor)) static void begin(void) {
    fuzz_stderr = fmemopen(line, sizeof line, "w");
    __sanitizer_install_malloc_and_free_hooks(note_malloc, note_free);
}

// Whole lines, warnings among them, that a terminal shows as they are. The last one says why the program ends.
static void check_line(void) {
    size_t length = (size_t)ftell(fuzz_stderr);
    line[length] = 0; // a longer one may have stood there
    fuzz_require(strlen(line) == length);
    char *rest = line, *last = NULL;
    for (char *next; (next = strsep(&rest, "\n")) && *next; last = next) {
        fuzz_require(strncmp(next, "mok: ", 5) == 0);
        for (char *c = next; *c; c++) fuzz_require((unsigned char)*c >= 32 && *c != 127);
    }
    fuzz_require(last && strncmp(last, "mok: error: ", 12) == 0);
}

static _Noreturn void fuzz_exit(int status) {
    if (!armed || status != 2) {
        fprintf(stderr, "found the end of the program with status %d, wanted %s: %.*s", status,
                status == 2 ? "none here" : "2 at most", (int)ftell(fuzz_stderr), line);
        abort();
    }
    armed = false;
    check_line();
    give_back();
    longjmp(fuzz_stop, 1);
}

void fuzz_arm(void) {
    first_descriptor = dup(STDERR_FILENO); // the lowest that is free
    fuzz_require(first_descriptor >= 0);
    close(first_descriptor);
    pointer_count = 0;
    rewind(fuzz_stderr);
    armed = true;
}

void fuzz_disarm(void) { armed = false; }

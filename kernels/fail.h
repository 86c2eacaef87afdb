// How the program stops: one line that says where, what was found, what was wanted and what to do. Names and texts of
// damaged files may be part of it: control characters are printed as '?', and what is too long is cut.
#ifndef MOK_KERNELS_FAIL_H
#define MOK_KERNELS_FAIL_H

#include <stdbool.h>

#ifdef __cplusplus
#define _Noreturn [[noreturn]]
extern "C" {
#endif

// The user can mend it (flag, file, size): prints "mok: error: PLACE: MESSAGE" to stderr and ends with exit code 2.
// place: a flag ("--steps") or a file path. message: found, wanted, hint, in this order.
_Noreturn void fail_user(const char *place, const char *message, ...) __attribute__((format(printf, 2, 3)));

// The program or the machine is at fault (allocation, I/O error, broken invariant): the same line, exit code 1.
_Noreturn void fail_internal(const char *place, const char *message, ...) __attribute__((format(printf, 2, 3)));

// Something is not as it should be, but the program goes on: "mok: warning: PLACE: MESSAGE".
void fail_warn(const char *place, const char *message, ...) __attribute__((format(printf, 2, 3)));

// true: warnings are not printed, since another rank has said the same; until it is called with false.
void fail_hold_warnings(bool hold);

// For a job of several ranks: from now on the lines begin with "mok: error: rank 3: " or "mok: warning: rank 3: ", and end
// is called to stop all ranks before this process exits with the code. NULL takes both back.
void fail_set_rank(int rank, void (*end)(int code));

// Turns what a terminal would obey rather than show (the control characters of ASCII and Latin-1; other UTF-8 stays)
// into '?', and returns text.
char *fail_hide_controls(char *text);

#ifdef __cplusplus
}
#endif

#endif

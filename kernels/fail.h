// How the program stops: one line that says where, what was found, what was wanted and what to do.
#ifndef MOK_KERNELS_FAIL_H
#define MOK_KERNELS_FAIL_H

// The user can mend it (flag, file, size): prints "mok: error: PLACE: MESSAGE" to stderr and ends with exit code 2.
// place: a flag ("--steps") or a file path. message: found, wanted, hint, in this order.
_Noreturn void fail_user(const char *place, const char *message, ...) __attribute__((format(printf, 2, 3)));

// The program or the machine is at fault (allocation, I/O error, broken invariant): the same line, exit code 1.
_Noreturn void fail_internal(const char *place, const char *message, ...) __attribute__((format(printf, 2, 3)));

#endif

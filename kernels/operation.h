// Every operation of kernels.h says when it is called, so that a step's time can be told apart by operation.
//
// The thread that calls operations records them; one that is part of another is not told apart. Nothing but a look at one
// pointer happens while nobody records.
#ifndef MOK_KERNELS_OPERATION_H
#define MOK_KERNELS_OPERATION_H

#include "kernels/trace.h"

#ifdef __cplusplus
extern "C" {
#endif

// Where operations are recorded; NULL: nowhere.
extern struct trace *operation_trace;

// Number of the span that begins, -1 within another; its end.
int operation_begin(const char *name);
void operation_end(int span);

static inline int operation_enter(const char *name) { return operation_trace ? operation_begin(name) : -1; }
static inline void operation_leave(const int *span) {
    if (*span >= 0) operation_end(*span);
}

#ifdef __cplusplus
}

// nvcc knows no cleanup attribute.
struct operation_scope {
    const int span;
    explicit operation_scope(const char *name) : span(operation_enter(name)) {}
    ~operation_scope() { operation_leave(&span); }
    operation_scope(const operation_scope &) = delete;
    operation_scope &operator=(const operation_scope &) = delete;
};
#endif

// The first statement of an operation, which ends when the function does.
#ifdef __cplusplus
#define OPERATION() const operation_scope operation_scope_(__func__)
#else
#define OPERATION()                                                                                                    \
    __attribute__((cleanup(operation_leave), unused)) const int operation_span_ = operation_enter(__func__)
#endif

#endif

// Spans of a step: the operations that say when they are called, and the phases of the model.
#include "kernels/operation.h"

#include <stdlib.h>

#include "kernels/fail.h"
#include "kernels/kernels.h"

struct trace *operation_trace;
static bool inside; // an operation

void trace_add_span(struct trace *t, struct trace_span span) {
    if (t->span_count == t->span_capacity) {
        t->span_capacity = 2 * t->span_capacity + 1024;
        t->spans = realloc(t->spans, t->span_capacity * sizeof *t->spans);
        if (!t->spans) fail_internal("trace", "found no memory for %zu spans", t->span_capacity);
    }
    t->spans[t->span_count++] = span;
}

int operation_begin(const char *name) {
    if (inside) return -1;
    struct trace *t = operation_trace;
    inside = true;
    trace_add_span(t, (struct trace_span){name, t->block, device_mark(), -1, true});
    return (int)t->span_count - 1;
}

void operation_end(int span) {
    operation_trace->spans[span].end = device_mark();
    inside = false;
}

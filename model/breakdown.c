#include "model/breakdown.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/fail.h"

struct row {
    const char *name;
    int calls;
    double seconds;
};

static struct row *row_of(struct row *rows, int *count, const char *name) {
    for (int i = 0; i < *count; i++)
        if (strcmp(rows[i].name, name) == 0) return &rows[i];
    rows[*count] = (struct row){.name = name};
    return &rows[(*count)++];
}

static int longest_first(const void *a, const void *b) {
    const struct row *x = a, *y = b;
    if (x->seconds != y->seconds) return x->seconds > y->seconds ? -1 : 1;
    return strcmp(x->name, y->name);
}

static void print_row(FILE *file, const char *name, const char *calls, double seconds, double whole) {
    fprintf(file, "  %-24s %7s %11.3f %9.1f %%\n", name, calls, 1e3 * seconds, whole > 0 ? 100 * seconds / whole : 0);
}

void breakdown_print(FILE *file, const struct trace_track *device, int64_t step, double seconds) {
    struct row *rows = calloc(device->count + 1, sizeof *rows);
    int count = 0;
    double operations = 0;
    if (!rows) fail_internal("trace", "found no memory for a table of %zu operations", device->count);
    for (size_t i = 0; i < device->count; i++) {
        const struct trace_event *e = &device->events[i];
        struct row *row = row_of(rows, &count, e->name);
        row->calls++;
        row->seconds += e->end - e->begin;
        operations += e->end - e->begin;
    }
    qsort(rows, (size_t)count, sizeof *rows, longest_first);
    fprintf(file, "where the time of step %" PRId64 " went, on rank 0\n", step);
    fprintf(file, "  %-24s %7s %11s %11s\n", "operation", "calls", "ms", "of the step");
    for (int i = 0; i < count; i++) {
        char calls[16];
        snprintf(calls, sizeof calls, "%d", rows[i].calls);
        print_row(file, rows[i].name, calls, rows[i].seconds, seconds);
    }
    print_row(file, "gaps, host", "", fmax(seconds - operations, 0), seconds);
    print_row(file, "step", "", seconds, seconds);
    free(rows);
}

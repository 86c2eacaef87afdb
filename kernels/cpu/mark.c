// Marks: operations are done when their calls return.
#include <stdlib.h>

#include "kernels/clock.h"
#include "kernels/fail.h"
#include "kernels/kernels.h"

static double *seconds; // [capacity], those of `count` marks
static int count, capacity;

int device_mark(void) {
    if (count == capacity) {
        capacity = 2 * capacity + 1024;
        seconds = realloc(seconds, (size_t)capacity * sizeof *seconds);
        if (!seconds) fail_internal("trace", "found no memory for %d marks", capacity);
    }
    seconds[count] = clock_seconds();
    return count++;
}

double device_mark_seconds(int mark) { return seconds[mark]; }

void device_clear_marks(void) { count = 0; }

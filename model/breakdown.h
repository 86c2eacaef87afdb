// Where the time of a step goes: a table of its operations.
#ifndef MOK_MODEL_BREAKDOWN_H
#define MOK_MODEL_BREAKDOWN_H

#include <stdio.h>

#include "kernels/trace.h"

// Calls and time of every operation of one rank's track "device", the longest first; then the time in which none ran (the
// device waited for the host, or the host for something else), and the whole step.
void breakdown_print(FILE *file, const struct trace_track *device, int64_t step, double seconds);

#endif

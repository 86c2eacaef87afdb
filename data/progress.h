// A bar on standard error for what takes long and is no training step. Nothing is printed where that is no terminal.
#ifndef MOK_DATA_PROGRESS_H
#define MOK_DATA_PROGRESS_H

#include <stdbool.h>
#include <stdint.h>

struct progress {
    const char *what, *unit; // "text", "B"; an empty unit if `what` says it
    uint64_t total;          // 0: not known
    bool shown;
    double start, last; // clock_seconds of the beginning and of the last line
};

struct progress progress_begin(const char *what, const char *unit, uint64_t total);
// At most five lines a second; call it as often as it suits.
void progress_show(struct progress *p, uint64_t done);
// Takes the bar away.
void progress_end(struct progress *p);

#endif

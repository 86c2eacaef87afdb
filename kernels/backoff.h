// How to wait for another thread on a machine that may have fewer cores than threads: look, let others run, sleep.
#ifndef MOK_KERNELS_BACKOFF_H
#define MOK_KERNELS_BACKOFF_H

#include <sched.h>
#include <time.h>

#include "kernels/clock.h"

// Seconds of a wait, as far as this process was awake: one that was stopped for a while, as by Ctrl-Z, gives the others
// their time when it goes on.
struct waited {
    double last, seconds; // zeros: the clock was not read yet
};

// To be called again and again during the wait.
static inline double waited_seconds(struct waited *w) {
    const double most = 0.1; // between two looks
    double now = clock_seconds(), step = w->last == 0 ? 0 : now - w->last;
    w->last = now;
    return w->seconds += step < most ? step : most;
}

struct backoff {
    int polls;
    struct waited waited;
};

// Between two looks. Returns how many seconds it has waited so far; 0 while that is too short to read the clock for.
static inline double backoff_pause(struct backoff *b) {
    enum { LOOKS = 64, YIELDS = 256, CLOCK_EVERY = 32 };
    b->polls++;
    if (b->polls < LOOKS) return 0;
    if (b->polls < LOOKS + YIELDS)
        sched_yield();
    else
        nanosleep(&(struct timespec){0, 50000}, NULL);
    return b->polls % CLOCK_EVERY ? 0 : waited_seconds(&b->waited);
}

#endif

// The barrier at the edges of a pass: its own step, never part of the pass.
#include <stdio.h>
#include <string.h>

#include "kernels/backoff.h"
#include "kernels/cpu/mok_header.h"
#include "kernels/fail.h"
#include "kernels/operation.h"

size_t mok_header_bytes(int ranks) { return sizeof(struct mok_header) + (size_t)ranks * sizeof(struct mok_arrival); }

void mok_set_tokens(struct mok_group *g, int tokens) { mok_header_of(g, g->rank)->tokens = g->tokens = tokens; }

static uint64_t arrived(const struct mok_group *g, int rank) {
    return __atomic_load_n(&mok_header_of(g, g->rank)->arrivals[rank].epoch, __ATOMIC_ACQUIRE);
}

static _Noreturn void fail_missing(const struct mok_group *g, const char *what, double seconds) {
    char missing[256] = "";
    for (int r = 0; r < g->ranks && strlen(missing) < sizeof missing - 48; r++)
        if (arrived(g, r) < g->epoch)
            snprintf(missing + strlen(missing), sizeof missing - strlen(missing), "%s%d (at barrier %llu)",
                     *missing ? ", " : "", r, (unsigned long long)arrived(g, r));
    fail_internal("megakernel",
                  "rank %d of its EP group waited %.0f s at barrier %llu, %s, for rank %s of the group; a rank has "
                  "stopped, or is "
                  "very slow: raise --timeout if it is only slow",
                  g->rank, seconds, (unsigned long long)g->epoch, what, missing);
}

void mok_barrier(struct mok_group *g, const char *what) {
    OPERATION();
    g->epoch++;
    for (int i = 0; i < g->ranks; i++) { // from the next rank on, so that not all of them write to rank 0 first
        int to = (g->rank + i) % g->ranks;
        __atomic_store_n(&mok_header_of(g, to)->arrivals[g->rank].epoch, g->epoch, __ATOMIC_RELEASE);
    }
    for (int r = 0; r < g->ranks; r++) {
        struct backoff wait = {0};
        while (arrived(g, r) < g->epoch) {
            double seconds = backoff_pause(&wait);
            if (seconds > g->timeout) fail_missing(g, what, seconds);
        }
    }
}

#include "kernels/stop.h"

#include <signal.h>
#include <stddef.h>

#include "kernels/comm.h"

static volatile sig_atomic_t requested;

static void request(int signal_number) {
    requested = signal_number;
    // Each line into a closed pipe brings another SIGPIPE, and the checkpoint is still to be written.
    signal(signal_number, signal_number == SIGPIPE ? SIG_IGN : SIG_DFL);
}

void stop_catch_signals(void) {
    static const int signals[] = {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGPIPE};
    for (size_t i = 0; i < sizeof signals / sizeof *signals; i++)
        if (signal(signals[i], request) == SIG_IGN) signal(signals[i], SIG_IGN);
}

int stop_requested(void) { return requested; }

int stop_agree(struct comm *c) {
    int64_t asked[NSIG] = {0}; // ranks that got this signal
    asked[stop_requested()] = 1;
    comm_sum_int64(c, asked, NSIG);
    for (int signal_number = 1; signal_number < NSIG; signal_number++)
        if (asked[signal_number]) return signal_number;
    return 0;
}

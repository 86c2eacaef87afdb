// A signal asks the program to end: what takes long looks here, and leaves where nothing is lost.
#ifndef MOK_KERNELS_STOP_H
#define MOK_KERNELS_STOP_H

struct comm;

// From now on Ctrl-C, SIGTERM, SIGHUP, SIGUSR1 (what cluster schedulers send when the time is nearly up) and a closed
// pipe only ask. One that comes a second time ends the program at once. Signals that are ignored, as nohup asks, stay so.
void stop_catch_signals(void);

// The number of the signal that asked, 0 if none did.
int stop_requested(void);

// The same for all ranks of c, collective: a signal that asked any of them, and the lowest where there are several. Ranks
// that work together stop where they have agreed to, else some would wait for those that have left.
int stop_agree(struct comm *c);

#endif

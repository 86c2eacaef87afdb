// What a run says: one aligned line and one JSON line per step, with the same numbers. Rank 0 writes the file; on others
// everything but the lines on standard output is left out.
#ifndef MOK_MODEL_LOG_H
#define MOK_MODEL_LOG_H

#include <stdint.h>
#include <stdio.h>

#include "model/trainer.h"

struct run_log {
    FILE *json; // log.jsonl of the run folder; NULL on other ranks than 0
    char path[OPTION_TEXT + 16];
    double flops_per_token;
    double peak_flops; // of all ranks: that of this rank's device (on a CPU, of its threads) times their number
    double started;    // monotonic seconds when the first step began; 0 before
    int64_t first_step;
};

// Opens FOLDER/log.jsonl. A run that starts at step > 0 keeps the lines of earlier steps and drops later ones, so that
// no step appears twice; what is no whole line of a log goes too. Ends the program (exit 2) when it cannot be opened.
void log_open(struct run_log *log, const struct trainer *t, const char *folder);
void log_close(struct run_log *log);
// Puts what was logged on the disk.
void log_sync(struct run_log *log);

void log_step(struct run_log *log, const struct trainer *t, const struct step_report *report, double seconds);
void log_eval(struct run_log *log, const struct trainer *t, struct evaluation e);
void log_choices(struct run_log *log, const struct trainer *t, struct choice_counts counts);

// The same lines without a log file or a step, for weights that are not trained here.
void log_print_eval(FILE *file, struct evaluation e);
void log_print_choices(FILE *file, struct choice_counts counts);

// Every MoE block's load.
void log_moe(struct run_log *log, const struct trainer *t);

// How the ranks share the model: "2 ranks: EP 2 x DP 1, --moe mok".
void log_print_layout(FILE *file, const struct options *o, const struct parallel *p);

// The resolved options, several in a line.
void log_print_options(FILE *file, const struct options *o);

#endif

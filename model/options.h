// Everything a run can be told: one struct, one table of flags that fills it, prints it and explains it.
#ifndef MOK_MODEL_OPTIONS_H
#define MOK_MODEL_OPTIONS_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "model/config.h"

enum schedule { SCHEDULE_COSINE, SCHEDULE_LINEAR, SCHEDULE_WSD, SCHEDULE_CONSTANT };

enum { OPTION_TEXT = 1024 }; // bytes of a path or prompt, with its final zero

struct options {
    char preset[32];
    struct config model;

    char data[OPTION_TEXT];      // "stories", or a text file
    char eval_data[OPTION_TEXT]; // empty: the held-out part of data
    char out[OPTION_TEXT];       // run folder
    bool resume, overwrite;

    int64_t steps;           // optimizer steps
    int batch;               // sequences per rank and micro-batch
    int seq;                 // tokens per sequence; with generate 0: as the checkpoint
    int64_t tokens_per_step; // global tokens per optimizer step; 0: one micro-batch
    uint64_t seed;

    double lr, min_lr; // peak and last learning rate
    enum schedule schedule;
    int64_t warmup;      // steps
    int64_t decay_steps; // of wsd; 0: a fifth of the steps
    double weight_decay, clip, beta1, beta2, adam_eps;

    int64_t save_every, eval_every, sample_every, log_moe_every; // steps; 0: never
    int eval_sequences;
    int keep;          // checkpoints kept; 0: all
    int sample_tokens; // length of the samples during training; 0: none

    int64_t generate; // tokens to sample instead of training; 0: train
    char from[OPTION_TEXT];
    char prompt[OPTION_TEXT];
    double temperature;

    bool plan, device, help; // print and stop
};

// Starts from the defaults, applies --preset wherever it stands, then every other flag. A flag is "--name value" or
// "--name=value" (switches take no value). Unknown, repeated, malformed, out-of-range or contradicting flags end the
// program with one line and exit code 2. Sizes are checked later by config_validate, once the data has given the
// vocabulary. With --help anywhere, help is set and nothing else is read.
//
// A preset's --warmup and --min-lr that the user has not given shrink to a given --steps and --lr.
void options_parse(struct options *o, int argc, char **argv);

// Steps of wsd's last phase: decay_steps, or for 0 a fifth of the steps; never more than what follows the warmup.
int64_t options_decay_steps(const struct options *o);

// Fills o with defaults and one preset; false if there is no preset of that name.
bool options_set_preset(struct options *o, const char *name);

// All flags with their meaning, range and default, from the table that parses them; then the presets.
void options_print_help(FILE *file);

// The resolved options as JSON, one member per flag (name without dashes) in table order. Free with cJSON_Delete.
// Numbers are raw members (cJSON_Raw) with as many digits as they need; a seed above 2^53 is a string.
struct cJSON *options_to_json(const struct options *o);
// Sets options from such a JSON object; members that are not there leave theirs alone. Returns NULL, or a static line
// that names the member that is unknown, repeated or wrong, and then o is unchanged.
const char *options_from_json(struct options *o, const struct cJSON *json);

// For a resumed run: prints one line per flag whose value differs ("--lr: 0.001 before, 0.002 now"), and returns the
// name of the first that would make it another run, or NULL if all of them may change.
const char *options_compare(FILE *file, const struct options *before, const struct options *now);

#endif

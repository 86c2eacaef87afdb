// Everything a run can be told: one struct, one table of flags that fills it, prints it and explains it.
#ifndef MOK_MODEL_OPTIONS_H
#define MOK_MODEL_OPTIONS_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "model/config.h"
#include "model/moe_settings.h"

struct cJSON;

enum schedule { SCHEDULE_COSINE, SCHEDULE_LINEAR, SCHEDULE_WSD, SCHEDULE_CONSTANT };

enum { OPTION_TEXT = 1024 }; // bytes of a path or prompt, with its final zero

struct options {
    char preset[32];
    struct config model;

    char data[OPTION_TEXT];      // "stories", a text file, a token shard, or a glob of shards
    char eval_data[OPTION_TEXT]; // empty: the held-out part of data
    char tokenizer[OPTION_TEXT]; // empty: found by the data or the weights
    char from[OPTION_TEXT];      // weights to begin with or to sample from; empty: none
    char out[OPTION_TEXT];       // run folder
    bool resume, override, overwrite;

    int64_t steps;           // optimizer steps
    int batch;               // sequences per rank and micro-batch, at most
    int seq;                 // tokens per sequence; with generate or evaluate 0: as the checkpoint
    int64_t tokens_per_step; // of all ranks; 0, until it is settled: a micro-batch of each rank
    uint64_t seed;

    // How the run is laid out here, which is not part of it: never taken from a run that is resumed.
    int ep; // ranks of an EP group; 0: chosen
    struct moe_settings moe;
    char trace[OPTION_TEXT]; // file; empty: none
    int64_t trace_step;      // 0: the third
    int trace_layer;         // 0: all, or the first with experts
    double timeout;          // seconds that a rank waits for others
    int ranks;               // with plan: of the job that is planned; 0: those that there are
    double memory;           // with plan: GiB that a rank is compared with; 0: what there is here

    double lr, min_lr; // peak and last learning rate
    enum schedule schedule;
    int64_t warmup;      // steps
    int64_t decay_steps; // of wsd; 0: a fifth of the steps
    double weight_decay, clip, beta1, beta2, adam_eps;

    int64_t save_every, eval_every, sample_every, log_moe_every; // steps; 0: never
    int eval_sequences;
    char eval_choices[OPTION_TEXT]; // empty: none
    int keep;                       // checkpoints kept; 0: all
    int sample_tokens;              // length of the samples during training; 0: none

    bool evaluate;    // instead of training
    int64_t generate; // tokens to sample instead of training; 0: train
    char prompt[OPTION_TEXT];
    double temperature;
    char logits[OPTION_TEXT]; // file; empty: none

    bool plan, device, help; // print and stop
};

// A run's options come about in two calls: options_parse reads the command line, then one of the others settles what
// depends on more than that. All of them end the program with one line and exit code 2 at the first thing wrong.

// Starts from the defaults, applies --preset wherever it stands, then every other flag. A flag is "--name value" or
// "--name=value" (switches take no value). Unknown, repeated, malformed and out-of-range flags are refused, and modes
// that exclude each other. With --help anywhere, help is set and nothing else is read.
void options_parse(struct options *o, int argc, char **argv);

// For a new run on so many ranks: a preset's --warmup and --min-lr that were not given shrink to --steps and --lr, and
// tokens_per_step becomes a number; then the flags must fit each other. Sizes are checked later by config_validate, once
// the data has given the vocabulary.
void options_settle(struct options *o, int ranks, int argc, char **argv);

// For a new run from existing weights, before options_settle: the model is the one found in folder. Flags that were given
// stay, and what they change is printed; a size is refused, but for fewer MTP modules.
void options_take_model(struct options *o, const struct config *found, const char *folder, int argc, char **argv);

// For --evaluate: --data, --eval-data and --seed that were not given are those saved in folder; saved may be NULL, and
// then --data must have been given.
void options_take_data(struct options *o, const struct cJSON *saved, const char *folder, int argc, char **argv);

// For a resumed run: the settings are those saved in folder, and flags that were given change them. Every change is
// printed. One that would make it another run is refused without --override, one of a tensor's size always; so is
// another --preset. Where the run lies and how it is laid out on ranks is as given now.
void options_resume(struct options *o, const struct cJSON *saved, const char *folder, int ranks, int argc, char **argv);

// Steps of wsd's last phase: decay_steps, or for 0 a fifth of the steps; never more than what follows the warmup.
int64_t options_decay_steps(const struct options *o);

// Fills o with defaults and one preset; false if there is no preset of that name.
bool options_set_preset(struct options *o, const char *name);

// All flags with their meaning, range and default, from the table that parses them; then the presets.
void options_print_help(FILE *file);

// The resolved options as JSON, one member per flag (name without dashes) in table order. Free with cJSON_Delete.
// Numbers are raw members (cJSON_Raw) with as many digits as they need; a seed above 2^53 is a string.
struct cJSON *options_to_json(const struct options *o);
// The same without what is not part of the run: where it lies, what it began from, how it is started and laid out on
// ranks. Equal runs leave equal bytes.
struct cJSON *options_run_to_json(const struct options *o);
// Sets options from such a JSON object; members that are not there leave theirs alone. Returns NULL, or a static line
// that names the member that is unknown, repeated or wrong, and then o is unchanged.
const char *options_from_json(struct options *o, const struct cJSON *json);

// Prints one line per flag whose value differs ("--lr: 0.001 before, 0.002 now"). Returns the name of the first that may
// not change in a resumed run, or NULL if all of them may.
const char *options_compare(FILE *file, const struct options *before, const struct options *now, bool override);

#endif

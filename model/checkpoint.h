// A checkpoint is a folder RUN/step-00000100 that Hugging Face's transformers can load as it is, with the trainer's own
// state beside it:
//
//   config.json, generation_config.json, tokenizer files    the model in Hugging Face's words
//   model-00001-of-000NN.safetensors, ...                   weights (F32, or BF16 where the device has them so) and
//   model.safetensors.index.json                            selection biases (F32) under Hugging Face's names; file 1:
//                                                           embedding, last norm, head; then one per block
//   state-00001-of-000NN.safetensors, ...                   the same split: NAME.master, NAME.m, NAME.v in F32
//   trainer.json                                            progress, options, data; size and hash of every other file
//                                                           and its own hash; written last
//
// Nothing in it tells time, path or number of ranks, so two saves of the same state are the same bytes. The masters are
// authoritative: a run that goes on, on a device of either kind, has weights that are its masters, rounded. A folder is
// complete when trainer.json and every file it lists are there with their sizes; it is whole when their hashes are right
// too. Whatever loads from a folder looks at the hashes first.
//
// Ranks that share a model save and load together, at any layout from any other. Rank 0 of the job writes all files; the
// others give it their pieces tensor by tensor. Every rank reads the same folder, so it lies where all of them see it.
// What is wrong with a folder rank 0 finds out, alone, while the others wait. They wait longer than for anything else:
// comm_timeout and in addition checkpoint_seconds, which grows with the bytes, since a slow disk is no failure.
#ifndef MOK_MODEL_CHECKPOINT_H
#define MOK_MODEL_CHECKPOINT_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "kernels/types.h"
#include "model/config.h"
#include "model/params.h"
#include "model/sharding.h"

struct cJSON;

struct tokenizer;

struct checkpoint {
    const struct config *config;
    const struct params *params;
    const struct parallel *parallel; // NULL: this process has the whole model and no others, whatever MPI says
    const struct sharding *sharding; // NULL: as sharding_build makes it
    // Device arrays: this rank's weights as params lays them out, [params->size], and its shards of the rest,
    // [sharding->size], which is the same when it has the whole model. Loading weights skips those that are NULL.
    real *weights;
    accum *master, *m, *v;
    accum *bias;                     // [MoE blocks, experts] selection bias, the same on all ranks
    int64_t step, sequences, tokens; // optimizer steps done, next global sequence, tokens seen
    uint64_t seed;
    bool bf16;                         // the model's files are written in BF16, not F32
    struct cJSON *options;             // the run's resolved flags, kept as they are to compare on resume; may be NULL
    struct cJSON *data;                // what tells the run's data from other data, kept likewise; may be NULL
    const struct tokenizer *tokenizer; // saved beside the weights; NULL: none
};

// Collective. Writes run_folder/step-%08d through a hidden folder that is renamed once all of it is on disk and every
// rank is there, then removes all but the newest keep complete checkpoints (0: keeps all; later steps than this one are
// never touched). Ends the program (exit 1) when something cannot be written, with older checkpoints intact and the hidden
// folder removed. If a rank dies meanwhile, the hidden folder stays behind for checkpoint_mend or the next save.
void checkpoint_save(const struct checkpoint *c, const char *run_folder, int keep);

// ---- folders: for one rank ----

// Removes every checkpoint of a run, complete or not, by exact name and nothing else. Ends the program (exit 2) when
// one cannot be removed.
void checkpoint_remove_all(const char *run_folder);

// Does away with what saves left that were killed: half of a checkpoint is removed, and one that was about to be replaced
// gets its name back. Nobody else may be saving.
void checkpoint_mend(const char *run_folder);

// Path of the newest whole checkpoint of a run; false if there is none. Says on log, if that is not NULL, which newer
// ones it skipped and why ("skipped step-00000200: FILE: found hash ..., wanted ...: damaged").
bool checkpoint_newest(const char *run_folder, char *path, size_t size, FILE *log);

// Whether a run has any checkpoint, complete or not.
bool checkpoint_exists(const char *run_folder);

// The checkpoint that --from stands for: of a run folder the newest whole one, else the folder itself. Ends the program (exit
// 2) when the run has none, or the path is too long.
void checkpoint_find(const char *folder, char *path, size_t size);

// Bytes of one checkpoint of a model, a little more than it will have; and bytes that the checkpoints of a run have now,
// complete or not.
uint64_t checkpoint_bytes(const struct config *c);
uint64_t checkpoint_bytes_on_disk(const char *run_folder);

// Seconds that a slow disk takes to write or read so many bytes and to read them once more for their hashes: what other
// ranks wait longer for one that does so.
double checkpoint_seconds(uint64_t bytes);

// The model's sizes. The training-only constants that config.json has no key for stay as they are.
bool checkpoint_read_config(const char *folder, struct config *config, char *error, size_t error_size);

// MTP modules that the files hold, of the config->mtp_depth that config.json speaks of: transformers knows none, and a
// folder that it has saved has lost them. Ends the program (exit 2) when the files cannot be read.
int checkpoint_count_modules(const char *folder, const struct config *config);

// The options of the run that saved a checkpoint, for the caller to delete; NULL where there are none (a folder of other
// origin).
struct cJSON *checkpoint_read_options(const char *folder);

// Tokens per sequence of the run that saved a checkpoint, from its options; 0 where there are none (a folder of other
// origin).
int checkpoint_trained_length(const char *folder);

// ---- loading: collective if c->parallel says so ----

// Weights and bias from any Hugging Face folder of this model, F32, F16 or BF16, in one file or many; masters get the
// same values. MTP modules beyond config->mtp_depth are left out. Ends the program (exit 2) when a tensor is missing,
// has another shape, or is not one of the model's, or a file is damaged where trainer.json tells.
void checkpoint_load_weights(const char *folder, struct checkpoint *c);

// step, sequences, tokens, seed, options and data of a complete checkpoint; options and data become new objects for the
// caller to delete, or NULL if none were saved. Ends the program (exit 2) when the folder is not complete.
void checkpoint_load_progress(const char *folder, struct checkpoint *c);

// The state as it was saved: masters, moments and bias, weights from the masters. Ends the program (exit 2) when the
// folder is not whole or not of this model.
void checkpoint_load_state(const char *folder, struct checkpoint *c);

#endif

// The flat arrays of a model in safetensors files: one file for embedding, last norm and head, then one per block,
// whatever the number of ranks. Tensors have Hugging Face's names and orientation. Functions that return bool leave one
// line that begins with the path in error.
#ifndef MOK_MODEL_SHARDS_H
#define MOK_MODEL_SHARDS_H

#include "kernels/types.h"
#include "model/config.h"
#include "model/params.h"
#include "model/safetensors.h"
#include "model/sharding.h"

// A model and this rank's part of it.
struct spread {
    const struct config *config;
    const struct params *params;
    const struct parallel *parallel;
    const struct sharding *sharding;
};

// A flat device array whose tensors are called NAME + suffix in a file: weights [params->size] or values
// [sharding->size]. Writing takes weights, or values when weights is NULL, and writes them in F32, or in BF16; reading fills
// both that are not NULL.
struct shard_array {
    const char *suffix;
    real *weights;
    accum *values;
    bool bf16;
};

static inline int shards_count(const struct config *c) { return 1 + config_blocks(c); }

// Writes folder/STEM-00001-of-000NN.safetensors and so on, on rank 0 of the job, while every other rank gives it what it
// lacks by shards_send with the same arrays: one tensor after the other, of which no rank ever has more than one in host
// memory. bias [MoE blocks, experts] in device memory goes into the files of the MoE blocks, always in F32; NULL leaves it
// out.
bool shards_write(const char *folder, const char *stem, const struct spread *spread, const struct shard_array *arrays,
                  int array_count, const accum *bias, char *error, size_t error_size);
void shards_send(const struct spread *spread, const struct shard_array *arrays, int array_count);

// Writes folder/model.safetensors.index.json: which file of stem "model" has which weight, in BF16 or F32, or bias.
bool shards_write_index(const char *folder, const struct config *c, const struct params *p, bool bf16, char *error,
                        size_t error_size);

// Several files read as one; used marks the tensors that were asked for.
struct shards {
    struct safetensors *files; // [count]
    bool **used;               // [count][tensors of the file]
    int count;
    int last; // the file where the last tensor was found: the next one is most likely there too
};

// Opens the files that shards_write wrote with that stem.
bool shards_open(struct shards *s, const char *folder, const char *stem, const struct config *c, char *error,
                 size_t error_size);
// Opens those of a Hugging Face folder: what its index lists, or model.safetensors alone.
bool shards_open_index(struct shards *s, const char *folder, char *error, size_t error_size);
void shards_close(struct shards *s);

// Whether the files hold the MTP module of that block.
bool shards_have_module(struct shards *s, int block);

// Whether every tensor that reading would take from the files is there with its shape. exact refuses 16-bit types, which
// have lost bits.
bool shards_check(struct shards *s, const struct params *p, const struct shard_array *arrays, int array_count,
                  bool exact, char *error, size_t error_size);
bool shards_check_bias(struct shards *s, const struct config *c, bool exact, char *error, size_t error_size);
// False when the files hold a tensor that none of these checks took. MTP modules beyond mtp_depth may be there, and what
// is no parameter: copies of embedding and head beside an MTP module, rotary frequencies.
bool shards_check_used(struct shards *s, const struct config *c, char *error, size_t error_size);

// Loads this rank's part of every array, and of the files nothing else.
bool shards_read(struct shards *s, const struct spread *spread, const struct shard_array *arrays, int array_count,
                 bool exact, char *error, size_t error_size);
bool shards_read_bias(struct shards *s, const struct config *c, accum *bias, bool exact, char *error,
                      size_t error_size);

#endif

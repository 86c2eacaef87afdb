// The flat arrays of a model in safetensors files: one file for embedding, last norm and head, then one per block,
// whatever the number of ranks. Tensors have Hugging Face's names and orientation. Functions that return bool leave one
// line that begins with the path in error.
#ifndef MOK_MODEL_SHARDS_H
#define MOK_MODEL_SHARDS_H

#include "kernels/types.h"
#include "model/config.h"
#include "model/params.h"
#include "model/safetensors.h"

// A flat device array whose tensors are called NAME + suffix in a file. Writing takes weights, or values when weights
// is NULL; reading fills both that are not NULL.
struct shard_array {
    const char *suffix;
    real *weights;
    accum *values;
};

static inline int shards_count(const struct config *c) { return 1 + config_blocks(c); }

// Writes folder/STEM-00001-of-000NN.safetensors and so on. bias [MoE blocks, experts] in device memory goes into the
// files of the MoE blocks; NULL leaves it out.
bool shards_write(const char *folder, const char *stem, const struct config *c, const struct params *p,
                  const struct shard_array *arrays, int array_count, const accum *bias, char *error, size_t error_size);

// Writes folder/model.safetensors.index.json: which file of stem "model" has which weight or bias.
bool shards_write_index(const char *folder, const struct config *c, const struct params *p, char *error,
                        size_t error_size);

// Several files read as one; used marks the tensors that something was loaded from.
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

// Loads every tensor of the table into every array. exact refuses 16-bit types, which have lost bits.
bool shards_read(struct shards *s, const struct params *p, const struct shard_array *arrays, int array_count,
                 bool exact, char *error, size_t error_size);
bool shards_read_bias(struct shards *s, const struct config *c, accum *bias, bool exact, char *error,
                      size_t error_size);
// False when the files hold a tensor that nothing was loaded from. MTP modules beyond mtp_depth may be there, and what
// is no parameter: copies of embedding and head beside an MTP module, rotary frequencies.
bool shards_check_used(struct shards *s, const struct config *c, char *error, size_t error_size);

#endif

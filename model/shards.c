#include "model/shards.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels/fail.h"
#include "kernels/kernels.h"

enum { NAME = 128 }; // bytes of a tensor's or file's name with its suffix

static const char *const index_name = "model.safetensors.index.json";

static void shard_name(char name[NAME], const char *stem, int shard, int count) {
    snprintf(name, NAME, "%s-%05d-of-%05d.safetensors", stem, shard + 1, count);
}

// Shard 0 holds what belongs to no block, shard i + 1 block i.
static int shard_of_block(int block) { return block + 1; }

static void bias_name(char name[NAME], int block) {
    snprintf(name, NAME, "model.layers.%d.mlp.gate.e_score_correction_bias", block);
}

// Shape of a parameter in a file.
static int param_shape(const struct param *p, uint64_t shape[2]) {
    shape[0] = (uint64_t)p->rows;
    shape[1] = (uint64_t)p->cols;
    return p->cols ? 2 : 1;
}

// Host memory for one tensor at a time: in memory's orientation and in the file's.
struct scratch {
    float *memory, *file;
};

static struct scratch scratch_alloc(const struct params *p) {
    size_t most = params_largest(p);
    struct scratch s = {malloc(most * sizeof *s.memory), malloc(most * sizeof *s.file)};
    if (!s.memory || !s.file) fail_internal("checkpoint", "found no memory for two tensors of %zu elements", most);
    return s;
}

static void scratch_free(struct scratch *s) {
    free(s->memory);
    free(s->file);
}

// ---- writing ----

static void add_tensor(struct safetensors_tensor *list, int *count, const char *name, const char *suffix,
                       enum safetensors_type type, const uint64_t *shape, int rank) {
    struct safetensors_tensor *t = &list[(*count)++];
    char *full = malloc(NAME);
    if (!full) fail_internal("checkpoint", "no memory for a tensor's name");
    snprintf(full, NAME, "%s%s", name, suffix);
    *t = (struct safetensors_tensor){.name = full, .type = type, .rank = rank};
    memcpy(t->shape, shape, (size_t)rank * sizeof *shape);
}

// What one shard will hold, in order: every array's version of the first parameter, of the second, ...; then the bias.
static struct safetensors_tensor *list_shard(int block, const struct config *c, const struct params *p,
                                             const struct shard_array *arrays, int array_count, bool with_bias,
                                             int *count) {
    struct safetensors_tensor *list = calloc((size_t)p->count * (size_t)array_count + 1, sizeof *list);
    if (!list) fail_internal("checkpoint", "no memory for its tensors");
    *count = 0;
    for (int i = 0; i < p->count; i++) {
        if (p->list[i].block != block) continue;
        uint64_t shape[2];
        int rank = param_shape(&p->list[i], shape);
        for (int a = 0; a < array_count; a++)
            add_tensor(list, count, p->list[i].name, arrays[a].suffix,
                       arrays[a].bf16 ? SAFETENSORS_BF16 : SAFETENSORS_F32, shape, rank);
    }
    if (with_bias) {
        char name[NAME];
        bias_name(name, block);
        add_tensor(list, count, name, "", SAFETENSORS_F32, &(uint64_t){(uint64_t)c->experts}, 1);
    }
    return list;
}

// One tensor of one array in memory's orientation, from all ranks that have something of it. The ranks of the first EP
// group, which are called as their places in it, give the experts' weights.
static void collect_param(const struct spread *spread, const struct layout *layout, int i,
                          const struct shard_array *array, float *memory) {
    const struct param *p = &spread->params->list[i];
    const struct parallel *parallel = spread->parallel;
    if (array->weights) {
        if (layout->holders[i] > 0)
            comm_receive(parallel->world, memory, param_size(p) * sizeof *memory, layout->holders[i]);
        else
            device_real_to_float(memory, array->weights + p->offset, param_size(p));
        return;
    }
    for (int rank = 0; rank < parallel->ranks; rank++) {
        struct piece piece = layout_piece(layout, spread->params, i, rank);
        float *to = memory + piece.first;
        if (piece.count && rank == 0) device_accum_to_float(to, array->values + piece.state, piece.count);
        if (piece.count && rank > 0) comm_receive(parallel->world, to, piece.count * sizeof *to, rank);
    }
}

// The other side of it: what rank 0 takes from this rank.
static void send_param(const struct spread *spread, const struct param *p, const struct shard_array *array,
                       float *memory) {
    size_t count = 0;
    if (array->weights && p->expert >= 0 && p->offset != PARAM_ELSEWHERE && spread->parallel->dp_rank == 0) {
        count = param_size(p);
        device_real_to_float(memory, array->weights + p->offset, count);
    } else if (!array->weights) {
        struct piece piece = sharding_piece(spread->sharding, p);
        count = piece.count;
        if (count) device_accum_to_float(memory, array->values + piece.state, count);
    }
    if (count) comm_send(spread->parallel->world, memory, count * sizeof *memory, 0);
}

void shards_send(const struct spread *spread, const struct shard_array *arrays, int array_count) {
    const struct params *p = spread->params;
    float *memory = malloc(params_largest(p) * sizeof *memory);
    if (!memory) fail_internal("checkpoint", "found no memory for a tensor of %zu elements", params_largest(p));
    for (int shard = 0; shard < shards_count(spread->config); shard++)
        for (int i = 0; i < p->count; i++)
            for (int a = 0; shard_of_block(p->list[i].block) == shard && a < array_count; a++)
                send_param(spread, &p->list[i], &arrays[a], memory);
    free(memory);
}

static bool append_bias(struct safetensors_writer *w, const accum *bias, int experts, char *error, size_t error_size) {
    size_t bytes = (size_t)experts * sizeof(float);
    float *row = malloc(bytes);
    if (!row) fail_internal("checkpoint", "no memory for %d biases", experts);
    device_accum_to_float(row, bias, (size_t)experts);
    bool written = safetensors_append(w, row, bytes, error, error_size);
    free(row);
    return written;
}

// What a writer needs besides the arrays.
struct writing {
    const struct spread *spread;
    struct layout layout;
    struct scratch scratch;
};

static bool append_params(struct safetensors_writer *file, struct writing *w, int block,
                          const struct shard_array *arrays, int array_count, char *error, size_t error_size) {
    const struct params *p = w->spread->params;
    bool written = true;
    for (int i = 0; written && i < p->count; i++)
        for (int a = 0; written && p->list[i].block == block && a < array_count; a++) {
            collect_param(w->spread, &w->layout, i, &arrays[a], w->scratch.memory);
            params_export(w->scratch.file, w->scratch.memory, &p->list[i]);
            size_t n = param_size(&p->list[i]);
            void *data = w->scratch.file;
            if (arrays[a].bf16) safetensors_bf16_from_f32(data, w->scratch.file, n);
            written = safetensors_append(file, data, n * (arrays[a].bf16 ? sizeof(uint16_t) : sizeof(float)), error,
                                         error_size);
        }
    return written;
}

static bool write_shard(const char *path, int block, struct writing *w, const struct shard_array *arrays,
                        int array_count, const accum *bias, char *error, size_t error_size) {
    const struct config *c = w->spread->config;
    bool with_bias = bias && block >= 0 && config_is_moe(c, block);
    int count;
    struct safetensors_tensor *list = list_shard(block, c, w->spread->params, arrays, array_count, with_bias, &count);
    struct safetensors_writer file;
    bool written = safetensors_begin(&file, path, list, count, error, error_size);
    if (written) {
        written = append_params(&file, w, block, arrays, array_count, error, error_size);
        if (written && with_bias) {
            size_t row = (size_t)(block - c->dense_layers);
            written = append_bias(&file, bias + row * (size_t)c->experts, c->experts, error, error_size);
        }
        // After a failure the file is closed too, but the first line is the one that says why.
        char later[FILE_ERROR];
        bool finished = safetensors_finish(&file, written ? error : later, written ? error_size : sizeof later);
        written = written && finished;
    }
    for (int i = 0; i < count; i++) free((char *)list[i].name);
    free(list);
    return written;
}

bool shards_write(const char *folder, const char *stem, const struct spread *spread, const struct shard_array *arrays,
                  int array_count, const accum *bias, char *error, size_t error_size) {
    struct writing w = {.spread = spread, .scratch = scratch_alloc(spread->params)};
    layout_build(&w.layout, spread->config, spread->params, spread->parallel);
    bool written = true;
    int count = shards_count(spread->config);
    for (int shard = 0; written && shard < count; shard++) {
        char name[NAME], path[FILE_PATH];
        shard_name(name, stem, shard, count);
        file_path(path, folder, name);
        written = write_shard(path, shard - 1, &w, arrays, array_count, bias, error, error_size);
    }
    layout_free(&w.layout);
    scratch_free(&w.scratch);
    return written;
}

bool shards_write_index(const char *folder, const struct config *c, const struct params *p, bool bf16, char *error,
                        size_t error_size) {
    struct cJSON *index = cJSON_CreateObject();
    struct cJSON *metadata = cJSON_AddObjectToObject(index, "metadata");
    struct cJSON *map = cJSON_AddObjectToObject(index, "weight_map");
    char file[NAME], name[NAME], path[FILE_PATH];
    int moe_blocks = config_blocks(c) - c->dense_layers;
    size_t biases = (size_t)moe_blocks * (size_t)c->experts * sizeof(float);
    file_json_add_integer(metadata, "total_size", params_total(p) * (bf16 ? sizeof(uint16_t) : sizeof(float)) + biases);
    for (int i = 0; i < p->count; i++) {
        shard_name(file, "model", shard_of_block(p->list[i].block), shards_count(c));
        cJSON_AddStringToObject(map, p->list[i].name, file);
    }
    for (int block = c->dense_layers; block < config_blocks(c); block++) {
        shard_name(file, "model", shard_of_block(block), shards_count(c));
        bias_name(name, block);
        cJSON_AddStringToObject(map, name, file);
    }
    file_path(path, folder, index_name);
    bool written = file_write_json(path, index, error, error_size);
    cJSON_Delete(index);
    return written;
}

// ---- reading ----

static bool add_file(struct shards *s, const char *folder, const char *name, char *error, size_t error_size) {
    char path[FILE_PATH];
    size_t count = (size_t)s->count + 1;
    file_path(path, folder, name);
    s->files = realloc(s->files, count * sizeof *s->files);
    s->used = realloc(s->used, count * sizeof *s->used);
    if (!s->files || !s->used) fail_internal(path, "no memory to open it");
    struct safetensors *file = &s->files[s->count];
    if (!safetensors_open(file, path, error, error_size)) return false;
    s->used[s->count] = calloc((size_t)file->count + 1, sizeof **s->used);
    if (!s->used[s->count]) fail_internal(path, "no memory for %d tensors", file->count);
    s->count++;
    return true;
}

bool shards_open(struct shards *s, const char *folder, const char *stem, const struct config *c, char *error,
                 size_t error_size) {
    *s = (struct shards){0};
    for (int shard = 0; shard < shards_count(c); shard++) {
        char name[NAME];
        shard_name(name, stem, shard, shards_count(c));
        if (!add_file(s, folder, name, error, error_size)) {
            shards_close(s);
            return false;
        }
    }
    return true;
}

// Opens the file of one entry of the index, unless that was done already.
static bool add_indexed_file(struct shards *s, const char *folder, const struct cJSON *entry, char *error,
                             size_t error_size) {
    char path[FILE_PATH];
    if (!cJSON_IsString(entry) || strchr(entry->valuestring, '/'))
        return file_error(error, error_size, "%s/%s: tensor %.96s: found no file name, wanted one in this folder",
                          folder, index_name, entry->string);
    file_path(path, folder, entry->valuestring);
    for (int i = s->count - 1; i >= 0; i--)
        if (strcmp(s->files[i].path, path) == 0) return true;
    return add_file(s, folder, entry->valuestring, error, error_size);
}

bool shards_open_index(struct shards *s, const char *folder, char *error, size_t error_size) {
    char path[FILE_PATH];
    *s = (struct shards){0};
    file_path(path, folder, index_name);
    if (access(path, F_OK) != 0 && errno == ENOENT)
        return add_file(s, folder, "model.safetensors", error, error_size) || (shards_close(s), false);
    struct cJSON *index = file_read_json(path, error, error_size);
    if (!index) return false;
    const struct cJSON *map = cJSON_GetObjectItemCaseSensitive(index, "weight_map"), *entry;
    bool opened = cJSON_IsObject(map) || file_error(error, error_size, "%s: found no weight_map, wanted one", path);
    cJSON_ArrayForEach(entry, map) opened = opened && add_indexed_file(s, folder, entry, error, error_size);
    cJSON_Delete(index);
    if (!opened) shards_close(s);
    return opened;
}

void shards_close(struct shards *s) {
    for (int i = 0; i < s->count; i++) {
        safetensors_close(&s->files[i]);
        free(s->used[i]);
    }
    free(s->files);
    free(s->used);
    *s = (struct shards){0};
}

// The tensor of that name; s->last becomes its file. NULL if no file has it.
static const struct safetensors_tensor *find_tensor(struct shards *s, const char *name) {
    for (int i = 0; i < s->count; i++) {
        int file = (s->last + i) % s->count;
        const struct safetensors_tensor *t = safetensors_find(&s->files[file], name);
        if (!t) continue;
        s->last = file;
        return t;
    }
    return NULL;
}

// Only MTP modules have an enorm.
bool shards_have_module(struct shards *s, int block) {
    char name[NAME];
    snprintf(name, sizeof name, "model.layers.%d.enorm.weight", block);
    return find_tensor(s, name) != NULL;
}

// The tensor of that name, which s->last becomes the file of and which counts as used, if its shape and type are as wanted.
static const struct safetensors_tensor *take_tensor(struct shards *s, const char *name, const uint64_t *shape, int rank,
                                                    bool exact, char *error, size_t error_size) {
    const struct safetensors_tensor *t = find_tensor(s, name);
    if (!t) {
        file_error(error, error_size, "%s: tensor %s: found none, wanted one in %d file%s",
                   s->count ? s->files[0].path : "checkpoint", name, s->count, s->count == 1 ? "" : "s");
        return NULL;
    }
    const struct safetensors *file = &s->files[s->last];
    if (t->rank != rank || memcmp(t->shape, shape, (size_t)rank * sizeof *shape) != 0) {
        char found[256], wanted[64];
        file_error(error, error_size, "%s: tensor %s: found shape %s, wanted %s", file->path, name,
                   safetensors_shape_text(found, sizeof found, t->shape, t->rank),
                   safetensors_shape_text(wanted, sizeof wanted, shape, rank));
        return NULL;
    }
    if (exact ? t->type != SAFETENSORS_F32 : t->type == SAFETENSORS_I64) {
        file_error(error, error_size, "%s: tensor %s: found %s, wanted %s", file->path, name,
                   safetensors_type_names[t->type], exact ? "F32" : "F32, F16 or BF16");
        return NULL;
    }
    s->used[s->last][t - file->list] = true;
    return t;
}

// The tensor of one parameter in one array.
static const struct safetensors_tensor *take_param(struct shards *s, const struct param *p,
                                                   const struct shard_array *array, bool exact, char *error,
                                                   size_t error_size) {
    char name[NAME];
    uint64_t shape[2];
    int rank = param_shape(p, shape);
    snprintf(name, sizeof name, "%s%s", p->name, array->suffix);
    return take_tensor(s, name, shape, rank, exact, error, error_size);
}

static const struct safetensors_tensor *take_bias(struct shards *s, const struct config *c, int block, bool exact,
                                                  char *error, size_t error_size) {
    char name[NAME];
    bias_name(name, block);
    return take_tensor(s, name, &(uint64_t){(uint64_t)c->experts}, 1, exact, error, error_size);
}

bool shards_check(struct shards *s, const struct params *p, const struct shard_array *arrays, int array_count,
                  bool exact, char *error, size_t error_size) {
    for (int i = 0; i < p->count; i++)
        for (int a = 0; a < array_count; a++)
            if (!take_param(s, &p->list[i], &arrays[a], exact, error, error_size)) return false;
    return true;
}

bool shards_check_bias(struct shards *s, const struct config *c, bool exact, char *error, size_t error_size) {
    for (int block = c->dense_layers; block < config_blocks(c); block++)
        if (!take_bias(s, c, block, exact, error, error_size)) return false;
    return true;
}

static bool ends_with(const char *text, const char *end) {
    size_t length = strlen(text), end_length = strlen(end);
    return length >= end_length && strcmp(text + length - end_length, end) == 0;
}

// Tensors of published files that are copies or constants.
static bool is_no_parameter(const char *name) {
    return strncmp(name, "model.layers.", 13) == 0 &&
           (ends_with(name, ".embed_tokens.weight") || ends_with(name, ".shared_head.head.weight") ||
            ends_with(name, ".rotary_emb.inv_freq"));
}

// Part of an MTP module beyond those that the model has; a layer too many is none.
static bool is_left_out_module(struct shards *s, const struct config *c, const char *name) {
    int block;
    return sscanf(name, "model.layers.%d.", &block) == 1 && block >= config_blocks(c) && shards_have_module(s, block);
}

bool shards_check_used(struct shards *s, const struct config *c, char *error, size_t error_size) {
    for (int i = 0; i < s->count; i++)
        for (int t = 0; t < s->files[i].count; t++) {
            const char *name = s->files[i].list[t].name;
            if (!s->used[i][t] && !is_no_parameter(name) && !is_left_out_module(s, c, name))
                return file_error(error, error_size,
                                  "%s: found tensor %.96s, which this model does not have; does config.json belong to "
                                  "these weights?",
                                  s->files[i].path, name);
        }
    return true;
}

static bool read_param(struct shards *s, const struct spread *spread, const struct param *p,
                       const struct shard_array *array, bool exact, struct scratch *scratch, char *error,
                       size_t error_size) {
    bool weights = array->weights && p->offset != PARAM_ELSEWHERE;
    struct piece piece = {0};
    if (array->values) piece = sharding_piece(spread->sharding, p);
    if (!weights && !piece.count) return true;
    const struct safetensors_tensor *t = take_param(s, p, array, exact, error, error_size);
    if (!t || !safetensors_read_f32(&s->files[s->last], t, 0, param_size(p), scratch->file, error, error_size))
        return false;
    params_import(scratch->memory, scratch->file, p);
    if (weights) device_real_from_float(array->weights + p->offset, scratch->memory, param_size(p));
    if (piece.count) device_accum_from_float(array->values + piece.state, scratch->memory + piece.first, piece.count);
    return true;
}

bool shards_read(struct shards *s, const struct spread *spread, const struct shard_array *arrays, int array_count,
                 bool exact, char *error, size_t error_size) {
    const struct params *p = spread->params;
    struct scratch scratch = scratch_alloc(p);
    bool read = true;
    for (int i = 0; read && i < p->count; i++)
        for (int a = 0; read && a < array_count; a++)
            read = read_param(s, spread, &p->list[i], &arrays[a], exact, &scratch, error, error_size);
    scratch_free(&scratch);
    return read;
}

bool shards_read_bias(struct shards *s, const struct config *c, accum *bias, bool exact, char *error,
                      size_t error_size) {
    size_t experts = (size_t)c->experts;
    float *row = malloc(experts * sizeof *row);
    if (!row) fail_internal("checkpoint", "no memory for %zu biases", experts);
    bool read = true;
    for (int block = c->dense_layers; read && block < config_blocks(c); block++) {
        const struct safetensors_tensor *t = take_bias(s, c, block, exact, error, error_size);
        read = t && safetensors_read_f32(&s->files[s->last], t, 0, experts, row, error, error_size);
        if (read) device_accum_from_float(bias + (size_t)(block - c->dense_layers) * experts, row, experts);
    }
    free(row);
    return read;
}

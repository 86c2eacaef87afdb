#include "model/checkpoint.h"

#include <cjson/cJSON.h>
#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "data/tokenizer.h"
#include "kernels/fail.h"
#include "kernels/kernels.h"
#include "data/files.h"
#include "model/hf_config.h"
#include "model/shards.h"

enum { FORMAT_VERSION = 1, STEP_NAME = 40 };

static const char *const trainer_name = "trainer.json";

// ---- names of steps ----

static void step_name(char name[STEP_NAME], const char *prefix, int64_t step) {
    snprintf(name, STEP_NAME, "%sstep-%08" PRId64, prefix, step);
}

// The step of a folder that checkpoint_save names so, -1 for every other name.
static int64_t step_of_name(const char *name) {
    char exact[STEP_NAME];
    if (strncmp(name, "step-", 5) != 0) return -1;
    int64_t step = strtoll(name + 5, NULL, 10);
    step_name(exact, "", step);
    return step >= 0 && strcmp(name, exact) == 0 ? step : -1;
}

static int is_step(const struct dirent *entry) { return step_of_name(entry->d_name) >= 0; }

static int newest_first(const struct dirent **a, const struct dirent **b) {
    int64_t x = step_of_name((*a)->d_name), y = step_of_name((*b)->d_name);
    return (x < y) - (x > y);
}

static void free_entries(struct dirent **entries, int count) {
    for (int i = 0; i < count; i++) free(entries[i]);
    free(entries);
}

// ---- trainer.json ----

static int is_content(const struct dirent *entry) {
    return entry->d_name[0] != '.' && strcmp(entry->d_name, trainer_name) != 0;
}

// Bytewise: the order must not follow the user's locale.
static int by_name(const struct dirent **a, const struct dirent **b) { return strcmp((*a)->d_name, (*b)->d_name); }

// Puts every file of the folder on disk and into files as name: bytes.
static bool list_files(struct cJSON *files, const char *folder, char *error, size_t error_size) {
    struct dirent **entries;
    int count = scandir(folder, &entries, is_content, by_name);
    if (count < 0) return file_error(error, error_size, "%s: cannot list: %s", folder, strerror(errno));
    bool listed = true;
    for (int i = 0; listed && i < count; i++) {
        char path[FILE_PATH];
        uint64_t bytes = 0;
        file_path(path, folder, entries[i]->d_name);
        listed = file_size(path, &bytes, error, error_size) && file_sync(path, error, error_size);
        file_json_add_integer(files, entries[i]->d_name, bytes);
    }
    free_entries(entries, count);
    return listed;
}

static bool write_trainer(const struct checkpoint *c, const char *folder, char *error, size_t error_size) {
    char path[FILE_PATH], seed[24];
    struct cJSON *json = cJSON_CreateObject();
    snprintf(seed, sizeof seed, "%" PRIu64, c->seed); // text, because a JSON number is exact to 2^53 only
    file_json_add_integer(json, "format_version", FORMAT_VERSION);
    file_json_add_integer(json, "step", (uint64_t)c->step);
    file_json_add_integer(json, "sequences", (uint64_t)c->sequences);
    file_json_add_integer(json, "tokens", (uint64_t)c->tokens);
    cJSON_AddStringToObject(json, "seed", seed);
    if (c->options) cJSON_AddItemReferenceToObject(json, "options", c->options);
    file_path(path, folder, trainer_name);
    bool written = list_files(cJSON_AddObjectToObject(json, "files"), folder, error, error_size) &&
                   file_write_json(path, json, error, error_size);
    cJSON_Delete(json);
    return written;
}

static bool check_version(const struct cJSON *json, const char *path, char *error, size_t error_size) {
    uint64_t version;
    const struct cJSON *found = cJSON_GetObjectItemCaseSensitive(json, "format_version");
    if (!file_json_integer(found, &version))
        return file_error(error, error_size, "%s: found no format_version, wanted %d", path, FORMAT_VERSION);
    return version == FORMAT_VERSION || file_error(error, error_size, "%s: found format_version %ju, wanted %d", path,
                                                   (uintmax_t)version, FORMAT_VERSION);
}

// One entry of the list: the file is there with its size, and the header of a tensor file describes it.
static bool check_file(const char *folder, const struct cJSON *entry, char *error, size_t error_size) {
    char path[FILE_PATH];
    uint64_t wanted, found;
    if (strchr(entry->string, '/') || !file_json_integer(entry, &wanted))
        return file_error(error, error_size, "%s/%s: found a bad entry for file %.96s, wanted its bytes", folder,
                          trainer_name, entry->string);
    file_path(path, folder, entry->string);
    if (!file_size(path, &found, error, error_size)) return false;
    if (found != wanted)
        return file_error(error, error_size, "%s: found %ju bytes, wanted %ju", path, (uintmax_t)found,
                          (uintmax_t)wanted);
    const char *dot = strrchr(entry->string, '.');
    if (!dot || strcmp(dot, ".safetensors") != 0) return true;
    struct safetensors tensors;
    if (!safetensors_open(&tensors, path, error, error_size)) return false;
    safetensors_close(&tensors);
    return true;
}

static bool is_complete(const char *folder, char *error, size_t error_size) {
    char path[FILE_PATH];
    file_path(path, folder, trainer_name);
    struct cJSON *json = file_read_json(path, error, error_size);
    if (!json) return false;
    const struct cJSON *files = cJSON_GetObjectItemCaseSensitive(json, "files"), *entry;
    bool complete = check_version(json, path, error, error_size) &&
                    ((cJSON_IsObject(files) && files->child) ||
                     file_error(error, error_size, "%s: found no list of files, wanted one", path));
    cJSON_ArrayForEach(entry, files) complete = complete && check_file(folder, entry, error, error_size);
    cJSON_Delete(json);
    return complete;
}

static bool read_count(const struct cJSON *json, const char *key, int64_t *value, const char *path, char *error,
                       size_t error_size) {
    uint64_t number;
    if (!file_json_integer(cJSON_GetObjectItemCaseSensitive(json, key), &number))
        return file_error(error, error_size, "%s: found no valid \"%s\", wanted an integer of at least 0", path, key);
    *value = (int64_t)number;
    return true;
}

static bool read_seed(const struct cJSON *json, uint64_t *seed, const char *path, char *error, size_t error_size) {
    const struct cJSON *item = cJSON_GetObjectItemCaseSensitive(json, "seed");
    char exact[24] = "";
    if (cJSON_IsString(item)) {
        *seed = strtoull(item->valuestring, NULL, 10);
        snprintf(exact, sizeof exact, "%" PRIu64, *seed);
    }
    return (*exact && strcmp(exact, item->valuestring) == 0) ||
           file_error(error, error_size, "%s: found no valid \"seed\", wanted an integer as text", path);
}

static bool read_trainer(struct checkpoint *c, const char *folder, char *error, size_t error_size) {
    char path[FILE_PATH];
    file_path(path, folder, trainer_name);
    struct cJSON *json = file_read_json(path, error, error_size);
    if (!json) return false;
    bool read = check_version(json, path, error, error_size) &&
                read_count(json, "step", &c->step, path, error, error_size) &&
                read_count(json, "sequences", &c->sequences, path, error, error_size) &&
                read_count(json, "tokens", &c->tokens, path, error, error_size) &&
                read_seed(json, &c->seed, path, error, error_size);
    if (read) c->options = cJSON_DetachItemFromObjectCaseSensitive(json, "options");
    cJSON_Delete(json);
    return read;
}

// ---- saving ----

static bool write_config(const struct config *c, const char *folder, char *error, size_t error_size) {
    char path[FILE_PATH];
    bool bytes = c->vocab >= TOKENIZER_BYTE_VOCAB;
    int end_of_text = bytes ? TOKENIZER_END_OF_TEXT : 0;
    struct cJSON *config = hf_config_to_json(c, end_of_text, "float32");
    struct cJSON *generation = hf_generation_config_to_json(end_of_text);
    file_path(path, folder, "config.json");
    bool written = file_write_json(path, config, error, error_size);
    file_path(path, folder, "generation_config.json");
    written = written && file_write_json(path, generation, error, error_size);
    cJSON_Delete(config);
    cJSON_Delete(generation);
    if (!written || !bytes) return written;
    struct tokenizer *tokenizer = tokenizer_open_bytes();
    written = tokenizer_write(tokenizer, folder, error, error_size);
    tokenizer_close(tokenizer);
    return written;
}

static bool write_folder(const struct checkpoint *c, const char *folder, char *error, size_t error_size) {
    struct shard_array model = {"", c->weights, NULL};
    struct shard_array state[] = {{".master", NULL, c->master}, {".m", NULL, c->m}, {".v", NULL, c->v}};
    if (mkdir(folder, 0777) != 0)
        return file_error(error, error_size, "%s: cannot create the folder: %s", folder, strerror(errno));
    return write_config(c->config, folder, error, error_size) &&
           shards_write(folder, "model", c->config, c->params, &model, 1, c->bias, error, error_size) &&
           shards_write_index(folder, c->config, c->params, error, error_size) &&
           shards_write(folder, "state", c->config, c->params, state, 3, NULL, error, error_size) &&
           write_trainer(c, folder, error, error_size) && file_sync(folder, error, error_size);
}

// Moves the finished folder to its name. One that has the name already is moved aside, and back if this fails.
static bool publish(const char *temporary, const char *folder, const char *aside, char *error, size_t error_size) {
    if (rename(folder, aside) != 0 && errno != ENOENT)
        return file_error(error, error_size, "%s: cannot move it aside: %s", folder, strerror(errno));
    if (rename(temporary, folder) == 0) return true;
    file_error(error, error_size, "%s: cannot rename to %s: %s", temporary, folder, strerror(errno));
    rename(aside, folder);
    return false;
}

static void warn(const char *error) { fprintf(stderr, "mok: warning: %s\n", error); }

// Of the steps before the one just saved, keeps as many complete ones as still may be and removes all older ones.
static void purge(const char *run_folder, int64_t saved, int keep) {
    char error[FILE_ERROR];
    struct dirent **entries;
    int count = scandir(run_folder, &entries, is_step, newest_first), kept = 1;
    for (int i = 0; i < count; i++) {
        char path[FILE_PATH];
        struct stat info;
        file_path(path, run_folder, entries[i]->d_name);
        // A link is someone's own doing.
        if (step_of_name(entries[i]->d_name) >= saved || lstat(path, &info) != 0 || !S_ISDIR(info.st_mode)) continue;
        if (kept < keep)
            kept += is_complete(path, error, sizeof error);
        else if (!file_remove_folder(path, error, sizeof error))
            warn(error);
    }
    if (count >= 0) free_entries(entries, count);
}

void checkpoint_save(const struct checkpoint *c, const char *run_folder, int keep) {
    char name[STEP_NAME], folder[FILE_PATH], temporary[FILE_PATH], aside[FILE_PATH];
    char error[FILE_ERROR], later[FILE_ERROR];
    step_name(name, "", c->step);
    file_path(folder, run_folder, name);
    step_name(name, ".tmp-", c->step);
    file_path(temporary, run_folder, name);
    step_name(name, ".old-", c->step);
    file_path(aside, run_folder, name);

    // What a run left that was killed while it saved this step. Killed between the two renames of publish, it left the
    // only complete folder aside.
    rename(aside, folder);
    bool saved = file_remove_folder(temporary, error, sizeof error) && file_remove_folder(aside, error, sizeof error) &&
                 write_folder(c, temporary, error, sizeof error) &&
                 publish(temporary, folder, aside, error, sizeof error) && file_sync(run_folder, error, sizeof error);
    if (!saved) {
        file_remove_folder(temporary, later, sizeof later);
        fail_internal("checkpoint",
                      "step %" PRId64 " was not saved: %s; older checkpoints are as they were, make room "
                      "or mend the folder and use --resume",
                      c->step, error);
    }
    if (!file_remove_folder(aside, error, sizeof error)) warn(error);
    if (keep > 0) purge(run_folder, c->step, keep);
}

static int is_step_or_hidden(const struct dirent *entry) {
    const char *name = entry->d_name;
    bool hidden = strncmp(name, ".tmp-", 5) == 0 || strncmp(name, ".old-", 5) == 0;
    return step_of_name(hidden ? name + 5 : name) >= 0;
}

void checkpoint_remove_all(const char *run_folder) {
    char path[FILE_PATH], error[FILE_ERROR];
    struct dirent **entries;
    struct stat info;
    int count = scandir(run_folder, &entries, is_step_or_hidden, by_name);
    for (int i = 0; i < count; i++) {
        file_path(path, run_folder, entries[i]->d_name);
        if (lstat(path, &info) == 0 && S_ISDIR(info.st_mode) && !file_remove_folder(path, error, sizeof error))
            fail_user("checkpoint", "%s; wanted to remove it: do so by hand, or name another folder", error);
    }
    if (count >= 0) free_entries(entries, count);
}

// ---- finding and loading ----

bool checkpoint_newest(const char *run_folder, char *path, size_t size, FILE *log) {
    char candidate[FILE_PATH], error[FILE_ERROR];
    struct dirent **entries;
    int count = scandir(run_folder, &entries, is_step, newest_first);
    bool found = false;
    for (int i = 0; i < count && !found; i++) {
        file_path(candidate, run_folder, entries[i]->d_name);
        found = is_complete(candidate, error, sizeof error);
        if (!found && log) fprintf(log, "skipped %s, which is not complete: %s\n", entries[i]->d_name, error);
    }
    if (count >= 0) free_entries(entries, count);
    if (found && snprintf(path, size, "%s", candidate) >= (int)size)
        fail_user(run_folder, "found a checkpoint path of %zu bytes, wanted less than %zu; use a shorter one",
                  strlen(candidate), size);
    return found;
}

bool checkpoint_exists(const char *run_folder) {
    struct dirent **entries;
    int count = scandir(run_folder, &entries, is_step, newest_first);
    if (count >= 0) free_entries(entries, count);
    return count > 0;
}

bool checkpoint_read_config(const char *folder, struct config *config, char *error, size_t error_size) {
    char path[FILE_PATH], line[FILE_ERROR];
    file_path(path, folder, "config.json");
    struct cJSON *json = file_read_json(path, error, error_size);
    if (!json) return false;
    bool read =
        hf_config_from_json(config, json, line, sizeof line) || file_error(error, error_size, "%s: %s", path, line);
    cJSON_Delete(json);
    return read;
}

int checkpoint_trained_length(const char *folder) {
    char path[FILE_PATH], error[FILE_ERROR];
    file_path(path, folder, trainer_name);
    struct cJSON *json = file_read_json(path, error, sizeof error);
    const struct cJSON *options = cJSON_GetObjectItemCaseSensitive(json, "options");
    const struct cJSON *seq = cJSON_GetObjectItemCaseSensitive(options, "seq");
    int length = cJSON_IsNumber(seq) && seq->valuedouble >= 1 && seq->valuedouble <= INT_MAX ? seq->valueint : 0;
    cJSON_Delete(json);
    return length;
}

void checkpoint_load_weights(const char *folder, struct checkpoint *c) {
    char error[FILE_ERROR];
    struct shards model;
    struct shard_array weights = {"", c->weights, c->master};
    if (!shards_open_index(&model, folder, error, sizeof error) ||
        !shards_read(&model, c->params, &weights, 1, false, error, sizeof error) ||
        !shards_read_bias(&model, c->config, c->bias, false, error, sizeof error) ||
        !shards_check_used(&model, c->config, error, sizeof error))
        fail_user("checkpoint", "cannot load weights: %s", error);
    shards_close(&model);
}

void checkpoint_load_progress(const char *folder, struct checkpoint *c) {
    char error[FILE_ERROR];
    if (!is_complete(folder, error, sizeof error) || !read_trainer(c, folder, error, sizeof error))
        fail_user("checkpoint", "cannot resume: %s", error);
}

void checkpoint_load_state(const char *folder, struct checkpoint *c) {
    char error[FILE_ERROR];
    struct shards model, state;
    struct shard_array arrays[] = {{".master", c->weights, c->master}, {".m", NULL, c->m}, {".v", NULL, c->v}};
    if (!is_complete(folder, error, sizeof error) ||
        !shards_open(&model, folder, "model", c->config, error, sizeof error) ||
        !shards_open(&state, folder, "state", c->config, error, sizeof error) ||
        !shards_read_bias(&model, c->config, c->bias, true, error, sizeof error) ||
        !shards_read(&state, c->params, arrays, 3, true, error, sizeof error) ||
        !shards_check_used(&state, c->config, error, sizeof error))
        fail_user("checkpoint", "cannot resume: %s", error);
    shards_close(&model);
    shards_close(&state);
}

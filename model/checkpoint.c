#include "model/checkpoint.h"

#include <cjson/cJSON.h>
#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "data/files.h"
#include "data/hash.h"
#include "data/tokenizer.h"
#include "kernels/fail.h"
#include "kernels/kernels.h"
#include "model/hf_config.h"
#include "model/shards.h"

enum { FORMAT_VERSION = 2, STEP_NAME = 40, HASH_TEXT = 17 };

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

// Its last member is the hash of all text before it: this many bytes at the end.
#define HASH_MEMBER ",\n\t\"hash\":\t\"%016" PRIx64 "\"\n}\n"
enum { HASH_MEMBER_BYTES = sizeof ",\n\t\"hash\":\t\"0123456789abcdef\"\n}\n" - 1 };

static void hash_text(char text[HASH_TEXT], uint64_t hash) { snprintf(text, HASH_TEXT, "%016" PRIx64, hash); }

// Hash of the first bytes of a file, which must have as many.
static bool hash_file(const char *path, uint64_t bytes, char text[HASH_TEXT], char *error, size_t error_size) {
    unsigned char buffer[1 << 16];
    struct hash hash = hash_begin();
    FILE *file = fopen(path, "rb");
    if (!file) return file_error(error, error_size, "%s: cannot open: %s", path, strerror(errno));
    size_t got = 1;
    for (uint64_t left = bytes; left && got; left -= got) {
        got = fread(buffer, 1, left < sizeof buffer ? left : sizeof buffer, file);
        hash_add(&hash, buffer, got);
    }
    if (!got)
        file_error(error, error_size, "%s: cannot read %ju bytes: %s", path, (uintmax_t)bytes,
                   ferror(file) ? strerror(errno) : "the file has become shorter");
    fclose(file);
    hash_text(text, hash_end(&hash));
    return got;
}

// Whether the first bytes of a file have the hash that is wanted.
static bool check_hash(const char *path, uint64_t bytes, const char *wanted, char *error, size_t error_size) {
    char found[HASH_TEXT];
    if (!hash_file(path, bytes, found, error, error_size)) return false;
    return strcmp(found, wanted) == 0 ||
           file_error(error, error_size, "%s: found hash %s, wanted %.16s: damaged", path, found, wanted);
}

static int is_content(const struct dirent *entry) {
    return entry->d_name[0] != '.' && strcmp(entry->d_name, trainer_name) != 0;
}

// Bytewise: the order must not follow the user's locale.
static int by_name(const struct dirent **a, const struct dirent **b) { return strcmp((*a)->d_name, (*b)->d_name); }

// One file of the list, {"bytes": N, "hash": "16 hex digits"}, which is on disk when this returns. Its bytes are read
// back: whoever wrote them, they are what a later reader will find, and just written they are still in memory.
static bool list_file(struct cJSON *files, const char *folder, const char *name, char *error, size_t error_size) {
    char path[FILE_PATH], hash[HASH_TEXT];
    uint64_t bytes;
    file_path(path, folder, name);
    if (!file_size(path, &bytes, error, error_size) || !file_sync(path, error, error_size) ||
        !hash_file(path, bytes, hash, error, error_size))
        return false;
    struct cJSON *entry = cJSON_AddObjectToObject(files, name);
    file_json_add_integer(entry, "bytes", bytes);
    cJSON_AddStringToObject(entry, "hash", hash);
    return true;
}

static bool list_files(struct cJSON *files, const char *folder, char *error, size_t error_size) {
    struct dirent **entries;
    int count = scandir(folder, &entries, is_content, by_name);
    if (count < 0) return file_error(error, error_size, "%s: cannot list: %s", folder, strerror(errno));
    bool listed = true;
    for (int i = 0; listed && i < count; i++) listed = list_file(files, folder, entries[i]->d_name, error, error_size);
    free_entries(entries, count);
    return listed;
}

// Writes the JSON with one more member, the hash.
static bool write_hashed(const char *path, const struct cJSON *json, char *error, size_t error_size) {
    char *text = cJSON_Print(json), *whole;
    if (!text) fail_internal(path, "no memory for its text");
    size_t length = strlen(text) - strlen("\n}");
    struct hash hash = hash_begin();
    hash_add(&hash, text, length);
    int bytes = asprintf(&whole, "%.*s" HASH_MEMBER, (int)length, text, hash_end(&hash));
    if (bytes < 0) fail_internal(path, "no memory for its text");
    bool written = file_write(path, whole, (size_t)bytes, error, error_size);
    free(whole);
    cJSON_free(text);
    return written;
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
    if (c->data) cJSON_AddItemReferenceToObject(json, "data", c->data);
    file_path(path, folder, trainer_name);
    bool written = list_files(cJSON_AddObjectToObject(json, "files"), folder, error, error_size) &&
                   write_hashed(path, json, error, error_size);
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

static bool check_own_hash(const struct cJSON *json, const char *path, char *error, size_t error_size) {
    uint64_t bytes;
    const char *wanted = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(json, "hash"));
    if (!file_size(path, &bytes, error, error_size)) return false;
    if (!wanted || bytes < HASH_MEMBER_BYTES)
        return file_error(error, error_size, "%s: found no hash, wanted it as the last member", path);
    return check_hash(path, bytes - HASH_MEMBER_BYTES, wanted, error, error_size);
}

// trainer.json of a folder, undamaged and of this version; path receives its name. NULL if it is not.
static struct cJSON *open_trainer(const char *folder, char path[FILE_PATH], char *error, size_t error_size) {
    file_path(path, folder, trainer_name);
    struct cJSON *json = file_read_json(path, error, error_size);
    if (json && check_version(json, path, error, error_size) && check_own_hash(json, path, error, error_size))
        return json;
    cJSON_Delete(json);
    return NULL;
}

// How closely the files of a checkpoint are looked at: sizes and the headers of tensor files, or every byte of all of
// them, or of those that hold weights, not state.
enum check { CHECK_SIZES, CHECK_BYTES, CHECK_WEIGHTS };

static bool is_tensor_file(const char *name) {
    const char *dot = strrchr(name, '.');
    return dot && strcmp(dot, ".safetensors") == 0;
}

static bool check_header(const char *path, char *error, size_t error_size) {
    struct safetensors tensors;
    if (!safetensors_open(&tensors, path, error, error_size)) return false;
    safetensors_close(&tensors);
    return true;
}

// One entry of the list: the file is there with its size, and its bytes or its header are as they should be.
static bool check_file(const char *folder, const struct cJSON *entry, enum check check, char *error,
                       size_t error_size) {
    char path[FILE_PATH];
    uint64_t wanted, found;
    const char *name = entry->string, *hash = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(entry, "hash"));
    if (strchr(name, '/') || !hash || !file_json_integer(cJSON_GetObjectItemCaseSensitive(entry, "bytes"), &wanted))
        return file_error(error, error_size, "%s/%s: found a bad entry for file %.96s, wanted its bytes and hash",
                          folder, trainer_name, name);
    if (check == CHECK_WEIGHTS && strncmp(name, "state-", 6) == 0) return true;
    file_path(path, folder, name);
    if (!file_size(path, &found, error, error_size)) return false;
    if (found != wanted)
        return file_error(error, error_size, "%s: found %ju bytes, wanted %ju", path, (uintmax_t)found,
                          (uintmax_t)wanted);
    if (check != CHECK_SIZES) return check_hash(path, wanted, hash, error, error_size);
    return !is_tensor_file(name) || check_header(path, error, error_size);
}

static bool check_files(const char *folder, enum check check, char *error, size_t error_size) {
    char path[FILE_PATH];
    struct cJSON *json = open_trainer(folder, path, error, error_size);
    if (!json) return false;
    const struct cJSON *files = cJSON_GetObjectItemCaseSensitive(json, "files"), *entry;
    bool good = (cJSON_IsObject(files) && files->child) ||
                file_error(error, error_size, "%s: found no list of files, wanted one", path);
    cJSON_ArrayForEach(entry, files) good = good && check_file(folder, entry, check, error, error_size);
    cJSON_Delete(json);
    return good;
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
    struct cJSON *json = open_trainer(folder, path, error, error_size);
    if (!json) return false;
    bool read = read_count(json, "step", &c->step, path, error, error_size) &&
                read_count(json, "sequences", &c->sequences, path, error, error_size) &&
                read_count(json, "tokens", &c->tokens, path, error, error_size) &&
                read_seed(json, &c->seed, path, error, error_size);
    if (read) {
        c->options = cJSON_DetachItemFromObjectCaseSensitive(json, "options");
        c->data = cJSON_DetachItemFromObjectCaseSensitive(json, "data");
    }
    cJSON_Delete(json);
    return read;
}

// ---- all ranks together ----

// What a collective call begins with and puts back at its end.
struct together {
    struct spread spread;
    struct sharding own; // where the caller has none
    double timeout;
};

double checkpoint_seconds(uint64_t bytes) {
    const double slow_disk = 10e6; // bytes per second
    return 2 * (double)bytes / slow_disk;
}

static void together_begin(struct together *t, const struct checkpoint *c) {
    const struct parallel *parallel = c->parallel ? c->parallel : &parallel_alone;
    *t = (struct together){.spread = {c->config, c->params, parallel, c->sharding}, .timeout = comm_timeout()};
    if (!c->sharding) {
        sharding_build(&t->own, c->params, parallel);
        t->spread.sharding = &t->own;
    }
    comm_set_timeout(t->timeout + checkpoint_seconds(checkpoint_bytes(c->config)));
}

// Waits for the last rank, still for long.
static void together_end(struct together *t) {
    comm_barrier(t->spread.parallel->world);
    comm_set_timeout(t->timeout);
    sharding_free(&t->own);
}

// ---- saving ----

static bool write_config(const struct checkpoint *c, const char *folder, char *error, size_t error_size) {
    char path[FILE_PATH];
    int end_of_text = c->tokenizer ? tokenizer_end_of_text(c->tokenizer) : -1;
    struct cJSON *config = hf_config_to_json(c->config, end_of_text, c->bf16 ? "bfloat16" : "float32");
    struct cJSON *generation = hf_generation_config_to_json(end_of_text);
    file_path(path, folder, "config.json");
    bool written = file_write_json(path, config, error, error_size);
    file_path(path, folder, "generation_config.json");
    written = written && file_write_json(path, generation, error, error_size);
    cJSON_Delete(config);
    cJSON_Delete(generation);
    return written && (!c->tokenizer || tokenizer_write(c->tokenizer, folder, error, error_size));
}

// The arrays of the model files and of the state files.
enum { STATE_ARRAYS = 3 };
static struct shard_array model_array(const struct checkpoint *c) {
    return (struct shard_array){"", c->weights, NULL, c->bf16};
}
static void state_arrays(const struct checkpoint *c, struct shard_array arrays[STATE_ARRAYS]) {
    arrays[0] = (struct shard_array){".master", NULL, c->master, false};
    arrays[1] = (struct shard_array){".m", NULL, c->m, false};
    arrays[2] = (struct shard_array){".v", NULL, c->v, false};
}

static bool write_folder(const struct checkpoint *c, const struct spread *spread, const char *folder, char *error,
                         size_t error_size) {
    struct shard_array model = model_array(c), state[STATE_ARRAYS];
    state_arrays(c, state);
    if (mkdir(folder, 0777) != 0)
        return file_error(error, error_size, "%s: cannot create the folder: %s", folder, strerror(errno));
    return write_config(c, folder, error, error_size) &&
           shards_write(folder, "model", spread, &model, 1, c->bias, error, error_size) &&
           shards_write_index(folder, c->config, c->params, c->bf16, error, error_size) &&
           shards_write(folder, "state", spread, state, STATE_ARRAYS, NULL, error, error_size) &&
           write_trainer(c, folder, error, error_size) && file_sync(folder, error, error_size);
}

// What the other ranks do meanwhile.
static void send_folder(const struct checkpoint *c, const struct spread *spread) {
    struct shard_array model = model_array(c), state[STATE_ARRAYS];
    state_arrays(c, state);
    shards_send(spread, &model, 1);
    shards_send(spread, state, STATE_ARRAYS);
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

// A link is someone's own doing: where it leads is left alone, whatever it is called here.
static bool is_folder(const char *path) {
    struct stat info;
    return lstat(path, &info) == 0 && S_ISDIR(info.st_mode);
}

static bool is_link(const char *path) {
    struct stat info;
    return lstat(path, &info) == 0 && S_ISLNK(info.st_mode);
}

static bool check_name_is_ours(const char *folder, char *error, size_t error_size) {
    return is_folder(folder) || is_link(folder) || access(folder, F_OK) != 0 ||
           file_error(error, error_size, "%s: found a file, wanted a folder or nothing", folder);
}

// What lay at the name of the step before.
static bool remove_aside(const char *path, char *error, size_t error_size) {
    return (is_link(path) && unlink(path) == 0) || file_remove_folder(path, error, error_size);
}

// Removes a checkpoint, which loses its name first: killed in between, it must not look like one that is damaged. What has
// a hidden name already is simply removed.
static bool remove_checkpoint(const char *path, char *error, size_t error_size) {
    char folder[FILE_PATH], hidden[FILE_PATH], name[STEP_NAME];
    int64_t step = step_of_name(strrchr(path, '/') + 1);
    if (step < 0) return file_remove_folder(path, error, error_size);
    snprintf(folder, sizeof folder, "%.*s", (int)(strrchr(path, '/') - path), path);
    step_name(name, ".tmp-", step);
    file_path(hidden, folder, name);
    return file_remove_folder(hidden, error, error_size) &&
           (rename(path, hidden) == 0 ||
            file_error(error, error_size, "%s: cannot remove: %s", path, strerror(errno))) &&
           file_remove_folder(hidden, error, error_size);
}

// Of the steps before the one just saved, keeps as many complete ones as still may be and removes all older ones.
static void purge(const char *run_folder, int64_t saved, int keep) {
    char error[FILE_ERROR];
    struct dirent **entries;
    int count = scandir(run_folder, &entries, is_step, newest_first), kept = 1;
    for (int i = 0; i < count; i++) {
        char path[FILE_PATH];
        file_path(path, run_folder, entries[i]->d_name);
        if (step_of_name(entries[i]->d_name) >= saved || !is_folder(path)) continue;
        if (kept < keep)
            kept += check_files(path, CHECK_SIZES, error, sizeof error);
        else if (!remove_checkpoint(path, error, sizeof error))
            fail_warn("checkpoint", "%s", error);
    }
    if (count >= 0) free_entries(entries, count);
}

// Rank 0's part of a save.
static void write_step(const struct checkpoint *c, const struct spread *spread, const char *run_folder, int keep) {
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
    bool saved = check_name_is_ours(folder, error, sizeof error) &&
                 file_remove_folder(temporary, error, sizeof error) && remove_aside(aside, error, sizeof error) &&
                 write_folder(c, spread, temporary, error, sizeof error);
    if (saved) {
        comm_barrier(spread->parallel->world); // nothing is published unless every rank has come this far
        saved = publish(temporary, folder, aside, error, sizeof error) && file_sync(run_folder, error, sizeof error);
    }
    if (!saved) {
        file_remove_folder(temporary, later, sizeof later);
        fail_internal("checkpoint",
                      "step %" PRId64 " was not saved: %s; older checkpoints are as they were, make room "
                      "or mend the folder and use --resume",
                      c->step, error);
    }
    if (!remove_aside(aside, error, sizeof error)) fail_warn("checkpoint", "%s", error);
    if (keep > 0) purge(run_folder, c->step, keep);
}

void checkpoint_save(const struct checkpoint *c, const char *run_folder, int keep) {
    struct together t;
    together_begin(&t, c);
    if (t.spread.parallel->rank == 0) {
        write_step(c, &t.spread, run_folder, keep);
    } else {
        send_folder(c, &t.spread);
        comm_barrier(t.spread.parallel->world); // all is on disk, and rank 0 may publish it
    }
    together_end(&t);
}

static bool is_hidden(const char *name, const char *prefix) {
    return strncmp(name, prefix, 5) == 0 && step_of_name(name + 5) >= 0;
}

static int is_step_or_hidden(const struct dirent *entry) {
    return is_step(entry) || is_hidden(entry->d_name, ".tmp-") || is_hidden(entry->d_name, ".old-");
}

// Calls what with every checkpoint folder of a run, complete or not, and those of saves that were killed.
static void for_every_folder(const char *run_folder, void (*what)(const char *path, void *argument), void *argument) {
    char path[FILE_PATH];
    struct dirent **entries;
    int count = scandir(run_folder, &entries, is_step_or_hidden, by_name);
    for (int i = 0; i < count; i++) {
        file_path(path, run_folder, entries[i]->d_name);
        if (is_folder(path)) what(path, argument);
    }
    if (count >= 0) free_entries(entries, count);
}

static void remove_one(const char *path, void *argument) {
    char error[FILE_ERROR];
    (void)argument;
    if (!remove_checkpoint(path, error, sizeof error))
        fail_user("checkpoint", "%s; wanted to remove it: do so by hand, or name another folder", error);
}

void checkpoint_remove_all(const char *run_folder) { for_every_folder(run_folder, remove_one, NULL); }

static void mend_one(const char *path, void *run_folder) {
    char folder[FILE_PATH], error[FILE_ERROR];
    const char *name = strrchr(path, '/') + 1;
    if (step_of_name(name) >= 0) return;
    file_path(folder, run_folder, name + 5);
    bool returned = is_hidden(name, ".old-") && rename(path, folder) == 0; // fails where the new one has the name
    if (!returned && !file_remove_folder(path, error, sizeof error)) fail_warn("checkpoint", "%s", error);
}

void checkpoint_mend(const char *run_folder) { for_every_folder(run_folder, mend_one, (void *)run_folder); }

// ---- disk space ----

static void add_bytes(const char *folder, void *sum) {
    struct dirent **entries;
    int count = scandir(folder, &entries, NULL, by_name);
    for (int i = 0; i < count; i++) {
        char path[FILE_PATH];
        struct stat info;
        file_path(path, folder, entries[i]->d_name);
        if (lstat(path, &info) == 0 && S_ISREG(info.st_mode)) *(uint64_t *)sum += (uint64_t)info.st_size;
    }
    if (count >= 0) free_entries(entries, count);
}

uint64_t checkpoint_bytes_on_disk(const char *run_folder) {
    uint64_t sum = 0;
    for_every_folder(run_folder, add_bytes, &sum);
    return sum;
}

uint64_t checkpoint_bytes(const struct config *c) {
    // Names, shapes and places of a tensor: in four headers, in the index, with its quotes.
    const uint64_t words_of_a_tensor = 1024, other_files = 1 << 16;
    struct params params;
    params_build(&params, c);
    uint64_t total = (uint64_t)params_total(&params), biases = (uint64_t)config_blocks(c) * (uint64_t)c->experts;
    uint64_t weight = sizeof(real) < sizeof(float) ? sizeof(real) : sizeof(float);
    uint64_t bytes = (3 * sizeof(float) + weight) * total + sizeof(float) * biases +
                     words_of_a_tensor * (uint64_t)params.count + other_files;
    params_free(&params);
    return bytes;
}

// ---- finding and loading ----

bool checkpoint_newest(const char *run_folder, char *path, size_t size, FILE *log) {
    char candidate[FILE_PATH], error[FILE_ERROR];
    struct dirent **entries;
    int count = scandir(run_folder, &entries, is_step, newest_first);
    bool found = false;
    for (int i = 0; i < count && !found; i++) {
        file_path(candidate, run_folder, entries[i]->d_name);
        found = check_files(candidate, CHECK_BYTES, error, sizeof error);
        if (!found && log) fprintf(log, "skipped %s: %s\n", entries[i]->d_name, fail_hide_controls(error));
    }
    if (count >= 0) free_entries(entries, count);
    if (found && snprintf(path, size, "%s", candidate) >= (int)size)
        fail_user(run_folder, "found a checkpoint path of %zu bytes, wanted less than %zu; use a shorter one",
                  strlen(candidate), size);
    return found;
}

void checkpoint_find(const char *folder, char *path, size_t size) {
    if (checkpoint_newest(folder, path, size, stderr)) return;
    char log[FILE_PATH];
    file_path(log, folder, "log.jsonl");
    if (checkpoint_exists(folder) || access(log, F_OK) == 0)
        fail_user("--from",
                  "found a run without a whole checkpoint in %s, wanted one with; name another run or a checkpoint",
                  folder);
    if (snprintf(path, size, "%s", folder) >= (int)size)
        fail_user("--from", "found a path of %zu bytes, wanted less than %zu; use a shorter one", strlen(folder), size);
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

int checkpoint_count_modules(const char *folder, const struct config *config) {
    char error[FILE_ERROR];
    struct shards model;
    if (!shards_open_index(&model, folder, error, sizeof error)) fail_user("checkpoint", "cannot read: %s", error);
    int modules = 0;
    while (modules < config->mtp_depth && shards_have_module(&model, config->layers + modules)) modules++;
    shards_close(&model);
    return modules;
}

struct cJSON *checkpoint_read_options(const char *folder) {
    char path[FILE_PATH], error[FILE_ERROR];
    file_path(path, folder, trainer_name);
    struct cJSON *json = file_read_json(path, error, sizeof error);
    struct cJSON *options = cJSON_DetachItemFromObjectCaseSensitive(json, "options");
    cJSON_Delete(json);
    return options;
}

int checkpoint_trained_length(const char *folder) {
    struct cJSON *options = checkpoint_read_options(folder);
    const struct cJSON *seq = cJSON_GetObjectItemCaseSensitive(options, "seq");
    int length = cJSON_IsNumber(seq) && seq->valuedouble >= 1 && seq->valuedouble <= INT_MAX ? seq->valueint : 0;
    cJSON_Delete(options);
    return length;
}

// Rank 0 looks whether there is anything wrong in a folder, alone; then every rank opens it and reads its part.

static bool check_weights(const char *folder, const struct checkpoint *c, char *error, size_t error_size) {
    char path[FILE_PATH];
    file_path(path, folder, trainer_name);
    bool ours = access(path, F_OK) == 0; // else of other origin, without hashes
    struct shards model;
    struct shard_array weights = model_array(c);
    if ((ours && !check_files(folder, CHECK_WEIGHTS, error, error_size)) ||
        !shards_open_index(&model, folder, error, error_size))
        return false;
    bool good = shards_check(&model, c->params, &weights, 1, false, error, error_size) &&
                shards_check_bias(&model, c->config, false, error, error_size) &&
                shards_check_used(&model, c->config, error, error_size);
    shards_close(&model);
    return good;
}

static bool read_weights(const char *folder, const struct checkpoint *c, const struct spread *spread, char *error,
                         size_t error_size) {
    struct shards model;
    struct shard_array weights = {"", c->weights, c->master, false};
    if (!shards_open_index(&model, folder, error, error_size)) return false;
    bool read = shards_read(&model, spread, &weights, 1, false, error, error_size) &&
                shards_read_bias(&model, c->config, c->bias, false, error, error_size);
    shards_close(&model);
    return read;
}

void checkpoint_load_weights(const char *folder, struct checkpoint *c) {
    char error[FILE_ERROR];
    struct together t;
    together_begin(&t, c);
    if (t.spread.parallel->rank == 0 && !check_weights(folder, c, error, sizeof error))
        fail_user("checkpoint", "cannot load weights: %s", error);
    comm_barrier(t.spread.parallel->world);
    if (!read_weights(folder, c, &t.spread, error, sizeof error))
        fail_user("checkpoint", "cannot load weights: %s", error);
    together_end(&t);
}

void checkpoint_load_progress(const char *folder, struct checkpoint *c) {
    const struct parallel *parallel = c->parallel ? c->parallel : &parallel_alone;
    char error[FILE_ERROR];
    bool read = parallel->rank > 0 ||
                (check_files(folder, CHECK_SIZES, error, sizeof error) && read_trainer(c, folder, error, sizeof error));
    if (read) comm_barrier(parallel->world);
    if (!read || (parallel->rank > 0 && !read_trainer(c, folder, error, sizeof error)))
        fail_user("checkpoint", "cannot resume: %s", error);
}

static bool check_state(const char *folder, const struct checkpoint *c, char *error, size_t error_size) {
    struct shards model, state;
    struct shard_array arrays[STATE_ARRAYS];
    state_arrays(c, arrays);
    if (!check_files(folder, CHECK_BYTES, error, error_size) ||
        !shards_open(&model, folder, "model", c->config, error, error_size))
        return false;
    bool good = shards_open(&state, folder, "state", c->config, error, error_size) &&
                shards_check_bias(&model, c->config, true, error, error_size) &&
                shards_check(&state, c->params, arrays, STATE_ARRAYS, true, error, error_size) &&
                shards_check_used(&state, c->config, error, error_size);
    shards_close(&model);
    shards_close(&state);
    return good;
}

static bool read_state(const char *folder, const struct checkpoint *c, const struct spread *spread, char *error,
                       size_t error_size) {
    struct shards model, state;
    struct shard_array arrays[STATE_ARRAYS];
    state_arrays(c, arrays);
    arrays[0].weights = c->weights;
    if (!shards_open(&model, folder, "model", c->config, error, error_size)) return false;
    bool read = shards_open(&state, folder, "state", c->config, error, error_size) &&
                shards_read_bias(&model, c->config, c->bias, true, error, error_size) &&
                shards_read(&state, spread, arrays, STATE_ARRAYS, true, error, error_size);
    shards_close(&model);
    shards_close(&state);
    return read;
}

void checkpoint_load_state(const char *folder, struct checkpoint *c) {
    char error[FILE_ERROR];
    struct together t;
    together_begin(&t, c);
    if (t.spread.parallel->rank == 0 && !check_state(folder, c, error, sizeof error))
        fail_user("checkpoint", "cannot resume: %s", error);
    comm_barrier(t.spread.parallel->world);
    if (!read_state(folder, c, &t.spread, error, sizeof error)) fail_user("checkpoint", "cannot resume: %s", error);
    together_end(&t);
}

#include "model/run_folder.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "data/files.h"
#include "kernels/fail.h"
#include "model/checkpoint.h"

static void make_folder(const char *path) {
    char partial[OPTION_TEXT];
    snprintf(partial, sizeof partial, "%s", path);
    for (char *slash = partial + 1;; slash++) {
        if (*slash != '/' && *slash != 0) continue;
        char kept = *slash;
        *slash = 0;
        if (mkdir(partial, 0777) != 0 && errno != EEXIST)
            fail_user("--out", "cannot make the folder %s: %s", partial, strerror(errno));
        *slash = kept;
        if (!kept) break;
    }
    struct stat status;
    if (stat(path, &status) != 0 || !S_ISDIR(status.st_mode))
        fail_user("--out", "found that %s is not a folder; name another one", path);
}

struct cJSON *run_folder_settings(const char *folder) {
    char path[OPTION_TEXT + 32], error[FILE_ERROR];
    snprintf(path, sizeof path, "%s/config.json", folder);
    if (access(path, F_OK) != 0) return NULL;
    struct cJSON *json = file_read_json(path, error, sizeof error);
    if (!json) fail_user("--out", "%s; wanted the settings of a run: mend it, or name another folder", error);
    if (!cJSON_IsString(cJSON_GetObjectItemCaseSensitive(json, "preset")) ||
        !cJSON_IsString(cJSON_GetObjectItemCaseSensitive(json, "out")))
        fail_user("--out",
                  "found that %s is not the config.json of a run, wanted a run's folder or one without it: weights "
                  "would be lost; name another folder, and --from for the weights to begin with",
                  path);
    return json;
}

// A log without a line is that of a run which stopped before its first step: nothing would be lost.
static bool holds_run(const char *folder) {
    char path[OPTION_TEXT + 32];
    struct stat log;
    snprintf(path, sizeof path, "%s/log.jsonl", folder);
    bool logged = stat(path, &log) == 0 && (!S_ISREG(log.st_mode) || log.st_size > 0);
    return logged || checkpoint_exists(folder);
}

// Held until the process ends: two runs in one folder would remove each other's files. Not every network file system has
// locks.
static void lock_folder(const char *folder) {
    char path[OPTION_TEXT + 32];
    snprintf(path, sizeof path, "%s/.lock", folder);
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (file < 0) fail_user("--out", "cannot write %s: %s", path, strerror(errno));
    if (flock(file, LOCK_EX | LOCK_NB) == 0) return;
    if (errno == EWOULDBLOCK)
        fail_user("--out", "found that another process runs in %s; wait for it, or name another folder", folder);
    fail_warn("--out", "cannot lock %s: %s; see to it that no other run writes there", folder, strerror(errno));
}

void run_folder_open(const struct options *o, char *from, size_t size) {
    from[0] = 0;
    make_folder(o->out);
    cJSON_Delete(run_folder_settings(o->out)); // a folder of something else stays as it is
    lock_folder(o->out);
    if (o->resume) {
        checkpoint_mend(o->out);
        if (checkpoint_newest(o->out, from, size, stderr)) return;
        if (checkpoint_exists(o->out))
            fail_user("--resume",
                      "found no complete checkpoint in %s, only the broken ones above; mend one, or start "
                      "again with --overwrite",
                      o->out);
        printf("no checkpoint in %s yet: starting at the beginning\n", o->out);
    } else if (!o->overwrite && holds_run(o->out)) {
        fail_user("--out",
                  "found a run in %s; give --resume to go on with it, --overwrite to start again, or another --out",
                  o->out);
    }
}

static void write_config(const struct options *o) {
    char path[OPTION_TEXT + 32], temporary[OPTION_TEXT + 40], error[FILE_ERROR];
    snprintf(path, sizeof path, "%s/config.json", o->out);
    snprintf(temporary, sizeof temporary, "%s.tmp", path);
    cJSON *json = options_to_json(o);
    if (!file_write_json(temporary, json, error, sizeof error)) fail_user("--out", "%s", error);
    if (rename(temporary, path) != 0) fail_user("--out", "cannot write %s: %s", path, strerror(errno));
    cJSON_Delete(json);
}

// Checkpoints that are there at once at most: those kept and the one that is being written.
static int64_t most_checkpoints(const struct options *o) {
    int64_t saves = o->steps / o->save_every + (o->steps % o->save_every != 0);
    return o->keep > 0 && o->keep < saves ? o->keep + 1 : saves;
}

void run_folder_check_space(const struct options *o, uint64_t available) {
    const double gib = 1 << 30;
    if (o->save_every == 0) return;
    uint64_t one = checkpoint_bytes(&o->model), used = checkpoint_bytes_on_disk(o->out);
    uint64_t room = available + (o->overwrite ? used : 0); // which run_folder_begin will remove
    int64_t most = most_checkpoints(o);
    if (room < one)
        fail_user(
            "--out",
            "found %.3f GiB free in %s, wanted %.3f GiB for one checkpoint; free some space, name another folder, "
            "or save nothing with --save-every 0",
            (double)room / gib, o->out, (double)one / gib);
    if ((double)available + (double)used < (double)most * (double)one)
        fail_warn("--keep",
                  "found %.3f GiB for checkpoints in %s, wanted %.3f GiB for the %lld that are there at once; the run "
                  "will stop when they do not fit",
                  (double)(available + used) / gib, o->out, (double)most * (double)one / gib, (long long)most);
}

// Bytes that this user may still write; a file system that does not tell has no end.
static uint64_t free_bytes(const char *folder) {
    struct statvfs info;
    if (statvfs(folder, &info) != 0 || info.f_blocks == 0) return UINT64_MAX / 2;
    return (uint64_t)info.f_bavail * (uint64_t)info.f_frsize;
}

// Before anything is removed for a log that then cannot be written.
static void check_log(const char *folder) {
    char path[OPTION_TEXT + 32];
    struct stat info;
    snprintf(path, sizeof path, "%s/log.jsonl", folder);
    if (stat(path, &info) == 0 && S_ISDIR(info.st_mode))
        fail_user(path, "cannot open the log: %s; mend or move it", strerror(EISDIR));
}

void run_folder_begin(const struct options *o) {
    check_log(o->out);
    run_folder_check_space(o, free_bytes(o->out));
    if (o->overwrite) checkpoint_remove_all(o->out);
    write_config(o);
}

#include "model/run_folder.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kernels/fail.h"
#include "model/checkpoint.h"
#include "data/files.h"

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

static bool holds_run(const char *folder) {
    char path[OPTION_TEXT + 32];
    snprintf(path, sizeof path, "%s/log.jsonl", folder);
    return access(path, F_OK) == 0 || checkpoint_newest(folder, path, sizeof path, NULL);
}

// Held until the process ends: two runs in one folder would remove each other's files.
static void lock_folder(const char *folder) {
    char path[OPTION_TEXT + 32];
    snprintf(path, sizeof path, "%s/.lock", folder);
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (file < 0) fail_user("--out", "cannot write %s: %s", path, strerror(errno));
    if (flock(file, LOCK_EX | LOCK_NB) != 0)
        fail_user("--out", "found that another process runs in %s; wait for it, or name another folder", folder);
}

void run_folder_open(const struct options *o, char *from, size_t size) {
    from[0] = 0;
    make_folder(o->out);
    lock_folder(o->out);
    if (o->resume) {
        if (checkpoint_newest(o->out, from, size, stderr)) return;
        if (checkpoint_exists(o->out))
            fail_user("--resume",
                      "found no complete checkpoint in %s, only the broken ones above; mend one, or start "
                      "again with --overwrite",
                      o->out);
        printf("no complete checkpoint in %s: starting at the beginning\n", o->out);
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

void run_folder_begin(const struct options *o) {
    if (o->overwrite) checkpoint_remove_all(o->out);
    write_config(o);
}

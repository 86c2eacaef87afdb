#include "data/files.h"

#include <cjson/cJSON.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kernels/fail.h"

bool file_error(char *error, size_t error_size, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(error, error_size, format, args);
    va_end(args);
    return false;
}

void file_path(char path[FILE_PATH], const char *folder, const char *name) {
    int length = snprintf(path, FILE_PATH, "%s/%s", folder, name);
    if (length >= FILE_PATH)
        fail_user(folder, "found a path of %d bytes, wanted less than %d; use a shorter one", length, FILE_PATH);
}

bool file_size(const char *path, uint64_t *bytes, char *error, size_t error_size) {
    struct stat info;
    if (stat(path, &info) != 0) return file_error(error, error_size, "%s: %s", path, strerror(errno));
    if (!S_ISREG(info.st_mode))
        return file_error(error, error_size, "%s: found a folder or device, wanted a regular file", path);
    *bytes = (uint64_t)info.st_size;
    return true;
}

ssize_t file_read_at(int descriptor, void *data, size_t n, uint64_t offset) {
    size_t done = 0;
    while (done < n) {
        ssize_t got = pread(descriptor, (char *)data + done, n - done, (off_t)(offset + done));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return -1;
        if (got == 0) break;
        done += (size_t)got;
    }
    return (ssize_t)done;
}

// ---- writing ----

bool file_close_synced(FILE *file, const char *path, char *error, size_t error_size) {
    bool flushed = fflush(file) == 0 && fsync(fileno(file)) == 0;
    int flush_errno = errno;
    if (fclose(file) != 0 && flushed)
        return file_error(error, error_size, "%s: cannot close: %s", path, strerror(errno));
    if (!flushed) return file_error(error, error_size, "%s: cannot flush: %s", path, strerror(flush_errno));
    return true;
}

// The name is on the disk when its folder is.
static bool sync_parent(const char *path, char *error, size_t error_size) {
    char folder[FILE_PATH];
    const char *slash = strrchr(path, '/');
    if (!slash) return file_sync(".", error, error_size);
    size_t length = slash == path ? 1 : (size_t)(slash - path);
    if (length >= sizeof folder) return file_error(error, error_size, "%s: its path is too long", path);
    memcpy(folder, path, length);
    folder[length] = 0;
    return file_sync(folder, error, error_size);
}

bool file_publish(FILE *file, const char *temporary, const char *path, char *error, size_t error_size) {
    bool renamed = file_close_synced(file, temporary, error, error_size) &&
                   (rename(temporary, path) == 0 ||
                    file_error(error, error_size, "%s: cannot be renamed to %s: %s", temporary, path, strerror(errno)));
    if (!renamed) unlink(temporary);
    return renamed && sync_parent(path, error, error_size);
}

bool file_write(const char *path, const char *text, size_t bytes, char *error, size_t error_size) {
    FILE *file = fopen(path, "wb");
    if (!file) return file_error(error, error_size, "%s: cannot create: %s", path, strerror(errno));
    if (fwrite(text, 1, bytes, file) != bytes) {
        file_error(error, error_size, "%s: cannot write %zu bytes: %s", path, bytes, strerror(errno));
        fclose(file);
        return false;
    }
    return file_close_synced(file, path, error, error_size);
}

bool file_sync(const char *path, char *error, size_t error_size) {
    int descriptor = open(path, O_RDONLY | O_CLOEXEC);
    if (descriptor < 0) return file_error(error, error_size, "%s: cannot open: %s", path, strerror(errno));
    bool synced = fsync(descriptor) == 0;
    int sync_errno = errno;
    close(descriptor);
    return synced || file_error(error, error_size, "%s: cannot sync: %s", path, strerror(sync_errno));
}

bool file_remove_folder(const char *path, char *error, size_t error_size) {
    // A link to a folder is not followed: what it leads to is not ours.
    int descriptor = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (descriptor < 0 && errno == ENOENT) return true;
    DIR *folder = descriptor < 0 ? NULL : fdopendir(descriptor);
    if (!folder) return file_error(error, error_size, "%s: cannot open the folder: %s", path, strerror(errno));
    for (struct dirent *entry; (entry = readdir(folder));)
        unlinkat(dirfd(folder), entry->d_name, 0); // what cannot be removed makes rmdir fail
    closedir(folder);
    return rmdir(path) == 0 || file_error(error, error_size, "%s: cannot remove: %s", path, strerror(errno));
}

bool file_write_json(const char *path, const struct cJSON *json, char *error, size_t error_size) {
    char *text = cJSON_Print(json);
    if (!text) fail_internal(path, "no memory for its text");
    size_t length = strlen(text);
    text[length] = '\n'; // in place of the final zero
    bool written = file_write(path, text, length + 1, error, error_size);
    cJSON_free(text);
    return written;
}

// ---- reading ----

struct cJSON *file_parse_json(const char *text, size_t length, const char *path, char *error, size_t error_size) {
    const char *end = text;
    struct cJSON *json = cJSON_ParseWithLengthOpts(text, length, &end, false);
    size_t parsed = (size_t)(end - text);
    while (json && parsed < length && strchr(" \t\r\n", text[parsed]) && text[parsed]) parsed++;
    if (cJSON_IsObject(json) && parsed == length) return json;
    cJSON_Delete(json);
    file_error(error, error_size, "%s: found no JSON at byte %zu of %zu, wanted one JSON object", path, parsed, length);
    return NULL;
}

// The text [bytes] of a file, which may end before the size it had: it is being changed, or the size was made up.
static bool read_content(FILE *file, const char *path, char *text, size_t bytes, char *error, size_t error_size) {
    size_t got = fread(text, 1, bytes, file);
    if (got == bytes) return true;
    if (ferror(file))
        return file_error(error, error_size, "%s: cannot read %zu bytes: %s", path, bytes, strerror(errno));
    return file_error(error, error_size, "%s: found %zu bytes, wanted the %zu of its size; copy it or make it again",
                      path, got, bytes);
}

char *file_read(const char *path, size_t *length, char *error, size_t error_size) {
    const uint64_t most = 100 << 20; // the largest index or tokenizer of a published model is a tenth of this
    uint64_t bytes;
    if (!file_size(path, &bytes, error, error_size)) return NULL;
    if (bytes > most) {
        file_error(error, error_size, "%s: found %ju bytes, wanted at most %ju", path, (uintmax_t)bytes,
                   (uintmax_t)most);
        return NULL;
    }
    FILE *file = fopen(path, "rb");
    char *text = malloc(bytes + 1);
    bool read = file && text;
    if (!read) file_error(error, error_size, "%s: cannot read %ju bytes: %s", path, (uintmax_t)bytes, strerror(errno));
    read = read && read_content(file, path, text, bytes, error, error_size);
    if (file) fclose(file);
    if (read) {
        text[bytes] = 0;
        *length = bytes;
        return text;
    }
    free(text);
    return NULL;
}

struct cJSON *file_read_json(const char *path, char *error, size_t error_size) {
    size_t bytes;
    char *text = file_read(path, &bytes, error, error_size);
    struct cJSON *json = text ? file_parse_json(text, bytes, path, error, error_size) : NULL;
    free(text);
    return json;
}

bool file_json_integer(const struct cJSON *item, uint64_t *value) {
    if (!cJSON_IsNumber(item)) return false;
    double number = item->valuedouble;
    if (!(number >= 0 && number <= 0x1p53) || floor(number) != number) return false;
    *value = (uint64_t)number;
    return true;
}

void file_json_add_integer(struct cJSON *object, const char *name, uint64_t value) {
    char text[24];
    snprintf(text, sizeof text, "%ju", (uintmax_t)value);
    cJSON_AddRawToObject(object, name, text);
}

// ---- standard streams ----

void file_hold_closed_streams(void) {
    int descriptor;
    do descriptor = open("/dev/null", O_RDONLY);
    while (descriptor >= 0 && descriptor <= STDERR_FILENO);
    if (descriptor >= 0) close(descriptor);
}

void file_check_standard_output(void) {
    errno = 0;
    if (fflush(stdout) != 0 || ferror(stdout))
        fail_internal("standard output", "cannot be written: %s", errno ? strerror(errno) : "an earlier write failed");
}

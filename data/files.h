// Files that survive a crash, and JSON that is not trusted. Functions return false (or NULL) with one line in error
// that begins with the path, so that the caller can clean up before it gives up.
#ifndef MOK_DATA_FILES_H
#define MOK_DATA_FILES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/types.h>

struct cJSON;

enum { FILE_PATH = 4096, FILE_ERROR = FILE_PATH + 512 }; // bytes of a path and of an error line

// Writes the error line and returns false, so that a check reads "return file_error(...)".
bool file_error(char *error, size_t error_size, const char *format, ...) __attribute__((format(printf, 3, 4)));

// path = folder/name. Ends the program (exit 2) when that is too long.
void file_path(char path[FILE_PATH], const char *folder, const char *name);

// What makes an open file this one and no other, whatever its names are.
struct file_id {
    dev_t device;
    ino_t inode;
};

// Bytes of a regular file; false if there is none.
bool file_size(const char *path, uint64_t *bytes, char *error, size_t error_size);

// Reads n bytes at an offset, or fewer where the file ends, and returns how many; -1 with errno.
ssize_t file_read_at(int descriptor, void *data, size_t n, uint64_t offset);

// Flushes to the disk and closes, whatever happens.
bool file_close_synced(FILE *file, const char *path, char *error, size_t error_size);
// The last step of a file that was written under a temporary name: flushes and closes it, gives it its name, and puts that
// on disk too. A temporary file that did not get its name is removed.
bool file_publish(FILE *file, const char *temporary, const char *path, char *error, size_t error_size);
// The whole content of a new file, on disk on return.
bool file_write(const char *path, const char *text, size_t bytes, char *error, size_t error_size);
// Puts what was already written to a file, or the entries of a folder, on disk.
bool file_sync(const char *path, char *error, size_t error_size);
// Removes the files of a folder, then the folder. A folder that is not there is fine; one with folders inside stays,
// and so does what is no folder, or a link to one.
bool file_remove_folder(const char *path, char *error, size_t error_size);

// The content of a regular file of at most 100 MiB, and a final zero behind it. Free with free.
char *file_read(const char *path, size_t *length, char *error, size_t error_size);
// One JSON object with nothing but white space behind it. Free with cJSON_Delete.
struct cJSON *file_parse_json(const char *text, size_t length, const char *path, char *error, size_t error_size);
struct cJSON *file_read_json(const char *path, char *error, size_t error_size);
// Indented, with a final newline, on disk on return.
bool file_write_json(const char *path, const struct cJSON *json, char *error, size_t error_size);

// A JSON number that is an integer from 0 to 2^53, up to where doubles are exact.
bool file_json_integer(const struct cJSON *item, uint64_t *value);
// Adds such a number with all its digits; cJSON's own printing keeps 15 of them.
void file_json_add_integer(struct cJSON *object, const char *name, uint64_t value);

// ---- standard streams, for main ----

// The number of a closed standard stream goes to the next file that is opened, and messages would end in that file. A
// read-only stand-in keeps the number, and writing to it still fails.
void file_hold_closed_streams(void);
// Ends the program (exit 1) when something that was printed could not be written.
void file_check_standard_output(void);

#endif

// A small file system of its own, seen by this process and its children alone.
#ifndef MOK_TESTS_SMALL_DISK_H
#define MOK_TESTS_SMALL_DISK_H

#include "tests/folder.h"

#include <sched.h>
#include <sys/mount.h>

static inline bool write_map(const char *path, unsigned id) {
    FILE *file = fopen(path, "w");
    bool written = file && fprintf(file, "%u %u 1\n", id, id) > 0;
    return file && fclose(file) == 0 && written;
}

// A user who may not mount may do so in a namespace of users that has this one alone.
static inline bool enter_namespace(void) {
    unsigned user = geteuid(), group = getegid();
    if (unshare(CLONE_NEWNS) == 0) return true;
    if (unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) return false;
    FILE *deny = fopen("/proc/self/setgroups", "w");
    if (deny) {
        fputs("deny", deny);
        fclose(deny);
    }
    return write_map("/proc/self/uid_map", user) && write_map("/proc/self/gid_map", group);
}

// Skips the test where mounting is not allowed. The test removes the disk with unmount_small_disk.
static inline void mount_small_disk(const char *name, size_t bytes) {
    char size[32];
    snprintf(size, sizeof size, "size=%zu", bytes);
    assert_int_equal(mkdir(at(name), 0777), 0);
    if (!enter_namespace() || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0 ||
        mount("none", at(name), "tmpfs", 0, size) != 0) {
        print_message("skipped: this user may not mount a small disk\n");
        skip();
    }
}

static inline void unmount_small_disk(const char *name) { assert_int_equal(umount2(at(name), MNT_DETACH), 0); }

#endif

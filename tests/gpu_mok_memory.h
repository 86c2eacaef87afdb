// Device memory of the megakernel's tests, with poison between its arrays: what nobody may write must be poison after a
// call.
#ifndef MOK_TESTS_GPU_MOK_MEMORY_H
#define MOK_TESTS_GPU_MOK_MEMORY_H

#include "tests/scene.h"

// One piece of device memory and its copy on the host, with poison between the arrays in it.
enum { MOST_ARRAYS = 24, GAP = 256 };
struct memory {
    unsigned char *device, *image;
    size_t bytes;
    size_t first[MOST_ARRAYS], end[MOST_ARRAYS]; // of each array
    int count;
};

// The next array, aligned as device_alloc does. Without memory yet it is only counted.
static inline void *memory_take(struct memory *m, size_t bytes) {
    if (m->count == MOST_ARRAYS) abort();
    size_t at = m->bytes;
    m->first[m->count] = at;
    m->end[m->count++] = at + bytes;
    m->bytes = (at + bytes + 255) / 256 * 256 + GAP;
    return m->device ? m->device + at : NULL;
}

static inline void memory_alloc(struct memory *m) {
    m->device = device_alloc(m->bytes);
    m->image = malloc(m->bytes);
    if (!m->image) abort();
    m->bytes = 0;
    m->count = 0;
}

static inline void memory_close(struct memory *m) {
    device_free(m->device);
    free(m->image);
}

static inline void memory_poison(struct memory *m) {
    memset(m->image, 0xff, m->bytes); // NaN as a float, -1 as an integer
    device_copy_in(m->device, m->image, m->bytes);
}

static inline size_t memory_at(const struct memory *m, const void *device) {
    return (size_t)((const unsigned char *)device - m->device);
}

// Poison in one array alone; none there: nothing.
static inline void memory_poison_array(struct memory *m, const void *device, size_t bytes) {
    if (!device) return;
    size_t at = memory_at(m, device);
    memset(m->image + at, 0xff, bytes);
    device_copy_in(m->device + at, m->image + at, bytes);
}

static inline void memory_read(struct memory *m) { device_copy_out(m->image, m->device, m->bytes); }

// What was last read of an array.
static inline const void *memory_of(const struct memory *m, const void *device) {
    return m->image + memory_at(m, device);
}

static inline bool is_poison(const void *memory, size_t bytes) {
    const unsigned char *at = memory;
    return bytes == 0 || (*at == 0xff && memcmp(at, at + 1, bytes - 1) == 0);
}

// Of an array, `skip` bytes from its start on.
static inline void memory_check_unwritten(const struct memory *m, const char *what, const void *device, size_t skip,
                                          size_t bytes) {
    const unsigned char *at = memory_of(m, device);
    if (bytes > skip && !is_poison(at + skip, bytes - skip)) scene_fail(what, "was written");
}

// Nothing has changed since the memory was last read or written here.
static inline void memory_check_unchanged(const struct memory *m, const char *what, const void *device, size_t bytes) {
    if (!bytes) return;
    unsigned char *now = malloc(bytes);
    if (!now) abort();
    device_copy_out(now, device, bytes);
    if (memcmp(now, memory_of(m, device), bytes) != 0) scene_fail(what, "was written");
    free(now);
}

static inline void memory_check_gaps(const struct memory *m, const char *what) {
    for (int i = 0; i < m->count; i++) {
        size_t next = i + 1 < m->count ? m->first[i + 1] : m->bytes;
        if (!is_poison(m->image + m->end[i], next - m->end[i]))
            scene_fail(what, "memory behind array %d of %d was written", i, m->count);
    }
}

#endif

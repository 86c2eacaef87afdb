// A 64-bit fingerprint of bytes, to notice damage and change; not for secrets. The same on every little-endian machine.
// Damage within one word of eight bytes is noticed for certain, anything else but for one case in 2^64.
//
//   struct hash h = hash_begin();
//   hash_add(&h, bytes, count);   // as often as there are pieces; how they are cut does not matter
//   uint64_t fingerprint = hash_end(&h);
#ifndef MOK_DATA_HASH_H
#define MOK_DATA_HASH_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "kernels/random.h"

enum { HASH_LANES = 4, HASH_BLOCK = 8 * HASH_LANES };

// Four words at a time, each into a lane of its own, so that the multiplications overlap.
struct hash {
    uint64_t lanes[HASH_LANES];
    unsigned char rest[HASH_BLOCK]; // the last bytes, not yet a block
    uint64_t bytes;                 // so far
};

static inline struct hash hash_begin(void) { return (struct hash){.lanes = {1, 2, 3, 4}}; }

// One step of a lane can be undone, so blocks that differ leave different lanes. Factors carry a change upwards, the
// rotation brings it down again; the first factor keeps a change of few bits from being cancelled by few bits of the
// next block.
static inline void hash_block(struct hash *h, const unsigned char *block) {
    for (int lane = 0; lane < HASH_LANES; lane++) {
        uint64_t word;
        memcpy(&word, block + 8 * lane, 8);
        uint64_t mixed = h->lanes[lane] ^ word * 0x9e3779b97f4a7c15ull;
        h->lanes[lane] = (mixed << 29 | mixed >> 35) * 0xd1342543de82ef95ull;
    }
}

static inline void hash_add(struct hash *h, const void *data, size_t bytes) {
    const unsigned char *next = data;
    size_t held = h->bytes % HASH_BLOCK;
    if (!bytes) return; // data may be NULL then
    h->bytes += bytes;
    if (held) {
        size_t taken = HASH_BLOCK - held < bytes ? HASH_BLOCK - held : bytes;
        memcpy(h->rest + held, next, taken);
        next += taken;
        bytes -= taken;
        if (held + taken < HASH_BLOCK) return;
        hash_block(h, h->rest);
    }
    for (; bytes >= HASH_BLOCK; bytes -= HASH_BLOCK, next += HASH_BLOCK) hash_block(h, next);
    if (bytes) memcpy(h->rest, next, bytes);
}

// h itself stays as it is, so more may be added.
static inline uint64_t hash_end(const struct hash *h) {
    struct hash last = *h;
    size_t held = h->bytes % HASH_BLOCK;
    memset(last.rest + held, 0, HASH_BLOCK - held);
    hash_block(&last, last.rest);
    uint64_t result = h->bytes; // tells trailing zeros from none
    for (int lane = 0; lane < HASH_LANES; lane++) result = random_mix(result ^ last.lanes[lane]);
    return result;
}

#endif

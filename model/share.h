// Sequences, or whatever else the ranks of a job take on in equal parts.
#ifndef MOK_MODEL_SHARE_H
#define MOK_MODEL_SHARE_H

#include <stdint.h>

#include "model/parallel.h"

// What one rank does of `total`: the places first .. first + count - 1, in `rounds` micro-batches. All ranks do as many
// rounds as the fullest one needs, since the MoE layer takes all of a group; they come without sequences if need be.
struct share {
    int64_t first, count, rounds;
};

// total and the ranks below 2^31.
static inline struct share share_of(int64_t total, const struct parallel *p, int batch) {
    int64_t first = total * p->rank / p->ranks, next = total * (p->rank + 1) / p->ranks;
    int64_t fullest = (total + p->ranks - 1) / p->ranks;
    return (struct share){first, next - first, (fullest + batch - 1) / batch};
}

// Sequences in one of the rounds, which begins at place first + round * batch.
static inline int share_round(const struct share *s, int64_t round, int batch) {
    int64_t left = s->count - round * batch;
    return left < 0 ? 0 : left < batch ? (int)left : batch;
}

#endif

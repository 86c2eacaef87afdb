// The plans of all ranks of an EP group, made in one process: every rank's symmetric memory is a piece of the heap that
// holds the header, the ids and the gates. Tests write ids and gates of any rank, then call plans_make.
#ifndef MOK_TESTS_MOK_PLANS_H
#define MOK_TESTS_MOK_PLANS_H

#include "tests/test.h"

#include "kernels/mok.h"
#include "kernels/random.h"

enum { PLANS_MOST_RANKS = 72 };

struct plans {
    struct mok_shape s;
    char *memory[PLANS_MOST_RANKS];
    struct mok_group group[PLANS_MOST_RANKS];
    struct mok_plan plan[PLANS_MOST_RANKS];
    int tokens[PLANS_MOST_RANKS];
    int32_t *ids[PLANS_MOST_RANKS]; // [max_tokens, K], -1 at first
    accum *gates[PLANS_MOST_RANKS]; // [max_tokens, K], all different
};

static inline void plans_open(struct plans *w, const struct mok_shape *s) {
    *w = (struct plans){.s = *s};
    size_t header = (mok_header_bytes(s->ranks) + 63) / 64 * 64, slots = (size_t)s->max_tokens * (size_t)s->top_k;
    for (int r = 0; r < s->ranks; r++) {
        w->memory[r] = calloc(1, header + slots * (sizeof(int32_t) + sizeof(accum)) + sizeof(accum));
        if (!w->memory[r]) abort();
        w->group[r] = (struct mok_group){.rank = r, .ranks = s->ranks, .base = w->memory, .timeout = 60};
        w->gates[r] = (accum *)(w->memory[r] + header);
        w->ids[r] = (int32_t *)(w->gates[r] + slots);
        for (size_t slot = 0; slot < slots; slot++) {
            w->ids[r][slot] = -1;
            w->gates[r][slot] = (accum)((size_t)r * slots + slot + 1);
        }
        mok_plan_alloc(&w->plan[r], s);
    }
}

static inline void plans_close(struct plans *w) {
    for (int r = 0; r < w->s.ranks; r++) {
        mok_plan_free(&w->plan[r]);
        free(w->memory[r]);
    }
}

// Makes the plan of one rank, or of all, in poisoned memory.
static inline void plans_make_one(struct plans *w, int rank) {
    for (int r = 0; r < w->s.ranks; r++) mok_set_tokens(&w->group[r], w->tokens[r]);
    memset(w->plan[rank].rows, 0x5a, mok_plan_bytes(&w->s));
    mok_plan_make(&w->plan[rank], &w->s, &w->group[rank], w->ids[rank], w->gates[rank]);
}
static inline void plans_make(struct plans *w) {
    for (int r = 0; r < w->s.ranks; r++) plans_make_one(w, r);
}

// Routes as many tokens to each expert as counts [experts] says, one route per token, the tokens dealt to the ranks in
// turn (a rank's first `each` tokens, then the next rank's); the other choices of a token are -1. Sets tokens.
static inline void plans_route_counts(struct plans *w, const int *counts, int each) {
    int rank = 0, K = w->s.top_k, k = 0;
    for (int r = 0; r < w->s.ranks; r++) w->tokens[r] = 0;
    for (int e = 0; e < w->s.experts; e++)
        for (int i = 0; i < counts[e]; i++) {
            int token = w->tokens[rank]++;
            assert_true(token < w->s.max_tokens);
            w->ids[rank][token * K + k] = e;
            k = (k + 1) % K;
            if (w->tokens[rank] % each == 0) rank = (rank + 1) % w->s.ranks;
        }
}

// Tokens that plans_route_counts gives one rank at most.
static inline int plans_most_tokens(const int *counts, int experts, int ranks, int each) {
    int all = 0;
    for (int e = 0; e < experts; e++) all += counts[e];
    return mok_ceil(mok_ceil(all, each), ranks) * each;
}

#endif

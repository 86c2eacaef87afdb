#include "data/bpe.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/fail.h"
#include "kernels/random.h"

struct bpe_word {
    uint32_t tag; // upper half of the text's hash
    uint32_t id_plus_1;
};

struct bpe_merge {
    uint64_t pair;
    uint32_t rank;
    int32_t id; // -1: a free place
};

enum { NO_RANK = UINT32_MAX };

// ---- tables ----

static void *allocate(size_t count, size_t size) {
    void *memory = calloc(count ? count : 1, size);
    if (!memory) fail_internal("tokenizer", "no memory for %zu entries of %zu bytes", count, size);
    return memory;
}

// Places for a hash table of n entries, a power of two, at most half of them used.
static size_t table_places(size_t n) {
    size_t places = 16;
    while (places < 2 * n) places *= 2;
    return places;
}

void bpe_create(struct bpe *b, size_t vocab, size_t text_bytes, size_t merges) {
    size_t words = vocab < text_bytes ? vocab : text_bytes; // of which each has a byte or more
    *b = (struct bpe){.vocab = vocab, .word_mask = table_places(words) - 1, .merge_mask = table_places(merges) - 1};
    b->tokens = allocate(vocab, sizeof *b->tokens);
    b->text = allocate(text_bytes, 1);
    b->words = allocate(b->word_mask + 1, sizeof *b->words);
    b->merges = allocate(b->merge_mask + 1, sizeof *b->merges);
    for (size_t i = 0; i <= b->merge_mask; i++) b->merges[i].id = -1;
}

void bpe_close(struct bpe *b) {
    free(b->tokens);
    free(b->text);
    free(b->words);
    free(b->merges);
}

static uint64_t hash_text(const char *text, size_t bytes) {
    uint64_t h = bytes, word;
    for (; bytes >= 8; bytes -= 8, text += 8) {
        memcpy(&word, text, 8);
        h = (h ^ word) * 0x9e3779b97f4a7c15ull;
        h ^= h >> 32;
    }
    word = 0;
    for (size_t i = 0; i < bytes; i++) word = word << 8 | (unsigned char)text[i];
    return random_mix(h ^ word);
}

static bool token_is(const struct bpe *b, int32_t id, const char *text, size_t bytes, bool named) {
    const struct bpe_token *t = &b->tokens[id];
    return t->bytes == bytes && t->named == named && memcmp(b->text + t->start, text, bytes) == 0;
}

int32_t bpe_find(const struct bpe *b, const char *text, size_t bytes, bool named) {
    uint64_t hash = hash_text(text, bytes);
    uint32_t tag = (uint32_t)(hash >> 32);
    for (size_t place = hash & b->word_mask; b->words[place].id_plus_1; place = (place + 1) & b->word_mask) {
        int32_t id = (int32_t)b->words[place].id_plus_1 - 1;
        if (b->words[place].tag == tag && token_is(b, id, text, bytes, named)) return id;
    }
    return -1;
}

void bpe_add_token(struct bpe *b, int32_t id, const char *text, size_t bytes, bool named, bool find) {
    b->tokens[id] = (struct bpe_token){
        .start = (uint32_t)b->text_bytes, .bytes = (uint32_t)bytes & 0xfffffff, .present = true, .named = named};
    memcpy(b->text + b->text_bytes, text, bytes);
    b->text_bytes += bytes;
    if (!find) return;
    uint64_t hash = hash_text(text, bytes);
    size_t place = hash & b->word_mask;
    while (b->words[place].id_plus_1) place = (place + 1) & b->word_mask;
    b->words[place] = (struct bpe_word){(uint32_t)(hash >> 32), (uint32_t)id + 1};
}

static struct bpe_merge *find_place(const struct bpe *b, int32_t left, int32_t right) {
    uint64_t pair = (uint64_t)left << 32 | (uint32_t)right;
    uint64_t mixed = pair * 0x9e3779b97f4a7c15ull;
    size_t place = (mixed ^ mixed >> 32) & b->merge_mask;
    while (b->merges[place].id >= 0 && b->merges[place].pair != pair) place = (place + 1) & b->merge_mask;
    return &b->merges[place];
}

void bpe_add_merge(struct bpe *b, int32_t left, int32_t right, int32_t id) {
    uint64_t pair = (uint64_t)left << 32 | (uint32_t)right;
    *find_place(b, left, right) = (struct bpe_merge){pair, (uint32_t)b->merge_count++, id};
}

static uint32_t find_rank(const struct bpe *b, int32_t left, int32_t right) {
    const struct bpe_merge *m = find_place(b, left, right);
    return m->id >= 0 ? m->rank : NO_RANK;
}

// ---- merging ----

void token_list_reserve(struct token_list *list, size_t count) {
    if (list->capacity - list->count >= count) return;
    size_t capacity = list->capacity + list->capacity / 2;
    if (capacity < list->count + count) capacity = list->count + count + 64;
    list->ids = realloc(list->ids, capacity * sizeof *list->ids);
    if (!list->ids) fail_internal("tokenizer", "no memory for %zu ids", capacity);
    list->capacity = capacity;
}

// Words up to this length are merged in a small array that is searched from end to end; longer ones with a heap.
enum { SHORT_WORD = 64 };

// Merges ids [n] in place and returns how many are left. ranks [n - 1] are those of neighbours.
static size_t merge_short(const struct bpe *b, int32_t *ids, size_t n) {
    uint32_t ranks[SHORT_WORD];
    for (size_t i = 0; i + 1 < n; i++) ranks[i] = find_rank(b, ids[i], ids[i + 1]);
    while (n > 1) {
        size_t best = 0;
        for (size_t i = 1; i + 1 < n; i++)
            if (ranks[i] < ranks[best]) best = i;
        if (ranks[best] == NO_RANK) break;
        ids[best] = find_place(b, ids[best], ids[best + 1])->id;
        n--;
        memmove(ids + best + 1, ids + best + 2, (n - best - 1) * sizeof *ids);
        memmove(ranks + best, ranks + best + 1, (n - best) * sizeof *ranks);
        if (best > 0) ranks[best - 1] = find_rank(b, ids[best - 1], ids[best]);
        if (best + 1 < n) ranks[best] = find_rank(b, ids[best], ids[best + 1]);
    }
    return n;
}

// A long word is a list of symbols, and a heap of rank << 32 | position of its pairs, the smallest first. Pairs that
// have changed stay in the heap until they come up.
struct symbol {
    int32_t id; // -1: has become part of the one before
    uint32_t previous, next;
};

struct long_word {
    struct symbol *symbols; // [n]; next is n at the end
    uint64_t *heap;
    uint32_t n;
    size_t used; // of heap
};

static void heap_push(struct long_word *w, uint64_t key) {
    size_t at = w->used++;
    for (; at > 0 && w->heap[(at - 1) / 2] > key; at = (at - 1) / 2) w->heap[at] = w->heap[(at - 1) / 2];
    w->heap[at] = key;
}

static uint64_t heap_pop(struct long_word *w) {
    uint64_t top = w->heap[0], last = w->heap[--w->used];
    size_t at = 0;
    for (size_t child; (child = 2 * at + 1) < w->used; at = child) {
        if (child + 1 < w->used && w->heap[child + 1] < w->heap[child]) child++;
        if (w->heap[child] >= last) break;
        w->heap[at] = w->heap[child];
    }
    w->heap[at] = last;
    return top;
}

static uint32_t rank_at(const struct bpe *b, const struct long_word *w, uint32_t position) {
    const struct symbol *s = &w->symbols[position];
    return s->id < 0 || s->next == w->n ? NO_RANK : find_rank(b, s->id, w->symbols[s->next].id);
}

static void push_pair(const struct bpe *b, struct long_word *w, uint32_t position) {
    uint32_t rank = rank_at(b, w, position);
    if (rank != NO_RANK) heap_push(w, (uint64_t)rank << 32 | position);
}

static void merge_symbols(const struct bpe *b, struct long_word *w, uint32_t position) {
    struct symbol *s = &w->symbols[position], *gone = &w->symbols[s->next];
    s->id = find_place(b, s->id, gone->id)->id;
    s->next = gone->next;
    gone->id = -1;
    if (s->next < w->n) w->symbols[s->next].previous = position;
    push_pair(b, w, position);
    if (position > 0) push_pair(b, w, s->previous);
}

static void merge_long(const struct bpe *b, const char *word, uint32_t n, struct token_list *out) {
    // Every merge takes one symbol away and one pair from the heap, and puts at most two pairs in.
    struct long_word w = {.symbols = allocate(n, sizeof *w.symbols), .heap = allocate(2 * (size_t)n, 8), .n = n};
    for (uint32_t i = 0; i < n; i++)
        w.symbols[i] = (struct symbol){b->byte_ids[(unsigned char)word[i]], i ? i - 1 : 0, i + 1};
    for (uint32_t i = 0; i < n; i++) push_pair(b, &w, i);
    while (w.used) {
        uint64_t key = heap_pop(&w);
        uint32_t position = (uint32_t)key;
        if (rank_at(b, &w, position) == key >> 32) merge_symbols(b, &w, position);
    }
    for (uint32_t i = 0; i < n; i = w.symbols[i].next) {
        token_list_reserve(out, 1);
        out->ids[out->count++] = w.symbols[i].id;
    }
    free(w.symbols);
    free(w.heap);
}

static void merge_word(const struct bpe *b, const char *word, size_t bytes, struct token_list *out) {
    if (bytes > SHORT_WORD) {
        merge_long(b, word, (uint32_t)bytes, out);
        return;
    }
    token_list_reserve(out, bytes);
    int32_t *ids = out->ids + out->count;
    for (size_t i = 0; i < bytes; i++) ids[i] = b->byte_ids[(unsigned char)word[i]];
    out->count += merge_short(b, ids, bytes);
}

void bpe_mark_whole_words(struct bpe *b) {
    struct token_list ids = {0};
    for (size_t id = 0; id < b->vocab; id++) {
        struct bpe_token *t = &b->tokens[id];
        if (!t->present || t->named || t->bytes == 0) continue;
        ids.count = 0;
        if (!b->ignore_merges) merge_word(b, b->text + t->start, t->bytes, &ids);
        t->whole = b->ignore_merges || (ids.count == 1 && ids.ids[0] == (int32_t)id);
    }
    free(ids.ids);
}

static void encode_bytes(const struct bpe *b, const char *text, size_t bytes, struct token_list *out) {
    token_list_reserve(out, bytes);
    for (size_t i = 0; i < bytes; i++) out->ids[out->count++] = b->byte_ids[(unsigned char)text[i]];
}

void bpe_encode(const struct bpe *b, const char *word, size_t bytes, struct token_list *out) {
    enum { MOST = 1 << 26 }; // a longer word is cut there, so that merging needs at most 2 GB
    if (b->merge_count == 0 && !b->ignore_merges) {
        encode_bytes(b, word, bytes, out);
        return;
    }
    int32_t id = bpe_find(b, word, bytes, false);
    if (id >= 0 && b->tokens[id].whole) {
        token_list_reserve(out, 1);
        out->ids[out->count++] = id;
        return;
    }
    for (; bytes > MOST; word += MOST, bytes -= MOST) merge_word(b, word, MOST, out);
    merge_word(b, word, bytes, out);
}

// ---- fingerprint ----

static void add_number(struct hash *h, uint64_t number) { hash_add(h, &number, sizeof number); }

static int compare_merges(const void *left, const void *right) {
    const struct bpe_merge *a = left, *b = right;
    return (a->rank > b->rank) - (a->rank < b->rank);
}

// Merges in the order of their ranks; gaps in the ranks change nothing.
static void add_merges(const struct bpe *b, struct hash *h) {
    struct bpe_merge *ordered = allocate(b->merge_count, sizeof *ordered);
    size_t count = 0;
    for (size_t i = 0; i <= b->merge_mask; i++)
        if (b->merges[i].id >= 0) ordered[count++] = b->merges[i];
    qsort(ordered, count, sizeof *ordered, compare_merges);
    for (size_t i = 0; i < count; i++) {
        add_number(h, ordered[i].pair);
        add_number(h, (uint64_t)ordered[i].id);
    }
    add_number(h, count);
    free(ordered);
}

void bpe_add_to_hash(const struct bpe *b, struct hash *h) {
    for (size_t id = 0; id < b->vocab; id++) {
        const struct bpe_token *t = &b->tokens[id];
        if (!t->present) continue;
        add_number(h, id);
        add_number(h, (uint64_t)t->bytes << 2 | t->named << 1 | t->special);
        hash_add(h, b->text + t->start, t->bytes);
    }
    add_number(h, b->ignore_merges);
    add_merges(b, h);
}

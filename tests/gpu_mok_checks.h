// What must hold of the megakernel's passes: bits, numbers against the record, the plan, what stays for the backward pass,
// and what nobody may write.
#ifndef MOK_TESTS_GPU_MOK_CHECKS_H
#define MOK_TESTS_GPU_MOK_CHECKS_H

#include "tests/gpu_mok_ranks.h"

// The CPU rounds nothing; the GPU rounds to BF16, 1.6e-3 each time in the mean square: gate and up, then hidden, makes
// 1.6e-3 * sqrt(3) = 2.8e-3 of hidden. A product keeps this, since the errors are independent of the weights; its own
// rounding makes it 3.2e-3 of a slot, that of the sum 3.6e-3 of y without a residual (tests/rounding.c measures 2.8e-3,
// 3.1e-3 and 3.9e-3 where widths are not tiny). The limit is 1.5 times that; a term left out is off by 1e-1 and more.
// One element is off by up to 5 times the mean among a million, and its row's largest is some 3 times its row's mean:
// 6.5e-3, and its own rounding, 2e-3, makes 8.5e-3. Twice that.
static const struct tolerance FORWARD = {6e-3, 1.6e-2, 0};

// Backward: gate, up and d hidden are rounded before d gate, d up and hidden are made of them, and rounded themselves, so
// that a gradient of theirs is off by what an output of forward is (tests/rounding.c measures 3.6e-3 of a slot, 4.2e-3 of
// dx, 3.2e-3 of a gate's gradient, 3.3e-3 of a weight's and 3.8e-3 of one of a single token).
static const struct tolerance GRADIENT = {6e-3, 1.6e-2, 0};
// A weight's gradient from one token is that token's row times numbers of which one may be far smaller than what it was
// made of: where silu has no slope (3.4e-2 measured).
static const struct tolerance GRADIENT_OF_WEIGHT = {6e-3, 1e-1, 0};

// A gate's gradient is a sum of I products, of about 0.6 sqrt(H) over many; a few may all be small, since the products
// cancel (one off by 1.7e-2 measured, of two).
static inline struct tolerance gradient_of_gates(size_t n, int H) {
    struct tolerance t = with_floor(GRADIENT, 0.6 * sqrt(H));
    if (n < FEW_ELEMENTS) t.norm = t.worst = 2 * t.worst;
    return t;
}

// Where nothing is rounded, that is in the double build: as sums in FP32.
static inline struct tolerance limit_of(struct tolerance t) {
    return sizeof(real) > sizeof(float) ? with_floor(SUMMED, t.floor) : t;
}

// ---- bits ----

static inline void same_bytes(const char *output, const char *what, const void *found, const void *wanted,
                              size_t bytes) {
    const unsigned char *a = found, *b = wanted;
    scene_note(output, 0);
    if (memcmp(a, b, bytes) == 0) return;
    size_t at = 0;
    while (a[at] == b[at]) at++;
    scene_fail(output, "%s: found other bits from byte %zu of %zu on", what, at, bytes);
}

// The shared expert's gradients are those of each rank's own tokens. The sum over several ranks is another one than over
// all tokens.
static inline bool is_summed_by_rank(int which, int ranks) {
    return ranks > 1 && (which == RESULT_D_SHARED_W13 || which == RESULT_D_SHARED_W2);
}

static inline void close_sums(const char *what, struct result found, struct result wanted) {
    double *a = malloc(sizeof *a * (found.n + 1));
    float *b = malloc(sizeof *b * (found.n + 1));
    if (!a || !b) abort();
    for (size_t i = 0; i < found.n; i++) {
        a[i] = (double)((const accum *)found.memory)[i];
        b[i] = (float)((const accum *)wanted.memory)[i];
    }
    int failures = scene.operation->failures;
    compare_floats(found.name, a, b, found.n, found.row, SUMMED);
    if (scene.operation->failures > failures) printf("# ... %s\n", what);
    free(a);
    free(b);
}

// What a dealing to so many ranks gave, and what one rank gave, of p.
static inline void same_results(const char *what, int ranks, const struct problem *p, const struct results *found,
                                const struct results *wanted) {
    for (int i = 0; i < RESULTS; i++) {
        struct result a = result_of(found, p, i), b = result_of(wanted, p, i);
        if (is_summed_by_rank(i, ranks))
            close_sums(what, a, b);
        else
            same_bytes(a.name, what, a.memory, b.memory, a.n * a.bytes);
    }
}

// Everything was written, and of the gates' gradients those of placed routes alone.
static inline void check_results(const struct problem *p, const struct results *r) {
    for (int i = 0; i < RESULTS; i++) {
        struct result one = result_of(r, p, i);
        size_t at = 0;
        for (; at < one.n; at++) {
            bool number = one.bytes == sizeof(real) && i < RESULT_D_GATES
                              ? !isnan(host_double(((const real *)one.memory)[at]))
                              : !isnan(((const accum *)one.memory)[at]);
            if (number != (i != RESULT_D_GATES || p->ids[at] >= 0)) break;
        }
        if (at < one.n)
            scene_fail(one.name, "element %zu of %zu was %s", at, one.n,
                       i == RESULT_D_GATES && p->ids[at] < 0 ? "written" : "not written");
    }
}

// ---- against the record ----

// n reals in host memory. NaN stands for what nobody wrote.
static inline void against_record(const char *output, const real *values, size_t n, size_t row, struct tolerance t) {
    float *floats = malloc(sizeof *floats * (n + 1));
    for (size_t i = 0; i < n; i++) floats[i] = (float)host_double(values[i]);
    scene_floats(output, floats, n, row ? row : 1, limit_of(t));
    free(floats);
}

static inline void integers_against_record(const char *output, int32_t *values, size_t n) {
    struct record_header h = scene_header(output, ELEMENT_INT32, n, 1);
    if (scene.recording) {
        if (scene.perturb && n > 0) values[n / 2] ^= 1, scene.perturbed++;
        record_write(&scene.record, &h, values);
        return;
    }
    const struct record_header *recorded = scene_find(output, ELEMENT_INT32, n, 1);
    if (!recorded) return;
    const int32_t *wanted = record_data(recorded);
    scene_note(output, 0);
    for (size_t i = 0; i < n; i++)
        if (values[i] != wanted[i]) {
            scene_fail(output, "integer %zu of %zu: found %d, wanted %d", i, n, values[i], wanted[i]);
            return;
        }
}

// ---- the plan ----

static inline void append(int32_t *all, size_t *count, const int *values, size_t n) {
    memcpy(all + *count, values, sizeof *values * n);
    *count += n;
}

static inline void plan_against_record(const struct place *me, const struct mok_plan *p) {
    size_t blocks = (size_t)p->blocks, experts = (size_t)p->experts, rows = blocks * MOK_BLOCK_ROWS, count = 0;
    int numbers[] = {p->rank, p->experts, p->tokens, p->blocks};
    int32_t *all = malloc(sizeof *all * (4 + 2 * blocks + (2 + (size_t)me->shape.ranks) * experts + 1 + 3 * rows));
    append(all, &count, numbers, 4);
    append(all, &count, p->expert_block, experts + 1);
    append(all, &count, p->expert_rows, experts);
    append(all, &count, p->source_rows, experts * (size_t)me->shape.ranks);
    append(all, &count, p->block_expert, blocks);
    append(all, &count, p->walk, blocks);
    for (size_t r = 0; r < rows; r++) {
        float gate = (float)p->rows[r].gate;
        all[count++] = p->rows[r].source;
        all[count++] = p->rows[r].slot;
        memcpy(&all[count++], &gate, sizeof gate);
    }
    char name[48];
    snprintf(name, sizeof name, "plan of %d, rank %d", me->shape.ranks, me->group.rank);
    integers_against_record(name, all, count);
    free(all);
}

// The twin of a row from another rank: of the rows of its token the one that comes first in the walk, unless that is this
// row itself. With several macrobatches there are none.
static inline void check_twins(const struct place *me, const struct mok_plan *p) {
    const struct mok_shape *s = &me->shape;
    if (!p->twin) return;
    size_t tokens = (size_t)s->max_tokens, all = (size_t)s->ranks * tokens;
    int *first = malloc(sizeof *first * all); // row of every rank's tokens
    for (size_t i = 0; i < all; i++) first[i] = -1;
    for (int at = 0; at < p->blocks * MOK_BLOCK_ROWS; at++) {
        int block = p->walk[at / MOK_BLOCK_ROWS], r = block * MOK_BLOCK_ROWS + at % MOK_BLOCK_ROWS, wanted = -1;
        const struct mok_row *row = &p->rows[r];
        if (row->source >= 0 && row->source != p->rank) {
            int *earliest = &first[(size_t)row->source * tokens + (size_t)(row->slot / s->top_k)];
            if (*earliest >= 0 && mok_macrobatches(s, p) == 1)
                wanted = *earliest;
            else
                *earliest = r;
        }
        if (p->twin[r] == wanted) continue;
        scene_fail("twins", "row %d of rank %d of %d has twin %d, wanted %d", r, p->rank, s->ranks, p->twin[r], wanted);
        break;
    }
    free(first);
}

// ---- what is kept, and what is not written ----

// Blocks whose rows are still in the ring behind a pass.
static inline bool is_in_ring(const struct place *me, const struct mok_plan *plan, enum mok_pass pass, int block) {
    int ring = mok_ring_blocks(&me->shape);
    return pass == MOK_FORWARD ? block < ring : block + ring >= plan->blocks;
}

static inline size_t count_not_zero(const real *values, size_t n) {
    size_t count = 0;
    for (size_t i = 0; i < n; i++) count += !(host_double(values[i]) == 0);
    return count;
}

enum { SUMMED_ROWS = 64 }; // that a GPU's weight gradients add up at a time

// Pulled rows are copies of tokens. On a GPU their padding is zeros, and so are results of padding up to the next 64 rows, which
// weight gradients add up; what is behind is not even multiplied. The CPU multiplies no padding.
static inline void check_rows(const struct ranks *all, const struct place *me, int l, const struct mok_plan *plan,
                              enum mok_pass pass) {
    const struct own_layer *own = &me->layers[l];
    const struct mok_shape *s = &me->shape;
    size_t H = (size_t)s->hidden, I = (size_t)s->intermediate;
    const struct memory *m = &me->own;
    const real *x_rows = memory_of(m, own->layer.x_rows), *hidden = memory_of(m, me->work.hidden),
               *dy_rows = memory_of(m, me->work.dy_rows), *d_gate_up = memory_of(m, me->work.d_gate_up);
    bool backward = pass == MOK_BACKWARD;
    size_t wrong = 0, dirty = 0;
    for (int b = 0; b < plan->blocks; b++)
        for (size_t i = 0; i < MOK_BLOCK_ROWS && is_in_ring(me, plan, pass, b); i++) {
            const struct mok_row *row = &plan->rows[(size_t)b * MOK_BLOCK_ROWS + i];
            size_t at = mok_ring_row(s, b) + i;
            if (row->source >= 0) {
                size_t token = (size_t)(all->list[row->source].layers[l].first_token + row->slot / s->top_k);
                wrong += memcmp(x_rows + at * H, own->p->x + token * H, sizeof(real) * H) != 0;
                if (backward) wrong += memcmp(dy_rows + at * H, own->p->dy + token * H, sizeof(real) * H) != 0;
                continue;
            }
            if (sizeof(real) > 2) continue;
            dirty += count_not_zero(x_rows + at * H, H);
            if (backward) dirty += count_not_zero(dy_rows + at * H, H);
            if (i / SUMMED_ROWS > (size_t)(mok_block_rows(plan, b) - 1) / SUMMED_ROWS) continue;
            dirty += count_not_zero(hidden + at * I, I);
            if (backward) dirty += count_not_zero(d_gate_up + at * 2 * I, 2 * I);
        }
    if (wrong) scene_fail("rows", "%zu rows of rank %d of %d are not their tokens", wrong, plan->rank, s->ranks);
    if (dirty) scene_fail("padding", "%zu elements of rank %d of %d are not 0", dirty, plan->rank, s->ranks);
}

static inline void check_kept(const struct memory *m, const char *what, const void *device, const void *host,
                              size_t bytes) {
    if (memcmp(memory_of(m, device), host, bytes) != 0) scene_fail(what, "an input was written");
}

// Symmetric memory: inputs as they were, slots and gates' gradients only of routes.
static inline void check_symmetric(const struct place *me, int l, enum mok_pass pass) {
    const struct memory *m = &me->symmetric;
    const struct own_layer *own = &me->layers[l];
    const struct problem *p = own->p;
    size_t N = (size_t)own->tokens, first = (size_t)own->first_token, H = (size_t)p->H, K = (size_t)p->K;
    size_t most = (size_t)me->shape.max_tokens, slot = sizeof(real) * H, written = pass == MOK_BACKWARD ? N : 0;
    memory_check_gaps(m, "symmetric memory");
    check_kept(m, "x", own->x, p->x + first * H, N * slot);
    check_kept(m, "ids", own->ids, p->ids + first * K, sizeof(int32_t) * N * K);
    check_kept(m, "gates", own->gates, p->gates + first * K, sizeof(accum) * N * K);
    check_kept(m, "dy", me->dy, p->dy + first * H, written * slot);
    memory_check_unwritten(m, "x behind the tokens", own->x, N * slot, most * slot);
    memory_check_unwritten(m, "dy behind the tokens", me->dy, written * slot, most * slot);
    memory_check_unwritten(m, "d gates behind the tokens", me->d_gates, sizeof(accum) * written * K,
                           sizeof(accum) * most * K);
    memory_check_unwritten(m, "slots behind the tokens", me->slots, N * K * slot, most * K * slot);
    for (size_t i = 0; i < N * K; i++)
        if (p->ids[first * K + i] < 0) {
            memory_check_unwritten(m, "a slot of id -1", me->slots, i * slot, (i + 1) * slot);
            memory_check_unwritten(m, "d gate of id -1", me->d_gates, i * sizeof(accum), (i + 1) * sizeof(accum));
        }
}

// A ring of so many columns, behind the last row block.
static inline void check_behind_blocks(const struct place *me, const struct mok_plan *plan, const char *what,
                                       const real *device, size_t columns) {
    size_t R = (size_t)me->shape.ring_rows, rows = (size_t)plan->blocks * MOK_BLOCK_ROWS,
           bytes = sizeof(real) * columns;
    memory_check_unwritten(&me->own, what, device, rows * bytes, R * bytes);
}

// What is the other pass's alone, results behind the tokens, and the rings behind the rows. Rows of the shared expert
// behind the tokens are nobody's.
static inline void check_own(const struct place *me, int l, const struct mok_plan *plan, enum mok_pass pass) {
    const struct memory *m = &me->own;
    const struct mok_shape *s = &me->shape;
    const struct mok_layer *layer = &me->layers[l].layer;
    size_t R = (size_t)s->ring_rows, H = (size_t)s->hidden, I = (size_t)s->intermediate, S = (size_t)s->shared;
    size_t N = (size_t)me->layers[l].tokens, most = (size_t)s->max_tokens;
    size_t row = sizeof(real) * H, y = pass == MOK_FORWARD ? N : 0, dx = pass == MOK_BACKWARD ? N : 0;
    memory_check_gaps(m, "own memory");
    memory_check_unwritten(m, "y behind the tokens", me->y, y * row, most * row);
    memory_check_unwritten(m, "dx behind the tokens", me->dx, dx * row, most * row);
    check_behind_blocks(me, plan, "x rows behind the blocks", layer->x_rows, H);
    check_behind_blocks(me, plan, "gate and up behind the blocks", layer->gate_up, 2 * I);
    check_behind_blocks(me, plan, "hidden behind the blocks", me->work.hidden, I);
    check_behind_blocks(me, plan, "dy rows behind the blocks", me->work.dy_rows, H);
    check_behind_blocks(me, plan, "d gate and up behind the blocks", me->work.d_gate_up, 2 * I);
    if (pass == MOK_BACKWARD) return;
    memory_check_unwritten(m, "dy rows", me->work.dy_rows, 0, sizeof(real) * R * H);
    memory_check_unwritten(m, "d gate and up", me->work.d_gate_up, 0, sizeof(real) * R * 2 * I);
    memory_check_unwritten(m, "partials", me->work.partials, 0,
                           sizeof(accum) * (size_t)mok_ceil(s->intermediate, MOK_PARTIAL_COLUMNS) * R);
    memory_check_unwritten(m, "shared d gate and up", me->work.shared_d_gate_up, 0, sizeof(real) * most * 2 * S);
}

// Before the memory is read again: what forward keeps is still there behind backward, unless it was made again; and
// forward writes no gradients.
static inline void check_unchanged(const struct place *me, int l, const struct mok_plan *plan, enum mok_pass pass) {
    const struct memory *m = &me->own, *g = &me->gradients;
    const struct mok_shape *s = &me->shape;
    const struct mok_layer *layer = &me->layers[l].layer;
    size_t R = (size_t)s->ring_rows, H = (size_t)s->hidden, I = (size_t)s->intermediate, S = (size_t)s->shared;
    if (pass == MOK_FORWARD) {
        memory_check_unchanged(g, "gradients of weights", g->device, g->bytes);
        return;
    }
    memory_check_unchanged(m, "shared gate and up", layer->shared_gate_up,
                           sizeof(real) * (size_t)s->max_tokens * 2 * S);
    if (s->replay || mok_macrobatches(s, plan) > 1) return;
    memory_check_unchanged(m, "x rows", layer->x_rows, sizeof(real) * R * H);
    memory_check_unchanged(m, "gate and up", layer->gate_up, sizeof(real) * R * 2 * I);
}

// After a call that began with poison everywhere; backward after forward's check.
static inline void ranks_check(struct ranks *all, int l, enum mok_pass pass) {
    for (int r = 0; r < all->count; r++) {
        struct place *me = &all->list[r];
        struct mok_plan plan;
        mok_plan_read(&plan, &me->layers[l].plan, &me->shape);
        check_unchanged(me, l, &plan, pass);
        memory_read(&me->symmetric);
        memory_read(&me->own);
        check_symmetric(me, l, pass);
        check_own(me, l, &plan, pass);
        if (pass == MOK_FORWARD)
            check_twins(me, &plan);
        else
            memory_check_gaps(&me->gradients, "gradients of weights"); // ranks_backward has read them
        check_rows(all, me, l, &plan, pass);
        free(plan.rows);
    }
}

// The rows without padding that a pass left in the ring, of an array [ring_rows, columns]. ranks_check has read the memory.
static inline void ring_against_record(const char *output, const struct place *me, const struct mok_plan *plan,
                                       enum mok_pass pass, const real *device, int columns, struct tolerance t) {
    const struct mok_shape *s = &me->shape;
    const real *ring = memory_of(&me->own, device);
    size_t width = (size_t)columns, count = 0;
    real *rows = malloc(sizeof *rows * ((size_t)s->ring_rows * width + 1));
    for (int b = 0; b < plan->blocks; b++) {
        if (!is_in_ring(me, plan, pass, b)) continue;
        size_t here = (size_t)mok_block_rows(plan, b);
        memcpy(rows + count * width, ring + mok_ring_row(s, b) * width, sizeof *rows * here * width);
        count += here;
    }
    against_record(output, rows, count * width, width, t);
    free(rows);
}

#endif

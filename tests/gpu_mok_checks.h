// What must hold of the megakernel's forward pass: beside the numbers, the plan, what stays for the backward pass, and
// what nobody may write.
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

static inline void same_y(const char *what, const struct problem *p, const real *found, const real *wanted) {
    same_bytes("y", what, found, wanted, sizeof(real) * (size_t)p->tokens * (size_t)p->H);
}

// ---- against the record ----

// n reals in host memory. NaN stands for what nobody wrote.
static inline void against_record(const char *output, const real *values, size_t n, size_t row, struct tolerance t) {
    float *floats = malloc(sizeof *floats * (n + 1));
    for (size_t i = 0; i < n; i++) floats[i] = (float)host_double(values[i]);
    scene_floats(output, floats, n, row ? row : 1, t);
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

// Pulled rows are copies of tokens. Padding is zeros on a GPU, whose backward pass multiplies it; the CPU's does not.
static inline void check_rows(const struct ranks *all, const struct place *me, int l, const struct mok_plan *plan) {
    const struct own_layer *own = &me->layers[l];
    const struct mok_shape *s = &me->shape;
    size_t H = (size_t)s->hidden, I = (size_t)s->intermediate;
    const real *x_rows = memory_of(&me->own, own->layer.x_rows), *hidden = memory_of(&me->own, me->work.hidden);
    size_t wrong = 0, dirty = 0;
    for (int b = 0; b < mok_macrobatch_blocks(s, plan, 0); b++)
        for (size_t i = 0; i < MOK_BLOCK_ROWS; i++) {
            const struct mok_row *row = &plan->rows[(size_t)b * MOK_BLOCK_ROWS + i];
            size_t at = mok_ring_row(s, b) + i;
            if (row->source >= 0) {
                size_t token = (size_t)(all->list[row->source].layers[l].first_token + row->slot / s->top_k);
                wrong += memcmp(x_rows + at * H, own->p->x + token * H, sizeof(real) * H) != 0;
                continue;
            }
#ifdef MOK_CUDA
            for (size_t h = 0; h < H; h++) dirty += !(host_double(x_rows[at * H + h]) == 0);
            for (size_t c = 0; c < I; c++) dirty += !(host_double(hidden[at * I + c]) == 0);
#else
            (void)hidden, (void)I;
#endif
        }
    if (wrong) scene_fail("x rows", "%zu rows of rank %d of %d are not their tokens", wrong, plan->rank, s->ranks);
    if (dirty) scene_fail("padding", "%zu elements of rank %d of %d are not 0", dirty, plan->rank, s->ranks);
}

static inline void check_unwritten(const struct memory *m, const char *what, const void *device, size_t skip,
                                   size_t bytes) {
    const unsigned char *at = memory_of(m, device);
    if (bytes > skip && !is_poison(at + skip, bytes - skip)) scene_fail(what, "was written");
}

static inline void check_kept(const struct memory *m, const char *what, const void *device, const void *host,
                              size_t bytes) {
    if (memcmp(memory_of(m, device), host, bytes) != 0) scene_fail(what, "an input was written");
}

// Symmetric memory: inputs as they were, slots only of routes.
static inline void check_symmetric(const struct place *me, int l) {
    const struct memory *m = &me->symmetric;
    const struct own_layer *own = &me->layers[l];
    const struct problem *p = own->p;
    size_t N = (size_t)own->tokens, first = (size_t)own->first_token, H = (size_t)p->H, K = (size_t)p->K;
    size_t most = (size_t)me->shape.max_tokens, slot = sizeof(real) * H;
    memory_check_gaps(m, "symmetric memory");
    check_kept(m, "x", own->x, p->x + first * H, N * slot);
    check_kept(m, "ids", own->ids, p->ids + first * K, sizeof(int32_t) * N * K);
    check_kept(m, "gates", own->gates, p->gates + first * K, sizeof(accum) * N * K);
    check_unwritten(m, "x behind the tokens", own->x, N * slot, most * slot);
    check_unwritten(m, "dy", me->dy, 0, most * slot);
    check_unwritten(m, "d_gates", me->d_gates, 0, sizeof(accum) * most * K);
    check_unwritten(m, "slots behind the tokens", me->slots, N * K * slot, most * K * slot);
    for (size_t i = 0; i < N * K; i++)
        if (p->ids[first * K + i] < 0) check_unwritten(m, "a slot of id -1", me->slots, i * slot, (i + 1) * slot);
}

// What is the backward pass's alone, and y behind the tokens. Rows of the shared expert there are nobody's.
static inline void check_own(const struct place *me, int l) {
    const struct memory *m = &me->own;
    const struct mok_shape *s = &me->shape;
    size_t R = (size_t)s->ring_rows, H = (size_t)s->hidden, I = (size_t)s->intermediate, S = (size_t)s->shared;
    size_t N = (size_t)me->layers[l].tokens, most = (size_t)s->max_tokens;
    memory_check_gaps(m, "own memory");
    check_unwritten(m, "dy_rows", me->work.dy_rows, 0, sizeof(real) * R * H);
    check_unwritten(m, "d_gate_up", me->work.d_gate_up, 0, sizeof(real) * R * 2 * I);
    check_unwritten(m, "partials", me->work.partials, 0,
                    sizeof(accum) * (size_t)mok_ceil(s->intermediate, MOK_PARTIAL_COLUMNS) * R);
    check_unwritten(m, "shared_d_gate_up", me->work.shared_d_gate_up, 0, sizeof(real) * most * 2 * S);
    check_unwritten(m, "y behind the tokens", me->y, sizeof(real) * N * H, sizeof(real) * most * H);
}

// After a call that began with poison everywhere.
static inline void ranks_check(struct ranks *all, int l) {
    for (int r = 0; r < all->count; r++) {
        struct place *me = &all->list[r];
        struct mok_plan plan;
        memory_read(&me->symmetric);
        memory_read(&me->own);
        mok_plan_read(&plan, &me->layers[l].plan, &me->shape);
        check_symmetric(me, l);
        check_own(me, l);
        check_twins(me, &plan);
        check_rows(all, me, l, &plan);
        free(plan.rows);
    }
}

// The rows of macrobatch 0 without padding, of a kept array [ring_rows, columns]. ranks_check has read the memory.
static inline void kept_against_record(const char *output, const struct place *me, const struct mok_plan *plan,
                                       const real *device, int columns, struct tolerance t) {
    const struct mok_shape *s = &me->shape;
    const real *ring = memory_of(&me->own, device);
    size_t width = (size_t)columns, count = 0;
    int blocks = mok_macrobatch_blocks(s, plan, 0);
    real *rows = malloc(sizeof *rows * ((size_t)blocks * MOK_BLOCK_ROWS * width + 1));
    for (int b = 0; b < blocks; b++) {
        size_t here = (size_t)mok_block_rows(plan, b);
        memcpy(rows + count * width, ring + mok_ring_row(s, b) * width, sizeof *rows * here * width);
        count += here;
    }
    against_record(output, rows, count * width, width, t);
    free(rows);
}

// ---- the same layer by separate operations ----

static inline real *poisoned_reals(size_t n) {
    real *values = device_alloc(sizeof(real) * n);
    poison_device(values, sizeof(real) * n);
    return values;
}

// One gated unit for E experts, row by row in the order of offsets.
static inline void separate_experts(real *out, real *hidden, real *gate_up, const real *rows, const real *w13,
                                    const real *w2, const int *offsets, int E, const accum *gates,
                                    const int *slot_of_row, int count, int H, int I) {
    grouped_matmul_nt(gate_up, rows, w13, offsets, E, 2 * I, H);
    swiglu_forward(hidden, gate_up, gates, slot_of_row, count, I);
    grouped_matmul_nn(out, hidden, w2, offsets, E, H, I);
}

// y [tokens, H] host
static inline void separate_forward(const struct problem *p, enum grouped_core core, real *y) {
    size_t N = (size_t)p->tokens, H = (size_t)p->H, I = (size_t)p->I, S = (size_t)p->S, K = (size_t)p->K, slots = N * K;
    int32_t *ids = device_alloc(sizeof *ids * slots);
    accum *gates = device_alloc(sizeof *gates * slots);
    int *offsets = device_alloc(sizeof(int) * ((size_t)p->E + 1)), *slot_of_row = device_alloc(sizeof(int) * slots),
        *row_of_slot = device_alloc(sizeof(int) * slots), *host = malloc(sizeof(int) * ((size_t)p->E + 1));
    real *x = device_alloc(sizeof(real) * N * H), *rows = poisoned_reals(slots * H), *out = poisoned_reals(slots * H);
    real *gate_up = poisoned_reals(slots * 2 * I), *hidden = poisoned_reals(slots * I), *sum = poisoned_reals(N * H);
    real *shared_gate_up = poisoned_reals(N * 2 * S), *shared_hidden = poisoned_reals(N * S),
         *shared_out = poisoned_reals(N * H);
    device_copy_in(x, p->x, sizeof(real) * N * H);
    device_copy_in(ids, p->ids, sizeof *ids * slots);
    device_copy_in(gates, p->gates, sizeof *gates * slots);
    grouped_matmul_choose(core);
    moe_place(offsets, slot_of_row, row_of_slot, ids, NULL, p->tokens, p->K, p->E);
    moe_scatter(rows, x, row_of_slot, p->tokens, p->K, p->H);
    device_copy_out(host, offsets, sizeof(int) * ((size_t)p->E + 1));
    separate_experts(out, hidden, gate_up, rows, p->w13, p->w2, host, p->E, gates, slot_of_row, host[p->E], p->H, p->I);
    int all[] = {0, p->tokens};
    if (S)
        separate_experts(shared_out, shared_hidden, shared_gate_up, x, p->shared_w13, p->shared_w2, all, 1, NULL, NULL,
                         p->tokens, p->H, p->S);
    moe_combine(sum, out, row_of_slot, S ? shared_out : NULL, p->residual, p->tokens, p->K, p->H);
    device_copy_out(y, sum, sizeof(real) * N * H);
    void *used[] = {ids,     gates,  offsets, slot_of_row,    row_of_slot,   x,         rows, out,
                    gate_up, hidden, sum,     shared_gate_up, shared_hidden, shared_out};
    for (size_t i = 0; i < sizeof used / sizeof *used; i++) device_free(used[i]);
    free(host);
}

// With the megakernel's own core bit for bit; else two times the same roundings of sums in another order.
static inline void against_separate(const struct problem *p, const real *wanted) {
    enum grouped_core core = grouped_matmul_available(GROUPED_OWN) ? GROUPED_OWN : GROUPED_CUBLASLT;
    real *y = result_open(p);
    separate_forward(p, core, y);
    if (core == GROUPED_OWN) {
        same_y("by separate operations", p, y, wanted);
    } else {
        size_t n = (size_t)p->tokens * (size_t)p->H;
        double *found = malloc(sizeof *found * (n + 1));
        float *mok = malloc(sizeof *mok * (n + 1));
        for (size_t i = 0; i < n; i++) found[i] = host_double(y[i]), mok[i] = (float)host_double(wanted[i]);
        compare_floats("y by separate operations", found, mok, n, (size_t)p->H, FORWARD);
        free(found);
        free(mok);
    }
    free(y);
}

#endif

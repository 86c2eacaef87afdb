// Rows beyond 2^32 elements: offsets that are computed in 32 bits overflow (Transformer Engine issue 2908, torchtitan issue
// 2430). Buffers of many gigabytes are reserved, and only the pages of one row of each are ever touched.
#include "tests/mok_ranks.h"

#include <sys/mman.h>

#include "kernels/cpu/mok_tasks.h"

// The last expert's only row stands in the last row block and belongs to the last token: element 2^32 of every buffer of
// rows, of slots, inputs and weights comes before it.
enum { H = 1 << 20, I = 1, FAR_BLOCK = 33, EXPERTS = 4201, LAST = EXPERTS - 1, TOKENS = 4200, TOKEN = TOKENS - 1 };

// Zeros. Skips the test where so much may not even be reserved.
static void *reserve(size_t bytes) {
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) skip();
    return memory;
}

static real *reserve_rows(size_t rows) { return reserve(sizeof(real) * rows * H); }

// A few elements of a row of H, the first and the last among them.
static void fill_some(real *row, uint64_t *seed) {
    static const int columns[] = {0, 1, 255, 256, 70000, H - 1};
    for (size_t i = 0; i < sizeof columns / sizeof *columns; i++) row[columns[i]] = (real)test_normal(seed);
}

// All rows but the last are of expert 0, which nobody computes here.
static struct mok_plan far_plan(accum gate) {
    size_t rows = (FAR_BLOCK + 1) * MOK_BLOCK_ROWS;
    struct mok_plan p = {.experts = EXPERTS, .tokens = TOKENS, .blocks = FAR_BLOCK + 1};
    p.expert_block = calloc(EXPERTS + 1, sizeof(int));
    p.expert_rows = calloc(EXPERTS, sizeof(int));
    p.block_expert = calloc(FAR_BLOCK + 1, sizeof(int));
    p.walk = calloc(FAR_BLOCK + 1, sizeof(int));
    p.rows = malloc(sizeof *p.rows * rows);
    for (int e = 1; e <= EXPERTS; e++) p.expert_block[e] = e <= LAST ? FAR_BLOCK : FAR_BLOCK + 1;
    p.expert_rows[0] = FAR_BLOCK * MOK_BLOCK_ROWS;
    p.expert_rows[LAST] = 1;
    p.block_expert[FAR_BLOCK] = LAST;
    for (int b = 0; b <= FAR_BLOCK; b++) p.walk[b] = b;
    for (size_t row = 0; row < rows; row++) p.rows[row] = (struct mok_row){-1, 0, 0};
    p.rows[(size_t)FAR_BLOCK * MOK_BLOCK_ROWS] = (struct mok_row){0, TOKEN, gate};
    return p;
}

static void free_plan(struct mok_plan *p) {
    void *all[] = {p->expert_block, p->expert_rows, p->block_expert, p->walk, p->rows};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

// What a pass does for the last expert.
static void run_last_expert(const struct mok_job *j) {
    for (int i = 0; i < mok_move_total(j->s, j->p); i++) {
        struct mok_move move = mok_move_at(j->s, j->p, j->pass, i);
        if (move.block == FAR_BLOCK) mok_do_pull(j, move);
    }
    for (int i = 0; i < mok_task_total(j->s, j->p, j->pass); i++) {
        struct mok_task task = mok_task_at(j->s, j->p, j->pass, i);
        if (task.expert == LAST) mok_do_task(j, task);
    }
    for (int i = 0; i < mok_move_total(j->s, j->p); i++) {
        struct mok_move move = mok_move_at(j->s, j->p, j->pass, i);
        if (move.block == FAR_BLOCK) mok_do_push(j, move);
    }
}

static void rows_and_experts_beyond_the_range_of_an_int(void **state) {
    (void)state;
    const size_t ring = (FAR_BLOCK + 1) * MOK_BLOCK_ROWS, at = (size_t)TOKEN * H, expert = (size_t)LAST * I * H;
    const accum gate = (accum)0.7;
    uint64_t seed = 31;
    struct mok_shape s = {.ranks = 1, .experts = EXPERTS, .top_k = 1, .hidden = H, .intermediate = I};
    s.max_tokens = TOKENS, s.minibatch_rows = MOK_BLOCK_ROWS, s.ring_rows = (int)ring, s.move_rows = MOK_BLOCK_ROWS;
    real *x = reserve_rows(TOKENS), *dy = reserve_rows(TOKENS);
    real *w13 = reserve_rows((size_t)EXPERTS * 2 * I), *w2 = reserve_rows((size_t)EXPERTS * I);
    accum *d_w13 = reserve(sizeof(accum) * EXPERTS * 2 * I * H), *d_w2 = reserve(sizeof(accum) * EXPERTS * I * H);
    fill_some(x + at, &seed);
    fill_some(dy + at, &seed);
    fill_some(w13 + 2 * expert, &seed);
    fill_some(w13 + 2 * expert + H, &seed);
    fill_some(w2 + expert, &seed);
    struct mok_layer layer = {.x = x,
                              .dy = dy,
                              .slots = reserve_rows(TOKENS),
                              .d_gates = calloc(TOKENS, sizeof(accum)),
                              .w13 = w13,
                              .w2 = w2,
                              .d_w13 = d_w13,
                              .d_w2 = d_w2,
                              .first_use = true,
                              .x_rows = reserve_rows(ring),
                              .gate_up = calloc(ring * 2 * I, sizeof(real))};
    struct mok_workspace work = {.hidden = calloc(ring * I, sizeof(real)),
                                 .out = reserve_rows(ring),
                                 .dy_rows = reserve_rows(ring),
                                 .d_gate_up = calloc(ring * 2 * I, sizeof(real)),
                                 .partials = calloc(ring, sizeof(accum))};
    struct mok_plan plan = far_plan(gate);
    char *base[] = {(char *)x};
    struct mok_group group = {.ranks = 1, .base = base};
    double *y = calloc(H, 8), *dx = calloc(H, 8), *of_w13 = calloc(2 * H, 8), *of_w2 = calloc(H, 8);
    double d_gate = exact_ffn(y, dx, of_w13, of_w2, x + at, dy + at, w13 + 2 * expert, w2 + expert, gate, H, I);

    // Single numbers of six FP32 products each, which may cancel. Another row would be off by 1.
    const double tolerance = 2e-5;
    run_last_expert(&(struct mok_job){&s, &plan, &group, &layer, &work, MOK_FORWARD});
    test_assert_close("y", layer.slots + at, y, H, tolerance);
    run_last_expert(&(struct mok_job){&s, &plan, &group, &layer, &work, MOK_BACKWARD});
    test_assert_close("dx", layer.slots + at, dx, H, tolerance);
    test_assert_close("d gate", layer.d_gates + TOKEN, &d_gate, 1, tolerance);
    test_assert_close("d W gate", d_w13 + 2 * expert, of_w13, H, tolerance);
    test_assert_close("d W up", d_w13 + 2 * expert + H, of_w13 + H, H, tolerance);
    test_assert_close("d W down", d_w2 + expert, of_w2, H, tolerance);

    free_plan(&plan);
    void *heap[] = {y, dx, of_w13, of_w2, layer.d_gates, layer.gate_up, work.hidden, work.d_gate_up, work.partials};
    for (size_t i = 0; i < sizeof heap / sizeof *heap; i++) free(heap[i]);
    const struct {
        void *memory;
        size_t rows;
    } maps[] = {{x, TOKENS},          {dy, TOKENS},    {layer.slots, TOKENS}, {w13, 2 * EXPERTS}, {w2, EXPERTS},
                {d_w13, 2 * EXPERTS}, {d_w2, EXPERTS}, {layer.x_rows, ring},  {work.out, ring},   {work.dy_rows, ring}};
    for (size_t i = 0; i < sizeof maps / sizeof *maps; i++)
        assert_int_equal(munmap(maps[i].memory, sizeof(real) * maps[i].rows * H), 0);
}

// The all-to-all layer's rows are gathered from, and added up, wherever they are.
static void rows_are_gathered_and_combined_beyond_the_range_of_an_int(void **state) {
    (void)state;
    real *x = reserve_rows(TOKENS), *rows = malloc(sizeof(real) * H), *y = malloc(sizeof(real) * H);
    uint64_t seed = 32;
    int far = TOKEN;
    fill_some(x + (size_t)TOKEN * H, &seed);
    moe_gather(rows, x, &far, 1, H);
    assert_memory_equal(rows, x + (size_t)TOKEN * H, sizeof(real) * H);
    moe_combine(y, x, &far, NULL, NULL, 1, 1, H);
    assert_memory_equal(y, rows, sizeof(real) * H);
    munmap(x, sizeof(real) * TOKENS * H);
    free(rows);
    free(y);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_and_experts_beyond_the_range_of_an_int),
        cmocka_unit_test(rows_are_gathered_and_combined_beyond_the_range_of_an_int),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

// Stands in for a GPU in tests of the tests: every operation of the CPU build, linked with --wrap, rounds its `real`
// results to BF16 as the GPU's does. The sums inside are the CPU's, and what attention rounds inside stays as it is.
// The megakernel's widths are those that its tiles can have on a GPU.
//
// MOK_MISTAKE=NAME in the environment makes one mistake, which the comparison must find: a term is left out (router,
// balance, residual, shared, rotation, gate, norm), a factor is wrong (target), or the program ends (end). Of the
// megakernel: two rows change places (rows), a gate is forgotten (weight), a row's bits depend on where it is (place),
// a column too many is written (behind), the plan's walk is another one (walk). Of its backward pass: a gate's gradient is
// taken behind the gate (weighted), a weight's gradient is stored where it must be added (stored) or is without the last
// row (short), nothing is multiplied again for a replay (replay).
#include <stdlib.h>
#include <string.h>

#include "kernels/comm.h"
#include "kernels/cpu/gemm.h"
#include "kernels/cpu/mok_tasks.h"
#include "kernels/cpu/swiglu.h"
#include "kernels/fail.h"
#include "kernels/kernels.h"
#include "kernels/mok.h"
#include "tests/record.h"

static bool mistake(const char *name) {
    const char *asked = getenv("MOK_MISTAKE");
    return asked && strcmp(asked, name) == 0;
}

static void round_rows(real *x, size_t rows, size_t columns, size_t stride) {
    for (size_t r = 0; r < rows; r++)
        for (size_t c = 0; c < columns; c++) x[r * stride + c] = (real)round_to_bf16((float)x[r * stride + c]);
}
static void round_all(real *x, int rows, size_t columns) { round_rows(x, (size_t)rows, columns, columns); }

// Operations that call others must not have those rounded. Workers of the megakernel count for themselves.
static _Thread_local int depth;

// Declares the operation behind __wrap_NAME and begins its wrapper.
#define WRAP(name, ...)                                                                                                \
    void __real_##name(__VA_ARGS__);                                                                                   \
    void __wrap_##name(__VA_ARGS__);                                                                                   \
    void __wrap_##name(__VA_ARGS__)
// The same for one that returns a value.
#define WRAP_VALUE(type, name, ...)                                                                                    \
    type __wrap_##name(__VA_ARGS__);                                                                                   \
    type __wrap_##name(__VA_ARGS__)
#define REAL(name, ...) (depth++, __real_##name(__VA_ARGS__), depth--)

WRAP_VALUE(int, mok_column_unit, void) { return 8; }
WRAP_VALUE(int, grouped_matmul_unit, enum grouped_core core) { return core == GROUPED_OWN ? 8 : 1; }

WRAP(device_real_from_float, real *device, const float *host, size_t n) {
    REAL(device_real_from_float, device, host, n);
    round_rows(device, 1, n, n);
}

WRAP(matmul_nt, real *y, const real *x, const real *w, int M, int N, int K, const real *add) {
    REAL(matmul_nt, y, x, w, M, N, K, mistake("residual") && add != y ? NULL : add);
    if (depth == 0) round_all(y, M, (size_t)N);
}
WRAP(matmul_nn, real *y, const real *x, const real *w, int M, int N, int K, const real *add) {
    REAL(matmul_nn, y, x, w, M, N, K, add);
    if (depth == 0) round_all(y, M, (size_t)N);
}

static void round_group(real *y, const int *offsets, int E, int N) {
    round_all(y + (size_t)offsets[0] * (size_t)N, offsets[E] - offsets[0], (size_t)N);
}
WRAP(grouped_matmul_nt, real *y, const real *x, const real *w, const int *offsets, int E, int N, int K) {
    REAL(grouped_matmul_nt, y, x, w, offsets, E, N, K);
    round_group(y, offsets, E, N);
}
WRAP(grouped_matmul_nn, real *y, const real *x, const real *w, const int *offsets, int E, int N, int K) {
    REAL(grouped_matmul_nn, y, x, w, offsets, E, N, K);
    round_group(y, offsets, E, N);
}

WRAP(rmsnorm_forward, real *y, int y_stride, accum *rstd, const real *x, int x_stride, const real *w, int N, int C,
     double eps) {
    REAL(rmsnorm_forward, y, y_stride, rstd, x, x_stride, w, N, C, eps);
    round_rows(y, (size_t)N, (size_t)C, (size_t)y_stride);
}
WRAP(rmsnorm_backward, real *dx, int dx_stride, bool add, accum *dw, const real *dy, int dy_stride, const real *x,
     int x_stride, const real *w, const accum *rstd, int N, int C) {
    REAL(rmsnorm_backward, dx, dx_stride, add && !mistake("norm"), dw, dy, dy_stride, x, x_stride, w, rstd, N, C);
    round_rows(dx, (size_t)N, (size_t)C, (size_t)dx_stride);
}

WRAP(rope_rotate, real *x, int row_stride, int heads, int head_stride, int first, int rope_dim, const accum *angles,
     int N, int T, bool inverse) {
    if (inverse && mistake("rotation")) return;
    REAL(rope_rotate, x, row_stride, heads, head_stride, first, rope_dim, angles, N, T, inverse);
    for (int h = 0; h < heads; h++)
        round_rows(x + (size_t)h * (size_t)head_stride + first, (size_t)N, (size_t)rope_dim, (size_t)row_stride);
}

WRAP(attention_forward, real *o, accum *lse, const real *q, const real *kv, const real *kr, int kr_stride,
     struct attention_shape s) {
    REAL(attention_forward, o, lse, q, kv, kr, kr_stride, s);
    round_all(o, s.batch * s.length, (size_t)(s.heads * s.value_dim));
}
WRAP(attention_backward, real *dq, real *dkv, real *dkr, int dkr_stride, const real *d_o, const real *q, const real *kv,
     const real *kr, int kr_stride, const real *o, const accum *lse, struct attention_shape s) {
    REAL(attention_backward, dq, dkv, dkr, dkr_stride, d_o, q, kv, kr, kr_stride, o, lse, s);
    int N = s.batch * s.length;
    round_all(dq, N, (size_t)(s.heads * (s.nope_dim + s.rope_dim)));
    round_all(dkv, N, (size_t)(s.heads * (s.nope_dim + s.value_dim)));
    round_rows(dkr, (size_t)N, (size_t)s.rope_dim, (size_t)dkr_stride);
}

WRAP(swiglu_forward, real *hidden, const real *gate_up, const accum *gates, const int *slot_of_row, int rows, int I) {
    REAL(swiglu_forward, hidden, gate_up, mistake("gate") ? NULL : gates, slot_of_row, rows, I);
    round_all(hidden, rows, (size_t)I);
}
WRAP(swiglu_backward, real *d_gate_up, real *hidden, accum *d_gates, const real *d_hidden, const real *gate_up,
     const accum *gates, const int *slot_of_row, int rows, int I) {
    REAL(swiglu_backward, d_gate_up, hidden, d_gates, d_hidden, gate_up, gates, slot_of_row, rows, I);
    round_all(d_gate_up, rows, 2 * (size_t)I);
    round_all(hidden, rows, (size_t)I);
}

WRAP(router_score, accum *scores, const real *x, const real *w, int N, int E, int H) {
    REAL(router_score, scores, x, w, N, E, H);
}
WRAP(router_backward, real *dx, accum *dw, accum *dz, const accum *d_gates, const accum *scores, const int32_t *ids,
     const accum *f, double balance_scale, const real *x, const real *w, int B, int T, int H,
     struct router_shape shape) {
    if (mistake("router")) return;
    REAL(router_backward, dx, dw, dz, d_gates, scores, ids, f, mistake("balance") ? 0 : balance_scale, x, w, B, T, H,
         shape);
    round_all(dx, B * T, (size_t)H);
}

WRAP(moe_combine, real *y, const real *rows, const int *row_of_slot, const real *shared, const real *residual, int N,
     int K, int H) {
    REAL(moe_combine, y, rows, row_of_slot, mistake("shared") ? NULL : shared, residual, N, K, H);
    round_all(y, N, (size_t)H);
}
WRAP(moe_sum_slots, real *y, const real *slots, const int32_t *ids, const real *shared, const real *residual, int N,
     int K, int H) {
    REAL(moe_sum_slots, y, slots, ids, mistake("shared") ? NULL : shared, residual, N, K, H);
    round_all(y, N, (size_t)H);
}

// ---- the megakernel ----

// The buffers and weights of a task: from the first row of its block on, all columns.
struct part {
    real *gate_up, *hidden, *d_gate_up, *out;
    const real *dy, *w2;
    int rows, I, H;
    size_t ring_row;           // of its first row
    const struct mok_row *row; // NULL for the shared expert
};

static struct part part_of(const struct mok_job *j, struct mok_task task) {
    const struct mok_layer *l = j->layer;
    const struct mok_workspace *w = j->w;
    bool shared = task.expert < 0;
    size_t first = (size_t)task.block * MOK_BLOCK_ROWS, row = shared ? first : mok_ring_row(j->s, task.block);
    size_t H = (size_t)j->s->hidden, I = (size_t)(shared ? j->s->shared : j->s->intermediate);
    struct part p = {.I = (int)I, .H = (int)H, .ring_row = row};
    p.rows = shared ? mok_min(MOK_BLOCK_ROWS, j->p->tokens - (int)first) : mok_block_rows(j->p, task.block);
    p.gate_up = (shared ? l->shared_gate_up : l->gate_up) + row * 2 * I;
    p.hidden = (shared ? w->shared_hidden : w->hidden) + row * I;
    p.d_gate_up = (shared ? w->shared_d_gate_up : w->d_gate_up) + row * 2 * I;
    p.out = (shared ? w->shared_out : w->out) + row * H;
    p.dy = (shared ? l->dy : w->dy_rows) + row * H;
    p.w2 = shared ? l->shared_w2 : l->w2 + (size_t)task.expert * I * H;
    p.row = shared ? NULL : j->p->rows + first;
    return p;
}

// Gate and up are rounded before hidden is computed of them.
static void round_gate_up(struct part p, int column, bool forward) {
    size_t I = (size_t)p.I, rows = (size_t)p.rows;
    int columns = mok_min(MOK_GATE_UP_COLUMNS, p.I - column);
    real *gate = p.gate_up + column, *hidden = p.hidden + column;
    round_rows(gate, rows, (size_t)columns, 2 * I);
    round_rows(gate + I, rows, (size_t)columns, 2 * I);
    for (size_t i = 0; i < rows && forward; i++)
        swiglu_row_forward(hidden + i * I, gate + i * 2 * I, gate + i * 2 * I + I,
                           p.row && !mistake("weight") ? p.row[i].gate : 1, columns);
    if (forward) round_rows(hidden, rows, (size_t)columns, I);
}

// d hidden, of which nothing is left, is rounded too: computed once more for it.
static void round_d_hidden(const struct mok_job *j, struct part p, int tile) {
    enum { COLUMNS = MOK_PARTIAL_COLUMNS };
    static _Thread_local real d_hidden[MOK_BLOCK_ROWS * COLUMNS];
    size_t I = (size_t)p.I, H = (size_t)p.H, rows = (size_t)p.rows;
    int first = tile * MOK_D_HIDDEN_COLUMNS, end = mok_min(first + MOK_D_HIDDEN_COLUMNS, p.I);
    for (int column = first; column < end; column += COLUMNS) {
        int columns = mok_min(COLUMNS, end - column);
        real *d_gate = p.d_gate_up + column, *hidden = p.hidden + column;
        struct view dy = {p.dy, H, 1}, w2 = {p.w2 + (size_t)column * H, 1, H};
        gemm_serial(&(struct gemm){p.rows, columns, p.H, dy, w2, d_hidden, COLUMNS, NULL, 0});
        round_rows(d_hidden, rows, (size_t)columns, COLUMNS);
        for (size_t i = 0; i < rows; i++) {
            const real *gate = p.gate_up + i * 2 * I + column, *d = d_hidden + i * COLUMNS;
            real weight = p.row ? p.row[i].gate : 1;
            accum part = swiglu_row_backward(d_gate + i * 2 * I, d_gate + i * 2 * I + I, hidden + i * I, d, gate,
                                             gate + I, weight, columns);
            if (mistake("weighted")) part *= weight;
            if (p.row) j->w->partials[(size_t)(column / COLUMNS) * (size_t)j->s->ring_rows + p.ring_row + i] = part;
        }
        round_rows(d_gate, rows, (size_t)columns, 2 * I);
        round_rows(d_gate + I, rows, (size_t)columns, 2 * I);
        round_rows(hidden, rows, (size_t)columns, I);
    }
}

static void round_out(struct part p, int column) {
    int columns = mok_min(MOK_OUT_COLUMNS, p.H - column);
    round_rows(p.out + column, (size_t)p.rows, (size_t)columns, (size_t)p.H);
    if (mistake("place") && p.row && p.ring_row == 2 * MOK_BLOCK_ROWS) p.out[column] *= 1.0078125f;
    if (mistake("behind") && !p.row && column + columns == p.H) p.out[(size_t)p.rows * (size_t)p.H] = 0;
}

void __real_mok_do_task(const struct mok_job *j, struct mok_task task);

// A tile of a weight's gradient: as it is but for mistakes.
static void do_d_weight(const struct mok_job *j, struct mok_task task) {
    struct mok_layer layer = *j->layer;
    struct mok_plan plan = *j->p;
    struct mok_job job = *j;
    size_t experts = (size_t)plan.experts;
    int *rows = malloc(sizeof *rows * (experts + 1));
    if (!rows) abort();
    memcpy(rows, plan.expert_rows, sizeof *rows * experts);
    if (mistake("short") && task.expert >= 0 && rows[task.expert] > 1) rows[task.expert]--;
    plan.expert_rows = rows;
    layer.first_use = layer.first_use || mistake("stored");
    job.p = &plan;
    job.layer = &layer;
    REAL(mok_do_task, &job, task);
    free(rows);
}

WRAP(mok_do_task, const struct mok_job *j, struct mok_task task) {
    bool forward = j->pass == MOK_FORWARD;
    switch (task.kind) {
    case MOK_TASK_GATE_UP:
    case MOK_TASK_SHARED_GATE_UP: {
        if (!forward && mistake("replay")) return;
        REAL(mok_do_task, j, task);
        struct part p = part_of(j, task);
        round_gate_up(p, task.tile * MOK_GATE_UP_COLUMNS, forward);
        if (mistake("rows") && forward && p.row && p.rows > 1 && task.tile == 0)
            memcpy(p.hidden, p.hidden + p.I, sizeof(real) * (size_t)mok_min(MOK_GATE_UP_COLUMNS, p.I));
        break;
    }
    case MOK_TASK_D_HIDDEN:
    case MOK_TASK_SHARED_D_HIDDEN:
        round_d_hidden(j, part_of(j, task), task.tile);
        break;
    case MOK_TASK_DOWN:
    case MOK_TASK_SHARED_DOWN:
    case MOK_TASK_D_X:
    case MOK_TASK_SHARED_D_X:
        REAL(mok_do_task, j, task);
        round_out(part_of(j, task), task.tile * MOK_OUT_COLUMNS);
        break;
    default:
        do_d_weight(j, task);
    }
}

WRAP(mok_plan_make, struct mok_plan *p, const struct mok_shape *s, const struct mok_group *g, const int32_t *ids,
     const accum *gates) {
    REAL(mok_plan_make, p, s, g, ids, gates);
    if (mistake("moved") && g->rank == 1 && p->expert_rows[0] > 1) p->rows[0].slot = p->rows[1].slot;
    if (!mistake("walk") || p->blocks < 2 || mok_phase_blocks(s) < 2)
        return; // in one phase, so that no wait is endless
    int first = p->walk[0];
    p->walk[0] = p->walk[1];
    p->walk[1] = first;
}

// ---- loss and optimizer ----

WRAP(cross_entropy, real *logits, accum *loss, const int32_t *targets, int rows, int V, bool want_gradient,
     double scale) {
    if (mistake("end")) fail_internal("cross_entropy", "found the mistake that was asked for");
    REAL(cross_entropy, logits, loss, targets, rows, V, want_gradient, mistake("target") ? 1.05 * scale : scale);
    if (want_gradient) round_all(logits, rows, (size_t)V);
}

WRAP(comm_all_gather, struct comm *c, real *values, const size_t *offsets) {
    REAL(comm_all_gather, c, values, offsets);
    if (mistake("replica") && comm_rank(c) == 1) values[offsets[comm_size(c)] - 1] += 1;
}

WRAP(router_update_bias, accum *bias, const int64_t *counts, int E, double rate) {
    if (mistake("bias") && comm_rank(comm_world()) == 1) return;
    REAL(router_update_bias, bias, counts, E, rate);
}

WRAP(adamw_update, accum *master, accum *m, accum *v, real *weight, const accum *grad, size_t n, struct adamw a) {
    REAL(adamw_update, master, m, v, weight, grad, n, a);
    round_rows(weight, 1, n, n);
}

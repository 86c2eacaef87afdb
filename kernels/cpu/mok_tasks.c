// The tiles and the transfers. A tile stops at the last row that is no padding: what would be multiplied there is zero.
#include "kernels/cpu/mok_tasks.h"

#include <string.h>

#include "kernels/cpu/gemm.h"
#include "kernels/cpu/swiglu.h"

static struct view plain(const real *data, size_t columns) { return (struct view){data, columns, 1}; }
static struct view transposed(const real *data, size_t columns) { return (struct view){data, 1, columns}; }

// c [M, N] = a [M, K] b [K, N] + init, all rows of c and init c_row apart; init NULL: zero.
static void multiply(real *c, size_t c_row, struct view a, struct view b, int M, int N, int K, const real *init) {
    gemm_serial(&(struct gemm){M, N, K, a, b, c, c_row, init, c_row});
}

// The rows that a tile works on: of one expert in the ring, or own tokens for the shared expert.
struct rows {
    size_t first; // in the ring, or the first token
    int count;
    int I;                     // inner width
    const struct mok_row *row; // [count], NULL for the shared expert
};

static struct rows rows_of(const struct mok_job *j, struct mok_task task) {
    if (task.expert < 0) {
        int first = task.block * MOK_BLOCK_ROWS;
        return (struct rows){(size_t)first, mok_min(MOK_BLOCK_ROWS, j->p->tokens - first), j->s->shared, NULL};
    }
    return (struct rows){mok_ring_row(j->s, task.block), mok_block_rows(j->p, task.block), j->s->intermediate,
                         j->p->rows + (size_t)task.block * MOK_BLOCK_ROWS};
}

// The buffers and weights of a routed expert or of the shared one.
struct ffn {
    const real *x, *dy;     // [rows, H]
    real *gate_up, *hidden; // [rows, 2I], [rows, I]
    real *d_gate_up, *out;  // [rows, 2I], [rows, H]
    const real *w13, *w2;   // [2I, H], [I, H]
    accum *d_w13, *d_w2;
};

static struct ffn ffn_of(const struct mok_job *j, int expert) {
    const struct mok_layer *l = j->layer;
    const struct mok_workspace *w = j->w;
    if (expert < 0)
        return (struct ffn){l->x,          l->dy,         l->shared_gate_up, w->shared_hidden, w->shared_d_gate_up,
                            w->shared_out, l->shared_w13, l->shared_w2,      l->d_shared_w13,  l->d_shared_w2};
    size_t size = (size_t)expert * (size_t)j->s->intermediate * (size_t)j->s->hidden;
    return (struct ffn){l->x_rows,
                        w->dy_rows,
                        l->gate_up,
                        w->hidden,
                        w->d_gate_up,
                        w->out,
                        l->w13 + 2 * size,
                        l->w2 + size,
                        l->d_w13 ? l->d_w13 + 2 * size : NULL,
                        l->d_w2 ? l->d_w2 + size : NULL};
}

// gate and up of some columns, and in forward hidden = gate weight * silu(gate) * up.
static void do_gate_up(const struct mok_job *j, struct mok_task task) {
    struct rows r = rows_of(j, task);
    struct ffn f = ffn_of(j, task.expert);
    int H = j->s->hidden, column = task.tile * MOK_GATE_UP_COLUMNS,
        columns = mok_min(MOK_GATE_UP_COLUMNS, r.I - column);
    size_t width = 2 * (size_t)r.I;
    const real *x = f.x + r.first * (size_t)H;
    real *gate = f.gate_up + r.first * width + column, *up = gate + r.I;
    const real *w1 = f.w13 + (size_t)column * (size_t)H, *w3 = w1 + (size_t)r.I * (size_t)H;
    multiply(gate, width, plain(x, (size_t)H), transposed(w1, (size_t)H), r.count, columns, H, NULL);
    multiply(up, width, plain(x, (size_t)H), transposed(w3, (size_t)H), r.count, columns, H, NULL);
    if (j->pass == MOK_BACKWARD) return;
    real *hidden = f.hidden + r.first * (size_t)r.I + column;
    for (int i = 0; i < r.count; i++)
        swiglu_row_forward(hidden + (size_t)i * (size_t)r.I, gate + (size_t)i * width, up + (size_t)i * width,
                           r.row ? r.row[i].gate : 1, columns);
}

// Some columns of a down projection: y = hidden W2, or of dx = d_gate_up W13.
static void do_out(const struct mok_job *j, struct mok_task task, bool backward) {
    struct rows r = rows_of(j, task);
    struct ffn f = ffn_of(j, task.expert);
    int H = j->s->hidden, column = task.tile * MOK_OUT_COLUMNS, columns = mok_min(MOK_OUT_COLUMNS, H - column);
    int K = backward ? 2 * r.I : r.I;
    const real *a = (backward ? f.d_gate_up : f.hidden) + r.first * (size_t)K, *w = backward ? f.w13 : f.w2;
    multiply(f.out + r.first * (size_t)H + column, (size_t)H, plain(a, (size_t)K), plain(w + column, (size_t)H),
             r.count, columns, K, NULL);
}

// Where row r's partial sum of its gate's gradient over chunk c of the columns lies.
static accum *partial_of(const struct mok_job *j, int chunk, size_t row) {
    return j->w->partials + (size_t)chunk * (size_t)j->s->ring_rows + row;
}

// Some columns of d hidden = dy W2^T, and at once through SwiGLU: d gate, d up, hidden for W2's gradient, and the partial
// sums of the gates' gradients.
static void do_d_hidden(const struct mok_job *j, struct mok_task task) {
    static _Thread_local real d_hidden[MOK_BLOCK_ROWS * MOK_D_HIDDEN_COLUMNS];
    struct rows r = rows_of(j, task);
    struct ffn f = ffn_of(j, task.expert);
    int H = j->s->hidden, first = task.tile * MOK_D_HIDDEN_COLUMNS,
        columns = mok_min(MOK_D_HIDDEN_COLUMNS, r.I - first);
    multiply(d_hidden, MOK_D_HIDDEN_COLUMNS, plain(f.dy + r.first * (size_t)H, (size_t)H),
             transposed(f.w2 + (size_t)first * (size_t)H, (size_t)H), r.count, columns, H, NULL);
    for (int i = 0; i < r.count; i++)
        for (int at = 0; at < columns; at += MOK_PARTIAL_COLUMNS) {
            size_t row = r.first + (size_t)i, column = (size_t)(first + at);
            const real *gate = f.gate_up + row * 2 * (size_t)r.I + column;
            real *d_gate = f.d_gate_up + row * 2 * (size_t)r.I + column;
            accum partial = swiglu_row_backward(d_gate, d_gate + r.I, f.hidden + row * (size_t)r.I + column,
                                                d_hidden + (size_t)i * MOK_D_HIDDEN_COLUMNS + at, gate, gate + r.I,
                                                r.row ? r.row[i].gate : 1, mok_min(MOK_PARTIAL_COLUMNS, columns - at));
            if (r.row) *partial_of(j, (first + at) / MOK_PARTIAL_COLUMNS, row) = partial;
        }
}

// A tile of dw [M, H] = or += a^T b over rows that stand together: a [rows, M], b [rows, H].
static void do_d_weight(const struct mok_job *j, int tile, accum *dw, const real *a, const real *b, int rows, int M,
                        bool store) {
    struct mok_corner corner = mok_d_weight_corner(j->s, M, rows, tile);
    int H = j->s->hidden, i = corner.row, column = corner.column;
    accum *out = dw + (size_t)i * (size_t)H + column;
    multiply(out, (size_t)H, transposed(a + i, (size_t)M), plain(b + column, (size_t)H),
             mok_min(MOK_D_WEIGHT_ROWS, M - i), mok_min(MOK_D_WEIGHT_COLUMNS, H - column), rows, store ? NULL : out);
}

// W2's gradient is hidden^T dy, W13's is d_gate_up^T x.
static void do_d_weights(const struct mok_job *j, struct mok_task task, bool w2) {
    struct ffn f = ffn_of(j, task.expert);
    int I = j->s->shared, rows = j->p->tokens;
    size_t first = 0, H = (size_t)j->s->hidden;
    bool store = j->layer->first_use;
    if (task.expert >= 0) {
        struct mok_stretch blocks = mok_expert_stretch(j->s, j->p, task.expert, task.block);
        I = j->s->intermediate;
        rows = mok_stretch_rows(j->p, task.expert, blocks);
        if (rows) {
            first = mok_ring_row(j->s, blocks.first);
            store = store && blocks.first == j->p->expert_block[task.expert];
        }
    }
    if (w2)
        do_d_weight(j, task.tile, f.d_w2, f.hidden + first * (size_t)I, f.dy + first * H, rows, I, store);
    else
        do_d_weight(j, task.tile, f.d_w13, f.d_gate_up + first * 2 * (size_t)I, f.x + first * H, rows, 2 * I, store);
}

void mok_do_task(const struct mok_job *j, struct mok_task task) {
    switch (task.kind) {
    case MOK_TASK_SHARED_GATE_UP:
    case MOK_TASK_GATE_UP:
        do_gate_up(j, task);
        break;
    case MOK_TASK_SHARED_DOWN:
    case MOK_TASK_DOWN:
        do_out(j, task, false);
        break;
    case MOK_TASK_SHARED_D_HIDDEN:
    case MOK_TASK_D_HIDDEN:
        do_d_hidden(j, task);
        break;
    case MOK_TASK_SHARED_D_X:
    case MOK_TASK_D_X:
        do_out(j, task, true);
        break;
    case MOK_TASK_SHARED_D_W2:
    case MOK_TASK_D_W2:
        do_d_weights(j, task, true);
        break;
    default:
        do_d_weights(j, task, false);
    }
}

// ---- movers ----

size_t mok_do_pull(const struct mok_job *j, struct mok_move move) {
    const struct mok_shape *s = j->s;
    const struct mok_row *row = j->p->rows + (size_t)move.block * MOK_BLOCK_ROWS + move.first;
    size_t H = (size_t)s->hidden, to = mok_ring_row(s, move.block) + (size_t)move.first, bytes = H * sizeof(real),
           far = 0;
    bool x = j->pass == MOK_FORWARD || mok_pull_replays(s, j->pass, move.block);
    for (int i = 0; i < s->move_rows && row[i].source >= 0; i++) {
        size_t token = (size_t)(row[i].slot / s->top_k), at = (to + (size_t)i) * H;
        const real *from_x = mok_peer(j->g, row[i].source, j->layer->x);
        if (x) memcpy(j->layer->x_rows + at, from_x + token * H, bytes);
        if (j->pass == MOK_BACKWARD) {
            const real *from_dy = mok_peer(j->g, row[i].source, j->layer->dy);
            memcpy(j->w->dy_rows + at, from_dy + token * H, bytes);
        }
        if (row[i].source != j->g->rank) far += bytes * (x + (j->pass == MOK_BACKWARD));
    }
    return far;
}

size_t mok_do_push(const struct mok_job *j, struct mok_move move) {
    const struct mok_shape *s = j->s;
    const struct mok_row *row = j->p->rows + (size_t)move.block * MOK_BLOCK_ROWS + move.first;
    size_t H = (size_t)s->hidden, from = mok_ring_row(s, move.block) + (size_t)move.first, bytes = H * sizeof(real),
           far = 0;
    for (int i = 0; i < s->move_rows && row[i].source >= 0; i++) {
        real *slots = mok_peer(j->g, row[i].source, j->layer->slots);
        memcpy(slots + (size_t)row[i].slot * H, j->w->out + (from + (size_t)i) * H, bytes);
        if (row[i].source != j->g->rank) far += bytes;
        if (j->pass == MOK_FORWARD) continue;
        accum *d_gates = mok_peer(j->g, row[i].source, j->layer->d_gates), sum = 0;
        for (int chunk = 0; chunk < mok_ceil(s->intermediate, MOK_PARTIAL_COLUMNS); chunk++)
            sum += *partial_of(j, chunk, from + (size_t)i);
        d_gates[row[i].slot] = sum;
    }
    return far;
}

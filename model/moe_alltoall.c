#include "model/moe_alltoall.h"

#include <limits.h>
#include <stdlib.h>

#include "kernels/fail.h"

// ---- memory ----

static void *grow(struct grown *g, size_t bytes) {
    if (bytes > g->bytes) {
        device_free(g->memory);
        g->bytes = bytes + (g->memory ? bytes / 8 : 0);
        g->memory = device_alloc(g->bytes);
    }
    return g->memory;
}

static void *host_alloc(size_t count, size_t size) {
    void *memory = calloc(count, size);
    if (!memory) fail_internal("expert parallelism", "found no host memory for %zu numbers", count);
    return memory;
}

// Room for R rows, in what a block keeps, for itself and in `kept`, and in what all share. A group of one rank reorders
// nothing.
static void reserve_forward(struct moe_alltoall *l, struct alltoall_block *b, struct alltoall_block *kept,
                            const struct config *c, size_t R) {
    size_t row = sizeof(real) * (size_t)c->hidden, inner = sizeof(real) * (size_t)c->expert_intermediate;
    if (l->ranks > 1) {
        grow(&b->arrival_of_row, sizeof(int) * R);
        grow(&b->row_of_arrival, sizeof(int) * R);
        grow(&b->gates, sizeof(accum) * R);
        grow(&l->moved, row * R);
    }
    grow(&kept->rows, row * R);
    grow(&kept->gate_up, 2 * inner * R);
    grow(&l->hidden, inner * R);
    grow(&l->out, row * R);
}

static void reserve_backward(struct moe_alltoall *l, const struct config *c, size_t R) {
    size_t row = sizeof(real) * (size_t)c->hidden, inner = sizeof(real) * (size_t)c->expert_intermediate;
    if (l->ranks > 1) grow(&l->d_gates, sizeof(accum) * R);
    grow(&l->d_rows, row * R);
    grow(&l->d_hidden, inner * R);
    grow(&l->d_gate_up, 2 * inner * R);
}

// Rows that buffers are made for: those that arrive when all experts have equally many, and an eighth more where a rank
// has not all experts, so that few of them grow, which stops everything.
static size_t planned_rows(const struct config *c, int ep, int experts, size_t routes) {
    size_t balanced = (routes * (size_t)ep * (size_t)experts + (size_t)c->experts - 1) / (size_t)c->experts;
    return ep > 1 ? balanced + balanced / 8 : balanced;
}

size_t moe_alltoall_bytes(const struct config *c, int ep, int batch, int seq, bool training, enum recompute recompute) {
    if (model_moe_blocks(c) == 0) return 0;
    size_t E = (size_t)c->experts, routes = (size_t)batch * (size_t)seq * (size_t)c->top_k;
    size_t with_routes = (size_t)model_kept_routes(c, training, recompute);
    size_t with_rows = (size_t)model_kept_rows(c, training, recompute);
    size_t R = planned_rows(c, ep, (int)((E + (size_t)ep - 1) / (size_t)ep), routes);
    size_t row = sizeof(real) * (size_t)c->hidden, inner = sizeof(real) * (size_t)c->expert_intermediate;
    size_t places = 0, kept = row + 2 * inner, shared = row + inner;
    size_t bytes = sizeof(int) * (E + ((size_t)ep + 1) * (E + 1));
    if (ep > 1) {
        places = 2 * sizeof(int) + sizeof(accum);
        shared += row + (training ? sizeof(accum) : 0);
        bytes += (row + sizeof(accum)) * routes;
    }
    if (training) shared += row + 3 * inner;
    double about = ((double)with_rows * (double)kept + (double)shared) * (double)R;
    if (about > 0x1p62)
        fail_user(
            "--batch",
            "found rows of experts that no memory can hold, %.3g bytes; lower --batch, --seq or the model's sizes",
            about);
    return bytes + with_routes * (sizeof(int) * 2 * routes + places * R) + (with_rows * kept + shared) * R;
}

// ---- the order of sending ----

// First expert of piece c of rank p; that of piece `pieces` is behind the rank's last one.
static int piece_first_expert(const struct moe_alltoall *l, int E, int c, int p) {
    int begin = parallel_first_expert(E, l->ranks, p), end = parallel_first_expert(E, l->ranks, p + 1);
    return begin + (int)((long long)c * (end - begin) / l->pieces);
}

static void order_experts(struct moe_alltoall *l, int E) {
    int *order = host_alloc((size_t)E, sizeof *order), place = 0;
    for (int c = 0; c < l->pieces; c++)
        for (int p = 0; p < l->ranks; p++) {
            l->first[c * l->ranks + p] = place;
            int end = piece_first_expert(l, E, c + 1, p);
            for (int e = piece_first_expert(l, E, c, p); e < end; e++) order[e] = place++;
        }
    l->first[l->pieces * l->ranks] = place;
    device_copy_in(l->order, order, sizeof(int) * (size_t)E);
    free(order);
}

// More pieces than the rank with the most experts has would only be empty.
static int piece_count(const struct model *m, int ranks) {
    int most = (m->config.experts + ranks - 1) / ranks, wanted = m->moe.alltoall_chunks;
    return ranks == 1 || wanted < 1 ? 1 : wanted < most ? wanted : most;
}

static void block_open(struct moe_alltoall *l, struct alltoall_block *b, size_t routes) {
    size_t places = (size_t)l->pieces * (size_t)l->ranks + 1;
    b->slot_of_row = device_alloc(sizeof(int) * routes);
    b->row_of_slot = device_alloc(sizeof(int) * routes);
    b->offsets = host_alloc((size_t)l->experts + 1, sizeof *b->offsets);
    b->send = host_alloc(places, sizeof *b->send);
    b->arrive = host_alloc(places, sizeof *b->arrive);
}

void moe_alltoall_open(struct model *m) {
    const struct config *c = &m->config;
    struct moe_alltoall *l = m->alltoall = host_alloc(1, sizeof *l);
    size_t E = (size_t)c->experts, routes = (size_t)m->acts.batch * (size_t)m->acts.seq * (size_t)c->top_k;
    // Sizes that nothing can hold end here.
    moe_alltoall_bytes(c, m->parallel->ep, m->acts.batch, m->acts.seq, m->grads, m->moe.recompute);
    l->group = m->parallel->group;
    l->ranks = comm_size(l->group);
    l->rank = comm_rank(l->group);
    struct expert_range here = parallel_experts(m->parallel, c->experts);
    l->experts = here.end - here.first;
    l->pieces = piece_count(m, l->ranks);
    l->first = host_alloc((size_t)l->pieces * (size_t)l->ranks + 1, sizeof *l->first);
    l->there = host_alloc((size_t)l->pieces, sizeof *l->there);
    l->back = host_alloc((size_t)l->pieces, sizeof *l->back);
    l->order = device_alloc(sizeof(int) * E);
    order_experts(l, c->experts);
    l->own_offsets = device_alloc(sizeof(int) * (E + 1));
    l->offsets = device_alloc(sizeof(int) * (size_t)l->ranks * (E + 1));
    l->host_offsets = host_alloc((size_t)l->ranks * (E + 1), sizeof *l->host_offsets);
    if (l->ranks > 1) {
        l->sent = device_alloc(sizeof(real) * routes * (size_t)c->hidden);
        l->sent_gates = device_alloc(sizeof(accum) * routes);
    }
    size_t R = planned_rows(c, l->ranks, l->experts, routes);
    l->kept_routes = model_kept_routes(c, m->grads, m->moe.recompute);
    l->kept_rows = model_kept_rows(c, m->grads, m->moe.recompute);
    l->blocks = host_alloc((size_t)l->kept_routes, sizeof *l->blocks);
    for (int i = 0; i < l->kept_routes; i++) {
        block_open(l, &l->blocks[i], routes);
        reserve_forward(l, &l->blocks[i], &l->blocks[i < l->kept_rows ? i : 0], c, R);
    }
    if (m->grads) reserve_backward(l, c, R);
}

static void block_close(struct alltoall_block *b) {
    void *device[] = {b->slot_of_row,  b->row_of_slot, b->arrival_of_row.memory, b->row_of_arrival.memory,
                      b->gates.memory, b->rows.memory, b->gate_up.memory};
    for (size_t i = 0; i < sizeof device / sizeof *device; i++) device_free(device[i]);
    free(b->send);
    free(b->arrive);
    free(b->offsets);
}

void moe_alltoall_close(struct model *m) {
    struct moe_alltoall *l = m->alltoall;
    for (int i = 0; i < l->kept_routes; i++) block_close(&l->blocks[i]);
    void *device[] = {l->order,         l->own_offsets,     l->offsets,          l->sent,
                      l->sent_gates,    l->moved.memory,    l->hidden.memory,    l->out.memory,
                      l->d_rows.memory, l->d_hidden.memory, l->d_gate_up.memory, l->d_gates.memory};
    for (size_t i = 0; i < sizeof device / sizeof *device; i++) device_free(device[i]);
    void *host[] = {l->first, l->there, l->back, l->host_offsets, l->blocks};
    for (size_t i = 0; i < sizeof host / sizeof *host; i++) free(host[i]);
    free(l);
    m->alltoall = NULL;
}

// ---- one pass ----

// What the steps of a pass work on.
struct pass {
    struct model *m;
    struct moe_alltoall *l;
    struct alltoall_block *b, *kept; // routes; rows
    const struct block_activations *a;
    const struct block_offsets *w;
    int H, E, K, I;
};

static struct pass pass_of(struct model *m, int block) {
    const struct config *c = &m->config;
    struct moe_alltoall *l = m->alltoall;
    int i = block - c->dense_layers;
    return (struct pass){.m = m,
                         .l = l,
                         .b = &l->blocks[i < l->kept_routes ? i : 0],
                         .kept = &l->blocks[i < l->kept_rows ? i : 0],
                         .a = &m->acts.blocks[block],
                         .w = &m->params.blocks[block],
                         .H = c->hidden,
                         .E = c->experts,
                         .K = c->top_k,
                         .I = c->expert_intermediate};
}

static int rows_here(const struct pass *p) { return (int)p->b->arrive[p->l->pieces * p->l->ranks]; }

// One piece of the local experts, and its rows in the order of computing or of arrival: the same numbers in both.
struct piece {
    int expert, experts; // the first one's number here, how many
    size_t row;
    int rows;
};

static struct piece piece_of(const struct pass *p, int c) {
    const struct moe_alltoall *l = p->l;
    int begin = piece_first_expert(l, p->E, 0, l->rank), first = piece_first_expert(l, p->E, c, l->rank);
    const size_t *arrive = p->b->arrive + (size_t)c * l->ranks;
    return (struct piece){first - begin, piece_first_expert(l, p->E, c + 1, l->rank) - first, arrive[0],
                          (int)(arrive[l->ranks] - arrive[0])};
}

// Gates lie by slot in a group of one rank, else as they arrived; these say where the one of each row is.
static const int *gate_of_row(const struct pass *p) {
    return p->l->ranks == 1 ? p->b->slot_of_row : p->b->arrival_of_row.memory;
}
static const accum *gates_here(const struct pass *p) { return p->l->ranks == 1 ? p->a->gates : p->b->gates.memory; }

// ---- placement ----

static size_t offsets_bytes(const struct pass *p) { return sizeof(int) * ((size_t)p->E + 1) * (size_t)p->l->ranks; }

// Where every route's row is sent. All ranks' offsets go to all, so that the lists of what is sent and what is received
// come from one matrix. Its way to the host is all that the host waits for, and what is called before count_routes runs
// meanwhile.
static void place_routes(const struct pass *p, int N) {
    struct moe_alltoall *l = p->l;
    moe_place(l->own_offsets, p->b->slot_of_row, p->b->row_of_slot, p->a->ids, l->order, N, p->K, p->E);
    comm_gather_device(l->group, l->offsets, l->own_offsets, sizeof(int) * ((size_t)p->E + 1));
    if (offsets_bytes(p) <= DEVICE_READ_BYTES) device_read_begin(l->offsets, offsets_bytes(p));
}

static void read_offsets(const struct pass *p) {
    if (offsets_bytes(p) <= DEVICE_READ_BYTES)
        device_read_finish(p->l->host_offsets, offsets_bytes(p));
    else
        device_copy_out(p->l->host_offsets, p->l->offsets, offsets_bytes(p));
}

// The rows that rank r sends of the experts first .. end - 1, numbered in the order of sending.
static int rows_from(const struct pass *p, int r, int first, int end) {
    const int *offsets = p->l->host_offsets + (size_t)r * (p->E + 1);
    return offsets[end] - offsets[first];
}

// send and arrive, from the offsets.
static void count_rows(const struct pass *p) {
    struct moe_alltoall *l = p->l;
    struct alltoall_block *b = p->b;
    const int *own = l->host_offsets + (size_t)l->rank * (p->E + 1);
    size_t row = 0;
    for (int c = 0; c < l->pieces; c++) {
        const int *to = l->first + c * l->ranks;
        for (int r = 0; r < l->ranks; r++) {
            b->send[c * l->ranks + r] = (size_t)own[to[r]];
            b->arrive[c * l->ranks + r] = row;
            row += (size_t)rows_from(p, r, to[l->rank], to[l->rank + 1]);
        }
    }
    b->send[l->pieces * l->ranks] = (size_t)own[p->E];
    b->arrive[l->pieces * l->ranks] = row;
    if (row > INT_MAX)
        fail_user("--batch", "found %zu rows for the experts of one rank, wanted at most %d; lower --batch or --seq",
                  row, INT_MAX);
}

static void count_experts(const struct pass *p) {
    struct moe_alltoall *l = p->l;
    int *offsets = p->b->offsets, local = 0;
    offsets[0] = 0;
    for (int c = 0; c < l->pieces; c++) {
        const int *to = l->first + c * l->ranks + l->rank;
        for (int e = to[0]; e < to[1]; e++, local++) {
            offsets[local + 1] = offsets[local];
            for (int r = 0; r < l->ranks; r++) offsets[local + 1] += rows_from(p, r, e, e + 1);
        }
    }
}

// How many rows are sent and arrive, and room for them.
static void count_routes(const struct pass *p) {
    read_offsets(p);
    count_rows(p);
    count_experts(p);
    reserve_forward(p->l, p->b, p->kept, &p->m->config, (size_t)rows_here(p));
}

// How the rows that arrive are ordered for computing, and back.
static void regroup_routes(const struct pass *p) {
    struct moe_alltoall *l = p->l;
    struct alltoall_block *b = p->b;
    for (int c = 0; c < l->pieces && l->ranks > 1; c++) {
        const int *here = l->first + c * l->ranks + l->rank;
        const size_t *arrive = b->arrive + (size_t)c * l->ranks;
        moe_regroup(b->arrival_of_row.memory, b->row_of_arrival.memory, l->offsets + here[0], l->ranks, p->E + 1,
                    here[1] - here[0], (int)arrive[0], (int)(arrive[l->ranks] - arrive[0]));
    }
}

// ---- exchanges; in a group of one rank there are none ----

// In one piece nothing overlaps: the exchange ends here.
static struct comm_exchange *start(const struct moe_alltoall *l, void *to, const size_t *to_offsets, const void *from,
                                   const size_t *from_offsets, size_t row_bytes) {
    if (l->pieces > 1) return comm_exchange_begin(l->group, to, to_offsets, from, from_offsets, row_bytes);
    comm_exchange_rows(l->group, to, to_offsets, from, from_offsets, row_bytes);
    return NULL;
}

static void finish(struct alltoall_exchange *e) {
    if (e->rows) comm_exchange_finish(e->rows);
    if (e->gates) comm_exchange_finish(e->gates);
    *e = (struct alltoall_exchange){0};
}

// Rows, and with_gates gates, of all pieces go to the experts: they are there, so none waits for the results of another.
static void start_there(const struct pass *p, bool with_gates) {
    struct moe_alltoall *l = p->l;
    for (int c = 0; c < l->pieces && l->ranks > 1; c++) {
        const size_t *send = p->b->send + (size_t)c * l->ranks, *arrive = p->b->arrive + (size_t)c * l->ranks;
        l->there[c].rows = start(l, l->moved.memory, arrive, l->sent, send, sizeof(real) * (size_t)p->H);
        if (with_gates) l->there[c].gates = start(l, p->b->gates.memory, arrive, l->sent_gates, send, sizeof(accum));
    }
}

// Results, and with_gates gate gradients, of piece c go back to where its rows came from.
static void start_back(const struct pass *p, int c, bool with_gates) {
    struct moe_alltoall *l = p->l;
    if (l->ranks == 1) return;
    const size_t *send = p->b->send + (size_t)c * l->ranks, *arrive = p->b->arrive + (size_t)c * l->ranks;
    l->back[c].rows = start(l, l->sent, send, l->moved.memory, arrive, sizeof(real) * (size_t)p->H);
    if (with_gates) l->back[c].gates = start(l, l->sent_gates, send, l->d_gates.memory, arrive, sizeof(accum));
}

static void finish_back(const struct pass *p) {
    for (int c = 0; c < p->l->pieces; c++) finish(&p->l->back[c]);
}

// Rows of x [N, H], one for each placed route, on their way to `computed`: at once in a group of one rank, else by
// exchanges from `sent`, after which order_arrived brings each piece there. Rows behind the last placed one keep what they
// had: nobody sends or reads them.
static void scatter_rows(const struct pass *p, real *computed, const real *x, int N) {
    moe_scatter(p->l->ranks == 1 ? computed : p->l->sent, x, p->b->row_of_slot, N, p->K, p->H);
}

static void order_arrived(const struct pass *p, struct piece piece, real *computed) {
    if (p->l->ranks == 1) return;
    const int *arrival_of_row = p->b->arrival_of_row.memory;
    moe_gather(computed + piece.row * p->H, p->l->moved.memory, arrival_of_row + piece.row, piece.rows, p->H);
}

// The piece's results in the order of arrival, in which they go back.
static void order_results(const struct pass *p, struct piece piece) {
    if (p->l->ranks == 1) return;
    real *leaving = (real *)p->l->moved.memory + piece.row * p->H;
    const int *row_of_arrival = p->b->row_of_arrival.memory;
    moe_gather(leaving, p->l->out.memory, row_of_arrival + piece.row, piece.rows, p->H);
}

// y = results of every token's slots + shared + residual
static void combine(const struct pass *p, real *y, const real *residual, int N) {
    const real *results = p->l->ranks == 1 ? p->l->out.memory : p->l->sent;
    const real *shared = p->m->config.shared_experts ? p->m->acts.shared_out : NULL;
    moe_combine(y, results, p->b->row_of_slot, shared, residual, N, p->K, p->H);
}

// ---- forward ----

// The shared expert reads every token; its output stays in shared_out until the sum.
static void shared_forward(const struct pass *p, int N) {
    const struct activations *s = &p->m->acts;
    const real *weights = p->m->weights;
    int H = p->H, I = config_shared_intermediate(&p->m->config);
    if (I == 0) return;
    matmul_nt(p->a->gate_up, p->a->ffn_norm, weights + p->w->shared_w13, N, 2 * I, H, NULL);
    swiglu_forward(s->ffn_hidden, p->a->gate_up, NULL, NULL, N, I);
    matmul_nn(s->shared_out, s->ffn_hidden, weights + p->w->shared_w2, N, H, I, NULL);
}

static void experts_gate_up(const struct pass *p, struct piece piece) {
    size_t H = (size_t)p->H, I = (size_t)p->I, expert = (size_t)piece.expert;
    const real *w13 = p->m->weights + p->w->expert_w13 + expert * 2 * I * H;
    grouped_matmul_nt(p->kept->gate_up.memory, p->kept->rows.memory, w13, p->b->offsets + expert, piece.experts,
                      2 * p->I, p->H);
}

static void experts_forward(const struct pass *p, struct piece piece) {
    const struct moe_alltoall *l = p->l;
    size_t H = (size_t)p->H, I = (size_t)p->I, row = piece.row, expert = (size_t)piece.expert;
    const real *w2 = p->m->weights + p->w->expert_w2 + expert * I * H;
    const int *offsets = p->b->offsets + expert;
    real *gate_up = p->kept->gate_up.memory, *hidden = l->hidden.memory, *out = l->out.memory;
    experts_gate_up(p, piece);
    swiglu_forward(hidden + row * I, gate_up + row * 2 * I, gates_here(p), gate_of_row(p) + row, piece.rows, p->I);
    grouped_matmul_nn(out, hidden, w2, offsets, piece.experts, p->H, p->I);
}

// How many rows are sent is not known yet when they are placed; in a group of one rank the rows of all routes always have
// room.
void moe_alltoall_forward(struct model *m, int block, real *y, const real *residual, int N) {
    struct pass pass = pass_of(m, block), *p = &pass;
    struct moe_alltoall *l = p->l;
    int slots = N * p->K;
    grouped_matmul_choose(m->moe.expert_gemm);
    place_routes(p, N);
    scatter_rows(p, p->kept->rows.memory, p->a->ffn_norm, N);
    if (l->ranks > 1) moe_gather_gates(l->sent_gates, p->a->gates, p->b->slot_of_row, slots);
    if (l->pieces > 1) comm_hold_start(true); // exchanges run beside the shared expert
    shared_forward(p, N);
    count_routes(p);
    start_there(p, true);
    if (l->pieces > 1) comm_hold_start(false);
    regroup_routes(p);
    for (int c = 0; c < l->pieces; c++) {
        struct piece piece = piece_of(p, c);
        finish(&l->there[c]);
        order_arrived(p, piece, p->kept->rows.memory);
        experts_forward(p, piece);
        order_results(p, piece);
        start_back(p, c, false);
    }
    finish_back(p);
    combine(p, y, residual, N);
}

// ---- backward ----

// Rows, gates and ups as forward had them: other blocks have used their memory since.
static void rebuild_rows(const struct pass *p, int N) {
    struct moe_alltoall *l = p->l;
    real *rows = p->kept->rows.memory;
    scatter_rows(p, rows, p->a->ffn_norm, N);
    start_there(p, false);
    for (int c = 0; c < l->pieces; c++) {
        struct piece piece = piece_of(p, c);
        finish(&l->there[c]);
        order_arrived(p, piece, rows);
        experts_gate_up(p, piece);
    }
}

// shared_out = gradient of the normed input through the shared expert
static void shared_backward(const struct pass *p, const real *dy, int N) {
    const struct activations *s = &p->m->acts;
    const real *weights = p->m->weights;
    accum *grads = p->m->grads;
    bool add = !p->m->first_use;
    int H = p->H, I = config_shared_intermediate(&p->m->config);
    if (I == 0) return;
    matmul_nt(s->d_hidden, dy, weights + p->w->shared_w2, N, I, H, NULL);
    swiglu_backward(s->d_gate_up, s->ffn_hidden, NULL, s->d_hidden, p->a->gate_up, NULL, NULL, N, I);
    matmul_tn(grads + p->w->shared_w2, s->ffn_hidden, dy, I, H, N, add);
    matmul_tn(grads + p->w->shared_w13, s->d_gate_up, p->a->ffn_norm, 2 * I, H, N, add);
    matmul_nn(s->shared_out, s->d_gate_up, weights + p->w->shared_w13, N, H, 2 * I, NULL);
}

// Gradients of the piece's rows and gates.
static void experts_backward(const struct pass *p, struct piece piece, accum *d_gates) {
    const struct moe_alltoall *l = p->l;
    size_t H = (size_t)p->H, I = (size_t)p->I, row = piece.row, expert = (size_t)piece.expert;
    const real *w13 = p->m->weights + p->w->expert_w13 + expert * 2 * I * H;
    const real *w2 = p->m->weights + p->w->expert_w2 + expert * I * H;
    const int *offsets = p->b->offsets + expert;
    const real *gate_up = p->kept->gate_up.memory;
    real *hidden = l->hidden.memory, *d_hidden = l->d_hidden.memory, *d_gate_up = l->d_gate_up.memory;
    grouped_matmul_nt(d_hidden, l->d_rows.memory, w2, offsets, piece.experts, p->I, p->H);
    swiglu_backward(d_gate_up + row * 2 * I, hidden + row * I, d_gates, d_hidden + row * I, gate_up + row * 2 * I,
                    gates_here(p), gate_of_row(p) + row, piece.rows, p->I);
    grouped_matmul_nn(l->out.memory, d_gate_up, w13, offsets, piece.experts, p->H, 2 * p->I);
}

// They need no exchange and are computed while the results go back.
static void weight_gradients(const struct pass *p, struct piece piece) {
    const struct moe_alltoall *l = p->l;
    size_t H = (size_t)p->H, I = (size_t)p->I, expert = (size_t)piece.expert;
    const int *offsets = p->b->offsets + expert;
    accum *w13 = p->m->grads + p->w->expert_w13 + expert * 2 * I * H;
    accum *w2 = p->m->grads + p->w->expert_w2 + expert * I * H;
    bool add = !p->m->first_use;
    grouped_matmul_tn(w2, l->hidden.memory, l->d_rows.memory, offsets, piece.experts, p->I, p->H, add);
    grouped_matmul_tn(w13, l->d_gate_up.memory, p->kept->rows.memory, offsets, piece.experts, 2 * p->I, p->H, add);
}

void moe_alltoall_backward(struct model *m, int block, real *dx, accum *d_gates, const real *dy, int N) {
    struct pass pass = pass_of(m, block), *p = &pass;
    struct moe_alltoall *l = p->l;
    bool alone = l->ranks == 1;
    int slots = N * p->K;
    grouped_matmul_choose(m->moe.expert_gemm);
    reserve_backward(l, &m->config, (size_t)rows_here(p));
    real *d_rows = l->d_rows.memory;
    if (m->moe.recompute == RECOMPUTE_MOE) rebuild_rows(p, N);
    if (alone) device_zero(d_gates, sizeof(accum) * (size_t)slots); // those of routes that were not placed
    scatter_rows(p, d_rows, dy, N);
    start_there(p, false);
    shared_backward(p, dy, N);
    for (int c = 0; c < l->pieces; c++) {
        struct piece piece = piece_of(p, c);
        finish(&l->there[c]);
        order_arrived(p, piece, d_rows);
        experts_backward(p, piece, alone ? d_gates : l->d_gates.memory);
        order_results(p, piece);
        start_back(p, c, true);
        weight_gradients(p, piece);
    }
    finish_back(p);
    if (!alone) moe_gather_gates(d_gates, l->sent_gates, p->b->row_of_slot, slots);
    combine(p, dx, NULL, N);
}

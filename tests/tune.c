// Measures cuBLASLt's algorithms for the matrix products of a training run and writes those that beat its first
// proposal to the table that kernels/cuda/matmul_choice.c reads:
// tests/tune --preset NAME [--batch B] [--seq T] [--ep N] ...
#include <stdbool.h>

#include "kernels/cuda/matmul.h"
#include "kernels/cuda/tuning.h"
#include "model/activations.h"
#include "model/config.h"
#include "model/options.h"
#include "tests/gpu_bench.h"

enum {
    WORKS = 4096,
    CANDIDATES = 8,
    EXPERTS_TIMED = 16, // of a rank's; more take longer and say the same
    ROUNDS = 2,         // over all candidates, there and back, since the clock falls meanwhile
    REPEATS = 7,
};
#define GAIN 0.02 // what a named algorithm must be faster by

// One product, or that of every expert with as many rows each.
struct work {
    struct matmul_key key;
    int experts; // 0: not by experts
};

static struct {
    struct work works[WORKS];
    int count;
} list;

static void work_add(enum matmul_kind kind, int M, int N, int K, bool add, int experts) {
    static real none; // stands for buffers, which are all aligned
    void *aligned = (void *)((uintptr_t)&none & ~(uintptr_t)15);
    if (M <= 0 || N <= 0 || K <= 0) return;
    struct matmul_key key = matmul_key_make(kind, M, N, K, aligned, aligned, add ? aligned : NULL, aligned);
    struct work w = {.key = matmul_key_round(&key), .experts = experts};
    for (int i = 0; i < list.count; i++)
        if (memcmp(&list.works[i].key, &w.key, sizeof w.key) == 0) return;
    if (list.count < WORKS) list.works[list.count++] = w;
}

// The first backward pass of a step stores a weight's gradient, the others add to it.
static void gradient_add(int M, int N, int rows, int experts) {
    work_add(MATMUL_TN, M, N, rows, false, experts);
    work_add(MATMUL_TN, M, N, rows, true, experts);
}

// The three products of y = x w^T with w [out, in]. add_forward: y has a residual; add_backward: dx already has a part.
static void linear_add(int rows, int out, int in, bool add_forward, bool add_backward) {
    work_add(MATMUL_NT, rows, out, in, add_forward, 0);
    work_add(MATMUL_NN, rows, in, out, add_backward, 0);
    gradient_add(out, in, rows, 0);
}

// Gate and up, and down, whose weight is [I, H].
static void ffn_add(int rows, int H, int I, bool add, int experts) {
    work_add(MATMUL_NT, rows, 2 * I, H, false, experts);
    work_add(MATMUL_NN, rows, H, I, add, experts);
    work_add(MATMUL_NT, rows, I, H, false, experts);
    gradient_add(I, H, rows, experts);
    gradient_add(2 * I, H, rows, experts);
    work_add(MATMUL_NN, rows, H, 2 * I, false, experts);
}

// An expert's rows vary with the routing: from an eighth to four times the mean, every count that is told apart.
static void experts_add(const struct config *c, int tokens, int ep) {
    int local = (c->experts + ep - 1) / ep, experts = local < EXPERTS_TIMED ? local : EXPERTS_TIMED;
    int64_t mean = (int64_t)tokens * ep * c->top_k / c->experts, most = 4 * mean;
    if (most > (int64_t)tokens * ep) most = (int64_t)tokens * ep;
    for (int64_t rows = mean / 8 + 1; rows <= most && rows <= INT32_MAX / 2; rows++) {
        struct matmul_key key = matmul_key_round(&(struct matmul_key){.kind = MATMUL_NT, .M = (int)rows});
        rows = key.M;
        ffn_add((int)rows, c->hidden, c->expert_intermediate, false, experts);
    }
}

static void head_add(int tokens, int vocab, int hidden) {
    int rows = activations_logit_rows(vocab, (size_t)tokens);
    linear_add(rows, vocab, hidden, false, false);
    linear_add(tokens % rows, vocab, hidden, false, false);
}

static void list_make(const struct options *o) {
    const struct config *c = &o->model;
    int tokens = o->batch * o->seq, H = c->hidden, query = c->heads * config_query_dim(c);
    linear_add(tokens, c->q_rank ? c->q_rank : query, H, false, true);
    if (c->q_rank) linear_add(tokens, query, c->q_rank, false, false);
    linear_add(tokens, c->kv_rank + c->rope_dim, H, false, false);
    linear_add(tokens, c->heads * (c->nope_dim + c->value_dim), c->kv_rank, false, false);
    linear_add(tokens, H, c->heads * c->value_dim, true, false);
    if (c->dense_layers) ffn_add(tokens, H, c->intermediate, true, 0);
    if (c->mtp_depth) linear_add(tokens, H, 2 * H, false, false);
    head_add(tokens, c->vocab, H);
    if (c->dense_layers == c->layers) return;
    ffn_add(tokens, H, config_shared_intermediate(c), false, 0);
    experts_add(c, tokens, o->ep);
}

// ---- measuring ----

struct operands {
    struct buffer first, second, add, out;
    int *offsets;
};

static struct operands operands_take(const struct work *w) {
    const struct matmul_key *k = &w->key;
    size_t M = (size_t)k->M, N = (size_t)k->N, K = (size_t)k->K, E = w->experts ? (size_t)w->experts : 1;
    bool tn = k->kind == MATMUL_TN;
    double elements = (double)(M * K + N * K + M * N * (tn ? 2 : 1)) * (double)E;
    struct operands b = {.offsets = malloc(sizeof(int) * (E + 1))};
    if (!b.offsets) fail_internal("tune", "no memory");
    for (size_t e = 0; e <= E; e++) b.offsets[e] = (int)(e * (tn ? K : M));
    bench_begin(elements * sizeof(real));
    b.first = buffer_reals(E * M * K);
    b.second = buffer_reals(E * N * K);
    b.out = tn ? buffer_accums(E * M * N) : buffer_reals(E * M * N);
    b.add = k->add_bytes && !tn ? buffer_reals(E * M * N) : b.out;
    return b;
}

static void work_call(const struct work *w, const struct operands *b) {
    const struct matmul_key *k = &w->key;
    const real *first = at(b->first), *second = at(b->second), *add = k->add_bytes ? at(b->add) : NULL;
    void *out = at(b->out);
    if (w->experts && k->kind == MATMUL_NT)
        grouped_matmul_nt(out, first, second, b->offsets, w->experts, k->N, k->K);
    else if (w->experts && k->kind == MATMUL_NN)
        grouped_matmul_nn(out, first, second, b->offsets, w->experts, k->N, k->K);
    else if (w->experts)
        grouped_matmul_tn(out, first, second, b->offsets, w->experts, k->M, k->N, k->add_bytes > 0);
    else if (k->kind == MATMUL_NT)
        matmul_nt(out, first, second, k->M, k->N, k->K, add);
    else if (k->kind == MATMUL_NN)
        matmul_nn(out, first, second, k->M, k->N, k->K, add);
    else
        matmul_tn(out, first, second, k->M, k->N, k->K, k->add_bytes > 0);
}

static double work_time(const struct work *w, const struct operands *b, const struct matmul_algorithm *algorithm) {
    struct sample s;
    matmul_force(algorithm);
    BENCH_TIMES(s, REPEATS, work_call(w, b));
    return s.seconds;
}

// Adds the best candidate to the table if it beats the default.
static void work_tune(const struct work *w, struct tuning *t) {
    static const char *const names[] = {"nt", "nn", "tn"};
    const struct matmul_key *k = &w->key;
    struct matmul_algorithm candidates[CANDIDATES];
    double seconds[CANDIDATES] = {0}, by_default = 0;
    int count = matmul_propose(candidates, CANDIDATES, k), best = -1;
    struct operands b = operands_take(w);
    for (int round = 0; round < ROUNDS; round++) {
        by_default += work_time(w, &b, NULL) / ROUNDS;
        for (int i = 0; i < count; i++) {
            int c = round % 2 ? count - 1 - i : i;
            seconds[c] += work_time(w, &b, &candidates[c]) / ROUNDS;
        }
    }
    matmul_force(NULL);
    free(b.offsets);
    for (int i = 0; i < count; i++)
        if (seconds[i] < (best < 0 ? (1 - GAIN) * by_default : seconds[best])) best = i;
    double tera = 2e-12 * k->M * k->N * k->K * (w->experts ? w->experts : 1);
    printf("%s  M %6d  N %6d  K %6d  %-7s  %-3s  default %6.1f TFLOP/s  ", names[k->kind], k->M, k->N, k->K,
           w->experts ? "experts" : "", k->add_bytes ? "add" : "", tera / by_default);
    if (best >= 0)
        printf("best %6.1f (number %d of %d)\n", tera / seconds[best], best + 1, count);
    else
        printf("kept, of %d\n", count);
    fflush(stdout);
    if (best >= 0) t->products[t->count++] = (struct tuned_product){*k, candidates[best]};
}

int main(int argc, char **argv) {
    static struct options o;
    static struct tuned_product products[WORKS];
    static char path[FILENAME_MAX];
    struct tuning t = {.version = cublasLtGetVersion(), .products = products};
    device_start(argv);
    options_parse(&o, argc, argv);
    device_open(0, 1);
    snprintf(path, sizeof path, "%s", matmul_table_path());
    if (!*path) fail_user("MOK_TUNE", "found an empty path, wanted the table to write");
    setenv("MOK_TUNE", "", 1); // what is compared with is cuBLASLt's first proposal
    snprintf(t.machine, sizeof t.machine, "%s", matmul_machine());
    if (o.ep == 0) o.ep = 1;
    if (o.model.vocab == 0) o.model.vocab = 257;
    if (o.model.hidden <= 0 || o.model.layers <= 0 || (int64_t)o.batch * o.seq > INT32_MAX / 2)
        fail_user("--preset", "found no sizes of a model and a batch, wanted --preset NAME");
    bench_open();
    list_make(&o);
    printf("%s, cuBLASLt %zu, %d products of %s: batch %d, seq %d, ep %d, vocab %d\n", t.machine, cublasLtGetVersion(),
           list.count, o.preset, o.batch, o.seq, o.ep, o.model.vocab);
    for (int i = 0; i < list.count; i++) work_tune(&list.works[i], &t);
    tuning_write(&t, path);
    printf("%s: %d of %d products have another algorithm than the default\n", path, t.count, list.count);
    return 0;
}

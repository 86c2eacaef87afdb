// A problem for the megakernel: a global batch of tokens with routes, gates, weights and the gradient of its output; and
// what comes of it, in the order of the batch, however it was dealt out.
#ifndef MOK_TESTS_GPU_MOK_PROBLEM_H
#define MOK_TESTS_GPU_MOK_PROBLEM_H

#include "tests/scene.h"

#include "kernels/mok.h"

// ---- a problem ----

struct problem {
    int tokens, E, K, H, I, S;
    int32_t *ids;   // [tokens, K] host
    accum *gates;   // [tokens, K] host
    real *x, *dy;   // [tokens, H] host, numbers as the device has them
    real *residual; // [tokens, H] device; NULL: none
    real *w13, *w2, *shared_w13,
        *shared_w2; // [E, 2I, H], [E, I, H], [2S, H], [S, H] device; the shared ones NULL without S
};

// Nearly normal, of deviation 1, and fast: the sum of four uniform numbers of 16 bits.
static inline double bell(void) {
    uint64_t bits = random_next(&scene.seed), sum = 0;
    for (int i = 0; i < 4; i++) sum += bits >> 16 * i & 0xffff;
    return ((double)sum / 65536 - 2) * 1.7320508075688772;
}

static inline real *bell_reals(size_t n, double deviation) {
    real *values = malloc(sizeof *values * (n + 1));
    if (!values) abort();
    for (size_t i = 0; i < n; i++) values[i] = host_real(round_to_bf16((float)(deviation * bell())));
    return values;
}

static inline void *on_device(void *host, size_t bytes) {
    void *device = device_alloc(bytes);
    device_copy_in(device, host, bytes);
    free(host);
    return device;
}

static inline real *device_reals(size_t n, double deviation) {
    return on_device(bell_reals(n, deviation), sizeof(real) * n);
}

// Every token chooses K different experts at random.
static inline void choose_at_random(struct problem *p) {
    for (int t = 0; t < p->tokens; t++)
        for (int k = 0; k < p->K; k++) {
            int32_t *id = p->ids + (size_t)t * (size_t)p->K + k;
            bool again = true;
            while (again) {
                *id = scene_below(p->E);
                again = false;
                for (int j = 0; j < k; j++) again = again || id[j - k] == *id;
            }
        }
}

static inline void problem_open(struct problem *p, int tokens, int E, int K, int H, int I, int S, bool residual) {
    *p = (struct problem){.tokens = tokens, .E = E, .K = K, .H = H, .I = I, .S = S};
    size_t N = (size_t)tokens, w = (size_t)E * (size_t)I * (size_t)H, s = (size_t)S * (size_t)H, slots = N * (size_t)K;
    p->ids = malloc(sizeof *p->ids * (slots + 1));
    p->gates = malloc(sizeof *p->gates * (slots + 1));
    for (size_t i = 0; i < slots; i++) p->gates[i] = (accum)(float)(0.1 + scene_uniform());
    p->x = bell_reals(N * (size_t)H, 1);
    p->dy = bell_reals(N * (size_t)H, 1);
    p->residual = residual ? device_reals(N * (size_t)H, 1) : NULL;
    p->w13 = device_reals(2 * w, 1 / sqrt(H));
    p->w2 = device_reals(w, 1 / sqrt(I));
    p->shared_w13 = S ? device_reals(2 * s, 1 / sqrt(H)) : NULL;
    p->shared_w2 = S ? device_reals(s, 1 / sqrt(S)) : NULL;
    choose_at_random(p);
}

static inline void problem_close(struct problem *p) {
    void *host[] = {p->ids, p->gates, p->x, p->dy},
         *device[] = {p->residual, p->w13, p->w2, p->shared_w13, p->shared_w2};
    for (size_t i = 0; i < sizeof host / sizeof *host; i++) free(host[i]);
    for (size_t i = 0; i < sizeof device / sizeof *device; i++)
        if (device[i]) device_free(device[i]);
}

// What a gradient is before it is added to: element i of array `which`.
static inline accum start_value(int which, size_t i) {
    return (accum)(float)(8 * random_uniform(random_mix((uint64_t)i ^ (uint64_t)which << 56)) - 4);
}

// ---- its results ----

struct results {
    real *y, *dx;   // [tokens, H]
    accum *d_gates; // [tokens, K], those of id -1 unwritten
    accum *d_w13, *d_w2, *d_shared_w13, *d_shared_w2;
};

// One of them, for what is done with all.
enum { RESULT_Y, RESULT_DX, RESULT_D_GATES, RESULT_D_W13, RESULT_D_W2, RESULT_D_SHARED_W13, RESULT_D_SHARED_W2 };
enum { RESULTS = RESULT_D_SHARED_W2 + 1 };
struct result {
    const char *name;
    void *memory;
    size_t n, bytes, row; // elements, bytes of one, elements of a row
};

static inline struct result result_of(const struct results *r, const struct problem *p, int which) {
    size_t N = (size_t)p->tokens, H = (size_t)p->H, K = (size_t)p->K, w = (size_t)p->E * (size_t)p->I * H,
           s = (size_t)p->S * H;
    const struct result all[] = {{"y", r->y, N * H, sizeof(real), H},
                                 {"dx", r->dx, N * H, sizeof(real), H},
                                 {"d gates", r->d_gates, N * K, sizeof(accum), K},
                                 {"d w13", r->d_w13, 2 * w, sizeof(accum), H},
                                 {"d w2", r->d_w2, w, sizeof(accum), H},
                                 {"d shared w13", r->d_shared_w13, 2 * s, sizeof(accum), H},
                                 {"d shared w2", r->d_shared_w2, s, sizeof(accum), H}};
    return all[which];
}

static inline void *poisoned(size_t bytes) {
    void *memory = malloc(bytes + 1);
    if (!memory) abort();
    memset(memory, 0xff, bytes + 1); // NaN as a float
    return memory;
}

static inline struct results results_open(const struct problem *p) {
    const struct results none = {0};
    void *memory[RESULTS] = {0};
    for (int i = 0; i < RESULTS; i++) {
        struct result r = result_of(&none, p, i);
        memory[i] = poisoned(r.n * r.bytes);
    }
    return (struct results){memory[RESULT_Y],          memory[RESULT_DX],   memory[RESULT_D_GATES],
                            memory[RESULT_D_W13],      memory[RESULT_D_W2], memory[RESULT_D_SHARED_W13],
                            memory[RESULT_D_SHARED_W2]};
}

static inline void results_close(struct results *r) {
    void *memory[] = {r->y, r->dx, r->d_gates, r->d_w13, r->d_w2, r->d_shared_w13, r->d_shared_w2};
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++) free(memory[i]);
}

#endif

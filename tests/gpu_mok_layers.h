// The layers that the megakernel's passes are compared on: odd sizes, and every way in which routes may fall.
#ifndef MOK_TESTS_GPU_MOK_LAYERS_H
#define MOK_TESTS_GPU_MOK_LAYERS_H

#include "tests/gpu_mok_problem.h"

#include "model/route.h"

enum routes {
    ROUTES_RANDOM,
    ROUTES_FIRST,
    ROUTES_HALF,
    ROUTES_EVEN,
    ROUTES_LAST,
    ROUTES_COUNTS,
    ROUTES_MASKED,
    ROUTES_NONE,
    ROUTES_WORKLOAD
};
enum gates { GATES_POSITIVE, GATES_ANY }; // any: zeros and negative ones too

struct layer_case {
    const char *name;
    int tokens, E, K, H, I, S;
    enum routes routes;
    enum gates gates;
    bool residual;
    int counts[8];           // of ROUTES_COUNTS: so many tokens choose expert e alone
    enum moe_route workload; // of ROUTES_WORKLOAD
    int step;                // its
    int minibatch, ring;     // 0: the tests' own
    bool tiny, large;
};

#define WORKLOAD(name, at) .routes = ROUTES_WORKLOAD, .workload = ROUTE_##name, .step = at

static const struct layer_case layers[] = {
    {"random routes", 300, 12, 3, 256, 128, 256, .residual = true},
    {"several tiles of everything", 190, 4, 2, 512, 384, 256, .routes = ROUTES_RANDOM},
    {"no multiple of a tile", 150, 4, 2, 200, 72, 40, .residual = true},
    {"beyond one tile, no multiple", 190, 4, 2, 328, 296, 136, .routes = ROUTES_RANDOM},
    {"three chunks of a tile", 150, 4, 2, 136, 184, 72, .routes = ROUTES_RANDOM},
    {"narrow", 33, 4, 1, 72, 8, 8, .tiny = true},
    {"smallest widths", 70, 3, 2, 8, 8, 8, .residual = true, .tiny = true},
    {"one expert", 140, 1, 1, 128, 128, 64, .routes = ROUTES_RANDOM},
    {"5 experts", 90, 5, 3, 128, 128, 64, .residual = true},
    {"7 experts", 90, 7, 3, 128, 128, 64, .routes = ROUTES_RANDOM},
    {"13 experts", 90, 13, 3, 128, 128, 64, .tiny = true},
    {"64 experts", 257, 64, 6, 128, 128, 128, .residual = true},
    {"every expert chosen", 65, 4, 4, 128, 128, 128, .routes = ROUTES_RANDOM},
    {"one choice", 129, 6, 1, 256, 128, 128, .routes = ROUTES_RANDOM},
    {"eight choices on one rank, ring of one minibatch", 130, 16, 8, 128, 128, 64, .routes = ROUTES_FIRST,
     .minibatch = 128, .ring = 128},
    {"one rank, many macrobatches", 400, 8, 2, 256, 128, 128, .routes = ROUTES_FIRST, .residual = true,
     .minibatch = 128, .ring = 256},
    {"one rank, one macrobatch", 400, 8, 2, 256, 128, 128, .routes = ROUTES_FIRST},
    {"no multiple of a tile, many macrobatches", 350, 5, 2, 328, 296, 136, .residual = true, .minibatch = 128,
     .ring = 256},
    {"one expert, many macrobatches", 500, 6, 1, 256, 128, 128, .routes = ROUTES_LAST, .minibatch = 128, .ring = 128},
    {"half of the experts", 200, 8, 2, 128, 256, 128, .routes = ROUTES_HALF, .residual = true},
    {"every other expert", 200, 8, 3, 128, 128, 128, .routes = ROUTES_EVEN},
    {"around a row block", 385, 8, 1, 128, 128, 64, .routes = ROUTES_COUNTS, .counts = {1, 63, 65, 127, 129}},
    {"empty experts between", 136, 8, 1, 128, 128, 64, .routes = ROUTES_COUNTS, .residual = true,
     .counts = {0, 5, 0, 0, 130, 0, 1}},
    {"full row blocks", 448, 8, 1, 128, 128, 64, .routes = ROUTES_COUNTS, .counts = {128, 0, 64, 0, 0, 256}},
    {"masked tokens", 200, 6, 2, 128, 128, 128, .routes = ROUTES_MASKED, .residual = true, .tiny = true},
    {"all masked", 200, 6, 2, 128, 128, 128, .routes = ROUTES_NONE},
    {"all masked, no shared expert", 100, 6, 2, 128, 128, 0, .routes = ROUTES_NONE, .residual = true},
    {"zero and negative gates", 200, 6, 3, 128, 128, 128, .gates = GATES_ANY},
    {"no shared expert", 150, 6, 2, 256, 128, 0, .residual = true, .tiny = true},
    {"no shared expert, no residual", 150, 6, 2, 128, 256, 0, .routes = ROUTES_RANDOM},
    {"wide shared expert", 150, 6, 2, 128, 128, 520, .routes = ROUTES_RANDOM},
    {"one token", 1, 6, 2, 128, 128, 64, .residual = true, .tiny = true},
    {"no token", 0, 5, 2, 128, 128, 64, .residual = true, .tiny = true},
    {"W0", 512, 16, 4, 128, 128, 64, WORKLOAD(BALANCED, 0)},
    {"W1", 512, 16, 4, 128, 128, 64, WORKLOAD(W1, 0)},
    {"W2", 512, 16, 4, 128, 128, 64, WORKLOAD(W2, 0)},
    {"W3", 512, 16, 4, 128, 128, 64, WORKLOAD(W3, 0)},
    {"W4", 512, 16, 4, 128, 128, 64, WORKLOAD(W4, 0)},
    {"W5", 512, 16, 4, 128, 128, 64, WORKLOAD(W5, 0)},
    {"W6", 512, 16, 4, 128, 128, 64, WORKLOAD(W6, 3)},
    {"W7", 512, 16, 4, 128, 128, 64, WORKLOAD(W7, 0)},
    {"W7, burst", 512, 16, 4, 128, 128, 64, WORKLOAD(W7, ROUTE_BURST - 1)},
    {"more than a group of blocks", 2300, 2, 1, 264, 1096, 0, .routes = ROUTES_COUNTS, .counts = {2250, 50},
     .minibatch = 4096, .large = true},
    {"large", 2048, 8, 4, 1024, 768, 768, .residual = true, .minibatch = 2048, .large = true},
    {"large, many macrobatches", 2048, 8, 4, 1024, 768, 0, .minibatch = 1024, .ring = 3072, .large = true},
};

static inline void layer_route(struct problem *p, const struct layer_case *c) {
    size_t K = (size_t)p->K, slots = (size_t)p->tokens * K;
    int token = 0;
    for (int e = 0; e < 8 && c->routes == ROUTES_COUNTS; e++)
        for (int i = 0; i < c->counts[e]; i++) p->ids[token++] = e;
    if (c->routes == ROUTES_COUNTS && token != p->tokens) abort();
    if (c->routes == ROUTES_WORKLOAD)
        route_fill(p->ids, c->workload, (struct route_place){.seed = 1, .step = c->step}, 0, p->tokens, p->E, p->K);
    for (size_t i = 0; i < slots; i++) {
        int t = (int)(i / K), k = (int)(i % K);
        if (c->routes == ROUTES_FIRST) p->ids[i] = (t + k) % p->K;
        if (c->routes == ROUTES_HALF) p->ids[i] = (t + k) % (p->E / 2);
        if (c->routes == ROUTES_EVEN) p->ids[i] = 2 * ((t + k) % (p->E / 2));
        if (c->routes == ROUTES_LAST) p->ids[i] = p->E - 1 - k;
        if (c->routes == ROUTES_MASKED && (t % 3 == 0 || (t % 7 == 1 && k == 1))) p->ids[i] = -1;
        if (c->routes == ROUTES_NONE) p->ids[i] = -1;
        if (c->gates == GATES_ANY) p->gates[i] = (accum)(i % 3 == 0 ? 0 : i % 3 == 1 ? -p->gates[i] : p->gates[i]);
    }
}

#endif

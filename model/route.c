#include "model/route.h"

#include <stdlib.h>

#include "kernels/fail.h"
#include "kernels/random.h"

// The experts of a workload in the order of choice: the first `hot` of them are the hot set, those behind `used` have
// no load. With hot 0 all are alike.
struct load {
    int *experts; // [E]
    int hot, used;
};

static int at_least(int value, int least) { return value > least ? value : least; }

int route_hot_experts(int E, int K) {
    int eighth = at_least((E + 7) / 8, K);
    return eighth < E ? eighth : E;
}

static uint64_t key_of(struct route_place place, enum moe_route route, uint64_t what) {
    uint64_t key = random_mix(place.seed ^ random_mix((uint64_t)route));
    return random_mix(key ^ random_mix((uint64_t)place.block ^ random_mix(what)));
}

static void shuffle(int *experts, int E, uint64_t key) {
    for (int i = E - 1; i > 0; i--) {
        int j = (int)random_below(&key, (uint64_t)i + 1), other = experts[j];
        experts[j] = experts[i];
        experts[i] = other;
    }
}

// Brings the experts for which chosen is true to the front, both parts in ascending order; returns how many they are.
static int partition(int *experts, int E, const bool *chosen) {
    int count = 0;
    for (int e = 0; e < E; e++)
        if (chosen[e]) experts[count++] = e;
    for (int e = 0, next = count; e < E; e++)
        if (!chosen[e]) experts[next++] = e;
    return count;
}

// Experts with load in W5. If fewer than K were left, more of the fourth ones get load, then more than half.
static int choose_loaded(int *experts, bool *chosen, int E, int K) {
    int half = at_least(E / 2, K), count = 0;
    for (int e = 0; e < half; e++) count += chosen[e] = e % 4 != 1;
    for (int e = 0; e < half && count < K; e++) {
        count += !chosen[e];
        chosen[e] = true;
    }
    return partition(experts, E, chosen);
}

// chosen [E] comes as all false.
static struct load load_of(int *experts, bool *chosen, enum moe_route route, struct route_place place, int E, int K) {
    struct load load = {experts, route_hot_experts(E, K), E};
    int64_t turn = place.step * load.hot;
    for (int e = 0; e < E; e++) experts[e] = e;
    switch (route) {
    case ROUTE_W1:
        shuffle(experts, E, key_of(place, route, 0));
        break;
    case ROUTE_W3:
        for (int i = 0; i < load.hot; i++) chosen[(int64_t)i * E / load.hot] = true;
        partition(experts, E, chosen);
        break;
    case ROUTE_W5:
        load.used = choose_loaded(experts, chosen, E, K);
        load.hot = 0;
        break;
    case ROUTE_W6:
        for (int e = 0; e < E; e++) experts[e] = (int)((turn + e) % E);
        break;
    case ROUTE_BALANCED:
        shuffle(experts, E, key_of(place, route, (uint64_t)place.step));
        break;
    case ROUTE_W4:
        load.hot = 0;
        break;
    default:
        break; // W2 and its burst: the first experts
    }
    return load;
}

static bool contains(const int32_t *ids, int count, int id) {
    for (int i = 0; i < count; i++)
        if (ids[i] == id) return true;
    return false;
}

// One of `count` experts that is not among the first k ids; fewer than count are.
static int choose(const int32_t *ids, int k, const int *experts, int count, uint64_t *random) {
    int id = experts[random_below(random, (uint64_t)count)];
    while (contains(ids, k, id)) id = experts[random_below(random, (uint64_t)count)];
    return id;
}

// Every choice is hot with ROUTE_HOT_SHARE, as long as each side has experts left.
static void choose_all(int32_t *ids, int K, struct load load, uint64_t random) {
    int hot = 0, cold = 0; // chosen so far
    for (int k = 0; k < K; k++) {
        bool is_hot = random_uniform(random_next(&random)) < ROUTE_HOT_SHARE;
        if (hot == load.hot) is_hot = false;
        if (cold == load.used - load.hot) is_hot = true;
        ids[k] = is_hot ? choose(ids, k, load.experts, load.hot, &random)
                        : choose(ids, k, load.experts + load.hot, load.used - load.hot, &random);
        hot += is_hot;
        cold += !is_hot;
    }
}

// Routes, counted from the global batch's first one, take the experts in turn.
static void take_turns(int32_t *ids, int K, const int *experts, int E, int64_t token) {
    for (int k = 0; k < K; k++) ids[k] = experts[(int)((token % E * K + k) % E)];
}

// W4: of every stretch the first tokens have experts, of every fourth stretch, on average, none.
static bool is_idle(struct route_place place, int64_t token) {
    uint64_t random = key_of(place, ROUTE_W4, random_mix((uint64_t)place.step) ^ (uint64_t)(token / ROUTE_STRETCH));
    int live = (int)random_below(&random, ROUTE_STRETCH * 4 / 3 + 1) - ROUTE_STRETCH / 3;
    return token % ROUTE_STRETCH >= live;
}

void route_fill(int32_t *ids, enum moe_route route, struct route_place place, int64_t first_token, int n, int E,
                int K) {
    if (route == ROUTE_W7) route = place.step % ROUTE_BURST == ROUTE_BURST - 1 ? ROUTE_W2 : ROUTE_BALANCED;
    int *experts = malloc(sizeof *experts * (size_t)E);
    bool *chosen = calloc((size_t)E, sizeof *chosen);
    if (!experts || !chosen) fail_internal("--route", "found no memory for %d experts", E);
    struct load load = load_of(experts, chosen, route, place, E, K);
    uint64_t step_key = key_of(place, route, ~(uint64_t)place.step);
    for (int t = 0; t < n; t++) {
        int64_t token = first_token + t;
        int32_t *of_token = ids + (size_t)t * K;
        if (route == ROUTE_BALANCED)
            take_turns(of_token, K, experts, E, token);
        else if (route == ROUTE_W4 && is_idle(place, token))
            for (int k = 0; k < K; k++) of_token[k] = -1;
        else
            choose_all(of_token, K, load, random_mix(step_key ^ random_mix((uint64_t)token)));
    }
    free(experts);
    free(chosen);
}

// Forced routes: workloads for benchmarks of the MoE layer, in place of the router's choice.
//
// The experts of a token depend on the workload's name, the seed, the step, the block and the token's number in the
// global batch, and on E and K: every layout of ranks sees the same routes. A hot set has an eighth of the experts (at
// least K), and ROUTE_HOT_SHARE of the routes choose from it: as much as six of eight ranks have on average.
//
//   balanced  over any stretch of tokens, the numbers of routes to two experts differ by one at most
//   W1        hot set: scattered experts, other ones in every block, the same in every step
//   W2        hot set: the first experts, which are one rank of eight, and all on the first rank of fewer
//   W3        hot set: as hot as W2, spread evenly over the experts and so over the ranks
//   W4        uniform, but every ROUTE_STRETCH tokens only some, between none and all, have experts at all
//   W5        uniform over the lower half of the experts without every fourth; the others, half of the ranks among
//             them, have no load
//   W6        hot set: as many experts behind each other, those behind them in the next step
//   W7        balanced, and every ROUTE_BURST-th step as W2
#ifndef MOK_MODEL_ROUTE_H
#define MOK_MODEL_ROUTE_H

#include "kernels/types.h"
#include "model/moe_settings.h"

#define ROUTE_HOT_SHARE 0.75
enum { ROUTE_STRETCH = 64, ROUTE_BURST = 8 };

// What the routes depend on besides the token.
struct route_place {
    uint64_t seed;
    int64_t step; // from 0
    int block;
};

// Experts of a workload's hot set.
int route_hot_experts(int E, int K);

// ids (host) [n, K] of the tokens from number first_token on: K different experts each, or all -1. Not for
// ROUTE_LEARNED.
void route_fill(int32_t *ids, enum moe_route route, struct route_place place, int64_t first_token, int n, int E, int K);

#endif

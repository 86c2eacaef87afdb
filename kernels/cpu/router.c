// The router: scores, group-limited selection, balance loss, gradient, and the selection bias.
#include <limits.h>
#include <math.h>

#include "kernels/cpu/rowmath.h"
#include "kernels/cpu/scratch.h"
#include "kernels/kernels.h"
#include "kernels/operation.h"

static const accum GATE_EPS = (accum)1e-20; // in the gates' denominator, as released code has it

int router_most_experts(void) { return INT_MAX; }

void router_score(accum *scores, const real *x, const real *w, int N, int E, int H) {
    OPERATION();
    matmul_nt(scores, x, w, N, E, H, NULL);
#pragma omp parallel for
    for (int t = 0; t < N; t++)
        for (int e = 0; e < E; e++) scores[(size_t)t * E + e] = row_sigmoid(scores[(size_t)t * E + e]);
}

// Index of the largest of n values, the first one of equals. Used values are marked by -infinity.
static int largest(const accum *values, int n) {
    int best = 0;
    for (int i = 1; i < n; i++)
        if (values[i] > values[best]) best = i;
    return best;
}

// Takes the k largest of n values, largest first; values are destroyed.
static void select_top(int32_t *ids, int k, accum *values, int n) {
    for (int i = 0; i < k; i++) {
        ids[i] = largest(values, n);
        values[ids[i]] = (accum)-INFINITY;
    }
}

static accum sum_of_two_largest(const accum *values, int n) {
    accum first = (accum)-INFINITY, second = (accum)-INFINITY;
    for (int i = 0; i < n; i++) {
        if (values[i] > first) {
            second = first;
            first = values[i];
        } else if (values[i] > second)
            second = values[i];
    }
    return n == 1 ? first : first + second;
}

// Sets the experts of all but the best groups to -infinity. group_scores [groups], kept [top_groups] are scratch.
static void mask_groups(accum *biased, accum *group_scores, int32_t *kept, struct router_shape shape) {
    int size = shape.experts / shape.groups;
    for (int g = 0; g < shape.groups; g++) group_scores[g] = sum_of_two_largest(biased + g * size, size);
    select_top(kept, shape.top_groups, group_scores, shape.groups);
    for (int g = 0; g < shape.groups; g++) {
        if (group_scores[g] == (accum)-INFINITY) continue; // select_top has marked the kept ones
        for (int e = g * size; e < (g + 1) * size; e++) biased[e] = (accum)-INFINITY;
    }
}

static void gates_from_scores(accum *gates, const accum *scores, const int32_t *ids, struct router_shape shape) {
    accum sum = GATE_EPS;
    for (int k = 0; k < shape.top_k; k++) sum += scores[ids[k]];
    accum factor = shape.normalize ? (accum)shape.scale / sum : (accum)shape.scale;
    for (int k = 0; k < shape.top_k; k++) gates[k] = scores[ids[k]] * factor;
}

static void select_nothing(int32_t *ids, accum *gates, int K) {
    for (int k = 0; k < K; k++) {
        ids[k] = -1;
        gates[k] = 0;
    }
}

void router_select(int32_t *ids, accum *gates, const accum *scores, const accum *bias, const int32_t *tokens, int N,
                   struct router_shape shape) {
    OPERATION();
    int E = shape.experts, K = shape.top_k;
#pragma omp parallel
    {
        accum *biased = scratch_alloc(sizeof(accum) * (size_t)E);
        accum *group_scores = scratch_alloc(sizeof(accum) * (size_t)shape.groups);
        int32_t *kept = scratch_alloc(sizeof(int32_t) * (size_t)shape.top_groups);
#pragma omp for
        for (int t = 0; t < N; t++) {
            const accum *s = scores + (size_t)t * E;
            if (tokens && tokens[t] < 0) {
                select_nothing(ids + (size_t)t * K, gates + (size_t)t * K, K);
                continue;
            }
            for (int e = 0; e < E; e++) biased[e] = s[e] + bias[e];
            if (shape.groups > 1) mask_groups(biased, group_scores, kept, shape);
            select_top(ids + (size_t)t * K, K, biased, E);
            gates_from_scores(gates + (size_t)t * K, s, ids + (size_t)t * K, shape);
        }
        scratch_free(biased);
        scratch_free(group_scores);
        scratch_free(kept);
    }
}

void router_gates(int32_t *ids, accum *gates, const accum *scores, const int32_t *tokens, int N,
                  struct router_shape shape) {
    OPERATION();
    int E = shape.experts, K = shape.top_k;
#pragma omp parallel for
    for (int t = 0; t < N; t++) {
        int32_t *chosen = ids + (size_t)t * K;
        if (chosen[0] < 0 || (tokens && tokens[t] < 0))
            select_nothing(chosen, gates + (size_t)t * K, K);
        else
            gates_from_scores(gates + (size_t)t * K, scores + (size_t)t * E, chosen, shape);
    }
}

void router_count(int64_t *counts, const int32_t *ids, size_t n, int E) {
    OPERATION();
    (void)E;
    for (size_t i = 0; i < n; i++)
        if (ids[i] >= 0) counts[ids[i]]++;
}

void router_balance(accum *f, accum *loss, const accum *scores, const int32_t *tokens, int B, int T,
                    struct router_shape shape) {
    OPERATION();
    int E = shape.experts, K = shape.top_k;
#pragma omp parallel
    {
        accum *left = scratch_alloc(sizeof(accum) * (size_t)E), *share = scratch_alloc(sizeof(accum) * (size_t)E);
        int32_t *top = scratch_alloc(sizeof(int32_t) * (size_t)K);
#pragma omp for
        for (int b = 0; b < B; b++) {
            accum *fb = f + (size_t)b * E;
            for (int e = 0; e < E; e++) fb[e] = share[e] = 0;
            int count = 0; // tokens that are not masked
            for (int t = 0; t < T; t++) {
                if (tokens && tokens[(size_t)b * T + t] < 0) continue;
                count++;
                const accum *s = scores + ((size_t)b * T + t) * E;
                accum sum = row_sum(s, E);
                for (int e = 0; e < E; e++) {
                    share[e] += s[e] / sum;
                    left[e] = s[e];
                }
                select_top(top, K, left, E);
                for (int k = 0; k < K; k++) fb[top[k]] += 1;
            }
            accum total = 0;
            for (int e = 0; e < E && count > 0; e++) {
                fb[e] *= (accum)E / ((accum)K * count);
                total += fb[e] * (share[e] / count);
            }
            loss[b] = total;
        }
        scratch_free(left);
        scratch_free(share);
        scratch_free(top);
    }
}

// ds [E] of one token through gates and balance loss, then through the sigmoid into dz.
static void token_backward(accum *dz, const accum *d_gates, const accum *s, const int32_t *ids, const accum *f,
                           accum balance_scale, struct router_shape shape) {
    int E = shape.experts, K = shape.top_k;
    for (int e = 0; e < E; e++) dz[e] = 0;
    if (ids[0] < 0) return; // masked
    accum sum = GATE_EPS, mean = 0;
    for (int k = 0; k < K; k++) sum += s[ids[k]];
    for (int k = 0; k < K; k++) mean += d_gates[k] * s[ids[k]];
    mean /= sum;
    for (int k = 0; k < K; k++)
        dz[ids[k]] +=
            shape.normalize ? (accum)shape.scale / sum * (d_gates[k] - mean) : (accum)shape.scale * d_gates[k];
    accum all = row_sum(s, E), f_mean = row_dot(f, s, E) / all;
    for (int e = 0; e < E; e++) {
        accum ds = dz[e] + balance_scale * (f[e] - f_mean) / all;
        dz[e] = ds * s[e] * (1 - s[e]);
    }
}

// What balance_scale is for one token of a sequence: divided by its tokens that are not masked. ids [T, K]
static accum scale_per_token(double balance_scale, const int32_t *ids, int T, int K) {
    int count = 0;
    for (int t = 0; t < T; t++) count += ids[(size_t)t * K] >= 0;
    return (accum)(balance_scale / (count > 0 ? count : 1));
}

void router_backward(real *dx, accum *dw, accum *dz, const accum *d_gates, const accum *scores, const int32_t *ids,
                     const accum *f, double balance_scale, const real *x, const real *w, int B, int T, int H,
                     struct router_shape shape) {
    OPERATION();
    int N = B * T, E = shape.experts, K = shape.top_k;
    accum *scales = scratch_alloc(sizeof(accum) * (size_t)B);
    for (int b = 0; b < B; b++) scales[b] = scale_per_token(balance_scale, ids + (size_t)b * T * K, T, K);
#pragma omp parallel for
    for (int t = 0; t < N; t++)
        token_backward(dz + (size_t)t * E, d_gates + (size_t)t * K, scores + (size_t)t * E, ids + (size_t)t * K,
                       f + (size_t)(t / T) * E, scales[t / T], shape);
    scratch_free(scales);
    matmul_tn(dw, dz, x, E, H, N, true);
    matmul_nn(dx, dz, w, N, H, E, dx);
}

void router_update_bias(accum *bias, const int64_t *counts, int E, double rate) {
    OPERATION();
    int64_t total = 0;
    for (int e = 0; e < E; e++) total += counts[e];
    for (int e = 0; e < E; e++) {
        // The sign of total - E counts[e], without the product, which could overflow.
        int64_t whole = total / E, rest = total % E;
        int sign = counts[e] < whole || (counts[e] == whole && rest > 0) ? 1 : counts[e] > whole ? -1 : 0;
        bias[e] += (accum)(rate * sign);
    }
}

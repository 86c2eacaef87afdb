#include "model/generate.h"

#include <math.h>
#include <stdlib.h>

#include "kernels/fail.h"

// Uniform in [0, 1) from (seed, position): splitmix64.
static double uniform_at(uint64_t seed, uint64_t position) {
    uint64_t z = (seed ^ 0xd1b54a32d192ed03ull) + (position + 1) * 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return (double)((z ^ (z >> 31)) >> 11) * 0x1p-53;
}

int generate_pick(const float *logits, int V, double temperature, double u) {
    int best = 0;
    for (int v = 1; v < V; v++)
        if (logits[v] > logits[best]) best = v;
    if (temperature <= 0) return best;
    double total = 0, passed = 0;
    for (int v = 0; v < V; v++) total += exp((logits[v] - (double)logits[best]) / temperature);
    for (int v = 0; v < V; v++) {
        passed += exp((logits[v] - (double)logits[best]) / temperature);
        if (u * total < passed) return v;
    }
    return best; // u * total rounded up to total
}

int generate_tokens(struct model *m, int32_t *tokens, int prompt, int count, double temperature, uint64_t seed,
                    int32_t stop) {
    int V = m->config.vocab;
    float *logits = malloc(sizeof *logits * (size_t)V);
    if (!logits) fail_internal("sampling", "found no memory for %d logits", V);
    int added = 0;
    while (added < count) {
        int length = prompt + added, window = length < m->acts.seq ? length : m->acts.seq;
        model_logits(m, tokens + length - window, window, window - 1, logits);
        int32_t next = generate_pick(logits, V, temperature, uniform_at(seed, (uint64_t)length));
        tokens[length] = next;
        added++;
        if (next == stop) break;
    }
    free(logits);
    return added;
}

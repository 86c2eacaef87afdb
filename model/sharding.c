#include "model/sharding.h"

#include <stdlib.h>

#include "kernels/fail.h"

// Offsets of the pieces of elements first .. end - 1.
static size_t *cut(size_t first, size_t end, int pieces) {
    size_t *offsets = malloc(((size_t)pieces + 1) * sizeof *offsets);
    if (!offsets) fail_internal("optimizer state", "found no memory for %d pieces", pieces);
    for (int i = 0; i <= pieces; i++) offsets[i] = first + parallel_piece(end - first, pieces, i);
    return offsets;
}

// The shards of a rank of the job, as the pieces say.
static void take_shards(struct sharding *s, int rank, int dp_rank) {
    const size_t *dense = s->dense_offsets + rank, *experts = s->expert_offsets + dp_rank;
    s->dense = (struct shard){dense[0], dense[1], 0};
    s->experts = (struct shard){experts[0], experts[1], dense[1] - dense[0]};
    s->size = s->experts.state + experts[1] - experts[0];
}

void sharding_build(struct sharding *s, const struct params *p, const struct parallel *parallel) {
    s->dense_offsets = cut(0, p->dense_size, parallel->ranks);
    s->expert_offsets = cut(p->dense_size, p->size, parallel->dp);
    take_shards(s, parallel->rank, parallel->dp_rank);
}

void sharding_free(struct sharding *s) {
    free(s->dense_offsets);
    free(s->expert_offsets);
    *s = (struct sharding){0};
}

struct piece sharding_cut(const struct shard *shard, size_t offset, size_t size) {
    size_t begin = offset > shard->begin ? offset : shard->begin;
    size_t end = offset + size < shard->end ? offset + size : shard->end;
    if (begin >= end) return (struct piece){0};
    return (struct piece){begin - offset, end - begin, shard->state + begin - shard->begin};
}

struct piece sharding_piece(const struct sharding *s, const struct param *tensor) {
    if (tensor->offset == PARAM_ELSEWHERE) return (struct piece){0};
    return sharding_cut(tensor->expert < 0 ? &s->dense : &s->experts, tensor->offset, param_size(tensor));
}

// ---- all ranks ----

// The sharding of one place of the EP groups, and where the experts are that it holds.
static void add_place(struct layout *l, const struct config *c, const struct parallel *parallel, int place) {
    struct params p;
    struct parallel there = {place, parallel->ranks, parallel->ep, place, parallel->dp, 0, NULL, NULL, NULL};
    params_build_share(&p, c, parallel_experts(&there, c->experts));
    sharding_build(&l->places[place], &p, &there);
    for (int i = 0; i < p.count; i++) {
        if (p.list[i].offset == PARAM_ELSEWHERE) continue;
        l->offsets[i] = p.list[i].offset;
        l->holders[i] = p.list[i].expert < 0 ? -1 : place;
    }
    params_free(&p);
}

void layout_build(struct layout *l, const struct config *c, const struct params *p, const struct parallel *parallel) {
    size_t count = (size_t)p->count, ep = (size_t)parallel->ep;
    *l = (struct layout){.ep = parallel->ep, .offsets = malloc(count * sizeof *l->offsets)};
    l->holders = malloc(count * sizeof *l->holders);
    l->places = malloc(ep * sizeof *l->places);
    if (!l->offsets || !l->holders || !l->places)
        fail_internal("optimizer state", "found no memory for the places of %d tensors", p->count);
    for (int place = 0; place < l->ep; place++) add_place(l, c, parallel, place);
}

void layout_free(struct layout *l) {
    for (int place = 0; place < l->ep; place++) sharding_free(&l->places[place]);
    free(l->offsets);
    free(l->holders);
    free(l->places);
    *l = (struct layout){0};
}

struct piece layout_piece(const struct layout *l, const struct params *p, int i, int rank) {
    struct sharding s = l->places[rank % l->ep];
    take_shards(&s, rank, rank / l->ep);
    if (l->holders[i] >= 0 && l->holders[i] != rank % l->ep) return (struct piece){0};
    return sharding_cut(l->holders[i] < 0 ? &s.dense : &s.experts, l->offsets[i], param_size(&p->list[i]));
}

#include "model/parallel.h"

#include <stdlib.h>

#include "kernels/fail.h"
#include "model/leader.h"

const struct parallel parallel_alone = {.ranks = 1, .ep = 1, .dp = 1};

// hosts [ranks]: the first rank on every rank's host. Free with free.
static int *find_hosts(struct comm *world) {
    struct comm *near = comm_split_host(world);
    int first = comm_rank(world), *hosts = malloc((size_t)comm_size(world) * sizeof *hosts);
    if (!hosts) fail_internal("memory", "found no room for the hosts of %d ranks", comm_size(world));
    comm_broadcast(near, &first, sizeof first, 0);
    comm_gather_all(world, hosts, &first, sizeof first);
    comm_free(near);
    return hosts;
}

// hosts NULL: all ranks are on one.
static bool groups_stay_on_hosts(const int *hosts, int ranks, int ep) {
    for (int r = 0; r < ranks && hosts; r++)
        if (hosts[r] != hosts[r / ep * ep]) return false;
    return true;
}

static int choose_ep(const int *hosts, int ranks, int experts) {
    int ep = experts < ranks ? experts : ranks;
    while (ep > 1 && (ranks % ep != 0 || !groups_stay_on_hosts(hosts, ranks, ep))) ep--;
    return ep > 1 ? ep : 1;
}

static int choose_ep_here(struct comm *world, int experts) {
    int *hosts = find_hosts(world), ep = choose_ep(hosts, comm_size(world), experts);
    free(hosts);
    return ep;
}

static void check_ep(int ep, int ranks, int experts) {
    if (ep == 1) return;
    if (experts == 0) fail_user("--ep", "found %d and a model without experts, wanted 1; leave it out", ep);
    if (ep < 1 || ranks % ep != 0)
        fail_user("--ep",
                  "found %d with %d rank%s, wanted a divisor of the number of ranks; change --ep, or mpirun -n "
                  "(--plan: --ranks)",
                  ep, ranks, ranks == 1 ? "" : "s");
    if (ep > experts)
        fail_user("--ep", "found %d, more than the %d experts of the model, wanted at most %d; lower --ep", ep, experts,
                  experts);
}

// All ranks would say the same: rank 0 does, and ends the job while the others wait.
static void check_by_turns(struct comm *world, int ep, int experts) {
    leader_begin(world);
    check_ep(ep, comm_size(world), experts);
    leader_end(world);
}

struct parallel parallel_suppose(int ranks, int ep, int experts) {
    const int most = 1 << 20;
    if (ranks > most) fail_user("--ranks", "found %d, wanted at most %d", ranks, most);
    if (ep == 0)
        ep = choose_ep(NULL, ranks, experts);
    else
        check_ep(ep, ranks, experts);
    int dp = ranks / ep;
    return (struct parallel){
        .rank = ranks - 1, .ranks = ranks, .ep = ep, .ep_rank = ep - 1, .dp = dp, .dp_rank = dp - 1};
}

void parallel_open(struct parallel *p, int ep, int experts) {
    struct comm *world = comm_world();
    int rank = comm_rank(world), ranks = comm_size(world);
    if (ep == 0)
        ep = choose_ep_here(world, experts);
    else
        check_by_turns(world, ep, experts);
    *p = (struct parallel){.rank = rank, .ranks = ranks, .ep = ep, .dp = ranks / ep, .world = world};
    p->ep_rank = rank % ep;
    p->dp_rank = rank / ep;
    p->group = comm_split(world, p->dp_rank, p->ep_rank);
    p->replicas = comm_split(world, p->ep_rank, p->dp_rank);
}

void parallel_close(struct parallel *p) {
    comm_free(p->group);
    comm_free(p->replicas);
    *p = parallel_alone;
}

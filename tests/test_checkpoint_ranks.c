// Checkpoints of a model that is spread over ranks: the files are the same at every layout, and any layout loads them.
// mpirun -n 6 runs all layouts: each is a job of the first ranks, while the others wait.
#include "tests/ranks.h"
#include "tests/saved_model.h"
#include "tests/shared_folder.h"
#include "tests/trainer_json.h"

#include <dirent.h>

enum { RANKS = 6 };

static int me;
static struct comm *jobs[RANKS + 1]; // [n] the first n ranks

static const struct {
    int ranks, ep;
} layouts[] = {{1, 1}, {2, 1}, {2, 2}, {3, 1}, {3, 3}, {4, 1}, {4, 2}, {4, 4}, {6, 1}, {6, 2}, {6, 3}, {6, 6}};
enum { LAYOUTS = sizeof layouts / sizeof *layouts };

// This rank's place in a job of the first ranks; false if it has none.
static bool join(struct parallel *p, int ranks, int ep) {
    *p = (struct parallel){.rank = me, .ranks = ranks, .ep = ep, .dp = ranks / ep, .world = jobs[ranks]};
    p->ep_rank = me % ep;
    p->dp_rank = me / ep;
    return me < ranks;
}

static bool layout_fits(int l) { return layouts[l].ranks <= comm_size(comm_world()); }

// What rank 0 saves when it knows of no other rank.
static void save_alone(const struct config *c, const char *folder) {
    struct model whole;
    if (me > 0) return;
    model_init_share(&whole, c, &parallel_alone);
    model_fill_share(&whole, 100);
    whole.c.parallel = NULL;
    whole.c.sharding = NULL;
    assert_int_equal(mkdir(at(folder), 0777), 0);
    checkpoint_save(&whole.c, at(folder), 0);
    model_free(&whole);
}

static void save_spread(const struct config *c, const struct parallel *p, const char *folder, int64_t step, int keep) {
    struct model share;
    model_init_share(&share, c, p);
    model_fill_share(&share, step);
    share.c.step = step;
    if (p->rank == 0 && !exists(folder)) assert_int_equal(mkdir(at(folder), 0777), 0);
    checkpoint_save(&share.c, at(folder), keep);
    assert_true(comm_timeout() == RANKS_TIMEOUT); // as it was before
    model_free(&share);
}

// Bytes that no load leaves behind: NaN.
static void poison(struct model *m) {
    memset(m->c.weights, 0xff, m->params.size * sizeof(real));
    memset(m->c.master, 0xff, m->sharding.size * sizeof(accum));
    memset(m->c.m, 0xff, m->sharding.size * sizeof(accum));
    memset(m->c.v, 0xff, m->sharding.size * sizeof(accum));
    memset(m->c.bias, 0xff, BIASES * sizeof(accum));
}

// ---- saving ----

static int is_visible(const struct dirent *entry) { return entry->d_name[0] != '.'; }

static uint64_t hash_of_file(const char *folder, const char *name) {
    char path[512];
    size_t bytes;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    char *data = read_bytes(path, &bytes);
    uint64_t hash = hash_of(data, bytes);
    free(data);
    return hash;
}

static void assert_same_files(const char *found, const char *wanted) {
    struct dirent **a, **b;
    int count = scandir(found, &a, is_visible, alphasort);
    assert_int_equal(scandir(wanted, &b, is_visible, alphasort), count);
    assert_true(count >= 14); // 2 configs, index, 2 * 5 shards, trainer.json
    for (int i = 0; i < count; i++) {
        assert_string_equal(a[i]->d_name, b[i]->d_name);
        if (hash_of_file(found, a[i]->d_name) != hash_of_file(wanted, b[i]->d_name))
            fail_msg("%s: %s is not what one process writes", found, a[i]->d_name);
        free(a[i]);
        free(b[i]);
    }
    free(a);
    free(b);
}

static void files_do_not_depend_on_the_layout(void **state) {
    (void)state;
    save_alone(&uneven, "alone");
    for (int l = 0; l < LAYOUTS; l++) {
        struct parallel p;
        char name[64], folder[128];
        if (!layout_fits(l) || !join(&p, layouts[l].ranks, layouts[l].ep)) continue;
        snprintf(name, sizeof name, "ranks%d-ep%d", p.ranks, p.ep);
        save_spread(&uneven, &p, name, 100, 0);
        snprintf(folder, sizeof folder, "%s/step-00000100", name);
        if (me == 0) assert_same_files(at(folder), at("alone/step-00000100"));
    }
}

// When saving returns, the new checkpoint is there and the old one is not, whichever rank looks.
static void all_ranks_see_what_was_saved_and_purged(void **state) {
    (void)state;
    struct parallel p;
    int ranks = comm_size(comm_world());
    if (ranks > RANKS || !join(&p, ranks, 1)) return;
    save_spread(&uneven, &p, "run", 100, 1);
    assert_true(exists("run/step-00000100/trainer.json"));
    comm_barrier(p.world);
    save_spread(&uneven, &p, "run", 200, 1);
    assert_true(exists("run/step-00000200/trainer.json") && !exists("run/step-00000100"));
    assert_false(exists("run/.tmp-step-00000200"));
}

// ---- loading ----

static void assert_piece(const struct param *p, enum state_array array, size_t first, const accum *found,
                         size_t count) {
    for (size_t k = 0; k < count; k++) {
        accum wanted = (accum)value_of(p, array, first + k);
        if (memcmp(&found[k], &wanted, sizeof wanted) != 0)
            fail_msg("rank %d: %s[%zu] of array %d: found %g, wanted %g", me, p->name, first + k, (int)array,
                     (double)found[k], (double)wanted);
    }
}

// All that this rank has, with weights and masters from the array that was loaded for them.
static void assert_share(const struct model *m, enum state_array weights, bool moments) {
    for (int i = 0; i < m->params.count; i++) {
        const struct param *p = &m->params.list[i];
        struct piece piece = sharding_piece(&m->sharding, p);
        for (size_t k = 0; p->offset != PARAM_ELSEWHERE && k < param_size(p); k++) {
            real wanted = (real)value_of(p, weights, k);
            if (memcmp(&m->c.weights[p->offset + k], &wanted, sizeof wanted) != 0)
                fail_msg("rank %d: %s[%zu]: found weight %g, wanted %g", me, p->name, k,
                         (double)m->c.weights[p->offset + k], (double)wanted);
        }
        assert_piece(p, weights, piece.first, m->c.master + piece.state, piece.count);
        if (!moments) continue;
        assert_piece(p, FIRST_MOMENT, piece.first, m->c.m + piece.state, piece.count);
        assert_piece(p, SECOND_MOMENT, piece.first, m->c.v + piece.state, piece.count);
    }
    for (int i = 0; i < BIASES; i++) assert_true(m->c.bias[i] == bias_value(i));
}

static void load_and_compare(const struct parallel *p, const char *folder) {
    struct model m;
    model_init_share(&m, &uneven, p);
    poison(&m);
    checkpoint_load_progress(folder, &m.c);
    assert_true(m.c.step == 100 && m.c.sequences == 12345 && m.c.tokens == 9007199254740991);
    assert_true(m.c.seed == 0xfedcba9876543210 && !m.c.options && !m.c.data);
    checkpoint_load_state(folder, &m.c);
    assert_share(&m, MASTER, true);
    poison(&m);
    checkpoint_load_weights(folder, &m.c);
    assert_share(&m, WEIGHTS, false);
    for (size_t i = 0; i < m.sharding.size; i++) assert_true(isnan(m.c.m[i]) && isnan(m.c.v[i]));

    accum *master = m.c.master; // as for sampling
    m.c.master = NULL;
    m.c.sharding = NULL;
    checkpoint_load_weights(folder, &m.c);
    m.c.master = master;
    assert_share(&m, WEIGHTS, false);
    assert_true(comm_timeout() == RANKS_TIMEOUT);
    model_free(&m);
}

// The files come from the largest layout with several groups of several ranks.
static void every_layout_loads_what_another_saved(void **state) {
    (void)state;
    struct parallel p;
    int from = LAYOUTS - 3; // 6 ranks, EP 2
    while (from > 0 && !layout_fits(from)) from--;
    if (join(&p, layouts[from].ranks, layouts[from].ep)) save_spread(&uneven, &p, "from", 100, 0);
    comm_barrier(comm_world());
    for (int l = 0; l < LAYOUTS; l++)
        if (layout_fits(l) && join(&p, layouts[l].ranks, layouts[l].ep)) load_and_compare(&p, at("from/step-00000100"));
}

// Experts, and those of them that a rank holds in any array, by hash.
static void count_right_experts(const struct model *m, int64_t counts[STATE_ARRAYS]) {
    const accum *arrays[STATE_ARRAYS] = {NULL, m->c.master, m->c.m, m->c.v};
    for (int i = 0; i < m->params.count; i++) {
        const struct param *p = &m->params.list[i];
        if (p->expert < 0 || p->offset == PARAM_ELSEWHERE) continue;
        struct piece piece = sharding_piece(&m->sharding, p);
        assert_true(piece.first == 0 && piece.count == param_size(p)); // one group: no replicas
        float *found = malloc(piece.count * sizeof *found), *wanted = malloc(piece.count * sizeof *wanted);
        for (int a = 0; a < STATE_ARRAYS; a++) {
            if (a == WEIGHTS)
                device_real_to_float(found, m->c.weights + p->offset, piece.count);
            else
                device_accum_to_float(found, arrays[a] + piece.state, piece.count);
            enum state_array source = a == WEIGHTS ? MASTER : (enum state_array)a;
            for (size_t k = 0; k < piece.count; k++) wanted[k] = value_of(p, source, k);
            size_t bytes = piece.count * sizeof *found;
            counts[a] += hash_of(found, bytes) == hash_of(wanted, bytes);
        }
        free(found);
        free(wanted);
    }
}

// A checkpoint that holds the experts of one rank only, and a resume that does not notice: KempnerForge issue 202, verl issue
// 2086, UniRL pull 158.
static void all_experts_and_their_moments_survive_ep2(void **state) {
    (void)state;
    struct config c = uneven;
    c.experts = 4;
    if (comm_size(comm_world()) < 2) skip();
    struct parallel p;
    if (join(&p, 2, 2)) save_spread(&c, &p, "ep2", 100, 0);
    comm_barrier(comm_world());
    for (int ep = 1; ep <= 2; ep++) {
        struct model m;
        int64_t counts[STATE_ARRAYS] = {0};
        if (!join(&p, ep, ep)) continue;
        model_init_share(&m, &c, &p);
        poison(&m);
        checkpoint_load_state(at("ep2/step-00000100"), &m.c);
        count_right_experts(&m, counts);
        comm_sum_int64(p.world, counts, STATE_ARRAYS);
        for (int a = 0; a < STATE_ARRAYS; a++) assert_int_equal(counts[a], 3 * 4 * 3); // blocks, experts, matrices
        model_free(&m);
    }
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, make_shared_root, remove_shared_root)

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        TEST(files_do_not_depend_on_the_layout),
        TEST(all_ranks_see_what_was_saved_and_purged),
        TEST(every_layout_loads_what_another_saved),
        TEST(all_experts_and_their_moments_survive_ep2),
    };
    ranks_start(argc, argv);
    me = comm_rank(comm_world());
    for (int n = 1; n <= RANKS && n <= comm_size(comm_world()); n++) jobs[n] = comm_split(comm_world(), me >= n, me);
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    for (int n = 1; n <= RANKS; n++) comm_free(jobs[n]);
    return ranks_stop(failed);
}

// What can happen to a job of several ranks while it saves or loads: a rank dies or hangs, the disk is full, the folder is
// damaged or another model's. Every test starts mpirun with this program as the ranks, and looks at what they leave.
#include "tests/child.h"
#include "tests/saved_model.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/time.h>

#include "kernels/clock.h"
#include "model/shards.h"

enum { RANKS = 3, EP = 3, VICTIM = 2 };

// ---- a rank: PROGRAM WHAT FOLDER ----

static struct parallel parallel;

static void save(struct model *m, const char *folder, int64_t step) {
    m->c.step = step;
    checkpoint_save(&m->c, folder, 1);
}

// What a save does on a rank, up to the arrays of the state, or all of it but for agreeing to publish.
static void save_in_part(struct model *m, bool state) {
    struct spread spread = {m->c.config, &m->params, &parallel, &m->sharding};
    struct shard_array model = {"", m->c.weights, NULL, false};
    struct shard_array rest[] = {
        {".master", NULL, m->c.master, false}, {".m", NULL, m->c.m, false}, {".v", NULL, m->c.v, false}};
    shards_send(&spread, &model, 1);
    if (state) shards_send(&spread, rest, 3);
}

// The victim is gone when rank 0 waits for what it has of the state, or has long written all and waits for it to agree.
static void die_after(struct model *m, const char *folder, bool state) {
    if (parallel.rank == VICTIM) {
        save_in_part(m, state);
        const char *begun = state ? "trainer.json" : "state-00001-of-00005.safetensors";
        char hidden[128], published[128];
        snprintf(hidden, sizeof hidden, ".tmp-step-00000200/%s", begun);
        snprintf(published, sizeof published, "step-00000200/%s", begun);
        while (access(hidden, F_OK) != 0 && access(published, F_OK) != 0) usleep(1000);
        usleep(300000);
        raise(SIGKILL);
    }
    save(m, folder, 200);
}

static void hang(struct model *m, const char *folder) {
    comm_set_timeout(1);
    if (parallel.rank == VICTIM) {
        save_in_part(m, false);
        pause();
    }
    save(m, folder, 200);
}

// Files may not become larger: rank 0 gets a signal for the first byte too many, or an error if it ignores that.
static void save_with_small_files(struct model *m, const char *folder, void (*action)(int)) {
    const rlim_t largest = 60000; // too small for the first file of the state
    signal(SIGXFSZ, action);
    setrlimit(RLIMIT_FSIZE, &(struct rlimit){largest, largest});
    save(m, folder, 200);
}

static void save_on_and_on(struct model *m, const char *folder) {
    const char *microseconds = getenv("MOK_TEST_KILL");
    long rank = strtol(getenv("MOK_TEST_VICTIM"), NULL, 10);
    struct itimerval timer = {.it_value.tv_usec = strtol(microseconds, NULL, 10)};
    if (parallel.rank == rank) setitimer(ITIMER_REAL, &timer, NULL); // SIGALRM ends the process
    for (int64_t step = 101;; step++) save(m, folder, step);
}

static void load(const struct config *c, const char *folder, const char *what) {
    struct model m;
    model_init_share(&m, c, &parallel);
    checkpoint_load_progress(folder, &m.c);
    if (strcmp(what, "weights") == 0)
        checkpoint_load_weights(folder, &m.c);
    else
        checkpoint_load_state(folder, &m.c);
    model_free(&m);
}

static void be_rank(const char *what, const char *folder) {
    const char *first = "step-00000100";
    struct model m;
    struct config other = uneven;
    other.kv_rank = 13;
    if (chdir(strcmp(what, "unshared") == 0 && parallel.rank == VICTIM ? "/" : folder) != 0) exit(1);
    model_init_share(&m, &uneven, &parallel);
    model_fill_share(&m, 100);
    if (strcmp(what, "die early") == 0) die_after(&m, folder, false);
    if (strcmp(what, "die late") == 0) die_after(&m, folder, true);
    if (strcmp(what, "hang") == 0) hang(&m, folder);
    if (strcmp(what, "rank 0 dies") == 0) save_with_small_files(&m, folder, SIG_DFL);
    if (strcmp(what, "full disk") == 0) save_with_small_files(&m, folder, SIG_IGN);
    if (strcmp(what, "on and on") == 0) save_on_and_on(&m, folder);
    if (strcmp(what, "state") == 0 || strcmp(what, "weights") == 0) load(&uneven, first, what);
    if (strcmp(what, "other state") == 0) load(&other, first, "state");
    if (strcmp(what, "other weights") == 0) load(&other, first, "weights");
    if (strcmp(what, "unshared") == 0) load(&uneven, first, "state");
    model_free(&m);
}

static int rank_main(int argc, char **argv) {
    device_start(argv);
    comm_start(&argc, &argv);
    int rank = comm_rank(comm_world());
    parallel = (struct parallel){
        rank, comm_size(comm_world()), EP, rank % EP, comm_size(comm_world()) / EP, rank / EP, comm_world(), NULL,
        NULL};
    be_rank(argv[1], argv[2]);
    comm_stop();
    return 0;
}

// ---- the tests ----

static char program[4096];
static char said[16384];

static void start_ranks(void *what) {
    char ranks[16];
    snprintf(ranks, sizeof ranks, "%d", RANKS);
    setenv("OMP_NUM_THREADS", "1", 1);
    execl("/bin/sh", "sh", "-c", "exec ${MPIRUN:-mpirun} -n \"$1\" \"$0\" \"$2\" \"$3\" </dev/null", program, ranks,
          what, root, (char *)NULL);
    _exit(127);
}

// The exit code of a job whose ranks do that; `said` receives their messages. They may not take long to end.
static int run_job(const char *what) {
    double start = clock_seconds();
    int code = run_child(start_ranks, (void *)what, said, sizeof said);
    if (!(clock_seconds() - start < 60)) fail_msg("%s: the job took %g s to end", what, clock_seconds() - start);
    return code;
}

// What the ranks would have saved: the files are the same.
static void save_first(void) {
    struct model m;
    model_init_share(&m, &uneven, &parallel_alone);
    model_fill_share(&m, 100);
    save(&m, root, 100);
    model_free(&m);
}

// The checkpoint that was there is there, and no other.
static void assert_first_is_newest(void) {
    char path[512];
    assert_true(checkpoint_newest(root, path, sizeof path, NULL));
    assert_string_equal(path, at("step-00000100"));
    assert_false(exists("step-00000200"));
}

static int lines_with(const char *part) {
    int count = 0;
    for (const char *at_part = said; (at_part = strstr(at_part, part)); at_part++) count++;
    return count;
}

static void a_rank_that_dies_while_saving_publishes_nothing(void **state) {
    (void)state;
    static const char *const ways[] = {"die early", "die late", "rank 0 dies"};
    save_first();
    for (int i = 0; i < 3; i++) {
        assert_true(run_job(ways[i]) != 0);
        assert_first_is_newest();
        assert_true(exists(".tmp-step-00000200"));
        checkpoint_mend(root);
        assert_false(exists(".tmp-step-00000200"));
    }
}

static void a_rank_that_hangs_while_saving_ends_the_job(void **state) {
    (void)state;
    save_first();
    assert_true(run_job("hang") != 0);
    assert_contains(said, "2 in a group of 3; a rank has stopped");
    assert_first_is_newest();
}

static void a_full_disk_is_said_once_and_ends_all_ranks(void **state) {
    (void)state;
    save_first();
    assert_int_equal(run_job("full disk"), 1);
    assert_contains(said, "checkpoint: step 200 was not saved: ");
    assert_contains(said, "File too large; older checkpoints are as they were");
    assert_int_equal(lines_with("mok: error: "), 1);
    assert_false(exists(".tmp-step-00000200"));
    assert_first_is_newest();
}

static void killed_at_any_moment_a_whole_checkpoint_remains(void **state) {
    (void)state;
    char path[512], microseconds[16], victim[16];
    uint64_t random = 5;
    save_first();
    for (int round = 0; round < 4; round++) {
        snprintf(microseconds, sizeof microseconds, "%d", 1000 + (int)(200000 * test_uniform(&random)));
        snprintf(victim, sizeof victim, "%d", round % RANKS);
        setenv("MOK_TEST_KILL", microseconds, 1);
        setenv("MOK_TEST_VICTIM", victim, 1);
        assert_true(run_job("on and on") != 0);
        checkpoint_mend(root);
        if (!checkpoint_newest(root, path, sizeof path, NULL))
            fail_msg("rank %s killed after %s us: no whole checkpoint", victim, microseconds);
    }
}

// ---- folders that cannot be loaded: rank 0 says so, and nobody else ----

static void assert_refused(const char *what, const char *part) {
    int code = run_job(what);
    if (code != 2) fail_msg("%s: found exit code %d, wanted 2; messages: %s", what, code, said);
    assert_contains(said, part);
    assert_int_equal(lines_with("mok: error: "), 1);
}

static void another_model_is_refused_once_by_name_of_what_differs(void **state) {
    (void)state;
    save_first();
    assert_refused("other state", "kv_a_proj_with_mqa.weight.master: found shape [20, 24], wanted [21, 24]");
    assert_refused("other weights", "kv_a_proj_with_mqa.weight: found shape [20, 24], wanted [21, 24]");
}

static void a_damaged_folder_is_refused_once(void **state) {
    (void)state;
    save_first();
    FILE *file = fopen(at("step-00000100/state-00003-of-00005.safetensors"), "r+b");
    assert_non_null(file);
    assert_int_equal(fseek(file, -1, SEEK_END), 0);
    int byte = fgetc(file);
    assert_int_equal(fseek(file, -1, SEEK_END), 0);
    assert_true(fputc(byte ^ 1, file) != EOF && fclose(file) == 0);
    assert_refused("state", "state-00003-of-00005.safetensors: found hash ");
    assert_int_equal(run_job("weights"), 0); // those are whole
    assert_int_equal(remove(at("step-00000100/trainer.json")), 0);
    assert_refused("state", "trainer.json: No such file or directory");
}

// The folder is on rank 0's own disk.
static void a_folder_that_a_rank_does_not_see_is_that_ranks_error(void **state) {
    (void)state;
    save_first();
    assert_refused("unshared", "rank 2: checkpoint: cannot resume: step-00000100/trainer.json: No such file");
}

static int make_run(void **state) {
    int made = make_root(state);
    strcat(root, "/run");
    return made | mkdir(root, 0777);
}

static int remove_run(void **state) {
    *strrchr(root, '/') = 0;
    return remove_root(state);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, make_run, remove_run)

int main(int argc, char **argv) {
    if (argc > 1) return rank_main(argc, argv);
    ssize_t length = readlink("/proc/self/exe", program, sizeof program - 1);
    if (length < 0) return 1;
    const struct CMUnitTest tests[] = {
        TEST(a_rank_that_dies_while_saving_publishes_nothing),
        TEST(a_rank_that_hangs_while_saving_ends_the_job),
        TEST(a_full_disk_is_said_once_and_ends_all_ranks),
        TEST(killed_at_any_moment_a_whole_checkpoint_remains),
        TEST(another_model_is_refused_once_by_name_of_what_differs),
        TEST(a_damaged_folder_is_refused_once),
        TEST(a_folder_that_a_rank_does_not_see_is_that_ranks_error),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

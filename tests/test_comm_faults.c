// How a job of several ranks ends when something is wrong: within seconds, with an exit code that is not 0 and a message,
// and without a process left behind. The program starts itself under mpirun (or what MPIRUN names).
#include "tests/folder.h"

#include <ctype.h>
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>

#include "kernels/clock.h"
#include "kernels/comm.h"
#include "kernels/fail.h"
#include "model/parallel.h"

enum { SECONDS = 30 }; // for one job: most take half a second, and a few the second that they wait for others

// Ranks that wait for one that does not come give up soon; the others may take their time on a busy machine.
static double timeout_of(const char *what) { return !strcmp(what, "stop") || !strncmp(what, "idle", 4) ? 1 : 60; }

// ---- a rank ----

static struct comm *world;

static void alloc_exabyte(void) {
    struct symm s;
    symm_alloc(&s, world, (size_t)1 << 60);
}

static void open_parallel(int ep, int experts) {
    struct parallel p;
    parallel_open(&p, ep, experts);
}

// What the last rank does while the others go on.
static void make_mistake(const char *what) {
    if (!strcmp(what, "user")) fail_user("--steps", "found 0, wanted 1");
    if (!strcmp(what, "internal")) fail_internal("--steps", "found 0, wanted 1");
    if (!strcmp(what, "warn")) fail_warn("--steps", "found 0, wanted 1");
    if (!strcmp(what, "exit 0")) exit(0);
    if (!strcmp(what, "exit 3")) exit(3);
    if (!strcmp(what, "kill")) raise(SIGKILL);
    if (!strcmp(what, "crash")) {
        signal(SIGSEGV, SIG_DFL);
        raise(SIGSEGV);
    }
    if (!strcmp(what, "stop")) raise(SIGSTOP);
    if (!strncmp(what, "idle", 4)) sleep(60);
    if (!strcmp(what, "child")) // that ends is not the rank
        if (fork() == 0) fail_user("--steps", "found 0, wanted 1");
}

// What every rank does then.
static void work(const char *what) {
    static char data[1 << 20];
    size_t offsets[65] = {0};
    int last = comm_size(world) - 1;
    if (!strcmp(what, "idle in send")) comm_send(world, data, sizeof data, last);
    if (!strcmp(what, "idle in exchange")) {
        for (int r = 0; r < comm_size(world); r++) offsets[r + 1] = offsets[r] + 1;
        comm_exchange_rows(world, data + sizeof data / 2, offsets, data, offsets, 100);
    }
    if (!strcmp(what, "idle in reduce_scatter")) {
        for (int r = 0; r < comm_size(world); r++) offsets[r + 1] = offsets[r] + 5;
        comm_reduce_scatter(world, (accum *)data, offsets);
    }
    if (!strcmp(what, "idle in split")) comm_split(world, 0, 0);
    if (!strcmp(what, "exabyte")) alloc_exabyte();
    if (!strcmp(what, "ep 3 of 2")) open_parallel(3, 8);
    if (!strcmp(what, "more ep than experts")) open_parallel(comm_size(world), 1);
    if (!strcmp(what, "ep without experts")) open_parallel(comm_size(world), 0);
    comm_barrier(world);
    comm_barrier(world);
}

static int run_rank(int argc, char **argv, const char *what) {
    comm_start(&argc, &argv);
    comm_set_timeout(timeout_of(what));
    world = comm_world();
    if (comm_rank(world) == comm_size(world) - 1) make_mistake(what);
    work(what);
    comm_stop();
    return 0;
}

// ---- jobs ----

static const char *self;
static char name[64]; // of the job, among the arguments of its processes
static char *said;    // what it printed

static bool is_of_job(const char *process) {
    char path[300], line[4096];
    snprintf(path, sizeof path, "/proc/%s/cmdline", process); // empty for what has ended and was not waited for
    int file = open(path, O_RDONLY);
    if (file < 0) return false;
    ssize_t got = read(file, line, sizeof line);
    close(file);
    return got > 0 && memmem(line, (size_t)got, name, strlen(name)) != NULL;
}

static int count_processes(void) {
    int count = 0;
    DIR *folder = opendir("/proc");
    assert_non_null(folder);
    for (struct dirent *e; (e = readdir(folder));)
        if (isdigit((unsigned char)*e->d_name) && is_of_job(e->d_name)) count++;
    closedir(folder);
    return count;
}

static int finish(pid_t pid, double limit) {
    int status;
    double end = clock_seconds() + limit;
    while (waitpid(pid, &status, WNOHANG) == 0) {
        if (clock_seconds() > end) {
            kill(-pid, SIGKILL);
            fail_msg("%s goes on after %g s", name, limit);
        }
        usleep(10000);
    }
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

// Runs the job, on as many ranks or without mpirun (0), and returns its exit code.
static int run_job(int ranks, const char *what) {
    static int jobs;
    char count[16];
    size_t bytes;
    snprintf(name, sizeof name, "job-%d-%d", (int)getpid(), jobs++);
    snprintf(count, sizeof count, "%d", ranks);
    // MPIRUN may be several words.
    const char *arguments[] = {"sh", "-c", "exec ${MPIRUN:-mpirun} \"$@\"", "sh", "-n", count, self, what, name, NULL};
    const char *const *command = ranks ? arguments : arguments + 6;
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        int file = open(at("said"), O_WRONLY | O_CREAT | O_TRUNC, 0666), null = open("/dev/null", O_RDONLY);
        setpgid(0, 0);
        if (file < 0 || dup2(file, 1) < 0 || dup2(file, 2) < 0 || dup2(null, 0) < 0) _exit(126);
        execvp(command[0], (char *const *)command);
        _exit(127);
    }
    int code = finish(pid, SECONDS);
    free(said);
    said = read_bytes(at("said"), &bytes);
    for (int i = 0; i < 500 && count_processes() > 0; i++) usleep(10000); // the last ones may be about to end
    if (count_processes() > 0) fail_msg("%s left %d processes", what, count_processes());
    return code;
}

static void assert_code(int found, int wanted) {
    if (found != wanted) fail_msg("exit code %d, wanted %d; it said: %s", found, wanted, said);
}

static void a_job_without_mistakes_ends_well(void **state) {
    (void)state;
    assert_code(run_job(3, "nothing"), 0);
    assert_string_equal(said, "");
    assert_code(run_job(1, "nothing"), 0);
    assert_code(run_job(0, "nothing"), 0);
}

static void one_rank_ends_as_a_program_without_ranks(void **state) {
    (void)state;
    for (int ranks = 0; ranks <= 1; ranks++) {
        assert_code(run_job(ranks, "user"), 2);
        assert_contains(said, "mok: error: --steps: found 0, wanted 1\n");
        assert_code(run_job(ranks, "internal"), 1);
    }
}

// NCCL 585 and 1777: one rank ends, the others wait for it for ever.
static void an_error_on_one_rank_ends_the_job_with_its_code(void **state) {
    (void)state;
    assert_code(run_job(3, "user"), 2);
    assert_contains(said, "mok: error: rank 2: --steps: found 0, wanted 1\n");
    assert_code(run_job(3, "internal"), 1);
    assert_contains(said, "mok: error: rank 2: --steps: found 0, wanted 1\n");
}

static void a_warning_names_the_rank_and_the_job_goes_on(void **state) {
    (void)state;
    assert_code(run_job(3, "warn"), 0);
    assert_string_equal(said, "mok: warning: rank 2: --steps: found 0, wanted 1\n");
}

static void exit_on_one_rank_ends_the_job(void **state) {
    (void)state;
    assert_code(run_job(3, "exit 3"), 3);
    assert_code(run_job(3, "exit 0"), 1);
    assert_contains(said, "mok: error: rank 2: exit: ");
}

static void a_child_that_ends_is_no_rank(void **state) {
    (void)state;
    assert_code(run_job(3, "child"), 0);
}

static void a_killed_rank_ends_the_job(void **state) {
    (void)state;
    const char *ways[] = {"kill", "crash"};
    for (int w = 0; w < 2; w++) {
        if (run_job(3, ways[w]) == 0) fail_msg("%s: exit code 0; it said: %s", ways[w], said);
        assert_int_not_equal(*said, 0); // mpirun says which signal
    }
}

static void a_stopped_rank_is_named_and_ends_the_job(void **state) {
    (void)state;
    assert_code(run_job(3, "stop"), 1);
    assert_contains(said, ": comm_barrier: waited 1 s for rank 2 in a group of 3");
    assert_contains(said, "--timeout");
}

static void every_wait_for_other_ranks_has_an_end(void **state) {
    (void)state;
    const char *waits[][2] = {
        {"idle in send", "comm_send: waited 1 s for rank 2 "},
        {"idle in exchange", "comm_exchange_rows: waited 1 s for "},
        {"idle in reduce_scatter", "comm_reduce_scatter: waited 1 s for rank 2 "},
        {"idle in split", "comm_barrier: waited 1 s for rank 2 "},
    };
    for (size_t w = 0; w < sizeof waits / sizeof *waits; w++) {
        assert_code(run_job(3, waits[w][0]), 1);
        assert_contains(said, waits[w][1]);
    }
}

// Ubuntu 24.04's MPICH package starts N processes of which each is rank 0 of 1: all would write the same files.
static void a_launcher_that_does_not_belong_to_the_library_is_refused(void **state) {
    (void)state;
    const char *names[] = {"PMI_SIZE", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char wanted[128];
        snprintf(wanted, sizeof wanted, "mok: error: launcher: found %s=4 and MPI sees 1 rank, wanted ", names[i]);
        setenv(names[i], "4", 1);
        assert_code(run_job(0, "nothing"), 2);
        assert_contains(said, wanted);
        setenv(names[i], "1", 1);
        assert_code(run_job(0, "nothing"), 0);
        unsetenv(names[i]);
    }
    setenv("SLURM_NTASKS", "4", 1); // a script of sbatch starts one process itself
    assert_code(run_job(0, "nothing"), 0);
    unsetenv("SLURM_NTASKS");
}

static void memory_that_the_host_does_not_have_is_refused(void **state) {
    (void)state;
    assert_code(run_job(2, "exabyte"), 2);
    assert_contains(said, ": shared memory: found ");
    assert_contains(said, "GiB for the 2 ranks of this host; lower --batch");
    assert_null(strstr(strstr(said, "mok: error: ") + 1, "mok: error: ")); // once
}

static void an_ep_that_does_not_fit_is_refused(void **state) {
    (void)state;
    assert_code(run_job(2, "ep 3 of 2"), 2);
    assert_contains(said, ": --ep: found 3 with 2 ranks, wanted ");
    assert_code(run_job(2, "more ep than experts"), 2);
    assert_contains(said, ": --ep: found 2, more than the 1 ");
    assert_code(run_job(2, "ep without experts"), 2);
    assert_contains(said, ": --ep: found 2 and a model without experts, wanted 1");
}

#define TEST(function) cmocka_unit_test_setup_teardown(function, make_root, remove_root)

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        TEST(a_job_without_mistakes_ends_well),
        TEST(one_rank_ends_as_a_program_without_ranks),
        TEST(an_error_on_one_rank_ends_the_job_with_its_code),
        TEST(a_warning_names_the_rank_and_the_job_goes_on),
        TEST(exit_on_one_rank_ends_the_job),
        TEST(a_child_that_ends_is_no_rank),
        TEST(a_killed_rank_ends_the_job),
        TEST(a_stopped_rank_is_named_and_ends_the_job),
        TEST(every_wait_for_other_ranks_has_an_end),
        TEST(a_launcher_that_does_not_belong_to_the_library_is_refused),
        TEST(memory_that_the_host_does_not_have_is_refused),
        TEST(an_ep_that_does_not_fit_is_refused),
    };
    if (argc > 1) return run_rank(argc, argv, argv[1]);
    self = argv[0];
    setenv("OMP_NUM_THREADS", "1", 1);
    return cmocka_run_group_tests(tests, NULL, NULL);
}

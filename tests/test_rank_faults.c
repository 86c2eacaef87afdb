// What can happen to a training job of several ranks: one is killed or stops, signals, a full disk, too little memory, a
// reader that goes away. The job ends within seconds, says why, leaves no process and no shared memory behind, and its run
// goes on from the newest checkpoint. Started without mpirun: it starts $MPIRUN itself.
#include "tests/program.h"
#include "tests/small_disk.h"

#include <dirent.h>
#include <sys/prctl.h>

#include "kernels/clock.h"
#include "kernels/kernels.h"
#include "model/checkpoint.h"

// ---- jobs ----

enum { SECONDS = 60 }; // for a whole job: each takes one or two on an idle machine
static pid_t launcher;
static rlim_t address_space; // of the launcher and the ranks; 0: as it is
static bool reader_leaves;   // after the first line of the job's output

static void limit_address_space(void) {
    if (address_space && setrlimit(RLIMIT_AS, &(struct rlimit){address_space, address_space}) != 0) _exit(125);
}

// Every process of the job can be told by the test's folder in its environment, the launcher's helpers too.
static void start_job(int ranks, const char *const *arguments) {
    char count[16];
    const char *pipeline = reader_leaves ? "${MPIRUN:-mpirun} \"$@\" | head -n 1" : "exec ${MPIRUN:-mpirun} \"$@\"";
    const char *argv[64] = {"sh", "-c", pipeline, "sh", "-n", count, program()};
    snprintf(count, sizeof count, "%d", ranks);
    for (int i = 7; *arguments; arguments++) argv[i++] = *arguments;
    const char *kept = at("stdout"), *messages = at("stderr");
    remove(kept); // that of an earlier job is not to be taken for this one's
    launcher = fork();
    assert_true(launcher >= 0);
    if (launcher > 0) return;
    prctl(PR_SET_PDEATHSIG, SIGKILL); // a test that is ended takes its job along
    setenv("MOK_TEST_JOB", root, 1);
    redirect(STDOUT_FILENO, kept);
    redirect(STDERR_FILENO, messages);
    redirect(STDIN_FILENO, "/dev/null");
    limit_address_space();
    execv("/bin/sh", (char *const *)argv);
    _exit(127);
}

#define start_ranks(ranks, ...) start_job(ranks, (const char *const[]){__VA_ARGS__, NULL})
#define run_ranks(ranks, ...)   (start_ranks(ranks, __VA_ARGS__), finish_job(SECONDS))

// /proc/PROCESS/FILE with a final zero more, empty if the process is gone.
static size_t read_process(const char *process, const char *file, char *text, size_t size) {
    char path[300];
    snprintf(path, sizeof path, "/proc/%s/%s", process, file);
    int descriptor = open(path, O_RDONLY);
    ssize_t got = descriptor < 0 ? 0 : read(descriptor, text, size - 1);
    if (descriptor >= 0) close(descriptor);
    text[got > 0 ? got : 0] = 0;
    return got > 0 ? (size_t)got : 0;
}

static bool is_of_job(const char *process) {
    static char environment[1 << 16];
    char wanted[128];
    size_t length = (size_t)snprintf(wanted, sizeof wanted, "MOK_TEST_JOB=%s", root) + 1;
    size_t got = read_process(process, "environ", environment, sizeof environment);
    return got && memmem(environment, got, wanted, length);
}

static bool is_rank(const char *process) {
    char line[4096];
    read_process(process, "cmdline", line, sizeof line);
    return strcmp(line, program()) == 0;
}

// Processes of the job, or its ranks alone. pids [at most 64] may be NULL.
static int find_processes(bool ranks_only, pid_t *pids) {
    int count = 0;
    DIR *folder = opendir("/proc");
    assert_non_null(folder);
    for (struct dirent *e; (e = readdir(folder)) && count < 64;) {
        if (!isdigit((unsigned char)*e->d_name) || !is_of_job(e->d_name)) continue;
        if (ranks_only && !is_rank(e->d_name)) continue;
        if (pids) pids[count] = atoi(e->d_name);
        count++;
    }
    closedir(folder);
    return count;
}

static void kill_job(void) {
    pid_t pids[64];
    int count = find_processes(false, pids);
    for (int i = 0; i < count; i++) kill(pids[i], SIGKILL);
}

static bool has_ended(pid_t pid) {
    siginfo_t info = {0};
    assert_int_equal(waitid(P_PID, (id_t)pid, &info, WEXITED | WNOHANG | WNOWAIT), 0);
    return info.si_pid == pid;
}

static void assert_nothing_left(void);

// The launcher's exit code, which comes within so many seconds; nothing of the job is then left.
static int finish_job(double limit) {
    double end = clock_seconds() + limit;
    while (!has_ended(launcher) && clock_seconds() < end) usleep(5000);
    bool late = !has_ended(launcher);
    if (late) kill_job();
    int code = finish_program(launcher);
    if (late) fail_msg("the job went on for %g s; it said: %s%s", limit, out, err);
    assert_nothing_left();
    return code;
}

// ---- what a job leaves ----

static bool own_shared_memory; // /dev/shm is this test program's alone
static int files_of_mpi;       // that ranks left which died while MPI started

// Some KiB of MPICH's or MiB of UCX's: they have a name for a moment of MPI_Init, in every program that uses them, and
// stay if the rank is killed right then.
static bool is_file_of_mpi(const char *name) {
    return !strncmp(name, "mpich_shar", 10) || !strncmp(name, "ucx_shm_", 8);
}

static void assert_no_shared_memory(void) {
    DIR *folder = own_shared_memory ? opendir("/dev/shm") : NULL;
    if (!folder) return;
    for (struct dirent *e; (e = readdir(folder));) {
        char path[300];
        snprintf(path, sizeof path, "/dev/shm/%s", e->d_name);
        if (*e->d_name == '.') continue;
        bool started = strstr(out, ", on CPU"); // what rank 0 prints first, when all ranks are through MPI_Init
        if (started || !is_file_of_mpi(e->d_name)) fail_msg("the job left %s; it said: %s", path, out);
        files_of_mpi++;
        assert_int_equal(remove(path), 0);
    }
    closedir(folder);
}

static void assert_nothing_left(void) {
    double end = clock_seconds() + 5;
    while (find_processes(false, NULL) > 0 && clock_seconds() < end) usleep(5000);
    int left = find_processes(false, NULL);
    kill_job();
    if (left) fail_msg("the job left %d processes; it said: %s%s", left, out, err);
    assert_no_shared_memory();
}

// A /dev/shm of its own, where no other program's files come and go; without the right to mount it is not looked at.
static int hide_shared_memory(void **state) {
    (void)state;
    own_shared_memory = enter_namespace() && mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0 &&
                        mount("none", "/dev/shm", "tmpfs", 0, "size=1g") == 0;
    return 0;
}

static int count_files_of_mpi(void **state) {
    (void)state;
    if (files_of_mpi) print_message("files that ranks left which died within MPI_Init: %d\n", files_of_mpi);
    return 0;
}

// ---- runs ----

#define TRAIN QUIET, "--out", at("run")
#define LONG  TRAIN, "--steps", "1000000", "--save-every", "1000000"

static void wait_for_text(const char *text) {
    for (int i = 0; i < 1000 * SECONDS / 5 && !has_ended(launcher); i++) {
        char *said = exists("stdout") ? read_text("stdout") : calloc(1, 1);
        bool found = strstr(said, text);
        free(said);
        if (found) return;
        usleep(5000);
    }
    kill_job();
    finish_program(launcher);
    fail_msg("found \"%s\" and \"%s\", wanted \"%s\"", out, err, text);
}

// The newest checkpoint is whole, by its hashes; 0: there is none. No other folder looks like one.
static int newest_step(void) {
    char path[512];
    int step = 0;
    DIR *folder = opendir(at("run"));
    for (struct dirent *e; folder && (e = readdir(folder));)
        if (!strncmp(e->d_name, "step-", 5) && atoi(e->d_name + 5) > step) step = atoi(e->d_name + 5);
    if (folder) closedir(folder);
    if (step && (!checkpoint_newest(at("run"), path, sizeof path, NULL) || atoi(strrchr(path, '-') + 1) != step))
        fail_msg("step %d was published and is not whole", step);
    return step;
}

// Two more steps after the newest checkpoint, or from the beginning, on any number of ranks.
static void assert_goes_on(int ranks) {
    int step = newest_step();
    char steps[16], begin[64];
    snprintf(steps, sizeof steps, "%d", step + 2);
    snprintf(begin, sizeof begin, "going on from %s/step-%08d", at("run"), step);
    assert_code(run_ranks(ranks, "--resume", "--steps", steps, "--save-every", "1", "--out", at("run")), 0);
    assert_string_equal(err, "");
    assert_contains(out, step ? begin : "starting at the beginning");
    assert_int_equal(newest_step(), step + 2);
    assert_steps_logged("run", 1, step + 2);
    DIR *folder = opendir(at("run"));
    for (struct dirent *e; (e = readdir(folder));)
        if (!strncmp(e->d_name, ".tmp-", 5)) fail_msg("half a checkpoint stayed: %s", e->d_name);
    closedir(folder);
}

// ---- a rank is killed ----

static void wait_for_ranks(int ranks) {
    for (double end = clock_seconds() + SECONDS; clock_seconds() < end; usleep(1000))
        if (find_processes(true, NULL) >= ranks || has_ended(launcher)) return;
}

#define SHORT                                                                                                          \
    "--batch", "1", "--seq", "32", "--warmup", "2", "--sample-tokens", "0", "--eval-every", "0", "--steps", "8",       \
        "--save-every", "1", "--out", at("run")

// Kills a random rank of a short run after so many seconds. false: the run had ended well before.
static bool kill_one(const char *preset, const char *moe, int ranks, double seconds, uint64_t *random) {
    pid_t pids[64];
    start_ranks(ranks, "--preset", preset, "--moe", moe, SHORT);
    wait_for_ranks(1);
    usleep((useconds_t)(1e6 * seconds));
    int found = find_processes(true, pids);
    if (found) kill(pids[(int)(test_uniform(random) * found)], SIGKILL);
    int code = finish_job(found ? 10 : SECONDS);
    if (code == 0 && newest_step() == 8) return false;
    if (code == 0) fail_msg("exit code 0 of a killed job of %d ranks; it said: %s%s", ranks, out, err);
    // Hydra, MPICH's launcher, says it on standard output.
    if (!strstr(out, "BAD TERMINATION") && !strstr(err, "signal") && !strstr(err, "mok: error: "))
        fail_msg("no word of a killed rank; it said: %s%s", out, err);
    return true;
}

// NCCL 585, 1777; torchtitan 1204: one rank dies and the others wait for ever.
static void rank_killed_at_any_moment_ends_the_job(void **state) {
    (void)state;
    static const char *const presets[] = {"unit", "tiny"}, *const layers[] = {"mok", "alltoall"};
    int wanted = getenv("MOK_LONG") ? 20 : 5, killed = 0;
    uint64_t random = (uint64_t)time(NULL);
    double start = clock_seconds();
    print_message("seed %llu\n", (unsigned long long)random);
    assert_code(run_ranks(3, "--preset", "tiny", SHORT), 0);
    double whole = clock_seconds() - start;
    for (int i = 0; killed < wanted && i < 10 * wanted; i++) {
        remove_tree(at("run"));
        const char *preset = presets[i / 2 % 2], *moe = layers[i % 2];
        if (!kill_one(preset, moe, 2 + i % 3, whole * test_uniform(&random), &random)) {
            whole *= 0.8; // the machine had more to do when it was measured
            continue;
        }
        killed++;
        if (exists("run/config.json")) assert_goes_on(1 + (i + 1) % 3);
        if (!exists("run")) assert_int_equal(mkdir(at("run"), 0777), 0);
    }
    assert_int_equal(killed, wanted);
}

// ---- a rank stops ----

// The number in the job of a process, as its launcher told it.
static int rank_of(pid_t pid) {
    static char environment[1 << 16];
    static const char *const names[] = {"PMI_RANK=", "OMPI_COMM_WORLD_RANK=", "PMIX_RANK="};
    char process[16];
    snprintf(process, sizeof process, "%d", (int)pid);
    size_t got = read_process(process, "environ", environment, sizeof environment);
    for (const char *text = environment; text < environment + got; text += strlen(text) + 1)
        for (int i = 0; i < 3; i++)
            if (!strncmp(text, names[i], strlen(names[i]))) return atoi(text + strlen(names[i]));
    fail_msg("found no rank number in the environment of process %d", (int)pid);
    return -1;
}

// Among all lines that speak of a wait for ranks one names this rank.
static bool is_named(int rank) {
    for (const char *list = err; (list = strstr(list, "for rank"));) {
        list += strlen("for rank");
        for (const char *end = list + strcspn(list, ";\n"); list < end; list++)
            if (isdigit((unsigned char)*list) && !isdigit((unsigned char)list[-1]) && strtol(list, NULL, 10) == rank)
                return true;
    }
    return false;
}

// DeepEP 26; Megatron-LM 1207: a rank that hangs stops all others without a word, for ever.
static void rank_that_stops_is_named_by_those_that_wait(void **state) {
    (void)state;
    static const char *const layers[] = {"mok", "alltoall"};
    uint64_t random = (uint64_t)time(NULL);
    for (int i = 0; i < (getenv("MOK_LONG") ? 8 : 2); i++) {
        pid_t pids[64];
        start_ranks(3, LONG, "--overwrite", "--timeout", "1", "--moe", layers[i % 2]);
        wait_for_text("step       2/");
        usleep((useconds_t)(1e5 * test_uniform(&random)));
        assert_int_equal(find_processes(true, pids), 3);
        pid_t stopped = pids[(int)(3 * test_uniform(&random))];
        int rank = rank_of(stopped);
        assert_int_equal(kill(stopped, SIGSTOP), 0);
        assert_code(finish_job(20), 1);
        if (!is_named(rank)) fail_msg("rank %d was stopped; it said: %s", rank, err);
        // A barrier of the megakernel says of which layer and pass, a collective its own name.
        if (!strstr(err, " pass of layer ") && !strstr(err, ": comm_"))
            fail_msg("no word of what was waited for; it said: %s", err);
    }
}

// ---- a rank ends by itself ----

static void full_disk_on_the_rank_that_writes_ends_all(void **state) {
    (void)state;
    assert_code(run_ranks(2, QUIET, "--steps", "2", "--save-every", "2", "--out", at("one")), 0);
    size_t one = checkpoint_bytes_on_disk(at("one"));
    mount_small_disk("disk", one * 7 / 4);
    assert_code(run_ranks(3, QUIET, "--steps", "6", "--save-every", "3", "--keep", "1", "--out", at("disk/run")), 1);
    assert_contains(err, "mok: error: rank 0: checkpoint: step 6 was not saved: ");
    assert_contains(err, "No space left on device");
    assert_int_equal(count_of(err, "mok: error: "), 1);
    assert_true(exists("disk/run/step-00000003"));
    assert_false(exists("disk/run/step-00000006") || exists("disk/run/.tmp-step-00000006"));
    unmount_small_disk("disk");
}

// ---- signals ----

static int step_of_stop(int number) {
    char wanted[64];
    snprintf(wanted, sizeof wanted, "stopped by signal %d after step ", number);
    if (count_of(out, wanted) != 1) fail_msg("found \"%s\", wanted \"%s\" once", out, wanted);
    return atoi(strstr(out, wanted) + strlen(wanted));
}

// Open MPI's mpirun, asked by Ctrl-C or SIGTERM, gives its ranks one second and ends with exit code 1; SIGUSR1 it passes on.
// Its line in build/mpi.mk has variables of its own.
static bool launcher_passes_on(void) { return !getenv("MPIRUN") || !strstr(getenv("MPIRUN"), "OMPI_"); }

// Ctrl-C and what schedulers send, to the launcher or to one rank alone: all ranks stop after the same step and save it.
static void signal_is_obeyed_by_all_ranks_at_one_step(void **state) {
    (void)state;
    static const int numbers[] = {SIGINT, SIGTERM, SIGTERM};
    for (int i = 0; i < 3; i++) {
        pid_t pids[64];
        start_ranks(3, LONG, "--overwrite", "--moe", i == 1 ? "alltoall" : "mok");
        wait_for_text("step       2/");
        assert_int_equal(find_processes(true, pids), 3);
        int number = i == 2 || launcher_passes_on() ? numbers[i] : SIGUSR1;
        assert_int_equal(kill(i < 2 ? launcher : pids[2], number), 0);
        assert_code(finish_job(SECONDS), 0);
        assert_int_equal(newest_step(), step_of_stop(number));
        assert_goes_on(2);
    }
}

static void launcher_that_is_killed_takes_the_ranks_along(void **state) {
    (void)state;
    start_ranks(3, LONG);
    wait_for_text("step       2/");
    assert_int_equal(kill(launcher, SIGKILL), 0);
    assert_code(finish_job(10), -SIGKILL);
    assert_goes_on(3);
}

// mpirun ... | head
static void reader_that_leaves_ends_the_job(void **state) {
    (void)state;
    reader_leaves = true;
    start_ranks(3, TRAIN, "--steps", "1000000", "--save-every", "2");
    reader_leaves = false;
    finish_job(SECONDS); // head's code
    assert_int_equal(count_of(out, "\n"), 1);
    if (exists("run/config.json")) assert_goes_on(2);
}

// ---- memory ----

// This program as a rank: room for its own piece but not for all.
static int be_rank(int argc, char **argv) {
    const size_t piece = (size_t)256 << 20;
    size_t pages = 0;
    struct symm s;
    comm_start(&argc, &argv);
    FILE *file = fopen("/proc/self/statm", "r");
    if (!file || fscanf(file, "%zu", &pages) != 1) return 99;
    fclose(file);
    rlim_t most = pages * (size_t)sysconf(_SC_PAGE_SIZE) + piece + piece / 2;
    if (setrlimit(RLIMIT_AS, &(struct rlimit){most, most}) != 0) return 99;
    symm_alloc(&s, comm_world(), piece);
    comm_stop();
    return 0;
}

static char self[4096];

static void memory_that_a_process_may_not_have_is_an_error_of_one_line(void **state) {
    (void)state;
    setenv("MOK_TRAIN", self, 1);
    int code = run_ranks(2, "rank");
    unsetenv("MOK_TRAIN");
    assert_code(code, 2);
    assert_contains(err, ": shared memory: found no room for 268");
    assert_contains(err, "wanted 2 pieces of");
    assert_contains(err, "lower --batch or --seq");
}

static void too_little_memory_ends_the_job_with_a_message(void **state) {
    (void)state;
#ifdef __SANITIZE_ADDRESS__
    skip(); // it takes all addresses for itself
#endif
    // Activations of 4.4 GiB where a rank may have 4: libraries and the stacks of many threads take more than one.
    if (device_memory_bytes() < (size_t)16 << 30) skip();
    address_space = (rlim_t)4 << 30;
    int code = run_ranks(2, "--preset", "unit", "--seq", "1024", "--batch", "240", "--warmup", "0", "--out", at("run"));
    address_space = 0;
    assert_code(code, 1);
    assert_contains(err, ": device memory: found no room for ");
}

// Containers give 64 MiB: MPI needs some of it, the layers' memory, here 26 MiB for each rank, none.
static void small_shared_memory_folder_is_no_limit(void **state) {
    (void)state;
    if (!own_shared_memory || mount("none", "/dev/shm", "tmpfs", 0, "size=32m") != 0) skip();
    int code = run_ranks(2, "--preset", "unit", "--seq", "128", "--batch", "128", "--steps", "1", "--warmup", "0",
                         "--save-every", "0", "--sample-tokens", "0", "--eval-every", "0", "--out", at("run"));
    assert_int_equal(umount2("/dev/shm", MNT_DETACH), 0);
    assert_code(code, 0);
}

static void no_shared_memory_folder_at_all_ends_the_job(void **state) {
    (void)state;
    if (!own_shared_memory || mount("none", "/dev/shm", "tmpfs", 0, "size=64k") != 0) skip();
    int code = run_ranks(3, TRAIN, "--steps", "2", "--save-every", "0");
    assert_int_equal(umount2("/dev/shm", MNT_DETACH), 0);
    assert_int_not_equal(code, 0); // MPI ends it, mostly with words of its own
}

// ---- more ranks than cores ----

static void more_ranks_than_cores_finish(void **state) {
    (void)state;
    static const char *const layers[] = {"mok", "alltoall"};
    for (int i = 0; i < 2; i++) {
        double start = clock_seconds();
        assert_code(run_ranks(6, TRAIN, "--overwrite", "--steps", "5", "--save-every", "5", "--moe", layers[i]), 0);
        print_message("6 ranks, 5 steps, --moe %s: %.1f s\n", layers[i], clock_seconds() - start);
        assert_int_equal(newest_step(), 5);
    }
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        TEST(rank_killed_at_any_moment_ends_the_job),
        TEST(rank_that_stops_is_named_by_those_that_wait),
        TEST(full_disk_on_the_rank_that_writes_ends_all),
        TEST(signal_is_obeyed_by_all_ranks_at_one_step),
        TEST(launcher_that_is_killed_takes_the_ranks_along),
        TEST(reader_that_leaves_ends_the_job),
        TEST(memory_that_a_process_may_not_have_is_an_error_of_one_line),
        TEST(too_little_memory_ends_the_job_with_a_message),
        TEST(small_shared_memory_folder_is_no_limit),
        TEST(no_shared_memory_folder_at_all_ends_the_job),
        TEST(more_ranks_than_cores_finish),
    };
    if (argc > 1) return be_rank(argc, argv);
    if (readlink("/proc/self/exe", self, sizeof self - 1) < 0) return 1;
    use_one_thread();
    return cmocka_run_group_tests(tests, hide_shared_memory, count_files_of_mpi);
}

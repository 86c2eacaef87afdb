// Checkpoints that are damaged, and failures while they are saved.
#include "tests/child.h"
#include "tests/saved_model.h"
#include "tests/small_disk.h"
#include "tests/trainer_json.h"

#include <dirent.h>
#include <signal.h>
#include <sys/resource.h>

#include "data/files.h"
#include "model/shards.h"

// ---- checkpoints that are damaged ----

static void newest_skips_what_is_not_complete_and_says_why(void **state) {
    (void)state;
    struct model a;
    char path[512], *text = NULL;
    size_t bytes = 0;
    model_init(&a, &uneven);
    model_fill(&a, 7);
    assert_false(checkpoint_newest(at("absent"), path, sizeof path, stderr));
    assert_false(checkpoint_newest(root, path, sizeof path, stderr));
    for (int step = 1; step <= 5; step++) save_step(&a, step, 0);
    assert_int_equal(rename(at("step-00000005"), at("step-00000010")), 0);
    assert_int_equal(mkdir(at("step-00000009"), 0777), 0);
    assert_int_equal(mkdir(at(".tmp-step-00000011"), 0777), 0);
    assert_int_equal(remove(at("step-00000010/state-00003-of-00005.safetensors")), 0);
    assert_int_equal(truncate(at("step-00000004/model-00001-of-00005.safetensors"), 1000), 0);
    FILE *broken = fopen(at("step-00000003/model-00002-of-00005.safetensors"), "r+b"); // right size, no header
    assert_int_equal(fwrite("\xff\xff\xff\xff\xff\xff\xff\xff", 1, 8, broken), 8);
    fclose(broken);
    FILE *log = open_memstream(&text, &bytes);
    assert_true(checkpoint_newest(root, path, sizeof path, log));
    fclose(log);
    assert_string_equal(path, at("step-00000002"));
    assert_contains(text, "skipped step-00000010: ");
    assert_contains(text, "step-00000010/state-00003-of-00005.safetensors: No such file or directory");
    assert_contains(text, "step-00000009/trainer.json: No such file or directory");
    assert_contains(text, "step-00000004/model-00001-of-00005.safetensors: found 1000 bytes, wanted ");
    assert_contains(text, "step-00000003/model-00002-of-00005.safetensors: found hash ");
    assert_null(strstr(text, "tmp-step"));
    free(text);
    model_free(&a);
}

static void load_first(void *model) { checkpoint_load_state(at("step-00000001"), &((struct model *)model)->c); }
static void load_second(void *model) { checkpoint_load_state(at("step-00000002"), &((struct model *)model)->c); }
static void load_second_weights(void *model) {
    checkpoint_load_weights(at("step-00000002"), &((struct model *)model)->c);
}

static void flip_bit(const char *path, long byte, int bit) {
    FILE *file = fopen(path, "r+b");
    assert_non_null(file);
    assert_int_equal(fseek(file, byte, SEEK_SET), 0);
    int value = fgetc(file);
    assert_true(value != EOF && fseek(file, byte, SEEK_SET) == 0);
    assert_true(fputc(value ^ 1 << bit, file) != EOF && fclose(file) == 0);
}

static int is_listed(const struct dirent *entry) {
    return entry->d_name[0] != '.' && strcmp(entry->d_name, "trainer.json") != 0;
}

// What checkpoint_newest says on its log; free with free().
static char *newest_of_root(char path[512]) {
    char *text = NULL;
    size_t bytes;
    FILE *log = open_memstream(&text, &bytes);
    assert_true(checkpoint_newest(root, path, 512, log));
    fclose(log);
    return text;
}

// Sizes do not tell: a flipped bit in a moment, say, would be a silent change of the run.
static void one_flipped_bit_in_any_file_is_noticed(void **state) {
    (void)state;
    struct model a;
    struct dirent **files;
    char path[512], text[4096];
    uint64_t random = 2;
    model_init(&a, &uneven);
    model_fill(&a, 20);
    save_step(&a, 1, 0);
    save_step(&a, 2, 0);
    int count = scandir(at("step-00000002"), &files, is_listed, alphasort);
    assert_true(count >= 13);
    for (int i = 0; i < count; i++) {
        char file[180], wanted[512];
        struct stat info;
        snprintf(file, sizeof file, "step-00000002/%.150s", files[i]->d_name);
        assert_int_equal(stat(at(file), &info), 0);
        long places[] = {0, (long)(test_uniform(&random) * (double)info.st_size), info.st_size - 1};
        for (int place = 0; place < 3; place++) {
            int bit = (int)(8 * test_uniform(&random));
            flip_bit(at(file), places[place], bit);
            char *said = newest_of_root(path);
            assert_string_equal(path, at("step-00000001"));
            snprintf(wanted, sizeof wanted, "skipped step-00000002: %s: found hash ", at(file));
            assert_contains(said, wanted);
            assert_contains(said, ": damaged\n");
            free(said);
            if (place == 1) {
                assert_int_equal(run_child(load_second, &a, text, sizeof text), 2);
                assert_contains(text, "mok: error: checkpoint: cannot resume: ");
                assert_contains(text, ": damaged\n");
                // Weights alone do not need the state.
                bool needed = strncmp(files[i]->d_name, "state-", 6) != 0;
                assert_int_equal(run_child(load_second_weights, &a, text, sizeof text), needed ? 2 : 0);
                if (needed) assert_contains(text, ": damaged\n");
            }
            flip_bit(at(file), places[place], bit);
        }
        free(files[i]);
    }
    free(files);
    assert_true(checkpoint_newest(root, path, sizeof path, NULL));
    assert_string_equal(path, at("step-00000002"));
    model_free(&a);
}

// Nor may trainer.json itself be trusted. White space around its last member may change, since that changes nothing.
static void one_flipped_bit_in_trainer_json_is_noticed(void **state) {
    (void)state;
    struct model a;
    char path[512];
    size_t bytes;
    uint64_t random = 3;
    model_init(&a, &uneven);
    model_fill(&a, 21);
    a.c.options = cJSON_Parse("{\"lr\": 0.0003, \"data\": \"stories\"}");
    save_step(&a, 1, 0);
    save_step(&a, 2, 0);
    char *good = read_bytes(at("step-00000002/trainer.json"), &bytes);
    int accepted = 0;
    for (size_t i = 0; i < bytes; i++) {
        int bit = (int)(8 * test_uniform(&random));
        flip_bit(at("step-00000002/trainer.json"), (long)i, bit);
        assert_true(checkpoint_newest(root, path, sizeof path, NULL));
        if (strcmp(path, at("step-00000002")) == 0) {
            struct checkpoint c = {0};
            checkpoint_load_progress(path, &c);
            assert_true(c.step == 2 && c.sequences == a.c.sequences && c.tokens == a.c.tokens && c.seed == a.c.seed);
            assert_true(cJSON_Compare(c.options, a.c.options, true));
            cJSON_Delete(c.options);
            accepted++;
        }
        flip_bit(at("step-00000002/trainer.json"), (long)i, bit);
    }
    assert_true(accepted <= 5); // the white space of the last member
    free(good);
    cJSON_Delete(a.c.options);
    model_free(&a);
}

static void trainer_json_that_lies_makes_a_checkpoint_incomplete(void **state) {
    (void)state;
    struct model a;
    char path[512], *text = NULL;
    size_t bytes;
    model_init(&a, &uneven);
    model_fill(&a, 8);
    save_step(&a, 1, 0);
    char *good = read_bytes(at("step-00000001/trainer.json"), &bytes);
    // Cut anywhere, it is no JSON; the last byte is only the newline.
    for (size_t cut = 0; cut < bytes; cut += cut < bytes - 40 ? 7 : 1) {
        write_file("step-00000001/trainer.json", good, cut);
        assert_false(checkpoint_newest(root, path, sizeof path, NULL));
    }
    const char *config_hash = strstr(good, "\"config.json\""), *hash = strstr(config_hash, "\"hash\":") + 9;
    char right[512];
    snprintf(right, sizeof right, "\"files\": {\"config.json\": {\"bytes\": %d, \"hash\": \"%.16s\"}}",
             atoi(strstr(config_hash, "\"bytes\":") + 9), hash);
#define FILES(entry) "{\"format_version\": 2, \"files\": {" entry "}"
    const struct {
        const char *json, *part;
    } wrong[] = {
        {"{\"step\": 1", "found no format_version, wanted 2"},
        {"{\"format_version\": \"2\"", "found no format_version, wanted 2"},
        {"{\"format_version\": 1, \"files\": {\"config.json\": 800}", "found format_version 1, wanted 2"},
        {"{\"format_version\": 3", "found format_version 3, wanted 2"},
        {"{\"format_version\": 2", "found no list of files, wanted one"},
        {FILES(""), "found no list of files, wanted one"},
        {FILES("\"config.json\": 800"), "found a bad entry for file config.json, wanted its bytes and hash"},
        {FILES("\"config.json\": {\"bytes\": 800}"), "found a bad entry for file config.json"},
        {FILES("\"config.json\": {\"hash\": \"0123456789abcdef\"}"), "found a bad entry for file config.json"},
        {FILES("\"config.json\": {\"bytes\": -1, \"hash\": \"0123456789abcdef\"}"), "found a bad entry for file"},
        {FILES("\"../step-00000001/config.json\": {\"bytes\": 1, \"hash\": \"0\"}"), "found a bad entry for file ../"},
        {FILES("\"..\": {\"bytes\": 1, \"hash\": \"0123456789abcdef\"}"), "wanted a regular file"},
        {FILES("\"\\u001b[2Jgone\": {\"bytes\": 1, \"hash\": \"0123456789abcdef\"}"), "/?[2Jgone: No such file"},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        write_hashed("step-00000001/trainer.json", wrong[i].json);
        FILE *log = open_memstream(&text, &bytes);
        assert_false(checkpoint_newest(root, path, sizeof path, log));
        fclose(log);
        assert_contains(text, wrong[i].part);
        free(text);
    }
    // The same with nothing wrong, and then with a hash that is none.
    char *whole;
    assert_true(asprintf(&whole, "{\"format_version\": 2, %s", right) > 0);
    write_hashed("step-00000001/trainer.json", whole);
    assert_true(checkpoint_newest(root, path, sizeof path, NULL));
    strcpy(strstr(whole, "\"hash\": \"") + 9, "0x23456789abcdef\"}}");
    write_hashed("step-00000001/trainer.json", whole);
    assert_false(checkpoint_newest(root, path, sizeof path, NULL));
    const char *unhashed[] = {"{\"format_version\":2}", "{\"format_version\":2,\"hash\":\"\"}",
                              "{\"format_version\":2,\"files\":{},\"hash\":12345678901234567890}"};
    for (int i = 0; i < 3; i++) {
        write_file("step-00000001/trainer.json", unhashed[i], strlen(unhashed[i]));
        FILE *log = open_memstream(&text, &bytes);
        assert_false(checkpoint_newest(root, path, sizeof path, log));
        fclose(log);
        assert_contains(text, "found no hash, wanted it as the last member");
        free(text);
    }
    free(whole);
    free(good);
    model_free(&a);
}

// What the hashes vouch for is still looked at when it is loaded.
static void file_that_lies_with_a_right_hash_is_noticed(void **state) {
    (void)state;
    struct model a;
    char path[512], text[4096];
    model_init(&a, &uneven);
    model_fill(&a, 22);
    save_step(&a, 1, 0);
    flip_bit(at("step-00000001/state-00002-of-00005.safetensors"), 7, 7); // of the header's length
    vouch_for("step-00000001", "state-00002-of-00005.safetensors");
    assert_true(checkpoint_newest(root, path, sizeof path, NULL));
    assert_int_equal(run_child(load_first, &a, text, sizeof text), 2);
    assert_contains(text, "state-00002-of-00005.safetensors: found header length ");
    model_free(&a);
}

// ---- failures while saving ----

static rlim_t largest_file;

static void save_with_small_files(void *argument) {
    signal(SIGXFSZ, SIG_IGN); // then a write beyond the limit fails as on a full disk
    struct rlimit limit = {largest_file, largest_file};
    setrlimit(RLIMIT_FSIZE, &limit);
    save_step(argument, 200, 1);
}

static void save_again(void *argument) { save_step(argument, 200, 1); }

static void assert_whole(const struct model *a, const char *name) {
    struct model b;
    char path[512];
    model_init(&b, &uneven);
    assert_true(checkpoint_newest(root, path, sizeof path, NULL));
    assert_string_equal(path, at(name));
    checkpoint_load_state(path, &b.c);
    assert_memory_equal(a->c.m, b.c.m, a->params.size * sizeof(accum));
    model_free(&b);
}

// --keep 1: the older one must stay until the newer is whole (prime-rl issue 1251).
static void a_save_that_fails_leaves_the_older_checkpoint(void **state) {
    (void)state;
    struct model a;
    char text[4096];
    model_init(&a, &uneven);
    model_fill(&a, 9);
    save_step(&a, 100, 1);
    // Too small for the first file that is written, for one of the model, for one of the state.
    static const rlim_t limits[] = {10, 10000, 60000};
    static const char *const files[] = {"config.json", "model-00001-of-00005.safetensors",
                                        "state-00001-of-00005.safetensors"};
    for (int i = 0; i < 3; i++) {
        largest_file = limits[i];
        assert_int_equal(run_child(save_with_small_files, &a, text, sizeof text), 1);
        assert_contains(text, "mok: error: checkpoint: step 200 was not saved: ");
        assert_contains(text, files[i]);
        assert_contains(text, "File too large; older checkpoints are as they were");
        assert_false(exists(".tmp-step-00000200") || exists("step-00000200"));
        assert_whole(&a, "step-00000100");
    }

    // The name of the hidden folder, or that of the checkpoint, is taken by a file: nothing is overwritten.
    write_file(".tmp-step-00000200", "x", 1);
    assert_int_equal(run_child(save_again, &a, text, sizeof text), 1);
    assert_contains(text, ".tmp-step-00000200: cannot open the folder: Not a directory");
    assert_true(exists(".tmp-step-00000200") && !exists("step-00000200"));
    assert_int_equal(remove(at(".tmp-step-00000200")), 0);
    write_file("step-00000200", "x", 1);
    assert_int_equal(run_child(save_again, &a, text, sizeof text), 1);
    assert_contains(text, "step-00000200: found a file, wanted a folder or nothing");
    assert_true(exists("step-00000200") && !exists(".tmp-step-00000200"));
    assert_whole(&a, "step-00000100");
    model_free(&a);
}

// The disk has room for one checkpoint and a half.
static void a_full_disk_leaves_the_older_checkpoint(void **state) {
    (void)state;
    struct model a;
    char text[4096], path[512];
    model_init(&a, &uneven);
    model_fill(&a, 23);
    mount_small_disk("disk", 3 * checkpoint_bytes(&uneven) / 2);
    a.c.step = 100;
    checkpoint_save(&a.c, at("disk"), 1);
    char whole_root[sizeof root];
    strcpy(whole_root, root);
    strcpy(root, at("disk"));
    assert_int_equal(run_child(save_again, &a, text, sizeof text), 1);
    assert_contains(text, "mok: error: checkpoint: step 200 was not saved: ");
    assert_contains(text, "No space left on device; older checkpoints are as they were");
    assert_false(exists(".tmp-step-00000200") || exists("step-00000200"));
    assert_whole(&a, "step-00000100");
    assert_true(checkpoint_newest(root, path, sizeof path, stderr));
    strcpy(root, whole_root);
    unmount_small_disk("disk");
    model_free(&a);
}

static void save_as_somebody(void *argument) {
    if (geteuid() == 0 && setuid(65534) != 0) _exit(99); // nothing is read-only to root
    checkpoint_save(&((struct model *)argument)->c, at("run"), 1);
}

static void a_read_only_run_folder_is_named(void **state) {
    (void)state;
    struct model a;
    char text[4096];
    model_init(&a, &uneven);
    assert_int_equal(mkdir(at("run"), 0555), 0);
    assert_int_equal(chmod(root, 0755), 0);
    assert_int_equal(run_child(save_as_somebody, &a, text, sizeof text), 1);
    assert_contains(text, "run/.tmp-step-00000000: cannot create the folder: Permission denied");
    assert_int_equal(rmdir(at("run")), 0); // nothing is in it
    model_free(&a);
}

// All renames stay inside the run folder, wherever that lies.
static void a_run_folder_on_another_file_system_is_written(void **state) {
    (void)state;
    struct model a;
    struct stat here, there;
    char other[] = "/dev/shm/mok_test_XXXXXX";
    if (!mkdtemp(other) || stat(other, &there) != 0 || stat(root, &here) != 0 || here.st_dev == there.st_dev) {
        rmdir(other);
        print_message("skipped: found no second file system at /dev/shm\n");
        skip();
    }
    model_init(&a, &uneven);
    model_fill(&a, 24);
    char whole_root[sizeof root];
    strcpy(whole_root, root);
    assert_int_equal(symlink(other, at("run")), 0);
    strcpy(root, at("run"));
    save_step(&a, 100, 1);
    save_step(&a, 200, 1);
    assert_whole(&a, "step-00000200");
    assert_false(exists("step-00000100"));
    strcpy(root, whole_root);
    remove_tree(other);
    model_free(&a);
}

// Someone moved a checkpoint to a larger disk and left a link: it can be resumed from, and what it leads to is never
// removed, not even when the step is saved again.
static void a_checkpoint_behind_a_link_is_read_and_never_removed(void **state) {
    (void)state;
    struct model a;
    char text[4096];
    model_init(&a, &uneven);
    model_fill(&a, 25);
    save_step(&a, 200, 0);
    assert_int_equal(rename(at("step-00000200"), at("moved")), 0);
    assert_int_equal(symlink("moved", at("step-00000200")), 0);
    assert_whole(&a, "step-00000200");
    save_step(&a, 200, 1);
    assert_false(exists(".old-step-00000200"));
    struct stat info;
    assert_true(lstat(at("step-00000200"), &info) == 0 && S_ISDIR(info.st_mode));
    assert_whole(&a, "step-00000200");
    assert_true(exists("moved/trainer.json"));

    remove_tree(at("step-00000200"));
    assert_int_equal(symlink("moved", at(".tmp-step-00000200")), 0);
    assert_int_equal(run_child(save_again, &a, text, sizeof text), 1);
    assert_contains(text, ".tmp-step-00000200: cannot open the folder: ");
    assert_true(exists("moved/trainer.json") && exists(".tmp-step-00000200"));
    checkpoint_remove_all(root);
    assert_true(exists("moved/trainer.json") && exists(".tmp-step-00000200"));
    model_free(&a);
}

static void save_to_absent_run(void *argument) { checkpoint_save(argument, "/proc/no such run", 1); }

static void a_folder_that_cannot_be_made_is_named(void **state) {
    (void)state;
    struct model a;
    char text[4096];
    model_init(&a, &uneven);
    assert_int_equal(run_child(save_to_absent_run, &a.c, text, sizeof text), 1);
    assert_contains(text, "/proc/no such run/.tmp-step-00000000: cannot create the folder: No such file or directory");
    model_free(&a);
}

static void what_a_killed_save_left_is_taken_away_by_the_next(void **state) {
    (void)state;
    struct model a;
    model_init(&a, &uneven);
    model_fill(&a, 10);
    assert_int_equal(mkdir(at(".tmp-step-00000100"), 0777), 0);
    write_file(".tmp-step-00000100/half", "half", 4);
    checkpoint_save(&a.c, root, 0);
    assert_false(exists(".tmp-step-00000100") || exists("step-00000100/half"));
    // Killed between moving the old folder aside and giving the new one its name.
    assert_int_equal(rename(at("step-00000100"), at(".old-step-00000100")), 0);
    checkpoint_save(&a.c, root, 0);
    assert_true(exists("step-00000100") && !exists(".old-step-00000100"));
    model_free(&a);
}

static void mending_finishes_what_killed_saves_left(void **state) {
    (void)state;
    struct model a;
    model_init(&a, &uneven);
    model_fill(&a, 26);
    for (int step = 1; step <= 3; step++) save_step(&a, step, 0);
    assert_int_equal(rename(at("step-00000003"), at(".old-step-00000003")), 0); // between the two renames
    assert_int_equal(rename(at("step-00000002"), at(".old-step-00000002")), 0); // after both
    save_step(&a, 4, 0);
    assert_int_equal(rename(at("step-00000004"), at("step-00000002")), 0);
    assert_int_equal(mkdir(at(".tmp-step-00000005"), 0777), 0);
    write_file(".tmp-step-00000005/half", "half", 4);
    assert_int_equal(mkdir(at(".tmp-mine"), 0777), 0);
    checkpoint_mend(root);
    assert_true(exists("step-00000001/trainer.json") && exists("step-00000002/trainer.json"));
    assert_true(exists("step-00000003/trainer.json") && exists(".tmp-mine"));
    assert_false(exists(".old-step-00000002") || exists(".old-step-00000003") || exists(".tmp-step-00000005"));
    checkpoint_mend(at("absent"));
    model_free(&a);
}

static void killed_at_any_moment_a_complete_checkpoint_remains(void **state) {
    (void)state;
    struct model a;
    char path[512];
    model_init(&a, &uneven);
    model_fill(&a, 11);
    save_step(&a, 1, 1);
    FILE *log = fopen("/dev/null", "w");
    uint64_t random = 1;
    assert_true(checkpoint_newest(root, path, sizeof path, log));
    for (int round = 0; round < 20; round++) {
        // From the newest on: one of a later step would not be touched, and be there whatever happens to the others.
        int64_t newest = atoll(strrchr(path, '-') + 1);
        pid_t child = fork();
        if (child == 0)
            for (int64_t step = newest + 1;; step++) save_step(&a, step, 1);
        usleep((useconds_t)(1000 + 40000 * test_uniform(&random)));
        kill(child, SIGKILL);
        waitpid(child, NULL, 0);
        if (!checkpoint_newest(root, path, sizeof path, log)) fail_msg("round %d: no complete checkpoint", round);
    }
    fclose(log);
    model_free(&a);
}

// A kill between the two renames of a save leaves the only complete folder aside; the next save of the step, which may
// fail, must not lose it.
static void folder_that_was_set_aside_comes_back(void **state) {
    (void)state;
    struct model a;
    model_init(&a, &uneven);
    model_fill(&a, 1);
    checkpoint_save(&a.c, root, 0);
    assert_int_equal(rename(at("step-00000100"), at(".old-step-00000100")), 0);
    assert_false(checkpoint_exists(root));
    struct rlimit before, small;
    getrlimit(RLIMIT_FSIZE, &before);
    small = (struct rlimit){100, before.rlim_max};
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        signal(SIGXFSZ, SIG_IGN);
        setrlimit(RLIMIT_FSIZE, &small);
        close(STDERR_FILENO);
        checkpoint_save(&a.c, root, 0);
        _exit(0);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 1);
    char path[256];
    assert_true(checkpoint_newest(root, path, sizeof path, NULL));
    assert_string_equal(path, at("step-00000100"));
    model_free(&a);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, make_root, remove_root)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(newest_skips_what_is_not_complete_and_says_why),
        TEST(one_flipped_bit_in_any_file_is_noticed),
        TEST(one_flipped_bit_in_trainer_json_is_noticed),
        TEST(trainer_json_that_lies_makes_a_checkpoint_incomplete),
        TEST(file_that_lies_with_a_right_hash_is_noticed),
        TEST(a_save_that_fails_leaves_the_older_checkpoint),
        TEST(a_read_only_run_folder_is_named), // before the next, which may make this process the root of a namespace
        TEST(a_full_disk_leaves_the_older_checkpoint),
        TEST(a_run_folder_on_another_file_system_is_written),
        TEST(a_checkpoint_behind_a_link_is_read_and_never_removed),
        TEST(a_folder_that_cannot_be_made_is_named),
        TEST(what_a_killed_save_left_is_taken_away_by_the_next),
        TEST(mending_finishes_what_killed_saves_left),
        TEST(killed_at_any_moment_a_complete_checkpoint_remains),
        TEST(folder_that_was_set_aside_comes_back),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

// What bench_layer is asked for: its flags, and the sizes, workloads and arms that it knows by name.
#ifndef MOK_TESTS_BENCH_LAYER_OPTIONS_H
#define MOK_TESTS_BENCH_LAYER_OPTIONS_H

#include <errno.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/fail.h"
#include "model/moe_settings.h"
#include "tests/bench_unfused.h"

// S: inner width of the shared expert, 0 for none. T: tokens of a rank.
struct layer_shape {
    const char *name;
    int T, H, I, E, K, S;
};

static const struct layer_shape known_shapes[] = {
    {"moonlight", 8192, 2048, 1408, 64, 6, 1408}, {"moonlight-routed", 8192, 2048, 1408, 64, 6, 0},
    {"qwen3-30b", 8192, 2048, 768, 128, 8, 768},  {"dsv3", 4096, 7168, 2048, 256, 8, 2048},
    {"qwen3.5", 8192, 4096, 1024, 512, 10, 1024}, {"small", 16384, 1024, 512, 64, 8, 512},
};
enum { KNOWN_SHAPES = sizeof known_shapes / sizeof *known_shapes, DEFAULT_SHAPES = 3, TOKENS_UNIT = 64 };

enum load { BURST, SUSTAINED, LOADS };
static const char *const load_names[LOADS] = {"burst", "sustained"};

enum arm_kind { ARM_MOK, ARM_ALLTOALL, ARM_PRODUCTS };

// chunks: those of the flag; else one. unfused: the megakernel's work by kernels one after the other.
struct arm_type {
    const char *name;
    enum arm_kind kind;
    enum grouped_core core;
    bool unfused, chunks;
};

static const struct arm_type arm_types[] = {
    {.name = "mok", .kind = ARM_MOK},
    {.name = "unfused", .kind = ARM_MOK, .unfused = true},
    {.name = "alltoall-cublaslt", .kind = ARM_ALLTOALL, .core = GROUPED_CUBLASLT},
    {.name = "alltoall-cublaslt-chunks", .kind = ARM_ALLTOALL, .core = GROUPED_CUBLASLT, .chunks = true},
    {.name = "alltoall-own", .kind = ARM_ALLTOALL, .core = GROUPED_OWN},
    {.name = "alltoall-own-chunks", .kind = ARM_ALLTOALL, .core = GROUPED_OWN, .chunks = true},
    {.name = "products-cublaslt", .kind = ARM_PRODUCTS, .core = GROUPED_CUBLASLT},
    {.name = "products-own", .kind = ARM_PRODUCTS, .core = GROUPED_OWN},
};
enum { ARMS = sizeof arm_types / sizeof *arm_types, WORKLOADS = 8, MOST_SHAPES = 16 };
// Arms of --with stand beside those. Their type is the first one, of which they differ by settings.
enum { MOST_WITH = 16, MOST_ARMS = ARMS + MOST_WITH };
static const struct arm_type *const type_of_with = &arm_types[0];

struct options {
    struct layer_shape shapes[MOST_SHAPES];
    int shape_count;
    bool workloads[WORKLOADS], arms[ARMS], loads[LOADS];
    struct moe_settings with[MOST_WITH]; // settings of the megakernel, 0 where it chooses
    int with_count;
    bool backward, parts, help;
    int pull_warps, chunks, iterations;
    const char *json; // file that rows are added to; NULL: none
};

static enum moe_route route_of_workload(int w) { return (enum moe_route)(ROUTE_BALANCED + w); }

// ---- one value ----

// Digits alone, up to `end`.
static bool read_int(const char *text, const char *end, int least, int most, int *value) {
    char *stop;
    errno = 0;
    if (*text < '0' || *text > '9') return false;
    long number = strtol(text, &stop, 10);
    if (stop != end || errno || number < least || number > most) return false;
    *value = (int)number;
    return true;
}

static int int_of(const char *flag, const char *text, int least, int most) {
    int value;
    if (!read_int(text, text + strlen(text), least, most, &value))
        fail_user(flag, "found '%s', wanted a number from %d to %d", text, least, most);
    return value;
}

static void add_shape(struct options *o, struct layer_shape s) {
    if (o->shape_count == MOST_SHAPES) fail_user("--shape", "found more than %d, wanted fewer", MOST_SHAPES);
    o->shapes[o->shape_count++] = s;
}

static struct layer_shape shape_of_numbers(const char *text) {
    enum { NUMBERS = 6, MOST = 1 << 20 };
    struct layer_shape s = {.name = text};
    int *numbers[NUMBERS] = {&s.T, &s.H, &s.I, &s.E, &s.K, &s.S};
    const char *at = text;
    for (int i = 0; i < NUMBERS; i++) {
        const char *end = i + 1 < NUMBERS ? strchr(at, ',') : at + strlen(at);
        if (!end || !read_int(at, end, i + 1 < NUMBERS ? 1 : 0, MOST, numbers[i]))
            fail_user(
                "--shape",
                "found '%s', wanted all, the name of a shape (see --help), or T,H,I,E,K,S, as 8192,2048,768,128,8,0",
                text);
        at = end + 1;
    }
    if (s.K > s.E) fail_user("--shape", "found %d experts of a token in %s, wanted at most all %d", s.K, text, s.E);
    if (s.S % s.I) fail_user("--shape", "found shared width %d in %s, wanted a multiple of I, %d", s.S, text, s.I);
    // Input sets lie behind each other: none of their rows, ids and gates may lose the alignment of the first.
    if (s.T % TOKENS_UNIT)
        fail_user("--shape", "found %d tokens in %s, wanted a multiple of %d", s.T, text, TOKENS_UNIT);
    return s;
}

static void read_shape(struct options *o, const char *text) {
    bool all = strcmp(text, "all") == 0, found = false;
    for (int i = 0; i < KNOWN_SHAPES; i++) {
        if (!all && strcmp(text, known_shapes[i].name) != 0) continue;
        add_shape(o, known_shapes[i]);
        found = true;
    }
    if (!found) add_shape(o, shape_of_numbers(text));
}

static void read_workload(struct options *o, const char *text) {
    bool all = strcmp(text, "all") == 0,
         one = text[0] == 'W' && text[1] >= '0' && text[1] < '0' + WORKLOADS && !text[2];
    if (!all && !one) fail_user("--workload", "found '%s', wanted W0 to W%d, or all", text, WORKLOADS - 1);
    for (int w = 0; w < WORKLOADS; w++) o->workloads[w] |= all || text[1] == '0' + w;
}

static void read_load(struct options *o, const char *text) {
    bool found = false;
    for (int l = 0; l < LOADS; l++)
        if (strcmp(text, load_names[l]) == 0) o->loads[l] = found = true;
    if (!found) fail_user("--load", "found '%s', wanted burst or sustained", text);
}

// Names with commas between them.
static void read_arms(struct options *o, const char *text) {
    for (const char *at = text, *end; at; at = *end ? end + 1 : NULL) {
        bool found = false;
        end = at + strcspn(at, ",");
        for (int a = 0; a < ARMS; a++) {
            if (strlen(arm_types[a].name) != (size_t)(end - at) || memcmp(arm_types[a].name, at, (size_t)(end - at)))
                continue;
            o->arms[a] = found = true;
        }
        if (!found) fail_user("--arms", "found '%s', wanted names of arms with commas between them (see --help)", text);
    }
}

// ---- settings of the megakernel: the trainer's flags without dashes, with commas between them ----

enum { SETTINGS = 4, MOST_SETTING = 1 << 24 };
static const char *const setting_names[SETTINGS] = {"workers", "comm-workers", "minibatch-rows", "ring-rows"};

static int *setting_of(struct moe_settings *s, int number) {
    int *members[SETTINGS] = {&s->workers, &s->comm_workers, &s->minibatch_rows, &s->ring_rows};
    return members[number];
}

static bool same_settings(struct moe_settings a, struct moe_settings b) {
    bool same = true;
    for (int i = 0; i < SETTINGS; i++) same &= *setting_of(&a, i) == *setting_of(&b, i);
    return same;
}

// One of `text`, from at to end.
static void read_setting(struct moe_settings *with, const char *at, const char *end, const char *text) {
    int length = (int)(end - at), name = (int)strcspn(at, "=,");
    for (int i = 0; i < SETTINGS; i++) {
        int *value = setting_of(with, i);
        if (at[name] != '=' || strlen(setting_names[i]) != (size_t)name || memcmp(at, setting_names[i], (size_t)name))
            continue;
        if (*value) fail_user("--with", "found %s twice in '%s', wanted it once", setting_names[i], text);
        if (!read_int(at + name + 1, end, 1, MOST_SETTING, value))
            fail_user("--with", "found '%.*s' in '%s', wanted a number from 1 to %d behind =", length, at, text,
                      MOST_SETTING);
        return;
    }
    fail_user("--with",
              "found '%.*s' in '%s', wanted workers=N, comm-workers=N, minibatch-rows=N or ring-rows=N, with commas "
              "between them",
              length, at, text);
}

static void read_with(struct options *o, const char *text) {
    struct moe_settings with = {0};
    for (const char *at = text, *end; at; at = *end ? end + 1 : NULL) {
        end = at + strcspn(at, ",");
        read_setting(&with, at, end, text);
    }
    if (o->with_count == MOST_WITH) fail_user("--with", "found more than %d, wanted fewer", MOST_WITH);
    for (int i = 0; i < o->with_count; i++)
        if (same_settings(o->with[i], with))
            fail_user("--with", "found '%s' a second time, wanted each arm once", text);
    o->with[o->with_count++] = with;
}

// ---- all of them ----

static void print_help(void) {
    printf(
        "Times the MoE layer alone, as its ranks run it: started alone, or by mpirun with one rank for each GPU.\n\n"
        "  --shape NAME         one of the shapes below, or T,H,I,E,K,S, or all; may be repeated\n"
        "  --workload W0        W0 to W7 (model/route.h), or all; may be repeated\n"
        "  --arms LIST          names with commas between them; default: all that this build has\n"
        "  --with SETTINGS      one more arm beside those, mok with settings as flags of ./train: comm-workers=8, or\n"
        "                       ring-rows=16384,minibatch-rows=1024, or workers=N; may be repeated, up to %d times\n"
        "  --pull-warps %d      warps of each multiprocessor that pull in unfused, at most so many\n"
        "  --chunks 4           of the arms that overlap exchanges with products\n"
        "  --iterations 100     passes that are timed of each arm and load, at least; with --backward a third of them\n"
        "                       stores the gradients of weights, a third adds them, and a third is timed as a whole\n"
        "  --load LOAD          burst or sustained; default: both\n"
        "  --backward           the backward pass too, and its products\n"
        "  --parts              where the time of a pass goes in all arms; else in mok and unfused alone\n"
        "  --json FILE          adds every row to a file as a line of JSON\n"
        "\nshapes (the first %d unless said):\n",
        MOST_WITH, UNFUSED_WARPS, DEFAULT_SHAPES);
    for (int i = 0; i < KNOWN_SHAPES; i++) {
        const struct layer_shape *s = &known_shapes[i];
        printf("  %-18s T %5d, H %4d, I %4d, E %3d, K %2d, S %d\n", s->name, s->T, s->H, s->I, s->E, s->K, s->S);
    }
    printf("\narms:\n");
    for (int a = 0; a < ARMS; a++) printf("  %s\n", arm_types[a].name);
}

static void set_flag(struct options *o, const char *flag, const char *value) {
    enum { MOST_CHUNKS = 1024, MOST_ITERATIONS = 10000 };
    if (strcmp(flag, "--shape") == 0)
        read_shape(o, value);
    else if (strcmp(flag, "--workload") == 0)
        read_workload(o, value);
    else if (strcmp(flag, "--arms") == 0)
        read_arms(o, value);
    else if (strcmp(flag, "--load") == 0)
        read_load(o, value);
    else if (strcmp(flag, "--with") == 0)
        read_with(o, value);
    else if (strcmp(flag, "--pull-warps") == 0)
        o->pull_warps = int_of(flag, value, 1, UNFUSED_WARPS);
    else if (strcmp(flag, "--chunks") == 0)
        o->chunks = int_of(flag, value, 2, MOST_CHUNKS);
    else if (strcmp(flag, "--iterations") == 0)
        o->iterations = int_of(flag, value, 1, MOST_ITERATIONS);
    else if (strcmp(flag, "--json") == 0)
        o->json = value;
    else
        fail_user(flag, "found a flag that bench_layer does not know, wanted one of those of --help");
}

static void choose_all(bool *chosen, int count) {
    bool any = false;
    for (int i = 0; i < count; i++) any |= chosen[i];
    for (int i = 0; i < count && !any; i++) chosen[i] = true;
}

static void read_options(struct options *o, int argc, char **argv) {
    *o = (struct options){.pull_warps = UNFUSED_WARPS, .chunks = 4, .iterations = 100};
    for (int i = 1; i < argc; i++) {
        bool *switches[] = {&o->backward, &o->parts, &o->help}, found = false;
        static const char *const names[] = {"--backward", "--parts", "--help"};
        for (int s = 0; s < 3; s++)
            if (strcmp(argv[i], names[s]) == 0) *switches[s] = found = true;
        if (found) continue;
        if (i + 1 == argc) fail_user(argv[i], "found no value behind it, wanted a flag and its value (see --help)");
        set_flag(o, argv[i], argv[i + 1]);
        i++;
    }
    bool default_shapes = o->shape_count == 0;
    for (int i = 0; i < DEFAULT_SHAPES && default_shapes; i++) add_shape(o, known_shapes[i]);
    bool any = false;
    for (int w = 0; w < WORKLOADS; w++) any |= o->workloads[w];
    if (!any) o->workloads[0] = true;
    choose_all(o->arms, ARMS);
    choose_all(o->loads, LOADS);
}

#endif

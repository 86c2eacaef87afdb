// What bench_layer measures: one shape in one workload, its arms and their times.
#ifndef MOK_TESTS_BENCH_LAYER_H
#define MOK_TESTS_BENCH_LAYER_H

#include <stdlib.h>

#include "model/model.h"
#include "model/trace.h"
#include "tests/bench_layer_options.h"
#include "tests/bench_layer_unfused.h"

// ---- the clock of the multiprocessors ----

#ifdef MOK_CUDA
#include "tests/gpu_clock.h"
static void clock_open(void) { nvml_open(); }
static unsigned clock_mhz(void) { return nvml_mhz(); }
// Of dense BF16: 2048 multiply-adds in each multiprocessor and cycle (Hopper).
static double peak_at(double mhz) { return 4096e6 * mhz * cuda_multiprocessors(); }
#else
static void clock_open(void) {}
static unsigned clock_mhz(void) { return 0; }
static double peak_at(double mhz) { return mhz; }
#endif

// ---- what is measured ----

enum { SETS = 3, PARTS = 32 };

// Of a layer: its passes, backward storing the gradients of weights or adding them, and both passes in one interval. Of the
// products: those of forward, those of backward, and all of either.
enum measure {
    FORWARD,
    BACKWARD,
    BACKWARD_ADD,
    FORWARD_BACKWARD,
    GATE_UP,
    DOWN,
    BOTH,
    D_HIDDEN,
    D_X,
    D_W2,
    D_W13,
    FOUR,
    MEASURES
};
static const char *const measure_names[MEASURES] = {"forward", "backward", "backward-add", "fwd+bwd",
                                                    "gate-up", "down",     "both",         "d-hidden",
                                                    "d-x",     "d-w2",     "d-w13",        "four"};

// What a pass of a layer is when there are backward ones: they take turns.
enum kind { STORES, ADDS, JOINED, KINDS };

// Marks of the device; begin < 0: was not measured.
struct interval {
    int begin, end;
};

struct samples {
    double *seconds[MEASURES]; // of the slowest rank
    int count[MEASURES];
    double mhz; // their sum
    int clocks; // how many
};

struct arm {
    const struct arm_type *type;
    bool with; // of --with
    char name[128];
    struct model model; // shares all but the layer's own memory with the others
    bool owner;         // of that
    int passes;         // so far: their kinds take turns
    double seconds;     // of a pass, about
    struct samples samples[LOADS];
};

// One shape in one workload.
struct bench {
    const struct options *options;
    struct parallel parallel;
    struct layer_shape shape;
    int workload;
    struct model model;                  // weights and activations of all arms
    struct block_activations first;      // those of input set 0
    int set;                             // the next one
    uint64_t barriers;                   // that all megakernels have passed, where the host counts them
    int *offsets[SETS];                  // host [experts here + 1] of the products
    double routes, busiest;              // of a rank: mean, most; mean over the sets
    real *rows, *gate_up, *hidden, *out; // of the products
    real *d_hidden, *d_x;                // of those of backward
    struct unfused_plan unfused[SETS];
    struct unfused_rows unfused_rows;
    char *meeting;       // [ranks * MEETING_BYTES]
    struct trace *trace; // of the pass `traced`; NULL: none
    enum measure traced;
    struct arm arms[MOST_ARMS];
    int arm_count;
    FILE *json;
};
enum { MEETING_BYTES = 256 };

static bool is_leader(const struct bench *b) { return b->parallel.rank == 0; }

static void *host_alloc(size_t count, size_t size) {
    void *memory = calloc(count, size);
    if (!memory) fail_internal("bench_layer", "found no memory for %zu numbers", count);
    return memory;
}

#endif

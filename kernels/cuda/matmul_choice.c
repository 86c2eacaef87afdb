// Which of cuBLASLt's algorithms computes a product.
//
// Asking costs tens of microseconds, and the row counts of experts are new with every routing. So the count of rows (M
// of nt and nn, K of tn) is rounded up to one of eight steps between powers of two, the algorithm for that size is
// remembered, and for the true size it is only checked. Training's own row counts are mostly round and stay as they
// are.
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/matmul.h"
#include "kernels/cuda/tuning.h"

void matmul_check_code(cublasStatus_t code, const char *place, const char *call) {
    if (code == CUBLAS_STATUS_SUCCESS) return;
    fail_internal(place, "%.*s failed: %s", (int)strcspn(call, "("), call, cublasLtGetStatusString(code));
}

cublasLtHandle_t matmul_handle(void) {
    static cublasLtHandle_t handle;
    if (!handle) matmul_check(cublasLtCreate(&handle));
    return handle;
}

// ---- keys and layouts ----

// The largest power of two, of at most 16, that divides the address and the bytes of a row. No load is wider.
static int aligned_bytes(const void *matrix, size_t row_bytes) {
    size_t bits = (size_t)(uintptr_t)matrix | row_bytes | 16;
    return (int)(bits & -bits);
}

struct matmul_key matmul_key_make(enum matmul_kind kind, int M, int N, int K, const void *first, const void *second,
                                  const void *add, const void *out) {
    size_t first_row = (size_t)(kind == MATMUL_TN ? M : K) * sizeof(real);
    size_t second_row = (size_t)(kind == MATMUL_NT ? K : N) * sizeof(real);
    size_t out_row = (size_t)N * (kind == MATMUL_TN ? sizeof(accum) : sizeof(real));
    return (struct matmul_key){
        .kind = kind,
        .M = M,
        .N = N,
        .K = K,
        .first_bytes = aligned_bytes(first, first_row),
        .second_bytes = aligned_bytes(second, second_row),
        .add_bytes = add ? aligned_bytes(add, out_row) : 0,
        .out_bytes = aligned_bytes(out, out_row),
    };
}

// Up to 16 as it is, then to four leading bits: at most an eighth more.
static int round_up_rows(int rows) {
    int64_t step = 1;
    while (rows / step >= 16) step *= 2;
    int64_t rounded = (rows + step - 1) / step * step;
    return rounded > INT_MAX ? rows : (int)rounded;
}

struct matmul_key matmul_key_round(const struct matmul_key *key) {
    struct matmul_key rounded = *key;
    int32_t *rows = key->kind == MATMUL_TN ? &rounded.K : &rounded.M;
    *rows = round_up_rows(*rows);
    return rounded;
}

// matmul.c explains what is A and B to cuBLASLt.
void matmul_layouts_make(struct matmul_layouts *l, const struct matmul_key *key) {
    uint64_t M = (uint64_t)key->M, N = (uint64_t)key->N, K = (uint64_t)key->K;
    bool nt = key->kind == MATMUL_NT, tn = key->kind == MATMUL_TN;
    int32_t turn_second = nt ? CUBLAS_OP_T : CUBLAS_OP_N, turn_first = tn ? CUBLAS_OP_T : CUBLAS_OP_N;
    matmul_check(cublasLtMatmulDescInit(&l->operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    matmul_check(
        cublasLtMatmulDescSetAttribute(&l->operation, CUBLASLT_MATMUL_DESC_TRANSA, &turn_second, sizeof turn_second));
    matmul_check(
        cublasLtMatmulDescSetAttribute(&l->operation, CUBLASLT_MATMUL_DESC_TRANSB, &turn_first, sizeof turn_first));
    matmul_check(cublasLtMatrixLayoutInit(&l->second, CUDA_R_16BF, nt ? K : N, nt ? N : K, (int64_t)(nt ? K : N)));
    matmul_check(cublasLtMatrixLayoutInit(&l->first, CUDA_R_16BF, tn ? M : K, tn ? K : M, (int64_t)(tn ? M : K)));
    matmul_check(cublasLtMatrixLayoutInit(&l->out, tn ? CUDA_R_32F : CUDA_R_16BF, N, M, (int64_t)N));
}

// ---- cuBLASLt's own proposals ----

// Sums of a product that is cut along K may only be kept in FP32 and added in a step of their own, in a fixed order:
// the other ways add in the output's type, or in the order in which blocks finish.
static void preference_make(cublasLtMatmulPreferenceOpaque_t *preference, const struct matmul_key *key) {
    uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    uint64_t workspace = MATMUL_LANE_BYTES;
    const struct {
        cublasLtMatmulPreferenceAttributes_t attribute;
        uint32_t bytes;
    } alignments[] = {
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, (uint32_t)key->second_bytes},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, (uint32_t)key->first_bytes},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, (uint32_t)(key->add_bytes ? key->add_bytes : key->out_bytes)},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, (uint32_t)key->out_bytes},
    };
    matmul_check(cublasLtMatmulPreferenceInit(preference));
    matmul_check(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &schemes,
                                                      sizeof schemes));
    matmul_check(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace,
                                                      sizeof workspace));
    for (size_t i = 0; i < sizeof alignments / sizeof *alignments; i++)
        matmul_check(cublasLtMatmulPreferenceSetAttribute(preference, alignments[i].attribute, &alignments[i].bytes,
                                                          sizeof alignments[i].bytes));
}

// At most `most` algorithms, best guess first; returns how many.
static int propose(cublasLtMatmulHeuristicResult_t *results, int most, struct matmul_layouts *l,
                   const struct matmul_key *key) {
    cublasLtMatmulPreferenceOpaque_t preference;
    preference_make(&preference, key);
    int found = 0, usable = 0;
    cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(matmul_handle(), &l->operation, &l->second, &l->first,
                                                           &l->out, &l->out, &preference, most, results, &found);
    if (status == CUBLAS_STATUS_NOT_SUPPORTED) return 0;
    matmul_check_code(status, "matmul", "cublasLtMatmulAlgoGetHeuristic");
    for (int i = 0; i < found; i++)
        if (results[i].state == CUBLAS_STATUS_SUCCESS && results[i].workspaceSize <= MATMUL_LANE_BYTES)
            results[usable++] = results[i];
    return usable;
}

static bool propose_first(cublasLtMatmulAlgo_t *algorithm, struct matmul_layouts *l, const struct matmul_key *key) {
    cublasLtMatmulHeuristicResult_t result;
    if (propose(&result, 1, l, key) == 0) return false;
    *algorithm = result.algo;
    return true;
}

static bool fits(const cublasLtMatmulAlgo_t *algorithm, struct matmul_layouts *l) {
    cublasLtMatmulHeuristicResult_t result;
    return cublasLtMatmulAlgoCheck(matmul_handle(), &l->operation, &l->second, &l->first, &l->out, &l->out, algorithm,
                                   &result) == CUBLAS_STATUS_SUCCESS &&
           result.workspaceSize <= MATMUL_LANE_BYTES;
}

// ---- algorithms by their configuration ----

static const struct {
    cublasLtMatmulAlgoConfigAttributes_t attribute;
    size_t bytes;
} attributes[ALGORITHM_FIELDS] = {
    [ALGORITHM_ID] = {CUBLASLT_ALGO_CONFIG_ID, 4},
    [ALGORITHM_TILE] = {CUBLASLT_ALGO_CONFIG_TILE_ID, 4},
    [ALGORITHM_SPLITS] = {CUBLASLT_ALGO_CONFIG_SPLITK_NUM, 4},
    [ALGORITHM_REDUCTION] = {CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, 4},
    [ALGORITHM_SWIZZLE] = {CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING, 4},
    [ALGORITHM_CUSTOM] = {CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION, 4},
    [ALGORITHM_STAGES] = {CUBLASLT_ALGO_CONFIG_STAGES_ID, 4},
    [ALGORITHM_INNER_SHAPE] = {CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID, 2},
    [ALGORITHM_CLUSTER_SHAPE] = {CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID, 2},
};

bool matmul_algorithm_allowed(const struct matmul_algorithm *algorithm) {
    uint32_t scheme = algorithm->fields[ALGORITHM_REDUCTION];
    return scheme == CUBLASLT_REDUCTION_SCHEME_NONE || scheme == CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
}

// Little-endian: the first bytes of a number are a narrower one.
static bool configuration_of(struct matmul_algorithm *a, const cublasLtMatmulAlgo_t *algorithm) {
    *a = (struct matmul_algorithm){0};
    for (int i = 0; i < ALGORITHM_FIELDS; i++) {
        size_t written;
        if (cublasLtMatmulAlgoConfigGetAttribute(algorithm, attributes[i].attribute, &a->fields[i], attributes[i].bytes,
                                                 &written) != CUBLAS_STATUS_SUCCESS)
            return false;
    }
    return true;
}

// false: this cuBLASLt has no such algorithm for the product.
static bool algorithm_make(cublasLtMatmulAlgo_t *algorithm, const struct matmul_algorithm *a,
                           const struct matmul_key *key) {
    cudaDataType_t out = key->kind == MATMUL_TN ? CUDA_R_32F : CUDA_R_16BF;
    if (cublasLtMatmulAlgoInit(matmul_handle(), CUBLAS_COMPUTE_32F, CUDA_R_32F, CUDA_R_16BF, CUDA_R_16BF, out, out,
                               (int)a->fields[ALGORITHM_ID], algorithm) != CUBLAS_STATUS_SUCCESS)
        return false;
    for (int i = ALGORITHM_ID + 1; i < ALGORITHM_FIELDS; i++)
        if (cublasLtMatmulAlgoConfigSetAttribute(algorithm, attributes[i].attribute, &a->fields[i],
                                                 attributes[i].bytes) != CUBLAS_STATUS_SUCCESS)
            return false;
    struct matmul_layouts l;
    matmul_layouts_make(&l, key);
    return fits(algorithm, &l);
}

int matmul_propose(struct matmul_algorithm *algorithms, int most, const struct matmul_key *key) {
    cublasLtMatmulHeuristicResult_t results[MATMUL_PROPOSALS];
    struct matmul_layouts l;
    matmul_layouts_make(&l, key);
    int proposals = propose(results, most < MATMUL_PROPOSALS ? most : MATMUL_PROPOSALS, &l, key), count = 0;
    for (int i = 0; i < proposals; i++) {
        cublasLtMatmulAlgo_t again;
        struct matmul_algorithm *a = &algorithms[count];
        if (configuration_of(a, &results[i].algo) && matmul_algorithm_allowed(a) && algorithm_make(&again, a, key))
            count++;
    }
    return count;
}

// ---- the table of make tune ----

const char *matmul_machine(void) {
    static char machine[TUNING_MACHINE];
    if (*machine) return machine;
    int device;
    struct cudaDeviceProp properties;
    cuda_check(cudaGetDevice(&device));
    cuda_check(cudaGetDeviceProperties(&properties, device));
    snprintf(machine, sizeof machine, "%s, %d multiprocessors", properties.name, properties.multiProcessorCount);
    return machine;
}

// The machine's name up to the comma, in letters that every file system takes.
const char *matmul_table_path(void) {
    static char path[sizeof "tune/.txt" + TUNING_MACHINE];
    const char *asked = getenv("MOK_TUNE"), *machine = matmul_machine();
    if (asked) return asked;
    int length = (int)strcspn(machine, ",");
    snprintf(path, sizeof path, "tune/%.*s.txt", length, machine);
    for (char *c = path + strlen("tune/"); *c; c++)
        if (*c == ' ' || *c == '/') *c = '-';
    return path;
}

static const struct tuning *table(void) {
    static struct tuning tuning;
    static bool asked;
    if (asked) return &tuning;
    asked = true;
    const char *path = matmul_table_path();
    if (!*path) return &tuning; // MOK_TUNE= turns tables off
    if (!tuning_read(&tuning, path)) {
        if (getenv("MOK_TUNE")) fail_user("MOK_TUNE", "found no file '%s', wanted a table that make tune wrote", path);
        return &tuning;
    }
    uint64_t version = cublasLtGetVersion();
    if (strcmp(tuning.machine, matmul_machine()) == 0 && tuning.version == version) return &tuning;
    fail_warn(path,
              "found a table for %s with cuBLASLt %" PRIu64 ", wanted one for %s with %" PRIu64
              "; it is not used, make tune writes a new one",
              tuning.machine, tuning.version, matmul_machine(), version);
    free(tuning.products);
    tuning = (struct tuning){0};
    return &tuning;
}

const char *device_tuning(void) {
    static char text[sizeof "tuned " + 16];
    const struct tuning *t = table();
    if (t->count == 0) return "default";
    snprintf(text, sizeof text, "tuned %016" PRIx64, t->hash);
    return text;
}

// ---- choices that were made ----

// A key has its place in PROBES neighbouring ones; when those are taken, a choice is forgotten and made again later,
// with the same result. So the memory is bounded whatever sizes come.
enum { CHOICES = 4096, PROBES = 8 };

struct choice {
    bool made, possible; // possible: cuBLASLt has an algorithm
    struct matmul_key key;
    cublasLtMatmulAlgo_t algorithm;
};
static struct choice choices[CHOICES];
static const struct matmul_algorithm *forced; // NULL: none

void matmul_force(const struct matmul_algorithm *algorithm) {
    forced = algorithm;
    memset(choices, 0, sizeof choices);
}

static uint32_t key_hash(const struct matmul_key *key) {
    const int32_t words[] = {key->kind,         key->M,         key->N,        key->K, key->first_bytes,
                             key->second_bytes, key->add_bytes, key->out_bytes};
    uint32_t hash = 2166136261u;
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        hash = (hash ^ (uint32_t)words[i]) * 16777619u;
        hash ^= hash >> 15;
    }
    return hash;
}

static void choice_make(struct choice *c, const struct matmul_key *key) {
    const struct matmul_algorithm *named = forced ? forced : tuning_find(table(), key);
    c->made = true;
    c->key = *key;
    c->possible = named && algorithm_make(&c->algorithm, named, key);
    if (c->possible) return;
    if (named && !forced)
        fail_user(
            matmul_table_path(),
            "found an algorithm for M %d, N %d, K %d that this cuBLASLt does not have; make the table again with make "
            "tune",
            key->M, key->N, key->K);
    struct matmul_layouts l;
    matmul_layouts_make(&l, key);
    c->possible = propose_first(&c->algorithm, &l, key);
    if (!c->possible && (double)key->M * key->N * key->K >= 1e8)
        fail_warn("matmul", "cuBLASLt has no algorithm for M %d, N %d, K %d; a slow kernel of our own multiplies",
                  key->M, key->N, key->K);
}

static const struct choice *choice_of(const struct matmul_key *key) {
    uint32_t home = key_hash(key);
    struct choice *place = NULL;
    for (uint32_t i = 0; i < PROBES; i++) {
        struct choice *c = &choices[(home + i) % CHOICES];
        if (c->made && memcmp(&c->key, key, sizeof *key) == 0) return c;
        if (!c->made && !place) place = c;
    }
    if (!place) place = &choices[home % CHOICES];
    choice_make(place, key);
    return place;
}

bool matmul_choose(cublasLtMatmulAlgo_t *algorithm, struct matmul_layouts *layouts, const struct matmul_key *key) {
    struct matmul_key rounded = matmul_key_round(key);
    const struct choice *c = choice_of(&rounded);
    *algorithm = c->algorithm;
    bool same = memcmp(&rounded, key, sizeof *key) == 0;
    if (same || (c->possible && fits(algorithm, layouts))) return c->possible;
    return propose_first(algorithm, layouts, key);
}

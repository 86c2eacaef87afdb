// One call of one operation, in the CPU, the double and the GPU build from the same lines: inputs from a seed, poisoned
// outputs, and what came out recorded or compared with what the CPU build recorded.
//
//   if (!scene_begin("matmul_nt", work, "M %d", M)) return;
//   const real *x = in_real(n, row, 1);          inputs first, with all their numbers
//   real *y = out_real("y", n, row, ROUNDED);    an output has a name
//   while (scene_run()) matmul_nt(...);          twice when comparing: the same inputs must give the same bytes
//
// Beside the results: inputs are still what they were; nothing around an array was written; what the CPU left unwritten
// (it was NaN and still is) the GPU has left too.
#ifndef MOK_TESTS_SCENE_H
#define MOK_TESTS_SCENE_H

#include "kernels/bf16.h"
#include "kernels/kernels.h"
#include "kernels/random.h"
#include "tests/record.h"

#define COUNT_OF(list) ((int)(sizeof(list) / sizeof *(list)))

enum kind { KIND_REAL, KIND_ACCUM, KIND_INT32, KIND_INT64 };
enum { SCENE_GUARD = 256, SCENE_ARRAYS = 16, SCENE_OPERATIONS = 64, SCENE_PARTS = 2 };

// Columns of an output that are compared on their own, so that no error in them is small beside the others' size: in
// every `period` elements `columns` from `first` on.
struct part {
    const char *name;
    size_t period, first, columns;
};

struct array {
    const char *name; // of an output; NULL: it is not compared
    enum kind kind;
    bool written; // by the operation
    size_t n, row;
    size_t before, bytes;   // bytes of the guard before it, and of all with both guards
    unsigned char *initial; // what it is before the operation, with its guards
    unsigned char *after;
    unsigned char *device;
    struct tolerance tolerance;
    struct part parts[SCENE_PARTS]; // of floats; all of it, if nothing else is asked for
    int parts_count;
};

// What is reported of one operation.
struct operation_result {
    char name[32];
    int cases, outputs, failures;
    double worst; // largest error found, as a part of its limit
    char where[160];
};

static struct {
    struct record record;
    bool recording, perturb, small, tiny;
    bool finished;
    int perturbed;    // outputs
    bool round;       // the results are rounded to BF16 before they are compared: the GPU's rounding on the CPU
    const char *only; // part of the names of operations to run
    struct operation_result operations[SCENE_OPERATIONS];
    int count;
    // of the case in work
    struct operation_result *operation;
    char name[96];
    uint64_t seed;
    struct array arrays[SCENE_ARRAYS];
    int arrays_count, run;
    int shift; // elements by which every array is moved away from an aligned address
} scene;

// ---- reports ----

// A failure of the case in work; the lines, of which the first few are printed, are TAP's comments.
enum { SCENE_LINES = 40 };
__attribute__((format(printf, 2, 3))) static inline void scene_fail(const char *output, const char *text, ...) {
    if (scene.operation->failures++ >= SCENE_LINES) return;
    va_list arguments;
    va_start(arguments, text);
    printf("# %s: %s: ", scene.name, output);
    vprintf(text, arguments);
    printf("\n");
    va_end(arguments);
}

// A part of a limit, for the table.
static inline void scene_note(const char *output, double part) {
    struct operation_result *o = scene.operation;
    o->outputs++;
    if (part <= o->worst) return;
    o->worst = part;
    snprintf(o->where, sizeof o->where, "%.80s: %.40s", scene.name + strlen(o->name) + 1, output);
}

static inline struct operation_result *scene_operation(const char *name) {
    for (int i = 0; i < scene.count; i++)
        if (strcmp(scene.operations[i].name, name) == 0) return &scene.operations[i];
    if (scene.count == SCENE_OPERATIONS) abort();
    struct operation_result *o = &scene.operations[scene.count++];
    snprintf(o->name, sizeof o->name, "%s", name);
    return o;
}

// ---- the case ----

// Multiplications of one case at most with --small, and with --tiny, which is for sanitizers.
#define SMALL_WORK 1e6
#define TINY_WORK  5e4

// false: this case is not to be run. The arguments that follow tell the cases of one operation apart.
__attribute__((format(printf, 3, 4))) static inline bool scene_begin(const char *operation, double work,
                                                                     const char *text, ...) {
    if (scene.small && work > (scene.tiny ? TINY_WORK : SMALL_WORK)) return false;
    if (scene.only && !strstr(operation, scene.only)) return false;
    va_list arguments;
    va_start(arguments, text);
    int length = snprintf(scene.name, sizeof scene.name, "%s ", operation);
    length += vsnprintf(scene.name + length, sizeof scene.name - (size_t)length, text, arguments);
    va_end(arguments);
    if (length >= (int)sizeof scene.name) abort(); // two cases could have the same name
    scene.operation = scene_operation(operation);
    scene.operation->cases++;
    // Inputs depend on the case's own name, not on the cases before it.
    scene.seed = 0;
    for (const char *c = scene.name; *c; c++) scene.seed = random_mix(scene.seed ^ (unsigned char)*c);
    scene.arrays_count = scene.run = scene.shift = 0;
    return true;
}

static inline double scene_uniform(void) { return random_uniform(random_next(&scene.seed)); }
static inline double scene_normal(void) {
    double u = 1 - scene_uniform(), v = scene_uniform();
    return sqrt(-2 * log(u)) * cos(6.283185307179586 * v);
}
static inline int scene_below(int n) { return (int)random_below(&scene.seed, (uint64_t)n); }

// ---- elements in host memory ----

static inline size_t kind_bytes(enum kind kind) {
    return kind == KIND_REAL ? sizeof(real) : kind == KIND_ACCUM ? sizeof(accum) : kind == KIND_INT32 ? 4 : 8;
}

static inline real host_real(float value) {
#ifdef MOK_CUDA
    return (real){bf16_from_float(value)}; // the values are BF16 already
#else
    return (real)value;
#endif
}

static inline double host_double(real value) {
#ifdef MOK_CUDA
    return bf16_to_float(value.bits);
#else
    return (double)value;
#endif
}

static inline unsigned char *array_elements(const struct array *a, unsigned char *memory) { return memory + a->before; }

static inline void array_set(const struct array *a, size_t i, double value) {
    void *elements = array_elements(a, a->initial);
    if (a->kind == KIND_REAL) ((real *)elements)[i] = host_real(round_to_bf16((float)value));
    if (a->kind == KIND_ACCUM) ((accum *)elements)[i] = (accum)(float)value;
    if (a->kind == KIND_INT32) ((int32_t *)elements)[i] = (int32_t)value;
    if (a->kind == KIND_INT64) ((int64_t *)elements)[i] = (int64_t)value;
}

// ---- arrays ----

// Floats are poisoned by NaN, integers by a number that is no index.
static inline struct array *array_add(const char *name, enum kind kind, bool written, size_t n, size_t row,
                                      struct tolerance tolerance) {
    if (scene.arrays_count == SCENE_ARRAYS || (row && n % row != 0)) abort(); // whole rows: a part would lose the last
    struct array *a = &scene.arrays[scene.arrays_count++];
    *a = (struct array){.name = name, .kind = kind, .written = written, .n = n, .row = row ? row : 1};
    a->tolerance = tolerance;
    a->parts[a->parts_count++] = (struct part){name, a->row, 0, a->row};
    a->before = SCENE_GUARD + (size_t)scene.shift * kind_bytes(kind);
    a->bytes = a->before + n * kind_bytes(kind) + SCENE_GUARD;
    a->initial = malloc(a->bytes);
    a->after = malloc(a->bytes);
    if (!a->initial || !a->after) abort();
    memset(a->initial, kind == KIND_REAL || kind == KIND_ACCUM ? 0xff : 0x7f, a->bytes);
    a->device = device_alloc(a->bytes);
    return a;
}

static inline void *array_pointer(const struct array *a) { return array_elements(a, a->device); }

// Normal numbers in the first `columns` of every row, poison in the others.
static inline void array_fill(const struct array *a, size_t columns, double deviation) {
    for (size_t i = 0; i < a->n; i++)
        if (i % a->row < columns) array_set(a, i, deviation * scene_normal());
}

static inline const real *in_rows(size_t rows, size_t columns, size_t stride, double deviation) {
    struct array *a = array_add(NULL, KIND_REAL, false, rows * stride, stride, EXACT);
    array_fill(a, columns, deviation);
    return array_pointer(a);
}
static inline const real *in_real(size_t rows, size_t columns, double deviation) {
    return in_rows(rows, columns, columns, deviation);
}
static inline const accum *in_accum(size_t n, double deviation) {
    struct array *a = array_add(NULL, KIND_ACCUM, false, n, n, EXACT);
    array_fill(a, n, deviation);
    return array_pointer(a);
}
// What the host has: floats (real: BF16 numbers) and integers.
static inline const void *in_values(enum kind kind, const float *values, size_t n) {
    struct array *a = array_add(NULL, kind, false, n, n, EXACT);
    for (size_t i = 0; i < n; i++) array_set(a, i, (double)values[i]);
    return array_pointer(a);
}
static inline const int *in_int(const int *values, size_t n) {
    struct array *a = array_add(NULL, KIND_INT32, false, n, n, EXACT);
    for (size_t i = 0; i < n; i++) array_set(a, i, values[i]);
    return array_pointer(a);
}

static inline real *out_real(const char *name, size_t rows, size_t stride, struct tolerance t) {
    return array_pointer(array_add(name, KIND_REAL, true, rows * stride, stride, t));
}
// Two outputs that take turns in every row: `columns` of the one, then others of the other, then the first again.
static inline real *out_real_pair(const char *first, size_t first_columns, const char *second, size_t second_columns,
                                  size_t rows, size_t pairs, struct tolerance t) {
    size_t period = first_columns + second_columns;
    struct array *a = array_add(first, KIND_REAL, true, rows * pairs * period, pairs * period, t);
    a->parts[0] = (struct part){first, period, 0, first_columns};
    a->parts[1] = (struct part){second, period, first_columns, second_columns};
    a->parts_count = 2;
    return array_pointer(a);
}
static inline accum *out_accum(const char *name, size_t rows, size_t columns, struct tolerance t) {
    return array_pointer(array_add(name, KIND_ACCUM, true, rows * columns, columns, t));
}
static inline int *out_int(const char *name, size_t n) {
    return array_pointer(array_add(name, KIND_INT32, true, n, n, EXACT));
}
// Outputs that are added to or worked on in place.
static inline real *change_rows(const char *name, size_t rows, size_t columns, size_t stride, double deviation,
                                struct tolerance t) {
    struct array *a = array_add(name, KIND_REAL, true, rows * stride, stride, t);
    array_fill(a, columns, deviation);
    return array_pointer(a);
}
static inline real *change_real(const char *name, size_t rows, size_t columns, double deviation, struct tolerance t) {
    return change_rows(name, rows, columns, columns, deviation, t);
}
static inline accum *change_accum(const char *name, size_t rows, size_t columns, double deviation, struct tolerance t) {
    struct array *a = array_add(name, KIND_ACCUM, true, rows * columns, columns, t);
    array_fill(a, a->n, deviation);
    return array_pointer(a);
}
static inline void *change_values(const char *name, enum kind kind, const float *values, size_t n, struct tolerance t) {
    struct array *a = array_add(name, kind, true, n, n, t);
    for (size_t i = 0; i < n; i++) array_set(a, i, (double)values[i]);
    return array_pointer(a);
}

// ---- recording and comparing ----

static inline struct record_header scene_header(const char *output, enum element element, size_t n, size_t row) {
    struct record_header h = {.element = element, .row = (int32_t)row, .n = n};
    int length = snprintf(h.name, sizeof h.name, "%s: %s", scene.name, output);
    if (length >= (int)sizeof h.name) abort();
    return h;
}

static inline const struct record_header *scene_find(const char *output, enum element element, size_t n, size_t row) {
    struct record_header wanted = scene_header(output, element, n, row);
    const struct record_header *h = record_find(&scene.record, wanted.name);
    if (!h)
        scene_fail(output, "is not in %s; record again, with the same flags", scene.record.path);
    else if (h->n != n || h->row != wanted.row || h->element != wanted.element)
        scene_fail(output, "is another array in %s; record again", scene.record.path);
    else
        return h;
    return NULL;
}

// With --perturb one element in the middle is off by four times what any limit allows, so that comparing must fail.
// Where single elements have no limit, it alone is four times the norm's.
static inline void perturb_floats(float *values, size_t n, struct tolerance t) {
    double most = 0, part = isinf(t.worst) ? t.norm * sqrt((double)n) : fmax(t.worst, 1e-3);
    for (size_t i = 0; i < n; i++) most = fmax(most, isnan(values[i]) ? 0 : fabs((double)values[i]));
    for (size_t i = n / 2; i < n; i++)
        if (!isnan(values[i])) {
            values[i] += (float)fmax(4 * part * fmax(most, t.floor), 1e-30);
            scene.perturbed++;
            return;
        }
}

// Elements of a part, in all and in a row, and where its element k is in the array.
static inline size_t part_elements(const struct array *a, const struct part *p) {
    return a->n / p->period * p->columns;
}
static inline size_t part_row(const struct array *a, const struct part *p) { return a->row / p->period * p->columns; }
static inline size_t part_at(const struct part *p, size_t k) {
    return k / p->columns * p->period + p->first + k % p->columns;
}

static inline double array_get(const struct array *a, size_t i) {
    void *elements = array_elements(a, a->after);
    return a->kind == KIND_REAL ? host_double(((real *)elements)[i]) : (double)((accum *)elements)[i];
}

// NaN: unwritten.
static inline void part_record(const struct array *a, const struct part *p) {
    size_t n = part_elements(a, p);
    struct record_header h = scene_header(p->name, ELEMENT_FLOAT, n, part_row(a, p));
    float *values = malloc(sizeof *values * (n + 1));
    for (size_t k = 0; k < n; k++) values[k] = (float)array_get(a, part_at(p, k));
    if (scene.perturb) perturb_floats(values, n, a->tolerance);
    record_write(&scene.record, &h, values);
    free(values);
}

static inline void array_record(const struct array *a) {
    if (a->kind == KIND_REAL || a->kind == KIND_ACCUM) {
        for (int i = 0; i < a->parts_count; i++) part_record(a, &a->parts[i]);
        return;
    }
    enum element element = a->kind == KIND_INT32 ? ELEMENT_INT32 : ELEMENT_INT64;
    struct record_header h = scene_header(a->name, element, a->n, a->row);
    unsigned char *elements = array_elements(a, a->after);
    if (scene.perturb && a->n > 0) elements[a->n / 2 * kind_bytes(a->kind)] ^= 1, scene.perturbed++;
    record_write(&scene.record, &h, elements);
}

// What the CPU left unwritten must be as it was.
static inline bool array_is_unwritten(const struct array *a, size_t i) {
    size_t bytes = kind_bytes(a->kind), at = a->before + i * bytes;
    return memcmp(a->after + at, a->initial + at, bytes) == 0;
}

// n floats of which NaN were not written; found has n + 1 elements.
static inline void compare_floats(const char *name, const double *found, const float *wanted, size_t n, size_t row,
                                  struct tolerance t) {
    struct difference d = record_difference(found, wanted, n, row, t.floor);
    double limit = norm_limit(t, n);
    if (!(d.norm <= limit) || !(d.worst <= t.worst))
        scene_fail(name, "norm %.2e of %.0e, worst %.2e of %.0e at row %zu column %zu: found %.9g, wanted %.9g", d.norm,
                   limit, d.worst, t.worst, d.at / row, d.at % row, found[d.at], (double)wanted[d.at]);
    scene_note(name, d.norm == 0 ? 0 : fmax(d.norm / limit, d.worst / t.worst));
}

static inline void part_compare(const struct array *a, const struct part *p) {
    size_t n = part_elements(a, p), row = part_row(a, p);
    const struct record_header *h = scene_find(p->name, ELEMENT_FLOAT, n, row);
    if (!h) return;
    const float *wanted = record_data(h);
    double *found = malloc(sizeof *found * (n + 1));
    for (size_t k = 0; k < n; k++) {
        found[k] = array_get(a, part_at(p, k));
        if (a->kind == KIND_REAL && scene.round) found[k] = round_to_bf16((float)found[k]);
        if (isnan(wanted[k]) && !array_is_unwritten(a, part_at(p, k))) {
            scene_fail(p->name, "element %zu of %zu (row of %zu) was written", k, n, row);
            break;
        }
    }
    compare_floats(p->name, found, wanted, n, row, a->tolerance);
    free(found);
}

static inline void array_compare(const struct array *a) {
    if (a->kind == KIND_REAL || a->kind == KIND_ACCUM) {
        for (int i = 0; i < a->parts_count; i++) part_compare(a, &a->parts[i]);
        return;
    }
    const struct record_header *h =
        scene_find(a->name, a->kind == KIND_INT32 ? ELEMENT_INT32 : ELEMENT_INT64, a->n, a->row);
    if (!h) return;
    size_t bytes = kind_bytes(a->kind), wrong = 0, first = 0;
    const unsigned char *found = array_elements(a, a->after), *wanted = record_data(h);
    for (size_t i = a->n; i-- > 0;)
        if (memcmp(found + i * bytes, wanted + i * bytes, bytes) != 0) wrong++, first = i;
    if (wrong > 0) {
        int64_t x = 0, y = 0;
        memcpy(&x, found + first * bytes, bytes);
        memcpy(&y, wanted + first * bytes, bytes);
        if (bytes == 4) x = (int32_t)x, y = (int32_t)y;
        scene_fail(a->name, "%zu of %zu integers differ, first %zu: found %lld, wanted %lld", wrong, a->n, first,
                   (long long)x, (long long)y);
    }
    scene_note(a->name, 0);
}

// Results that the host has as floats. perturb changes them.
static inline void scene_floats(const char *output, float *values, size_t n, size_t row, struct tolerance t) {
    struct record_header h = scene_header(output, ELEMENT_FLOAT, n, row);
    if (scene.recording) {
        if (scene.perturb) perturb_floats(values, n, t);
        record_write(&scene.record, &h, values);
        return;
    }
    const struct record_header *wanted = scene_find(output, ELEMENT_FLOAT, n, row);
    double *found = malloc(sizeof *found * (n + 1));
    for (size_t i = 0; i < n; i++) found[i] = (double)values[i];
    if (wanted) compare_floats(output, found, record_data(wanted), n, row, t);
    free(found);
}

// A number that an operation returned to the host; norm is its relative limit.
static inline void scene_number(const char *output, double value, double norm) {
    struct record_header h = scene_header(output, ELEMENT_DOUBLE, 1, 1);
    if (scene.recording) {
        if (scene.perturb) value += 2 * norm * fabs(value) + 1e-30, scene.perturbed++;
        record_write(&scene.record, &h, &value);
        return;
    }
    const struct record_header *found = scene_find(output, ELEMENT_DOUBLE, 1, 1);
    if (!found) return;
    double wanted = *(const double *)record_data(found);
    bool same = value == wanted || (isnan(value) && isnan(wanted));
    double error = same ? 0 : fabs(value - wanted) / fabs(wanted);
    if (!(error <= norm))
        scene_fail(output, "found %.17g, wanted %.17g (off by %.2e of %.0e)", value, wanted, error, norm);
    scene_note(output, norm > 0 ? error / norm : 0);
}

// Something that must hold in every build.
#define scene_check(condition)                                                                                         \
    do {                                                                                                               \
        if (!(condition)) scene_fail("check", "found not so: %s", #condition);                                         \
    } while (0)

// ---- running ----

static inline void array_collect(struct array *a, bool first) {
    if (first) {
        device_copy_out(a->after, a->device, a->bytes);
        return;
    }
    unsigned char *again = malloc(a->bytes);
    device_copy_out(again, a->device, a->bytes);
    for (size_t i = 0; i < a->bytes && (a->name || !a->written); i++)
        if (again[i] != a->after[i]) {
            scene_fail(a->name ? a->name : "an input", "the second run gave other bytes, from element %zd of %zu on",
                       ((ptrdiff_t)i - (ptrdiff_t)a->before) / (ptrdiff_t)kind_bytes(a->kind), a->n);
            break;
        }
    free(again);
}

static inline void array_check_guards(const struct array *a, int number) {
    size_t end = a->before + a->n * kind_bytes(a->kind);
    char what[32];
    snprintf(what, sizeof what, "array %d", number);
    const char *name = a->name ? a->name : what;
    if (!a->written && memcmp(a->after, a->initial, a->bytes) != 0)
        scene_fail(name, "an input was written");
    else if (memcmp(a->after, a->initial, a->before) != 0)
        scene_fail(name, "memory before the array was written");
    else if (memcmp(a->after + end, a->initial + end, a->bytes - end) != 0)
        scene_fail(name, "memory behind the array was written");
}

static inline void scene_end(void) {
    for (int i = 0; i < scene.arrays_count; i++) {
        struct array *a = &scene.arrays[i];
        array_check_guards(a, i);
        if (a->name && scene.recording) array_record(a);
        if (a->name && !scene.recording) array_compare(a);
        device_free(a->device);
        free(a->initial);
        free(a->after);
    }
    fflush(stdout);
}

// Before each run; false when there was the last one.
static inline bool scene_run(void) {
    for (int i = 0; i < scene.arrays_count && scene.run > 0; i++) array_collect(&scene.arrays[i], scene.run == 1);
    if (scene.run == (scene.recording ? 1 : 2)) {
        scene_end();
        return false;
    }
    for (int i = 0; i < scene.arrays_count; i++)
        device_copy_in(scene.arrays[i].device, scene.arrays[i].initial, scene.arrays[i].bytes);
    scene.run++;
    return true;
}

// A forward pass's result as a backward pass's input: of the CPU build for both. made [n] is that result, in device
// memory, and is looked at only when recording.
static inline const void *in_recorded(const char *output, enum kind kind, size_t n, const void *made) {
    float *values = malloc(sizeof *values * (n + 1));
    if (scene.recording) {
        unsigned char *bytes = malloc(n * kind_bytes(kind) + 1);
        device_copy_out(bytes, made, n * kind_bytes(kind));
        for (size_t i = 0; i < n; i++)
            values[i] = kind == KIND_REAL ? round_to_bf16((float)host_double(((real *)(void *)bytes)[i]))
                                          : (float)((accum *)(void *)bytes)[i];
        free(bytes);
        struct record_header h = scene_header(output, ELEMENT_FLOAT, n, n);
        record_write(&scene.record, &h, values);
    } else {
        const struct record_header *h = scene_find(output, ELEMENT_FLOAT, n, n);
        if (h) memcpy(values, record_data(h), sizeof *values * n);
    }
    const void *array = in_values(kind, values, n);
    free(values);
    return array;
}

// ---- the end ----

// TAP: one result per operation. Lines "# table: " are for people.
static inline int scene_finish(void) {
    scene.finished = true;
    int failed = 0;
    if (!scene.recording)
        printf("# table: %-22s %5s %7s  %s\n", "operation", "cases", "outputs", "largest part of a limit");
    for (int i = 0; i < scene.count; i++) {
        const struct operation_result *o = &scene.operations[i];
        failed += o->failures > 0;
        if (!scene.recording)
            printf("# table: %-22s %5d %7d  %.2f  %s%s\n", o->name, o->cases, o->outputs, o->worst, o->where,
                   o->failures ? "  FAILED" : "");
    }
    for (int i = 0; i < scene.count; i++) {
        const struct operation_result *o = &scene.operations[i];
        printf("%s %d - %s, %d cases, %d outputs, %d failures\n", o->failures ? "not ok" : "ok", i + 1, o->name,
               o->cases, o->outputs, o->failures);
    }
    printf("1..%d\n", scene.count);
    if (scene.perturb) printf("# perturbed %d outputs\n", scene.perturbed);
    record_close(&scene.record);
    return failed > 0;
}

// Where an operation ends the program, what was found before is said all the same.
static inline void scene_exit(void) {
    if (scene.finished || scene.recording || !scene.operation) return;
    scene_fail("program", "ended in this case or behind it");
    scene_finish();
    fflush(stdout);
}

// --record FILE or --compare FILE; --small, --tiny, --only NAME, --perturb (with --record), --round (with --compare).
static inline void scene_start(int argc, char **argv) {
    const char *path = NULL;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--small") == 0)
            scene.small = true;
        else if (strcmp(argv[i], "--tiny") == 0)
            scene.small = scene.tiny = true;
        else if (strcmp(argv[i], "--perturb") == 0)
            scene.perturb = true;
        else if (strcmp(argv[i], "--round") == 0)
            scene.round = true;
        else if (i + 1 < argc && strcmp(argv[i], "--only") == 0)
            scene.only = argv[++i];
        else if (i + 1 < argc && (strcmp(argv[i], "--record") == 0 || strcmp(argv[i], "--compare") == 0)) {
            scene.recording = strcmp(argv[i], "--record") == 0;
            path = argv[++i];
        } else
            record_fail(argv[i], "found an unknown word, wanted --record FILE or --compare FILE, --small, --tiny, "
                                 "--only NAME, --perturb, --round");
    }
    if (!path) record_fail(argv[0], "wanted --record FILE or --compare FILE");
    if (scene.recording)
        record_create(&scene.record, path);
    else
        record_open(&scene.record, path);
    atexit(scene_exit);
}

#endif

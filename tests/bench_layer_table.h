// What bench_layer prints: a row for every pass of every arm, and the parts of a pass.
#ifndef MOK_TESTS_BENCH_LAYER_TABLE_H
#define MOK_TESTS_BENCH_LAYER_TABLE_H

#include <cjson/cJSON.h>

#include "kernels/kernels.h"
#include "tests/bench_layer.h"

// ---- rows of the table ----

static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double flops_of(const struct bench *b, enum measure m) {
    const struct layer_shape *s = &b->shape;
    double product = 2.0 * s->H * s->I * b->busiest, layer = 6.0 * s->H * (s->I * b->routes + (double)s->S * s->T);
    const double flops[MEASURES] = {
        [FORWARD] = layer,       [BACKWARD] = 2 * layer, [BACKWARD_ADD] = 2 * layer, [FORWARD_BACKWARD] = 3 * layer,
        [GATE_UP] = 2 * product, [DOWN] = product,       [BOTH] = 3 * product,       [D_HIDDEN] = product,
        [D_W2] = product,        [D_X] = 2 * product,    [D_W13] = 2 * product,      [FOUR] = 6 * product};
    return flops[m];
}

static double busiest_share(const struct bench *b) { return b->routes > 0 ? b->busiest / b->routes : 1; }

// Of the column of arms.
static int name_width(const struct bench *b) {
    int width = 27;
    for (int i = 0; i < b->arm_count; i++) {
        int length = (int)strlen(b->arms[i].name);
        if (length > width) width = length;
    }
    return width;
}

static void print_head(const struct bench *b) {
    printf("%6s %5s %5s %4s %3s %5s %3s %-4s %7s %-*s %-13s %-9s %9s %9s %9s %8s %5s %7s %7s\n", "T", "H", "I", "E",
           "K", "S", "EP", "work", "busiest", name_width(b), "arm", "pass", "load", "ms", "p10", "p90", "TFLOP/s",
           "MHz", "of MHz", "of peak");
}

static void print_sizes(const struct bench *b, const char *arm, const char *pass, const char *load) {
    const struct layer_shape *s = &b->shape;
    printf("%6d %5d %5d %4d %3d %5d %3d W%-3d %7.3f %-*s %-13s %-9s", s->T, s->H, s->I, s->E, s->K, s->S,
           b->parallel.ep, b->workload, busiest_share(b), name_width(b), arm, pass, load);
}

static cJSON *json_sizes(const struct bench *b, const char *arm, const char *pass, const char *load) {
    const struct layer_shape *s = &b->shape;
    const struct {
        const char *name;
        int value;
    } sizes[] = {{"T", s->T}, {"H", s->H}, {"I", s->I}, {"E", s->E}, {"K", s->K}, {"S", s->S}, {"EP", b->parallel.ep}};
    cJSON *row = cJSON_CreateObject();
    char workload[4];
    snprintf(workload, sizeof workload, "W%d", b->workload);
    cJSON_AddStringToObject(row, "device", device_name());
    cJSON_AddStringToObject(row, "shape", s->name);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        cJSON_AddNumberToObject(row, sizes[i].name, sizes[i].value);
    cJSON_AddStringToObject(row, "workload", workload);
    cJSON_AddNumberToObject(row, "busiest", busiest_share(b));
    cJSON_AddStringToObject(row, "arm", arm);
    cJSON_AddStringToObject(row, "pass", pass);
    cJSON_AddStringToObject(row, "load", load);
    return row;
}

// What a megakernel runs with, chosen or asked for.
static void add_settings(cJSON *row, const struct arm *a) {
    if (a->type->kind != ARM_MOK) return;
    const struct moe_mok *l = a->model.mok;
    cJSON_AddNumberToObject(row, "workers", l->crew.workers);
    cJSON_AddNumberToObject(row, "comm_workers", a->model.moe.comm_workers);
    cJSON_AddNumberToObject(row, "minibatch_rows", l->shape.minibatch_rows);
    cJSON_AddNumberToObject(row, "ring_rows", l->shape.ring_rows);
}

// Takes row.
static void write_json(const struct bench *b, cJSON *row) {
    char *text = cJSON_PrintUnformatted(row);
    if (!text) fail_internal("--json", "found no memory for a row");
    if (fprintf(b->json, "%s\n", text) < 0 || fflush(b->json) != 0)
        fail_internal(b->options->json, "cannot write a row; free some space there or name another file");
    cJSON_free(text);
    cJSON_Delete(row);
}

// Percent of a whole that may be unknown.
static void print_share(double part, double whole) {
    if (whole > 0)
        printf(" %6.1f%%", 100 * part / whole);
    else
        printf(" %7s", "-");
}

static void print_row(const struct bench *b, const struct arm *a, enum load load, enum measure m) {
    const struct samples *s = &a->samples[load];
    double *sorted = s->seconds[m];
    int count = s->count[m];
    if (count == 0) return;
    qsort(sorted, (size_t)count, sizeof *sorted, compare_doubles);
    double ms = 1e3 * sorted[count / 2], p10 = 1e3 * sorted[count / 10], p90 = 1e3 * sorted[count - 1 - count / 10];
    double rate = flops_of(b, m) / (1e-3 * ms), mhz = s->clocks ? s->mhz / s->clocks : 0;
    print_sizes(b, a->name, measure_names[m], load_names[load]);
    printf(" %9.4f %9.4f %9.4f %8.1f", ms, p10, p90, 1e-12 * rate);
    if (s->clocks)
        printf(" %5.0f", mhz);
    else
        printf(" %5s", "-");
    print_share(rate, peak_at(mhz));
    print_share(rate, device_peak_flops());
    putchar('\n');
    if (!b->json) return;
    cJSON *row = json_sizes(b, a->name, measure_names[m], load_names[load]);
    cJSON_AddNumberToObject(row, "ms", ms);
    cJSON_AddNumberToObject(row, "p10", p10);
    cJSON_AddNumberToObject(row, "p90", p90);
    cJSON_AddNumberToObject(row, "tflops", 1e-12 * rate);
    if (s->clocks) cJSON_AddNumberToObject(row, "mhz", mhz);
    cJSON_AddNumberToObject(row, "passes", count);
    add_settings(row, a);
    write_json(b, row);
}

static void print_rows(const struct bench *b) {
    for (int l = 0; l < LOADS; l++)
        for (int m = 0; m < MEASURES; m++)
            for (int i = 0; i < b->arm_count; i++) print_row(b, &b->arms[i], (enum load)l, (enum measure)m);
    fflush(stdout);
}

// ---- parts of a pass ----

// Seconds of one operation in all passes.
struct part {
    const char *name;
    int calls;
    double seconds;
};

static int collect_parts(const struct trace *t, struct part parts[PARTS]) {
    const struct trace_track *device = &t->tracks[trace_device_track(t)];
    int count = 0;
    for (size_t i = 0; i < device->count; i++) {
        const struct trace_event *e = &device->events[i];
        int p = 0;
        while (p < count && strcmp(parts[p].name, e->name) != 0) p++;
        if (p == PARTS) continue;
        if (p == count) parts[count++] = (struct part){.name = e->name};
        parts[p].calls++;
        parts[p].seconds += e->end - e->begin;
    }
    return count;
}

// flops 0: those of the part are not known.
static void print_part(const struct bench *b, const struct arm *a, enum measure m, const struct part *p, int passes,
                       double whole, double flops, double mhz) {
    double seconds = p->seconds / passes, calls = (double)p->calls / passes;
    print_sizes(b, a->name, measure_names[m], load_names[SUSTAINED]);
    printf("   %-24s %5.1f %9.4f %6.1f%%", p->name, calls, 1e3 * seconds, 100 * seconds / whole);
    if (flops > 0) printf(" %8.1f TFLOP/s at %.0f MHz", 1e-12 * flops / seconds, mhz);
    putchar('\n');
    if (!b->json) return;
    cJSON *row = json_sizes(b, a->name, measure_names[m], load_names[SUSTAINED]);
    cJSON_AddStringToObject(row, "part", p->name);
    cJSON_AddNumberToObject(row, "calls", calls);
    cJSON_AddNumberToObject(row, "ms", 1e3 * seconds);
    cJSON_AddNumberToObject(row, "share", seconds / whole);
    if (flops > 0) cJSON_AddNumberToObject(row, "tflops", 1e-12 * flops / seconds);
    write_json(b, row);
}

static void print_parts(const struct bench *b, const struct arm *a, enum measure m, const struct trace *t, int passes,
                        double whole, double mhz) {
    struct part parts[PARTS], rest = {"between operations", 0, whole * passes};
    int count = collect_parts(t, parts);
    for (int i = 0; i < count; i++) {
        bool megakernel = strcmp(parts[i].name, "mok_run") == 0;
        print_part(b, a, m, &parts[i], passes, whole, megakernel ? flops_of(b, m) : 0, mhz);
        rest.seconds -= parts[i].seconds;
    }
    print_part(b, a, m, &rest, passes, whole, 0, mhz);
    fflush(stdout);
}

#endif

#include "model/log.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include "data/files.h"
#include "kernels/clock.h"
#include "kernels/fail.h"
#include "model/plan.h"

// ---- the JSON file ----

static void check_write(const struct run_log *log, bool ok) {
    if (!ok) fail_internal(log->path, "cannot write the log: %s; free some space and resume", strerror(errno));
}

static _Noreturn void fail_open(const struct run_log *log) {
    fail_user(log->path, "cannot open the log: %s; mend or move it and resume", strerror(errno));
}

// One object, one line.
static void write_json(struct run_log *log, cJSON *object) {
    char *text = log->json ? cJSON_PrintUnformatted(object) : NULL;
    if (!log->json) {
        cJSON_Delete(object);
        return;
    }
    if (!text) fail_internal(log->path, "found no memory for a log line");
    check_write(log, fprintf(log->json, "%s\n", text) > 0 && fflush(log->json) == 0);
    free(text);
    cJSON_Delete(object);
}

// JSON has no NaN or infinity: they become null.
static void add_number(cJSON *object, const char *name, double value) {
    if (isfinite(value))
        cJSON_AddNumberToObject(object, name, value);
    else
        cJSON_AddNullToObject(object, name);
}

// The step of a line of length bytes; INT64_MAX for what is no line of a log: torn, with zeros in it, or something else.
static int64_t step_of_line(const char *line, size_t length) {
    if (memchr(line, 0, length)) return INT64_MAX;
    cJSON *object = cJSON_ParseWithOpts(line, NULL, true);
    uint64_t step;
    bool counted = file_json_integer(cJSON_GetObjectItemCaseSensitive(object, "step"), &step);
    cJSON_Delete(object);
    return counted ? (int64_t)step : INT64_MAX;
}

// Copies the lines of steps up to `last` to a new file. The last line may lack its end.
static void copy_lines(const struct run_log *log, FILE *old, FILE *kept, int64_t last) {
    char *line = NULL;
    size_t capacity = 0;
    for (ssize_t length; (length = getline(&line, &capacity, old)) > 0;) {
        if (line[length - 1] == '\n') line[--length] = 0;
        if (step_of_line(line, (size_t)length) <= last) check_write(log, fprintf(kept, "%s\n", line) > 0);
    }
    if (ferror(old)) fail_open(log);
    free(line);
}

// Replaces the log by one without the lines of steps after `last`.
static void drop_later_lines(const struct run_log *log, int64_t last) {
    char temporary[sizeof log->path + 8], error[FILE_ERROR];
    snprintf(temporary, sizeof temporary, "%s.tmp", log->path);
    FILE *old = fopen(log->path, "r");
    if (!old && errno == ENOENT) return;
    if (!old) fail_open(log);
    FILE *kept = fopen(temporary, "w");
    check_write(log, kept != NULL);
    copy_lines(log, old, kept, last);
    fclose(old);
    if (!file_publish(kept, temporary, log->path, error, sizeof error))
        fail_internal(log->path, "cannot write the log: %s; free some space and resume", error);
}

void log_open(struct run_log *log, const struct trainer *t, const char *folder) {
    const struct options *o = &t->options;
    *log = (struct run_log){.flops_per_token = plan_flops_per_token(&o->model, o->seq), .first_step = t->step};
    if (t->parallel->rank != 0) return;
    log->peak_flops = device_peak_flops() * t->parallel->ranks;
    snprintf(log->path, sizeof log->path, "%s/log.jsonl", folder);
    if (t->step > 0) drop_later_lines(log, t->step);
    log->json = fopen(log->path, t->step > 0 ? "a" : "w");
    if (!log->json) fail_open(log);
}

void log_close(struct run_log *log) {
    if (log->json) check_write(log, fclose(log->json) == 0);
    *log = (struct run_log){0};
}

void log_sync(struct run_log *log) {
    if (log->json) check_write(log, fsync(fileno(log->json)) == 0);
}

// ---- the human line ----

// A line that is put together piece by piece.
struct line {
    char text[512];
    size_t length;
};

static void append(struct line *line, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void append(struct line *line, const char *format, ...) {
    va_list args;
    va_start(args, format);
    size_t room = sizeof line->text - line->length;
    int written = vsnprintf(line->text + line->length, room, format, args);
    va_end(args);
    if (written > 0) line->length += (size_t)written < room ? (size_t)written : room - 1;
}

// The most that this process has held so far.
static double peak_memory_gib(void) {
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return (double)usage.ru_maxrss / (1024.0 * 1024.0);
}

static void append_duration(struct line *line, double seconds) {
    long s = lround(seconds);
    if (s < 60)
        append(line, "%lds", s);
    else if (s < 3600)
        append(line, "%ldm%02lds", s / 60, s % 60);
    else
        append(line, "%ldh%02ldm", s / 3600, s % 3600 / 60);
}

// When the step had been taken, to be set beside what else was recorded of the machine.
static double unix_time(void) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

// What a step's duration says.
struct rates {
    double seconds, tokens_per_second, mfu, eta;
};

static struct rates rates_of(struct run_log *log, const struct options *o, const struct step_report *r,
                             double seconds) {
    if (log->started == 0) log->started = clock_seconds() - seconds;
    double tokens_per_second = (double)(trainer_sequences_per_step(o) * o->seq) / seconds;
    double per_step = (clock_seconds() - log->started) / (double)(r->step - log->first_step);
    return (struct rates){seconds, tokens_per_second, tokens_per_second * log->flops_per_token / log->peak_flops,
                          per_step * (double)(o->steps - r->step)};
}

static bool has_moe(const struct options *o) { return model_moe_blocks(&o->model) > 0; }

// The epoch of the last sequence that was trained on.
static uint64_t epoch_of(const struct trainer *t) {
    return data_epoch(t->data, DATA_TRAIN, (uint64_t)(t->sequences - 1));
}

static void print_step(const struct trainer *t, const struct step_report *r, struct rates rates) {
    const struct options *o = &t->options;
    struct line line = {0};
    int width = snprintf(NULL, 0, "%lld", (long long)o->steps);
    append(&line, "step %*lld/%lld | loss %7.4f", width, (long long)r->step, (long long)o->steps, r->loss);
    if (o->model.mtp_depth) append(&line, " | mtp %7.4f", r->mtp);
    if (has_moe(o)) append(&line, " | bal %.2e", r->balance);
    append(&line, " | norm %7.3f | lr %.2e", r->norm, r->lr);
    if (has_moe(o)) append(&line, " | load max/mean %5.2f dead %3d", r->load_max_over_mean, r->dead);
    if (data_windows(t->data, DATA_TRAIN)) append(&line, " | epoch %3llu", (unsigned long long)epoch_of(t));
    append(&line, " | %8.1f ms | %7.1fK tok/s | mfu %5.1f%% (causal) | data %5.1f%% | %6.2f GiB | eta ",
           1e3 * rates.seconds, rates.tokens_per_second / 1e3, 100 * rates.mfu, 100 * r->data_seconds / rates.seconds,
           peak_memory_gib());
    append_duration(&line, rates.eta);
    puts(line.text);
    fflush(stdout);
}

void log_step(struct run_log *log, const struct trainer *t, const struct step_report *r, double seconds) {
    const struct options *o = &t->options;
    struct rates rates = rates_of(log, o, r, seconds);
    print_step(t, r, rates);

    cJSON *json = cJSON_CreateObject();
    add_number(json, "step", (double)r->step);
    add_number(json, "loss", r->loss);
    if (o->model.mtp_depth) add_number(json, "mtp_loss", r->mtp);
    if (has_moe(o)) add_number(json, "balance_loss", r->balance);
    add_number(json, "grad_norm", r->norm);
    add_number(json, "lr", r->lr);
    if (has_moe(o)) {
        add_number(json, "load_max_over_mean", r->load_max_over_mean);
        add_number(json, "dead_experts", r->dead);
    }
    add_number(json, "tokens", (double)t->tokens);
    add_number(json, "epoch", (double)epoch_of(t));
    add_number(json, "unix_time", unix_time());
    add_number(json, "seconds", rates.seconds);
    add_number(json, "tokens_per_second", rates.tokens_per_second);
    add_number(json, "mfu_causal", rates.mfu);
    add_number(json, "data_seconds", r->data_seconds);
    add_number(json, "peak_memory_gib", peak_memory_gib());
    add_number(json, "ranks", t->parallel->ranks);
    add_number(json, "ep", t->parallel->ep);
    add_number(json, "eta_seconds", rates.eta);
    write_json(log, json);
}

void log_print_eval(FILE *file, struct evaluation e) {
    fprintf(file, "loss %.4f over %lld tokens", e.loss, (long long)e.targets);
    if (isfinite(e.bits_per_byte))
        fprintf(file, " | %.4f bits per byte over %lld bytes", e.bits_per_byte, (long long)e.bytes);
    fputc('\n', file);
}

void log_eval(struct run_log *log, const struct trainer *t, struct evaluation e) {
    printf("eval at step %lld | ", (long long)t->step);
    log_print_eval(stdout, e);
    fflush(stdout);
    cJSON *json = cJSON_CreateObject();
    add_number(json, "step", (double)t->step);
    add_number(json, "eval_loss", e.loss);
    add_number(json, "eval_bits_per_byte", e.bits_per_byte);
    write_json(log, json);
}

static double share(int64_t part, int64_t whole) { return whole ? (double)part / (double)whole : NAN; }

void log_print_choices(FILE *file, struct choice_counts counts) {
    fprintf(file, "%lld of %lld questions right, %.2f %% | by sum %lld", (long long)counts.right_by_mean,
            (long long)counts.examples, 100 * share(counts.right_by_mean, counts.examples),
            (long long)counts.right_by_sum);
    if (counts.skipped) fprintf(file, " | %lld too long for --seq, skipped", (long long)counts.skipped);
    fputc('\n', file);
}

void log_choices(struct run_log *log, const struct trainer *t, struct choice_counts counts) {
    printf("eval at step %lld | ", (long long)t->step);
    log_print_choices(stdout, counts);
    fflush(stdout);
    cJSON *json = cJSON_CreateObject();
    add_number(json, "step", (double)t->step);
    add_number(json, "choices_accuracy", share(counts.right_by_mean, counts.examples));
    add_number(json, "choices_accuracy_by_sum", share(counts.right_by_sum, counts.examples));
    add_number(json, "choices_examples", (double)counts.examples);
    add_number(json, "choices_skipped", (double)counts.skipped);
    write_json(log, json);
}

void log_moe(struct run_log *log, const struct trainer *t) {
    const struct config *c = &t->options.model;
    cJSON *json = cJSON_CreateObject(), *blocks = NULL;
    add_number(json, "step", (double)t->step);
    blocks = cJSON_AddArrayToObject(json, "moe_blocks");
    struct moe_load *loads = trainer_loads(t);
    for (int block = c->dense_layers; block < config_blocks(c); block++) {
        struct moe_load load = loads[block - c->dense_layers];
        printf("moe block %d | load max/mean %.2f min/mean %.2f entropy %.3f dead %d | bias %.4f to %.4f\n", block,
               load.max_over_mean, load.min_over_mean, load.entropy, load.dead, load.bias_min, load.bias_max);
        cJSON *row = cJSON_CreateObject();
        add_number(row, "block", block);
        add_number(row, "load_max_over_mean", load.max_over_mean);
        add_number(row, "load_min_over_mean", load.min_over_mean);
        add_number(row, "load_entropy", load.entropy);
        add_number(row, "dead_experts", load.dead);
        add_number(row, "bias_min", load.bias_min);
        add_number(row, "bias_max", load.bias_max);
        cJSON_AddItemToArray(blocks, row);
    }
    free(loads);
    fflush(stdout);
    write_json(log, json);
}

void log_print_layout(FILE *file, const struct options *o, const struct parallel *p) {
    fprintf(file, "%d rank%s: EP %d x DP %d, --moe %s\n", p->ranks, p->ranks == 1 ? "" : "s", p->ep, p->dp,
            o->moe.kind == MOE_MOK ? "mok" : "alltoall");
}

void log_print_options(FILE *file, const struct options *o) {
    enum { COLUMNS = 3, WIDTH = 40 };
    cJSON *json = options_to_json(o), *member;
    int column = 0;
    cJSON_ArrayForEach(member, json) {
        char *value = cJSON_PrintUnformatted(member);
        char text[OPTION_TEXT + 64];
        snprintf(text, sizeof text, "%-21s %s", member->string, value);
        fprintf(file, "  %-*s", column < COLUMNS - 1 ? WIDTH : 0, text);
        if (++column == COLUMNS) {
            fputc('\n', file);
            column = 0;
        }
        free(value);
    }
    if (column) fputc('\n', file);
    cJSON_Delete(json);
}

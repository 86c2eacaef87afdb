// The program: flags -> build -> loop -> log -> save.
#include <cjson/cJSON.h>
#include <stdio.h>
#include <stdlib.h>

#include "data/data.h"
#include "data/files.h"
#include "kernels/clock.h"
#include "kernels/fail.h"
#include "kernels/kernels.h"
#include "kernels/stop.h"
#include "model/checkpoint.h"
#include "model/evaluate.h"
#include "model/generate.h"
#include "model/input.h"
#include "model/log.h"
#include "model/options.h"
#include "model/origin.h"
#include "model/plan.h"
#include "model/run_folder.h"
#include "model/saved_model.h"
#include "model/trainer.h"

// After this step: always at the last one, and every `every` steps; 0 means never.
static bool is_due(int64_t every, int64_t step, const struct options *o) {
    return every > 0 && (step % every == 0 || step == o->steps);
}

// This build is one process. A launcher that starts several would have them all write the same files.
static void refuse_several_ranks(void) {
    static const char *const names[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const char *value = getenv(names[i]);
        if (value && atol(value) > 1)
            fail_user("launcher", "found %s=%s, wanted one process; start ./train without mpirun", names[i], value);
    }
}

static void save(struct trainer *t, struct run_log *log) {
    if (!trainer_is_finite(t))
        fail_internal("weights",
                      "step %lld left weights that are not finite numbers; they were not saved: start a new "
                      "run with a lower --lr",
                      (long long)t->step);
    log_sync(log); // a log that a power loss cuts would lack steps of the checkpoint
    struct checkpoint c = trainer_checkpoint(t);
    c.options = options_to_json(&t->options);
    // Where a run lies and how it was started is not part of it: equal runs leave equal bytes.
    static const char *const left_out[] = {"out", "from", "resume", "override", "overwrite"};
    for (size_t i = 0; i < sizeof left_out / sizeof *left_out; i++)
        cJSON_DeleteItemFromObjectCaseSensitive(c.options, left_out[i]);
    checkpoint_save(&c, t->options.out, t->options.keep);
    cJSON_Delete(c.options);
    printf("saved %s/step-%08lld\n", t->options.out, (long long)t->step);
    fflush(stdout);
}

static _Noreturn void stop_not_finite(const struct trainer *t, const struct step_report *r) {
    fail_internal("gradient",
                  "step %lld has loss %g and gradient norm %g, wanted finite numbers; the step was not "
                  "applied and nothing was saved, older checkpoints in %s are as they were: start a new run with a "
                  "lower --lr",
                  (long long)r->step, r->loss, r->norm, t->options.out);
}

// An evaluation that is cut short by a signal says nothing.
static void evaluate(struct trainer *t, struct run_log *log, const struct choices *choices) {
    const struct options *o = &t->options;
    struct evaluation e = trainer_evaluate(t, o->eval_sequences);
    if (!stop_requested()) log_eval(log, t, e);
    if (!choices->count || stop_requested()) return;
    struct choice_counts counts = evaluate_all_choices(&t->model, choices, o->batch, o->seq);
    if (!stop_requested()) log_choices(log, t, counts);
}

static void train_loop(struct trainer *t, struct run_log *log, const struct choices *choices) {
    const struct options *o = &t->options;
    if (o->sample_tokens && t->step == 0) generate_print_sample(&t->model, o, t->tokenizer, "before training");
    while (t->step < o->steps && !stop_requested()) {
        double start = clock_seconds();
        struct step_report report = trainer_step(t);
        if (!report.finite) stop_not_finite(t, &report);
        log_step(log, t, &report, clock_seconds() - start);
        if (o->log_moe_every && t->step % o->log_moe_every == 0) log_moe(log, t);
        if (is_due(o->eval_every, t->step, o)) evaluate(t, log, choices);
        if (is_due(o->save_every, t->step, o)) save(t, log);
        if (o->sample_every && t->step % o->sample_every == 0 && t->step < o->steps)
            generate_print_sample(&t->model, o, t->tokenizer, "in between");
    }
    if (stop_requested()) {
        printf("stopped by signal %d after step %lld\n", stop_requested(), (long long)t->step);
        if (o->save_every && !is_due(o->save_every, t->step, o)) save(t, log); // else it has been saved
    } else if (o->sample_tokens) {
        generate_print_sample(&t->model, o, t->tokenizer, "after training");
    }
}

static void train(const struct options *o, const struct input *in, const struct origin *origin) {
    struct trainer t;
    struct run_log log;
    trainer_open(&t, o, in->data, in->tokenizer);
    if (origin->checkpoint[0])
        trainer_restore(&t, origin->checkpoint);
    else if (origin->weights[0])
        trainer_start_from(&t, origin->weights);
    if (t.step >= o->steps) {
        printf("found step %lld done, and --steps %lld: nothing to do\n", (long long)t.step, (long long)o->steps);
    } else {
        run_folder_begin(o);
        log_open(&log, &t, o->out);
        stop_catch_signals();
        train_loop(&t, &log, &in->choices);
        log_close(&log);
    }
    trainer_close(&t);
}

// Trains, or prints the plan.
static void run(struct options *o, int argc, char **argv) {
    struct origin origin;
    struct input in;
    origin_settle(&origin, o, argc, argv);
    input_open(&in, o, origin.tokenizer, origin_folder(&origin), o->seq, 1 + o->model.mtp_depth);
    config_validate(&o->model);
    if (!o->plan) {
        plan_check_memory(&o->model, o->batch, o->seq);
        if (!o->resume) run_folder_open(o, origin.checkpoint, sizeof origin.checkpoint);
    }
    printf("%s, on %s\n", o->preset, device_name());
    log_print_options(stdout, o);
    plan_print(stdout, &o->model, o->batch, o->seq, o->tokens_per_step);
    if (o->plan) {
        plan_print_activations(stdout, &o->model, o->batch, o->seq);
    } else {
        data_describe(in.data, stdout);
        fflush(stdout);
        train(o, &in, &origin);
    }
    input_close(&in);
}

// --evaluate: the weights of --from on held-out data, by default the run's own.
static void evaluate_weights(struct options *o, int argc, char **argv) {
    struct model m;
    struct input in;
    char folder[OPTION_TEXT + 32];
    saved_model_open(&m, o, o->batch, folder, sizeof folder);
    struct cJSON *saved = checkpoint_read_options(folder);
    options_take_data(o, saved, folder, argc, argv);
    cJSON_Delete(saved);
    o->model = m.config;
    input_open(&in, o, o->tokenizer, folder, m.acts.seq, 1);
    data_describe(in.data, stdout);
    fflush(stdout);
    printf("weights in %s | ", folder);
    log_print_eval(stdout, evaluate_heldout(&m, in.data, in.tokenizer, o->batch, m.acts.seq, o->eval_sequences));
    if (in.choices.count) {
        printf("weights in %s | ", folder);
        log_print_choices(stdout, evaluate_all_choices(&m, &in.choices, o->batch, m.acts.seq));
    }
    input_close(&in);
    model_close(&m);
}

int main(int argc, char **argv) {
    struct options o;
    device_start(argv);
    file_hold_closed_streams();
    options_parse(&o, argc, argv);
    if (o.help) {
        options_print_help(stdout);
    } else if (o.device) {
        puts(device_name());
    } else {
        refuse_several_ranks();
        if (o.generate)
            generate_from_checkpoint(&o);
        else if (o.evaluate)
            evaluate_weights(&o, argc, argv);
        else
            run(&o, argc, argv);
    }
    file_check_standard_output();
    return 0;
}

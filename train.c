// The program: flags -> build -> loop -> log -> save.
#include <cjson/cJSON.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>

#include "data/data.h"
#include "data/files.h"
#include "kernels/clock.h"
#include "kernels/fail.h"
#include "kernels/kernels.h"
#include "model/checkpoint.h"
#include "model/evaluate.h"
#include "model/generate.h"
#include "model/log.h"
#include "model/options.h"
#include "model/plan.h"
#include "model/run_folder.h"
#include "model/saved_model.h"
#include "model/trainer.h"
#include "model/vocabulary.h"

static volatile sig_atomic_t stop_requested;
static void request_stop(int signal_number) {
    stop_requested = signal_number;
    // A second one does not wait for the step to end; but each line into a closed pipe brings one.
    signal(signal_number, signal_number == SIGPIPE ? SIG_IGN : SIG_DFL);
}

// A closed pipe is a reason to stop like the others: the step is finished and saved. SIGUSR1 is what cluster schedulers
// send when the time is nearly up.
static void catch_stop_signals(void) {
    static const int signals[] = {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGPIPE};
    for (size_t i = 0; i < sizeof signals / sizeof *signals; i++)
        if (signal(signals[i], request_stop) == SIG_IGN) signal(signals[i], SIG_IGN); // as nohup asks
}

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

static void save(struct trainer *t) {
    if (!trainer_is_finite(t))
        fail_internal("weights",
                      "step %lld left weights that are not finite numbers; they were not saved: start a new "
                      "run with a lower --lr",
                      (long long)t->step);
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

static void evaluate(struct trainer *t, struct run_log *log, const struct choices *choices) {
    const struct options *o = &t->options;
    log_eval(log, t, trainer_evaluate(t, o->eval_sequences));
    if (choices) log_choices(log, t, evaluate_all_choices(&t->model, choices, o->batch, o->seq));
}

static void train_loop(struct trainer *t, struct run_log *log, const struct choices *choices) {
    const struct options *o = &t->options;
    if (o->sample_tokens && t->step == 0) generate_print_sample(&t->model, o, t->tokenizer, "before training");
    while (t->step < o->steps && !stop_requested) {
        double start = clock_seconds();
        struct step_report report = trainer_step(t);
        if (!report.finite) stop_not_finite(t, &report);
        log_step(log, t, &report, clock_seconds() - start);
        if (o->log_moe_every && t->step % o->log_moe_every == 0) log_moe(log, t);
        if (is_due(o->eval_every, t->step, o)) evaluate(t, log, choices);
        if (is_due(o->save_every, t->step, o)) save(t);
        if (o->sample_every && t->step % o->sample_every == 0 && t->step < o->steps)
            generate_print_sample(&t->model, o, t->tokenizer, "in between");
    }
    if (stop_requested) {
        printf("stopped by signal %d after step %lld\n", (int)stop_requested, (long long)t->step);
        if (o->save_every && !is_due(o->save_every, t->step, o)) save(t); // else it has been saved
    } else if (o->sample_tokens) {
        generate_print_sample(&t->model, o, t->tokenizer, "after training");
    }
}

// Where a run begins. The first two empty: with weights drawn from the seed.
struct origin {
    char checkpoint[OPTION_TEXT + 32]; // of this run, to go on from
    char weights[OPTION_TEXT + 32];    // of another, to begin with
    char tokenizer[OPTION_TEXT];       // --tokenizer as it is given now; empty: as the checkpoint or the data has it
};

// What a run reads, and who understands it.
struct input {
    struct tokenizer *tokenizer; // NULL: nobody
    struct data *data;
    struct choices choices; // of --eval-choices
};

static void input_open(struct input *in, struct options *o, const char *tokenizer, const char *weights, int length,
                       int lookahead) {
    char error[FILE_ERROR];
    *in = (struct input){.tokenizer = vocabulary_open(o, tokenizer, weights)};
    in->data = data_open(o->data, o->eval_data, in->tokenizer, o->seed, length, lookahead);
    o->model.vocab = data_settle_vocab(in->data, o->model.vocab);
    if (o->eval_choices[0] &&
        !choices_open(&in->choices, o->eval_choices, in->tokenizer, o->model.vocab, error, sizeof error))
        fail_user("--eval-choices", "%s", error);
}

static const struct choices *input_choices(const struct input *in) { return in->choices.count ? &in->choices : NULL; }

static void input_close(struct input *in) {
    if (in->choices.count) choices_close(&in->choices);
    data_close(in->data);
    tokenizer_close(in->tokenizer);
}

static void train(struct options *o, const struct input *in, const struct origin *origin) {
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
        catch_stop_signals();
        train_loop(&t, &log, input_choices(in));
        log_close(&log);
    }
    trainer_close(&t);
}

static void take_saved_settings(struct options *o, const char *folder, int argc, char **argv) {
    struct checkpoint c = {0};
    checkpoint_load_progress(folder, &c);
    options_resume(o, c.options, folder, argc, argv);
    cJSON_Delete(c.options);
    cJSON_Delete(c.data);
}

static void take_model(struct options *o, const char *folder, int argc, char **argv) {
    struct config found = o->model;
    char error[FILE_ERROR];
    if (!checkpoint_read_config(folder, &found, error, sizeof error))
        fail_user("--from", "%s; name a checkpoint, a Hugging Face folder, or a run folder that holds one", error);
    int modules = checkpoint_count_modules(folder, &found);
    if (modules < found.mtp_depth)
        printf("found %d MTP modules in %s, where config.json speaks of %d\n", modules, folder, found.mtp_depth);
    found.mtp_depth = modules;
    options_take_model(o, &found, folder, argc, argv);
}

// What the command line leaves open: a run that is resumed has its own settings, weights have their sizes.
static void settle(struct options *o, struct origin *origin, int argc, char **argv) {
    snprintf(origin->tokenizer, sizeof origin->tokenizer, "%s", o->tokenizer); // before the saved one is among them
    if (o->resume) run_folder_open(o, origin->checkpoint, sizeof origin->checkpoint);
    if (origin->checkpoint[0]) {
        take_saved_settings(o, origin->checkpoint, argc, argv);
        return;
    }
    if (o->from[0]) {
        checkpoint_find(o->from, origin->weights, sizeof origin->weights);
        take_model(o, origin->weights, argc, argv);
    }
    options_settle(o, argc, argv);
}

// Trains, or prints the plan.
static void run(struct options *o, int argc, char **argv) {
    struct origin origin = {0};
    settle(o, &origin, argc, argv);
    struct input in;
    input_open(&in, o, origin.tokenizer, origin.checkpoint[0] ? origin.checkpoint : origin.weights, o->seq,
               1 + o->model.mtp_depth);
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

// --evaluate: the weights of --from on held-out data.
static void evaluate_weights(struct options *o) {
    struct model m;
    struct input in;
    char folder[OPTION_TEXT + 32];
    saved_model_open(&m, o, o->batch, folder, sizeof folder);
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
            evaluate_weights(&o);
        else
            run(&o, argc, argv);
    }
    file_check_standard_output();
    return 0;
}

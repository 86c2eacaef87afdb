// The program: flags -> build -> loop -> log -> save.
#include <cjson/cJSON.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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
#include "model/leader.h"
#include "model/log.h"
#include "model/moe_mok.h"
#include "model/options.h"
#include "model/origin.h"
#include "model/plan.h"
#include "model/plan_ranks.h"
#include "model/run_folder.h"
#include "model/saved_model.h"
#include "model/trace.h"
#include "model/trainer.h"

// After this step: always at the last one, and every `every` steps; 0 means never.
static bool is_due(int64_t every, int64_t step, const struct options *o) {
    return every > 0 && (step % every == 0 || step == o->steps);
}

static void save(struct trainer *t, struct run_log *log) {
    if (!trainer_is_finite(t)) {
        leader_begin(t->parallel->world);
        fail_internal("weights",
                      "step %lld left weights that are not finite numbers; they were not saved: start a new "
                      "run with a lower --lr",
                      (long long)t->step);
    }
    log_sync(log); // a log that a power loss cuts would lack steps of the checkpoint
    struct checkpoint c = trainer_checkpoint(t);
    c.options = options_run_to_json(&t->options);
    checkpoint_save(&c, t->options.out, t->options.keep);
    cJSON_Delete(c.options);
    printf("saved %s/step-%08lld\n", t->options.out, (long long)t->step);
    fflush(stdout);
}

static _Noreturn void stop_not_finite(const struct trainer *t, const struct step_report *r) {
    leader_begin(t->parallel->world);
    fail_internal("gradient",
                  "step %lld has loss %g and gradient norm %g, wanted finite numbers; the step was not "
                  "applied and nothing was saved, older checkpoints in %s are as they were: start a new run with a "
                  "lower --lr",
                  (long long)r->step, r->loss, r->norm, t->options.out);
}

static void evaluate(struct trainer *t, struct run_log *log, const struct choices *choices) {
    const struct options *o = &t->options;
    struct evaluation e = trainer_evaluate(t, o->eval_sequences);
    if (e.stopped) return;
    log_eval(log, t, e);
    struct choice_counts counts;
    if (choices->count && evaluate_all_choices(&t->model, choices, o->batch, o->seq, &counts))
        log_choices(log, t, counts);
}

// Of the rank that took the most, beside what the fullest was planned to need.
static void print_memory(const struct trainer *t) {
    struct comm *world = t->parallel->world;
    struct plan plan;
    size_t used = device_memory_used(), *all = calloc((size_t)comm_size(world), sizeof *all);
    if (!all) fail_internal("memory", "found no room for %d numbers", comm_size(world));
    comm_gather_all(world, all, &used, sizeof used);
    for (int r = 0; r < comm_size(world); r++)
        if (all[r] > used) used = all[r];
    free(all);
    plan_make(&plan, &t->options, t->parallel);
    plan_print_used(stdout, plan.total_bytes, used);
}

static void train_loop(struct trainer *t, struct run_log *log, struct run_trace *trace, const struct choices *choices) {
    const struct options *o = &t->options;
    if (o->sample_tokens && t->step == 0) generate_print_sample(&t->model, o, t->tokenizer, "before training");
    const int64_t settled = t->step + 2; // all memory has been taken by then
    int stop;                            // the signal that ends the run, agreed by all ranks
    while (!(stop = stop_agree(t->parallel->world)) && t->step < o->steps) {
        double start = clock_seconds();
        trace_begin_step(trace, t->step + 1);
        struct step_report report = trainer_step(t);
        if (!report.finite) stop_not_finite(t, &report);
        double seconds = clock_seconds() - start;
        trace_end_step(trace);
        log_step(log, t, &report, seconds);
        if (t->step == settled) print_memory(t);
        if (o->log_moe_every && t->step % o->log_moe_every == 0) log_moe(log, t);
        if (is_due(o->eval_every, t->step, o)) evaluate(t, log, choices);
        if (is_due(o->save_every, t->step, o)) save(t, log);
        if (o->sample_every && t->step % o->sample_every == 0 && t->step < o->steps)
            generate_print_sample(&t->model, o, t->tokenizer, "in between");
    }
    if (stop) {
        printf("stopped by signal %d after step %lld\n", stop, (long long)t->step);
        if (o->save_every && !is_due(o->save_every, t->step, o)) save(t, log); // else it has been saved
    } else if (o->sample_tokens) {
        generate_print_sample(&t->model, o, t->tokenizer, "after training");
    }
}

// With tracks for the workers of the MoE layers.
static void open_trace(struct run_trace *trace, const struct trainer *t) {
    const struct options *o = &t->options;
    bool mok = o->moe.kind == MOE_MOK && model_moe_blocks(&o->model) > 0;
    int workers = moe_mok_workers(&o->moe), movers = o->moe.comm_workers;
    trace_open_run(trace, t->parallel->world, o->trace, mok ? mok_trace_tracks(workers, movers) : 0, o->trace_step,
                   t->step, o->steps);
    trace->trace.layer = o->trace_layer ? o->trace_layer : -1;
    if (o->trace[0] && mok) mok_trace_open(&trace->trace, workers, movers);
}

static void train(const struct options *o, const struct input *in, const struct origin *origin,
                  const struct parallel *parallel) {
    struct trainer t;
    struct run_log log;
    struct run_trace trace;
    trainer_open(&t, o, in->data, in->tokenizer, parallel);
    if (origin->checkpoint[0])
        trainer_restore(&t, origin->checkpoint);
    else if (origin->weights[0])
        trainer_start_from(&t, origin->weights);
    if (t.step >= o->steps) {
        printf("found step %lld done, and --steps %lld: nothing to do\n", (long long)t.step, (long long)o->steps);
    } else {
        // First, since it looks whether the trace can be written: run_folder_begin may remove a run.
        open_trace(&trace, &t);
        if (leader_is_here(parallel->world)) run_folder_begin(o);
        log_open(&log, &t, o->out);
        t.model.trace = &trace.trace;
        stop_catch_signals();
        train_loop(&t, &log, &trace, &in->choices);
        mok_trace_close();
        trace_close_run(&trace);
        log_close(&log);
    }
    trainer_close(&t);
}

static void open_input(struct input *in, struct options *o, const struct origin *origin) {
    input_open(in, o, origin->tokenizer, origin_folder(origin), o->seq, 1 + o->model.mtp_depth);
    config_validate(&o->model);
}

// Rank 0 looks at the hashes of a whole checkpoint there: the others wait so much longer.
static void wait_for_leader(const struct options *o, const char *folder) {
    comm_set_timeout(o->timeout + checkpoint_seconds(checkpoint_bytes_on_disk(folder)));
}

// A GPU for this rank.
static void open_device(struct comm *world) {
    struct comm *here = comm_split_host(world);
    device_open(comm_rank(here), comm_size(here));
    comm_free(here);
}

// Ranks that share this machine's memory.
static int count_ranks_here(struct comm *world) {
    struct comm *here = comm_split_host(world);
    int ranks = comm_size(here);
    comm_free(here);
    return ranks;
}

static void print_device(const struct options *o) {
    printf("%s, on %s", o->preset, device_name());
    if (strcmp(device_tuning(), "default") != 0) printf(", matrix products %s", device_tuning());
    putchar('\n');
}

static void run(struct options *o, int argc, char **argv) {
    struct comm *world = comm_world();
    struct origin origin;
    struct input in;
    struct parallel parallel;
    wait_for_leader(o, o->resume ? o->out : o->from);
    if (leader_is_here(world)) origin_settle(&origin, o, comm_size(world), argc, argv);
    comm_broadcast(world, o, sizeof *o, 0);
    comm_broadcast(world, &origin, sizeof origin, 0);
    comm_set_timeout(o->timeout);
    leader_begin(world);
    open_input(&in, o, &origin);
    leader_end(world);
    parallel_open(&parallel, o->ep, o->model.experts);
    int ranks_here = count_ranks_here(world);
    leader_begin(world);
    plan_check_memory(o, &parallel, ranks_here);
    leader_end(world);
    if (leader_is_here(world) && !o->resume) run_folder_open(o, origin.checkpoint, sizeof origin.checkpoint);
    print_device(o);
    log_print_layout(stdout, o, &parallel);
    log_print_options(stdout, o);
    plan_print(stdout, o, &parallel, ranks_here);
    data_describe(in.data, stdout);
    fflush(stdout);
    train(o, &in, &origin, &parallel);
    parallel_close(&parallel);
    input_close(&in);
}

// --plan, for the ranks that there are or as many as are asked for. Rank 0 does it.
static void print_plan(struct options *o, int argc, char **argv) {
    struct comm *world = comm_world();
    struct parallel parallel;
    struct origin origin;
    struct input in;
    int ranks_here = o->ranks ? 0 : count_ranks_here(world);
    wait_for_leader(o, o->from);
    if (leader_is_here(world)) {
        origin_settle(&origin, o, o->ranks ? o->ranks : comm_size(world), argc, argv);
        open_input(&in, o, &origin);
    }
    comm_broadcast(world, o, sizeof *o, 0);
    comm_set_timeout(o->timeout);
    if (o->ranks) {
        leader_begin(world);
        parallel = parallel_suppose(o->ranks, o->ep, o->model.experts);
        leader_end(world);
    } else {
        parallel_open(&parallel, o->ep, o->model.experts);
    }
    if (leader_is_here(world)) {
        printf("%s, on %s\n", o->preset, device_name());
        log_print_options(stdout, o);
        plan_print(stdout, o, &parallel, ranks_here);
        plan_ranks_print(stdout, o, &parallel);
        plan_print_activations(stdout, o, &parallel);
        input_close(&in);
    }
    parallel_close(&parallel);
}

// The experts of the model in --from, which becomes the checkpoint that it stands for.
static int find_model(struct options *o) {
    struct config found = o->model;
    char folder[OPTION_TEXT + 32], error[FILE_ERROR];
    checkpoint_find(o->from, folder, sizeof folder);
    if (!checkpoint_read_config(folder, &found, error, sizeof error))
        fail_user("--from", "%s; name a checkpoint, a Hugging Face folder, or a run folder that holds one", error);
    if (strlen(folder) < sizeof o->from) strcpy(o->from, folder);
    return found.experts;
}

// --evaluate: the weights of --from on held-out data, by default the run's own.
static void evaluate_weights(struct options *o, int argc, char **argv) {
    struct comm *world = comm_world();
    struct parallel parallel;
    struct model m;
    struct input in;
    struct choice_counts counts;
    char folder[OPTION_TEXT + 32];
    int experts = 0;
    wait_for_leader(o, o->from);
    if (leader_is_here(world)) experts = find_model(o);
    comm_broadcast(world, o, sizeof *o, 0);
    comm_broadcast(world, &experts, sizeof experts, 0);
    comm_set_timeout(o->timeout);
    parallel_open(&parallel, o->ep, experts);
    saved_model_open(&m, o, &parallel, o->batch, folder, sizeof folder);
    leader_begin(world);
    struct cJSON *saved = checkpoint_read_options(folder);
    options_take_data(o, saved, folder, argc, argv);
    cJSON_Delete(saved);
    o->model = m.config;
    input_open(&in, o, o->tokenizer, folder, m.acts.seq, 1);
    leader_end(world);
    data_describe(in.data, stdout);
    fflush(stdout);
    struct evaluation e = evaluate_heldout(&m, in.data, in.tokenizer, o->batch, m.acts.seq, o->eval_sequences);
    printf("weights in %s | ", folder);
    log_print_eval(stdout, e);
    if (in.choices.count && evaluate_all_choices(&m, &in.choices, o->batch, m.acts.seq, &counts)) {
        printf("weights in %s | ", folder);
        log_print_choices(stdout, counts);
    }
    input_close(&in);
    model_close(&m);
    parallel_close(&parallel);
}

// Rank 0 reads the command line, and it alone prints.
static void read_command_line(struct options *o, int argc, char **argv) {
    struct comm *world = comm_world();
    if (leader_is_here(world)) {
        options_parse(o, argc, argv);
        if (o->generate && comm_size(world) > 1)
            fail_user("--generate", "found %d ranks, wanted one process; start it without mpirun", comm_size(world));
    }
    comm_broadcast(world, o, sizeof *o, 0);
    comm_set_timeout(o->timeout);
    if (!leader_is_here(world) && !freopen("/dev/null", "w", stdout))
        fail_internal("standard output", "cannot open /dev/null for a rank that prints nothing");
}

int main(int argc, char **argv) {
    struct options o;
    device_start(argv);
    file_hold_closed_streams();
    comm_start(&argc, &argv);
    read_command_line(&o, argc, argv);
    if (!o.help && !o.device && !o.plan) open_device(comm_world());
    if (o.help)
        options_print_help(stdout);
    else if (o.device)
        puts(device_name());
    else if (o.generate)
        generate_from_checkpoint(&o);
    else if (o.evaluate)
        evaluate_weights(&o, argc, argv);
    else if (o.plan)
        print_plan(&o, argc, argv);
    else
        run(&o, argc, argv);
    file_check_standard_output();
    comm_stop();
    return 0;
}

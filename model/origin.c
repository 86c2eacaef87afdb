#include "model/origin.h"

#include <cjson/cJSON.h>
#include <stdio.h>

#include "data/files.h"
#include "kernels/fail.h"
#include "model/checkpoint.h"
#include "model/run_folder.h"

const char *origin_folder(const struct origin *origin) {
    return origin->checkpoint[0] ? origin->checkpoint : origin->weights;
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

// The settings of a run that exists; false if there is none.
static bool take_saved_settings(struct origin *origin, struct options *o, int ranks, int argc, char **argv) {
    run_folder_open(o, origin->checkpoint, sizeof origin->checkpoint);
    if (origin->checkpoint[0]) {
        struct checkpoint c = {0};
        checkpoint_load_progress(origin->checkpoint, &c);
        options_resume(o, c.options, origin->checkpoint, ranks, argc, argv);
        cJSON_Delete(c.options);
        cJSON_Delete(c.data);
        return true;
    }
    struct cJSON *settings = run_folder_settings(o->out);
    if (!settings) return false;
    options_resume(o, settings, o->out, ranks, argc, argv);
    cJSON_Delete(settings);
    // Its sizes are among the settings already.
    if (o->from[0]) checkpoint_find(o->from, origin->weights, sizeof origin->weights);
    return true;
}

void origin_settle(struct origin *origin, struct options *o, int ranks, int argc, char **argv) {
    *origin = (struct origin){0};
    snprintf(origin->tokenizer, sizeof origin->tokenizer, "%s", o->tokenizer); // before the saved one is among them
    if (o->resume && take_saved_settings(origin, o, ranks, argc, argv)) {
        // Before the first checkpoint there is none to have the tokenizer.
        if (!origin->checkpoint[0]) snprintf(origin->tokenizer, sizeof origin->tokenizer, "%s", o->tokenizer);
        return;
    }
    if (o->from[0]) {
        checkpoint_find(o->from, origin->weights, sizeof origin->weights);
        take_model(o, origin->weights, argc, argv);
    }
    options_settle(o, ranks, argc, argv);
}

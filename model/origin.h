// Where a run begins, and the settings it begins with.
#ifndef MOK_MODEL_ORIGIN_H
#define MOK_MODEL_ORIGIN_H

#include "model/options.h"

struct origin {
    char checkpoint[OPTION_TEXT + 32]; // of this run, to go on from; empty: none
    char weights[OPTION_TEXT + 32];    // of another, to begin with; both empty: weights are drawn from the seed
    char tokenizer[OPTION_TEXT];       // --tokenizer as it is given now; empty: as the checkpoint or the data has it
};

// Settles what the command line (options_parse) leaves open, for a run on so many ranks. A run that is resumed has the settings of its newest
// checkpoint, or before the first one of its config.json; with --from the model is that of the weights. With --resume
// opens the run folder. Ends the program (exit 2) when settings contradict each other.
void origin_settle(struct origin *origin, struct options *o, int ranks, int argc, char **argv);

// The folder whose tokenizer is the run's: of the checkpoint or of the weights; empty for none.
const char *origin_folder(const struct origin *origin);

#endif

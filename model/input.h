// What a run or an evaluation reads, and who understands it.
#ifndef MOK_MODEL_INPUT_H
#define MOK_MODEL_INPUT_H

#include "data/choices.h"
#include "data/data.h"
#include "data/tokenizer.h"
#include "model/options.h"

struct input {
    struct tokenizer *tokenizer; // NULL: nobody
    struct data *data;
    struct choices choices; // of --eval-choices; count 0: none
};

// Opens --data, --eval-data and --eval-choices for sequences of length tokens and as many behind them as lookahead says,
// and settles the vocabulary. tokenizer, folder: see vocabulary_open. Ends the program (exit 2) when something cannot be
// used.
void input_open(struct input *in, struct options *o, const char *tokenizer, const char *folder, int length,
                int lookahead);
void input_close(struct input *in);

#endif

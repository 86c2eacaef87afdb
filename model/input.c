#include "model/input.h"

#include "data/files.h"
#include "kernels/fail.h"
#include "model/vocabulary.h"

void input_open(struct input *in, struct options *o, const char *tokenizer, const char *folder, int length,
                int lookahead) {
    char error[FILE_ERROR];
    *in = (struct input){.tokenizer = vocabulary_open(o, tokenizer, folder)};
    in->data = data_open(o->data, o->eval_data, in->tokenizer, o->seed, length, lookahead);
    o->model.vocab = data_settle_vocab(in->data, o->model.vocab);
    if (o->eval_choices[0] &&
        !choices_open(&in->choices, o->eval_choices, in->tokenizer, o->model.vocab, error, sizeof error))
        fail_user("--eval-choices", "%s", error);
}

void input_close(struct input *in) {
    if (in->choices.count) choices_close(&in->choices);
    data_close(in->data);
    tokenizer_close(in->tokenizer);
}

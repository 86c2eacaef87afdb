// How good a model is: loss and bits per byte of held-out text, and accuracy on multiple-choice questions.
// The ranks of the model share the work: all of this is collective, and its results are the same on all of them. A signal
// that asks the program to end (kernels/stop.h) cuts an evaluation short.
#ifndef MOK_MODEL_EVALUATE_H
#define MOK_MODEL_EVALUATE_H

#include "data/choices.h"
#include "data/data.h"
#include "data/tokenizer.h"
#include "model/model.h"

// ---- held-out text ----

struct evaluation {
    double loss;            // mean cross-entropy of the main model over the valid targets, in nats
    double bits_per_byte;   // all nats / ln 2 / bytes; NaN where the bytes are not known or none
    int64_t targets, bytes; // valid targets, and the bytes of text that they stand for
    bool stopped;           // by a signal: the numbers say nothing
};

// The first sequences of the eval split, as many as there are, in micro-batches of `batch` of `seq` tokens; the model
// and the data must have been opened for both. tokenizer: NULL if there is none. Special tokens (the end of text) stand
// for no bytes, but what they cost counts: a model that does not see texts end pays for it in bits per byte. Unlike the
// loss, that number can be compared between tokenizers.
struct evaluation evaluate_heldout(struct model *m, const struct data *d, const struct tokenizer *tokenizer, int batch,
                                   int seq, int sequences);

// ---- multiple choice ----

// Cross-entropy of the completions of one example behind its context.
struct choice_score {
    int completions;           // 0: skipped, since a completion does not fit into seq tokens
    double nats[CHOICES_MOST]; // sum over the completion's tokens
};

// Scores `count` examples from number `first` on, which each rank chooses for itself: scores [count]. Rows of context and completion stand side by side in
// micro-batches of at most `batch` rows of `seq` tokens; the numbers do not depend on how they are packed. A context that
// is too long for the longest of its completions loses its beginning, in the rows of all completions alike.
void evaluate_score_choices(struct model *m, const struct choices *c, int batch, int seq, int first, int count,
                            struct choice_score *scores);

// The answer is the completion with the lowest mean (or sum) of cross-entropy over its tokens; of equal ones the first.
struct choice_counts {
    int64_t examples; // scored
    int64_t right_by_mean, right_by_sum;
    int64_t skipped; // not scored
};

// Adds what the model answers to `count` examples from number `first` on, the same for all ranks. Accuracy is right /
// examples.
void evaluate_choices(struct model *m, const struct choices *c, int batch, int seq, int first, int count,
                      struct choice_counts *counts);

// The same for all examples, with a bar on standard error where that is a terminal. False when a signal stopped it: the
// numbers say nothing.
bool evaluate_all_choices(struct model *m, const struct choices *c, int batch, int seq, struct choice_counts *counts);

#endif

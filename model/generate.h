// Sampling from the model, one token after the other.
#ifndef MOK_MODEL_GENERATE_H
#define MOK_MODEL_GENERATE_H

#include "data/tokenizer.h"
#include "model/model.h"
#include "model/options.h"

// Index drawn from softmax(logits / temperature) with u in [0, 1); temperature 0 takes the largest, first of equals.
// Safe for logits of any size.   logits (host) [V]
int generate_pick(const float *logits, int V, double temperature, double u);

// Extends tokens[0..prompt-1] by `count` sampled tokens, each from at most the last acts.seq tokens. tokens (host) has
// room for prompt + count; prompt >= 1. Stops early after the token `stop` (-1: never). The choice at each position
// depends on (seed, position) and the logits alone. Returns the number of tokens added. Collective over the model's ranks:
// rank 0 chooses, the others take part in its passes without tokens of their own, and all get what it chose.
int generate_tokens(struct model *m, int32_t *tokens, int prompt, int count, double temperature, uint64_t seed,
                    int32_t stop);

// Prints sample_tokens tokens of a text that the model begins, under a line that says when. Without a tokenizer (NULL)
// they are printed as ids. Collective.
void generate_print_sample(struct model *m, const struct options *o, const struct tokenizer *tokenizer,
                           const char *when);

// --generate N --from DIR --prompt TEXT: prints prompt and continuation. Names of special tokens in the prompt are those
// tokens. For one process. Ends the program (exit 2) when DIR holds no model or nothing says what its ids stand for.
// --logits FILE: "tokens" I64 [T], the end of a text and the prompt, and "logits" F32 [T, V], in a safetensors file.
void generate_from_checkpoint(const struct options *o);

#endif

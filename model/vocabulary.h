// Which tokenizer a run speaks.
#ifndef MOK_MODEL_VOCABULARY_H
#define MOK_MODEL_VOCABULARY_H

#include "data/tokenizer.h"
#include "model/options.h"

// named is what --tokenizer says ("bytes", a tokenizer.json or its folder), empty for a run that goes on and was not
// given another: its own is in the checkpoint. Else the tokenizer.json beside the weights in folder (empty: none); else
// the one beside the token shards of --data; else bytes. NULL where the ids are given and nothing says what they stand
// for: shards or weights without a tokenizer.json. Ends the program (exit 2) when there is text to read as well, since
// bytes would be other ids, and when one cannot be read, unless it was not asked for and no text needs it.
struct tokenizer *vocabulary_open(const struct options *o, const char *named, const char *folder);

#endif

// Fingerprints of a source, to notice that a run goes on with other data.
#ifndef MOK_DATA_IDENTITY_H
#define MOK_DATA_IDENTITY_H

#include "data/source.h"

struct cJSON;

// {"files", "tokens", "shards", "tokenizer"} or {"stories", "tokenizer"} of data_identity, for the caller to free; NULL
// with the reason in e.
struct cJSON *source_identity(const struct source *s, struct data_error *e);

#endif

// The folder of one run: config.json, log.jsonl, step-00000100/ ... What may be written into, and where to go on from.
#ifndef MOK_MODEL_RUN_FOLDER_H
#define MOK_MODEL_RUN_FOLDER_H

#include <stddef.h>

#include "model/options.h"

// Makes the folder (its parents too) or checks the one that is there, and writes config.json, the resolved options.
//   no run in it           used as it is
//   a run, --overwrite     its log and checkpoints are removed, nothing else
//   a run, --resume        from [size] receives the newest complete checkpoint
//   a run, neither         refused (exit 2)
// from is empty when the run starts at the beginning.
void run_folder_open(const struct options *o, char *from, size_t size);

#endif

// The folder of one run: config.json, log.jsonl, step-00000100/ ... What may be written into, and where to go on from.
#ifndef MOK_MODEL_RUN_FOLDER_H
#define MOK_MODEL_RUN_FOLDER_H

#include <stddef.h>

#include "model/options.h"

// Makes the folder (its parents too) or checks the one that is there.
//   no run in it           used as it is
//   a run, --overwrite     its checkpoints are removed, nothing else; log_open starts the log anew
//   a run, --resume        from [size] receives the newest complete checkpoint
//   a run, neither         refused (exit 2)
// from is empty when the run starts at the beginning; with --resume a line says so.
void run_folder_open(const struct options *o, char *from, size_t size);

// Writes config.json, the resolved options. Called once nothing can refuse the run any more: a refused --resume leaves
// the old one alone.
void run_folder_write_config(const struct options *o);

#endif

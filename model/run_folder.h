// The folder of one run: config.json, log.jsonl, step-00000100/ ... What may be written into, and where to go on from.
#ifndef MOK_MODEL_RUN_FOLDER_H
#define MOK_MODEL_RUN_FOLDER_H

#include <stddef.h>

#include "model/options.h"

// Makes the folder (its parents too) or checks the one that is there.
//   no run in it           used as it is
//   a run, --overwrite     accepted; run_folder_begin makes room
//   a run, --resume        from [size] receives the newest complete checkpoint
//   a run, neither         refused (exit 2)
// Refuses (exit 2) a folder that another process runs in, and --resume where all checkpoints are broken.
// from is empty when the run starts at the beginning; with --resume a line says so.
void run_folder_open(const struct options *o, char *from, size_t size);

// Makes the folder this run's: with --overwrite removes the old one's checkpoints (and nothing else; log_open starts the
// log anew), and writes config.json, the resolved options. Called once memory and --resume can refuse nothing any more.
void run_folder_begin(const struct options *o);

#endif

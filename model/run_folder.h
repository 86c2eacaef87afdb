// The folder of one run: config.json, log.jsonl, step-00000100/ ... What may be written into, and where to go on from.
#ifndef MOK_MODEL_RUN_FOLDER_H
#define MOK_MODEL_RUN_FOLDER_H

#include <stddef.h>
#include <stdint.h>

#include "model/options.h"

// Makes the folder (its parents too) or checks the one that is there.
//   no run in it           used as it is
//   a run, --overwrite     accepted; run_folder_begin makes room
//   a run, --resume        from [size] receives the newest checkpoint that is whole; others are skipped with a line
//   a run, neither         refused (exit 2)
// A run is a checkpoint, even a broken one, or a log with a line in it. Refuses (exit 2) a folder that another process
// runs in, one of something else, whose config.json is not a run's, and --resume where all checkpoints are broken. A
// folder that cannot be locked is used with a warning.
// from is empty when the run starts at the beginning; with --resume a line says so.
void run_folder_open(const struct options *o, char *from, size_t size);

// The settings in a run's config.json, for the caller to delete; NULL if there is no such file. Ends the program (exit 2)
// when it is not a run's.
struct cJSON *run_folder_settings(const char *folder);

// Ends the program (exit 2) when the bytes available on its file system have no room for one checkpoint, and warns when
// those that --keep asks for and the one being written will not fit beside each other.
void run_folder_check_space(const struct options *o, uint64_t available);

// Makes the folder this run's: checks the space on its disk, with --overwrite removes the old one's checkpoints (and
// nothing else; log_open starts the log anew), and writes config.json, the resolved options. Called once memory and
// --resume can refuse nothing any more, and only if there is a step to do.
void run_folder_begin(const struct options *o);

#endif

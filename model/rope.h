// Rotary position angles, with the optional YaRN extension.
#ifndef MOK_MODEL_ROPE_H
#define MOK_MODEL_ROPE_H

#include "kernels/types.h"
#include "model/config.h"

// Frequency of pair j (dims 2j, 2j+1): theta^(-2j/dr), stretched by YaRN where it is on (arXiv 2309.00071, section
// 3.2).
double rope_frequency(const struct config *c, int pair);
// The pairs between which YaRN blends from "as trained" (below low) to "divided by factor" (above high).
void rope_yarn_range(const struct config *c, int *low, int *high);
// YaRN's temperature term: 1 + 0.1 weight ln(factor), or 1 where it is off.
double rope_yarn_scale(double factor, double weight);

// host angles [T, dr]: cos and sin of position * frequency side by side, per pair.
void rope_angles(accum *angles, const struct config *c, int T);

#endif

// Multi-head latent attention of one block, with its norm and residual (DeepSeek-V2 paper, section 2.1).
#ifndef MOK_MODEL_MLA_H
#define MOK_MODEL_MLA_H

#include "model/model.h"

// middle = input + MLA(RMS(input)), in the block's activations.
void mla_forward(struct model *m, int block, int B, int T);
// dx [N, H] comes as the gradient of middle and leaves as that of input.
void mla_backward(struct model *m, int block, real *dx, int B, int T);

#endif

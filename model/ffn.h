// The feed-forward half of one block, with its norm and residual: a dense SwiGLU, or router and MoE layer.
#ifndef MOK_MODEL_FFN_H
#define MOK_MODEL_FFN_H

#include "model/model.h"

// out [N, H] = middle + FFN(RMS(middle)). count: add the routes to the block's counts. tokens [N] of the block's input,
// -1 for masked ones, which no expert sees. A MoE block writes its B balance losses behind those of the blocks before it.
void ffn_forward(struct model *m, int block, real *out, const int32_t *tokens, int B, int T, bool count);
// dx [N, H] comes as the gradient of out and leaves as that of middle. sequences: of the whole optimizer step.
void ffn_backward(struct model *m, int block, real *dx, int B, int T, int64_t sequences);

#endif

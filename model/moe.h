// The MoE layer: given normed rows, the router's choice and the weights, the layer's output and its gradients.
#ifndef MOK_MODEL_MOE_H
#define MOK_MODEL_MOE_H

#include "model/activations.h"
#include "model/model.h"

// y = sum over the chosen experts of gate * expert(x) + shared expert(x) + residual. The gate multiplies the hidden
// activation before the down projection, which is the same function.
// y, residual [N, H]; x, ids and gates are those in the block's activations (ffn_norm, ids, gates).
void moe_forward(struct model *m, int block, real *y, const real *residual, int N);

// From dy [N, H]: dx [N, H] (written; the router's part is added by the caller), d_gates [N, K], and the weight
// gradients of routed and shared experts (added).
void moe_backward(struct model *m, int block, real *dx, accum *d_gates, const real *dy, int N);

#endif

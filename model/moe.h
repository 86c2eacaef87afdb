// The MoE layer: given normed rows, the router's choice and the weights, the layer's output and its gradients.
#ifndef MOK_MODEL_MOE_H
#define MOK_MODEL_MOE_H

#include "model/activations.h"
#include "model/model.h"

// Bytes that the layer wants at the beginning of the activations' symmetric memory; 0: it wants none.
size_t moe_header_bytes(const struct config *c, const struct moe_settings *settings, int ep);

// Whether the layer can have this model, on ranks with max_tokens tokens each, as settings say. If not,
// ends the program (exit 2).
void moe_check(const struct config *c, const struct moe_settings *settings, int ep, int max_tokens);
// A part of it: the widths of the experts must be multiples of unit; what names whose unit it is, instead
// who takes any.
void moe_check_widths(const struct config *c, int unit, const char *what, const char *instead);

// The layer's own memory, for the kind, parallel group and batch of a model whose other members are open. All four
// functions are collective over the EP group: a rank without tokens calls them with N = 0, its experts serve the others.
void moe_open(struct model *m);
void moe_close(struct model *m);

// y = sum over the chosen experts of gate * expert(x) + shared expert(x) + residual. The gate multiplies the hidden
// activation before the down projection, which is the same function.
// y, residual [N, H]; x, ids and gates are those in the block's activations (ffn_norm, ids, gates). A route with id -1 goes
// nowhere.
void moe_forward(struct model *m, int block, real *y, const real *residual, int N);

// From dy [N, H]: dx [N, H] (written; the router's part is added by the caller), d_gates [N, K] (0 where the id is -1), and
// the weight gradients of routed and shared experts: added, or with m->first_use stored.
void moe_backward(struct model *m, int block, real *dx, accum *d_gates, const real *dy, int N);

#endif

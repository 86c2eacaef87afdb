// The MoE layer as a megakernel (kernels/mok.h): what a model's layers share and keep for it, and the steps of a pass.
#ifndef MOK_MODEL_MOE_MOK_H
#define MOK_MODEL_MOE_MOK_H

#include "kernels/mok.h"
#include "model/model.h"

// What a block keeps from its forward to its backward pass, besides its activations.
struct mok_block {
    struct mok_plan plan;
    real *x_rows;  // [ring_rows, H]; with RECOMPUTE_MOE the same for all blocks
    real *gate_up; // [ring_rows, 2m]; so is this
};

struct moe_mok {
    struct mok_shape shape;
    struct mok_group group;
    struct mok_crew crew;
    struct mok_workspace work;
    struct mok_block *blocks; // [MoE blocks]; without training, or with RECOMPUTE_BLOCK, all of them are one
};

// Sizes of the layer and its schedule on a rank of an EP group of ep, with what settings leave open chosen for so many
// workers. Ends the program (exit 2) when settings do not fit each other or the sizes.
struct mok_shape moe_mok_shape(const struct config *c, int ep, int max_tokens, const struct moe_settings *settings);

// Workers of a rank that settings ask for.
int moe_mok_workers(const struct moe_settings *settings);

// Bytes of device memory that moe_mok_open takes; symmetric memory is among the activations.
size_t moe_mok_bytes(const struct config *c, const struct mok_shape *s, bool training, enum recompute recompute);

// The symmetric memory of the model's activations must be there. All four are collective over the EP group.
void moe_mok_open(struct model *m);
void moe_mok_close(struct model *m);
// As moe_forward and moe_backward of model/moe.h; dy must lie in symmetric memory.
void moe_mok_forward(struct model *m, int block, real *y, const real *residual, int N);
void moe_mok_backward(struct model *m, int block, real *dx, accum *d_gates, const real *dy, int N);

#endif

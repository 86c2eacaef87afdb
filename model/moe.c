// Which layer computes the experts.
#include "model/moe.h"

#include "model/moe_alltoall.h"
#include "model/moe_mok.h"
#include "model/trace.h"

size_t moe_header_bytes(const struct config *c, const struct moe_settings *settings, int ep) {
    return model_moe_blocks(c) && settings->kind == MOE_MOK ? mok_header_bytes(ep) : 0;
}

void moe_open(struct model *m) {
    if (!model_moe_blocks(&m->config)) return;
    if (m->moe.kind == MOE_MOK)
        moe_mok_open(m);
    else
        moe_alltoall_open(m);
}

void moe_close(struct model *m) {
    if (m->mok) moe_mok_close(m);
    if (m->alltoall) moe_alltoall_close(m);
}

void moe_forward(struct model *m, int block, real *y, const real *residual, int N) {
    int begin = trace_mark(m->trace);
    if (m->mok)
        moe_mok_forward(m, block, y, residual, N);
    else
        moe_alltoall_forward(m, block, y, residual, N);
    trace_add_phase(m->trace, "moe forward", block, begin);
}

void moe_backward(struct model *m, int block, real *dx, accum *d_gates, const real *dy, int N) {
    int begin = trace_mark(m->trace);
    if (m->mok)
        moe_mok_backward(m, block, dx, d_gates, dy, N);
    else
        moe_alltoall_backward(m, block, dx, d_gates, dy, N);
    trace_add_phase(m->trace, "moe backward", block, begin);
}

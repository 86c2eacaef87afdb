// Which layer computes the experts.
#include "model/moe.h"

#include <stdio.h>

#include "kernels/fail.h"
#include "model/moe_alltoall.h"
#include "model/moe_mok.h"
#include "model/trace.h"

static void check_width(const char *flag, int width, int unit, const char *what, const char *instead) {
    int below = width / unit * unit;
    char nearest[64];
    if (width % unit == 0) return;
    if (below)
        snprintf(nearest, sizeof nearest, "%d or %d", below, below + unit);
    else
        snprintf(nearest, sizeof nearest, "%d", unit);
    fail_user(flag, "found %d, wanted a multiple of %d with %s on this device; the nearest is %s, and %s takes any",
              width, unit, what, nearest, instead);
}

// The shared expert is some experts wide.
void moe_check_widths(const struct config *c, int unit, const char *what, const char *instead) {
    check_width("--hidden", c->hidden, unit, what, instead);
    check_width("--expert-intermediate", c->expert_intermediate, unit, what, instead);
}

void moe_check(const struct config *c, const struct moe_settings *settings, int ep, int max_tokens) {
    if (!model_moe_blocks(c)) return;
    if (settings->kind == MOE_MOK)
        moe_mok_shape(c, ep, max_tokens, settings);
    else
        moe_check_widths(c, grouped_matmul_unit(settings->expert_gemm), "--expert-gemm own", "--expert-gemm cublaslt");
}

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

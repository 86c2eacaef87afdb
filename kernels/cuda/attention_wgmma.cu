// Which operands the passes of attention by WGMMA take, and the counters their blocks take tiles from.
#include <math.h>

#include "kernels/cuda/attention_wgmma.cuh"
#include "kernels/cuda/device.h"

static __device__ struct tile_counters counters[ATTENTION_PASSES];

struct tile_counters *attention_wgmma_counters(enum attention_pass pass) {
    static struct tile_counters *address;
    if (!address) cuda_check(cudaGetSymbolAddress((void **)&address, counters));
    return &address[pass];
}

// Short sequences of the narrowest heads are faster by mma.sync, of whose blocks two fit a multiprocessor: measured with
// 256 tokens and 24/16 columns, by 3 to 27 %.
static bool is_small(const struct attention_shape *s) {
    return s->nope_dim + s->rope_dim <= 32 && s->value_dim <= 32 && s->length < 512;
}

// TMA and the stores need aligned rows.
bool attention_wgmma_takes(const struct attention_operands *a, const void *output) {
    const struct attention_shape *s = &a->shape;
    const int hopper = 90;
    return cuda_compiled_capability() == hopper && s->nope_dim <= largest_heads::NOPE &&
           s->rope_dim <= largest_heads::ROPE && s->value_dim <= largest_heads::VALUE && attention_rows_aligned(a) &&
           (uintptr_t)output % 16 == 0 && !is_small(s);
}

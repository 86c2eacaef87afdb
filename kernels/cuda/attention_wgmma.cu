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

// Short sequences of the narrowest heads, measured with 256 tokens and 24/16 columns, are 3 to 27 % faster by mma.sync,
// whose blocks are twice as many.
static bool is_small(const struct attention_shape *s) {
    return s->nope_dim + s->rope_dim <= 32 && s->value_dim <= 32 && s->length < 512;
}

// TMA and the stores need rows of all heads to begin at multiples of 16 bytes.
bool attention_wgmma_takes(const struct attention_operands *a, const void *output) {
    const struct attention_shape *s = &a->shape;
    const int hopper = 90, most_nope = 128, most_rope = 64, most_value = 128;
    uintptr_t addresses = (uintptr_t)a->q | (uintptr_t)a->kv | (uintptr_t)a->kr | (uintptr_t)a->d_o | (uintptr_t)output;
    return cuda_compiled_capability() == hopper && s->nope_dim <= most_nope && s->rope_dim <= most_rope &&
           s->value_dim <= most_value && (s->nope_dim | s->rope_dim | s->value_dim | a->kr_stride) % 8 == 0 &&
           addresses % 16 == 0 && !is_small(s);
}

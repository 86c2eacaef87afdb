// A wait inside a kernel that never ends must end the job, with its record. Exit code 0: it was not noticed.
//   build/cuda/tests/gpu_lost_wait            one thread waits for nobody
//   build/cuda/tests/gpu_lost_wait attention  attention's workers wait for rows of which half were never loaded
#include <cstdio>
#include <cstring>

#include "kernels/comm.h"
#include "kernels/cuda/attention_wgmma_forward.cu" // for its parameters
#include "kernels/kernels.h"

enum { BLOCKS = 3, THREADS = 64, BLOCK = 2, THREAD = 33 }; // the last two: the one that waits

// Nobody arrives at the barrier: its phase 0 never ends. The one before, 1, counts as ended.
static __global__ void wait_for_nobody(unsigned phase, struct lost_wait *record) {
    __shared__ uint64_t barrier;
    if (blockIdx.x != BLOCK || threadIdx.x != THREAD) return;
    barrier_init(shared_address(&barrier), 1);
    barrier_wait(shared_address(&barrier), phase, record, WAIT_ATTENTION_STREAM);
}

static void wait_in_kernel(unsigned phase) {
    wait_for_nobody<<<BLOCKS, THREADS, 0, cuda_stream()>>>(phase, lost_wait_record());
    cuda_check_launch();
    device_finish();
}

static void attention_misses_rows() {
    struct attention_shape shape = {1, 1000, 2, 128, 64, 128, 0.07};
    size_t n = (size_t)shape.length * 1024; // more than the widest row
    struct attention_operands a = {};
    a.q = (real *)device_alloc(n * sizeof(real));
    a.kv = (real *)device_alloc(n * sizeof(real));
    a.kr = (real *)device_alloc(n * sizeof(real));
    a.kr_stride = shape.rope_dim;
    a.shape = shape;
    real *o = (real *)device_alloc(n * sizeof(real));
    accum *lse = (accum *)device_alloc(n * sizeof(accum));
    struct forward_parameters p = forward_parameters_of(o, lse, &a);
    p.q = maps_of_queries(&a, HALF_ROWS / 2);
    forward_launch(p, &shape);
    device_finish();
}

int main(int argc, char **argv) {
    device_start(argv);
    comm_start(&argc, &argv);
    device_open(0, 1);
    wait_in_kernel(1);
    printf("ok: a wait that ends\n");
    if (argc > 1 && strcmp(argv[1], "attention") == 0)
        attention_misses_rows();
    else
        wait_in_kernel(0);
    printf("the lost wait was not noticed\n");
    comm_stop();
    return 0;
}

// A wait inside a kernel that never ends must end the job, with its record. Exit code 0: it was not noticed.
//   build/cuda/tests/gpu_lost_wait            one thread waits for nobody
//   build/cuda/tests/gpu_lost_wait attention  attention's workers wait for rows of which half were never loaded
//   build/cuda/tests/gpu_lost_wait counter    a block's threads wait for a counter that nobody raises any more
//   build/cuda/tests/gpu_lost_wait barrier    a rank waits at its second barrier for one that came to the first alone
#include <cstdio>
#include <cstring>

#include "kernels/comm.h"
#include "kernels/cuda/attention_wgmma_forward.cu" // for its parameters
#include "kernels/cuda/mok_header.h"
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

// All threads of a block lose their wait at once, and one of them tells.
static __global__ void wait_for_counter(const int32_t *counter, int wanted, struct lost_wait *record,
                                        int32_t *given_up) {
    if (blockIdx.x == BLOCK) counter_wait(counter, wanted, record, given_up, WAIT_MOK_READY, 5);
}

static void nobody_counts() {
    const int32_t found = 3;
    int32_t *words = (int32_t *)device_alloc(2 * sizeof *words); // the counter, given_up
    device_copy_in(words, &found, sizeof found);
    for (int wanted = found; wanted <= 16; wanted += 13) {
        wait_for_counter<<<BLOCKS, THREADS, 0, cuda_stream()>>>(words, wanted, lost_wait_record(), words + 1);
        cuda_check_launch();
        device_finish();
        printf("ok: a counter that has got to %d\n", wanted);
    }
}

// The memory of both ranks is this process's. Rank 1 has passed 5 barriers; rank 0 has come to the sixth.
static void rank_misses_barrier() {
    const uint64_t passed = 5, come = 6;
    char *base[2];
    for (char *&memory : base) memory = (char *)device_alloc(mok_header_bytes(2));
    struct mok_header *header = (struct mok_header *)base[1];
    struct mok_group group = {};
    group.rank = 1;
    group.ranks = 2;
    group.base = base;
    group.timeout = 2;
    device_copy_in(&header->epoch, &passed, sizeof passed);
    device_copy_in(&header->arrivals[0].epoch, &come, sizeof come);
    mok_barrier(&group, "after the forward pass of layer 2");
    device_finish();
    uint64_t told[2];
    device_copy_out(&told[0], &((struct mok_header *)base[0])->arrivals[1].epoch, sizeof *told);
    device_copy_out(&told[1], &header->arrivals[1].epoch, sizeof *told);
    printf("%s: a barrier to which both came\n", told[0] == come && told[1] == come ? "ok" : "failed");
    mok_barrier(&group, "before the forward pass of layer 3");
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
    else if (argc > 1 && strcmp(argv[1], "counter") == 0)
        nobody_counts();
    else if (argc > 1 && strcmp(argv[1], "barrier") == 0)
        rank_misses_barrier();
    else
        wait_in_kernel(0);
    printf("the lost wait was not noticed\n");
    comm_stop();
    return 0;
}

#include "kernels/cuda/lost_wait.h"

static const char *const words[] = {
    [WAIT_ATTENTION_TILE] = "a tile of attention's work",
    [WAIT_ATTENTION_TILE_ROOM] = "room for the next tile of attention's work",
    [WAIT_ATTENTION_FIXED] = "the rows that stay for a tile of attention",
    [WAIT_ATTENTION_FIXED_ROOM] = "room for the rows that stay for a tile of attention",
    [WAIT_ATTENTION_STREAM] = "the rows that pass by a tile of attention",
    [WAIT_ATTENTION_STREAM_ROOM] = "room for the rows that pass by a tile of attention",
    [WAIT_TILE_TASK] = "a tile task from the block's loader",
    [WAIT_TILE_TASK_ROOM] = "room for the next tile task",
    [WAIT_TILE_FULL] = "the factors of a tile",
    [WAIT_TILE_ROOM] = "room for the factors of a tile",
    [WAIT_TILE_STAGED] = "the results of a tile to store",
    [WAIT_TILE_STAGING_ROOM] = "room for the results of a tile",
    // the index follows
    [WAIT_MOK_READY] = "pulled groups of row block",
    [WAIT_MOK_GATE_UP] = "halves of gate/up tiles of row block",
    [WAIT_MOK_D_HIDDEN] = "halves of d hidden tiles of row block",
    [WAIT_MOK_OUT] = "halves of output tiles of row block",
    [WAIT_MOK_PUSHED] = "pushed groups of row block", // on a GPU nobody waits for it
    [WAIT_MOK_EXPERT_D_HIDDEN] = "halves of d hidden tiles of local expert",
    [WAIT_MOK_EXPERT_D_WEIGHTS] = "halves of weight-gradient tiles of local expert",
    [WAIT_MOK_SHARED_INNER] = "halves of shared inner tiles of token block",
    [WAIT_MOK_SHARED_ALL] = "halves of shared inner tiles, counter",
    [WAIT_MOK_BARRIER] = "another rank",
};
_Static_assert(sizeof words / sizeof *words == WAIT_KINDS, "every wait has its words");

static struct lost_wait *record; // in host memory that kernels reach

struct lost_wait *lost_wait_record(void) {
    static struct lost_wait *device;
    if (device) return device;
    struct lost_wait *host;
    cuda_check(cudaHostAlloc((void **)&host, sizeof *host, cudaHostAllocMapped));
    *host = (struct lost_wait){0};
    cuda_check(cudaHostGetDevicePointer((void **)&device, host, 0));
    record = host;
    return device;
}

// The first 16 bytes in one load, as the device writes them in one store: many threads may lose their waits at once. What
// follows them was written before them.
static struct lost_wait read_record(void) {
    typedef int vector __attribute__((vector_size(offsetof(struct lost_wait, index)), may_alias));
    vector v = *(const volatile vector *)record;
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    struct lost_wait lost = *record;
    lost.what = v[0];
    lost.block = v[1];
    lost.thread = v[2];
    lost.phase = (unsigned)v[3];
    lost.text[sizeof lost.text - 1] = 0;
    return lost;
}

static bool was_lost(void) { return record && ((const volatile struct lost_wait *)record)->what; }

static _Noreturn void fail_missing_rank(const struct lost_wait *lost) {
    fail_internal("megakernel",
                  "rank %d of its EP group waited %u s at a barrier, %s, for rank %d of the group (found it at barrier "
                  "%d, wanted %d); a rank has stopped, or is very slow: raise --timeout if it is only slow",
                  lost->rank, lost->phase, lost->text, lost->index, lost->found, lost->wanted);
}

// That long: LOST_AFTER_TICKS.
#define LOST_WAIT "thread %d of block %d waited over 8 seconds inside a kernel for %s "
#define REPORT_IT "; a fault of this program or of the GPU: please report it with this line"

void lost_wait_check(void) {
    if (!was_lost()) return;
    struct lost_wait lost = read_record();
    enum wait_for what = (enum wait_for)(lost.what - 1);
    if (what == WAIT_MOK_BARRIER) fail_missing_rank(&lost);
    if (what >= WAIT_MOK_READY)
        fail_internal("GPU", LOST_WAIT "%d: found %d, wanted %d" REPORT_IT, lost.thread, lost.block, words[what],
                      lost.index, lost.found, lost.wanted);
    fail_internal("GPU", LOST_WAIT "(barrier phase %u)" REPORT_IT, lost.thread, lost.block, words[what], lost.phase);
}

// What this backend does not have: the megakernel, and the expert products that would share its tiles. The options
// refuse both by asking whether they are there; whatever else is called here is a mistake of the caller.
#include "kernels/mok.h"

#include "kernels/fail.h"
#include "kernels/kernels.h"

static _Noreturn void refuse(void) {
    fail_internal("megakernel", "found a call, wanted none: this build for GPUs does not have it");
}

bool mok_available(void) { return false; }

bool grouped_matmul_available(enum grouped_core core) { return core == GROUPED_CUBLASLT; }

int mok_default_workers(void) { refuse(); }

size_t mok_header_bytes(int ranks) {
    (void)ranks;
    refuse();
}

size_t mok_plan_bytes(const struct mok_shape *s) {
    (void)s;
    refuse();
}

void mok_set_tokens(struct mok_group *g, int tokens) {
    (void)g, (void)tokens;
    refuse();
}

void mok_barrier(struct mok_group *g, const char *what) {
    (void)g, (void)what;
    refuse();
}

void mok_plan_alloc(struct mok_plan *p, const struct mok_shape *s) {
    (void)p, (void)s;
    refuse();
}

void mok_plan_free(struct mok_plan *p) {
    (void)p;
    refuse();
}

void mok_plan_make(struct mok_plan *p, const struct mok_shape *s, const struct mok_group *g, const int32_t *ids,
                   const accum *gates) {
    (void)p, (void)s, (void)g, (void)ids, (void)gates;
    refuse();
}

void mok_crew_open(struct mok_crew *c) {
    (void)c;
    refuse();
}

void mok_crew_close(struct mok_crew *c) {
    (void)c;
    refuse();
}

void mok_run(const struct mok_shape *s, const struct mok_plan *p, const struct mok_group *g,
             const struct mok_layer *layer, const struct mok_workspace *w, const struct mok_crew *crew,
             enum mok_pass pass) {
    (void)s, (void)p, (void)g, (void)layer, (void)w, (void)crew, (void)pass;
    refuse();
}

// Matrix products of kernels.h by cuBLASLt; grouped ones also by our own tiles.
//
// cuBLASLt's matrices are column-major, and a row-major matrix [rows, cols] read column-major is its transpose
// [cols, rows] with the leading dimension cols. So each product is computed transposed, with the operands in the other
// order:
//
//   nt   y  = x w^T    y^T  = w x^T      m = N, n = M, k = K   A = w, transposed   B = x
//   nn   y  = x w      y^T  = w^T x^T                          A = w               B = x
//   tn   dw = a^T b    dw^T = b^T a                            A = b               B = a, transposed

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/grouped.h"
#include "kernels/cuda/matmul.h"

struct product {
    enum matmul_kind kind;
    int M, N, K;
    const real *first, *second;
    const void *add; // like out; may be NULL or out
    void *out;       // [M, N], accum for tn, else real
};

// Lane 0 is the stream of all operations. The others begin at an event of it, and it waits for their ends.
static struct {
    bool open;
    cudaStream_t streams[MATMUL_LANES];
    cudaEvent_t begin, ends[MATMUL_LANES];
    char *workspaces;
} lanes;

static void lanes_open(void) {
    if (lanes.open) return;
    lanes.workspaces = device_alloc(MATMUL_WORKSPACE_BYTES);
    lanes.streams[0] = cuda_stream();
    cuda_check(cudaEventCreateWithFlags(&lanes.begin, cudaEventDisableTiming));
    for (int i = 1; i < MATMUL_LANES; i++) {
        cuda_check(cudaStreamCreateWithFlags(&lanes.streams[i], cudaStreamNonBlocking));
        cuda_check(cudaEventCreateWithFlags(&lanes.ends[i], cudaEventDisableTiming));
    }
    lanes.open = true;
}

static void lanes_fork(void) {
    cuda_check(cudaEventRecord(lanes.begin, lanes.streams[0]));
    for (int i = 1; i < MATMUL_LANES; i++) cuda_check(cudaStreamWaitEvent(lanes.streams[i], lanes.begin, 0));
}

static void lanes_join(void) {
    for (int i = 1; i < MATMUL_LANES; i++) {
        cuda_check(cudaEventRecord(lanes.ends[i], lanes.streams[i]));
        cuda_check(cudaStreamWaitEvent(lanes.streams[0], lanes.ends[i], 0));
    }
}

static size_t element_bytes(const struct product *p) { return p->kind == MATMUL_TN ? sizeof(accum) : sizeof(real); }

// An empty sum: add, or zeros. On lane 0, since it is no work.
static void product_of_nothing(const struct product *p) {
    size_t bytes = (size_t)p->M * (size_t)p->N * element_bytes(p);
    if (p->add == p->out) return;
    if (p->add)
        cuda_check(cudaMemcpyAsync(p->out, p->add, bytes, cudaMemcpyDeviceToDevice, cuda_stream()));
    else
        cuda_check(cudaMemsetAsync(p->out, 0, bytes, cuda_stream()));
}

static void product_without_library(const struct product *p) {
    size_t M = (size_t)p->M, N = (size_t)p->N, K = (size_t)p->K;
    bool tn = p->kind == MATMUL_TN, nt = p->kind == MATMUL_NT;
    matmul_fallback(&(struct matmul_fallback){
        .M = p->M,
        .N = p->N,
        .K = p->K,
        .first = p->first,
        .second = p->second,
        .first_row = tn ? 1 : K,
        .first_col = tn ? M : 1,
        .second_row = nt ? 1 : N,
        .second_col = nt ? K : 1,
        .add = p->add,
        .out = p->out,
        .out_accum = tn,
    });
}

static void product_run(const struct product *p, int lane) {
    if (p->M == 0 || p->N == 0) return;
    if (p->K == 0) {
        product_of_nothing(p);
        return;
    }
    lanes_open();
    struct matmul_key key = matmul_key_make(p->kind, p->M, p->N, p->K, p->first, p->second, p->add, p->out);
    struct matmul_layouts l;
    cublasLtMatmulAlgo_t algorithm;
    matmul_layouts_make(&l, &key);
    if (!matmul_choose(&algorithm, &l, &key)) {
        product_without_library(p);
        return;
    }
    float alpha = 1, beta = p->add ? 1 : 0;
    const void *add = p->add ? p->add : p->out;
    void *workspace = lanes.workspaces + (size_t)lane * MATMUL_LANE_BYTES;
    cublasStatus_t status =
        cublasLtMatmul(matmul_handle(), &l.operation, &alpha, p->second, &l.second, p->first, &l.first, &beta, add,
                       &l.out, p->out, &l.out, &algorithm, workspace, MATMUL_LANE_BYTES, lanes.streams[lane]);
    if (status == CUBLAS_STATUS_SUCCESS) return;
    static const char *const names[] = {"nt", "nn", "tn"};
    fail_internal("matmul", "cublasLtMatmul failed: %s (%s, M %d, N %d, K %d, aligned to %d, %d, %d, %d bytes)",
                  cublasLtGetStatusString(status), names[p->kind], p->M, p->N, p->K, key.first_bytes, key.second_bytes,
                  key.add_bytes, key.out_bytes);
}

void matmul_nt(real *y, const real *x, const real *w, int M, int N, int K, const real *add) {
    OPERATION();
    product_run(&(struct product){MATMUL_NT, M, N, K, x, w, add, y}, 0);
}

void matmul_nn(real *y, const real *x, const real *w, int M, int N, int K, const real *add) {
    OPERATION();
    product_run(&(struct product){MATMUL_NN, M, N, K, x, w, add, y}, 0);
}

void matmul_tn(accum *dw, const real *a, const real *b, int M, int N, int K, bool add) {
    OPERATION();
    product_run(&(struct product){MATMUL_TN, M, N, K, a, b, add ? dw : NULL, dw}, 0);
}

// Expert e's part of a grouped product, whose out has width columns. The cost of a part is its rows.
static struct product part_of(const struct product *all, int e, int first_row, int rows) {
    struct product p = *all;
    size_t first = (size_t)first_row, each = (size_t)e;
    size_t M = (size_t)p.M, N = (size_t)p.N, K = (size_t)p.K;
    if (p.kind == MATMUL_TN) {
        p.K = rows;
        p.first += first * M;
        p.second += first * N;
        p.out = (accum *)p.out + each * M * N;
        if (p.add) p.add = p.out;
    } else {
        p.M = rows;
        p.first += first * K;
        p.second += each * N * K;
        p.out = (real *)p.out + first * N;
    }
    return p;
}

// One product for each expert that has rows, in the lane that has the fewest rows so far. Lanes change when a product
// is made, not what it is.
static void product_run_grouped(const struct product *all, const int *offsets, int E) {
    int experts = 0;
    for (int e = 0; e < E; e++) experts += offsets[e + 1] > offsets[e];
    if (experts == 0 || all->N == 0) return;
    lanes_open();
    size_t rows_in_lane[MATMUL_LANES] = {0};
    bool spread = experts > 1;
    if (spread) lanes_fork();
    for (int e = 0; e < E; e++) {
        int rows = offsets[e + 1] - offsets[e], lane = 0;
        if (rows <= 0) continue;
        for (int i = 1; spread && i < MATMUL_LANES; i++)
            if (rows_in_lane[i] < rows_in_lane[lane]) lane = i;
        rows_in_lane[lane] += (size_t)rows;
        struct product p = part_of(all, e, offsets[e], rows);
        product_run(&p, lane);
    }
    if (spread) lanes_join();
}

static enum grouped_core core = GROUPED_CUBLASLT;

bool grouped_matmul_available(enum grouped_core which) { return which == GROUPED_CUBLASLT || grouped_own_available(); }

int grouped_matmul_unit(enum grouped_core which) { return which == GROUPED_OWN ? GROUPED_UNIT : 1; }

void grouped_matmul_choose(enum grouped_core which) {
    if (grouped_matmul_available(which)) core = which;
}

void grouped_matmul_nt(real *y, const real *x, const real *w, const int *offsets, int E, int N, int K) {
    OPERATION();
    if (core == GROUPED_OWN)
        grouped_own_nt(y, x, w, offsets, E, N, K);
    else
        product_run_grouped(&(struct product){MATMUL_NT, 0, N, K, x, w, NULL, y}, offsets, E);
}

void grouped_matmul_nn(real *y, const real *x, const real *w, const int *offsets, int E, int N, int K) {
    OPERATION();
    if (core == GROUPED_OWN)
        grouped_own_nn(y, x, w, offsets, E, N, K);
    else
        product_run_grouped(&(struct product){MATMUL_NN, 0, N, K, x, w, NULL, y}, offsets, E);
}

// Zeros in the matrices, of `size` elements, of the experts without rows.
static void clear_unused(accum *dw, const int *offsets, int E, size_t size) {
    for (int e = 0, end; e < E; e = end) {
        end = e + 1;
        if (offsets[end] > offsets[e]) continue;
        while (end < E && offsets[end + 1] == offsets[e]) end++;
        device_zero(dw + (size_t)e * size, sizeof(accum) * (size_t)(end - e) * size);
    }
}

void grouped_matmul_tn(accum *dw, const real *a, const real *b, const int *offsets, int E, int M, int N, bool add) {
    OPERATION();
    if (!add) clear_unused(dw, offsets, E, (size_t)M * (size_t)N);
    if (core == GROUPED_OWN)
        grouped_own_tn(dw, a, b, offsets, E, M, N, add);
    else
        product_run_grouped(&(struct product){MATMUL_TN, M, N, 0, a, b, add ? dw : NULL, dw}, offsets, E);
}

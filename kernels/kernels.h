// Every operation of the trainer, declared once. kernels/cpu implements it in readable C; the backend is chosen at
// link time, so the model never asks which machine it runs on.
//
// Conventions
//   - All matrices are row-major. N rows are tokens (batch times time). Shapes stand beside the pointers.
//   - Pointers are device memory from device_alloc unless the comment says host.
//   - A "_backward" writes (=) activation gradients unless it says it adds, and always adds (+=) weight gradients.
//   - Operations run in the order of their calls. Results in host memory are complete on return, and the host side of a
//     copy may then be used again.
//   - Every sum has a fixed order: the same inputs give the same bits on every run. kernels/cpu promises more: for
//     finite inputs the bits of an output depend on its own inputs only, never on the number of threads or of other
//     rows.
//   - Sizes of zero are allowed; a sum over nothing is zero.
//   - Products of sizes are size_t; a single size is an int.
//   - Equations are numbered as in the DeepSeek-V3 paper (arXiv 2412.19437) where the comment says "V3 eq.".
#ifndef MOK_KERNELS_H
#define MOK_KERNELS_H

#include "kernels/types.h"

#ifdef __cplusplus
extern "C" {
#endif

// ---- device: memory and identity ----

// The first call of the program, with main's argv: sets up what must be there before the process has really begun. May
// start the program again with another environment.
void device_start(char **argv);

// Chooses this rank's GPU among those that the host's ranks can see: local_rank of local_ranks. After comm_start and
// before any other call but device_start, device_name and those that a plan is made of: device_memory_bytes,
// device_memory_is_shared, device_library_bytes, device_scratch_bytes, attention_most_columns, router_most_experts; by
// all ranks of the host together. Ends the program (exit 2) when there are fewer GPUs than ranks on the host. The CPU
// has nothing to choose.
void device_open(int local_rank, int local_ranks);

// Memory that is zeroed when the call returns, aligned to 256 bytes. Ends the program with the size that was asked for
// when there is none left.
void *device_alloc(size_t bytes);
void device_free(void *memory);
void device_zero(void *memory, size_t bytes);
void device_copy_in(void *device, const void *host, size_t bytes);
void device_copy_out(void *host, const void *device, size_t bytes);
// device_copy_out in two halves, so that what is called in between runs meanwhile: begin comes after the operations
// that make the bytes, finish waits for them alone. One at a time; at most DEVICE_READ_BYTES.
enum { DEVICE_READ_BYTES = 1 << 20 };
void device_read_begin(const void *device, size_t bytes);
void device_read_finish(void *host, size_t bytes);
// Waits until everything that was called has been done.
void device_finish(void);

// Marks between the operations called before and those called after, to measure time with: number 0, 1, ... since the
// last device_clear_marks. The first one waits for everything before it.
int device_mark(void);
// What clock_seconds showed when the device came there; waits for it.
double device_mark_seconds(int mark);
void device_clear_marks(void);

// Conversion between host floats and device reals, n elements.
void device_real_from_float(real *device, const float *host, size_t n);
void device_real_to_float(float *host, const real *device, size_t n);
// The same for accum (gradients, master weights, moments).
void device_accum_from_float(accum *device, const float *host, size_t n);
void device_accum_to_float(float *host, const accum *device, size_t n);

// One line for people: what this binary computes on, for example "CPU, 2 threads, AVX2".
const char *device_name(void);
// How matrix products are computed: "default", or "tuned HASH" when a table of make tune says it. After device_open;
// the CPU has nothing to tune.
const char *device_tuning(void);
// Floating-point operations per second the device can do at most: of a CPU measured once per process (a loop of
// multiply-adds in registers on all threads), of a GPU its maker's figure for dense BF16. The denominator of MFU.
double device_peak_flops(void);
// Bytes of memory that the runs on this machine (CPU), or this rank (its GPU), can use. 0: not known, as where there is
// no GPU; that is no error.
size_t device_memory_bytes(void);
// Whether that memory is one for all ranks of a host (CPU), or every rank has its own (GPU).
bool device_memory_is_shared(void);
// Bytes of it that are taken: by device_alloc, by libraries and by the driver, and by other programs on the same GPU.
// 0: not known (CPU).
size_t device_memory_used(void);
// Bytes that driver and libraries take in a job of so many ranks, beside all that is allocated here: an estimate, as
// measured. 0 on the CPU.
size_t device_library_bytes(int ranks);

// ---- scratch memory: what operations need beside their arguments ----

// The largest sizes that they are called with. Zero where there is nothing of the kind.
struct scratch_sizes {
    int rows, width;                                         // of norms, and rows of everything else
    int hidden, experts, top_k, sequences;                   // of the router and of dispatch
    int batch, length, heads, nope_dim, rope_dim, value_dim; // of attention_backward
};
// Bytes for the operation that needs most, since they use it in turn; 0 on the CPU, which takes it call by call.
size_t device_scratch_bytes(const struct scratch_sizes *s);
// Takes them now. An operation that finds too little takes more by itself, while everything waits.
void device_reserve_scratch(size_t bytes);

// ---- matrix products ----

// y = x w^T + add       y, add [M, N]   x [M, K]   w [N, K]      add may be NULL (nothing) or y itself (accumulate).
// Summed in accum, starting from add, and rounded to real once. Some algorithms of a GPU's library round the product
// before they add it (measured: 1.4 times the rounding error).
void matmul_nt(real *y, const real *x, const real *w, int M, int N, int K, const real *add);
// y = x w + add         y, add [M, N]   x [M, K]   w [K, N]
void matmul_nn(real *y, const real *x, const real *w, int M, int N, int K, const real *add);
// dw = a^T b, or with add dw += a^T b      dw [M, N]   a [K, M]   b [K, N]      the weight-gradient product. K counts
// tokens; without any, dw stays as it is with add, else gets zeros.
void matmul_tn(accum *dw, const real *a, const real *b, int M, int N, int K, bool add);

// The same three for E experts at once. Rows of expert e are offsets[e] .. offsets[e+1]-1 (offsets [E + 1], host
// memory); w and dw hold the experts' matrices one after the other. Rows outside are not written. add: dw += as above,
// and an expert without rows leaves its dw as it is; else dw = a^T b, and an expert without rows gets zeros.
void grouped_matmul_nt(real *y, const real *x, const real *w, const int *offsets, int E, int N, int K);
void grouped_matmul_nn(real *y, const real *x, const real *w, const int *offsets, int E, int N, int K);
void grouped_matmul_tn(accum *dw, const real *a, const real *b, const int *offsets, int E, int M, int N, bool add);

// What multiplies the tiles of the grouped products: NVIDIA's library or this program's own code.
enum grouped_core { GROUPED_CUBLASLT, GROUPED_OWN };
bool grouped_matmul_available(enum grouped_core core);
// N, K and M of the grouped products must be multiples of this.
int grouped_matmul_unit(enum grouped_core core);
// From now on this one multiplies, if the build has it.
void grouped_matmul_choose(enum grouped_core core);

// ---- embedding, norm, rotary position ----

// x[i] = table[ids[i]]  x [N, H]   table [V, H]   ids [N]      an id of -1 gives a row of zeros.
void embedding_forward(real *x, const real *table, const int32_t *ids, int N, int H);
// dtable[ids[i]] += dx[i], rows in ascending order; id -1 is skipped.
void embedding_backward(accum *dtable, const real *dx, const int32_t *ids, int N, int H);

// RMSNorm over the first C columns of each row: y = w x r,  r = (mean(x^2) + eps)^(-1/2).
// x [N, x_stride]   y [N, y_stride]   w [C]   rstd [N] receives r.
void rmsnorm_forward(real *y, int y_stride, accum *rstd, const real *x, int x_stride, const real *w, int N, int C,
                     double eps);
// dx (= or, with add, +=) r (t - xhat mean(t xhat)) with t = w dy, xhat = x r;   dw += sum over rows of dy xhat.
// dx [N, dx_stride]   dw [C]   dy [N, dy_stride]   x [N, x_stride]   dx may be dy itself.
void rmsnorm_backward(real *dx, int dx_stride, bool add, accum *dw, const real *dy, int dy_stride, const real *x,
                      int x_stride, const real *w, const accum *rstd, int N, int C);

// Rotates, in place, rope_dim columns of every head: adjacent pairs (2j, 2j+1) by the angle of position i mod T.
// x [N, row_stride]; head h's columns begin at h * head_stride + first. angles [T, rope_dim] holds cos, sin per pair.
// inverse turns the other way: the backward pass.
void rope_rotate(real *x, int row_stride, int heads, int head_stride, int first, int rope_dim, const accum *angles,
                 int N, int T, bool inverse);

// ---- attention (MLA in its training form: nothing absorbed) ----

// Sizes of one multi-head latent attention. Query and key heads are nope_dim + rope_dim wide, values value_dim.
struct attention_shape {
    int batch, length, heads; // B sequences of T tokens, n heads
    int nope_dim, rope_dim, value_dim;
    double scale; // of the scores before the softmax, above 0
};

// The widest heads, of queries and of values, that both passes take. INT_MAX: any.
int attention_most_columns(void);
// Causal softmax attention. Key of head h = [kn of head h | kr shared by all heads].
// o [N, n*dv]   lse [B, n, T] log of the softmax denominators   q [N, n*(dn+dr)]   kv [N, n*(dn+dv)], per head dn keys
// then dv values   kr [N, kr_stride], its first dr columns
void attention_forward(real *o, accum *lse, const real *q, const real *kv, const real *kr, int kr_stride,
                       struct attention_shape shape);
// dq, dkv like q, kv; dkr [N, dkr_stride] is the sum over heads, whose parts a GPU rounds to real first. o and lse are
// those of the forward pass.
void attention_backward(real *dq, real *dkv, real *dkr, int dkr_stride, const real *d_o, const real *q, const real *kv,
                        const real *kr, int kr_stride, const real *o, const accum *lse, struct attention_shape shape);

// ---- SwiGLU ----

// hidden = gate weight * silu(g) * u     gate_up [rows, 2I]: g columns, then u columns   hidden [rows, I]
// gates: NULL for weight 1; else row r has weight gates[slot_of_row[r]] (gates [N, K], slot = token*K + k), and a row
// whose slot is -1 becomes zeros (in both passes).
void swiglu_forward(real *hidden, const real *gate_up, const accum *gates, const int *slot_of_row, int rows, int I);
// d_gate_up [rows, 2I] from d_hidden [rows, I]; hidden [rows, I] is computed again for the down projection's weight
// gradient. With gates: d_gates[slot_of_row[r]] = <d_hidden, silu(g) u>, taken before the weight, so that a zero
// weight still gets its gradient, and summed in chunks of GATE_GRADIENT_COLUMNS columns, whose sums are added in
// ascending order; d_gates of slots without a row are not written. d_gates may be NULL when gates is.
enum { GATE_GRADIENT_COLUMNS = 128 };
void swiglu_backward(real *d_gate_up, real *hidden, accum *d_gates, const real *d_hidden, const real *gate_up,
                     const accum *gates, const int *slot_of_row, int rows, int I);

// ---- router (V3 eq. 12 to 16; operands widened, products, sums and results in accum) ----

struct router_shape {
    int experts, top_k;
    int groups, top_groups; // selection is limited to top_groups of groups; groups = 1 means no limit
    bool normalize;         // selected scores are divided by their sum
    double scale;           // routed_scaling_factor
};

// The most experts that routing and dispatch take. INT_MAX: any number.
int router_most_experts(void);
// scores = sigmoid(x w^T)     scores [N, E]   x [N, H]   w [E, H]
void router_score(accum *scores, const real *x, const real *w, int N, int E, int H);
// ids [N, K]: the K largest of scores + bias among the best groups, largest first, ties to the lower id. A group's rank
// is the sum of its two largest biased scores; experts of other groups are out of the running whatever their sign.
// gates [N, K]: scale * s / (sum of the selected s + 1e-20); without normalize, scale * s. bias [E]
// tokens [N] or NULL: a token of -1 is masked and goes to no expert; its ids are -1, its gates 0.
void router_select(int32_t *ids, accum *gates, const accum *scores, const accum *bias, const int32_t *tokens, int N,
                   struct router_shape shape);
// The same gates for a choice that was made elsewhere. ids of masked tokens become -1; a token whose first id is -1 has
// no expert, its gates are 0.
void router_gates(int32_t *ids, accum *gates, const accum *scores, const int32_t *tokens, int N,
                  struct router_shape shape);
// counts[e] += number of ids equal to e, ids -1 not counted.   ids [N*K] as n entries   counts [E], 64-bit
void router_count(int64_t *counts, const int32_t *ids, size_t n, int E);
// Sequence-wise balance loss (V3 eq. 17 to 20): f_i = E/(K T) * tokens whose plain top-K of scores has i;
// P_i = mean over the sequence of s_i / sum_j s_j. Masked tokens are left out, of T too.
// f [B, E]   loss [B] receives sum_i f_i P_i, not yet multiplied by alpha   scores [B*T, E]   tokens [B*T] or NULL
void router_balance(accum *f, accum *loss, const accum *scores, const int32_t *tokens, int B, int T,
                    struct router_shape shape);
// Gradient of gates and balance loss through sigmoid and matmul:
//   dw += dz^T x,   dx += dz w,   dz [N, E] is written (the caller's scratch).
// d_gates [N, K], not read for masked tokens (ids -1), whose dz is 0; f [B, E] of router_balance with N = B*T;
// balance_scale = alpha / sequences averaged over.
// x [N, H]   dx [N, H]   w, dw [E, H]
void router_backward(real *dx, accum *dw, accum *dz, const accum *d_gates, const accum *scores, const int32_t *ids,
                     const accum *f, double balance_scale, const real *x, const real *w, int B, int T, int H,
                     struct router_shape shape);
// bias[e] += rate * sign(mean count - counts[e]), compared exactly in integers: sum_j counts_j - E counts_e.
void router_update_bias(accum *bias, const int64_t *counts, int E, double rate);

// ---- dispatch and combine ----

// Stable placement of routes: rows are ordered by (order[expert], token, k); order [E] has every number below E once,
// NULL stands for 0, 1, 2, ...
// offsets [E + 1] first row of each expert in this order, offsets[E] the number of rows   row_of_slot [N*K], slot =
// token*K + k   slot_of_row [N*K]   Routes with id -1 are not placed: their row_of_slot is -1, and as many last rows
// have slot -1.
void moe_place(int *offsets, int *slot_of_row, int *row_of_slot, const int32_t *ids, const int *order, int N, int K,
               int E);
// Rows arrive ordered by (source, expert) and are to be ordered by (expert, source), both times as they were within one
// pair. Source s, of S, sent of expert e, of E, offsets[s * stride + e + 1] - offsets[s * stride + e] rows. Numbers of
// rows, in both orders, begin at first: arrival_of_row[first + i] is where the i-th row of the new order came in,
// row_of_arrival the inverse.   rows: how many there are
void moe_regroup(int *arrival_of_row, int *row_of_arrival, const int *offsets, int S, int stride, int E, int first,
                 int rows);
// out[i] = gates[index[i]], 0 where the index is -1.   out, index [n]
void moe_gather_gates(accum *out, const accum *gates, const int *index, int n);
// rows[row_of_slot[t*K + k]] = x[t] for every slot that has a row, not -1; no two have the same. Other rows are not
// written.   x [N, H]   row_of_slot [N*K]
void moe_scatter(real *rows, const real *x, const int *row_of_slot, int N, int K, int H);
// rows[r] = x[index[r]]; a row whose index is -1 becomes zeros.   rows [R, H]   index [R]
void moe_gather(real *rows, const real *x, const int *index, int R, int H);
// y = sum over k = 0..K-1 of rows[row_of_slot[t*K + k]], then + shared, then + residual (both may be NULL).
// y [N, H]; slots with row -1 are skipped.
void moe_combine(real *y, const real *rows, const int *row_of_slot, const real *shared, const real *residual, int N,
                 int K, int H);
// The same where every slot has a row of its own: y = sum over k = 0..K-1 of slots[t*K + k], then + shared, then +
// residual. Slots with id -1 are never read.   y [N, H]   slots [N*K, H]   ids [N, K]
void moe_sum_slots(real *y, const real *slots, const int32_t *ids, const real *shared, const real *residual, int N,
                   int K, int H);

// ---- loss ----

// Softmax cross-entropy of one chunk of rows, in place: loss[i] = logsumexp(logits_i) - logits_i[target], and with
// want_gradient logits become scale * (softmax - onehot); without it they are left undefined. A target of -1 gives loss
// 0 and gradient 0.
// logits [rows, V]   loss [rows]   targets [rows]
void cross_entropy(real *logits, accum *loss, const int32_t *targets, int rows, int V, bool want_gradient,
                   double scale);

// ---- sums in double ----

// *sum += the sum of n values.   sum: device memory
void device_add_sum(double *sum, const accum *values, size_t n);
// Sum of squares of n values. NaN and infinity survive.
double device_sum_squares(const accum *values, size_t n);

// ---- optimizer ----

struct adamw {
    double lr, beta1, beta2, eps, weight_decay;
    double grad_scale; // clip factor, multiplies every gradient first
    int64_t step;      // 1 for the first update
};
// Decoupled weight decay (Loshchilov and Hutter), on master weights; weight = master rounded to real.
// All [n]. m, v moments; weight may not overlap master.
void adamw_update(accum *master, accum *m, accum *v, real *weight, const accum *grad, size_t n, struct adamw a);

#ifdef __cplusplus
}
#endif

#endif

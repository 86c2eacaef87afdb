// The router's choices: experts and gates of every token, counts, balance loss and the selection bias.
//
// A warp works on a token. Comparisons, gates and their sums follow kernels/cpu operation by operation, so that equal
// scores give equal choices and gates, bit by bit.
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/experts.h"
#include "kernels/cuda/scratch_router.h"

extern "C" int router_most_experts(void) { return MOST_EXPERTS; }

enum { MOST_WARPS = 8, SHARED_BYTES = 48 * 1024, NO_INDEX = 0x7fffffff };

// Warps of a block whose shared memory holds so many bytes for each of them, and for all.
static int warps_that_fit(size_t bytes_of_warp, size_t bytes_of_all) {
    size_t fit = (SHARED_BYTES - bytes_of_all) / bytes_of_warp;
    return fit < MOST_WARPS ? (int)fit : (int)MOST_WARPS;
}

// ---- the largest of many ----

// Floats as integers in the same order. Both zeros are one key; NaN stands with -infinity. Never 0, which is the key of
// what is out of the running.
static __device__ __forceinline__ unsigned key_of(float value) {
    unsigned bits = __float_as_uint(value == value ? value + 0.0f : -INFINITY);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

static __device__ __forceinline__ float value_of(unsigned key) {
    return __uint_as_float(key >> 31 ? key ^ 0x80000000u : ~key);
}

struct candidate {
    unsigned key;
    int index;
};

// The largest of a lane's keys, which are those of lane, lane + 32, ...; the first one of equals.
static __device__ __forceinline__ struct candidate lane_best(const unsigned *keys, int n, int lane) {
    struct candidate best = {0, NO_INDEX};
    for (int i = lane; i < n; i += 32)
        if (keys[i] > best.key) best = {keys[i], i};
    return best;
}

// Takes the k largest of n keys, largest first, the lower index of equals; their keys become 0. At least k keys are
// above 0. chosen [k] may be NULL. Other lanes' results can be read after __syncwarp.
static __device__ void select_top(int *chosen, int k, unsigned *keys, int n, int lane) {
    struct candidate best = lane_best(keys, n, lane);
    for (int i = 0; i < k; i++) {
        unsigned largest = __reduce_max_sync(ALL_LANES, best.key);
        int index = __reduce_min_sync(ALL_LANES, best.key == largest ? best.index : (int)NO_INDEX);
        if (chosen && lane == 0) chosen[i] = index;
        if (best.index == index) {
            keys[index] = 0;
            best = lane_best(keys, n, lane);
        }
    }
}

// The rank of a group: the sum of its two largest values.
static __device__ float sum_of_two_largest(const unsigned *keys, int n, int lane) {
    unsigned first = 0, second = 0; // of this lane
    for (int i = lane; i < n; i += 32) {
        unsigned key = keys[i];
        if (key > first) {
            second = first;
            first = key;
        } else if (key > second)
            second = key;
    }
    unsigned largest = __reduce_max_sync(ALL_LANES, first);
    // One of the lanes that have it gives it away.
    int owner = __ffs((int)__ballot_sync(ALL_LANES, first == largest)) - 1;
    unsigned next = __reduce_max_sync(ALL_LANES, lane == owner ? second : first);
    return n == 1 ? value_of(largest) : __fadd_rn(value_of(largest), value_of(next));
}

// Takes the experts of all but the best groups out of the running. group_keys [groups]
static __device__ void mask_groups(unsigned *keys, unsigned *group_keys, struct router_shape shape, int lane) {
    int size = shape.experts / shape.groups;
    __syncwarp();
    for (int g = 0; g < shape.groups; g++) {
        unsigned key = key_of(sum_of_two_largest(keys + g * size, size, lane));
        if (lane == g % 32) group_keys[g] = key; // the lane that looks at it in select_top
    }
    select_top(NULL, shape.top_groups, group_keys, shape.groups, lane);
    __syncwarp();
    for (int e = lane; e < shape.experts; e += 32)
        if (group_keys[e / size] != 0) keys[e] = 0; // select_top has marked the kept ones
}

// ---- gates ----

// ids and gates of one token [K] from its scores [E]. chosen [K] has been written by any lane; picked [K] is scratch.
static __device__ void write_choice(int32_t *ids, float *gates, const float *scores, const int *chosen, float *picked,
                                    struct router_shape shape, int lane) {
    int K = shape.top_k;
    __syncwarp();
    for (int k = lane; k < K; k += 32) picked[k] = scores[chosen[k]];
    __syncwarp();
    float sum = GATE_EPS, factor = (float)shape.scale;
    for (int k = 0; k < K; k++) sum = __fadd_rn(sum, picked[k]);
    if (shape.normalize) factor = __fdiv_rn(factor, sum);
    for (int k = lane; k < K; k += 32) {
        ids[k] = chosen[k];
        gates[k] = __fmul_rn(picked[k], factor);
    }
}

static __device__ void write_nothing(int32_t *ids, float *gates, int K, int lane) {
    for (int k = lane; k < K; k += 32) {
        ids[k] = -1;
        gates[k] = 0.0f;
    }
}

// ---- selection ----

static __host__ __device__ size_t select_words(struct router_shape shape) {
    return (size_t)shape.experts + shape.groups + 2 * (size_t)shape.top_k;
}

static __global__ void select_kernel(int32_t *ids, float *gates, const float *scores, const float *bias,
                                     const int32_t *tokens, int N, struct router_shape shape) {
    extern __shared__ unsigned words[];
    int E = shape.experts, K = shape.top_k, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int t = blockIdx.x * (blockDim.x / 32) + warp;
    if (t >= N) return;
    ids += (size_t)t * K;
    gates += (size_t)t * K;
    if (tokens && tokens[t] < 0) {
        write_nothing(ids, gates, K, lane);
        return;
    }
    unsigned *keys = words + warp * select_words(shape), *group_keys = keys + E;
    int *chosen = (int *)(group_keys + shape.groups);
    float *picked = (float *)(chosen + K);
    const float *s = scores + (size_t)t * E;
    for (int e = lane; e < E; e += 32) keys[e] = key_of(__fadd_rn(s[e], bias[e]));
    if (shape.groups > 1) mask_groups(keys, group_keys, shape, lane);
    select_top(chosen, K, keys, E, lane);
    write_choice(ids, gates, s, chosen, picked, shape, lane);
}

extern "C" void router_select(int32_t *ids, accum *gates, const accum *scores, const accum *bias, const int32_t *tokens,
                              int N, struct router_shape shape) {
    OPERATION();
    experts_check(shape.experts);
    if (N == 0) return;
    size_t of_warp = sizeof(unsigned) * select_words(shape);
    int warps = warps_that_fit(of_warp, 0);
    size_t bytes = of_warp * (size_t)warps;
    select_kernel<<<cuda_blocks((size_t)N, warps), warps * 32, bytes, cuda_stream()>>>(ids, gates, scores, bias, tokens,
                                                                                       N, shape);
    cuda_check_launch();
}

static __global__ void gates_kernel(int32_t *ids, float *gates, const float *scores, const int32_t *tokens, int N,
                                    struct router_shape shape) {
    extern __shared__ unsigned words[];
    int K = shape.top_k, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int t = blockIdx.x * (blockDim.x / 32) + warp;
    if (t >= N) return;
    ids += (size_t)t * K;
    gates += (size_t)t * K;
    bool nothing = ids[0] < 0 || (tokens && tokens[t] < 0);
    __syncwarp(); // ids[0] has been read by all lanes before it is written
    if (nothing) {
        write_nothing(ids, gates, K, lane);
        return;
    }
    int *chosen = (int *)(words + (size_t)warp * 2 * K);
    for (int k = lane; k < K; k += 32) chosen[k] = ids[k];
    write_choice(ids, gates, scores + (size_t)t * shape.experts, chosen, (float *)(chosen + K), shape, lane);
}

extern "C" void router_gates(int32_t *ids, accum *gates, const accum *scores, const int32_t *tokens, int N,
                             struct router_shape shape) {
    OPERATION();
    experts_check(shape.experts);
    if (N == 0) return;
    size_t of_warp = sizeof(unsigned) * 2 * (size_t)shape.top_k;
    int warps = warps_that_fit(of_warp, 0);
    size_t bytes = of_warp * (size_t)warps;
    gates_kernel<<<cuda_blocks((size_t)N, warps), warps * 32, bytes, cuda_stream()>>>(ids, gates, scores, tokens, N,
                                                                                      shape);
    cuda_check_launch();
}

// ---- counts and the bias ----

enum { COUNT_THREADS = 256, COUNT_IDS = 2048 }; // of a block

static __global__ void count_kernel(unsigned long long *counts, const int32_t *ids, size_t n, int E) {
    extern __shared__ unsigned words[];
    for (int e = threadIdx.x; e < E; e += COUNT_THREADS) words[e] = 0;
    __syncthreads();
    size_t begin = (size_t)blockIdx.x * COUNT_IDS, end = n - begin < COUNT_IDS ? n : begin + COUNT_IDS;
    for (size_t i = begin + threadIdx.x; i < end; i += COUNT_THREADS)
        if (ids[i] >= 0) atomicAdd(&words[ids[i]], 1u);
    __syncthreads();
    for (int e = threadIdx.x; e < E; e += COUNT_THREADS)
        if (words[e]) atomicAdd(&counts[e], (unsigned long long)words[e]);
}

extern "C" void router_count(int64_t *counts, const int32_t *ids, size_t n, int E) {
    OPERATION();
    experts_check(E);
    if (n == 0) return;
    count_kernel<<<cuda_blocks(n, COUNT_IDS), COUNT_THREADS, sizeof(unsigned) * (size_t)E, cuda_stream()>>>(
        (unsigned long long *)counts, ids, n, E);
    cuda_check_launch();
}

static __global__ void update_bias_kernel(float *bias, const int64_t *counts, int E, double rate) {
    __shared__ unsigned long long sum;
    if (threadIdx.x == 0) sum = 0;
    __syncthreads();
    for (int e = threadIdx.x; e < E; e += COUNT_THREADS) atomicAdd(&sum, (unsigned long long)counts[e]);
    __syncthreads();
    // The sign of total - E counts[e], without the product, which could overflow.
    int64_t whole = (int64_t)sum / E, rest = (int64_t)sum % E;
    for (int e = threadIdx.x; e < E; e += COUNT_THREADS) {
        int sign = counts[e] < whole || (counts[e] == whole && rest > 0) ? 1 : counts[e] > whole ? -1 : 0;
        bias[e] += (float)(rate * sign);
    }
}

extern "C" void router_update_bias(accum *bias, const int64_t *counts, int E, double rate) {
    OPERATION();
    if (E == 0) return;
    update_bias_kernel<<<1, COUNT_THREADS, 0, cuda_stream()>>>(bias, counts, E, rate);
    cuda_check_launch();
}

// ---- balance loss ----

// A block sums CHUNK_TOKENS tokens of one sequence: how often each expert is chosen, and its share of the scores.
enum { CHUNK_TOKENS = 64, FINISH_THREADS = 256 };

struct balance_sums {
    float *shares; // [chunks of all sequences, E]
    int *counts;   // [chunks, E]
    int *tokens;   // [chunks], those that are not masked
};

static int chunks_of(int T) { return T / CHUNK_TOKENS + (T % CHUNK_TOKENS != 0); }

static size_t balance_bytes(size_t chunks, int E) { return chunks * (2 * (size_t)E + 1) * sizeof(float); }

extern "C" size_t scratch_router_balance(int rows, int experts, int sequences) {
    return balance_bytes((size_t)rows / CHUNK_TOKENS + (size_t)sequences, experts);
}

static __host__ __device__ size_t balance_words(struct router_shape shape) {
    return 2 * (size_t)shape.experts + shape.top_k;
}

// Shared memory: counts [E] of the block, then for each warp shares [E], keys [E], chosen [K].
static __global__ void balance_kernel(struct balance_sums sums, const float *scores, const int32_t *tokens, int T,
                                      int chunks, struct router_shape shape) {
    extern __shared__ unsigned words[];
    __shared__ int unmasked;
    int E = shape.experts, K = shape.top_k, warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    int *counts = (int *)words;
    float *shares = (float *)(words + E + warp * balance_words(shape));
    unsigned *keys = (unsigned *)(shares + E);
    int *chosen = (int *)(keys + E);
    if (threadIdx.x == 0) unmasked = 0;
    for (int e = threadIdx.x; e < E; e += blockDim.x) counts[e] = 0;
    for (int e = lane; e < E; e += 32) shares[e] = 0.0f;
    __syncthreads();

    size_t sequence = blockIdx.x / chunks;
    int begin = (int)(blockIdx.x % chunks) * CHUNK_TOKENS, end = T - begin < CHUNK_TOKENS ? T : begin + CHUNK_TOKENS;
    int mine = 0;
    for (int t = begin + warp; t < end; t += warps) {
        size_t token = sequence * T + t;
        if (tokens && tokens[token] < 0) continue;
        mine++;
        const float *s = scores + token * E;
        float all = 0.0f;
        for (int e = lane; e < E; e += 32) {
            all += s[e];
            keys[e] = key_of(s[e]);
        }
        all = warp_sum(all);
        for (int e = lane; e < E; e += 32) shares[e] += s[e] / all;
        select_top(chosen, K, keys, E, lane);
        __syncwarp();
        for (int k = lane; k < K; k += 32) atomicAdd(&counts[chosen[k]], 1);
        __syncwarp(); // read before the next token's choice is written
    }
    if (lane == 0) atomicAdd(&unmasked, mine);
    __syncthreads();

    const float *first = (const float *)(words + E);
    for (int e = threadIdx.x; e < E; e += blockDim.x) {
        float share = 0.0f;
        for (int w = 0; w < warps; w++) share += first[w * balance_words(shape) + e];
        sums.shares[(size_t)blockIdx.x * E + e] = share;
        sums.counts[(size_t)blockIdx.x * E + e] = counts[e];
    }
    if (threadIdx.x == 0) sums.tokens[blockIdx.x] = unmasked;
}

// f [E] and loss of one sequence from its chunks in ascending order. A block per sequence.
static __global__ void balance_finish_kernel(float *f, float *loss, struct balance_sums sums, int chunks, int E,
                                             int K) {
    __shared__ float warp_sums[33];
    __shared__ int unmasked;
    size_t first = (size_t)blockIdx.x * chunks;
    if (threadIdx.x == 0) unmasked = 0;
    __syncthreads();
    for (int c = threadIdx.x; c < chunks; c += FINISH_THREADS) atomicAdd(&unmasked, sums.tokens[first + c]);
    __syncthreads();
    float total = 0.0f, tokens = (float)unmasked;
    for (int e = threadIdx.x; e < E; e += FINISH_THREADS) {
        int count = 0;
        float share = 0.0f;
#pragma unroll 8
        for (int c = 0; c < chunks; c++) {
            count += sums.counts[(first + c) * E + e];
            share += sums.shares[(first + c) * E + e];
        }
        float fe = unmasked ? (float)count * ((float)E / ((float)K * tokens)) : 0.0f;
        if (unmasked) total += fe * (share / tokens);
        f[(size_t)blockIdx.x * E + e] = fe;
    }
    total = block_sum(total, warp_sums);
    if (threadIdx.x == 0) loss[blockIdx.x] = total;
}

extern "C" void router_balance(accum *f, accum *loss, const accum *scores, const int32_t *tokens, int B, int T,
                               struct router_shape shape) {
    OPERATION();
    int E = shape.experts, chunks = chunks_of(T);
    experts_check(E);
    if (B == 0) return;
    size_t all = (size_t)B * (size_t)chunks, of_warp = sizeof(unsigned) * balance_words(shape);
    struct balance_sums sums;
    sums.shares = (float *)cuda_scratch(balance_bytes(all, E));
    sums.counts = (int *)(sums.shares + all * (size_t)E);
    sums.tokens = sums.counts + all * (size_t)E;
    if (all > 0) {
        size_t of_all = sizeof(int) * (size_t)E;
        int warps = warps_that_fit(of_warp, of_all + 64); // and a little for what is declared
        size_t bytes = of_all + of_warp * (size_t)warps;
        balance_kernel<<<(unsigned)all, warps * 32, bytes, cuda_stream()>>>(sums, scores, tokens, T, chunks, shape);
        cuda_check_launch();
    }
    balance_finish_kernel<<<(unsigned)B, FINISH_THREADS, 0, cuda_stream()>>>(f, loss, sums, chunks, E, shape.top_k);
    cuda_check_launch();
}

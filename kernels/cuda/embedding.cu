// Token embedding.
//
// Its gradient adds rows of one id in ascending order. Tokens are sorted by (id, position): tiles in shared memory,
// then every token looks up its place among all tiles. What is left is a sum over a segment of the sorted tokens for
// each id. Each kernel waits for the one before it only when its blocks are there.
#include "kernels/cuda/rows.cuh"
#include "kernels/cuda/scratch.h"

enum { TILE = 1024, SORT_THREADS = TILE / 2, MERGE_WARPS = 8, CHUNK = EMBEDDING_CHUNK_ROWS };
enum { SUM_THREADS = 128, VECTORS = 2 }; // of a block that sums; groups of neighbouring columns of a thread

// ---- forward ----

extern "C" void embedding_forward(real *x, const real *table, const int32_t *ids, int N, int H) {
    OPERATION();
    rows_gather(x, table, ids, N, H);
}

// ---- backward: sorting ----

// Id, then position. An id of -1 is the largest unsigned number and comes last.
static __device__ uint64_t make_key(int32_t id, int position) {
    return (uint64_t)(uint32_t)id << 32 | (uint32_t)position;
}

// Bitonic sort of one tile; the last one is filled up with the largest key there is. Over distances below 32 a warp
// compares among its own 64 keys, and waits for nobody else.
static __global__ void __launch_bounds__(SORT_THREADS) sort_tiles(uint64_t *keys, const int32_t *ids, int N) {
    __shared__ uint64_t tile[TILE];
    size_t first = (size_t)blockIdx.x * TILE;
    int own = threadIdx.x / 32 * 64 + threadIdx.x % 32;
    cudaTriggerProgrammaticLaunchCompletion();
    for (int i = own; i < own + 64; i += 32)
        tile[i] = first + i < (size_t)N ? make_key(ids[first + i], (int)(first + i)) : ~(uint64_t)0;
    for (int size = 2; size <= TILE; size *= 2)
        for (int distance = size / 2; distance > 0; distance /= 2) {
            if (distance < 32)
                __syncwarp();
            else
                __syncthreads();
            int low = 2 * threadIdx.x - (threadIdx.x & (distance - 1)), high = low + distance;
            uint64_t a = tile[low], b = tile[high];
            bool descending = (low & size) != 0;
            if ((a > b) != descending) {
                tile[low] = b;
                tile[high] = a;
            }
        }
    __syncwarp();
    for (int i = own; i < own + 64; i += 32)
        if (first + i < (size_t)N) keys[first + i] = tile[i];
}

// How many of n ascending keys are below this one.
static __device__ int count_below(const uint64_t *keys, int n, uint64_t key) {
    int low = 0, high = n;
    while (low < high) {
        int middle = low + (high - low) / 2;
        if (keys[middle] < key)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

// A block has 32 keys, neighbours in their tile, which take nearly the same way through another; its warps share out
// the tiles.
static __global__ void __launch_bounds__(32 * MERGE_WARPS) merge_tiles(uint64_t *sorted, const uint64_t *keys, int N) {
    __shared__ int below[MERGE_WARPS][32];
    size_t i = (size_t)blockIdx.x * 32 + threadIdx.x;
    cudaTriggerProgrammaticLaunchCompletion();
    cudaGridDependencySynchronize();
    uint64_t key = i < (size_t)N ? keys[i] : 0;
    int place = 0;
    for (size_t first = (size_t)threadIdx.y * TILE; first < (size_t)N; first += (size_t)MERGE_WARPS * TILE)
        place += count_below(keys + first, (int)min((size_t)TILE, (size_t)N - first), key);
    below[threadIdx.y][threadIdx.x] = place;
    __syncthreads();
    if (threadIdx.y > 0 || i >= (size_t)N) return;
    for (int warp = 1; warp < MERGE_WARPS; warp++) place += below[warp][threadIdx.x];
    sorted[place] = key;
}

static __device__ __forceinline__ int32_t id_of(uint64_t key) { return (int32_t)(key >> 32); }

// First and last + 1 of the places that have the id of place p; -1, -1 for a masked token. Most ids have one place.
static __device__ int2 find_segment(const uint64_t *sorted, int N, int p) {
    int32_t id = id_of(sorted[p]);
    if (id < 0) return make_int2(-1, -1);
    int2 segment = make_int2(p, p + 1);
    if (p > 0 && id_of(sorted[p - 1]) == id) segment.x = count_below(sorted, p, make_key(id, 0));
    if (p + 1 < N && id_of(sorted[p + 1]) == id)
        segment.y += count_below(sorted + p + 1, N - p - 1, (uint64_t)((uint32_t)id + 1) << 32);
    return segment;
}

// ---- backward: sums ----

// The first of the WIDTH columns that this thread has in group v, and where it reads them: behind the end of a row it
// reads the last ones again, so that reading needs no branch, and writes none.
template <int WIDTH> static __device__ __forceinline__ int own_column(int v) {
    return ((blockIdx.y * VECTORS + v) * SUM_THREADS + threadIdx.x) * WIDTH;
}
template <int WIDTH> static __device__ __forceinline__ int read_column(int v, int H) {
    return min(own_column<WIDTH>(v), H - WIDTH);
}

template <int WIDTH, typename NUMBER>
static __device__ __forceinline__ void add_row(float (&sums)[VECTORS][WIDTH], const NUMBER *row, int H) {
    float values[VECTORS][WIDTH];
    for (int v = 0; v < VECTORS; v++) columns_read<WIDTH>(values[v], row + read_column<WIDTH>(v, H));
    for (int v = 0; v < VECTORS; v++)
        for (int c = 0; c < WIDTH; c++) sums[v][c] += values[v][c];
}

template <int WIDTH>
static __device__ __forceinline__ void write_row(accum *row, const float (&sums)[VECTORS][WIDTH], int H) {
    for (int v = 0; v < VECTORS; v++)
        if (own_column<WIDTH>(v) < H) columns_write<WIDTH>(row + own_column<WIDTH>(v), sums[v]);
}

static __device__ __forceinline__ const real *row_of(const real *dx, uint64_t key, int H) {
    return dx + (size_t)(uint32_t)key * H;
}

// segments[p] = find_segment of place p. One of more than CHUNK rows leaves the sums of its full chunks, so that an id
// that is everywhere is no long chain. Of the CHUNK places of a block at most one begins a full chunk, whose sum has
// the block's number.
template <int WIDTH>
static __global__ void __launch_bounds__(SUM_THREADS)
    sum_chunks(int2 *segments, accum *partials, const uint64_t *sorted, const real *dx, int N, int H) {
    __shared__ int start;
    cudaTriggerProgrammaticLaunchCompletion();
    if (threadIdx.x == 0) start = -1;
    cudaGridDependencySynchronize();
    __syncthreads();
    size_t place = (size_t)blockIdx.x * CHUNK + threadIdx.x;
    if (threadIdx.x < CHUNK && place < (size_t)N) {
        int p = (int)place;
        int2 segment = find_segment(sorted, N, p);
        if (blockIdx.y == 0) segments[p] = segment;
        if (segment.y - segment.x > CHUNK && (p - segment.x) % CHUNK == 0 && segment.y - p >= CHUNK) start = p;
    }
    __syncthreads();
    if (start < 0) return;
    float sums[VECTORS][WIDTH] = {};
#pragma unroll 4
    for (int i = 0; i < CHUNK; i++) add_row<WIDTH>(sums, row_of(dx, sorted[start + i], H), H);
    write_row<WIDTH>(partials + (size_t)blockIdx.x * H, sums, H);
}

// dtable's row, then the sums of full chunks where there are any, then the other rows: one block for each segment,
// found by its first place, and for SUM_THREADS * VECTORS * WIDTH columns.
template <int WIDTH>
static __global__ void __launch_bounds__(SUM_THREADS)
    add_segments(accum *dtable, const accum *partials, const uint64_t *sorted, const int2 *segments, const real *dx,
                 int H) {
    int p = blockIdx.x;
    cudaGridDependencySynchronize();
    int2 segment = segments[p];
    accum *row = dtable + (size_t)(sorted[p] >> 32) * H;
    if (p != segment.x) return;
    float sums[VECTORS][WIDTH];
    for (int v = 0; v < VECTORS; v++) columns_read<WIDTH>(sums[v], row + read_column<WIDTH>(v, H));
    if (segment.y - segment.x > CHUNK) {
        int chunks = (segment.y - segment.x) / CHUNK;
        const accum *partial = partials + (size_t)(p / CHUNK) * H; // chunks begin CHUNK places apart
#pragma unroll 4
        for (int chunk = 0; chunk < chunks; chunk++) add_row<WIDTH>(sums, partial + (size_t)chunk * H, H);
        p += chunks * CHUNK;
    }
#pragma unroll 2
    for (; p < segment.y; p++) add_row<WIDTH>(sums, row_of(dx, sorted[p], H), H);
    write_row<WIDTH>(row, sums, H);
}

template <int WIDTH>
static void add_rows(accum *dtable, int2 *segments, accum *partials, const uint64_t *sorted, const real *dx, int N,
                     int H) {
    unsigned column_blocks = cuda_blocks((size_t)H, SUM_THREADS * VECTORS * WIDTH);
    cuda_launch_early(sum_chunks<WIDTH>, dim3(cuda_blocks((size_t)N, CHUNK), column_blocks), SUM_THREADS, segments,
                      partials, sorted, dx, N, H);
    cuda_launch_early(add_segments<WIDTH>, dim3((unsigned)N, column_blocks), SUM_THREADS, dtable, partials, sorted,
                      segments, dx, H);
}

extern "C" void embedding_backward(accum *dtable, const real *dx, const int32_t *ids, int N, int H) {
    OPERATION();
    if (N == 0 || H == 0) return;
    struct embedding_scratch layout = scratch_embedding_layout(N, H);
    char *scratch = (char *)cuda_scratch(layout.bytes);
    uint64_t *keys = (uint64_t *)(scratch + layout.keys), *sorted = (uint64_t *)(scratch + layout.sorted);
    int2 *segments = (int2 *)(scratch + layout.segments);
    accum *partials = (accum *)(scratch + layout.partials);

    sort_tiles<<<cuda_blocks((size_t)N, TILE), SORT_THREADS, 0, cuda_stream()>>>(keys, ids, N);
    cuda_check_launch();
    cuda_launch_early(merge_tiles, cuda_blocks((size_t)N, 32), dim3(32, MERGE_WARPS), sorted, keys, N);
    if (columns_aligned(dtable, sizeof(accum) * (size_t)H) && columns_aligned(dx, sizeof(real) * (size_t)H))
        add_rows<8>(dtable, segments, partials, sorted, dx, N, H);
    else
        add_rows<1>(dtable, segments, partials, sorted, dx, N, H);
}

#include "kernels/cuda/tensor_map.h"

typedef CUresult encode_tiled(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                              const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                              CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// The driver's function, by its address, so that programs start where there is no driver.
static encode_tiled *find_encode(void) {
    static encode_tiled *encode;
    enum cudaDriverEntryPointQueryResult found;
    void *address = NULL;
    if (encode) return encode;
    cuda_check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &address, 12000, cudaEnableDefault, &found));
    if (found != cudaDriverEntryPointSuccess || !address)
        fail_internal("tensor map", "found no cuTensorMapEncodeTiled in the driver, wanted one for CUDA 12 or newer");
    return encode = (encode_tiled *)address;
}

CUtensorMap tensor_map_heads(struct head_array a, int rows) {
    CUtensorMap map;
    cuuint64_t sizes[4] = {(cuuint64_t)a.columns, (cuuint64_t)a.heads, (cuuint64_t)a.length, (cuuint64_t)a.batch};
    cuuint64_t strides[3] = {a.head_stride * sizeof(real), a.row_stride * sizeof(real),
                             a.sequence_stride * sizeof(real)};
    cuuint32_t box[4] = {64, 1, (cuuint32_t)rows, 1}, steps[4] = {1, 1, 1, 1};
    CUresult code = find_encode()(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, (void *)a.x, sizes, strides, box, steps,
                                  CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (code != CUDA_SUCCESS)
        fail_internal("tensor map",
                      "cuTensorMapEncodeTiled gave code %d for %d x %d x %d x %d elements, rows %zu, heads %zu and "
                      "sequences %zu apart",
                      (int)code, a.batch, a.length, a.heads, a.columns, a.row_stride, a.head_stride, a.sequence_stride);
    return map;
}

CUtensorMap tensor_map_matrix(const real *x, size_t rows, size_t columns, size_t row_stride) {
    CUtensorMap map;
    cuuint64_t sizes[2] = {columns, rows}, strides[1] = {row_stride * sizeof(real)};
    cuuint32_t box[2] = {MATRIX_BOX, MATRIX_BOX}, steps[2] = {1, 1};
    CUresult code = find_encode()(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, (void *)x, sizes, strides, box, steps,
                                  CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (code != CUDA_SUCCESS)
        fail_internal("tensor map", "cuTensorMapEncodeTiled gave code %d for %zu x %zu elements, rows %zu apart, at %p",
                      (int)code, rows, columns, row_stride, (const void *)x);
    return map;
}

static CUtensorMap map_matrices(void *x, CUtensorMapDataType type, size_t size, size_t count, size_t rows,
                                size_t columns, int box_columns) {
    CUtensorMap map;
    cuuint64_t sizes[3] = {columns, rows, count}, strides[2] = {columns * size, rows * columns * size};
    cuuint32_t box[3] = {(cuuint32_t)box_columns, MATRIX_BOX, 1}, steps[3] = {1, 1, 1};
    CUresult code = find_encode()(&map, type, 3, x, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                  CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (code != CUDA_SUCCESS)
        fail_internal("tensor map",
                      "cuTensorMapEncodeTiled gave code %d for %zu x %zu x %zu elements of %zu bytes at %p", (int)code,
                      count, rows, columns, size, x);
    return map;
}

CUtensorMap tensor_map_matrices(const real *x, size_t count, size_t rows, size_t columns) {
    return map_matrices((void *)x, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, sizeof *x, count, rows, columns, MATRIX_BOX);
}

CUtensorMap tensor_map_matrices_accum(accum *x, size_t count, size_t rows, size_t columns) {
    return map_matrices(x, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, sizeof *x, count, rows, columns, ACCUM_BOX_COLUMNS);
}

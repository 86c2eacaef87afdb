// The backward pass once more, for --trace: its blocks record what they do (mok_record.cuh).
#define MOK_RECORDED         true
#define mok_backward_launch  mok_backward_launch_recorded
#define mok_backward_prepare mok_backward_prepare_recorded
#include "kernels/cuda/mok_backward.cu"

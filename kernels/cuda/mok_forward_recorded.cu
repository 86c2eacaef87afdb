// The forward pass once more, for --trace: its blocks record what they do (mok_record.cuh).
#define MOK_RECORDED        true
#define mok_forward_launch  mok_forward_launch_recorded
#define mok_forward_prepare mok_forward_prepare_recorded
#include "kernels/cuda/mok_forward.cu"

#include "model/presets.h"

#include <string.h>

// YaRN is off everywhere; the other numbers are what --yarn-factor alone then uses (DeepSeek-V3's).
#define YARN_OFF                                                                                                       \
    { .factor = 0, .original_length = 4096, .beta_fast = 32, .beta_slow = 1, .mscale = 1, .mscale_all_dim = 1 }

// The unit models differ in widths and experts only. Their vocabulary is given, so that tests need no data.
#define UNIT_COMMON                                                                                                    \
    .layers = 3, .dense_layers = 1, .shared_experts = 1, .groups = 4, .top_groups = 2, .normalize_gates = true,        \
    .route_scale = 2.5, .mtp_depth = 1, .max_positions = 1024, .rms_eps = 1e-6, .rope_theta = 10000, .yarn = YARN_OFF, \
    .init_std = 0.02, .balance_alpha = 1e-3, .bias_rate = 1e-3, .mtp_weight = 0.3

// For measuring: the widths of a released model in so many layers that one H200, or each of two that share the experts, is
// nearly full with a vocabulary of 129280.
#define MOONLIGHT_MINI                                                                                                 \
    .hidden = 2048, .dense_layers = 1, .intermediate = 11264, .expert_intermediate = 1408, .heads = 16, .q_rank = 0,   \
    .kv_rank = 512, .nope_dim = 128, .rope_dim = 64, .value_dim = 128, .experts = 64, .shared_experts = 2, .top_k = 6, \
    .groups = 1, .top_groups = 1, .normalize_gates = true, .route_scale = 2.446, .balance_alpha = 1e-4,                \
    .bias_rate = 1e-2, .mtp_depth = 0, .mtp_weight = 0.3, .max_positions = 8192, .rms_eps = 1e-5, .rope_theta = 50000, \
    .yarn = YARN_OFF, .init_std = 0.02
#define QWEN3_MOE_MINI                                                                                                 \
    .hidden = 2048, .dense_layers = 0, .intermediate = 6144, .expert_intermediate = 768, .heads = 16, .q_rank = 0,     \
    .kv_rank = 512, .nope_dim = 128, .rope_dim = 64, .value_dim = 128, .experts = 128, .shared_experts = 0,            \
    .top_k = 8, .groups = 1, .top_groups = 1, .normalize_gates = true, .route_scale = 1.0, .balance_alpha = 1e-4,      \
    .bias_rate = 1e-2, .mtp_depth = 0, .mtp_weight = 0.3, .max_positions = 8192, .rms_eps = 1e-6, .rope_theta = 10000, \
    .yarn = YARN_OFF, .init_std = 0.02
#define MEASURED_TRAINING                                                                                              \
    .batch = 8, .seq = 4096, .tokens_per_step = 0, .steps = 2000, .warmup = 200, .lr = 4.2e-4, .min_lr = 4.2e-5,       \
    .save_every = 1000, .eval_every = 250, .sample_every = 0

// With equal gates, route_scale = sqrt(top_k) makes the sum of the routed experts as large as one expert's output.
// Runs of a few hundred steps balance their experts with a bias_rate of 1e-2; with 1e-3, moonlight-mini-1 still sent most
// tokens to the same experts after 60 steps.
// One line per concern is easier to compare than what clang-format makes of it.
// clang-format off
const struct preset presets[] = {
    {.name = "unit",
     .purpose = "every branch of the model, as small as it gets; for tests",
     .model = {UNIT_COMMON,
               .vocab = 257, .hidden = 64, .intermediate = 128, .expert_intermediate = 32,
               .heads = 4, .q_rank = 32, .kv_rank = 24, .nope_dim = 16, .rope_dim = 8, .value_dim = 16,
               .experts = 8, .top_k = 2},
     .batch = 4, .seq = 32, .steps = 100, .warmup = 10,
     .lr = 3e-3, .min_lr = 3e-4, .save_every = 50, .eval_every = 50, .sample_tokens = 100},
    {.name = "unit-12",
     .purpose = "unit with 12 experts, which 3 and 6 ranks can share; for tests",
     .model = {UNIT_COMMON,
               .vocab = 257, .hidden = 64, .intermediate = 128, .expert_intermediate = 32,
               .heads = 4, .q_rank = 32, .kv_rank = 24, .nope_dim = 16, .rope_dim = 8, .value_dim = 16,
               .experts = 12, .top_k = 3},
     .batch = 4, .seq = 32, .steps = 100, .warmup = 10,
     .lr = 3e-3, .min_lr = 3e-4, .save_every = 50, .eval_every = 50, .sample_tokens = 100},
    {.name = "unit-128",
     .purpose = "unit in multiples of 128, for GPU tiles; for tests",
     .model = {UNIT_COMMON,
               .vocab = 384, .hidden = 128, .intermediate = 256, .expert_intermediate = 128,
               .heads = 2, .q_rank = 128, .kv_rank = 128, .nope_dim = 64, .rope_dim = 64, .value_dim = 128,
               .experts = 8, .top_k = 2},
     .batch = 4, .seq = 128, .steps = 100, .warmup = 10,
     .lr = 1e-3, .min_lr = 1e-4, .save_every = 50, .eval_every = 50, .sample_tokens = 100},
    {.name = "tiny",
     .purpose = "learns the built-in stories on two CPU cores in 90 s",
     .model = {.hidden = 64, .layers = 4, .dense_layers = 1, .intermediate = 192, .expert_intermediate = 64,
               .heads = 4, .q_rank = 0, .kv_rank = 64, .nope_dim = 16, .rope_dim = 16, .value_dim = 24,
               .experts = 16, .shared_experts = 1, .top_k = 2, .groups = 1, .top_groups = 1,
               .normalize_gates = true, .route_scale = 2.0, .balance_alpha = 1e-3, .bias_rate = 1e-2,
               .mtp_depth = 0, .mtp_weight = 0.3, .max_positions = 2048, .rms_eps = 1e-6, .rope_theta = 10000,
               .yarn = YARN_OFF, .init_std = 0.08},
     .batch = 8, .seq = 256, .tokens_per_step = 2048, .steps = 1200, .warmup = 40,
     .lr = 3e-3, .min_lr = 3e-5, .save_every = 600, .eval_every = 300, .sample_every = 0, .sample_tokens = 400},
    {.name = "small",
     .purpose = "a first model for one GPU",
     .model = {.hidden = 512, .layers = 8, .dense_layers = 1, .intermediate = 1536, .expert_intermediate = 256,
               .heads = 8, .q_rank = 192, .kv_rank = 128, .nope_dim = 64, .rope_dim = 32, .value_dim = 64,
               .experts = 32, .shared_experts = 1, .top_k = 4, .groups = 1, .top_groups = 1,
               .normalize_gates = true, .route_scale = 2.0, .balance_alpha = 1e-4, .bias_rate = 1e-3,
               .mtp_depth = 0, .mtp_weight = 0.3, .max_positions = 4096, .rms_eps = 1e-6, .rope_theta = 10000,
               .yarn = YARN_OFF, .init_std = 0.02},
     .batch = 8, .seq = 1024, .tokens_per_step = 131072, .steps = 10000, .warmup = 300,
     .lr = 1e-3, .min_lr = 1e-4, .save_every = 1000, .eval_every = 250, .sample_every = 1000, .sample_tokens = 200},
    {.name = "base",
     .purpose = "a serious run on one node",
     .model = {.hidden = 768, .layers = 12, .dense_layers = 1, .intermediate = 2304, .expert_intermediate = 384,
               .heads = 12, .q_rank = 384, .kv_rank = 256, .nope_dim = 64, .rope_dim = 32, .value_dim = 64,
               .experts = 64, .shared_experts = 1, .top_k = 6, .groups = 1, .top_groups = 1,
               .normalize_gates = true, .route_scale = 2.446, .balance_alpha = 1e-4, .bias_rate = 1e-3,
               .mtp_depth = 0, .mtp_weight = 0.3, .max_positions = 4096, .rms_eps = 1e-6, .rope_theta = 10000,
               .yarn = YARN_OFF, .init_std = 0.02},
     .batch = 8, .seq = 1024, .tokens_per_step = 524288, .steps = 20000, .warmup = 500,
     .lr = 6e-4, .min_lr = 6e-5, .save_every = 1000, .eval_every = 250, .sample_every = 1000, .sample_tokens = 100},
    {.name = "moonlight-mini",
     .purpose = "Moonlight's widths, to measure on two H200 or more",
     .model = {MOONLIGHT_MINI, .layers = 12},
     MEASURED_TRAINING},
    {.name = "moonlight-mini-1",
     .purpose = "the same for one H200",
     .model = {MOONLIGHT_MINI, .layers = 8},
     MEASURED_TRAINING},
    {.name = "qwen3-moe-mini",
     .purpose = "Qwen3-30B-A3B's many narrow experts, likewise",
     .model = {QWEN3_MOE_MINI, .layers = 12},
     MEASURED_TRAINING},
    {.name = "qwen3-moe-mini-1",
     .purpose = "the same for one H200",
     .model = {QWEN3_MOE_MINI, .layers = 8},
     MEASURED_TRAINING},
    {.name = "moonlight",
     .purpose = "Moonlight-16B-A3B",
     .model = {.vocab = 163840,
               .hidden = 2048, .layers = 27, .dense_layers = 1, .intermediate = 11264, .expert_intermediate = 1408,
               .heads = 16, .q_rank = 0, .kv_rank = 512, .nope_dim = 128, .rope_dim = 64, .value_dim = 128,
               .experts = 64, .shared_experts = 2, .top_k = 6, .groups = 1, .top_groups = 1,
               .normalize_gates = true, .route_scale = 2.446, .balance_alpha = 1e-4, .bias_rate = 1e-3,
               .mtp_depth = 0, .mtp_weight = 0.3, .max_positions = 8192, .rms_eps = 1e-5, .rope_theta = 50000,
               .yarn = YARN_OFF, .init_std = 0.02},
     .batch = 1, .seq = 8192, .tokens_per_step = 16777216, .steps = 340000, .warmup = 2000,
     .lr = 4.2e-4, .min_lr = 4.2e-5, .save_every = 1000, .eval_every = 1000, .sample_every = 0},
    {.name = "dsv3",
     .purpose = "DeepSeek-V3, as pre-trained at 4K",
     .model = {.vocab = 129280,
               .hidden = 7168, .layers = 61, .dense_layers = 3, .intermediate = 18432, .expert_intermediate = 2048,
               .heads = 128, .q_rank = 1536, .kv_rank = 512, .nope_dim = 128, .rope_dim = 64, .value_dim = 128,
               .experts = 256, .shared_experts = 1, .top_k = 8, .groups = 8, .top_groups = 4,
               .normalize_gates = true, .route_scale = 2.5, .balance_alpha = 1e-4, .bias_rate = 1e-3,
               .mtp_depth = 1, .mtp_weight = 0.3, .max_positions = 4096, .rms_eps = 1e-6, .rope_theta = 10000,
               .yarn = YARN_OFF, .init_std = 0.006},
     .batch = 1, .seq = 4096, .tokens_per_step = 62914560, .steps = 235000, .warmup = 2000,
     .lr = 2.2e-4, .min_lr = 2.2e-5, .save_every = 1000, .eval_every = 1000, .sample_every = 0},
};
// clang-format on

const int preset_count = sizeof presets / sizeof *presets;

const struct preset *preset_find(const char *name) {
    for (int i = 0; i < preset_count; i++)
        if (strcmp(presets[i].name, name) == 0) return &presets[i];
    return NULL;
}

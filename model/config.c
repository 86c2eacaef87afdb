#include "model/config.h"

#include <limits.h>
#include <math.h>
#include <stdint.h>

#include "kernels/fail.h"
#include "kernels/kernels.h"
#include "model/rope.h"

static bool has_moe(const struct config *c) { return config_is_moe(c, config_blocks(c) - 1); }

// Each size on its own. Half the range of int leaves room for sums and doubles of a size.
static void check_sizes(const struct config *c) {
    int moe = has_moe(c), dense = c->dense_layers > 0;
    const struct {
        const char *flag;
        int value, minimum;
        bool depends; // the minimum depends on what kinds of layers there are
    } sizes[] = {
        {"--vocab", c->vocab, 0, false},
        {"--hidden", c->hidden, 1, false},
        {"--heads", c->heads, 1, false},
        {"--q-rank", c->q_rank, 0, false},
        {"--kv-rank", c->kv_rank, 1, false},
        {"--nope-dim", c->nope_dim, 1, false},
        {"--rope-dim", c->rope_dim, 2, false},
        {"--value-dim", c->value_dim, 1, false},
        {"--intermediate", c->intermediate, dense, true},
        {"--expert-intermediate", c->expert_intermediate, moe, true},
        {"--experts", c->experts, moe, true},
        {"--shared-experts", c->shared_experts, 0, false},
        {"--top-k", c->top_k, moe, true},
        {"--groups", c->groups, moe, true},
        {"--top-groups", c->top_groups, moe, true},
        {"--max-positions", c->max_positions, 1, false},
    };
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        if (sizes[i].value >= sizes[i].minimum && sizes[i].value <= INT_MAX / 2) continue;
        if (sizes[i].depends)
            fail_user(sizes[i].flag,
                      "found %d with --dense-layers %d of --layers %d and --mtp-depth %d, wanted %d to %d",
                      sizes[i].value, c->dense_layers, c->layers, c->mtp_depth, sizes[i].minimum, INT_MAX / 2);
        fail_user(sizes[i].flag, "found %d, wanted %d to %d", sizes[i].value, sizes[i].minimum, INT_MAX / 2);
    }
}

// Each constant on its own. Written so that NaN is refused too.
static void check_constants(const struct config *c) {
    const struct {
        const char *flag;
        double value;
        bool zero_allowed;
    } constants[] = {
        {"--route-scale", c->route_scale, false},    {"--rms-eps", c->rms_eps, false},
        {"--rope-theta", c->rope_theta, false},      {"--init-std", c->init_std, true},
        {"--balance-alpha", c->balance_alpha, true}, {"--bias-rate", c->bias_rate, true},
        {"--mtp-weight", c->mtp_weight, true},
    };
    for (size_t i = 0; i < sizeof constants / sizeof *constants; i++) {
        double value = constants[i].value;
        bool good = isfinite(value) && (constants[i].zero_allowed ? value >= 0 : value > 0);
        if (!good)
            fail_user(constants[i].flag, "found %g, wanted a number %s", value,
                      constants[i].zero_allowed ? "of at least 0" : "above 0");
    }
}

static void check_layers(const struct config *c) {
    const int most = 1 << 16;
    if (c->layers < 1 || c->layers > most) fail_user("--layers", "found %d, wanted 1 to %d", c->layers, most);
    if (c->mtp_depth < 0 || c->mtp_depth > MTP_MAX)
        fail_user("--mtp-depth", "found %d, wanted 0 to %d", c->mtp_depth, MTP_MAX);
    if (c->dense_layers < 0 || c->dense_layers > c->layers)
        fail_user("--dense-layers", "found %d, wanted 0 to --layers %d", c->dense_layers, c->layers);
}

static void check_routing(const struct config *c) {
    int E = c->experts, K = c->top_k, G = c->groups;
    if (K > E) fail_user("--top-k", "found %d, wanted at most --experts %d", K, E);
    if (E % G) fail_user("--groups", "found %d, wanted a divisor of --experts %d", G, E);
    if (G > 1 && E / G < 2)
        fail_user("--groups",
                  "found %d with --experts %d, wanted at least 2 experts in a group: its rank is the sum of "
                  "its two best",
                  G, E);
    if (c->top_groups > G) fail_user("--top-groups", "found %d, wanted at most --groups %d", c->top_groups, G);
    if (c->top_groups * (E / G) < K)
        fail_user("--top-groups",
                  "found %d, whose groups of %d experts (--experts %d, --groups %d) are too few for "
                  "--top-k %d",
                  c->top_groups, E / G, E, G, K);
    if (K == 1 && c->normalize_gates)
        fail_user("--normalize-gates", "found true with --top-k 1, wanted false: a single gate divided by itself is "
                                       "constant, and the router would never learn");
}

static void check_yarn(const struct config *c) {
    const struct yarn *y = &c->yarn;
    if (y->factor == 0) return;
    if (!(isfinite(y->factor) && y->factor >= 1))
        fail_user("--yarn-factor", "found %g, wanted 0 (off) or at least 1", y->factor);
    if (y->original_length < 1)
        fail_user("--yarn-original-length", "found %d with --yarn-factor %g, wanted at least 1", y->original_length,
                  y->factor);
    if (c->max_positions > y->factor * y->original_length)
        fail_user("--max-positions", "found %d, wanted at most --yarn-factor %g x --yarn-original-length %d",
                  c->max_positions, y->factor, y->original_length);
    if (!(y->beta_slow > 0 && y->beta_fast > y->beta_slow && isfinite(y->beta_fast)))
        fail_user("--yarn-beta-fast", "found %g, wanted more than --yarn-beta-slow %g, and that above 0", y->beta_fast,
                  y->beta_slow);
    if (!(isfinite(y->mscale) && isfinite(y->mscale_all_dim) && y->mscale >= 0 && y->mscale_all_dim >= 0))
        fail_user("--yarn-mscale", "found %g with --yarn-mscale-all-dim %g, wanted both at least 0", y->mscale,
                  y->mscale_all_dim);
    if (!(c->rope_theta > 1))
        fail_user("--rope-theta", "found %g with --yarn-factor %g, wanted more than 1", c->rope_theta, y->factor);
}

// One matrix dimension is an int everywhere, and so is the number of tensors. A whole model has fewer than 2^56
// parameters, so that its bytes fit in 64 bits.
static void check_products(const struct config *c) {
    const struct {
        const char *flag, *other;
        int64_t value, other_value, most;
    } products[] = {
        {"--heads", "--nope-dim + --rope-dim", c->heads, config_query_dim(c), INT_MAX},
        {"--heads", "--nope-dim + --value-dim", c->heads, (int64_t)c->nope_dim + c->value_dim, INT_MAX},
        {"--shared-experts", "--expert-intermediate", c->shared_experts, c->expert_intermediate, INT_MAX / 2},
        {"--experts", "--layers + --mtp-depth", c->experts, config_blocks(c), INT_MAX / 8},
    };
    for (size_t i = 0; i < sizeof products / sizeof *products; i++) {
        int64_t product = products[i].value * products[i].other_value;
        if (product > products[i].most)
            fail_user(products[i].flag, "found %lld with %s = %lld, wanted a product of at most %lld",
                      (long long)products[i].value, products[i].other, (long long)products[i].other_value,
                      (long long)products[i].most);
    }
    double h = c->hidden, n = c->heads;
    double attention = h * (c->q_rank + c->kv_rank + c->rope_dim) + n * c->value_dim * h +
                       n * config_query_dim(c) * (c->q_rank ? c->q_rank : h) +
                       n * (c->nope_dim + c->value_dim) * c->kv_rank;
    double ffn = 3 * h * (c->intermediate + ((double)c->experts + c->shared_experts) * c->expert_intermediate);
    double bound = config_blocks(c) * (attention + ffn + 2 * h * h + h * c->experts) + 2.0 * c->vocab * h;
    if (bound > 0x1p56)
        fail_user("--hidden", "found %d with --layers %d, which makes about %.2g parameters, wanted fewer than %.2g",
                  c->hidden, c->layers, bound, 0x1p56);
}

// What the kernels of this build can hold.
static void check_kernels(const struct config *c) {
    int experts = router_most_experts(), columns = attention_most_columns();
    if (has_moe(c) && c->experts > experts)
        fail_user("--experts", "found %d, wanted at most %d: this build for GPUs holds no more", c->experts, experts);
    if (config_query_dim(c) > columns)
        fail_user("--nope-dim",
                  "found %d with --rope-dim %d, wanted a sum of at most %d: this build for GPUs holds no more",
                  c->nope_dim, c->rope_dim, columns);
    if (c->value_dim > columns)
        fail_user("--value-dim", "found %d, wanted at most %d: this build for GPUs holds no more", c->value_dim,
                  columns);
}

void config_validate(const struct config *c) {
    check_layers(c);
    check_sizes(c);
    check_constants(c);
    if (c->rope_dim % 2) fail_user("--rope-dim", "found %d, wanted an even number: columns turn in pairs", c->rope_dim);
    if (has_moe(c)) check_routing(c);
    check_yarn(c);
    check_products(c);
    check_kernels(c);
}

double config_attention_scale(const struct config *c) {
    double scale = 1 / sqrt(config_query_dim(c));
    if (c->yarn.factor > 1) {
        double mscale = rope_yarn_scale(c->yarn.factor, c->yarn.mscale_all_dim);
        scale *= mscale * mscale;
    }
    return scale;
}

// The MoE layer and the whole model in two builds: the CPU build records, the GPU build compares (tests/scene.h).
//
// Both have the same weights, BF16 numbers all of them, and the same tokens. In between, the GPU rounds every
// activation to BF16, and where two experts' scores are nearly alike it may choose the other one. So gradients are
// compared on forced routes (model/route.h), the router's own choice by the loss alone.
//
// Limits: noise of independent roundings (1.6e-3 each, in the mean square) adds up by its squares. Measured with the
// CPU's operations and their results rounded (tests/rounding.c); the limits are two to three times that.
#include "tests/configs.h"
#include "tests/scene.h"

#include "kernels/mok.h"
#include "model/ffn.h"
#include "model/model.h"
#include "model/moe.h"
#include "model/presets.h"

// One MoE layer: three to six roundings.
static const struct tolerance LAYER = {1e-2, 5e-2, 0};
// Gradients of a model with a few blocks: dozens of roundings forward and as many backward. Single elements may cancel
// to less than their noise, and so does the gradient of a single token's attention as a whole.
static const struct tolerance GRADIENT = {4e-2, INFINITY, 1e-6};
// An expert's, who may have seen a token or two.
static const struct tolerance EXPERT_GRADIENT = {1e-1, INFINITY, 1e-6};
// The router's: of normalized gates only differences between a token's experts are left.
static const struct tolerance ROUTER_GRADIENT = {2.5e-1, INFINITY, 1e-6};
// Mean of many losses: single ones are off by 1e-3 to 1e-2, with either sign.
static const double LOSS = 2e-3, SINGLE_LOSS = 1e-2;
// With the router's own choice: a few tokens go elsewhere.
static const double LEARNED_LOSS = 5e-3;

struct model_case {
    const char *name, *preset;
    int batch, seq;
    int q_rank, mtp_depth; // -1: the preset's
};

static const struct model_case cases[] = {
    {"unit", "unit", 3, 33, -1, -1},          {"unit, whole q", "unit", 4, 40, 0, 1},
    {"unit, no MTP", "unit", 4, 32, -1, 0},   {"unit, two MTP", "unit", 6, 32, -1, 2},
    {"unit-12", "unit-12", 3, 33, -1, -1},    {"unit-12, whole q", "unit-12", 3, 65, 0, 0},
    {"unit-128", "unit-128", 2, 129, -1, -1}, {"unit-128, whole q", "unit-128", 1, 128, 0, 1},
    {"tiny", "tiny", 2, 100, -1, -1},         {"tiny, MTP", "tiny", 2, 100, 24, 1},
    {"one token", "unit", 1, 1, -1, -1},
};
enum { CASES = sizeof cases / sizeof *cases };

static double loss_limit(const struct model_case *k) { return k->batch * k->seq == 1 ? SINGLE_LOSS : LOSS; }

static struct config config_of(const struct model_case *k) {
    struct config c = preset_find(k->preset)->model;
    if (c.vocab == 0) c.vocab = 321;
    if (k->q_rank >= 0) c.q_rank = k->q_rank;
    if (k->mtp_depth >= 0) c.mtp_depth = k->mtp_depth;
    c.balance_alpha = 0.1; // so that its part of the gradients shows
    return c;
}

// Weights with which attention and routing are far from uniform.
static void open_model(struct model *m, const struct config *c, int batch, int seq, bool training,
                       const struct moe_settings *moe) {
    model_open(m, c, batch, seq, training, NULL, moe);
    m->seed = 5;
    float *values = malloc(sizeof *values * params_largest(&m->params));
    for (int i = 0; i < m->params.count; i++) {
        const struct param *p = &m->params.list[i];
        double std = p->kind == PARAM_EMBEDDING ? 1 : p->cols ? 0.7 / sqrt(p->cols) : 0.3;
        for (size_t j = 0; j < param_size(p); j++)
            values[j] = round_to_bf16((float)((p->cols ? 0 : 1) + std * scene_normal()));
        device_real_from_float(m->weights + p->offset, values, param_size(p));
    }
    free(values);
    size_t n = model_bias_size(c);
    float *bias = malloc(sizeof *bias * (n + 1));
    for (size_t i = 0; i < n; i++) bias[i] = (float)(0.2 * scene_normal());
    device_accum_from_float(m->bias, bias, n);
    free(bias);
}

static int32_t *make_tokens(const struct config *c, int B, int T) {
    int columns = T + 1 + c->mtp_depth, n = B * columns;
    int32_t *tokens = malloc(sizeof *tokens * (size_t)n);
    for (int i = 0; i < n; i++) tokens[i] = scene_below(c->vocab);
    if (T > 4) tokens[columns - 1] = tokens[n - columns + 3] = -1;
    return tokens;
}

// ---- the model ----

static void compare_losses(const struct model *m, struct losses sums, const struct step_totals *totals, double limit) {
    for (int k = 0; k <= m->config.mtp_depth; k++) {
        char name[32];
        snprintf(name, sizeof name, "loss %d", k);
        scene_number(name, sums.cross_entropy[k] / (double)totals->targets[k], limit);
    }
    if (model_moe_blocks(&m->config)) scene_number("balance", sums.balance / (double)totals->sequences, limit);
}

static struct tolerance gradient_limit(enum param_kind kind) {
    return kind == PARAM_ROUTER ? ROUTER_GRADIENT : kind == PARAM_EXPERT ? EXPERT_GRADIENT : GRADIENT;
}

// Every tensor on its own.
static void compare_gradients(const struct model *m) {
    float *values = malloc(sizeof *values * params_largest(&m->params));
    for (int i = 0; i < m->params.count; i++) {
        const struct param *p = &m->params.list[i];
        size_t n = param_size(p), row = (size_t)(p->transposed ? p->rows : p->cols ? p->cols : p->rows);
        device_accum_to_float(values, m->grads + p->offset, n);
        const char *name = strncmp(p->name, "model.", 6) == 0 ? p->name + 6 : p->name;
        scene_floats(name, values, n, row, gradient_limit(p->kind));
    }
    free(values);
}

static void *copy_out(const void *device, size_t bytes) {
    void *copy = malloc(bytes + 1);
    device_copy_out(copy, device, bytes);
    return copy;
}

// The pass once more, over NaN: the same bytes.
static void check_repeats(struct model *m, struct batch batch, const struct step_totals *totals) {
    size_t bytes = sizeof(accum) * m->params.size;
    void *first = copy_out(m->grads, bytes);
    poison_gradients(m->grads, &m->params);
    model_begin_gradients(m);
    device_zero(m->counts, sizeof(int64_t) * model_bias_size(&m->config));
    model_gradient(m, batch, totals);
    void *second = copy_out(m->grads, bytes);
    if (memcmp(first, second, bytes) != 0) scene_fail("gradient", "the second run gave other bytes");
    free(first);
    free(second);
}

static bool begin_gradient(const struct model_case *k, const char *route_name, const struct moe_settings *moe) {
    if (moe->kind == MOE_ALLTOALL) return scene_begin("model gradient", 0, "%s, %s", k->name, route_name);
    return scene_begin("model gradient mok", 0, "%s, %s, recompute %d, ring %d", k->name, route_name, moe->recompute,
                       moe->ring_rows);
}

static void case_gradient(const struct model_case *k, const char *route_name, struct moe_settings moe) {
    if (!begin_gradient(k, route_name, &moe)) return;
    struct config c = config_of(k);
    struct model m;
    open_model(&m, &c, k->batch, k->seq, true, &moe);
    int32_t *tokens = make_tokens(&c, k->batch, k->seq);
    struct batch batch = {tokens, k->batch, k->seq, 0};
    struct step_totals totals = {0};
    model_add_totals(&totals, &c, batch);
    model_begin_gradients(&m);
    model_gradient(&m, batch, &totals);
    compare_losses(&m, model_take_losses(&m), &totals, loss_limit(k));
    compare_gradients(&m);
    if (!scene.recording) check_repeats(&m, batch, &totals);
    free(tokens);
    model_close(&m);
}

static void case_gradients(const struct model_case *k, struct moe_settings moe) {
    static const struct {
        enum moe_route route;
        const char *name;
    } routes[] = {{ROUTE_BALANCED, "balanced"}, {ROUTE_W2, "hot rank"}, {ROUTE_W4, "ragged"}};
    for (size_t i = 0; i < sizeof routes / sizeof *routes; i++) {
        moe.route = routes[i].route;
        case_gradient(k, routes[i].name, moe);
    }
}

static void case_learned(const struct model_case *k) {
    if (!scene_begin("model loss", 0, "%s, learned routes", k->name)) return;
    struct config c = config_of(k);
    struct model m;
    // More tokens than for gradients, so that single ones that go elsewhere do not show.
    int batch_size = k->seq == 1 ? 1 : 8;
    open_model(&m, &c, batch_size, k->seq, true, &(struct moe_settings){.kind = MOE_ALLTOALL, .route = ROUTE_LEARNED});
    int32_t *tokens = make_tokens(&c, batch_size, k->seq);
    struct batch batch = {tokens, batch_size, k->seq, 0};
    struct step_totals totals = {0};
    model_add_totals(&totals, &c, batch);
    compare_losses(&m, model_evaluate(&m, batch), &totals, LEARNED_LOSS);
    free(tokens);
    model_close(&m);
}

// Layers that share the megakernel's memory, in a model that is not trained.
static void case_megakernel(const struct model_case *k) {
    if (!scene_begin("model loss mok", 0, "%s, balanced", k->name)) return;
    struct config c = config_of(k);
    struct model m;
    open_model(&m, &c, k->batch, k->seq, false, &(struct moe_settings){.kind = MOE_MOK, .route = ROUTE_BALANCED});
    int32_t *tokens = make_tokens(&c, k->batch, k->seq);
    struct batch batch = {tokens, k->batch, k->seq, 0};
    struct step_totals totals = {0};
    model_add_totals(&totals, &c, batch);
    compare_losses(&m, model_evaluate(&m, batch), &totals, loss_limit(k));
    free(tokens);
    model_close(&m);
}

// Its memory is used by one layer after the other, and again in backward. The first case has all levels, each other one its
// own. Small rings hold a part of a micro-batch.
static void run_megakernel(int i) {
    case_megakernel(&cases[i]);
    for (int level = RECOMPUTE_NONE; level <= RECOMPUTE_BLOCK; level++)
        if (i == 0 || i % (RECOMPUTE_BLOCK + 1) == level)
            case_gradients(&cases[i], (struct moe_settings){.kind = MOE_MOK, .recompute = (enum recompute)level});
    struct moe_settings ring = {.kind = MOE_MOK, .ring_rows = MOK_BLOCK_ROWS, .route = ROUTE_W4};
    case_gradient(&cases[i], "ragged", ring);
    ring.recompute = RECOMPUTE_MOE;
    case_gradient(&cases[i], "ragged", ring);
}

// ---- the MoE layer ----

enum load { LOAD_EVEN, LOAD_ONE_EXPERT, LOAD_FEW_EXPERTS, LOAD_MASKED, LOAD_NONE, LOADS };
static const char *const load_names[LOADS] = {"even", "the same experts", "few experts", "masked", "no routes"};

static void fill_load(int32_t *ids, enum load load, int N, int E, int K) {
    for (int t = 0; t < N; t++)
        for (int k = 0; k < K; k++) {
            int first = load == LOAD_ONE_EXPERT ? 0 : load == LOAD_FEW_EXPERTS ? t % 2 : t * K + t / 3;
            bool none = load == LOAD_NONE || (load == LOAD_MASKED && t % 3 == 1);
            ids[(size_t)t * (size_t)K + (size_t)k] = none ? -1 : (first + k) % E;
        }
}

static void put_normals(real *device, size_t n, double deviation) {
    float *values = malloc(sizeof *values * (n + 1));
    for (size_t i = 0; i < n; i++) values[i] = round_to_bf16((float)(deviation * scene_normal()));
    device_real_from_float(device, values, n);
    free(values);
}

static void compare_real(const char *name, const real *device, size_t n, size_t row, struct tolerance t) {
    float *values = malloc(sizeof *values * (n + 1));
    device_real_to_float(values, device, n);
    scene_floats(name, values, n, row, t);
    free(values);
}

static void compare_accum(const char *name, const accum *device, size_t n, size_t row, struct tolerance t) {
    float *values = malloc(sizeof *values * (n + 1));
    device_accum_to_float(values, device, n);
    scene_floats(name, values, n, row, t);
    free(values);
}

static struct config layer_config(const char *preset, bool shared) {
    struct config c = preset_find(preset)->model;
    if (c.vocab == 0) c.vocab = 64;
    if (!shared) c.shared_experts = 0;
    return c;
}

// Rows, residual and routes of the first layer with experts.
static void put_layer(struct model *m, int N, enum load load) {
    const struct config *c = &m->config;
    struct block_activations *a = &m->acts.blocks[c->dense_layers];
    size_t n = (size_t)N, H = (size_t)c->hidden, slots = n * (size_t)c->top_k;
    int32_t *ids = malloc(sizeof *ids * (slots + 1));
    float *gates = malloc(sizeof *gates * (slots + 1));
    fill_load(ids, load, N, c->experts, c->top_k);
    for (size_t i = 0; i < slots; i++) gates[i] = ids[i] < 0 ? 0 : (float)scene_uniform();
    device_copy_in(a->ids, ids, sizeof *ids * slots);
    device_accum_from_float(a->gates, gates, slots);
    put_normals(a->ffn_norm, n * H, 1);
    put_normals(a->middle, n * H, 1);
    free(ids);
    free(gates);
}

// dx, the gates' gradients and those of all weights, with the gradient of the output in acts.dx.
static void layer_backward(struct model *m, int N) {
    m->first_use = true;
    moe_backward(m, m->config.dense_layers, m->acts.d_norm, m->acts.d_gates, m->acts.dx, N);
}

static void compare_backward(const struct model *m, int N) {
    const struct config *c = &m->config;
    const struct block_offsets *w = &m->params.blocks[c->dense_layers];
    size_t n = (size_t)N, H = (size_t)c->hidden, slots = n * (size_t)c->top_k, experts = (size_t)c->experts;
    size_t I = (size_t)c->expert_intermediate, S = (size_t)config_shared_intermediate(c);
    compare_real("dx", m->acts.d_norm, n * H, H, LAYER);
    compare_accum("d_gates", m->acts.d_gates, slots, slots, LAYER);
    compare_accum("experts' W13", m->grads + w->expert_w13, experts * 2 * I * H, 2 * I * H, LAYER);
    compare_accum("experts' W2", m->grads + w->expert_w2, experts * I * H, I * H, LAYER);
    if (!S) return;
    compare_accum("shared W13", m->grads + w->shared_w13, 2 * S * H, H, LAYER);
    compare_accum("shared W2", m->grads + w->shared_w2, S * H, H, LAYER);
}

static void case_layer(const char *preset, int N, enum load load, bool shared) {
    if (!scene_begin("moe layer", 0, "%s, %d tokens, %s, shared %d", preset, N, load_names[load], shared)) return;
    struct config c = layer_config(preset, shared);
    struct model m;
    open_model(&m, &c, 1, N > 0 ? N : 1, true, &(struct moe_settings){.kind = MOE_ALLTOALL});
    size_t n = (size_t)N, H = (size_t)c.hidden;
    put_layer(&m, N, load);
    put_normals(m.acts.dx, n * H, 1);
    moe_forward(&m, c.dense_layers, m.acts.output, m.acts.blocks[c.dense_layers].middle, N);
    compare_real("y", m.acts.output, n * H, H, LAYER);
    layer_backward(&m, N);
    compare_backward(&m, N);
    model_close(&m);
}

// What a pass forward and one backward give: y, dx, gates' gradients, weights' gradients.
struct results {
    void *y, *dx, *d_gates, *grads;
};

static struct results copy_results(const struct model *m, int N) {
    size_t n = (size_t)N, rows = sizeof(real) * n * (size_t)m->config.hidden;
    struct results r = {.y = copy_out(m->acts.output, rows)};
    if (!m->grads) return r;
    r.dx = copy_out(m->acts.d_norm, rows);
    r.d_gates = copy_out(m->acts.d_gates, sizeof(accum) * n * (size_t)m->config.top_k);
    r.grads = copy_out(m->grads, sizeof(accum) * m->params.size);
    return r;
}

static void free_results(struct results r) {
    free(r.y);
    free(r.dx);
    free(r.d_gates);
    free(r.grads);
}

static void compare_again(const struct model *m, int N, struct results first) {
    struct results again = copy_results(m, N);
    size_t n = (size_t)N, rows = sizeof(real) * n * (size_t)m->config.hidden;
    const char *other = "the second run gave other bytes";
    if (memcmp(first.y, again.y, rows) != 0) scene_fail("y", "%s", other);
    if (m->grads) {
        if (memcmp(first.dx, again.dx, rows) != 0) scene_fail("dx", "%s", other);
        if (memcmp(first.d_gates, again.d_gates, sizeof(accum) * n * (size_t)m->config.top_k) != 0)
            scene_fail("d_gates", "%s", other);
        if (memcmp(first.grads, again.grads, sizeof(accum) * m->params.size) != 0) scene_fail("gradients", "%s", other);
    }
    free_results(again);
}

static void layer_passes(struct model *m, int N) {
    moe_forward(m, m->config.dense_layers, m->acts.output, m->acts.blocks[m->config.dense_layers].middle, N);
    if (m->grads) layer_backward(m, N);
}

// The megakernel's passes, in a model that is trained and in one that is not, with the ring that is chosen and with one
// of `ring_rows`, which has many macrobatches. Passes over fewer tokens in between change nothing.
static void case_layer_mok(const char *preset, int N, enum load load, bool shared, bool training, int ring_rows) {
    if (!scene_begin("moe layer mok", 0, "%s, %d tokens, %s, shared %d, training %d, ring %d", preset, N,
                     load_names[load], shared, training, ring_rows))
        return;
    struct config c = layer_config(preset, shared);
    struct model m;
    open_model(&m, &c, 1, N > 0 ? N : 1, training, &(struct moe_settings){.kind = MOE_MOK, .ring_rows = ring_rows});
    size_t n = (size_t)N, H = (size_t)c.hidden;
    put_layer(&m, N, load);
    if (training) {
        put_normals(m.acts.dx, n * H, 1);
        poison_gradients(m.grads, &m.params);
    }
    layer_passes(&m, N);
    compare_real("y", m.acts.output, n * H, H, LAYER);
    if (training) compare_backward(&m, N);
    if (!scene.recording) {
        struct results first = copy_results(&m, N);
        layer_passes(&m, N / 2);
        device_zero(m.acts.output, sizeof(real) * n * H);
        if (training) {
            device_zero(m.acts.d_norm, sizeof(real) * n * H);
            device_zero(m.acts.d_gates, sizeof(accum) * n * (size_t)c.top_k);
            poison_gradients(m.grads, &m.params);
        }
        layer_passes(&m, N);
        compare_again(&m, N, first);
        free_results(first);
    }
    model_close(&m);
}

// Where this build has it.
static void run_layers_mok(void) {
    static const char *const presets_of_layers[] = {"unit", "unit-12", "unit-128"};
    if (!mok_available()) return;
    for (int p = 0; p < 3; p++)
        for (enum load load = 0; load < LOADS && !(scene.tiny && p > 0); load++) {
            case_layer_mok(presets_of_layers[p], 97, load, load % 2 == 0, true, 0);
            case_layer_mok(presets_of_layers[p], 97, load, load % 2 == 1, false, 0);
            if (!scene.small) case_layer_mok(presets_of_layers[p], 512, load, true, true, MOK_BLOCK_ROWS);
        }
    for (int training = 0; training < 2; training++) {
        case_layer_mok("tiny", 1, LOAD_EVEN, true, training, 0);
        case_layer_mok("unit", 0, LOAD_EVEN, true, training, 0);
    }
}

int main(int argc, char **argv) {
    device_start(argv);
    comm_start(&argc, &argv);
    scene_start(argc, argv);
    device_open(0, 1);
    printf("# %s\n", device_name());
    static const char *const presets_of_layers[] = {"unit", "unit-12", "unit-128"};
    for (int p = 0; p < 3; p++)
        for (enum load load = 0; load < LOADS && !(scene.tiny && p > 0); load++) {
            case_layer(presets_of_layers[p], 97, load, load % 2 == 0);
            if (!scene.small) case_layer(presets_of_layers[p], 512, load, true);
        }
    case_layer("tiny", 1, LOAD_EVEN, true);
    case_layer("unit", 0, LOAD_EVEN, true);
    run_layers_mok();
    for (int i = 0; i < CASES; i++) {
        if (i > 0 && (scene.tiny || (scene.small && i % 4 != 0))) continue;
        case_gradients(&cases[i], (struct moe_settings){.kind = MOE_ALLTOALL});
        case_learned(&cases[i]);
        if (mok_available()) run_megakernel(i);
    }
    int code = scene_finish();
    comm_stop();
    return code;
}

// The table of flags comes first; parsing, JSON and help below all read it. The checks between flags stand in between.
#include "model/options.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/fail.h"
#include "kernels/mok.h"
#include "model/plan.h"
#include "model/presets.h"

// ---- the table ----

enum flag_type { FLAG_BOOL, FLAG_INT, FLAG_INT64, FLAG_UINT64, FLAG_DOUBLE, FLAG_TEXT, FLAG_CHOICE };

// May a resumed run have another value?
enum change {
    FREE,  // yes, it is the same run
    FIXED, // it is another run then: only with --override
    SIZE,  // never: the tensors would not fit
    START, // it is no setting of the run, but says how it is started here: what is given now counts
};

struct flag {
    const char *group, *name;
    const char *value;   // stands for the value in the help; NULL: a switch; for a choice, its words in enum order
    enum flag_type type; // of the member at offset in struct options, size bytes long
    size_t offset, size;
    double minimum, maximum; // of a number, both allowed; exact in a double, so below 2^53
    enum change change;      // what it means when this differs in a resumed run
    const char *help;
};

// The type is taken from the member, so the two cannot disagree.
#define MEMBER(member)                                                                                                 \
    _Generic(((struct options *)0)->member,                                                                            \
        bool: FLAG_BOOL,                                                                                               \
        int: FLAG_INT,                                                                                                 \
        int64_t: FLAG_INT64,                                                                                           \
        uint64_t: FLAG_UINT64,                                                                                         \
        double: FLAG_DOUBLE,                                                                                           \
        char *: FLAG_TEXT,                                                                                             \
        enum schedule: FLAG_CHOICE, enum moe_kind: FLAG_CHOICE, enum moe_route: FLAG_CHOICE,                           \
        enum grouped_core: FLAG_CHOICE, enum recompute: FLAG_CHOICE),                                                  \
        offsetof(struct options, member), sizeof(((struct options *)0)->member)

#define MANY  1e12  // a bound that no one meets, and small enough for sums and for a double
#define SMALL 1e-30 // stands for "above zero"

static const char RUN[] = "Run", BATCH[] = "Batch and length", RATE[] = "Optimizer", OUTPUT[] = "Output",
                  RANKS[] = "Ranks and experts", SAMPLE[] = "Sampling", SIZES[] = "Model sizes",
                  EXPERTS[] = "Mixture of experts", POSITIONS[] = "Positions and norms";

// One flag per line reads best wide.
// clang-format off
static const struct flag flags[] = {
    {RUN, "preset", "NAME", MEMBER(preset), 0, 0, FREE, "sizes and settings to start from, one of the list below; other flags change them"},
    {RUN, "data", "SPEC", MEMBER(data), 0, 0, FREE, "\"stories\" (built in), a text file, a token shard, or a glob of token shards"},
    {RUN, "eval-data", "SPEC", MEMBER(eval_data), 0, 0, FREE, "data to evaluate on; else the held-out part of --data"},
    {RUN, "tokenizer", "FILE", MEMBER(tokenizer), 0, 0, FREE, "Hugging Face tokenizer.json, or its folder; else the one of --from or beside the shards, else bytes"},
    {RUN, "from", "DIR", MEMBER(from), 0, 0, FREE, "checkpoint, run folder or Hugging Face folder: train from its weights on, or sample from it"},
    {RUN, "out", "DIR", MEMBER(out), 0, 0, START, "run folder for the log and the checkpoints"},
    {RUN, "resume", NULL, MEMBER(resume), 0, 0, START, "go on from the newest complete checkpoint in --out, with its settings; flags that are given change them"},
    {RUN, "override", NULL, MEMBER(override), 0, 0, START, "let --resume change settings and data that make it another run"},
    {RUN, "overwrite", NULL, MEMBER(overwrite), 0, 0, START, "start anew in an --out that holds a run"},
    {RUN, "evaluate", NULL, MEMBER(evaluate), 0, 0, FREE, "evaluate the weights of --from on held-out data, and on --eval-choices, and stop"},
    {RUN, "device", NULL, MEMBER(device), 0, 0, FREE, "print what this program computes on, and stop"},
    {RUN, "plan", NULL, MEMBER(plan), 0, 0, FREE, "print parameters, memory and work of this run, and stop"},
    {RUN, "help", NULL, MEMBER(help), 0, 0, FREE, "print this, and stop"},

    {BATCH, "steps", "N", MEMBER(steps), 1, MANY, FREE, "optimizer steps"},
    {BATCH, "batch", "N", MEMBER(batch), 1, MANY, FREE, "sequences that a rank has in memory at once (a micro-batch), at most"},
    {BATCH, "seq", "N", MEMBER(seq), 1, MANY, FIXED, "tokens per sequence; with --generate and --evaluate 0, their default: as the checkpoint was trained"},
    {BATCH, "tokens-per-step", "N", MEMBER(tokens_per_step), 0, MANY, FIXED, "tokens per optimizer step of all ranks together, a multiple of --seq; 0: one micro-batch of each rank"},
    {BATCH, "recompute", "none|moe|block", MEMBER(moe.recompute), 0, 0, START, "what a block computes again in backward to save memory: nothing; rows, gates and ups of the routed experts; everything but its input. Results are the same bits"},
    {BATCH, "seed", "N", MEMBER(seed), 0, MANY, FIXED, "of first weights, order of data, and samples"},

    {RATE, "lr", "X", MEMBER(lr), 0, MANY, FIXED, "learning rate at its peak"},
    {RATE, "min-lr", "X", MEMBER(min_lr), 0, MANY, FIXED, "learning rate at the end"},
    {RATE, "schedule", "cosine|linear|wsd|constant", MEMBER(schedule), 0, 0, FIXED, "how the rate falls after the warmup; wsd: constant, then linear in the last --decay-steps"},
    {RATE, "warmup", "N", MEMBER(warmup), 0, MANY, FIXED, "steps in which the rate rises"},
    {RATE, "decay-steps", "N", MEMBER(decay_steps), 0, MANY, FIXED, "steps in which wsd falls; 0: a fifth of --steps"},
    {RATE, "weight-decay", "X", MEMBER(weight_decay), 0, MANY, FIXED, "decoupled, on matrices only"},
    {RATE, "clip", "X", MEMBER(clip), 0, MANY, FIXED, "largest norm of the gradient; 0: off"},
    {RATE, "beta1", "X", MEMBER(beta1), 0, 0.999999, FIXED, "AdamW: memory of the first moment"},
    {RATE, "beta2", "X", MEMBER(beta2), 0, 0.999999, FIXED, "AdamW: memory of the second moment"},
    {RATE, "adam-eps", "X", MEMBER(adam_eps), SMALL, MANY, FIXED, "AdamW: added to the root of the second moment"},

    {RANKS, "ep", "N", MEMBER(ep), 0, MANY, START, "ranks that share one set of experts (an EP group), a divisor of all ranks; 0: the most that one host and the experts allow"},
    {RANKS, "moe", "mok|alltoall", MEMBER(moe.kind), 0, 0, START, "how the ranks of a group exchange tokens: the megakernel (of a build for GPUs only that for Hopper has it), or all-to-all around grouped products"},
    {RANKS, "workers", "N", MEMBER(moe.workers), 0, MANY, START, "mok: workers of a rank: threads, on a GPU thread blocks; 0: as many threads as compute elsewhere, on a GPU one block for each multiprocessor"},
    {RANKS, "comm-workers", "N", MEMBER(moe.comm_workers), 0, MANY, START, "mok: of these, workers that only move rows; 0: each one moves and multiplies"},
    {RANKS, "minibatch-rows", "N", MEMBER(moe.minibatch_rows), 0, MANY, START, "mok: rows of one phase, a multiple of 128; 0: chosen"},
    {RANKS, "ring-rows", "N", MEMBER(moe.ring_rows), 0, MANY, START, "mok: rows in memory at once, a multiple of 128 and of --minibatch-rows; 0: chosen"},
    {RANKS, "alltoall-chunks", "N", MEMBER(moe.alltoall_chunks), 1, MANY, START, "alltoall: pieces of a rank's experts whose exchanges overlap with computing; 1: no overlap"},
    {RANKS, "expert-gemm", "cublaslt|own", MEMBER(moe.expert_gemm), 0, 0, START, "alltoall: what multiplies in the experts, cuBLASLt or this program's own code; a build for CPUs has only its own"},
    {RANKS, "route", "learned|balanced|W1|W2|W3|W4|W5|W6|W7", MEMBER(moe.route), 0, 0, FIXED, "learned: the router chooses; others force a load for benchmarks (W1 to W7 are uneven), and the model learns nothing sensible"},
    {RANKS, "trace", "FILE", MEMBER(trace), 0, 0, START, "write what every worker did when, for Perfetto or chrome://tracing, and print where the time of a step goes"},
    {RANKS, "trace-step", "N", MEMBER(trace_step), 0, MANY, START, "the step that --trace records; 0: the third that is taken, or the last"},
    {RANKS, "trace-layer", "N", MEMBER(trace_layer), 0, MANY, START, "the MoE layer, counted from 0, whose workers --trace records with --moe mok, on a GPU in one micro-batch; 0: on CPUs all MoE layers, on a GPU the first one"},
    {RANKS, "timeout", "X", MEMBER(timeout), SMALL, MANY, START, "seconds that a rank waits for others before the job ends with an error"},
    {RANKS, "ranks", "N", MEMBER(ranks), 0, MANY, START, "with --plan: plan for N ranks, without running them; 0: as many as there are"},
    {RANKS, "memory", "X", MEMBER(memory), 0, 1e9, START, "with --plan: compare a rank with so many GiB, those of one GPU; 0: with what is here"},

    {OUTPUT, "save-every", "N", MEMBER(save_every), 0, MANY, FREE, "steps between checkpoints; 0: never"},
    {OUTPUT, "keep", "N", MEMBER(keep), 0, MANY, FREE, "newest checkpoints that are kept; 0: all"},
    {OUTPUT, "eval-every", "N", MEMBER(eval_every), 0, MANY, FREE, "steps between evaluations; 0: never"},
    {OUTPUT, "eval-sequences", "N", MEMBER(eval_sequences), 1, MANY, FREE, "sequences of one evaluation, or as many as there are"},
    {OUTPUT, "eval-choices", "FILE", MEMBER(eval_choices), 0, 0, FREE, "multiple-choice file (llm.c's format) that evaluations answer too"},
    {OUTPUT, "sample-every", "N", MEMBER(sample_every), 0, MANY, FREE, "steps between samples of text; 0: never"},
    {OUTPUT, "sample-tokens", "N", MEMBER(sample_tokens), 0, MANY, FREE, "length of these samples; 0: none"},
    {OUTPUT, "log-moe-every", "N", MEMBER(log_moe_every), 0, MANY, FREE, "steps between the log's lines on each MoE layer; 0: never"},

    {SAMPLE, "generate", "N", MEMBER(generate), 0, MANY, FREE, "sample N tokens instead of training; 0: train"},
    {SAMPLE, "prompt", "TEXT", MEMBER(prompt), 0, 0, FREE, "text that the sample goes on from"},
    {SAMPLE, "temperature", "X", MEMBER(temperature), 0, 1000, FREE, "divides the logits; 0: always the likeliest token"},
    {SAMPLE, "logits", "FILE", MEMBER(logits), 0, 0, START, "write the ids of the prompt and the logits behind each to a safetensors file, see scripts/check_transformers.py"},

    {SIZES, "vocab", "N", MEMBER(model.vocab), 0, MANY, SIZE, "tokens in the vocabulary; 0: as the data has"},
    {SIZES, "hidden", "N", MEMBER(model.hidden), 1, MANY, SIZE, "width of the residual stream"},
    {SIZES, "layers", "N", MEMBER(model.layers), 1, MANY, SIZE, "layers, dense ones included"},
    {SIZES, "dense-layers", "N", MEMBER(model.dense_layers), 0, MANY, SIZE, "this many first layers have a dense FFN instead of experts"},
    {SIZES, "heads", "N", MEMBER(model.heads), 1, MANY, SIZE, "attention heads"},
    {SIZES, "q-rank", "N", MEMBER(model.q_rank), 0, MANY, SIZE, "width of the compressed queries; 0: not compressed"},
    {SIZES, "kv-rank", "N", MEMBER(model.kv_rank), 1, MANY, SIZE, "width of the compressed keys and values"},
    {SIZES, "nope-dim", "N", MEMBER(model.nope_dim), 1, MANY, SIZE, "part of a query and key head without position"},
    {SIZES, "rope-dim", "N", MEMBER(model.rope_dim), 2, MANY, SIZE, "rotated part of a query and key head, even"},
    {SIZES, "value-dim", "N", MEMBER(model.value_dim), 1, MANY, SIZE, "width of a value head"},
    {SIZES, "intermediate", "N", MEMBER(model.intermediate), 0, MANY, SIZE, "inner width of a dense FFN"},
    {SIZES, "mtp-depth", "N", MEMBER(model.mtp_depth), 0, MTP_MAX, SIZE, "modules that predict a further token; 0: none"},
    {SIZES, "mtp-weight", "X", MEMBER(model.mtp_weight), 0, MANY, FIXED, "weight of their loss"},
    {SIZES, "init-std", "X", MEMBER(model.init_std), 0, MANY, FIXED, "standard deviation of the first matrices"},

    {EXPERTS, "expert-intermediate", "N", MEMBER(model.expert_intermediate), 0, MANY, SIZE, "inner width of an expert"},
    {EXPERTS, "experts", "N", MEMBER(model.experts), 0, MANY, SIZE, "routed experts in a layer"},
    {EXPERTS, "shared-experts", "N", MEMBER(model.shared_experts), 0, MANY, SIZE, "experts that every token uses"},
    {EXPERTS, "top-k", "N", MEMBER(model.top_k), 0, MANY, FIXED, "routed experts that a token uses"},
    {EXPERTS, "groups", "N", MEMBER(model.groups), 0, MANY, FIXED, "groups of experts; 1: selection is not limited"},
    {EXPERTS, "top-groups", "N", MEMBER(model.top_groups), 0, MANY, FIXED, "groups that a token may choose from"},
    {EXPERTS, "normalize-gates", "true|false", MEMBER(model.normalize_gates), 0, 0, FIXED, "divide the selected scores by their sum"},
    {EXPERTS, "route-scale", "X", MEMBER(model.route_scale), SMALL, MANY, FIXED, "factor of the gates"},
    {EXPERTS, "balance-alpha", "X", MEMBER(model.balance_alpha), 0, MANY, FIXED, "weight of the sequence balance loss"},
    {EXPERTS, "bias-rate", "X", MEMBER(model.bias_rate), 0, MANY, FIXED, "step of the selection bias"},

    {POSITIONS, "max-positions", "N", MEMBER(model.max_positions), 1, MANY, FIXED, "longest sequence that the model is meant for"},
    {POSITIONS, "rms-eps", "X", MEMBER(model.rms_eps), SMALL, MANY, FIXED, "added to the mean square in norms"},
    {POSITIONS, "rope-theta", "X", MEMBER(model.rope_theta), SMALL, MANY, FIXED, "base of the rotation's frequencies"},
    {POSITIONS, "yarn-factor", "X", MEMBER(model.yarn.factor), 0, MANY, FIXED, "YaRN: how many times longer sequences become; 0: off"},
    {POSITIONS, "yarn-original-length", "N", MEMBER(model.yarn.original_length), 1, MANY, FIXED, "YaRN: length before"},
    {POSITIONS, "yarn-beta-fast", "X", MEMBER(model.yarn.beta_fast), 0, MANY, FIXED, "YaRN: pairs with more turns than this stay as they are"},
    {POSITIONS, "yarn-beta-slow", "X", MEMBER(model.yarn.beta_slow), 0, MANY, FIXED, "YaRN: pairs with fewer turns than this are stretched"},
    {POSITIONS, "yarn-mscale", "X", MEMBER(model.yarn.mscale), 0, MANY, FIXED, "YaRN: growth of cosines and sines"},
    {POSITIONS, "yarn-mscale-all-dim", "X", MEMBER(model.yarn.mscale_all_dim), 0, MANY, FIXED, "YaRN: growth of the attention scores"},
};
// clang-format on

enum { FLAGS = sizeof flags / sizeof *flags };

static const struct flag *flag_find(const char *name, size_t length) {
    for (int i = 0; i < FLAGS; i++)
        if (strlen(flags[i].name) == length && memcmp(flags[i].name, name, length) == 0) return &flags[i];
    return NULL;
}

static double flag_maximum(const struct flag *f) {
    return f->type == FLAG_INT && f->maximum > INT_MAX ? INT_MAX : f->maximum;
}

// Every 64-bit seed is allowed, and no bound is worth printing that only the type sets.
static bool flag_has_maximum(const struct flag *f) { return f->type != FLAG_UINT64 && f->maximum < MANY; }

// Writes ">=1", ">0" or "0..1000".
static void flag_range(const struct flag *f, char *text, size_t size) {
    if (flag_has_maximum(f))
        snprintf(text, size, "%.15g..%.15g", f->minimum, f->maximum);
    else if (f->minimum == SMALL)
        snprintf(text, size, ">0");
    else
        snprintf(text, size, ">=%.15g", f->minimum);
}

// ---- one flag's value from text and to text ----

static bool set_integer(const struct flag *f, void *member, const char *text) {
    const char *digits = *text == '-' ? text + 1 : text;
    if (*digits < '0' || *digits > '9') return false; // strtoll would skip spaces and take a plus sign
    char *end;
    errno = 0;
    if (f->type == FLAG_UINT64) {
        uint64_t value = strtoull(text, &end, 10);
        if (*text == '-' || *end || errno) return false;
        *(uint64_t *)member = value;
        return true;
    }
    int64_t value = strtoll(text, &end, 10);
    if (*end || errno || value < f->minimum || value > flag_maximum(f)) return false;
    if (f->type == FLAG_INT)
        *(int *)member = (int)value;
    else
        *(int64_t *)member = value;
    return true;
}

static bool set_double(const struct flag *f, double *member, const char *text) {
    // Decimal digits only: strtod would take spaces, "nan", "inf" and hexadecimal too.
    if (!*text || text[strspn(text, "0123456789+-.eE")] || *text == '+') return false;
    char *end;
    errno = 0;
    double value = strtod(text, &end);
    if (*end || errno || value < f->minimum || value > f->maximum) return false;
    *member = value;
    return true;
}

// Index of text among words separated by "|", or -1.
static int word_find(const char *words, const char *text) {
    size_t length = strlen(text);
    for (int index = 0;; index++) {
        size_t word = strcspn(words, "|");
        if (word == length && memcmp(words, text, length) == 0) return index;
        if (!words[word]) return -1;
        words += word + 1;
    }
}

// Sets the flag's member of o; false if the text does not say a value in range.
static bool flag_set(const struct flag *f, struct options *o, const char *text) {
    void *member = (char *)o + f->offset;
    int word;
    switch (f->type) {
    case FLAG_BOOL:
        word = word_find("true|false", text);
        if (word < 0) return false;
        *(bool *)member = word == 0;
        return true;
    case FLAG_CHOICE:
        word = word_find(f->value, text);
        if (word < 0) return false;
        *(unsigned *)member = (unsigned)word; // what gcc and clang make of an enum
        return true;
    case FLAG_TEXT:
        if (strlen(text) >= f->size) return false;
        memset(member, 0, f->size); // equal options are equal bytes
        memcpy(member, text, strlen(text));
        return true;
    case FLAG_DOUBLE:
        return set_double(f, member, text);
    default:
        return set_integer(f, member, text);
    }
}

// What flag_set would have taken, for messages. A static line.
static const char *flag_wanted(const struct flag *f) {
    static char wanted[128];
    char range[64];
    flag_range(f, range, sizeof range);
    switch (f->type) {
    case FLAG_BOOL:
        return "true or false";
    case FLAG_CHOICE:
        snprintf(wanted, sizeof wanted, "one of %s", f->value);
        break;
    case FLAG_TEXT:
        snprintf(wanted, sizeof wanted, "1 to %zu bytes", f->size - 1);
        break;
    case FLAG_UINT64:
        return "a whole number from 0 to 18446744073709551615";
    case FLAG_DOUBLE:
        snprintf(wanted, sizeof wanted, "a number %s", range);
        break;
    case FLAG_INT:
    case FLAG_INT64:
        snprintf(wanted, sizeof wanted, "a whole number from %.0f to %.0f", f->minimum, flag_maximum(f));
        break;
    }
    return wanted;
}

// The text that flag_set would turn into the same value; text holds OPTION_TEXT bytes and is returned.
static const char *flag_text(const struct flag *f, const struct options *o, char *text) {
    const void *member = (const char *)o + f->offset;
    switch (f->type) {
    case FLAG_BOOL:
        snprintf(text, OPTION_TEXT, "%s", *(const bool *)member ? "true" : "false");
        break;
    case FLAG_INT:
        snprintf(text, OPTION_TEXT, "%d", *(const int *)member);
        break;
    case FLAG_INT64:
        snprintf(text, OPTION_TEXT, "%" PRId64, *(const int64_t *)member);
        break;
    case FLAG_UINT64:
        snprintf(text, OPTION_TEXT, "%" PRIu64, *(const uint64_t *)member);
        break;
    case FLAG_TEXT:
        snprintf(text, OPTION_TEXT, "%s", (const char *)member);
        break;
    case FLAG_DOUBLE: // as few digits as give the same number again
        for (int digits = 6; digits <= 17; digits++) {
            snprintf(text, OPTION_TEXT, "%.*g", digits, *(const double *)member);
            if (strtod(text, NULL) == *(const double *)member) break;
        }
        break;
    case FLAG_CHOICE: {
        const char *word = f->value;
        for (unsigned i = *(const unsigned *)member; i > 0; i--) word = strchr(word, '|') + 1;
        snprintf(text, OPTION_TEXT, "%.*s", (int)strcspn(word, "|"), word);
    }
    }
    return text;
}

// ---- defaults and checks between flags ----

bool options_set_preset(struct options *o, const char *name) {
    const struct preset *p = preset_find(name);
    if (!p) return false;
    *o = (struct options){
        .model = p->model,
        .batch = p->batch,
        .seq = p->seq,
        .tokens_per_step = p->tokens_per_step,
        .steps = p->steps,
        .seed = 1337,
        .moe = {.kind = mok_available() ? MOE_MOK : MOE_ALLTOALL,
                .alltoall_chunks = 1,
                .expert_gemm = grouped_matmul_available(GROUPED_CUBLASLT) ? GROUPED_CUBLASLT : GROUPED_OWN},
        .timeout = 300,
        .lr = p->lr,
        .min_lr = p->min_lr,
        .schedule = SCHEDULE_COSINE,
        .warmup = p->warmup,
        .weight_decay = 0.1,
        .clip = 1,
        .beta1 = 0.9,
        .beta2 = 0.95,
        .adam_eps = 1e-8,
        .save_every = p->save_every,
        .eval_every = p->eval_every,
        .sample_every = p->sample_every,
        .log_moe_every = 100,
        .eval_sequences = 64,
        .keep = 3,
        .sample_tokens = p->sample_tokens,
        .temperature = 0.8,
    };
    snprintf(o->preset, sizeof o->preset, "%s", name);
    snprintf(o->data, sizeof o->data, "stories");
    snprintf(o->out, sizeof o->out, "runs/%s", name);
    return true;
}

int64_t options_decay_steps(const struct options *o) {
    int64_t steps = o->decay_steps ? o->decay_steps : (o->steps + 4) / 5;
    return steps < o->steps - o->warmup ? steps : o->steps - o->warmup;
}

// Settles tokens_per_step too.
static void settle_batch(struct options *o, int ranks) {
    int64_t micro = (int64_t)o->batch * o->seq, routes, all;
    if (micro > INT_MAX)
        fail_user("--batch", "found %d with --seq %d, wanted a product of at most %d tokens", o->batch, o->seq,
                  INT_MAX);
    if (__builtin_mul_overflow(micro, (int64_t)o->model.top_k, &routes) || routes > INT_MAX)
        fail_user("--batch", "found %d with --seq %d and --top-k %d, wanted a product of at most %d routes", o->batch,
                  o->seq, o->model.top_k, INT_MAX);
    if (o->seq > o->model.max_positions)
        fail_user("--seq", "found %d, wanted at most --max-positions %d", o->seq, o->model.max_positions);
    if (!o->tokens_per_step) o->tokens_per_step = micro * ranks; // both factors below 2^31
    int64_t tokens = o->tokens_per_step;
    if (tokens % o->seq) {
        int64_t below = tokens / o->seq * o->seq;
        char nearest[64];
        if (below)
            snprintf(nearest, sizeof nearest, "%" PRId64 " or %" PRId64, below, below + o->seq);
        else
            snprintf(nearest, sizeof nearest, "%d", o->seq);
        fail_user("--tokens-per-step", "found %" PRId64 ", wanted a multiple of --seq %d; the nearest is %s", tokens,
                  o->seq, nearest);
    }
    if (tokens / o->seq > INT_MAX)
        fail_user("--tokens-per-step", "found %" PRId64 " with --seq %d, wanted at most %d sequences", tokens, o->seq,
                  INT_MAX);
    if (__builtin_mul_overflow(tokens, o->steps, &all))
        fail_user("--steps", "found %" PRId64 " of %" PRId64 " tokens each, wanted fewer than 2^63 tokens in all",
                  o->steps, tokens);
}

// What only another build has.
static void check_build(const struct options *o) {
    if (o->moe.kind == MOE_MOK && !mok_available())
        fail_user("--moe", "found mok, which this build for GPUs does not have (that for Hopper does); use --moe "
                           "alltoall");
    if (grouped_matmul_available(o->moe.expert_gemm)) return;
    bool own = o->moe.expert_gemm == GROUPED_OWN;
    fail_user("--expert-gemm", "found %s, which this build for %s does not have; use --expert-gemm %s",
              own ? "own" : "cublaslt", own ? "GPUs" : "CPUs", own ? "cublaslt" : "own");
}

static void check_rows(const char *flag, int rows) {
    enum { BLOCK = 128 };
    int below = rows / BLOCK * BLOCK;
    if (rows % BLOCK)
        fail_user(flag, "found %d, wanted a multiple of %d; the nearest is %d", rows, BLOCK, below ? below : BLOCK);
}

static void check_trace_layer(const struct options *o) {
    int first = o->model.dense_layers, last = config_blocks(&o->model) - 1;
    if (!o->trace_layer || (o->trace_layer >= first && o->trace_layer <= last)) return;
    if (first > last) fail_user("--trace-layer", "found %d, but no layer of this model has experts", o->trace_layer);
    fail_user("--trace-layer", "found %d, wanted a layer with experts: %d to %d", o->trace_layer, first, last);
}

static void check_layout(const struct options *o) {
    const struct moe_settings *moe = &o->moe;
    check_rows("--minibatch-rows", moe->minibatch_rows);
    check_rows("--ring-rows", moe->ring_rows);
    if (moe->minibatch_rows && moe->ring_rows % moe->minibatch_rows)
        fail_user("--ring-rows", "found %d, wanted a multiple of --minibatch-rows %d", moe->ring_rows,
                  moe->minibatch_rows);
    if (moe->workers && moe->comm_workers >= moe->workers)
        fail_user("--comm-workers", "found %d, wanted fewer than --workers %d: some must multiply", moe->comm_workers,
                  moe->workers);
    if (moe->route != ROUTE_LEARNED)
        fail_warn("--route", "routing is forced: the numbers of this run are for benchmarks, and the model learns "
                             "nothing sensible");
}

// Flags of the MoE layer that is not chosen.
static void warn_of_idle_flags(const struct options *o) {
    const struct moe_settings *moe = &o->moe;
    bool of_mok = moe->workers || moe->comm_workers || moe->minibatch_rows || moe->ring_rows;
    if (moe->kind == MOE_MOK && moe->alltoall_chunks > 1)
        fail_warn("--alltoall-chunks", "found %d with --moe mok, which exchanges nothing in pieces; it changes nothing",
                  moe->alltoall_chunks);
    if (moe->kind == MOE_ALLTOALL && of_mok)
        fail_warn("--moe", "found alltoall with --workers, --comm-workers, --minibatch-rows or --ring-rows, which are "
                           "for --moe mok; they change nothing");
    if (moe->kind == MOE_ALLTOALL && o->trace_layer)
        fail_warn("--trace-layer", "found %d with --moe alltoall, which has no workers to record; it changes nothing",
                  o->trace_layer);
}

static void check_rate(const struct options *o) {
    if (o->warmup > o->steps)
        fail_user("--warmup", "found %" PRId64 ", wanted at most --steps %" PRId64, o->warmup, o->steps);
    if (o->min_lr > o->lr) fail_user("--min-lr", "found %g, wanted at most --lr %g", o->min_lr, o->lr);
    if (o->schedule == SCHEDULE_WSD && o->decay_steps > o->steps - o->warmup)
        fail_user("--decay-steps", "found %" PRId64 ", wanted at most --steps %" PRId64 " less --warmup %" PRId64,
                  o->decay_steps, o->steps, o->warmup);
}

static void check_modes(const struct options *o, bool prompt_given, bool temperature_given, bool logits_given) {
    if (o->resume && o->overwrite)
        fail_user("--resume", "found beside --overwrite, wanted one of them: go on with the run, or start it anew");
    if (o->resume && o->plan)
        fail_user("--plan", "found beside --resume, wanted the flags of a new run: a run that exists has printed its "
                            "plan and kept its settings in config.json");
    if (o->ranks && !o->plan)
        fail_user("--ranks", "found without --plan, wanted both: mpirun -n %d starts a run on %d ranks", o->ranks,
                  o->ranks);
    if (o->memory > 0 && !o->plan)
        fail_user("--memory", "found without --plan, wanted both: a run takes what it needs, which --plan says");
    if (o->trace_step && !o->trace[0])
        fail_user("--trace-step", "found without --trace, wanted --trace FILE: where to write what is recorded");
    if (o->trace_layer && !o->trace[0])
        fail_user("--trace-layer", "found without --trace, wanted --trace FILE: where to write what is recorded");
    if (o->override && !o->resume)
        fail_user("--override", "found without --resume, wanted both: it lets a run go on with other settings");
    if (o->generate && o->evaluate) fail_user("--generate", "found beside --evaluate, wanted one of them");
    const char *weights = o->generate ? "--generate" : o->evaluate ? "--evaluate" : NULL;
    if (weights && !o->from[0]) fail_user(weights, "found without --from, wanted --from DIR: whose weights to use");
    const char *alone = prompt_given        ? "--prompt"
                        : temperature_given ? "--temperature"
                        : logits_given      ? "--logits"
                                            : NULL;
    if (!o->generate && alone)
        fail_user(alone, "found without --generate, wanted --generate N: it matters for sampling only");
}

// Sampling and evaluating read their model from a checkpoint: the settings of a run would be ignored.
static void check_no_settings(const char *const values[], const char *mode, const char *const *allowed) {
    char list[512] = "";
    for (const char *const *a = allowed; *a; a++)
        snprintf(list + strlen(list), sizeof list - strlen(list), "%s--%s", a == allowed ? "" : ", ", *a);
    for (int i = 0; i < FLAGS; i++) {
        bool fits = !values[i] || strcmp(flags[i].name, mode) == 0;
        for (const char *const *a = allowed; *a; a++) fits = fits || strcmp(flags[i].name, *a) == 0;
        if (fits) continue;
        char place[64];
        snprintf(place, sizeof place, "--%s", flags[i].name);
        fail_user(place, "found beside --%s, wanted no flags but %s", mode, list);
    }
}

static const char *const beside_generate[] = {"from",           "prompt",    "temperature", "logits",  "tokenizer",
                                              "seed",           "seq",       "moe",         "workers", "comm-workers",
                                              "minibatch-rows", "ring-rows", "expert-gemm", NULL};
static const char *const beside_evaluate[] = {"from",
                                              "data",
                                              "eval-data",
                                              "eval-sequences",
                                              "eval-choices",
                                              "tokenizer",
                                              "batch",
                                              "seq",
                                              "seed",
                                              "ep",
                                              "moe",
                                              "workers",
                                              "comm-workers",
                                              "minibatch-rows",
                                              "ring-rows",
                                              "alltoall-chunks",
                                              "expert-gemm",
                                              "timeout",
                                              NULL};

// ---- the command line ----

// Edit distance between name and a flag's name; both shorter than 64.
static int distance(const char *a, size_t a_length, const char *b) {
    int row[64];
    size_t b_length = strlen(b);
    for (size_t j = 0; j <= b_length; j++) row[j] = (int)j;
    for (size_t i = 1; i <= a_length; i++) {
        int diagonal = row[0];
        row[0] = (int)i;
        for (size_t j = 1; j <= b_length; j++) {
            int best = diagonal + (a[i - 1] != b[j - 1]);
            if (row[j] + 1 < best) best = row[j] + 1;
            if (row[j - 1] + 1 < best) best = row[j - 1] + 1;
            diagonal = row[j];
            row[j] = best;
        }
    }
    return row[b_length];
}

static _Noreturn void fail_unknown(const char *argument) {
    const char *name = argument + strspn(argument, "-"), *nearest = NULL;
    size_t length = strcspn(name, "=");
    int best = (int)length / 3 + 1; // farther names would be guesses
    for (int i = 0; i < FLAGS && length > 1 && length < 64; i++) {
        int d = distance(name, length, flags[i].name);
        if (d < best || (d == best && !nearest)) {
            best = d;
            nearest = flags[i].name;
        }
    }
    int shown = (int)strcspn(argument, "=");
    if (nearest)
        fail_user("command line", "found unknown flag %.*s, wanted perhaps --%s; --help lists all flags", shown,
                  argument, nearest);
    fail_user("command line", "found unknown flag %.*s, wanted one that --help lists", shown, argument);
}

// Splits the arguments into one text per flag, NULL where the flag is not given.
static void collect(const char *values[FLAGS], int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        const char *argument = argv[i], *equals = strchr(argument, '=');
        if (argument[0] != '-')
            fail_user("command line", "found '%s' where a flag should be, wanted --flag value; --help lists the flags",
                      argument);
        size_t length = equals ? (size_t)(equals - argument) : strlen(argument);
        const struct flag *f = length > 2 && argument[1] == '-' ? flag_find(argument + 2, length - 2) : NULL;
        if (!f) fail_unknown(argument);

        char place[64];
        snprintf(place, sizeof place, "--%s", f->name);
        const char **value = &values[f - flags];
        if (*value) fail_user(place, "found twice, wanted once");
        if (!f->value) {
            if (equals) fail_user(place, "found value '%s', wanted none: it is a switch", equals + 1);
            *value = "true";
            continue;
        }
        if (equals)
            *value = equals + 1;
        else if (i + 1 < argc && strncmp(argv[i + 1], "--", 2) != 0)
            *value = argv[++i];
        else
            fail_user(place, "found no value, wanted %s (one that begins with -- is given as %s=VALUE)", flag_wanted(f),
                      place);
        if (!**value) fail_user(place, "found an empty value, wanted %s", flag_wanted(f));
    }
}

static const char *value_given(const char *const values[FLAGS], const char *name) {
    return values[flag_find(name, strlen(name)) - flags];
}

// Sets every flag that is given, but for the preset, which says where the others start.
static void set_given(struct options *o, const char *const values[FLAGS]) {
    for (int i = 0; i < FLAGS; i++) {
        if (!values[i] || strcmp(flags[i].name, "preset") == 0 || flag_set(&flags[i], o, values[i])) continue;
        char place[64];
        snprintf(place, sizeof place, "--%s", flags[i].name);
        fail_user(place, "found '%s', wanted %s", values[i], flag_wanted(&flags[i]));
    }
}

static void start_from_preset(struct options *o, const char *name) {
    if (options_set_preset(o, name)) return;
    char names[512] = "";
    for (int i = 0; i < preset_count; i++)
        snprintf(names + strlen(names), sizeof names - strlen(names), "%s%s", i ? ", " : "", presets[i].name);
    fail_user("--preset", "found '%s', wanted one of %s", name, names);
}

void options_parse(struct options *o, int argc, char **argv) {
    options_set_preset(o, "tiny");
    for (int i = 1; i < argc; i++)
        if (strcmp(argv[i], "--help") == 0) {
            o->help = true;
            return;
        }
    const char *values[FLAGS] = {0};
    collect(values, argc, argv);
    if (value_given(values, "preset")) start_from_preset(o, value_given(values, "preset"));
    set_given(o, values);
    if ((o->generate || o->evaluate) && !value_given(values, "seq")) o->seq = 0;
    check_modes(o, value_given(values, "prompt"), value_given(values, "temperature"), value_given(values, "logits"));
    check_build(o);
    warn_of_idle_flags(o);
    if (o->generate) check_no_settings(values, "generate", beside_generate);
    if (o->evaluate) check_no_settings(values, "evaluate", beside_evaluate);
    if (o->generate || o->evaluate) check_layout(o);
}

void options_settle(struct options *o, int ranks, int argc, char **argv) {
    const char *values[FLAGS] = {0};
    collect(values, argc, argv);
    if (!value_given(values, "warmup") && o->warmup > o->steps) o->warmup = o->steps;
    if (!value_given(values, "min-lr") && o->min_lr > o->lr) o->min_lr = o->lr;
    settle_batch(o, ranks);
    check_rate(o);
    check_trace_layer(o);
    check_layout(o);
}

void options_take_model(struct options *o, const struct config *found, const char *folder, int argc, char **argv) {
    const char *values[FLAGS] = {0};
    collect(values, argc, argv);
    struct options theirs = *o;
    theirs.model = *found;
    *o = theirs;
    set_given(o, values);
    for (int i = 0; i < FLAGS; i++) {
        char there[OPTION_TEXT], here[OPTION_TEXT], place[64];
        const struct flag *f = &flags[i];
        if (strcmp(flag_text(f, &theirs, there), flag_text(f, o, here)) == 0) continue;
        bool fewer_modules = strcmp(f->name, "mtp-depth") == 0 && o->model.mtp_depth < found->mtp_depth;
        snprintf(place, sizeof place, "--%s", f->name);
        if (f->change == SIZE && !fewer_modules)
            fail_user(place, "found %s, wanted %s, the size of the model in %s; leave the flag out", here, there,
                      folder);
        printf("%s: %s in %s, %s now\n", place, there, folder, here);
    }
}

static void read_saved(struct options *o, const struct cJSON *saved, const char *folder) {
    options_set_preset(o, "tiny");
    const char *wrong = options_from_json(o, saved);
    if (wrong)
        fail_user(folder, "found settings that this program does not know: %s; use the program that saved it", wrong);
}

void options_take_data(struct options *o, const struct cJSON *saved, const char *folder, int argc, char **argv) {
    const char *values[FLAGS] = {0};
    collect(values, argc, argv);
    bool data = value_given(values, "data"), eval_data = value_given(values, "eval-data");
    if (!saved && !data)
        fail_user("--data", "found none, wanted --data SPEC: nothing in %s says what it was trained on", folder);
    if (!saved) return;
    struct options theirs;
    read_saved(&theirs, saved, folder);
    if (!value_given(values, "seed")) o->seed = theirs.seed;
    if (data) return;
    snprintf(o->data, sizeof o->data, "%s", theirs.data);
    if (!eval_data) snprintf(o->eval_data, sizeof o->eval_data, "%s", theirs.eval_data);
}

// What is given now, or the default, where a saved run has no say.
static void take_start(struct options *o, const struct options *given) {
    for (int i = 0; i < FLAGS; i++)
        if (flags[i].change == START)
            memcpy((char *)o + flags[i].offset, (const char *)given + flags[i].offset, flags[i].size);
}

void options_resume(struct options *o, const struct cJSON *saved, const char *folder, int ranks, int argc,
                    char **argv) {
    const char *values[FLAGS] = {0};
    collect(values, argc, argv);
    struct options before, now;
    read_saved(&before, saved, folder);
    take_start(&before, o);
    if (!before.tokens_per_step) before.tokens_per_step = (int64_t)before.batch * before.seq; // of one rank
    const char *preset = value_given(values, "preset");
    if (preset && strcmp(preset, before.preset) != 0)
        fail_user("--preset", "found %s, wanted %s as in %s; leave it out", preset, before.preset, folder);
    now = before;
    set_given(&now, values);
    settle_batch(&now, ranks);
    check_rate(&now);
    check_trace_layer(&now);
    check_layout(&now);
    printf("going on with the settings saved in %s\n", folder);
    const char *changed = options_compare(stdout, &before, &now, now.override);
    if (changed) {
        char place[64];
        snprintf(place, sizeof place, "--%s", changed);
        bool size = flag_find(changed, strlen(changed))->change == SIZE;
        fail_user(place,
                  "found another value than in %s, wanted the same; leave the flag out, %s start a new run with "
                  "another --out",
                  folder, size ? "or" : "change it all the same with --override, or");
    }
    *o = now;
}

// ---- JSON ----

struct cJSON *options_to_json(const struct options *o) {
    cJSON *json = cJSON_CreateObject();
    for (int i = 0; i < FLAGS; i++) {
        const struct flag *f = &flags[i];
        char text[OPTION_TEXT];
        flag_text(f, o, text);
        bool beyond_double = f->type == FLAG_UINT64 && strtoull(text, NULL, 10) > 1ull << 53;
        cJSON *item;
        if (f->type == FLAG_BOOL)
            item = cJSON_CreateBool(text[0] == 't');
        else if (f->type == FLAG_TEXT || f->type == FLAG_CHOICE || beyond_double)
            item = cJSON_CreateString(text);
        else
            item = cJSON_CreateRaw(text); // cJSON's own numbers print 15 digits only
        if (!json || !item || !cJSON_AddItemToObject(json, f->name, item))
            fail_internal("options", "no memory for JSON");
    }
    return json;
}

struct cJSON *options_run_to_json(const struct options *o) {
    cJSON *json = options_to_json(o);
    for (int i = 0; i < FLAGS; i++)
        if (flags[i].change == START) cJSON_DeleteItemFromObjectCaseSensitive(json, flags[i].name);
    cJSON_DeleteItemFromObjectCaseSensitive(json, "from");
    return json;
}

// The member as the text that flag_set reads, or NULL if it has the wrong type. number: room for a number's text.
static const char *json_text(const struct flag *f, const cJSON *item, char number[32]) {
    if (f->type == FLAG_BOOL) return cJSON_IsBool(item) ? (cJSON_IsTrue(item) ? "true" : "false") : NULL;
    if (f->type == FLAG_TEXT || f->type == FLAG_CHOICE) return cJSON_IsString(item) ? item->valuestring : NULL;
    if (cJSON_IsRaw(item) || (f->type == FLAG_UINT64 && cJSON_IsString(item))) return item->valuestring;
    if (!cJSON_IsNumber(item)) return NULL;
    snprintf(number, 32, "%.17g", item->valuedouble);
    return number;
}

const char *options_from_json(struct options *o, const struct cJSON *json) {
    static char wrong[256];
    if (!cJSON_IsObject(json)) return "not a JSON object";
    struct options result = *o;
    const cJSON *item;
    cJSON_ArrayForEach(item, json) {
        const char *name = item->string;
        const struct flag *f = flag_find(name, strlen(name));
        char number[32];
        const char *text = f ? json_text(f, item, number) : NULL;
        if (!f)
            snprintf(wrong, sizeof wrong, "unknown member \"%.64s\"", name);
        else if (cJSON_GetObjectItemCaseSensitive(json, name) != item)
            snprintf(wrong, sizeof wrong, "member \"%s\" stands there twice", name);
        else if (!text || !flag_set(f, &result, text))
            snprintf(wrong, sizeof wrong, "member \"%s\" is not %s", name, flag_wanted(f));
        else
            continue;
        return wrong;
    }
    *o = result;
    return NULL;
}

const char *options_compare(FILE *file, const struct options *before, const struct options *now, bool override) {
    const char *refused = NULL;
    for (int i = 0; i < FLAGS; i++) {
        const struct flag *f = &flags[i];
        char old[OPTION_TEXT], new[OPTION_TEXT];
        if (!f->value) continue; // switches say what to do, not what the run is
        if (strcmp(flag_text(f, before, old), flag_text(f, now, new)) == 0) continue;
        fprintf(file, "--%s: %s before, %s now\n", f->name, old, new);
        bool allowed = f->change == FREE || f->change == START || (f->change == FIXED && override);
        if (!allowed && !refused) refused = f->name;
    }
    return refused;
}

// ---- help ----

enum { HELP_INDENT = 32, HELP_WIDTH = 100 };

// Prints text from column on, each further line indented by HELP_INDENT.
static void print_wrapped(FILE *file, const char *text, int column) {
    if (column >= HELP_INDENT) {
        fputc('\n', file);
        column = 0;
    }
    fprintf(file, "%*s", HELP_INDENT - column, "");
    column = HELP_INDENT;
    while (*text) {
        int word = (int)strcspn(text, " ");
        if (column > HELP_INDENT && column + 1 + word > HELP_WIDTH) {
            fprintf(file, "\n%*s", HELP_INDENT, "");
            column = HELP_INDENT;
        }
        if (column > HELP_INDENT) column += fprintf(file, " ");
        column += fprintf(file, "%.*s", word, text);
        text += word + (text[word] == ' ');
    }
    fputc('\n', file);
}

static void print_flag(FILE *file, const struct flag *f, const struct options *defaults) {
    char text[2 * OPTION_TEXT], value[OPTION_TEXT], range[64];
    flag_text(f, defaults, value);
    flag_range(f, range, sizeof range);
    bool number = f->type != FLAG_BOOL && f->type != FLAG_CHOICE && f->type != FLAG_TEXT;
    if (!f->value || !value[0])
        snprintf(text, sizeof text, "%s", f->help);
    else
        snprintf(text, sizeof text, "%s [%s%s%s]", f->help, value, number ? "; " : "", number ? range : "");
    int column = fprintf(file, "  --%s%s%s", f->name, f->value ? " " : "", f->value ? f->value : "");
    print_wrapped(file, text, column);
}

static void print_presets(FILE *file) {
    fprintf(file, "\nPresets (parameters with a vocabulary of 257 bytes where the data decides)\n");
    fprintf(file, "  %-16s%9s%9s  purpose\n", "name", "all", "active");
    for (int i = 0; i < preset_count; i++) {
        struct config c = presets[i].model;
        if (!c.vocab) c.vocab = 257;
        struct plan plan;
        plan_count(&plan, &c);
        char all[16], active[16];
        fprintf(file, "  %-16s%9s%9s  %s\n", presets[i].name, plan_format_count(all, plan.total + plan.mtp),
                plan_format_count(active, plan.active), presets[i].purpose);
    }
}

void options_print_help(FILE *file) {
    struct options defaults;
    options_set_preset(&defaults, "tiny");
    fprintf(file, "usage: train [--flag VALUE | --flag=VALUE | --switch] ...\n"
                  "In brackets: the value of --preset tiny, which is the default preset, then the range.\n");
    const char *group = NULL;
    for (int i = 0; i < FLAGS; i++) {
        if (flags[i].group != group) {
            group = flags[i].group;
            fprintf(file, "\n%s\n", group);
        }
        print_flag(file, &flags[i], &defaults);
    }
    print_presets(file);
}

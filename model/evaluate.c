#include "model/evaluate.h"

#include <math.h>
#include <stdlib.h>

#include "data/progress.h"
#include "kernels/fail.h"
#include "kernels/stop.h"
#include "model/share.h"

// ---- held-out text ----

// Bytes of text that the targets of a micro-batch stand for.
static int64_t count_bytes(const struct tokenizer *tokenizer, struct batch batch, size_t columns) {
    int64_t bytes = 0;
    for (size_t b = 0; b < (size_t)batch.B; b++)
        for (size_t t = 1; t <= (size_t)batch.T; t++) {
            int32_t target = batch.tokens[b * columns + t];
            if (target >= 0) bytes += (int64_t)tokenizer_token_bytes(tokenizer, target);
        }
    return bytes;
}

// Sequences of the eval split that there are, `wanted` at most. A second reading of some would weigh them twice.
static int count_sequences(const struct data *d, int wanted) {
    uint64_t windows = data_windows(d, DATA_EVAL); // 0: without end
    return windows > 0 && windows < (uint64_t)wanted ? (int)windows : wanted;
}

static void sum_over_ranks(const struct model *m, struct evaluation *e, double *nats) {
    comm_sum_double(m->parallel->world, nats, 1);
    comm_sum_int64(m->parallel->world, &e->targets, 1);
    comm_sum_int64(m->parallel->world, &e->bytes, 1);
}

struct evaluation evaluate_heldout(struct model *m, const struct data *d, const struct tokenizer *tokenizer, int batch,
                                   int seq, int sequences) {
    size_t columns = (size_t)seq + 1 + (size_t)m->config.mtp_depth;
    int32_t *tokens = malloc(sizeof *tokens * (size_t)batch * columns);
    if (!tokens) fail_internal("evaluation", "found no memory for %d x %zu tokens", batch, columns);
    struct evaluation e = {0};
    struct step_totals totals = {0};
    double nats = 0;
    struct share share = share_of(count_sequences(d, sequences), m->parallel, batch);
    for (int64_t round = 0; round < share.rounds; round++) {
        if ((e.stopped = stop_agree(m->parallel->world) != 0)) break;
        struct batch micro = {tokens, share_round(&share, round, batch), seq, share.first + round * batch};
        for (int b = 0; b < micro.B; b++)
            data_read_or_fail(d, DATA_EVAL, (uint64_t)micro.first + (uint64_t)b, tokens + (size_t)b * columns);
        model_add_totals(&totals, &m->config, micro);
        nats += model_evaluate(m, micro).cross_entropy[0];
        if (tokenizer) e.bytes += count_bytes(tokenizer, micro, columns);
    }
    free(tokens);
    e.targets = totals.targets[0];
    sum_over_ranks(m, &e, &nats);
    e.loss = nats / (double)e.targets;
    e.bits_per_byte = e.bytes > 0 ? nats / log(2) / (double)e.bytes : NAN;
    return e;
}

// ---- multiple choice: scores ----

// One completion behind its context.
struct row {
    struct choice_ids context, completion;
    double *nats; // where its score goes
};

static int row_length(const struct row *row) { return row->context.count + row->completion.count; }

static void write_row(const struct row *row, int32_t *tokens, size_t columns) {
    size_t next = 0;
    for (int i = 0; i < row->context.count; i++) tokens[next++] = row->context.ids[i];
    for (int i = 0; i < row->completion.count; i++) tokens[next++] = row->completion.ids[i];
    while (next < columns) tokens[next++] = -1;
}

// The last token of a row is a target only, so a micro-batch is one position shorter than its longest row.
static void score_rows(struct model *m, const struct row *rows, int count, int32_t *tokens, float *losses) {
    int T = 0;
    for (int r = 0; r < count; r++)
        if (row_length(&rows[r]) - 1 > T) T = row_length(&rows[r]) - 1;
    size_t columns = (size_t)T + 1 + (size_t)m->config.mtp_depth;
    for (int r = 0; r < count; r++) write_row(&rows[r], tokens + (size_t)r * columns, columns);
    model_score(m, (struct batch){tokens, count, T, 0}, losses);
    for (int r = 0; r < count; r++) {
        // The loss at a position is that of the token behind it.
        const float *first = losses + (size_t)r * (size_t)T + rows[r].context.count - 1;
        for (int i = 0; i < rows[r].completion.count; i++) *rows[r].nats += (double)first[i];
    }
}

// Scores this rank's rows while the others score theirs; false, and nothing is done, when no rank has any left.
static bool score_together(struct model *m, const struct row *rows, int count, int32_t *tokens, float *losses) {
    int64_t busy = count > 0;
    comm_sum_int64(m->parallel->world, &busy, 1);
    if (busy) score_rows(m, rows, count, tokens, losses);
    return busy > 0;
}

// The context as all completions of the example see it: its last ids, at least one; count 0 if none fits.
static struct choice_ids cut_context(const struct choice_example *e, int seq) {
    int longest = 0;
    for (int k = 0; k < e->completions; k++)
        if (e->completion[k].count > longest) longest = e->completion[k].count;
    int room = seq + 1 - longest, kept = e->context.count < room ? e->context.count : room;
    if (kept < 1) return (struct choice_ids){0};
    return (struct choice_ids){e->context.ids + e->context.count - kept, kept};
}

void evaluate_score_choices(struct model *m, const struct choices *c, int batch, int seq, int first, int count,
                            struct choice_score *scores) {
    if (c->largest_id >= m->config.vocab)
        fail_user(c->path,
                  "found id %d, wanted less than the model's vocabulary of %d; use a file made with its tokenizer",
                  c->largest_id, m->config.vocab);
    size_t columns = (size_t)seq + 1 + (size_t)m->config.mtp_depth;
    struct row *rows = malloc(sizeof *rows * (size_t)batch);
    int32_t *tokens = malloc(sizeof *tokens * (size_t)batch * columns);
    float *losses = malloc(sizeof *losses * (size_t)batch * (size_t)seq);
    if (!rows || !tokens || !losses) fail_internal(c->path, "found no memory for %d rows of %d tokens", batch, seq);
    int waiting = 0;
    for (int i = 0; i < count; i++) {
        const struct choice_example *e = &c->examples[first + i];
        struct choice_ids context = cut_context(e, seq);
        scores[i] = (struct choice_score){.completions = context.count ? e->completions : 0};
        for (int k = 0; k < scores[i].completions; k++) {
            rows[waiting++] = (struct row){context, e->completion[k], &scores[i].nats[k]};
            if (waiting < batch) continue;
            score_together(m, rows, waiting, tokens, losses);
            waiting = 0;
        }
    }
    while (score_together(m, rows, waiting, tokens, losses)) waiting = 0;
    free(rows);
    free(tokens);
    free(losses);
}

// ---- multiple choice: answers ----

// The first of the lowest values; -1 if none is a finite number, so that a broken model is never right.
static int lowest(const double *values, int n) {
    int best = -1;
    for (int i = 0; i < n; i++)
        if (isfinite(values[i]) && (best < 0 || values[i] < values[best])) best = i;
    return best;
}

static void count_answer(const struct choice_example *e, const struct choice_score *score,
                         struct choice_counts *counts) {
    if (!score->completions) {
        counts->skipped++;
        return;
    }
    double means[CHOICES_MOST];
    for (int k = 0; k < score->completions; k++) means[k] = score->nats[k] / e->completion[k].count;
    counts->examples++;
    counts->right_by_mean += lowest(means, score->completions) == e->label;
    counts->right_by_sum += lowest(score->nats, score->completions) == e->label;
}

static void add_over_ranks(const struct model *m, struct choice_counts *counts, struct choice_counts mine) {
    int64_t sums[] = {mine.examples, mine.right_by_mean, mine.right_by_sum, mine.skipped};
    comm_sum_int64(m->parallel->world, sums, sizeof sums / sizeof *sums);
    counts->examples += sums[0];
    counts->right_by_mean += sums[1];
    counts->right_by_sum += sums[2];
    counts->skipped += sums[3];
}

void evaluate_choices(struct model *m, const struct choices *c, int batch, int seq, int first, int count,
                      struct choice_counts *counts) {
    struct share share = share_of(count, m->parallel, 1);
    struct choice_score *scores = malloc(sizeof *scores * ((size_t)share.count + 1));
    if (!scores) fail_internal(c->path, "found no memory for %lld examples", (long long)share.count);
    first += (int)share.first;
    evaluate_score_choices(m, c, batch, seq, first, (int)share.count, scores);
    struct choice_counts mine = {0};
    for (int i = 0; i < share.count; i++) count_answer(&c->examples[first + i], &scores[i], &mine);
    add_over_ranks(m, counts, mine);
    free(scores);
}

bool evaluate_all_choices(struct model *m, const struct choices *c, int batch, int seq, struct choice_counts *counts) {
    enum { PIECE = 32 }; // examples of a rank between two looks at the bar
    int64_t most = (int64_t)PIECE * m->parallel->ranks;
    struct progress progress = progress_begin("questions", "", (uint64_t)c->count);
    bool stopped = false;
    *counts = (struct choice_counts){0};
    for (int first = 0, count; first < c->count; first += count) {
        if ((stopped = stop_agree(m->parallel->world) != 0)) break;
        count = c->count - first < most ? c->count - first : (int)most;
        evaluate_choices(m, c, batch, seq, first, count, counts);
        progress_show(&progress, (uint64_t)(first + count));
    }
    progress_end(&progress);
    return !stopped;
}

// Evaluation against an independent computation: logits of one row at a time, and the logarithm of their softmax in FP64.
#include "tests/child.h"
#include "tests/configs.h"
#include "tests/test.h"

#include "data/token_file.h"
#include "model/evaluate.h"
#include "model/presets.h"

enum { LENGTH = 12, ROWS = 7 };

// ---- a small model with weights that make attention and routing far from uniform ----

static void open_model(struct model *m, const struct config *c, int batch, int seq) {
    config_validate(c);
    model_open(m, c, batch, seq, true, NULL, NULL);
    init_weights(m->weights, &m->params, 0.15, 1);
}

static struct config unit(void) {
    struct config c = preset_find("unit")->model;
    c.vocab = 61;
    return c;
}

// What the tokens from position `first` on cost behind those before them. tokens [n]
static double cost_of(struct model *m, const int32_t *tokens, int n, int first) {
    int V = m->config.vocab;
    float *logits = malloc(sizeof *logits * (size_t)n * (size_t)V);
    assert_non_null(logits);
    model_logits(m, tokens, n, 0, logits);
    double nats = 0;
    for (int i = first; i < n; i++) {
        const float *row = logits + (size_t)(i - 1) * (size_t)V;
        double sum = 0;
        for (int v = 0; v < V; v++) sum += exp((double)row[v]);
        nats += log(sum) - (double)row[tokens[i]];
    }
    free(logits);
    return nats;
}

// The losses are FP32 and of size 4, and the sums over V behind them add rounding of the same size: measured 1e-7 at
// worst, and 1e-6 leaves a factor of ten.
static void assert_near(double found, double wanted) {
    if (!(fabs(found - wanted) <= 1e-6 * fabs(wanted))) fail_msg("found %.9g, wanted %.9g", found, wanted);
}

// ---- scores of a micro-batch ----

static void scores_are_the_losses_of_every_target(void **state) {
    (void)state;
    struct config c = unit();
    struct model m;
    open_model(&m, &c, 3, LENGTH + 1); // the independent computation sees the last target too
    int columns = LENGTH + 1 + c.mtp_depth;
    assert_true(c.mtp_depth > 0);
    int32_t tokens[3 * (LENGTH + 1 + MTP_MAX)];
    uint64_t random = 5;
    for (int i = 0; i < 3 * columns; i++) tokens[i] = (int32_t)(test_uniform(&random) * c.vocab);
    for (int t = 5; t < columns; t++) tokens[columns + t] = -1; // the second row is short
    float losses[3 * LENGTH];
    for (int i = 0; i < 3 * LENGTH; i++) losses[i] = NAN;
    model_score(&m, (struct batch){tokens, 3, LENGTH, 0}, losses);
    for (int b = 0; b < 3; b++) {
        const int32_t *row = tokens + b * columns;
        for (int t = 0; t < LENGTH; t++) {
            float loss = losses[b * LENGTH + t];
            if (row[t + 1] < 0)
                assert_true(loss == 0);
            else
                assert_near(loss, cost_of(&m, row, t + 2, t + 1));
        }
    }
    for (size_t i = 0; i < model_bias_size(&c); i++) assert_int_equal(m.counts[i], 0);
    model_close(&m);
}

// ---- scores of examples ----

static uint16_t numbers[4096]; // random ids below the vocabulary

static struct choice_ids some_ids(int *next, int count) {
    assert_true((size_t)(*next + count) <= sizeof numbers / sizeof *numbers);
    struct choice_ids list = {numbers + *next, count};
    *next += count;
    return list;
}

// Examples with contexts and completions of every length that fits, two to five completions each.
static struct choices make_choices(struct choice_example *examples, int count, int vocab) {
    uint64_t random = 9;
    int next = 0;
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        numbers[i] = (uint16_t)(test_uniform(&random) * vocab);
    for (int i = 0; i < count; i++) {
        struct choice_example *e = &examples[i];
        *e = (struct choice_example){.label = i % 2, .completions = 2 + i % 4};
        e->context = some_ids(&next, 1 + i % 5);
        for (int k = 0; k < e->completions; k++) e->completion[k] = some_ids(&next, 1 + (i * 3 + k * 5) % 8);
    }
    return (struct choices){"examples", count, vocab - 1, 0, examples, NULL};
}

// The cost of one completion, computed alone. Of the context only the last `kept` ids count.
static double wanted_nats(struct model *m, const struct choice_example *e, int k, int kept) {
    int32_t tokens[64];
    int n = 0;
    for (int i = e->context.count - kept; i < e->context.count; i++) tokens[n++] = e->context.ids[i];
    for (int i = 0; i < e->completion[k].count; i++) tokens[n++] = e->completion[k].ids[i];
    return cost_of(m, tokens, n, kept);
}

enum { EXAMPLES = 23 };

static void poison(struct choice_score *scores, int count) { memset(scores, 0xff, sizeof *scores * (size_t)count); }

static void completions_cost_what_they_cost_alone(void **state) {
    (void)state;
    struct config c = unit();
    struct model m;
    open_model(&m, &c, ROWS, 16);
    struct choice_example examples[EXAMPLES];
    struct choices choices = make_choices(examples, EXAMPLES, c.vocab);
    struct choice_score scores[EXAMPLES];
    poison(scores, EXAMPLES);
    evaluate_score_choices(&m, &choices, ROWS, 16, 0, EXAMPLES, scores);
    for (int i = 0; i < EXAMPLES; i++) {
        assert_int_equal(scores[i].completions, examples[i].completions);
        for (int k = 0; k < scores[i].completions; k++)
            assert_near(scores[i].nats[k], wanted_nats(&m, &examples[i], k, examples[i].context.count));
    }
    model_close(&m);
}

// Fewer rows than completions of one example, and rows that divide nothing (llm.c pull 667).
static void answers_do_not_depend_on_the_batch(void **state) {
    (void)state;
    struct config c = unit();
    struct model m;
    open_model(&m, &c, 64, 16);
    struct choice_example examples[EXAMPLES];
    struct choices choices = make_choices(examples, EXAMPLES, c.vocab);
    struct choice_score wanted[EXAMPLES], found[EXAMPLES];
    poison(wanted, EXAMPLES);
    evaluate_score_choices(&m, &choices, 64, 16, 0, EXAMPLES, wanted);
    struct choice_counts all = {0};
    evaluate_choices(&m, &choices, 64, 16, 0, EXAMPLES, &all);
    assert_int_equal(all.examples, EXAMPLES);
    assert_true(all.right_by_mean > 0 && all.right_by_mean < EXAMPLES); // this says something
    static const int batches[] = {1, 2, 3, 5, 7, 63};
    for (size_t i = 0; i < sizeof batches / sizeof *batches; i++) {
        poison(found, EXAMPLES);
        evaluate_score_choices(&m, &choices, batches[i], 16, 0, EXAMPLES, found);
        for (int e = 0; e < EXAMPLES; e++)
            assert_memory_equal(found[e].nats, wanted[e].nats, sizeof(double) * (size_t)wanted[e].completions);
        struct choice_counts parts = {0}; // in two parts, as a caller with a progress bar would
        evaluate_choices(&m, &choices, batches[i], 16, 0, 10, &parts);
        evaluate_choices(&m, &choices, batches[i], 16, 10, EXAMPLES - 10, &parts);
        assert_memory_equal(&parts, &all, sizeof all);
    }
    model_close(&m);
}

// ---- examples longer than the model's sequences ----

static void long_contexts_lose_their_beginning(void **state) {
    (void)state;
    enum { SHORT = 8 };
    struct config c = unit();
    struct model m;
    open_model(&m, &c, 3, 16); // 16: the independent computation sees one token more than SHORT
    struct choice_example examples[5];
    struct choices choices = make_choices(examples, 5, c.vocab);
    int next = 2048, lengths[5][3] = {
                         {6, 3, 1},     // 6 + 3 = SHORT + 1: fits just so
                         {7, 3, 1},     // one too long
                         {40, 2, 3},    // much too long
                         {5, SHORT, 1}, // the longest completion: one id of the context is left
                         {5, SHORT + 1, 1},
                     };
    for (int i = 0; i < 5; i++) {
        examples[i].label = 0;
        examples[i].completions = 2;
        examples[i].context = some_ids(&next, lengths[i][0]);
        for (int k = 0; k < 2; k++) examples[i].completion[k] = some_ids(&next, lengths[i][1 + k]);
    }
    static const int kept[4] = {6, 6, 6, 1};
    struct choice_score scores[5];
    poison(scores, 5);
    evaluate_score_choices(&m, &choices, 3, SHORT, 0, 5, scores);
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 2; k++) assert_near(scores[i].nats[k], wanted_nats(&m, &examples[i], k, kept[i]));
    assert_int_equal(scores[4].completions, 0);
    struct choice_counts counts = {0};
    evaluate_choices(&m, &choices, 2, SHORT, 0, 5, &counts);
    assert_int_equal(counts.examples, 4);
    assert_int_equal(counts.skipped, 1);
    evaluate_choices(&m, &choices, 2, SHORT, 4, 1, &counts); // nothing to score at all
    assert_int_equal(counts.examples, 4);
    assert_int_equal(counts.skipped, 2);
    model_close(&m);
}

// ---- answers ----

// All logits are zero, so every token costs ln V: means tie, and sums prefer the shortest completion.
static void first_of_equal_completions_is_the_answer(void **state) {
    (void)state;
    struct config c = unit();
    struct model m;
    model_open(&m, &c, 2, 16, false, NULL, NULL);
    struct choice_example examples[3];
    struct choices choices = make_choices(examples, 3, c.vocab);
    for (int i = 0; i < 3; i++) {
        examples[i].completions = 3;
        for (int k = 0; k < 3; k++) examples[i].completion[k] = (struct choice_ids){numbers + k, k == 1 ? 1 : 4};
        examples[i].label = i;
    }
    struct choice_counts counts = {0};
    evaluate_choices(&m, &choices, 2, 16, 0, 1, &counts);
    assert_memory_equal(&counts, (&(struct choice_counts){1, 1, 0, 0}), sizeof counts);
    evaluate_choices(&m, &choices, 2, 16, 1, 1, &counts);
    assert_memory_equal(&counts, (&(struct choice_counts){2, 1, 1, 0}), sizeof counts);
    evaluate_choices(&m, &choices, 2, 16, 2, 1, &counts);
    assert_memory_equal(&counts, (&(struct choice_counts){3, 1, 1, 0}), sizeof counts);
    evaluate_choices(&m, &choices, 2, 16, 0, 0, &counts); // no example
    assert_int_equal(counts.examples, 3);
    model_close(&m);
}

static void broken_model_is_never_right(void **state) {
    (void)state;
    struct config c = unit();
    struct model m;
    open_model(&m, &c, 2, 16);
    for (size_t i = 0; i < m.params.size; i++) m.weights[i] = NAN;
    struct choice_example examples[4];
    struct choices choices = make_choices(examples, 4, c.vocab);
    struct choice_counts counts = {0};
    evaluate_choices(&m, &choices, 2, 16, 0, 4, &counts);
    assert_memory_equal(&counts, (&(struct choice_counts){4, 0, 0, 0}), sizeof counts);
    model_close(&m);
}

static const char *const animals[][2] = {{"cow", "moo"}, {"dog", "wow"}, {"cat", "mew"}, {"pig", "oik"}};

// AdamW steps on rows that say "the cow says moo." and so on.
static void teach(struct model *m, int steps) {
    enum { T = 18 };
    size_t size = m->params.size;
    accum *state = calloc(3 * size, sizeof *state), *master = state, *first = state + size, *second = first + size;
    assert_non_null(state);
    for (size_t i = 0; i < size; i++) master[i] = m->weights[i];
    int columns = T + 1 + m->config.mtp_depth;
    int32_t *tokens = malloc(sizeof *tokens * 4 * (size_t)columns);
    for (int b = 0; b < 4; b++) {
        char text[32];
        int n = sprintf(text, "the %s says %s.", animals[b][0], animals[b][1]);
        for (int t = 0; t < columns; t++) tokens[b * columns + t] = t < n ? (unsigned char)text[t] : -1;
    }
    struct batch batch = {tokens, 4, T, 0};
    struct step_totals totals = {0};
    model_add_totals(&totals, &m->config, batch);
    for (int step = 1; step <= steps; step++) {
        device_zero(m->grads, sizeof(accum) * size);
        model_gradient(m, batch, &totals);
        struct adamw a = {.lr = 3e-3, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .grad_scale = 1, .step = step};
        adamw_update(master, first, second, m->weights, m->grads, size, a);
    }
    free(tokens);
    free(state);
}

static struct choice_ids text_ids(int *next, const char *text) {
    struct choice_ids list = {numbers + *next, (int)strlen(text)};
    for (int i = 0; i < list.count; i++) numbers[(*next)++] = (unsigned char)text[i];
    return list;
}

// Which animal says what: four choices of the same length, and the wrong ones are right for other animals.
static void trained_model_knows_the_answers(void **state) {
    (void)state;
    struct config c = preset_find("unit")->model;
    c.vocab = 257;
    struct model m;
    config_validate(&c);
    model_open(&m, &c, 4, 24, true, NULL, NULL);
    init_weights(m.weights, &m.params, 0.05, 1);
    struct choice_example examples[4];
    int next = 0;
    for (int i = 0; i < 4; i++) {
        char text[32];
        examples[i] = (struct choice_example){.label = i, .completions = 4};
        sprintf(text, "the %s says", animals[i][0]);
        examples[i].context = text_ids(&next, text);
        for (int k = 0; k < 4; k++) {
            sprintf(text, " %s.", animals[k][1]);
            examples[i].completion[k] = text_ids(&next, text);
        }
    }
    struct choices choices = {"animals", 4, 255, 0, examples, NULL};
    struct choice_counts before = {0}, after = {0};
    evaluate_choices(&m, &choices, 4, 24, 0, 4, &before);
    assert_true(before.right_by_mean < 4);
    teach(&m, 150);
    evaluate_choices(&m, &choices, 4, 24, 0, 4, &after);
    assert_memory_equal(&after, (&(struct choice_counts){4, 4, 4, 0}), sizeof after);
    model_close(&m);
}

static void evaluate_foreign(void *argument) {
    struct model *m = argument;
    struct choice_example examples[1];
    struct choices choices = make_choices(examples, 1, m->config.vocab + 1);
    evaluate_choices(m, &choices, 1, 16, 0, 1, &(struct choice_counts){0});
}

// (Ids at the vocabulary: torchtitan pull 1495.)
static void ids_outside_the_models_vocabulary_are_refused(void **state) {
    (void)state;
    struct config c = unit();
    struct model m;
    open_model(&m, &c, 1, 16);
    char text[512];
    assert_int_equal(run_child(evaluate_foreign, &m, text, sizeof text), 2);
    assert_string_equal(text, "mok: error: examples: found id 61, wanted less than the model's vocabulary of 61; use a "
                              "file made with its tokenizer\n");
    model_close(&m);
}

// ---- held-out text ----

enum { SEQ = 20, SEQUENCES = 5 };

static struct config unit_of_bytes(void) {
    struct config c = preset_find("unit")->model;
    c.vocab = 257;
    return c;
}

static void heldout_loss_and_bits_are_those_of_the_targets(void **state) {
    (void)state;
    struct config c = unit_of_bytes();
    struct model m;
    open_model(&m, &c, SEQUENCES, SEQ + 1);
    struct data *d = data_open("stories", NULL, NULL, 3, SEQ, 1 + c.mtp_depth);
    struct tokenizer *bytes = tokenizer_open_bytes();
    double nats = 0;
    int64_t text = 0;
    for (uint64_t i = 0; i < SEQUENCES; i++) {
        int32_t tokens[SEQ + 1 + MTP_MAX];
        data_read_or_fail(d, DATA_EVAL, i, tokens);
        nats += cost_of(&m, tokens, SEQ + 1, 1);
        for (int t = 1; t <= SEQ; t++) text += tokens[t] < 256;
    }
    assert_true(text < SEQUENCES * SEQ); // an end of text is among the targets: it costs, and is no byte
    struct evaluation e = evaluate_heldout(&m, d, bytes, SEQUENCES, SEQ, SEQUENCES);
    assert_int_equal(e.targets, SEQUENCES * SEQ);
    assert_int_equal(e.bytes, text);
    assert_near(e.loss, nats / (SEQUENCES * SEQ));
    assert_near(e.bits_per_byte, nats / log(2) / (double)text);

    struct evaluation untold = evaluate_heldout(&m, d, NULL, SEQUENCES, SEQ, SEQUENCES);
    assert_true(untold.loss == e.loss && isnan(untold.bits_per_byte) && untold.bytes == 0);
    tokenizer_close(bytes);
    data_close(d);
    model_close(&m);
}

// The sums of the micro-batches, one after the other: the loss has the same bits whoever adds them up so.
static double sum_of_batches(struct model *m, const struct data *d, int batch) {
    int columns = SEQ + 1 + m->config.mtp_depth;
    int32_t *tokens = malloc(sizeof *tokens * (size_t)batch * (size_t)columns);
    double nats = 0;
    for (int first = 0; first < SEQUENCES; first += batch) {
        int rows = SEQUENCES - first < batch ? SEQUENCES - first : batch;
        for (int b = 0; b < rows; b++) data_read_or_fail(d, DATA_EVAL, (uint64_t)(first + b), tokens + b * columns);
        nats += model_evaluate(m, (struct batch){tokens, rows, SEQ, 0}).cross_entropy[0];
    }
    free(tokens);
    return nats;
}

// Another cut into micro-batches adds in another order, which may change the last bits of a double.
static void heldout_text_is_the_same_in_any_batch(void **state) {
    (void)state;
    struct config c = unit_of_bytes();
    struct model m;
    open_model(&m, &c, 8, SEQ);
    struct data *d = data_open("stories", NULL, NULL, 3, SEQ, 1 + c.mtp_depth);
    struct tokenizer *bytes = tokenizer_open_bytes();
    struct evaluation wanted = evaluate_heldout(&m, d, bytes, 1, SEQ, SEQUENCES);
    for (int batch = 2; batch <= 8; batch++) {
        struct evaluation e = evaluate_heldout(&m, d, bytes, batch, SEQ, SEQUENCES);
        assert_true(e.loss == sum_of_batches(&m, d, batch) / (SEQUENCES * SEQ));
        assert_true(fabs(e.loss / wanted.loss - 1) <= 1e-13);
        assert_true(fabs(e.bits_per_byte / wanted.bits_per_byte - 1) <= 1e-13);
        assert_int_equal(e.targets, wanted.targets);
        assert_int_equal(e.bytes, wanted.bytes);
    }
    tokenizer_close(bytes);
    data_close(d);
    model_close(&m);
}

// Three windows, asked for four times each and once more: the first would count more than the others, and the line would
// speak of text that is not there.
static void heldout_text_that_is_short_is_read_once(void **state) {
    (void)state;
    char path[] = "/tmp/mok_test_XXXXXX";
    int file = mkstemp(path);
    assert_true(file >= 0);
    for (int i = 0; i <= 3 * SEQ; i++) assert_int_equal(write(file, &(char){(char)('a' + i % 7 + i / SEQ)}, 1), 1);
    struct config c = unit_of_bytes();
    struct model m;
    open_model(&m, &c, 2, SEQ);
    struct data *d = data_open(path, path, NULL, 3, SEQ, 1 + c.mtp_depth);
    struct tokenizer *bytes = tokenizer_open_bytes();
    assert_int_equal(data_windows(d, DATA_EVAL), 3);
    struct evaluation wanted = evaluate_heldout(&m, d, bytes, 2, SEQ, 3);
    struct evaluation e = evaluate_heldout(&m, d, bytes, 2, SEQ, 13);
    assert_int_equal(e.targets, 3 * SEQ);
    assert_int_equal(e.bytes, 3 * SEQ);
    assert_true(e.loss == wanted.loss);
    tokenizer_close(bytes);
    data_close(d);
    model_close(&m);
    close(file);
    unlink(path);
}

// Zero weights cost ln V nats a token, whatever it is. So bits per byte tell how many bytes the ids stand for.
static void bits_per_byte_count_the_bytes_of_long_tokens(void **state) {
    (void)state;
    static const char text[] = "The people of the world are there.\n";
    char path[] = "/tmp/mok_test_XXXXXX", error[FILE_ERROR];
    int file = mkstemp(path);
    assert_true(file >= 0);
    struct tokenizer *t = tokenizer_open("tests/reference/tokenizer_gpt2.json", error, sizeof error);
    if (!t) fail_msg("%s", error);
    struct token_list ids = {0};
    for (int i = 0; i < 40; i++) tokenizer_encode(t, text, strlen(text), false, &ids);
    struct token_writer w;
    bool written = token_writer_begin(&w, path, tokenizer_vocab(t), tokenizer_hash(t), error, sizeof error) &&
                   token_writer_append(&w, ids.ids, ids.count, error, sizeof error) &&
                   token_writer_finish(&w, error, sizeof error);
    if (!written) fail_msg("%s", error);
    free(ids.ids);
    struct config c = unit_of_bytes();
    c.vocab = tokenizer_vocab(t);
    struct data *d = data_open(path, path, t, 3, SEQ, 1 + c.mtp_depth);
    assert_int_equal(data_settle_vocab(d, 0), c.vocab);
    struct model m;
    config_validate(&c);
    model_open(&m, &c, 2, SEQ, false, NULL, NULL);
    int64_t read = 0;
    for (uint64_t i = 0; i < 3; i++) {
        int32_t tokens[SEQ + 1 + MTP_MAX];
        char decoded[SEQ * 16];
        data_read_or_fail(d, DATA_EVAL, i, tokens);
        read += (int64_t)tokenizer_decode(t, decoded, sizeof decoded, tokens + 1, SEQ);
    }
    assert_true(read > 3 * SEQ * 5 / 4); // not a byte each
    struct evaluation e = evaluate_heldout(&m, d, t, 2, SEQ, 3);
    assert_int_equal(e.bytes, read);
    assert_near(e.loss, log(c.vocab));
    assert_near(e.bits_per_byte, log2(c.vocab) * 3 * SEQ / (double)read);
    model_close(&m);
    data_close(d);
    tokenizer_close(t);
    close(file);
    unlink(path);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(scores_are_the_losses_of_every_target),
        cmocka_unit_test(completions_cost_what_they_cost_alone),
        cmocka_unit_test(answers_do_not_depend_on_the_batch),
        cmocka_unit_test(long_contexts_lose_their_beginning),
        cmocka_unit_test(first_of_equal_completions_is_the_answer),
        cmocka_unit_test(broken_model_is_never_right),
        cmocka_unit_test(trained_model_knows_the_answers),
        cmocka_unit_test(ids_outside_the_models_vocabulary_are_refused),
        cmocka_unit_test(heldout_loss_and_bits_are_those_of_the_targets),
        cmocka_unit_test(heldout_text_is_the_same_in_any_batch),
        cmocka_unit_test(heldout_text_that_is_short_is_read_once),
        cmocka_unit_test(bits_per_byte_count_the_bytes_of_long_tokens),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

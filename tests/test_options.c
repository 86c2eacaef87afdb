// Flags: what is taken, what is refused and with which words.
#include "kernels/fail.h"
#include "tests/options.h"

// Static, overwritten by the next call.
static char *help_text(void) {
    static char text[32768];
    FILE *file = fmemopen(text, sizeof text, "w");
    assert_non_null(file);
    options_print_help(file);
    assert_int_equal(fclose(file), 0);
    return text;
}

// ---- the command line ----

static void refused_command_lines_name_flag_found_and_wanted(void **state) {
    (void)state;
    const struct {
        const char *line, *words[5];
    } cases[] = {
        // features.md part 4: llm.c took all of these
        {"-b 4", {"-b", "--help"}},
        {"--bacth 4", {"--bacth", "--batch"}},
        {"--eval_every=4", {"--eval_every", "--eval-every"}},
        {"--completely-different 4", {"--completely-different", "--help"}},
        {"--", {"unknown flag --"}},
        {"--batch", {"--batch: found no value"}},
        {"--batch --seq 4", {"--batch: found no value"}},
        {"--batch=", {"--batch: found an empty value"}},
        {"--batch 12abc", {"--batch: found '12abc'", "from 1 to 2147483647"}},
        {"--batch -4", {"--batch: found '-4'", "from 1"}},
        {"--batch 0", {"--batch: found '0'", "from 1"}},
        {"--batch 1e9", {"--batch: found '1e9'", "whole number"}},
        {"--batch +4", {"--batch: found '+4'"}},
        {"--batch 4.0", {"--batch: found '4.0'"}},
        {"--batch 3000000000", {"--batch: found '3000000000'", "2147483647"}},
        {"--batch 99999999999999999999", {"--batch: found '99999999999999999999'"}},
        // (data is opened before the model is looked at: a window of --seq and this many tokens must have a length)
        {"--mtp-depth 2147483647", {"--mtp-depth: found '2147483647'", "from 0 to 4"}},
        {"--batch 4 --batch 4", {"--batch: found twice"}},
        {"--batch 4 --batch=4", {"--batch: found twice"}},
        {"--resume --resume", {"--resume: found twice"}},
        {"--resume=true", {"--resume: found value 'true'", "switch"}},
        {"--resume 1", {"found '1' where a flag"}},
        {"model.bin", {"found 'model.bin' where a flag"}},
        {"--lr nan", {"--lr: found 'nan'"}},
        {"--lr inf", {"--lr: found 'inf'"}},
        {"--lr 0x10", {"--lr: found '0x10'"}},
        {"--lr 1e999", {"--lr: found '1e999'"}},
        {"--lr 1e-999", {"--lr: found '1e-999'"}},
        {"--lr -1", {"--lr: found '-1'", ">=0"}},
        {"--lr 1e-3x", {"--lr: found '1e-3x'"}},
        {"--beta1 1", {"--beta1: found '1'", "0..0.999999"}},
        {"--adam-eps 0", {"--adam-eps: found '0'", ">0"}},
        {"--seed -1", {"--seed: found '-1'", "18446744073709551615"}},
        {"--seed 18446744073709551616", {"--seed: found '18446744073709551616'"}},
        {"--schedule cos", {"--schedule: found 'cos'", "cosine|linear|wsd|constant"}},
        {"--schedule cosine|linear", {"--schedule: found"}},
        {"--normalize-gates yes", {"--normalize-gates: found 'yes'", "true or false"}},
        {"--preset large", {"--preset: found 'large'", "tiny", "dsv3"}},
        {"--preset a-name-that-is-longer-than-any-preset", {"--preset: found 'a-name"}},
        // between flags
        {"--batch 1000000000 --seq 1000000000", {"--batch: found 1000000000", "--seq 1000000000", "2147483647"}},
        {"--batch 65536 --seq 32767 --max-positions 32767 --top-k 8",
         {"--batch: found 65536", "--seq 32767", "--top-k 8"}},
        {"--seq 4096 --max-positions 2048", {"--seq: found 4096", "--max-positions 2048"}},
        // nanochat issue 532: a bare assertion
        {"--seq 256 --tokens-per-step 255", {"--tokens-per-step: found 255", "--seq 256", "nearest is 256"}},
        {"--seq 256 --tokens-per-step 700", {"--tokens-per-step: found 700", "nearest is 512 or 768"}},
        {"--batch 1 --seq 1 --tokens-per-step 3000000000", {"--tokens-per-step: found 3000000000", "2147483647"}},
        {"--steps 1000000000000 --batch 1000 --seq 1000 --tokens-per-step 1000000000000",
         {"--steps: found 1000000000000", "2^63"}},
        {"--steps 10 --warmup 11", {"--warmup: found 11", "--steps 10"}},
        {"--lr 1e-4 --min-lr 2e-4", {"--min-lr: found 0.0002", "--lr 0.0001"}},
        {"--schedule wsd --steps 100 --warmup 20 --decay-steps 81",
         {"--decay-steps: found 81", "--steps 100", "--warmup 20"}},
        {"--ep -1", {"--ep: found '-1'"}},
        {"--moe nccl", {"--moe: found 'nccl'", "mok|alltoall"}},
        {"--expert-gemm mkl", {"--expert-gemm: found 'mkl'", "cublaslt|own"}},
        {"--expert-gemm cublaslt", {"--expert-gemm: found cublaslt", "use --expert-gemm own"}},
        {"--route W8", {"--route: found 'W8'", "learned|balanced|W1"}},
        {"--alltoall-chunks 0", {"--alltoall-chunks: found '0'", "from 1"}},
        {"--timeout 0", {"--timeout: found '0'", ">0"}},
        {"--minibatch-rows 100", {"--minibatch-rows: found 100", "multiple of 128", "nearest is 128"}},
        {"--ring-rows 1000", {"--ring-rows: found 1000", "multiple of 128", "nearest is 896"}},
        {"--minibatch-rows 256 --ring-rows 640", {"--ring-rows: found 640", "--minibatch-rows 256"}},
        {"--workers 2 --comm-workers 2", {"--comm-workers: found 2", "--workers 2"}},
        {"--ranks 64", {"--ranks: found without --plan", "mpirun -n 64"}},
        {"--memory 186", {"--memory: found without --plan", "--plan says"}},
        {"--plan --memory 1e10", {"--memory: found '1e10'", "0..1000000000"}},
        {"--recompute all", {"--recompute: found 'all'", "none|moe|block"}},
        {"--resume --overwrite", {"--resume", "--overwrite"}},
        {"--generate 10", {"--generate", "--from"}},
        {"--trace-step 3", {"--trace-step: found without --trace"}},
        {"--trace-layer 1", {"--trace-layer: found without --trace"}},
        {"--preset unit --trace t --trace-layer 9", {"--trace-layer: found 9", "layer with experts: 1 to 3"}},
        {"--preset unit --trace t --dense-layers 2 --trace-layer 1", {"--trace-layer: found 1", "2 to 3"}},
        {"--preset unit --trace t --mtp-depth 0 --layers 2 --dense-layers 2 --trace-layer 1",
         {"--trace-layer: found 1", "no layer of this model has experts"}},
        {"--trace t --trace-layer -1", {"--trace-layer: found '-1'", "from 0"}},
        {"--override", {"--override: found without --resume"}},
        {"--resume --plan", {"--plan: found beside --resume"}},
        {"--generate 10 --from x --data y", {"--data: found beside --generate", "--tokenizer", "--moe"}},
        {"--generate 10 --from x --route W1", {"--route: found beside --generate"}},
        {"--generate 10 --from x --ring-rows 100", {"--ring-rows: found 100", "multiple of 128"}},
        {"--evaluate", {"--evaluate: found without --from"}},
        {"--evaluate --from x --lr 1", {"--lr: found beside --evaluate", "--eval-choices"}},
        {"--evaluate --from x --ring-rows 100", {"--ring-rows: found 100", "multiple of 128"}},
        {"--evaluate --from x --generate 1", {"--generate: found beside --evaluate"}},
        {"--prompt Once", {"--prompt", "--generate"}},
        {"--temperature 1", {"--temperature", "--generate"}},
        {"--logits x", {"--logits", "--generate"}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char message[1024];
        const char *words[6] = {0};
        memcpy(words, cases[i].words, sizeof cases[i].words);
        int code = run_child(parse_line, (void *)cases[i].line, message, sizeof message);
        assert_refused(cases[i].line, code, message, words);
    }
}

static void text_longer_than_its_room_is_refused(void **state) {
    (void)state;
    char line[OPTION_TEXT + 16] = "--data ", message[4096];
    memset(line + 7, 'x', OPTION_TEXT); // one byte too many
    int code = run_child(parse_line, line, message, sizeof message);
    assert_refused("long --data", code, message, (const char *[]){"--data: found 'xxx", "1 to 1023 bytes", NULL});
    line[7 + OPTION_TEXT - 1] = 0; // as long as can be
    struct options o;
    parse(&o, line);
    assert_int_equal(strlen(o.data), OPTION_TEXT - 1);
}

static void values_arrive_in_both_spellings_and_any_order(void **state) {
    (void)state;
    struct options o;
    parse(
        &o,
        "--batch 4 --seq=64 --preset unit --lr=1e-2 --schedule wsd --seed 18446744073709551615 --normalize-gates=false "
        "--q-rank 0 --resume --eval-every 0");
    assert_string_equal(o.preset, "unit");
    assert_int_equal(o.batch, 4);
    assert_int_equal(o.seq, 64);
    assert_true(o.lr == 1e-2);
    assert_int_equal(o.schedule, SCHEDULE_WSD);
    assert_true(o.seed == UINT64_MAX);
    assert_false(o.model.normalize_gates);
    assert_int_equal(o.model.q_rank, 0);
    assert_true(o.resume);
    assert_false(o.overwrite);
    assert_int_equal(o.eval_every, 0);
    assert_int_equal(o.model.experts, 8); // unit's own, though --preset came last

    char *argv[] = {"train", "--generate=5", "--from=a=b", "--prompt=--once upon", "--temperature", "0"};
    options_parse(&o, 6, argv);
    assert_int_equal(o.generate, 5);
    assert_string_equal(o.from, "a=b");
    assert_string_equal(o.prompt, "--once upon");
    assert_true(o.temperature == 0);
}

static void no_flags_mean_the_tiny_preset(void **state) {
    (void)state;
    struct options o, tiny;
    parse(&o, "");
    set_preset(&tiny, "tiny");
    tiny.tokens_per_step = (int64_t)tiny.batch * tiny.seq; // which a preset leaves open
    assert_null(options_compare(stdout, &tiny, &o, false));
    assert_string_equal(o.preset, "tiny");
    assert_string_equal(o.data, "stories");
    assert_false(options_set_preset(&o, "none"));
}

static void untyped_warmup_and_min_lr_give_way(void **state) {
    (void)state;
    struct options o;
    parse(&o, "--steps 5");
    assert_int_equal(o.warmup, 5);
    parse(&o, "--lr 1e-5");
    assert_true(o.min_lr == 1e-5);
    parse(&o, "--steps 20 --warmup 20"); // warmup equal to the whole run is allowed
    assert_int_equal(o.warmup, 20);
}

static void decay_of_wsd_is_a_fifth_and_fits_behind_the_warmup(void **state) {
    (void)state;
    struct options o;
    parse(&o, "--schedule wsd --steps 100 --warmup 10");
    assert_int_equal(options_decay_steps(&o), 20);
    parse(&o, "--schedule wsd --steps 100 --warmup 10 --decay-steps 90");
    assert_int_equal(options_decay_steps(&o), 90);
    parse(&o, "--schedule wsd --steps 100 --warmup 95");
    assert_int_equal(options_decay_steps(&o), 5);
    parse(&o, "--schedule wsd --steps 1 --warmup 0");
    assert_int_equal(options_decay_steps(&o), 1);
    parse(&o, "--schedule wsd --steps 1 --warmup 1");
    assert_int_equal(options_decay_steps(&o), 0);
}

static void every_rank_has_a_micro_batch_where_nothing_is_said(void **state) {
    (void)state;
    struct arguments a;
    struct options o;
    split(&a, "--preset unit --batch 3 --seq 16");
    for (int ranks = 1; ranks <= 6; ranks++) {
        options_parse(&o, a.argc, a.argv);
        options_settle(&o, ranks, a.argc, a.argv);
        assert_int_equal(o.tokens_per_step, ranks * 3 * 16);
    }
    split(&a, "--preset unit --batch 3 --seq 16 --tokens-per-step 80"); // does not divide by the ranks
    options_parse(&o, a.argc, a.argv);
    options_settle(&o, 3, a.argc, a.argv);
    assert_int_equal(o.tokens_per_step, 80);
}

static void layout_flags_arrive(void **state) {
    (void)state;
    struct options o;
    parse(&o, "--ep 3 --moe alltoall --alltoall-chunks 4 --workers 5 --comm-workers 2 --minibatch-rows 256 "
              "--ring-rows 1024 --route W7 --trace t.json --trace-step 9 --trace-layer 2 --timeout 0.5");
    assert_true(o.ep == 3 && o.moe.kind == MOE_ALLTOALL && o.moe.alltoall_chunks == 4 && o.moe.workers == 5 &&
                o.moe.comm_workers == 2 && o.moe.minibatch_rows == 256 && o.moe.ring_rows == 1024 &&
                o.moe.route == ROUTE_W7 && o.timeout == 0.5);
    assert_string_equal(o.trace, "t.json");
    assert_int_equal(o.trace_step, 9);
    assert_int_equal(o.trace_layer, 2);
    parse(&o, "--plan --ranks 72 --memory 139.8");
    assert_true(o.ranks == 72 && o.memory == 139.8);
    parse(&o, "--recompute moe");
    assert_int_equal(o.moe.recompute, RECOMPUTE_MOE);
    parse(&o, "--recompute=block");
    assert_int_equal(o.moe.recompute, RECOMPUTE_BLOCK);
    parse(&o, "--generate 3 --from x --moe mok --workers 4 --comm-workers 1 --minibatch-rows 128 --ring-rows 256 "
              "--expert-gemm own");
    assert_true(o.generate == 3 && o.moe.kind == MOE_MOK && o.moe.workers == 4 && o.moe.comm_workers == 1 &&
                o.moe.minibatch_rows == 128 && o.moe.ring_rows == 256 && o.moe.expert_gemm == GROUPED_OWN);
}

static void forced_routing_warns(void **state) {
    (void)state;
    char message[1024];
    assert_int_equal(run_child(parse_line, "--route W1", message, sizeof message), 0);
    assert_non_null(strstr(message, "mok: warning: --route: "));
    assert_int_equal(run_child(parse_line, "--route learned", message, sizeof message), 0);
    assert_string_equal(message, "");
}

static void flags_of_the_other_layer_warn(void **state) {
    (void)state;
    char message[1024];
    assert_int_equal(run_child(parse_line, "--moe mok --alltoall-chunks 2", message, sizeof message), 0);
    assert_non_null(strstr(message, "mok: warning: --alltoall-chunks: "));
    assert_int_equal(run_child(parse_line, "--moe alltoall --ring-rows 256", message, sizeof message), 0);
    assert_non_null(strstr(message, "mok: warning: --moe: "));
    assert_int_equal(run_child(parse_line, "--moe alltoall --trace t --trace-layer 1", message, sizeof message), 0);
    assert_non_null(strstr(message, "mok: warning: --trace-layer: "));
    assert_int_equal(run_child(parse_line, "--moe alltoall --alltoall-chunks 2", message, sizeof message), 0);
    assert_string_equal(message, "");
}

// ---- help ----

static void help_stops_parsing_and_tolerates_other_flags(void **state) {
    (void)state;
    const char *lines[] = {"--help", "--batch 4 --help", "--help --nonsense", "--generate 4 --help", "--batch --help"};
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++) {
        struct options o;
        parse(&o, lines[i]);
        assert_true(o.help);
    }
}

// llm.c's help names two flags that its parser does not know.
static void every_flag_of_the_help_parses_and_every_flag_is_in_it(void **state) {
    (void)state;
    struct options tiny;
    set_preset(&tiny, "tiny");
    cJSON *defaults = options_to_json(&tiny);
    char *help = help_text(), *rest;
    int count = 0;
    for (char *line = strtok_r(help, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        if (strncmp(line, "  --", 4) != 0) continue;
        count++;
        char name[64], text[256], arguments[512], message[1024];
        assert_int_equal(sscanf(line, "  --%63[a-z0-9-]", name), 1);
        const cJSON *item = cJSON_GetObjectItemCaseSensitive(defaults, name);
        if (!item) fail_msg("--%s is in the help, not in the JSON", name);

        bool is_switch = line[4 + strlen(name)] != ' ' || line[5 + strlen(name)] == ' ';
        bool sampling = strcmp(name, "prompt") == 0 || strcmp(name, "temperature") == 0 || strcmp(name, "logits") == 0;
        if (is_switch)
            text[0] = 0;
        else if (cJSON_IsString(item) && !*item->valuestring)
            snprintf(text, sizeof text, " x");
        else if (cJSON_IsString(item) || cJSON_IsRaw(item))
            snprintf(text, sizeof text, " %s", item->valuestring);
        else
            snprintf(text, sizeof text, " %s", cJSON_IsTrue(item) ? "true" : "false");
        snprintf(arguments, sizeof arguments, "--%s%s%s", name, text,
                 sampling                        ? " --generate 1 --from x"
                 : strcmp(name, "override") == 0 ? " --resume"
                 : strcmp(name, "evaluate") == 0 ? " --from x"
                 : strcmp(name, "ranks") == 0    ? " --plan"
                                                 : "");
        int code = run_child(parse_line, arguments, message, sizeof message);
        if (code != 0) fail_msg("%s: exit code %d: %s", arguments, code, message);
    }
    assert_int_equal(count, cJSON_GetArraySize(defaults));
    cJSON_Delete(defaults);
}

static void help_lists_every_preset_and_keeps_to_100_columns(void **state) {
    (void)state;
    char *help = help_text(), *rest;
    char *presets_part = strstr(help, "\nPresets");
    assert_non_null(presets_part);
    for (int i = 0; i < preset_count; i++) {
        char line[64];
        snprintf(line, sizeof line, "\n  %s ", presets[i].name);
        if (!strstr(presets_part, line)) fail_msg("preset %s is not in the help", presets[i].name);
        assert_non_null(strstr(presets_part, presets[i].purpose));
    }
    for (char *line = strtok_r(help, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest))
        if (strlen(line) > 100) fail_msg("%zu columns: %s", strlen(line), line);
}

// ---- JSON ----

static void every_flag_round_trips_through_json_and_changes_nothing_else(void **state) {
    (void)state;
    struct options defaults;
    set_preset(&defaults, "tiny");
    cJSON *all = options_to_json(&defaults);
    const cJSON *item;
    cJSON_ArrayForEach(item, all) {
        const char *value = "7"; // in range for every number but these
        if (strncmp(item->string, "beta", 4) == 0) value = "0.7";
        if (strcmp(item->string, "mtp-depth") == 0) value = "3";
        if (cJSON_IsBool(item)) value = cJSON_IsTrue(item) ? "false" : "true";
        if (cJSON_IsString(item)) value = "\"x \\\"y\\\" \\u00e9\"";
        if (strcmp(item->string, "schedule") == 0) value = "\"constant\"";
        if (strcmp(item->string, "moe") == 0) value = "\"alltoall\"";
        if (strcmp(item->string, "expert-gemm") == 0) value = "\"cublaslt\"";
        if (strcmp(item->string, "route") == 0) value = "\"W7\"";
        if (strcmp(item->string, "recompute") == 0) value = "\"block\"";
        char patch[256];
        snprintf(patch, sizeof patch, "{\"%s\": %s}", item->string, value);

        struct options changed = defaults, again = defaults;
        const char *wrong = read_options(&changed, patch);
        if (wrong) fail_msg("%s: %s", patch, wrong);
        char *text = print_options(&changed);
        assert_null(read_options(&again, text));
        char *text_again = print_options(&again);
        assert_string_equal(text, text_again);

        cJSON *now = options_to_json(&again);
        int differ = 0;
        for (cJSON *a = all->child, *b = now->child; a; a = a->next, b = b->next) {
            assert_string_equal(a->string, b->string);
            if (cJSON_Compare(a, b, true)) continue;
            differ++;
            assert_string_equal(a->string, item->string);
        }
        if (differ != 1) fail_msg("%s changed %d members", patch, differ);
        cJSON_Delete(now);
        free(text);
        free(text_again);
    }
    cJSON_Delete(all);
}

static void numbers_survive_json_to_the_last_bit(void **state) {
    (void)state;
    struct options o, again;
    set_preset(&o, "tiny");
    set_preset(&again, "tiny");
    o.lr = 0.1 + 0.2; // needs 17 digits
    o.adam_eps = 1e-8;
    o.seed = UINT64_MAX;
    o.steps = 999999999999;
    char *text = print_options(&o);
    assert_null(read_options(&again, text));
    assert_true(again.lr == o.lr);
    assert_true(again.adam_eps == o.adam_eps);
    assert_true(again.seed == o.seed);
    assert_true(again.steps == o.steps);
    free(text);
}

// Checkpoints of one run under several layouts can be compared byte by byte.
static void run_is_told_without_its_layout(void **state) {
    (void)state;
    struct options a, b;
    parse(&a, "--preset unit --lr 0.01 --tokens-per-step 512 --out a");
    parse(&b, "--preset unit --lr 0.01 --tokens-per-step 512 --out b --overwrite --from c --ep 4 --moe alltoall "
              "--workers 3 --comm-workers 1 --minibatch-rows 128 --ring-rows 256 --alltoall-chunks 2 "
              "--trace t --trace-step 7 --trace-layer 2 --timeout 9");
    cJSON *of_a = options_run_to_json(&a), *of_b = options_run_to_json(&b);
    assert_true(cJSON_Compare(of_a, of_b, true));
    b.lr = 0.02;
    cJSON *other = options_run_to_json(&b);
    assert_false(cJSON_Compare(of_a, other, true));
    cJSON_Delete(of_a);
    cJSON_Delete(of_b);
    cJSON_Delete(other);
}

static void wrong_json_is_named_and_changes_nothing(void **state) {
    (void)state;
    const struct {
        const char *text, *words[2];
    } cases[] = {
        {"[1]", {"object", ""}},
        {"{\"batch\": 4, \"bacth\": 4}", {"\"bacth\"", "unknown"}},
        {"{\"batch\": 4, \"seq\": \"4\"}", {"\"seq\"", "whole number"}},
        {"{\"batch\": 4, \"seq\": 4.5}", {"\"seq\"", "whole number"}},
        {"{\"batch\": 4, \"seq\": -4}", {"\"seq\"", "from 1"}},
        {"{\"batch\": 4, \"seq\": 1e300}", {"\"seq\"", "2147483647"}},
        {"{\"batch\": 4, \"seq\": null}", {"\"seq\"", "whole number"}},
        {"{\"batch\": 4, \"lr\": true}", {"\"lr\"", "number"}},
        {"{\"batch\": 4, \"resume\": \"true\"}", {"\"resume\"", "true or false"}},
        {"{\"batch\": 4, \"schedule\": \"cos\"}", {"\"schedule\"", "cosine|"}},
        {"{\"batch\": 4, \"data\": 4}", {"\"data\"", "bytes"}},
        {"{\"batch\": 4, \"batch\": 5}", {"\"batch\"", "twice"}},
        {"{\"batch\": 4, \"preset\": \"a name that does not fit into its 32 bytes\"}", {"\"preset\"", "31 bytes"}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct options o;
        set_preset(&o, "tiny");
        const char *wrong = read_options(&o, cases[i].text);
        if (!wrong) fail_msg("%s was taken", cases[i].text);
        for (int w = 0; w < 2; w++)
            if (!strstr(wrong, cases[i].words[w]))
                fail_msg("%s: no '%s' in: %s", cases[i].text, cases[i].words[w], wrong);
        assert_int_equal(o.batch, 8);
    }
}

static void compare_prints_what_changed_and_names_what_may_not(void **state) {
    (void)state;
    struct options before, now;
    set_preset(&before, "tiny");
    now = before;
    now.resume = true;
    now.steps = 800;
    now.keep = 9;
    char text[1024];
    FILE *file = fmemopen(text, sizeof text, "w");
    assert_non_null(file);
    assert_null(options_compare(file, &before, &now, false));
    now.lr = 1e-4;
    now.model.experts = 32;
    assert_string_equal(options_compare(file, &before, &now, false), "lr");
    assert_int_equal(fclose(file), 0);
    assert_non_null(strstr(text, "--steps: 1200 before, 800 now\n"));
    assert_non_null(strstr(text, "--lr: 0.003 before, 0.0001 now\n"));
    assert_non_null(strstr(text, "--experts: 16 before, 32 now\n"));
    assert_null(strstr(text, "--resume"));
    // With --override a setting may change, a tensor's size may not.
    assert_string_equal(options_compare(stdout, &before, &now, true), "experts");
    now.model.experts = before.model.experts;
    assert_null(options_compare(stdout, &before, &now, true));
    assert_string_equal(options_compare(stdout, &before, &now, false), "lr");
}

// Whether a word stands in a list of words between spaces.
static bool is_among(const char *name, const char *list) {
    char word[80];
    snprintf(word, sizeof word, " %s ", name);
    return strstr(list, word) != NULL;
}

// Another value than the default, as options_from_json takes it.
static cJSON *other_value(const cJSON *item) {
    if (cJSON_IsBool(item)) return cJSON_CreateBool(!cJSON_IsTrue(item));
    if (cJSON_IsString(item)) {
        if (strcmp(item->valuestring, "cosine") == 0) return cJSON_CreateString("linear");
        if (strcmp(item->valuestring, "tiny") == 0) return cJSON_CreateString("small");
        if (strcmp(item->valuestring, "mok") == 0) return cJSON_CreateString("alltoall");
        if (strcmp(item->valuestring, "own") == 0) return cJSON_CreateString("cublaslt");
        if (strcmp(item->valuestring, "learned") == 0) return cJSON_CreateString("balanced");
        if (strcmp(item->valuestring, "none") == 0) return cJSON_CreateString("moe");
        return cJSON_CreateString("other");
    }
    double value = strtod(item->valuestring, NULL);
    if (value < 0.99) return cJSON_CreateNumber(0.99);
    return cJSON_CreateNumber(value == 2 ? 4 : 2);
}

// Every flag, one by one: what a resumed run may change, only with --override, or never.
static void every_flag_says_whether_a_resumed_run_may_change_it(void **state) {
    (void)state;
    static const char free_flags[] =
        " preset data eval-data tokenizer from out resume override overwrite evaluate device batch "
        "ep moe workers comm-workers minibatch-rows ring-rows alltoall-chunks expert-gemm trace trace-step "
        "trace-layer timeout "
        "ranks memory "
        "recompute "
        "plan help steps save-every keep eval-every eval-sequences eval-choices "
        "sample-every sample-tokens log-moe-every generate prompt temperature logits ";
    static const char sizes[] = " vocab hidden layers dense-layers heads q-rank kv-rank nope-dim rope-dim value-dim "
                                "intermediate mtp-depth expert-intermediate experts shared-experts ";
    struct options before;
    set_preset(&before, "tiny");
    cJSON *all = options_to_json(&before), *item;
    FILE *nowhere = fopen("/dev/null", "w");
    cJSON_ArrayForEach(item, all) {
        struct options now = before;
        cJSON *change = cJSON_CreateObject();
        cJSON_AddItemToObject(change, item->string, other_value(item));
        const char *wrong = options_from_json(&now, change);
        if (wrong) { // fractions are not for whole numbers
            cJSON_ReplaceItemInObjectCaseSensitive(change, item->string, cJSON_CreateNumber(3));
            wrong = options_from_json(&now, change);
        }
        if (wrong) fail_msg("--%s: %s", item->string, wrong);
        bool is_switch = cJSON_IsBool(item) && strcmp(item->string, "normalize-gates") != 0;
        bool may = is_among(item->string, free_flags), never = is_among(item->string, sizes);
        const char *plain = options_compare(nowhere, &before, &now, false);
        const char *override = options_compare(nowhere, &before, &now, true);
        if (!plain != (may || is_switch)) fail_msg("--%s: may change: %s", item->string, plain ? "no" : "yes");
        if (!override == never) fail_msg("--%s: may change with --override: %s", item->string, override ? "no" : "yes");
        cJSON_Delete(change);
    }
    fclose(nowhere);
    cJSON_Delete(all);
}

// ---- a run that goes on ----

// Settings that no default has, as a checkpoint keeps them.
static struct cJSON *saved_settings(void) {
    struct options o;
    fail_hold_warnings(true); // of the workers, which the layer has no use for
    parse(&o, "--preset unit --lr 0.01 --keep 0 --steps 70 --warmup 7 --seq 16 --data my.txt --out elsewhere "
              "--batch 3 --ep 2 --moe alltoall --workers 3 --timeout 7 --trace old.json");
    fail_hold_warnings(false);
    return options_to_json(&o);
}

struct resuming {
    const char *line;
    int ranks; // 0: one
    struct options o;
};

static void resume_line(void *argument) {
    struct resuming *r = argument;
    struct arguments a;
    split(&a, r->line);
    cJSON *saved = saved_settings();
    options_parse(&r->o, a.argc, a.argv);
    options_resume(&r->o, saved, "run/step-00000005", r->ranks ? r->ranks : 1, a.argc, a.argv);
    cJSON_Delete(saved);
}

static void resumed_run_has_the_saved_settings(void **state) {
    (void)state;
    struct resuming r = {.line = "--resume --out here"};
    resume_line(&r);
    assert_string_equal(r.o.preset, "unit");
    assert_string_equal(r.o.data, "my.txt");
    assert_string_equal(r.o.out, "here"); // the run may have been moved
    assert_true(r.o.lr == 0.01 && r.o.keep == 0 && r.o.steps == 70 && r.o.warmup == 7 && r.o.seq == 16);
    assert_true(r.o.resume);
}

static void flags_that_are_given_change_a_resumed_run(void **state) {
    (void)state;
    struct resuming r = {.line = "--resume --preset unit --steps 90 --keep 2 --lr 0.01"};
    resume_line(&r);
    assert_true(r.o.steps == 90 && r.o.keep == 2 && r.o.lr == 0.01 && r.o.warmup == 7);
    r.line = "--resume --override --lr 0.02 --warmup 3 --top-k 1";
    resume_line(&r);
    assert_true(r.o.lr == 0.02 && r.o.warmup == 3 && r.o.steps == 70 && r.o.model.top_k == 1);
}

// The layout of a run belongs to the machine it runs on now; what a step trains on stays the same.
static void resumed_run_is_laid_out_anew(void **state) {
    (void)state;
    struct resuming r = {.line = "--resume", .ranks = 5};
    resume_line(&r);
    assert_true(r.o.ep == 0 && r.o.moe.kind == MOE_MOK && r.o.moe.workers == 0 && r.o.timeout == 300);
    assert_string_equal(r.o.trace, "");
    assert_int_equal(r.o.batch, 3);
    assert_int_equal(r.o.tokens_per_step, 3 * 16); // as the one rank before
    r.line = "--resume --ep 4 --moe alltoall --alltoall-chunks 3 --batch 1 --trace new.json --recompute moe";
    resume_line(&r);
    assert_true(r.o.ep == 4 && r.o.moe.kind == MOE_ALLTOALL && r.o.moe.alltoall_chunks == 3 && r.o.moe.workers == 0);
    assert_string_equal(r.o.trace, "new.json");
    assert_int_equal(r.o.moe.recompute, RECOMPUTE_MOE);
    assert_int_equal(r.o.batch, 1);
    assert_int_equal(r.o.tokens_per_step, 3 * 16);
}

// The rate of a checkpoint beats the command line, or the other way round, in silence (Megatron-LM issue 963, verl issue
// 7953).
static void changes_that_make_another_run_are_refused(void **state) {
    (void)state;
    static const struct {
        const char *line, *words[5];
    } cases[] = {
        {"--resume --lr 0.02", {"--lr: found another value", "run/step-00000005", "--override", "--out"}},
        {"--resume --tokens-per-step 64", {"--tokens-per-step: found another value", "--override"}},
        {"--resume --warmup 3", {"--warmup: found another value"}},
        {"--resume --hidden 96", {"--hidden: found another value", "leave the flag out, or start a new run"}},
        {"--resume --override --hidden 96", {"--hidden: found another value"}},
        {"--resume --override --mtp-depth 2", {"--mtp-depth: found another value"}},
        {"--resume --preset tiny", {"--preset: found tiny, wanted unit"}},
        {"--resume --steps 5", {"--warmup: found 7, wanted at most --steps 5"}},
        {"--resume --override --tokens-per-step 17", {"--tokens-per-step: found 17"}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char message[1024];
        const char *words[6] = {0};
        memcpy(words, cases[i].words, sizeof cases[i].words);
        struct resuming r = {.line = cases[i].line};
        int code = run_child(resume_line, &r, message, sizeof message);
        assert_refused(cases[i].line, code, message, words);
    }
}

// ---- a run that starts from weights ----

struct taking {
    const char *line;
    struct config found;
    struct options o;
};

static void take_line(void *argument) {
    struct taking *t = argument;
    struct arguments a;
    split(&a, t->line);
    options_parse(&t->o, a.argc, a.argv);
    options_take_model(&t->o, &t->found, "there", a.argc, a.argv);
    options_settle(&t->o, 1, a.argc, a.argv);
}

static struct config other_model(void) {
    struct config c = *valid_config(preset_find("unit"));
    c.vocab = 300;
    c.mtp_depth = 2;
    c.rope_theta = 12345;
    return c;
}

static void weights_bring_their_model(void **state) {
    (void)state;
    struct taking t = {.line = "--from there --seq 32", .found = other_model()};
    take_line(&t);
    assert_memory_equal(&t.o.model, &t.found, sizeof t.found);
    assert_string_equal(t.o.preset, "tiny"); // the rest of the settings
    assert_int_equal(t.o.seq, 32);
}

static void flags_may_change_what_weights_do_not_fix(void **state) {
    (void)state;
    struct taking t = {.line = "--from there --mtp-depth 1 --rope-theta 5000 --bias-rate 0 --hidden 64",
                       .found = other_model()};
    assert_int_equal(t.found.hidden, 64);
    take_line(&t);
    assert_int_equal(t.o.model.mtp_depth, 1);
    assert_true(t.o.model.rope_theta == 5000 && t.o.model.bias_rate == 0);
    assert_int_equal(t.o.model.vocab, 300);
}

static void sizes_that_contradict_the_weights_are_refused(void **state) {
    (void)state;
    static const struct {
        const char *line, *words[5];
    } cases[] = {
        {"--from there --hidden 96", {"--hidden: found 96, wanted 64", "there", "leave the flag out"}},
        {"--from there --vocab 257", {"--vocab: found 257, wanted 300"}},
        {"--from there --mtp-depth 3", {"--mtp-depth: found 3, wanted 2"}},
        {"--from there --experts 4", {"--experts: found 4, wanted 8"}},
        {"--from there --seq 100000", {"--seq: found 100000", "--max-positions"}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char message[1024];
        const char *words[6] = {0};
        memcpy(words, cases[i].words, sizeof cases[i].words);
        struct taking t = {.line = cases[i].line, .found = other_model()};
        int code = run_child(take_line, &t, message, sizeof message);
        assert_refused(cases[i].line, code, message, words);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(refused_command_lines_name_flag_found_and_wanted),
        cmocka_unit_test(text_longer_than_its_room_is_refused),
        cmocka_unit_test(values_arrive_in_both_spellings_and_any_order),
        cmocka_unit_test(no_flags_mean_the_tiny_preset),
        cmocka_unit_test(every_rank_has_a_micro_batch_where_nothing_is_said),
        cmocka_unit_test(layout_flags_arrive),
        cmocka_unit_test(forced_routing_warns),
        cmocka_unit_test(flags_of_the_other_layer_warn),
        cmocka_unit_test(run_is_told_without_its_layout),
        cmocka_unit_test(untyped_warmup_and_min_lr_give_way),
        cmocka_unit_test(decay_of_wsd_is_a_fifth_and_fits_behind_the_warmup),
        cmocka_unit_test(help_stops_parsing_and_tolerates_other_flags),
        cmocka_unit_test(every_flag_of_the_help_parses_and_every_flag_is_in_it),
        cmocka_unit_test(help_lists_every_preset_and_keeps_to_100_columns),
        cmocka_unit_test(every_flag_round_trips_through_json_and_changes_nothing_else),
        cmocka_unit_test(numbers_survive_json_to_the_last_bit),
        cmocka_unit_test(wrong_json_is_named_and_changes_nothing),
        cmocka_unit_test(compare_prints_what_changed_and_names_what_may_not),
        cmocka_unit_test(every_flag_says_whether_a_resumed_run_may_change_it),
        cmocka_unit_test(resumed_run_has_the_saved_settings),
        cmocka_unit_test(flags_that_are_given_change_a_resumed_run),
        cmocka_unit_test(resumed_run_is_laid_out_anew),
        cmocka_unit_test(changes_that_make_another_run_are_refused),
        cmocka_unit_test(weights_bring_their_model),
        cmocka_unit_test(flags_may_change_what_weights_do_not_fix),
        cmocka_unit_test(sizes_that_contradict_the_weights_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

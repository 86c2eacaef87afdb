// The tokenizer room: ids against Hugging Face's tokenizers (tests/reference_tokenizers.py computed them), words against
// merging done the slow way, round trips. Run from the root of the repository.
#include "tests/tokenizers.h"

#include <pthread.h>

#include "data/added_tokens.h"
#include "data/bpe.h"
#include "kernels/clock.h"

// ---- against Hugging Face ----

static cJSON *read_reference(const char *name) {
    char error[FILE_ERROR] = "";
    cJSON *json = file_read_json("tests/reference/tokenizers.json", error, sizeof error);
    if (!json) fail_msg("%s", error);
    cJSON *list = cJSON_DetachItemFromObjectCaseSensitive(json, name);
    assert_true(cJSON_GetArraySize(list) > 0);
    cJSON_Delete(json);
    return list;
}

static size_t read_hexadecimal(const char *digits, char *text, size_t capacity) {
    size_t bytes = strlen(digits) / 2;
    assert_true(bytes <= capacity);
    for (size_t i = 0; i < bytes; i++) {
        unsigned byte;
        assert_int_equal(sscanf(digits + 2 * i, "%2x", &byte), 1);
        text[i] = (char)(unsigned char)byte;
    }
    return bytes;
}

static void compare_ids(const char *name, const struct tokenizer *t, const cJSON *entry, bool special,
                        const cJSON *wanted) {
    char text[4096];
    size_t bytes = read_hexadecimal(cJSON_GetObjectItem(entry, "text")->valuestring, text, sizeof text);
    struct token_list ids = encode(t, text, bytes, special);
    const cJSON *id;
    size_t i = 0;
    cJSON_ArrayForEach(id, wanted) {
        if (i >= ids.count || ids.ids[i] != id->valueint)
            fail_msg("%s, \"%.*s\", special %d: id %zu of %zu is %d, wanted %d", name, (int)bytes, text, special, i,
                     ids.count, i < ids.count ? ids.ids[i] : -1, id->valueint);
        i++;
    }
    if (i != ids.count) fail_msg("%s, \"%.*s\": %zu ids, wanted %zu", name, (int)bytes, text, ids.count, i);
    free(ids.ids);
}

static void ids_are_those_of_hugging_face(void **state) {
    (void)state;
    cJSON *texts = read_reference("texts"), *entry;
    int compared = 0;
    cJSON_ArrayForEach(entry, texts) {
        const char *name = cJSON_GetObjectItem(entry, "tokenizer")->valuestring;
        const cJSON *special = cJSON_GetObjectItem(entry, "special"), *plain = cJSON_GetObjectItem(entry, "plain");
        for (int v = 0; v < VOCABULARIES; v++) {
            if (strcmp(name, NAMES[v]) != 0) continue;
            compare_ids(name, trained[v], entry, true, special);
            compare_ids(name, trained[v], entry, false, plain ? plain : special);
            compared++;
        }
    }
    assert_int_equal(compared, cJSON_GetArraySize(texts));
    cJSON_Delete(texts);
}

static void other_ways_to_cut_words_are_those_of_hugging_face(void **state) {
    (void)state;
    cJSON *variants = read_reference("variants"), *variant, *entry;
    cJSON_ArrayForEach(variant, variants) {
        cJSON *steps = cJSON_GetObjectItem(variant, "pre_tokenizer");
        write_changed("variant.json", "pre_tokenizer", cJSON_Duplicate(steps, true));
        struct tokenizer *t = open_or_fail(at("variant.json"));
        char *name = cJSON_PrintUnformatted(steps);
        cJSON_ArrayForEach(entry, cJSON_GetObjectItem(variant, "texts"))
            compare_ids(name, t, entry, true, cJSON_GetObjectItem(entry, "ids"));
        assert_true(tokenizer_hash(t) != tokenizer_hash(trained[GPT2]));
        cJSON_free(name);
        tokenizer_close(t);
    }
    cJSON_Delete(variants);
}

// ---- round trips ----

// Random characters of all lengths of UTF-8, random bytes, and pieces of words and tokens.
static size_t make_text(uint64_t *seed, char *text, size_t capacity) {
    static const char *const pieces[] = {"the", " child",        "'ll",     "  ",   "\r\n", "\t",
                                         "123", "<|endoftext|>", "<think>", "日本", "ё"};
    size_t used = 0, kinds = sizeof pieces / sizeof *pieces;
    while (used + 20 < capacity) {
        double choice = test_uniform(seed);
        if (choice < 0.5) {
            const char *piece = pieces[(size_t)(test_uniform(seed) * (double)kinds)];
            memcpy(text + used, piece, strlen(piece));
            used += strlen(piece);
        } else {
            int top = choice < 0.7 ? 0x80 : 0x100;
            text[used++] = (char)(unsigned char)(test_uniform(seed) * top);
        }
    }
    return used;
}

static void any_bytes_come_back(void **state) {
    (void)state;
    struct tokenizer *bytes = tokenizer_open_bytes();
    uint64_t seed = 3;
    char text[600];
    for (int i = 0; i < 400; i++) {
        size_t n = make_text(&seed, text, (size_t)(test_uniform(&seed) * (double)sizeof text));
        for (int v = 0; v < VOCABULARIES; v++) check_round_trip(trained[v], text, n);
        check_round_trip(bytes, text, n);
    }
    tokenizer_close(bytes);
}

// What is not UTF-8 is single bytes, and the text on either side is what it would be alone.
static void bytes_that_are_not_utf8_stand_alone(void **state) {
    (void)state;
    static const struct {
        const char *text;
        size_t bytes;
    } broken[] = {{"\xff", 1},         {"\x80", 1},         {"\xc0\xaf", 2},
                  {"\xe0\x9f\xbf", 3}, {"\xed\xa0\x80", 3}, {"\xf4\x90\x80\x80", 4},
                  {"\xe3\x81", 2},     {"\xf0\x9f\x91", 3}, {"\xf8\x88", 2}};
    for (size_t i = 0; i < sizeof broken / sizeof *broken; i++) {
        char text[64];
        int bytes = snprintf(text, sizeof text, "the child %s the  child", broken[i].text);
        for (int v = 0; v < VOCABULARIES; v++) {
            struct token_list whole = encode(trained[v], text, (size_t)bytes, true), parts = {0};
            tokenizer_encode(trained[v], "the child ", 10, true, &parts);
            for (size_t j = 0; j < broken[i].bytes; j++)
                tokenizer_encode(trained[v], broken[i].text + j, 1, true, &parts);
            tokenizer_encode(trained[v], " the  child", 11, true, &parts);
            assert_int_equal(whole.count, parts.count);
            assert_memory_equal(whole.ids, parts.ids, whole.count * sizeof *whole.ids);
            free(whole.ids);
            free(parts.ids);
        }
    }
}

static void special_tokens_are_read_only_when_asked_for(void **state) {
    (void)state;
    const char text[] = "a<|endoftext|>b";
    struct token_list with = encode(trained[GPT2], text, strlen(text), true);
    struct token_list without = encode(trained[GPT2], text, strlen(text), false);
    int32_t end = tokenizer_end_of_text(trained[GPT2]);
    assert_int_equal(end, tokenizer_find(trained[GPT2], "<|endoftext|>"));
    assert_int_equal(with.count, 3);
    assert_int_equal(with.ids[1], end);
    for (size_t i = 0; i < without.count; i++) assert_int_not_equal(without.ids[i], end);
    assert_int_equal(tokenizer_token_bytes(trained[GPT2], end), 0);
    char back[64];
    assert_int_equal(tokenizer_decode(trained[GPT2], back, sizeof back, with.ids, 3), 3);
    assert_memory_equal(back, "a\nb", 3);
    free(with.ids);
    free(without.ids);

    // A token that is not special is text, found either way; other special tokens decode to their own text.
    int32_t think = tokenizer_find(trained[DEEPSEEK], "<think>");
    int32_t begin = tokenizer_find(trained[DEEPSEEK], "<｜begin▁of▁sentence｜>");
    assert_true(think >= 0 && begin >= 0);
    without = encode(trained[DEEPSEEK], "<think>", 7, false);
    assert_int_equal(without.count, 1);
    assert_int_equal(without.ids[0], think);
    assert_int_equal(tokenizer_token_bytes(trained[DEEPSEEK], think), 7);
    const int32_t odd[] = {begin, think, -1, tokenizer_vocab(trained[DEEPSEEK]), INT32_MAX};
    const char wanted[] = "<｜begin▁of▁sentence｜><think>???";
    assert_int_equal(tokenizer_decode_room(trained[DEEPSEEK], odd, 5), strlen(wanted));
    assert_int_equal(tokenizer_decode(trained[DEEPSEEK], back, sizeof back, odd, 5), strlen(wanted));
    assert_memory_equal(back, wanted, strlen(wanted));
    assert_int_equal(tokenizer_token_bytes(trained[DEEPSEEK], begin), 0);
    assert_int_equal(tokenizer_token_bytes(trained[DEEPSEEK], -1), 0);
    assert_int_equal(tokenizer_token_bytes(trained[DEEPSEEK], INT32_MAX), 0);
    assert_int_equal(tokenizer_find(trained[DEEPSEEK], "<thin"), -1);
    assert_int_equal(tokenizer_find(trained[DEEPSEEK], ""), -1);
    free(without.ids);
}

static void ids_are_appended(void **state) {
    (void)state;
    struct token_list ids = {0};
    for (int i = 0; i < 1000; i++) tokenizer_encode(trained[GPT2], "x", 1, false, &ids);
    assert_int_equal(ids.count, 1000);
    for (int i = 1; i < 1000; i++) assert_int_equal(ids.ids[i], ids.ids[0]);
    tokenizer_encode(trained[GPT2], NULL, 0, true, &ids);
    assert_int_equal(ids.count, 1000);
    free(ids.ids);
}

// ---- merging ----

// The pair of lowest rank, leftmost first, looked for anew after every merge; ranks by their place in a list.
struct slow_bpe {
    int32_t left[64], right[64], id[64];
    int merges;
};

static size_t merge_slowly(const struct slow_bpe *s, int32_t *ids, size_t n) {
    for (;;) {
        int best = -1;
        size_t place = 0;
        for (int m = 0; m < s->merges && best < 0; m++)
            for (size_t i = 0; i + 1 < n && best < 0; i++)
                if (ids[i] == s->left[m] && ids[i + 1] == s->right[m]) best = m, place = i;
        if (best < 0) return n;
        ids[place] = s->id[best];
        memmove(ids + place + 1, ids + place + 2, (n - place - 2) * sizeof *ids);
        n--;
    }
}

// A vocabulary over a and b (ids 256 and on for what is merged): many ways to build the same words.
static void make_merges(struct bpe *b, struct slow_bpe *s, uint64_t *seed) {
    char texts[320][40];
    size_t lengths[320];
    int vocab = 256;
    bpe_create(b, 320, 320 * 40, 64);
    *s = (struct slow_bpe){0};
    for (int byte = 0; byte < 256; byte++) {
        texts[byte][0] = (char)(unsigned char)byte;
        lengths[byte] = 1;
        bpe_add_token(b, byte, texts[byte], 1, false, true);
        b->byte_ids[byte] = byte;
    }
    while (s->merges < 30) {
        int pick[2];
        for (int i = 0; i < 2; i++) {
            int any = (int)(test_uniform(seed) * (vocab - 256 + 2));
            pick[i] = any < 2 ? 'a' + any : 256 + any - 2;
        }
        size_t length = lengths[pick[0]] + lengths[pick[1]];
        if (length > 39) continue;
        bool known = false;
        for (int m = 0; m < s->merges; m++) known = known || (s->left[m] == pick[0] && s->right[m] == pick[1]);
        if (known) continue;
        memcpy(texts[vocab], texts[pick[0]], lengths[pick[0]]);
        memcpy(texts[vocab] + lengths[pick[0]], texts[pick[1]], lengths[pick[1]]);
        int32_t id = bpe_find(b, texts[vocab], length, false);
        if (id < 0) {
            id = vocab++;
            lengths[id] = length;
            bpe_add_token(b, id, texts[id], length, false, true);
        }
        bpe_add_merge(b, pick[0], pick[1], id);
        s->left[s->merges] = pick[0];
        s->right[s->merges] = pick[1];
        s->id[s->merges++] = id;
    }
    bpe_mark_whole_words(b);
}

static void merges_are_done_by_rank_and_from_the_left(void **state) {
    (void)state;
    uint64_t seed = 11;
    for (int round = 0; round < 60; round++) {
        struct bpe b;
        struct slow_bpe s;
        make_merges(&b, &s, &seed);
        for (int i = 0; i < 40; i++) {
            char word[200];
            int32_t wanted[200];
            // Words on either side of the length where the way of merging changes.
            size_t n = 1 + (size_t)(test_uniform(&seed) * (i % 2 ? 199 : 20));
            for (size_t k = 0; k < n; k++) wanted[k] = word[k] = test_uniform(&seed) < 0.6 ? 'a' : 'b';
            size_t count = merge_slowly(&s, wanted, n);
            struct token_list found = {0};
            bpe_encode(&b, word, n, &found);
            assert_int_equal(found.count, count);
            assert_memory_equal(found.ids, wanted, count * sizeof *wanted);
            free(found.ids);
        }
        bpe_close(&b);
    }
}

// The vocabulary of gpt2, two of whose merges, neighbours, have changed places; with drop the first of them is gone.
static uint64_t hash_of_changed_merges(int place, bool drop) {
    char error[FILE_ERROR] = "";
    cJSON *json = file_read_json(reference_path("gpt2"), error, sizeof error);
    assert_non_null(json);
    cJSON *merges = cJSON_GetObjectItem(cJSON_GetObjectItem(json, "model"), "merges");
    cJSON *first = cJSON_GetArrayItem(merges, place), *second = first->next;
    char *text = first->valuestring;
    first->valuestring = second->valuestring;
    second->valuestring = text;
    if (drop) cJSON_DeleteItemFromArray(merges, place);
    if (!file_write_json(at("tokenizer.json"), json, error, sizeof error)) fail_msg("%s", error);
    cJSON_Delete(json);
    struct tokenizer *t = open_or_fail(at("tokenizer.json"));
    assert_int_equal(tokenizer_vocab(t), tokenizer_vocab(trained[GPT2]));
    uint64_t hash = tokenizer_hash(t);
    tokenizer_close(t);
    return hash;
}

// Merges in another order make other ids of the same vocabulary.
static void merges_and_their_order_are_in_the_hash(void **state) {
    (void)state;
    uint64_t hashes[] = {tokenizer_hash(trained[GPT2]), hash_of_changed_merges(0, false),
                         hash_of_changed_merges(700, false), hash_of_changed_merges(0, true)};
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < i; k++) assert_true(hashes[i] != hashes[k]);
    write_changed("tokenizer.json", "truncation", cJSON_CreateNull()); // written anew, it is the same
    struct tokenizer *t = open_or_fail(at("tokenizer.json"));
    assert_true(tokenizer_hash(t) == hashes[0]);
    tokenizer_close(t);
}

// Runs without an end to the word: work that grows with the square of the length would take hours. The limit is some
// hundred times what it takes.
static void long_runs_are_quick(void **state) {
    (void)state;
    static const char *const pieces[] = {"a",  "ab", " ",       "\n",      " \n",  "1",  "!",
                                         "風", "ё",  "e\u0301", "👩\u200d", "\xff", "'s", "\t "};
    enum { BYTES = 1 << 17 };
    char *text = malloc(BYTES + 16);
    assert_non_null(text);
    double start = clock_seconds();
    for (size_t i = 0; i < sizeof pieces / sizeof *pieces; i++) {
        size_t length = strlen(pieces[i]), n = 0;
        for (; n < BYTES; n += length) memcpy(text + n, pieces[i], length);
        text[n++] = 'x'; // something to look for in vain until the very end
        for (int v = 0; v < VOCABULARIES; v++) {
            struct token_list ids = encode(trained[v], text, n, true);
            assert_int_equal(tokenizer_decode_room(trained[v], ids.ids, ids.count), n);
            free(ids.ids);
        }
    }
    double seconds = clock_seconds() - start;
    print_message("%.2f s for %zu runs of %d KiB\n", seconds, sizeof pieces / sizeof *pieces * VOCABULARIES,
                  BYTES >> 10);
    assert_true(seconds < 120);
    free(text);
}

static void *encode_in_thread(void *argument) {
    struct token_list *ids = argument;
    for (int i = 0; i < 200; i++) {
        ids->count = 0;
        tokenizer_encode(trained[LLAMA3], "The wind blew over the hill, 12345 times!\r\n\r\n 風が丘の上", 58, true,
                         ids);
    }
    return NULL;
}

static void threads_share_a_tokenizer(void **state) {
    (void)state;
    pthread_t threads[4];
    struct token_list ids[5] = {0};
    for (int i = 0; i < 4; i++) assert_int_equal(pthread_create(&threads[i], NULL, encode_in_thread, &ids[i]), 0);
    encode_in_thread(&ids[4]);
    for (int i = 0; i < 4; i++) {
        pthread_join(threads[i], NULL);
        assert_int_equal(ids[i].count, ids[4].count);
        assert_memory_equal(ids[i].ids, ids[4].ids, ids[4].count * sizeof *ids[4].ids);
        free(ids[i].ids);
    }
    free(ids[4].ids);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ids_are_those_of_hugging_face),
        in_folder(other_ways_to_cut_words_are_those_of_hugging_face),
        cmocka_unit_test(any_bytes_come_back),
        cmocka_unit_test(bytes_that_are_not_utf8_stand_alone),
        cmocka_unit_test(special_tokens_are_read_only_when_asked_for),
        cmocka_unit_test(ids_are_appended),
        cmocka_unit_test(merges_are_done_by_rank_and_from_the_left),
        in_folder(merges_and_their_order_are_in_the_hash),
        cmocka_unit_test(long_runs_are_quick),
        cmocka_unit_test(threads_share_a_tokenizer),
    };
    return cmocka_run_group_tests(tests, open_trained, close_trained);
}

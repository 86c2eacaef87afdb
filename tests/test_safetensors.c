// Tensor files that lie, and those that do not.
#include "tests/saved_model.h"

#include "model/safetensors.h"

// Header, then bytes of data; length is what the first 8 bytes say, -1 for the truth.
static void write_tensors(const char *header, int64_t length, size_t data_bytes) {
    size_t header_bytes = strlen(header);
    char *text = calloc(1, 8 + header_bytes + data_bytes);
    uint64_t said = length == -1 ? header_bytes : (uint64_t)length;
    memcpy(text, &said, 8);
    memcpy(text + 8, header, header_bytes);
    write_file("x.safetensors", text, 8 + header_bytes + data_bytes);
    free(text);
}

static void assert_refused(const char *part) {
    struct safetensors s;
    char error[FILE_ERROR] = "";
    if (safetensors_open(&s, at("x.safetensors"), error, sizeof error)) fail_msg("accepted, wanted: %s", part);
    assert_contains(error, "/x.safetensors: ");
    assert_contains(error, part);
}

static void safetensors_refuses_wrong_lengths(void **state) {
    (void)state;
    const char *header = "{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}";
    write_tensors(header, -1, 8);
    struct safetensors s;
    char error[FILE_ERROR];
    assert_true(safetensors_open(&s, at("x.safetensors"), error, sizeof error));
    safetensors_close(&s);
    const int64_t lengths[] = {0, 1, INT64_MIN, -2, INT64_MAX, 1 << 20, 101 << 20};
    for (int i = 0; i < 7; i++) {
        write_tensors(header, lengths[i], 8);
        assert_refused("found header length");
    }
    write_tensors(header, (int64_t)strlen(header) - 1, 8);
    assert_refused("found no JSON");
    write_tensors(header, (int64_t)strlen(header) + 1, 8);
    assert_refused("found no JSON");
    write_tensors(header, -1, 7);
    assert_refused("data_offsets [0, 8], wanted them ascending and at most 7");
    write_tensors(header, -1, 9);
    assert_refused("found 9 bytes of data, wanted 8");
    // More than the cap, and the file is that long.
    write_tensors(header, (100 << 20) + 1, 8);
    assert_int_equal(truncate(at("x.safetensors"), 200 << 20), 0);
    assert_refused("found header length 104857601, wanted 2 to 104857600");
}

static void safetensors_refuses_a_file_cut_anywhere(void **state) {
    (void)state;
    struct model a;
    size_t bytes;
    model_init(&a, &uneven);
    model_fill(&a, 12);
    checkpoint_save(&a.c, root, 0);
    char *good = read_bytes(at("step-00000100/model-00003-of-00005.safetensors"), &bytes);
    for (size_t cut = 0; cut < bytes; cut += cut < 64 ? 1 : 997) {
        write_file("x.safetensors", good, cut);
        assert_refused("found ");
    }
    write_file("x.safetensors", good, bytes - 1);
    assert_refused("found ");
    free(good);
    model_free(&a);
}

static void safetensors_refuses_headers_that_lie(void **state) {
    (void)state;
#define TENSOR(name, type, shape, offsets)                                                                             \
    "\"" name "\":{\"dtype\":\"" type "\",\"shape\":" shape ",\"data_offsets\":" offsets "}"
    const struct {
        const char *header, *part;
    } cases[] = {
        {"not JSON at all, but long enough", "found no JSON"},
        {"[]", "found no JSON"},
        {"{} {}", "found no JSON"},
        {"{\"a\":1}", "found dtype"},
        {"{" TENSOR("a", "F8_E4M3", "[16]", "[0,16]") "}", "found dtype F8_E4M3, wanted F32, F16, BF16 or I64"},
        {"{" TENSOR("a", "F32", "4", "[0,16]") "}", "found a bad shape"},
        {"{" TENSOR("a", "F32", "[-4]", "[0,16]") "}", "found a bad shape"},
        {"{" TENSOR("a", "F32", "[4.5]", "[0,16]") "}", "found a bad shape"},
        {"{" TENSOR("a", "F32", "[1,1,1,1,1,1,1,1,4]", "[0,16]") "}", "found a bad shape"},
        {"{" TENSOR("a", "F32", "[4]", "[0]") "}", "found bad data_offsets"},
        {"{" TENSOR("a", "F32", "[4]", "[0,1e300]") "}", "found bad data_offsets"},
        {"{" TENSOR("a", "F32", "[4]", "[-16,0]") "}", "found bad data_offsets"},
        {"{" TENSOR("a", "F32", "[4]", "[16,0]") "}", "found data_offsets [16, 0], wanted them ascending"},
        {"{" TENSOR("a", "F32", "[8]", "[0,32]") "}", "at most 16"},
        {"{" TENSOR("a", "F32", "[1099511627776,1099511627776]", "[0,16]") "}", "whose size fits 64 bits"},
        {"{" TENSOR("a", "F32", "[3]", "[0,16]") "}", "found 16 bytes, wanted 12 for F32 [3]"},
        {"{" TENSOR("a", "BF16", "[4]", "[0,16]") "}", "found 16 bytes, wanted 8 for BF16 [4]"},
        {"{" TENSOR("a", "F32", "[3]", "[0,12]") "," TENSOR("b", "F32", "[2]", "[8,16]") "}", "tensors overlap"},
        {"{" TENSOR("a", "F32", "[4]", "[0,16]") "," TENSOR("b", "F32", "[4]", "[0,16]") "}", "tensors overlap"},
        {"{" TENSOR("a", "F32", "[1]", "[0,4]") "," TENSOR("b", "F32", "[2]", "[8,16]") "}", "a gap before it"},
        {"{" TENSOR("a", "F32", "[2]", "[0,8]") "," TENSOR("a", "F32", "[2]", "[8,16]") "}", "tensor a twice"},
        {"{}", "found 16 bytes of data, wanted 0"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        write_tensors(cases[i].header, -1, 16);
        assert_refused(cases[i].part);
    }
    assert_int_equal(remove(at("x.safetensors")), 0);
    assert_int_equal(mkfifo(at("x.safetensors"), 0600), 0); // nobody writes: opening it would wait for ever
    assert_refused("wanted a regular file");
}

static void safetensors_reads_16_bit_types_as_float(void **state) {
    (void)state;
    const char *header = "{\"__metadata__\":{\"format\":\"pt\"},"
                         "\"h\":{\"dtype\":\"F16\",\"shape\":[2,4],\"data_offsets\":[0,16]},"
                         "\"b\":{\"dtype\":\"BF16\",\"shape\":[4],\"data_offsets\":[16,24]},"
                         "\"i\":{\"dtype\":\"I64\",\"shape\":[1],\"data_offsets\":[24,32]}}";
    const uint16_t data[16] = {0x3c00, 0xc000, 0x0001, 0x83ff, 0x7bff, 0x7c00,
                               0x8000, 0x3555, 0x3f80, 0xc0e0, 0x0001, 0x7f80};
    const float half[8] = {1, -2, 0x1p-24f, -1023 * 0x1p-24f, 65504, INFINITY, -0.0f, 1365 * 0x1p-12f};
    const float brain[4] = {1, -7, 0x1p-133f, INFINITY};
    char error[FILE_ERROR];
    float out[8];
    struct safetensors s;
    write_tensors(header, -1, 32);
    FILE *file = fopen(at("x.safetensors"), "r+b");
    fseek(file, 8 + (long)strlen(header), SEEK_SET);
    assert_int_equal(fwrite(data, 1, 32, file), 32);
    fclose(file);
    if (!safetensors_open(&s, at("x.safetensors"), error, sizeof error)) fail_msg("%s", error);
    const struct safetensors_tensor *h = safetensors_find(&s, "h");
    assert_true(safetensors_read_f32(&s, h, 0, 8, out, error, sizeof error));
    assert_memory_equal(out, half, sizeof half);
    assert_true(safetensors_read_f32(&s, h, 5, 3, out, error, sizeof error)); // a part
    assert_memory_equal(out, half + 5, 3 * sizeof *half);
    assert_true(safetensors_read_f32(&s, safetensors_find(&s, "b"), 0, 4, out, error, sizeof error));
    assert_memory_equal(out, brain, sizeof brain);
    assert_false(safetensors_read_f32(&s, h, 5, 4, out, error, sizeof error));
    assert_false(safetensors_read_f32(&s, h, UINT64_MAX, 2, out, error, sizeof error));
    assert_false(safetensors_read_f32(&s, safetensors_find(&s, "i"), 0, 1, out, error, sizeof error));
    assert_null(safetensors_find(&s, "__metadata__"));
    safetensors_close(&s);
}

static void safetensors_writer_notices_a_full_disk_and_missing_data(void **state) {
    (void)state;
    struct safetensors_writer w;
    char error[FILE_ERROR] = "";
    static float zero[1 << 16];
    struct safetensors_tensor list[] = {{.name = "a", .type = SAFETENSORS_F32, .rank = 1, .shape = {1 << 16}}};
    bool written = safetensors_begin(&w, "/dev/full", list, 1, error, sizeof error);
    if (written) {
        written = safetensors_append(&w, zero, sizeof zero, error, sizeof error);
        char later[FILE_ERROR];
        safetensors_finish(&w, later, sizeof later);
    }
    assert_false(written);
    assert_contains(error, "/dev/full: cannot write 262144 bytes");
    assert_contains(error, "No space left on device");

    // So little that only the flush at the end meets the disk.
    list[0].shape[0] = 1;
    assert_true(safetensors_begin(&w, "/dev/full", list, 1, error, sizeof error));
    assert_true(safetensors_append(&w, zero, 4, error, sizeof error));
    assert_false(safetensors_finish(&w, error, sizeof error));
    assert_contains(error, "No space left on device");

    assert_true(safetensors_begin(&w, at("short"), list, 1, error, sizeof error));
    assert_false(safetensors_finish(&w, error, sizeof error));
    assert_contains(error, "found 0 bytes of data, wanted 4");
}

static float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static uint16_t bf16_of(uint32_t bits) {
    float value = float_of(bits);
    uint16_t rounded;
    safetensors_bf16_from_f32(&rounded, &value, 1);
    return rounded;
}

static void bf16_is_rounded_to_nearest_even(void **state) {
    (void)state;
    static const struct {
        uint32_t bits;
        uint16_t wanted;
    } cases[] = {
        {0x3f800000, 0x3f80}, {0x3f807fff, 0x3f80}, {0x3f808000, 0x3f80}, {0x3f808001, 0x3f81}, // 1 and a bit
        {0x3f818000, 0x3f82}, {0xbf818000, 0xbf82}, {0xbf808000, 0xbf80},                       // ties, both signs
        {0x3fffffff, 0x4000},                                                                   // the next power of two
        {0x00000000, 0x0000}, {0x80000000, 0x8000}, {0x00000001, 0x0000}, {0x00018000, 0x0002}, // zeros, subnormals
        {0x007fffff, 0x0080},                                                                   // the least normal one
        {0x7f800000, 0x7f80}, {0xff800000, 0xff80},                                             // infinities
        {0x7f7f7fff, 0x7f7f}, {0x7f7f8000, 0x7f80}, {0xff7fffff, 0xff80},                       // beyond the largest
        {0x7fc00000, 0x7fc0}, {0x7f800001, 0x7fc0}, {0xffffffff, 0xffff},                       // NaN stays NaN
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        if (bf16_of(cases[i].bits) != cases[i].wanted)
            fail_msg("%08x became %04x, wanted %04x", cases[i].bits, bf16_of(cases[i].bits), cases[i].wanted);

    // Everything else against distances in double, which has both neighbours and their distances exactly.
    uint64_t seed = 11;
    for (int i = 0; i < 200000; i++) {
        uint32_t bits = (uint32_t)(test_uniform(&seed) * 0x1p32);
        if ((bits & 0x7fffffff) >= 0x7f7f0000) continue;
        uint16_t below = (uint16_t)(bits >> 16), above = (uint16_t)(below + 1);
        double down = fabs((double)float_of(bits) - (double)float_of((uint32_t)below << 16));
        double up = fabs((double)float_of((uint32_t)above << 16) - (double)float_of(bits));
        uint16_t wanted = down < up || (down == up && below % 2 == 0) ? below : above;
        if (bf16_of(bits) != wanted) fail_msg("%08x became %04x, wanted %04x", bits, bf16_of(bits), wanted);
    }
}

// As the writer does it; what was BF16 before comes out as it was.
static void bf16_is_made_in_place(void **state) {
    (void)state;
    enum { COUNT = 1001 };
    float values[COUNT];
    uint16_t apart[COUNT];
    for (int i = 0; i < COUNT; i++) values[i] = float_of((uint32_t)i << 16);
    safetensors_bf16_from_f32(apart, values, COUNT);
    for (int i = 0; i < COUNT; i++) assert_int_equal(apart[i], i);
    safetensors_bf16_from_f32((void *)values, values, COUNT);
    assert_memory_equal(values, apart, sizeof apart);
    safetensors_bf16_from_f32(apart, values, 0);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, make_root, remove_root)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(safetensors_refuses_wrong_lengths),
        TEST(safetensors_refuses_a_file_cut_anywhere),
        TEST(safetensors_refuses_headers_that_lie),
        TEST(safetensors_reads_16_bit_types_as_float),
        TEST(bf16_is_rounded_to_nearest_even),
        TEST(bf16_is_made_in_place),
        TEST(safetensors_writer_notices_a_full_disk_and_missing_data),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

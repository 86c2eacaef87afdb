// First values: every number against the same formula in long double by the C library, at the ends of the uniform numbers
// too, and whatever the vectors' length.
#include <math.h>

#include "tests/test.h"

#include "kernels/random.h"
#include "model/normal.h"

static const double STD = 0.02;

// Of two numbers' 64 random bits.
static double reference(uint64_t of_u, uint64_t of_v) {
    const long double pi = 3.14159265358979323846264338327950288L;
    long double u = 1 - (long double)random_uniform(of_u), v = random_uniform(of_v);
    return (double)(STD * sqrtl(-2 * logl(u)) * cosl(2 * pi * v));
}

// A result is rounded to float: half a unit of its last place. Before, a double's last places are lost of numbers up to
// the largest one, sqrt(-2 ln 2^-53) standard deviations: 8.6.
static void assert_near(float x, double wanted, uint64_t key) {
    double allowed = 0x1p-24 * fabs(wanted) + 8 * 0x1p-53 * 8.6 * STD;
    if (!(fabs((double)x - wanted) <= allowed))
        fail_msg("key %llx: found %.9g, wanted %.17g", (unsigned long long)key, (double)x, wanted);
}

// What is lost before it is rounded to float shows where that rounding goes the other way: of numbers that are off by e,
// about 2^25 e: one in 60 million if doubles are off by 2^-51. An error of 1e-11 would be 300 of these.
enum { OTHERWISE_ROUNDED = 3 };

static void numbers_are_those_of_the_formula(void **state) {
    (void)state;
    enum { N = 300000 };
    float *x = malloc(N * sizeof *x);
    assert_non_null(x);
    int otherwise = 0;
    for (uint64_t key = 1; key < 4; key++) {
        memset(x, 0xff, N * sizeof *x);
        normal_fill(x, N, STD, random_mix(key));
        for (uint64_t i = 0; i < N; i++) {
            double wanted = reference(random_mix(random_mix(key) + 2 * i), random_mix(random_mix(key) + 2 * i + 1));
            assert_near(x[i], wanted, key);
            otherwise += x[i] != (float)wanted;
        }
    }
    if (otherwise > OTHERWISE_ROUNDED) fail_msg("found %d of %d numbers rounded otherwise", otherwise, 3 * N);
    free(x);
}

// The number of which random_mix makes these bits.
static uint64_t unmix(uint64_t z) {
    z ^= z >> 31 ^ z >> 62;
    z *= 0x319642b2d24d8ec3; // 1 / 0x94d049bb133111eb
    z ^= z >> 27 ^ z >> 54;
    z *= 0x96de1b173f119089; // 1 / 0xbf58476d1ce4e5b9
    z ^= z >> 30 ^ z >> 60;
    return z - 0x9e3779b97f4a7c15;
}

// u as small as it gets, 1 and near it, at 1/2 and where m is sqrt(1/2); then v at the ends, at the zeros and at the turns
// of its cosine. (One of the two can be chosen: the other one's bits are of the next number.)
static void numbers_at_the_ends_are_those_of_the_formula(void **state) {
    (void)state;
    const double places[] = {0, 0x1p-53, 0.125, 0.25, 0.29289321881345248, 0.375, 0.5, 0.625, 0.75, 0.875, 1 - 0x1p-53};
    for (size_t i = 0; i < sizeof places / sizeof *places; i++)
        for (int away = -1; away <= 1; away++) {
            uint64_t bits = ((uint64_t)(places[i] * 0x1p53) + (uint64_t)away) << 11;
            float x;
            uint64_t key = unmix(bits);
            assert_true(random_mix(key) == bits);
            normal_fill(&x, 1, STD, key);
            assert_near(x, reference(bits, random_mix(key + 1)), key);
            normal_fill(&x, 1, STD, key - 1);
            assert_near(x, reference(random_mix(key - 1), bits), key - 1);
        }
    float x;
    normal_fill(&x, 1, STD, unmix(0)); // u is 1
    assert_true(x == 0);
    normal_fill(&x, 1, STD, unmix(~0ull)); // u is 2^-53
    assert_true(isfinite(x));
}

// Vectors end somewhere, and threads begin somewhere.
static void a_number_depends_on_its_place_alone(void **state) {
    (void)state;
    enum { N = 1000 };
    float all[N], some[N];
    normal_fill(all, N, STD, 5);
    for (size_t n = 0; n < N; n += n < 70 ? 1 : 37) {
        memset(some, 0xff, sizeof some);
        normal_fill(some, n, STD, 5);
        assert_memory_equal(some, all, n * sizeof *some);
        if (n < N) assert_true(isnan(some[n])); // nothing behind the end
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(numbers_are_those_of_the_formula),
        cmocka_unit_test(numbers_at_the_ends_are_those_of_the_formula),
        cmocka_unit_test(a_number_depends_on_its_place_alone),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

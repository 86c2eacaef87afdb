// What every test file starts with: cmocka, random numbers, and the relative norm.
#ifndef MOK_TESTS_TEST_H
#define MOK_TESTS_TEST_H

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

// Uniform in [0, 1), from a state the caller keeps (splitmix64).
static inline double test_uniform(uint64_t *state) {
    uint64_t z = (*state += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return (double)((z ^ (z >> 31)) >> 11) * 0x1p-53;
}

// Standard normal (Box-Muller).
static inline double test_normal(uint64_t *state) {
    double u = 1.0 - test_uniform(state), v = test_uniform(state);
    return sqrt(-2.0 * log(u)) * cos(6.283185307179586 * v);
}

// |a - b| / |b| in the Euclidean norm; NaN anywhere gives NaN, so compare with "!(x <= tolerance)".
#define test_relative_norm(a, b, n)                                                                                    \
    ({                                                                                                                 \
        double difference_ = 0, size_ = 0;                                                                             \
        for (size_t i_ = 0; i_ < (size_t)(n); i_++) {                                                                  \
            double d_ = (double)(a)[i_] - (double)(b)[i_];                                                             \
            difference_ += d_ * d_;                                                                                    \
            size_ += (double)(b)[i_] * (double)(b)[i_];                                                                \
        }                                                                                                              \
        size_ > 0 ? sqrt(difference_ / size_) : sqrt(difference_);                                                     \
    })

#define test_assert_close(name, a, b, n, tolerance)                                                                    \
    do {                                                                                                               \
        double error_ = test_relative_norm(a, b, n);                                                                   \
        if (!(error_ <= (tolerance)))                                                                                  \
            fail_msg("%s: relative error %.3g, wanted at most %.3g", name, error_, (double)(tolerance));               \
    } while (0)

#endif

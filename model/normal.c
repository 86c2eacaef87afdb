// Box-Muller: sqrt(-2 ln u) cos(2 pi v) of two uniform numbers. A model has billions of first values, so both functions are
// written here, of nothing but additions, multiplications, divisions and bits: the compiler makes vectors of them, and
// they do not hang on a library's last bit. Both are off by less than 2^-51 of their value.
#include "model/normal.h"

#include <math.h>
#include <string.h>

#include "kernels/random.h"

static inline double double_of_bits(uint64_t bits) {
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
static inline uint64_t bits_of_double(double x) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

// Of integers below 2^52. (Vectors of most processors cannot convert 64-bit integers.)
static inline double double_of_small(uint64_t i) { return double_of_bits(0x4330000000000000 | i) - 0x1p52; }

// random_uniform in two halves.
static inline double uniform_of(uint64_t bits) {
    return double_of_small(bits >> 32) * 0x1p-32 + double_of_small(bits >> 11 & 0x1fffff) * 0x1p-53;
}

// ln x of a normal number x > 0. x = m 2^k with m from sqrt(1/2) to sqrt(2); then, with s = (m - 1) / (m + 1),
// ln m = 2 (s + s^3 / 3 + s^5 / 5 + ...), whose terms behind s^21 are below 1e-18 of the sum.
static inline double ln(double x) {
    const uint64_t one = 0x3ff0000000000000, root_of_half = 0x3fe6a09e667f3bcd;
    const double ln_2 = 0.69314718055994530942;
    uint64_t bits = bits_of_double(x), exponent = (bits - root_of_half + one) >> 52; // k + 1023
    double m = double_of_bits(bits - (exponent << 52) + one), s = (m - 1) / (m + 1), z = s * s;
    double sum = 1.0 / 21;
    for (int odd = 19; odd > 0; odd -= 2) sum = sum * z + 1.0 / odd;
    return (double_of_small(exponent) - 1023) * ln_2 + 2 * s * sum;
}

// cos(2 pi v), 0 <= v < 1: it is -sin x, where x = 2 pi (1/4 - |v - 1/2|) is from -pi / 2 to pi / 2 and the parenthesis
// exact. Terms of sin x = x - x^3 / 3! + ... behind x^21 are below 1e-17 of the sum.
static inline double cos_of_turns(double v) {
    double x = 6.28318530717958647693 * (0.25 - fabs(v - 0.5)), z = x * x, sum = 1;
    for (int odd = 21; odd > 1; odd -= 2) sum = 1 - sum * z * (1.0 / (odd * (odd - 1)));
    return -x * sum;
}

void normal_fill(float *x, size_t n, double std, uint64_t key) {
#pragma omp parallel for simd
    for (size_t i = 0; i < n; i++) {
        double u = 1 - uniform_of(random_mix(key + 2 * i)), v = uniform_of(random_mix(key + 2 * i + 1)); // u in (0, 1]
        x[i] = (float)(std * (sqrt(-2 * ln(u)) * cos_of_turns(v)));
    }
}

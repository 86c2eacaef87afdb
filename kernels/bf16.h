// BF16 on the host: the upper half of a float.
#ifndef MOK_KERNELS_BF16_H
#define MOK_KERNELS_BF16_H

#include <stdint.h>
#include <string.h>

// Rounded to nearest even: half of the last place is added, and a last bit so that ties become even. A carry out of the
// fraction makes the next power of two, at the end infinity. NaN, whose fraction could vanish, keeps a bit.
static inline uint16_t bf16_from_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static inline float bf16_to_float(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

#endif

#include "model/rope.h"

#include <math.h>

static const double PI = 3.14159265358979323846;

double rope_yarn_scale(double factor, double weight) { return factor > 1 ? 1 + 0.1 * weight * log(factor) : 1; }

// The (fractional) pair whose wave turns `rotations` times within the original length.
static double pair_of_rotations(const struct config *c, double rotations) {
    return c->rope_dim * log(c->yarn.original_length / (2 * PI * rotations)) / (2 * log(c->rope_theta));
}

void rope_yarn_range(const struct config *c, int *low, int *high) {
    int last = c->rope_dim - 1;
    *low = (int)floor(pair_of_rotations(c, c->yarn.beta_fast));
    *high = (int)ceil(pair_of_rotations(c, c->yarn.beta_slow));
    if (*low < 0) *low = 0;
    if (*high > last) *high = last;
}

double rope_frequency(const struct config *c, int pair) {
    double frequency = pow(c->rope_theta, -2.0 * pair / c->rope_dim);
    if (c->yarn.factor == 0) return frequency;
    int low, high;
    rope_yarn_range(c, &low, &high);
    double ramp = (pair - low) / (high > low ? (double)(high - low) : 0.001);
    ramp = ramp < 0 ? 0 : ramp > 1 ? 1 : ramp;
    return frequency / c->yarn.factor * ramp + frequency * (1 - ramp);
}

void rope_angles(accum *angles, const struct config *c, int T) {
    double scale = 1;
    if (c->yarn.factor != 0)
        scale =
            rope_yarn_scale(c->yarn.factor, c->yarn.mscale) / rope_yarn_scale(c->yarn.factor, c->yarn.mscale_all_dim);
    for (int j = 0; j < c->rope_dim / 2; j++) {
        double frequency = rope_frequency(c, j);
        for (int t = 0; t < T; t++) {
            accum *pair = angles + (size_t)t * (size_t)c->rope_dim + 2 * (size_t)j;
            pair[0] = (accum)(scale * cos(t * frequency));
            pair[1] = (accum)(scale * sin(t * frequency));
        }
    }
}

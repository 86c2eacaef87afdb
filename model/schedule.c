#include "model/schedule.h"

#include <math.h>

static double fall(double from, double to, double progress) { return from + (to - from) * progress; }

double schedule_lr(const struct options *o, int64_t step) {
    if (step < o->warmup) return o->lr * (double)(step + 1) / (double)o->warmup;
    int64_t last = o->steps - 1, span = last - o->warmup;
    double progress = span > 0 ? (double)(step - o->warmup) / (double)span : 0;
    if (progress > 1) progress = 1;
    switch (o->schedule) {
    case SCHEDULE_COSINE:
        return fall(o->min_lr, o->lr, 0.5 * (1 + cos(3.14159265358979323846 * progress)));
    case SCHEDULE_LINEAR:
        return fall(o->lr, o->min_lr, progress);
    case SCHEDULE_WSD: {
        int64_t decay = options_decay_steps(o);
        int64_t into = step - (o->steps - decay) + 1; // 1 at the first step of the decay
        if (into <= 0 || span <= 0) return o->lr;
        return into >= decay ? o->min_lr : fall(o->lr, o->min_lr, (double)into / (double)decay);
    }
    case SCHEDULE_CONSTANT:
        break;
    }
    return o->lr;
}

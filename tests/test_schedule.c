// The four learning-rate schedules: values by hand, then the inputs that made other trainers divide by zero or start at
// zero (torchtitan pull 1010, composer issue 1077, nanoGPT pull 691 and issue 443).
#include "tests/test.h"

#include "model/schedule.h"

// A few double operations on numbers up to 1.
static const double EXACT = 1e-14;

static const enum schedule all_schedules[] = {SCHEDULE_COSINE, SCHEDULE_LINEAR, SCHEDULE_WSD, SCHEDULE_CONSTANT};
enum { SCHEDULES = sizeof all_schedules / sizeof *all_schedules };
static const char *const names[] = {
    [SCHEDULE_COSINE] = "cosine",
    [SCHEDULE_LINEAR] = "linear",
    [SCHEDULE_WSD] = "wsd",
    [SCHEDULE_CONSTANT] = "constant",
};

static struct options make(enum schedule schedule, int64_t steps, int64_t warmup, int64_t decay) {
    return (struct options){
        .schedule = schedule, .steps = steps, .warmup = warmup, .decay_steps = decay, .lr = 1, .min_lr = 0.1};
}

static void values_are_those_worked_out_by_hand(void **state) {
    (void)state;
    // 14 steps, 4 of them warmup: the fall takes 9 steps from step 4 to step 13, that of wsd the last 4 steps.
    // cosine: 0.1 + 0.45 (1 + cos(pi k / 9)); step 7 is k = 3, step 10 k = 6.
    const struct {
        enum schedule schedule;
        int64_t step;
        double lr;
    } table[] = {
        {SCHEDULE_COSINE, 0, 0.25},
        {SCHEDULE_COSINE, 1, 0.5},
        {SCHEDULE_COSINE, 3, 1},
        {SCHEDULE_COSINE, 4, 1},
        {SCHEDULE_COSINE, 5, 0.55 + 0.45 * 0.9396926207859084},
        {SCHEDULE_COSINE, 7, 0.775},
        {SCHEDULE_COSINE, 10, 0.325},
        {SCHEDULE_COSINE, 13, 0.1},
        {SCHEDULE_LINEAR, 0, 0.25},
        {SCHEDULE_LINEAR, 1, 0.5},
        {SCHEDULE_LINEAR, 3, 1},
        {SCHEDULE_LINEAR, 4, 1},
        {SCHEDULE_LINEAR, 5, 0.9},
        {SCHEDULE_LINEAR, 12, 0.2},
        {SCHEDULE_LINEAR, 13, 0.1},
        {SCHEDULE_WSD, 0, 0.25},
        {SCHEDULE_WSD, 1, 0.5},
        {SCHEDULE_WSD, 3, 1},
        {SCHEDULE_WSD, 4, 1},
        {SCHEDULE_WSD, 5, 1},
        {SCHEDULE_WSD, 9, 1},
        {SCHEDULE_WSD, 10, 0.775},
        {SCHEDULE_WSD, 11, 0.55},
        {SCHEDULE_WSD, 12, 0.325},
        {SCHEDULE_WSD, 13, 0.1},
        {SCHEDULE_CONSTANT, 0, 0.25},
        {SCHEDULE_CONSTANT, 1, 0.5},
        {SCHEDULE_CONSTANT, 3, 1},
        {SCHEDULE_CONSTANT, 4, 1},
        {SCHEDULE_CONSTANT, 5, 1},
        {SCHEDULE_CONSTANT, 13, 1},
    };
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        struct options o = make(table[i].schedule, 14, 4, 4);
        double lr = schedule_lr(&o, table[i].step);
        if (!(fabs(lr - table[i].lr) <= EXACT))
            fail_msg("%s, step %lld: found %.17g, wanted %.17g", names[table[i].schedule], (long long)table[i].step, lr,
                     table[i].lr);
    }
}

static void wsd_falls_over_a_fifth_of_the_steps_when_nothing_is_said(void **state) {
    (void)state;
    struct options o = make(SCHEDULE_WSD, 100, 10, 0);
    assert_true(schedule_lr(&o, 79) == 1);
    assert_true(fabs(schedule_lr(&o, 80) - (1 - 0.9 / 20)) <= EXACT);
    assert_true(fabs(schedule_lr(&o, 98) - (0.1 + 0.9 / 20)) <= EXACT);
    assert_true(schedule_lr(&o, 99) == 0.1);
}

// Lengths at the edges, warmup 0 to all of the steps, decay 0 to all that warmup leaves.
static const int64_t lengths[] = {1, 2, 3, 7, 100};

static void every_rate_is_finite_above_zero_and_at_most_the_peak(void **state) {
    (void)state;
    for (size_t l = 0; l < sizeof lengths / sizeof *lengths; l++)
        for (int64_t warmup = 0; warmup <= lengths[l]; warmup++)
            for (int64_t decay = 0; decay <= lengths[l] - warmup; decay++)
                for (int s = 0; s < SCHEDULES; s++) {
                    struct options o = make(all_schedules[s], lengths[l], warmup, decay);
                    for (int64_t step = 0; step < lengths[l]; step++) {
                        double lr = schedule_lr(&o, step);
                        if (!(isfinite(lr) && lr > 0 && lr <= 1 + EXACT))
                            fail_msg("%s, %lld steps, warmup %lld, decay %lld, step %lld: found %g", names[s],
                                     (long long)lengths[l], (long long)warmup, (long long)decay, (long long)step, lr);
                    }
                }
}

// A run of two steps or more does not waste its first one, even if it shall end at zero.
static void first_rate_is_not_zero_when_the_last_one_is(void **state) {
    (void)state;
    for (size_t l = 1; l < sizeof lengths / sizeof *lengths; l++)
        for (int64_t warmup = 0; warmup <= lengths[l]; warmup++)
            for (int s = 0; s < SCHEDULES; s++) {
                struct options o = make(all_schedules[s], lengths[l], warmup, lengths[l] - warmup);
                o.min_lr = 0;
                if (!(schedule_lr(&o, 0) > 0))
                    fail_msg("%s, %lld steps, warmup %lld: found 0", names[s], (long long)lengths[l],
                             (long long)warmup);
            }
}

static void last_rate_is_the_smallest_one(void **state) {
    (void)state;
    for (size_t l = 1; l < sizeof lengths / sizeof *lengths; l++)
        for (int64_t warmup = 0; warmup <= lengths[l] - 2; warmup++) {
            for (int s = 0; s < SCHEDULES; s++) {
                struct options o = make(all_schedules[s], lengths[l], warmup, 0);
                double wanted = s == SCHEDULE_CONSTANT ? 1 : 0.1;
                assert_true(fabs(schedule_lr(&o, lengths[l] - 1) - wanted) <= EXACT);
                // and stays there: a run that is asked for a step too many must not climb again
                assert_true(fabs(schedule_lr(&o, lengths[l] + 5) - wanted) <= EXACT);
            }
        }
}

static void rates_rise_to_the_peak_then_never_rise_again(void **state) {
    (void)state;
    for (int s = 0; s < SCHEDULES; s++)
        for (int64_t warmup = 0; warmup <= 50; warmup++) {
            struct options o = make(all_schedules[s], 50, warmup, 0);
            if (warmup) assert_true(fabs(schedule_lr(&o, warmup - 1) - 1) <= EXACT);
            for (int64_t step = 1; step < 50; step++) {
                double before = schedule_lr(&o, step - 1), now = schedule_lr(&o, step);
                if (step < warmup)
                    assert_true(now > before);
                else
                    assert_true(now <= before + EXACT);
            }
        }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(values_are_those_worked_out_by_hand),
        cmocka_unit_test(wsd_falls_over_a_fifth_of_the_steps_when_nothing_is_said),
        cmocka_unit_test(every_rate_is_finite_above_zero_and_at_most_the_peak),
        cmocka_unit_test(first_rate_is_not_zero_when_the_last_one_is),
        cmocka_unit_test(last_rate_is_the_smallest_one),
        cmocka_unit_test(rates_rise_to_the_peak_then_never_rise_again),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

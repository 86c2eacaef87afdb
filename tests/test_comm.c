// What ranks do together, on any number of ranks: mpirun -n N build/cpu/tests/test_comm.
#include "tests/ranks.h"

#include <sched.h>
#include <stdatomic.h>

#include "kernels/comm_mpi.h"

static struct comm *world;
static int me, n;

// ---- data that says where it comes from ----

static uint8_t byte_of(int rank, size_t i) { return (uint8_t)((size_t)rank * 37 + i * 11 + i / 251); }

static void fill(uint8_t *bytes, size_t count, int rank) {
    for (size_t i = 0; i < count; i++) bytes[i] = byte_of(rank, i);
}

static void assert_filled(const uint8_t *bytes, size_t count, int rank) {
    for (size_t i = 0; i < count; i++)
        if (bytes[i] != byte_of(rank, i))
            fail_msg("byte %zu of %zu from rank %d is %d, wanted %d", i, count, rank, bytes[i], byte_of(rank, i));
}

// Numbers of all magnitudes: another order of a sum would show in its bits.
static double number_of(int rank, size_t i) {
    uint64_t seed = (uint64_t)rank * 1000003 + i;
    return test_normal(&seed) * pow(10, (double)((i + (size_t)rank * 5) % 13) - 6);
}

// Sizes around the limit of one message, and of a round of a sum, when they are small.
static const size_t sizes[] = {0, 1, 7, 8, 9, 64, 1000};
enum { SIZES = sizeof sizes / sizeof *sizes, LARGEST = 1000 };

static int start_small(void **state) {
    (void)state;
    comm_message_bytes = 8;
    comm_sum_bytes = 100;
    return 0;
}

static int end_small(void **state) {
    comm_message_bytes = (size_t)1 << 30;
    comm_sum_bytes = (size_t)16 << 20;
    return ranks_meet(state);
}

// Every function once as it is, and once with messages of 8 bytes: what is larger than one message goes in several.
#define BOTH_TESTS(function)                                                                                           \
    RANKS_TEST(function), { #function " in small messages", function, start_small, end_small, NULL }

// ---- host memory ----

static void broadcasts_reach_every_rank(void **state) {
    (void)state;
    for (int source = 0; source < n; source++)
        for (int s = 0; s < SIZES; s++) {
            uint8_t data[LARGEST + 1];
            memset(data, 0xee, sizeof data);
            if (me == source) fill(data, sizes[s], source);
            comm_broadcast(world, data, sizes[s], source);
            assert_filled(data, sizes[s], source);
            assert_int_equal(data[sizes[s]], 0xee);
        }
}

static void gathering_brings_everything_everywhere(void **state) {
    (void)state;
    for (int s = 0; s < SIZES; s++) {
        size_t bytes = sizes[s];
        uint8_t mine[LARGEST], *all = malloc((size_t)n * bytes + 1);
        memset(all, 0xee, (size_t)n * bytes + 1);
        fill(mine, bytes, me);
        comm_gather_all(world, all, mine, bytes);
        for (int r = 0; r < n; r++) assert_filled(all + (size_t)r * bytes, bytes, r);
        assert_int_equal(all[(size_t)n * bytes], 0xee);
        // what is sent may stand in its place already
        memset(all, 0xee, (size_t)n * bytes);
        fill(all + (size_t)me * bytes, bytes, me);
        comm_gather_all(world, all, all + (size_t)me * bytes, bytes);
        for (int r = 0; r < n; r++) assert_filled(all + (size_t)r * bytes, bytes, r);
        free(all);
    }
}

static void sums_of_integers_are_exact(void **state) {
    (void)state;
    for (int s = 0; s < SIZES; s++) {
        int64_t values[LARGEST];
        const int64_t large = (int64_t)1 << 58;
        for (size_t i = 0; i < sizes[s]; i++) values[i] = (i % 2 ? large : -large) + (int64_t)i * (me + 1);
        comm_sum_int64(world, values, sizes[s]);
        for (size_t i = 0; i < sizes[s]; i++)
            assert_true(values[i] == n * (i % 2 ? large : -large) + (int64_t)i * n * (n + 1) / 2);
    }
}

static void sums_of_doubles_are_made_in_the_order_of_the_ranks(void **state) {
    (void)state;
    for (int s = 0; s < SIZES; s++) {
        double values[LARGEST];
        for (size_t i = 0; i < sizes[s]; i++) values[i] = number_of(me, i);
        comm_sum_double(world, values, sizes[s]);
        for (size_t i = 0; i < sizes[s]; i++) {
            double sum = number_of(0, i);
            for (int r = 1; r < n; r++) sum += number_of(r, i);
            assert_memory_equal(&values[i], &sum, sizeof sum);
        }
    }
}

// All pairs both ways at once, and collectives in between do not take the messages for theirs.
static void messages_between_two_arrive_in_order(void **state) {
    (void)state;
    for (int s = 0; s < SIZES; s++)
        for (int distance = 1; distance < n; distance++) {
            int to = (me + distance) % n, from = (me + n - distance) % n;
            uint8_t sent[LARGEST], received[LARGEST], none = 0;
            fill(sent, sizes[s], me);
            memset(received, 0xee, sizeof received);
            if (me < to) { // who sends to a larger one sends first: no circle of waits
                comm_send(world, sent, sizes[s], to);
                comm_receive(world, received, sizes[s], from);
            } else {
                comm_receive(world, received, sizes[s], from);
                comm_send(world, sent, sizes[s], to);
            }
            assert_filled(received, sizes[s], from);
            comm_broadcast(world, &none, 1, 0);
        }
}

static void barriers_hold_until_the_last_rank(void **state) {
    (void)state;
    struct symm s;
    symm_alloc(&s, world, sizeof(_Atomic int));
    for (int round = 1; round <= 200; round++) {
        if (round % n == me) usleep(200);
        atomic_store((_Atomic int *)s.mine, round);
        comm_barrier(world);
        for (int r = 0; r < n; r++) assert_true(atomic_load((_Atomic int *)s.peers[r]) >= round);
    }
    symm_free(&s);
}

// ---- pieces ----

// Pieces of r elements or so: none, uneven, one for all.
static void lay_out(size_t *offsets, int kind, size_t scale) {
    offsets[0] = 0;
    for (int r = 0; r < n; r++) {
        size_t length[] = {0, (size_t)r * scale, r == n / 2 ? 7 * scale : 0, scale + 3, r % 2 ? 0 : 5 * scale + 1};
        offsets[r + 1] = offsets[r] + length[kind];
    }
}
enum { LAYOUTS = 5 };

static void reduce_scatter_gives_each_rank_the_sum_of_its_piece(void **state) {
    (void)state;
    size_t offsets[65];
    for (int kind = 0; kind < LAYOUTS; kind++) {
        lay_out(offsets, kind, 20);
        accum *values = malloc((offsets[n] + 1) * sizeof *values);
        for (size_t i = 0; i < offsets[n]; i++) values[i] = (accum)number_of(me, i);
        values[offsets[n]] = 1234;
        comm_reduce_scatter(world, values, offsets);
        for (size_t i = offsets[me]; i < offsets[me + 1]; i++) {
            accum sum = (accum)number_of(0, i);
            for (int r = 1; r < n; r++) sum += (accum)number_of(r, i);
            assert_memory_equal(&values[i], &sum, sizeof sum);
        }
        assert_true(values[offsets[n]] == 1234);
        free(values);
    }
}

static void all_gather_brings_every_piece_everywhere(void **state) {
    (void)state;
    size_t offsets[65];
    for (int kind = 0; kind < LAYOUTS; kind++) {
        lay_out(offsets, kind, 20);
        real *values = malloc((offsets[n] + 1) * sizeof *values);
        for (size_t i = 0; i <= offsets[n]; i++) values[i] = (real)NAN;
        for (size_t i = offsets[me]; i < offsets[me + 1]; i++) values[i] = (real)number_of(me, i);
        comm_all_gather(world, values, offsets);
        for (int r = 0; r < n; r++)
            for (size_t i = offsets[r]; i < offsets[r + 1]; i++) assert_true(values[i] == (real)number_of(r, i));
        assert_true(isnan(values[offsets[n]]));
        free(values);
    }
}

// ---- rows ----

// Rows from a rank to another. A rank that sends nothing, one that receives nothing, a pair with nothing one way and
// something the other (NCCL 788: one side skips the other, which waits), nothing at all.
static size_t rows_between(int kind, int from, int to) {
    size_t rows[] = {0,
                     (size_t)(from * 3 + to * 5) % 7,
                     from == 0 ? 0 : 4,
                     to == n - 1 ? 0 : 3,
                     from < to ? 2 : 0,
                     to == 0 ? 50 : 0,
                     from == n - 1 ? 9 : 0};
    return rows[kind];
}
enum { KINDS = 7 };

struct rows {
    size_t from_offsets[65], to_offsets[65], row_bytes;
    uint8_t *from, *to;
};

// Byte i of row k from one rank to another.
static uint8_t row_byte(int from, int to, size_t k, size_t i) { return byte_of(from * 64 + to, k * 131 + i); }

static void open_rows(struct rows *x, int kind, size_t row_bytes) {
    x->row_bytes = row_bytes;
    x->from_offsets[0] = x->to_offsets[0] = 0;
    for (int r = 0; r < n; r++) {
        x->from_offsets[r + 1] = x->from_offsets[r] + rows_between(kind, me, r);
        x->to_offsets[r + 1] = x->to_offsets[r] + rows_between(kind, r, me);
    }
    x->from = malloc(x->from_offsets[n] * row_bytes + 1);
    x->to = malloc(x->to_offsets[n] * row_bytes + 1);
    memset(x->to, 0xee, x->to_offsets[n] * row_bytes + 1);
    for (int r = 0; r < n; r++)
        for (size_t k = 0; k < rows_between(kind, me, r); k++)
            for (size_t i = 0; i < row_bytes; i++)
                x->from[(x->from_offsets[r] + k) * row_bytes + i] = row_byte(me, r, k, i);
}

static void close_rows(struct rows *x, int kind) {
    for (int r = 0; r < n; r++)
        for (size_t k = 0; k < rows_between(kind, r, me); k++)
            for (size_t i = 0; i < x->row_bytes; i++)
                if (x->to[(x->to_offsets[r] + k) * x->row_bytes + i] != row_byte(r, me, k, i))
                    fail_msg("kind %d: byte %zu of row %zu from rank %d is another", kind, i, k, r);
    assert_int_equal(x->to[x->to_offsets[n] * x->row_bytes], 0xee);
    free(x->from);
    free(x->to);
}

static void rows_are_exchanged_between_all_pairs(void **state) {
    (void)state;
    static const size_t widths[] = {0, 1, 8, 52, 3000};
    for (int kind = 0; kind < KINDS; kind++)
        for (size_t w = 0; w < sizeof widths / sizeof *widths; w++) {
            struct rows x;
            open_rows(&x, kind, widths[w]);
            comm_exchange_rows(world, x.to, x.to_offsets, x.from, x.from_offsets, widths[w]);
            close_rows(&x, kind);
        }
}

// A rank without any rows hung the others in Megatron-LM 4851.
static void one_rank_without_rows_does_not_hold_up_the_others(void **state) {
    (void)state;
    for (int idle = 0; idle < n; idle++) {
        size_t from_offsets[65] = {0}, to_offsets[65] = {0};
        uint8_t from[64] = {0}, to[64];
        for (int r = 0; r < n; r++) {
            from_offsets[r + 1] = from_offsets[r] + (me != idle && r != idle);
            to_offsets[r + 1] = to_offsets[r] + (me != idle && r != idle);
        }
        for (int r = 0; r < n; r++)
            if (me != idle && r != idle) from[from_offsets[r]] = (uint8_t)(10 * me + r);
        comm_exchange_rows(world, to, to_offsets, from, from_offsets, 1);
        for (int r = 0; r < n; r++)
            if (me != idle && r != idle) assert_int_equal(to[to_offsets[r]], (uint8_t)(10 * r + me));
    }
}

static void several_exchanges_under_way_finish_in_any_order(void **state) {
    (void)state;
    struct rows x[KINDS];
    struct comm_exchange *e[KINDS];
    for (int round = 0; round < 2; round++) {
        for (int k = 0; k < KINDS; k++) {
            open_rows(&x[k], k, 40 + 13 * (size_t)k);
            e[k] = comm_exchange_begin(world, x[k].to, x[k].to_offsets, x[k].from, x[k].from_offsets, x[k].row_bytes);
        }
        int64_t one = 1; // other calls in between
        comm_sum_int64(world, &one, 1);
        assert_int_equal(one, n);
        for (int i = 0; i < KINDS; i++) {
            int k = (i * 3 + me + round) % KINDS; // another order on every rank
            comm_exchange_finish(e[k]);
            close_rows(&x[k], k);
        }
    }
}

// ---- groups ----

static void check_sum(struct comm *c, int64_t wanted) {
    int64_t value = me + 1;
    comm_sum_int64(c, &value, 1);
    assert_int_equal(value, wanted);
}

static void groups_are_split_by_color_and_ordered_by_key(void **state) {
    (void)state;
    for (int colors = 1; colors <= n; colors++) {
        struct comm *c = comm_split(world, me % colors, -me); // backwards
        int64_t sum = 0, members = 0, behind = 0;
        for (int r = me % colors; r < n; r += colors) sum += r + 1, members++, behind += r > me;
        assert_int_equal(comm_size(c), members);
        assert_int_equal(comm_rank(c), behind);
        check_sum(c, sum);
        struct comm *again = comm_split(c, 0, comm_rank(c)), *alone = comm_split(c, comm_rank(c), 0);
        check_sum(again, sum);
        assert_int_equal(comm_size(alone), 1);
        check_sum(alone, me + 1);
        comm_free(alone);
        comm_free(again);
        comm_free(c);
    }
}

// DeepEP 726: a communicator that is made at its first use is missing where that comes late. Here two groups are there
// from the start, and half of the ranks use one of them alone.
static void groups_exist_from_the_start(void **state) {
    (void)state;
    struct comm *a = comm_split(world, me % 2, me), *b = comm_split(world, me / 2, me);
    int64_t even = 0, pair = 0;
    for (int r = 0; r < n; r++) {
        if (r % 2 == 0) even += r + 1;
        if (r / 2 == me / 2) pair += r + 1;
    }
    if (me % 2 == 0) check_sum(a, even);
    check_sum(b, pair);
    comm_free(a);
    comm_free(b);
}

static void ranks_of_one_host_find_each_other(void **state) {
    (void)state;
    struct comm *c = comm_split_host(world); // the tests run on one host
    assert_int_equal(comm_size(c), n);
    assert_int_equal(comm_rank(c), me);
    comm_free(c);
}

static void a_group_of_one_needs_nobody(void **state) {
    (void)state;
    struct comm *groups[] = {NULL, comm_split(world, me, 0)};
    for (int g = 0; g < 2; g++) {
        struct comm *c = groups[g];
        const size_t offsets[] = {1, 3};
        const size_t to_offsets[] = {2, 4};
        int64_t integer = 5;
        double number = 5.5;
        accum sums[] = {1, 2, 3};
        real pieces[] = {1, 2, 3};
        uint8_t from[] = {1, 2, 3, 4, 5, 6}, to[8] = {0}, copy[3] = {0};
        struct symm s;
        assert_int_equal(comm_rank(c), 0);
        assert_int_equal(comm_size(c), 1);
        comm_barrier(c);
        comm_broadcast(c, from, 3, 0);
        comm_gather_all(c, copy, from, 3);
        assert_memory_equal(copy, from, 3);
        comm_sum_int64(c, &integer, 1);
        comm_sum_double(c, &number, 1);
        assert_true(integer == 5 && number == 5.5);
        comm_reduce_scatter(c, sums, offsets);
        comm_all_gather(c, pieces, offsets);
        for (int i = 0; i < 3; i++) assert_true(sums[i] == (accum)(i + 1) && pieces[i] == (real)(i + 1));
        comm_exchange_rows(c, to, to_offsets, from, offsets, 2);
        assert_memory_equal(to, ((uint8_t[]){0, 0, 0, 0, 3, 4, 5, 6}), 8);
        comm_exchange_finish(comm_exchange_begin(c, to, offsets, from, offsets, 2));
        assert_memory_equal(to, ((uint8_t[]){0, 0, 3, 4, 5, 6, 5, 6}), 8);
        symm_alloc(&s, c, 100);
        assert_ptr_equal(s.peers[0], s.mine);
        assert_int_equal((uintptr_t)s.mine % 256, 0);
        for (int i = 0; i < 100; i++) assert_int_equal(((char *)s.mine)[i], 0);
        symm_free(&s);
        struct comm *again = comm_split(c, 3, 3), *host = comm_split_host(c);
        assert_true(comm_size(again) == 1 && comm_size(host) == 1);
        comm_free(again);
        comm_free(host);
    }
    comm_free(groups[1]);
}

// ---- symmetric memory ----

static void symmetric_memory_is_zeroed_and_aligned(void **state) {
    (void)state;
    static const size_t byte_counts[] = {0, 1, 255, 256, 4096, 100000};
    for (size_t b = 0; b < sizeof byte_counts / sizeof *byte_counts; b++) {
        struct symm s;
        symm_alloc(&s, world, byte_counts[b]);
        assert_int_equal(s.bytes, byte_counts[b]);
        assert_ptr_equal(s.peers[me], s.mine);
        for (int r = 0; r < n; r++) {
            const uint8_t *piece = s.peers[r];
            assert_int_equal((uintptr_t)piece % 256, 0);
            for (size_t i = 0; i < s.bytes; i++) assert_int_equal(piece[i], 0);
        }
        comm_barrier(world);
        memset(s.mine, 0xee, s.bytes); // the next must not find it
        symm_free(&s);
    }
}

// Every rank writes into every other's piece and says so with a flag: what is read after the flag is the data.
static void every_rank_writes_to_and_reads_from_every_other(void **state) {
    (void)state;
    enum { WORDS = 500, ROUNDS = 20 };
    struct cell {
        _Atomic int ready; // the round
        int data[WORDS];
    };
    struct symm s, counter; // two at once
    symm_alloc(&s, world, (size_t)n * sizeof(struct cell));
    symm_alloc(&counter, world, sizeof(_Atomic int64_t));
    for (int round = 1; round <= ROUNDS; round++) {
        for (int r = 0; r < n; r++) {
            struct cell *cell = (struct cell *)s.peers[r] + me;
            for (int i = 0; i < WORDS; i++) cell->data[i] = round * 1000000 + me * 1000 + i;
            atomic_store_explicit(&cell->ready, round, memory_order_release);
            for (int i = 0; i < 10; i++) atomic_fetch_add((_Atomic int64_t *)counter.peers[r], me + 1);
        }
        for (int r = 0; r < n; r++) {
            struct cell *cell = (struct cell *)s.mine + r;
            while (atomic_load_explicit(&cell->ready, memory_order_acquire) < round) sched_yield();
            for (int i = 0; i < WORDS; i++) assert_int_equal(cell->data[i], round * 1000000 + r * 1000 + i);
        }
        comm_barrier(world); // all have read this round
    }
    assert_int_equal(*(_Atomic int64_t *)counter.mine, 10 * ROUNDS * n * (n + 1) / 2);
    symm_free(&s);
    symm_free(&counter);
}

static void two_groups_have_memory_of_their_own(void **state) {
    (void)state;
    if (n % 2 || n < 4) skip(); // groups of one have nothing in common
    struct comm *c = comm_split(world, me % 2, me);
    struct symm s;
    symm_alloc(&s, c, 64);
    for (int r = 0; r < comm_size(c); r++) atomic_fetch_add((_Atomic int *)s.peers[r], me % 2 ? 1000 : 1);
    comm_barrier(c);
    assert_int_equal(*(_Atomic int *)s.mine, comm_size(c) * (me % 2 ? 1000 : 1));
    symm_free(&s);
    comm_free(c);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        BOTH_TESTS(broadcasts_reach_every_rank),
        BOTH_TESTS(gathering_brings_everything_everywhere),
        BOTH_TESTS(sums_of_integers_are_exact),
        BOTH_TESTS(sums_of_doubles_are_made_in_the_order_of_the_ranks),
        BOTH_TESTS(messages_between_two_arrive_in_order),
        BOTH_TESTS(reduce_scatter_gives_each_rank_the_sum_of_its_piece),
        BOTH_TESTS(all_gather_brings_every_piece_everywhere),
        RANKS_TEST(barriers_hold_until_the_last_rank),
        RANKS_TEST(rows_are_exchanged_between_all_pairs),
        RANKS_TEST(one_rank_without_rows_does_not_hold_up_the_others),
        RANKS_TEST(several_exchanges_under_way_finish_in_any_order),
        RANKS_TEST(groups_are_split_by_color_and_ordered_by_key),
        RANKS_TEST(groups_exist_from_the_start),
        RANKS_TEST(ranks_of_one_host_find_each_other),
        RANKS_TEST(a_group_of_one_needs_nobody),
        RANKS_TEST(symmetric_memory_is_zeroed_and_aligned),
        RANKS_TEST(every_rank_writes_to_and_reads_from_every_other),
        RANKS_TEST(two_groups_have_memory_of_their_own),
    };
    ranks_start(argc, argv);
    world = comm_world();
    me = comm_rank(world);
    n = comm_size(world);
    return ranks_stop(cmocka_run_group_tests(tests, NULL, NULL));
}

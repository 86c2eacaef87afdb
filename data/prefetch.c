#include "data/prefetch.h"

#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "data/data.h"
#include "kernels/clock.h"
#include "kernels/fail.h"

// The caller owns one of two buffers, the thread fills the other while `state` is ASKED. Then they change places.
struct prefetch {
    const struct data *data;
    size_t window_tokens;
    int64_t count, stride;
    pthread_t thread;

    // All below is read and written under the mutex; `changed` tells that state or stop is another.
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    enum { IDLE, ASKED, READ, FAILED } state;
    bool stop;
    int64_t first;    // sequence that the block asked for begins with
    int32_t *ahead;   // its buffer, the thread's alone while ASKED
    int32_t *present; // the caller's
    struct data_error error;
};

static bool read_block(const struct prefetch *p, int64_t first, int32_t *tokens, struct data_error *e) {
    for (int64_t i = 0; i < p->count; i++)
        if (!data_read(p->data, DATA_TRAIN, (uint64_t)(first + i), tokens + (size_t)i * p->window_tokens, e))
            return false;
    return true;
}

static void *read_ahead(void *argument) {
    struct prefetch *p = argument;
    pthread_mutex_lock(&p->mutex);
    while (!p->stop) {
        if (p->state != ASKED) {
            pthread_cond_wait(&p->changed, &p->mutex);
            continue;
        }
        int64_t first = p->first;
        int32_t *tokens = p->ahead;
        pthread_mutex_unlock(&p->mutex);
        struct data_error error;
        bool read = read_block(p, first, tokens, &error);
        pthread_mutex_lock(&p->mutex);
        if (!read) p->error = error;
        p->state = read ? READ : FAILED;
        pthread_cond_broadcast(&p->changed);
    }
    pthread_mutex_unlock(&p->mutex);
    return NULL;
}

// A signal such as Ctrl-C is for the thread that trains, so that it interrupts what that one waits for.
static void start_thread(struct prefetch *p) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&p->thread, NULL, read_ahead, p); // inherits the mask
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed) fail_internal("data", "cannot start the thread that reads ahead: %s", strerror(failed));
}

struct prefetch *prefetch_open(const struct data *d, size_t window_tokens, int64_t count, int64_t stride) {
    struct prefetch *p = calloc(1, sizeof *p);
    size_t tokens = (size_t)count * window_tokens;
    if (p) *p = (struct prefetch){.data = d, .window_tokens = window_tokens, .count = count, .stride = stride};
    if (p) p->ahead = malloc(sizeof *p->ahead * (tokens + 1));
    if (p) p->present = malloc(sizeof *p->present * (tokens + 1));
    if (!p || !p->ahead || !p->present)
        fail_internal("data", "found no memory for the %zu tokens of two steps", tokens);
    pthread_mutex_init(&p->mutex, NULL);
    pthread_cond_init(&p->changed, NULL);
    start_thread(p);
    return p;
}

// Both under the mutex.
static void ask(struct prefetch *p, int64_t first) {
    p->first = first;
    p->state = ASKED;
    pthread_cond_broadcast(&p->changed);
}

static void wait_for_thread(struct prefetch *p) {
    while (p->state == ASKED) pthread_cond_wait(&p->changed, &p->mutex);
}

const int32_t *prefetch_take(struct prefetch *p, int64_t first, double *waited) {
    double start = clock_seconds();
    pthread_mutex_lock(&p->mutex);
    wait_for_thread(p);
    if (p->state == IDLE || p->first != first) {
        ask(p, first);
        wait_for_thread(p);
    }
    if (p->state == FAILED) data_fail(&p->error); // the thread waits, and changes nothing
    int32_t *taken = p->ahead;
    p->ahead = p->present;
    p->present = taken;
    ask(p, first + p->stride);
    pthread_mutex_unlock(&p->mutex);
    *waited += clock_seconds() - start;
    return taken;
}

void prefetch_close(struct prefetch *p) {
    if (!p) return;
    pthread_mutex_lock(&p->mutex);
    p->stop = true;
    pthread_cond_broadcast(&p->changed);
    pthread_mutex_unlock(&p->mutex);
    pthread_join(p->thread, NULL);
    pthread_cond_destroy(&p->changed);
    pthread_mutex_destroy(&p->mutex);
    free(p->ahead);
    free(p->present);
    free(p);
}

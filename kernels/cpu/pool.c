#include "kernels/cpu/pool.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>

#include "kernels/fail.h"

struct member {
    struct pool *pool;
    int number;
    pthread_t thread;
};

struct pool {
    pthread_mutex_t mutex;
    pthread_cond_t begin, end;
    unsigned long runs; // begun so far
    int busy;           // members that have not returned from the present one
    bool closing;
    void (*work)(void *argument, int worker);
    void *argument;
    int workers;
    struct member members[]; // [workers], of which 0 is the caller
};

static void *serve(void *argument) {
    struct member *m = argument;
    struct pool *p = m->pool;
    for (unsigned long run = 1;; run++) {
        pthread_mutex_lock(&p->mutex);
        while (p->runs < run && !p->closing) pthread_cond_wait(&p->begin, &p->mutex);
        bool closing = p->closing;
        pthread_mutex_unlock(&p->mutex);
        if (closing) return NULL;
        p->work(p->argument, m->number);
        pthread_mutex_lock(&p->mutex);
        if (--p->busy == 0) pthread_cond_signal(&p->end);
        pthread_mutex_unlock(&p->mutex);
    }
}

struct pool *pool_open(int workers) {
    struct pool *p = calloc(1, sizeof *p + (size_t)workers * sizeof *p->members);
    if (!p) fail_internal("workers", "found no memory for %d of them; lower --workers", workers);
    p->workers = workers;
    pthread_mutex_init(&p->mutex, NULL);
    pthread_cond_init(&p->begin, NULL);
    pthread_cond_init(&p->end, NULL);
    for (int i = 1; i < workers; i++) {
        p->members[i] = (struct member){.pool = p, .number = i};
        if (pthread_create(&p->members[i].thread, NULL, serve, &p->members[i]) != 0)
            fail_internal("workers", "found no room for thread %d of %d; lower --workers", i, workers);
    }
    return p;
}

void pool_close(struct pool *p) {
    if (!p) return;
    pthread_mutex_lock(&p->mutex);
    p->closing = true;
    pthread_cond_broadcast(&p->begin);
    pthread_mutex_unlock(&p->mutex);
    for (int i = 1; i < p->workers; i++) pthread_join(p->members[i].thread, NULL);
    pthread_cond_destroy(&p->begin);
    pthread_cond_destroy(&p->end);
    pthread_mutex_destroy(&p->mutex);
    free(p);
}

void pool_run(struct pool *p, void (*work)(void *argument, int worker), void *argument) {
    pthread_mutex_lock(&p->mutex);
    p->work = work;
    p->argument = argument;
    p->busy = p->workers - 1;
    p->runs++;
    pthread_cond_broadcast(&p->begin);
    pthread_mutex_unlock(&p->mutex);
    work(argument, 0);
    pthread_mutex_lock(&p->mutex);
    while (p->busy > 0) pthread_cond_wait(&p->end, &p->mutex);
    pthread_mutex_unlock(&p->mutex);
}

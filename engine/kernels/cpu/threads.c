/* A pool of compute threads with a barrier and a shared work counter. Waiting threads spin briefly and then sleep on a
 * futex, so an idle server uses no CPU and a descheduled thread does not make the others burn theirs. Work is handed
 * out item by item: when another process takes part of a core, the other cores take over the items of its share. */
#define _GNU_SOURCE
#include "atom.h"

#include <linux/futex.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#define SPINS 2000

typedef struct {
    _Alignas(64) atomic_uint generation;
    _Alignas(64) atomic_int sleepers;
} event;

typedef struct {
    _Alignas(64) atomic_int_fast64_t taken;
} share;

struct atom_pool {
    int num_threads;
    pthread_t *threads;
    pthread_mutex_t run_lock;
    event start, phase, done;
    share *shares;
    _Alignas(64) atomic_int arrived;
    _Alignas(64) atomic_int finished;
    atomic_int stopping;
    atom_task task;
    void *arg;
};

typedef struct {
    atom_pool *pool;
    int tid;
} worker_arg;

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void event_wait(event *e, unsigned seen) {
    for (int i = 0; i < SPINS; i++) {
        if (atomic_load_explicit(&e->generation, memory_order_acquire) != seen) return;
        relax();
    }
    atomic_fetch_add(&e->sleepers, 1);
    while (atomic_load(&e->generation) == seen)
        syscall(SYS_futex, &e->generation, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
    atomic_fetch_sub(&e->sleepers, 1);
}

static void event_signal(event *e) {
    atomic_fetch_add(&e->generation, 1);
    if (atomic_load(&e->sleepers)) syscall(SYS_futex, &e->generation, FUTEX_WAKE_PRIVATE, 0x7fffffff, NULL, NULL, 0);
}

int atom_pool_size(const atom_pool *pool) { return pool->num_threads; }

int64_t atom_next(atom_pool *pool, int tid, int64_t n) {
    int threads = pool->num_threads;
    for (int i = 0; i < threads; i++) {
        int owner = tid + i < threads ? tid + i : tid + i - threads;
        int64_t first = n * owner / threads, size = n * (owner + 1) / threads - first;
        share *s = &pool->shares[owner];
        if (atomic_load_explicit(&s->taken, memory_order_relaxed) >= size) continue;
        int64_t taken = atomic_fetch_add_explicit(&s->taken, 1, memory_order_relaxed);
        if (taken < size) return first + taken;
    }
    return -1;
}

static void rewind_shares(atom_pool *pool) {
    for (int i = 0; i < pool->num_threads; i++) atomic_store_explicit(&pool->shares[i].taken, 0, memory_order_relaxed);
}

void atom_barrier(atom_pool *pool) {
    if (pool->num_threads == 1) {
        rewind_shares(pool);
        return;
    }
    unsigned seen = atomic_load_explicit(&pool->phase.generation, memory_order_acquire);
    if (atomic_fetch_add(&pool->arrived, 1) + 1 == pool->num_threads) {
        atomic_store_explicit(&pool->arrived, 0, memory_order_relaxed);
        rewind_shares(pool);
        event_signal(&pool->phase);
    } else {
        event_wait(&pool->phase, seen);
    }
}

static void *worker(void *raw) {
    worker_arg a = *(worker_arg *)raw;
    free(raw);
    atom_pool *pool = a.pool;
    unsigned seen = 0;
    for (;;) {
        event_wait(&pool->start, seen);
        seen++;
        if (atomic_load(&pool->stopping)) return NULL;
        pool->task(pool->arg, a.tid);
        if (atomic_fetch_add(&pool->finished, 1) + 1 == pool->num_threads - 1) event_signal(&pool->done);
    }
}

void atom_pool_run(atom_pool *pool, atom_task task, void *arg) {
    pthread_mutex_lock(&pool->run_lock);
    pool->task = task;
    pool->arg = arg;
    rewind_shares(pool);
    atomic_store(&pool->finished, 0);
    unsigned seen = atomic_load(&pool->done.generation);
    if (pool->num_threads > 1) event_signal(&pool->start);
    task(arg, 0);
    if (pool->num_threads > 1) event_wait(&pool->done, seen);
    pthread_mutex_unlock(&pool->run_lock);
}

atom_pool *atom_pool_create(int num_threads) {
    atom_pool *pool = NULL;
    if (num_threads < 1 || posix_memalign((void **)&pool, 64, sizeof *pool)) return NULL;
    __builtin_memset(pool, 0, sizeof *pool);
    pool->num_threads = 1;
    pthread_mutex_init(&pool->run_lock, NULL);
    pool->threads = calloc((size_t)num_threads, sizeof *pool->threads);
    if (!pool->threads || posix_memalign((void **)&pool->shares, 64, (size_t)num_threads * sizeof *pool->shares)) {
        free(pool->threads);
        free(pool);
        return NULL;
    }
    /* Workers read num_threads only inside a task, which starts after this function has returned. */
    for (int tid = 1; tid < num_threads; tid++) {
        worker_arg *a = malloc(sizeof *a);
        if (!a) break;
        *a = (worker_arg){pool, tid};
        if (pthread_create(&pool->threads[tid], NULL, worker, a)) {
            free(a);
            break;
        }
        pool->num_threads = tid + 1;
    }
    return pool;
}

void atom_pool_destroy(atom_pool *pool) {
    if (!pool) return;
    atomic_store(&pool->stopping, 1);
    event_signal(&pool->start);
    for (int tid = 1; tid < pool->num_threads; tid++) pthread_join(pool->threads[tid], NULL);
    pthread_mutex_destroy(&pool->run_lock);
    free(pool->shares);
    free(pool->threads);
    free(pool);
}

#define _GNU_SOURCE
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define LINE 64

/* A wait spins for about 2 microseconds, as most phases end together, then gives way: on a busy machine the thread
 * that it waits for may share its core. A worker without work gives way so often (about 100 microseconds in all),
 * because the next pass usually comes at once, and then sleeps. */
#define SPINS 64
#define YIELDS 200

/* How much of a thread's stretch is taken, in this phase and in the next; and what only the thread reads. */
typedef struct {
    _Alignas(LINE) atomic_int taken[2];
    unsigned phase;
} pl_seat;

struct pl_pool {
    _Alignas(LINE) atomic_int arrived;
    _Alignas(LINE) atomic_uint phase;
    _Alignas(LINE) atomic_uint epoch; /* counts regions; workers wait for it to move */
    atomic_int sleepers;
    atomic_int closing;
    pl_region region;
    void *arg;
    int threads, watched;
    double opened; /* when the last barrier did, if watched */
    pid_t owner;
    pthread_mutex_t running, sleep;
    pthread_cond_t wake;
    pthread_t *workers;
    pl_seat *seats;
};

typedef struct {
    pl_pool *pool;
    int thread;
    unsigned epoch;
} pl_start;

static inline void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static inline void linger(int turn)
{
    if (turn < SPINS)
        relax();
    else
        sched_yield();
}

static unsigned next_epoch(pl_pool *pool, unsigned seen)
{
    unsigned now;
    for (int turn = 0; turn < SPINS + YIELDS; turn++) {
        now = atomic_load_explicit(&pool->epoch, memory_order_acquire);
        if (now != seen)
            return now;
        linger(turn);
    }
    pthread_mutex_lock(&pool->sleep);
    atomic_fetch_add(&pool->sleepers, 1);
    while ((now = atomic_load(&pool->epoch)) == seen)
        pthread_cond_wait(&pool->wake, &pool->sleep);
    atomic_fetch_sub(&pool->sleepers, 1);
    pthread_mutex_unlock(&pool->sleep);
    return now;
}

static void *work(void *arg)
{
    pl_start start = *(pl_start *)arg;
    free(arg);
    unsigned seen = start.epoch;
    for (;;) {
        seen = next_epoch(start.pool, seen);
        if (atomic_load(&start.pool->closing))
            return NULL;
        start.pool->region(start.pool->arg, start.pool, start.thread);
        pl_pool_barrier(start.pool, start.thread);
    }
}

static void next_region(pl_pool *pool)
{
    atomic_fetch_add(&pool->epoch, 1);
    if (atomic_load(&pool->sleepers)) {
        pthread_mutex_lock(&pool->sleep);
        pthread_cond_broadcast(&pool->wake);
        pthread_mutex_unlock(&pool->sleep);
    }
}

static void close_workers(pl_pool *pool, int started)
{
    atomic_store(&pool->closing, 1);
    next_region(pool);
    for (int i = 0; i < started; i++)
        pthread_join(pool->workers[i], NULL);
    atomic_store(&pool->closing, 0);
}

/* The locks are new too: those that a fork copied may be held by a thread that the child does not have. */
static int start_workers(pl_pool *pool)
{
    pool->owner = getpid();
    pthread_mutex_init(&pool->running, NULL);
    pthread_mutex_init(&pool->sleep, NULL);
    pthread_cond_init(&pool->wake, NULL);
    atomic_store(&pool->arrived, 0);
    memset(pool->seats, 0, (size_t)pool->threads * sizeof *pool->seats);
    atomic_store(&pool->phase, 0);
    atomic_store(&pool->sleepers, 0);
    for (int i = 0; i < pool->threads - 1; i++) {
        pl_start *start = malloc(sizeof *start);
        if (start != NULL)
            *start = (pl_start){pool, i + 1, atomic_load(&pool->epoch)};
        if (start == NULL || pthread_create(&pool->workers[i], NULL, work, start) != 0) {
            free(start);
            close_workers(pool, i);
            return -1;
        }
    }
    return 0;
}

pl_pool *pl_pool_create(int threads)
{
    pl_pool *pool = NULL;
    if (threads < 1 || posix_memalign((void **)&pool, LINE, sizeof *pool) != 0)
        return NULL;
    *pool = (pl_pool){.threads = threads, .workers = calloc((size_t)threads, sizeof(pthread_t))};
    if (posix_memalign((void **)&pool->seats, LINE, (size_t)threads * sizeof *pool->seats) != 0)
        pool->seats = NULL;
    if (pool->workers == NULL || pool->seats == NULL || start_workers(pool) != 0) {
        free(pool->seats);
        free(pool->workers);
        free(pool);
        return NULL;
    }
    return pool;
}

void pl_pool_destroy(pl_pool *pool)
{
    if (pool == NULL)
        return;
    if (pool->owner == getpid())
        close_workers(pool, pool->threads - 1);
    free(pool->seats);
    free(pool->workers);
    free(pool);
}

int pl_pool_threads(const pl_pool *pool) { return pool->threads; }

double pl_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

void pl_pool_watch(pl_pool *pool) { pool->watched = 1; }
double pl_pool_opened(const pl_pool *pool) { return pool->opened; }

void pl_pool_barrier(pl_pool *pool, int thread)
{
    pl_seat *seat = &pool->seats[thread];
    if (atomic_fetch_add_explicit(&pool->arrived, 1, memory_order_acq_rel) == pool->threads - 1) {
        atomic_store_explicit(&pool->arrived, 0, memory_order_relaxed);
        if (pool->watched)
            pool->opened = pl_now();
        atomic_fetch_add_explicit(&pool->phase, 1, memory_order_release);
    }
    for (int turn = 0; atomic_load_explicit(&pool->phase, memory_order_acquire) == seat->phase;)
        linger(turn < SPINS ? turn++ : turn);
    seat->phase++;
    /* nobody looks at the next phase's claims before this thread, too, has come to the next barrier */
    atomic_store_explicit(&seat->taken[(seat->phase + 1) % 2], 0, memory_order_relaxed);
}

/* In 32 bits, as this stands between all pieces of work and a long division takes its time. */
static int first_of(const pl_pool *pool, int thread, size_t total)
{
    return (int)((unsigned)total * (unsigned)thread / (unsigned)pool->threads);
}

static int claim_from(pl_pool *pool, int owner, unsigned phase, size_t total)
{
    int first = first_of(pool, owner, total), end = first_of(pool, owner + 1, total);
    atomic_int *taken = &pool->seats[owner].taken[phase];
    if (first + atomic_load_explicit(taken, memory_order_relaxed) >= end)
        return -1;
    int claimed = first + atomic_fetch_add_explicit(taken, 1, memory_order_relaxed);
    return claimed < end ? claimed : -1;
}

int pl_pool_claim(pl_pool *pool, int thread, size_t total)
{
    unsigned phase = pool->seats[thread].phase % 2;
    int claimed = claim_from(pool, thread, phase, total);
    for (int other = 0; claimed < 0 && other < pool->threads; other++)
        claimed = claim_from(pool, other, phase, total);
    return claimed;
}

void pl_pool_run(pl_pool *pool, pl_region region, void *arg)
{
    if (pool->owner != getpid() && start_workers(pool) != 0)
        pool->threads = 1;
    pthread_mutex_lock(&pool->running);
    pool->region = region;
    pool->arg = arg;
    pool->watched = 0;
    if (pool->threads > 1)
        next_region(pool);
    region(arg, pool, 0);
    pl_pool_barrier(pool, 0);
    pthread_mutex_unlock(&pool->running);
}

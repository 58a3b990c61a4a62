/* Threads of our own: one parallel region a call, barriers inside it, work handed out piece by piece. */
#ifndef PL_POOL_H
#define PL_POOL_H

#include <stddef.h>

typedef struct pl_pool pl_pool;
typedef void (*pl_region)(void *arg, pl_pool *pool, int thread);

/* A pool of `threads` threads, the caller counted; NULL without memory or threads. */
pl_pool *pl_pool_create(int threads);
void pl_pool_destroy(pl_pool *pool);
int pl_pool_threads(const pl_pool *pool);

/* Run the region on every thread; returns when all have left it. Calls from several threads queue up. After a
 * fork the child starts threads of its own. */
void pl_pool_run(pl_pool *pool, pl_region region, void *arg);

/* Inside a region: wait for all threads; then claims start again. */
void pl_pool_barrier(pl_pool *pool, int thread);

/* Seconds on the monotonic clock. */
double pl_now(void);

/* Inside a region, thread 0: from now on to its end note when barriers open; and when the last one did. A thread may
 * wake long after, and by then the others have done the next phase. */
void pl_pool_watch(pl_pool *pool);
double pl_pool_opened(const pl_pool *pool);

/* Inside a region: the next of 0 .. total - 1, each handed out once between two barriers; -1 when none is left.
 * Every thread goes through a stretch of its own, so that it reads memory in order, and then helps the others. */
int pl_pool_claim(pl_pool *pool, int thread, size_t total);

#endif

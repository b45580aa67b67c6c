/* pool.h: a few worker threads that share the stages of a step.
 *
 * The thread that calls pool_run() works too. A stage is n_items independent items; each is computed by exactly
 * one thread, so results never depend on the split. Workers spin briefly, then sleep on a futex: an idle pool
 * costs no CPU time. See ../lab for what the design measured.
 */
#ifndef MILAD_POOL_H
#define MILAD_POOL_H

#include <stddef.h>
#include <stdint.h>

typedef struct pool pool;
/* Items lo <= i < hi on thread `thread` (0 = the caller). Must not call pool_run. */
typedef void (*pool_fn)(void *arg, int32_t lo, int32_t hi, int32_t thread);

/* n_threads >= 1 counts the caller. NULL: out of memory or no threads to be had. */
pool *pool_open(int32_t n_threads);
void pool_close(pool *p);
int32_t pool_threads(const pool *p);
/* Runs fn over 0..n_items-1 and returns when all is done. grain >= 1: least items handed out at once. Items go out in
 * rising order per thread. */
void pool_run(pool *p, int32_t n_items, int32_t grain, pool_fn fn, void *arg);
/* What `thread` will read first in the stage after the next one: while it waits at the next one's end, it asks for that memory.
 * Only a hint; holds for one stage. Caller's thread. */
void pool_ahead(pool *p, int32_t thread, const void *at, size_t n_bytes);
/* Cores this process may really use: affinity mask and cgroup quota, at least 1. */
int32_t pool_usable_cores(void);

#endif

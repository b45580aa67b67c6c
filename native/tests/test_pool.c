/* test_pool.c: every item exactly once in every stage, whatever the sizes; results of a stage are visible after it; workers that come
 * late, sleep or are left out do no harm; no CPU time when idle; a forked child can go on. Run under TSan by scripts/check.
 */
#include "pool.h"

#include <sched.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "test.h"

enum { MOST = 300000 };
static atomic_uchar seen[MOST];
static int32_t plain[MOST];

typedef struct stage {
    int32_t n, grain, n_threads;
    atomic_int wrong;
    int32_t value;
} stage;

static void mark(void *arg, int32_t lo, int32_t hi, int32_t thread)
{
    stage *s = arg;
    if (lo < 0 || hi > s->n || lo >= hi || thread < 0 || thread >= s->n_threads)
        atomic_fetch_add(&s->wrong, 1);
    for (int32_t i = lo; i < hi; i++) {
        atomic_fetch_add_explicit(&seen[i], 1, memory_order_relaxed);
        plain[i] = s->value + i;
    }
}

static void one_stage(pool *p, int32_t n, int32_t grain, int32_t value)
{
    stage s = {n, grain, pool_threads(p), 0, value};
    int32_t missed = 0;
    for (int32_t i = 0; i < n; i++)
        atomic_store_explicit(&seen[i], 0, memory_order_relaxed);
    pool_run(p, n, grain, mark, &s);
    for (int32_t i = 0; i < n; i++)
        missed += atomic_load_explicit(&seen[i], memory_order_relaxed) != 1 || plain[i] != value + i;
    CHECK_INT(missed, 0);
    CHECK_INT(s.wrong, 0);
}

static void test_every_item_once(void)
{
    for (int32_t n_threads = 1; n_threads <= 5; n_threads++) {
        uint64_t state = (uint64_t)n_threads;
        pool *p = pool_open(n_threads);
        CHECK(p != NULL);
        CHECK_INT(pool_threads(p), n_threads);
        for (int i = 0; i < 3000; i++) {
            uint64_t r = test_random(&state);
            one_stage(p, (int32_t)(r % 97), (int32_t)(r >> 20) % 9 + 1, i);
            if (i % 500 == 0)
                usleep(3000); /* workers fall asleep */
        }
        one_stage(p, MOST, 1, 7);
        one_stage(p, MOST, 1000, 8);
        one_stage(p, 1, 100, 9);
        one_stage(p, 0, 1, 10);
        pool_close(p);
    }
    pool_close(NULL);
    CHECK_INT(pool_threads(NULL), 1);
    one_stage(NULL, 10, 1, 1);
}

static void slow(void *arg, int32_t lo, int32_t hi, int32_t thread)
{
    (void)thread;
    atomic_fetch_add((atomic_int *)arg, hi - lo);
    usleep(2000); /* a chunk that stalls: whoever holds it is left out for a while */
}

static void test_stalls(void)
{
    pool *p = pool_open(3);
    for (int i = 0; i < 60; i++) {
        atomic_int n = 0;
        pool_run(p, 12, 1, slow, &n);
        CHECK_INT(n, 12);
        one_stage(p, 50, 1, i);
    }
    pool_close(p);
}

static void test_idle_costs_nothing(void)
{
    pool *p = pool_open(4);
    one_stage(p, 100, 1, 1);
    struct timespec a, b;
    usleep(20000);
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &a);
    usleep(200000);
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &b);
    int64_t ns = (int64_t)(b.tv_sec - a.tv_sec) * 1000000000 + b.tv_nsec - a.tv_nsec;
    CHECK(ns < 20000000); /* a tenth of one core would be a spinning worker */
    pool_close(p);
}

static void test_fork(void)
{
    pool *p = pool_open(3);
    one_stage(p, 64, 1, 1);
    pid_t child = fork();
    if (child == 0) {
        one_stage(p, 64, 1, 2);
        pool_close(p);
        _exit(test_failures != 0);
    }
    int status = 1;
    waitpid(child, &status, 0);
    CHECK_INT(status, 0);
    one_stage(p, 64, 1, 3);
    pool_close(p);
}

static void sleep_in_worker(void *arg, int32_t lo, int32_t hi, int32_t thread)
{
    (void)lo, (void)hi;
    if (thread > 0 && !atomic_exchange((atomic_int *)arg, 1))
        usleep(30000); /* left out */
    else
        usleep(100); /* leaves chunks to the others */
}

/* A worker that is left out when the process forks is not let back in the child: to place it would pin the child's own thread.
 * One child on each of two cores, for a worker that stays on its core is not placed again. */
static void test_fork_while_left_out(void)
{
    cpu_set_t all, one, now;
    CHECK_INT(sched_getaffinity(0, sizeof all, &all), 0);
    pool *p = pool_open(CPU_COUNT(&all));
    atomic_int slept = 0;
    pool_run(p, 64, 1, sleep_in_worker, &slept);
    for (int cpu = 0, n = 0; cpu < CPU_SETSIZE && n < 2; cpu++) {
        if (!CPU_ISSET(cpu, &all))
            continue;
        n++;
        pid_t child = fork();
        if (child == 0) {
            CPU_ZERO(&one);
            CPU_SET(cpu, &one);
            CHECK_INT(sched_setaffinity(0, sizeof one, &one), 0);
            usleep(50000);
            one_stage(p, 64, 1, 2);
            CHECK_INT(sched_getaffinity(0, sizeof now, &now), 0);
            CHECK(CPU_EQUAL(&one, &now));
            pool_close(p);
            _exit(test_failures != 0);
        }
        int status = 1;
        waitpid(child, &status, 0);
        CHECK_INT(status, 0);
    }
    pool_close(p);
}

static void test_open_close(void)
{
    for (int i = 0; i < 200; i++) {
        pool *p = pool_open(4);
        if (i % 2)
            one_stage(p, 8, 1, i);
        pool_close(p);
    }
    CHECK(pool_usable_cores() >= 1);
}

int main(void)
{
    test_every_item_once();
    test_stalls();
    test_open_close();
    test_fork();
    test_fork_while_left_out();
    test_idle_costs_nothing();
    return test_done();
}

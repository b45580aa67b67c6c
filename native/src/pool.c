/* pool.c: worker threads that share stages with the thread that calls. Owns threads, pinning and the choice of cores; must not
 * know what a stage computes.
 *
 * A stage is cut into chunks of `grain` items. Each thread has a range of chunks in one atomic word (tag 32 | lo 16 |
 * hi 16): its owner takes from the front, others take from the back, both by compare-and-swap. The leader waits until the
 * work is done, not until threads arrive, so a worker that the machine has put to sleep costs nothing unless it holds a chunk.
 * Who waits asks for the memory that it will read in the stage after (pool_ahead), so that memory does not idle.
 *
 * What a late worker may see: `fn`, `arg` and the rest of a stage are read only after a chunk of it was taken. The
 * leader writes the next stage only when every chunk is done, so what is read then is that stage's, whatever the tag; the tag
 * keeps a worker that read a word of an old stage from taking from a new one without looking again.
 *
 * A busy machine (measured in ../lab): when the wait for the others takes a millisecond, threads that hold chunks without getting
 * half of a core are left out for 5 ms, and twice as long when it soon happens again, up to 400 ms; with two threads that means
 * working alone. The same happens when the leader is preempted and gets less than 75 % of a core: one worker stops so that the
 * system can move the leader. Shorter moments are no busy machine but the program's own threads, which send what was computed:
 * to leave a worker out for them cost a server half of its speed. Workers are pinned to one core each inside the mask that the process was given, never to the leader's present core;
 * the leader belongs to the caller and is not pinned.
 */
#include "pool.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "cores.h"

enum {
    MAX_THREADS = 256,
    STACK_BYTES = 2 << 20,
    LINE = 64,
    ASK_LINES = 4,          /* asked for between two looks: what a core requests in some 10 ns */
    JOB_LINES = 5,          /* of a stage of three products */
    TAKE_PART = 4,          /* of what is left of a range */
    SPIN_IDLE = 4000,       /* pauses of an idle worker before it sleeps */
    SPIN_STALL = 3000,      /* pauses of the leader between looks at whom it waits for */
    WINDOW_NS = 4000000,    /* least time over which the leader looks at its own share of a core */
    STALL_NS = 1000000,     /* least wait that may be a worker's that gets no core */
    GOOD_NS = 100000000,    /* so long without a stall halves the next exclusion */
    ALONE_MIN_NS = 5000000,
    ALONE_MAX_NS = 400000000
};

typedef struct pool_thread {
    _Alignas(128) _Atomic uint64_t range;
    _Atomic(const char *) ahead;   /* what it will read after this stage; written with the range */
    _Atomic size_t n_ahead;
    _Alignas(128) atomic_uint finished; /* chunks, ever; written by the thread alone: a shared count would wander from core to core */
    _Alignas(128) atomic_int busy; /* holds a chunk */
    const char *next;              /* leader only: of pool_ahead() */
    size_t n_next;
    int64_t left_out_until;        /* leader only */
    int64_t penalty;               /* leader only: ns of the last exclusion */
    int64_t cpu_seen;              /* leader only: the thread's CPU time when a wait grew long */
    clockid_t clock;
    pthread_t thread;
    int32_t core;                  /* -1: not pinned */
    int32_t index;
    struct pool *pool;
} pool_thread;

struct pool {
    _Alignas(128) atomic_uint stage;
    _Alignas(128) atomic_int sleepers; /* a worker may sleep on `stage`; cleared by who wakes it, which it may be long in noticing */
    _Alignas(128) _Atomic(pool_fn) fn;
    _Atomic(void *) arg;
    atomic_int n_items, grain, quit;
    atomic_uint active[MAX_THREADS]; /* 0: left out, sleeps on this word */
    int32_t n_threads;
    unsigned n_forks;              /* before it was opened */
    uint32_t n_given;              /* chunks of all stages, to compare with what the threads have finished */
    int64_t window_wall, window_cpu, window_preempted;
    uint32_t n_stages;
    int32_t n_left_out;
    core_list cores;
    pool_thread *t;
};

/* Forks that this process is the child of: a child has no workers. getpid() is a system call, and stages are many. */
static unsigned n_forks;
static pthread_once_t counts_forks = PTHREAD_ONCE_INIT;

static void forked(void)
{
    n_forks++;
}

static void count_forks(void)
{
    pthread_atfork(NULL, NULL, forked);
}

static int64_t clock_ns(clockid_t id)
{
    struct timespec t;
    clock_gettime(id, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static inline void pause_cpu(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void futex_wait(atomic_uint *word, unsigned value)
{
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void futex_wake(atomic_uint *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

static inline uint64_t range_word(unsigned tag, uint32_t lo, uint32_t hi)
{
    return (uint64_t)tag << 32 | (uint64_t)lo << 16 | hi;
}

/* Takes a part of a stage's chunks from one end of a range: the last takes are small, so threads end together. */
static bool take(_Atomic uint64_t *range, unsigned tag, bool front, uint32_t *lo, uint32_t *hi)
{
    uint64_t w = atomic_load_explicit(range, memory_order_acquire);
    for (;;) {
        uint32_t a = (uint32_t)(w >> 16) & 0xffffu, b = (uint32_t)w & 0xffffu;
        if ((unsigned)(w >> 32) != tag || a >= b)
            return false;
        const uint32_t n = (b - a + TAKE_PART - 1) / TAKE_PART;
        *lo = front ? a : b - n;
        *hi = *lo + n;
        uint64_t next = front ? range_word(tag, a + n, b) : range_word(tag, a, b - n);
        if (atomic_compare_exchange_weak_explicit(range, &w, next, memory_order_acq_rel, memory_order_acquire))
            return true;
    }
}

static void do_chunks(pool *p, int32_t thread, uint32_t lo, uint32_t hi)
{
    const int64_t grain = atomic_load_explicit(&p->grain, memory_order_relaxed);
    const int64_t n = atomic_load_explicit(&p->n_items, memory_order_relaxed);
    const int64_t end = (int64_t)hi * grain < n ? (int64_t)hi * grain : n;
    pool_fn fn = atomic_load_explicit(&p->fn, memory_order_relaxed);
    fn(atomic_load_explicit(&p->arg, memory_order_relaxed), (int32_t)((int64_t)lo * grain), (int32_t)end, thread);
    atomic_store_explicit(&p->t[thread].busy, 0, memory_order_relaxed);
    const unsigned finished = atomic_load_explicit(&p->t[thread].finished, memory_order_relaxed);
    atomic_store_explicit(&p->t[thread].finished, finished + (hi - lo), memory_order_release);
}

/* Asks for some of [*at, *at + *left); false: nothing is left. */
static inline bool ask(const char **at, size_t *left)
{
    if (*left < ASK_LINES * LINE)
        return false;
    for (int i = 0; i < ASK_LINES; i++)
        __builtin_prefetch(*at + i * LINE);
    *at += ASK_LINES * LINE;
    *left -= ASK_LINES * LINE;
    return true;
}

static void work(pool *p, int32_t thread, unsigned tag)
{
    uint32_t lo, hi;
    atomic_int *busy = &p->t[thread].busy;
    for (int32_t i = 0; i < p->n_threads; i++) {
        int32_t from = thread + i < p->n_threads ? thread + i : thread + i - p->n_threads;
        for (;;) {
            atomic_store_explicit(busy, 1, memory_order_relaxed);
            if (!take(&p->t[from].range, tag, i == 0, &lo, &hi))
                break;
            do_chunks(p, thread, lo, hi);
        }
        atomic_store_explicit(busy, 0, memory_order_relaxed);
    }
}

static void *worker(void *arg)
{
    pool_thread *self = arg;
    pool *p = self->pool;
    unsigned tag = 0;
    atomic_uint *active = &p->active[self->index];
    for (;;) {
        int spins = 0;
        unsigned now;
        const char *ahead = atomic_load_explicit(&self->ahead, memory_order_relaxed); /* of this stage or, late, of the next: no matter */
        size_t n_ahead = atomic_load_explicit(&self->n_ahead, memory_order_relaxed);
        while (atomic_load(active) == 0)
            futex_wait(active, 0);
        while ((now = atomic_load_explicit(&p->stage, memory_order_acquire)) == tag
               && atomic_load_explicit(active, memory_order_relaxed)) {
            if (ask(&ahead, &n_ahead))
                continue;
            pause_cpu();
            if (++spins < SPIN_IDLE)
                continue;
            atomic_store(&p->sleepers, 1);
            if (atomic_load(&p->stage) == tag)
                futex_wait(&p->stage, tag);
            spins = 0;
        }
        if (atomic_load_explicit(&p->quit, memory_order_acquire))
            return NULL;
        if (now != tag) {
            /* The leader's memory, perhaps another die's: all lines at once, before the first atomic operation. */
            const char *job = atomic_load_explicit(&p->arg, memory_order_relaxed);
            for (int i = 0; i < JOB_LINES; i++)
                __builtin_prefetch(job + i * LINE);
            tag = now;
            work(p, self->index, tag);
        }
    }
}

static void pin(pool_thread *t, int32_t core)
{
    cpu_set_t set;
    if (core < 0 || core >= CPU_SETSIZE)
        return;
    CPU_ZERO(&set);
    CPU_SET(core, &set);
    if (pthread_setaffinity_np(t->thread, sizeof set, &set) == 0)
        t->core = core;
}

/* Pins the workers to cores of the list other than the leader's present one. */
static void place_workers(pool *p)
{
    const int32_t here = sched_getcpu();
    if (p->n_threads < p->cores.n_physical || p->n_threads > p->cores.n)
        return; /* with cores to spare the system places them better */
    int32_t next = 0;
    for (int32_t i = 1; i < p->n_threads; i++) {
        while (next < p->cores.n && p->cores.core[next] == here)
            next++;
        if (next == p->cores.n)
            return;
        if (p->t[i].core != p->cores.core[next])
            pin(&p->t[i], p->cores.core[next]);
        next++;
    }
}

pool *pool_open(int32_t n_threads)
{
    n_threads = n_threads < 1 ? 1 : n_threads > MAX_THREADS ? MAX_THREADS : n_threads;
    pool *p = aligned_alloc(128, sizeof *p);
    if (p == NULL)
        return NULL;
    memset(p, 0, sizeof *p);
    p->t = aligned_alloc(128, (size_t)n_threads * sizeof *p->t);
    if (p->t == NULL) {
        free(p);
        return NULL;
    }
    memset(p->t, 0, (size_t)n_threads * sizeof *p->t);
    pthread_once(&counts_forks, count_forks);
    p->n_forks = n_forks;
    cores_list(&p->cores);
    for (int32_t i = 0; i < n_threads; i++) {
        p->t[i].index = i;
        p->t[i].pool = p;
        p->t[i].core = -1;
        atomic_store(&p->active[i], 1);
    }
    p->n_threads = n_threads;
    pthread_attr_t sized; /* a stage's buffers take 170 kB of stack, where some systems give a thread 128 */
    pthread_attr_init(&sized);
    pthread_attr_setstacksize(&sized, STACK_BYTES);
    for (int32_t i = 1; i < n_threads; i++) {
        if (pthread_create(&p->t[i].thread, &sized, worker, &p->t[i]) != 0) {
            pthread_attr_destroy(&sized);
            p->n_threads = i; /* no worker has had work, so none has looked at it */
            pool_close(p);
            return NULL;
        }
        if (pthread_getcpuclockid(p->t[i].thread, &p->t[i].clock) != 0)
            p->t[i].clock = CLOCK_MONOTONIC; /* never seems to stall */
    }
    pthread_attr_destroy(&sized);
    place_workers(p);
    return p;
}

static void wake_left_out(pool *p, int32_t thread)
{
    atomic_store(&p->active[thread], 1);
    futex_wake(&p->active[thread]);
}

void pool_close(pool *p)
{
    if (p == NULL)
        return;
    if (p->n_forks == n_forks) {
        atomic_store(&p->quit, 1);
        atomic_fetch_add(&p->stage, 1);
        futex_wake(&p->stage);
        for (int32_t i = 1; i < p->n_threads; i++) {
            wake_left_out(p, i);
            pthread_join(p->t[i].thread, NULL);
        }
    }
    free(p->t);
    free(p);
}

int32_t pool_threads(const pool *p)
{
    return p ? p->n_threads : 1;
}

static void leave_out(pool *p, int32_t thread, int64_t now)
{
    pool_thread *t = &p->t[thread];
    if (!atomic_load_explicit(&p->active[thread], memory_order_relaxed))
        return;
    const int64_t good = (now - t->left_out_until) / GOOD_NS;
    t->penalty = good <= 0 ? 2 * t->penalty : good < 8 ? t->penalty >> good : 0;
    t->penalty = t->penalty < ALONE_MIN_NS ? ALONE_MIN_NS : t->penalty < ALONE_MAX_NS ? t->penalty : ALONE_MAX_NS;
    atomic_store_explicit(&p->active[thread], 0, memory_order_relaxed);
    t->left_out_until = now + t->penalty;
    p->n_left_out++;
}

static void let_back(pool *p)
{
    const int64_t now = clock_ns(CLOCK_MONOTONIC);
    bool any = false;
    for (int32_t i = 1; i < p->n_threads; i++) {
        if (!atomic_load_explicit(&p->active[i], memory_order_relaxed) && now >= p->t[i].left_out_until) {
            wake_left_out(p, i);
            p->n_left_out--;
            any = true;
        }
    }
    if (any) {
        place_workers(p);
        p->window_wall = 0;
    }
}

/* How often the calling thread has had to give its core to another. */
static int64_t preempted(void)
{
    struct rusage u;
    return getrusage(RUSAGE_THREAD, &u) == 0 ? u.ru_nivcsw : 0;
}

/* The leader's share of a core since the window began. A pause between steps also lowers it, but is no preemption. Called every
 * few stages: the clocks cost as much as a small stage. */
static void look_at_share(pool *p)
{
    const int64_t now = clock_ns(CLOCK_MONOTONIC), wall = now - p->window_wall;
    if (p->window_wall != 0 && wall < WINDOW_NS)
        return;
    const int64_t cpu_now = clock_ns(CLOCK_THREAD_CPUTIME_ID), cpu = cpu_now - p->window_cpu;
    const int64_t times = preempted(), had_to_wait = times - p->window_preempted;
    const bool whole = p->window_wall != 0;
    p->window_wall = now;
    p->window_cpu = cpu_now;
    p->window_preempted = times;
    if (!whole)
        return;
    if (cpu * 100 >= wall * 75 || !had_to_wait)
        return;
    for (int32_t i = p->n_threads - 1; i > 0; i--) {
        if (atomic_load_explicit(&p->active[i], memory_order_relaxed)) {
            leave_out(p, i, now);
            return;
        }
    }
}

static int64_t cpu_time(const pool_thread *t)
{
    return clock_ns(t->clock);
}

/* Leaves out threads that hold a chunk but have had less than half of a core since the last look. */
static void leave_out_stalled(pool *p, int64_t *looked_at)
{
    const int64_t now = clock_ns(CLOCK_MONOTONIC), wall = now - *looked_at;
    if (*looked_at && wall < STALL_NS)
        return;
    for (int32_t i = 1; i < p->n_threads; i++) {
        pool_thread *t = &p->t[i];
        const int64_t cpu = cpu_time(t);
        if (*looked_at && atomic_load_explicit(&t->busy, memory_order_relaxed) && 2 * (cpu - t->cpu_seen) < wall)
            leave_out(p, i, now);
        t->cpu_seen = cpu;
    }
    *looked_at = now;
}

static bool all_done(const pool *p)
{
    uint32_t n = 0;
    for (int32_t i = 0; i < p->n_threads; i++)
        n += atomic_load_explicit(&p->t[i].finished, memory_order_acquire);
    return n == p->n_given;
}

static void wait_done(pool *p)
{
    int spins = 0;
    int64_t looked_at = 0;
    const char *ahead = atomic_load_explicit(&p->t[0].ahead, memory_order_relaxed);
    size_t n_ahead = atomic_load_explicit(&p->t[0].n_ahead, memory_order_relaxed);
    while (!all_done(p)) {
        if (ask(&ahead, &n_ahead))
            continue;
        pause_cpu();
        if (++spins < SPIN_STALL)
            continue;
        if (spins % SPIN_STALL == 0)
            leave_out_stalled(p, &looked_at);
        if (p->n_left_out && spins % 256 == 0)
            sched_yield(); /* a stalled worker may wait for this very core */
    }
}

static void publish(pool *p, int32_t n_chunks, unsigned tag)
{
    int32_t n_active = 0, k = 0;
    for (int32_t i = 0; i < p->n_threads; i++)
        n_active += (int32_t)atomic_load_explicit(&p->active[i], memory_order_relaxed);
    p->n_given += (uint32_t)n_chunks;
    for (int32_t i = 0; i < p->n_threads; i++) {
        uint32_t lo = (uint32_t)((int64_t)n_chunks * k / n_active);
        k += (int32_t)atomic_load_explicit(&p->active[i], memory_order_relaxed);
        uint32_t hi = (uint32_t)((int64_t)n_chunks * k / n_active);
        atomic_store_explicit(&p->t[i].ahead, p->t[i].next, memory_order_relaxed);
        atomic_store_explicit(&p->t[i].n_ahead, p->t[i].n_next, memory_order_relaxed);
        p->t[i].n_next = 0;
        atomic_store_explicit(&p->t[i].range, range_word(tag, lo, hi), memory_order_release);
    }
    atomic_store(&p->stage, tag);
    if (atomic_exchange(&p->sleepers, 0)) {
        int32_t here = sched_getcpu();
        for (int32_t i = 1; i < p->n_threads; i++)
            if (p->t[i].core == here) {
                place_workers(p);
                break;
            }
        futex_wake(&p->stage);
    }
}

void pool_ahead(pool *p, int32_t thread, const void *at, size_t n_bytes)
{
    p->t[thread].next = at;
    p->t[thread].n_next = n_bytes;
}

void pool_run(pool *p, int32_t n_items, int32_t grain, pool_fn fn, void *arg)
{
    if (n_items <= 0)
        return;
    grain = grain < 1 ? 1 : grain;
    if (n_items / grain > 65000)
        grain = n_items / 65000 + 1;
    const int32_t n_chunks = (int32_t)(((int64_t)n_items + grain - 1) / grain);
    const bool has_workers = p && p->n_forks == n_forks;
    if (has_workers && p->n_left_out)
        let_back(p);
    if (!has_workers || n_chunks == 1 || p->n_left_out == p->n_threads - 1) {
        fn(arg, 0, n_items, 0);
        return;
    }
    if (++p->n_stages % 16 == 0)
        look_at_share(p);
    atomic_store_explicit(&p->fn, fn, memory_order_relaxed);
    atomic_store_explicit(&p->arg, arg, memory_order_relaxed);
    atomic_store_explicit(&p->n_items, n_items, memory_order_relaxed);
    atomic_store_explicit(&p->grain, grain, memory_order_relaxed);
    unsigned tag = atomic_load_explicit(&p->stage, memory_order_relaxed) + 1;
    publish(p, n_chunks, tag);
    work(p, 0, tag);
    wait_done(p);
}

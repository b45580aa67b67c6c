/* probe.c: milad_probe and milad_devices: what this machine is and what it can do. Owns the measurement; must not know models.
 *
 * A limit is the best of the bursts of about 0.2 s: whatever else runs can only make one slower.
 */
#include "probe.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "cores.h"
#include "error.h"
#include "mat.h"
#include "milad.h"

static const probe_kernels *kernels(void)
{
#if defined(MILAD_HAVE_AVX512)
    if (strncmp(mat_isa(), "avx512", 6) == 0)
        return &probe_kernels_avx512;
#endif
#if defined(MILAD_HAVE_AVX2)
    if (strcmp(mat_isa(), "avx2") == 0)
        return &probe_kernels_avx2;
#endif
#if defined(MILAD_HAVE_DOTPROD)
    if (strcmp(mat_isa(), "neon-dotprod") == 0)
        return &probe_kernels_dotprod;
#endif
#if defined(MILAD_HAVE_NEON)
    if (strcmp(mat_isa(), "neon") == 0)
        return &probe_kernels_neon;
#endif
    return &probe_kernels_c;
}

static double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

typedef struct read_job {
    const char *data;
    size_t slice, n_bytes;
    _Atomic int64_t seen;
} read_job;

static void read_slices(void *arg, int32_t lo, int32_t hi, int32_t thread)
{
    read_job *job = arg;
    (void)thread;
    size_t begin = (size_t)lo * job->slice, end = (size_t)hi * job->slice;
    end = end < job->n_bytes ? end : job->n_bytes;
    atomic_fetch_or(&job->seen, kernels()->read(job->data + begin, end - begin));
}

double probe_read_once(pool *p, const void *data, size_t n_bytes)
{
    read_job job = {data, 65536, n_bytes / 512 * 512, 0};
    const double begin = now_s();
    pool_run(p, (int32_t)((job.n_bytes + job.slice - 1) / job.slice), 1, read_slices, &job);
    return now_s() - begin;
}

typedef struct ops_job {
    double (*fn)(int64_t, int64_t *);
    _Atomic int64_t n_ops;
} ops_job;

static void run_ops(void *arg, int32_t lo, int32_t hi, int32_t thread)
{
    ops_job *job = arg;
    (void)thread;
    for (int32_t i = lo; i < hi; i++) {
        int64_t n = 0;
        volatile double keep = job->fn(20000, &n);
        (void)keep;
        atomic_fetch_add(&job->n_ops, n);
    }
}

double probe_ops_once(pool *p, enum probe_kind kind)
{
    ops_job job = {kernels()->ops[kind] ? kernels()->ops[kind] : kernels()->ops[PROBE_F32], 0};
    const double begin = now_s();
    pool_run(p, 100 * pool_threads(p), 1, run_ops, &job);
    return (double)job.n_ops / (now_s() - begin);
}

static long cache_bytes(int level)
{
#if defined(_SC_LEVEL1_DCACHE_SIZE)
    static const int names[] = {_SC_LEVEL1_DCACHE_SIZE, _SC_LEVEL2_CACHE_SIZE, _SC_LEVEL3_CACHE_SIZE};
    long n = sysconf(names[level - 1]);
    return n > 0 ? n : 0;
#else
    (void)level;
    return 0;
#endif
}

/* The least of the limits that a container's cgroup shows (v2, v1); SIZE_MAX: none. */
static size_t memory_limit(void)
{
    static const char *const files[] = {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"};
    size_t limit = SIZE_MAX, n;
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        FILE *f = fopen(files[i], "r");
        if (f && fscanf(f, "%zu", &n) == 1 && n < limit)
            limit = n;
        if (f)
            fclose(f);
    }
    return limit;
}

/* Bytes that no cache holds a share of worth counting: 192 MB beside an L3 of 32 were read 5 to 20 % faster than memory (../lab). */
static size_t probe_bytes(void)
{
    enum { LEAST = 192 << 20, MOST = 1 << 30, OF_L3 = 16, OF_MEMORY = 16 };
    const size_t all = (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE), limit = memory_limit();
    const size_t memory = (all < limit ? all : limit) / OF_MEMORY;
    size_t n = (size_t)cache_bytes(3) * OF_L3;
    n = n < MOST ? n : MOST;
    n = n < memory ? n : memory;
    return (n > LEAST ? n : LEAST) / 512 * 512;
}

static double best_read(pool *p)
{
    const size_t n_bytes = probe_bytes();
    char *data = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED)
        return 0;
#ifdef MADV_HUGEPAGE
    madvise(data, n_bytes, MADV_HUGEPAGE);
#endif
    memset(data, 1, n_bytes);
    double best = 0;
    for (double begin = now_s(); now_s() - begin < 0.2;) {
        double rate = (double)n_bytes / probe_read_once(p, data, n_bytes);
        best = rate > best ? rate : best;
    }
    munmap(data, n_bytes);
    return best;
}

int32_t milad_probe(int32_t kind, int32_t n_threads, double *out)
{
    if (out == NULL || kind < PROBE_READ || kind > PROBE_F32 || n_threads < 0)
        return fail(MILAD_E_ARGUMENT, "milad_probe: kind must be 0..3 and n_threads at least 0");
    pool *p = pool_open(n_threads ? n_threads : pool_usable_cores());
    if (p == NULL)
        return fail(MILAD_E_MEMORY, "milad_probe: no memory or no threads");
    double best = 0;
    if (kind == PROBE_READ) {
        best = best_read(p);
    } else {
        for (double begin = now_s(); now_s() - begin < 0.2;) {
            double rate = probe_ops_once(p, (enum probe_kind)kind);
            if (rate == 0) { /* no BF16 instructions: F32's speed */
                kind = PROBE_F32;
                continue;
            }
            best = rate > best ? rate : best;
        }
    }
    pool_close(p);
    if (!(best > 0))
        return fail(MILAD_E_MEMORY, "milad_probe: no memory to read");
    *out = best;
    return MILAD_OK;
}

/* The processor's name for a JSON string: printable ASCII without quotes and backslashes. */
static void processor_name(char *out, size_t n_bytes)
{
    char line[512];
    snprintf(out, n_bytes, "unknown");
    FILE *f = fopen("/proc/cpuinfo", "r");
    if (f == NULL)
        return;
    while (fgets(line, sizeof line, f)) {
        char *colon = strchr(line, ':');
        if (strncmp(line, "model name", 10) != 0 || colon == NULL)
            continue;
        size_t n = 0;
        for (char *c = colon + 2; *c && n + 1 < n_bytes; c++)
            if (*c >= 32 && *c < 127 && *c != '"' && *c != '\\')
                out[n++] = *c;
        out[n] = 0;
        break;
    }
    fclose(f);
}

int64_t milad_devices(char *buf, size_t n_bytes)
{
    core_list cores;
    char name[128];
    cores_list(&cores);
    processor_name(name, sizeof name);
    const long long memory = (long long)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE);
    return snprintf(buf, n_bytes,
                    "{\"isa\": \"%s\", \"cores\": %d, \"threads\": %d, \"usable\": %d, \"devices\": [{\"kind\": \"cpu\", \"name\": \"%s\", "
                    "\"l1d_bytes\": %ld, \"l2_bytes\": %ld, \"l3_bytes\": %ld, \"memory_bytes\": %lld}]}",
                    mat_isa(), (int)cores.n_physical, (int)cores.n, (int)pool_usable_cores(), name, cache_bytes(1), cache_bytes(2),
                    cache_bytes(3), memory);
}

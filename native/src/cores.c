/* cores.c: the cores that this process may really use: affinity mask, SMT siblings, cgroup quota (v2 and v1).
 *
 * Files: /sys/devices/system/cpu/cpuN/topology/thread_siblings_list; /proc/self/cgroup and below /sys/fs/cgroup cpu.max
 * ("max 100000" or "150000 100000") or cpu.cfs_quota_us (-1: none) with cpu.cfs_period_us
 * (kernel documentation, admin-guide/cgroup-v2.rst and cgroup-v1/cpu: sched-bwc.rst).
 */
#include "cores.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "pool.h"

static int32_t first_sibling(int32_t cpu)
{
    char path[96];
    int32_t first = cpu;
    snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list", (int)cpu);
    FILE *f = fopen(path, "r");
    if (f == NULL)
        return cpu;
    if (fscanf(f, "%d", &first) != 1)
        first = cpu;
    fclose(f);
    return first;
}

void cores_list(core_list *out)
{
    cpu_set_t set;
    static const int32_t none = -1;
    int32_t sibling[CORES_MAX], later[CORES_MAX], n_later = 0;
    out->n = 0;
    if (sched_getaffinity(0, sizeof set, &set) != 0) {
        out->n = out->n_physical = 1;
        out->core[0] = none;
        return;
    }
    for (int32_t cpu = 0; cpu < CPU_SETSIZE && cpu < CORES_MAX; cpu++) {
        if (!CPU_ISSET(cpu, &set))
            continue;
        int32_t s = first_sibling(cpu), seen = 0;
        for (int32_t i = 0; i < out->n; i++)
            seen |= sibling[i] == s;
        if (seen) {
            later[n_later++] = cpu;
        } else {
            sibling[out->n] = s;
            out->core[out->n++] = cpu;
        }
    }
    out->n_physical = out->n;
    for (int32_t i = 0; i < n_later; i++)
        out->core[out->n++] = later[i];
}

/* The cores that one cgroup directory allows; 0: no limit there. */
static double quota_in(const char *directory)
{
    char path[1200], text[64] = "";
    double quota = 0, period = 0;
    snprintf(path, sizeof path, "%s/cpu.max", directory);
    FILE *f = fopen(path, "r");
    if (f) {
        int n = fscanf(f, "%63s %lf", text, &period);
        fclose(f);
        quota = atof(text);
        return n == 2 && strcmp(text, "max") != 0 && quota > 0 && period > 0 ? quota / period : 0;
    }
    snprintf(path, sizeof path, "%s/cpu.cfs_quota_us", directory);
    f = fopen(path, "r");
    if (f == NULL)
        return 0;
    int n = fscanf(f, "%lf", &quota);
    fclose(f);
    snprintf(path, sizeof path, "%s/cpu.cfs_period_us", directory);
    f = fopen(path, "r");
    if (f == NULL)
        return 0;
    n += fscanf(f, "%lf", &period);
    fclose(f);
    return n == 2 && quota > 0 && period > 0 ? quota / period : 0;
}

/* The least quota from the process's cgroup up to the root; 0: none. */
static double cgroup_quota(void)
{
    double least = 0;
    char line[1024], directory[1100];
    FILE *f = fopen("/proc/self/cgroup", "r");
    if (f == NULL)
        return 0;
    while (fgets(line, sizeof line, f)) {
        char *controllers = strchr(line, ':'), *path = controllers ? strchr(controllers + 1, ':') : NULL;
        if (path == NULL)
            continue;
        *path++ = 0;
        path[strcspn(path, "\n")] = 0;
        controllers++;
        const char *root = *controllers == 0 ? "/sys/fs/cgroup" : strcmp(controllers, "cpu") == 0 ? "/sys/fs/cgroup/cpu" :
                           strstr(controllers, "cpu,cpuacct") ? "/sys/fs/cgroup/cpu,cpuacct" : NULL;
        for (size_t n = strlen(path); root; n--) {
            snprintf(directory, sizeof directory, "%s%.*s", root, (int)n, path);
            double q = quota_in(directory);
            if (q > 0 && (least == 0 || q < least))
                least = q;
            while (n > 0 && path[n - 1] != '/')
                n--;
            if (n == 0)
                break;
        }
    }
    fclose(f);
    return least;
}

int32_t pool_usable_cores(void)
{
    core_list list;
    cores_list(&list);
    double quota = cgroup_quota();
    int32_t n = list.n_physical;
    if (quota > 0 && quota < n)
        n = (int32_t)quota;
    return n < 1 ? 1 : n;
}

/* driver.c: runs a fuzz target where libFuzzer is not to be had (gcc): seeded mutations of given files.
 *
 *   target [-runs=N] [-seed=N] [-max_len=N] FILE...      (libFuzzer's option names; a folder stands for its files)
 *
 * It has no coverage feedback: seeds should be small and of every kind. A crash comes back with the same arguments.
 */
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

enum { MAX_SEEDS = 4096 };
static struct { uint8_t *data; size_t n; } seeds[MAX_SEEDS];
static size_t n_seeds, max_len = 1 << 16;
static uint64_t state;

static uint64_t next(void) { /* splitmix64 */
    uint64_t z = (state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static void add_file(const char *path) {
    struct stat st;
    if (stat(path, &st) != 0 || n_seeds == MAX_SEEDS)
        return;
    if (S_ISDIR(st.st_mode)) {
        DIR *dir = opendir(path);
        for (struct dirent *e; dir && (e = readdir(dir));) {
            char child[4096];
            if (e->d_name[0] != '.' && snprintf(child, sizeof child, "%s/%s", path, e->d_name) < (int)sizeof child)
                add_file(child);
        }
        if (dir)
            closedir(dir);
        return;
    }
    FILE *f = fopen(path, "rb");
    if (!f)
        return;
    uint8_t *data = malloc(max_len);
    size_t n = data ? fread(data, 1, max_len, f) : 0;
    fclose(f);
    seeds[n_seeds].data = data;
    seeds[n_seeds++].n = n;
}

/* Changes data[0..n) in one of the ways that break parsers; returns the new length. */
static size_t mutate(uint8_t *data, size_t n) {
    static const uint64_t nasty[] = {0, 1, 2, 5, 0x7f, 0x80, 0xff, 0x7fff, 0xffff, 0x7fffffff, 0x80000000, 0xffffffff,
                                     0x7fffffffffffffff, 0x8000000000000000, 0xffffffffffffffff, 0x2000000000000001};
    size_t at = n ? next() % n : 0, k = next() % 64;
    switch (next() % 7) {
    case 0: if (n) data[at] = (uint8_t)next(); return n;
    case 1: if (n) data[at] ^= (uint8_t)(1u << (next() % 8)); return n;
    case 2: return at; /* cut */
    case 3: /* a nasty number */
        k = (size_t)1 << (next() % 4);
        if (at + k <= n)
            memcpy(data + at, &nasty[next() % (sizeof nasty / sizeof *nasty)], k);
        return n;
    case 4: /* take bytes out */
        if (at + k < n) {
            memmove(data + at, data + at + k, n - at - k);
            return n - k;
        }
        return n;
    case 5: /* double some */
        if (at + k <= n && n + k <= max_len) {
            memmove(data + at + k, data + at, n - at);
            return n + k;
        }
        return n;
    default: { /* splice from another seed */
        size_t other = next() % n_seeds;
        if (seeds[other].n == 0)
            return n;
        size_t from = next() % seeds[other].n;
        k = seeds[other].n - from < k ? seeds[other].n - from : k;
        if (at + k <= n)
            memcpy(data + at, seeds[other].data + from, k);
        return n;
    }
    }
}

int main(int argc, char **argv) {
    uint64_t runs = 100000, seed = 1;
    for (int i = 1; i < argc; i++) {
        unsigned long long value;
        if (sscanf(argv[i], "-runs=%llu", &value) == 1)
            runs = value;
        else if (sscanf(argv[i], "-seed=%llu", &value) == 1)
            seed = value;
        else if (sscanf(argv[i], "-max_len=%llu", &value) == 1)
            max_len = value;
        else
            add_file(argv[i]);
    }
    if (n_seeds == 0)
        seeds[n_seeds++].data = calloc(1, max_len);
    for (size_t i = 0; i < n_seeds; i++)
        LLVMFuzzerTestOneInput(seeds[i].data, seeds[i].n);
    uint8_t *scratch = malloc(max_len);
    for (uint64_t run = 0; scratch && run < runs; run++) {
        state = seed * 0x100000001b3u + run;
        size_t pick = next() % n_seeds, n = seeds[pick].n;
        memcpy(scratch, seeds[pick].data, n);
        for (uint64_t k = 1 + next() % 6; k; k--)
            n = mutate(scratch, n);
        uint8_t *exact = malloc(n ? n : 1); /* so that a sanitizer sees a read beyond the end */
        memcpy(exact, scratch, n);
        LLVMFuzzerTestOneInput(exact, n);
        free(exact);
    }
    free(scratch);
    for (size_t i = 0; i < n_seeds; i++)
        free(seeds[i].data);
    printf("%llu runs, seed %llu\n", (unsigned long long)runs, (unsigned long long)seed);
    return 0;
}

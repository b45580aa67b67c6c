/* gguf_split.c: models in several files, NAME-00001-of-0000N.gguf, opened by the name of any of them.
 *
 * The first file holds the metadata, every file some of the tensors and the keys split.no (from 0), split.count and
 * split.tensors.count (of all). Source: llama.cpp, src/llama-model-loader.cpp and llama_split_path().
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../include/milad.h"
#include "error.h"
#include "gguf_internal.h"

enum { MAX_PARTS = 1000 };

/* The number in five digits at s; -1: other characters. */
static int64_t digits_at(const char *s) {
    int64_t n = 0;
    for (int i = 0; i < 5; i++) {
        if (s[i] < '0' || s[i] > '9')
            return -1;
        n = 10 * n + (s[i] - '0');
    }
    return n;
}

/* Which part a name says it is, 1..n_parts; 0: it is no name of a part. *number: where the digits stand. */
static int64_t part_number(const char *path, uint64_t n_parts, size_t *number) {
    static const char pattern[] = "-00001-of-00001.gguf";
    size_t n = strlen(path), n_pattern = sizeof pattern - 1;
    if (n < n_pattern)
        return 0;
    const char *s = path + n - n_pattern;
    if (s[0] != '-' || memcmp(s + 6, "-of-", 4) != 0 || strcmp(s + 15, ".gguf") != 0)
        return 0;
    int64_t part = digits_at(s + 1);
    if (digits_at(s + 10) != (int64_t)n_parts || part < 1 || part > (int64_t)n_parts)
        return 0;
    *number = n - n_pattern + 1;
    return part;
}

static int32_t check_key(const gguf *g, const char *key, uint64_t wanted) {
    uint64_t value = 0;
    int32_t found = gguf_get_u64(g, key, &value);
    if (found < 0)
        return found;
    if (found == 0 || value != wanted)
        return fail(MILAD_E_FORMAT, "%s: key '%s' is not %llu: the file is not the part that its name says", g->path, key,
                    (unsigned long long)wanted);
    return 0;
}

/* Makes `first` hold all parts and their tensors. parts[0] is first itself; it keeps the array. */
static int32_t join(gguf *first, gguf **parts, uint64_t n_parts) {
    uint64_t n = 0, expected;
    for (uint64_t i = 0; i < n_parts; i++)
        n += parts[i]->n_tensors;
    if (n > MAX_TENSORS)
        return fail(MILAD_E_FORMAT, "%s: %llu tensors in all parts (the limit is %d)", first->path, (unsigned long long)n,
                    MAX_TENSORS);
    expected = n;
    int32_t found = gguf_get_u64(first, "split.tensors.count", &expected);
    if (found < 0)
        return found;
    if (expected != n)
        return fail(MILAD_E_FORMAT, "%s: key 'split.tensors.count' is %llu, but the parts have %llu tensors", first->path,
                    (unsigned long long)expected, (unsigned long long)n);
    gguf_tensor *tensors = calloc(n + 1, sizeof *tensors);
    const gguf_str **by_name = calloc(n + 1, sizeof *by_name);
    if (!tensors || !by_name) {
        free(tensors);
        free(by_name);
        return fail(MILAD_E_MEMORY, "out of memory");
    }
    uint64_t at = 0;
    for (uint64_t i = 0; i < n_parts; i++)
        for (uint64_t k = 0; k < parts[i]->n_tensors; k++, at++) {
            tensors[at] = parts[i]->tensors[k];
            by_name[at] = &tensors[at].name;
        }
    free(first->tensors);
    free(first->by_name);
    first->tensors = tensors;
    first->by_name = by_name;
    first->n_tensors = n;
    return gguf_index(first, by_name, n, "tensor");
}

/* Opens the parts that are not open yet; `number` is where a part's digits stand in path. */
static int32_t open_parts(char *path, size_t number, uint64_t n_parts, int32_t vocab_only, gguf **parts) {
    for (uint64_t i = 0; i < n_parts; i++) {
        char digits[24];
        snprintf(digits, sizeof digits, "%05llu", (unsigned long long)i + 1);
        memcpy(path + number, digits, 5);
        int32_t status = parts[i] ? 0 : gguf_open_one(path, vocab_only, &parts[i]);
        if (!status && i >= MAX_OPEN)
            gguf_end_reads(parts[i]);
        if (status || (status = check_key(parts[i], "split.no", i)) || (status = check_key(parts[i], "split.count", n_parts)))
            return status;
    }
    return 0;
}

/* All parts, of which g is open; takes g over. */
static int32_t open_split(const char *path, uint64_t n_parts, int32_t vocab_only, gguf *g, gguf **out) {
    size_t number = 0;
    int64_t which = part_number(path, n_parts, &number);
    if (which == 0) {
        int32_t status = fail(MILAD_E_FORMAT, "%s: a part of %llu, but its name does not end in -0000I-of-%05llu.gguf", g->path,
                              (unsigned long long)n_parts, (unsigned long long)n_parts);
        gguf_close(g);
        return status;
    }
    char *name = strdup(path);
    gguf **parts = calloc(n_parts, sizeof *parts);
    int32_t status = name && parts ? 0 : fail(MILAD_E_MEMORY, "out of memory");
    if (status)
        gguf_close(g);
    else
        parts[which - 1] = g;
    if (!status)
        status = open_parts(name, number, n_parts, vocab_only, parts);
    if (!status)
        status = join(parts[0], parts, n_parts);
    free(name);
    if (status) {
        for (uint64_t i = 0; parts && i < n_parts; i++)
            gguf_close(parts[i]);
        free(parts);
        return status;
    }
    *out = parts[0];
    memmove(parts, parts + 1, (n_parts - 1) * sizeof *parts);
    (*out)->parts = parts;
    (*out)->n_parts = n_parts - 1;
    return 0;
}

int32_t gguf_open(const char *path, int32_t vocab_only, gguf **out) {
    uint64_t n_parts = 1;
    int32_t status = gguf_open_one(path, vocab_only, out);
    if (status)
        return status;
    gguf *g = *out;
    int32_t found = gguf_get_u64(g, "split.count", &n_parts);
    if (found >= 0 && n_parts <= 1)
        return 0;
    *out = NULL;
    if (found >= 0 && n_parts > MAX_PARTS)
        found = fail(MILAD_E_FORMAT, "%s: key 'split.count' is %llu (the limit is %d)", g->path, (unsigned long long)n_parts,
                     MAX_PARTS);
    if (found < 0) {
        gguf_close(g);
        return found;
    }
    return open_split(path, n_parts, vocab_only, g, out);
}

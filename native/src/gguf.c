/* gguf.c: the GGUF container, versions 2 and 3, little-endian.
 *
 *   file   = "GGUF" version:u32 n_tensors:u64 n_values:u64 value* tensor* padding data
 *   value  = key:string type:u32 payload          string = n:u64 byte*n
 *   array  = item_type:u32 n:u64 item*n           (payload of type 9)
 *   tensor = name:string n_dims:u32 dim:u64*n_dims type:u32 offset:u64
 *
 * Offsets count from the first byte after the padding and are multiples of general.alignment (32 unless given).
 * Source: docs/gguf.md of ggml-org/ggml.
 *
 * The file is hostile: every count is checked against the bytes that are left before anything is allocated or walked,
 * every product against overflow, and both indexes are sorted arrays, so no choice of names makes a lookup slow.
 * A failure names the file and the key or tensor that broke the rule.
 */
#include "gguf_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../include/milad.h"
#include "error.h"
#include "mat.h"

static const uint8_t TYPE_BYTES[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
enum { N_TYPES = 13 };

/* The unread rest of the header. */
typedef struct cursor {
    const gguf *g;
    uint64_t at;
} cursor;

static uint64_t left(const cursor *c) { return c->g->n_bytes - c->at; }

static int32_t cut_short(const cursor *c, const char *what) {
    return fail(MILAD_E_FORMAT, "%s: the file ends inside %s, at byte %llu: it is cut short or damaged", c->g->path, what,
                (unsigned long long)c->g->n_bytes);
}

static int32_t read_u32(cursor *c, uint32_t *out, const char *what) {
    if (left(c) < 4) {
        cut_short(c, what);
        return MILAD_E_FORMAT; /* a constant: the compiler sees that *out is set otherwise */
    }
    *out = load_u32(c->g->data + c->at);
    c->at += 4;
    return 0;
}

static int32_t read_u64(cursor *c, uint64_t *out, const char *what) {
    if (left(c) < 8) {
        cut_short(c, what);
        return MILAD_E_FORMAT; /* a constant: the compiler sees that *out is set otherwise */
    }
    *out = load_u64(c->g->data + c->at);
    c->at += 8;
    return 0;
}

static int32_t read_string(cursor *c, gguf_str *out, const char *what) {
    if (read_u64(c, &out->n_bytes, what))
        return MILAD_E_FORMAT;
    if (out->n_bytes > left(c)) {
        fail(MILAD_E_FORMAT, "%s: %s has length %llu, with %llu bytes left in the file", c->g->path, what,
             (unsigned long long)out->n_bytes, (unsigned long long)left(c));
        return MILAD_E_FORMAT;
    }
    out->data = (const char *)c->g->data + c->at;
    c->at += out->n_bytes;
    return 0;
}

/* Steps over n items; the first is at v->data. */
static int32_t skip_items(cursor *c, gguf_value *v, int32_t type, const char *what) {
    uint64_t start = c->at;
    v->data = c->g->data + start;
    if (type == GGUF_STRING) {
        for (uint64_t i = 0; i < v->n_items; i++) {
            gguf_str s;
            if (read_string(c, &s, what))
                return MILAD_E_FORMAT;
        }
    } else {
        uint64_t n = v->n_items * TYPE_BYTES[type]; /* n_items <= MAX_ITEMS */
        if (n > left(c))
            return cut_short(c, what);
        c->at += n;
    }
    v->n_bytes = c->at - start;
    return 0;
}

static int32_t read_array(cursor *c, gguf_value *v, const char *what) {
    uint32_t type;
    if (read_u32(c, &type, what) || read_u64(c, &v->n_items, what))
        return MILAD_E_FORMAT;
    if (type >= N_TYPES)
        return fail(MILAD_E_FORMAT, "%s: %s has items of unknown type %u", c->g->path, what, type);
    if (type == GGUF_ARRAY)
        return fail(MILAD_E_UNSUPPORTED, "%s: %s is an array of arrays", c->g->path, what);
    v->item_type = (int32_t)type;
    uint64_t item_bytes = type == GGUF_STRING ? 8 : TYPE_BYTES[type];
    if (v->n_items > MAX_ITEMS || v->n_items > left(c) / item_bytes)
        return fail(MILAD_E_FORMAT, "%s: %s has %llu items, with %llu bytes left in the file (the limit is %d)",
                    c->g->path, what, (unsigned long long)v->n_items, (unsigned long long)left(c), MAX_ITEMS);
    return skip_items(c, v, v->item_type, what);
}

static int32_t read_value(cursor *c, gguf_value *v) {
    char what[SHOWN + 16];
    uint32_t type;
    if (read_string(c, &v->key, "a key"))
        return MILAD_E_FORMAT;
    if (v->key.n_bytes == 0 || v->key.n_bytes > MAX_KEY)
        return fail(MILAD_E_FORMAT, "%s: a key has %llu bytes, not 1 to %d", c->g->path,
                    (unsigned long long)v->key.n_bytes, MAX_KEY);
    snprintf(what, sizeof what, "key '%.*s'", NAME(v->key));
    if (read_u32(c, &type, what))
        return MILAD_E_FORMAT;
    if (type >= N_TYPES)
        return fail(MILAD_E_FORMAT, "%s: %s has unknown type %u", c->g->path, what, type);
    v->type = v->item_type = (int32_t)type;
    if (type == GGUF_ARRAY)
        return read_array(c, v, what);
    v->n_items = 1;
    if (type == GGUF_STRING) {
        gguf_str s;
        if (read_string(c, &s, what))
            return MILAD_E_FORMAT;
        v->data = (const uint8_t *)s.data;
        v->n_bytes = s.n_bytes;
        return 0;
    }
    if (skip_items(c, v, v->type, what))
        return MILAD_E_FORMAT;
    if (type == GGUF_BOOL && v->data[0] > 1)
        return fail(MILAD_E_FORMAT, "%s: %s is a bool of value %u, not 0 or 1", c->g->path, what, v->data[0]);
    return 0;
}

/* n_bytes of a tensor, and that its dims fit its type. Leaves n_bytes 0 for a type without known blocks. */
static int32_t measure_tensor(const gguf *g, gguf_tensor *t) {
    uint64_t n_values = 1;
    for (int32_t i = 0; i < t->n_dims; i++) {
        if (t->dims[i] == 0 || t->dims[i] > INT64_MAX || __builtin_mul_overflow(n_values, t->dims[i], &n_values) ||
            n_values > INT64_MAX)
            return fail(MILAD_E_FORMAT, "%s: tensor '%.*s': dimension %d of %llu is impossible", g->path, NAME(t->name), i,
                        (unsigned long long)t->dims[i]);
    }
    int32_t block_values = mat_block_values(t->type);
    if (block_values <= 0)
        return 0;
    if (t->dims[0] % (uint64_t)block_values)
        return fail(MILAD_E_FORMAT, "%s: tensor '%.*s': rows of %llu values are no multiple of %s's blocks of %d", g->path,
                    NAME(t->name), (unsigned long long)t->dims[0], mat_type_name(t->type), block_values);
    if (__builtin_mul_overflow(n_values / (uint64_t)block_values, (uint64_t)mat_block_bytes(t->type), &t->n_bytes))
        return fail(MILAD_E_FORMAT, "%s: tensor '%.*s' is impossibly large", g->path, NAME(t->name));
    return 0;
}

/* Reads a tensor's entry; *offset is where its data lies in the data section. */
static int32_t read_tensor(cursor *c, gguf_tensor *t, uint64_t *offset) {
    char what[SHOWN + 16];
    uint32_t n_dims, type;
    if (read_string(c, &t->name, "a tensor's name"))
        return MILAD_E_FORMAT;
    if (t->name.n_bytes == 0 || t->name.n_bytes > MAX_NAME)
        return fail(MILAD_E_FORMAT, "%s: a tensor's name has %llu bytes, not 1 to %d", c->g->path,
                    (unsigned long long)t->name.n_bytes, MAX_NAME);
    snprintf(what, sizeof what, "tensor '%.*s'", NAME(t->name));
    if (read_u32(c, &n_dims, what))
        return MILAD_E_FORMAT;
    if (n_dims < 1 || n_dims > 4)
        return fail(MILAD_E_FORMAT, "%s: %s has %u dimensions, not 1 to 4", c->g->path, what, n_dims);
    t->n_dims = (int32_t)n_dims;
    for (uint32_t i = 0; i < 4; i++) {
        t->dims[i] = 1;
        if (i < n_dims && read_u64(c, &t->dims[i], what))
            return MILAD_E_FORMAT;
    }
    if (read_u32(c, &type, what) || read_u64(c, offset, what))
        return MILAD_E_FORMAT;
    if (type > INT32_MAX)
        return fail(MILAD_E_FORMAT, "%s: %s has unknown type %u", c->g->path, what, type);
    t->type = (int32_t)type;
    return measure_tensor(c->g, t);
}

static int compare_str(const gguf_str *a, const gguf_str *b) {
    uint64_t n = a->n_bytes < b->n_bytes ? a->n_bytes : b->n_bytes;
    int order = memcmp(a->data, b->data, n);
    return order ? order : (a->n_bytes > b->n_bytes) - (a->n_bytes < b->n_bytes);
}

/* An index holds pointers to the strings that lead their structs, so a string found leads to its struct. */
_Static_assert(offsetof(gguf_value, key) == 0 && offsetof(gguf_tensor, name) == 0, "index");

static int compare_indexed(const void *a, const void *b) {
    return compare_str(*(const gguf_str *const *)a, *(const gguf_str *const *)b);
}

int32_t gguf_index(const gguf *g, const gguf_str **index, uint64_t n, const char *noun) {
    qsort(index, n, sizeof *index, compare_indexed);
    for (uint64_t i = 1; i < n; i++)
        if (compare_str(index[i - 1], index[i]) == 0)
            return fail(MILAD_E_FORMAT, "%s: %s '%.*s' occurs twice", g->path, noun, NAME(*index[i]));
    return 0;
}

static const gguf_str *find_name(const gguf_str *const *index, uint64_t n, const char *name) {
    gguf_str wanted = {name, strlen(name)};
    const gguf_str *key = &wanted;
    const gguf_str *const *found = n ? bsearch(&key, index, n, sizeof *index, compare_indexed) : NULL;
    return found ? *found : NULL;
}

static int32_t read_values(cursor *c, gguf *g) {
    enum { LEAST = 8 + 1 + 4 + 1 }; /* bytes of the smallest value */
    if (g->n_values > MAX_VALUES || g->n_values > left(c) / LEAST)
        return fail(MILAD_E_FORMAT, "%s: the header counts %llu keys, with %llu bytes left in the file (the limit is %d)",
                    g->path, (unsigned long long)g->n_values, (unsigned long long)left(c), MAX_VALUES);
    g->values = calloc(g->n_values + 1, sizeof *g->values);
    g->by_key = calloc(g->n_values + 1, sizeof *g->by_key);
    if (!g->values || !g->by_key)
        return fail(MILAD_E_MEMORY, "%s: out of memory", g->path);
    for (uint64_t i = 0; i < g->n_values; i++) {
        int32_t status = read_value(c, &g->values[i]);
        if (status)
            return status;
        g->by_key[i] = &g->values[i].key;
    }
    return gguf_index(g, g->by_key, g->n_values, "key");
}

/* Where the data section begins, given the end of the header. */
static int32_t data_start(const gguf *g, uint64_t header_end, uint64_t *alignment, uint64_t *start) {
    *alignment = 32;
    int32_t found = gguf_get_u64(g, "general.alignment", alignment);
    if (found < 0)
        return found;
    if (*alignment < 8 || *alignment > MAX_ALIGNMENT || (*alignment & (*alignment - 1)))
        return fail(MILAD_E_FORMAT, "%s: key 'general.alignment' is %llu, not a power of two of 8 to %d", g->path,
                    (unsigned long long)*alignment, MAX_ALIGNMENT);
    *start = (header_end + *alignment - 1) & ~(*alignment - 1);
    return 0;
}

static int32_t read_tensors(cursor *c, gguf *g, int32_t vocab_only) {
    enum { LEAST = 8 + 1 + 4 + 8 + 4 + 8 };
    if (g->n_tensors > MAX_TENSORS || g->n_tensors > left(c) / LEAST)
        return fail(MILAD_E_FORMAT, "%s: the header counts %llu tensors, with %llu bytes left in the file (the limit is %d)",
                    g->path, (unsigned long long)g->n_tensors, (unsigned long long)left(c), MAX_TENSORS);
    g->tensors = calloc(g->n_tensors + 1, sizeof *g->tensors);
    g->by_name = calloc(g->n_tensors + 1, sizeof *g->by_name);
    uint64_t *offsets = calloc(g->n_tensors + 1, sizeof *offsets);
    int32_t status = g->tensors && g->by_name && offsets ? 0 : fail(MILAD_E_MEMORY, "%s: out of memory", g->path);
    for (uint64_t i = 0; !status && i < g->n_tensors; i++) {
        status = read_tensor(c, &g->tensors[i], &offsets[i]);
        g->by_name[i] = &g->tensors[i].name;
    }
    uint64_t alignment = 0, start = 0;
    if (!status)
        status = data_start(g, c->at, &alignment, &start);
    for (uint64_t i = 0; !status && !vocab_only && i < g->n_tensors; i++) {
        gguf_tensor *t = &g->tensors[i];
        uint64_t room = g->n_bytes > start ? g->n_bytes - start : 0;
        if (offsets[i] % alignment)
            status = fail(MILAD_E_FORMAT, "%s: tensor '%.*s': offset %llu is no multiple of the alignment %llu", g->path,
                          NAME(t->name), (unsigned long long)offsets[i], (unsigned long long)alignment);
        else if (offsets[i] > room || t->n_bytes > room - offsets[i])
            status = fail(MILAD_E_FORMAT, "%s: tensor '%.*s': %llu bytes at offset %llu reach beyond the end of the file "
                          "(%llu bytes of data): it is cut short or damaged", g->path, NAME(t->name),
                          (unsigned long long)t->n_bytes, (unsigned long long)offsets[i], (unsigned long long)room);
        else if (t->n_bytes)
            t->data = g->data + start + offsets[i];
    }
    free(offsets);
    return status ? status : gguf_index(g, g->by_name, g->n_tensors, "tensor");
}

static int32_t read_header(gguf *g, int32_t vocab_only) {
    cursor c = {g, 0};
    uint32_t version;
    if (g->n_bytes < 4 || memcmp(g->data, "GGUF", 4) != 0) {
        int lfs = g->n_bytes > 40 && memcmp(g->data, "version https://git-lfs", 23) == 0;
        return fail(MILAD_E_FORMAT, "%s: not a GGUF file%s", g->path,
                    lfs ? ": it is a Git LFS pointer to one" : g->n_bytes == 0 ? ": it is empty" : "");
    }
    c.at = 4;
    if (read_u32(&c, &version, "the header"))
        return MILAD_E_FORMAT;
    if (version && (version & 0xffff) == 0)
        return fail(MILAD_E_UNSUPPORTED, "%s: a big-endian GGUF file; only little-endian ones can be read", g->path);
    if (version != 2 && version != 3)
        return fail(MILAD_E_UNSUPPORTED, "%s: GGUF version %u; only 2 and 3 can be read", g->path, version);
    if (read_u64(&c, &g->n_tensors, "the header") || read_u64(&c, &g->n_values, "the header"))
        return MILAD_E_FORMAT;
    int32_t status = read_values(&c, g);
    return status ? status : read_tensors(&c, g, vocab_only);
}

/* The end of a path, short enough to leave room for the message. */
static void set_path(gguf *g, const char *path) {
    size_t n = strlen(path);
    if (n < sizeof g->path)
        memcpy(g->path, path, n + 1);
    else
        snprintf(g->path, sizeof g->path, "...%s", path + n - (sizeof g->path - 4));
}

static int32_t map_file(gguf *g, const char *path, int32_t vocab_only) {
    struct stat st;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* NONBLOCK: a FIFO must not stall */
    if (fd < 0)
        return fail(MILAD_E_IO, "%s: %s", g->path, strerror(errno));
    int32_t status = 0;
    if (fstat(fd, &st) != 0)
        status = fail(MILAD_E_IO, "%s: %s", g->path, strerror(errno));
    else if (!S_ISREG(st.st_mode))
        status = fail(MILAD_E_IO, "%s: not a regular file", g->path);
    else if (st.st_size > 0) {
        void *data = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (data == MAP_FAILED) {
            status = fail(MILAD_E_IO, "%s: can't map %lld bytes: %s", g->path, (long long)st.st_size, strerror(errno));
        } else {
            g->data = data;
            g->n_bytes = (uint64_t)st.st_size;
            g->mapped = 1;
        }
    }
    if (status || !g->mapped || vocab_only) {
        close(fd);
    } else {
        fcntl(fd, F_SETFL, 0); /* known to be a file: reads may wait */
        g->fd = fd;
    }
    return status;
}

int32_t gguf_open_one(const char *path, int32_t vocab_only, gguf **out) {
    *out = NULL;
    gguf *g = calloc(1, sizeof *g);
    if (!g)
        return fail(MILAD_E_MEMORY, "out of memory");
    g->fd = -1;
    set_path(g, path);
    int32_t status = map_file(g, path, vocab_only);
    if (!status)
        status = read_header(g, vocab_only);
    if (status)
        gguf_close(g);
    else
        *out = g;
    return status;
}

int32_t gguf_open_memory(const void *data, size_t n_bytes, int32_t vocab_only, gguf **out) {
    *out = NULL;
    gguf *g = calloc(1, sizeof *g);
    if (!g)
        return fail(MILAD_E_MEMORY, "out of memory");
    g->fd = -1;
    set_path(g, "(memory)");
    g->data = data;
    g->n_bytes = n_bytes;
    int32_t status = read_header(g, vocab_only);
    if (status)
        gguf_close(g);
    else
        *out = g;
    return status;
}

void gguf_close(gguf *g) {
    if (!g)
        return;
    gguf_end_reads(g);
    if (g->mapped)
        munmap((void *)(uintptr_t)g->data, g->n_bytes);
    free(g->values);
    free(g->tensors);
    free(g->by_key);
    free(g->by_name);
    for (uint64_t i = 0; i < g->n_parts; i++)
        gguf_close(g->parts[i]);
    free(g->parts);
    free(g);
}

/* The file of a split model in whose mapping a range begins. */
static const gguf *part_of(const gguf *g, const uint8_t *data) {
    for (uint64_t i = 0; i < g->n_parts; i++)
        if (data >= g->parts[i]->data && data < g->parts[i]->data + g->parts[i]->n_bytes)
            return g->parts[i];
    return g;
}

int32_t gguf_read(const gguf *g, const uint8_t *data, uint64_t n_bytes, void *out) {
    g = part_of(g, data);
    if (g->fd < 0) {
        memcpy(out, data, n_bytes);
        if (g->mapped && n_bytes) { /* whole pages around it, for a fault maps its neighbours too; reading them again works */
            uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), lo = (uintptr_t)data & ~(page - 1);
            madvise((void *)lo, (uintptr_t)data + n_bytes - lo, MADV_DONTNEED);
        }
        return 0;
    }
    uint64_t at = (uint64_t)(data - g->data);
    for (uint8_t *to = out; n_bytes;) {
        ssize_t n = pread(g->fd, to, n_bytes, (off_t)at);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return fail(MILAD_E_IO, "%s: can't read at byte %llu: %s", g->path, (unsigned long long)at, strerror(errno));
        if (n == 0)
            return fail(MILAD_E_IO, "%s: the file ends at byte %llu, which it did not when it was opened", g->path,
                        (unsigned long long)at);
        to += n;
        at += (uint64_t)n;
        n_bytes -= (uint64_t)n;
    }
    return 0;
}

void gguf_will_read(const gguf *g, const uint8_t *data, uint64_t n_bytes) {
    g = part_of(g, data);
    if (g->fd >= 0)
        posix_fadvise(g->fd, (off_t)(data - g->data), (off_t)n_bytes, POSIX_FADV_WILLNEED);
}

void gguf_end_reads(gguf *g) {
    if (g->fd >= 0)
        close(g->fd);
    g->fd = -1;
    for (uint64_t i = 0; i < g->n_parts; i++)
        gguf_end_reads(g->parts[i]);
}

const char *gguf_path(const gguf *g) { return g->path; }

uint64_t gguf_file_bytes(const gguf *g) {
    uint64_t n = g->n_bytes;
    for (uint64_t i = 0; i < g->n_parts; i++)
        n += g->parts[i]->n_bytes;
    return n;
}

uint64_t gguf_n_values(const gguf *g) { return g->n_values; }
const gguf_value *gguf_value_at(const gguf *g, uint64_t i) { return i < g->n_values ? &g->values[i] : NULL; }
uint64_t gguf_n_tensors(const gguf *g) { return g->n_tensors; }
const gguf_tensor *gguf_tensor_at(const gguf *g, uint64_t i) { return i < g->n_tensors ? &g->tensors[i] : NULL; }

const gguf_value *gguf_find(const gguf *g, const char *key) {
    return (const gguf_value *)find_name(g->by_key, g->n_values, key);
}

const gguf_tensor *gguf_find_tensor(const gguf *g, const char *name) {
    return (const gguf_tensor *)find_name(g->by_name, g->n_tensors, name);
}

/* gguf.h: reads GGUF v2 and v3 files and trusts nothing in them.
 *
 * All names and values point into the mapping and live until gguf_close(). A file that another process cuts short while it
 * is open ends this one with SIGBUS where the mapping is read: models are replaced by renaming, never written in place.
 */
#ifndef MILAD_GGUF_H
#define MILAD_GGUF_H

#include <stddef.h>
#include <stdint.h>

typedef struct gguf gguf;

enum gguf_type {
    GGUF_U8, GGUF_I8, GGUF_U16, GGUF_I16, GGUF_U32, GGUF_I32, GGUF_F32, GGUF_BOOL, GGUF_STRING, GGUF_ARRAY,
    GGUF_U64, GGUF_I64, GGUF_F64
};

typedef struct gguf_str { const char *data; uint64_t n_bytes; } gguf_str; /* not NUL-terminated */

typedef struct gguf_value {
    gguf_str key;
    int32_t type;       /* enum gguf_type */
    int32_t item_type;  /* of an array's items */
    uint64_t n_items;   /* array length; 1 otherwise */
    const uint8_t *data; /* first item in the mapping, unaligned */
    uint64_t n_bytes;    /* of all items; a string's bytes without its length */
} gguf_value;

typedef struct gguf_tensor {
    gguf_str name;
    int32_t type;       /* enum mat_type or another number */
    int32_t n_dims;
    uint64_t dims[4];   /* dims[0] is the row length (n_in) */
    const uint8_t *data; /* NULL when opened vocabulary-only or of a type that mat.h doesn't know */
    uint64_t n_bytes;    /* 0 likewise */
} gguf_tensor;

/* Maps and checks the whole header, and all parts of a split model (NAME-00001-of-0000N.gguf), named by any. On failure returns a milad_status and sets the thread's error. */
int32_t gguf_open(const char *path, int32_t vocab_only, gguf **out);
/* The same on bytes in memory, which must outlive it (tests, fuzzing). */
int32_t gguf_open_memory(const void *data, size_t n_bytes, int32_t vocab_only, gguf **out);
void gguf_close(gguf *g);
const char *gguf_path(const gguf *g); /* for messages: a long path without its beginning */
uint64_t gguf_file_bytes(const gguf *g);
/* Copies a range of tensor data. Faster than the mapping, whose pages cost more to map than to copy, adds nothing to resident memory, and
 * a file cut short meanwhile is an error (set for this thread). Any thread; not after gguf_end_reads(). */
int32_t gguf_read(const gguf *g, const uint8_t *data, uint64_t n_bytes, void *out);
/* Tells the system that a range will be read soon. Any thread. */
void gguf_will_read(const gguf *g, const uint8_t *data, uint64_t n_bytes);
void gguf_end_reads(gguf *g);

uint64_t gguf_n_values(const gguf *g);
const gguf_value *gguf_value_at(const gguf *g, uint64_t i);
const gguf_value *gguf_find(const gguf *g, const char *key); /* NULL: absent */
/* Typed reads: 1 found, 0 absent, < 0 wrong type or out of range (error set, names the key). A float must be finite. */
int32_t gguf_get_u64(const gguf *g, const char *key, uint64_t *out);
int32_t gguf_get_f64(const gguf *g, const char *key, double *out);
int32_t gguf_get_bool(const gguf *g, const char *key, int32_t *out);
int32_t gguf_get_str(const gguf *g, const char *key, gguf_str *out);
/* Items of an array value. String arrays: sequential access by cursor (start at 0). */
int32_t gguf_next_str(const gguf_value *v, uint64_t *cursor, gguf_str *out); /* 1, or 0 at the end */
double gguf_item_f64(const gguf_value *v, uint64_t i);  /* i < n_items; NaN: not numbers */
int64_t gguf_item_i64(const gguf_value *v, uint64_t i); /* i < n_items; INT64_MIN: not integers; clamped to INT64_MAX */

uint64_t gguf_n_tensors(const gguf *g);
const gguf_tensor *gguf_tensor_at(const gguf *g, uint64_t i);
const gguf_tensor *gguf_find_tensor(const gguf *g, const char *name);

#endif

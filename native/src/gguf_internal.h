/* gguf_internal.h: what the GGUF rooms share: gguf.c reads one file, gguf_get.c its values, gguf_split.c joins the parts of a
 * split model. */
#ifndef MILAD_GGUF_INTERNAL_H
#define MILAD_GGUF_INTERNAL_H

#include "gguf.h"

enum {
    MAX_VALUES = 1 << 16,   /* files seen have about 50 */
    MAX_TENSORS = 1 << 16,  /* files seen have up to some thousands */
    MAX_ITEMS = 1 << 24,    /* the largest vocabularies have 2^18 tokens and 2^20 merges */
    MAX_KEY = 65535,        /* docs/gguf.md */
    MAX_NAME = 255,         /* docs/gguf.md says 64 */
    MAX_ALIGNMENT = 1 << 20,
    MAX_OPEN = 64,          /* parts of a split model that keep a descriptor: processes may have few */
    SHOWN = 80              /* bytes of a name in a message */
};

struct gguf {
    const uint8_t *data;
    uint64_t n_bytes;
    int mapped;
    int fd;                   /* for gguf_read(), -1: none */
    char path[200];
    uint64_t n_values, n_tensors;
    gguf_value *values;
    gguf_tensor *tensors;
    const gguf_str **by_key;  /* the keys of values, sorted */
    const gguf_str **by_name; /* the names of tensors, sorted */
    gguf **parts;             /* of a split model: the other files, owned; their tensors are in `tensors` too */
    uint64_t n_parts;
};

/* Arguments of "%.*s" for a name of the file's. */
#define NAME(s) (int)((s).n_bytes < SHOWN ? (s).n_bytes : SHOWN), (s).data

/* Opens one file, a part of a split model included. */
int32_t gguf_open_one(const char *path, int32_t vocab_only, gguf **out);
/* Sorts n pointers to names; MILAD_E_FORMAT when two are equal. noun: "key" or "tensor". */
int32_t gguf_index(const gguf *g, const gguf_str **index, uint64_t n, const char *noun);

static inline uint32_t load_u32(const uint8_t *p) {
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static inline uint64_t load_u64(const uint8_t *p) { return load_u32(p) | (uint64_t)load_u32(p + 4) << 32; }

#endif

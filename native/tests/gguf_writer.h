/* gguf_writer.h: writes GGUF bytes for tests, right ones and wrong ones. */
#ifndef MILAD_GGUF_WRITER_H
#define MILAD_GGUF_WRITER_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct writer { uint8_t *data; size_t n, room; } writer;

static inline void w_bytes(writer *w, const void *data, size_t n) {
    if (w->n + n > w->room) {
        w->room = 2 * (w->n + n) + 64;
        w->data = realloc(w->data, w->room);
        if (!w->data)
            abort();
    }
    if (n)
        memcpy(w->data + w->n, data, n);
    w->n += n;
}

static inline void w_u32(writer *w, uint32_t v) { w_bytes(w, &v, 4); }
static inline void w_u64(writer *w, uint64_t v) { w_bytes(w, &v, 8); }
static inline void w_f32(writer *w, float v) { w_bytes(w, &v, 4); }

static inline void w_str(writer *w, const char *s) {
    w_u64(w, strlen(s));
    w_bytes(w, s, strlen(s));
}

static inline void w_header(writer *w, uint64_t n_tensors, uint64_t n_values) {
    w_bytes(w, "GGUF", 4);
    w_u32(w, 3);
    w_u64(w, n_tensors);
    w_u64(w, n_values);
}

static inline void w_key(writer *w, const char *key, uint32_t type) {
    w_str(w, key);
    w_u32(w, type);
}

static inline void w_tensor(writer *w, const char *name, uint64_t n_in, uint64_t n_out, uint32_t type, uint64_t offset) {
    w_str(w, name);
    w_u32(w, 2);
    w_u64(w, n_in);
    w_u64(w, n_out);
    w_u32(w, type);
    w_u64(w, offset);
}

static inline void w_pad(writer *w, size_t alignment) {
    while (w->n % alignment)
        w_bytes(w, "", 1);
}

#endif

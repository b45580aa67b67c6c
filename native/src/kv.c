/* kv.c: where keys and values lie (kv.h states the format). Knows nothing of sequences, references or hashes. */
#include "kv.h"

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "error.h"

enum { T = MILAD_KV_BLOCK, GROUP = ATTN_Q8_GROUP, AHEAD = 64, NICE = 5 };

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14; older ones refuse it */
#endif

struct kv {
    int32_t type, n_layer, n_blocks, n_head_kv, head_dim, n_groups;
    size_t k_bytes, v_bytes;       /* of one head's keys, values */
    size_t page_bytes, n_bytes;
    size_t k_at;                   /* offset of the numbers in keys, behind the scales */
    size_t width, pack;            /* bytes of a number; dimensions of keys, tokens of values that lie together */
    uint8_t *data;
    pthread_t toucher; /* maps blocks before they are used */
    pthread_mutex_t lock;
    pthread_cond_t wake;
    atomic_int wanted; /* blocks that shall be mapped; under the lock but for a look */
    int has_toucher, ends;
};

static uint8_t *page_at(const kv *c, int32_t layer, int32_t block) {
    return c->data + ((size_t)layer * (size_t)c->n_blocks + (size_t)block) * c->page_bytes;
}

static uint8_t *keys_of(const kv *c, uint8_t *page, int32_t head) { return page + (size_t)head * c->k_bytes; }

static uint8_t *values_of(const kv *c, uint8_t *page, int32_t head) {
    return page + (size_t)c->n_head_kv * c->k_bytes + (size_t)head * c->v_bytes;
}

/* The last may be part empty. */
static size_t n_key_packs(const kv *c) { return ((size_t)c->head_dim + c->pack - 1) / c->pack; }

static void lay_out(kv *c) {
    c->width = c->type == KV_Q8_0 ? 1 : c->type == KV_F32 ? 4 : 2;
    c->pack = c->type == KV_Q8_0 ? 4 : c->type == KV_BF16 ? 2 : 1;
    c->k_at = c->type == KV_Q8_0 ? (size_t)attn_q8_numbers(c->head_dim) : 0;
    c->k_bytes = (c->k_at + n_key_packs(c) * c->pack * T * c->width + 63) / 64 * 64;
    c->v_bytes = ((size_t)c->head_dim * T * c->width + 63) / 64 * 64;
    c->page_bytes = (c->k_bytes + c->v_bytes) * (size_t)c->n_head_kv;
}

/* Zeroed memory that begins where a huge page can: reading a long sequence from 4 kB pages takes up to twice as long
 * (KERNELS.md of the design: 16-21 against 24-32 GB/s a core). Nothing is resident before it is written. NULL: none to be had. */
static uint8_t *map_huge(size_t n_bytes) {
    const size_t huge = (size_t)2 << 20;
    uint8_t *m = mmap(NULL, n_bytes + huge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (m == MAP_FAILED) return NULL;
    const size_t before = (huge - (uintptr_t)m % huge) % huge, page = (size_t)sysconf(_SC_PAGESIZE);
    const size_t used = (before + n_bytes + page - 1) / page * page;
    if (before) munmap(m, before);
    munmap(m + used, n_bytes + huge - used);
    madvise(m + before, n_bytes, MADV_HUGEPAGE); /* where it is refused, small pages do */
    return m + before;
}

/* The arena's own thread. Maps [mapped, wanted) of each layer; a mapping never changes what memory holds. */
static void *touch(void *arg) {
    kv *c = arg;
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    int32_t mapped = 0;
    setpriority(PRIO_PROCESS, 0, NICE); /* of this thread alone on Linux: steps come first */
    pthread_mutex_lock(&c->lock);
    for (;;) {
        while (!c->ends && atomic_load(&c->wanted) <= mapped) pthread_cond_wait(&c->wake, &c->lock);
        if (c->ends) break;
        const int32_t wanted = atomic_load(&c->wanted);
        for (int32_t l = 0; l < c->n_layer && !c->ends; l++) {
            pthread_mutex_unlock(&c->lock);
            const uintptr_t at = (uintptr_t)page_at(c, l, mapped) / page * page;
            const uintptr_t end = (uintptr_t)page_at(c, l, wanted); /* one past the layer is within the arena or its end */
            const int refused = madvise((void *)at, end - at, MADV_POPULATE_WRITE);
            pthread_mutex_lock(&c->lock);
            if (refused) c->ends = 1;
        }
        mapped = wanted;
    }
    pthread_mutex_unlock(&c->lock);
    return NULL;
}

void kv_ahead(kv *c, int32_t block) {
    const int32_t wanted = block + 1 + AHEAD < c->n_blocks ? block + 1 + AHEAD : c->n_blocks;
    /* half of the way before the next call does anything */
    const int32_t before = atomic_load(&c->wanted);
    if (!c->has_toucher || before == c->n_blocks || (wanted < c->n_blocks && wanted < before + AHEAD / 2)) return;
    pthread_mutex_lock(&c->lock);
    atomic_store(&c->wanted, wanted);
    pthread_cond_signal(&c->wake);
    pthread_mutex_unlock(&c->lock);
}

int32_t kv_open(const hparams *hp, int32_t n_blocks, int32_t type, kv **out) {
    if (type < KV_F16 || type > KV_BF16)
        return fail(MILAD_E_ARGUMENT, "kv_type %d is not 0 (F16), 1 (Q8_0), 2 (F32) or 3 (BF16)", type);
    if (n_blocks < 1) return fail(MILAD_E_ARGUMENT, "n_blocks %d: at least 1", n_blocks);
    kv *c = calloc(1, sizeof *c);
    if (!c) return fail(MILAD_E_MEMORY, "out of memory");
    c->type = type;
    c->n_layer = hp->n_layer;
    c->n_blocks = n_blocks;
    c->n_head_kv = hp->n_head_kv;
    c->head_dim = hp->head_dim;
    c->n_groups = attn_q8_groups(hp->head_dim);
    lay_out(c);
    if (__builtin_mul_overflow(c->page_bytes, (size_t)c->n_layer, &c->n_bytes) ||
        __builtin_mul_overflow(c->n_bytes, (size_t)n_blocks, &c->n_bytes) || c->n_bytes > PTRDIFF_MAX / 2) {
        kv_close(c);
        return fail(MILAD_E_ARGUMENT, "%d KV blocks are more than memory can address", n_blocks);
    }
    c->data = map_huge(c->n_bytes);
    if (!c->data) {
        size_t wanted = c->n_bytes;
        kv_close(c);
        return fail(MILAD_E_MEMORY, "no memory for %d KV blocks (%zu MB)", n_blocks, wanted >> 20);
    }
    pthread_mutex_init(&c->lock, NULL);
    pthread_cond_init(&c->wake, NULL);
    c->has_toucher = pthread_create(&c->toucher, NULL, touch, c) == 0; /* without it memory comes as it is used */
    *out = c;
    return MILAD_OK;
}

void kv_close(kv *c) {
    if (!c) return;
    if (c->has_toucher) {
        pthread_mutex_lock(&c->lock);
        c->ends = 1;
        pthread_cond_signal(&c->wake);
        pthread_mutex_unlock(&c->lock);
        pthread_join(c->toucher, NULL);
    }
    if (c->data) munmap(c->data, c->n_bytes);
    free(c);
}

size_t kv_bytes(const kv *c) { return c->n_bytes; }
size_t kv_block_bytes(const kv *c) { return c->page_bytes * (size_t)c->n_layer; }
int32_t kv_n_blocks(const kv *c) { return c->n_blocks; }

static void copy_columns(uint8_t *dst, const uint8_t *src, int32_t n_rows, int32_t n_tokens, size_t width) {
    for (int32_t i = 0; i < n_rows; i++) memcpy(dst + (size_t)i * T * width, src + (size_t)i * T * width, (size_t)n_tokens * width);
}

static void copy_keys(const kv *c, uint8_t *dst, const uint8_t *src, int32_t n_tokens) {
    copy_columns(dst + c->k_at, src + c->k_at, (int32_t)n_key_packs(c), n_tokens, c->pack * c->width);
    if (c->type != KV_Q8_0) return;
    copy_columns(dst, src, c->n_groups, n_tokens, 2);
    const size_t tokens = (size_t)c->n_groups * T * 2;
    copy_columns(dst + tokens, src + tokens, 2, n_tokens, 4);
}

/* n_tokens may end within a pack of tokens. */
static void copy_values(const kv *c, uint8_t *dst, const uint8_t *src, int32_t n_tokens) {
    const size_t d = (size_t)c->head_dim, n = (size_t)n_tokens, pack = c->pack * c->width, whole = n / c->pack * d * pack;
    memcpy(dst, src, whole);
    for (size_t i = 0; i < d && n % c->pack; i++) memcpy(dst + whole + i * pack, src + whole + i * pack, n % c->pack * c->width);
}

void kv_copy(kv *c, int32_t src, int32_t dst, int32_t n_tokens) {
    if (src == dst) return;
    for (int32_t l = 0; l < c->n_layer; l++)
        for (int32_t h = 0; h < c->n_head_kv; h++) {
            uint8_t *to = page_at(c, l, dst), *from = page_at(c, l, src);
            copy_keys(c, keys_of(c, to, h), keys_of(c, from, h), n_tokens);
            copy_values(c, values_of(c, to, h), values_of(c, from, h), n_tokens);
        }
}

void kv_read(const kv *c, int32_t block, void *buf) {
    uint8_t *to = buf;
    for (int32_t l = 0; l < c->n_layer; l++, to += c->page_bytes) memcpy(to, page_at(c, l, block), c->page_bytes);
}

void kv_write(kv *c, int32_t block, const void *buf) {
    const uint8_t *from = buf;
    for (int32_t l = 0; l < c->n_layer; l++, from += c->page_bytes) memcpy(page_at(c, l, block), from, c->page_bytes);
}

/* Values have one scale a token, kept as its log2, which attention adds to scores, and its inverse; never so small that either leaves
 * F32's range. NaN makes its scale NaN. */
static void append_q8(kv *c, const ops *o, uint8_t *kp, uint8_t *vp, int32_t slot, const float *k, const float *v) {
    const size_t s = (size_t)slot, d = (size_t)c->head_dim, n_groups = (size_t)c->n_groups;
    uint16_t *scales = (uint16_t *)(void *)kp + s;
    float *tokens = (float *)(void *)(kp + n_groups * T * 2) + s;
    uint8_t *keys = kp + c->k_at + s * 4, *values = vp + s / 4 * d * 4 + s % 4;
    int8_t q[GROUP];
    for (size_t g = 0; g < n_groups; g++) {
        const size_t at = g * GROUP, n = d - at < GROUP ? d - at : GROUP;
        const float scale = o->rotated_i8(q, k + at, (int32_t)n);
        o->f16_from_f32(scales + g * T, &scale, 1);
        for (size_t i = 0; i < n; i += 4) {
            uint32_t pack;
            memcpy(&pack, q + i, 4);
            pack ^= 0x80808080; /* what multiplies keys takes them unsigned */
            memcpy(keys + (at + i) / 4 * T * 4, &pack, 4);
        }
    }
    float top = o->max_abs(v, c->head_dim);
    if (top < 0x1p-60f) top = 0x1p-60f;
    const float inverse = 127.0f / top;
    tokens[0] = log2f(top / 127.0f);
    tokens[T] = inverse;
    for (size_t at = 0; at < d; at += GROUP) {
        const size_t n = d - at < GROUP ? d - at : GROUP;
        o->i8_from_f32(q, v + at, (int32_t)n, inverse);
        for (size_t i = 0; i < n; i++) values[(at + i) * 4] = (uint8_t)q[i];
    }
}

static void append_f32(const kv *c, uint8_t *kp, uint8_t *vp, int32_t slot, const float *k, const float *v) {
    float *keys = (float *)(void *)kp + slot;
    for (int32_t d = 0; d < c->head_dim; d++) keys[(size_t)d * T] = k[d];
    memcpy((float *)(void *)vp + (size_t)slot * (size_t)c->head_dim, v, (size_t)c->head_dim * 4);
}

enum { STRETCH = 64 }; /* values converted at once; even */

static void append_f16(const kv *c, const ops *o, uint8_t *kp, uint8_t *vp, int32_t slot, const float *k, const float *v) {
    uint16_t *keys = (uint16_t *)(void *)kp + slot, half[STRETCH];
    for (int32_t d = 0; d < c->head_dim; d += STRETCH) {
        const int32_t n = c->head_dim - d < STRETCH ? c->head_dim - d : STRETCH;
        o->f16_from_f32(half, k + d, n);
        for (int32_t i = 0; i < n; i++) keys[(size_t)(d + i) * T] = half[i];
    }
    o->f16_from_f32((uint16_t *)(void *)vp + (size_t)slot * (size_t)c->head_dim, v, c->head_dim);
}

static void append_bf16(const kv *c, const ops *o, uint8_t *kp, uint8_t *vp, int32_t slot, const float *k, const float *v) {
    uint16_t *keys = (uint16_t *)(void *)kp + (size_t)slot * 2, half[STRETCH];
    uint16_t *values = (uint16_t *)(void *)vp + (size_t)(slot / 2) * (size_t)c->head_dim * 2 + slot % 2;
    for (int32_t d = 0; d < c->head_dim; d += STRETCH) {
        const int32_t n = c->head_dim - d < STRETCH ? c->head_dim - d : STRETCH;
        o->bf16_from_f32(half, k + d, n);
        for (int32_t i = 0; i < n; i++) keys[(size_t)((d + i) / 2) * T * 2 + (size_t)(i % 2)] = half[i];
        o->bf16_from_f32(half, v + d, n);
        for (int32_t i = 0; i < n; i++) values[(size_t)(d + i) * 2] = half[i];
    }
    if (c->head_dim % 2) keys[(size_t)(c->head_dim / 2) * T * 2 + 1] = 0; /* multiplied by zero, which NaN survives */
}

void kv_append(kv *c, const ops *o, int32_t layer, int32_t block, int32_t slot, const float *k, const float *v) {
    for (int32_t h = 0; h < c->n_head_kv; h++, k += c->head_dim, v += c->head_dim) {
        uint8_t *page = page_at(c, layer, block), *kp = keys_of(c, page, h), *vp = values_of(c, page, h);
        switch (c->type) {
        case KV_F16: append_f16(c, o, kp, vp, slot, k, v); break;
        case KV_Q8_0: append_q8(c, o, kp, vp, slot, k, v); break;
        case KV_F32: append_f32(c, kp, vp, slot, k, v); break;
        default: append_bf16(c, o, kp, vp, slot, k, v); break;
        }
    }
}

void kv_will_append(const kv *c, int32_t layer, int32_t block, int32_t slot) {
    const size_t pack = c->pack * c->width, n_keys = n_key_packs(c), row = (size_t)c->head_dim * pack;
    for (int32_t h = 0; h < c->n_head_kv; h++) {
        uint8_t *page = page_at(c, layer, block);
        const uint8_t *k = keys_of(c, page, h) + c->k_at, *v = values_of(c, page, h) + (size_t)slot / c->pack * row;
        for (size_t i = 0; i < n_keys; i++) __builtin_prefetch(k + (i * T + (size_t)slot) * pack, 1);
        for (size_t i = 0; i < row; i += 64) __builtin_prefetch(v + i, 1);
    }
}

int32_t kv_type(const kv *c) { return c->type; }

size_t kv_key_bytes(const kv *c) { return c->k_bytes; }
size_t kv_value_bytes(const kv *c) { return c->v_bytes; }

const void *kv_keys(const kv *c, int32_t layer, int32_t block, int32_t head) {
    return keys_of(c, page_at(c, layer, block), head);
}

const void *kv_values(const kv *c, int32_t layer, int32_t block, int32_t head) {
    return values_of(c, page_at(c, layer, block), head);
}

static void expand_q8(const kv *c, const ops *o, const uint8_t *kp, const uint8_t *vp, float *k, float *v) {
    const float *inverses = (const float *)(const void *)(kp + c->k_at) - T;
    float scale[T];
    for (int32_t g = 0; k && g < c->n_groups; g++) {
        const int32_t d = g * GROUP, n = c->head_dim - d < GROUP ? c->head_dim - d : GROUP;
        o->f32_from_f16(scale, (const uint16_t *)(const void *)kp + g * T, T);
        o->f32_from_packs(k + d * T, kp + c->k_at + d * T, n, T, scale, 0);
    }
    if (!v) return;
    for (int32_t t = 0; t < T; t++) scale[t] = 1.0f / inverses[t];
    o->f32_from_packs(v, vp, T, c->head_dim, scale, 1);
}

static float bf16_value(const uint8_t *p) {
    uint16_t h;
    memcpy(&h, p, 2);
    uint32_t u = (uint32_t)h << 16;
    float x;
    memcpy(&x, &u, 4);
    return x;
}

static void expand_bf16(const kv *c, const uint8_t *kp, const uint8_t *vp, float *k, float *v) {
    for (int32_t d = 0; d < c->head_dim; d++)
        for (int32_t t = 0; t < T; t++) {
            if (k) k[d * T + t] = bf16_value(kp + ((d / 2 * T + t) * 2 + d % 2) * 2);
            if (v) v[t * c->head_dim + d] = bf16_value(vp + ((t / 2 * c->head_dim + d) * 2 + t % 2) * 2);
        }
}

void kv_expand(const kv *c, const ops *o, int32_t layer, int32_t block, int32_t head, float *k, float *v) {
    uint8_t *page = page_at(c, layer, block);
    const uint8_t *kp = keys_of(c, page, head), *vp = values_of(c, page, head);
    const int32_t n = c->head_dim * T;
    switch (c->type) {
    case KV_Q8_0: expand_q8(c, o, kp, vp, k, v); break;
    case KV_BF16: expand_bf16(c, kp, vp, k, v); break;
    case KV_F32:
        if (k) memcpy(k, kp, (size_t)n * 4);
        if (v) memcpy(v, vp, (size_t)n * 4);
        break;
    default:
        if (k) o->f32_from_f16(k, (const uint16_t *)(const void *)kp, n);
        if (v) o->f32_from_f16(v, (const uint16_t *)(const void *)vp, n);
        break;
    }
}

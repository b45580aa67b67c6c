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

enum { T = MILAD_KV_BLOCK, GROUP = 32, AHEAD = 128, NICE = 5 };

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14; older ones refuse it */
#endif

struct kv {
    int32_t type, n_layer, n_blocks, n_head_kv, head_dim, n_groups;
    size_t k_bytes, v_bytes, page_bytes, n_bytes; /* of one head's keys, values */
    size_t k_at, v_at;             /* offsets of the numbers in them, behind the scales */
    uint8_t *data;
    pthread_t toucher; /* maps blocks before they are used */
    pthread_mutex_t lock;
    pthread_cond_t wake;
    atomic_int wanted; /* blocks that shall be mapped; under the lock but for a look */
    int has_toucher, ends;
};

static size_t value_bytes(const kv *c) { return c->type == KV_Q8_0 ? 1 : c->type == KV_F32 ? 4 : 2; }

static uint8_t *page_at(const kv *c, int32_t layer, int32_t block) {
    return c->data + ((size_t)layer * (size_t)c->n_blocks + (size_t)block) * c->page_bytes;
}

static uint8_t *keys_of(const kv *c, uint8_t *page, int32_t head) { return page + (size_t)head * c->k_bytes; }

static uint8_t *values_of(const kv *c, uint8_t *page, int32_t head) {
    return page + (size_t)c->n_head_kv * c->k_bytes + (size_t)head * c->v_bytes;
}

static void lay_out(kv *c) {
    const size_t pair = c->type == KV_BF16 ? (size_t)c->head_dim % 2 : 0; /* an odd dimension's pair is half empty */
    const size_t scales = c->type == KV_Q8_0 ? (size_t)c->n_groups * T * 2 : 0, row = T * value_bytes(c);
    c->k_at = c->v_at = scales;
    c->k_bytes = (scales + ((size_t)c->head_dim + pair) * row + 63) / 64 * 64;
    c->v_bytes = (scales + (size_t)c->head_dim * row + 63) / 64 * 64;
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
    if (!c->has_toucher || before == c->n_blocks || wanted < before + AHEAD / 2) return;
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
    c->n_groups = (hp->head_dim + GROUP - 1) / GROUP;
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

/* Elements are pairs; n_tokens may end within a pair of tokens of the values. */
static void copy_keys(const kv *c, uint8_t *dst, const uint8_t *src, int32_t n_tokens) {
    if (c->type == KV_BF16) copy_columns(dst, src, (c->head_dim + 1) / 2, n_tokens, 4);
    else copy_columns(dst + c->k_at, src + c->k_at, c->head_dim, n_tokens, value_bytes(c));
    if (c->type == KV_Q8_0) copy_columns(dst, src, c->n_groups, n_tokens, 2);
}

static void copy_values(const kv *c, uint8_t *dst, const uint8_t *src, int32_t n_tokens) {
    const size_t d = (size_t)c->head_dim, n = (size_t)n_tokens;
    if (c->type == KV_Q8_0) memcpy(dst, src, n * (size_t)c->n_groups * 2);
    if (c->type != KV_BF16) {
        memcpy(dst + c->v_at, src + c->v_at, n * d * value_bytes(c));
        return;
    }
    const size_t whole = n / 2 * d * 4;
    memcpy(dst, src, whole);
    for (size_t i = 0; i < d && n % 2; i++) memcpy(dst + whole + i * 4, src + whole + i * 4, 2);
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

/* One group of at most 32 dimensions: the scale as stored, and int8 values of `step` bytes apart. The scale is rounded to F16
 * before dividing, so that the greatest value still fits. */
static uint16_t quantise_group(const ops *o, const float *x, int32_t n, int8_t *q, size_t step) {
    float top = 0, d, inverse;
    uint16_t h;
    for (int32_t i = 0; i < n; i++) top = fabsf(x[i]) > top || x[i] != x[i] ? fabsf(x[i]) : top;
    d = top / 127.0f;
    o->f16_from_f32(&h, &d, 1);
    o->f32_from_f16(&d, &h, 1);
    inverse = d > 0 ? 1.0f / d : 0.0f;
    for (int32_t i = 0; i < n; i++) {
        float v = x[i] * inverse;
        v = v > 127.0f ? 127.0f : v >= -127.0f ? v : -127.0f; /* NaN: -127, its scale is NaN */
        q[(size_t)i * step] = (int8_t)lrintf(v);
    }
    return h;
}

static void append_q8(kv *c, const ops *o, uint8_t *kp, uint8_t *vp, int32_t slot, const float *k, const float *v) {
    const size_t s = (size_t)slot;
    uint16_t *k_scales = (uint16_t *)(void *)kp, *v_scales = (uint16_t *)(void *)vp;
    int8_t *kq = (int8_t *)kp + c->k_at, *vq = (int8_t *)vp + c->v_at + s * (size_t)c->head_dim;
    for (int32_t g = 0; g < c->n_groups; g++) {
        const int32_t d = g * GROUP, n = c->head_dim - d < GROUP ? c->head_dim - d : GROUP;
        k_scales[(size_t)g * T + s] = quantise_group(o, k + d, n, kq + (size_t)d * T + s, T);
        v_scales[s * (size_t)c->n_groups + (size_t)g] = quantise_group(o, v + d, n, vq + d, 1);
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
    const size_t pair = c->type == KV_BF16 ? 2 : 1, width = value_bytes(c) * pair; /* of what lies together */
    const size_t n_keys = ((size_t)c->head_dim + pair - 1) / pair, row = (size_t)c->head_dim * width;
    for (int32_t h = 0; h < c->n_head_kv; h++) {
        uint8_t *page = page_at(c, layer, block);
        const uint8_t *k = keys_of(c, page, h) + c->k_at, *v = values_of(c, page, h) + c->v_at + (size_t)slot / pair * row;
        for (size_t i = 0; i < n_keys; i++) __builtin_prefetch(k + (i * T + (size_t)slot) * width, 1);
        for (size_t i = 0; i < row; i += 64) __builtin_prefetch(v + i, 1);
    }
}

int32_t kv_type(const kv *c) { return c->type; }

const void *kv_keys(const kv *c, int32_t layer, int32_t block, int32_t head) {
    return keys_of(c, page_at(c, layer, block), head) + c->k_at;
}

const void *kv_values(const kv *c, int32_t layer, int32_t block, int32_t head) {
    return values_of(c, page_at(c, layer, block), head) + c->v_at;
}

static void expand_q8(const kv *c, const ops *o, const uint8_t *kp, const uint8_t *vp, float *k, float *v) {
    const int8_t *kq = (const int8_t *)kp + c->k_at, *vq = (const int8_t *)vp + c->v_at;
    const uint16_t *k_scales = (const uint16_t *)(const void *)kp, *v_scales = (const uint16_t *)(const void *)vp;
    float scale[T];
    uint16_t half[T];
    for (int32_t g = 0; g < c->n_groups; g++) {
        const int32_t d = g * GROUP, n = c->head_dim - d < GROUP ? c->head_dim - d : GROUP;
        if (k) {
            o->f32_from_f16(scale, k_scales + g * T, T);
            o->f32_from_i8(k + d * T, kq + d * T, T, n, T, scale, 0);
        }
        if (!v) continue;
        for (int32_t t = 0; t < T; t++) half[t] = v_scales[t * c->n_groups + g];
        o->f32_from_f16(scale, half, T);
        o->f32_from_i8(v + d, vq + d, c->head_dim, T, n, scale, 1);
    }
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

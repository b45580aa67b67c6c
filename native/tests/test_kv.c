/* The arena: what is appended is what is read, a copied prefix is exactly a prefix, blocks move as bytes. */
#include <math.h>

#include "kv.h"
#include "milad.h"
#include "test.h"

enum { D = 40, HEADS = 2, BLOCKS = 5 };

static void append_all(kv *c, const ops *o, int32_t block, float seed) {
    float k[HEADS * D], v[HEADS * D];
    for (int32_t layer = 0; layer < 2; layer++)
        for (int32_t t = 0; t < 32; t++) {
            for (int32_t i = 0; i < HEADS * D; i++) {
                k[i] = seed + (float)(layer * 1000 + t * 8) + (float)i / 128;
                v[i] = -k[i];
            }
            kv_append(c, o, layer, block, t, k, v);
        }
}

/* Q8_0 keys rotated back. */
static void expand(const kv *c, const ops *o, int32_t layer, int32_t block, float *k, float *v) {
    for (int32_t h = 0; h < HEADS; h++, k += D * 32, v += D * 32) {
        kv_expand(c, o, layer, block, h, k, v);
        for (int32_t t = 0; kv_type(c) == KV_Q8_0 && t < 32; t++) {
            float key[D];
            for (int32_t i = 0; i < D; i++) key[i] = k[i * 32 + t];
            o->rotate(key, D);
            for (int32_t i = 0; i < D; i++) k[i * 32 + t] = key[i];
        }
    }
}

static void test_type(int32_t type, float tolerance) {
    const hparams hp = {.n_layer = 2, .n_head = 4, .n_head_kv = HEADS, .head_dim = D};
    const ops *o = ops_get();
    kv *c;
    CHECK_INT(kv_open(&hp, BLOCKS, type, &c), 0);
    CHECK_INT(kv_bytes(c), kv_block_bytes(c) * BLOCKS);
    append_all(c, o, 3, 1);
    append_all(c, o, 4, 500);
    float k[HEADS * D * 32], v[HEADS * D * 32], k4[HEADS * D * 32], v4[HEADS * D * 32], got_k[HEADS * D * 32], got_v[HEADS * D * 32];
    for (int32_t layer = 0; layer < 2; layer++) {
        expand(c, o, layer, 3, k, v);
        expand(c, o, layer, 4, k4, v4);
        for (int32_t i = 0; i < HEADS * D; i++)
            for (int32_t t = 0; t < 32; t++) {
                float want = 1 + (float)(layer * 1000 + t * 8) + (float)i / 128;
                CHECK_NEAR(k[i * 32 + t], want, tolerance * want);
                CHECK_NEAR(v[i / D * D * 32 + t * D + i % D], -want, tolerance * want);
            }
        kv_copy(c, 3, 4, 0);
        expand(c, o, layer, 4, got_k, got_v);
        CHECK(memcmp(k4, got_k, sizeof k4) == 0 && memcmp(v4, got_v, sizeof v4) == 0);
    }
    kv_copy(c, 3, 4, 13);
    for (int32_t layer = 0; layer < 2; layer++) { /* the first 13 of block 3, then what block 4 had */
        expand(c, o, layer, 3, k, v);
        expand(c, o, layer, 4, got_k, got_v);
        kv *fresh;
        CHECK_INT(kv_open(&hp, BLOCKS, type, &fresh), 0);
        append_all(fresh, o, 4, 500);
        expand(fresh, o, layer, 4, k4, v4);
        kv_close(fresh);
        for (int32_t i = 0; i < HEADS * D; i++)
            for (int32_t t = 0; t < 32; t++) {
                const int32_t at_v = i / D * D * 32 + t * D + i % D;
                CHECK(got_k[i * 32 + t] == (t < 13 ? k : k4)[i * 32 + t]);
                CHECK(got_v[at_v] == (t < 13 ? v : v4)[at_v]);
            }
    }
    const size_t n = kv_block_bytes(c);
    uint8_t *bytes = malloc(n), *again = malloc(n);
    kv_read(c, 3, bytes);
    kv_write(c, 0, bytes);
    kv_copy(c, 3, 1, 32);
    kv_read(c, 0, again);
    CHECK(memcmp(bytes, again, n) == 0);
    kv_read(c, 1, again);
    CHECK(memcmp(bytes, again, n) == 0);
    kv_read(c, 2, again);
    for (size_t i = 0; i < n; i++)
        CHECK(again[i] == 0);
    free(bytes);
    free(again);
    kv_close(c);
}

/* Q8_0: zeros, one huge value, NaN, values that only a subnormal scale can hold. */
static void test_q8_extremes(void) {
    const hparams hp = {.n_layer = 1, .n_head = 1, .n_head_kv = 1, .head_dim = 32};
    const ops *o = ops_get();
    kv *c;
    float x[32] = {0}, k[32 * 32], v[32 * 32];
    CHECK_INT(kv_open(&hp, 1, KV_Q8_0, &c), 0);
    kv_append(c, o, 0, 0, 0, x, x);
    x[7] = 3e38f;
    kv_append(c, o, 0, 0, 1, x, x);
    x[7] = 1e-6f;
    kv_append(c, o, 0, 0, 2, x, x);
    x[7] = NAN;
    kv_append(c, o, 0, 0, 3, x, x);
    kv_expand(c, o, 0, 0, 0, k, v);
    for (int32_t d = 0; d < 32; d++) {
        CHECK(k[d * 32] == 0);
        CHECK(isfinite(v[32 + d]));
        CHECK_NEAR(v[64 + d], d == 7 ? 1e-6 : 0, 1e-5);
    }
    CHECK(v[32 + 7] > 1e6f);
    CHECK(isnan(v[96 + 7]));
    kv_close(c);
}

/* Memory mapped ahead while blocks are written changes none of them, and an arena may close at any moment of it. */
static void test_ahead(void) {
    const hparams hp = {.n_layer = 3, .n_head = 2, .n_head_kv = 2, .head_dim = 64};
    for (int32_t last = 0; last < 2000; last = last * 3 + 1) {
        kv *c = NULL;
        CHECK_INT(kv_open(&hp, 2000, KV_F16, &c), 0);
        uint8_t *wrote = malloc(kv_block_bytes(c)), *found = malloc(kv_block_bytes(c));
        for (int32_t block = 0; block <= last; block += 7) {
            memset(wrote, block + 1, kv_block_bytes(c));
            kv_write(c, block, wrote);
            kv_ahead(c, block);
        }
        for (int32_t block = 0; block <= last; block += 7) {
            memset(wrote, block + 1, kv_block_bytes(c));
            kv_read(c, block, found);
            CHECK(memcmp(wrote, found, kv_block_bytes(c)) == 0);
        }
        kv_close(c);
        free(wrote);
        free(found);
    }
}

int main(void) {
    const hparams hp = {.n_layer = 1 << 20, .n_head = 1, .n_head_kv = 1 << 12, .head_dim = 1 << 10};
    kv *c = NULL;
    test_type(KV_F16, 1.0f / 2048);
    test_type(KV_Q8_0, 6.0f / 127); /* keys nearly constant: the worst that rotating can do */
    test_type(KV_F32, 0);
    test_type(KV_BF16, 1.0f / 256);
    test_q8_extremes();
    test_ahead();
    CHECK_INT(kv_open(&hp, INT32_MAX, KV_F16, &c), MILAD_E_ARGUMENT);
    CHECK_INT(kv_open(&hp, 0, KV_F16, &c), MILAD_E_ARGUMENT);
    CHECK_INT(kv_open(&hp, 1, 4, &c), MILAD_E_ARGUMENT);
    CHECK(!c);
    return test_done();
}

/* gguf_fuzz.c: any bytes as a model file: the reader, every typed read, and the metadata a stranger can ask for.
 * The hyperparameters' half runs too; the vocabulary and the weights are model_fuzz's. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "gguf.h"
#include "hparams.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

static volatile uint64_t sum; /* keeps the reads */

static void read_value(const gguf *g, const gguf_value *v) {
    uint64_t u, cursor = 0;
    double f;
    int32_t b;
    gguf_str s;
    char key[128];
    size_t n = v->key.n_bytes < sizeof key - 1 ? v->key.n_bytes : sizeof key - 1;
    memcpy(key, v->key.data, n);
    key[n] = 0;
    gguf_get_u64(g, key, &u);
    gguf_get_f64(g, key, &f);
    gguf_get_bool(g, key, &b);
    gguf_get_str(g, key, &s);
    while (gguf_next_str(v, &cursor, &s))
        sum += s.n_bytes ? (uint8_t)s.data[s.n_bytes - 1] : 0;
    for (uint64_t i = 0; v->item_type != GGUF_STRING && i < v->n_items; i++)
        sum += (uint64_t)gguf_item_i64(v, i) + (gguf_item_f64(v, i) > 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes) {
    gguf *g;
    hparams hp;
    if (gguf_open_memory(data, n_bytes, n_bytes & 1, &g))
        return 0;
    for (uint64_t i = 0; i < gguf_n_values(g); i++)
        read_value(g, gguf_value_at(g, i));
    for (uint64_t i = 0; i < gguf_n_tensors(g); i++) {
        const gguf_tensor *t = gguf_tensor_at(g, i);
        if (t->data && t->n_bytes)
            sum += t->data[0] + t->data[t->n_bytes - 1];
    }
    uint64_t fingerprint = 0;
    sum += (uint64_t)model_fingerprint(g, &fingerprint) + fingerprint;
    if (hparams_read(g, &hp) == 0)
        hparams_read_rope(g, &hp);
    hparams_close(&hp);
    gguf_close(g);
    return 0;
}

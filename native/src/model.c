/* model.c: opens a model file: metadata, hyperparameters, vocabulary, weights, in the order that finds trouble cheaply. */
#include "model.h"

#include <stdlib.h>
#include <stdio.h>
#include <string.h>

#include "error.h"
#include "hparams.h"

static uint64_t mix(uint64_t h, uint64_t word) {
    unsigned __int128 product = (unsigned __int128)(h ^ word) * 0x9fb21c651e98df25u;
    return (uint64_t)product ^ (uint64_t)(product >> 64) ^ 0x27d4eb2f165667c5u;
}

/* Eight bytes at a time, the length first so that neighbours can't trade bytes. */
static uint64_t mix_bytes(uint64_t h, const void *data, uint64_t n_bytes) {
    const uint8_t *p = data;
    h = mix(h, n_bytes);
    for (; n_bytes >= 8; n_bytes -= 8, p += 8) {
        uint64_t word;
        memcpy(&word, p, 8);
        h = mix(h, word);
    }
    uint64_t word = 0;
    memcpy(&word, p, n_bytes);
    return mix(h, word);
}

static int begins(const gguf_str *s, const char *text) {
    size_t n = strlen(text);
    return s->n_bytes >= n && memcmp(s->data, text, n) == 0;
}

int32_t model_fingerprint(const gguf *g, uint64_t *out) {
    enum { SAMPLE = 64 };
    uint64_t h = 0x6d696c6164; /* "milad" */
    for (uint64_t i = 0; i < gguf_n_values(g); i++) {
        const gguf_value *v = gguf_value_at(g, i);
        if (begins(&v->key, "general.") && !begins(&v->key, "general.architecture"))
            continue;
        if (begins(&v->key, "tokenizer.chat_template") || begins(&v->key, "split."))
            continue;
        h = mix_bytes(h, v->key.data, v->key.n_bytes);
        h = mix(h, (uint64_t)v->item_type);
        h = mix_bytes(h, v->data, v->n_bytes);
    }
    for (uint64_t i = 0; i < gguf_n_tensors(g); i++) {
        const gguf_tensor *t = gguf_tensor_at(g, i);
        h = mix_bytes(h, t->name.data, t->name.n_bytes);
        h = mix(h, (uint64_t)t->type);
        h = mix_bytes(h, t->dims, sizeof t->dims);
        for (uint64_t k = 0; t->data && k < 3; k++) {
            uint8_t sample[SAMPLE];
            uint64_t n = t->n_bytes < SAMPLE ? t->n_bytes : SAMPLE;
            int32_t status = gguf_read(g, t->data + (t->n_bytes - n) / 2 * k, n, sample);
            if (status)
                return status;
            h = mix_bytes(h, sample, n);
        }
    }
    *out = h;
    return 0;
}

static void fill_info(milad_model *m) {
    const hparams *hp = &m->hp;
    const vocab_ids *ids = vocab_special_ids(m->vocab);
    milad_model_info *info = &m->info;
    info->size = sizeof *info;
    info->n_vocab = hp->n_vocab;
    info->n_ctx_train = hp->n_ctx_train;
    info->n_layer = hp->n_layer;
    info->n_embd = hp->n_embd;
    info->n_head = hp->n_head;
    info->n_head_kv = hp->n_head_kv;
    info->head_dim = hp->head_dim;
    info->n_ff = hp->n_ff;
    info->bos = ids->bos;
    info->eos = ids->eos;
    info->eot = ids->eot;
    info->unk = ids->unk;
    info->pad = ids->pad;
    info->add_bos = ids->add_bos;
    info->add_eos = ids->add_eos;
    info->file_bytes = gguf_file_bytes(m->file);
    for (uint64_t i = 0; i < gguf_n_tensors(m->file); i++) {
        const gguf_tensor *t = gguf_tensor_at(m->file, i);
        info->n_params += t->dims[0] * t->dims[1] * t->dims[2] * t->dims[3]; /* the reader checked each product */
    }
}

static void name_architecture(milad_model *m) {
    gguf_str arch;
    if (gguf_get_str(m->file, "general.architecture", &arch) > 0)
        snprintf(m->info.architecture, sizeof m->info.architecture, "%.*s", (int)(arch.n_bytes < 31 ? arch.n_bytes : 31),
                 arch.data);
}

static int32_t load(milad_model *m, const char *path, const milad_model_params *params) {
    int32_t vocab_only = (params->flags & MILAD_MODEL_VOCAB_ONLY) != 0;
    int32_t status = gguf_open(path, vocab_only, &m->file);
    if (status || (status = hparams_read(m->file, &m->hp)) || (status = vocab_count(m->file, &m->hp.n_vocab)))
        return status;
    name_architecture(m);
    if (!vocab_only && ((status = model_bind(m)) || (status = hparams_read_rope(m->file, &m->hp))))
        return status;
    int32_t packs = !vocab_only && !(params->flags & MILAD_MODEL_NO_REPACK); /* its threads open the vocabulary beside it */
    if (!packs && ((status = vocab_open(m->file, &m->vocab)) || (status = model_fingerprint(m->file, &m->info.fingerprint))))
        return status;
    if (!vocab_only && (status = model_pack(m, params)))
        return status;
    fill_info(m);
    m->info.has_weights = !vocab_only;
    gguf_end_reads(m->file);
    if (params->progress)
        *params->progress = 1;
    return 0;
}

int32_t milad_model_open(const char *path, const milad_model_params *params, milad_model **out) {
    milad_model_params defaults = {.size = sizeof defaults};
    if (!out)
        return fail(MILAD_E_ARGUMENT, "milad_model_open: out is NULL");
    *out = NULL;
    if (!path || !*path)
        return fail(MILAD_E_ARGUMENT, "milad_model_open: no path");
    if (!params)
        params = &defaults;
    if (params->size != sizeof *params)
        return fail(MILAD_E_ARGUMENT, "milad_model_open: params are of %u bytes, not %zu", params->size, sizeof *params);
    if (params->flags & ~(uint32_t)(MILAD_MODEL_VOCAB_ONLY | MILAD_MODEL_MLOCK | MILAD_MODEL_NO_REPACK))
        return fail(MILAD_E_ARGUMENT, "milad_model_open: unknown flags %#x", params->flags);
    milad_model *m = calloc(1, sizeof *m);
    if (!m)
        return fail(MILAD_E_MEMORY, "out of memory");
    int32_t status = load(m, path, params);
    if (status)
        milad_model_close(m);
    else
        *out = m;
    return status;
}

void milad_model_close(milad_model *m) {
    if (!m)
        return;
    model_free_weights(m);
    hparams_close(&m->hp);
    vocab_close(m->vocab);
    gguf_close(m->file);
    free(m);
}

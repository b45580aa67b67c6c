/* api.c: the doors of the ABI that only look at an open model, and what describes the library itself.
 *
 * Arguments are checked here, so the rooms behind may trust them. Metadata leaves as JSON: any bytes of the file become
 * well-formed UTF-8 (what is not well formed: U+FFFD), numbers that JSON can't say become null.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../include/milad.h"
#include "error.h"
#include "model.h"

#ifndef MILAD_VERSION
#error "MILAD_VERSION is set by the build"
#endif

const char *milad_version(void) { return MILAD_VERSION; }

uint32_t milad_struct_size(int32_t which) {
    switch (which) {
    case MILAD_STRUCT_MODEL_PARAMS: return sizeof(milad_model_params);
    case MILAD_STRUCT_MODEL_INFO: return sizeof(milad_model_info);
    case MILAD_STRUCT_CONTEXT_PARAMS: return sizeof(milad_context_params);
    case MILAD_STRUCT_CONTEXT_STAT: return sizeof(milad_context_stat);
    case MILAD_STRUCT_SEQUENCE: return sizeof(milad_sequence);
    case MILAD_STRUCT_ROW: return sizeof(milad_row);
    case MILAD_STRUCT_SAMPLER: return sizeof(milad_sampler);
    case MILAD_STRUCT_OUTPUT: return sizeof(milad_output);
    case MILAD_STRUCT_BATCH: return sizeof(milad_batch);
    default: return 0;
    }
}

int32_t milad_model_info_get(const milad_model *m, milad_model_info *out) {
    if (!m || !out || out->size != sizeof *out)
        return fail(MILAD_E_ARGUMENT, "milad_model_info_get: no model, or a struct of another size");
    *out = m->info;
    out->size = sizeof *out;
    return MILAD_OK;
}

/* Text that is counted in full and kept as far as it fits. */
typedef struct sink {
    char *buf;
    size_t n_bytes, at;
} sink;

static void put(sink *s, const char *text, size_t n) {
    if (s->at < s->n_bytes)
        memcpy(s->buf + s->at, text, n < s->n_bytes - s->at ? n : s->n_bytes - s->at);
    s->at += n;
}

/* Bytes of the well-formed UTF-8 character at p (0: none), as Unicode 15 table 3-7 lists them. */
static size_t utf8_length(const uint8_t *p, uint64_t n) {
    if (p[0] < 0x80)
        return 1;
    size_t want = p[0] >= 0xf0 ? 4 : p[0] >= 0xe0 ? 3 : 2;
    if (p[0] < 0xc2 || p[0] > 0xf4 || n < want)
        return 0;
    uint8_t lo = p[0] == 0xe0 ? 0xa0 : p[0] == 0xf0 ? 0x90 : 0x80;
    uint8_t hi = p[0] == 0xed ? 0x9f : p[0] == 0xf4 ? 0x8f : 0xbf;
    if (p[1] < lo || p[1] > hi)
        return 0;
    for (size_t i = 2; i < want; i++)
        if ((p[i] & 0xc0) != 0x80)
            return 0;
    return want;
}

static void put_string(sink *s, const char *data, uint64_t n) {
    const uint8_t *p = (const uint8_t *)data;
    put(s, "\"", 1);
    while (n) {
        size_t take = utf8_length(p, n);
        char escape[8];
        if (take == 0) {
            put(s, "\\ufffd", 6);
            take = 1;
        } else if (*p < 0x20 || *p == '"' || *p == '\\') {
            put(s, escape, (size_t)snprintf(escape, sizeof escape, "\\u%04x", *p));
        } else {
            put(s, (const char *)p, take);
        }
        p += take;
        n -= take;
    }
    put(s, "\"", 1);
}

/* The shortest of the forms that read back as the same number. */
static int print_float(char *text, size_t n_bytes, double value, int is_f32) {
    int n = 0;
    for (int digits = is_f32 ? 6 : 15; digits <= (is_f32 ? 9 : 17); digits++) {
        n = snprintf(text, n_bytes, "%.*g", digits, value);
        if (is_f32 ? strtof(text, NULL) == (float)value : strtod(text, NULL) == value)
            break;
    }
    return n;
}

static void put_number(sink *s, const gguf_value *v, uint64_t i) {
    char text[40];
    int n;
    if (v->item_type == GGUF_BOOL) {
        n = snprintf(text, sizeof text, "%s", gguf_item_i64(v, i) ? "true" : "false");
    } else if (v->item_type == GGUF_F32 || v->item_type == GGUF_F64) {
        double value = gguf_item_f64(v, i);
        n = isfinite(value) ? print_float(text, sizeof text, value, v->item_type == GGUF_F32) : snprintf(text, 5, "null");
    } else if (v->item_type == GGUF_U64) {
        uint64_t value;
        memcpy(&value, v->data + 8 * i, 8);
        n = snprintf(text, sizeof text, "%llu", (unsigned long long)value);
    } else {
        n = snprintf(text, sizeof text, "%lld", (long long)gguf_item_i64(v, i));
    }
    put(s, text, (size_t)n);
}

static void put_value(sink *s, const gguf_value *v, uint64_t max_items) {
    char text[48];
    if (v->type == GGUF_STRING) {
        put_string(s, (const char *)v->data, v->n_bytes);
    } else if (v->type != GGUF_ARRAY) {
        put_number(s, v, 0);
    } else if (v->n_items > max_items) {
        put(s, text, (size_t)snprintf(text, sizeof text, "{\"array\": %llu}", (unsigned long long)v->n_items));
    } else {
        uint64_t cursor = 0;
        gguf_str item;
        put(s, "[", 1);
        for (uint64_t i = 0; i < v->n_items; i++) {
            if (i)
                put(s, ", ", 2);
            if (gguf_next_str(v, &cursor, &item))
                put_string(s, item.data, item.n_bytes);
            else
                put_number(s, v, i);
        }
        put(s, "]", 1);
    }
}

int64_t milad_model_metadata(const milad_model *m, const char *key, char *buf, size_t n_bytes) {
    enum { LISTED = 64 };
    if (!m || (!buf && n_bytes))
        return fail(MILAD_E_ARGUMENT, "milad_model_metadata: no model or no buffer");
    sink s = {buf, n_bytes ? n_bytes - 1 : 0, 0};
    if (key) {
        const gguf_value *v = gguf_find(m->file, key);
        if (!v)
            return fail(MILAD_E_ARGUMENT, "%s: no key '%s'", gguf_path(m->file), key);
        put_value(&s, v, UINT64_MAX);
    } else {
        put(&s, "{", 1);
        for (uint64_t i = 0; i < gguf_n_values(m->file); i++) {
            const gguf_value *v = gguf_value_at(m->file, i);
            if (i)
                put(&s, ", ", 2);
            put_string(&s, v->key.data, v->key.n_bytes);
            put(&s, ": ", 2);
            put_value(&s, v, LISTED);
        }
        put(&s, "}", 1);
    }
    if (n_bytes)
        buf[s.at < n_bytes ? s.at : n_bytes - 1] = 0;
    return (int64_t)s.at;
}

int64_t milad_tokenize(const milad_model *m, const char *text, size_t n_bytes, uint32_t flags, int32_t *tokens,
                       int64_t n_tokens) {
    if (!m || (!text && n_bytes) || n_tokens < 0 || (!tokens && n_tokens))
        return fail(MILAD_E_ARGUMENT, "milad_tokenize: no model, no text or no buffer");
    if (flags & ~(uint32_t)(MILAD_TOKENIZE_ADD_BOS | MILAD_TOKENIZE_PARSE_SPECIAL))
        return fail(MILAD_E_ARGUMENT, "milad_tokenize: unknown flags %#x", flags);
    return vocab_tokenize(m->vocab, n_bytes ? text : "", n_bytes, flags, tokens, n_tokens);
}

int32_t milad_token_bytes(const milad_model *m, int32_t token, char *buf, int32_t n_bytes, uint32_t *attributes) {
    if (!m || n_bytes < 0 || (!buf && n_bytes))
        return fail(MILAD_E_ARGUMENT, "milad_token_bytes: no model or no buffer");
    if (token < 0 || token >= m->hp.n_vocab)
        return fail(MILAD_E_ARGUMENT, "token %d is outside the vocabulary of %d", token, m->hp.n_vocab);
    return vocab_token_bytes(m->vocab, token, buf, n_bytes, attributes);
}

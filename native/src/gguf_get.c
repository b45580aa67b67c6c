/* gguf_get.c: typed reads of the values that gguf.c found and checked. A wrong type is an error that names the key. */
#include <math.h>
#include <string.h>

#include "../include/milad.h"
#include "error.h"
#include "gguf_internal.h"

static const char *const TYPE_NAMES[] = {"u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "string", "array",
                                         "u64", "i64", "f64"};

int64_t gguf_item_i64(const gguf_value *v, uint64_t i) {
    switch (v->item_type) {
    case GGUF_U8: case GGUF_BOOL: return v->data[i];
    case GGUF_I8: return (int8_t)v->data[i];
    case GGUF_U16: return (uint16_t)(v->data[2 * i] | v->data[2 * i + 1] << 8);
    case GGUF_I16: return (int16_t)(v->data[2 * i] | v->data[2 * i + 1] << 8);
    case GGUF_U32: return load_u32(v->data + 4 * i);
    case GGUF_I32: return (int32_t)load_u32(v->data + 4 * i);
    case GGUF_I64: return (int64_t)load_u64(v->data + 8 * i);
    case GGUF_U64: {
        uint64_t u = load_u64(v->data + 8 * i);
        return u > INT64_MAX ? INT64_MAX : (int64_t)u;
    }
    default: return INT64_MIN;
    }
}

double gguf_item_f64(const gguf_value *v, uint64_t i) {
    if (v->item_type == GGUF_F32) {
        uint32_t u = load_u32(v->data + 4 * i);
        float f;
        memcpy(&f, &u, 4);
        return f;
    }
    if (v->item_type == GGUF_F64) {
        uint64_t u = load_u64(v->data + 8 * i);
        double f;
        memcpy(&f, &u, 8);
        return f;
    }
    return v->item_type == GGUF_STRING ? (double)NAN : (double)gguf_item_i64(v, i);
}

static int32_t wrong_type(const gguf *g, const gguf_value *v, const char *wanted) {
    return fail(MILAD_E_FORMAT, "%s: key '%.*s' is of type %s, not %s", g->path, NAME(v->key), TYPE_NAMES[v->type], wanted);
}

static int is_integer(int32_t type) {
    return type <= GGUF_I32 || type == GGUF_U64 || type == GGUF_I64;
}

int32_t gguf_get_u64(const gguf *g, const char *key, uint64_t *out) {
    const gguf_value *v = gguf_find(g, key);
    if (!v)
        return 0;
    if (!is_integer(v->type))
        return wrong_type(g, v, "an integer");
    int64_t value = gguf_item_i64(v, 0);
    if (v->type == GGUF_U64)
        *out = load_u64(v->data);
    else if (value < 0)
        return fail(MILAD_E_FORMAT, "%s: key '%.*s' is negative", g->path, NAME(v->key));
    else
        *out = (uint64_t)value;
    return 1;
}

int32_t gguf_get_f64(const gguf *g, const char *key, double *out) {
    const gguf_value *v = gguf_find(g, key);
    if (!v)
        return 0;
    if (!is_integer(v->type) && v->type != GGUF_F32 && v->type != GGUF_F64)
        return wrong_type(g, v, "a number");
    double value = gguf_item_f64(v, 0);
    if (!isfinite(value))
        return fail(MILAD_E_FORMAT, "%s: key '%.*s' is not finite", g->path, NAME(v->key));
    *out = value;
    return 1;
}

int32_t gguf_get_bool(const gguf *g, const char *key, int32_t *out) {
    const gguf_value *v = gguf_find(g, key);
    if (!v)
        return 0;
    if (v->type != GGUF_BOOL)
        return wrong_type(g, v, "bool");
    *out = v->data[0];
    return 1;
}

int32_t gguf_get_str(const gguf *g, const char *key, gguf_str *out) {
    const gguf_value *v = gguf_find(g, key);
    if (!v)
        return 0;
    if (v->type != GGUF_STRING)
        return wrong_type(g, v, "string");
    out->data = (const char *)v->data;
    out->n_bytes = v->n_bytes;
    return 1;
}

int32_t gguf_next_str(const gguf_value *v, uint64_t *at, gguf_str *out) {
    if (v->type != GGUF_ARRAY || v->item_type != GGUF_STRING || *at >= v->n_bytes)
        return 0;
    out->n_bytes = load_u64(v->data + *at);
    out->data = (const char *)v->data + *at + 8;
    *at += 8 + out->n_bytes;
    return 1;
}

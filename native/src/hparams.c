/* hparams.c: hyperparameters of the llama, qwen2 and qwen3 architectures.
 *
 * Keys are "<architecture>.<rest>" (docs/gguf.md of ggml-org/ggml; names as in llama.cpp's src/llama-arch.cpp). What is
 * absent has the value that llama.cpp takes; what is out of range, or says something this forward pass does not do
 * (experts, a layer-dependent shape, an unknown RoPE scaling), is an error that names the key: a guess would answer wrongly.
 */
#include "hparams.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "error.h"

enum { MAX_LAYERS = 1024, MAX_WIDTH = 1 << 20, MAX_HEADS = 4096, MAX_HEAD_DIM = 1024 };

static const struct {
    const char *name;
    int32_t arch, rope_style;
} ARCHES[] = {
    {"llama", ARCH_LLAMA, ROPE_PAIRS}, {"qwen2", ARCH_QWEN2, ROPE_HALVES}, {"qwen3", ARCH_QWEN3, ROPE_HALVES}};

/* Reads keys of one architecture until the first error; `status` keeps it. */
typedef struct reader {
    const gguf *g;
    const char *arch;
    int32_t status;
    char key[96];
} reader;

static const char *name_key(reader *r, const char *rest) {
    snprintf(r->key, sizeof r->key, "%s.%s", r->arch, rest);
    return r->key;
}

/* An integer of lo..hi; absent: `other`, or an error where that is -1. */
static int32_t read_int(reader *r, const char *rest, int64_t lo, int64_t hi, int64_t other) {
    uint64_t value = 0;
    if (r->status)
        return 0;
    int32_t found = gguf_get_u64(r->g, name_key(r, rest), &value);
    if (found < 0) {
        r->status = found;
    } else if (found == 0) {
        if (other < 0)
            r->status = fail(MILAD_E_FORMAT, "%s: key '%s' is missing", gguf_path(r->g), r->key);
        return (int32_t)other;
    } else if (value > INT64_MAX || (int64_t)value < lo || (int64_t)value > hi) {
        r->status = fail(MILAD_E_FORMAT, "%s: key '%s' is %llu, not %lld to %lld", gguf_path(r->g), r->key,
                         (unsigned long long)value, (long long)lo, (long long)hi);
    }
    return (int32_t)value;
}

/* A number of lo..hi; absent: `other`, or an error where that is NaN. */
static double read_number(reader *r, const char *rest, double lo, double hi, double other) {
    double value = other;
    if (r->status)
        return 1;
    int32_t found = gguf_get_f64(r->g, name_key(r, rest), &value);
    if (found < 0)
        r->status = found;
    else if (found == 0 && isnan(other))
        r->status = fail(MILAD_E_FORMAT, "%s: key '%s' is missing", gguf_path(r->g), r->key);
    else if (found && !(value >= lo && value <= hi))
        r->status = fail(MILAD_E_FORMAT, "%s: key '%s' is %g, not %g to %g", gguf_path(r->g), r->key, value, lo, hi);
    return value;
}

static int equals(gguf_str s, const char *text) {
    return s.n_bytes == strlen(text) && memcmp(s.data, text, s.n_bytes) == 0;
}

static int32_t read_arch(const gguf *g, hparams *hp, const char **name) {
    gguf_str kind, arch;
    int32_t found = gguf_get_str(g, "general.type", &kind);
    if (found < 0)
        return found;
    if (found && !equals(kind, "model"))
        return fail(MILAD_E_UNSUPPORTED, "%s: holds a part of a model (key 'general.type' is '%.*s'), not a model",
                    gguf_path(g), (int)(kind.n_bytes < 32 ? kind.n_bytes : 32), kind.data);
    found = gguf_get_str(g, "general.architecture", &arch);
    if (found < 0)
        return found;
    if (!found)
        return fail(MILAD_E_FORMAT, "%s: key 'general.architecture' is missing", gguf_path(g));
    for (size_t i = 0; i < sizeof ARCHES / sizeof *ARCHES; i++)
        if (equals(arch, ARCHES[i].name)) {
            hp->arch = ARCHES[i].arch;
            hp->rope_style = ARCHES[i].rope_style;
            *name = ARCHES[i].name;
            return 0;
        }
    return fail(MILAD_E_UNSUPPORTED, "%s: architecture '%.*s' is not supported (llama, qwen2 and qwen3 are)", gguf_path(g),
                (int)(arch.n_bytes < 64 ? arch.n_bytes : 64), arch.data);
}

/* Trained with a window of attention, run with all of it: equal only while a sequence fits the window. */
static void limit_to_window(reader *r, hparams *hp) {
    int32_t window = read_int(r, "attention.sliding_window", 0, INT32_MAX, 0);
    if (r->status || window == 0 || window >= hp->n_ctx_train)
        return;
    log_line('W', "%s: sliding window attention is not supported: the context is limited to the window, %d tokens instead "
             "of %d", gguf_path(r->g), window, hp->n_ctx_train);
    hp->n_ctx_train = window;
}

static int32_t read_heads(reader *r, hparams *hp) {
    hp->n_head = read_int(r, "attention.head_count", 1, MAX_HEADS, -1);
    hp->n_head_kv = read_int(r, "attention.head_count_kv", 1, MAX_HEADS, hp->n_head);
    if (r->status)
        return r->status;
    if (hp->n_head % hp->n_head_kv)
        return fail(MILAD_E_FORMAT, "%s: key '%s.attention.head_count_kv' is %d, which does not divide head_count %d",
                    gguf_path(r->g), r->arch, hp->n_head_kv, hp->n_head);
    int32_t even = hp->n_embd % hp->n_head == 0 ? hp->n_embd / hp->n_head : -1;
    hp->head_dim = read_int(r, "attention.key_length", 1, MAX_HEAD_DIM, even);
    int32_t value_length = read_int(r, "attention.value_length", 1, MAX_HEAD_DIM, hp->head_dim);
    if (r->status)
        return r->status;
    if (hp->head_dim > MAX_HEAD_DIM)
        return fail(MILAD_E_FORMAT, "%s: heads of %d values (embedding_length / head_count), more than %d", gguf_path(r->g),
                    hp->head_dim, MAX_HEAD_DIM);
    if (value_length != hp->head_dim)
        return fail(MILAD_E_UNSUPPORTED, "%s: key '%s.attention.value_length' is %d, another than key_length %d",
                    gguf_path(r->g), r->arch, value_length, hp->head_dim);
    hp->n_rot = read_int(r, "rope.dimension_count", 2, hp->head_dim, hp->head_dim);
    if (!r->status && hp->n_rot % 2)
        return fail(MILAD_E_FORMAT, "%s: key '%s.rope.dimension_count' is %d, an odd number", gguf_path(r->g), r->arch,
                    hp->n_rot);
    hp->attn_scale = (float)(1 / sqrt(hp->head_dim));
    return r->status;
}

int32_t hparams_read(const gguf *g, hparams *hp) {
    reader r = {.g = g};
    memset(hp, 0, sizeof *hp);
    int32_t status = read_arch(g, hp, &r.arch);
    if (status)
        return status;
    hp->n_layer = read_int(&r, "block_count", 1, MAX_LAYERS, -1);
    hp->n_ctx_train = read_int(&r, "context_length", 1, INT32_MAX, -1);
    hp->n_embd = read_int(&r, "embedding_length", 1, MAX_WIDTH, -1);
    hp->n_ff = read_int(&r, "feed_forward_length", 1, MAX_WIDTH, -1);
    hp->norm_eps = (float)read_number(&r, "attention.layer_norm_rms_epsilon", 0, 1, NAN);
    hp->rope_base = (float)read_number(&r, "rope.freq_base", 1, 1e12, 10000);
    int32_t n_experts = read_int(&r, "expert_count", 0, INT32_MAX, 0);
    if (r.status || read_heads(&r, hp))
        return r.status ? r.status : MILAD_E_FORMAT;
    if (n_experts > 0)
        return fail(MILAD_E_UNSUPPORTED, "%s: key '%s.expert_count' is %d: mixtures of experts are not supported",
                    gguf_path(g), r.arch, n_experts);
    limit_to_window(&r, hp);
    return r.status;
}

/* Llama 3.1's scaling: long waves are slowed by `factor`, short ones kept, those between mixed.
 * Source: transformers, modeling_rope_utils.py, _compute_llama3_parameters. */
static void scale_llama3(reader *r, const hparams *hp, double factor, double n_ctx_original, double *inv_freq) {
    double low = read_number(r, "rope.scaling.low_freq_factor", 1e-3, 1e3, 1);
    double high = read_number(r, "rope.scaling.high_freq_factor", 1e-3, 1e3, 4);
    if (!r->status && !(high > low))
        r->status = fail(MILAD_E_FORMAT, "%s: key '%s.rope.scaling.high_freq_factor' is %g, not above low_freq_factor %g",
                         gguf_path(r->g), r->arch, high, low);
    for (int32_t i = 0; !r->status && i < hp->n_rot / 2; i++) {
        double wavelength = 2 * M_PI / inv_freq[i];
        double smooth = (n_ctx_original / wavelength - low) / (high - low);
        smooth = smooth < 0 ? 0 : smooth > 1 ? 1 : smooth;
        inv_freq[i] = (1 - smooth) * inv_freq[i] / factor + smooth * inv_freq[i];
    }
}

/* The dimension whose wave turns n_turns times over the original context. */
static double yarn_dimension(const hparams *hp, double n_ctx_original, double n_turns) {
    return hp->n_rot * log(n_ctx_original / (n_turns * 2 * M_PI)) / (2 * log(hp->rope_base));
}

static double yarn_mscale(double factor, double weight) { return factor <= 1 ? 1 : 0.1 * weight * log(factor) + 1; }

/* YaRN (arXiv 2309.00071): a ramp from kept to slowed frequencies, and sin and cos scaled. As transformers'
 * _compute_yarn_parameters and llama.cpp's rope_yarn and llama-context.cpp (yarn_attn_factor) compute it. */
static void scale_yarn(reader *r, hparams *hp, double factor, double n_ctx_original, double *inv_freq) {
    double beta_fast = read_number(r, "rope.scaling.yarn_beta_fast", 1e-3, 1e6, 32);
    double beta_slow = read_number(r, "rope.scaling.yarn_beta_slow", 1e-3, 1e6, 1);
    double weight = read_number(r, "rope.scaling.yarn_ext_factor", 0, 1, 1);
    double log_multiplier = read_number(r, "rope.scaling.yarn_log_multiplier", 0, 100, 0);
    if (!r->status && !(hp->rope_base > 1))
        r->status = fail(MILAD_E_FORMAT, "%s: key '%s.rope.freq_base' is %g: YaRN needs more than 1", gguf_path(r->g),
                         r->arch, hp->rope_base);
    if (r->status)
        return;
    double low = fmax(0, floor(yarn_dimension(hp, n_ctx_original, beta_fast)));
    double high = fmin(hp->n_rot - 1, ceil(yarn_dimension(hp, n_ctx_original, beta_slow)));
    for (int32_t i = 0; i < hp->n_rot / 2; i++) {
        double ramp = (i - low) / fmax(0.001, high - low);
        double keep = weight * (1 - (ramp < 0 ? 0 : ramp > 1 ? 1 : ramp));
        inv_freq[i] = inv_freq[i] / factor * (1 - keep) + inv_freq[i] * keep;
    }
    if (weight > 0)
        hp->rope_mscale *= (float)(yarn_mscale(factor, 1) / (log_multiplier > 0 ? yarn_mscale(factor, log_multiplier) : 1));
}

/* The file's own divisor of each frequency: how converted Llama 3.x files carry their scaling. 1 found, 0 absent. */
static int32_t apply_freqs_tensor(const gguf *g, const hparams *hp, double *inv_freq) {
    const gguf_tensor *t = gguf_find_tensor(g, "rope_freqs.weight");
    if (!t || !t->data)
        return 0;
    uint64_t n = (uint64_t)hp->n_rot / 2;
    if (t->type != MAT_F32 || t->dims[0] != n || t->n_bytes != 4 * n)
        return fail(MILAD_E_FORMAT, "%s: tensor 'rope_freqs.weight' is not F32 of %llu values", gguf_path(g),
                    (unsigned long long)n);
    for (uint64_t i = 0; i < n; i++) {
        float factor;
        memcpy(&factor, t->data + 4 * i, 4);
        if (!(factor > 0) || isinf(factor))
            return fail(MILAD_E_FORMAT, "%s: tensor 'rope_freqs.weight' holds %g, which is no divisor", gguf_path(g), factor);
        inv_freq[i] /= factor;
    }
    return 1;
}

static void scale_rope(reader *r, hparams *hp, int has_tensor, double *inv_freq) {
    gguf_str type = {"", 0};
    int32_t found = gguf_get_str(r->g, name_key(r, "rope.scaling.type"), &type);
    if (found < 0) {
        r->status = found;
        return;
    }
    double linear = read_number(r, "rope.scale_linear", 0, 1e6, 0); /* the key before rope.scaling.factor */
    double factor = read_number(r, "rope.scaling.factor", 0, 1e6, linear);
    double n_ctx_original = read_int(r, "rope.scaling.original_context_length", 1, INT32_MAX, hp->n_ctx_train);
    double attn_factor = read_number(r, "rope.scaling.attn_factor", 1e-3, 1e3, 1);
    if (r->status)
        return;
    hp->rope_mscale = (float)attn_factor;
    if (factor == 0) /* as llama.cpp: no scaling */
        factor = 1;
    if (equals(type, "none"))
        return;
    if (equals(type, "yarn")) {
        scale_yarn(r, hp, factor, n_ctx_original, inv_freq);
    } else if (equals(type, "llama3")) {
        if (!has_tensor)
            scale_llama3(r, hp, factor, n_ctx_original, inv_freq);
    } else if (!found || equals(type, "linear")) {
        for (int32_t i = 0; i < hp->n_rot / 2; i++)
            inv_freq[i] /= factor;
    } else {
        r->status = fail(MILAD_E_UNSUPPORTED, "%s: key '%s.rope.scaling.type' is '%.*s': this RoPE scaling is not supported",
                         gguf_path(r->g), r->arch, (int)(type.n_bytes < 32 ? type.n_bytes : 32), type.data);
    }
}

int32_t hparams_read_rope(const gguf *g, hparams *hp) {
    reader r = {.g = g, .arch = ARCHES[hp->arch].name};
    size_t n = (size_t)hp->n_rot / 2;
    hp->rope_mscale = 1;
    hp->rope_inv_freq = calloc(n, sizeof *hp->rope_inv_freq);
    double *inv_freq = calloc(n, sizeof *inv_freq);
    if (!hp->rope_inv_freq || !inv_freq) {
        free(inv_freq);
        return fail(MILAD_E_MEMORY, "out of memory");
    }
    for (size_t i = 0; i < n; i++)
        inv_freq[i] = pow(hp->rope_base, -2.0 * (double)i / hp->n_rot);
    int32_t found = apply_freqs_tensor(g, hp, inv_freq);
    if (found >= 0)
        scale_rope(&r, hp, found, inv_freq);
    for (size_t i = 0; i < n; i++)
        hp->rope_inv_freq[i] = (float)inv_freq[i];
    free(inv_freq);
    if (found < 0 || r.status)
        return found < 0 ? found : r.status;
    for (size_t i = 0; i < n; i++)
        if (!isfinite(hp->rope_inv_freq[i]))
            return fail(MILAD_E_FORMAT, "%s: the RoPE scaling gives a frequency that is not finite", gguf_path(g));
    return 0;
}

void hparams_close(hparams *hp) {
    free(hp->rope_inv_freq);
    hp->rope_inv_freq = NULL;
}

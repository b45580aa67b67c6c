/* model.h: a model file opened: hyperparameters, vocabulary and weights, checked and packed. */
#ifndef MILAD_MODEL_H
#define MILAD_MODEL_H

#include <stddef.h>
#include <stdint.h>

#include "../include/milad.h"
#include "gguf.h"
#include "mat.h"
#include "vocab.h"

enum arch { ARCH_LLAMA, ARCH_QWEN2, ARCH_QWEN3 };
enum rope_style { ROPE_PAIRS /* llama: (2i, 2i+1) */, ROPE_HALVES /* qwen, neox: (i, i + n/2) */ };

typedef struct hparams {
    int32_t arch;
    int32_t n_layer, n_embd, n_head, n_head_kv, head_dim, n_ff, n_vocab, n_ctx_train;
    int32_t rope_style, n_rot;  /* n_rot <= head_dim, even */
    float rope_base;
    float norm_eps;
    float attn_scale;           /* 1 / sqrt(head_dim) */
    float rope_mscale;          /* factor on sin and cos (YaRN), 1 otherwise */
    float *rope_inv_freq;       /* [n_rot / 2], scaling (linear, llama3, YaRN, rope_freqs tensor) already applied */
} hparams;

typedef struct layer {
    float *attn_norm;                  /* [n_embd] */
    mat wq, wk, wv;                    /* n_embd -> n_head * head_dim, n_head_kv * head_dim (twice) */
    float *bq, *bk, *bv;               /* NULL or biases */
    float *q_norm, *k_norm;            /* NULL or [head_dim] (qwen3) */
    mat wo;                            /* n_head * head_dim -> n_embd */
    float *bo;                         /* NULL or [n_embd] */
    float *ffn_norm;                   /* [n_embd] */
    mat gate, up, down;                /* n_embd -> n_ff (twice), n_ff -> n_embd */
} layer;

struct milad_model {
    hparams hp;
    vocab *vocab;
    gguf *file;                        /* metadata stays mapped; tensor pages are dropped after packing */
    layer *layers;                     /* NULL when vocabulary-only */
    mat token_embd;                    /* rows are tokens */
    mat output;                        /* token_embd itself when tied */
    float *output_norm;                /* [n_embd] */
    void *weights;                     /* one arena of panels; NULL: all matrices lie in the mapping */
    size_t n_weight_bytes;
    float *vectors;                    /* one arena of norms and biases */
    milad_model_info info;
};

/* The parts of milad_model_open() (weights.c), in this order. They set the thread's error. */
int32_t model_bind(milad_model *m);    /* finds and checks every tensor; matrices point into the mapping */
/* Into panels, opening the vocabulary and taking the fingerprint beside it; or locks the mapping. */
int32_t model_pack(milad_model *m, const milad_model_params *params);
void model_free_weights(milad_model *m);
/* Of the tensors and the metadata that a KV cache's content depends on. Reads a few bytes of each tensor. */
int32_t model_fingerprint(const gguf *g, uint64_t *out);

#endif

/* step_fuzz.c: a context of a small model survives any batch: it is computed or refused with MILAD_E_ARGUMENT, and whatever came
 * before, a proper batch afterwards gives the same token as ever. The input decides what is odd about a valid batch. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "milad.h"
#include "model.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

enum { EMBD = 32, D = 16, FF = 32, VOCAB = 40, BLOCKS = 6, ROWS = 12 };

typedef struct bytes { const uint8_t *at; size_t left; } bytes;

static uint8_t next(bytes *b) { return b->left ? (b->left--, *b->at++) : 0; }

/* `usual`, but one time in 128 a number at or beyond the edges of 0..limit-1: about half of all batches are valid. */
static int32_t maybe(bytes *b, int32_t usual, int32_t limit) {
    const int32_t odd[] = {INT32_MIN, INT32_MAX, -1, -2, 1 << 20, limit, limit - 1, 0};
    return !b->left || next(b) > 1 ? usual : odd[next(b) % 8];
}

static mat make(int32_t n_in, int32_t n_out, uint32_t *seed) {
    float *x = malloc((size_t)n_in * (size_t)n_out * 4);
    for (int32_t i = 0; i < n_in * n_out; i++) {
        *seed = *seed * 1664525 + 1013904223;
        x[i] = (float)(int32_t)*seed * 0x1p-33f;
    }
    return (mat){.type = MAT_F32, .layout = MAT_ROWS, .n_in = n_in, .n_out = n_out, .data = x,
                 .n_bytes = (size_t)n_in * (size_t)n_out * 4};
}

static milad_context *context_get(void) {
    static float ones[EMBD], inv_freq[D / 2];
    static layer l;
    static milad_model m;
    static milad_context *c;
    if (c) return c;
    uint32_t seed = 1;
    for (int32_t i = 0; i < EMBD; i++) ones[i] = 1;
    for (int32_t i = 0; i < D / 2; i++) inv_freq[i] = 1 / (float)(i + 1);
    m.hp = (hparams){.n_layer = 1, .n_embd = EMBD, .n_head = 2, .n_head_kv = 1, .head_dim = D, .n_ff = FF, .n_vocab = VOCAB,
                     .n_rot = D, .norm_eps = 1e-5f, .attn_scale = 0.25f, .rope_mscale = 1, .rope_inv_freq = inv_freq};
    l.attn_norm = l.ffn_norm = m.output_norm = ones;
    l.wq = make(EMBD, 2 * D, &seed);
    l.wk = make(EMBD, D, &seed);
    l.wv = make(EMBD, D, &seed);
    l.wo = make(2 * D, EMBD, &seed);
    l.gate = make(EMBD, FF, &seed);
    l.up = make(EMBD, FF, &seed);
    l.down = make(FF, EMBD, &seed);
    m.layers = &l;
    m.output = m.token_embd = make(EMBD, VOCAB, &seed);
    milad_context_params p = {.size = sizeof p, .n_blocks = BLOCKS, .n_threads = 1, .max_rows = ROWS};
    if (milad_context_open(&m, &p, &c) < 0) abort();
    return c;
}

static int32_t proper_token(milad_context *c) {
    static const int32_t block = 5;
    milad_sequence sequence = {.blocks = &block, .n_blocks = 1};
    milad_row rows[3] = {{.token = 3, .output = -1}, {.token = 4, .position = 1, .output = -1}, {.token = 5, .position = 2}};
    milad_sampler sampler = {.top_p = 1, .repeat_penalty = 1, .n_top = -1, .forced = -1};
    milad_output output = {.token = -7};
    milad_batch b = {.size = sizeof b, .n_rows = 3, .rows = rows, .sequences = &sequence, .n_sequences = 1, .n_outputs = 1,
                     .samplers = &sampler, .outputs = &output};
    if (milad_step(c, &b) < 0 || output.token < 0) abort();
    return output.token;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes) {
    static int32_t expected = -1;
    milad_context *c = context_get();
    if (expected < 0) expected = proper_token(c);
    bytes in = {data, n_bytes};
    int32_t tables[ROWS][BLOCKS], n_outputs = 0;
    milad_sequence sequences[ROWS] = {{0}};
    milad_row rows[ROWS] = {{0}};
    milad_sampler samplers[ROWS] = {{0}};
    milad_output outputs[ROWS];
    float logits[ROWS * VOCAB];
    const int32_t n_rows = 1 + next(&in) % ROWS, n_sequences = 1 + next(&in) % 3, shared = next(&in) % 2;
    int32_t position = next(&in) % 20 + 32 * shared;
    for (int32_t s = 0; s < ROWS; s++) { /* two blocks each, the first everyone's or not */
        const int32_t own[BLOCKS] = {shared ? 0 : 2 * s, 2 * s + 1, 0, 1, 2, 3};
        for (int32_t i = 0; i < BLOCKS; i++) tables[s][i] = maybe(&in, own[i] % BLOCKS, BLOCKS);
        sequences[s] = (milad_sequence){.blocks = tables[s], .n_blocks = maybe(&in, 2, BLOCKS)};
    }
    for (int32_t r = 0; r < ROWS; r++, position = (int32_t)((uint32_t)position + 1)) {
        const int32_t wanted = r < n_rows && next(&in) % 3 == 0;
        position = maybe(&in, position, 32 * BLOCKS);
        rows[r] = (milad_row){.token = maybe(&in, r, VOCAB), .position = position, .sequence = maybe(&in, 0, n_sequences),
                              .output = maybe(&in, wanted ? n_outputs : -1, ROWS)};
        n_outputs += wanted;
    }
    for (int32_t i = 0; i < ROWS; i++) {
        static const float odd[] = {0, 1, 0.5f, -1, 1e30f, NAN, INFINITY, 2};
        const int32_t usual = next(&in) % 16 != 0;
        samplers[i] = (milad_sampler){.temperature = odd[next(&in) % (usual ? 3 : 8)], .top_p = usual ? 1 : odd[next(&in) % 8],
                                      .min_p = usual ? 0 : odd[next(&in) % 8], .repeat_penalty = usual ? 1 : odd[next(&in) % 8],
                                      .top_k = maybe(&in, 3, VOCAB), .n_top = maybe(&in, i % 5, 21), .forced = maybe(&in, -1, VOCAB),
                                      .seed = next(&in)};
    }
    milad_batch b = {.size = sizeof b, .n_rows = maybe(&in, n_rows, ROWS + 1), .rows = rows, .sequences = sequences,
                     .n_sequences = maybe(&in, n_sequences, ROWS + 1), .n_outputs = maybe(&in, n_outputs, ROWS), .samplers = samplers,
                     .outputs = outputs, .logits = next(&in) % 2 ? logits : NULL};
    int32_t status = milad_step(c, &b);
    if (status != MILAD_OK && status != MILAD_E_ARGUMENT) abort();
    if (status == MILAD_E_ARGUMENT && !*milad_last_error()) abort();
    if (proper_token(c) != expected) abort();
    return 0;
}

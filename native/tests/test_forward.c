/* The whole step on models built in memory: F32 weights against the same model in double precision (../src/ref), and batches that
 * no caller should send. */
#include <math.h>

#include "milad.h"
#include "model.h"
#include "ref/ref.h"
#include "test.h"

enum { EMBD = 48, HEADS = 4, HEADS_KV = 2, D = 20, FF = 80, VOCAB = 50, LAYERS = 3, TOKENS = 70 };

static float *random_floats(uint64_t *seed, int64_t n, float size, float mean) {
    float *x = malloc((size_t)n * 4);
    for (int64_t i = 0; i < n; i++)
        x[i] = mean + test_uniform(seed) * size;
    return x;
}

static mat random_mat(uint64_t *seed, int32_t n_in, int32_t n_out) {
    mat m = {.type = MAT_F32, .layout = MAT_ROWS, .n_in = n_in, .n_out = n_out, .n_bytes = (size_t)n_in * (size_t)n_out * 4};
    m.data = random_floats(seed, (int64_t)n_in * n_out, 1.7f / sqrtf((float)n_in), 0);
    return m;
}

static void model_make(milad_model *m, int32_t style, int32_t n_rot, int32_t extras, uint64_t seed) {
    memset(m, 0, sizeof *m);
    m->hp = (hparams){.n_layer = LAYERS, .n_embd = EMBD, .n_head = HEADS, .n_head_kv = HEADS_KV, .head_dim = D, .n_ff = FF,
                      .n_vocab = VOCAB, .n_ctx_train = 256, .rope_style = style, .n_rot = n_rot, .norm_eps = 1e-5f,
                      .attn_scale = (float)(1 / sqrt(D)), .rope_mscale = extras ? 1.25f : 1.0f};
    m->hp.rope_inv_freq = malloc((size_t)n_rot * 2);
    for (int32_t i = 0; i < n_rot / 2; i++)
        m->hp.rope_inv_freq[i] = (float)pow(10000, -2.0 * i / n_rot);
    m->token_embd = random_mat(&seed, EMBD, VOCAB);
    m->output = extras ? random_mat(&seed, EMBD, VOCAB) : m->token_embd;
    m->output_norm = random_floats(&seed, EMBD, 0.3f, 1);
    m->layers = calloc(LAYERS, sizeof *m->layers);
    for (layer *l = m->layers; l < m->layers + LAYERS; l++) {
        l->attn_norm = random_floats(&seed, EMBD, 0.3f, 1);
        l->ffn_norm = random_floats(&seed, EMBD, 0.3f, 1);
        l->wq = random_mat(&seed, EMBD, HEADS * D);
        l->wk = random_mat(&seed, EMBD, HEADS_KV * D);
        l->wv = random_mat(&seed, EMBD, HEADS_KV * D);
        l->wo = random_mat(&seed, HEADS * D, EMBD);
        l->gate = random_mat(&seed, EMBD, FF);
        l->up = random_mat(&seed, EMBD, FF);
        l->down = random_mat(&seed, FF, EMBD);
        if (!extras)
            continue;
        l->bq = random_floats(&seed, HEADS * D, 0.5f, 0);
        l->bk = random_floats(&seed, HEADS_KV * D, 0.5f, 0);
        l->bv = random_floats(&seed, HEADS_KV * D, 0.5f, 0);
        l->bo = random_floats(&seed, EMBD, 0.5f, 0);
        l->q_norm = random_floats(&seed, D, 0.3f, 1);
        l->k_norm = random_floats(&seed, D, 0.3f, 1);
    }
}

static void model_free(milad_model *m) {
    if (m->output.data != m->token_embd.data)
        free((void *)m->output.data);
    free((void *)m->token_embd.data);
    free(m->output_norm);
    free(m->hp.rope_inv_freq);
    for (layer *l = m->layers; l < m->layers + LAYERS; l++) {
        const void *all[] = {l->attn_norm, l->ffn_norm, l->wq.data, l->wk.data, l->wv.data, l->wo.data, l->gate.data, l->up.data,
                             l->down.data, l->bq, l->bk, l->bv, l->bo, l->q_norm, l->k_norm};
        for (size_t i = 0; i < sizeof all / sizeof *all; i++)
            free((void *)all[i]);
    }
    free(m->layers);
}

static void ref_mul(double *out, const mat *w, const double *x, const float *bias) {
    for (int64_t o = 0; o < w->n_out; o++) {
        out[o] = bias ? bias[o] : 0;
        for (int64_t i = 0; i < w->n_in; i++)
            out[o] += ((const float *)w->data)[o * w->n_in + i] * x[i];
    }
}

static void ref_heads(const hparams *h, double *v, int32_t n_heads, const float *norm, int32_t position) {
    for (int32_t i = 0; i < n_heads; i++, v += D) {
        if (norm)
            ref_rms_norm(v, v, norm, D, h->norm_eps);
        ref_rope(v, D, h->n_rot, h->rope_style, position, h->rope_inv_freq, h->rope_mscale);
    }
}

/* Logits of every position, [TOKENS][VOCAB], one token after another. */
static void ref_forward(const milad_model *m, const int32_t *tokens, double *logits) {
    static double k[LAYERS][TOKENS][HEADS_KV * D], v[LAYERS][TOKENS][HEADS_KV * D];
    for (int32_t t = 0; t < TOKENS; t++) {
        double x[EMBD], n[EMBD], q[HEADS * D], att[HEADS * D], sum[EMBD], gate[FF], up[FF];
        for (int32_t i = 0; i < EMBD; i++)
            x[i] = ((const float *)m->token_embd.data)[tokens[t] * EMBD + i];
        for (int32_t i = 0; i < LAYERS; i++) {
            const layer *l = &m->layers[i];
            ref_rms_norm(n, x, l->attn_norm, EMBD, m->hp.norm_eps);
            ref_mul(q, &l->wq, n, l->bq);
            ref_mul(k[i][t], &l->wk, n, l->bk);
            ref_mul(v[i][t], &l->wv, n, l->bv);
            ref_heads(&m->hp, q, HEADS, l->q_norm, t);
            ref_heads(&m->hp, k[i][t], HEADS_KV, l->k_norm, t);
            for (int32_t h = 0; h < HEADS; h++) {
                const int32_t at = h / (HEADS / HEADS_KV) * D;
                ref_attention(att + h * D, q + h * D, &k[i][0][at], &v[i][0][at], HEADS_KV * D, t + 1, D, m->hp.attn_scale);
            }
            ref_mul(sum, &l->wo, att, l->bo);
            for (int32_t e = 0; e < EMBD; e++)
                x[e] += sum[e];
            ref_rms_norm(n, x, l->ffn_norm, EMBD, m->hp.norm_eps);
            ref_mul(gate, &l->gate, n, NULL);
            ref_mul(up, &l->up, n, NULL);
            ref_swiglu(gate, gate, up, FF);
            ref_mul(sum, &l->down, gate, NULL);
            for (int32_t e = 0; e < EMBD; e++)
                x[e] += sum[e];
        }
        ref_rms_norm(n, x, m->output_norm, EMBD, m->hp.norm_eps);
        ref_mul(logits + t * VOCAB, &m->output, n, NULL);
    }
}

static milad_context *context_of(milad_model *m, int32_t n_threads, int32_t kv_type) {
    milad_context_params p = {.size = sizeof p, .n_blocks = 4, .n_threads = n_threads, .max_rows = TOKENS, .kv_type = kv_type};
    milad_context *c = NULL;
    CHECK_INT(milad_context_open(m, &p, &c), 0);
    return c;
}

static void test_reference(int32_t style, int32_t n_rot, int32_t extras) {
    static const int32_t blocks[] = {2, 0, 3};
    static double want[TOKENS * VOCAB];
    static float got[TOKENS * VOCAB];
    int32_t tokens[TOKENS];
    uint64_t seed = 9;
    milad_model m;
    model_make(&m, style, n_rot, extras, 4);
    milad_row rows[TOKENS];
    milad_sampler samplers[TOKENS];
    milad_output outputs[TOKENS];
    for (int32_t t = 0; t < TOKENS; t++) {
        tokens[t] = (int32_t)(test_random(&seed) % VOCAB);
        rows[t] = (milad_row){.token = tokens[t], .position = t, .output = TOKENS - 1 - t};
        samplers[t] = (milad_sampler){.top_p = 1, .repeat_penalty = 1, .n_top = 2, .forced = -1};
    }
    ref_forward(&m, tokens, want);
    for (int32_t kv_type = 0; kv_type < 4; kv_type++) {
        milad_context *c = context_of(&m, 2, kv_type);
        milad_sequence sequence = {.blocks = blocks, .n_blocks = 3};
        milad_batch b = {.size = sizeof b, .n_rows = TOKENS, .rows = rows, .sequences = &sequence, .n_sequences = 1,
                         .n_outputs = TOKENS, .samplers = samplers, .outputs = outputs, .logits = got};
        CHECK_INT(milad_step(c, &b), 0);
        double worst = 0;
        for (int32_t t = 0; t < TOKENS; t++) {
            const float *row = got + (TOKENS - 1 - t) * VOCAB;
            double nmse = ref_nmse(row, want + t * VOCAB, VOCAB);
            worst = !(nmse <= worst) ? nmse : worst;
            int32_t best = 0;
            for (int32_t i = 1; i < VOCAB; i++)
                best = row[i] > row[best] ? i : best;
            CHECK_INT(outputs[TOKENS - 1 - t].token, best);
            CHECK_INT(outputs[TOKENS - 1 - t].top_ids[0], best);
        }
        static const double bounds[] = {1e-6, 2e-3, 1e-11, 1e-4}; /* F16, Q8_0, F32, BF16 keys and values */
        CHECK(worst <= bounds[kv_type]);
        milad_context_close(c);
    }
    model_free(&m);
}

static void test_refuses(void) {
    milad_model m;
    model_make(&m, ROPE_PAIRS, D, 0, 5);
    milad_context *c = context_of(&m, 1, 0), *none = NULL;
    const int32_t block = 1;
    milad_row row = {.token = 1, .output = 0};
    milad_sampler sampler = {.top_p = 1, .repeat_penalty = 1, .n_top = -1, .forced = -1}, bad = sampler;
    milad_output output;
    milad_sequence sequence = {.blocks = &block, .n_blocks = 1}, no_table = {.n_blocks = 1};
    const milad_batch good = {.size = sizeof good, .n_rows = 1, .rows = &row, .sequences = &sequence, .n_sequences = 1, .n_outputs = 1,
                              .samplers = &sampler, .outputs = &output};
    bad.temperature = NAN;
    milad_batch wrong[9];
    for (int32_t i = 0; i < 9; i++)
        wrong[i] = good;
    wrong[0].size--;
    wrong[1].rows = NULL;
    wrong[2].sequences = NULL;
    wrong[3].samplers = NULL;
    wrong[4].outputs = NULL;
    wrong[5].n_rows = INT32_MIN;
    wrong[6].n_outputs = -1;
    wrong[7].sequences = &no_table;
    wrong[8].samplers = &bad;
    for (int32_t i = 0; i < 9; i++) {
        CHECK_INT(milad_step(c, &wrong[i]), MILAD_E_ARGUMENT);
        CHECK(*milad_last_error());
    }
    CHECK_INT(milad_step(c, NULL), MILAD_E_ARGUMENT);
    CHECK_INT(milad_step(NULL, &good), MILAD_E_ARGUMENT);
    CHECK_INT(milad_step(c, &good), 0);
    milad_context_params p = {.size = sizeof p, .n_blocks = 1, .max_rows = 1, .n_threads = -1};
    CHECK_INT(milad_context_open(&m, &p, &none), MILAD_E_ARGUMENT);
    p.n_threads = 1;
    p.flags = 1;
    CHECK_INT(milad_context_open(&m, &p, &none), MILAD_E_ARGUMENT);
    CHECK_INT(milad_context_open(NULL, &p, &none), MILAD_E_ARGUMENT);
    CHECK(!none);
    milad_context_close(NULL);
    milad_interrupt(NULL);
    milad_context_close(c);
    model_free(&m);
}

int main(void) {
    test_reference(ROPE_PAIRS, D, 0);
    test_reference(ROPE_HALVES, 12, 1);
    test_refuses();
    return test_done();
}

/* Hyperparameters and RoPE scaling, from metadata alone. The frequencies are what transformers 5.24
 * (modeling_rope_utils.py: _compute_llama3_parameters, _compute_yarn_parameters) gives in float32 for these settings. */
#include "gguf_writer.h"
#include "hparams.h"
#include "test.h"

static const float LLAMA32[] = {
    1.00000000e+00f, 6.63601220e-01f, 4.40366626e-01f, 2.92227805e-01f, 1.93922758e-01f, 1.28687382e-01f,
    8.53971019e-02f, 5.66696189e-02f, 3.76060307e-02f, 2.49554086e-02f, 1.65604409e-02f, 1.09895291e-02f,
    7.29266508e-03f, 4.83942125e-03f, 3.21144611e-03f, 1.29054801e-03f, 4.29556705e-04f, 9.70828623e-05f,
    1.94616387e-05f, 1.29147684e-05f, 8.57025589e-06f, 5.68723181e-06f, 3.77405445e-06f, 2.50446692e-06f,
    1.66196764e-06f, 1.10288363e-06f, 7.31874934e-07f, 4.85673127e-07f, 3.22293289e-07f, 2.13874230e-07f,
    1.41927202e-07f, 9.41830720e-08f};

static const float QWEN_YARN[] = {
    1.00000000e+00f, 8.05842221e-01f, 6.49381638e-01f, 5.23299098e-01f, 4.21696514e-01f, 3.39820832e-01f,
    2.73841977e-01f, 2.20673397e-01f, 1.77827939e-01f, 1.43301263e-01f, 1.15478203e-01f, 9.30572003e-02f,
    7.49894157e-02f, 6.04296438e-02f, 4.86967526e-02f, 3.92418988e-02f, 3.16227786e-02f, 2.54829675e-02f,
    2.05352493e-02f, 1.65481716e-02f, 1.33352149e-02f, 1.07460786e-02f, 8.65964312e-03f, 6.97830599e-03f,
    5.37532149e-03f, 4.13173810e-03f, 3.16842273e-03f, 2.42342241e-03f, 1.84827659e-03f, 1.40511245e-03f,
    1.06436107e-03f, 8.02959781e-04f, 6.02941145e-04f, 4.50323569e-04f, 3.34240554e-04f, 2.46258394e-04f,
    1.79841183e-04f, 1.29931490e-04f, 9.26230132e-05f, 6.49039430e-05f, 4.44569851e-05f, 3.58253128e-05f,
    2.88695519e-05f, 2.32642997e-05f, 1.87473561e-05f, 1.51074091e-05f, 1.21741887e-05f, 9.81047469e-06f,
    7.90569356e-06f, 6.37074254e-06f, 5.13381246e-06f, 4.13704265e-06f, 3.33380399e-06f, 2.68651957e-06f,
    2.16491071e-06f, 1.74457637e-06f, 1.40585337e-06f, 1.13289593e-06f, 9.12935377e-07f, 7.35681851e-07f,
    5.92843435e-07f, 4.77738240e-07f, 3.84981632e-07f, 3.10234441e-07f};

static const float SHORT_YARN[] = {
    1.00000000e+00f, 2.37170815e-01f, 4.99999970e-02f, 7.90569466e-03f, 2.49999994e-03f, 7.90569466e-04f,
    2.50000012e-04f, 7.90569466e-05f};

static const float BETAS_YARN[] = {
    1.00000000e+00f, 5.62341332e-01f, 3.16227764e-01f, 1.77827939e-01f, 1.00000001e-01f, 5.62341288e-02f,
    3.16227786e-02f, 1.46708051e-02f, 6.50000013e-03f, 2.67112115e-03f, 9.48683301e-04f, 2.22284929e-04f,
    1.25000006e-04f, 7.02926627e-05f, 3.95284733e-05f, 2.22284925e-05f};

/* Metadata under construction; the count goes into the header last. */
typedef struct file { writer w; uint64_t n; } file;

static void put_u32(file *f, const char *key, uint32_t v) { w_key(&f->w, key, GGUF_U32), w_u32(&f->w, v), f->n++; }
static void put_f32(file *f, const char *key, float v) { w_key(&f->w, key, GGUF_F32), w_f32(&f->w, v), f->n++; }
static void put_str(file *f, const char *key, const char *v) { w_key(&f->w, key, GGUF_STRING), w_str(&f->w, v), f->n++; }

static file begin(uint32_t head_dim, float base, uint32_t n_ctx) {
    file f = {0};
    w_header(&f.w, 0, 0);
    put_str(&f, "general.architecture", "llama");
    put_u32(&f, "llama.block_count", 2);
    put_u32(&f, "llama.context_length", n_ctx);
    put_u32(&f, "llama.embedding_length", 4 * head_dim);
    put_u32(&f, "llama.feed_forward_length", 96);
    put_u32(&f, "llama.attention.head_count", 4);
    put_f32(&f, "llama.attention.layer_norm_rms_epsilon", 1e-6f);
    put_f32(&f, "llama.rope.freq_base", base);
    return f;
}

/* Reads both halves; ends f. */
static int32_t read_all(file *f, hparams *hp) {
    gguf *g = NULL;
    memcpy(f->w.data + 16, &f->n, 8);
    int32_t status = gguf_open_memory(f->w.data, f->w.n, 0, &g);
    CHECK_INT(status, 0);
    memset(hp, 0, sizeof *hp);
    if (!status && !(status = hparams_read(g, hp)))
        status = hparams_read_rope(g, hp);
    gguf_close(g);
    free(f->w.data);
    return status;
}

static void check_frequencies(file *f, const float *want, int n, double mscale) {
    hparams hp;
    CHECK_INT(read_all(f, &hp), 0);
    CHECK_INT(hp.n_rot, 2 * n);
    CHECK_NEAR(hp.rope_mscale, mscale, 1e-6);
    for (int i = 0; i < n && hp.rope_inv_freq; i++)
        CHECK_NEAR(hp.rope_inv_freq[i] / want[i], 1, 2e-5); /* the source computes in float32 */
    hparams_close(&hp);
}

static void test_llama3(void) {
    file f = begin(64, 500000, 131072);
    put_str(&f, "llama.rope.scaling.type", "llama3");
    put_f32(&f, "llama.rope.scaling.factor", 32);
    put_f32(&f, "llama.rope.scaling.low_freq_factor", 1);
    put_f32(&f, "llama.rope.scaling.high_freq_factor", 4);
    put_u32(&f, "llama.rope.scaling.original_context_length", 8192);
    check_frequencies(&f, LLAMA32, 32, 1);
}

static void test_yarn(void) {
    file f = begin(128, 1000000, 131072);
    put_str(&f, "llama.rope.scaling.type", "yarn");
    put_f32(&f, "llama.rope.scaling.factor", 4);
    put_u32(&f, "llama.rope.scaling.original_context_length", 32768);
    check_frequencies(&f, QWEN_YARN, 64, 1.13862944);
    f = begin(16, 10000, 512);
    put_str(&f, "llama.rope.scaling.type", "yarn");
    put_f32(&f, "llama.rope.scaling.factor", 4);
    put_u32(&f, "llama.rope.scaling.original_context_length", 128);
    check_frequencies(&f, SHORT_YARN, 8, 1.13862944);
    f = begin(32, 10000, 32768);
    put_str(&f, "llama.rope.scaling.type", "yarn");
    put_f32(&f, "llama.rope.scaling.factor", 8);
    put_f32(&f, "llama.rope.scaling.yarn_beta_fast", 16);
    put_f32(&f, "llama.rope.scaling.yarn_beta_slow", 2);
    put_f32(&f, "llama.rope.scaling.yarn_log_multiplier", 0.8f);
    put_u32(&f, "llama.rope.scaling.original_context_length", 4096);
    check_frequencies(&f, BETAS_YARN, 16, 1.03565708);
}

/* Plain and linear: base^(-2i/n) over the factor, under the new and the old key. */
static void test_linear(void) {
    float plain[8], slow[8];
    for (int i = 0; i < 8; i++) {
        static const float powers[8] = {1, 0.316227766f, 0.1f, 0.0316227766f, 0.01f, 0.00316227766f, 0.001f, 0.000316227766f};
        plain[i] = powers[i];
        slow[i] = powers[i] / 4;
    }
    file f = begin(16, 10000, 512);
    check_frequencies(&f, plain, 8, 1);
    f = begin(16, 10000, 512);
    put_str(&f, "llama.rope.scaling.type", "none");
    put_f32(&f, "llama.rope.scaling.factor", 4);
    check_frequencies(&f, plain, 8, 1);
    f = begin(16, 10000, 512);
    put_str(&f, "llama.rope.scaling.type", "linear");
    put_f32(&f, "llama.rope.scaling.factor", 4);
    check_frequencies(&f, slow, 8, 1);
    f = begin(16, 10000, 512);
    put_f32(&f, "llama.rope.scale_linear", 4);
    check_frequencies(&f, slow, 8, 1);
}

/* rope_freqs.weight divides; with it the llama3 keys must not scale again. */
static void test_tensor(int with_keys) {
    file f = {0};
    float plain[2] = {1, 0.01f}, want[2] = {1, 0.0025f};
    w_header(&f.w, 1, 0);
    put_str(&f, "general.architecture", "llama");
    put_u32(&f, "llama.block_count", 1);
    put_u32(&f, "llama.context_length", 512);
    put_u32(&f, "llama.embedding_length", 16);
    put_u32(&f, "llama.feed_forward_length", 32);
    put_u32(&f, "llama.attention.head_count", 4);
    put_f32(&f, "llama.attention.layer_norm_rms_epsilon", 1e-6f);
    if (with_keys) {
        put_str(&f, "llama.rope.scaling.type", "llama3");
        put_f32(&f, "llama.rope.scaling.factor", 8);
    }
    w_tensor(&f.w, "rope_freqs.weight", 2, 1, MAT_F32, 0);
    w_pad(&f.w, 32);
    w_f32(&f.w, 1), w_f32(&f.w, 4);
    CHECK(plain[1] / want[1] > 3.9f);
    check_frequencies(&f, want, 2, 1);
}

static void test_defaults(void) {
    hparams hp;
    file f = begin(16, 10000, 512);
    CHECK_INT(read_all(&f, &hp), 0);
    CHECK(hp.arch == ARCH_LLAMA && hp.rope_style == ROPE_PAIRS);
    CHECK(hp.n_head_kv == 4 && hp.head_dim == 16 && hp.n_rot == 16 && hp.n_ctx_train == 512 && hp.n_ff == 96);
    CHECK_NEAR(hp.attn_scale, 0.25, 1e-9);
    CHECK_NEAR(hp.norm_eps, 1e-6, 1e-12);
    hparams_close(&hp);
    f = begin(16, 10000, 512);
    put_u32(&f, "llama.attention.key_length", 20);
    put_u32(&f, "llama.attention.value_length", 20);
    put_u32(&f, "llama.rope.dimension_count", 8);
    put_u32(&f, "llama.attention.head_count_kv", 2);
    CHECK_INT(read_all(&f, &hp), 0);
    CHECK(hp.n_head_kv == 2 && hp.head_dim == 20 && hp.n_rot == 8);
    hparams_close(&hp);
}

int main(void) {
    test_llama3();
    test_yarn();
    test_linear();
    test_tensor(0);
    test_tensor(1);
    test_defaults();
    return test_done();
}

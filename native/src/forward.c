/* forward.c: one pass over the layers for the rows of a step, written over the rooms mat, ops, attention and kv.
 *
 *   x = embed(token)
 *   each layer   n = norm(x); q, k, v = Wq n, Wk n, Wv n (+ bias); per-head norms (qwen3); rope; store k, v
 *                x += Wo attention(q); n = norm(x); x += Wdown (silu(Wgate n) * Wup n)
 *   logits = Wout norm(x), only for rows that want them
 *
 * Rows go through in chunks of at most MAX_CHUNK, so that scratch doesn't grow with the largest step; a chunk only attends to
 * itself and to what came before, and no sum spans rows, so chunks change no bit. After the last layer's keys and values are
 * stored, rows without an output are dropped.
 */
#include "forward.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "attention.h"
#include "error.h"
#include "sample.h"

enum { MAX_CHUNK = 512 };
enum { MAX_LOGIT_ROWS = 32 };    /* rows whose logits exist at once */
enum { FEW_ROWS = 16 };          /* up to so many, a step waits for memory */
enum { SERIAL_FLOATS = 4096 };   /* row-wise stages of fewer floats cost less than waking a worker */

struct forward {
    const milad_model *model;
    const hparams *hp;
    const ops *ops;
    pool *pool;
    kv *kv;
    attention *attention;
    const atomic_int *interrupt;
    int32_t n_chunk, n_logit_rows;
    uint8_t *memory;
    size_t n_bytes;
    float *x, *norm, *sum;           /* [n_chunk][n_embd]: residual stream, normed, a product to be added */
    float *q, *k, *v, *att;          /* [n_chunk][n_head or n_head_kv][head_dim] */
    float *gate, *up;                /* [n_chunk][n_ff]; the same memory as q, k, v and att, which are dead by then */
    float *rope;                     /* [n_chunk][n_rot]: cosines, then sines */
    float *logits;                   /* [n_logit_rows][n_vocab] */
    uint8_t *sampling;               /* [n_threads][n_vocab * 8] */
    void *act;                       /* activations as the matrices want them */
    milad_row *rows;                 /* [n_chunk]: those still computed */
    const milad_batch *batch;        /* the step's arguments */
    const layer *layer;
    int32_t i_layer, n_rows;
    const float *next_norm;          /* of the stage that follows a residual */
    pool_fn make;                    /* what the next product's rows still want; NULL: they are there */
};

typedef struct plan { uint8_t *base; size_t n_bytes; } plan;

/* Takes n bytes, 64-byte aligned; with base NULL it only counts. */
static void *take(plan *p, size_t n) {
    void *at = p->base ? p->base + p->n_bytes : NULL;
    p->n_bytes += (n + 63) / 64 * 64;
    return at;
}

static uint32_t act_kinds(const mat *const *m, int32_t n) {
    uint32_t kinds = 0;
    for (int32_t i = 0; i < n; i++) kinds |= mat_act_kind(m[i]->type);
    return kinds;
}

static void lay_out(forward *f, plan *p) {
    const hparams *h = f->hp;
    const size_t rows = (size_t)f->n_chunk, embd = (size_t)h->n_embd, heads = (size_t)h->n_head * (size_t)h->head_dim;
    const size_t kv_heads = (size_t)h->n_head_kv * (size_t)h->head_dim, ff = (size_t)h->n_ff;
    f->x = take(p, rows * embd * 4);
    f->norm = take(p, rows * embd * 4);
    f->sum = take(p, rows * embd * 4);
    plan attending = *p, feeding = *p;
    f->q = take(&attending, rows * heads * 4);
    f->k = take(&attending, rows * kv_heads * 4);
    f->v = take(&attending, rows * kv_heads * 4);
    f->att = take(&attending, rows * heads * 4);
    f->gate = take(&feeding, rows * ff * 4);
    f->up = take(&feeding, rows * ff * 4);
    p->n_bytes = attending.n_bytes > feeding.n_bytes ? attending.n_bytes : feeding.n_bytes;
    f->rope = take(p, rows * (size_t)h->n_rot * 4);
    f->logits = take(p, (size_t)f->n_logit_rows * (size_t)h->n_vocab * 4);
    f->sampling = take(p, (size_t)pool_threads(f->pool) * (size_t)h->n_vocab * 8);
    size_t act = mat_act_bytes(h->n_embd, f->n_chunk);
    if (mat_act_bytes((int64_t)heads, f->n_chunk) > act) act = mat_act_bytes((int64_t)heads, f->n_chunk);
    if (mat_act_bytes(h->n_ff, f->n_chunk) > act) act = mat_act_bytes(h->n_ff, f->n_chunk);
    f->act = take(p, act);
    f->rows = take(p, rows * sizeof *f->rows);
}

int32_t forward_open(const milad_model *model, pool *p, kv *c, int32_t max_rows, const atomic_int *interrupt, forward **out) {
    forward *f = calloc(1, sizeof *f);
    if (!f) return fail(MILAD_E_MEMORY, "out of memory");
    f->model = model;
    f->hp = &model->hp;
    f->ops = ops_get();
    f->pool = p;
    f->kv = c;
    f->interrupt = interrupt;
    f->n_chunk = max_rows < MAX_CHUNK ? max_rows : MAX_CHUNK;
    f->n_logit_rows = max_rows < MAX_LOGIT_ROWS ? max_rows : MAX_LOGIT_ROWS;
    plan count = {0};
    lay_out(f, &count);
    f->n_bytes = count.n_bytes;
    void *memory = mmap(NULL, f->n_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        size_t wanted = f->n_bytes;
        f->memory = NULL;
        forward_close(f);
        return fail(MILAD_E_MEMORY, "no memory for steps of %d rows (%zu MB)", max_rows, wanted >> 20);
    }
    f->memory = memory;
    plan place = {.base = memory};
    lay_out(f, &place);
    int32_t status = attention_open(f->hp, f->ops, p, c, f->n_chunk, &f->attention);
    if (status < 0) {
        forward_close(f);
        return status;
    }
    *out = f;
    return MILAD_OK;
}

void forward_close(forward *f) {
    if (!f) return;
    attention_close(f->attention);
    if (f->memory) munmap(f->memory, f->n_bytes);
    free(f);
}

size_t forward_bytes(const forward *f) { return f->n_bytes + attention_bytes(f->attention); }

static int32_t interrupted(const forward *f) {
    return atomic_load_explicit(f->interrupt, memory_order_relaxed) ? fail(MILAD_E_INTERRUPTED, "interrupted") : MILAD_OK;
}

/* A stage over the rows, of n_floats each. */
static void each_row(forward *f, int64_t n_floats, pool_fn fn) {
    if (n_floats * f->n_rows < SERIAL_FLOATS) {
        fn(f, 0, f->n_rows, 0);
        return;
    }
    const int32_t grain = f->n_rows / (pool_threads(f->pool) * 8);
    pool_run(f->pool, f->n_rows, grain > 1 ? grain : 1, fn, f);
}

/* Angles in double: position * frequency is exact there and libm reduces it, so far positions are as precise as near ones. */
static void embed_rows(void *arg, int32_t lo, int32_t hi, int32_t thread) {
    forward *f = arg;
    const hparams *h = f->hp;
    const int32_t half = h->n_rot / 2;
    (void)thread;
    for (int32_t r = lo; r < hi; r++) {
        float *x = f->x + (int64_t)r * h->n_embd, *cs = f->rope + (int64_t)r * h->n_rot;
        mat_row_f32(&f->model->token_embd, f->rows[r].token, x);
        f->ops->rms_norm(f->norm + (int64_t)r * h->n_embd, x, f->model->layers[0].attn_norm, h->n_embd, h->norm_eps);
        for (int32_t i = 0; i < half; i++) {
            const double angle = (double)f->rows[r].position * (double)h->rope_inv_freq[i];
            cs[i] = (float)(cos(angle) * (double)h->rope_mscale);
            cs[half + i] = (float)(sin(angle) * (double)h->rope_mscale);
        }
    }
}

static void store_rows(void *arg, int32_t lo, int32_t hi, int32_t thread) {
    forward *f = arg;
    const hparams *h = f->hp;
    const int32_t d = h->head_dim;
    (void)thread;
    for (int32_t r = lo; r < hi; r++) {
        const milad_row *row = &f->rows[r];
        const int32_t block = f->batch->sequences[row->sequence].blocks[row->position / MILAD_KV_BLOCK];
        float *q = f->q + (int64_t)r * h->n_head * d, *k = f->k + (int64_t)r * h->n_head_kv * d;
        const float *cs = f->rope + (int64_t)r * h->n_rot;
        if (f->layer->q_norm)
            for (int32_t i = 0; i < h->n_head; i++) f->ops->rms_norm(q + i * d, q + i * d, f->layer->q_norm, d, h->norm_eps);
        if (f->layer->k_norm)
            for (int32_t i = 0; i < h->n_head_kv; i++) f->ops->rms_norm(k + i * d, k + i * d, f->layer->k_norm, d, h->norm_eps);
        f->ops->rope(q, h->n_head, d, h->n_rot, h->rope_style, cs);
        f->ops->rope(k, h->n_head_kv, d, h->n_rot, h->rope_style, cs);
        kv_append(f->kv, f->ops, f->i_layer, block, row->position % MILAD_KV_BLOCK, k, f->v + (int64_t)r * h->n_head_kv * d);
    }
}

/* x += sum, and normed for what comes next. */
static void residual_rows(void *arg, int32_t lo, int32_t hi, int32_t thread) {
    forward *f = arg;
    const int32_t n = f->hp->n_embd;
    (void)thread;
    for (int64_t r = lo; r < hi; r++) {
        f->ops->add(f->x + r * n, f->sum + r * n, n);
        f->ops->rms_norm(f->norm + r * n, f->x + r * n, f->next_norm, n, f->hp->norm_eps);
    }
}

static void swiglu_rows(void *arg, int32_t lo, int32_t hi, int32_t thread) {
    forward *f = arg;
    const int64_t n = f->hp->n_ff;
    (void)thread;
    for (int64_t r = lo; r < hi; r++) f->ops->swiglu(f->gate + r * n, f->up + r * n, f->hp->n_ff);
}

/* What the stage after next will multiply with: memory idles while few rows are normed and stored. */
static void ahead(const forward *f, const mat *const *w, int32_t n) {
    if (f->n_rows <= FEW_ROWS) mat_will_mul(f->pool, w, n);
}

static void make_now(forward *f, int64_t n_floats) {
    if (f->make) each_row(f, n_floats, f->make);
    f->make = NULL;
}

/* Products of n matrices with the rows of `in`, which f->make writes first: in the same stage that prepares them, where rows
 * are so many that threads take whole tiles of them. n <= 3. The n_next matrices of the next product are asked for at the end. */
static void multiply(forward *f, const float *in, const mat *const *w, int32_t n, float *const *out, const float *const *bias,
                     const mat *const *next, int32_t n_next) {
    int64_t ld[3] = {0};
    for (int32_t i = 0; i < n; i++) ld[i] = w[i]->n_out;
    if (f->n_rows <= FEW_ROWS) make_now(f, w[0]->n_in);
    mat_act_make(f->pool, f->act, act_kinds(w, n), in, w[0]->n_in, w[0]->n_in, f->n_rows, f->make, f);
    f->make = NULL;
    ahead(f, next, n_next);
    mat_mul(f->pool, w, n, f->act, f->n_rows, out, ld, bias);
}

/* Few rows leave memory idle while they are normed and stored, and by the next step the weights have pushed out what that
 * needs: it is asked for before the product that comes first. */
static void will_store(const forward *f) {
    for (int32_t r = 0; r < f->n_rows && f->n_rows <= FEW_ROWS; r++) {
        const milad_row *row = &f->rows[r];
        kv_will_append(f->kv, f->i_layer, f->batch->sequences[row->sequence].blocks[row->position / MILAD_KV_BLOCK],
                       row->position % MILAD_KV_BLOCK);
    }
}

static void will_norm(forward *f, const float *weights) {
    f->next_norm = weights;
    for (int32_t i = 0; i < f->hp->n_embd && f->n_rows <= FEW_ROWS; i += 16) __builtin_prefetch(weights + i);
}

/* Keeps the rows that want an output. */
static void drop_rows(forward *f) {
    const hparams *h = f->hp;
    const size_t embd = (size_t)h->n_embd, heads = (size_t)h->n_head * (size_t)h->head_dim;
    int32_t n = 0;
    for (int32_t r = 0; r < f->n_rows; r++) {
        if (f->rows[r].output < 0) continue;
        if (n != r) {
            f->rows[n] = f->rows[r];
            memcpy(f->x + (size_t)n * embd, f->x + (size_t)r * embd, embd * 4);
            memcpy(f->q + (size_t)n * heads, f->q + (size_t)r * heads, heads * 4);
        }
        n++;
    }
    f->n_rows = n;
    attention_plan(f->attention, f->rows, n, f->batch->sequences);
}

static int32_t run_layer(forward *f) {
    const hparams *h = f->hp;
    const layer *l = f->layer;
    const int32_t last = f->i_layer == h->n_layer - 1;
    const mat *qkv[] = {&l->wq, &l->wk, &l->wv}, *wo[] = {&l->wo}, *gate_up[] = {&l->gate, &l->up}, *down[] = {&l->down};
    float *const qkv_out[] = {f->q, f->k, f->v}, *const sum[] = {f->sum}, *const gate_up_out[] = {f->gate, f->up};
    const layer *after = last ? l : l + 1;
    const mat *next_qkv[] = {&after->wq, &after->wk, &after->wv}, *head[] = {&f->model->output};
    const float *const qkv_bias[] = {l->bq, l->bk, l->bv}, *const wo_bias[] = {l->bo};

    will_store(f);
    multiply(f, f->norm, qkv, 3, qkv_out, qkv_bias, wo, 1);
    each_row(f, (int64_t)(h->n_head + 2 * h->n_head_kv) * h->head_dim, store_rows);
    if (last) drop_rows(f);
    if (interrupted(f) < 0) return MILAD_E_INTERRUPTED;
    if (!f->n_rows) return MILAD_OK;

    ahead(f, wo, 1);
    attention_run(f->attention, f->i_layer, f->q, f->att);
    will_norm(f, l->ffn_norm);
    multiply(f, f->att, wo, 1, sum, wo_bias, gate_up, 2);
    if (interrupted(f) < 0) return MILAD_E_INTERRUPTED;

    f->make = residual_rows;
    multiply(f, f->norm, gate_up, 2, gate_up_out, NULL, down, 1);
    f->make = swiglu_rows;
    will_norm(f, last ? f->model->output_norm : f->model->layers[f->i_layer + 1].attn_norm);
    multiply(f, f->gate, down, 1, sum, NULL, last ? head : next_qkv, last ? 1 : 3);
    f->make = residual_rows;
    return interrupted(f);
}

static void sample_rows(void *arg, int32_t lo, int32_t hi, int32_t thread) {
    forward *f = arg;
    const int32_t n_vocab = f->hp->n_vocab;
    for (int32_t r = lo; r < hi; r++) {
        const milad_row *row = &f->rows[r];
        float *logits = f->logits + (int64_t)r * n_vocab;
        if (f->batch->logits)
            memcpy(f->batch->logits + (int64_t)row->output * n_vocab, logits, (size_t)n_vocab * 4);
        sample(&f->batch->samplers[row->output], row->position, logits, n_vocab, f->sampling + (size_t)thread * (size_t)n_vocab * 8,
               &f->batch->outputs[row->output]);
    }
}

/* Logits and samples of the rows that are left, a few at a time. */
static int32_t run_outputs(forward *f) {
    const layer *l = &f->model->layers[0];
    const mat *w[] = {&f->model->output}, *first[] = {&l->wq, &l->wk, &l->wv}; /* of the next step */
    float *const out[] = {f->logits};
    const int32_t n_rows = f->n_rows;
    milad_row *rows = f->rows;
    int32_t status = MILAD_OK;
    make_now(f, f->hp->n_embd);
    for (int32_t r = 0; r < n_rows && status == MILAD_OK; r += f->n_logit_rows) {
        f->n_rows = n_rows - r < f->n_logit_rows ? n_rows - r : f->n_logit_rows;
        f->rows = rows + r;
        multiply(f, f->norm + (int64_t)r * f->hp->n_embd, w, 1, out, NULL, first, 3);
        pool_run(f->pool, f->n_rows, 1, sample_rows, f);
        status = interrupted(f);
    }
    f->rows = rows;
    return status;
}

static int32_t run_chunk(forward *f) {
    f->make = NULL; /* an interrupted step may have left one */
    attention_plan(f->attention, f->rows, f->n_rows, f->batch->sequences);
    each_row(f, 2 * f->hp->n_embd + 16 * f->hp->n_rot, embed_rows); /* a sine costs some 16 multiplications */
    for (f->i_layer = 0; f->i_layer < f->hp->n_layer; f->i_layer++) {
        f->layer = &f->model->layers[f->i_layer];
        if (run_layer(f) < 0) return MILAD_E_INTERRUPTED;
    }
    return run_outputs(f);
}

int32_t forward_run(forward *f, const milad_batch *batch) {
    f->batch = batch;
    for (int32_t r = 0; r < batch->n_rows; r += f->n_chunk) {
        f->n_rows = batch->n_rows - r < f->n_chunk ? batch->n_rows - r : f->n_chunk;
        memcpy(f->rows, batch->rows + r, (size_t)f->n_rows * sizeof *f->rows);
        int32_t status = interrupted(f);
        if (status == MILAD_OK) status = run_chunk(f);
        if (status < 0) return status;
    }
    return MILAD_OK;
}

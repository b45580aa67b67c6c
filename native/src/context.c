/* context.c: the context half of the ABI (milad.h): opens what a model needs to run, and checks every batch whole before any
 * of it is computed. Knows nothing of how layers or kernels work. */
#include <stdlib.h>
#include <string.h>

#include "error.h"
#include "forward.h"
#include "sample.h"

enum { MAX_ROWS = 4096, MAX_THREADS = 1024 };

/* Who lists a block in the step `step`. */
typedef struct listing {
    uint64_t step;
    int32_t n;
} listing;

struct milad_context {
    const milad_model *model;
    pool *pool;
    kv *kv;
    forward *forward;
    int32_t max_rows, n_blocks, last_block; /* the highest that the batch just checked names */
    atomic_int interrupt;
    uint64_t n_steps, n_rows, n_checks;
    listing *listings;    /* [n_blocks] */
    int32_t *positions;   /* [max_rows] of each sequence's row before, -1: none */
    uint8_t *filled;      /* [max_rows] outputs that have a row */
};

static int32_t check_params(const milad_model *model, const milad_context_params *p) {
    if (!model) return fail(MILAD_E_ARGUMENT, "no model");
    if (!model->layers) return fail(MILAD_E_ARGUMENT, "the model was opened vocabulary-only and can't run");
    if (!p || p->size != sizeof *p) return fail(MILAD_E_ARGUMENT, "milad_context_params: size is not %zu", sizeof *p);
    if (p->flags) return fail(MILAD_E_ARGUMENT, "milad_context_params: flags %#x are unknown", p->flags);
    if (p->max_rows < 1 || p->max_rows > MAX_ROWS)
        return fail(MILAD_E_ARGUMENT, "max_rows %d is not within 1..%d", p->max_rows, MAX_ROWS);
    if (p->n_threads < 0 || p->n_threads > MAX_THREADS)
        return fail(MILAD_E_ARGUMENT, "n_threads %d is not within 0..%d", p->n_threads, MAX_THREADS);
    if (model->hp.n_head % model->hp.n_head_kv)
        return fail(MILAD_E_UNSUPPORTED, "%d query heads are no multiple of %d key heads", model->hp.n_head, model->hp.n_head_kv);
    return MILAD_OK;
}

int32_t milad_context_open(milad_model *model, const milad_context_params *params, milad_context **out) {
    if (!out) return fail(MILAD_E_ARGUMENT, "no place for the context");
    *out = NULL;
    int32_t status = check_params(model, params);
    if (status < 0) return status;
    milad_context *c = calloc(1, sizeof *c);
    if (!c) return fail(MILAD_E_MEMORY, "out of memory");
    c->model = model;
    c->max_rows = params->max_rows;
    c->n_blocks = params->n_blocks;
    atomic_init(&c->interrupt, 0);
    status = kv_open(&model->hp, params->n_blocks, params->kv_type, &c->kv);
    if (status == MILAD_OK) {
        c->listings = calloc((size_t)params->n_blocks, sizeof *c->listings);
        c->positions = calloc((size_t)c->max_rows, sizeof *c->positions);
        c->filled = calloc((size_t)c->max_rows, 1);
        c->pool = pool_open(params->n_threads ? params->n_threads : pool_usable_cores());
        if (!c->listings || !c->positions || !c->filled || !c->pool)
            status = fail(MILAD_E_MEMORY, c->pool ? "out of memory" : "can't start %d threads", params->n_threads);
    }
    if (status == MILAD_OK) status = forward_open(model, c->pool, c->kv, c->max_rows, &c->interrupt, &c->forward);
    if (status < 0) {
        milad_context_close(c);
        return status;
    }
    *out = c;
    return MILAD_OK;
}

void milad_context_close(milad_context *c) {
    if (!c) return;
    forward_close(c->forward);
    if (c->pool) pool_close(c->pool);
    kv_close(c->kv);
    free(c->listings);
    free(c->positions);
    free(c->filled);
    free(c);
}

int32_t milad_context_stat_get(const milad_context *c, milad_context_stat *out) {
    if (!c) return fail(MILAD_E_ARGUMENT, "no context");
    if (!out || out->size != sizeof *out) return fail(MILAD_E_ARGUMENT, "milad_context_stat: size is not %zu", sizeof *out);
    *out = (milad_context_stat){
        .size = sizeof *out,
        .n_threads = pool_threads(c->pool),
        .n_blocks = c->n_blocks,
        .max_rows = c->max_rows,
        .kv_bytes = kv_bytes(c->kv),
        .kv_block_bytes = kv_block_bytes(c->kv),
        .scratch_bytes = forward_bytes(c->forward),
        .n_steps = c->n_steps,
        .n_rows = c->n_rows,
    };
    const char *isa = mat_isa();
    size_t n = strlen(isa);
    memcpy(out->isa, isa, n < sizeof out->isa ? n : sizeof out->isa - 1);
    return MILAD_OK;
}

static int32_t check_shape(const milad_context *c, const milad_batch *b) {
    if (!b || b->size != sizeof *b) return fail(MILAD_E_ARGUMENT, "milad_batch: size is not %zu", sizeof *b);
    if (b->n_rows < 1 || b->n_rows > c->max_rows) return fail(MILAD_E_ARGUMENT, "batch of %d rows: not within 1..%d", b->n_rows, c->max_rows);
    if (b->n_sequences < 1 || b->n_sequences > c->max_rows)
        return fail(MILAD_E_ARGUMENT, "batch of %d sequences: not within 1..%d", b->n_sequences, c->max_rows);
    if (b->n_outputs < 0 || b->n_outputs > b->n_rows)
        return fail(MILAD_E_ARGUMENT, "batch of %d outputs: not within 0..%d (its rows)", b->n_outputs, b->n_rows);
    if (!b->rows || !b->sequences) return fail(MILAD_E_ARGUMENT, "batch without rows or sequences");
    if (b->n_outputs && (!b->samplers || !b->outputs)) return fail(MILAD_E_ARGUMENT, "batch without samplers or outputs");
    return MILAD_OK;
}

/* Block tables: every entry a block, and how many entries name each. */
static int32_t check_sequences(milad_context *c, const milad_batch *b) {
    c->n_checks++;
    c->last_block = 0;
    for (int32_t s = 0; s < b->n_sequences; s++) {
        const milad_sequence *q = &b->sequences[s];
        if (q->n_blocks < 0 || q->n_blocks > c->n_blocks || (q->n_blocks && !q->blocks))
            return fail(MILAD_E_ARGUMENT, "sequence %d: %d blocks of an arena of %d", s, q->n_blocks, c->n_blocks);
        for (int32_t i = 0; i < q->n_blocks; i++) {
            if (q->blocks[i] < 0 || q->blocks[i] >= c->n_blocks)
                return fail(MILAD_E_ARGUMENT, "sequence %d: blocks[%d] = %d is not within 0..%d", s, i, q->blocks[i], c->n_blocks - 1);
            listing *l = &c->listings[q->blocks[i]];
            if (l->step != c->n_checks) *l = (listing){.step = c->n_checks};
            l->n++;
            if (q->blocks[i] > c->last_block) c->last_block = q->blocks[i];
        }
        c->positions[s] = -1;
    }
    return MILAD_OK;
}

static int32_t check_row(milad_context *c, const milad_batch *b, int32_t r) {
    const milad_row *row = &b->rows[r];
    if (row->token < 0 || row->token >= c->model->hp.n_vocab)
        return fail(MILAD_E_ARGUMENT, "row %d: token %d is not within 0..%d", r, row->token, c->model->hp.n_vocab - 1);
    if (row->sequence < 0 || row->sequence >= b->n_sequences)
        return fail(MILAD_E_ARGUMENT, "row %d: sequence %d is not within 0..%d", r, row->sequence, b->n_sequences - 1);
    const milad_sequence *q = &b->sequences[row->sequence];
    if (row->position < 0 || row->position / MILAD_KV_BLOCK >= q->n_blocks)
        return fail(MILAD_E_ARGUMENT, "row %d: position %d is outside the %d blocks of sequence %d", r, row->position, q->n_blocks, row->sequence);
    int32_t *before = &c->positions[row->sequence];
    if (*before >= 0 && row->position - 1 != *before)
        return fail(MILAD_E_ARGUMENT, "row %d: position %d follows %d in sequence %d", r, row->position, *before, row->sequence);
    *before = row->position;
    const int32_t block = q->blocks[row->position / MILAD_KV_BLOCK];
    if (c->listings[block].n != 1)
        return fail(MILAD_E_ARGUMENT, "row %d: block %d is listed %d times, so it can't be written", r, block, c->listings[block].n);
    if (row->output < -1 || row->output >= b->n_outputs)
        return fail(MILAD_E_ARGUMENT, "row %d: output %d is not within -1..%d", r, row->output, b->n_outputs - 1);
    if (row->output >= 0 && c->filled[row->output]++) return fail(MILAD_E_ARGUMENT, "row %d: output %d has a row already", r, row->output);
    return MILAD_OK;
}

static int32_t check_batch(milad_context *c, const milad_batch *b) {
    int32_t status = check_shape(c, b);
    if (status == MILAD_OK) status = check_sequences(c, b);
    if (status < 0) return status;
    memset(c->filled, 0, (size_t)b->n_outputs);
    for (int32_t r = 0; r < b->n_rows; r++)
        if ((status = check_row(c, b, r)) < 0) return status;
    for (int32_t i = 0; i < b->n_outputs; i++) {
        if (!c->filled[i]) return fail(MILAD_E_ARGUMENT, "output %d has no row", i);
        const char *wrong = sample_check(&b->samplers[i], c->model->hp.n_vocab);
        if (wrong) return fail(MILAD_E_ARGUMENT, "sampler %d: %s", i, wrong);
    }
    return MILAD_OK;
}

int32_t milad_step(milad_context *c, const milad_batch *batch) {
    if (!c) return fail(MILAD_E_ARGUMENT, "no context");
    int32_t status = check_batch(c, batch);
    if (status < 0) return status;
    kv_ahead(c->kv, c->last_block);
    status = forward_run(c->forward, batch);
    if (status == MILAD_E_INTERRUPTED) atomic_store(&c->interrupt, 0);
    if (status < 0) return status;
    c->n_steps++;
    c->n_rows += (uint64_t)batch->n_rows;
    return MILAD_OK;
}

static int32_t check_block(const milad_context *c, int32_t block) {
    if (!c) return fail(MILAD_E_ARGUMENT, "no context");
    if (block < 0 || block >= c->n_blocks) return fail(MILAD_E_ARGUMENT, "block %d is not within 0..%d", block, c->n_blocks - 1);
    return MILAD_OK;
}

int32_t milad_kv_copy(milad_context *c, int32_t src, int32_t dst, int32_t n_tokens) {
    int32_t status = check_block(c, src);
    if (status == MILAD_OK) status = check_block(c, dst);
    if (status < 0) return status;
    if (n_tokens < 0 || n_tokens > MILAD_KV_BLOCK) return fail(MILAD_E_ARGUMENT, "%d tokens of a block of %d", n_tokens, MILAD_KV_BLOCK);
    kv_copy(c->kv, src, dst, n_tokens);
    return MILAD_OK;
}

static int32_t check_buffer(const milad_context *c, int32_t block, const void *buf, size_t n_bytes) {
    int32_t status = check_block(c, block);
    if (status < 0) return status;
    if (!buf || n_bytes != kv_block_bytes(c->kv))
        return fail(MILAD_E_ARGUMENT, "a block has %zu bytes, the buffer %zu", kv_block_bytes(c->kv), n_bytes);
    return MILAD_OK;
}

int32_t milad_kv_read(const milad_context *c, int32_t block, void *buf, size_t n_bytes) {
    int32_t status = check_buffer(c, block, buf, n_bytes);
    if (status == MILAD_OK) kv_read(c->kv, block, buf);
    return status;
}

int32_t milad_kv_write(milad_context *c, int32_t block, const void *buf, size_t n_bytes) {
    int32_t status = check_buffer(c, block, buf, n_bytes);
    if (status == MILAD_OK) kv_write(c->kv, block, buf);
    return status;
}

void milad_interrupt(milad_context *c) {
    if (c) atomic_store(&c->interrupt, 1);
}

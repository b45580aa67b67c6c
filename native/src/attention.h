/* attention.h: causal attention of a step's rows over their sequences' KV blocks. */
#ifndef MILAD_ATTENTION_H
#define MILAD_ATTENTION_H

#include "kv.h"
#include "ops.h"
#include "pool.h"

typedef struct attention attention;

/* Buffers for steps of up to max_rows rows. MILAD_E_MEMORY. */
int32_t attention_open(const hparams *hp, const ops *o, pool *p, const kv *c, int32_t max_rows, attention **out);
void attention_close(attention *a);
size_t attention_bytes(const attention *a);

/* Decides once per step how the rows are worked off; the sequences' block tables must live until the last run. */
void attention_plan(attention *a, const milad_row *rows, int32_t n_rows, const milad_sequence *sequences);
/* q, out: [n_rows][n_head][head_dim]. The rows' keys and values are in the arena already. q is not scaled yet. */
void attention_run(attention *a, int32_t layer, const float *q, float *out);

#endif

/* forward.h: the dense transformer, from tokens to logits to samples. */
#ifndef MILAD_FORWARD_H
#define MILAD_FORWARD_H

#include <stdatomic.h>

#include "kv.h"
#include "model.h"
#include "pool.h"

typedef struct forward forward;

/* Scratch for steps of up to max_rows rows. `interrupt` is the context's flag: looked at between stages, never cleared here. */
int32_t forward_open(const milad_model *model, pool *p, kv *c, int32_t max_rows, const atomic_int *interrupt, forward **out);
void forward_close(forward *f);
size_t forward_bytes(const forward *f);

/* Computes a batch that has been checked. MILAD_E_INTERRUPTED when the flag was seen. */
int32_t forward_run(forward *f, const milad_batch *batch);

#endif

/* sample.h: from logits to a token. Pure: logits, a sampler and a position in; an output out. */
#ifndef MILAD_SAMPLE_H
#define MILAD_SAMPLE_H

#include <stdint.h>

#include "../include/milad.h"

/* logits[n_vocab] is scratch afterwards. scratch: n_vocab * 8 bytes of the caller's (per thread). The draw uses (seed, position). */
void sample(const milad_sampler *s, int32_t position, float *logits, int32_t n_vocab, void *scratch, milad_output *out);
/* NULL, or why the sampler is not usable (ids out of range, NaN parameters, n_top beyond the cap). */
const char *sample_check(const milad_sampler *s, int32_t n_vocab);

#endif

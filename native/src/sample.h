/* sample.h: from logits to a token. Pure: logits, a sampler and a position in; an output out.
 *
 * Order: bias, mask, penalties; the log-probabilities are of that distribution; then temperature, top_k, top_p, min_p, each on
 * what the one before left (as vLLM and Hugging Face do; llama.cpp's default chain applies temperature last).
 */
#ifndef MILAD_SAMPLE_H
#define MILAD_SAMPLE_H

#include <stdint.h>

#include "../include/milad.h"

/* What stands for the logarithm of an impossible token's probability (as in OpenAI's API, where it also fits JSON). */
#define SAMPLE_IMPOSSIBLE (-9999.0f)

/* logits[n_vocab] is scratch afterwards. scratch: n_vocab * 8 bytes of the caller's (per thread), 8-byte aligned. The draw
 * uses (seed, position). The sampler must have passed sample_check. Without logprobs (n_top < 0) out->logprob is 0. */
void sample(const milad_sampler *s, int32_t position, float *logits, int32_t n_vocab, void *scratch, milad_output *out);
/* NULL, or why the sampler is not usable (ids out of range, NaN parameters, n_top beyond the cap). Takes time for the history
 * only where a penalty is on. */
const char *sample_check(const milad_sampler *s, int32_t n_vocab);

#endif

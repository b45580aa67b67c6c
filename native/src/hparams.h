/* hparams.h: a file's hyperparameters, read, checked and complete. */
#ifndef MILAD_HPARAMS_H
#define MILAD_HPARAMS_H

#include "model.h"

/* The architecture and everything but n_vocab and rope_inv_freq; sets the thread's error. Needs no tensors. */
int32_t hparams_read(const gguf *g, hparams *hp);
/* Allocates and fills rope_inv_freq and sets rope_mscale, from the keys and the tensor rope_freqs.weight. */
int32_t hparams_read_rope(const gguf *g, hparams *hp);
void hparams_close(hparams *hp);

#endif

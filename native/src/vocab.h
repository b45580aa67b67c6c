/* vocab.h: token ids to bytes and text to token ids. Byte-level BPE with each family's pre-tokenizer. */
#ifndef MILAD_VOCAB_H
#define MILAD_VOCAB_H

#include <stddef.h>
#include <stdint.h>

#include "gguf.h"

typedef struct vocab vocab;

typedef struct vocab_ids { int32_t bos, eos, eot, unk, pad; int32_t add_bos, add_eos; } vocab_ids;

/* Builds the vocabulary from tokenizer.ggml.*; copies what it keeps. Hostile data: an error. */
int32_t vocab_open(const gguf *g, vocab **out);
int32_t vocab_count(const gguf *g, int32_t *n); /* the tokens it will have, at no cost */
void vocab_close(vocab *v);
int32_t vocab_size(const vocab *v);
const vocab_ids *vocab_special_ids(const vocab *v);
/* As milad_tokenize / milad_token_bytes. Thread-safe. */
int64_t vocab_tokenize(const vocab *v, const char *text, size_t n_bytes, uint32_t flags, int32_t *tokens, int64_t n_tokens);
int32_t vocab_token_bytes(const vocab *v, int32_t token, char *buf, int32_t n_bytes, uint32_t *attributes);

#endif

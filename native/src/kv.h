/* kv.h: the paged key-value arena.
 *
 * Block b, layer l: one page of MILAD_KV_BLOCK tokens x all kv heads, pages of one layer side by side so that a sequence whose
 * blocks lie in order is read as one rising address range. In a page, per kv head: keys head_dim x 32 (transposed: 32 tokens
 * of one dimension side by side), then values 32 x head_dim. F16, or Q8_0-like int8 with scales by option.
 */
#ifndef MILAD_KV_H
#define MILAD_KV_H

#include <stddef.h>
#include <stdint.h>

#include "model.h"

typedef struct kv kv;

int32_t kv_open(const hparams *hp, int32_t n_blocks, int32_t type, kv **out);
void kv_close(kv *c);
size_t kv_bytes(const kv *c);
size_t kv_block_bytes(const kv *c);
int32_t kv_copy(kv *c, int32_t src, int32_t dst, int32_t n_tokens);
int32_t kv_read(const kv *c, int32_t block, void *buf, size_t n_bytes);
int32_t kv_write(kv *c, int32_t block, const void *buf, size_t n_bytes);

#endif

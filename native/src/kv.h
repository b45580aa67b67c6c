/* kv.h: the paged key-value arena.
 *
 * Block b, layer l: one page of MILAD_KV_BLOCK tokens: all heads' keys, then all heads' values, as attention reads them.
 * Pages of one layer lie side by side. Each head's keys, and values, padded to 64 bytes:
 *
 *   F16   keys head_dim x 32 (transposed: 32 tokens of one dimension side by side); values 32 x head_dim
 *   Q8_0  keys: rotated (ops.h), groups of 64 dimensions (the last may be shorter) share a scale: F16 scales n_groups x 32; for each
 *         token the log2 and the inverse of its values' one scale, F32 2 x 32; then packs of 4 dimensions ceil(head_dim / 4) x 32 x 4,
 *         each number an int8 plus 128. Values: packs of 4 tokens 8 x head_dim x 4, int8. Number = scale * int8. Queries are
 *         rotated too; machines that multiply bytes round queries and weights to bytes (ops.h)
 *   BF16  keys as pairs of dimensions (head_dim + 1) / 2 x 32 x 2; values as pairs of tokens 16 x head_dim x 2; queries and weights
 *         are rounded to BF16 too (ops.h), so machines that multiply pairs of BF16 attend about twice as fast
 *   F32   as F16, for comparing logits with exact implementations
 *
 * The arena starts zeroed. Its memory belongs to the thread that owns the context, and to the pool's threads during a stage
 * that writes disjoint tokens.
 */
#ifndef MILAD_KV_H
#define MILAD_KV_H

#include <stddef.h>
#include <stdint.h>

#include "model.h"
#include "ops.h"

typedef struct kv kv;

enum kv_type { KV_F16 = 0, KV_Q8_0 = 1, KV_F32 = 2, KV_BF16 = 3 };

/* MILAD_E_ARGUMENT: no such type, or a size that wraps; MILAD_E_MEMORY. */
int32_t kv_open(const hparams *hp, int32_t n_blocks, int32_t type, kv **out);
void kv_close(kv *c);
size_t kv_bytes(const kv *c);
size_t kv_block_bytes(const kv *c);
int32_t kv_n_blocks(const kv *c);

/* Blocks must be in range and n_tokens within 0..32: the caller has checked. kv_read and kv_write move kv_block_bytes. */
void kv_copy(kv *c, int32_t src, int32_t dst, int32_t n_tokens);
void kv_read(const kv *c, int32_t block, void *buf);
void kv_write(kv *c, int32_t block, const void *buf);

/* Stores one token's keys and values, both [n_head_kv][head_dim], at slot 0..31 of a block. */
void kv_append(kv *c, const ops *o, int32_t layer, int32_t block, int32_t slot, const float *k, const float *v);

/* Blocks up to `block` are used now: a thread of the arena's own has the memory of some dozens more mapped, so that no step waits for
 * it (a step that is the first to reach 2 MB further in each of 30 layers stood still for 140 ms). Cheap; any thread. */
void kv_ahead(kv *c, int32_t block);

/* Asks for the memory that kv_append(layer, block, slot) will write, so that it comes while something else is computed. */
void kv_will_append(const kv *c, int32_t layer, int32_t block, int32_t slot);

int32_t kv_type(const kv *c);
/* Keys and values of one tile where they lie (Q8_0 keys: from their scales on), and their bytes. */
const void *kv_keys(const kv *c, int32_t layer, int32_t block, int32_t head);
const void *kv_values(const kv *c, int32_t layer, int32_t block, int32_t head);
size_t kv_key_bytes(const kv *c);
size_t kv_value_bytes(const kv *c);
/* The same as F32, any type: k[head_dim][32] (Q8_0: rotated), v[32][head_dim]; either may be NULL. */
void kv_expand(const kv *c, const ops *o, int32_t layer, int32_t block, int32_t head, float *k, float *v);

#endif

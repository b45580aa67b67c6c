/* vocab_bpe.h: the tables of a byte-level BPE vocabulary and its merge loop. Knows nothing of GGUF or of added tokens. */
#ifndef MILAD_VOCAB_BPE_H
#define MILAD_VOCAB_BPE_H

#include <stddef.h>
#include <stdint.h>

/* Spellings of all tokens, one after the other; a hash table finds the lowest id of a spelling. */
typedef struct spellings {
    int32_t n;           /* < 2^24 */
    char *bytes;
    size_t *starts;      /* n + 1 */
    uint32_t *slots;     /* of ids (vocab_bpe.c) */
    size_t slot_mask;
    uint64_t seed;       /* of the hashes, from all the spellings: a file can't be written so that its own hashes collide */
    int32_t n_duplicates;
} spellings;

/* One merge: the pair of neighbours becomes `id`; lower ranks go first. */
typedef struct merge { uint32_t left, right, rank, id; } merge;

typedef struct bpe {
    int32_t byte_ids[256]; /* token of a single byte, -1: none (the byte is dropped, as Hugging Face's BPE does without unk) */
    merge *merges;         /* as they were added */
    uint32_t n_merges;
    uint32_t *slots;       /* of indices of merges */
    size_t slot_mask;
    uint64_t seed;         /* of the hashes */
} bpe;

/* Tokens as they are found. Counts all, keeps what fits. */
typedef struct token_sink { int32_t *tokens; int64_t n_tokens, n; } token_sink;

/* Memory of one call, grown as pieces need it. Zero it first. */
typedef struct bpe_scratch { struct symbol *symbols; size_t n_symbols; uint64_t *heap; size_t n_heap, heap_room; } bpe_scratch;

/* Copies nothing: bytes and starts are filled by the caller. MILAD_OK or MILAD_E_MEMORY. */
int32_t spellings_index(spellings *s);
int32_t spellings_find(const spellings *s, const char *spelling, size_t n_bytes); /* lowest id, or -1 */
void spellings_free(spellings *s);

/* GPT-2's map of bytes to characters that print: bytes_to_unicode() in openai/gpt-2's encoder.py. */
uint32_t byte_to_char(uint8_t byte);
int32_t char_to_byte(uint32_t cp); /* -1: not in the map */
/* Undoes the map for a spelling; a spelling with characters outside the map stands for itself, as in Hugging Face's
 * ByteLevel decoder. Writes at most n_out bytes, returns how many there are. */
size_t spelling_decode(const char *spelling, size_t n_bytes, char *out, size_t n_out);
/* The spelling of bytes (2 * n_bytes are enough); returns its length. */
size_t spelling_encode(const uint8_t *bytes, size_t n_bytes, char *out);

/* Room for n_merges < 2^24, at most so many are added. MILAD_OK or MILAD_E_MEMORY. */
int32_t bpe_reserve(bpe *b, size_t n_merges, uint64_t seed);
int32_t bpe_add(bpe *b, uint32_t left, uint32_t right, uint32_t rank, uint32_t id); /* 0: the pair was there already */
void bpe_free(bpe *b);
/* Tokens of one piece. O(n log n). MILAD_OK or MILAD_E_MEMORY. */
int32_t bpe_encode(const bpe *b, const uint8_t *piece, size_t n_bytes, bpe_scratch *scratch, token_sink *out);
void bpe_scratch_free(bpe_scratch *scratch);

static inline void token_put(token_sink *out, int32_t id) {
    if (out->n < out->n_tokens)
        out->tokens[out->n] = id;
    out->n++;
}

#endif

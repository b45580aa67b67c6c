/* milad.h: the whole ABI of libmilad, the core that runs language models.
 *
 * Rules
 * - Every struct starts with `size`, which the caller sets to sizeof; milad_struct_size() reports what
 *   the library was built with, so that a binding can compare before the first call.
 * - Buffers belong to the caller. Strings in are UTF-8 with a byte length or NUL-terminated as said.
 * - A status < 0 is one of milad_status; milad_last_error() then holds one line for a person (thread-local,
 *   valid until the same thread's next call).
 * - A model may be read from any thread. A context belongs to one thread at a time; only milad_interrupt()
 *   may be called from another.
 * - The library never calls back into the caller; what it has to say waits in the log ring (milad_log_drain).
 *
 * Batch invariance: the logits of a row are the same bits whatever other rows, chunks or number of threads
 * computed them. Every reduction has one order, fixed by the model and the position.
 */
#ifndef MILAD_H
#define MILAD_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define MILAD_API __attribute__((visibility("default")))
#else
#define MILAD_API
#endif

enum milad_status {
    MILAD_OK = 0,
    MILAD_E_ARGUMENT = -1,    /* the caller's mistake */
    MILAD_E_IO = -2,          /* a file can't be opened or read */
    MILAD_E_FORMAT = -3,      /* a model file breaks its format's rules */
    MILAD_E_UNSUPPORTED = -4, /* well formed, but this build can't run it */
    MILAD_E_MEMORY = -5,      /* out of memory */
    MILAD_E_INTERRUPTED = -6, /* milad_interrupt() was called */
    MILAD_E_INTERNAL = -7     /* a bug of the core's */
};

enum { MILAD_KV_BLOCK = 32 };   /* tokens in a KV block */
enum { MILAD_MAX_TOP = 20 };    /* most alternatives a row can report */

enum milad_struct {
    MILAD_STRUCT_MODEL_PARAMS = 0,
    MILAD_STRUCT_MODEL_INFO = 1,
    MILAD_STRUCT_CONTEXT_PARAMS = 2,
    MILAD_STRUCT_CONTEXT_STAT = 3,
    MILAD_STRUCT_SEQUENCE = 4,
    MILAD_STRUCT_ROW = 5,
    MILAD_STRUCT_SAMPLER = 6,
    MILAD_STRUCT_OUTPUT = 7,
    MILAD_STRUCT_BATCH = 8
};

typedef struct milad_model milad_model;
typedef struct milad_context milad_context;

/* Flags of milad_model_params. */
enum {
    MILAD_MODEL_VOCAB_ONLY = 1, /* read metadata and vocabulary; tensors may be absent */
    MILAD_MODEL_MLOCK = 2,      /* keep the weights in memory */
    MILAD_MODEL_NO_REPACK = 4   /* run from the mapped file, slower, shares pages with other processes */
};

typedef struct milad_model_params {
    uint32_t size;
    uint32_t flags;
    int32_t n_threads;        /* for loading; 0: one per usable core */
    uint32_t reserved;
    volatile float *progress; /* NULL, or a float of the caller's set to 0..1 while loading */
} milad_model_params;

typedef struct milad_model_info {
    uint32_t size;
    int32_t n_vocab, n_ctx_train, n_layer, n_embd, n_head, n_head_kv, head_dim, n_ff;
    int32_t bos, eos, eot, unk, pad; /* -1: none */
    int32_t add_bos, add_eos;        /* 0 or 1 */
    int32_t has_weights;             /* 0 when opened vocabulary-only */
    int32_t reserved;
    uint64_t n_params;
    uint64_t file_bytes;
    uint64_t weight_bytes;           /* read once per step: the floor of a decode step */
    uint64_t fingerprint;            /* of tensors' names, shapes, types and sampled bytes, and the vocabulary */
    char architecture[32];
    char quantisation[32];           /* the commonest weight type, e.g. "Q4_1" */
} milad_model_info;

/* Token attributes, from milad_token_bytes. */
enum {
    MILAD_TOKEN_NORMAL = 1,
    MILAD_TOKEN_UNKNOWN = 2,
    MILAD_TOKEN_CONTROL = 4,      /* never part of text: <|im_end|> and its kin */
    MILAD_TOKEN_USER_DEFINED = 8, /* added token that is text */
    MILAD_TOKEN_UNUSED = 16,
    MILAD_TOKEN_BYTE = 32,
    MILAD_TOKEN_EOG = 64          /* ends a generation */
};

/* Flags of milad_tokenize. */
enum {
    MILAD_TOKENIZE_ADD_BOS = 1,       /* as the file asks for it; exactly one, also when the text begins with it */
    MILAD_TOKENIZE_PARSE_SPECIAL = 2  /* spell control tokens in the text as their ids */
};

typedef struct milad_context_params {
    uint32_t size;
    int32_t n_blocks;     /* KV blocks of MILAD_KV_BLOCK tokens in the arena, >= 1 */
    int32_t n_threads;    /* 0: one per usable core within the cgroup's quota */
    int32_t max_rows;     /* most rows of one step, 1..4096 */
    int32_t kv_type;      /* 0: F16, 1: Q8_0, 2: F32 (to compare with exact implementations), 3: BF16 */
    uint32_t flags;       /* 0 */
} milad_context_params;

typedef struct milad_context_stat {
    uint32_t size;
    int32_t n_threads, n_blocks, max_rows;
    uint64_t kv_bytes;         /* the arena */
    uint64_t kv_block_bytes;   /* one block, all layers: what milad_kv_read fills */
    uint64_t scratch_bytes;
    uint64_t n_steps, n_rows;  /* since open */
    char isa[32];              /* "avx512-vnni", "avx2", "neon-dotprod", "c" */
} milad_context_stat;

/* A sequence of the batch: where its tokens' keys and values live. blocks[i] holds positions
 * 32 i .. 32 i + 31. A block may be listed by several sequences (a shared prefix), but a row may only
 * write a block that one sequence of the batch lists. */
typedef struct milad_sequence {
    const int32_t *blocks;
    int32_t n_blocks;
    int32_t reserved;
} milad_sequence;

/* One token to compute. Rows of one sequence stand in rising order of position without gaps; their keys and
 * values are written before any row of the step attends. */
typedef struct milad_row {
    int32_t token;
    int32_t position;
    int32_t sequence; /* index into batch->sequences */
    int32_t output;   /* index into samplers/outputs, or -1: no logits wanted */
} milad_row;

/* How to pick the token that follows a row. Plain data: it never outlives the step. */
typedef struct milad_sampler {
    float temperature;       /* <= 0: the best token */
    int32_t top_k;           /* <= 0: off */
    float top_p;             /* >= 1: off */
    float min_p;             /* <= 0: off */
    float repeat_penalty;    /* 1: off; over `history` */
    float presence_penalty;  /* 0: off; over `history` from n_prompt on */
    float frequency_penalty; /* 0: off; likewise */
    int32_t n_top;           /* alternatives wanted, 0..MILAD_MAX_TOP; -1: no logprobs at all */
    uint64_t seed;           /* the draw is a function of (seed, position), so it never depends on the batch */
    const int32_t *history;  /* the sequence's tokens up to and including the row, for the penalties */
    int32_t n_history;
    int32_t n_prompt;         /* how many of them are the prompt; without history of no matter */
    const int32_t *bias_ids; /* logit bias: logits[bias_ids[i]] += bias[i] */
    const float *bias;
    int32_t n_bias;
    int32_t forced;          /* >= 0: do not draw, report this token and its logprob (echo, scoring) */
    const uint32_t *mask;    /* NULL, or (n_vocab + 31) / 32 words: bit set = token allowed */
} milad_sampler;

/* What a row gave. Logprobs are natural logarithms of the softmax of the logits after bias, penalties and mask
 * at temperature 1, over the whole vocabulary (as OpenAI's: before top-k, top-p and temperature). */
typedef struct milad_output {
    int32_t token;   /* -1: the mask allowed none, or the logits were not finite */
    int32_t n_top;   /* alternatives below, best first */
    float logprob;
    int32_t reserved;
    int32_t top_ids[20];
    float top_logprobs[20];
} milad_output;

typedef struct milad_batch {
    uint32_t size;
    int32_t n_rows;
    const milad_row *rows;
    const milad_sequence *sequences;
    int32_t n_sequences;
    int32_t n_outputs;
    const milad_sampler *samplers; /* n_outputs */
    milad_output *outputs;         /* n_outputs, filled */
    float *logits;                 /* NULL, or n_outputs x n_vocab raw logits (tests, perplexity) */
} milad_batch;

MILAD_API const char *milad_version(void);
MILAD_API const char *milad_last_error(void);
MILAD_API uint32_t milad_struct_size(int32_t which); /* enum milad_struct; 0: unknown */

/* Moves waiting log lines ("W text\n": level letter D I W E, blank, text) into buf, whole lines only.
 * Returns the bytes written, no NUL. Any thread. */
MILAD_API int64_t milad_log_drain(char *buf, size_t n_bytes);

/* JSON text about the machine: {"isa","cores","threads","devices":[...]}. Returns bytes needed (without NUL);
 * writes at most n_bytes - 1 and a NUL. */
MILAD_API int64_t milad_devices(char *buf, size_t n_bytes);

MILAD_API int32_t milad_model_open(const char *path, const milad_model_params *params, milad_model **out);
MILAD_API void milad_model_close(milad_model *model); /* after its contexts; NULL is fine */
MILAD_API int32_t milad_model_info_get(const milad_model *model, milad_model_info *out);

/* The metadata value under `key` as JSON text; key NULL: an object of all (arrays longer than 64 elements are
 * written as {"array": n}). Returns bytes needed (writes as milad_devices does), MILAD_E_ARGUMENT: no such key. */
MILAD_API int64_t milad_model_metadata(const milad_model *model, const char *key, char *buf, size_t n_bytes);

/* Tokens of text (any bytes; what is not UTF-8 is taken as U+FFFD would be, never refused). Returns their number and writes
 * the first n_tokens of them. */
MILAD_API int64_t milad_tokenize(const milad_model *model, const char *text, size_t n_bytes, uint32_t flags,
                                 int32_t *tokens, int64_t n_tokens);

/* The bytes that a token stands for (a control token: its spelling). attributes may be NULL.
 * Returns their number, writes at most n_bytes; MILAD_E_ARGUMENT: no such token. */
MILAD_API int32_t milad_token_bytes(const milad_model *model, int32_t token, char *buf, int32_t n_bytes,
                                    uint32_t *attributes);

MILAD_API int32_t milad_context_open(milad_model *model, const milad_context_params *params, milad_context **out);
MILAD_API void milad_context_close(milad_context *context); /* NULL is fine */
MILAD_API int32_t milad_context_stat_get(const milad_context *context, milad_context_stat *out);

/* Computes every row, samples every output. On an error nothing of the batch counts as computed
 * (blocks it wrote are undefined beyond what earlier steps wrote). */
MILAD_API int32_t milad_step(milad_context *context, const milad_batch *batch);

/* Copies the first n_tokens positions of block src into block dst, all layers. */
MILAD_API int32_t milad_kv_copy(milad_context *context, int32_t src, int32_t dst, int32_t n_tokens);
/* One block, all layers, kv_block_bytes in this build's own layout (stable for one fingerprint and kv_type). */
MILAD_API int32_t milad_kv_read(const milad_context *context, int32_t block, void *buf, size_t n_bytes);
MILAD_API int32_t milad_kv_write(milad_context *context, int32_t block, const void *buf, size_t n_bytes);

/* Makes a step that runs, or else the next one, return MILAD_E_INTERRUPTED soon. Any thread. */
MILAD_API void milad_interrupt(milad_context *context);

/* A physical limit of this machine, measured for about 0.2 s. kind 0: read bandwidth in bytes/s, 1: int8
 * operations/s, 2: bf16 operations/s, 3: f32 operations/s. */
MILAD_API int32_t milad_probe(int32_t kind, int32_t n_threads, double *out);

#ifdef __cplusplus
}
#endif
#endif

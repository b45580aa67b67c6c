/* tokenize_fuzz.c: any bytes as a vocabulary and a text.
 *
 * Input: rule byte, flag byte, then lines: "t<type><token>" and "m<merge>" build the vocabulary, the rest after an empty line is
 * the text. Invariants: ids in range; the count does not depend on the room given; text never gives a control token unless
 * asked; bytes of all tokens can be read.
 */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "../include/milad.h"
#include "../tests/gguf_writer.h"
#include "gguf.h"
#include "vocab.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

static const char *const rules[] = {"gpt-2", "smollm", "llama-bpe", "qwen2", "qwen35", "tekken", "unknown"};

/* Items of one kind: strings into w, types (of tokens) into types. Returns how many; *text: what follows the empty line. */
static uint64_t lines(const uint8_t *data, size_t n, char kind, writer *w, writer *types, size_t *text) {
    uint64_t count = 0;
    for (size_t at = 0; at < n;) {
        const uint8_t *end = memchr(data + at, '\n', n - at);
        size_t next = end ? (size_t)(end - data) : n, start = at + 1 + (kind == 't');
        *text = next < n ? next + 1 : n;
        if (next == at)
            break;
        if (data[at] == kind && start <= next) {
            uint64_t length = next - start;
            w_u64(w, length);
            w_bytes(w, data + start, length);
            if (types)
                w_u32(types, data[at + 1] % 7);
            count++;
        }
        at = *text;
    }
    return count;
}

static vocab *build(const uint8_t *data, size_t n, const char *pre, size_t *text) {
    writer w = {0}, tokens = {0}, types = {0}, merges = {0};
    uint64_t n_tokens = lines(data, n, 't', &tokens, &types, text), n_merges = lines(data, n, 'm', &merges, NULL, text);
    w_header(&w, 0, 6);
    w_key(&w, "tokenizer.ggml.model", GGUF_STRING), w_str(&w, "gpt2");
    w_key(&w, "tokenizer.ggml.pre", GGUF_STRING), w_str(&w, pre);
    w_key(&w, "tokenizer.ggml.tokens", GGUF_ARRAY), w_u32(&w, GGUF_STRING), w_u64(&w, n_tokens), w_bytes(&w, tokens.data, tokens.n);
    w_key(&w, "tokenizer.ggml.token_type", GGUF_ARRAY), w_u32(&w, GGUF_I32), w_u64(&w, n_tokens), w_bytes(&w, types.data, types.n);
    w_key(&w, "tokenizer.ggml.merges", GGUF_ARRAY), w_u32(&w, GGUF_STRING), w_u64(&w, n_merges), w_bytes(&w, merges.data, merges.n);
    w_key(&w, "tokenizer.ggml.bos_token_id", GGUF_U32), w_u32(&w, n ? data[0] % 16 : 0);
    gguf *g = NULL;
    vocab *v = NULL;
    if (gguf_open_memory(w.data, w.n, 1, &g) == MILAD_OK)
        vocab_open(g, &v);
    gguf_close(g);
    free(w.data), free(tokens.data), free(types.data), free(merges.data);
    return v;
}

static void use(const vocab *v, const char *text, size_t n, uint32_t flags) {
    int64_t count = vocab_tokenize(v, text, n, flags, NULL, 0);
    if (count < 0)
        abort();
    int32_t *tokens = malloc(((size_t)count + 1) * sizeof *tokens);
    if (!tokens || vocab_tokenize(v, text, n, flags, tokens, count) != count)
        abort();
    for (int64_t i = 0; i < count; i++) {
        uint32_t attributes = 0;
        char buf[16];
        if (vocab_token_bytes(v, tokens[i], buf, sizeof buf, &attributes) < 0)
            abort();
        if (attributes & MILAD_TOKEN_CONTROL && !(flags & MILAD_TOKENIZE_PARSE_SPECIAL) && !(i == 0 && flags & MILAD_TOKENIZE_ADD_BOS))
            abort();
    }
    free(tokens);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes) {
    if (n_bytes < 2)
        return 0;
    size_t text = 0;
    vocab *v = build(data + 2, n_bytes - 2, rules[data[0] % 7], &text);
    if (v)
        use(v, (const char *)data + 2 + text, n_bytes - 2 - text, data[1] & 3);
    vocab_close(v);
    return 0;
}

/* vocab.c: see vocab.h. Reads tokenizer.ggml.* and puts the parts together: added tokens, NFC, pre-tokenizer, BPE.
 *
 * Rules
 * - Text can become a control token only where MILAD_TOKENIZE_PARSE_SPECIAL asks for it: bytes, merges and whole-piece
 *   look-ups never give one, whatever the file's merges say.
 * - Added tokens match leftmost, then longest, before anything else looks at the text, as in Hugging Face's AddedVocabulary:
 *   user-defined ones always, control ones on request.
 * - What a real file may lack is tolerated with a warning: an unknown pre-tokenizer, ids out of range, merges that name
 *   missing tokens, duplicate and empty tokens (the lowest id has the spelling; an empty token matches nothing). What
 *   leaves the meaning open is an error that names the key.
 */
#include "vocab.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../include/milad.h"
#include "error.h"
#include "pretokenize.h"
#include "unicode.h"
#include "vocab_bpe.h"

#define KEY "tokenizer.ggml."

enum {
    MAX_TOKENS = 1 << 22,    /* the largest vocabularies have 2^18 */
    MAX_MERGES = 1 << 23,    /* and 2^19 merges */
    MAX_SPELLING = 1 << 16,
    MAX_ADDED = 256          /* bytes of an added token that is looked for in text: bounds the search per position */
};

/* Added tokens sorted by spelling. */
typedef struct added {
    int32_t *ids;
    int32_t n;
    uint32_t first_bytes[8]; /* bit set of what they begin with */
} added;

struct vocab {
    spellings spellings;
    uint8_t *attributes; /* MILAD_TOKEN_* per id */
    bpe bpe;
    added all, user_defined;
    const pre_rule *rule;
    size_t longest_normal; /* bytes of the longest normal spelling */
    vocab_ids ids;
};

typedef struct span { const char *data; size_t n_bytes; } span;

static span spelling_of(const vocab *v, int32_t id) {
    size_t start = v->spellings.starts[id];
    return (span){v->spellings.bytes + start, v->spellings.starts[id + 1] - start};
}

/* -- reading ------------------------------------------------------------------------------------------------------- */

/* The array of tokens, of 1 to MAX_TOKENS items. */
static int32_t find_tokens(const gguf *g, const gguf_value **out) {
    const gguf_value *tokens = *out = gguf_find(g, KEY "tokens");
    if (!tokens || tokens->type != GGUF_ARRAY || tokens->item_type != GGUF_STRING)
        return fail(MILAD_E_FORMAT, "%s: key '" KEY "tokens' is %s", gguf_path(g), tokens ? "no array of strings" : "missing");
    if (tokens->n_items == 0 || tokens->n_items > MAX_TOKENS)
        return fail(MILAD_E_FORMAT, "%s: key '" KEY "tokens' has %llu tokens, not 1 to %d", gguf_path(g),
                    (unsigned long long)tokens->n_items, MAX_TOKENS);
    return MILAD_OK;
}

static int32_t read_tokens(const gguf *g, vocab *v) {
    const gguf_value *tokens;
    int32_t status = find_tokens(g, &tokens);
    if (status)
        return status;
    spellings *s = &v->spellings;
    gguf_str token;
    size_t n_bytes = 0;
    for (uint64_t cursor = 0; gguf_next_str(tokens, &cursor, &token) == 1; s->n++) {
        if (token.n_bytes > MAX_SPELLING)
            return fail(MILAD_E_FORMAT, "%s: key '" KEY "tokens': token %d has %llu bytes, more than %d", gguf_path(g), s->n,
                        (unsigned long long)token.n_bytes, MAX_SPELLING);
        n_bytes += token.n_bytes;
    }
    if ((uint64_t)s->n != tokens->n_items)
        return fail(MILAD_E_FORMAT, "%s: key '" KEY "tokens' is cut short", gguf_path(g));
    s->bytes = malloc(n_bytes + 1);
    s->starts = malloc(((size_t)s->n + 1) * sizeof *s->starts);
    v->attributes = malloc((size_t)s->n);
    if (!s->bytes || !s->starts || !v->attributes)
        return fail(MILAD_E_MEMORY, "%s: no memory for the vocabulary", gguf_path(g));
    n_bytes = 0;
    uint64_t cursor = 0;
    for (int32_t id = 0; id < s->n && gguf_next_str(tokens, &cursor, &token) == 1; id++) {
        s->starts[id] = n_bytes;
        memcpy(s->bytes + n_bytes, token.data, token.n_bytes);
        n_bytes += token.n_bytes;
    }
    s->starts[s->n] = n_bytes;
    if (spellings_index(s) != MILAD_OK)
        return fail(MILAD_E_MEMORY, "%s: no memory for the vocabulary", gguf_path(g));
    if (s->n_duplicates)
        log_line('W', "%s: %d tokens are spelled like an earlier one; text gives the earlier", gguf_path(g), s->n_duplicates);
    return MILAD_OK;
}

/* GGUF's numbers: docs/gguf.md of ggml-org/ggml, tokenizer.ggml.token_type. */
static int32_t read_types(const gguf *g, vocab *v) {
    static const uint8_t attributes[] = {MILAD_TOKEN_NORMAL, MILAD_TOKEN_NORMAL, MILAD_TOKEN_UNKNOWN, MILAD_TOKEN_CONTROL,
                                         MILAD_TOKEN_USER_DEFINED, MILAD_TOKEN_UNUSED, MILAD_TOKEN_BYTE};
    const gguf_value *types = gguf_find(g, KEY "token_type");
    memset(v->attributes, MILAD_TOKEN_NORMAL, (size_t)v->spellings.n);
    if (!types)
        return MILAD_OK;
    if (types->type != GGUF_ARRAY || (types->item_type != GGUF_I32 && types->item_type != GGUF_U32))
        return fail(MILAD_E_FORMAT, "%s: key '" KEY "token_type' is no array of 32-bit integers", gguf_path(g));
    if (types->n_items != (uint64_t)v->spellings.n)
        return fail(MILAD_E_FORMAT, "%s: key '" KEY "token_type' has %llu items for %d tokens", gguf_path(g),
                    (unsigned long long)types->n_items, v->spellings.n);
    for (int32_t id = 0; id < v->spellings.n; id++) {
        int64_t type = gguf_item_i64(types, (uint64_t)id);
        if (type < 0 || type >= (int64_t)sizeof attributes)
            return fail(MILAD_E_FORMAT, "%s: key '" KEY "token_type': token %d has type %lld", gguf_path(g), id, (long long)type);
        v->attributes[id] = attributes[type];
    }
    return MILAD_OK;
}

/* May BPE give this token? */
static int is_text(const vocab *v, int32_t id) {
    return id >= 0 && v->attributes[id] & (MILAD_TOKEN_NORMAL | MILAD_TOKEN_USER_DEFINED);
}

static void read_bytes(vocab *v) {
    for (int b = 0; b < 256; b++) {
        uint8_t byte = (uint8_t)b;
        char spelling[4];
        int32_t id = spellings_find(&v->spellings, spelling, spelling_encode(&byte, 1, spelling));
        v->bpe.byte_ids[b] = is_text(v, id) ? id : -1;
    }
    for (int32_t id = 0; id < v->spellings.n; id++) {
        size_t n_bytes = spelling_of(v, id).n_bytes;
        if (v->attributes[id] & MILAD_TOKEN_NORMAL && n_bytes > v->longest_normal)
            v->longest_normal = n_bytes;
    }
}

/* Is this the spelling of the token? */
static int is_spelled(const vocab *v, int32_t id, const char *left, size_t n_left, const char *right, size_t n_right) {
    if (id < 0 || id >= v->spellings.n)
        return 0;
    span s = spelling_of(v, id);
    return s.n_bytes == n_left + n_right && memcmp(s.data, left, n_left) == 0 && memcmp(s.data + n_left, right, n_right) == 0;
}

/* One merge "left right". 1: kept. *last: the token of the merge before, whose neighbour most often is the token of this one. */
static int read_merge(vocab *v, gguf_str text, uint32_t rank, char *joined, int32_t *last) {
    const char *blank = text.n_bytes > 2 && text.n_bytes < MAX_SPELLING ? memchr(text.data + 1, ' ', text.n_bytes - 2) : NULL;
    if (!blank)
        return 0;
    size_t n_left = (size_t)(blank - text.data), n_right = text.n_bytes - n_left - 1;
    int32_t left = spellings_find(&v->spellings, text.data, n_left), right = spellings_find(&v->spellings, blank + 1, n_right);
    int32_t id = *last + 1;
    if (v->spellings.n_duplicates || !is_spelled(v, id, text.data, n_left, blank + 1, n_right)) { /* the lowest id counts */
        memcpy(joined, text.data, n_left);
        memcpy(joined + n_left, blank + 1, n_right);
        id = spellings_find(&v->spellings, joined, n_left + n_right);
    }
    *last = id;
    return is_text(v, left) && is_text(v, right) && is_text(v, id) &&
           bpe_add(&v->bpe, (uint32_t)left, (uint32_t)right, rank, (uint32_t)id);
}

static int32_t read_merges(const gguf *g, vocab *v) {
    const gguf_value *merges = gguf_find(g, KEY "merges");
    if (!merges || merges->type != GGUF_ARRAY || merges->item_type != GGUF_STRING)
        return fail(MILAD_E_FORMAT, "%s: key '" KEY "merges' is %s", gguf_path(g), merges ? "no array of strings" : "missing");
    if (merges->n_items > MAX_MERGES)
        return fail(MILAD_E_FORMAT, "%s: key '" KEY "merges' has %llu merges, more than %d", gguf_path(g),
                    (unsigned long long)merges->n_items, MAX_MERGES);
    char *joined = malloc(MAX_SPELLING);
    if (!joined || bpe_reserve(&v->bpe, merges->n_items, v->spellings.seed) != MILAD_OK) {
        free(joined);
        return fail(MILAD_E_MEMORY, "%s: no memory for the merges", gguf_path(g));
    }
    uint32_t rank = 0, n_kept = 0;
    int32_t last = -1;
    gguf_str text;
    for (uint64_t cursor = 0; gguf_next_str(merges, &cursor, &text) == 1; rank++)
        n_kept += (uint32_t)read_merge(v, text, rank, joined, &last);
    free(joined);
    if (n_kept < rank)
        log_line('W', "%s: " KEY "merges: %u of %u ignored (no pair, a repeated pair, or a token that is missing or no text)",
                 gguf_path(g), rank - n_kept, rank);
    return MILAD_OK;
}

static int32_t read_rule(const gguf *g, vocab *v) {
    gguf_str pre = {"", 0};
    int32_t found = gguf_get_str(g, KEY "pre", &pre);
    if (found < 0)
        return found;
    v->rule = pre_rule_find(pre.data, (size_t)pre.n_bytes);
    if (!v->rule) {
        v->rule = pre_rule_default();
        if (found)
            log_line('W', "%s: " KEY "pre is '%.*s', which this build doesn't know: text is cut as for gpt-2, and the model may "
                     "answer worse than it could", gguf_path(g), (int)(pre.n_bytes < 40 ? pre.n_bytes : 40), pre.data);
        else
            log_line('W', "%s: " KEY "pre is missing: text is cut as for gpt-2, and the model may answer worse than it could",
                     gguf_path(g));
    }
    return MILAD_OK;
}

/* -- special tokens ------------------------------------------------------------------------------------------------ */

static int32_t read_id(const gguf *g, const vocab *v, const char *key, int32_t *out) {
    uint64_t id;
    int32_t found = gguf_get_u64(g, key, &id);
    *out = -1;
    if (found <= 0)
        return found;
    if (id < (uint64_t)v->spellings.n)
        *out = (int32_t)id;
    else if (id != UINT32_MAX) /* -1 written as unsigned: none */
        log_line('W', "%s: key '%s' is %llu, but there are %d tokens: ignored", gguf_path(g), key, (unsigned long long)id,
                 v->spellings.n);
    return MILAD_OK;
}

/* Control tokens that end a generation whatever the file says, those that end a turn first. Files name one EOS only, while
 * chat models end turns with another token: ggml-org/llama.cpp issue 9606 and llama-vocab.cpp, special_eog_ids. */
static const char *const eog_spellings[] = {
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>", "[EOT]",
    ("<\xEF\xBD\x9C" "end\xE2\x96\x81of\xE2\x96\x81sentence\xEF\xBD\x9C>"), "<end_of_utterance>", /* up to here: eot */
    "<|eom_id|>", "<|return|>", "<|call|>", "</s>", "[EOS]", "<eos>"};
enum { N_EOT_SPELLINGS = 10 };

static void mark_eog(vocab *v, int32_t id) {
    if (id < 0)
        return;
    if (v->attributes[id] & MILAD_TOKEN_NORMAL) { /* what ends a turn must not be spelled by text */
        log_line('W', "token %d ends a generation but is marked as text: taken as a control token", id);
        v->attributes[id] = MILAD_TOKEN_CONTROL;
    }
    v->attributes[id] |= MILAD_TOKEN_EOG;
}

static int32_t read_ids(const gguf *g, vocab *v) {
    vocab_ids *ids = &v->ids;
    int32_t eom, status;
    struct { const char *key; int32_t *id; } keys[] = {
        {KEY "bos_token_id", &ids->bos}, {KEY "eos_token_id", &ids->eos}, {KEY "eot_token_id", &ids->eot},
        {KEY "eom_token_id", &eom}, {KEY "unknown_token_id", &ids->unk}, {KEY "padding_token_id", &ids->pad}};
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        if ((status = read_id(g, v, keys[i].key, keys[i].id)) < 0)
            return status;
    ids->add_bos = pre_rule_add_bos(v->rule);
    if ((status = gguf_get_bool(g, KEY "add_bos_token", &ids->add_bos)) < 0 ||
        (status = gguf_get_bool(g, KEY "add_eos_token", &ids->add_eos)) < 0)
        return status;
    ids->add_bos = ids->add_bos && ids->bos >= 0;
    ids->add_eos = ids->add_eos && ids->eos >= 0;
    mark_eog(v, ids->eos);
    mark_eog(v, ids->eot);
    mark_eog(v, eom);
    for (size_t i = 0; i < sizeof eog_spellings / sizeof *eog_spellings; i++) {
        int32_t id = spellings_find(&v->spellings, eog_spellings[i], strlen(eog_spellings[i]));
        if (id < 0 || !(v->attributes[id] & MILAD_TOKEN_CONTROL))
            continue;
        mark_eog(v, id);
        if (ids->eot < 0 && i < N_EOT_SPELLINGS)
            ids->eot = id;
    }
    return MILAD_OK;
}

/* -- added tokens -------------------------------------------------------------------------------------------------- */

static int by_spelling(const void *a, const void *b, void *arg) {
    span x = spelling_of(arg, *(const int32_t *)a), y = spelling_of(arg, *(const int32_t *)b);
    int order = memcmp(x.data, y.data, x.n_bytes < y.n_bytes ? x.n_bytes : y.n_bytes);
    return order ? order : (x.n_bytes > y.n_bytes) - (x.n_bytes < y.n_bytes);
}

static int32_t collect_added(vocab *v, added *a, uint32_t wanted) {
    int32_t room = 0;
    for (int32_t id = 0; id < v->spellings.n; id++)
        room += (v->attributes[id] & wanted) != 0;
    a->ids = malloc(((size_t)room + 1) * sizeof *a->ids);
    if (!a->ids)
        return fail(MILAD_E_MEMORY, "no memory for the vocabulary");
    for (int32_t id = 0; id < v->spellings.n; id++) {
        span s = spelling_of(v, id);
        if (!(v->attributes[id] & wanted) || !s.n_bytes || s.n_bytes > MAX_ADDED ||
            spellings_find(&v->spellings, s.data, s.n_bytes) != id)
            continue;
        a->ids[a->n++] = id;
        uint8_t first = (uint8_t)s.data[0];
        a->first_bytes[first >> 5] |= 1u << (first & 31);
    }
    qsort_r(a->ids, (size_t)a->n, sizeof *a->ids, by_spelling, v);
    return MILAD_OK;
}

/* Narrows ids[lo..hi), which agree on `depth` bytes, to those whose next byte is `byte`. */
static void narrow(const vocab *v, const added *a, int32_t *lo, int32_t *hi, size_t depth, uint8_t byte) {
    int32_t ends[2];
    for (int upper = 0; upper < 2; upper++) {
        int32_t from = *lo, to = *hi;
        while (from < to) {
            int32_t mid = from + (to - from) / 2;
            span s = spelling_of(v, a->ids[mid]);
            int here = s.n_bytes > depth ? (uint8_t)s.data[depth] : -1;
            if (here < byte + upper)
                from = mid + 1;
            else
                to = mid;
        }
        ends[upper] = from;
    }
    *lo = ends[0];
    *hi = ends[1];
}

/* The longest added token that text begins with, or -1. */
static int32_t match_added(const vocab *v, const added *a, const uint8_t *text, size_t n) {
    if (!(a->first_bytes[text[0] >> 5] >> (text[0] & 31) & 1))
        return -1;
    int32_t lo = 0, hi = a->n, best = -1;
    for (size_t depth = 0; depth < n; depth++) {
        narrow(v, a, &lo, &hi, depth, text[depth]);
        if (lo == hi)
            break;
        if (spelling_of(v, a->ids[lo]).n_bytes == depth + 1)
            best = a->ids[lo];
    }
    return best;
}

/* -- open and close ------------------------------------------------------------------------------------------------ */

static int32_t check_model(const gguf *g) {
    gguf_str model;
    int32_t found = gguf_get_str(g, KEY "model", &model);
    if (found < 0)
        return found;
    if (!found)
        return fail(MILAD_E_FORMAT, "%s: key '" KEY "model' is missing", gguf_path(g));
    if (model.n_bytes == 4 && memcmp(model.data, "gpt2", 4) == 0)
        return MILAD_OK;
    int sentencepiece = model.n_bytes == 5 && memcmp(model.data, "llama", 5) == 0;
    return fail(MILAD_E_UNSUPPORTED, "%s: key '" KEY "model' is '%.*s'%s; this build has byte-level BPE ('gpt2') only",
                gguf_path(g), (int)(model.n_bytes < 40 ? model.n_bytes : 40), model.data, sentencepiece ? " (SentencePiece)" : "");
}

int32_t vocab_count(const gguf *g, int32_t *n) {
    const gguf_value *tokens;
    int32_t status = check_model(g);
    if (!status && !(status = find_tokens(g, &tokens)))
        *n = (int32_t)tokens->n_items;
    return status;
}

int32_t vocab_open(const gguf *g, vocab **out) {
    *out = NULL;
    int32_t status = check_model(g);
    if (status)
        return status;
    vocab *v = calloc(1, sizeof *v);
    if (!v)
        return fail(MILAD_E_MEMORY, "%s: no memory for the vocabulary", gguf_path(g));
    if ((status = read_tokens(g, v)) || (status = read_types(g, v)) || (status = read_rule(g, v)) || (status = read_ids(g, v))) {
        vocab_close(v);
        return status;
    }
    read_bytes(v);
    if ((status = read_merges(g, v)) ||
        (status = collect_added(v, &v->all, MILAD_TOKEN_CONTROL | MILAD_TOKEN_USER_DEFINED | MILAD_TOKEN_UNKNOWN)) ||
        (status = collect_added(v, &v->user_defined, MILAD_TOKEN_USER_DEFINED))) {
        vocab_close(v);
        return status;
    }
    *out = v;
    return MILAD_OK;
}

void vocab_close(vocab *v) {
    if (!v)
        return;
    spellings_free(&v->spellings);
    bpe_free(&v->bpe);
    free(v->attributes);
    free(v->all.ids);
    free(v->user_defined.ids);
    free(v);
}

int32_t vocab_size(const vocab *v) { return v->spellings.n; }
const vocab_ids *vocab_special_ids(const vocab *v) { return &v->ids; }

/* -- tokens of text ------------------------------------------------------------------------------------------------ */

typedef struct encoder {
    const vocab *v;
    bpe_scratch scratch;
    char *spelling; /* of a piece, 2 * longest_normal bytes at most matter */
    token_sink out;
} encoder;

/* ignore_merges: the id of a piece that is a normal token as a whole, or -1. */
static int32_t whole_piece(const encoder *e, const uint8_t *piece, size_t n) {
    const vocab *v = e->v;
    if (!e->spelling || n > v->longest_normal)
        return -1;
    int32_t id = spellings_find(&v->spellings, e->spelling, spelling_encode(piece, n, e->spelling));
    return id >= 0 && v->attributes[id] & MILAD_TOKEN_NORMAL ? id : -1;
}

/* Text between added tokens. */
static int32_t encode_text(encoder *e, const uint8_t *text, size_t n) {
    uint8_t *composed = NULL;
    size_t begin, end;
    int32_t status = n && pre_rule_nfc(e->v->rule) ? unicode_nfc(text, n, &composed, &n) : MILAD_OK;
    if (composed)
        text = composed;
    pre_scan scan;
    pre_scan_start(&scan, e->v->rule, text, n);
    while (!status && pre_scan_next(&scan, &begin, &end)) {
        int32_t id = whole_piece(e, text + begin, end - begin);
        if (id >= 0)
            token_put(&e->out, id);
        else
            status = bpe_encode(&e->v->bpe, text + begin, end - begin, &e->scratch, &e->out);
    }
    free(composed);
    return status;
}

static int32_t encode_all(encoder *e, const uint8_t *text, size_t n, const added *a, int32_t bos) {
    size_t start = 0, i = 0;
    int32_t status = MILAD_OK;
    while (i < n && !status) {
        int32_t id = match_added(e->v, a, text + i, n - i);
        if (id < 0) {
            i++;
            continue;
        }
        status = encode_text(e, text + start, i - start);
        if (!(id == bos && i == 0)) /* the text brought its own BOS */
            token_put(&e->out, id);
        start = i += spelling_of(e->v, id).n_bytes;
    }
    return status ? status : encode_text(e, text + start, n - start);
}

int64_t vocab_tokenize(const vocab *v, const char *text, size_t n_bytes, uint32_t flags, int32_t *tokens, int64_t n_tokens) {
    encoder e = {.v = v, .out = {.tokens = tokens, .n_tokens = n_tokens}};
    const uint8_t *bytes = (const uint8_t *)text;
    uint8_t *repaired = NULL;
    int32_t status = MILAD_OK, bos = flags & MILAD_TOKENIZE_ADD_BOS && v->ids.add_bos ? v->ids.bos : -1;
    size_t n_valid = utf8_valid_prefix(bytes, n_bytes);
    if (n_valid < n_bytes) {
        repaired = n_bytes < SIZE_MAX / 3 ? malloc(3 * n_bytes) : NULL;
        if (repaired)
            n_bytes = utf8_repair(bytes, n_bytes, repaired);
        else
            status = MILAD_E_MEMORY;
        bytes = repaired;
    }
    if (!status && pre_rule_ignore_merges(v->rule)) {
        e.spelling = malloc(2 * v->longest_normal + 4);
        status = e.spelling ? MILAD_OK : MILAD_E_MEMORY;
    }
    if (bos >= 0)
        token_put(&e.out, bos);
    if (!status)
        status = encode_all(&e, bytes, n_bytes, flags & MILAD_TOKENIZE_PARSE_SPECIAL ? &v->all : &v->user_defined, bos);
    free(repaired);
    free(e.spelling);
    bpe_scratch_free(&e.scratch);
    return status ? fail(status, "no memory to tokenise %zu bytes", n_bytes) : e.out.n;
}

int32_t vocab_token_bytes(const vocab *v, int32_t token, char *buf, int32_t n_bytes, uint32_t *attributes) {
    if (token < 0 || token >= v->spellings.n)
        return fail(MILAD_E_ARGUMENT, "there is no token %d: the vocabulary has %d", token, v->spellings.n);
    span s = spelling_of(v, token);
    size_t room = n_bytes > 0 ? (size_t)n_bytes : 0;
    if (attributes)
        *attributes = v->attributes[token];
    if (v->attributes[token] & (MILAD_TOKEN_NORMAL | MILAD_TOKEN_BYTE))
        return (int32_t)spelling_decode(s.data, s.n_bytes, buf, room);
    if (room)
        memcpy(buf, s.data, s.n_bytes < room ? s.n_bytes : room);
    return (int32_t)s.n_bytes;
}

/* test_vocab.c: the tokenizer's rooms one by one; test_tokenizer.py compares the whole with other implementations. */
#include "vocab.h"

#include <stdio.h>

#include "../include/milad.h"
#include "gguf_writer.h"
#include "pretokenize.h"
#include "test.h"
#include "unicode.h"
#include "vocab_bpe.h"

int32_t gguf_open_memory(const void *data, size_t n_bytes, int32_t vocab_only, gguf **out);

/* -- unicode ------------------------------------------------------------------------------------------------------- */

static void test_utf8_round_trip(void) {
    uint8_t bytes[4];
    for (uint32_t cp = 0; cp < 0x110000; cp++) {
        if (cp - 0xD800 < 0x800)
            continue;
        size_t n = utf8_put(cp, bytes), i = 0;
        CHECK_INT(utf8_next(bytes, n, &i), cp);
        CHECK_INT(i, n);
        CHECK_INT(utf8_valid_prefix(bytes, n), n);
    }
}

/* Unicode 16.0, table 3-8 and its like: the replacement characters of ill-formed sequences. */
static void test_repair(void) {
    static const struct { const char *in, *out; } cases[] = {
        {"a\xF1\x80\x80\xE1\x80\xC2" "b", "a\uFFFD\uFFFD\uFFFDb"},
        {"\xC0\xAF\xE0\x80\xBF\xF0\x81\x82" "A", "\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD\uFFFDA"},
        {"\xED\xA0\x80", "\uFFFD\uFFFD\uFFFD"}, {"\xF4\x91\x92\x93", "\uFFFD\uFFFD\uFFFD\uFFFD"}, {"\xF0\x9F\x98", "\uFFFD"},
        {"\xEF\xBF\xBD", "\uFFFD"}, {"\x80\xBF\xFF", "\uFFFD\uFFFD\uFFFD"}};
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        uint8_t out[64] = {0};
        size_t n = utf8_repair((const uint8_t *)cases[k].in, strlen(cases[k].in), out);
        CHECK_INT(n, strlen(cases[k].out));
        CHECK_STR((const char *)out, cases[k].out);
    }
}

static void test_classes(void) {
    static const struct { uint32_t cp, class; } cases[] = {
        {0, 0}, {'A', UC_UPPER}, {'z', UC_LOWER}, {'0', UC_NUMBER}, {' ', UC_SPACE}, {0x85, UC_SPACE}, {0x1C, 0}, {'_', UC_PUNCT}, {'$', UC_SYMBOL},
        {0x1C5, UC_UPPER}, {0xAA, UC_UNCASED}, {0x2B0, UC_UNCASED}, {0x301, UC_MARK}, {0x4E00, UC_UNCASED}, {0x3000, UC_SPACE}, {0x200B, 0},
        {0x2167, UC_NUMBER}, {0xD800, 0}, {0xE000, 0}, {0x1C89, UC_UPPER}, {0x10FFFF, 0}};
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++)
        CHECK_INT(unicode_class(cases[k].cp), cases[k].class);
    CHECK_STR(unicode_version, "16.0.0");
}

static void test_nfc(void) {
    static const char *const cases[][2] = {
        {"e\u0301", "\u00e9"}, {"\u1e0b\u0323", "\u1e0d\u0307"}, {"\u1100\u1161\u11a8", "\uac01"}, {"\u212b", "\u00c5"}, {"\u0344", "\u0308\u0301"},
        {"a\u0315\u0300\u05ae\u0300b", "\u00e0\u05ae\u0300\u0315b"}, {"\u0958", "\u0915\u093c"}, {"\uac00\u11a7", "\uac00\u11a7"}};
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        uint8_t *out;
        size_t n = 0;
        CHECK_INT(unicode_nfc((const uint8_t *)cases[k][0], strlen(cases[k][0]), &out, &n), MILAD_OK);
        CHECK(out && n == strlen(cases[k][1]) && memcmp(out, cases[k][1], n) == 0);
        free(out);
    }
}

/* -- pieces -------------------------------------------------------------------------------------------------------- */

/* Pieces joined by '|'. */
static void check_pieces(const char *pre, const char *text, const char *wanted) {
    char got[256] = "";
    size_t begin, end, n = 0;
    pre_scan s;
    const pre_rule *rule = pre_rule_find(pre, strlen(pre));
    CHECK(rule);
    pre_scan_start(&s, rule, (const uint8_t *)text, strlen(text));
    while (rule && pre_scan_next(&s, &begin, &end))
        n += (size_t)snprintf(got + n, sizeof got - n, "%s%.*s", n ? "|" : "", (int)(end - begin), text + begin);
    CHECK_STR(got, wanted);
}

/* Expected by tokenizers 0.23.3 with the expressions that pretokenize.c quotes. */
static void test_pieces(void) {
    check_pieces("gpt-2", "I'm  here'S 123 a\n\n b ", "I|'m| | here|'|S| 123| a|\n\n| b| ");
    check_pieces("smollm", "a  12 b", "a|  |1|2| b");
    check_pieces("llama-bpe", "I'M 12345 a\n \n b!\r\nx", "I|'M| |123|45| a|\n \n| b|!\r\n|x");
    check_pieces("qwen2", "'\u017fx 12\t(y", "'\u017f|x| |1|2|\t|(y");
    check_pieces("qwen35", "e\u0301a \u0301", "e\u0301a| \u0301");
    check_pieces("tekken", "ABCdef \u0301ABC aB//\n", "ABCdef| \u0301|ABC| a|B|//\n");
    CHECK(!pre_rule_find("gpt-3", 5) && !pre_rule_find("gpt-2x", 6) && !pre_rule_find("", 0));
}

/* Pieces cover any text in order and never stop short. */
static void test_pieces_cover(void) {
    static const char *const rules[] = {"gpt-2", "smollm", "llama-bpe", "qwen2", "qwen35", "tekken"};
    static const uint32_t points[] = {'a', 'B', ' ', ' ', '\n', '\r', '\t', '1', '2', '\'', 's', '/', '!', 0x301, 0x4E00, 0x1C5, 0x85, 0x378, 0x1F600, 0x17F};
    uint64_t seed = 6;
    for (int k = 0; k < 30000; k++) {
        uint8_t text[128];
        size_t n = 0, at = 0, begin, end;
        for (uint64_t left = test_random(&seed) % 30; left; left--)
            n += utf8_put(points[test_random(&seed) % (sizeof points / sizeof *points)], text + n);
        pre_scan s;
        pre_scan_start(&s, pre_rule_find(rules[k % 6], strlen(rules[k % 6])), text, n);
        for (; pre_scan_next(&s, &begin, &end); at = end)
            CHECK(begin == at && end > begin && end <= n);
        CHECK_INT(at, n);
    }
}

/* -- bpe ----------------------------------------------------------------------------------------------------------- */

static void test_byte_map(void) {
    for (int b = 0; b < 256; b++) {
        uint8_t byte = (uint8_t)b;
        char spelling[4], back[4];
        CHECK_INT(char_to_byte(byte_to_char(byte)), b);
        size_t n = spelling_encode(&byte, 1, spelling);
        CHECK(spelling_decode(spelling, n, back, 4) == 1 && (uint8_t)back[0] == byte);
    }
    CHECK_INT(byte_to_char(' '), 0x120);
    CHECK_INT(byte_to_char('\n'), 0x10A);
    char out[8];
    CHECK_INT(spelling_decode("\xE2\x96\x81", 3, out, 8), 3); /* no byte's character: stands for itself */
    CHECK_INT(spelling_decode("abc", 3, out, 2), 3);
}

/* The merge loop against the definition: again and again the lowest rank, leftmost first. */
static void test_merges_match_the_definition(void) {
    enum { BYTES = 3, RULES = 40 };
    uint64_t seed = 9;
    for (int round = 0; round < 400; round++) {
        bpe b;
        uint32_t n_ids = BYTES;
        struct { uint32_t left, right; } rules[RULES];
        memset(b.byte_ids, 0xFF, sizeof b.byte_ids);
        for (int k = 0; k < BYTES; k++)
            b.byte_ids['a' + k] = k;
        CHECK_INT(bpe_reserve(&b, RULES, test_random(&seed)), MILAD_OK);
        for (uint32_t k = 0; k < RULES; k++, n_ids++) {
            rules[k].left = (uint32_t)(test_random(&seed) % n_ids);
            rules[k].right = (uint32_t)(test_random(&seed) % n_ids);
            bpe_add(&b, rules[k].left, rules[k].right, k, n_ids);
        }
        for (int text = 0; text < 20; text++) {
            uint8_t piece[60];
            int32_t want[60], got[60];
            int64_t n = (int64_t)(test_random(&seed) % 60);
            size_t n_bytes = (size_t)n;
            for (size_t i = 0; i < n_bytes; i++)
                want[i] = (int32_t)(test_random(&seed) % BYTES), piece[i] = (uint8_t)('a' + want[i]);
            for (uint32_t k = 0; k < RULES;) {
                int64_t i = 0;
                while (i + 1 < n && ((uint32_t)want[i] != rules[k].left || (uint32_t)want[i + 1] != rules[k].right))
                    i++;
                if (i + 1 >= n) {
                    k++;
                    continue;
                }
                uint32_t first = k; /* a repeated pair keeps its first rank, so `first` is it */
                want[i] = (int32_t)(BYTES + first);
                memmove(want + i + 1, want + i + 2, (size_t)(n - i - 2) * sizeof *want);
                n--;
                k = 0;
            }
            bpe_scratch scratch = {0};
            token_sink out = {.tokens = got, .n_tokens = 60};
            CHECK_INT(bpe_encode(&b, piece, n_bytes, &scratch, &out), MILAD_OK);
            CHECK_INT(out.n, n);
            CHECK(memcmp(got, want, (size_t)n * sizeof *got) == 0);
            bpe_scratch_free(&scratch);
        }
        bpe_free(&b);
    }
}

/* -- a whole vocabulary -------------------------------------------------------------------------------------------- */

static vocab *open_vocabulary(const char *const *tokens, const int32_t *types, uint64_t n, const char *const *merges, uint64_t n_merges) {
    writer w = {0};
    w_header(&w, 0, 5);
    w_key(&w, "tokenizer.ggml.model", GGUF_STRING), w_str(&w, "gpt2");
    w_key(&w, "tokenizer.ggml.pre", GGUF_STRING), w_str(&w, "gpt-2");
    w_key(&w, "tokenizer.ggml.tokens", GGUF_ARRAY), w_u32(&w, GGUF_STRING), w_u64(&w, n);
    for (uint64_t i = 0; i < n; i++)
        w_str(&w, tokens[i]);
    w_key(&w, "tokenizer.ggml.token_type", GGUF_ARRAY), w_u32(&w, GGUF_I32), w_u64(&w, n), w_bytes(&w, types, 4 * n);
    w_key(&w, "tokenizer.ggml.merges", GGUF_ARRAY), w_u32(&w, GGUF_STRING), w_u64(&w, n_merges);
    for (uint64_t i = 0; i < n_merges; i++)
        w_str(&w, merges[i]);
    gguf *g = NULL;
    vocab *v = NULL;
    int32_t n_tokens = -1;
    CHECK_INT(gguf_open_memory(w.data, w.n, 1, &g), MILAD_OK);
    CHECK_INT(g ? vocab_count(g, &n_tokens) : -1, MILAD_OK);
    CHECK_INT(n_tokens, (int64_t)n);
    CHECK_INT(g ? vocab_open(g, &v) : -1, MILAD_OK);
    gguf_close(g); /* the vocabulary keeps copies */
    memset(w.data, 0xAA, w.n);
    free(w.data);
    return v;
}

static vocab *open_small(void) {
    static const char *const tokens[] = {"a", "b", "ab", "\xC4\xA0", "<s>", "<u>"}, *const merges[] = {"a b"};
    static const int32_t types[] = {1, 1, 1, 1, 3, 4};
    return open_vocabulary(tokens, types, 6, merges, 1);
}

static void check_tokens(const vocab *v, const char *text, const int32_t *wanted, int64_t n) {
    int32_t tokens[8];
    CHECK_INT(vocab_tokenize(v, text, strlen(text), 0, tokens, 8), n);
    CHECK(memcmp(tokens, wanted, (size_t)n * sizeof *wanted) == 0);
}

/* The token of a merge is the lowest id of its spelling, wherever that stands and however the neighbours are spelled. */
static void test_tokens_of_merges(void) {
    static const char *const merges[] = {"a b", "ab c", "b c", "c c", "bc c"};
    static const int32_t types[] = {1, 1, 1, 1, 1, 1, 1, 1};
    static const char *const orders[][8] = {
        {"a", "b", "c", "ab", "abc", "bc", "cc", "bcc"}, {"bcc", "cc", "bc", "abc", "ab", "c", "b", "a"},
        {"a", "b", "c", "ab", "abc", "ab", "bc", "cc"}, {"a", "b", "c", "ab", "ab", "abc", "abc", "bc"}};
    static const int32_t abc[] = {4, 3, 4, 5}, bc[] = {5, 2, 6, 7}, abcc[][2] = {{4, 2}, {3, 5}, {4, 2}, {5, 2}};
    for (int i = 0; i < 4; i++) {
        vocab *v = open_vocabulary(orders[i], types, 8, merges, 5);
        if (!v)
            continue;
        check_tokens(v, "abc", &abc[i], 1);
        check_tokens(v, "bc", &bc[i], 1);
        check_tokens(v, "abcc", abcc[i], 2);
        vocab_close(v);
    }
}

static void test_small_vocabulary(void) {
    vocab *v = open_small();
    int32_t tokens[8];
    char buf[8] = "";
    uint32_t attributes;
    if (!v)
        return;
    CHECK_INT(vocab_size(v), 6);
    CHECK_INT(vocab_tokenize(v, "ab b<s><u>zab", 13, 0, tokens, 8), 5); /* z, <, > and s have no byte tokens */
    static const int32_t plain[] = {2, 3, 1, 5, 2}, parsed[] = {2, 3, 1, 4, 5, 2};
    CHECK_INT(vocab_tokenize(v, "ab b<u>zab", 10, 0, tokens, 8), 5);
    CHECK(memcmp(tokens, plain, sizeof plain) == 0);
    CHECK_INT(vocab_tokenize(v, "ab b<s><u>zab", 13, MILAD_TOKENIZE_PARSE_SPECIAL, tokens, 8), 6);
    CHECK(memcmp(tokens, parsed, sizeof parsed) == 0);
    tokens[2] = -7;
    CHECK_INT(vocab_tokenize(v, "abab ab", 7, 0, tokens, 2), 4); /* counts all, writes what fits */
    CHECK(tokens[0] == 2 && tokens[1] == 2 && tokens[2] == -7);
    CHECK_INT(vocab_tokenize(v, "", 0, 3, NULL, 0), 0);
    CHECK_INT(vocab_token_bytes(v, 3, buf, 8, &attributes), 1);
    CHECK(buf[0] == ' ' && attributes == MILAD_TOKEN_NORMAL);
    CHECK_INT(vocab_token_bytes(v, 4, buf, 2, &attributes), 3);
    CHECK(buf[0] == '<' && buf[1] == 's' && attributes == MILAD_TOKEN_CONTROL);
    CHECK_INT(vocab_token_bytes(v, 6, buf, 8, NULL), MILAD_E_ARGUMENT);
    CHECK_INT(vocab_token_bytes(v, -1, buf, 8, NULL), MILAD_E_ARGUMENT);
    vocab_close(v);
    vocab_close(NULL);
}

int main(void) {
    test_utf8_round_trip();
    test_repair();
    test_classes();
    test_nfc();
    test_pieces();
    test_pieces_cover();
    test_byte_map();
    test_merges_match_the_definition();
    test_small_vocabulary();
    test_tokens_of_merges();
    return test_done();
}

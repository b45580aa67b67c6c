/* pretokenize.c: see pretokenize.h.
 *
 * The expressions, as the vendors' tokenizer.json files have them (pre_tokenizer, Split or ByteLevel; llama.cpp's
 * llama-vocab.cpp quotes the same ones beside its own). (?i:..) is full Unicode case folding: U+017F (long s) counts as s.
 *
 * gpt-2      's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
 * smollm     every \p{N} by itself (Digits, individual_digits), then gpt-2 on each stretch between
 * llama-bpe  (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+
 * qwen2      the same with \p{N} for \p{N}{1,3}; text in NFC (transformers' Qwen2Converter: normalizers.NFC())
 * qwen35     (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+
 * tekken     [^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+
 *            |[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*
 *            |\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+
 */
#include "pretokenize.h"

#include <string.h>

#include "unicode.h"

enum words { WORDS_GPT2, WORDS_PREFIXED, WORDS_CASED };

struct pre_rule {
    uint8_t words;         /* enum words */
    uint8_t numbers_first; /* every number is cut out before the rest is looked at */
    uint8_t max_number;    /* \p{N}{1,max_number} */
    uint8_t slash;         /* '/' may follow punctuation as a newline may */
    uint8_t letters;       /* class bits of a word */
    uint8_t nfc, ignore_merges, add_bos;
};

static const pre_rule rule_gpt2 = {.words = WORDS_GPT2, .letters = UC_LETTER};
static const pre_rule rule_smollm = {.words = WORDS_GPT2, .letters = UC_LETTER, .numbers_first = 1};
static const pre_rule rule_llama3 = {
    .words = WORDS_PREFIXED, .letters = UC_LETTER, .max_number = 3, .ignore_merges = 1, .add_bos = 1};
static const pre_rule rule_dbrx = {.words = WORDS_PREFIXED, .letters = UC_LETTER, .max_number = 3};
static const pre_rule rule_qwen2 = {.words = WORDS_PREFIXED, .letters = UC_LETTER, .max_number = 1, .nfc = 1};
static const pre_rule rule_stablelm2 = {.words = WORDS_PREFIXED, .letters = UC_LETTER, .max_number = 1};
static const pre_rule rule_qwen35 = {.words = WORDS_PREFIXED, .letters = UC_LETTER | UC_MARK, .max_number = 1};
static const pre_rule rule_tekken = {
    .words = WORDS_CASED, .letters = UC_LETTER, .max_number = 1, .slash = 1, .ignore_merges = 1, .add_bos = 1};

/* Names as llama.cpp's convert_hf_to_gguf.py writes them; which of them share an expression: llama-vocab.cpp. */
static const struct { const char *name; const pre_rule *rule; } rules[] = {
    {"gpt-2", &rule_gpt2}, {"phi-2", &rule_gpt2}, {"mpt", &rule_gpt2}, {"olmo", &rule_gpt2}, {"jais", &rule_gpt2},
    {"smollm", &rule_smollm}, {"starcoder", &rule_smollm}, {"refact", &rule_smollm}, {"command-r", &rule_smollm},
    {"codeshell", &rule_smollm},
    {"llama-bpe", &rule_llama3}, {"llama3", &rule_llama3}, {"llama-v3", &rule_llama3}, {"falcon3", &rule_llama3},
    {"pixtral", &rule_llama3}, {"lfm2", &rule_llama3}, {"dbrx", &rule_dbrx}, {"smaug-bpe", &rule_dbrx},
    {"qwen2", &rule_qwen2}, {"deepseek-r1-qwen", &rule_qwen2}, {"stablelm2", &rule_stablelm2},
    {"qwen35", &rule_qwen35}, {"tekken", &rule_tekken},
};

const pre_rule *pre_rule_find(const char *name, size_t n_bytes) {
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++)
        if (strlen(rules[i].name) == n_bytes && memcmp(rules[i].name, name, n_bytes) == 0)
            return rules[i].rule;
    return NULL;
}

const pre_rule *pre_rule_default(void) { return &rule_gpt2; }
int32_t pre_rule_nfc(const pre_rule *r) { return r->nfc; }
int32_t pre_rule_ignore_merges(const pre_rule *r) { return r->ignore_merges; }
int32_t pre_rule_add_bos(const pre_rule *r) { return r->add_bos; }

/* -- characters ---------------------------------------------------------------------------------------------------- */

enum { UC_END = 256 }; /* beyond the text */

typedef struct character { uint32_t cp, class; size_t next; } character;

static character char_at(const pre_scan *s, size_t i) {
    if (i >= s->chunk_end)
        return (character){.cp = UINT32_MAX, .class = UC_END, .next = i};
    uint32_t cp = utf8_next(s->text, s->chunk_end, &i);
    uint32_t class = cp - 'a' < 26 ? UC_LOWER : cp == ' ' ? UC_SPACE : unicode_class(cp);
    return (character){.cp = cp, .class = class, .next = i};
}

/* End of the run of characters of `mask` that starts at i. */
static size_t run_of(const pre_scan *s, size_t i, uint32_t mask) {
    for (character c; (c = char_at(s, i)).class & mask; i = c.next)
        ;
    return i;
}

static size_t run_of_others(const pre_scan *s, size_t i, uint32_t mask) {
    for (character c; !((c = char_at(s, i)).class & (mask | UC_END)); i = c.next)
        ;
    return i;
}

static int is_newline(uint32_t cp) { return cp == '\r' || cp == '\n'; }

/* 's|'t|'re|'ve|'m|'ll|'d at i: its end, or 0. */
static size_t contraction(const pre_scan *s, size_t i, int fold) {
    const uint8_t *t = s->text + i;
    size_t left = s->chunk_end - i;
    if (left < 2 || t[0] != '\'')
        return 0;
    uint8_t bit = fold ? 0x20 : 0, a = t[1] | bit, b = left > 2 ? t[2] | bit : 0;
    if (a == 's' || a == 't' || a == 'm' || a == 'd')
        return i + 2;
    if ((a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l'))
        return i + 3;
    return fold && left > 2 && t[1] == 0xC5 && t[2] == 0xBF ? i + 3 : 0; /* U+017F */
}

/* -- pieces -------------------------------------------------------------------------------------------------------- */

/* \s*[\r\n]+ (when newlines), else \s+(?!\S)|\s+, at i, which is white space. */
static size_t match_space(const pre_scan *s, size_t i, int newlines) {
    size_t last = i, after_newline = 0; /* start of the run's last character */
    character c;
    for (; (c = char_at(s, i)).class & UC_SPACE; i = c.next) {
        last = i;
        if (newlines && is_newline(c.cp))
            after_newline = c.next;
    }
    if (after_newline)
        return after_newline;
    int before_text = !(c.class & UC_END);
    return before_text && last > s->at ? last : i;
}

static size_t match_gpt2(const pre_scan *s) {
    size_t i = s->at, end = contraction(s, i, 0);
    if (end)
        return end;
    character c = char_at(s, i);
    if (c.cp == ' ') {
        character next = char_at(s, c.next);
        if (!(next.class & (UC_SPACE | UC_END)))
            c = next;
    }
    if (c.class & UC_LETTER)
        return run_of(s, c.next, UC_LETTER);
    if (c.class & UC_NUMBER)
        return run_of(s, c.next, UC_NUMBER);
    if (!(c.class & UC_SPACE))
        return run_of_others(s, c.next, UC_SPACE | UC_LETTER | UC_NUMBER);
    return match_space(s, i, 0);
}

/* [upper]*[lower]+ | [upper]+[lower]* of tekken at i, where marks and uncased letters are both: its end, or 0.
 * `alternative` 1 or 2. */
static size_t match_cased(const pre_scan *s, size_t i, int alternative) {
    const uint32_t both = UC_UNCASED | UC_MARK;
    size_t start = i, after_both = 0; /* end of the run's last character that may be lower too */
    character c;
    for (; (c = char_at(s, i)).class & (UC_UPPER | both); i = c.next)
        if (c.class & both)
            after_both = c.next;
    if (alternative == 2 && i == start)
        return 0;
    if (c.class & UC_LOWER)
        return run_of(s, i, UC_LOWER | both);
    return alternative == 2 ? i : after_both; /* the run gives characters back until one can be [lower] */
}

/* A word with at most one other character before it: its end, or 0. */
static size_t match_word(const pre_scan *s, character c) {
    int prefix = !(c.class & (UC_LETTER | UC_NUMBER | UC_END)) && !is_newline(c.cp);
    if (s->rule->words == WORDS_PREFIXED) {
        if (c.class & s->rule->letters)
            return run_of(s, c.next, s->rule->letters);
        return prefix && char_at(s, c.next).class & s->rule->letters ? run_of(s, c.next, s->rule->letters) : 0;
    }
    for (int alternative = 1; alternative <= 2; alternative++) {
        size_t end = prefix ? match_cased(s, c.next, alternative) : 0;
        if (!end)
            end = match_cased(s, s->at, alternative);
        if (end)
            return end;
    }
    return 0;
}

static size_t match_prefixed(const pre_scan *s) {
    const pre_rule *r = s->rule;
    size_t end = r->words == WORDS_PREFIXED ? contraction(s, s->at, 1) : 0;
    if (end)
        return end;
    character c = char_at(s, s->at);
    if ((end = match_word(s, c)))
        return end;
    if (c.class & UC_NUMBER) {
        end = c.next;
        for (int k = 1; k < r->max_number && (c = char_at(s, end)).class & UC_NUMBER; k++)
            end = c.next;
        return end;
    }
    uint32_t not_punct = UC_SPACE | UC_NUMBER | r->letters;
    character first = c.cp == ' ' ? char_at(s, c.next) : c;
    if (!(first.class & (not_punct | UC_END))) {
        end = run_of_others(s, first.next, not_punct);
        while (is_newline((c = char_at(s, end)).cp) || (r->slash && c.cp == '/'))
            end = c.next;
        return end;
    }
    return match_space(s, s->at, 1);
}

void pre_scan_start(pre_scan *s, const pre_rule *rule, const uint8_t *text, size_t n) {
    *s = (pre_scan){.rule = rule, .text = text, .n = n, .chunk_end = rule->numbers_first ? 0 : n};
}

int32_t pre_scan_next(pre_scan *s, size_t *begin, size_t *end) {
    if (s->at >= s->n)
        return 0;
    *begin = s->at;
    if (s->at >= s->chunk_end) { /* numbers_first: what lies ahead is one number, or a stretch without */
        s->chunk_end = s->n;
        character c = char_at(s, s->at);
        s->chunk_end = c.class & UC_NUMBER ? c.next : run_of_others(s, s->at, UC_NUMBER);
    }
    *end = s->at = s->rule->words == WORDS_GPT2 ? match_gpt2(s) : match_prefixed(s);
    return 1;
}

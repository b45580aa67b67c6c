/* pretokenize.h: cuts text into the pieces within which BPE merges, as each family's regular expression does.
 *
 * Matchers are written by hand, one pass, no backtracking beyond one piece: linear in the text. They know nothing of
 * vocabularies.
 */
#ifndef MILAD_PRETOKENIZE_H
#define MILAD_PRETOKENIZE_H

#include <stddef.h>
#include <stdint.h>

typedef struct pre_rule pre_rule;

/* The rule of a `tokenizer.ggml.pre`, NULL: unknown. */
const pre_rule *pre_rule_find(const char *name, size_t n_bytes);
const pre_rule *pre_rule_default(void); /* gpt-2 */
int32_t pre_rule_nfc(const pre_rule *r);           /* 1: text is brought to NFC first */
int32_t pre_rule_ignore_merges(const pre_rule *r); /* 1: a piece that is a token is that token */
int32_t pre_rule_add_bos(const pre_rule *r);       /* what holds when the file has no tokenizer.ggml.add_bos_token */

/* One walk over valid UTF-8. */
typedef struct pre_scan {
    const pre_rule *rule;
    const uint8_t *text;
    size_t n, at;
    size_t chunk_end; /* rules that cut numbers first: end of the stretch without or with them */
} pre_scan;

void pre_scan_start(pre_scan *s, const pre_rule *rule, const uint8_t *text, size_t n);
/* The next piece is text[*begin .. *end); 0 at the end of the text. Pieces cover all of it in order. */
int32_t pre_scan_next(pre_scan *s, size_t *begin, size_t *end);

#endif

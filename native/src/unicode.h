/* unicode.h: what the tokenizer must know of Unicode: UTF-8, classes of code points, NFC.
 *
 * Pure; tables in unicode_table.c (scripts/make-unicode). The version is the one that the regex engine of the Hugging
 * Face `tokenizers` wheel has (Oniguruma 6.9.10: 16.0), so that both cut text alike.
 */
#ifndef MILAD_UNICODE_H
#define MILAD_UNICODE_H

#include <stddef.h>
#include <stdint.h>

/* Class bits. A code point has one bit, or none (controls, format characters, private use, unassigned). */
enum {
    UC_UPPER = 1,   /* Lu, Lt */
    UC_LOWER = 2,   /* Ll */
    UC_UNCASED = 4, /* Lm, Lo */
    UC_MARK = 8,    /* Mn, Mc, Me */
    UC_NUMBER = 16, /* Nd, Nl, No */
    UC_PUNCT = 32,  /* P* */
    UC_SYMBOL = 64, /* S* */
    UC_SPACE = 128, /* the White_Space property, a regex's \s */
    UC_LETTER = UC_UPPER | UC_LOWER | UC_UNCASED
};

enum { UNICODE_REPLACEMENT = 0xFFFD };

uint32_t unicode_class(uint32_t cp);

/* The code point at text[*i] (*i < n); moves *i past it. A maximal invalid subsequence (Unicode 16.0, 3.9, table 3-8:
 * what Python's errors='replace' replaces by one character) gives UNICODE_REPLACEMENT. */
uint32_t utf8_next(const uint8_t *text, size_t n, size_t *i);
/* Writes cp (< 0x110000) to out[4]; returns 1..4. */
size_t utf8_put(uint32_t cp, uint8_t *out);
/* Length of the longest valid prefix. */
size_t utf8_valid_prefix(const uint8_t *text, size_t n);
/* Copies text with invalid subsequences replaced into out (3 * n bytes are enough); returns the bytes written. */
size_t utf8_repair(const uint8_t *text, size_t n, uint8_t *out);

/* Normalisation form C of valid UTF-8 (Unicode Standard Annex 15). *out: NULL when the text is NFC already as far as
 * can be told at once, else malloc'ed with *out_n bytes. Linear time and memory. MILAD_OK or MILAD_E_MEMORY. */
int32_t unicode_nfc(const uint8_t *text, size_t n, uint8_t **out, size_t *out_n);

/* unicode_table.c */
extern const char unicode_version[];
extern const int32_t unicode_n_ranges, unicode_n_combining, unicode_n_decompositions, unicode_n_compositions;
extern const uint32_t unicode_ranges[], unicode_combining_classes[], unicode_decompositions[][3], unicode_compositions[][3];

#endif

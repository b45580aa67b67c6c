/* unicode.c: see unicode.h. */
#include "unicode.h"

#include <stdlib.h>
#include <string.h>

#include "../include/milad.h"

uint32_t unicode_class(uint32_t cp) {
    int32_t lo = 0, hi = unicode_n_ranges; /* ranges[lo] starts at or before cp, ranges[hi] after it */
    while (hi - lo > 1) {
        int32_t mid = lo + (hi - lo) / 2;
        if (unicode_ranges[mid] >> 8 <= cp)
            lo = mid;
        else
            hi = mid;
    }
    return unicode_ranges[lo] & 0xFF;
}

uint32_t utf8_next(const uint8_t *text, size_t n, size_t *i) {
    uint32_t b = text[(*i)++];
    if (b < 0x80)
        return b;
    if (b < 0xC2 || b > 0xF4)
        return UNICODE_REPLACEMENT;
    int more = b < 0xE0 ? 1 : b < 0xF0 ? 2 : 3;
    uint32_t cp = b & (0x3Fu >> more);
    /* Table 3-7: the second byte's range shuts out overlong forms, surrogates and what is beyond U+10FFFF. */
    uint32_t lo = b == 0xE0 ? 0xA0 : b == 0xF0 ? 0x90 : 0x80;
    uint32_t hi = b == 0xED ? 0x9F : b == 0xF4 ? 0x8F : 0xBF;
    for (; more; more--, lo = 0x80, hi = 0xBF) {
        if (*i >= n || text[*i] < lo || text[*i] > hi)
            return UNICODE_REPLACEMENT;
        cp = cp << 6 | (text[(*i)++] & 0x3Fu);
    }
    return cp;
}

size_t utf8_put(uint32_t cp, uint8_t *out) {
    if (cp < 0x80) {
        out[0] = (uint8_t)cp;
        return 1;
    }
    size_t n = cp < 0x800 ? 2 : cp < 0x10000 ? 3 : 4;
    for (size_t k = n - 1; k; k--, cp >>= 6)
        out[k] = (uint8_t)(0x80 | (cp & 0x3F));
    out[0] = (uint8_t)((0xF00 >> n) | cp);
    return n;
}

size_t utf8_valid_prefix(const uint8_t *text, size_t n) {
    size_t i = 0;
    while (i < n) {
        size_t at = i;
        /* A real U+FFFD is three bytes and begins with EF; no invalid sequence does both. */
        if (utf8_next(text, n, &i) == UNICODE_REPLACEMENT && !(i - at == 3 && memcmp(text + at, "\xEF\xBF\xBD", 3) == 0))
            return at;
    }
    return n;
}

size_t utf8_repair(const uint8_t *text, size_t n, uint8_t *out) {
    size_t n_out = 0;
    for (size_t i = 0; i < n;)
        n_out += utf8_put(utf8_next(text, n, &i), out + n_out);
    return n_out;
}

/* -- NFC ----------------------------------------------------------------------------------------------------------- */

/* Hangul syllables, by arithmetic: The Unicode Standard, 3.12. */
enum { S_BASE = 0xAC00, L_BASE = 0x1100, V_BASE = 0x1161, T_BASE = 0x11A7, L_N = 19, V_N = 21, T_N = 28, S_N = 11172 };

static uint32_t combining_class(uint32_t cp) {
    int32_t lo = 0, hi = unicode_n_combining;
    while (lo < hi) {
        int32_t mid = lo + (hi - lo) / 2;
        uint32_t here = unicode_combining_classes[mid] >> 8;
        if (here == cp)
            return unicode_combining_classes[mid] & 0xFF;
        if (here < cp)
            lo = mid + 1;
        else
            hi = mid;
    }
    return 0;
}

static const uint32_t *decomposition(uint32_t cp) {
    int32_t lo = 0, hi = unicode_n_decompositions;
    while (lo < hi) {
        int32_t mid = lo + (hi - lo) / 2;
        const uint32_t *row = unicode_decompositions[mid];
        if (row[0] == cp)
            return row;
        if (row[0] < cp)
            lo = mid + 1;
        else
            hi = mid;
    }
    return NULL;
}

/* The primary composite of a pair, or 0. */
static uint32_t composition(uint32_t first, uint32_t second) {
    if (first - L_BASE < L_N && second - V_BASE < V_N)
        return S_BASE + ((first - L_BASE) * V_N + (second - V_BASE)) * T_N;
    if (first - S_BASE < S_N && (first - S_BASE) % T_N == 0 && second - T_BASE - 1 < T_N - 1)
        return first + (second - T_BASE);
    int32_t lo = 0, hi = unicode_n_compositions;
    while (lo < hi) {
        int32_t mid = lo + (hi - lo) / 2;
        const uint32_t *row = unicode_compositions[mid];
        if (row[0] == first && row[1] == second)
            return row[2];
        if (row[0] < first || (row[0] == first && row[1] < second))
            lo = mid + 1;
        else
            hi = mid;
    }
    return 0;
}

/* Full canonical decomposition of cp into out; returns how many (at most 4 in Unicode 16). */
static size_t decompose(uint32_t cp, uint32_t *out) {
    if (cp - S_BASE < S_N) {
        uint32_t s = cp - S_BASE, t = s % T_N;
        out[0] = L_BASE + s / (V_N * T_N);
        out[1] = V_BASE + s % (V_N * T_N) / T_N;
        out[2] = T_BASE + t;
        return t ? 3 : 2;
    }
    const uint32_t *row = decomposition(cp);
    if (!row) {
        out[0] = cp;
        return 1;
    }
    size_t n = decompose(row[1], out);
    if (row[2])
        n += decompose(row[2], out + n);
    return n;
}

/* Canonical order: a stable counting sort of every run of marks by combining class, linear however long the run. */
static void reorder(uint32_t *cps, uint8_t *classes, size_t n, uint32_t *spare) {
    for (size_t i = 0; i < n;) {
        if (!classes[i]) {
            i++;
            continue;
        }
        size_t end = i, starts[256] = {0};
        int sorted = 1;
        for (; end < n && classes[end]; end++) {
            sorted &= end == i || classes[end - 1] <= classes[end];
            starts[classes[end]]++;
        }
        if (!sorted) {
            for (size_t c = 0, at = i; c < 256; c++) {
                size_t count = starts[c];
                starts[c] = at;
                at += count;
            }
            for (size_t k = i; k < end; k++)
                spare[starts[classes[k]]++] = cps[k];
            memcpy(cps + i, spare + i, (end - i) * sizeof *cps);
            for (size_t c = 0, at = i; c < 256; c++)
                while (at < starts[c])
                    classes[at++] = (uint8_t)c;
        }
        i = end;
    }
}

/* Joins starters with the marks after them, in place; returns the new length. */
static size_t compose(uint32_t *cps, uint8_t *classes, size_t n) {
    size_t n_out = 0, starter = SIZE_MAX;
    uint32_t last_class = 0; /* of the last mark kept since the starter */
    for (size_t i = 0; i < n; i++) {
        uint32_t c = classes[i], joined = 0;
        int adjacent = starter != SIZE_MAX && n_out == starter + 1;
        if (starter != SIZE_MAX && (adjacent || last_class < c)) /* D115: not blocked */
            joined = composition(cps[starter], cps[i]);
        if (joined) {
            cps[starter] = joined;
            continue;
        }
        if (c == 0)
            starter = n_out;
        last_class = c;
        cps[n_out] = cps[i];
        classes[n_out++] = (uint8_t)c;
    }
    return n_out;
}

int32_t unicode_nfc(const uint8_t *text, size_t n, uint8_t **out, size_t *out_n) {
    *out = NULL;
    size_t i = 0;
    while (i < n && text[i] < 0xCC) /* CC 80 is U+0300: nothing below it can change */
        i++;
    if (i == n)
        return MILAD_OK;
    size_t room = n * 4 / 2 + 4; /* code points: at most 4 from one of at least 2 bytes */
    uint32_t *cps = malloc(room * sizeof *cps), *spare = malloc(room * sizeof *cps);
    uint8_t *classes = malloc(room), *bytes = malloc(room * 4);
    if (!cps || !spare || !classes || !bytes) {
        free(cps), free(spare), free(classes), free(bytes);
        return MILAD_E_MEMORY;
    }
    size_t n_cps = 0, n_bytes = 0;
    for (i = 0; i < n;) {
        uint32_t cp = utf8_next(text, n, &i);
        if (cp < 0xC0)
            cps[n_cps++] = cp;
        else
            n_cps += decompose(cp, cps + n_cps);
    }
    for (i = 0; i < n_cps; i++)
        classes[i] = cps[i] < 0x300 ? 0 : (uint8_t)combining_class(cps[i]);
    reorder(cps, classes, n_cps, spare);
    n_cps = compose(cps, classes, n_cps);
    for (i = 0; i < n_cps; i++)
        n_bytes += utf8_put(cps[i], bytes + n_bytes);
    free(cps), free(spare), free(classes);
    *out = bytes;
    *out_n = n_bytes;
    return MILAD_OK;
}

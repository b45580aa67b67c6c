/* error.c: the thread's last error and the log ring.
 *
 * Text that reaches a person may carry bytes of a model file, so whatever could move a terminal's cursor or
 * break a line is written as \xNN: control characters, ill-formed UTF-8, line separators and direction marks.
 * The ring holds whole lines and forgets the oldest; nothing here calls out of the library.
 */
#include "error.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "../include/milad.h"

enum { TEXT_BYTES = 512, RING_BYTES = 1 << 16 };

static _Thread_local char last_error[TEXT_BYTES];

static pthread_mutex_t ring_lock = PTHREAD_MUTEX_INITIALIZER;
static char ring[RING_BYTES];
static size_t ring_start, ring_used;

/* Bytes of the well-formed, harmless character at s (0: none). The text is NUL-terminated. */
static int printable_length(const unsigned char *s) {
    if (s[0] < 0x80)
        return s[0] >= 0x20 && s[0] != 0x7f;
    int n = s[0] >= 0xf0 ? 4 : s[0] >= 0xe0 ? 3 : 2;
    if (s[0] < 0xc2 || s[0] > 0xf4)
        return 0;
    uint32_t c = s[0] & (0xffu >> (n + 1));
    for (int i = 1; i < n; i++) {
        if ((s[i] & 0xc0) != 0x80)
            return 0;
        c = c << 6 | (s[i] & 0x3fu);
    }
    static const uint32_t least[5] = {0, 0, 0xa0, 0x800, 0x10000};
    if (c < least[n] || c > 0x10ffff || (c >= 0xd800 && c < 0xe000))
        return 0;
    if ((c >= 0x200e && c <= 0x200f) || (c >= 0x2028 && c <= 0x202e) || (c >= 0x2066 && c <= 0x2069) || c == 0xfeff)
        return 0;
    return n;
}

/* Formats into out (n_out bytes, NUL-terminated), escaped; returns the length. */
static size_t format_escaped(char *out, size_t n_out, const char *format, va_list args) {
    char raw[TEXT_BYTES];
    vsnprintf(raw, sizeof raw, format, args);
    const unsigned char *s = (const unsigned char *)raw;
    size_t n = 0;
    while (*s) {
        int take = printable_length(s);
        if (n + 5 > n_out)
            break;
        if (take) {
            memcpy(out + n, s, (size_t)take);
            n += (size_t)take;
            s += take;
        } else {
            n += (size_t)snprintf(out + n, n_out - n, "\\x%02x", *s++);
        }
    }
    out[n] = 0;
    return n;
}

int32_t fail(int32_t status, const char *format, ...) {
    va_list args;
    va_start(args, format);
    format_escaped(last_error, sizeof last_error, format, args);
    va_end(args);
    return status;
}

const char *milad_last_error(void) { return last_error; }

static void ring_put(const char *s, size_t n) {
    for (size_t i = 0; i < n; i++)
        ring[(ring_start + ring_used + i) % RING_BYTES] = s[i];
    ring_used += n;
}

static void ring_drop_line(void) {
    while (ring_used) {
        char c = ring[ring_start];
        ring_start = (ring_start + 1) % RING_BYTES;
        ring_used--;
        if (c == '\n')
            return;
    }
}

void log_line(char level, const char *format, ...) {
    char text[TEXT_BYTES + 3];
    va_list args;
    va_start(args, format);
    text[0] = level;
    text[1] = ' ';
    size_t n = 2 + format_escaped(text + 2, TEXT_BYTES, format, args);
    va_end(args);
    text[n++] = '\n';
    pthread_mutex_lock(&ring_lock);
    while (ring_used + n > RING_BYTES)
        ring_drop_line();
    ring_put(text, n);
    pthread_mutex_unlock(&ring_lock);
}

int64_t milad_log_drain(char *buf, size_t n_bytes) {
    size_t n_whole = 0;
    pthread_mutex_lock(&ring_lock);
    for (size_t i = 0; i < ring_used && i < n_bytes; i++) {
        buf[i] = ring[(ring_start + i) % RING_BYTES];
        if (buf[i] == '\n')
            n_whole = i + 1;
    }
    ring_start = (ring_start + n_whole) % RING_BYTES;
    ring_used -= n_whole;
    pthread_mutex_unlock(&ring_lock);
    return (int64_t)n_whole;
}

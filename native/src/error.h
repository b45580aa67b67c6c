/* error.h: the thread's last error and the log ring. */
#ifndef MILAD_ERROR_H
#define MILAD_ERROR_H

#include <stdint.h>

/* Sets the thread's error text (bytes that are not printable are escaped) and returns `status`. */
#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
int32_t fail(int32_t status, const char *format, ...);

/* Puts a line in the log ring: level 'D', 'I', 'W' or 'E'. Any thread; the oldest lines give way. */
#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
void log_line(char level, const char *format, ...);

#endif

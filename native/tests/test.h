/* test.h: a C test is a program that returns 0. CHECK prints what failed and goes on; `return test_done()` ends main.
 *
 * CHECK_NEAR is false for NaN on either side. Model files that a test needs come from the environment
 * (MILAD_TEST_MODEL); a test that lacks one says so and passes. */
#ifndef MILAD_TEST_H
#define MILAD_TEST_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int test_failures;

#define CHECK(condition) \
    do { \
        if (!(condition)) { \
            test_failures++; \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
        } \
    } while (0)

#define CHECK_INT(got, want) \
    do { \
        long long got_ = (long long)(got), want_ = (long long)(want); \
        if (got_ != want_) { \
            test_failures++; \
            fprintf(stderr, "%s:%d: %s is %lld, not %lld\n", __FILE__, __LINE__, #got, got_, want_); \
        } \
    } while (0)

#define CHECK_NEAR(got, want, tolerance) \
    do { \
        double got_ = (double)(got), want_ = (double)(want), gap_ = got_ - want_; \
        if (!((gap_ < 0 ? -gap_ : gap_) <= (double)(tolerance))) { \
            test_failures++; \
            fprintf(stderr, "%s:%d: %s is %.9g, not %.9g +- %g\n", __FILE__, __LINE__, #got, got_, want_, \
                    (double)(tolerance)); \
        } \
    } while (0)

#define CHECK_STR(got, want) \
    do { \
        const char *got_ = (got), *want_ = (want); \
        if (strcmp(got_, want_) != 0) { \
            test_failures++; \
            fprintf(stderr, "%s:%d: %s is \"%s\", not \"%s\"\n", __FILE__, __LINE__, #got, got_, want_); \
        } \
    } while (0)

static inline int test_done(void) {
    if (test_failures)
        fprintf(stderr, "%d check(s) failed\n", test_failures);
    return test_failures != 0;
}

/* splitmix64 (Steele, Lea, Flood 2014): seeded random numbers for tests. */
static inline uint64_t test_random(uint64_t *state) {
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* Uniform in [-1, 1). */
static inline float test_uniform(uint64_t *state) {
    return (float)((double)(test_random(state) >> 11) / 4503599627370496.0 - 1.0);
}

#endif

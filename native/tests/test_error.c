/* The last error is one printable line; the log ring keeps whole lines, newest first to stay. */
#include "error.h"
#include "milad.h"
#include "test.h"

static void test_escapes(void) {
    CHECK_INT(fail(MILAD_E_FORMAT, "key '%s'", "a\nb\x1b[31m\x7f"), MILAD_E_FORMAT);
    CHECK_STR(milad_last_error(), "key 'a\\x0ab\\x1b[31m\\x7f'");
    fail(-1, "%s", "d\xc3\xa9j\xc3\xa0 \xe2\x82\xac \xf0\x9f\x98\x80");
    CHECK_STR(milad_last_error(), "d\xc3\xa9j\xc3\xa0 \xe2\x82\xac \xf0\x9f\x98\x80");
    fail(-1, "%s", "\xc3");
    CHECK_STR(milad_last_error(), "\\xc3");
    fail(-1, "%s", "\xc0\xaf \xed\xa0\x80 \xe2\x80\xae \xc2\x85"); /* overlong, surrogate, override, NEL */
    CHECK_STR(milad_last_error(), "\\xc0\\xaf \\xed\\xa0\\x80 \\xe2\\x80\\xae \\xc2\\x85");
    char long_text[2000];
    memset(long_text, 1, sizeof long_text - 1);
    long_text[sizeof long_text - 1] = 0;
    fail(-1, "%s", long_text);
    CHECK(strlen(milad_last_error()) > 400 && strlen(milad_last_error()) < 512);
}

static void test_ring(void) {
    char buf[1 << 17];
    log_line('W', "one %d", 1);
    log_line('I', "two\n");
    CHECK_INT(milad_log_drain(buf, 9), 8);
    CHECK(memcmp(buf, "W one 1\n", 8) == 0);
    CHECK_INT(milad_log_drain(buf, 3), 0);
    CHECK_INT(milad_log_drain(buf, sizeof buf), 10);
    CHECK(memcmp(buf, "I two\\x0a\n", 10) == 0);
    CHECK_INT(milad_log_drain(buf, sizeof buf), 0);
    for (int i = 0; i < 20000; i++)
        log_line('D', "line %d", i);
    int64_t n = milad_log_drain(buf, sizeof buf);
    CHECK(n > 60000 && n <= 65536);
    CHECK(memcmp(buf, "D line ", 7) == 0);
    CHECK(memcmp(buf + n - 13, "D line 19999\n", 13) == 0);
}

int main(void) {
    test_escapes();
    test_ring();
    return test_done();
}

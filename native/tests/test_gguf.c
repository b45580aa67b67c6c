/* The GGUF reader: what a good file says, and that no damaged one does more than fail with one line. */
#include <sys/mman.h>
#include <unistd.h>

#include "gguf.h"
#include "gguf_writer.h"
#include "mat.h"
#include "milad.h"
#include "test.h"

/* A file with every type of value, two tensors and data. The copy is exactly as long, so ASan sees a byte too far. */
static writer sample_file(void) {
    writer w = {0};
    w_header(&w, 2, 17);
    w_key(&w, "u8", GGUF_U8), w_bytes(&w, "\xff", 1);
    w_key(&w, "i8", GGUF_I8), w_bytes(&w, "\xff", 1);
    w_key(&w, "u16", GGUF_U16), w_bytes(&w, "\xff\xff", 2);
    w_key(&w, "i16", GGUF_I16), w_bytes(&w, "\xfe\xff", 2);
    w_key(&w, "u32", GGUF_U32), w_u32(&w, 4000000000u);
    w_key(&w, "i32", GGUF_I32), w_u32(&w, (uint32_t)-5);
    w_key(&w, "f32", GGUF_F32), w_f32(&w, 0.25f);
    w_key(&w, "bool", GGUF_BOOL), w_bytes(&w, "\x01", 1);
    w_key(&w, "text", GGUF_STRING), w_str(&w, "caf\xc3\xa9");
    w_key(&w, "u64", GGUF_U64), w_u64(&w, UINT64_MAX);
    w_key(&w, "i64", GGUF_I64), w_u64(&w, (uint64_t)INT64_MIN);
    w_key(&w, "f64", GGUF_F64);
    double f64 = 1e300;
    w_bytes(&w, &f64, 8);
    w_key(&w, "nan", GGUF_F32), w_u32(&w, 0x7fc00000);
    w_key(&w, "words", GGUF_ARRAY), w_u32(&w, GGUF_STRING), w_u64(&w, 3);
    w_str(&w, "one"), w_str(&w, ""), w_str(&w, "three");
    w_key(&w, "numbers", GGUF_ARRAY), w_u32(&w, GGUF_I16), w_u64(&w, 2), w_bytes(&w, "\x01\x00\xff\xff", 4);
    w_key(&w, "none", GGUF_ARRAY), w_u32(&w, GGUF_STRING), w_u64(&w, 0);
    w_key(&w, "general.alignment", GGUF_U32), w_u32(&w, 16);
    w_tensor(&w, "b", 32, 2, MAT_Q8_0, 16);
    w_tensor(&w, "a", 4, 1, MAT_F32, 0);
    w_pad(&w, 16);
    for (int i = 0; i < 4; i++)
        w_f32(&w, (float)i);
    for (int i = 0; i < 2 * 34; i++)
        w_bytes(&w, "\x07", 1);
    w.data = realloc(w.data, w.n);
    return w;
}

static void test_values(const gguf *g) {
    uint64_t u = 0;
    double f = 0;
    int32_t b = 0;
    gguf_str s;
    CHECK_INT(gguf_n_values(g), 17);
    CHECK(gguf_get_u64(g, "u8", &u) == 1 && u == 255);
    CHECK(gguf_get_u64(g, "u16", &u) == 1 && u == 65535);
    CHECK(gguf_get_u64(g, "u32", &u) == 1 && u == 4000000000u);
    CHECK(gguf_get_u64(g, "u64", &u) == 1 && u == UINT64_MAX);
    CHECK(gguf_get_u64(g, "absent", &u) == 0);
    CHECK(gguf_get_u64(g, "i8", &u) == MILAD_E_FORMAT);
    CHECK_STR(milad_last_error(), "(memory): key 'i8' is negative");
    CHECK(gguf_get_u64(g, "text", &u) == MILAD_E_FORMAT);
    CHECK_STR(milad_last_error(), "(memory): key 'text' is of type string, not an integer");
    CHECK(gguf_get_u64(g, "f32", &u) < 0 && gguf_get_u64(g, "bool", &u) < 0 && gguf_get_u64(g, "words", &u) < 0);
    CHECK(gguf_get_f64(g, "f32", &f) == 1 && f == 0.25);
    CHECK(gguf_get_f64(g, "f64", &f) == 1 && f == 1e300);
    CHECK(gguf_get_f64(g, "i32", &f) == 1 && f == -5);
    CHECK(gguf_get_f64(g, "nan", &f) == MILAD_E_FORMAT && gguf_get_f64(g, "text", &f) < 0);
    CHECK(gguf_get_bool(g, "bool", &b) == 1 && b == 1 && gguf_get_bool(g, "u8", &b) < 0);
    CHECK(gguf_get_str(g, "text", &s) == 1 && s.n_bytes == 5 && memcmp(s.data, "caf\xc3\xa9", 5) == 0);
    CHECK(gguf_get_str(g, "words", &s) < 0);
    CHECK_INT(gguf_item_i64(gguf_find(g, "i64"), 0), INT64_MIN);
    CHECK_INT(gguf_item_i64(gguf_find(g, "u64"), 0), INT64_MAX);
    CHECK_INT(gguf_item_i64(gguf_find(g, "i16"), 0), -2);
    CHECK_INT(gguf_item_i64(gguf_find(g, "numbers"), 1), -1);
    CHECK(gguf_item_f64(gguf_find(g, "numbers"), 0) == 1);
}

static void test_arrays(const gguf *g) {
    uint64_t cursor = 0, n = 0;
    gguf_str s;
    char joined[32] = "";
    while (gguf_next_str(gguf_find(g, "words"), &cursor, &s))
        n++, strncat(joined, s.data, s.n_bytes), strcat(joined, ",");
    CHECK_INT(n, 3);
    CHECK_STR(joined, "one,,three,");
    cursor = 0;
    CHECK_INT(gguf_next_str(gguf_find(g, "none"), &cursor, &s), 0);
    CHECK_INT(gguf_next_str(gguf_find(g, "text"), &cursor, &s), 0);
    CHECK_INT(gguf_next_str(gguf_find(g, "numbers"), &cursor, &s), 0);
}

static void test_tensors(const gguf *g) {
    const gguf_tensor *a = gguf_find_tensor(g, "a"), *b = gguf_find_tensor(g, "b");
    CHECK(a && b && gguf_tensor_at(g, 0) == b && gguf_tensor_at(g, 1) == a && !gguf_tensor_at(g, 2));
    CHECK(!gguf_find_tensor(g, "c") && !gguf_find_tensor(g, "") && !gguf_find_tensor(g, "aa"));
    CHECK_INT(a->n_bytes, 16);
    CHECK_INT(b->n_bytes, 68);
    CHECK(a->dims[0] == 4 && a->dims[1] == 1 && b->dims[0] == 32 && b->dims[1] == 2 && b->dims[3] == 1);
    float third;
    memcpy(&third, a->data + 8, 4);
    CHECK(third == 2 && b->data == a->data + 16 && b->data[67] == 7);
}

/* Opens the first n bytes, in a block of just that size. */
static int32_t open_copy(const uint8_t *data, size_t n, int32_t vocab_only) {
    uint8_t *copy = malloc(n ? n : 1);
    gguf *g = NULL;
    memcpy(copy, data, n);
    int32_t status = gguf_open_memory(copy, n, vocab_only, &g);
    CHECK((status == 0) == (g != NULL));
    if (status)
        CHECK(strlen(milad_last_error()) > 10 && !strchr(milad_last_error(), '\n'));
    gguf_close(g);
    free(copy);
    return status;
}

static void test_truncated(const writer *w) {
    for (size_t n = 0; n < w->n; n++)
        CHECK(open_copy(w->data, n, 0) == MILAD_E_FORMAT);
    CHECK_INT(open_copy(w->data, w->n, 0), 0);
    CHECK_INT(open_copy(w->data, w->n - 68 - 16, 1), 0); /* vocabulary only: the data may be absent */
}

/* Every byte of the header set to every of a few values, then random damage: an error or a file, never more. */
static void test_damaged(const writer *w) {
    static const uint8_t values[] = {0, 1, 0x7f, 0x80, 0xff, 9, 8};
    uint8_t *copy = malloc(w->n);
    for (size_t i = 0; i < w->n; i++)
        for (size_t k = 0; k < sizeof values; k++) {
            memcpy(copy, w->data, w->n);
            copy[i] = values[k];
            open_copy(copy, w->n, 0);
        }
    uint64_t random = 1;
    for (int round = 0; round < 20000; round++) {
        memcpy(copy, w->data, w->n);
        for (uint64_t n = 1 + test_random(&random) % 8; n; n--)
            copy[test_random(&random) % w->n] = (uint8_t)test_random(&random);
        open_copy(copy, 1 + test_random(&random) % w->n, (int32_t)(round & 1));
    }
    free(copy);
}

/* A file of one value or one tensor, as the caller wrote it after the header. */
static void check_refused(writer *w, int32_t status, const char *words) {
    CHECK_INT(open_copy(w->data, w->n, 0), status);
    if (!strstr(milad_last_error(), words)) {
        test_failures++;
        fprintf(stderr, "expected \"%s\" in \"%s\"\n", words, milad_last_error());
    }
    free(w->data);
    *w = (writer){0};
}

static void refuse_tensor(uint32_t n_dims, uint64_t d0, uint64_t d1, uint32_t type, uint64_t offset, const char *words) {
    writer w = {0};
    w_header(&w, 1, 0);
    w_str(&w, "t");
    w_u32(&w, n_dims);
    w_u64(&w, d0);
    for (uint32_t i = 1; i < n_dims && i < 8; i++)
        w_u64(&w, d1);
    w_u32(&w, type);
    w_u64(&w, offset);
    w_pad(&w, 32);
    w_bytes(&w, "0123456789abcdef", 16);
    check_refused(&w, MILAD_E_FORMAT, words);
}

static void test_hostile(void) {
    writer w = {0};
    w_header(&w, 0, (uint64_t)1 << 63), check_refused(&w, MILAD_E_FORMAT, "counts 9223372036854775808 keys");
    w_header(&w, UINT64_MAX, 0), check_refused(&w, MILAD_E_FORMAT, "counts 18446744073709551615 tensors");
    w_bytes(&w, "GGUF\0\0\0\x03", 8), w_u64(&w, 0), w_u64(&w, 0);
    check_refused(&w, MILAD_E_UNSUPPORTED, "big-endian");
    w_bytes(&w, "GGUF\1\0\0\0", 8), check_refused(&w, MILAD_E_UNSUPPORTED, "version 1");
    w_bytes(&w, "GGML", 4), check_refused(&w, MILAD_E_FORMAT, "not a GGUF file");
    w_header(&w, 0, 1), w_key(&w, "k", 77), w_u64(&w, 0), check_refused(&w, MILAD_E_FORMAT, "key 'k' has unknown type 77");
    w_header(&w, 0, 1), w_key(&w, "k", GGUF_STRING), w_u64(&w, UINT64_MAX - 7);
    check_refused(&w, MILAD_E_FORMAT, "key 'k' has length 18446744073709551608");
    w_header(&w, 0, 1), w_key(&w, "k", GGUF_ARRAY), w_u32(&w, GGUF_U64), w_u64(&w, (uint64_t)1 << 61);
    check_refused(&w, MILAD_E_FORMAT, "key 'k' has 2305843009213693952 items");
    w_header(&w, 0, 1), w_key(&w, "k", GGUF_ARRAY), w_u32(&w, GGUF_ARRAY), w_u64(&w, 1), w_u64(&w, 0);
    check_refused(&w, MILAD_E_UNSUPPORTED, "array of arrays");
    w_header(&w, 0, 1), w_key(&w, "k", GGUF_BOOL), w_bytes(&w, "\x02", 1);
    check_refused(&w, MILAD_E_FORMAT, "bool of value 2");
    w_header(&w, 0, 2);
    for (int i = 0; i < 2; i++)
        w_key(&w, "twice\n", GGUF_U8), w_bytes(&w, "", 1);
    check_refused(&w, MILAD_E_FORMAT, "key 'twice\\x0a' occurs twice");
    w_header(&w, 2, 0), w_tensor(&w, "t", 1, 1, MAT_F32, 0), w_tensor(&w, "t", 1, 1, MAT_F32, 0), w_pad(&w, 32), w_u32(&w, 0);
    check_refused(&w, MILAD_E_FORMAT, "tensor 't' occurs twice");
    static const uint64_t alignments[] = {0, 1, 4, 24, 1u << 31, (uint64_t)1 << 32, UINT64_MAX};
    for (size_t i = 0; i < sizeof alignments / sizeof *alignments; i++) {
        w_header(&w, 0, 1), w_key(&w, "general.alignment", GGUF_U64), w_u64(&w, alignments[i]);
        check_refused(&w, MILAD_E_FORMAT, "'general.alignment' is");
    }
    w_header(&w, 0, 1), w_key(&w, "general.alignment", GGUF_STRING), w_str(&w, "32");
    check_refused(&w, MILAD_E_FORMAT, "'general.alignment' is of type string");
    refuse_tensor(0, 1, 1, MAT_F32, 0, "0 dimensions");
    refuse_tensor(5, 1, 1, MAT_F32, 0, "5 dimensions");
    refuse_tensor(UINT32_MAX, 1, 1, MAT_F32, 0, "4294967295 dimensions");
    refuse_tensor(2, 0, 1, MAT_F32, 0, "dimension 0 of 0");
    refuse_tensor(2, UINT64_MAX, 1, MAT_F32, 0, "dimension 0 of 18446744073709551615");
    refuse_tensor(4, (uint64_t)1 << 32, (uint64_t)1 << 32, MAT_F32, 0, "is impossible");
    refuse_tensor(2, (uint64_t)1 << 30, (uint64_t)1 << 30, MAT_F32, 0, "reach beyond the end");
    refuse_tensor(2, (uint64_t)1 << 31, (uint64_t)1 << 31, MAT_F32, 0, "impossibly large");
    refuse_tensor(2, (uint64_t)1 << 62, 1, MAT_F32, 0, "impossibly large");
    refuse_tensor(1, 31, 1, MAT_Q8_0, 0, "no multiple of Q8_0's blocks of 32");
    refuse_tensor(1, 4, 1, MAT_F32, 8, "offset 8 is no multiple of the alignment 32");
    refuse_tensor(1, 4, 1, MAT_F32, 32, "reach beyond the end");
    refuse_tensor(1, 4, 1, MAT_F32, UINT64_MAX - 31, "reach beyond the end");
    refuse_tensor(1, 4, 1, UINT32_MAX, 0, "unknown type 4294967295");
}

static void test_paths(void) {
    gguf *g;
    CHECK_INT(gguf_open("/nonexistent/model.gguf", 0, &g), MILAD_E_IO);
    CHECK_STR(milad_last_error(), "/nonexistent/model.gguf: No such file or directory");
    CHECK_INT(gguf_open("/", 0, &g), MILAD_E_IO);
    CHECK_INT(gguf_open("/dev/null", 0, &g), MILAD_E_IO);
    char path[5000];
    memset(path, 'p', sizeof path - 1);
    path[sizeof path - 1] = 0;
    CHECK_INT(gguf_open(path, 0, &g), MILAD_E_IO);
    CHECK(strncmp(milad_last_error(), "...p", 4) == 0 && strlen(milad_last_error()) < 300);
}

/* Reads past the mapping: what a shrunk file lacks is an error; without a descriptor the mapping serves. */
static void test_reads(const writer *w) {
    gguf *g = NULL;
    char path[64];
    uint8_t room[68];
    int fd = memfd_create("model", MFD_CLOEXEC);
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    CHECK_INT(pwrite(fd, w->data, w->n, 0), (int64_t)w->n);
    CHECK_INT(gguf_open(path, 0, &g), 0);
    if (!g)
        return;
    const gguf_tensor *t = gguf_find_tensor(g, "b");
    const uint8_t *last = w->data + w->n - sizeof room;
    CHECK_INT(t->n_bytes, sizeof room);
    CHECK_INT(gguf_read(g, t->data, sizeof room, room), 0);
    CHECK(memcmp(room, last, sizeof room) == 0);
    gguf_will_read(g, t->data, sizeof room);
    CHECK_INT(ftruncate(fd, (off_t)w->n - 1), 0);
    CHECK_INT(gguf_read(g, t->data, sizeof room - 1, room), 0);
    CHECK_INT(gguf_read(g, t->data, sizeof room, room), MILAD_E_IO);
    CHECK(strstr(milad_last_error(), "the file ends at byte") != NULL);
    CHECK_INT(pwrite(fd, w->data, w->n, 0), (int64_t)w->n);
    gguf_end_reads(g);
    memset(room, 0xAA, sizeof room);
    CHECK_INT(gguf_read(g, t->data, sizeof room, room), 0);
    CHECK(memcmp(room, last, sizeof room) == 0);
    gguf_end_reads(g);
    gguf_close(g);
    close(fd);
}

int main(void) {
    writer w = sample_file();
    gguf *g;
    CHECK_INT(gguf_open_memory(w.data, w.n, 0, &g), 0);
    if (g) {
        test_values(g);
        test_arrays(g);
        test_tensors(g);
        gguf_close(g);
    }
    test_truncated(&w);
    test_damaged(&w);
    test_reads(&w);
    free(w.data);
    test_hostile();
    test_paths();
    return test_done();
}

/* mat_pack.c: the panels' layouts: rows of a file into panels and back. Owns the order of bytes in a panel (see
 * mat_internal.h); must not know what they mean.
 */
#include "mat_internal.h"

#define PAIR(type, values, bytes, class, unit, ...) \
    {type, values, bytes, 2 * (values), 2 * (bytes), unit, class, 0, \
     (int32_t)(sizeof((mat_field[]){__VA_ARGS__}) / sizeof(mat_field)), {__VA_ARGS__}}
#define SUPER(type, bytes, class, unit, ...) \
    {type, 256, bytes, 256, bytes, unit, class, 0, \
     (int32_t)(sizeof((mat_field[]){__VA_ARGS__}) / sizeof(mat_field)), {__VA_ARGS__}}

static const mat_layout_info layouts[] = {
    {MAT_F32, 1, 4, 64, 256, 4096, MAT_FLOATS, 4, 0, {{0, 0}}},
    {MAT_F16, 1, 2, 64, 128, 2048, MAT_FLOATS, 2, 0, {{0, 0}}},
    {MAT_BF16, 1, 2, 64, 128, 2048, MAT_PAIRS, 4, 0, {{0, 0}}},
    PAIR(MAT_Q4_0, 32, 18, MAT_S32, 576, {0, 2}, {18, 2}, {2, 16}, {20, 16}),
    PAIR(MAT_Q4_1, 32, 20, MAT_SM32, 640, {0, 2}, {20, 2}, {2, 2}, {22, 2}, {4, 16}, {24, 16}),
    PAIR(MAT_Q5_0, 32, 22, MAT_S32, 704, {0, 2}, {22, 2}, {2, 4}, {24, 4}, {6, 16}, {28, 16}),
    PAIR(MAT_Q5_1, 32, 24, MAT_SM32, 768, {0, 2}, {24, 2}, {2, 2}, {26, 2}, {4, 4}, {28, 4}, {8, 16}, {32, 16}),
    PAIR(MAT_Q8_0, 32, 34, MAT_S32, 1088, {0, 2}, {34, 2}, {2, 32}, {36, 32}),
    PAIR(MAT_IQ4_NL, 32, 18, MAT_S32, 576, {0, 2}, {18, 2}, {2, 16}, {20, 16}),
    SUPER(MAT_Q2_K, 84, MAT_SM16, 1344, {80, 2}, {82, 2}, {0, 16}, {16, 64}),
    SUPER(MAT_Q3_K, 110, MAT_S16, 1792, {108, 2}, {108, 0}, {96, 12}, {0, 32}, {32, 64}),
    SUPER(MAT_Q4_K, 144, MAT_SM32, 2304, {0, 2}, {2, 2}, {4, 12}, {16, 128}),
    SUPER(MAT_Q5_K, 176, MAT_SM32, 2816, {0, 2}, {2, 2}, {4, 12}, {16, 32}, {48, 128}),
    SUPER(MAT_Q6_K, 210, MAT_S16, 3392, {208, 2}, {208, 0}, {192, 16}, {0, 128}, {128, 64}),
};

const mat_layout_info *mat_layout_of(int32_t type)
{
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++)
        if (layouts[i].type == type)
            return &layouts[i];
    return NULL;
}

static int64_t units_of(const mat_layout_info *l, int64_t n_in)
{
    return (n_in + l->unit_values - 1) / l->unit_values;
}

size_t mat_panel_bytes(const mat *m)
{
    const mat_layout_info *l = mat_layout_of(m->type);
    return l ? (size_t)((m->n_out + MAT_LANES - 1) / MAT_LANES) * (size_t)units_of(l, m->n_in) * (size_t)l->panel_unit : 0;
}

typedef uint16_t octet __attribute__((vector_size(16)));

/* transpose() where nothing is missing. Row by row: each word is one load and one store, and the runs stay in L1. */
static inline __attribute__((always_inline)) void transpose_whole(const uint8_t *const *rows, size_t offset, int32_t n_bytes,
                                                                  const int32_t word, uint32_t flip, uint8_t *dst)
{
    for (int32_t r = 0; r < MAT_LANES; r++, dst += word)
        for (int32_t i = 0; i < n_bytes; i += word) {
            uint32_t w = 0;
            memcpy(&w, rows[r] + offset + i, (size_t)word);
            w ^= flip;
            memcpy(dst + i * MAT_LANES, &w, (size_t)word);
        }
}

/* The same for a field of 2 bytes, eight rows to a store. */
static inline __attribute__((always_inline)) void transpose_scale(const uint8_t *const *rows, size_t offset, uint8_t *dst)
{
    for (int32_t r = 0; r < MAT_LANES; r += 8) {
        uint16_t w[8];
        for (int32_t k = 0; k < 8; k++)
            memcpy(&w[k], rows[r + k] + offset, 2);
        const octet out = {w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7]};
        memcpy(dst + 2 * r, &out, 16);
    }
}

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define HAVE_SHUFFLE 1
#endif
#endif

#ifdef HAVE_SHUFFLE
/* The same for fields of 16 n bytes, four rows at a time: a quarter of the loads and stores. */
static inline __attribute__((always_inline)) void transpose_quads(const uint8_t *const *rows, size_t offset, int32_t n_bytes,
                                                                  uint32_t flip, uint8_t *dst)
{
    typedef uint32_t quad __attribute__((vector_size(16)));
    for (int32_t r = 0; r < MAT_LANES; r += 4, dst += 16) {
        const uint8_t *row[4] = {rows[r] + offset, rows[r + 1] + offset, rows[r + 2] + offset, rows[r + 3] + offset};
        for (int32_t i = 0; i < n_bytes; i += 16) {
            quad in[4], half[4], out[4];
            for (int32_t k = 0; k < 4; k++)
                memcpy(&in[k], row[k] + i, 16);
            for (int32_t k = 0; k < 2; k++) {
                half[2 * k] = __builtin_shufflevector(in[k], in[k + 2], 0, 4, 1, 5);
                half[2 * k + 1] = __builtin_shufflevector(in[k], in[k + 2], 2, 6, 3, 7);
            }
            for (int32_t k = 0; k < 2; k++) {
                out[2 * k] = __builtin_shufflevector(half[k], half[k + 2], 0, 4, 1, 5) ^ flip;
                out[2 * k + 1] = __builtin_shufflevector(half[k], half[k + 2], 2, 6, 3, 7) ^ flip;
            }
            for (int32_t k = 0; k < 4; k++)
                memcpy(dst + (i + 4 * k) * MAT_LANES, &out[k], 16);
        }
    }
}

/* The same for words of 2 bytes, eight rows at a time. */
static inline __attribute__((always_inline)) void transpose_octets(const uint8_t *const *rows, size_t offset, int32_t n_bytes, uint8_t *dst)
{
    for (int32_t r = 0; r < MAT_LANES; r += 8, dst += 16)
        for (int32_t i = 0; i < n_bytes; i += 16) {
            octet a[8], b[8];
            for (int32_t k = 0; k < 8; k++)
                memcpy(&a[k], rows[r + k] + offset + i, 16);
            for (int32_t round = 0; round < 3; round++) {
                for (int32_t k = 0; k < 4; k++) {
                    b[2 * k] = __builtin_shufflevector(a[k], a[k + 4], 0, 8, 1, 9, 2, 10, 3, 11);
                    b[2 * k + 1] = __builtin_shufflevector(a[k], a[k + 4], 4, 12, 5, 13, 6, 14, 7, 15);
                }
                memcpy(a, b, sizeof a);
            }
            for (int32_t k = 0; k < 8; k++)
                memcpy(dst + (i + 2 * k) * MAT_LANES, &a[k], 16);
        }
}
#endif

/* n_bytes at `offset` of 16 rows of n_have bytes, `word` bytes at a time, as runs of 16 words. Rows at NULL and bytes beyond n_have are
 * zero. Bits of `flip` are turned over in every word. Returns the end of what it wrote. */
static inline __attribute__((always_inline)) uint8_t *transpose(const uint8_t *const *rows, size_t offset, int32_t n_bytes, int32_t word,
                                                                uint32_t flip, size_t n_have, uint8_t *dst)
{
    uint8_t *const end = dst + n_bytes * MAT_LANES;
    if (!rows[MAT_LANES - 1] || offset + (size_t)n_bytes > n_have) { /* rows end with the matrix: the last one tells */
        for (int32_t i = 0; i < n_bytes; i += word)
            for (int32_t r = 0; r < MAT_LANES; r++, dst += word)
                for (int32_t b = 0; b < word; b++) {
                    const size_t at = offset + (size_t)(i + b);
                    dst[b] = (uint8_t)((rows[r] && at < n_have ? rows[r][at] : 0) ^ (flip >> 8 * b));
                }
        return end;
    }
    if (n_bytes == 2)
        transpose_scale(rows, offset, dst);
    else if (n_bytes == 4)
        transpose_whole(rows, offset, 4, 4, flip, dst);
#ifdef HAVE_SHUFFLE
    else if (n_bytes == 16)
        transpose_quads(rows, offset, 16, flip, dst);
    else if (n_bytes % 16 == 0 && word == 4)
        transpose_quads(rows, offset, n_bytes, flip, dst);
    else if (n_bytes % 16 == 0)
        transpose_octets(rows, offset, n_bytes, dst);
#endif
    else if (word == 4)
        transpose_whole(rows, offset, n_bytes, 4, flip, dst);
    else
        transpose_whole(rows, offset, n_bytes, 2, 0, dst);
    return end;
}

/* dst |= ((src >> from) & mask) << to in every byte of a 64-byte line. */
static void move_bits(uint8_t *dst, int to, const uint8_t *src, int from, unsigned mask)
{
    const uint64_t m = mask * 0x0101010101010101u;
    for (int i = 0; i < 64; i += 8) {
        uint64_t s, d;
        memcpy(&s, src + i, 8);
        memcpy(&d, dst + i, 8);
        d |= ((s >> from) & m) << to;
        memcpy(dst + i, &d, 8);
    }
}

/* One line from n lines of the file: of each the bits from `from` on, one above the other. */
static inline __attribute__((always_inline)) void collect_bits(uint8_t *dst, const uint8_t *src, size_t step, int n, int from)
{
    typedef uint64_t pair __attribute__((vector_size(16)));
    const int width = 8 / n;
    const uint64_t mask = (0xFFu >> (8 - width)) * 0x0101010101010101u;
    for (int i = 0; i < 64; i += 16) {
        pair out = {0};
        for (int k = 0; k < n; k++) {
            pair s;
            memcpy(&s, src + (size_t)k * step + (size_t)i, 16);
            out |= ((s >> from) & mask) << (k * width);
        }
        memcpy(dst + i, &out, 16);
    }
}

/* The lines (64 bytes: 4 values of 16 rows) of a K type's codes between the file's order, in which a line holds bits of several
 * blocks, and the panel's, in which each block of 32 has its own: nibbles (4 lines), pairs of bits (2), single bits (1).
 * In the file (dequant.c): nibbles of block b in line group low(b); pairs and single bits of all blocks in the same lines. */
typedef struct codes {
    bool six, nibbles, pairs, singles;
    size_t low, two; /* where nibbles and pairs begin in the file; single bits are first */
} codes;

static codes codes_of(int32_t type)
{
    const bool six = type == MAT_Q6_K, singles = type == MAT_Q3_K || type == MAT_Q5_K;
    const size_t low = singles ? 512 : 0;
    return (codes){six, six || type == MAT_Q4_K || type == MAT_Q5_K, six || type == MAT_Q2_K || type == MAT_Q3_K, singles, low,
                   six ? low + 2048 : low};
}

static void regroup_to_panel(int32_t type, uint8_t *panel, const uint8_t *file)
{
    const codes c = codes_of(type);
    for (int b = 0; b < 8; b++) {
        if (c.nibbles) {
            const uint8_t *f = file + c.low + (c.six ? b / 4 * 2 + b % 2 : b / 2) * 512;
            for (int g = 0; g < 4; g++, panel += 64)
                collect_bits(panel, f + g * 64, 256, 2, c.six ? b % 4 / 2 * 4 : b % 2 * 4);
        }
        if (c.pairs)
            for (int g = 0; g < 8; g += 4, panel += 64)
                collect_bits(panel, file + c.two + (b / 4 * 8 + g) * 64, 64, 4, b % 4 * 2);
        if (c.singles) {
            collect_bits(panel, file, 64, 8, b);
            panel += 64;
        }
    }
}

static void regroup_to_file(int32_t type, const uint8_t *panel, uint8_t *file)
{
    const codes c = codes_of(type);
    for (int b = 0; b < 8; b++) {
        for (int g = 0; g < 8; g++) {
            const uint8_t *p = panel;
            if (c.nibbles) {
                const int line = c.six ? (b / 4 * 2 + b % 2) * 8 + g : b / 2 * 8 + g, shift = c.six ? b % 4 / 2 * 4 : b % 2 * 4;
                move_bits(file + c.low + line * 64, shift, p + g % 4 * 64, g / 4 * 4, 15);
                p += 256;
            }
            if (c.pairs) {
                move_bits(file + c.two + (b / 4 * 8 + g) * 64, b % 4 * 2, p + g / 4 * 64, g % 4 * 2, 3);
                p += 128;
            }
            if (c.singles)
                move_bits(file + g * 64, b, p, g, 1);
        }
        panel += c.nibbles * 256 + c.pairs * 128 + c.singles * 64;
    }
}

static size_t head_of(const mat_layout_info *l) /* scales before the codes */
{
    return l->type == MAT_Q2_K || l->type == MAT_Q6_K ? 320 : 256;
}

const uint8_t *mat_file_order(const mat_layout_info *l, const uint8_t *unit, uint8_t *room)
{
    if (l->block_values != 256)
        return unit;
    const size_t head = head_of(l);
    memcpy(room, unit, head);
    memset(room + head, 0, (size_t)l->panel_unit - head);
    regroup_to_file(l->type, unit + head, room + head);
    return room;
}

void mat_pack_units(const mat *src, int64_t o0, int64_t u0, int64_t u1, uint8_t *dst)
{
    const mat_layout_info *l = mat_layout_of(src->type);
    const size_t row_bytes = (size_t)(src->n_in / l->block_values) * (size_t)l->block_bytes;
    const uint32_t flip = l->type == MAT_Q8_0 ? 0x80808080u : 0;
    const uint8_t *rows[MAT_LANES];
    for (int32_t r = 0; r < MAT_LANES; r++)
        rows[r] = o0 + r < src->n_out ? (const uint8_t *)src->data + (size_t)(o0 + r) * row_bytes : NULL;
    for (int64_t u = u0; u < u1; u++) {
        const size_t begin = (size_t)u * (size_t)l->unit_bytes;
        uint8_t file[MAT_UNIT_MAX], *p = l->block_values == 256 ? file : dst;
        if (l->n_fields == 0)
            p = transpose(rows, begin, l->unit_bytes, l->word, 0, row_bytes, p);
        for (int32_t f = 0; f < l->n_fields; f++) {
            int32_t n = l->fields[f].n_bytes;
            if (n == 0) { /* keeps what follows 64-byte aligned */
                memset(p, 0, 32);
                p += 32;
            } else {
                p = transpose(rows, begin + l->fields[f].offset, n, n == 2 ? 2 : 4, n == 2 ? 0 : flip, row_bytes, p);
            }
        }
        if (l->block_values == 256) {
            const size_t head = head_of(l);
            memcpy(dst, file, head);
            regroup_to_panel(l->type, dst + head, file + head);
        }
        dst += l->panel_unit;
    }
}

void mat_unpack_lane(const mat_layout_info *l, const uint8_t *unit, int32_t lane, uint8_t *out)
{
    if (l->n_fields == 0)
        for (int32_t i = 0; i < l->unit_bytes; i += l->word)
            memcpy(out + i, unit + (size_t)i * MAT_LANES + (size_t)(lane * l->word), (size_t)l->word);
    for (int32_t f = 0; f < l->n_fields; f++) {
        int32_t n = l->fields[f].n_bytes, word = n == 2 ? 2 : 4;
        uint8_t *to = out + l->fields[f].offset;
        for (int32_t i = 0; i < n; i += word)
            memcpy(to + i, unit + (size_t)i * MAT_LANES + (size_t)(lane * word), (size_t)word);
        if (l->type == MAT_Q8_0 && n > 2)
            for (int32_t i = 0; i < n; i++)
                to[i] ^= 0x80;
        unit += n ? (size_t)n * MAT_LANES : 32;
    }
}

void mat_pack_rows(const mat *src, void *dst, int64_t o0, int64_t o1)
{
    const mat_layout_info *l = mat_layout_of(src->type);
    const int64_t n_units = units_of(l, src->n_in);
    const size_t panel = (size_t)n_units * (size_t)l->panel_unit;
    for (int64_t o = o0; o < o1; o += MAT_LANES)
        mat_pack_units(src, o, 0, n_units, (uint8_t *)dst + (size_t)(o / MAT_LANES) * panel);
}

void mat_row_f32(const mat *m, int64_t row, float *out)
{
    const mat_layout_info *l = mat_layout_of(m->type);
    if (m->layout == MAT_ROWS) {
        size_t row_bytes = (size_t)(m->n_in / l->block_values) * (size_t)l->block_bytes;
        mat_dequantize(m->type, (const uint8_t *)m->data + (size_t)row * row_bytes, out, m->n_in);
        return;
    }
    const int64_t n_units = units_of(l, m->n_in);
    const uint8_t *unit = (const uint8_t *)m->data + (size_t)(row / MAT_LANES) * (size_t)n_units * (size_t)l->panel_unit;
    uint8_t bytes[256], room[MAT_UNIT_MAX];
    for (int64_t u = 0; u < n_units; u++, unit += l->panel_unit) {
        int64_t n = m->n_in - u * l->unit_values;
        mat_unpack_lane(l, mat_file_order(l, unit, room), (int32_t)(row % MAT_LANES), bytes);
        mat_dequantize(m->type, bytes, out + u * l->unit_values, n < l->unit_values ? n : l->unit_values);
    }
}

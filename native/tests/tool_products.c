/* tool_products.c: a hash of the products of every type, seeded, per number of rows; the first line is mat_isa(). Where two machines'
 * kernels promise equal bits (mat_internal.h: all but plain C's, and BF16's where there is vdpbf16ps), their outputs are equal.
 * For scripts/check-neon.
 */
#include "mat.h"
#include "mat_internal.h"
#include "test.h"

static const int32_t types[] = {MAT_F32, MAT_F16, MAT_BF16, MAT_Q4_0, MAT_Q4_1, MAT_Q5_0, MAT_Q5_1, MAT_Q8_0,
                                MAT_Q2_K, MAT_Q3_K, MAT_Q4_K, MAT_Q5_K, MAT_Q6_K, MAT_IQ4_NL};

static uint64_t state = 7;

/* Random bytes; halves that are scales or values become finite ones of either sign, 2^-7 to 2^-4. */
static void fill(int32_t type, uint8_t *data, size_t n_bytes)
{
    const mat_layout_info *l = mat_layout_of(type);
    for (size_t i = 0; i < n_bytes; i++)
        data[i] = (uint8_t)test_random(&state);
    for (size_t at = 0; at < n_bytes; at += (size_t)l->block_bytes) {
        const float f = test_uniform(&state);
        if (type == MAT_F32)
            memcpy(data + at, &f, 4);
        else if (type == MAT_BF16)
            memcpy(data + at, (const uint8_t *)&f + 2, 2);
        else if (type == MAT_F16)
            data[at + 1] = (uint8_t)(0x20 | (data[at + 1] & 0x8f));
        for (int32_t i = 0; i < l->n_fields; i++)
            if (l->fields[i].n_bytes == 2 && l->fields[i].offset < l->block_bytes) {
                uint8_t *high = data + at + l->fields[i].offset + 1;
                *high = (uint8_t)(0x20 | (*high & 0x8f));
            }
    }
}

static uint64_t hash_of(const void *data, size_t n_bytes) /* FNV-1a, 64 bits */
{
    uint64_t h = 0xcbf29ce484222325u;
    for (size_t i = 0; i < n_bytes; i++)
        h = (h ^ ((const uint8_t *)data)[i]) * 0x100000001b3u;
    return h;
}

int main(void)
{
    enum { N_IN = 512, N_OUT = 40, MOST_ROWS = 20 };
    static const int32_t counts[] = {1, 2, 3, 4, 5, 6, 7, 9, 12, 13, 20};
    float *x = malloc(N_IN * MOST_ROWS * 4), *y = malloc(N_OUT * MOST_ROWS * 4);
    printf("%s\n", mat_isa());
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        mat rows = {types[i], MAT_ROWS, N_IN, N_OUT, NULL, 0}, panels = rows;
        rows.n_bytes = (size_t)(N_IN / mat_block_values(types[i]) * mat_block_bytes(types[i])) * N_OUT;
        uint8_t *data = malloc(rows.n_bytes), *packed = aligned_alloc(64, mat_panel_bytes(&rows));
        fill(types[i], data, rows.n_bytes);
        rows.data = data;
        mat_pack_rows(&rows, packed, 0, N_OUT);
        panels.layout = MAT_PANELS;
        panels.data = packed;
        for (int32_t k = 0; k < N_IN * MOST_ROWS; k++)
            x[k] = test_uniform(&state) * (float)(1 + k / 32 % 7);
        for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
            const mat *w = &panels;
            const int64_t ld = N_OUT;
            void *act = malloc(mat_act_bytes(N_IN, counts[c]));
            mat_act_prepare(NULL, act, mat_act_kind(types[i]), x, N_IN, N_IN, counts[c]);
            mat_mul(NULL, &w, 1, act, counts[c], &y, &ld, NULL);
            printf("%s %d %016llx\n", mat_type_name(types[i]), (int)counts[c],
                   (unsigned long long)hash_of(y, (size_t)counts[c] * N_OUT * 4));
            free(act);
        }
        free(data), free(packed);
    }
    free(x), free(y);
    return 0;
}

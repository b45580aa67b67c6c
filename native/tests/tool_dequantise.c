/* tool_dequantise.c: `tool_dequantise TYPE N` reads N values' blocks from stdin and writes them as F32, twice: straight, and by way of
 * a packed panel (row 1 of 2). For tests/test_quants.py. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "mat.h"

int main(int argc, char **argv)
{
    if (argc != 3)
        return 2;
    const int32_t type = atoi(argv[1]);
    const int64_t n = atoll(argv[2]);
    if (!mat_type_supported(type) || n <= 0 || n % mat_block_values(type))
        return 2;
    const size_t n_bytes = (size_t)(n / mat_block_values(type)) * (size_t)mat_block_bytes(type);
    uint8_t *rows = calloc(2, n_bytes);
    float *out = malloc((size_t)n * sizeof *out);
    if (fread(rows + n_bytes, 1, n_bytes, stdin) != n_bytes)
        return 3;
    mat_dequantize(type, rows + n_bytes, out, n);
    fwrite(out, sizeof *out, (size_t)n, stdout);
    mat m = {type, MAT_ROWS, n, 2, rows, 2 * n_bytes};
    void *panels = aligned_alloc(64, mat_panel_bytes(&m));
    mat_pack_rows(&m, panels, 0, 2);
    m.data = panels;
    m.layout = MAT_PANELS;
    mat_row_f32(&m, 1, out);
    return fwrite(out, sizeof *out, (size_t)n, stdout) == (size_t)n ? 0 : 3;
}

/* model_fuzz.c: any bytes as a whole model: hyperparameters, vocabulary, tensors, packing, then a tokenised text, all
 * tokens' bytes and the metadata as JSON. The file lives in memory (memfd). */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "milad.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

static void use(milad_model *m) {
    static const char text[] = "Hello <|im_start|>w\xc3\xb6rld\xff\r\n\t 12345 \xf0\x9f\x98\x80";
    milad_model_info info = {.size = sizeof info};
    char buf[256];
    int32_t tokens[64];
    uint32_t attributes;
    if (milad_model_info_get(m, &info))
        abort();
    for (uint32_t flags = 0; flags < 4; flags++) {
        int64_t n = milad_tokenize(m, text, sizeof text - 1, flags, tokens, 64);
        for (int64_t i = 0; i < n && i < 64; i++)
            if (tokens[i] < 0 || tokens[i] >= info.n_vocab)
                abort();
    }
    for (int32_t i = -1; i <= info.n_vocab && i < 1000; i++)
        if ((milad_token_bytes(m, i, buf, sizeof buf, &attributes) < 0) != (i < 0 || i >= info.n_vocab))
            abort();
    int64_t n = milad_model_metadata(m, NULL, NULL, 0);
    char *json = malloc((size_t)n + 1);
    if (n <= 0 || !json || milad_model_metadata(m, NULL, json, (size_t)n + 1) != n || strlen(json) != (size_t)n)
        abort();
    free(json);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes) {
    static int fd = -1;
    char path[64];
    if (fd < 0 && (fd = memfd_create("model", MFD_CLOEXEC)) < 0)
        abort();
    if (ftruncate(fd, 0) || pwrite(fd, data, n_bytes, 0) != (ssize_t)n_bytes)
        abort();
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    milad_model_params params = {.size = sizeof params, .n_threads = 1};
    milad_model *m;
    for (params.flags = 0; params.flags <= MILAD_MODEL_NO_REPACK; params.flags++) {
        if (params.flags == MILAD_MODEL_MLOCK || params.flags == 3)
            continue;
        if (milad_model_open(path, &params, &m) == 0)
            use(m);
        milad_model_close(m);
    }
    return 0;
}

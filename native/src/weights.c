/* weights.c: from the tensors of a file to the layers of a model.
 *
 * Binding: every tensor that the architecture needs is there, of a type with kernels and of the shape that the
 * hyperparameters imply; a tensor that no table below names is an error, because a forward pass that ignores it would
 * answer wrongly. Packing: matrices go into one arena of panels, in the order in which a step reads them. Threads take stretches of
 * the arena, a huge page each, so that no two of them make the system clear the same page; they read what belongs there into memory
 * of their own that stays in the second-level cache, so resident memory never exceeds the file's size by much. The first of them
 * opens the vocabulary, the second takes the fingerprint. Norms and biases become F32.
 */
#include <errno.h>
#include <math.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "error.h"
#include "model.h"
#include "pool.h"

enum dim { D_NONE, D_EMBD, D_Q, D_KV, D_HEAD, D_FF };
enum need { REQUIRED, OPTIONAL, QWEN3 /* required there, unknown elsewhere */ };

typedef struct entry {
    const char *suffix;
    size_t field;     /* offset in struct layer: of a mat, or of a float * where n_out is D_NONE */
    uint8_t n_in, n_out, need;
} entry;

/* In the order of their use in a step. */
static const entry LAYER[] = {
    {"attn_norm.weight", offsetof(layer, attn_norm), D_EMBD, D_NONE, REQUIRED},
    {"attn_q.weight", offsetof(layer, wq), D_EMBD, D_Q, REQUIRED},
    {"attn_k.weight", offsetof(layer, wk), D_EMBD, D_KV, REQUIRED},
    {"attn_v.weight", offsetof(layer, wv), D_EMBD, D_KV, REQUIRED},
    {"attn_q.bias", offsetof(layer, bq), D_Q, D_NONE, OPTIONAL},
    {"attn_k.bias", offsetof(layer, bk), D_KV, D_NONE, OPTIONAL},
    {"attn_v.bias", offsetof(layer, bv), D_KV, D_NONE, OPTIONAL},
    {"attn_q_norm.weight", offsetof(layer, q_norm), D_HEAD, D_NONE, QWEN3},
    {"attn_k_norm.weight", offsetof(layer, k_norm), D_HEAD, D_NONE, QWEN3},
    {"attn_output.weight", offsetof(layer, wo), D_Q, D_EMBD, REQUIRED},
    {"attn_output.bias", offsetof(layer, bo), D_EMBD, D_NONE, OPTIONAL},
    {"ffn_norm.weight", offsetof(layer, ffn_norm), D_EMBD, D_NONE, REQUIRED},
    {"ffn_gate.weight", offsetof(layer, gate), D_EMBD, D_FF, REQUIRED},
    {"ffn_up.weight", offsetof(layer, up), D_EMBD, D_FF, REQUIRED},
    {"ffn_down.weight", offsetof(layer, down), D_FF, D_EMBD, REQUIRED},
};
enum { N_LAYER_ENTRIES = sizeof LAYER / sizeof *LAYER };

/* ggml's names of the types without kernels, for messages (enum ggml_type of ggml.h). */
static const struct {
    int32_t type;
    const char *name;
} OTHER_TYPES[] = {{9, "Q8_1"}, {15, "Q8_K"}, {16, "IQ2_XXS"}, {17, "IQ2_XS"}, {18, "IQ3_XXS"}, {19, "IQ1_S"},
                   {21, "IQ3_S"}, {22, "IQ2_S"}, {23, "IQ4_XS"}, {24, "I8"}, {25, "I16"}, {26, "I32"}, {27, "I64"},
                   {28, "F64"}, {29, "IQ1_M"}, {34, "TQ1_0"}, {35, "TQ2_0"}, {39, "MXFP4"}, {40, "NVFP4"}};

/* What binding counts and where it stands. */
typedef struct binder {
    milad_model *m;
    float *vector;      /* next free float of m->vectors */
    uint8_t *source;    /* a vector's bytes as read */
    size_t n_source;
    uint64_t n_used;    /* tensors of the file */
    uint64_t n_weights; /* values of matrices, by type, for the commonest */
    uint64_t by_type[32];
} binder;

static const char *type_name(int32_t type, char *buf, size_t n_bytes) {
    const char *name = mat_type_name(type);
    for (size_t i = 0; !name && i < sizeof OTHER_TYPES / sizeof *OTHER_TYPES; i++)
        if (OTHER_TYPES[i].type == type)
            name = OTHER_TYPES[i].name;
    if (name)
        return name;
    snprintf(buf, n_bytes, "number %d", type);
    return buf;
}

static int64_t dim_of(const hparams *hp, int dim) {
    switch (dim) {
    case D_EMBD: return hp->n_embd;
    case D_Q: return (int64_t)hp->n_head * hp->head_dim;
    case D_KV: return (int64_t)hp->n_head_kv * hp->head_dim;
    case D_HEAD: return hp->head_dim;
    case D_FF: return hp->n_ff;
    default: return 1;
    }
}

/* The tensor `name` of n_in x n_out values (n_out 1: a vector). *out NULL: absent and optional. */
static int32_t find_tensor(binder *b, const char *name, int64_t n_in, int64_t n_out, int optional, const gguf_tensor **out) {
    const gguf *g = b->m->file;
    const gguf_tensor *t = gguf_find_tensor(g, name);
    char type[32];
    *out = t;
    if (!t)
        return optional ? 0 : fail(MILAD_E_FORMAT, "%s: tensor '%s' is missing", gguf_path(g), name);
    b->n_used++;
    if (!mat_type_supported(t->type))
        return fail(MILAD_E_UNSUPPORTED, "%s: tensor '%s' is of type %s, which is not supported", gguf_path(g), name,
                    type_name(t->type, type, sizeof type));
    if (t->dims[0] != (uint64_t)n_in || t->dims[1] != (uint64_t)n_out || t->dims[2] != 1 || t->dims[3] != 1)
        return fail(MILAD_E_FORMAT, "%s: tensor '%s' has the shape %llu x %llu x %llu x %llu, not %lld x %lld", gguf_path(g),
                    name, (unsigned long long)t->dims[0], (unsigned long long)t->dims[1], (unsigned long long)t->dims[2],
                    (unsigned long long)t->dims[3], (long long)n_in, (long long)n_out);
    if (!t->data)
        return fail(MILAD_E_INTERNAL, "%s: tensor '%s' has no data", gguf_path(g), name);
    return 0;
}

static int32_t bind_matrix(binder *b, const char *name, int64_t n_in, int64_t n_out, int optional, mat *out) {
    const gguf_tensor *t;
    int32_t status = find_tensor(b, name, n_in, n_out, optional, &t);
    if (status || !t)
        return status;
    *out = (mat){.type = t->type, .layout = MAT_ROWS, .n_in = n_in, .n_out = n_out, .data = t->data, .n_bytes = t->n_bytes};
    if (t->type < 32)
        b->by_type[t->type] += (uint64_t)(n_in * n_out);
    return 0;
}

static int32_t bind_vector(binder *b, const char *name, int64_t n, int optional, float **out) {
    const gguf_tensor *t;
    int32_t status = find_tensor(b, name, n, 1, optional, &t);
    if (status || !t)
        return status;
    *out = b->vector;
    b->vector += n;
    if (t->n_bytes > b->n_source) {
        free(b->source);
        b->source = malloc(b->n_source = t->n_bytes);
        if (!b->source)
            return fail(MILAD_E_MEMORY, "%s: out of memory", gguf_path(b->m->file));
    }
    if ((status = gguf_read(b->m->file, t->data, t->n_bytes, b->source)))
        return status;
    mat_dequantize(t->type, b->source, *out, n);
    for (int64_t i = 0; i < n; i++)
        if (!isfinite((*out)[i]))
            return fail(MILAD_E_FORMAT, "%s: tensor '%s' holds a value that is not finite", gguf_path(b->m->file), name);
    return 0;
}

static int32_t bind_layer(binder *b, int32_t index) {
    const hparams *hp = &b->m->hp;
    char name[64];
    for (int i = 0; i < N_LAYER_ENTRIES; i++) {
        const entry *e = &LAYER[i];
        char *field = (char *)&b->m->layers[index] + e->field;
        if (e->need == QWEN3 && hp->arch != ARCH_QWEN3)
            continue;
        snprintf(name, sizeof name, "blk.%d.%s", index, e->suffix);
        int32_t status = e->n_out == D_NONE
            ? bind_vector(b, name, dim_of(hp, e->n_in), e->need == OPTIONAL, (float **)(void *)field)
            : bind_matrix(b, name, dim_of(hp, e->n_in), dim_of(hp, e->n_out), e->need == OPTIONAL, (mat *)(void *)field);
        if (status)
            return status;
    }
    return 0;
}

/* Floats that the vectors of the model may take. */
static size_t vector_room(const hparams *hp) {
    size_t n = 0;
    for (int i = 0; i < N_LAYER_ENTRIES; i++)
        if (LAYER[i].n_out == D_NONE)
            n += (size_t)dim_of(hp, LAYER[i].n_in);
    return n * (size_t)hp->n_layer + (size_t)hp->n_embd;
}

/* Names the first tensor that binding did not use. */
static int32_t name_unknown(binder *b) {
    const gguf *g = b->m->file;
    for (uint64_t i = 0; i < gguf_n_tensors(g); i++) {
        const gguf_str *name = &gguf_tensor_at(g, i)->name;
        char text[256], wanted[64];
        int known = 0, n_layer = b->m->hp.n_layer;
        snprintf(text, sizeof text, "%.*s", (int)(name->n_bytes < 255 ? name->n_bytes : 255), name->data);
        char *suffix;
        long index = strncmp(text, "blk.", 4) == 0 ? strtol(text + 4, &suffix, 10) : -1;
        for (int k = 0; index >= 0 && index < n_layer && k < N_LAYER_ENTRIES; k++) {
            snprintf(wanted, sizeof wanted, "blk.%ld.%s", index, LAYER[k].suffix);
            known |= strcmp(text, wanted) == 0 && (LAYER[k].need != QWEN3 || b->m->hp.arch == ARCH_QWEN3);
        }
        static const char *const top[] = {"token_embd.weight", "output.weight", "output_norm.weight", "rope_freqs.weight"};
        for (size_t k = 0; k < sizeof top / sizeof *top; k++)
            known |= strcmp(text, top[k]) == 0;
        if (!known)
            return fail(MILAD_E_UNSUPPORTED, "%s: tensor '%s' has no place in architecture '%s' as supported here",
                        gguf_path(g), text, b->m->info.architecture);
    }
    return fail(MILAD_E_INTERNAL, "%s: tensors miscounted", gguf_path(g));
}

static void set_quantisation(binder *b) {
    int32_t best = 0;
    for (int32_t type = 1; type < 32; type++)
        if (b->by_type[type] > b->by_type[best])
            best = type;
    snprintf(b->m->info.quantisation, sizeof b->m->info.quantisation, "%s", mat_type_name(best));
}

int32_t model_bind(milad_model *m) {
    const hparams *hp = &m->hp;
    binder b = {.m = m};
    const gguf_tensor *rope = gguf_find_tensor(m->file, "rope_freqs.weight");
    b.n_used = rope != NULL;
    /* Before memory is set aside for its layers: the file must have at least the tensors that they need. */
    if (gguf_n_tensors(m->file) == 0)
        return fail(MILAD_E_FORMAT, "%s: holds a vocabulary only, no weights", gguf_path(m->file));
    if (gguf_n_tensors(m->file) < (uint64_t)hp->n_layer * 9 + 2)
        return fail(MILAD_E_FORMAT, "%s: %llu tensors are too few for %d layers", gguf_path(m->file),
                    (unsigned long long)gguf_n_tensors(m->file), hp->n_layer);
    int32_t status = bind_matrix(&b, "token_embd.weight", hp->n_embd, hp->n_vocab, 0, &m->token_embd);
    if (status)
        return status;
    m->layers = calloc((size_t)hp->n_layer, sizeof *m->layers);
    m->vectors = b.vector = malloc(vector_room(hp) * sizeof(float));
    if (!m->layers || !m->vectors)
        return fail(MILAD_E_MEMORY, "%s: out of memory", gguf_path(m->file));
    for (int32_t i = 0; !status && i < hp->n_layer; i++)
        status = bind_layer(&b, i);
    if (!status)
        status = bind_vector(&b, "output_norm.weight", hp->n_embd, 0, &m->output_norm);
    free(b.source);
    if (!status)
        status = bind_matrix(&b, "output.weight", hp->n_embd, hp->n_vocab, 1, &m->output);
    if (status)
        return status;
    if (!m->output.data)
        m->output = m->token_embd;
    if (b.n_used != gguf_n_tensors(m->file))
        return name_unknown(&b);
    set_quantisation(&b);
    return 0;
}

/* The matrices that a step reads, in order. Returns their number; `list` may be NULL. */
static size_t list_matrices(milad_model *m, mat **list) {
    size_t n = 0;
    for (int32_t l = 0; l < m->hp.n_layer; l++)
        for (int i = 0; i < N_LAYER_ENTRIES; i++)
            if (LAYER[i].n_out != D_NONE) {
                if (list)
                    list[n] = (mat *)(void *)((char *)&m->layers[l] + LAYER[i].field);
                n++;
            }
    if (list)
        list[n] = &m->output;
    return n + 1;
}

enum { HUGE_PAGE = 2 << 20, PANEL_ROWS = 16, PIECE_BYTES = 256 << 10 /* a quarter of a second-level cache or so */,
       AHEAD = 32 /* pieces that the system is asked for ahead of their use */ };

/* Rows of a matrix that are read and packed at once. */
typedef struct piece {
    const mat *src;
    int64_t o0, o1;
    uint8_t *dst;
} piece;

/* What the threads that load share. */
typedef struct packing {
    milad_model *m;
    piece *pieces;      /* in the order of dst */
    int32_t *stretches; /* the first piece of each, and the number of pieces */
    int32_t n_pieces, n_stretches;
    size_t room;        /* bytes of the largest piece */
    size_t n_bytes;     /* of all panels */
    volatile float *progress;
    atomic_size_t n_done;
    atomic_int next;    /* 0: the vocabulary; 1: the fingerprint; i: stretch i - 2 */
    atomic_int status;
    char error[512];    /* of who set status */
} packing;

static size_t row_bytes(const mat *w) { return w->n_bytes / (size_t)w->n_out; }
static size_t arena_bytes(const mat *w) { return (mat_panel_bytes(w) + 63) & ~(size_t)63; }

/* Cuts a matrix into pieces; `pieces` NULL: only counts. */
static void cut(packing *p, const mat *w, uint8_t *dst) {
    int64_t n_groups = (w->n_out + PANEL_ROWS - 1) / PANEL_ROWS, n = (int64_t)(PIECE_BYTES / (row_bytes(w) * PANEL_ROWS)) + 1;
    size_t panel = mat_panel_bytes(w) / (size_t)n_groups, most = row_bytes(w) * PANEL_ROWS * (size_t)n;
    p->room = most > p->room ? most : p->room;
    for (int64_t group = 0; group < n_groups; group += n, p->n_pieces++) {
        int64_t o0 = group * PANEL_ROWS, o1 = (group + n) * PANEL_ROWS;
        if (p->pieces)
            p->pieces[p->n_pieces] = (piece){w, o0, o1 < w->n_out ? o1 : w->n_out, dst + (size_t)group * panel};
    }
}

static size_t piece_bytes(const piece *c) { return (size_t)(c->o1 - c->o0) * row_bytes(c->src); }
static const uint8_t *piece_data(const piece *c) { return (const uint8_t *)c->src->data + (size_t)c->o0 * row_bytes(c->src); }

static int32_t pack_piece(packing *p, const piece *c, uint8_t *room) {
    if (p->pieces + p->n_pieces - c > AHEAD)
        gguf_will_read(p->m->file, piece_data(c + AHEAD), piece_bytes(c + AHEAD));
    int32_t status = gguf_read(p->m->file, piece_data(c), piece_bytes(c), room);
    if (status)
        return status;
    const mat part = {.type = c->src->type, .layout = MAT_ROWS, .n_in = c->src->n_in, .n_out = c->o1 - c->o0, .data = room,
                      .n_bytes = piece_bytes(c)};
    mat_pack_rows(&part, c->dst, 0, part.n_out);
    atomic_fetch_add_explicit(&p->n_done, mat_panel_bytes(&part), memory_order_relaxed);
    return 0;
}

static int32_t pack_stretch(packing *p, int32_t stretch, uint8_t *room) {
    int32_t status = 0;
    for (int32_t i = p->stretches[stretch]; !status && i < p->stretches[stretch + 1]; i++)
        status = pack_piece(p, &p->pieces[i], room);
    return status;
}

/* One thread's share: whatever is left, in one queue, so that the file is read in one rising run. */
static void load_some(void *arg, int32_t lo, int32_t hi, int32_t thread) {
    (void)lo, (void)hi;
    packing *p = arg;
    uint8_t *room = NULL;
    for (int32_t i; !atomic_load(&p->status) && (i = atomic_fetch_add(&p->next, 1)) < p->n_stretches + 2;) {
        int32_t status = 0, none = 0;
        if (i == 0)
            status = vocab_open(p->m->file, &p->m->vocab);
        else if (i == 1)
            status = model_fingerprint(p->m->file, &p->m->info.fingerprint);
        else if (!room && !(room = malloc(p->room)))
            status = fail(MILAD_E_MEMORY, "%s: out of memory", gguf_path(p->m->file));
        else
            status = pack_stretch(p, i - 2, room);
        if (status && atomic_compare_exchange_strong(&p->status, &none, status))
            snprintf(p->error, sizeof p->error, "%s", milad_last_error()); /* errors are a thread's own */
        if (thread == 0 && p->progress)
            *p->progress = (float)((double)atomic_load_explicit(&p->n_done, memory_order_relaxed) / (double)p->n_bytes);
    }
    free(room);
}

/* Memory for n_bytes in huge pages where the system has them. */
static void *map_arena(size_t n_bytes) {
    size_t n = (n_bytes + HUGE_PAGE - 1) & ~(size_t)(HUGE_PAGE - 1);
    uint8_t *p = mmap(NULL, n + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        return NULL;
    size_t head = (HUGE_PAGE - ((uintptr_t)p & (HUGE_PAGE - 1))) & (HUGE_PAGE - 1);
    if (head)
        munmap(p, head);
    if (HUGE_PAGE - head)
        munmap(p + head + n, HUGE_PAGE - head);
    madvise(p + head, n, MADV_HUGEPAGE);
    return p + head;
}

static void lock_memory(const milad_model *m, const void *data, size_t n_bytes) {
    if (mlock(data, n_bytes) != 0)
        log_line('W', "%s: can't lock %zu bytes of weights in memory: %s", gguf_path(m->file), n_bytes, strerror(errno));
}

/* Lists the pieces of all matrices and groups those that begin in the same huge page. */
static int32_t list_pieces(packing *p, mat *const *list, size_t n) {
    for (size_t i = 0; i < n; i++)
        cut(p, list[i], NULL);
    p->pieces = calloc((size_t)p->n_pieces, sizeof *p->pieces);
    p->stretches = calloc((size_t)p->n_pieces + 1, sizeof *p->stretches);
    if (!p->pieces || !p->stretches)
        return fail(MILAD_E_MEMORY, "%s: out of memory", gguf_path(p->m->file));
    p->n_pieces = 0;
    uint8_t *dst = p->m->weights;
    for (size_t i = 0; i < n; i++) {
        cut(p, list[i], dst);
        dst += arena_bytes(list[i]);
    }
    uintptr_t page = 0;
    for (int32_t i = 0; i < p->n_pieces; i++)
        if (page != (uintptr_t)p->pieces[i].dst / HUGE_PAGE) {
            page = (uintptr_t)p->pieces[i].dst / HUGE_PAGE;
            p->stretches[p->n_stretches++] = i;
        }
    p->stretches[p->n_stretches] = p->n_pieces;
    return 0;
}

static int32_t run(packing *p, int32_t n_threads) {
    n_threads = n_threads > 0 ? n_threads : pool_usable_cores();
    n_threads = n_threads < p->n_stretches ? n_threads : p->n_stretches;
    pool *threads = pool_open(n_threads);
    if (!threads)
        return fail(MILAD_E_MEMORY, "%s: no threads to pack the weights with", gguf_path(p->m->file));
    pool_run(threads, n_threads, 1, load_some, p);
    pool_close(threads);
    return p->status ? fail(p->status, "%s", p->error) : 0;
}

static int32_t pack_all(milad_model *m, const milad_model_params *params, mat **list, size_t n) {
    int tied = m->output.data == m->token_embd.data;
    packing p = {.m = m, .progress = params->progress};
    for (size_t i = 0; i < n; i++)
        p.n_bytes += arena_bytes(list[i]);
    m->weights = map_arena(p.n_bytes);
    if (!m->weights)
        return fail(MILAD_E_MEMORY, "%s: no memory for %zu bytes of weights", gguf_path(m->file), p.n_bytes);
    m->n_weight_bytes = p.n_bytes;
    int32_t status = list_pieces(&p, list, n);
    if (!status)
        status = run(&p, params->n_threads);
    free(p.pieces);
    free(p.stretches);
    if (status)
        return status;
    uint8_t *dst = m->weights;
    for (size_t i = 0; i < n; i++) {
        mat *w = list[i];
        const size_t room = arena_bytes(w);
        w->n_bytes = mat_panel_bytes(w);
        w->layout = MAT_PANELS;
        w->data = dst;
        dst += room;
    }
    if (tied)
        m->token_embd = m->output;
    if (params->flags & MILAD_MODEL_MLOCK)
        lock_memory(m, m->weights, m->n_weight_bytes);
    return 0;
}

int32_t model_pack(milad_model *m, const milad_model_params *params) {
    size_t n = list_matrices(m, NULL);
    mat **list = calloc(n, sizeof *list);
    if (!list)
        return fail(MILAD_E_MEMORY, "%s: out of memory", gguf_path(m->file));
    list_matrices(m, list);
    int32_t status = 0;
    if (!(params->flags & MILAD_MODEL_NO_REPACK)) {
        status = pack_all(m, params, list, n);
    } else if (params->flags & MILAD_MODEL_MLOCK) {
        for (size_t i = 0; i < n; i++)
            lock_memory(m, list[i]->data, list[i]->n_bytes);
    }
    m->info.weight_bytes = 0;
    for (size_t i = 0; !status && i < n; i++)
        m->info.weight_bytes += list[i]->n_bytes;
    if (!status && (params->flags & MILAD_MODEL_MLOCK) && m->token_embd.layout == MAT_ROWS)
        lock_memory(m, m->token_embd.data, m->token_embd.n_bytes);
    free(list);
    return status;
}

void model_free_weights(milad_model *m) {
    if (m->weights)
        munmap(m->weights, (m->n_weight_bytes + HUGE_PAGE - 1) & ~(size_t)(HUGE_PAGE - 1));
    free(m->layers);
    free(m->vectors);
    m->weights = NULL;
    m->layers = NULL;
    m->vectors = NULL;
}

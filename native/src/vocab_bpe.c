/* vocab_bpe.c: see vocab_bpe.h.
 *
 * Hash tables are open addressing over slots of 32 bits: 0 is free, else 8 bits of the hash above an index + 1, so that a look-up
 * seldom leaves the slots but for what it looks for. They are filled with zeros by hand: pages of calloc() that are read before
 * they are written are mapped twice, with an interrupt of the other threads between.
 *
 * The merge loop: symbols in a linked list over an array, candidates in a binary heap of (rank << 32 | position), so that
 * the lowest rank and among equals the leftmost goes first. A symbol notes the rank of the pair it begins; an entry of
 * the heap that no longer agrees with that note is stale and skipped. Every merge adds at most two entries.
 */
#include "vocab_bpe.h"

#include <stdlib.h>
#include <string.h>

#include "../include/milad.h"
#include "unicode.h"

#define NO_RANK UINT32_MAX
#define NONE UINT32_MAX

static uint64_t mix(uint64_t x) { /* splitmix64's finaliser */
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* Slots for n entries, a power of two, at most 2/3 full. NULL: out of memory. */
static uint32_t *new_slots(size_t n, size_t *mask) {
    size_t size = 16;
    while (size < n + n / 2)
        size *= 2;
    uint32_t *slots = aligned_alloc(64, size * sizeof *slots); /* malloc() and memset() would be made a calloc() */
    if (slots)
        memset(slots, 0, size * sizeof *slots);
    *mask = size - 1;
    return slots;
}

static uint32_t slot_word(uint64_t hash, uint32_t index) { return (uint32_t)(hash >> 56) << 24 | (index + 1); }
static int slot_agrees(uint32_t slot, uint64_t hash) { return slot >> 24 == hash >> 56; }
static uint32_t slot_index(uint32_t slot) { return (slot & 0xFFFFFF) - 1; }

/* -- spellings ----------------------------------------------------------------------------------------------------- */

/* Fewer than eight bytes as a word; which, is clear with their number. */
static uint64_t short_word(const char *bytes, size_t n) {
    uint32_t low, high;
    if (n == 0)
        return 0;
    if (n < 4)
        return (uint8_t)bytes[0] | (uint32_t)(uint8_t)bytes[n / 2] << 8 | (uint32_t)(uint8_t)bytes[n - 1] << 16;
    memcpy(&low, bytes, 4);
    memcpy(&high, bytes + n - 4, 4);
    return low | (uint64_t)high << 32;
}

static uint64_t hash_bytes(const char *bytes, size_t n, uint64_t seed) {
    uint64_t h = seed ^ n, word;
    for (; n >= 8; n -= 8, bytes += 8) {
        memcpy(&word, bytes, 8);
        h = mix(h ^ word) + seed + 0x9e3779b97f4a7c15u;
    }
    return mix(h ^ short_word(bytes, n));
}

/* The slot of a spelling, or the free one that it would take. */
static size_t spelling_slot(const spellings *s, const char *spelling, size_t n_bytes, uint64_t hash) {
    size_t at = hash & s->slot_mask;
    for (; s->slots[at]; at = (at + 1) & s->slot_mask) {
        if (!slot_agrees(s->slots[at], hash))
            continue;
        uint32_t id = slot_index(s->slots[at]);
        if (s->starts[id + 1] - s->starts[id] == n_bytes && memcmp(s->bytes + s->starts[id], spelling, n_bytes) == 0)
            break;
    }
    return at;
}

int32_t spellings_find(const spellings *s, const char *spelling, size_t n_bytes) {
    uint32_t slot = s->slots[spelling_slot(s, spelling, n_bytes, hash_bytes(spelling, n_bytes, s->seed))];
    return slot ? (int32_t)slot_index(slot) : -1;
}

int32_t spellings_index(spellings *s) {
    s->slots = new_slots((size_t)s->n, &s->slot_mask);
    if (!s->slots)
        return MILAD_E_MEMORY;
    s->seed = hash_bytes(s->bytes, s->starts[s->n], 0);
    for (int32_t id = 0; id < s->n; id++) {
        const char *spelling = s->bytes + s->starts[id];
        size_t n_bytes = s->starts[id + 1] - s->starts[id];
        uint64_t hash = hash_bytes(spelling, n_bytes, s->seed);
        uint32_t *slot = &s->slots[spelling_slot(s, spelling, n_bytes, hash)];
        if (*slot)
            s->n_duplicates++;
        else
            *slot = slot_word(hash, (uint32_t)id);
    }
    return MILAD_OK;
}

void spellings_free(spellings *s) {
    free(s->bytes);
    free(s->starts);
    free(s->slots);
    *s = (spellings){0};
}

/* -- the byte map -------------------------------------------------------------------------------------------------- */

static int maps_to_itself(uint32_t b) { return (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || (b >= 174 && b <= 255); }

uint32_t byte_to_char(uint8_t byte) {
    if (maps_to_itself(byte))
        return byte;
    /* The other 68 follow from U+0100 on: 0..32, 127..160, 173. */
    return 256u + (byte <= 32 ? byte : byte <= 160 ? byte - 127u + 33u : 67u);
}

int32_t char_to_byte(uint32_t cp) {
    if (cp < 256)
        return maps_to_itself(cp) ? (int32_t)cp : -1;
    uint32_t k = cp - 256;
    return k <= 32 ? (int32_t)k : k <= 66 ? (int32_t)(k - 33 + 127) : k == 67 ? 173 : -1;
}

size_t spelling_decode(const char *spelling, size_t n_bytes, char *out, size_t n_out) {
    const uint8_t *text = (const uint8_t *)spelling;
    size_t n = 0;
    for (size_t i = 0; i < n_bytes; n++) {
        int32_t byte = char_to_byte(utf8_next(text, n_bytes, &i));
        if (byte < 0) {
            memcpy(out, spelling, n_bytes < n_out ? n_bytes : n_out);
            return n_bytes;
        }
        if (n < n_out)
            out[n] = (char)byte;
    }
    return n;
}

size_t spelling_encode(const uint8_t *bytes, size_t n_bytes, char *out) {
    size_t n = 0;
    for (size_t i = 0; i < n_bytes; i++)
        n += utf8_put(byte_to_char(bytes[i]), (uint8_t *)out + n);
    return n;
}

/* -- merges -------------------------------------------------------------------------------------------------------- */

static uint64_t hash_pair(const bpe *b, uint32_t left, uint32_t right) {
    return mix(((uint64_t)left << 32 | right) ^ b->seed);
}

/* The slot of a pair, or the free one that it would take. */
static size_t pair_slot(const bpe *b, uint32_t left, uint32_t right, uint64_t hash) {
    size_t at = hash & b->slot_mask;
    for (; b->slots[at]; at = (at + 1) & b->slot_mask) {
        if (!slot_agrees(b->slots[at], hash))
            continue;
        const merge *m = &b->merges[slot_index(b->slots[at])];
        if (m->left == left && m->right == right)
            break;
    }
    return at;
}

int32_t bpe_reserve(bpe *b, size_t n_merges, uint64_t seed) {
    b->slots = new_slots(n_merges, &b->slot_mask);
    b->merges = malloc((n_merges + 1) * sizeof *b->merges);
    b->n_merges = 0;
    b->seed = seed;
    return b->slots && b->merges ? MILAD_OK : MILAD_E_MEMORY;
}

int32_t bpe_add(bpe *b, uint32_t left, uint32_t right, uint32_t rank, uint32_t id) {
    uint64_t hash = hash_pair(b, left, right);
    uint32_t *slot = &b->slots[pair_slot(b, left, right, hash)];
    if (*slot)
        return 0;
    *slot = slot_word(hash, b->n_merges);
    b->merges[b->n_merges++] = (merge){left, right, rank, id};
    return 1;
}

void bpe_free(bpe *b) {
    free(b->merges);
    free(b->slots);
    *b = (bpe){0};
}

/* -- the merge loop ------------------------------------------------------------------------------------------------ */

struct symbol {
    uint32_t id;
    uint32_t previous, next; /* NONE at the ends */
    uint32_t rank, merged;   /* of the pair that begins here: NO_RANK when it does not merge; the token it becomes */
};

static int32_t grow(bpe_scratch *w, size_t n) {
    if (n > UINT32_MAX - 1)
        return MILAD_E_MEMORY;
    if (n > w->n_symbols) {
        struct symbol *p = realloc(w->symbols, (n + n / 4) * sizeof *p);
        if (!p)
            return MILAD_E_MEMORY;
        w->symbols = p;
        w->n_symbols = n + n / 4;
    }
    /* n - 1 entries at first; a merge takes one and adds two, and there are at most n - 1 merges. */
    if (2 * n > w->heap_room) {
        uint64_t *p = realloc(w->heap, (2 * n + n / 2) * sizeof *p);
        if (!p)
            return MILAD_E_MEMORY;
        w->heap = p;
        w->heap_room = 2 * n + n / 2;
    }
    return MILAD_OK;
}

static void heap_push(bpe_scratch *w, uint64_t entry) {
    size_t at = w->n_heap++;
    for (; at && w->heap[(at - 1) / 2] > entry; at = (at - 1) / 2)
        w->heap[at] = w->heap[(at - 1) / 2];
    w->heap[at] = entry;
}

static uint64_t heap_pop(bpe_scratch *w) {
    uint64_t top = w->heap[0], last = w->heap[--w->n_heap];
    size_t at = 0;
    for (size_t child; (child = 2 * at + 1) < w->n_heap; at = child) {
        if (child + 1 < w->n_heap && w->heap[child + 1] < w->heap[child])
            child++;
        if (w->heap[child] >= last)
            break;
        w->heap[at] = w->heap[child];
    }
    w->heap[at] = last;
    return top;
}

/* Notes whether the pair that begins at symbol `at` merges, and queues it. */
static void consider(const bpe *b, bpe_scratch *w, uint32_t at) {
    struct symbol *s = &w->symbols[at];
    s->rank = NO_RANK;
    if (s->next == NONE)
        return;
    uint32_t right = w->symbols[s->next].id, slot = b->slots[pair_slot(b, s->id, right, hash_pair(b, s->id, right))];
    if (!slot)
        return;
    const merge *m = &b->merges[slot_index(slot)];
    s->rank = m->rank;
    s->merged = m->id;
    heap_push(w, (uint64_t)m->rank << 32 | at);
}

int32_t bpe_encode(const bpe *b, const uint8_t *piece, size_t n_bytes, bpe_scratch *w, token_sink *out) {
    int32_t status = grow(w, n_bytes);
    if (status)
        return status;
    struct symbol *s = w->symbols;
    uint32_t n = 0;
    for (size_t i = 0; i < n_bytes; i++) {
        int32_t id = b->byte_ids[piece[i]];
        if (id >= 0) {
            s[n] = (struct symbol){.id = (uint32_t)id, .previous = n ? n - 1 : NONE, .next = n + 1};
            n++;
        }
    }
    if (!n)
        return MILAD_OK;
    s[n - 1].next = NONE;
    w->n_heap = 0;
    for (uint32_t i = 0; i < n; i++)
        consider(b, w, i);
    while (w->n_heap) {
        uint64_t entry = heap_pop(w);
        uint32_t at = (uint32_t)entry, right = s[at].next;
        if (s[at].rank == NO_RANK || s[at].rank != entry >> 32)
            continue;
        s[at].id = s[at].merged;
        s[at].next = s[right].next;
        s[right].rank = NO_RANK; /* gone: its entries are stale */
        if (s[at].next != NONE)
            s[s[at].next].previous = at;
        consider(b, w, at);
        if (s[at].previous != NONE)
            consider(b, w, s[at].previous);
    }
    for (uint32_t i = 0; i != NONE; i = s[i].next)
        token_put(out, (int32_t)s[i].id);
    return MILAD_OK;
}

void bpe_scratch_free(bpe_scratch *w) {
    free(w->symbols);
    free(w->heap);
    *w = (bpe_scratch){0};
}

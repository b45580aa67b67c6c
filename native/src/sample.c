/* sample.c: see sample.h.
 *
 * Nothing here sorts a vocabulary: the k best come from one scan with a heap of k, a nucleus (top_p) from a heap of the
 * tokens that can belong to it, which histograms of their mass narrow down first where they are many. Candidates are
 * 64-bit keys, the logit's bits in an order-preserving form above the complement of the id, so that a larger key is a
 * larger logit or, among equal ones, a smaller id.
 *
 * The draw walks the kept tokens in the order in which the search left them (by rising id without filters, best first for
 * top_k): any order will do that is a function of the logits. Every sum has one order.
 */
#include "sample.h"

#include <math.h>
#include <string.h>

enum {
    BLOCK = 256, /* logits that are exponentiated and added together */
    WIDE = 1024  /* of more candidates than these only a part is put in order */
};

typedef float vec __attribute__((vector_size(16)));
typedef int32_t ivec __attribute__((vector_size(16)));
typedef double dvec __attribute__((vector_size(16)));

/* -- checks -------------------------------------------------------------------------------------------------------- */

static int penalises_prompt(const milad_sampler *s) { return s->repeat_penalty != 1.0f; }
static int penalises_answer(const milad_sampler *s) { return s->presence_penalty != 0 || s->frequency_penalty != 0; }

const char *sample_check(const milad_sampler *s, int32_t n_vocab) {
    if (isnan(s->temperature) || isnan(s->top_p) || isnan(s->min_p))
        return "temperature, top_p or min_p is not a number";
    if (!isfinite(s->repeat_penalty) || !(s->repeat_penalty > 0))
        return "repeat_penalty must be above 0";
    if (!isfinite(s->presence_penalty) || !isfinite(s->frequency_penalty))
        return "presence_penalty or frequency_penalty is not a number";
    if (s->n_top > MILAD_MAX_TOP)
        return "more alternatives wanted than 20";
    if (s->forced >= n_vocab)
        return "the forced token is not in the vocabulary";
    if (s->n_bias < 0 || (s->n_bias && (!s->bias_ids || !s->bias)))
        return "logit bias without ids or values";
    for (int32_t i = 0; i < s->n_bias; i++) {
        if (s->bias_ids[i] < 0 || s->bias_ids[i] >= n_vocab)
            return "logit bias for a token that is not in the vocabulary";
        if (!(s->bias[i] < INFINITY))
            return "logit bias is not a number";
    }
    if (s->n_history < 0 || s->n_prompt < 0 || (s->n_history && (!s->history || s->n_prompt > s->n_history)))
        return "history without tokens, or shorter than the prompt";
    if (penalises_prompt(s) || penalises_answer(s))
        for (int32_t i = 0; i < s->n_history; i++)
            if (s->history[i] < 0 || s->history[i] >= n_vocab)
                return "a token of the history is not in the vocabulary";
    return NULL;
}

/* -- what changes logits ------------------------------------------------------------------------------------------- */

static void apply_mask(const uint32_t *mask, float *logits, int32_t n_vocab) {
    for (int32_t base = 0; base < n_vocab; base += 32) {
        uint32_t word = mask[base / 32];
        int32_t n = n_vocab - base < 32 ? n_vocab - base : 32;
        if (word == UINT32_MAX)
            continue;
        for (int32_t j = 0; j < n; j++)
            if (!(word >> j & 1))
                logits[base + j] = -INFINITY;
    }
}

/* Repetition penalty: Keskar et al. 2019 (CTRL), 4.1, with the sign handled as Hugging Face's RepetitionPenaltyLogitsProcessor does.
 * Presence and frequency: OpenAI's API reference, logits - count * frequency - (count > 0) * presence. */
static void apply_penalties(const milad_sampler *s, float *logits, uint32_t *counts) {
    const int32_t first = penalises_prompt(s) ? 0 : s->n_prompt, n = s->n_history;
    if (!penalises_prompt(s) && !penalises_answer(s))
        return;
    for (int32_t i = first; i < n; i++)
        counts[s->history[i]] = 0;
    for (int32_t i = s->n_prompt; i < n; i++)
        counts[s->history[i]]++;
    for (int32_t i = first; i < n; i++) {
        int32_t id = s->history[i];
        if (counts[id] == UINT32_MAX) /* done */
            continue;
        float x = logits[id];
        x = x > 0 ? x / s->repeat_penalty : x * s->repeat_penalty;
        if (counts[id])
            x -= (float)counts[id] * s->frequency_penalty + s->presence_penalty;
        logits[id] = x;
        counts[id] = UINT32_MAX;
    }
}

/* -- scans --------------------------------------------------------------------------------------------------------- */

static vec choose_vec(ivec mask, vec yes, vec no) { return (vec)((mask & (ivec)yes) | (~mask & (ivec)no)); }

/* The largest logit; NAN when one is NaN or +inf. -inf: none is possible. */
static float find_max(const float *logits, int32_t n) {
    const vec infinity = {INFINITY, INFINITY, INFINITY, INFINITY};
    vec max[4] = {-infinity, -infinity, -infinity, -infinity};
    ivec good = {-1, -1, -1, -1};
    int32_t i = 0;
    for (; i + 16 <= n; i += 16)
        for (int j = 0; j < 4; j++) {
            vec x;
            memcpy(&x, logits + i + 4 * j, sizeof x);
            ivec above = x > max[j];
            max[j] = choose_vec(above, x, max[j]);
            good &= x < infinity;
        }
    float best = -INFINITY;
    int all_good = good[0] & good[1] & good[2] & good[3];
    for (; i < n; i++) {
        best = logits[i] > best ? logits[i] : best;
        all_good &= -(logits[i] < INFINITY);
    }
    for (int j = 0; j < 16; j++)
        best = max[j / 4][j % 4] > best ? max[j / 4][j % 4] : best;
    return all_good ? best : NAN;
}

static int32_t find_first(const float *logits, int32_t n, float value) {
    int32_t i = 0;
    for (; i + 16 <= n; i += 16) {
        int found = 0;
        for (int j = 0; j < 16; j++)
            found |= logits[i + j] == value;
        if (found)
            break;
    }
    while (i < n - 1 && logits[i] != value)
        i++;
    return i;
}

/* exp(z) for z <= 0, 0 below exp(-87). Error below 2e-7 of the value: 2^k e^r with r in +-ln(2)/2 split off in two parts (Cody
 * and Waite), e^r by its Taylor series to the seventh power. */
static vec exp_vec(vec z) {
    const vec lowest = {-87.0f, -87.0f, -87.0f, -87.0f}, zero = {0};
    ivec inside = z > lowest;
    vec t = choose_vec(inside, z, lowest);
    vec k = (t * 1.44269504f + 12582912.0f) - 12582912.0f; /* the nearest integer */
    vec r = (t - k * 0.693359375f) + k * 2.12194440e-4f;
    vec p = r * (1 / 5040.0f) + 1 / 720.0f;
    p = p * r + 1 / 120.0f;
    p = p * r + 1 / 24.0f;
    p = p * r + 1 / 6.0f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    ivec power = (__builtin_convertvector(k, ivec) + 127) << 23;
    return choose_vec(inside, p * (vec)power, zero);
}

/* out[i] = exp((x[i] - max) * scale); out has room for a multiple of 4. */
static void exp_block(const float *x, int32_t n, float max, float scale, float *out) {
    int32_t i = 0;
    vec here;
    for (; i + 4 <= n; i += 4) {
        memcpy(&here, x + i, sizeof here);
        here = exp_vec((here - max) * scale);
        memcpy(out + i, &here, sizeof here);
    }
    if (i < n) {
        here = (vec){x[i], i + 1 < n ? x[i + 1] : -INFINITY, i + 2 < n ? x[i + 2] : -INFINITY, -INFINITY};
        here = exp_vec((here - max) * scale);
        memcpy(out + i, &here, sizeof here);
    }
}

static double sum_block(const float *e, int32_t n) {
    dvec sums[4] = {{0}};
    double rest = 0;
    int32_t i = 0;
    for (; i + 8 <= n; i += 8)
        for (int j = 0; j < 4; j++)
            sums[j] += (dvec){(double)e[i + 2 * j], (double)e[i + 2 * j + 1]};
    for (; i < n; i++)
        rest += (double)e[i];
    dvec sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    return (sum[0] + sum[1]) + rest;
}

/* Sum of exp((x - max) * scale) over the vocabulary; blocks: NULL, or the part of every BLOCK tokens. */
static double sum_exp(const float *logits, int32_t n, float max, float scale, double *blocks) {
    float e[BLOCK];
    double sum = 0;
    for (int32_t base = 0; base < n; base += BLOCK) {
        int32_t n_here = n - base < BLOCK ? n - base : BLOCK;
        exp_block(logits + base, n_here, max, scale, e);
        double part = sum_block(e, n_here);
        if (blocks)
            blocks[base / BLOCK] = part;
        sum += part;
    }
    return sum;
}

/* -- candidates ---------------------------------------------------------------------------------------------------- */

static uint64_t key_of(float logit, int32_t id) {
    uint32_t bits;
    logit += 0.0f; /* -0 and 0 are equal */
    memcpy(&bits, &logit, sizeof bits);
    bits = bits >> 31 ? ~bits : bits | 0x80000000u;
    return (uint64_t)bits << 32 | (uint32_t)~(uint32_t)id;
}

static int32_t id_of(uint64_t key) { return (int32_t)~(uint32_t)key; }

/* Heaps of keys. `up` is 0 for a heap with the largest key on top, UINT64_MAX for one with the smallest: keys are compared
 * xor `up`. */
static void sift(uint64_t *heap, int32_t n, int32_t at, uint64_t up) {
    uint64_t key = heap[at];
    for (int32_t child; (child = 2 * at + 1) < n; at = child) {
        if (child + 1 < n && (heap[child + 1] ^ up) > (heap[child] ^ up))
            child++;
        if ((heap[child] ^ up) <= (key ^ up))
            break;
        heap[at] = heap[child];
    }
    heap[at] = key;
}

static void heapify(uint64_t *heap, int32_t n, uint64_t up) {
    for (int32_t at = n / 2; at-- > 0;)
        sift(heap, n, at, up);
}

/* Moves the top behind the heap, which shrinks to n - 1. */
static uint64_t pop(uint64_t *heap, int32_t n, uint64_t up) {
    uint64_t top = heap[0];
    heap[0] = heap[n - 1];
    heap[n - 1] = top;
    sift(heap, n - 1, 0, up);
    return top;
}

/* The k best tokens of finite logit into keys, best first; returns how many there are. */
static int32_t best_k(const float *logits, int32_t n, int32_t k, uint64_t *keys) {
    int32_t n_kept = 0, i = 0;
    for (; i < n && n_kept < k; i++)
        if (logits[i] > -INFINITY)
            keys[n_kept++] = key_of(logits[i], i);
    heapify(keys, n_kept, UINT64_MAX);
    float least = n_kept ? logits[id_of(keys[0])] : 0; /* an equal logit later has a higher id: never better */
    while (i < n && n_kept) {
        if (i + 16 <= n) { /* skip what can't be better in strides */
            int found = 0;
            for (int j = 0; j < 16; j++)
                found |= logits[i + j] > least;
            if (!found) {
                i += 16;
                continue;
            }
        }
        for (int32_t end = i + 16 < n ? i + 16 : n; i < end; i++)
            if (logits[i] > least) {
                keys[0] = key_of(logits[i], i);
                sift(keys, n_kept, 0, UINT64_MAX);
                least = logits[id_of(keys[0])];
            }
    }
    for (int32_t m = n_kept; m > 1; m--) /* worst to the back: best first remains */
        pop(keys, m, UINT64_MAX);
    return n_kept;
}

/* -- the draw ------------------------------------------------------------------------------------------------------ */

/* [0, 1) from (seed, position): splitmix64 (Steele, Lea, Flood 2014) keyed by both. */
static double uniform(uint64_t seed, int32_t position) {
    uint64_t z = seed;
    for (int round = 0; round < 2; round++) {
        z += 0x9e3779b97f4a7c15u;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        z ^= z >> 31;
        z += (uint64_t)(uint32_t)position * 0xd1342543de82ef95u;
    }
    z = (z ^ (z >> 32)) * 0xdaba0b6eb09322e3u;
    return (double)((z ^ (z >> 32)) >> 11) * 0x1p-53;
}

typedef struct pick {
    const milad_sampler *s;
    const float *logits;
    int32_t n;
    float max;
    double temperature;
    double u;
} pick;

static double weight_of(const pick *p, int32_t id) { return exp(((double)p->logits[id] - (double)p->max) / p->temperature); }

/* keys[0..n) are drawn from by weight. */
static int32_t draw_keys(const pick *p, const uint64_t *keys, int32_t n) {
    double total = 0, below = 0;
    for (int32_t i = 0; i < n; i++)
        total += weight_of(p, id_of(keys[i]));
    int32_t id = id_of(keys[0]);
    for (int32_t i = 0; i < n; i++) {
        double w = weight_of(p, id_of(keys[i]));
        if (w > 0)
            id = id_of(keys[i]);
        below += w;
        if (below > p->u * total)
            break;
    }
    return id;
}

static int32_t draw_all(const pick *p, double *blocks) {
    float e[BLOCK], scale = (float)(1 / p->temperature);
    double target = p->u * sum_exp(p->logits, p->n, p->max, scale, blocks), below = 0;
    int32_t n_blocks = (p->n + BLOCK - 1) / BLOCK, b = 0, last = 0;
    for (; b < n_blocks; b++) {
        if (blocks[b] > 0)
            last = b;
        if (below + blocks[b] > target)
            break;
        below += blocks[b];
    }
    int32_t base = last * BLOCK, n_here = p->n - base < BLOCK ? p->n - base : BLOCK, id = -1;
    exp_block(p->logits + base, n_here, p->max, scale, e);
    for (int32_t i = 0; i < n_here; i++) {
        if (e[i] > 0)
            id = base + i;
        below += (double)e[i];
        if (id >= 0 && below > target)
            break;
    }
    return id;
}

/* top_k: the k best, of which top_p and min_p keep a prefix. */
static int32_t draw_best_k(const pick *p, uint64_t *keys) {
    int32_t n = best_k(p->logits, p->n, p->s->top_k, keys), n_kept = 0;
    double total = 0, sum = 0;
    for (int32_t i = 0; i < n; i++)
        total += weight_of(p, id_of(keys[i]));
    while (n_kept < n) {
        double w = weight_of(p, id_of(keys[n_kept]));
        if (n_kept && (w < (double)p->s->min_p || (p->s->top_p < 1 && sum >= (double)p->s->top_p * total)))
            break;
        sum += w;
        n_kept++;
    }
    return draw_keys(p, keys, n_kept);
}

/* Weights of n_here <= BLOCK keys; returns their sum. */
static double weigh(const pick *p, const uint64_t *keys, int32_t n_here, float *e) {
    float logits[BLOCK];
    for (int32_t i = 0; i < n_here; i++)
        logits[i] = p->logits[id_of(keys[i])];
    exp_block(logits, n_here, p->max, (float)(1 / p->temperature), e);
    return sum_block(e, n_here);
}

static int32_t draw_many(const pick *p, const uint64_t *keys, int32_t n) {
    float e[BLOCK];
    double total = 0, below = 0;
    int32_t at = 0, id = id_of(keys[0]);
    for (; at < n; at += BLOCK)
        total += weigh(p, keys + at, n - at < BLOCK ? n - at : BLOCK, e);
    for (at = 0; at < n; at += BLOCK) {
        int32_t n_here = n - at < BLOCK ? n - at : BLOCK;
        double part = weigh(p, keys + at, n_here, e);
        for (int32_t i = 0; i < n_here && below + part > p->u * total; i++) {
            if (e[i] > 0)
                id = id_of(keys[at + i]);
            below += (double)e[i], part -= (double)e[i];
            if (below > p->u * total)
                return id;
        }
        below += part;
    }
    return id;
}

enum { N_BUCKETS = 1024 };

/* A step towards the nucleus: splits keys[0..*n) into N_BUCKETS ranges of key and finds the one in which the mass, *sum so far,
 * reaches `wanted`. Keys above it come first, *n_whole of them, then its own; *n counts both. Lighter keys are lost. */
static void narrow(const pick *p, uint64_t *keys, int32_t *n, int32_t *n_whole, double *sum, double wanted) {
    float e[BLOCK];
    double mass[N_BUCKETS] = {0};
    uint64_t least = UINT64_MAX, most = 0;
    int32_t crossing = 0, n_near = 0, shift = 0;
    for (int32_t i = 0; i < *n; i++) {
        least = keys[i] < least ? keys[i] : least;
        most = keys[i] > most ? keys[i] : most;
    }
    while ((most - least) >> shift >= N_BUCKETS)
        shift++;
    for (int32_t at = 0; at < *n; at += BLOCK) {
        int32_t n_here = *n - at < BLOCK ? *n - at : BLOCK;
        weigh(p, keys + at, n_here, e);
        for (int32_t i = 0; i < n_here; i++)
            mass[(most - keys[at + i]) >> shift] += (double)e[i];
    }
    while (crossing < N_BUCKETS - 1 && *sum + mass[crossing] < wanted)
        *sum += mass[crossing++];
    *n_whole = 0;
    for (int32_t i = 0; i < *n; i++) {
        uint64_t key = keys[i];
        int32_t bucket = (int32_t)((most - key) >> shift);
        if (bucket > crossing)
            continue;
        keys[i] = keys[n_near];
        if (bucket < crossing) {
            keys[n_near] = keys[*n_whole];
            keys[(*n_whole)++] = key;
        } else
            keys[n_near] = key;
        n_near++;
    }
    *n = n_near;
}

/* The nucleus of n keys: ranges of keys that belong to it as a whole, until what is left to put in order is little. Returns its
 * size; it stands first in keys. */
static int32_t find_nucleus(const pick *p, uint64_t *keys, int32_t n, double wanted) {
    double sum = 0;
    int32_t first = 0, n_whole, n_kept = 0;
    while (n - first > WIDE) { /* keys are distinct and the range shrinks N_BUCKETS-fold: seven rounds at most */
        int32_t n_left = n - first;
        narrow(p, keys + first, &n_left, &n_whole, &sum, wanted);
        n = first + n_left;
        first += n_whole;
    }
    n -= first;
    heapify(keys + first, n, 0);
    for (; n_kept < n && (first + n_kept == 0 || sum < wanted); n_kept++)
        sum += weight_of(p, id_of(pop(keys + first, n - n_kept, 0)));
    memmove(keys + first, keys + first + n - n_kept, (size_t)n_kept * sizeof *keys);
    return first + n_kept;
}

/* top_p or min_p over the vocabulary. What is below (1 - top_p) / n of the mass can't belong to the nucleus, since all such
 * tokens together have less than 1 - top_p: only the others are gathered. */
static int32_t draw_nucleus(const pick *p, uint64_t *keys) {
    double least = (double)p->s->min_p, wanted = INFINITY;
    if (p->s->top_p < 1) {
        double top_p = p->s->top_p > 0 ? (double)p->s->top_p : 0;
        double total = sum_exp(p->logits, p->n, p->max, (float)(1 / p->temperature), NULL);
        double floor = (1 - top_p) * total / p->n * 0.999; /* the sum is a rounded one */
        least = floor > least ? floor : least;
        wanted = top_p * total;
    }
    double cut = (double)p->max + p->temperature * (least > 0 ? log(least) : -INFINITY);
    int32_t n = 0;
    for (int32_t i = 0; i < p->n; i++)
        if ((double)p->logits[i] >= cut && p->logits[i] > -INFINITY)
            keys[n++] = key_of(p->logits[i], i);
    if (!n) /* min_p > 1: the best stays */
        return find_first(p->logits, p->n, p->max);
    if (wanted < INFINITY)
        n = find_nucleus(p, keys, n, wanted);
    return draw_many(p, keys, n);
}

/* -- the whole ----------------------------------------------------------------------------------------------------- */

static float logprob_of(float logit, float max, double log_sum) {
    double p = (double)logit - (double)max - log_sum;
    return p > (double)SAMPLE_IMPOSSIBLE ? (float)p : SAMPLE_IMPOSSIBLE;
}

static int32_t choose(const milad_sampler *s, int32_t position, const float *logits, int32_t n_vocab, float max, void *scratch) {
    if (s->forced >= 0)
        return s->forced;
    if (!(s->temperature > 0) || s->top_k == 1)
        return find_first(logits, n_vocab, max);
    double t = (double)s->temperature; /* the ends of the range act like 0 and infinity, without their NaNs */
    t = t < 1e-30 ? 1e-30 : t > 1e30 ? 1e30 : t;
    pick p = {s, logits, n_vocab, max, t, uniform(s->seed, position)};
    if (s->top_k > 0 && s->top_k < n_vocab)
        return draw_best_k(&p, scratch);
    return s->top_p < 1 || s->min_p > 0 ? draw_nucleus(&p, scratch) : draw_all(&p, scratch);
}

void sample(const milad_sampler *s, int32_t position, float *logits, int32_t n_vocab, void *scratch, milad_output *out) {
    *out = (milad_output){.token = -1};
    for (int32_t i = 0; i < s->n_bias; i++)
        logits[s->bias_ids[i]] += s->bias[i];
    if (s->mask)
        apply_mask(s->mask, logits, n_vocab);
    apply_penalties(s, logits, scratch);
    float max = find_max(logits, n_vocab);
    if (!(max > -INFINITY))
        return;
    out->token = choose(s, position, logits, n_vocab, max, scratch);
    if (s->n_top < 0)
        return;
    double log_sum = log(sum_exp(logits, n_vocab, max, 1.0f, NULL));
    out->logprob = logprob_of(logits[out->token], max, log_sum);
    uint64_t keys[MILAD_MAX_TOP];
    out->n_top = s->n_top ? best_k(logits, n_vocab, s->n_top, keys) : 0;
    for (int32_t i = 0; i < out->n_top; i++) {
        out->top_ids[i] = id_of(keys[i]);
        out->top_logprobs[i] = logprob_of(logits[id_of(keys[i])], max, log_sum);
    }
}

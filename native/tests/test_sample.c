/* test_sample.c: what sampling must keep on any machine; test_sampling.py compares it with numpy. */
#include "sample.h"

#include <math.h>

#include "test.h"

enum { N = 1000 };

static float logits[N];
static uint64_t scratch[N];

static milad_output draw(milad_sampler s, int32_t position) {
    static float copy[N];
    milad_output out;
    memcpy(copy, logits, sizeof copy);
    sample(&s, position, copy, N, scratch, &out);
    return out;
}

static milad_sampler sampler(float temperature) {
    return (milad_sampler){.temperature = temperature, .top_p = 1, .repeat_penalty = 1, .n_top = -1, .forced = -1};
}

static void fill(uint64_t seed) {
    for (int i = 0; i < N; i++)
        logits[i] = 8 * test_uniform(&seed);
}

/* The draw is part of what a seed promises: these tokens must not change from one build or machine to the next. */
static void test_draws_are_pinned(void) {
    static const int32_t wanted[3][4] = {{349, 53, 849, 834}, {351, 29, 396, 396}, {85, 173, 323, 323}};
    fill(1);
    for (int k = 0; k < 4; k++) {
        milad_sampler s = sampler(1);
        s.seed = 42;
        CHECK_INT(draw(s, k).token, wanted[0][k]);
        s.top_k = 40;
        CHECK_INT(draw(s, k).token, wanted[1][k]);
        s.top_k = 0;
        s.top_p = 0.9f;
        CHECK_INT(draw(s, k).token, wanted[2][k]);
    }
}

static void test_order_of_changes(void) {
    fill(2);
    int32_t bias_ids[] = {5, 6}, history[] = {6, 6, 7};
    float bias[] = {100, 60};
    uint32_t mask[(N + 31) / 32];
    memset(mask, 0xFF, sizeof mask);
    milad_sampler s = sampler(0);
    s.bias_ids = bias_ids, s.bias = bias, s.n_bias = 2;
    CHECK_INT(draw(s, 0).token, 5);
    mask[0] &= ~(1u << 5);
    s.mask = mask; /* a mask wins over any bias */
    CHECK_INT(draw(s, 0).token, 6);
    s.history = history, s.n_history = 3, s.n_prompt = 1; /* one 6 is the prompt's */
    s.forced = 6, s.n_top = 0;
    s.presence_penalty = 59;
    float present = draw(s, 0).logprob;
    CHECK(present < -1 && present > -20);
    s.presence_penalty = 0, s.frequency_penalty = 59; /* counted once */
    CHECK_NEAR(draw(s, 0).logprob, present, 1e-6);
    s.n_prompt = 0; /* counted twice */
    CHECK_NEAR(draw(s, 0).logprob, present - 59, 1);
}

static void test_logprobs_sum_to_one(void) {
    fill(3);
    double sum = 0;
    milad_sampler s = sampler(0.5f);
    s.n_top = 0;
    for (int i = 0; i < N; i++) {
        s.forced = i;
        sum += exp((double)draw(s, 0).logprob);
    }
    CHECK_NEAR(sum, 1, 1e-5);
}

static void test_nothing_to_choose_from(void) {
    float bad[] = {NAN, -NAN, INFINITY};
    for (int k = 0; k < 3; k++) {
        fill(4);
        logits[N - 1] = bad[k];
        for (float t = 0; t < 2; t++)
            CHECK_INT(draw(sampler(t), 0).token, -1);
    }
    for (int i = 0; i < N; i++)
        logits[i] = -INFINITY;
    for (float t = 0; t < 2; t++)
        CHECK_INT(draw(sampler(t), 0).token, -1);
    logits[N - 2] = -3e38f;
    for (float t = 0; t < 2; t++)
        CHECK_INT(draw(sampler(t), 0).token, N - 2);
}

static void test_any_sampler_gives_a_token(void) {
    uint64_t seed = 5;
    static const float values[] = {0, 1e-45f, 1e-30f, 0.05f, 0.5f, 0.999f, 1, 1.5f, 1e30f, 3e38f, -1, INFINITY, -INFINITY};
    const int n = sizeof values / sizeof *values;
    for (int k = 0; k < 20000; k++) {
        if (k % 100 == 0)
            fill(seed);
        milad_sampler s = sampler(values[test_random(&seed) % n]);
        s.top_p = values[test_random(&seed) % n];
        s.min_p = values[test_random(&seed) % n];
        s.top_k = (int32_t)(test_random(&seed) % 50) - 3;
        s.n_top = (int32_t)(test_random(&seed) % 22) - 1;
        s.seed = test_random(&seed);
        milad_output out = draw(s, (int32_t)test_random(&seed));
        CHECK(sample_check(&s, N) == NULL);
        CHECK(out.token >= 0 && out.token < N && out.n_top == (s.n_top > 0 ? s.n_top : 0));
        CHECK(s.n_top < 0 || (out.logprob <= 0 && out.logprob >= SAMPLE_IMPOSSIBLE));
    }
}

int main(void) {
    test_draws_are_pinned();
    test_order_of_changes();
    test_logprobs_sum_to_one();
    test_nothing_to_choose_from();
    test_any_sampler_gives_a_token();
    return test_done();
}

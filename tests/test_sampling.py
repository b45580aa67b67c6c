"""native/src/sample.c, compiled by itself, against numpy: log-probabilities, candidate sets, distributions, hostile logits."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
IMPOSSIBLE = -9999.0
OFF = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0, "n_top": -1, "forced": -1}


class Core:
    """sample() and sample_check() of a library of that one file."""

    def __init__(self, path: Path) -> None:
        from cffi import FFI

        sys.path.insert(0, str(ROOT / "native"))
        import make_cffi

        self.ffi = FFI()
        self.ffi.cdef(make_cffi.declarations(make_cffi.HEADER.read_text()) + """
            void sample(const milad_sampler *s, int32_t position, float *logits, int32_t n_vocab, void *scratch, milad_output *out);
            const char *sample_check(const milad_sampler *s, int32_t n_vocab);""")
        self.lib = self.ffi.dlopen(str(path))

    def sampler(self, mask: np.ndarray | None = None, history: Any = (), bias: Any = (), **fields: Any) -> Any:
        """(sampler, what it points to); bias: pairs (id, value); mask: a bool per token."""
        kept: dict[str, Any] = {"history": self.ffi.new("int32_t[]", list(history)), "bias_ids": self.ffi.new("int32_t[]", [b[0] for b in bias]),
                                "bias": self.ffi.new("float[]", [b[1] for b in bias])}
        if mask is not None:
            bits = np.packbits(np.pad(mask, (0, -len(mask) % 32)), bitorder="little")
            kept["mask"] = self.ffi.from_buffer("uint32_t[]", bits.tobytes())
        return self.ffi.new("milad_sampler *", {**OFF, **kept, "n_history": len(history), "n_bias": len(bias), **fields}), kept

    def check(self, n_vocab: int, **options: Any) -> str:
        s, kept = self.sampler(**options)
        said = self.lib.sample_check(s, n_vocab)
        return self.ffi.string(said).decode() if said else ""

    def sample(self, logits: np.ndarray, position: int = 0, **options: Any) -> Any:
        return self.draws(logits, [position], **options)[0]

    def draws(self, logits: np.ndarray, positions: Any, seeds: Any = None, **options: Any) -> list[Any]:
        """One output per position; scratch is filled with rubbish first."""
        s, kept = self.sampler(**options)
        assert not self.lib.sample_check(s, len(logits))
        outputs = []
        scratch = np.full(len(logits) + 1, 0xA5A5A5A5A5A5A5A5, np.uint64)
        for i, position in enumerate(positions):
            if seeds is not None:
                s.seed = seeds[i]
            work = np.array(logits, np.float32)
            out = self.ffi.new("milad_output *")
            self.lib.sample(s, position, self.ffi.cast("float *", work.ctypes.data), len(work),
                            self.ffi.cast("void *", scratch.ctypes.data), out)
            outputs.append(out)
        assert scratch[-1] == 0xA5A5A5A5A5A5A5A5, "scratch overrun"
        return outputs


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Core:
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        pytest.skip("no C compiler")
    path = tmp_path_factory.mktemp("sample") / "libsample.so"
    subprocess.run([compiler, "-std=c17", "-D_GNU_SOURCE", "-O3", "-ffp-contract=off", "-fPIC", "-shared", "-o", path,
                    ROOT / "native" / "src" / "sample.c", "-lm"], check=True)
    return Core(path)


# -- the reference -------------------------------------------------------------------------------------------------------


def changed(logits: np.ndarray, mask: np.ndarray | None = None, history: Any = (), n_prompt: int = 0, bias: Any = (),
            repeat_penalty: float = 1.0, presence_penalty: float = 0.0, frequency_penalty: float = 0.0, **_: Any) -> np.ndarray:
    x = logits.astype(np.float64)
    for token, value in bias:
        x[token] += value
    if mask is not None:
        x[~mask] = -np.inf
    for token in set(history):
        x[token] = x[token] / repeat_penalty if x[token] > 0 else x[token] * repeat_penalty
    for token in set(history[n_prompt:]):
        x[token] -= presence_penalty + frequency_penalty * history[n_prompt:].count(token)
    return x


def log_softmax(x: np.ndarray) -> np.ndarray:
    return x - (x.max() + np.log(np.exp(x - x.max()).sum()))


def distribution(x: np.ndarray, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, **_: Any) -> np.ndarray:
    """Probabilities of the draw; 0 for what a filter shuts out."""
    p = np.exp((x - x.max()) / temperature)
    order = np.lexsort((np.arange(len(x)), -x))
    order = order[p[order] > 0]
    if top_k > 0:
        order = order[:top_k]
    before = np.cumsum(p[order]) - p[order]
    if top_p < 1:
        order = order[(before < top_p * p[order].sum()) | (np.arange(len(order)) == 0)]
    order = order[(p[order] >= min_p * p.max()) | (np.arange(len(order)) == 0)]
    kept = np.zeros_like(p)
    kept[order] = p[order] / p[order].sum()
    return kept


def chi_square_ok(counts: np.ndarray, p: np.ndarray) -> bool:
    """Within 6 standard deviations of a chi-square variable with that many degrees of freedom; False for NaN."""
    n, many = counts.sum(), p * counts.sum() >= 5
    observed = np.append(counts[many], counts[~many].sum())
    expected = np.append(p[many], p[~many].sum()) * n
    observed, expected = observed[expected > 0], expected[expected > 0]
    if len(expected) < 2:
        return bool(observed.sum() == n)
    k = len(expected) - 1
    return bool(((observed - expected) ** 2 / expected).sum() <= k + 6 * np.sqrt(2 * k) + 6)


def random_case(r: random.Random, n: int) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if r.random() < 0.5:
        options["mask"] = np.array([r.random() < 0.7 for _ in range(n)])
        options["mask"][r.randrange(n)] = True
    if r.random() < 0.5:
        options["bias"] = [(r.randrange(n), r.uniform(-8, 8)) for _ in range(r.randint(1, 6))]
    if r.random() < 0.6:
        options["history"] = [r.randrange(n) for _ in range(r.randint(1, 60))]
        options["n_prompt"] = r.randint(0, len(options["history"]))
        options.update(r.choice([{"repeat_penalty": r.uniform(0.5, 2)}, {"presence_penalty": r.uniform(-2, 2)}, {"frequency_penalty": r.uniform(-2, 2)},
                                 {"repeat_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.4}]))
    return options


# -- log-probabilities ---------------------------------------------------------------------------------------------------


def test_chi_square_can_fail() -> None:
    p = np.full(10, 0.1)
    assert chi_square_ok(np.full(10, 1000), p)
    assert not chi_square_ok(np.array([1500] + [944] * 9), p)
    assert not chi_square_ok(np.full(10, np.nan), p)


def test_logprobs_and_alternatives(core: Core) -> None:
    r, g = random.Random(1), np.random.default_rng(1)
    for n in [*range(1, 40), 64, 255, 256, 257, 1000, 4099]:
        for _ in range(4):
            logits = (g.normal(size=n) * r.choice([0.1, 3, 30])).astype(np.float32)
            options, n_top = random_case(r, n), r.randint(0, 20)
            want = log_softmax(changed(logits, **options))
            out = core.sample(logits, n_top=n_top, **options)
            order = np.array([i for i in np.lexsort((np.arange(n), -want)) if want[i] > -np.inf], int)
            assert abs(want[out.token] - want.max()) <= 1e-5
            assert out.n_top == min(n_top, len(order))
            got = np.array(list(out.top_logprobs)[: out.n_top])
            assert np.all(np.abs(got - want[order[: out.n_top]]) <= 1e-5 * np.maximum(1, np.abs(want[order[: out.n_top]])))
            assert np.all(np.abs(got - want[np.array(list(out.top_ids)[: out.n_top], int)]) <= 1e-5 * np.maximum(1, np.abs(got)))
            assert len(set(out.top_ids[0 : out.n_top])) == out.n_top
            assert abs(out.logprob - want[out.token]) <= 1e-5 * max(1, abs(out.logprob))


def test_forced_token_is_scored_not_drawn(core: Core) -> None:
    logits = np.array([1, 2, 3, 4], np.float32)
    want = log_softmax(logits.astype(np.float64))
    for token in range(4):
        out = core.sample(logits, forced=token, n_top=2, temperature=1.0)
        assert out.token == token and abs(out.logprob - want[token]) <= 1e-5 and list(out.top_ids[0:2]) == [3, 2]
    out = core.sample(logits, forced=1, n_top=0, mask=np.array([True, False, True, True]))
    assert out.token == 1 and out.logprob == IMPOSSIBLE


def test_no_logprobs_wanted(core: Core) -> None:
    out = core.sample(np.array([0, 1], np.float32), n_top=-1)
    assert (out.token, out.n_top, out.logprob) == (1, 0, 0.0)


def test_logprobs_of_far_apart_logits(core: Core) -> None:
    out = core.sample(np.array([0, -3e38, 50, -np.inf], np.float32), n_top=4)
    assert out.n_top == 3 and list(out.top_ids[0:3]) == [2, 0, 1]
    assert abs(out.top_logprobs[0]) <= 1e-6 and abs(out.top_logprobs[1] + 50) <= 1e-4 and out.top_logprobs[2] == IMPOSSIBLE


# -- candidates and distributions ----------------------------------------------------------------------------------------

FILTERS: list[dict[str, Any]] = [
    {}, {"top_k": 1}, {"top_k": 5}, {"top_k": 1000}, {"top_p": 0.9}, {"top_p": 0.5}, {"top_p": 0.0}, {"top_p": 1e-9}, {"min_p": 0.05}, {"min_p": 0.5},
    {"min_p": 1.0}, {"min_p": 3.0}, {"top_k": 10, "top_p": 0.8}, {"top_k": 10, "min_p": 0.2}, {"top_p": 0.9, "min_p": 0.1},
    {"top_k": 20, "top_p": 0.95, "min_p": 0.02}, {"top_p": 0.999999},
]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_distribution(core: Core, filters: dict[str, Any], temperature: float) -> None:
    """Draws stay within the reference's candidate set, reach all of it, and follow its probabilities."""
    r, g = random.Random(str(filters)), np.random.default_rng(5)
    for n in (30, 300):
        logits = (g.normal(size=n) * 2).astype(np.float32)
        options = random_case(r, n)
        p = distribution(changed(logits, **options), temperature, **filters)
        counts = np.zeros(n)
        for out in core.draws(logits, range(4000), seed=n, temperature=temperature, **filters, **options):
            counts[out.token] += 1
        assert not np.any((p == 0) & (counts > 0))
        assert not np.any((p * 4000 > 20) & (counts == 0))
        assert chi_square_ok(counts, p)


def test_candidate_sets_are_exact(core: Core) -> None:
    """Equally likely kept tokens: all of them are drawn, and nothing else. Ties at the edge go to the lower ids."""
    for n, kept in ((1000, 1), (1000, 7), (1000, 40), (333, 100)):
        logits = np.zeros(n, np.float32)
        tokens = {o.token for o in core.draws(logits, range(60 * kept), temperature=1.0, top_k=kept)}
        assert tokens == set(range(kept))
        tokens = {o.token for o in core.draws(logits, range(60 * kept), temperature=0.7, top_p=(kept - 0.5) / n)}
        assert tokens == set(range(kept))
        logits[::3] += 1
        tokens = {o.token for o in core.draws(logits, range(12 * n), temperature=1.0, min_p=0.9)}
        assert tokens == set(range(0, n, 3))


@pytest.mark.parametrize("filters", [{"top_p": 0.5}, {"top_p": 0.97}, {"top_p": 0.999, "min_p": 0.3}, {"min_p": 0.01}, {}], ids=str)
@pytest.mark.parametrize("shape", ["equal", "slope", "random", "two levels"])
def test_wide_candidate_sets(core: Core, filters: dict[str, Any], shape: str) -> None:
    """Nuclei too wide to be put in order: draws within the reference's set, in its proportions (50 groups of tokens)."""
    n, g = 10_000, np.random.default_rng(2)
    logits = {"equal": np.zeros(n), "slope": np.linspace(2, -2, n), "random": g.normal(size=n), "two levels": np.where(g.random(n) < 0.5, 0.0, -0.5)}[shape]
    p = distribution(logits.astype(np.float32).astype(np.float64), 1.3, **filters)
    tokens = np.array([o.token for o in core.draws(logits.astype(np.float32), range(3000), seed=4, temperature=1.3, **filters)])
    outside = {int(t) for t in tokens if p[t] == 0}  # the sums' rounding may move the edge by a token
    assert len(outside) <= 1 and all(logits[p > 0].min() - logits[t] < 1e-2 for t in outside)
    groups = np.arange(n) * 50 // n
    assert chi_square_ok(np.bincount(groups[tokens], minlength=50).astype(float), np.bincount(groups, weights=p, minlength=50))


def test_best_k_of_any_order(core: Core) -> None:
    g = np.random.default_rng(8)
    for n in (17, 100, 5000):
        for x in (np.arange(n), -np.arange(n), g.permutation(n), g.integers(0, 5, n), np.where(g.random(n) < 0.9, -np.inf, g.normal(size=n))):
            logits = x.astype(np.float32)
            order = [int(i) for i in np.lexsort((np.arange(n), -logits)) if logits[i] > -np.inf][:20]
            assert list(core.sample(logits, n_top=20).top_ids)[: len(order)] == order
            drawn = {o.token for o in core.draws(logits, range(300), temperature=1e6, top_k=3)}
            assert drawn == set(order[:3])


def test_ties_go_to_the_lowest_id(core: Core) -> None:
    for n in (1, 2, 15, 16, 17, 100):
        for first in range(0, n, 7):
            logits = np.full(n, -0.0, np.float32)
            logits[:first] = -1
            logits[first + 1 :: 2] = 0.0  # equal to -0
            assert core.sample(logits).token == first
            assert core.sample(logits, n_top=1).top_ids[0] == first


# -- the draw ------------------------------------------------------------------------------------------------------------


def test_draw_is_a_function_of_seed_and_position(core: Core) -> None:
    g = np.random.default_rng(3)
    logits = g.normal(size=500).astype(np.float32)
    for filters in ({}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.01}):
        a = [o.token for o in core.draws(logits, range(200), seed=9, temperature=1.0, **filters)]
        b = [o.token for o in core.draws(logits, reversed(range(200)), seed=9, temperature=1.0, n_top=5, **filters)]
        c = [o.token for o in core.draws(logits, range(200), seed=10, temperature=1.0, **filters)]
        assert a == b[::-1] and a != c and len(set(a)) > 20


@pytest.mark.parametrize("case", ["positions", "seeds", "high seeds", "diagonal", "pairs"])
def test_draws_are_uniform(core: Core, case: str) -> None:
    """Neither near seeds nor near positions are alike."""
    n, logits = 64, np.zeros(64, np.float32)
    count = 20_000
    seeds = {"positions": [1] * count, "seeds": list(range(count)), "high seeds": [i << 40 for i in range(count)],
             "diagonal": list(range(count)), "pairs": [5] * count}[case]
    positions = [7] * count if "seeds" in case else list(range(count))
    tokens = np.array([o.token for o in core.draws(logits, positions, seeds=seeds, temperature=1.0)])
    if case == "pairs":
        tokens, n = tokens[:-1] // 8 * 8 + tokens[1:] // 8, 64
    assert chi_square_ok(np.bincount(tokens, minlength=n).astype(float), np.full(n, 1 / n))


def test_extreme_temperatures(core: Core) -> None:
    logits = np.array([1, 3, 2, -np.inf, 3], np.float32)
    for filters in FILTERS:
        for temperature in (1e-45, 1e-38, 1e-20, 1e-6, 0.0, -1.0, -np.inf):
            for out in core.draws(logits, range(20), temperature=temperature, **filters):
                assert out.token in (1, 4)
        for temperature in (1e10, 3e38, np.inf):
            for out in core.draws(logits, range(20), temperature=temperature, **filters):
                assert out.token in (0, 1, 2, 4)
    hot = {o.token for o in core.draws(logits, range(100), temperature=3e38)}
    assert hot == {0, 1, 2, 4}


@pytest.mark.parametrize("filters", [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 3}, {"temperature": 1.0, "top_p": 0.5},
                                     {"temperature": 1.0, "min_p": 0.1}, {"forced": 1}], ids=str)
def test_logits_that_are_no_numbers(core: Core, filters: dict[str, Any]) -> None:
    for n in (4, 16, 33, 300):
        for bad in (np.nan, -np.nan, np.inf):
            for at in {0, 3, n - 1, n // 2}:
                logits = np.zeros(n, np.float32)
                logits[at] = bad
                assert core.sample(logits, n_top=5, **filters).token == -1
        assert core.sample(np.full(n, -np.inf, np.float32), n_top=5, **filters).token == -1
        assert core.sample(np.zeros(n, np.float32), mask=np.zeros(n, bool), **filters).token == -1
        one = np.arange(n) == n // 2
        assert core.sample(np.zeros(n, np.float32), mask=one, **{**filters, "forced": -1}).token == n // 2


# -- checks --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options, said", [
    ({}, ""), ({"temperature": float("nan")}, "temperature"), ({"top_p": float("nan")}, "top_p"), ({"min_p": float("nan")}, "min_p"),
    ({"repeat_penalty": 0.0}, "repeat_penalty"), ({"repeat_penalty": float("nan")}, "repeat_penalty"), ({"presence_penalty": float("inf")}, "presence"),
    ({"frequency_penalty": float("nan")}, "frequency"), ({"n_top": 21}, "20"), ({"n_top": 20}, ""), ({"forced": 10}, "forced"), ({"forced": 9}, ""),
    ({"bias": [(10, 1.0)]}, "bias"), ({"bias": [(-1, 1.0)]}, "bias"), ({"bias": [(1, float("nan"))]}, "bias"), ({"bias": [(1, float("-inf"))]}, ""),
    ({"history": [1, 2], "n_prompt": 3}, "history"), ({"history": [1], "n_prompt": -1}, "history"),
    ({"history": [1, 10], "repeat_penalty": 1.1}, "history"), ({"history": [-1], "presence_penalty": 1.0}, "history"), ({"n_bias": 1, "bias_ids": 0}, "bias"),
])
def test_samplers_are_checked(core: Core, options: dict[str, Any], said: str) -> None:
    if options.get("bias_ids") == 0:
        options = {"n_bias": 1, "bias_ids": core.ffi.NULL}
    answer = core.check(10, **options)
    assert said in answer and bool(answer) == bool(said)

"""The engine over the real core: a request's tokens are the same alone, in company, drafted, preempted, from cache or disk."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any, Iterator

import pytest

from milad.engine.base import Done, Fault, Request, SamplerArgs, Scored, Token
from milad.engine.loop import Engine
from test_loop import until

N_CTX = 256


@pytest.fixture(scope="module")
def model(tiny: Any, library: Path) -> Iterator[Any]:
    from milad import capi
    m = capi.Model(tiny())
    yield m
    m.close()


def requests(model: Any) -> list[tuple[list[int], SamplerArgs]]:
    r = random.Random(4)
    system = model.tokenize("You are hello world and the other one, in the world. " * 3)
    found = []
    for i in range(10):
        text = " ".join(r.choice(("hello", "the world", "and", "12", "on", "er")) for _ in range(r.randrange(1, 30)))
        tokens = (system if i % 3 else []) + model.tokenize(text)
        found.append((tokens[:N_CTX - 60], SamplerArgs(
            temperature=r.choice((0.0, 0.8, 1.5)), top_k=r.choice((0, 20)), seed=i, n_top=r.choice((-1, 3)),
            repeat_penalty=1.1 if i % 4 == 0 else 1.0)))
    return found


class Reader:
    def __init__(self, engine: Engine, tokens: list[int], sampler: SamplerArgs, n: int = 50, **options: Any) -> None:
        self.items: list[Any] = []
        self.ended = threading.Event()
        self.handle = engine.submit(Request(tokens, n, sampler, frozenset(), self._sink, **options))

    def _sink(self, items: list[Any]) -> None:
        self.items += items
        if isinstance(items[-1], (Done, Fault)):
            self.ended.set()

    def result(self) -> list[tuple[int, float, Any]]:
        assert self.ended.wait(60)
        assert isinstance(self.items[-1], Done), self.items[-1]
        return [(i.id, i.logprob, i.top) for i in self.items if isinstance(i, Token)]


def run(model: Any, wanted: list[tuple[list[int], SamplerArgs]], *, n_blocks: int = 100, at_once: bool = True, n_threads: int = 1,
        max_rows: int = 64, **options: Any) -> tuple[list[Any], dict[str, Any]]:
    context = model.context(n_blocks=n_blocks, n_threads=n_threads, max_rows=max_rows)
    engine = Engine(model, context, post=lambda f, *a: f(*a), n_ctx=N_CTX, **options)
    try:
        results = []
        readers = []
        for tokens, sampler in wanted:
            readers.append(Reader(engine, tokens, sampler))
            if not at_once:
                readers[-1].result()
        results = [r.result() for r in readers]
        if "disk_dir" in options:
            until(lambda: not engine.stats()["disk"]["n_waiting"])
        return results, engine.stats()
    finally:
        assert engine.stop()
        context.close()


@pytest.fixture(scope="module")
def alone(model: Any) -> list[Any]:
    """Each request by itself, nothing cached, one thread."""
    return run(model, requests(model), at_once=False, cache=False)[0]


@pytest.mark.parametrize("options", [
    {"parallel": 8}, {"parallel": 8, "n_threads": 2}, {"parallel": 3, "max_rows": 16}, {"parallel": 8, "cache": False},
    {"at_once": False}, {"parallel": 8, "speculate": True}, {"at_once": False, "speculate": True},
    {"parallel": 8, "n_blocks": 9}, {"parallel": 8, "n_blocks": 12, "speculate": True}])
def test_the_same_tokens_and_logprobs(model: Any, alone: list[Any], options: dict[str, Any]) -> None:
    results, stats = run(model, requests(model), **options)
    assert results == alone
    assert stats["n_blocks_held"] == 0
    if options.get("n_blocks") == 9:
        assert stats["n_preempted"] > 0
    if options.get("cache", True):
        assert stats["n_cached_tokens"] > 0


def test_the_same_from_disk(model: Any, alone: list[Any], tmp_path: Path) -> None:
    for turn in range(2):
        results, stats = run(model, requests(model), at_once=False, disk_dir=str(tmp_path), disk_bytes=1 << 30)
        assert results == alone
    assert stats["disk"]["n_read"] > 0 and stats["disk"]["n_bad"] == 0


def test_prompt_logprobs_are_the_generated_ones(model: Any) -> None:
    """What a token was given when it was drawn is what scoring a prompt with it gives."""
    context = model.context(n_blocks=40)
    engine = Engine(model, context, post=lambda f, *a: f(*a), n_ctx=N_CTX)
    prompt = model.tokenize("hello world and the other")
    made = Reader(engine, prompt, SamplerArgs(temperature=1.0, seed=5, n_top=2), 40).result()
    whole = prompt + [t for t, _, _ in made]
    reader = Reader(engine, whole, SamplerArgs(n_top=2), 1, score_prompt=True)
    reader.result()
    scored = [(i.id, i.logprob, i.top) for i in reader.items if isinstance(i, Scored)]
    assert [t for t, _, _ in scored] == whole[1:]
    assert scored[len(prompt) - 1:] == made
    assert engine.stop()
    context.close()

"""Remembered generations through rendering and tokenising: a conversation's next turn hits the cache up to the last token."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Iterator

import pytest

from milad import families
from milad.conversation import Message, Sampling, Text, Turn
from milad.engine.loop import Engine
from milad.events import Fold
from milad.turn import Runner


@pytest.fixture(scope="module")
def parts(tiny: Any, library: Path) -> Iterator[Any]:
    from milad import capi
    model = capi.Model(tiny())
    family = families.choose(None, frozenset(model.specials), "chatml")
    yield model, family
    model.close()


def plain_bias(model: Any) -> tuple[tuple[int, float], ...]:
    """Keeps a random model to letters and blanks."""
    letters = set(b"helo ")         # what MERGES of tests/tiny.py joins
    return tuple((t, -100.0) for t in range(model.info.n_vocab)
                 if t in model.specials.values() or not set(model.token_bytes(t)) <= letters)


async def converse(model: Any, family: Any, remember: bool) -> tuple[list[int], list[int], int]:
    """Four turns: (tokens of each prompt that were new, cached, generations whose re-tokenising differed)."""
    context = model.context(n_blocks=64)
    engine = Engine(model, context, post=asyncio.get_running_loop().call_soon_threadsafe, n_ctx=1024)
    runner = Runner(model, context, engine, family, n_ctx=1024, remember=engine.remember if remember else None)
    messages: list[Message] = []
    new, cached, n_other = [], [], 0
    try:
        for i in range(4):
            messages.append(Message("user", (Text(f"hello {'world ' * i}"),)))
            turn = Turn("chat", tuple(messages), max_tokens=40,
                        sampling=Sampling(temperature=1.0, seed=i, logit_bias=plain_bias(model)))
            prepared = runner.prepare(turn)
            assert runner.count(turn) == len(prepared.tokens)
            fold = Fold()
            await runner.run(prepared).read(lambda events: [fold.take(event) for _, event in events] and None)
            assert fold.finish is not None
            usage = fold.usage
            new.append(usage.input_tokens - usage.cached_tokens)
            cached.append(usage.cached_tokens)
            text = fold.text()
            assert text, fold
            n_other += len(model.tokenize(text)) != usage.output_tokens
            messages.append(Message("assistant", (Text(text),)))
    finally:
        assert engine.stop()
        context.close()
    return new, cached, n_other


def test_the_next_turn_computes_only_what_is_new(parts: Any) -> None:
    model, family = parts
    new, cached, n_other = asyncio.run(converse(model, family, True))
    assert n_other >= 2, "the seeds make re-tokenising differ"
    user = [len(model.tokenize(f"<|im_end|>\n<|im_start|>user\nhello {'world ' * i}<|im_end|>\n<|im_start|>assistant\n",
                               parse_special=True)) for i in range(4)]
    for i in range(1, 4):
        assert new[i] <= user[i] + 2, (new, user)
    forgetful = asyncio.run(converse(model, family, False))[0]
    assert sum(forgetful) > sum(new), "without memory more is computed, or this test shows nothing"

"""Legacy completions: prompts, logprob arrays, the official SDK as reader, plain = stream."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from milad.errors import MiladError
from milad.events import BlockEnd, BlockStart, Delta, Finish, Started, TokenLogprob, Usage
from protocols.support import PROTOCOLS, frames, generation, ident, interleave, openai_client

COMPLETIONS = PROTOCOLS["completions"]


def parse(prompt: Any = "abc", **more: Any) -> Any:
    return COMPLETIONS.parse({"prompt": prompt, **more})


def fails(match: str, prompt: Any = "abc", **more: Any) -> MiladError:
    with pytest.raises(MiladError, match=match) as e:
        parse(prompt, **more)
    assert e.value.status == 400
    return e.value


def test_prompts() -> None:
    assert parse("a").prompt == "a" and parse("").prompt == "" and parse([1, 2]).prompt == (1, 2)
    assert parse(["a"]).prompt == "a" and parse([[1, 2]]).prompt == (1, 2)
    many = parse(["a", "b"], n=2)
    assert many.prompts == ("a", "b") and many.prompt == "a" and len(COMPLETIONS.encoder(many, ident()).folds) == 4
    assert parse([[1], [2, 3]]).prompts == ((1,), (2, 3))
    for value in (None, [], [[]], {}, 3, [1, "a"], ["a", 1], [True], [-1], [2**31], [1.5], ["\ud800"]):
        fails("prompt", value)
    fails("choices", ["a"] * 9, n=2)
    fails("more than 16", ["a"] * 17)


def test_fields() -> None:
    assert parse().max_tokens == 16 and parse(max_tokens=0).max_tokens == 0 and parse(max_tokens=-1).max_tokens is None
    assert parse(echo=True).echo and parse(logprobs=0).top_logprobs == 0 and parse().top_logprobs is None
    assert parse(best_of=1).n == 1
    assert parse(suffix="x").suffix == "x" and parse(suffix=None).suffix == ""
    fails("best_of: is not supported", best_of=2)
    fails("logprobs", logprobs=True)


@pytest.mark.parametrize("seed", range(40))
def test_plain_equals_stream(seed: int) -> None:
    rng = random.Random(seed)
    n = rng.randrange(1, 4)
    turn = parse(n=n, logprobs=2, stream_options={"include_usage": True})
    encoder = COMPLETIONS.encoder(turn, ident("cmpl-"))
    streams = [generation(rng, logprobs=True, kinds=("text",)) for _ in range(n)]
    stream = frames(encoder, interleave(rng, streams), rng)
    assert stream[-1] == (None, "[DONE]") and stream[-2][1]["choices"] == []
    body = json.loads(json.dumps(encoder.body(), allow_nan=False))
    assert stream[-2][1]["usage"] == body["usage"]
    for choice in body["choices"]:
        mine = [c["choices"][0] for _, c in stream[:-2] if c["choices"][0]["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"]
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == [choice["finish_reason"]]
        for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [v for c in mine if c["logprobs"] for v in c["logprobs"][key]] == choice["logprobs"][key]


def test_logprob_arrays() -> None:
    encoder = COMPLETIONS.encoder(parse(echo=True, logprobs=1), ident())
    tokens = (TokenLogprob("é".encode(), float("nan")), TokenLogprob(b"\xf0\x9f", -1.0, ((b"a", -0.5),)),
              TokenLogprob(b"\x8e\x89", float("-inf")), TokenLogprob(b"ok", -2.0))
    events = [Started(Usage(4)), BlockStart(0, "text"), Delta(0, "é🎉ok", tokens), BlockEnd(0), Finish("length", Usage(4, 0, 1))]
    frames(encoder, [(0, e) for e in events])
    choice = encoder.body()["choices"][0]
    assert choice["text"] == "é🎉ok" and choice["finish_reason"] == "length"
    assert choice["logprobs"] == {"tokens": ["é", "bytes:\\xf0\\x9f", "bytes:\\x8e\\x89", "ok"],
                                  "token_logprobs": [None, -1.0, -9999.0, -2.0],
                                  "top_logprobs": [None, {"a": -0.5}, {}, {}], "text_offset": [0, 1, 1, 2]}


def test_usage_counts_each_prompt_once() -> None:
    encoder = COMPLETIONS.encoder(parse(["a", "b"], n=2), ident())
    for i in range(4):
        prompt = 10 if i < 2 else 20
        frames(encoder, [(i, Started(Usage(prompt, 4))), (i, Finish("stop", Usage(prompt, 4, i + 1)))])
    usage = encoder.body()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["prompt_tokens_details"]["cached_tokens"]) == (30, 10, 8)


def test_sdk_reads_both() -> None:
    encoder = COMPLETIONS.encoder(parse(), ident("cmpl-"))
    stream = frames(encoder, [(0, e) for e in generation(random.Random(3), kinds=("text",))], random.Random(4))
    client = openai_client(lambda body: stream if body.get("stream") else encoder.body())
    plain = client.completions.create(model="m", prompt="abc")
    chunks = list(client.completions.create(model="m", prompt="abc", stream=True))
    assert "".join(c.choices[0].text for c in chunks) == plain.choices[0].text and plain.object == "text_completion"
    assert plain.usage.total_tokens == plain.usage.prompt_tokens + plain.usage.completion_tokens

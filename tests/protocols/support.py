"""What the protocol tests share: recorded requests, random generations, streams as bytes, official clients without a server."""

from __future__ import annotations

import gzip
import itertools
import json
import random
from pathlib import Path
from typing import Any, Callable, Iterator

from milad.events import (BlockEnd, BlockStart, Delta, Event, Finish, Progress, Started, TokenLogprob, Usage)
from milad.protocols.base import Ident
from milad.protocols.chat import Chat
from milad.protocols.completions import Completions
from milad.protocols.messages import Messages
from milad.protocols.responses import Responses

DATA = Path(__file__).resolve().parent.parent / "data" / "cases"
REASONS = ("stop", "stop_sequence", "length", "context", "tool_calls")


def cases() -> list[tuple[str, dict[str, Any]]]:
    """(client/name, {method, path, headers, body}) of every recorded request."""
    out = []
    for path in sorted(DATA.glob("*.json.gz")):
        client = path.name[:-len(".json.gz")]
        with gzip.open(path, "rt", encoding="utf-8") as f:
            out += [(f"{client}/{c['name']}", c) for c in json.load(f)]
    return out


def case(name: str) -> dict[str, Any]:
    return dict(cases())[name]["body"]


def ident(prefix: str = "id_", n_ctx: int = 4096) -> Ident:
    numbers = itertools.count(1)
    return Ident(prefix + "0001", 1700000000, "local-model", lambda p: f"{p}{next(numbers):024x}", n_ctx)


TEXT = ["Hello", ", wörld", "\n", "日本", "🎉", " \"quoted\"", "\\", "{", "}", "</think>", "<|im_end|>", "\u2028", "a" * 50]


def generation(rng: random.Random, *, logprobs: bool = False, tools: tuple[str, ...] = ("get_time", "weather"),
               kinds: tuple[str, ...] = ("text", "thinking", "tool_call"), reason: str = "") -> list[Event]:
    """A whole random generation that keeps the events' order."""
    usage = Usage(rng.randrange(1, 5000), 0)
    usage = Usage(usage.input_tokens, rng.randrange(usage.input_tokens + 1))
    events: list[Event] = [Progress(1, 2, 0, rng.randrange(3)) for _ in range(rng.randrange(3))]
    events.append(Started(usage))
    blocks = rng.randrange(5)
    for i in range(blocks):
        kind = rng.choice(kinds)
        complete = i + 1 < blocks or rng.random() < 0.7
        start = BlockStart(i, kind, f"{rng.getrandbits(96):024x}", rng.choice(tools)) if kind == "tool_call" else \
            BlockStart(i, kind)
        events.append(start)
        text = "".join(rng.choice(TEXT) for _ in range(rng.randrange(8)))
        if kind == "tool_call":
            value = rng.choice([None, {}, {"a": text}, {"input": text}, {"a": [1, {"b": None}]}, "junk"])
            text = "" if value is None else "not json {" if value == "junk" else \
                json.dumps(value, ensure_ascii=rng.random() < 0.5)
            if not complete:
                text = text[:rng.randrange(len(text) + 1)]
        at = 0
        while at < len(text):
            n = rng.randrange(1, 6)
            piece = text[at:at + n]
            events.append(Delta(i, piece, logprob(rng, piece) if logprobs and kind == "text" else ()))
            at += n
        events.append(BlockEnd(i, complete))
    reason = reason or rng.choice(REASONS)
    done = Usage(usage.input_tokens, usage.cached_tokens, rng.randrange(500), rng.randrange(100))
    events.append(Finish(reason, done, "STOP" if reason == "stop_sequence" else None))
    return events


def logprob(rng: random.Random, piece: str) -> tuple[TokenLogprob, ...]:
    top = tuple((bytes([rng.randrange(256)]), -rng.random() * 9) for _ in range(rng.randrange(4)))
    return (TokenLogprob(piece.encode(), -rng.random(), top), TokenLogprob(b"\xe2\x80", float("-inf")))


def interleave(rng: random.Random, streams: list[list[Event]]) -> Iterator[tuple[int, Event]]:
    at = [0] * len(streams)
    while any(a < len(s) for a, s in zip(at, streams)):
        i = rng.choice([i for i, s in enumerate(streams) if at[i] < len(s)])
        yield i, streams[i][at[i]]
        at[i] += 1


def frames(encoder: Any, events: Iterator[tuple[int, Event]] | list[tuple[int, Event]],
           rng: random.Random | None = None) -> list[Any]:
    """The whole stream; with rng, keepalives in between."""
    out = []
    for choice, event in events:
        if rng is not None and rng.random() < 0.15:
            out += encoder.keepalive()
        out += encoder.event(choice, event)
    return out + encoder.end()


def sse(stream: list[Any]) -> bytes:
    out = []
    for name, data in stream:
        text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, allow_nan=False)
        out.append((f"event: {name}\n" if name else "") + f"data: {text}\n\n")
    return "".join(out).encode()


def transport(reply: Callable[[dict[str, Any]], Any]) -> Any:
    """A MockTransport: reply(request body) -> frames, a plain body, or (status, body, headers)."""
    import httpx2

    def handle(request: Any) -> Any:
        answer = reply(json.loads(request.content))
        if isinstance(answer, tuple):
            status, body, headers = answer
            return httpx2.Response(status, json=body, headers=headers)
        if isinstance(answer, dict):
            return httpx2.Response(200, json=answer)
        return httpx2.Response(200, content=sse(answer), headers={"content-type": "text/event-stream"})
    return httpx2.Client(transport=httpx2.MockTransport(handle))


def openai_client(reply: Callable[[dict[str, Any]], Any]) -> Any:
    import openai
    return openai.OpenAI(api_key="x", base_url="http://127.0.0.1:1/v1", http_client=transport(reply), max_retries=0)


def anthropic_client(reply: Callable[[dict[str, Any]], Any]) -> Any:
    import anthropic
    return anthropic.Anthropic(api_key="x", base_url="http://127.0.0.1:1", http_client=transport(reply), max_retries=0)


PROTOCOLS = {"chat": Chat(), "completions": Completions(), "messages": Messages(), "responses": Responses()}


def protocol_of(path: str) -> str | None:
    for name, end in (("chat", "/chat/completions"), ("completions", "/completions"), ("responses", "/responses"),
                      ("messages", "/messages"), ("messages", "/messages/count_tokens")):
        if path.partition("?")[0].endswith(end):
            return name
    return None

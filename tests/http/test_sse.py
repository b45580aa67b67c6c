"""SSE frames: always valid UTF-8 and JSON, and what an independent reader of the standard makes of them."""

from __future__ import annotations

import json
import random

import pytest

from milad.http import sse


def parse(stream: bytes) -> list[tuple[str, str]]:
    """Events by WHATWG HTML, 9.2.6: any of CR LF, LF, CR ends a line."""
    events, name, data = [], "", []
    for line in stream.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n").split("\n"):
        if not line:
            if data:
                events.append((name or "message", "\n".join(data)))
            name, data = "", []
        elif line.startswith("event:"):
            name = line[6:].removeprefix(" ")
        elif line.startswith("data:"):
            data.append(line[5:].removeprefix(" "))
        else:
            raise AssertionError(line)
    assert not data, "the last event is not ended"
    return events


def test_frames() -> None:
    assert sse.encode([]) == b""
    assert sse.encode([("ping", {"type": "ping"}), (None, "[DONE]")]) == b'event: ping\ndata: {"type":"ping"}\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize("text", ["a\nb\r\n\rc", "\u2028\u2029\x85\x0b\x0c", "data: x\n\nevent: y", "\0\x1b[2J", "é😀", "\ufeff"])
def test_text_survives(text: str) -> None:
    assert [(n, json.loads(d)) for n, d in parse(sse.encode([("e", {"t": text})]))] == [("e", {"t": text})]


def test_what_is_no_text_or_number() -> None:
    value = {"a": "x\ud83dy\udc00", "\ud800": 1, "n": [float("nan"), float("inf"), -float("inf"), 1.5], "t": (1, float("nan"))}
    assert json.loads(sse.dumps(value).decode("utf-8")) == {"a": "x\ufffdy\ufffd", "\ufffd": 1, "n": [None, None, None, 1.5], "t": [1, None]}


def test_random_text_is_always_valid() -> None:
    rng = random.Random(3)
    for _ in range(500):
        text = "".join(chr(rng.choice([rng.randrange(128), rng.randrange(0x3000), rng.randrange(0xD700, 0xE100), rng.randrange(0x110000)]))
                       for _ in range(20))
        (_, data), = parse(sse.encode([(None, {"t": text})]))
        assert json.loads(data)["t"] == "".join("\ufffd" if 0xD800 <= ord(c) < 0xE000 else c for c in text)

"""The hostile table over sockets: no 5xx, nothing kept afterwards, and the daemon still answers."""

from __future__ import annotations

import http.client
import json
import random
from typing import Any, Iterator

import pytest

from protocols.test_hostile import BASE, DEEP, FIELDS, HOSTILE, NESTED, SHARED, put

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions", "responses": "/v1/responses", "messages": "/v1/messages"}
COUNT = {"responses": "/v1/responses/input_tokens", "messages": "/v1/messages/count_tokens"}
# Bodies that are no JSON document of ours, whole or by their bytes.
RAW = [b"", b"{", b"[]", b"null", b"3", b'"x"', b'{"messages":', b"\xff\xfe{}", b'{"messages": "\xff"}', b'{"a": "\\ud800"}', b'{"n": NaN}',
       b'{"n": 1e999}', b'{"n": -Infinity}', b'{"a": ' + b"9" * 100_000 + b"}", b"[" * 200_000, b'{"a":' * 50_000, b"{" + b" " * 500_000,
       b"\xef\xbb\xbf{}", b'{"a": 1, "a": 2}', b'{"messages": [{"role": "user", "content": "\\u0000"}]}', b"\x1f\x8b\x08\x00junk"]


@pytest.fixture(scope="module")
def daemon(start: Any) -> Any:
    return start([{"output": 'Hi <tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'}], ("--ctx", "131072", "--tools", "on"))


def bodies(rng: random.Random, share: float) -> Iterator[tuple[str, bytes]]:
    for protocol, path in PATHS.items():
        limits = {"max_tokens": 3, "max_output_tokens": 3}
        found = [{**BASE[protocol], **limits, field: value} for field in (*FIELDS[protocol], *SHARED) for value in HOSTILE]
        found += [{**BASE[protocol], **limits, **put(template, value)} for template in NESTED[protocol] for value in HOSTILE
                  if value is not DEEP]
        for body in found:
            if rng.random() < share:
                try:
                    data = json.dumps(body).encode()
                except RecursionError:
                    continue
                yield rng.choice((path, COUNT.get(protocol, path))), data
        for data in RAW:
            yield path, data


def play(daemon: Any, seed: int, share: float = 0.12) -> tuple[int, int]:
    """(answers, of which 200)"""
    connection = http.client.HTTPConnection(daemon.host, daemon.port, timeout=60)
    n = n_good = 0
    for path, data in bodies(random.Random(seed), share):
        try:
            connection.request("POST", path, data, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            status, text = answer.status, answer.read()
        except (http.client.HTTPException, OSError) as e:
            raise AssertionError((path, data[:300])) from e
        assert status < 500, (path, data[:300], text[:300])
        json.loads(text) if not text.startswith((b"event:", b"data:")) else text.decode()
        n += 1
        n_good += status == 200
    connection.close()
    return n, n_good


def resident(daemon: Any) -> int:
    with open(f"/proc/{daemon.process.pid}/statm") as f:
        return int(f.read().split()[1]) * 4096


def test_no_5xx_and_no_growth(daemon: Any) -> None:
    n, n_good = play(daemon, 0)
    assert n > 800 and 50 < n_good < n
    play(daemon, 1)
    before = resident(daemon)
    for _ in range(2):
        play(daemon, 1)             # the same bodies again: nothing new is to be remembered
    assert resident(daemon) - before < 8 << 20
    assert "Traceback" not in daemon.log and daemon.json("GET", "/health")[0] == 200
    status, answer = daemon.json("POST", PATHS["chat"], {"messages": [{"role": "user", "content": "x"}], "tools": [
        {"type": "function", "function": {"name": "f"}}]})
    assert status == 200 and answer["choices"][0]["message"]["tool_calls"]

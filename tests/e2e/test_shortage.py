"""The daemon when something gives out: a full disk, a kill, an end under load, a clock that jumps."""

from __future__ import annotations

import ast
import json
import resource
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from service import CHAT, ROOT, SLOW, Service, start  # noqa: F401

LONG = {"messages": [{"role": "user", "content": "Tell me about rivers, lakes and seas. " * 40}], "max_tokens": 4, "temperature": 0}


def answer(one: Service, body: Any = LONG) -> tuple[str, int]:
    """(text, tokens from the cache)."""
    status, data = one.ask("/v1/chat/completions", body)
    assert status == 200, data
    found = json.loads(data)
    return found["choices"][0]["message"]["content"], found["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_full_disk_takes_no_answer_away(start) -> None:
    """The log on a full device; the prompt cache's and the store's files cut off at 100 kB, as on a full disk."""
    def preexec() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    one = start("--ctx", "1024", "--log-file", "/dev/full", script=False, preexec=preexec)
    first, _ = answer(one)
    assert answer(one)[0] == first
    status, data = one.ask("/v1/responses", {"input": "hello", "max_output_tokens": 3, "store": True})
    assert status == 200 and json.loads(data)["status"] in ("completed", "incomplete")
    assert one.end() == 0


def test_killed_and_started_again(start, tmp_path: Path) -> None:
    """kill -9 while it works, with the prompt cache on disk: the next one starts, and answers the same."""
    args = ("--ctx", "1024", "--kv-cache-dir", str(tmp_path / "kv"))
    one = start(*args, script=False)
    first, _ = answer(one)
    end = time.monotonic() + 10
    while not list((tmp_path / "kv").rglob("*.kv")) and time.monotonic() < end:
        time.sleep(0.02)
    thread = threading.Thread(target=lambda: pytest.raises(OSError, one.ask, "/v1/chat/completions", {**LONG, "max_tokens": 500}))
    thread.start()
    time.sleep(0.1)
    one.signal(signal.SIGKILL)
    thread.join()
    for path in list((tmp_path / "kv").rglob("*.kv"))[:1]:
        path.write_bytes(path.read_bytes()[:1000])       # as if the kill had come in its middle
    two = start(*args, script=False)
    text, _ = answer(two)
    assert text == first and two.end() == 0


def test_an_end_under_load(start) -> None:
    """Every client gets a whole answer, an error event, a 503, or no connection; none hangs, none gets a clean half."""
    one = start("--drain-timeout", "0.5", "--queue-limit", "64", script=[{**SLOW[0], "when": {}}])
    ends: list[str] = []

    def client(i: int) -> None:
        body = {"messages": [{"role": "user", "content": f"slow {i}"}], "stream": bool(i % 2)}
        try:
            status, data = one.ask("/v1/chat/completions", body)
        except OSError:
            ends.append("refused")
            return
        if status == 200:
            ends.append("error event" if b'"error"' in data else "whole" if data.endswith(b"data: [DONE]\n\n") or not i % 2 else f"half: {data[-100:]!r}")
        else:
            ends.append(str(status))

    threads = [threading.Thread(target=client, args=(i,)) for i in range(30)]
    for thread in threads:
        thread.start()
    while json.loads(one.ask("/v1/milad/status")[1])["engine"]["n_running"] < 4:
        time.sleep(0.02)
    one.signal(signal.SIGTERM)
    for thread in threads:
        thread.join(30)
    assert one.process.wait(10) == 0
    assert len(ends) == 30 and set(ends) <= {"whole", "error event", "503", "refused"} and "error event" in ends and "503" in ends, ends


def test_an_engine_fault_hits_its_own_stream_alone(start) -> None:
    one = start(script=[{"output": "a b c d e f", "when": {"last": "fault"}, "fail_after": 3}, {"output": "Hello.", "when": {"last": "^(?!fault)"}}])
    status, data = one.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": "fault"}], "stream": True})
    assert status == 200 and b'"error"' in data and b"[DONE]" not in data.rpartition(b'"error"')[0]
    assert answer(one, CHAT)[0] == "Hello."


# time.time() jumps with the clock: only what is shown, stored or counted in days may use it.
WALL_CLOCK = {"app/generate.py", "app/core.py", "daemon.py", "metrics.py", "models.py", "http/server.py", "store.py", "protocols", "engine/disk.py", "log.py", "turn.py",
              "agents", "cli"}


def test_nothing_waits_by_the_wall_clock() -> None:
    for path in (ROOT / "milad").rglob("*.py"):
        name = str(path.relative_to(ROOT / "milad"))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr == "time" and isinstance(node.value, ast.Name) and node.value.id == "time":
                assert name in WALL_CLOCK or name.split("/")[0] in WALL_CLOCK, f"milad/{name}:{node.lineno} uses time.time()"

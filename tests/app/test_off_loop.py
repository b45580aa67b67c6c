"""What may take long (a grammar, a large body) is prepared beside the event loop: streams go on meanwhile."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from fake_app import CHAT, Live, ask, fake_app, runner, serving
from milad.protocols import responses
from milad.store import Store

TOOLS = [{"type": "function", "function": {"name": "f"}}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}


@pytest.fixture
def live():
    with serving(fake_app()) as live:
        yield live


@pytest.mark.parametrize("more, beside", [({}, False), ({"tools": TOOLS}, True), ({"response_format": FORMAT}, True),
                                          ({"response_format": {"type": "regex", "pattern": "a"}}, True), ({"user": "x" * 70_000}, True)])
def test_which_requests_leave_the_loop(live: Live, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], beside: bool) -> None:
    loop = live.call(threading.get_ident)
    seen: list[int] = []
    made = runner(live).prepare
    monkeypatch.setattr(runner(live), "prepare", lambda *args, **more: (seen.append(threading.get_ident()), made(*args, **more))[1])
    assert ask(live, "/v1/chat/completions", {**CHAT, **more}).status == 200
    assert len(seen) == 1 and (seen[0] != loop) == beside


def test_what_is_kept_is_written_beside_the_loop(live: Live, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ids for 10,000 items alone took 0.4 s."""
    live.app.store = Store(tmp_path)
    loop = live.call(threading.get_ident)
    seen: list[int] = []
    made = responses.input_items
    monkeypatch.setattr(responses, "input_items", lambda *args: (seen.append(threading.get_ident()), made(*args))[1])
    assert ask(live, "/v1/responses", {"input": "x"}).status == 200
    assert len(seen) == 1 and seen[0] != loop


@pytest.mark.parametrize("path, work", [("/v1/responses", "prepare"), ("/v1/responses/input_tokens", "count")])
def test_a_long_conversation_that_goes_on_by_its_name(live: Live, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, path: str, work: str) -> None:
    """A small body, but all that was said before is rendered again."""
    live.app.store = Store(tmp_path)
    name = ask(live, "/v1/responses", {"input": [{"role": "user", "content": "x"}] * 100}).json["id"]
    loop = live.call(threading.get_ident)
    seen: list[int] = []
    made = getattr(runner(live), work)
    monkeypatch.setattr(runner(live), work, lambda *args, **more: (seen.append(threading.get_ident()), made(*args, **more))[1])
    assert ask(live, path, {"input": "x", "previous_response_id": name}).status == 200
    assert len(seen) == 1 and seen[0] != loop


def test_a_slow_grammar_holds_nobody_up(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one request waits for its grammar, another is answered."""
    made, release = runner(live).prepare, threading.Event()

    def prepare(turn: Any, **more: Any) -> Any:
        if turn.tools:
            assert release.wait(20)
        return made(turn, **more)

    monkeypatch.setattr(runner(live), "prepare", prepare)
    statuses: list[int] = []
    slow = threading.Thread(target=lambda: statuses.append(ask(live, "/v1/chat/completions", {**CHAT, "tools": TOOLS}).status))
    slow.start()
    assert ask(live, "/v1/chat/completions", CHAT).status == 200 and not statuses
    release.set()
    slow.join(20)
    assert statuses == [200]


def test_large_bodies_are_worked_on_one_at_a_time(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    made, lock, most = runner(live).prepare, threading.Lock(), [0, 0]

    def prepare(turn: Any, **more: Any) -> Any:
        with lock:
            most[0] += 1
            most[1] = max(most)
        threading.Event().wait(0.02)
        with lock:
            most[0] -= 1
        return made(turn, **more)

    monkeypatch.setattr(runner(live), "prepare", prepare)
    body = {**CHAT, "user": "x" * 70_000}
    threads = [threading.Thread(target=ask, args=(live, "/v1/chat/completions", body)) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert most == [0, 1]

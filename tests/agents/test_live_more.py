"""What goes wrong between agents and local servers, with the real agents (scripts/test-agents): silence, overflow, Ctrl-C, two
tools at once, side requests, the next turn's prompt cache."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

import programs
from programs import PROGRAMS
from talk import TALKS
from test_live import ALL, TOOLS, call, read_then_write, settled, told

pytestmark = [pytest.mark.agents, pytest.mark.skipif(os.environ.get("MILAD_TEST_AGENTS") != "all",
                                                     reason="scripts/test-agents runs these")]


@pytest.mark.parametrize("name", TOOLS)
def test_two_tools_at_once(place: Any, name: str) -> None:
    def script(talk: Any, repo: Any) -> list[dict[str, Any]]:
        (repo).mkdir(parents=True)
        (repo / "b.txt").write_text("The other word is ZITHER-MARK.\n")
        both = call(talk.read(str(repo / "note.txt"))) + call(talk.read(str(repo / "b.txt")))
        return [{"output": both, "when": {"tools": True, "last": "both words\\?"}}, {"output": "Both are DONE-DONE."}]

    here = place(name, script)
    run = here.run("what are both words?")
    settled(run, here.server.log)
    assert "DONE-DONE" in run.out
    last = run.generations[-1].body.decode()
    assert "XYLOPHONE-MARK" in last and "ZITHER-MARK" in last


@pytest.mark.parametrize("name", ALL)
def test_a_long_silence(place: Any, name: str) -> None:
    here = place(name, told("Late but SCRIPTED-ANSWER.", delay_ms=20_000), ("--ctx", "65536", "--keepalive", "3"))
    run = here.run("say hello")
    settled(run, here.server.log)
    assert "SCRIPTED-ANSWER" in run.out


@pytest.mark.parametrize("name", ALL)
def test_ctrl_c_ends_the_sequence(place: Any, name: str) -> None:
    here = place(name, told("word " * 3000, token_delay_ms=50))
    process = here.start("say hello")
    try:
        end = time.monotonic() + 90
        while not any(len(x.answer) > 2000 for x in here.recorder.exchanges() if x.method == "POST"):
            assert process.poll() is None and time.monotonic() < end, process.communicate()
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)
        end = time.monotonic() + 15
        while "(client left)" not in here.server.log:
            assert time.monotonic() < end, here.server.log[-2000:]
            if time.monotonic() > end - 12:
                os.killpg(process.pid, signal.SIGINT)    # some ask for a second one
            time.sleep(1)
        here.server.process.send_signal(signal.SIGUSR1)
        time.sleep(0.5)
        assert "state: busy False" in here.server.log, here.server.log[-1500:]
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.communicate()


@pytest.mark.parametrize("name", ["claude", "codex", "opencode", "pi", "qwen"])
def test_the_next_turn_finds_the_cache(place: Any, name: str) -> None:
    here = place(name, read_then_write)
    settled(here.run("what is the secret word?"), here.server.log)
    run = here.run("and now say that again", again=True)
    settled(run, here.server.log)
    main = [x for x in run.generations if x.json.get("tools")]
    total, cached = main[0].usage()
    assert cached >= 0.95 * total, (total, cached)


@pytest.mark.parametrize("name", ["claude", "opencode", "qwen"])
def test_overflow_compacts_and_goes_on(place: Any, name: str) -> None:
    """The agent believes in a larger window than there is, and reads a file that fills the real one."""
    def script(talk: Any, repo: Any) -> list[dict[str, Any]]:
        repo.mkdir(parents=True)
        (repo / "big.txt").write_text("\n".join(f"line {i} of the big file" for i in range(1200)))
        return [{"output": call(talk.read(str(repo / "big.txt"))), "when": {"tools": True, "last": "big file\\?"}},
                {"output": "<summary>The file was read; GIST-MARK.</summary>"},
                {"output": "<summary>The file was read; GIST-MARK. DONE-DONE.</summary>"}]

    window = {"claude": 24_000, "opencode": 14_000, "qwen": 28_000}[name]
    here = place(name, script, ("--ctx", str(window)))
    run = here.run("what is in the big file?", options=("--ctx", "200000"))
    statuses = [x.status for x in run.generations]
    assert run.code == 0 and 400 in statuses and statuses[-1] == 200, (statuses, run.out[-800:], run.err[-800:])
    assert len(statuses) < 12 and "GIST-MARK" in run.generations[-1].body.decode()


def test_codex_compacts_before_it_overflows(place: Any) -> None:
    def script(talk: Any, repo: Any) -> list[dict[str, Any]]:
        repo.mkdir(parents=True)
        (repo / "big.txt").write_text("\n".join(f"line {i} of the big file" for i in range(700)))
        return [{"output": call(talk.read(str(repo / "big.txt"))), "when": {"tools": True, "last": "big file\\?"}},
                {"output": call(("exec_command", {"cmd": "cat note.txt"})), "when": {"tools": True, "last": "line 699"}},
                {"output": "GIST-MARK: the file was read. DONE-DONE."}]

    here = place("codex", script, ("--ctx", "17000"))
    run = here.run("what is in the big file?")
    settled(run, here.server.log)
    assert any("GIST-MARK" in x.body.decode() for x in run.generations), [x.usage() for x in run.generations]


@pytest.mark.parametrize("name", ALL)
def test_chat_on_the_model_itself(place: Any, name: str) -> None:
    """Whatever it says: no error, nothing asked twice."""
    here = place(name, None, ("--ctx", "65536", "--max-tokens", "64", "--temperature", "0"))
    here.env.update({"CLAUDE_CODE_MAX_OUTPUT_TOKENS": "64"})
    run = here.run("Say hello.", timeout_s=400)
    for one in run.exchanges:
        assert one.status in (200, 426), (one.path, one.status, one.answer[:300])
    assert run.code == 0, (run.out[-800:], run.err[-800:])

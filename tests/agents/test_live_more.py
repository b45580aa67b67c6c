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
        end = time.monotonic() + 200
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


def shared(server: Any, one: Any, other: Any) -> int:
    """Tokens that two chat requests' prompts begin with alike."""
    prompts = [server.json("POST", "/apply-template", {k: x.json[k] for k in ("messages", "tools")})[1]["tokens"] for x in (one, other)]
    return next((i for i, (a, b) in enumerate(zip(*prompts)) if a != b), min(map(len, prompts)))


@pytest.mark.parametrize("name", ["claude", "codex", "opencode", "pi", "qwen", "goose"])
def test_the_next_turn_finds_the_cache(place: Any, name: str) -> None:
    here = place(name, read_then_write)
    first = here.run("what is the secret word?")
    settled(first, here.server.log)
    run = here.run("and now say that again", again=True)
    settled(run, here.server.log)
    main = [x for x in run.generations if x.json.get("tools")]
    total, cached = main[0].usage()
    if name == "qwen":                       # on each start its system prompt tells git's status anew: a file was written
        total = shared(here.server, first.generations[-1], main[0])
        assert total > 2000
    assert cached >= 0.95 * total, (total, cached)


def filling(n_files: int) -> Any:
    """A script that reads until the window is full, sums up when asked to, and ends."""
    def script(talk: Any, repo: Any) -> list[dict[str, Any]]:
        repo.mkdir(parents=True)
        lines: list[dict[str, Any]] = []
        for i in range(n_files):
            (repo / f"big{i}.txt").write_text("".join(f"BIG{i} line {k} of it\n" for k in range(1, 351)))
            # Claude Code gives files that it knows to the compacted conversation again: a command's output stays away
            tool = ("Bash", {"command": f"seq -f 'BIG{i} line %g of it' 350"}) if talk.name == "claude" else talk.read(
                str(repo / f"big{i}.txt"))
            lines.append({"output": call(tool), "when": {"tools": True, "last": f"BIG{i - 1} line 350" if i else "big files\\?"}})
        return [*lines, {"output": "<summary>The files were read; GIST-MARK.</summary>", "when": {"last": "(?i)summar|snapshot"}},
                {"output": "The end is DONE-DONE."}]

    return script


@pytest.mark.parametrize("name,window", [("claude", 30_000), ("opencode", 18_000), ("qwen", 32_000)])
def test_overflow_compacts_and_goes_on(place: Any, name: str, window: int) -> None:
    """The agent believes in a larger window than there is."""
    here = place(name, filling(5), ("--ctx", str(window)))
    run = here.run("what is in the big files?", options=("--ctx", "200000"))
    statuses = [x.status for x in run.generations]
    shown = statuses, run.out[-800:], run.err[-800:]
    assert run.code == (1 if name == "opencode" else 0), shown       # OpenCode tells of the overflow by its exit code
    assert 400 in statuses and len(statuses) < 20 and "DONE-DONE" in run.out, shown
    assert "GIST-MARK" in "".join(x.body.decode() for x in run.generations)


@pytest.mark.parametrize("name,window", [("claude", 40_000), ("codex", 20_000), ("opencode", 32_768), ("qwen", 32_768)])
def test_the_true_window_compacts_before_it_overflows(place: Any, name: str, window: int) -> None:
    """Codex stops for good on an overflow; the others lose a request by it."""
    here = place(name, filling(5), ("--ctx", str(window)))
    run = here.run("what is in the big files?")
    settled(run, here.server.log)
    assert "DONE-DONE" in run.out and "GIST-MARK" in "".join(x.body.decode() for x in run.generations), [
        x.usage() for x in run.generations]


# Agents that send a limit of their own: the small model may go on without end, and to no use.
BRIEF = {"claude": "CLAUDE_CODE_MAX_OUTPUT_TOKENS", "opencode": "OPENCODE_EXPERIMENTAL_OUTPUT_TOKEN_MAX",
         "qwen": "QWEN_CODE_MAX_OUTPUT_TOKENS", "copilot": "COPILOT_PROVIDER_MAX_OUTPUT_TOKENS"}


@pytest.mark.parametrize("name", ALL)
def test_chat_on_the_model_itself(place: Any, name: str) -> None:
    """Whatever it says: no error, nothing asked twice. A cut answer is the agent's to tell."""
    here = place(name, None, ("--ctx", "65536", "--max-tokens", "500"))
    if name in BRIEF:
        here.env[BRIEF[name]] = "500"
    run = here.run("Say hello.", timeout_s=550)
    shown = run.out[-800:], run.err[-800:], here.server.log[-2000:]
    assert run.generations and all(one.status in (200, 426) for one in run.exchanges), shown
    assert len({(x.path, x.body) for x in run.generations}) == len(run.generations), shown
    assert run.code == 0 or "output token maximum" in run.out or "max_output_tokens" in run.err, shown
    assert " error: " not in here.server.log, shown

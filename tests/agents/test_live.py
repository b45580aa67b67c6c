"""Claude Code, Codex and OpenCode (with scripts/test-agents all that install) on a scripted daemon: what they ask, what they do."""

from __future__ import annotations

import json
import os
from collections import Counter
from typing import Any

import pytest

from programs import PROGRAMS
from talk import TALKS

pytestmark = pytest.mark.agents
ALL = list(PROGRAMS)
TOOLS = [n for n in ALL if TALKS[n].read]
ONLY_ALL = pytest.mark.skipif(os.environ.get("MILAD_TEST_AGENTS") != "all", reason="scripts/test-agents runs this")


def call(tool: Any) -> str:
    """A tool call in the chatml family's markup."""
    return "<tool_call>\n" + json.dumps({"name": tool[0], "arguments": tool[1]}) + "\n</tool_call>"


def settled(run: Any, log: str) -> None:
    """The agent ended well, and nothing it asked failed or came twice."""
    told = f"{run.out[-1500:]}\n{run.err[-1500:]}\n{log[-3000:]}"
    assert run.code == 0, told
    assert run.generations, told
    for one in run.exchanges:
        assert one.status in (200, 426), (one.method, one.path, one.status, one.answer[:500])
    twice = [body[:200] for body, n in Counter((x.path, x.body) for x in run.generations).items() if n > 1]
    assert not twice, told
    assert " error: " not in log and "(client left)" not in log, told


def told(text: str, **more: Any) -> Any:
    """A script of one line."""
    return lambda talk, repo: [{"output": text, **more}]


def read_then_write(talk: Any, repo: Any) -> list[dict[str, Any]]:
    return [{"output": "Reading. " + call(talk.read(str(repo / "note.txt"))), "when": {"tools": True, "last": "secret word\\?"}},
            {"output": call(talk.write(str(repo / "out.txt"), "it was\nXYLOPHONE")), "when": {"last": "XYLOPHONE-MARK"}},
            {"output": "All is DONE-DONE."}]


@pytest.mark.parametrize("name", ALL)
def test_chat(place: Any, name: str) -> None:
    here = place(name, told("Hello from the SCRIPTED-ANSWER."))
    run = here.run("say hello")
    settled(run, here.server.log)
    assert "SCRIPTED-ANSWER" in run.out


# What users may have configured: another provider, at an address that refuses.
THEIRS = {
    ".claude/settings.json": '{"env": {"ANTHROPIC_BASE_URL": "http://127.0.0.1:9", "ANTHROPIC_MODEL": "opus"}, "model": "opus"}',
    ".codex/config.toml": 'model = "gpt-5"\nmodel_provider = "o"\n[model_providers.o]\nname = "o"\nbase_url = "http://127.0.0.1:9"\n',
    ".config/opencode/opencode.json": '{"model": "o/m", "provider": {"o": {"npm": "@ai-sdk/openai-compatible", "models": {"m": {}},'
                                      ' "options": {"baseURL": "http://127.0.0.1:9"}}}}',
    ".config/goose/config.yaml": "GOOSE_PROVIDER: openai\nGOOSE_MODEL: gpt-5\nOPENAI_HOST: http://127.0.0.1:9\n",
    ".aider.conf.yml": "model: gpt-4\nopenai-api-base: http://127.0.0.1:9\n",
    ".qwen/settings.json": '{"security": {"auth": {"selectedType": "qwen-oauth"}}, "model": {"name": "qwen-max"}}',
}


@pytest.mark.parametrize("name", ["claude", "codex", pytest.param("opencode", marks=ONLY_ALL), "qwen", "aider", "goose"])
def test_the_users_own_provider_does_not_matter(place: Any, name: str) -> None:
    here = place(name, told("Hello from the SCRIPTED-ANSWER."))
    for path, text in THEIRS.items():
        (here.home / path).parent.mkdir(parents=True, exist_ok=True)
        (here.home / path).write_text(text)
    run = here.run("say hello")
    settled(run, here.server.log)
    assert "SCRIPTED-ANSWER" in run.out


@pytest.mark.parametrize("name", TOOLS)
def test_tools_read_and_write(place: Any, name: str) -> None:
    here = place(name, read_then_write)
    run = here.run("what is the secret word?")
    settled(run, here.server.log)
    assert "DONE-DONE" in run.out
    assert (here.repo / "out.txt").read_text().rstrip("\n") == "it was\nXYLOPHONE"
    main = [x for x in run.generations if x.json.get("tools")]
    assert len(main) == 3
    for turn in main[1:]:
        total, cached = turn.usage()
        assert cached >= 0.95 * total, (total, cached)


@ONLY_ALL
def test_opencodes_title_beside_the_main_request(place: Any) -> None:
    """It asks for a title at the same time: neither waits for the other's slow answer."""
    here = place("opencode", lambda talk, repo: [
        {"output": "A TITLE", "delay_ms": 1500, "when": {"tools": False}},
        {"output": "The ANSWER", "delay_ms": 1500, "when": {"tools": True}}])
    run = here.run("say hello")
    settled(run, here.server.log)
    main = [x for x in run.generations if x.json.get("tools")]
    side = [x for x in run.generations if not x.json.get("tools")]
    assert len(main) == 1 and len(side) == 1 and "The ANSWER" in run.out

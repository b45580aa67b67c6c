"""Every agent's launch against the stored table (tests/data/launch.json), and the plans' rules.

`python tests/agents/test_plans.py` writes the table anew: read the difference before it is committed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT)] if str(ROOT) not in sys.path else []

from milad import agents  # noqa: E402
from milad.agents import shell  # noqa: E402
from milad.agents.base import Plan, Target  # noqa: E402

TABLE = ROOT / "tests" / "data" / "launch.json"
FOLDER = Path("/home/me/.local/state/milad/agents/x")
KEY = "s3cret-of-the-server"
TARGETS = {
    "milad": Target("milad", "http://127.0.0.1:8000", "small", 65536),
    "llamacpp": Target("llamacpp", "http://localhost:8080", "a.gguf", 40960, KEY, "LLAMA_API_KEY"),
    "vllm": Target("vllm", "http://localhost:8000", "org/model", 65536),
    "ollama": Target("ollama", "http://localhost:11434", "qwen3:8b", 36864),
    "openai": Target("openai", "https://example.org/llm", "big", None, KEY, "MINE"),
}
USER = {"ANTHROPIC_API_KEY": "sk-real-one", "API_TIMEOUT_MS": "7", "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "11", "PATH": "/usr/bin",
        "OPENCODE_CONFIG_CONTENT": '{"theme": "dark", "model": "theirs/x", "provider": {"theirs": {"options": {"apiKey": "sk-theirs"}}}}'}


def plan(agent: str, kind: str, user: dict[str, str] | None = None, arguments: tuple[str, ...] = ()) -> Plan:
    return agents.find(agent).plan(TARGETS[kind], list(arguments), FOLDER, user or {})


def table() -> dict[str, Any]:
    return {f"{name} {kind}": {"command": p.command, "environment": p.added({}), "unset": list(p.unset),
                               "files": {str(f): text.splitlines() for f, text in p.files.items()}}
            for name in agents.NAMES for kind in TARGETS for p in [plan(name, kind)]}


@pytest.mark.parametrize("name", agents.NAMES)
def test_plans_are_the_stored_ones(name: str) -> None:
    stored = json.loads(TABLE.read_text())
    for key, value in table().items():
        if key.startswith(name + " "):
            assert value == stored[key], key


@pytest.mark.parametrize("name", agents.NAMES)
@pytest.mark.parametrize("kind", TARGETS)
def test_the_dry_run_is_the_launch(name: str, kind: str, tmp_path: Path) -> None:
    """Run by a shell, the printed text gives the program the arguments and environment that the plan has, and no secret is in it."""
    made = plan(name, kind, {}, ("--say", "it's $HOME \"now\"\nplease"))
    made.files = {tmp_path / "private" / path.name: text for path, text in made.files.items()}
    text = shell.script(made, TARGETS[kind], {})
    assert KEY not in text
    fake = tmp_path / "bin" / made.command[0]
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\nfor a in \"$@\"; do printf '%s\\0' \"$a\"; done > arguments\nenv -0 > environment\n")
    fake.chmod(0o755)
    env = {"PATH": f"{fake.parent}:/usr/bin:/bin", **({TARGETS[kind].key_env: KEY} if TARGETS[kind].key_env else {})}
    subprocess.run(["sh", "-c", text], cwd=tmp_path, env=env, check=True)
    assert (tmp_path / "arguments").read_text().split("\0")[:-1] == made.command[1:]
    got = dict(pair.split("=", 1) for pair in (tmp_path / "environment").read_text().split("\0") if pair)
    assert {k: v for k, v in got.items() if k in made.added({})} == made.added({})
    for path, wanted in made.files.items():
        assert path.read_text() == wanted and path.stat().st_mode & 0o777 == 0o600


def test_the_users_settings_win_but_not_over_address_key_and_model() -> None:
    made = plan("claude", "ollama", {**USER, "ANTHROPIC_MODEL": "opus", "ANTHROPIC_BASE_URL": "https://example.org"})
    env = made.environment({**USER, "ANTHROPIC_MODEL": "opus", "ANTHROPIC_BASE_URL": "https://example.org"})
    assert env["API_TIMEOUT_MS"] == "7" and env["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "11" and env["PATH"] == "/usr/bin"
    assert env["ANTHROPIC_MODEL"] == "qwen3:8b" and env["ANTHROPIC_BASE_URL"] == "http://localhost:11434"
    assert "ANTHROPIC_API_KEY" not in env


def test_every_model_alias_is_the_one_served() -> None:
    env = plan("claude", "milad").added({})
    assert {v for k, v in env.items() if "MODEL" in k and "CAPABILITIES" not in k} == {"small"}
    assert sum("MODEL" in k for k in env) >= 7


@pytest.mark.parametrize("kind,capabilities,timeout", [("milad", False, False), ("llamacpp", True, True), ("vllm", True, True),
                                                       ("ollama", False, True), ("openai", False, False)])
def test_what_claude_code_is_told_of_other_servers(kind: str, capabilities: bool, timeout: bool) -> None:
    env = plan("claude", kind).added({})
    assert env.get("CLAUDE_CODE_MODEL_CAPABILITIES") == ("-mid_conv_system,-mid_conv_tool_change" if capabilities else None)
    for name in ("CLAUDE_STREAM_IDLE_TIMEOUT_MS", "API_TIMEOUT_MS"):
        assert env.get(name) == ("1800000" if timeout else None)


def test_opencode_keeps_what_the_user_configured_beside_the_model() -> None:
    made = plan("opencode", "milad", USER)
    content = json.loads(made.fixed["OPENCODE_CONFIG_CONTENT"])
    assert content["theme"] == "dark" and content["model"] == "milad/small" and set(content["provider"]) == {"theirs", "milad"}
    text = shell.script(made, TARGETS["milad"], USER)
    assert "sk-theirs" not in text and "{env:MILAD_AGENT_KEY}" in text


def test_a_key_is_in_no_argument_and_no_file() -> None:
    """Arguments are readable by every user of the machine (ps)."""
    for name in agents.NAMES:
        made = plan(name, "llamacpp")
        assert not any(KEY in word for word in made.command) and not any(KEY in text for text in made.files.values())
        assert KEY in made.fixed.values()


if __name__ == "__main__":
    TABLE.write_text(json.dumps(table(), indent=1, ensure_ascii=False) + "\n")

"""`milad launch` from the outside, with a stand-in for the agent that writes down how it was started."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import servers

ROOT = Path(__file__).resolve().parent.parent.parent
AGENT = """#!/bin/sh
{ for a in "$@"; do printf '%s\\n' "$a"; done; } > "$OUT/arguments"
env > "$OUT/environment"
[ -z "$ASK" ] || "$PYTHON" -c "import os, urllib.request as u; print(u.urlopen(os.environ['ANTHROPIC_BASE_URL'] + '/health').read())"
[ -z "$SLEEP" ] || { echo $$ > "$OUT/pid"; exec sleep "$SLEEP"; }
exit ${CODE:-0}
"""
PROGRAMS = ("claude", "codex", "pi", "qwen", "aider", "copilot", "goose")      # OpenCode is not installed


class Person:
    """Someone with a home, an agent called claude (and the others) and a shell."""

    def __init__(self, folder: Path, library: Path) -> None:
        self.home, self.bin, self.out = folder / "home", folder / "bin", folder / "out"
        for made in (self.home, self.bin, self.out):
            made.mkdir()
        for name in PROGRAMS:
            (self.bin / name).write_text(AGENT)
            (self.bin / name).chmod(0o755)
        self.env = {"HOME": str(self.home), "PATH": f"{self.bin}:/usr/bin:/bin", "PYTHONPATH": str(ROOT), "OUT": str(self.out),
                    "PYTHON": sys.executable, "MILAD_LIBRARY": str(library), "PYTHONDONTWRITEBYTECODE": "1"}

    def start(self, *args: str, **env: str) -> "subprocess.Popen[str]":
        return subprocess.Popen([sys.executable, "-m", "milad", "launch", *args], env={**self.env, **env}, cwd=self.home,
                                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def launch(self, *args: str, **env: str) -> tuple[int, str, str]:
        process = self.start(*args, **env)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    def written(self) -> dict[str, int]:
        """Every file and folder under the home, with its permissions."""
        return {str(p.relative_to(self.home)): p.stat().st_mode & 0o777 for p in self.home.rglob("*")}


@pytest.fixture
def person(tmp_path: Path, library: Path) -> Person:
    return Person(tmp_path, library)


@pytest.fixture
def server():
    made = servers.Server(servers.milad(), {"Server": "milad/0.1.0"})
    yield made
    made.close()


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


def test_arguments_environment_and_exit_code_are_the_agents(person: Person, server: Any) -> None:
    code, _, err = person.launch("claude", "--url", server.url + "/v1", "--", "-p", "two words", "--url", "mine", "--", "x", CODE="7")
    assert code == 7, err
    assert (person.out / "arguments").read_text().splitlines()[2:] == ["-p", "two words", "--url", "mine", "--", "x"]
    env = dict(line.split("=", 1) for line in (person.out / "environment").read_text().splitlines() if "=" in line)
    assert env["ANTHROPIC_BASE_URL"] == server.url and env["ANTHROPIC_MODEL"] == "small"
    assert env["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "65536" and env["HOME"] == str(person.home)


def test_only_private_files_in_the_state_folder(person: Person, server: Any) -> None:
    for agent in PROGRAMS:
        assert person.launch(agent, "--url", server.url)[0] == 0
    written = person.written()
    assert {p: m for p, m in written.items() if "." in p.rsplit("/", 1)[-1][1:]} == {
        ".local/state/milad/agents/pi/milad.mjs": 0o600, ".local/state/milad/agents/qwen/settings.json": 0o600,
        ".local/state/milad/agents/aider/model-metadata.json": 0o600}
    assert not [p for p in written if not (p.startswith(".local/state/milad/") or ".local/state/milad".startswith(p))]
    assert written[".local/state/milad/agents/pi"] == 0o700


def test_a_dry_run_runs_and_writes_nothing(person: Person, server: Any) -> None:
    code, out, _ = person.launch("pi", "--url", server.url, "--dry-run", "--", "-p", "hi")
    assert code == 0 and "pi --extension" in out and "--model small -p hi" in out
    assert not person.written() and not list(person.out.iterdir())


def test_secrets_are_masked(person: Person) -> None:
    secret = "very-s3cret"
    listed = servers.keyed(secret, servers.models({"id": "m", "max_model_len": 70000}))
    with_key = servers.Server({**servers.vllm(), "GET /v1/models": listed})
    code, out, err = person.launch("claude", "--kind", "vllm", "--url", with_key.url, "--api-key-env", "MINE", "--dry-run", MINE=secret,
                                   ANTHROPIC_API_KEY="sk-other")
    assert code == 0 and secret not in out + err and "sk-other" not in out + err
    assert 'ANTHROPIC_AUTH_TOKEN="${MINE}"' in out and "-u ANTHROPIC_API_KEY" in out
    with_key.close()


def test_the_list_of_agents(person: Person) -> None:
    code, out, _ = person.launch()
    assert code == 0 and f"{person.bin}/claude" in out and "npm install -g opencode-ai" in out and len(out.splitlines()) == 8


def test_what_is_missing_is_said_in_a_line(person: Person, server: Any, free_port: int) -> None:
    down = f"http://127.0.0.1:{free_port}"
    for args, said in ((("opencode", "--url", server.url), "npm install -g opencode-ai"),
                       (("claude", "--url", down), "milad serve"),
                       (("claude", "--url", down), "--start"),
                       (("claude", "--kind", "ollama", "--url", down), "ollama serve"),
                       (("claude", "--kind", "openai"), "--url"),
                       (("claude", "--kind", "nope"), "--kind"),
                       (("emacs",), "claude, codex"),
                       (("claude", "--ctx", "1", "--url", server.url), "--ctx"),
                       (("claude", "--url", server.url, "--model", "big"), "it serves small"),
                       (("claude", "--start", "--kind", "vllm"), "--start")):
        code, out, err = person.launch(*args)
        assert code == 1 and said in err.splitlines()[-1] and not out, (args, err)
    assert not list(person.out.iterdir()), "no agent was run"


def test_claude_code_needs_messages_and_codex_responses(person: Person) -> None:
    plain = servers.Server({"GET /v1/models": servers.models({"id": "m", "max_model_len": 70000}), **servers.apis("chat/completions")})
    for agent, path in (("claude", "/v1/messages"), ("codex", "/v1/responses")):
        code, _, err = person.launch(agent, "--kind", "openai", "--url", plain.url)
        assert code == 1 and len(err.splitlines()) == 1 and path in err
    assert person.launch("pi", "--kind", "openai", "--url", plain.url)[0] == 0
    plain.close()


def test_another_server_is_recognised(person: Person) -> None:
    other = servers.Server(servers.llamacpp(), {"Server": "llama.cpp"})
    code, out, err = person.launch("claude", "--url", other.url, "--dry-run")
    assert code == 0 and "--kind llamacpp" in err and "CLAUDE_CODE_MODEL_CAPABILITIES=-mid_conv_system" in out
    other.close()


def test_small_contexts_are_told(person: Person) -> None:
    small = servers.Server(servers.milad(**{"GET /props": {"default_generation_settings": {"n_ctx": 8192}, "build_info": "milad-1"}}))
    assert "8,192" in person.launch("claude", "--url", small.url)[2]
    small.close()


# A daemon for the agent's life


def ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    return state == "Z"


def wait_for(condition: Any, what: str) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.05)


def answers(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def test_start_serves_for_the_agents_life(person: Person, default_model: Path, free_port: int) -> None:
    args = ("claude", "--start", "--url", f"http://127.0.0.1:{free_port}", "--model", str(default_model), "--ctx", "65536")
    code, out, err = person.launch(*args, ASK="1", CODE="5")
    assert code == 5 and '"status":"ok"' in out.replace(" ", ""), (out, err)
    assert not answers(free_port)
    env = (person.out / "environment").read_text()
    assert "CLAUDE_CODE_MAX_CONTEXT_TOKENS=65536" in env and "ANTHROPIC_MODEL=smollm2" in env


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_signals_with_start(person: Person, default_model: Path, free_port: int, number: int) -> None:
    """SIGTERM goes to the agent; and however the launcher ends, the daemon does too."""
    process = person.start("claude", "--start", "--url", f"http://127.0.0.1:{free_port}", "--model", str(default_model), SLEEP="300")
    wait_for((person.out / "pid").exists, "the agent did not start")
    wait_for(lambda: (person.out / "pid").read_text().strip(), "no pid")
    agent = int((person.out / "pid").read_text())
    process.send_signal(number)
    code = process.wait(30)
    if number == signal.SIGTERM:
        assert code == 128 + signal.SIGTERM and ended(agent)
    else:
        os.kill(agent, signal.SIGKILL)
    process.communicate(timeout=30)
    wait_for(lambda: not answers(free_port), "the daemon is still there")


def test_start_tells_why_it_could_not(person: Person, free_port: int) -> None:
    code, _, err = person.launch("claude", "--start", "--url", f"http://127.0.0.1:{free_port}", "--model", "/nowhere.gguf")
    assert code == 1 and "/nowhere.gguf" in err.splitlines()[-1] and not (person.out / "arguments").exists()


def test_a_daemon_that_answers_is_used(person: Person, server: Any) -> None:
    assert person.launch("claude", "--start", "--url", server.url)[0] == 0
    assert "ANTHROPIC_MODEL=small" in (person.out / "environment").read_text()

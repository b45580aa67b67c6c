"""`milad ask` as a shell uses it: exit codes, pipes that close, streams that are missing or full, text that is no UTF-8."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
LONG = "word " * 2000


@pytest.fixture
def ask(tiny: Callable[..., Path], library: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """ask(lines of the script, *arguments): a command line whose model plays the script."""
    def make(lines: list[dict[str, Any]], *arguments: str) -> list[str]:
        script = tmp_path / "script.jsonl"
        script.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return [sys.executable, "-m", "milad", "ask", "--model", str(tiny()), "--script", str(script), "--ctx", "8192",
                "--log-level", "error", *arguments]
    return make


@pytest.fixture
def env(library: Path, tmp_path: Path) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MILA", "XDG", "NO_COLOR"))}
    return {**clean, "PYTHONPATH": str(ROOT), "MILAD_LIBRARY": str(library), "HOME": str(tmp_path)}


def run(command: list[str], env: dict[str, str], **options: Any) -> subprocess.CompletedProcess:
    options.setdefault("stdin", subprocess.DEVNULL)
    if "stdout" not in options:
        options["stdout"] = subprocess.PIPE
    return subprocess.run(command, env=env, stderr=subprocess.PIPE, timeout=60, **options)


def test_exit_codes(ask, env):
    done = run(ask([{"output": "four"}], "what?"), env)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"four\n", b"")
    done = run(ask([{"output": LONG}], "--max-tokens", "3", "what?"), env)
    assert done.returncode == 4 and b"cut by the limit" in done.stderr and done.stderr.count(b"\n") == 1
    done = run(ask([{"output": "x", "when": {"last": "something else"}}], "what?"), env)
    assert done.returncode == 3 and b"script" in done.stderr and done.stderr.count(b"\n") == 1 and not done.stdout
    done = run(ask([{"output": LONG, "fail_after": 2}], "what?"), env)
    assert done.returncode == 3 and b"line 1 fails after 2" in done.stderr and b"Traceback" not in done.stderr
    assert run(ask([{"output": "x"}], "--ctx", "many", "what?"), env).returncode == 1
    assert run(ask([{"output": "x"}], "--nonsense", "what?"), env).returncode == 2
    assert run(ask([{"output": "x"}]), env).returncode == 2


@pytest.mark.parametrize("url", ["http://[::1", "http://localhost:99999", "http://localhost:x", "ftp://localhost", "http://", "//"])
def test_an_unreadable_address_is_one_line(env, url):
    done = run([sys.executable, "-m", "milad", "ask", "--url", url, "what?"], env)
    assert done.returncode == 1 and done.stderr.startswith(b"milad: --url") and done.stderr.count(b"\n") == 1


def test_stdin_is_appended_and_need_not_be_utf8(ask, env):
    lines = [{"output": "heard", "when": {"last": "\\Areview\\n\\ncaf\ufffd \ufffd\ufffd\0 done\\Z"}}]
    done = run(ask(lines, "review"), env, stdin=None, input=b"caf\xe9 \xff\xfe\0 done")
    assert (done.returncode, done.stdout) == (0, b"heard\n"), done.stderr


def test_a_pipe_that_closes_early_is_no_error(ask, env):
    process = subprocess.Popen(ask([{"output": LONG, "token_delay_ms": 1}], "what?"), env=env, stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.read(4) == b"word"
    process.stdout.close()
    assert process.wait(30) == 0 and process.stderr.read() == b""


def test_a_full_disk_is_one_line(ask, env):
    with open("/dev/full", "wb") as full:
        done = run(ask([{"output": LONG}], "what?"), env, stdout=full)
    assert done.returncode == 1 and done.stderr == b"milad: No space left on device\n"


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_a_missing_standard_stream_does_no_harm(ask, env, closed):
    command = ["sh", "-c", f'exec "$@" {closed}{"<" if closed == 0 else ">"}&-', "sh", *ask([{"output": "four"}], "what?")]
    done = run(command, env)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"" if closed == 1 else b"four\n", b"")


def test_interrupted(ask, env):
    """A shell gives its background jobs an ignored SIGINT, which they would inherit: the test may be one."""
    process = subprocess.Popen(ask([{"output": LONG, "token_delay_ms": 20}], "what?"), env=env, stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    assert process.stdout.read(4) == b"word"
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130 and process.stderr.read() == b""


@pytest.mark.parametrize("no_color", [False, True])
def test_colour_is_for_thinking_on_a_terminal(ask, env, no_color):
    """NO_COLOR as no-color.org has it: present, whatever its value."""
    command = ask([{"output": "<think>\nhmm\n</think>\n\nfour"}], "--family", "qwen3", "what?")
    ours, theirs = pty.openpty()
    process = subprocess.Popen(command, env={**env, **({"NO_COLOR": "1"} if no_color else {})}, stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=theirs)
    os.close(theirs)
    shown, end = b"", time.monotonic() + 60
    try:
        while time.monotonic() < end and (data := os.read(ours, 4096)):
            shown += data
    except OSError:                             # Linux: the other side is closed
        pass
    os.close(ours)
    assert process.stdout.read().strip() == b"four" and process.wait(30) == 0
    assert shown.replace(b"\x1b[2m", b"").replace(b"\x1b[0m", b"") == b"hmm" and (b"\x1b[2m" in shown) is not no_color

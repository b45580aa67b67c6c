"""What a running daemon takes of its machine, how it starts and ends, and that it runs twice and on every instruction set."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
GREEDY = {"messages": [{"role": "user", "content": "What is 2+2?"}], "max_tokens": 16, "temperature": 0}


def answer(daemon: Any, body: dict[str, Any] = GREEDY) -> str:
    status, reply = daemon.json("POST", "/v1/chat/completions", body)
    assert status == 200, reply
    return reply["choices"][0]["message"]["content"]


def resident(pid: int) -> int:
    """Bytes, the most so far."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"^VmHWM:\s+(\d+) kB", status, re.M)[1]) * 1024


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_resident_memory(start, default_model: Path) -> None:
    """At most 1.6 times the file, the arena, and 40 MB: also while it loads, and after long prompts side by side."""
    arena = 64 << 20
    daemon = start(args=("--kv-memory", str(arena), "--parallel", "2", "--kv-cache-disk", "0"))
    limit = 1.6 * default_model.stat().st_size + arena + 40e6
    assert resident(daemon.process.pid) <= limit - arena
    for text in "ab":
        assert daemon.json("POST", "/v1/completions", {"prompt": text + " quick brown fox" * 150, "max_tokens": 2})[0] == 200
    assert resident(daemon.process.pid) <= limit
    assert daemon.stop() == 0


def test_idle_takes_no_cpu(real) -> None:
    """In ticks of 10 ms: a keepalive or poll now and then would show; one may belong to what came before."""
    answer(real)
    time.sleep(0.3)
    before = cpu_ticks(real.process.pid)
    time.sleep(2)
    assert cpu_ticks(real.process.pid) - before <= 1


def test_the_command_that_the_log_shows_works(real) -> None:
    (command,) = re.findall(r"try it: (curl .*)", real.log)
    if not shutil.which("curl"):
        pytest.skip("no curl here")
    done = subprocess.run(["sh", "-c", command], capture_output=True, timeout=60)
    assert json.loads(done.stdout)["choices"][0]["message"]["content"]


def test_two_at_once(start, real) -> None:
    other = start()
    assert other.port != real.port
    assert answer(other) == answer(real) != ""
    assert other.stop() == 0
    assert answer(real)


@pytest.mark.parametrize("isa", ["avx2", "c"])
def test_instruction_sets(start, isa: str) -> None:
    daemon = start(env={"MILAD_ISA": isa})
    if not re.search(rf"threads, {isa}\b", daemon.log):
        daemon.stop()
        pytest.skip(f"no {isa} here")
    status, reply = daemon.json("POST", "/v1/completions", {"prompt": "The capital of France is", "max_tokens": 1, "temperature": 0})
    assert status == 200 and reply["choices"][0]["text"] == " Paris"
    assert daemon.stop() == 0


def test_a_context_beyond_the_training_is_a_warning(start, tiny) -> None:
    daemon = start(model=tiny(n_ctx=256), args=("--ctx", "700"))
    assert re.search(r"warning: --ctx 700 is beyond the 256 tokens", daemon.log)
    assert daemon.json("GET", "/props")[1]["default_generation_settings"]["n_ctx"] == 700
    status, reply = daemon.json("POST", "/v1/completions", {"prompt": [5] * 600, "max_tokens": 3, "temperature": 0})
    assert status == 200 and reply["usage"]["prompt_tokens"] == 600, reply
    assert daemon.stop() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_end_while_loading(library: Path, default_model: Path, tmp_path: Path, number: int) -> None:
    """From the first moment that /health answers 503."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("MILA", "XDG"))}
    env.update(PYTHONPATH=str(ROOT), MILAD_LIBRARY=str(library), HOME=str(tmp_path))
    code = ("import sys, time; from milad import loader; from milad.cli import main\n"
            "real = loader.load\n"
            "def slow(*a, **k):\n"
            "    print('loading', flush=True); time.sleep(60); return real(*a, **k)\n"
            "loader.load = slow\n"
            "sys.exit(main.main(sys.argv[1:]))\n")
    process = subprocess.Popen([sys.executable, "-c", code, "serve", "--model", str(default_model), "--port", "0"], env=env,
                               stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "loading\n"
    process.send_signal(number)
    _, log = process.communicate(timeout=10)
    assert process.returncode == 0 and "ended while loading" in log and "Traceback" not in log


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "..", ".", "smollm2/../../x", "a\0b", "x" * 200, "\ud7ff", "%2e%2e"])
def test_a_models_name_is_no_path(real, name: str) -> None:
    """In a body an unknown name gets the served model (WIRE: clients send names nobody knows); in a path it is a 404."""
    status, reply = real.json("POST", "/v1/chat/completions", {**GREEDY, "max_tokens": 1, "model": name})
    assert status == 200 and reply["model"] == json.loads(real.request("GET", "/v1/models")[2])["data"][0]["id"]
    from urllib.parse import quote
    status, _, _ = real.request("GET", "/v1/models/" + quote(name, safe=""))
    assert status == 404

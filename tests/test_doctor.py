"""`milad doctor` against servers that lack something, and with everything down."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "agents"))

import servers  # noqa: E402
from milad import doctor, machine  # noqa: E402
from milad.agents import target  # noqa: E402


@pytest.mark.parametrize("lines,name", [
    (("model name\t: AMD EPYC", "CPU part\t: 0xd0c"), "AMD EPYC"),
    (("CPU implementer\t: 0x41", "CPU part\t: 0xd0c") * 2, "aarch64, Neoverse N1"),
    (("CPU implementer\t: 0x41", "CPU part\t: 0xd05", "CPU part\t: 0xd0b", "CPU part\t: 0xd0b"),
     "aarch64, 1 Cortex-A55 and 2 Cortex-A76"),
    (("CPU implementer\t: 0x4e", "CPU part\t: 0x004"), "aarch64, implementer 0x4e part 0x004"),
    (("CPU implementer\t: ?", "CPU part", ""), "aarch64"), ((), "aarch64")])
def test_the_processors_name(monkeypatch: pytest.MonkeyPatch, lines: tuple[str, ...], name: str) -> None:
    """ARM kernels tell no model name."""
    monkeypatch.setattr("os.uname", lambda: SimpleNamespace(machine="aarch64"))
    assert machine.processor("\n".join(lines)) == name


def check(routes: dict[str, Any], kind: str | None = None, env: dict[str, str] | None = None, **headers: str) -> dict[str, Any]:
    server = servers.Server(routes, headers)
    try:
        found = list(doctor.server(target.kind_of(kind) if kind else None, server.url, model=None, key_env=None, environ=env or {}))
    finally:
        server.close()
    for finding in found:
        assert finding.state in ("ok", "note", "warn", "bad") and "\n" not in finding.said + finding.do
        assert finding.do or finding.state in ("ok", "note"), finding
    return {f.name: f for f in found}


def test_a_good_server() -> None:
    found = check(servers.milad(), Server="milad/0.1.0")
    assert {f.state for f in found.values()} == {"ok"} and len(found) == 9
    assert "65,536" in found["context"].said


def test_an_empty_body_and_one_token_are_all_that_is_sent() -> None:
    server = servers.Server(servers.milad(), {"Server": "milad/0.1.0"})
    list(doctor.server(None, server.url, model=None, key_env=None, environ={}))
    posted = [json.loads(body) for method, *_, body in server.asked if method == "POST"]
    server.close()
    assert len(posted) == 10 and all(not p or p.get("max_tokens") == 1 or p.get("max_output_tokens") == 16 for p in posted)


def test_a_missing_endpoint_a_small_context_and_a_refused_key() -> None:
    routes = servers.llamacpp(**{"GET /props": {"default_generation_settings": {"n_ctx": 8192}, "total_slots": 4}})
    del routes["POST /v1/messages"]
    found = check(routes)
    assert found["/v1/messages"].state == "warn" and "Claude Code" in found["/v1/messages"].said
    assert found["context"].state == "warn" and "4 slots" in found["context"].said
    found = check({**routes, "GET /v1/models": servers.keyed("k", servers.models({"id": "a"}))})
    assert found["key"].state == "bad" and "LLAMA_API_KEY" in found["key"].do


def test_a_key_is_accepted_or_needless() -> None:
    guarded = {**servers.vllm(), "GET /v1/models": servers.keyed("k", servers.models({"id": "a", "max_model_len": 40000}))}
    assert check(guarded, "vllm", {"VLLM_API_KEY": "k"})["key"].said == "accepted (from $VLLM_API_KEY)"
    assert check(servers.vllm(), "vllm", {"VLLM_API_KEY": "k"})["key"].state == "note"


@pytest.mark.parametrize("kind,message,do", [
    ("llamacpp", "tools param requires --jinja flag", "--jinja"),
    ("vllm", '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set', "--tool-call-parser NAME"),
    ("ollama", "registry.ollama.ai/library/gemma3:latest does not support tools", "choose another"),
])
def test_other_servers_faults_by_name(kind: str, message: str, do: str) -> None:
    def chat(_: Any, body: bytes) -> Any:
        return servers.BAD if b"tools" not in body and body == b"{}" else (
            (400, {"error": {"message": message}}) if b"tools" in body else servers.CHAT)
    routes = getattr(servers, kind)(**{"POST /v1/chat/completions": chat})
    found = check(routes, kind)
    assert found["tool calls"].state == "bad" and message in found["tool calls"].said and do in found["tool calls"].do
    assert found["/v1/chat/completions"].state == "ok"


def test_another_kind_than_said() -> None:
    assert check(servers.ollama(), "vllm")["server"].do.startswith("say --kind ollama")


def test_a_model_that_is_loading() -> None:
    found = check({"GET /v1/models": (503, {"error": "loading"}), "GET /health": (503, {"progress": 0.4}), "GET /props": (503, {})},
                  Server="milad/0.1.0")
    assert "40%" in found["model"].said


def run(home: Path, *args: str, **env: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-m", "milad", "doctor", *args], cwd=home, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                          env={"HOME": str(home), "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", **env},
                          timeout=60)
    assert done.stderr == "", done.stderr
    return done.returncode, done.stdout


def test_everything_down(tmp_path: Path, library: Path) -> None:
    code, out = run(tmp_path, "--url", "http://127.0.0.1:9", "--json", MILAD_LIBRARY=str(library))
    told = json.loads(out)
    states = {f["name"]: f["state"] for f in told["findings"]}
    assert code == 1 and told["ok"] is False and states["server"] == "bad" and states["core"] == "ok"
    assert [n for n, s in states.items() if s == "bad"] == ["server"]
    assert not list(tmp_path.iterdir()), "doctor writes nothing"


def test_exit_code_0_when_nothing_is_wrong(tmp_path: Path, library: Path) -> None:
    server = servers.Server(servers.milad(), {"Server": "milad/0.1.0"})
    code, out = run(tmp_path, "--url", server.url, MILAD_LIBRARY=str(library))
    server.close()
    assert code == 0 and "nothing wrong" in out.splitlines()[-1]


def test_what_is_broken_here(tmp_path: Path) -> None:
    (tmp_path / ".config/milad").mkdir(parents=True)
    (tmp_path / ".config/milad/milad.conf").write_text("prot = 9\n")
    (tmp_path / ".local/share/milad/models").mkdir(parents=True)
    (tmp_path / ".local/share/milad/models/bad.gguf").write_bytes(b"not one")
    (tmp_path / ".shiv/milad.pyz_0123").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    for name, text in (("claude", "#!/bin/sh\necho 'Claude Code 2.1.0.'\n"), ("codex", "#!/bin/sh\necho broken >&2\nexit 1\n"),
                       ("pi", "#!/bin/sh\nexec sleep 60\n")):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    code, out = run(tmp_path, "--url", "http://127.0.0.1:9", "--json", MILAD_LIBRARY=str(tmp_path / "no.so"),
                    PATH=f"{tmp_path}/bin:/usr/bin:/bin")
    found = {f["name"]: f for f in json.loads(out)["findings"]}
    assert code == 1
    assert found["configuration"]["state"] == "bad" and "port" in found["configuration"]["said"]
    assert found["models"]["state"] == "bad" and found["core"]["state"] == "bad" and found["leftovers"]["state"] == "warn"
    assert found["agent claude"]["said"] == "Claude Code 2.1.0" and "broken" in found["agent codex"]["said"]
    assert "does not tell" in found["agent pi"]["said"] and "npm install" in found["agent opencode"]["do"]


def test_an_unwritable_folder_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nowhere")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert next(f for f in doctor._folders() if f.name == "state folder").state == "bad"

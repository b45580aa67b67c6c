"""The reverse of --kind: launchers and clients of llama-server, vLLM and Ollama's OpenAI side find in milad what they ask those for
(llama.cpp's tools/server/README.md, vLLM's OpenAI-compatible server, Ollama's docs on OpenAI compatibility)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from e2e.conftest import Daemon
from milad.agents import target

N_CTX = 40_960
ID = "smollm2"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, default_model: Path, library: Path):
    made = Daemon(tmp_path_factory.mktemp("reverse"), default_model, library, None, ("--ctx", str(N_CTX)))
    yield made
    made.stop()


def text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


@pytest.mark.parametrize("client,path,field,wanted", [
    ("llama-server", "/health", "status", "ok"),
    ("llama-server", "/v1/health", "status", "ok"),
    ("llama-server", "/props", "default_generation_settings.n_ctx", N_CTX),
    ("llama-server", "/props", "total_slots", 4),
    ("llama-server", "/props", "build_info", text),
    ("llama-server", "/props", "model_path", text),
    ("llama-server", "/props", "model_alias", ID),
    ("llama-server", "/props", "chat_template", text),
    ("llama-server", "/props", "modalities.vision", False),
    ("llama-server", "/v1/models", "data.0.meta.n_ctx_train", 8192),
    ("llama-server", "/models", "data.0.id", ID),
    ("vLLM", "/health", "status", "ok"),
    ("vLLM", "/version", "version", text),
    ("vLLM", "/v1/models", "object", "list"),
    ("vLLM", "/v1/models", "data.0.id", ID),
    ("vLLM", "/v1/models", "data.0.max_model_len", N_CTX),
    ("Ollama", "/v1/models", "data.0.object", "model"),
    ("Ollama", "/v1/models", "data.0.owned_by", text),
    ("Ollama", f"/v1/models/{ID}", "id", ID),
])
def test_what_clients_of_other_servers_ask(daemon: Daemon, client: str, path: str, field: str, wanted: Any) -> None:
    status, value = daemon.json("GET", path, headers={"Authorization": "Bearer any"})
    assert status == 200
    for name in field.split("."):
        value = value[int(name) if name.isdigit() else name]
    assert wanted(value) if callable(wanted) else value == wanted, (client, value)


@pytest.mark.parametrize("kind", ["llamacpp", "vllm", "openai"])
def test_a_launcher_for_another_server_finds_model_and_window(daemon: Daemon, kind: str) -> None:
    found, _ = target.resolve(target.KINDS[kind], daemon.url, model=None, ctx=None, key_env=None, environ={})
    assert (found.model, found.context, found.up) == (ID, N_CTX, True)

"""What launch and doctor learn of servers, against servers that answer as llama.cpp, vLLM, Ollama and milad do."""

from __future__ import annotations

from typing import Any

import pytest

import servers
from milad.agents import target
from milad.errors import UsageError


@pytest.fixture
def serve():
    running: list[servers.Server] = []

    def make(routes: servers.Routes, **headers: str) -> servers.Server:
        running.append(servers.Server(routes, headers))
        return running[-1]

    yield make
    for server in running:
        server.close()


def resolve(url: str, kind: str, *, model: str | None = None, ctx: int | None = None, key_env: str | None = None,
            env: dict[str, str] | None = None) -> Any:
    return target.resolve(target.kind_of(kind), target.root_of(url), model=model, ctx=ctx, key_env=key_env, environ=env or {})[0]


@pytest.mark.parametrize("url", ["http://h:8080", "http://h:8080/", "http://h:8080/v1", "http://h:8080/v1/", "h:8080", "h:8080/v1"])
def test_base_urls_with_and_without_v1(url: str) -> None:
    assert target.root_of(url) == "http://h:8080"


def test_a_proxys_path_stays() -> None:
    assert target.root_of("https://h/llm/v1") == "https://h/llm" and target.root_of("https://h/v1x") == "https://h/v1x"


@pytest.mark.parametrize("url", ["", "ftp://h", "http://", "http://h:99999", "http://h:x", "http://h/?a", "http://h/#a",
                                 "http://me:secret@h", "http://h/a b", "http://h/$'"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(UsageError, match="--url"):
        target.root_of(url)


@pytest.mark.parametrize("name", ["llamacpp", "llama.cpp", "llama-cpp", "llama-server"])
def test_names_of_llamacpp(name: str) -> None:
    assert target.kind_of(name).name == "llamacpp"


def test_unknown_kind() -> None:
    with pytest.raises(UsageError, match="vllm"):
        target.kind_of("lmstudio")


@pytest.mark.parametrize("kind,routes,model,context", [
    ("milad", servers.milad(), "small", 65536),
    ("llamacpp", servers.llamacpp(), "a.gguf", 40960),
    ("vllm", servers.vllm(), "org/model", 65536),
    ("openai", servers.vllm(), "org/model", 65536),
])
def test_model_and_context(serve: Any, kind: str, routes: Any, model: str, context: int) -> None:
    server = serve(routes)
    found = resolve(server.url + "/v1", kind)
    assert (found.model, found.context, found.root, found.v1) == (model, context, server.url, server.url + "/v1")
    assert target.identify(server.url)[0] == (kind if kind != "openai" else "vllm")
    assert not [m for m, *_ in server.asked if m == "POST"], "asking costs no tokens"


def test_ollama_context_of_the_loaded_model_or_its_modelfile(serve: Any) -> None:
    server = serve(servers.ollama())
    assert resolve(server.url, "ollama", model="qwen3:8b").context == 36864
    assert resolve(server.url, "ollama", model="gemma3").context == 49152
    assert target.identify(server.url) == ("ollama", "0.14.2")


def test_the_training_length_is_never_taken(serve: Any) -> None:
    bare = {"parameters": "stop x", "model_info": {"gemma3.context_length": 131072}}
    server = serve(servers.ollama(**{"POST /api/show": bare, "GET /api/ps": {"models": []}}))
    assert resolve(server.url, "ollama", model="gemma3").context is None
    server = serve(servers.llamacpp(**{"GET /props": {"build_info": "b1"}}))
    assert resolve(server.url, "llamacpp").context is None


def test_what_the_user_says_of_the_context_wins(serve: Any) -> None:
    assert resolve(serve(servers.vllm()).url, "vllm", ctx=1234).context == 1234


def test_several_models_and_unknown_ones(serve: Any) -> None:
    server = serve(servers.ollama())
    with pytest.raises(UsageError, match="--model qwen3:8b, --model gemma3:latest"):
        resolve(server.url, "ollama")
    with pytest.raises(UsageError, match="does not serve 'nope'; it serves qwen3:8b"):
        resolve(server.url, "ollama", model="nope")
    assert resolve(serve(servers.milad()).url, "milad", model="other").model == "other"


def test_keys(serve: Any) -> None:
    listed = servers.models({"id": "m"})
    server = serve({"GET /v1/models": servers.keyed("s3cret", listed), "GET /props": servers.keyed("s3cret", {
        "default_generation_settings": {"n_ctx": 5000}})})
    found = resolve(server.url, "llamacpp", env={"LLAMA_API_KEY": "s3cret"})
    assert (found.key, found.key_env, found.context) == ("s3cret", "LLAMA_API_KEY", 5000)
    assert resolve(server.url, "llamacpp", key_env="MINE", env={"MINE": "s3cret"}).key_env == "MINE"
    with pytest.raises(UsageError, match="Invalid API Key.*LLAMA_API_KEY"):
        resolve(server.url, "llamacpp")
    with pytest.raises(UsageError, match="--api-key-env MINE"):
        resolve(server.url, "llamacpp", key_env="MINE")


def test_a_real_cloud_key_stays_at_home(serve: Any) -> None:
    server = serve(servers.vllm())
    found = resolve(server.url, "openai", env={"OPENAI_API_KEY": "sk-real"})
    assert found.key == "milad" and not any("sk-real" in str(asked) for asked in server.asked)


def test_nothing_answers() -> None:
    found = resolve("http://127.0.0.1:9", "milad", model="m")
    assert not found.up and found.model == "m" and found.context is None


def test_endpoints_are_found_by_an_empty_body(serve: Any) -> None:
    server = serve(servers.apis("messages"))
    told = target.Server(target.KINDS["openai"], server.url)
    assert target.has_api(told, "messages") is True and target.has_api(told, "responses") is False
    assert [body for *_, body in server.asked] == [b"{}", b"{}"]


@pytest.mark.parametrize("body", [b"", b"[]", b"null", b"5", b"[" * 100_000, b"\xff", b'{"data": 5}', b'{"data": [5, {"id": 5}, {}]}',
                                  b'{"error": 5, "data": [{"id": "m", "aliases": [5], "max_model_len": "x"}], "models": [5]}',
                                  b'{"default_generation_settings": {"n_ctx": -1}, "data": [{"id": "m"}], "parameters": 5}'])
@pytest.mark.parametrize("kind", target.KINDS)
def test_nonsense_from_a_server(serve: Any, kind: str, body: bytes) -> None:
    for status in (200, 401, 503):
        server = serve({"*": (status, body)})
        target.identify(server.url)
        try:
            assert resolve(server.url, kind, model="m").context is None
        except UsageError as e:
            assert "\n" not in str(e)

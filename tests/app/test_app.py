"""The application over real sockets with a canned Runner: routes, dialects of errors, who may call, bodies."""

from __future__ import annotations

import gzip
import http.client
import json
import time
from typing import Any

import pytest

from fake_app import APIS, BODIES, CHAT, Answer, Live, ask, error_of, fake_app, read_all, runner, serving
from milad.app import App, Settings
from milad.http import guard, server


@pytest.fixture
def live():
    with serving(fake_app()) as live:
        yield live


# Routes


@pytest.mark.parametrize("prefix", ["", "/v1"])
@pytest.mark.parametrize("path", [p.removeprefix("/v1") for p in APIS])
def test_every_api_with_and_without_the_prefix(live: Live, path: str, prefix: str) -> None:
    for suffix in ("", "/", "?beta=true"):
        answer = ask(live, prefix + path + suffix, BODIES["/v1" + path])
        assert answer.status == 200 and b"Hello, world" in answer.data
    assert runner(live).calls[-1] == ("/v1" + path, "127.0.0.1")


@pytest.mark.parametrize("method, path, allow", [
    ("GET", "/v1/chat/completions", "POST, OPTIONS"), ("POST", "/v1/models", "GET, HEAD, OPTIONS"), ("PUT", "/v1/messages", "POST, OPTIONS"),
    ("DELETE", "/health", "GET, HEAD, OPTIONS"), ("BREW", "/", "GET, HEAD, OPTIONS"), ("GET", "/v1/responses", "POST, OPTIONS"),
    ("POST", "/v1/responses/resp_1", "GET, HEAD, DELETE, OPTIONS"), ("HEAD", "/tokenize", "POST, OPTIONS"),
])
def test_wrong_methods(live: Live, method: str, path: str, allow: str) -> None:
    answer = ask(live, path, method=method)
    assert answer.status == 405 and answer.headers["Allow"] == allow and answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("path, headers, anthropic", [
    ("/nope", {}, False), ("/v1/nope", {}, False), ("/nope", {"anthropic-version": "2023-06-01"}, True), ("/v1/messages/nope", {}, True),
    ("/v1/messages/batches", {}, True), ("/v1/chat/nope", {"anthropic-version": "x"}, False), ("/v1/responses/a/b", {}, False), ("/v1x/models", {}, False),
])
def test_unknown_paths_in_the_dialect_they_suggest(live: Live, path: str, headers: dict[str, str], anthropic: bool) -> None:
    answer = ask(live, path, **headers)
    assert answer.status == 404
    error_of(answer, "/messages" if anthropic else path)


def test_broken_heads_in_the_dialect_of_their_path(live: Live) -> None:
    for path, sign in (("/v1/messages", b'"type":"error"'), ("/v1/chat/completions", b'"param":null')):
        for line in (b"X : y", b"Content-Length: +1", b"X: " + b"y" * 40_000):
            out = read_all(live.connect(b"POST %b?beta=true HTTP/1.1\r\nHost: localhost\r\n%b\r\n\r\n" % (path.encode(), line)))
            assert out.startswith((b"HTTP/1.1 400", b"HTTP/1.1 431")) and sign in out


@pytest.mark.parametrize("path", ["/v1/v1/chat/completions", "/v1/v1/messages", "/v1/v1", "/v1/v1/models"])
def test_the_prefix_twice_is_explained(live: Live, path: str) -> None:
    answer = ask(live, path, CHAT)
    assert answer.status == 404 and "base URL" in error_of(answer, path)["message"]


def test_head_and_options(live: Live) -> None:
    for path in ("/", "/health", "/v1/models", "/props", "/version", "/api/hello", "/v1/models/fake-model"):
        got, head = ask(live, path), ask(live, path, method="HEAD")
        assert head.status == got.status == 200 and head.data == b"" and head.headers["Content-Length"] == str(len(got.data))
    assert ask(live, "/v1/messages", method="OPTIONS").headers["Allow"] == "POST, OPTIONS"
    sock = live.connect(b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert read_all(sock).startswith(b"HTTP/1.1 204")


def test_websocket_upgrade_is_426(live: Live) -> None:
    answer = ask(live, "/v1/responses", Connection="Upgrade", Upgrade="websocket")
    assert answer.status == 426 and answer.headers["Upgrade"] == "HTTP/1.1"
    assert ask(live, "/v1/chat/completions", CHAT, Connection="Upgrade", Upgrade="h2c").status == 200


def test_request_ids_everywhere(live: Live) -> None:
    seen = set()
    for answer in [ask(live, "/health"), ask(live, "/nope"), ask(live, "/v1/messages", b"{"), ask(live, "/v1/messages", {**BODIES["/v1/messages"], "stream": True}),
                   ask(live, "/health", Host="evil.example"), ask(live, "/v1/chat/completions", CHAT), ask(live, "/health", method="OPTIONS")]:
        assert answer.headers["x-request-id"] == answer.headers["request-id"] and len(answer.headers.get_all("x-request-id")) == 1
        seen.add(answer.headers["x-request-id"])
    assert len(seen) == 7
    assert b"\r\nx-request-id: req_" in read_all(live.connect(b"BAD\r\n\r\n"))


def test_root_and_version(live: Live) -> None:
    text = ask(live, "/", Host=f"127.0.0.1:{live.port}")
    assert text.headers["Content-Type"].startswith("text/plain") and f"http://127.0.0.1:{live.port}/v1" in text.data.decode()
    page = ask(live, "/", Accept="text/html,*/*", Host="localhost")
    assert page.headers["Content-Type"].startswith("text/html") and b"<title>milad" in page.data
    assert set(ask(live, "/version").json) == {"version"}


def test_models_for_every_reader(live: Live) -> None:
    answer = ask(live, "/v1/models").json
    (model,) = answer["data"]
    assert (answer["object"], answer["has_more"], answer["first_id"], answer["last_id"]) == ("list", False, "fake-model", "fake-model")
    assert model["id"] == model["display_name"] == "fake-model" and model["type"] == "model" and model["object"] == "model"
    assert model["max_model_len"] == model["context_length"] == 4096 and model["meta"]["n_ctx_train"] == 8192 and "models" not in answer
    (codex,) = ask(live, "/v1/models?client_version=0.171.0").json["models"]
    assert codex["slug"] == "fake-model" and codex["context_window"] == 4096
    assert ask(live, "/v1/models/fake-model").json["id"] == "fake-model" and ask(live, "/v1/models/fake").status == 200
    for name in ("other", "gpt-4", "a/b", "%2e%2e"):
        assert ask(live, f"/v1/models/{name}").status == 404
    assert ask(live, "/v1/models/x", anthropic_version="1").json["type"] == "error"


def test_metrics_hook(live: Live) -> None:
    assert ask(live, "/metrics").status == 404
    live.app.settings.metrics = lambda: "# TYPE x gauge\nx 1\n"
    answer = ask(live, "/metrics")
    assert answer.data.endswith(b"x 1\n") and answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")


def test_access_log(live: Live) -> None:
    lines: list[str] = []
    live.app.settings.access_log = lines.append
    ask(live, "/v1/messages?key=secret", {**BODIES["/v1/messages"], "stream": True})
    ask(live, "/nope")
    read_all(live.connect(b"GET / HTTP/1.1\r\n\r\n"))
    read_all(live.connect(b"GET /\x1b[2J HTTP/1.1\r\n\r\n"))
    end = time.monotonic() + 5
    while len(lines) < 4 and time.monotonic() < end:
        time.sleep(0.005)
    assert [line.split()[1:4] for line in lines[:2]] == [["POST", "/v1/messages", "200"], ["GET", "/nope", "404"]]
    assert "3+4 tokens" in lines[0] and "req_" in lines[0] and lines[2].endswith("host") and lines[3].endswith("request_line")
    assert not any("secret" in line or "\x1b" in line or "hi" in line.split() for line in lines)


def test_a_slow_body_is_told_in_the_dialect() -> None:
    with serving(fake_app(), server.Settings(body_grace_s=0.2)) as live:
        sock = live.connect(b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{")
        out = read_all(sock)
        assert out.startswith(b"HTTP/1.1 408") and b'"type":"error"' in out


def test_props_and_text_tools(live: Live) -> None:
    props = ask(live, "/props").json
    assert props["default_generation_settings"]["n_ctx"] == 4096 and props["total_slots"] == 4 and props["model_path"] == "/models/fake.gguf"
    assert props["chat_template"] == "{{template}}" and "build_info" in props
    assert ask(live, "/tokenize", {"content": "ab"}).json == {"tokens": [97, 98]}
    assert ask(live, "/detokenize", {"tokens": [97, 98]}).json == {"content": "ab"}
    assert ask(live, "/apply-template", CHAT).json == {"prompt": "hi", "tokens": [1, 2]}
    for path, value in [("/tokenize", {}), ("/tokenize", {"content": 1}), ("/tokenize", {"content": "a", "parse_special": "yes"}), ("/detokenize", {"tokens": "a"}),
                        ("/detokenize", {}), ("/apply-template", {}), ("/apply-template", {"messages": 3})]:
        answer = ask(live, path, value)
        assert answer.status == 400 and error_of(answer, path)["param"], (path, value)


def test_while_the_model_loads() -> None:
    app = App(Settings())
    app.loading = 0.25
    with serving(app) as live:
        for path in ("/health", "/healthz", "/readyz"):
            answer = ask(live, path)
            assert answer.status == 503 and answer.json["progress"] == 0.25 and answer.headers["Retry-After"]
        for path in APIS:
            answer = ask(live, path, BODIES[path])
            assert answer.status == 503 and "25%" in error_of(answer, path)["message"] and answer.headers["Retry-After"]
        assert ask(live, "/").status == 200 and ask(live, "/v1/models").status == 503
        app.served = fake_app().served
        assert ask(live, "/readyz").json == {"status": "ok", "model": "fake-model"}


# Who may call


def test_host_and_origin(live: Live) -> None:
    for headers in ({"Host": "evil.example"}, {"Host": ""}, {"Origin": "null"}, {"Origin": "http://evil.example"}, {"Origin": f"http://localhost:{live.port}.evil"}):
        for method in ("GET", "OPTIONS"):
            answer = ask(live, "/health", method=method, **headers)
            assert answer.status == 403 and not [h for h in answer.headers if h.lower().startswith("access-control")], headers
        assert ask(live, "/v1/chat/completions", CHAT, **headers).status == 403
    assert not runner(live).turns
    assert ask(live, "/health", Host=f"localhost:{live.port}", Origin=f"http://localhost:{live.port}").status == 200


def one_key(name: str, key: str) -> guard.Auth:
    return lambda request: name if key in guard.keys_of(request) else None


def test_cors_for_allowed_origins() -> None:
    with serving(fake_app(allowed_origins=("http://app.example",), auth=one_key("me", "k"))) as live:
        answer = ask(live, "/v1/messages", method="OPTIONS", Origin="http://app.example", Access_Control_Request_Method="POST",
                     Access_Control_Request_Headers="content-type, x-api-key")
        assert answer.status == 204 and answer.headers["Access-Control-Allow-Origin"] == "http://app.example"
        assert answer.headers["Access-Control-Allow-Headers"] == "content-type, x-api-key" and "POST" in answer.headers["Access-Control-Allow-Methods"]
        answer = ask(live, "/v1/messages", BODIES["/v1/messages"], Origin="http://app.example", x_api_key="k")
        assert answer.status == 200 and answer.headers["Access-Control-Allow-Origin"] == "http://app.example" and answer.headers["Vary"] == "Origin"
        answer = ask(live, "/v1/messages", BODIES["/v1/messages"], Origin="http://app.example")
        assert answer.status == 401 and answer.headers["Access-Control-Allow-Origin"] == "http://app.example"


def test_keys() -> None:
    lines: list[str] = []
    with serving(fake_app(auth=one_key("alice", "k1"), access_log=lines.append)) as live:
        for path in APIS:
            for headers in ({}, {"Authorization": "Bearer no"}, {"x-api-key": "no"}):
                answer = ask(live, path, BODIES[path], **headers)
                assert answer.status == 401 and error_of(answer, path)["type"] == "authentication_error" and answer.headers["WWW-Authenticate"]
            for headers in ({"Authorization": "Bearer k1"}, {"x-api-key": "k1"}):
                assert ask(live, path, BODIES[path], **headers).status == 200
        assert runner(live).calls[-1][1] == "alice"
        for path, status in {"/health": 200, "/readyz": 200, "/": 200, "/api/hello": 200, "/v1/models": 401, "/nope": 401, "/props": 401}.items():
            assert ask(live, path).status == status, path
    assert not any("k1" in line or "hi" in line.split() for line in lines) and any(line.startswith("alice POST") for line in lines)


# Bodies


BOMB = gzip.compress(b" " * 20_000_000)


@pytest.mark.parametrize("path", [*APIS, "/v1/messages/count_tokens", "/v1/responses/input_tokens", "/tokenize", "/apply-template"])
def test_bad_bodies(live: Live, path: str) -> None:
    for data, status in [(b"", 400), (b"{", 400), (b"[]", 400), (b'{"a":NaN}', 400), (b"\xff", 400), (b'{"a":"\\ud800"}', 400), (b"[" * 100_000, 400), (b"{}", None)]:
        answer = ask(live, path, data)
        assert answer.status == (status or answer.status) and answer.status < 500, (data[:20], answer.data)
        if answer.status >= 400:
            error_of(answer, path)
    for headers, status in [({"Content-Type": "text/plain"}, 415), ({"Content-Type": "application/x-www-form-urlencoded"}, 415), ({"Content-Encoding": "br"}, 415),
                            ({"Content-Encoding": "gzip"}, 413), ({"Content-Encoding": "deflate"}, 400)]:
        answer = ask(live, path, BOMB, **headers)
        assert answer.status == status, headers
        error_of(answer, path)
    sock = live.connect(f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99999999\r\n\r\n".encode())
    out = read_all(sock)
    assert out.startswith(b"HTTP/1.1 413") and (b'"request_too_large"' in out or "messages" not in path)


def test_compressed_and_large_bodies(live: Live) -> None:
    big = {"messages": [{"role": "user", "content": "x" * 300_000}], "max_tokens": 5}
    for path in ("/v1/chat/completions", "/v1/messages"):
        assert ask(live, path, gzip.compress(json.dumps(big).encode()), Content_Encoding="gzip").status == 200
        assert ask(live, path, big).status == 200
    assert [len(t.last_text) for t in runner(live).turns] == [300_000] * 4


def test_the_collector_rests_and_comes_back(live: Live) -> None:
    import gc
    seen: list[bool] = []
    prepare = runner(live).prepare
    runner(live).prepare = lambda turn, **k: (seen.append(gc.isenabled()), prepare(turn, **k))[1]
    big = {"messages": [{"role": "user", "content": "x" * 100_000}]}
    assert ask(live, "/v1/chat/completions", big).status == 200 and ask(live, "/v1/chat/completions", CHAT).status == 200
    assert seen == [False, True] and gc.isenabled()
    for bad in ({**big, "n": -1}, b"[" * 100_000):
        assert ask(live, "/v1/chat/completions", bad).status == 400 and gc.isenabled()


def test_model_names(live: Live) -> None:
    for name in ("claude-sonnet-9", "gpt-9", "", "fake"):
        assert ask(live, "/v1/chat/completions", {**CHAT, "model": name}).json["model"] == "fake-model"
    live.app.settings.strict_model_names = True
    for path in APIS:
        answer = ask(live, path, {**BODIES[path], "model": "gpt-9"})
        assert answer.status == 404 and "fake-model" in error_of(answer, path)["message"]
        assert ask(live, path, {**BODIES[path], "model": "fake"}).status == 200
    assert ask(live, "/v1/chat/completions", CHAT).status == 200


HOSTILE: list[Any] = [None, True, False, -1, 0, 1, 2**31, 2**63, 10**299, -2**63, 1.5, -0.0, 1e308, 5e-324, "", "5", "x" * 10_000, "\0", [], [[]], [None], [0], [""],
                      {}, {"": None}, {"type": "text"}, {"type": 1}, [{}], [{"type": "x"}], [[[[[[[[]]]]]]]], {"a": {"b": {"c": []}}}, [{"role": "user"}] * 50]
FULL = {
    "/v1/chat/completions": {"model": "m", "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "r"}], "tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}],
        "tool_choice": "auto", "n": 1, "stop": ["x"], "seed": 1, "temperature": 1, "top_p": 1, "logprobs": True, "top_logprobs": 2, "logit_bias": {"5": 1}, "max_tokens": 5,
        "response_format": {"type": "text"}, "stream_options": {"include_usage": True}, "reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}, "stream": False},
    "/v1/completions": {"model": "m", "prompt": ["hi"], "n": 1, "best_of": 1, "echo": False, "suffix": None, "logprobs": 1, "stop": "x", "max_tokens": 5, "logit_bias": {"5": 1}},
    "/v1/responses": {"model": "m", "instructions": "i", "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"}, {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "r"}], "tools": [{"type": "function", "name": "f", "parameters": {}}], "tool_choice": "auto",
        "text": {"format": {"type": "text"}}, "reasoning": {"effort": "low"}, "include": [], "max_output_tokens": 5, "metadata": {"a": "b"}, "truncation": "auto", "store": False},
    "/v1/messages": {"model": "m", "max_tokens": 5, "system": [{"type": "text", "text": "s"}], "messages": [{"role": "user", "content": "hi"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": "s"}, {"type": "tool_use", "id": "t1", "name": "f", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "r"}]}]}],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "auto"}, "stop_sequences": ["x"], "thinking": {"type": "disabled"}, "temperature": 1},
}


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        found += places(value[key], (*path, key))
    return found


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


@pytest.mark.parametrize("path", APIS)
def test_hostile_values_everywhere(live: Live, path: str) -> None:
    """Every value of a full request, at every depth, replaced by every hostile one: never a 5xx, always the dialect's error or an answer."""
    client = http.client.HTTPConnection("127.0.0.1", live.port, timeout=20)
    full = FULL[path]
    n_ok = 0
    for place in places(full):
        for value in HOSTILE:
            client.request("POST", path, json.dumps(replaced(full, place, value)), {"Content-Type": "application/json"})
            answer = Answer(client.getresponse())
            assert answer.status in (200, 400, 404), (place, value, answer.data)
            n_ok += answer.status == 200
            if answer.status != 200:
                assert error_of(answer, path)["message"], (place, value)
    client.close()
    assert n_ok > 40

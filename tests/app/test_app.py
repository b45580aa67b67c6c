"""The application over real sockets with a canned Runner: routes, dialects, checks, streams, failures, the official SDKs."""

from __future__ import annotations

import gzip
import http.client
import json
import threading
import time
from typing import Any

import pytest

from fake_app import Live, Run, Runner, fake_app, read_all, serving, text_events
from milad.app import App, Settings
from milad.errors import ContextOverflow, EngineFault, MiladError
from milad.events import BlockEnd, BlockStart, Delta, Failure, Finish, Progress, Started, Usage
from milad.http import guard
from milad.store import Store

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
BODIES = {"/v1/chat/completions": CHAT, "/v1/completions": {"prompt": "hi"}, "/v1/responses": {"input": "hi"},
          "/v1/messages": {**CHAT, "max_tokens": 9}}
APIS = list(BODIES)


class Answer:
    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status, self.headers, self.data = response.status, response.headers, response.read()

    @property
    def json(self) -> Any:
        return json.loads(self.data)

    @property
    def events(self) -> list[tuple[str | None, Any]]:
        """(event line, JSON or text) of each SSE event; every event is whole."""
        assert self.data.endswith(b"\n\n"), self.data[-200:]
        out = []
        for block in self.data.decode("utf-8").split("\n\n")[:-1]:
            lines = block.split("\n")
            name = lines.pop(0)[7:] if lines[0].startswith("event: ") else None
            assert len(lines) == 1 and lines[0].startswith("data: ")
            text = lines[0][6:]
            out.append((name, json.loads(text) if text.startswith("{") else text))
        return out


def ask(live: Live, path: str, value: Any = None, method: str = "", **headers: str) -> Answer:
    client = http.client.HTTPConnection("127.0.0.1", live.port, timeout=20)
    data = value if isinstance(value, (bytes, type(None))) else json.dumps(value).encode()
    sent = {k.replace("_", "-"): v for k, v in headers.items()}
    if data is not None:
        sent.setdefault("Content-Type", "application/json")
    client.request(method or ("GET" if data is None else "POST"), path, data, sent)
    try:
        return Answer(client.getresponse())
    finally:
        client.close()


@pytest.fixture
def live():
    with serving(fake_app()) as live:
        yield live


def runner(live: Live) -> Runner:
    return live.app.served.runner


def error_of(answer: Answer, path: str) -> dict[str, Any]:
    """The error object, whose shape is checked against the dialect that `path` has."""
    value = answer.json
    if "/messages" in path:
        assert value["type"] == "error" and value["request_id"].startswith("req_") and set(value["error"]) == {"type", "message"}
        assert answer.headers["request-id"] == value["request_id"]
    else:
        assert set(value) == {"error"} and set(value["error"]) == {"message", "type", "param", "code"}
    return value["error"]


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


def test_cors_for_allowed_origins() -> None:
    with serving(fake_app(allowed_origins=("http://app.example",), auth=guard.key_auth({"me": "k"}))) as live:
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
    with serving(fake_app(auth=guard.key_auth({"alice": "k1"}), access_log=lines.append)) as live:
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


@pytest.mark.parametrize("path", [*APIS, "/v1/messages/count_tokens", "/v1/responses/input_tokens", "/tokenize", "/apply-template"])
def test_bad_bodies(live: Live, path: str) -> None:
    for data, status in [(b"", 400), (b"{", 400), (b"[]", 400), (b'{"a":NaN}', 400), (b"\xff", 400), (b'{"a":"\\ud800"}', 400), (b"[" * 100_000, 400), (b"{}", None)]:
        answer = ask(live, path, data)
        assert answer.status == (status or answer.status) and answer.status < 500, (data[:20], answer.data)
        if answer.status >= 400:
            error_of(answer, path)
    for headers, status in [({"Content-Type": "text/plain"}, 415), ({"Content-Type": "application/x-www-form-urlencoded"}, 415), ({"Content-Encoding": "br"}, 415),
                            ({"Content-Encoding": "gzip"}, 400)]:
        answer = ask(live, path, b"{}", **headers)
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


# Errors before the first byte


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", APIS)
def test_refused_before_the_stream(live: Live, path: str, stream: bool) -> None:
    body = {**BODIES[path], "stream": stream}
    runner(live).prepare_error = ContextOverflow(5000, 4096)
    answer = ask(live, path, body)
    message = error_of(answer, path)["message"]
    assert answer.status == 400 and answer.headers["x-should-retry"] == "false"
    assert message == "prompt is too long: 5000 tokens > 4096 maximum" if "messages" in path else "maximum context length is 4096" in message
    runner(live).prepare_error = None
    runner(live).run_error = MiladError("overloaded", "the queue is full", retry_after_s=7)
    answer = ask(live, path, body)
    assert answer.status == (529 if "messages" in path else 429) and answer.headers["Retry-After"] == "7" and answer.headers["x-should-retry"] is None
    runner(live).run_error = ZeroDivisionError("a bug")
    answer = ask(live, path, body)
    assert answer.status == 500 and "ZeroDivision" not in answer.data.decode()
    runner(live).run_error = None
    assert ask(live, path, body).status == 200


# Streams


@pytest.mark.parametrize("path", APIS)
def test_streams(live: Live, path: str) -> None:
    answer = ask(live, path, {**BODIES[path], "stream": True})
    assert answer.status == 200 and answer.headers["Content-Type"].startswith("text/event-stream") and answer.headers["Cache-Control"] == "no-cache"
    names = [name for name, _ in answer.events]
    if path in ("/v1/messages", "/v1/responses"):
        assert all(names) and all(value["type"] == name for name, value in answer.events)
        assert names[-1] in ("message_stop", "response.completed")
    else:
        assert answer.events[-1] == (None, "[DONE]") and not any(names)


def test_one_step_is_one_write(live: Live) -> None:
    """Chunks of the transfer coding show the writes."""
    runner(live).steps = [[Started(Usage(1)), BlockStart(0, "text")], [Delta(0, "a"), Delta(0, "b"), Delta(0, "c")], [BlockEnd(0), Finish("stop", Usage(1, 0, 2))]]
    body = json.dumps({**CHAT, "stream": True}).encode()
    out = read_all(live.connect(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body))
    chunks, rest = [], out.split(b"\r\n\r\n", 1)[1]
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        chunks.append(rest[:int(size, 16)])
        rest = rest[int(size, 16) + 2:]
    assert all(c.endswith(b"\n\n") for c in chunks[:-1]) and chunks[-1] == b""
    assert [c.count(b"data: ") for c in chunks] == [1, 3, 1, 1, 0]


def test_several_prompts_and_choices(live: Live) -> None:
    plain = ask(live, "/v1/completions", {"prompt": ["a", "b", "c"], "n": 2}).json
    assert [(c["index"], c["text"]) for c in plain["choices"]] == [(i, "Hello, world") for i in range(6)]
    texts = [""] * 6
    for _, value in ask(live, "/v1/completions", {"prompt": ["a", "b", "c"], "n": 2, "stream": True}).events[:-1]:
        for choice in value["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == ["Hello, world"] * 6
    assert [t.prompt for t in runner(live).turns[:3]] == ["a", "b", "c"]


KEEPALIVE = {"/v1/chat/completions": '"delta":{}', "/v1/completions": '"text":""', "/v1/messages": "event: ping", "/v1/responses": "event: response.in_progress"}


@pytest.mark.parametrize("path", APIS)
def test_keepalive_while_nothing_is_said(path: str) -> None:
    with serving(fake_app([[Started(Usage(3))], 0.35, *text_events("x")[1:-1], 0.35, text_events()[-1]], keepalive_s=0.1)) as live:
        steps = live.app.served.runner.steps
        steps[2:2] = [[BlockStart(0, "text")]]
        answer = ask(live, path, {**BODIES[path], "stream": True})
        text = answer.data.decode()
        assert answer.status == 200 and text.count(KEEPALIVE[path]) >= 4 and answer.events
    with serving(fake_app([*text_events(*["x"] * 20)], keepalive_s=0.2)) as live:
        live.app.served.runner.step_s = 0.02  # never silent for long
        text = ask(live, path, {**BODIES[path], "stream": True}).data.decode()
        assert text.count(KEEPALIVE[path]) <= 1 + text.count('"finish_reason":"stop"')


def test_head_and_first_keepalive_come_before_the_engine(live: Live) -> None:
    runner(live).steps = [5.0]
    body = json.dumps({**CHAT, "stream": True}).encode()
    sock = live.connect(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body, timeout=3)
    assert sock.recv(1000).startswith(b"HTTP/1.1 200 OK")
    sock.close()
    assert runner(live).cancelled.wait(3)


FAILURES = {"event": lambda: [Failure(MiladError("internal", "the engine failed"))], "fault": lambda: EngineFault("a step failed"),
            "bug": lambda: KeyError("a bug")}


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("path", APIS)
def test_failures(live: Live, path: str, failure: str) -> None:
    for before in ([], text_events("part")[:-1]):
        runner(live).steps = [*before, FAILURES[failure]()]
        answer = ask(live, path, {**BODIES[path], "stream": True})
        assert answer.status == 200
        name, value = answer.events[-1]
        text = json.dumps(value)
        assert "error" in text and "KeyError" not in text and value != "[DONE]" and name not in ("message_stop", "response.completed")
        assert name == {"/v1/messages": "error", "/v1/responses": "response.failed"}.get(path)
        answer = ask(live, path, BODIES[path])
        assert answer.status == 500
        error_of(answer, path)
    runner(live).steps = text_events("fine")
    assert ask(live, path, BODIES[path]).status == 200


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize("stream", [False, True])
def test_leaving_cancels(live: Live, path: str, stream: bool) -> None:
    runner(live).steps = [*text_events("a")[:-1], 30.0]
    body = json.dumps({**BODIES[path], "stream": stream}).encode()
    sock = live.connect(b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(body)) + body)
    end = time.monotonic() + 5
    while not runner(live).n_pulled and time.monotonic() < end:
        time.sleep(0.005)
    sock.close()
    assert runner(live).cancelled.wait(5)
    end = time.monotonic() + 5
    while live.app.n_active and time.monotonic() < end:
        time.sleep(0.005)
    assert live.app.n_active == 0


@pytest.mark.parametrize("path", APIS)
def test_drain_ends_streams_in_their_own_words(path: str) -> None:
    with serving(fake_app([*text_events("a")[:-1], 30.0])) as live:
        got: list[Answer] = []
        threads = [threading.Thread(target=lambda b=b: got.append(ask(live, path, b))) for b in (BODIES[path], {**BODIES[path], "stream": True})]
        for thread in threads:
            thread.start()
        end = time.monotonic() + 5
        while live.app.n_active < 2 and time.monotonic() < end:
            time.sleep(0.005)
        live.call(live.server.drain, 0.1)
        for thread in threads:
            thread.join(5)
        plain, stream = sorted(got, key=lambda a: a.headers["Content-Type"])
        assert plain.status == 503 and "shutting down" in error_of(plain, path)["message"]
        name, value = stream.events[-1]
        assert stream.status == 200 and "shutting down" in json.dumps(value) and name not in ("message_stop", "response.completed")


def test_a_stalled_reader_stops_the_runner(live: Live) -> None:
    runner(live).steps = lambda: ([Started(Usage(1)), BlockStart(0, "text")] if i == 0 else [Delta(0, "x" * 2000)] for i in range(10**9))
    body = json.dumps({**CHAT, "stream": True}).encode()
    sock = live.connect(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    sock.recv(100)
    before = -1
    while before != runner(live).n_pulled:
        before = runner(live).n_pulled
        time.sleep(0.3)
    assert ask(live, "/health").status == 200
    n = 0
    while n < 30_000_000 and runner(live).n_pulled == before:
        n += len(sock.recv(1 << 20))
    assert runner(live).n_pulled > before
    sock.close()
    assert runner(live).cancelled.wait(5)


def test_random_text_is_always_valid(live: Live) -> None:
    import random
    rng = random.Random(11)
    pieces = ["".join(chr(rng.choice([rng.randrange(32), rng.randrange(0xD800, 0xE000), rng.randrange(0x110000)])) for _ in range(5)) for _ in range(30)]
    runner(live).steps = text_events(*pieces)
    for path in APIS:
        plain = ask(live, path, BODIES[path])
        stream = ask(live, path, {**BODIES[path], "stream": True})
        assert plain.json and all(stream.events)
        plain.data.decode("utf-8"), stream.data.decode("utf-8")


def test_nothing_is_left_behind(live: Live) -> None:
    import gc
    from milad.http.server import _Connection
    for path in APIS * 3:
        ask(live, path, {**BODIES[path], "stream": True})
        ask(live, path, b"{")
    end = time.monotonic() + 5
    while live.server.connections and time.monotonic() < end:
        time.sleep(0.005)
    gc.collect()
    assert not [o for o in gc.get_objects() if isinstance(o, _Connection) and o.server is live.server]


# Stored responses


def test_stored_responses(live: Live, tmp_path: Any) -> None:
    openai = pytest.importorskip("openai")
    live.app.store = Store(tmp_path)
    client = openai.OpenAI(base_url=live.url + "/v1", api_key="x", max_retries=0)
    first = client.responses.create(model="m", input="one", metadata={"a": "b"})
    with client.responses.stream(model="m", input="two", previous_response_id=first.id) as stream:
        second = stream.get_final_response()
    assert [(m.role, m.text) for m in runner(live).turns[-1].messages] == [("user", "one"), ("assistant", "Hello, world"), ("user", "two")]
    assert client.responses.retrieve(second.id).output_text == "Hello, world" and client.responses.retrieve(first.id).metadata == {"a": "b"}
    items = client.responses.input_items.list(second.id).data
    assert [i.content[0].text for i in items] == ["two"]
    assert client.responses.input_tokens.count(model="m", input="x", previous_response_id=second.id).input_tokens == 3
    with pytest.raises(openai.BadRequestError, match="has ended"):
        client.responses.cancel(second.id)
    client.responses.delete(first.id)
    for call in (lambda: client.responses.retrieve(first.id), lambda: client.responses.delete(first.id), lambda: client.responses.cancel("resp_x"),
                 lambda: client.responses.input_items.list(first.id)):
        with pytest.raises(openai.NotFoundError):
            call()
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="m", input="x", previous_response_id=first.id)
    assert caught.value.code == "previous_response_not_found"
    unkept = client.responses.create(model="m", input="x", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unkept.id)
    live.app.store.close()
    assert client.responses.create(model="m", input="x").output_text == "Hello, world"  # a broken store takes no answer away


# The SDKs


def test_openai_sdk(live: Live) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=live.url + "/v1", api_key="x", max_retries=0)
    assert client.chat.completions.create(model="m", messages=CHAT["messages"]).choices[0].message.content == "Hello, world"
    with client.chat.completions.stream(model="m", messages=CHAT["messages"]) as stream:
        assert stream.get_final_completion().choices[0].message.content == "Hello, world"
    assert "".join(c.choices[0].text for c in client.completions.create(model="m", prompt="hi", stream=True)) == "Hello, world"
    assert client.responses.create(model="m", input="hi").output_text == "Hello, world"
    with client.responses.stream(model="m", input="hi") as stream:
        assert stream.get_final_response().output_text == "Hello, world"
    assert client.models.list().data[0].id == client.models.retrieve("fake-model").id == "fake-model"
    for call, error in [(lambda: client.models.retrieve("no"), openai.NotFoundError), (lambda: client.chat.completions.create(model="m", messages=[]), openai.BadRequestError),
                        (lambda: client.responses.retrieve("resp_no"), openai.NotFoundError)]:
        with pytest.raises(error) as caught:
            call()
        assert caught.value.request_id.startswith("req_")


def test_anthropic_sdk(live: Live) -> None:
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=live.url, api_key="x", max_retries=0)
    asked = {"model": "m", "max_tokens": 9, "messages": CHAT["messages"]}
    message = client.messages.create(**asked)
    assert message.content[0].text == "Hello, world" and message._request_id.startswith("req_")
    with client.messages.stream(**asked) as stream:
        assert stream.get_final_message().content[0].text == "Hello, world"
    assert client.messages.count_tokens(model="m", messages=CHAT["messages"]).input_tokens == 3
    assert client.models.list().data[0].id == "fake-model"
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.models.retrieve("no")
    assert caught.value.request_id.startswith("req_")
    runner(live).run_error = MiladError("overloaded", "the queue is full", retry_after_s=1)
    with pytest.raises(anthropic.APIStatusError) as caught:
        client.messages.create(**asked)
    assert caught.value.status_code == 529

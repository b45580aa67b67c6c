"""The generating routes over real sockets: errors before the first byte, streams and their failures, stored responses, the SDKs."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from fake_app import APIS, BODIES, CHAT, Answer, Live, ask, error_of, fake_app, read_all, runner, serving, text_events
from milad.app.generate import _Merged
from milad.conversation import Turn
from milad.engine.base import Admitted, Fault, Token
from milad.errors import ContextOverflow, EngineFault, MiladError
from milad.events import BlockEnd, BlockStart, Delta, Failure, Finish, Progress, Started, Usage
from milad.store import Store
from milad.turn import Defaults, Prepared, Run


@pytest.fixture
def live():
    with serving(fake_app()) as live:
        yield live


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


def silence_until_told() -> tuple[Any, threading.Semaphore]:
    """(a step that lasts, what ends it when released)."""
    goes_on = threading.Semaphore(0)

    async def silence() -> None:
        while not goes_on.acquire(blocking=False):
            await asyncio.sleep(0.01)

    return silence, goes_on


@pytest.mark.parametrize("path", APIS)
def test_keepalive_while_nothing_is_said(path: str) -> None:
    """Silence, before the first text and within it, lasts until four signs of life were read."""
    silence, goes_on = silence_until_told()
    steps = [[Started(Usage(3))], silence, [BlockStart(0, "text")], [Delta(0, "x")], silence, text_events()[-1]]
    with serving(fake_app(steps, keepalive_s=0.05)) as live:
        client = http.client.HTTPConnection("127.0.0.1", live.port, timeout=20)
        client.request("POST", path, json.dumps({**BODIES[path], "stream": True}), {"Content-Type": "application/json"})
        response = client.getresponse()
        text = ""
        for n in (4, 8):
            while text.count(KEEPALIVE[path]) < n:
                text += response.readline().decode()
            goes_on.release()
        text += response.read().decode()
        assert '"x"' in text and text.endswith("\n\n")
        client.close()


@pytest.mark.parametrize("path", APIS)
def test_signs_of_life_tell_how_far_the_prompt_is_read(path: str) -> None:
    """Until the first text; chat's return_progress asks for a chunk of each step."""
    silence, goes_on = silence_until_told()
    steps = [[Progress(0, 90, 0, 2)], silence, [Started(Usage(90, 20)), Progress(50, 90, 20)], silence,
             [Progress(90, 90, 20), BlockStart(0, "text")], [Delta(0, "x")], silence, text_events()[-1]]
    with serving(fake_app(steps, keepalive_s=0.05)) as live:
        client = http.client.HTTPConnection("127.0.0.1", live.port, timeout=20)
        client.request("POST", path, json.dumps({**BODIES[path], "stream": True}), {"Content-Type": "application/json"})
        response = client.getresponse()
        text = ""
        for seen in ('{"total":90,"cache":0,"processed":0,"queued":2}', '{"total":90,"cache":20,"processed":50,"queued":0}', '"x"'):
            while seen not in text:
                text += response.readline().decode()
            goes_on.release()
        rest = response.read().decode()
        assert "prompt_progress" not in rest
        client.close()


def test_chat_tells_each_step_of_the_prompt_where_asked(live: Live) -> None:
    runner(live).steps = [[Progress(50, 90, 20)], [Started(Usage(90, 20)), Progress(90, 90, 20)], *text_events("x")[1:]]
    for asked, n in ((True, 1), (False, 0)):
        answer = ask(live, "/v1/chat/completions", {**CHAT, "stream": True, "return_progress": asked})
        assert answer.data.count(b'"prompt_progress":{"total":90,"cache":20,"processed":50,"queued":0}') == n


def test_no_keepalive_while_something_is_said() -> None:
    with serving(fake_app(text_events(*["x"] * 30), keepalive_s=2.0)) as live:
        runner(live).step_s = 0.1
        assert ask(live, "/v1/messages", {**BODIES["/v1/messages"], "stream": True}).data.count(b"event: ping") == 0


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


# From the engine to the reader


class _Engine:
    """Keeps what is submitted; `tell` is its delivery."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.cancelled: set[int] = set()

    def submit(self, request: Any) -> Any:
        self.requests.append(request)
        number = len(self.requests) - 1
        return SimpleNamespace(cancel=lambda: self.cancelled.add(number), pause=lambda: None, resume=lambda: None)

    def tell(self, number: int, *items: Any) -> None:
        if number not in self.cancelled:
            self.requests[number].sink(list(items))


def raw_run(engine: _Engine, n: int = 1) -> Run:
    """A Run of raw text over nothing but an engine."""
    model = SimpleNamespace(is_control=lambda token: False, token_bytes=lambda token: b"x")
    runner = SimpleNamespace(engine=engine, model=model, special_ids=frozenset(), remember=None, defaults=Defaults(), stop_ids=frozenset())
    return Run(runner, Prepared(Turn("completions", prompt="hi", n=n), [1], 9, "length", [None] * n, [None] * n, [None] * n))


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("early", [True, False])
def test_a_bug_on_the_way_out_is_raised_and_not_waited_for(n: int, early: bool) -> None:
    async def main() -> set[int]:
        engine = _Engine()
        run = raw_run(engine, n)
        loop = asyncio.get_running_loop()
        (loop.call_soon if early else lambda *a: loop.call_later(0.01, *a))(engine.tell, n - 1, Token(0, "text, where bytes belong"))
        with pytest.raises(TypeError):
            await asyncio.wait_for(run.read(lambda events: None), 5)
        run.close()
        return engine.cancelled

    assert asyncio.run(main()) == set(range(n))


def test_a_failure_of_one_prompt_is_the_last_word_of_all() -> None:
    """Also where it came before anything was read: the others' items lie there already."""
    async def main() -> list[Any]:
        engine = _Engine()
        runs = [raw_run(engine), raw_run(engine)]
        merged = _Merged(runs, [1, 1])
        engine.tell(0, Admitted(1, 0), Fault(EngineFault("a step failed")))
        engine.tell(1, Admitted(1, 0), Token(0, b"x"))
        got: list[Any] = []

        def reader(events: list[Any]) -> None:
            got.append(events)
            if any(isinstance(event, Failure) for _, event in events):
                merged.close()

        await asyncio.wait_for(merged.read(reader), 5)
        return got

    (events,) = asyncio.run(main())
    assert [choice for choice, _ in events] == [0, 0] and isinstance(events[-1][1], Failure)


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

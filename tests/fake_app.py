"""A Runner that yields canned events, and a server around it on a thread of its own, for tests over real sockets."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Callable, Iterator

from milad.app import App, Served, Settings
from milad.events import BlockEnd, BlockStart, Delta, Finish, Started, Usage
from milad.http import server


def text_events(*pieces: str, reason: str = "stop", n_in: int = 3) -> list[list[Any]]:
    """One engine step per piece."""
    steps: list[list[Any]] = [[Started(Usage(n_in)), BlockStart(0, "text")]]
    steps += [[Delta(0, p)] for p in pieces]
    return [*steps, [BlockEnd(0), Finish(reason, Usage(n_in, 0, len(pieces) + 1))]]


class Run:
    """turn.Run of steps; an entry that is a number is seconds of silence, one that is a function is called and awaited. The
    runner's `cancelled` is set by close before the end."""

    def __init__(self, runner: "Runner", n: int) -> None:
        self.runner, self.n = runner, n
        self.steps = iter(runner.steps() if callable(runner.steps) else runner.steps)
        self.ended = self.closed = False

    async def read(self, reader: Callable[[list[Any]], Any]) -> None:
        for step in self.steps:
            if isinstance(step, float):
                await asyncio.sleep(step)
            elif isinstance(step, Exception):
                raise step
            elif callable(step):
                await step()
            else:
                self.runner.n_pulled += 1
                if self.runner.step_s is not None:
                    await asyncio.sleep(self.runner.step_s)
                wait = reader([(c, e) for c in range(self.n) for e in step])
                if wait is not None:
                    await wait()
                if self.closed:
                    return
        self.ended = True

    def cancel(self) -> None:
        if not self.ended:
            self.runner.cancelled.set()

    def close(self) -> None:
        self.closed = True
        self.cancel()


class Runner:
    n_ctx = 4096

    def __init__(self, steps: Any = None) -> None:
        self.steps = text_events("Hello", ", ", "world") if steps is None else steps
        self.step_s: float | None = 0.0
        self.prepare_error: Exception | None = None
        self.run_error: Exception | None = None
        self.cancelled = threading.Event()
        self.n_pulled = 0
        self.turns: list[Any] = []
        self.calls: list[tuple[str, str]] = []
        info = SimpleNamespace(n_ctx_train=8192, n_vocab=100, n_embd=8, n_params=1000, file_bytes=5000, architecture="llama",
                               quantisation="Q4_1")
        self.model = SimpleNamespace(info=info, path="/models/fake.gguf", metadata=lambda key=None: "{{template}}")
        self.family = SimpleNamespace(name="chatml", thinks=False)

    def prepare(self, turn: Any, *, path: str = "", client: str = "") -> Any:
        if self.prepare_error:
            raise self.prepare_error
        self.turns.append(turn)
        self.calls.append((path, client))
        return SimpleNamespace(turn=turn)

    def count(self, turn: Any) -> int:
        return 3

    def run(self, prepared: Any) -> Run:
        if self.run_error:
            raise self.run_error
        return Run(self, prepared.turn.n)

    def tokenize(self, content: str, **options: bool) -> list[Any]:
        return [ord(c) for c in content]

    def detokenize(self, tokens: list[int]) -> str:
        return "".join(map(chr, tokens))

    def apply_template(self, turn: Any) -> tuple[str, list[int]]:
        return turn.last_text, [1, 2]


class Live:
    """A running server. `call` runs a function on its loop."""

    def __init__(self, app: Any, loop: asyncio.AbstractEventLoop, served: server.Server, port: int) -> None:
        self.app, self.loop, self.server, self.port = app, loop, served, port
        self.url = f"http://127.0.0.1:{port}"
        self.sockets: list[socket.socket] = []

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        async def on_loop() -> Any:
            result = function(*args)
            return await result if asyncio.iscoroutine(result) else result
        return asyncio.run_coroutine_threadsafe(on_loop(), self.loop).result(20)

    def connect(self, data: bytes = b"", timeout: float = 10) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self.port), timeout)
        self.sockets.append(sock)
        if data:
            sock.sendall(data)
        return sock


@contextmanager
def serving(app: Any, settings: server.Settings = server.Settings(), sockets: Any = None, ssl: Any = None) -> Iterator[Live]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    bound = sockets or server.bind_tcp("127.0.0.1", 0)

    async def start() -> server.Server:
        made = server.Server(app, settings)
        await made.listen(bound, ssl)
        return made

    made = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    live = Live(app, loop, made, (made.ports or [0])[0])
    try:
        yield live
    finally:
        for sock in live.sockets:
            sock.close()
        asyncio.run_coroutine_threadsafe(made.drain(0.0), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


def fake_app(steps: Any = None, **settings: Any) -> App:
    app = App(Settings(**settings))
    app.served = Served("fake-model", Runner(steps), "/models/fake.gguf", ("fake",), 4, 1_700_000_000)
    return app


def read_all(sock: socket.socket) -> bytes:
    """Until the other side ends the connection, orderly or not."""
    out = b""
    try:
        while True:
            data = sock.recv(65536)
            if not data:
                return out
            out += data
    except ConnectionResetError:
        return out


# Clients

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

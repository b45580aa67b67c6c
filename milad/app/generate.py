"""The routes that run the model: one way from a body to an answer, for every protocol, streamed or plain.

Everything that can be refused (body, parse, names, rendering, limits, the queue) comes before the answer's first byte; then
the head goes out at once, each engine step's frames in one write, the protocol's keepalive whenever nothing else was sent for
a while, and what fails is told in the protocol's own words. The reader's pace holds the sequence back: while the socket's
buffer is full nothing is taken from the Run, which pauses its sequences.
"""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Awaitable, Callable, TypeVar

from .. import log
from ..conversation import Turn
from ..errors import EngineFault, MiladError
from ..events import Event, Failure, Progress
from ..http import body, sse
from ..http.base import Exchange
from ..protocols.base import Encoder, Frame, Ident, Protocol
from ..turn import Reader, Wait
from .base import Served

if TYPE_CHECKING:
    from .core import App

PROGRESS_S = 5.0                             # between two lines of the log about one prompt
OFF_LOOP_BYTES = 65536                       # larger bodies are read, rendered and tokenised in a thread
LONG_MESSAGES = 100                          # so are longer conversations: a small body can go on with one
STREAM_FIELDS = (("Content-Type", sse.CONTENT_TYPE), ("Cache-Control", "no-cache"), ("X-Accel-Buffering", "no"))
_LETTERS = (b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ" * 5)[:256]

T = TypeVar("T")


class _CollectorOff:
    """The cyclic garbage collector rests while large bodies are worked on: its passes over a tree of JSON, which never has
    cycles, hold the GIL for longer than all the rest (2 MiB of nested lists: 234 ms of stall, without them 59)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._n_inside = 0
        self._was_on = False

    def __enter__(self) -> None:
        with self._lock:
            if self._n_inside == 0:
                self._was_on = gc.isenabled()
                gc.disable()
            self._n_inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._n_inside -= 1
            if self._n_inside == 0 and self._was_on:
                gc.enable()


_collector_off = _CollectorOff()
# One at a time: four bodies of 10,000 messages at once held other streams up for 200 ms, one after the other for 90 at most.
_one_at_a_time = ThreadPoolExecutor(1, "milad-body")


def _large(work: Callable[[], T]) -> T:
    """In a thread. What the work leaves behind is freed here, also what only a traceback holds."""
    with _collector_off:
        try:
            return work()
        except MiladError as e:
            e.__context__ = e.__cause__ = None
            raise e.with_traceback(None)


async def off_loop(exchange: Exchange, work: Callable[[], T], slow: bool = False) -> T:
    """`work`, in a thread where it is `slow` (the disk, a grammar) or the body is large and would hold other streams up."""
    if len(exchange.body) > OFF_LOOP_BYTES or exchange.request and exchange.request.get("content-encoding"):
        return await asyncio.get_running_loop().run_in_executor(_one_at_a_time, _large, work)
    return await asyncio.to_thread(work) if slow else work()


def is_long(turn: Turn) -> bool:
    return len(turn.messages) > LONG_MESSAGES


def new_id(prefix: str) -> str:
    return prefix + os.urandom(24).translate(_LETTERS).decode()


def read_json(app: "App", exchange: Exchange) -> dict[str, Any]:
    request = exchange.request
    return body.parse(exchange.body, request.get("content-encoding") if request else None, app.settings.body_limit)


def check_model(app: "App", name: str) -> None:
    """Unknown names get the default model, unless the setting is strict."""
    if app.settings.strict_model_names and name and name not in app.known():
        known = ", ".join(app.known())
        raise MiladError("not_found", f"the model {name[:100]!r} is not served here; served: {known}", param="model",
                         code="model_not_found")


def path_of(exchange: Exchange) -> str:
    """The path with its /v1, as scripts and logs name it."""
    path = exchange.request.path if exchange.request else ""
    return path if path.startswith("/v1/") else "/v1" + path


# Answers


async def generate(app: "App", exchange: Exchange, protocol: Protocol, *, parse: Callable[[dict[str, Any]], Turn] | None = None,
                   keep: Callable[[Turn, Ident, Encoder], Awaitable[None]] | None = None) -> None:
    """`parse` stands in for the protocol's own, and may read the disk; `keep` is awaited with a whole answer before its end is
    told."""
    app.ready()

    def parsed() -> Turn:
        turn = (parse or protocol.parse)(read_json(app, exchange))
        check_model(app, turn.model)
        return turn

    turn = await off_loop(exchange, parsed, parse is not None)
    with app.hold(turn.model) as (name, loading):
        ident = Ident(new_id(protocol.id_prefix), int(time.time()), name, new_id)
        encoder = protocol.encoder(turn, ident)
        if turn.stream and not loading.done():
            await _load_aloud(app, exchange, encoder, loading)
        try:
            served = await asyncio.shield(loading)
            run = await _submit(exchange, served, turn)
        except MiladError as error:
            if exchange.status == 0:
                raise
            exchange.end(sse.encode(encoder.failure(error)))
            return
        app.n_active += 1

        async def kept() -> None:
            if keep:
                await keep(turn, ident, encoder)

        try:
            await (_stream if turn.stream else _plain)(app, exchange, encoder, run, kept)
        finally:
            app.n_active -= 1
            run.close()
            exchange.label = usage_label(encoder)


async def _load_aloud(app: "App", exchange: Exchange, encoder: Encoder, loading: "asyncio.Future[Served]") -> None:
    """Waits for a model that is loaded for this request; a stream whose wait gets long begins, and says that it lives."""
    await asyncio.wait({loading}, timeout=app.settings.keepalive_s)
    if loading.done():
        return
    exchange.start(200, (*STREAM_FIELDS, *app.fields(exchange)))
    try:
        while not loading.done():
            exchange.write(sse.encode(encoder.keepalive()))
            await asyncio.wait({loading}, timeout=app.settings.keepalive_s)
    except asyncio.CancelledError:
        if exchange.draining:
            exchange.end(sse.encode(encoder.failure(MiladError("unavailable", SHUTTING_DOWN, retry_after_s=5))))
        raise


async def _submit(exchange: Exchange, served: Served, turn: Turn) -> Any:
    """Rendered, tokenised, checked and queued."""
    def prepare() -> list[Any]:
        turns = [replace(turn, prompt=p, prompts=()) for p in turn.prompts] or [turn]
        return [served.runner.prepare(t, path=path_of(exchange), client=exchange.client) for t in turns]

    # a small schema or regex can take a second to compile
    prepared = await off_loop(exchange, prepare, bool(turn.tools) or turn.format.kind != "text" or is_long(turn))
    exchange.body = b""                      # generations last; what was parsed need not
    return submit(served.runner, prepared)


def submit(runner: Any, prepared: list[Any]) -> Any:
    """The run of all prompts, choices numbered prompt by prompt. Raises MiladError where one can't be queued."""
    if len(prepared) == 1:
        return runner.run(prepared[0])
    runs: list[Any] = []
    try:
        for one in prepared:
            runs.append(runner.run(one))
    except MiladError:
        for run in runs:
            run.cancel()
        raise
    return _Merged(runs, [one.turn.n for one in prepared])


class _Merged:
    """Several runs as one; a failure of one ends all."""

    def __init__(self, runs: list[Any], counts: list[int]) -> None:
        self._runs = [(run, sum(counts[:i])) for i, run in enumerate(runs)]

    async def read(self, reader: Reader) -> None:
        def numbered(first: int) -> Reader:
            return lambda batch: reader([(first + choice, event) for choice, event in batch])

        await asyncio.gather(*(run.read(numbered(first)) for run, first in self._runs))

    def close(self) -> None:
        for run, _ in self._runs:
            run.close()


def usage_label(encoder: Encoder) -> str:
    """For the access log: counts only."""
    usages = [f.usage for f in encoder.folds]
    return f"{usages[0].input_tokens}+{sum(u.output_tokens for u in usages)} tokens" if usages else ""


def as_error(error: BaseException) -> MiladError:
    """What a client is told of a failure of ours. The log has the rest."""
    if isinstance(error, MiladError):
        return error
    what = "the engine failed" if isinstance(error, EngineFault) else "an internal error; the log has more"
    return MiladError("internal", what)


SHUTTING_DOWN = "the server is shutting down"


class _ProgressLog:
    """Where a request stands before its first token, for who reads the log: its place in the queue when that changes, how far a
    long prompt is read every PROGRESS_S."""

    def __init__(self, exchange: Exchange) -> None:
        self._request_id = exchange.request_id
        self._due = time.monotonic() + PROGRESS_S

    def tell(self, event: Progress) -> None:
        if event.queued:
            log.logger.info("%s: place %d in the queue", self._request_id, event.queued)
        elif event.done < event.total and time.monotonic() >= self._due:
            self._due = time.monotonic() + PROGRESS_S
            log.logger.info("%s: %d of %d prompt tokens read, %d of them from the cache", self._request_id, event.done, event.total,
                            event.cached)


async def _plain(app: "App", exchange: Exchange, encoder: Encoder, run: Any, kept: Callable[[], Awaitable[None]]) -> None:
    progress = _ProgressLog(exchange)

    def take(batch: list[tuple[int, Event]]) -> None:
        for choice, event in batch:
            if isinstance(event, Failure):
                raise event.error
            if isinstance(event, Progress):
                progress.tell(event)
            encoder.event(choice, event)

    try:
        await run.read(take)
        await kept()
    except asyncio.CancelledError:
        if not exchange.draining:
            raise
        raise MiladError("unavailable", SHUTTING_DOWN, retry_after_s=5) from None
    app.reply(exchange, encoder.body())


class _Writer:
    """A stream's way out, and its sign of life: a timer that speaks up when nothing was written for `keepalive_s`."""

    def __init__(self, exchange: Exchange, encoder: Encoder, keepalive_s: float) -> None:
        self._exchange = exchange
        self._encoder = encoder
        self._keepalive_s = keepalive_s
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()
        self._timer = self._loop.call_at(self._last + keepalive_s, self._tick)

    def send(self, frames: list[Frame]) -> None:
        if frames:
            self._last = self._loop.time()
            self._exchange.write(sse.encode(frames))

    def _tick(self) -> None:
        due = self._last + self._keepalive_s
        if self._loop.time() >= due - 0.001:
            if self._exchange.stalled:
                self._last = self._loop.time()
            else:
                self.send(self._encoder.keepalive())
            due = self._loop.time() + self._keepalive_s
        self._timer = self._loop.call_at(due, self._tick)

    def end(self, frames: list[Frame]) -> None:
        self._timer.cancel()
        self._exchange.end(sse.encode(frames))

    def close(self) -> None:
        self._timer.cancel()


async def _stream(app: "App", exchange: Exchange, encoder: Encoder, run: Any, kept: Callable[[], Awaitable[None]]) -> None:
    if exchange.status == 0:                 # else begun while its model was loaded
        exchange.start(200, (*STREAM_FIELDS, *app.fields(exchange)))
    writer = _Writer(exchange, encoder, app.settings.keepalive_s)
    progress = _ProgressLog(exchange)
    failed = False

    def take(batch: list[tuple[int, Event]]) -> Wait | None:
        nonlocal failed
        frames: list[Frame] = []
        for choice, event in batch:
            if isinstance(event, Failure):
                failed = True
                writer.end(frames + encoder.failure(event.error))
                run.close()
                return None
            if isinstance(event, Progress):
                progress.tell(event)
            frames += encoder.event(choice, event)
        writer.send(frames)
        return exchange.drain if exchange.stalled else None

    try:
        await run.read(take)
        if not failed:
            await kept()
            writer.end(encoder.end())
    except asyncio.CancelledError:
        if not exchange.draining:
            raise
        writer.end(encoder.failure(MiladError("unavailable", SHUTTING_DOWN, retry_after_s=5)))
    except Exception as error:
        log.logger.error("%s: %s: %s", exchange.request_id, type(error).__name__, error, exc_info=error)
        writer.end(encoder.failure(as_error(error)))
    finally:
        writer.close()


async def chat(app: "App", exchange: Exchange) -> None:
    await generate(app, exchange, app.protocols["chat"])


async def completions(app: "App", exchange: Exchange) -> None:
    await generate(app, exchange, app.protocols["completions"])


async def messages(app: "App", exchange: Exchange) -> None:
    await generate(app, exchange, app.protocols["messages"])


# Counting


async def count(app: "App", exchange: Exchange, protocol: Any, **resolve: Any) -> None:
    """How many prompt tokens the same request would have."""
    app.ready()

    def parsed() -> Turn:
        turn = protocol.parse_count(read_json(app, exchange), **resolve)
        check_model(app, turn.model)
        return turn

    turn = await off_loop(exchange, parsed, bool(resolve))
    with app.hold(turn.model) as (_, loading):
        served = await asyncio.shield(loading)
        n_tokens = await off_loop(exchange, lambda: served.runner.count(turn), is_long(turn))
    app.reply(exchange, protocol.count_body(n_tokens))


async def count_tokens(app: "App", exchange: Exchange) -> None:
    await count(app, exchange, app.protocols["messages"])

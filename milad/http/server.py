"""The asyncio HTTP server: sockets, deadlines, backpressure and disconnects around wire.Connection and an Application.

One Protocol object per connection pumps bytes through the wire, collects one request's body, and runs the application's
handler as a task. Rules: the client's end of stream while its request is handled is a disconnect (a closed and a half-closed
socket look the same), and cancels the handler at once; every wait for a client has a deadline; after an early error the
connection is half-closed and drained for a moment, so that the client's kernel does not throw the reply away (RFC 9112, 9.6).
It must not know routes, JSON or models.
"""

from __future__ import annotations

import asyncio
import email.utils
import socket
import ssl as ssl_module
import time
from dataclasses import dataclass
from typing import Any, Callable, Iterable

from ..errors import MiladError
from . import wire
from .base import Application, Handler, Reply
from .listen import bind_tcp, bind_unix

__all__ = ["Server", "Settings", "TimedOut", "bind_tcp", "bind_unix"]


@dataclass(frozen=True)
class Settings:
    limits: wire.Limits = wire.Limits()
    head_s: float = 10.0                      # from the first byte of a head to its last
    idle_s: float = 75.0                      # before a first and between requests
    body_grace_s: float = 10.0                # a body may take this long, and 1 s more per body_rate bytes
    body_rate: int = 4096
    stall_s: float = 300.0                    # a client that reads nothing of its answer for so long is cut off
    linger_s: float = 2.0                     # after an early error
    linger_bytes: int = 256 << 20
    max_connections: int = 512                # beyond them the longest idle one goes, or the new one is refused
    max_body_bytes: int = 256 << 20           # of all requests that are not answered yet
    pipeline_bytes: int = 65536               # read ahead of the present request
    high_water: int = 65536                   # unsent bytes of an answer at which its client counts as stalled
    shutdown_s: float = 0.5                   # for handlers' last words once a drain is over


class TimedOut(MiladError):
    """The client took too long to send its request: 408 (RFC 9110, 15.5.9)."""

    status = 408                              # type: ignore[assignment]

    def __init__(self, what: str) -> None:
        super().__init__("invalid", f"the request's {what} took too long to arrive", code="request_timeout")


class _Exchange:
    """base.Exchange over one connection."""

    def __init__(self, connection: "_Connection", request: wire.Request | None) -> None:
        self.connection = connection
        self.request = request
        self.target = connection.wire.target
        self.body = b""
        self.peer = connection.peer
        self.local = connection.local
        self.body_limit = connection.wire.body_limit
        self.request_id = self.label = ""
        self.client = connection.peer
        self.received_s = connection.loop.time()
        self.ended_s = 0.0
        self.status = self.n_sent = 0
        self.disconnected = self.draining = False
        self.ended = False

    @property
    def stalled(self) -> bool:
        return self.connection.stalled

    def reply(self, reply: Reply) -> None:
        self._reply(reply, False)

    def _reply(self, reply: Reply, close: bool) -> None:
        out = self.connection.wire
        head = out.send_head(reply.status, (*reply.fields, _date()), len(reply.body), close or self.connection.server.draining)
        self.status, self.n_sent, self.ended = reply.status, len(reply.body), True
        self.connection.write(head + out.send_data(reply.body) + out.send_end())

    def start(self, status: int, fields: tuple[tuple[str, str], ...]) -> None:
        self.status = status
        self.connection.write(self.connection.wire.send_head(status, (*fields, _date()), None, self.connection.server.draining))

    def write(self, data: bytes) -> None:
        self.n_sent += len(data)
        self.connection.write(self.connection.wire.send_data(data))

    async def drain(self) -> None:
        if self.connection.stalled:
            await self.connection.writable()

    def end(self, data: bytes = b"") -> None:
        self.n_sent += len(data)
        self.ended = True
        out = self.connection.wire
        self.connection.write(out.send_data(data) + out.send_end())


_date_line: tuple[int, tuple[str, str]] = (0, ("Date", ""))


def _date() -> tuple[str, str]:
    """RFC 9110, 6.6.1; made once a second."""
    global _date_line
    now = int(time.time())
    if now != _date_line[0]:
        _date_line = (now, ("Date", email.utils.formatdate(now, usegmt=True)))
    return _date_line[1]


class _Connection(asyncio.Protocol):
    def __init__(self, server: "Server") -> None:
        self.server = server
        self.loop = server.loop
        self.settings = server.settings
        self.wire = wire.Connection(server.settings.limits)
        self.transport: Any = None
        self.peer = self.local = ""
        self.exchange: _Exchange | None = None
        self.task: asyncio.Task[None] | None = None
        self.stalled = False
        self._writable: asyncio.Future[None] | None = None
        self._handler: Handler | None = None
        self._refusal: Exception | None = None
        self._body: list[bytes] = []
        self._n_body = 0                      # bytes of it, counted in server.n_body_bytes
        self._n_received = 0                  # bytes since the head ended, or since lingering began
        self._body_from = 0.0
        self._lost = self._lingering = self._paused = False
        self._due = 0.0                       # loop time of the present deadline; 0: none
        self._what = ""                       # what the client is waited for: idle, head, body, stall, linger
        self._timer: asyncio.TimerHandle | None = None

    # The transport's calls

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.peer, self.local = (str(name[0]) if isinstance(name, tuple) and name else "unix"
                                 for name in map(transport.get_extra_info, ("peername", "sockname")))
        transport.set_write_buffer_limits(high=self.settings.high_water)
        n = len(self.server.connections)
        self.server.connections.add(self)
        if n >= 2 * self.settings.max_connections:
            transport.abort()
        elif n >= self.settings.max_connections and not self.server.drop_idle():
            self._refuse(MiladError("unavailable", "too many connections", retry_after_s=2))
        else:
            self._wait("idle", self.settings.idle_s)

    def data_received(self, data: bytes) -> None:
        self._n_received += len(data)
        if self._lingering:
            if self._n_received > self.settings.linger_bytes:
                self.transport.abort()
            return
        self.wire.feed(data)
        self._pump()

    def eof_received(self) -> bool:
        if self._lingering:
            return False
        self.wire.feed(b"")
        if self.task:
            self._disconnect()
            return False
        self._pump()
        return self._lingering and not self.transport.is_closing()

    def connection_lost(self, error: Exception | None) -> None:
        self._lost = True
        self.server.connections.discard(self)
        if self._timer:
            self._timer.cancel()
            self._timer = None
        self._disconnect()
        if self.task is None:
            self._drop_body()
        self.server.changed()

    def pause_writing(self) -> None:
        self.stalled = True
        self._wait("stall", self.settings.stall_s)

    def resume_writing(self) -> None:
        self.stalled = False
        if self._what == "stall" and not self.transport.is_closing():
            self._wait("", 0)
        if self._writable and not self._writable.done():
            self._writable.set_result(None)

    # Writing

    def write(self, data: bytes) -> None:
        if data and not self.transport.is_closing() and not (self.exchange and self.exchange.disconnected):
            self.transport.write(data)

    async def writable(self) -> None:
        if self.stalled and not self._lost:
            if self._writable is None or self._writable.done():
                self._writable = self.loop.create_future()
            await self._writable

    # Requests

    def _pump(self) -> None:
        """Takes events from the wire until it needs more bytes or has a whole request."""
        while not self._lost and not self._lingering:
            try:
                event = self.wire.next()
            except wire.WireError as e:
                self._refuse(e)
                return
            if event is None:
                break
            if isinstance(event, wire.Request):
                self._on_head(event)
            elif isinstance(event, wire.Data):
                if not self._refusal:
                    self._on_data(event.data)
            elif isinstance(event, wire.End):
                self._on_end()
            else:
                self._close()
                return
        if self._lost or self._lingering:
            return
        if self._refusal and self.task is None:
            self._refuse(self._refusal)
        elif self.task is not None:
            if not self._paused and self.wire.n_buffered > self.settings.pipeline_bytes:
                self._paused = True           # an unread socket shows its end only when written to: keepalives do that
                self.transport.pause_reading()
        elif self.exchange is None and not self.wire.idle and self._what != "head":
            self._wait("head", self.settings.head_s)

    def _on_head(self, request: wire.Request) -> None:
        exchange = self.exchange = _Exchange(self, request)
        self._refusal, self._handler = None, None
        self._n_received, self._body_from = 0, self.loop.time()
        try:
            self._handler = self.server.application.begin(exchange)
        except Exception as e:                # refuse() answers any of them
            self._refusal = e
            return
        self.wire.body_limit = exchange.body_limit
        if request.n_body != 0:
            self._wait("body", self.settings.body_grace_s)
            self.write(self.wire.send_continue())

    def _on_data(self, data: bytes) -> None:
        self._body.append(data)
        self._n_body += len(data)
        self.server.n_body_bytes += len(data)
        if self.server.n_body_bytes > self.settings.max_body_bytes:
            self._drop_body()
            self._refusal = MiladError("overloaded", "the server holds too many unanswered requests", retry_after_s=5)

    def _drop_body(self) -> None:
        self.server.n_body_bytes -= self._n_body
        self._body, self._n_body = [], 0

    def _on_end(self) -> None:
        exchange = self.exchange
        assert exchange is not None
        self._wait("", 0)
        if self._refusal or not self._handler:
            self._reply_error(exchange, self._refusal or RuntimeError("no handler"), False)
            self._finish(exchange)
            return
        exchange.body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body = []                       # _n_body stays counted until the answer ends
        self.task = self.loop.create_task(self._run(self._handler, exchange))
        self.task.add_done_callback(lambda _: self._finish(exchange))  # also for a task cancelled before its first step

    async def _run(self, handler: Handler, exchange: _Exchange) -> None:
        try:
            await handler(exchange)
            if not exchange.ended and not exchange.disconnected:
                raise RuntimeError("a handler left without an answer")
        except asyncio.CancelledError:
            pass                              # ours: _disconnect or drain
        except Exception as e:
            if exchange.status == 0:
                self._reply_error(exchange, e, False)
            else:
                self.server.application.refuse(exchange, e)  # for its log line

    def _reply_error(self, exchange: _Exchange, error: Exception, close: bool) -> None:
        exchange._reply(self.server.application.refuse(exchange, error), close)

    def _finish(self, exchange: _Exchange) -> None:
        """An answer has ended, well or not: on to the next request, or close."""
        self.exchange = self.task = None
        self._drop_body()
        self._refusal, self._handler = None, None
        exchange.ended_s = self.loop.time()
        self.server.application.done(exchange)
        self.server.changed()
        if self._lost:
            return
        if not exchange.ended or exchange.disconnected:
            self.transport.abort()            # a cut answer must not look whole
        elif not self.wire.keep_alive or self.server.draining:
            self._close()
        else:
            self.wire.start_next()
            self._wait("idle", self.settings.stall_s if self.stalled else self.settings.idle_s)
            if self._paused:
                self._paused = False
                self.transport.resume_reading()
            if self.wire.n_buffered:
                self.loop.call_soon(self._pump)

    def _refuse(self, error: Exception) -> None:
        """Answers before the request is read, and closes; nothing more can be understood on this connection."""
        exchange = self.exchange or _Exchange(self, self.wire.request)
        self._reply_error(exchange, error, True)
        self.exchange, self._refusal = None, None
        self._drop_body()
        exchange.ended_s = self.loop.time()
        self.server.application.done(exchange)
        self._linger()

    def _disconnect(self) -> None:
        if self.exchange:
            self.exchange.disconnected = True
        if self.task:
            self.task.cancel()
        if self._writable and not self._writable.done():
            self._writable.set_result(None)

    # Ends

    def _close(self) -> None:
        """Once what was written is sent."""
        if self.wire.n_buffered:
            self._linger()
            return
        self.transport.close()
        if not self._lost and self.transport.get_write_buffer_size():
            self._wait("stall", self.settings.stall_s)

    def _linger(self) -> None:
        if self._lost or self._lingering:
            return
        self._lingering, self._n_received = True, 0
        self._wait("linger", self.settings.linger_s)
        if self.transport.is_closing():
            return
        if not self.transport.can_write_eof():
            self.transport.close()            # TLS says goodbye itself
            return
        try:
            self.transport.write_eof()
        except OSError:
            self.transport.abort()
            return
        if self._paused:
            self._paused = False
            self.transport.resume_reading()

    # Deadlines: one lazy timer

    def _wait(self, what: str, seconds: float) -> None:
        """From now on the client is waited for, for so long; what "": nothing is."""
        self._what = what
        self._due = self.loop.time() + seconds if what else 0.0
        if what and (self._timer is None or self._timer.when() > self._due):
            if self._timer:
                self._timer.cancel()
            self._timer = self.loop.call_at(self._due, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if self._lost or not self._what:
            return
        if self._what == "body":
            self._due = self._body_from + self.settings.body_grace_s + self._n_received / self.settings.body_rate
        if self.loop.time() < self._due - 0.001:
            self._timer = self.loop.call_at(self._due, self._tick)
        elif self._what == "head" or self._what == "body":
            self._refuse(TimedOut(self._what))
        elif self._what == "idle" and not self.transport.get_write_buffer_size():
            self.transport.close()
        else:
            self.transport.abort()

    @property
    def idle_until(self) -> float | None:
        """The loop time at which it ends of itself; None while it is in use."""
        return self._due if self._what == "idle" and not self._lost and not self.transport.is_closing() else None

    def drop(self) -> None:
        self.server.connections.discard(self)  # now, not when the loop comes to it: its place is for one that came meanwhile
        self.transport.close()

    def drain(self) -> None:
        """The daemon ends: idle connections close now, busy ones after their answer."""
        if self.task is None and self.exchange is None and not self._lingering and self.wire.idle:
            self.transport.close()

    def stop(self) -> None:
        """The time for the answer is over: its handler may say a last word."""
        if self.task:
            if self.exchange:
                self.exchange.draining = True
            self.task.cancel()
        elif not self._lingering:
            self.transport.close()


class Server:
    """Listens and serves until drain(). One event loop's thread."""

    def __init__(self, application: Application, settings: Settings = Settings()) -> None:
        self.application = application
        self.settings = settings
        self.loop = asyncio.get_running_loop()
        self.connections: set[_Connection] = set()
        self.n_body_bytes = 0
        self.draining = False
        self._listeners: list[asyncio.Server] = []
        self._change: asyncio.Future[None] | None = None

    async def listen(self, sockets: Iterable[socket.socket], ssl: ssl_module.SSLContext | None = None) -> None:
        """Serves on bound sockets (bind_tcp, bind_unix, or a service manager's)."""
        for sock in sockets:
            sock.setblocking(False)
            self._listeners.append(await self.loop.create_server(
                lambda: _Connection(self), sock=sock, ssl=ssl, backlog=256,
                ssl_handshake_timeout=self.settings.head_s if ssl else None))

    @property
    def ports(self) -> list[int]:
        return [s.getsockname()[1] for one in self._listeners for s in one.sockets if isinstance(s.getsockname(), tuple)]

    def drop_idle(self) -> bool:
        """Makes room by closing the connection that is idle for longest; False where none is."""
        idle = [(due, id(c), c) for c in self.connections if (due := c.idle_until) is not None]
        if idle:
            min(idle)[2].drop()
        return bool(idle)

    def changed(self) -> None:
        if self._change and not self._change.done():
            self._change.set_result(None)

    async def _until(self, done: Callable[[], bool], timeout_s: float) -> None:
        end = self.loop.time() + timeout_s
        while not done() and self.loop.time() < end:
            self._change = self.loop.create_future()
            await asyncio.wait([self._change], timeout=max(end - self.loop.time(), 0))

    async def drain(self, timeout_s: float) -> None:
        """Accepts no more, lets answers end for `timeout_s`, then cancels their handlers, and closes everything."""
        self.draining = True
        for listener in self._listeners:
            listener.close()
        for connection in list(self.connections):
            connection.drain()
        await self._until(lambda: not any(c.task or c.exchange for c in self.connections), timeout_s)
        for connection in list(self.connections):
            connection.stop()
        await self._until(lambda: not self.connections, self.settings.shutdown_s)
        for connection in list(self.connections):
            connection.transport.abort()
        await self._until(lambda: not self.connections, 0.2)

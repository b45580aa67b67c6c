"""A small application around http.server, for tests of the server itself over real sockets."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
import time
from typing import Any

from milad.errors import MiladError
from milad.http import server
from milad.http.base import Exchange, Reply

# Deadlines that no test waits for, however busy the machine; tests of deadlines use HASTY ones.
CALM = server.Settings(head_s=60, idle_s=60, body_grace_s=60, linger_s=1, stall_s=60, shutdown_s=1)
HASTY = server.Settings(head_s=0.3, idle_s=0.5, body_grace_s=0.3, linger_s=0.5, stall_s=0.5)
GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"


class Echo:
    """An application: / answers with the body, /slow waits, /stream writes for ever, /burst
    many pieces at once when told to, /bug raises, /early refuses by its head."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()
        self.entered = threading.Event()
        self.go = threading.Event()
        self.n_written = 0
        self.finished: list[Any] = []
        self.errors: list[Exception] = []

    def begin(self, exchange: Exchange) -> Any:
        path = exchange.request.path
        if path == "/early":
            raise MiladError("forbidden", "no")
        return getattr(self, path.strip("/") or "echo")

    def refuse(self, exchange: Exchange, error: Exception) -> Reply:
        self.errors.append(error)
        return Reply(getattr(error, "status", 500), (("Content-Type", "text/plain"),), str(error).encode())

    def done(self, exchange: Exchange) -> None:
        self.finished.append(exchange)

    async def echo(self, exchange: Exchange) -> None:
        exchange.reply(Reply(200, (), exchange.body or b"hello"))

    async def later(self, exchange: Exchange) -> None:
        await asyncio.sleep(0.02)
        await self.echo(exchange)

    async def slow(self, exchange: Exchange) -> None:
        self.entered.set()
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            self.cancelled.set()
            if exchange.draining:
                exchange.reply(Reply(503, (), b"bye"))
                return
            raise

    async def stream(self, exchange: Exchange) -> None:
        exchange.start(200, (("Content-Type", "text/plain"),))
        self.entered.set()
        try:
            while True:
                exchange.write(b"x" * 10_000)
                self.n_written += 10_000
                await exchange.drain()
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled.set()
            if exchange.draining:
                exchange.end(b"bye")
                return
            raise

    async def burst(self, exchange: Exchange) -> None:
        exchange.start(200, ())
        self.entered.set()
        self.go.wait(10)
        for _ in range(50):
            exchange.write(b"x")
        exchange.end()

    async def three(self, exchange: Exchange) -> None:
        exchange.start(200, ())
        for piece in (b"one", b"two", b"three"):
            exchange.write(piece)
            await asyncio.sleep(0.01)
        exchange.end()

    async def big(self, exchange: Exchange) -> None:
        exchange.reply(Reply(200, (), b"x" * 30_000_000))

    async def bug(self, exchange: Exchange) -> None:
        raise KeyError("a bug")

    async def cut(self, exchange: Exchange) -> None:
        exchange.start(200, ())
        exchange.write(b"part")
        raise KeyError("a bug")

    async def silent(self, exchange: Exchange) -> None:
        return None


def status_of(data: bytes) -> int:
    assert data.startswith(b"HTTP/1.1 "), data[:100]
    return int(data[9:12])


def reset(sock: socket.socket) -> None:
    """Closes with RST instead of FIN."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def until(condition, what: str = "") -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, what or "in vain"
        time.sleep(0.005)

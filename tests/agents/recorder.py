"""A relay between an agent and a server that keeps every request and answer: the outside view of what an agent does.

Bytes pass unchanged both ways and as they come; a side that closes closes the other. What passed is read as HTTP afterwards.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Exchange:
    """One request and its answer."""
    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    status: int = 0
    answer: bytes = b""
    began: float = 0.0

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def usage(self) -> tuple[int, int]:
        """(prompt tokens, of which cached) as the answer told the agent, whatever the API."""
        total = cached = 0
        for value in _objects(self.answer):
            for usage in (value.get("usage"), (value.get("message") or {}).get("usage"), (value.get("response") or {}).get("usage")):
                if not usage:
                    continue
                if "prompt_tokens" in usage:
                    total, cached = usage["prompt_tokens"], (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
                elif "input_tokens_details" in usage:
                    total, cached = usage["input_tokens"], usage["input_tokens_details"].get("cached_tokens", 0)
                elif "input_tokens" in usage:
                    cached = usage.get("cache_read_input_tokens") or 0
                    total = usage["input_tokens"] + cached
        return total, cached


def _objects(data: bytes) -> list[dict[str, Any]]:
    """The JSON objects of a body or of an SSE stream."""
    found = []
    for line in data.decode("utf-8", "replace").splitlines():
        text = line[6:] if line.startswith("data: ") else line
        if text.startswith("{"):
            try:
                found.append(json.loads(text))
            except ValueError:
                pass
    return [v for v in found if isinstance(v, dict)]


@dataclass
class _Connection:
    sent: bytearray = field(default_factory=bytearray)
    got: bytearray = field(default_factory=bytearray)
    began: float = 0.0


class Recorder:
    """`url` is where agents go; everything reaches `host`:`port`."""

    def __init__(self, host: str, port: int) -> None:
        self._to = (host, port)
        self._connections: list[_Connection] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            kept = _Connection(began=time.monotonic())
            self._connections.append(kept)
            try:
                far = socket.create_connection(self._to)
            except OSError:
                near.close()
                continue
            for source, sink, into in ((near, far, kept.sent), (far, near, kept.got)):
                source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._pump, args=(source, sink, into), daemon=True).start()

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket, into: bytearray) -> None:
        try:
            while data := source.recv(65536):
                into += data
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            for sock in (source, sink):
                try:
                    sock.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass

    def close(self) -> None:
        """Ends the accepting thread before its descriptor is free for another: it would accept there."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(5)
        self._listener.close()

    def exchanges(self) -> list[Exchange]:
        """All so far, in the order in which their connections began."""
        found = []
        for connection in list(self._connections):
            requests, answers = bytes(connection.sent), bytes(connection.got)
            while requests:
                head, _, rest = requests.partition(b"\r\n\r\n")
                first, headers = _head(head)
                body, requests = _body(headers, rest)
                method, path, *_ = (*first.split(" "), "", "")
                one = Exchange(method, path, headers, body, began=connection.began)
                while answers:
                    head, _, rest = answers.partition(b"\r\n\r\n")
                    first, headers = _head(head)
                    one.status = int(first.split(" ")[1])
                    if method == "HEAD" or one.status < 200 or one.status in (204, 304):
                        answers = rest
                    else:
                        one.answer, answers = _body(headers, rest, to_end=True)
                    if one.status >= 200:
                        break
                found.append(one)
        return found


def _head(head: bytes) -> tuple[str, dict[str, str]]:
    first, *lines = head.decode("latin-1").split("\r\n")
    return first, {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}


def _body(headers: dict[str, str], data: bytes, to_end: bool = False) -> tuple[bytes, bytes]:
    """(body, what follows it). A body that was cut is what there is of it."""
    if "chunked" in headers.get("transfer-encoding", ""):
        body = b""
        while data:
            size, _, data = data.partition(b"\r\n")
            n = int(size.split(b";")[0] or b"0", 16)
            body += data[:n]
            data = data[n + 2:]
            if n == 0:
                break
        return body, data
    if "content-length" in headers:
        n = int(headers["content-length"])
        return data[:n], data[n:]
    return (data, b"") if to_end else (b"", data)

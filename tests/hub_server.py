"""A hub on loopback that misbehaves as told: cuts, stalls, lies about length, range and hash, redirects, errors."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Iterator


class Hub:
    """files: path -> bytes. moves: what to do with the next requests of files, one each; then plain service. seen: requests."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.listings: dict[str, Any] = {}
        self.moves: list[tuple[Any, ...]] = []
        self.seen: list[tuple[str, dict[str, str]]] = []
        self.etag: str | None = '"v1"'
        self.rate = 0.0                      # bytes a second; 0: as fast as it goes
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def add(self, repo: str, path: str, data: bytes, sha256: str | None = None) -> None:
        self.files[f"/{repo}/resolve/main/{path}"] = data
        self.listings.setdefault(repo, []).append({"type": "file", "path": path, "size": len(data), "lfs": {
            "oid": sha256 or hashlib.sha256(data).hexdigest(), "size": len(data)}})


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def _head(self, status: int, **fields: Any) -> None:
        self.send_response(status)
        for name, value in fields.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()

    def _body(self, data: bytes) -> None:
        step = max(1024, int(self.hub.rate / 50)) if self.hub.rate else len(data) or 1
        for at in range(0, len(data), step):
            self.wfile.write(data[at:at + step])
            if self.hub.rate:
                time.sleep(step / self.hub.rate)

    def do_GET(self) -> None:
        hub = self.hub
        hub.seen.append((self.path, {k.lower(): v for k, v in self.headers.items()}))
        try:
            if self.path.startswith("/api/models/"):
                self._listing()
            else:
                self._file(*(hub.moves.pop(0) if hub.moves else ("serve",)))
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _listing(self) -> None:
        repo = self.path.removeprefix("/api/models/").partition("/tree/")[0]
        if repo not in self.hub.listings:
            self._head(404, Content_Length=0)
            return
        data = json.dumps(self.hub.listings[repo]).encode()
        self._head(200, Content_Length=len(data))
        self.wfile.write(data)

    def _file(self, move: str, *arguments: Any) -> None:
        data = self.hub.files.get(self.path.partition("?")[0])
        if data is None:
            self._head(404, Content_Length=0)
            return
        if move == "status":
            self._head(arguments[0], Content_Length=0)
            return
        if move == "redirect":
            self._head(302, Location=arguments[0], Content_Length=0, **(arguments[1] if len(arguments) > 1 else {}))
            return
        start = 0
        asked = self.headers.get("Range")
        fields: dict[str, Any] = {"ETag": self.hub.etag} if self.hub.etag else {}
        if asked and move != "no_range" and self.headers.get("If-Range", self.hub.etag) == self.hub.etag:
            start = int(asked.removeprefix("bytes=").rstrip("-"))
            if start >= len(data):
                self._head(416, Content_Length=0)
                return
            shown = start + arguments[0] if move == "wrong_range" else start
            fields["Content_Range"] = f"bytes {shown}-{len(data) - 1}/{len(data)}"
        part = data[start:]
        length = len(part) + (arguments[0] if move == "length" else 0)
        if move == "chunked":
            self._head(206 if start else 200, Transfer_Encoding="chunked", **fields)
            self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
            self.wfile.write(b"0\r\n\r\n" if not arguments else b"")
            self.close_connection = bool(arguments)
            return
        self._head(206 if start else 200, Content_Length=length, **fields)
        if move in ("cut", "stall"):
            self.wfile.write(part[:arguments[0]])
            self.wfile.flush()
            if move == "stall":
                time.sleep(arguments[1])
            self.close_connection = True
        else:
            self._body(part)
            self.close_connection = move == "length"


@contextmanager
def serving() -> Iterator[Hub]:
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

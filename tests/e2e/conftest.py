"""A real daemon in its own process, for tests from the outside: scripted or with the default model."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


class Daemon:
    """`milad serve` on a free port. Its log is in `log_path`; everything it keeps lies under `home`."""

    def __init__(self, home: Path, model: Path, library: Path, script: list[dict[str, Any]] | None = None,
                 args: tuple[str, ...] = (), env: dict[str, str] | None = None, timeout_s: float = 60) -> None:
        self.home = home
        self.log_path = home / "log"
        home.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "milad", "serve", "--model", str(model), "--port", "0", *args]
        if script is not None:
            path = home / "script.jsonl"
            path.write_text("".join(json.dumps(line) + "\n" for line in script))
            command += ["--script", str(path)]
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("MILA", "XDG", "NOTIFY"))}
        clean.update({"PYTHONPATH": str(ROOT), "MILAD_LIBRARY": str(library), "HOME": str(home), **(env or {})})
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen(command, env=clean, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log)
        self.url = self._ready(timeout_s)
        self.host, _, port = self.url.removeprefix("http://").rpartition(":")
        self.port = int(port)

    def _ready(self, timeout_s: float) -> str:
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            found = re.search(r" at (http://\S+?):(\d+): ", self.log)
            if found:
                return f"{found[1]}:{found[2]}"
            if self.process.poll() is not None:
                break
            time.sleep(0.02)
        self.process.kill()
        raise AssertionError(f"the daemon did not get ready:\n{self.log}")

    @property
    def log(self) -> str:
        return self.log_path.read_text("utf-8", "replace")

    def request(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None,
                timeout_s: float = 60) -> tuple[int, dict[str, str], bytes]:
        """(status, headers in lower case, body). A body that is no bytes goes as JSON."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)
        sent = dict(headers or {})
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
        if body is not None and "content-type" not in map(str.lower, sent):
            sent["Content-Type"] = "application/json"
        try:
            connection.request(method, path, body, sent)
            reply = connection.getresponse()
            return reply.status, {k.lower(): v for k, v in reply.getheaders()}, reply.read()
        finally:
            connection.close()

    def json(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        status, _, data = self.request(method, path, body, headers)
        return status, json.loads(data)

    def events(self, path: str, body: Any, headers: dict[str, str] | None = None) -> list[tuple[str, Any]]:
        """The SSE events of a streamed answer: (event name or "", parsed data or "[DONE]")."""
        status, _, data = self.request("POST", path, body, headers)
        assert status == 200, data[:500]
        return parse_sse(data)

    def stop(self, timeout_s: float = 10) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                raise AssertionError(f"SIGTERM did not end the daemon:\n{self.log}") from None
        return self.process.returncode


def parse_sse(data: bytes) -> list[tuple[str, Any]]:
    found = []
    for block in data.decode("utf-8").split("\n\n"):
        name, text = "", []
        for line in block.split("\n"):
            if line.startswith("event: "):
                name = line[7:]
            elif line.startswith("data: "):
                text.append(line[6:])
        if text:
            joined = "\n".join(text)
            found.append((name, joined if joined == "[DONE]" else json.loads(joined)))
    return found


@pytest.fixture(scope="session")
def start(library: Path, default_model: Path, tmp_path_factory: pytest.TempPathFactory):
    """start(script=None, args=(), model=None, env=None) -> Daemon; all end with the session."""
    running: list[Daemon] = []

    def make(script: list[dict[str, Any]] | None = None, args: tuple[str, ...] = (), model: Path | None = None,
             env: dict[str, str] | None = None) -> Daemon:
        daemon = Daemon(tmp_path_factory.mktemp("daemon"), model or default_model, library, script, args, env)
        running.append(daemon)
        return daemon

    yield make
    for daemon in running:
        daemon.process.kill()
        daemon.process.wait()


@pytest.fixture(scope="session")
def real(start) -> Daemon:
    """The default model, computed."""
    return start()

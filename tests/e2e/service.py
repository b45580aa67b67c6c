"""The daemon as a service manager sees it: its own process, a notify socket, keys, certificates; scripted, so quick to start."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable, Iterator

import pytest

from milad.cli import main as cli

ROOT = Path(__file__).resolve().parent.parent.parent
CHAT = {"messages": [{"role": "user", "content": "the secret plan"}]}
SLOW_CHAT = {"messages": [{"role": "user", "content": "slow"}], "stream": True}
SLOW = [{"output": "word " * 400, "when": {"last": "slow"}, "token_delay_ms": 20}, {"output": "Hello there.", "when": {"last": "^(?!slow)"}}]


class Service:
    """`milad serve` under a notify socket; `args` after --script and --port 0. Use as a context manager."""

    def __init__(self, home: Path, model: Path | None, library: Path, *args: str, script: Any = None,
                 env: dict[str, str] | None = None, fds: list[int] = [], ready: bool = True,
                 preexec: Callable[[], None] | None = None) -> None:
        self.home = home
        home.mkdir(parents=True, exist_ok=True)
        self.notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        path = f"/tmp/milad-test-{os.getpid()}-{id(self):x}"            # a socket's path has 107 bytes at most
        self.notify.bind(path)
        self.path = path
        self.messages: list[str] = []
        command = [sys.executable, "-m", "milad", "serve"] + (["--model", str(model)] if model else [])
        if "--port" not in args:
            command += ["--port", "0"]
        if script is not False:                # False: the model computes
            (home / "script.jsonl").write_text("".join(json.dumps(line) + "\n" for line in script or SLOW))
            command += ["--script", str(home / "script.jsonl")]
        command += args
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("MILA", "XDG", "NOTIFY", "LISTEN"))}
        clean.update(PYTHONPATH=str(ROOT), MILAD_LIBRARY=str(library), HOME=str(home), NOTIFY_SOCKET=path, **(env or {}))

        def prepare() -> None:
            for i, fd in enumerate(fds):
                os.dup2(fd, 3 + i)
            if preexec:
                preexec()

        if fds:                                # the pid is known in the child only
            command = ["/bin/sh", "-c", 'LISTEN_PID=$$ exec "$@"', "sh", *command]
            clean["LISTEN_FDS"] = str(len(fds))
        with open(home / "stderr", "wb") as log:
            self.process = subprocess.Popen(command, env=clean, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log,
                                            preexec_fn=prepare, pass_fds=[3 + i for i in range(len(fds))])
        if ready:
            self.wait("READY=1")

    def __enter__(self) -> "Service":
        return self

    def __exit__(self, *_: Any) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.notify.close()
        os.unlink(self.path)

    @property
    def log(self) -> str:
        return (self.home / "stderr").read_text("utf-8", "replace")

    def wait(self, word: str, timeout_s: float = 30) -> str:
        """The first message with `word` in it that came since the last wait."""
        end = time.monotonic() + timeout_s
        self.notify.settimeout(0.2)
        while time.monotonic() < end:
            try:
                self.messages.append(self.notify.recv(65536).decode())
            except TimeoutError:
                if self.process.poll() is not None:
                    break
                continue
            if word in self.messages[-1]:
                return self.messages[-1]
        raise AssertionError(f"no {word}; {self.messages}\n{self.log}")

    def wait_log(self, word: str, path: Path | None = None, timeout_s: float = 20) -> str:
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            text = path.read_text() if path and path.exists() else self.log if not path else ""
            if word in text:
                return text
            time.sleep(0.02)
        raise AssertionError(f"{word!r} is not in the log:\n{self.log}")

    @property
    def port(self) -> int:
        status = next(m for m in self.messages if "READY=1" in m)
        return int(status.rpartition(":")[2].split()[0])

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def reload(self) -> None:
        self.signal(signal.SIGHUP)
        self.wait("READY=1")

    def end(self, timeout_s: float = 15) -> int:
        if self.process.poll() is None:
            self.signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    def ask(self, path: str, body: Any = None, headers: dict[str, str] | None = None, *, unix: str | None = None,
            tls: ssl.SSLContext | None = None, port: int | None = None) -> tuple[int, bytes]:
        connection = connect(port or (0 if unix else self.port), unix, tls)
        sent = {"Content-Type": "application/json", **(headers or {})} if body is not None else headers or {}
        try:
            connection.request("POST" if body is not None else "GET", path, None if body is None else json.dumps(body), sent)
            reply = connection.getresponse()
            return reply.status, reply.read()
        finally:
            connection.close()


@pytest.fixture
def start(tmp_path: Path, default_model: Path, library: Path) -> Iterator[Callable[..., Service]]:
    """start(*args, **Service's) -> Service, in a folder of its own; all end with the test. For a module to import."""
    running: list[Service] = []

    def make(*args: str, **options: Any) -> Service:
        running.append(Service(tmp_path / f"home{len(running)}", default_model, library, *args, **options))
        return running[-1]

    yield make
    for one in running:
        one.__exit__()


def connect(port: int, unix: str | None = None, tls: ssl.SSLContext | None = None) -> http.client.HTTPConnection:
    if unix:
        connection = http.client.HTTPConnection("localhost", timeout=30)
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(30)
        connection.sock.connect(unix)
        return connection
    if tls:
        return http.client.HTTPSConnection("localhost", port, timeout=30, context=tls)
    return http.client.HTTPConnection("127.0.0.1", port, timeout=30)


def certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """A self-signed certificate for localhost and its key, by openssl."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
                    "-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", key, "-out", cert],
                   check=True, capture_output=True)
    return cert, key


def trusting(cert: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(cert))


def make_key(keys_file: Path, name: str, *args: str) -> str:
    """`milad key add`'s output."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        assert cli.main(["key", "add", name, "--keys-file", str(keys_file), *args]) == 0
    return out.getvalue().strip()

"""Over HTTP: start-up, memory, time to the first token of a long chat, streams side by side; milad and llama-server in turn."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Iterator

from . import peer


class Server:
    """A server process: where it answers, its memory and processor time."""

    def __init__(self, process: subprocess.Popen, port: int) -> None:
        self.process, self.port = process, port

    def resident(self) -> int:
        with open(f"/proc/{self.process.pid}/status") as f:
            return next(int(line.split()[1]) * 1024 for line in f if line.startswith("VmRSS"))

    def cpu_s(self) -> float:
        """Processor time, the kernel's part included."""
        return sum(self.cpu_parts_s())

    def cpu_parts_s(self) -> tuple[float, float]:
        """(user, kernel)."""
        with open(f"/proc/{self.process.pid}/stat") as f:
            fields = f.read().rsplit(")", 1)[1].split()
        return tuple(int(f) / os.sysconf("SC_CLK_TCK") for f in fields[11:13])  # type: ignore[return-value]

    def loop_s(self) -> float:
        """Processor time of the first thread, which is the event loop's."""
        with open(f"/proc/{self.process.pid}/task/{self.process.pid}/schedstat") as f:
            return int(f.read().split()[0]) / 1e9

    def post(self, path: str, body: dict[str, Any]) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        if reply.status != 200:
            raise RuntimeError(f"{path}: {reply.status} {reply.read(300)!r}")
        reply.keep = connection  # type: ignore[attr-defined]
        return reply

    def first_token_s(self, messages: list[dict[str, str]], n: int = 1) -> tuple[float, str]:
        """(seconds to the first text, the whole text) of a streamed greedy chat."""
        start, first, text = time.perf_counter(), 0.0, ""
        for line in self.post("/v1/chat/completions", {"messages": messages, "max_tokens": n, "temperature": 0, "stream": True}):
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:]).get("choices", ()):
                    piece = choice.get("delta", {}).get("content") or ""
                    if piece and not first:
                        first = time.perf_counter() - start
                    text += piece
        return first or time.perf_counter() - start, text


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as s:
        return s.getsockname()[1]


def _wait(server: Server, path: str) -> float:
    start = time.perf_counter()
    while server.process.poll() is None:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
            connection.request("GET", path)
            if connection.getresponse().status == 200:
                return time.perf_counter() - start
        except OSError:
            pass
        time.sleep(0.005)
    raise RuntimeError("the server ended before it was ready")


@contextlib.contextmanager
def _running(command: list[str], port: int, env: dict[str, str] | None = None) -> Iterator[tuple[Server, float]]:
    """The server and its time to be ready; ended with the block."""
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    server = Server(process, port)
    try:
        yield server, _wait(server, "/health")
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def milad(file: Path, *args: str, home: str | None = None) -> Iterator[tuple[Server, float]]:
    """A fresh daemon, with its time to be ready. home: keep its caches there."""
    with contextlib.ExitStack() as stack:
        folder = home or stack.enter_context(tempfile.TemporaryDirectory())
        port = free_port()
        env = {k: v for k, v in os.environ.items() if not k.startswith(("XDG", "MILA"))}
        if "MILAD_LIBRARY" in os.environ:
            env["MILAD_LIBRARY"] = os.environ["MILAD_LIBRARY"]
        env.update(HOME=folder, PYTHONPATH=str(peer.ROOT))
        yield stack.enter_context(_running([sys.executable, "-m", "milad", "serve", "--model", str(file), "--port", str(port),
                                            "--threads", "2", "--log-level", "warning", *args], port, env))


@contextlib.contextmanager
def llama_server(file: Path, *args: str) -> Iterator[tuple[Server, float]]:
    port = free_port()
    with _running([str(peer.program("llama-server")), "-m", str(file), "--port", str(port), "-t", "2", *args], port) as running:
        yield running


def long_chat(n_words: int = 3716) -> list[dict[str, str]]:
    """5,809 tokens of SmolLM2's, template included."""
    words = "the quick brown fox jumps over a lazy dog while seven wizards brew potions near ancient rivers".split()
    text = " ".join(f"{words[i * 7 % len(words)]}{'.' if i % 13 == 12 else ''}" if i % 4 else words[i * 11 % len(words)] + str(i)
                    for i in range(n_words * 3 // 4))
    return [{"role": "system", "content": "You answer briefly."}, {"role": "user", "content": text + "\nSummarise this."}]


def chat(server: Server) -> dict[str, float]:
    """Seconds to the first token: cold, exact repeat, next turn."""
    messages = long_chat()
    cold, answer = server.first_token_s(messages, 24)
    repeat = min(server.first_token_s(messages, 1)[0] for _ in range(3))
    more = messages + [{"role": "assistant", "content": answer}, {"role": "user", "content": "And in one word?"}]
    turn, _ = server.first_token_s(more, 8)
    return {"cold_s": cold, "repeat_s": repeat, "next_turn_s": turn}


def streams(server: Server, n: int, tokens: int = 96) -> float:
    """Tokens/s of n different chats generating at once, prompts included in the time."""
    counts = [0] * n

    def one(i: int) -> None:
        body = {"prompt": f"{i} bottles of beer on the wall, {i} bottles of beer.", "max_tokens": tokens, "temperature": 0.8,
                "seed": i, "logit_bias": {"0": -100, "2": -100}, "stream": False}
        counts[i] = json.loads(server.post("/v1/completions", body).read())["usage"]["completion_tokens"]
    threads = [threading.Thread(target=one, args=(i,)) for i in range(n)]
    start = time.perf_counter()
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return sum(counts) / (time.perf_counter() - start)


def idle_cpu(server: Server, seconds: float = 2.0) -> float:
    before = server.cpu_s()
    time.sleep(seconds)
    return (server.cpu_s() - before) / seconds


def python_cost(file: Path, path: str, body: dict[str, Any], tokens: int = 1000, n: int = 4) -> dict[str, float]:
    """Microseconds of the daemon's processor time per streamed token, nothing computed: the scripted core, n streams, each token on
    its own as from a model (without a pace several would share an event and a write). user, kernel: the whole process, the engine's
    sleeps between tokens included; loop: the event loop's thread alone, from the engine's token to the bytes on the socket."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.jsonl"
        text = ("word " * tokens).strip()
        script.write_text(json.dumps({"output": text, "token_delay_ms": 3}) + "\n")
        with milad(file, "--script", str(script), "--ctx", str(4 * tokens)) as (server, _):
            def one() -> int:
                return len(server.post(path, {**body, "stream": True}).read())

            def used() -> tuple[float, float, float]:
                return (*server.cpu_parts_s(), server.loop_s())
            one()
            before = used()
            threads = [threading.Thread(target=one) for _ in range(n)]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
            user, kernel, loop = ((b - a) / (tokens * n) * 1e6 for a, b in zip(before, used()))
            return {"user": user, "kernel": kernel, "loop": loop}


PROTOCOLS = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "go"}]}),
    "completions": ("/v1/completions", {"prompt": "go", "max_tokens": 6000}),
    "messages": ("/v1/messages", {"messages": [{"role": "user", "content": "go"}], "max_tokens": 6000}),
    "responses": ("/v1/responses", {"input": "go", "store": False}),
}

"""Attacks and shortages of the daemon's surroundings: floods, no descriptors, no memory, memory that must not be executable."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import threading
import time
from pathlib import Path

import pytest

import service
from service import CHAT, SLOW_CHAT, Service, start  # noqa: F401


def rss(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def open_many(port: int, n: int, data: bytes = b"") -> list[socket.socket]:
    made = []
    for _ in range(n):
        sock = socket.create_connection(("127.0.0.1", port))
        if data:
            sock.sendall(data)
        made.append(sock)
    return made


def descriptors(n: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < n <= hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (n, hard))
    if hard < n:
        pytest.skip(f"{n} descriptors are needed, {hard} are allowed")


def test_a_thousand_idle_connections_are_cheap(start) -> None:
    descriptors(1500)
    one = start("--max-connections", "1200")
    one.ask("/v1/chat/completions", CHAT)
    before = rss(one.process.pid)
    idle = open_many(one.port, 1000)
    assert one.ask("/v1/chat/completions", CHAT)[0] == 200
    assert json.loads(one.ask("/v1/milad/status")[1])["connections"] >= 1001
    assert rss(one.process.pid) - before < 20 << 20
    for sock in idle:
        sock.close()


@pytest.mark.skipif(not shutil.which("openssl"), reason="no openssl to make a certificate with")
def test_idle_tls_connections_are_cheap(start, tmp_path: Path) -> None:
    cert, key = service.certificate(tmp_path, "cert")
    one = start("--tls-cert", str(cert), "--tls-key", str(key))
    trusted = service.trusting(cert)
    one.ask("/v1/chat/completions", CHAT, tls=trusted)
    before = rss(one.process.pid)
    idle = [trusted.wrap_socket(sock, server_hostname="localhost") for sock in open_many(one.port, 200)]
    assert one.ask("/v1/chat/completions", CHAT, tls=trusted)[0] == 200
    assert rss(one.process.pid) - before < 20 << 20
    for sock in idle:
        sock.close()


def test_a_flood_beyond_the_limit_leaves_room_for_a_good_client(start) -> None:
    descriptors(1500)
    one = start("--max-connections", "64")
    slow = open_many(one.port, 50, b"POST /v1/chat/completions HTTP/1.1\r\nHost: x")      # slow heads are held, then time out
    idle = open_many(one.port, 400)
    assert one.ask("/v1/chat/completions", CHAT)[0] == 200
    for sock in slow + idle:
        sock.close()
    assert one.ask("/v1/chat/completions", CHAT)[0] == 200 and one.end() == 0


def test_out_of_descriptors_and_back(start) -> None:
    one = start("--max-connections", "100000", preexec=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)))
    many = open_many(one.port, 120)
    one.wait_log("Too many open files")
    for sock in many:
        sock.close()
    end = time.monotonic() + 20
    while True:
        try:
            if one.ask("/v1/chat/completions", CHAT)[0] == 200:
                break
        except OSError:
            pass
        assert time.monotonic() < end
        time.sleep(0.1)
    assert one.end() == 0


def test_64_streams_at_once_finish(start) -> None:
    one = start("--queue-limit", "64", script=[{"output": "word " * 20, "when": {}, "token_delay_ms": 2}])
    ends: list[bool] = []

    def stream() -> None:
        status, body = one.ask("/v1/chat/completions", {**CHAT, "stream": True})
        ends.append(status == 200 and body.endswith(b"data: [DONE]\n\n"))

    threads = [threading.Thread(target=stream) for _ in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert ends == [True] * 64


def test_clients_that_come_and_go_leave_nothing_behind(start) -> None:
    one = start()
    for i in range(40):
        stream = service.connect(one.port)
        stream.request("POST", "/v1/chat/completions", json.dumps(SLOW_CHAT), {"Content-Type": "application/json"})
        if i % 2:
            stream.getresponse().read(10)
        stream.close()
    end = time.monotonic() + 20
    while True:
        status = json.loads(one.ask("/v1/milad/status")[1])
        if not status["sequences"] and status["connections"] == 1:
            break
        assert time.monotonic() < end, status
        time.sleep(0.05)
    assert status["engine"]["n_blocks_held"] == 0 and status["engine"]["n_faults"] == 0


def test_too_little_memory_is_one_line(tmp_path: Path, default_model: Path, library: Path) -> None:
    """An address space that ends somewhere in loading: exit code 1 and a line, no trace, no signal; or it is enough."""
    codes = set()
    for limit_mb in (160, 300, 420, 2000):
        limit = limit_mb << 20
        with Service(tmp_path / f"small{limit_mb}", default_model, library, "--ctx", "512", "--kv-cache-disk", "0", script=False,
                     ready=False, preexec=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit))) as one:
            try:
                one.wait("READY=1")
                codes.add(one.end())
            except AssertionError:
                code = one.process.wait(5)
                codes.add(code)
                assert code == 1 and "Traceback" not in one.log and "milad: " in one.log, (limit_mb, code, one.log)
    assert codes == {0, 1}


def test_memory_that_must_stay_unexecutable(start) -> None:
    """systemd's MemoryDenyWriteExecute: nothing of milad asks for writable and executable memory (prctl PR_SET_MDWE, Linux 6.3)."""
    import ctypes
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(66, 0, 0, 0, 0) < 0:          # PR_GET_MDWE
        pytest.skip("this kernel has no PR_SET_MDWE")

    def preexec() -> None:
        if libc.prctl(65, 1, 0, 0, 0) != 0:     # PR_SET_MDWE, PR_MDWE_REFUSE_EXEC_GAIN
            os._exit(99)

    one = start(preexec=preexec)
    assert one.ask("/v1/chat/completions", CHAT)[0] == 200 and one.end() == 0

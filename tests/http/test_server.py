"""The asyncio server over real sockets: keep-alive, deadlines, disconnects, backpressure, hostile clients, drain."""

from __future__ import annotations

import http.client
import random
import socket
import subprocess
import threading
import time
from dataclasses import replace

import pytest

from echo_app import CALM, GET, HASTY, Echo, reset, status_of, until
from fake_app import Live, read_all, serving
from milad.errors import MiladError
from milad.http import wire


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
def live(echo: Echo):
    with serving(echo, CALM) as live:
        yield live


@pytest.fixture
def hasty(echo: Echo):
    with serving(echo, HASTY) as live:
        yield live


# Clients that behave


def test_http_client_keeps_one_connection(live: Live) -> None:
    client = http.client.HTTPConnection("127.0.0.1", live.port, timeout=5)
    client.request("GET", "/")
    sock = client.sock
    assert client.getresponse().read() == b"hello"
    for body in (b"abc", b"x" * 3_000_000, b""):
        client.request("POST", "/", body)
        assert client.getresponse().read() == (body or b"hello")
    client.request("POST", "/", iter([b"a", b"bc" * 100_000]), {"Transfer-Encoding": "chunked"}, encode_chunked=True)
    assert client.getresponse().read() == b"a" + b"bc" * 100_000
    client.request("HEAD", "/")
    response = client.getresponse()
    assert response.read() == b"" and response.getheader("Content-Length") == "5"
    client.request("GET", "/three")
    response = client.getresponse()
    assert response.getheader("Transfer-Encoding") == "chunked" and response.read() == b"onetwothree"
    assert response.getheader("Date") and client.sock is sock
    client.close()


def test_curl(live: Live) -> None:
    done = subprocess.run(["curl", "-sS", "-m", "10", "-w", "%{http_code} %{num_connects} ", live.url + "/three", live.url + "/later",
                           "-H", "Expect: 100-continue", "-d", "body"], capture_output=True, text=True)
    assert done.stdout == "onetwothree200 1 body200 0 ", done
    done = subprocess.run(["curl", "-sS", "-m", "10", "--http1.0", live.url + "/three"], capture_output=True, text=True)
    assert done.stdout == "onetwothree", done
    done = subprocess.run(["curl", "-sS", "-m", "10", "--http2-prior-knowledge", "-o", "/dev/null", live.url], capture_output=True, text=True)
    assert done.returncode != 0


def test_continue(live: Live) -> None:
    sock = live.connect(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nExpect: 100-continue\r\nConnection: close\r\n\r\n")
    assert sock.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
    sock.sendall(b"ab")
    assert read_all(sock).endswith(b"\r\n\r\nab")
    sock = live.connect(b"POST /early HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n")
    assert status_of(read_all(sock)) == 403  # the body was never asked for


def test_pipelining_keeps_the_order(live: Live) -> None:
    names = [b"later", b"", b"later", b"early", b"three"] * 5
    requests = b"".join(b"POST /%b HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n%02d" % (n, i) for i, n in enumerate(names))
    sock = live.connect(requests + b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
    out = read_all(sock)
    assert out.count(b"HTTP/1.1 200") == 21 and out.count(b"HTTP/1.1 403") == 5 and out.endswith(b"hello")
    found = [out.index(b"\r\n\r\n%02d" % i) for i, n in enumerate(names) if n in (b"later", b"")]
    assert found == sorted(found)


def test_pipelining_is_bounded(live: Live, echo: Echo) -> None:
    sock = live.connect(b"GET /slow HTTP/1.1\r\nHost: a\r\n\r\n")
    assert echo.entered.wait(5)
    sock.setblocking(False)
    n_sent, still = 0, 0
    while still < 20:
        try:
            n_sent += sock.send(GET * 1000)
            still = 0
        except BlockingIOError:
            still += 1
            time.sleep(0.01)
    assert n_sent < 40 << 20  # the kernel's buffers, not ours
    assert all(c.wire.n_buffered < 1 << 20 for c in live.server.connections)
    sock.close()


# Clients that break the rules


@pytest.mark.parametrize("data, status", [
    (b"GET / HTTP/1.1\r\n\r\n", 400), (b"GET / HTTP/1.1\nHost: a\n\n", 400), (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505), (b"\x16\x03\x01\x00", 400),
    (b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\n", 414), (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 40000, 431),
    (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999\r\n\r\n", 413), (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
    (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
])
def test_refusals_close(live: Live, data: bytes, status: int) -> None:
    sock = live.connect(data)
    out = read_all(sock)
    assert status_of(out) == status and b"\r\nConnection: close\r\n" in out
    assert live.connect(GET).recv(20).startswith(b"HTTP/1.1 200")


def test_a_good_request_before_a_bad_one_is_answered(live: Live) -> None:
    out = read_all(live.connect(GET + b"BAD\r\n\r\n"))
    assert out.count(b"HTTP/1.1 ") == 2 and b"hello" in out and b"HTTP/1.1 400" in out


@pytest.mark.parametrize("head", [b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 104857600\r\n\r\n", b"POST /early HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n6400000\r\n"])
def test_an_unread_body_does_not_lose_the_reply(live: Live, head: bytes) -> None:
    """100 MB are sent before the reply is read: without the drain the kernel answers with a reset (RFC 9112, 9.6)."""
    with serving(Echo(), replace(CALM, linger_s=10, limits=wire.Limits(body=1 << 24))) as live:
        sock = live.connect(head)
        try:
            for _ in range(100):
                sock.sendall(b"x" * (1 << 20))
        except (BrokenPipeError, ConnectionResetError):
            pytest.fail("the server stopped reading")
        sock.shutdown(socket.SHUT_WR)
        assert status_of(read_all(sock)) in (403, 413)


def test_draining_is_bounded(live: Live) -> None:
    with serving(Echo(), replace(CALM, linger_bytes=1 << 20)) as live:
        sock = live.connect(b"POST /early HTTP/1.1\r\nHost: a\r\nContent-Length: 16777216\r\n\r\n")
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            for _ in range(200):
                sock.sendall(b"x" * (1 << 20))


def test_a_client_that_never_ends_is_dropped_after_the_linger(live: Live) -> None:
    sock = live.connect(b"BAD\r\n")
    assert status_of(read_all(sock)) == 400
    until(lambda: not live.server.connections)


def test_random_bytes_do_no_harm(live: Live, echo: Echo) -> None:
    rng = random.Random(5)
    for _ in range(150):
        data = rng.randbytes(rng.randrange(60)) if rng.random() < 0.3 else bytes(
            b if rng.random() > 0.03 else rng.randrange(256) for b in GET + b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n")
        sock = live.connect(data)
        if rng.random() < 0.5:
            reset(sock)
        else:
            sock.shutdown(socket.SHUT_WR)
            out = read_all(sock)
            assert not out or out.startswith(b"HTTP/1.1 ")
            sock.close()
    assert all(isinstance(e, (wire.WireError, MiladError)) for e in echo.errors)
    until(lambda: not live.server.connections)


# Slow clients


def test_a_head_has_a_deadline(hasty: Live) -> None:
    sock = hasty.connect()
    out = b""
    try:
        for byte in GET * 10:
            sock.sendall(bytes([byte]))
            time.sleep(0.02)
            if not hasty.server.connections:
                break
    except (BrokenPipeError, ConnectionResetError):
        pass
    out = read_all(sock)
    assert status_of(out) == 408


def test_a_body_has_a_rate(hasty: Live) -> None:
    sock = hasty.connect(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n")
    assert status_of(read_all(sock)) == 408


def test_a_fast_long_body_has_time() -> None:
    with serving(Echo(), replace(CALM, body_grace_s=2, body_rate=10)) as live:
        sock = live.connect(b"POST / HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 600\r\n\r\n")
        for _ in range(6):
            sock.sendall(b"x" * 100)
            time.sleep(0.5)
        assert read_all(sock).endswith(b"x" * 600)


def test_idle_connections_end_quietly(hasty: Live) -> None:
    assert read_all(hasty.connect()) == b""
    sock = hasty.connect(GET)
    assert read_all(sock).endswith(b"hello")


# Clients that leave


@pytest.mark.parametrize("leave", ["close", "reset", "half-close"])
@pytest.mark.parametrize("path", ["slow", "stream"])
def test_leaving_cancels_the_handler(live: Live, echo: Echo, path: str, leave: str) -> None:
    sock = live.connect(b"GET /%b HTTP/1.1\r\nHost: a\r\n\r\n" % path.encode())
    assert echo.entered.wait(5)
    if leave == "close":
        sock.close()
    elif leave == "reset":
        reset(sock)
    else:
        sock.shutdown(socket.SHUT_WR)
    assert echo.cancelled.wait(5)
    until(lambda: echo.finished and not live.server.connections)
    assert echo.finished[0].disconnected and not echo.errors


def test_a_half_closed_client_gets_its_plain_answer(live: Live) -> None:
    for _ in range(50):
        sock = live.connect(GET)
        sock.shutdown(socket.SHUT_WR)
        assert read_all(sock).endswith(b"hello")


def test_leaving_during_the_body(live: Live, echo: Echo) -> None:
    sock = live.connect(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\nabc")
    sock.shutdown(socket.SHUT_WR)
    assert status_of(read_all(sock)) == 400
    reset(live.connect(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\nabc"))
    until(lambda: not live.server.connections)


# Answers


def test_a_stalled_reader_holds_only_itself_up(live: Live, echo: Echo) -> None:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", live.port))
    sock.sendall(b"GET /stream HTTP/1.1\r\nHost: a\r\n\r\n")
    assert echo.entered.wait(5)
    def written() -> int:
        before = echo.n_written
        time.sleep(0.1)
        return echo.n_written - before
    until(lambda: written() == 0)
    assert live.connect(GET).recv(100).startswith(b"HTTP/1.1 200")
    assert echo.n_written < 20 << 20
    before = echo.n_written
    got = 0
    while got < before + 1_000_000:
        got += len(sock.recv(1 << 20))
    assert echo.n_written > before  # reading on lets it go on
    reset(sock)
    assert echo.cancelled.wait(5)


def test_a_stalled_reader_is_cut_in_the_end(hasty: Live, echo: Echo) -> None:
    hasty.connect(b"GET /stream HTTP/1.1\r\nHost: a\r\n\r\n")
    assert echo.cancelled.wait(10)


@pytest.mark.parametrize("connection", [b"close", b"keep-alive"])
def test_a_reader_that_never_comes_back_is_dropped(hasty: Live, connection: bytes) -> None:
    sock = hasty.connect(b"GET /big HTTP/1.1\r\nHost: a\r\nConnection: %b\r\n\r\n" % connection)
    until(lambda: hasty.server.connections)
    until(lambda: not hasty.server.connections)
    sock.close()


def test_unanswered_bodies_are_bounded(echo: Echo) -> None:
    with serving(echo, replace(CALM, max_body_bytes=1_000_000)) as live:
        held = live.connect(b"POST /slow HTTP/1.1\r\nHost: a\r\nContent-Length: 600000\r\n\r\n" + b"x" * 600_000)
        assert echo.entered.wait(5)
        out = read_all(live.connect(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 600000\r\n\r\n" + b"x" * 600_000))
        assert status_of(out) == 429
        assert live.connect(GET).recv(20).startswith(b"HTTP/1.1 200")
        held.close()
        until(lambda: live.server.n_body_bytes == 0)
        sock = live.connect(b"POST / HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 600000\r\n\r\n" + b"x" * 600_000)
        assert status_of(read_all(sock)) == 200
        until(lambda: live.server.n_body_bytes == 0)


def test_bugs(live: Live, echo: Echo) -> None:
    sock = live.connect(b"GET /bug HTTP/1.1\r\nHost: a\r\n\r\n" + b"GET /silent HTTP/1.1\r\nHost: a\r\n\r\n" + b"GET /cut HTTP/1.1\r\nHost: a\r\n\r\n" + GET)
    out = read_all(sock)
    assert out.count(b"HTTP/1.1 500") == 2 and out.count(b"HTTP/1.1 200") == 1
    assert not out.endswith(b"0\r\n\r\n")  # a cut answer does not look whole
    assert len(echo.errors) == 3


def test_nothing_more_is_written_to_who_is_gone(echo: Echo, caplog: pytest.LogCaptureFixture) -> None:
    """Many pieces in one turn of the loop: asyncio would log a line for each."""
    with serving(echo, CALM) as live:
        sock = live.connect(b"GET /burst HTTP/1.1\r\nHost: a\r\n\r\n")
        assert echo.entered.wait(5)
        reset(sock)
        echo.go.set()
        until(lambda: echo.finished)
    assert not [r for r in caplog.records if r.name == "asyncio"]


def test_too_many_connections(echo: Echo) -> None:
    with serving(echo, replace(CALM, max_connections=3, idle_s=30)) as live:
        busy = [live.connect(b"GET /slow HTTP/1.1\r\nHost: a\r\n\r\n") for _ in range(2)]
        idle = live.connect()
        until(lambda: len(live.server.connections) == 3)
        busy.append(live.connect(b"GET /slow HTTP/1.1\r\nHost: a\r\n\r\n"))
        assert read_all(idle) == b""  # the idle one made room
        until(lambda: sum(c.task is not None for c in live.server.connections) == 3)
        assert status_of(read_all(live.connect(GET))) == 503
        busy.pop().close()
        until(lambda: len(live.server.connections) == 2)
        assert live.connect(GET).recv(20).startswith(b"HTTP/1.1 200")


# The end


def test_drain_lets_answers_end(echo: Echo) -> None:
    with serving(echo, CALM) as live:
        idle = live.connect()
        busy = live.connect(b"GET /three HTTP/1.1\r\nHost: a\r\n\r\n")
        until(lambda: any(c.task for c in live.server.connections))
        live.call(live.server.drain, 5.0)
        assert read_all(idle) == b""
        out = read_all(busy)
        assert out.endswith(b"three\r\n0\r\n\r\n") and not live.server.connections
        with pytest.raises(OSError):
            live.connect()


@pytest.mark.parametrize("path", ["slow", "stream"])
def test_drain_gives_handlers_a_last_word(echo: Echo, path: str) -> None:
    with serving(echo, CALM) as live:
        sock = live.connect(b"GET /%b HTTP/1.1\r\nHost: a\r\n\r\n" % path.encode())
        got: list[bytes] = []
        reader = threading.Thread(target=lambda: got.append(read_all(sock)))
        reader.start()
        assert echo.entered.wait(5)
        live.call(live.server.drain, 0.1)
        reader.join(5)
        assert b"bye" in got[0] and not live.server.connections and not echo.finished[0].disconnected


def test_drain_does_not_wait_for_a_stalled_reader(echo: Echo) -> None:
    with serving(echo, replace(CALM, stall_s=60)) as live:
        sock = live.connect(b"GET /stream HTTP/1.1\r\nHost: a\r\n\r\n")
        assert echo.entered.wait(5)
        live.call(live.server.drain, 0.1)
        assert not live.server.connections
        sock.close()

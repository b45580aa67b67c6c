"""Where the server listens: addresses that can't be, IPv6, Unix sockets, TLS."""

from __future__ import annotations

import http.client
import os
import socket
import ssl
import subprocess
from pathlib import Path

import pytest

from echo_app import CALM, GET, Echo, status_of, until
from fake_app import read_all, serving
from milad.errors import UsageError
from milad.http import server


@pytest.fixture
def echo() -> Echo:
    return Echo()


def test_a_port_in_use_is_one_line() -> None:
    held = server.bind_tcp("127.0.0.1", 0)[0]
    with pytest.raises(UsageError, match=r"^cannot listen on 127\.0\.0\.1:\d+: the port is in use"):
        server.bind_tcp("127.0.0.1", held.getsockname()[1])
    held.close()


@pytest.mark.parametrize("host, port", [("999.1.1.1", 1), ("no such host", 1), ("127.0.0.1", 99999), ("203.0.113.1", 0), ("\udc80", 1), ("a" * 300, 1)])
def test_bad_addresses_are_one_line(host: str, port: int) -> None:
    with pytest.raises(UsageError) as caught:
        server.bind_tcp(host, port)
    assert "\n" not in str(caught.value)


def test_ipv6(echo: Echo) -> None:
    try:
        sockets = server.bind_tcp("::1", 0)
    except UsageError as e:
        pytest.skip(str(e))
    with serving(echo, CALM, sockets) as live:
        with socket.create_connection(("::1", live.port), 5) as sock:
            sock.sendall(GET)
            assert sock.recv(20).startswith(b"HTTP/1.1 200")
        until(lambda: echo.finished)
        assert echo.finished[0].local == "::1"


def test_unix_socket(echo: Echo, tmp_path: Path) -> None:
    path = str(tmp_path / "milad.sock")
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(path)
    dead.close()
    with serving(echo, CALM, [server.bind_unix(path)]):
        assert os.stat(path).st_mode & 0o777 == 0o660
        with pytest.raises(UsageError, match="in use"):
            server.bind_unix(path)
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(path)
        sock.sendall(b"GET /stream HTTP/1.1\r\nHost: a\r\n\r\n")
        assert sock.recv(20).startswith(b"HTTP/1.1 200")
        sock.close()
        assert echo.cancelled.wait(5)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError):
        server.bind_unix(str(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "mine"
    with pytest.raises(UsageError):
        server.bind_unix(str(tmp_path / ("x" * 200)))


def test_tls(echo: Echo, tmp_path: Path) -> None:
    made = subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", "/CN=localhost",
                           "-addext", "subjectAltName=DNS:localhost", "-keyout", tmp_path / "key", "-out", tmp_path / "cert"], capture_output=True)
    if made.returncode:
        pytest.skip("no openssl to make a certificate with")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert", tmp_path / "key")
    with serving(echo, CALM, ssl=context) as live:
        client = ssl.create_default_context(cafile=str(tmp_path / "cert"))
        connection = http.client.HTTPSConnection("localhost", live.port, context=client, timeout=5)
        for path, body in (("/", b"hello"), ("/three", b"onetwothree"), ("/early", b"no")):
            connection.request("POST", path, b"")
            assert connection.getresponse().read() == body
        connection.close()
        with client.wrap_socket(live.connect(), server_hostname="localhost") as sock:
            sock.sendall(b"BAD\r\n\r\n")
            assert status_of(sock.recv(1000)) == 400
        sock = client.wrap_socket(live.connect(), server_hostname="localhost")
        sock.sendall(b"GET /slow HTTP/1.1\r\nHost: a\r\n\r\n")
        assert echo.entered.wait(5)
        sock.close()
        assert echo.cancelled.wait(5)
        assert status_of(read_all(live.connect(GET)) or b"HTTP/1.1 400") == 400  # plain HTTP to a TLS port

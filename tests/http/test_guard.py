"""Who may talk to the daemon: Host, Origin, keys."""

from __future__ import annotations

import pytest

from milad.http import guard
from milad.http.wire import Connection, Request


def request(*lines: str, version: str = "1.1") -> Request:
    connection = Connection()
    connection.feed("\r\n".join([f"GET / HTTP/{version}", *lines, "", ""]).encode("latin-1"))
    event = connection.next()
    assert isinstance(event, Request)
    return event


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "localhost.", "app.localhost:80", "127.0.0.1", "127.0.0.1:8000", "127.8.8.8", "[::1]", "[::1]:99",
                                  "192.168.7.5:8000", "milad.lan", "Milad.Lan:80", "[::ffff:127.0.0.1]"])
def test_hosts_that_are_ours(host: str) -> None:
    assert guard.host_allowed(request(f"Host: {host}"), "192.168.7.5", ("milad.lan",))


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "192.168.7.6", "", "0.0.0.0", "[::2]", "xlocalhost",
                                  "2130706433", "0x7f.1", "evil.example:8000", "milad.lan.evil", "a.milad.lan"])
def test_hosts_that_are_not(host: str) -> None:
    assert not guard.host_allowed(request(f"Host: {host}"), "192.168.7.5", ("milad.lan",))


def test_requests_without_a_host() -> None:
    assert guard.host_allowed(request(version="1.0"), "192.168.7.5", ())
    assert not guard.host_allowed(request("Host: evil.example", version="1.0"), "192.168.7.5", ())
    assert not guard.host_allowed(request("Host:", version="1.0"), "192.168.7.5", ())
    assert guard.host_allowed(request("Host: whatever"), "unix", ())


@pytest.mark.parametrize("origin, allowed, expected", [
    (None, (), True), ("null", (), False), ("http://evil.example", (), False), ("http://localhost:8000", (), True), ("https://localhost:8000", (), True),
    ("http://localhost:3000", (), False), ("http://localhost", (), False), ("http://app.example", ("http://app.example",), True),
    ("HTTP://APP.example", ("http://app.example/",), True), ("http://app.example.evil", ("http://app.example",), False), ("null", ("*",), False),
    ("http://x", ("*",), True), ("", (), False), ("http://localhost:8000, http://evil", (), False),
])
def test_origins(origin: str | None, allowed: tuple[str, ...], expected: bool) -> None:
    lines = [] if origin is None else [f"Origin: {origin}"]
    assert guard.origin_allowed(request("Host: localhost:8000", *lines), allowed) is expected


def test_two_origins_are_foreign() -> None:
    assert not guard.origin_allowed(request("Host: localhost", "Origin: http://localhost", "Origin: http://localhost"), ())


@pytest.mark.parametrize("lines, expected", [
    (["Authorization: Bearer k1"], ["k1"]), (["authorization: bearer  k2 "], ["k2"]), (["X-Api-Key: k2"], ["k2"]), (["Authorization: Basic k1"], []),
    (["Authorization: Bearer"], []), ([], []), (["Authorization: Bearer k3", "x-api-key: k1"], ["k3", "k1"]), (["x-api-key: \xff"], ["\xff"]),
    (["x-api-key:"], []),
])
def test_keys(lines: list[str], expected: list[str]) -> None:
    assert guard.keys_of(request("Host: a", *lines)) == expected

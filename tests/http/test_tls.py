"""TLS on the server's sockets: versions, large bodies both ways, handshakes that never end."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import ssl
import subprocess
from pathlib import Path

import pytest

from fake_app import CHAT, fake_app, read_all, serving, text_events
from milad.errors import UsageError
from milad.http import server, tls

pytestmark = [pytest.mark.skipif(not shutil.which("openssl"), reason="no openssl to make a certificate with"),
              pytest.mark.filterwarnings("ignore::DeprecationWarning")]          # TLS 1.1 is asked for on purpose


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-subj", "/CN=x",
                    "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert], check=True, capture_output=True)
    return cert, key


def client(cert: Path, low: ssl.TLSVersion = ssl.TLSVersion.TLSv1_2, high: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> ssl.SSLContext:
    made = ssl.create_default_context(cafile=str(cert))
    made.minimum_version, made.maximum_version = low, high
    return made


def test_versions_and_bodies(files) -> None:
    big = "x" * 1_000_000
    with serving(fake_app(text_events(big, big)), ssl=tls.context(*map(str, files))) as live:
        for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
            https = http.client.HTTPSConnection("127.0.0.1", live.port, context=client(files[0], version, version), timeout=20)
            body = {"messages": [{"role": "user", "content": big}]}
            for stream in (False, True):
                https.request("POST", "/v1/chat/completions", json.dumps({**body, "stream": stream}), {"Content-Type": "application/json"})
                data = https.getresponse().read()
                assert data.count(b"x" * 1000) >= 2000 // 2 and (not stream or data.endswith(b"[DONE]\n\n"))
            https.close()


def test_old_versions_and_plain_http_are_refused(files) -> None:
    made = tls.context(*map(str, files))
    assert made.minimum_version == ssl.TLSVersion.TLSv1_2
    with serving(fake_app(), ssl=made) as live:
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
        old.set_ciphers("ALL:@SECLEVEL=0")
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises((ssl.SSLError, ConnectionError)):
            old.wrap_socket(socket.create_connection(("127.0.0.1", live.port)))
        sock = live.connect(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert not read_all(sock).startswith(b"HTTP/")


def test_handshakes_that_never_end_are_cut(files) -> None:
    with serving(fake_app(), server.Settings(head_s=0.3), ssl=tls.context(*map(str, files))) as live:
        silent = [socket.create_connection(("127.0.0.1", live.port)) for _ in range(50)]
        silent[0].sendall(b"\x16\x03\x01")      # the beginning of a record
        https = http.client.HTTPSConnection("127.0.0.1", live.port, context=client(files[0]), timeout=20)
        https.request("POST", "/v1/chat/completions", json.dumps(CHAT), {"Content-Type": "application/json"})
        assert https.getresponse().status == 200
        for sock in silent:
            sock.settimeout(20)
            assert read_all(sock) == b""
        https.close()


def test_what_is_no_certificate(files, tmp_path: Path) -> None:
    """Among them a key with a passphrase, which must not ask at the terminal."""
    cert, key = files
    locked = tmp_path / "locked.pem"
    subprocess.run(["openssl", "ec", "-aes128", "-passout", "pass:secret", "-in", key, "-out", locked], check=True, capture_output=True)
    (tmp_path / "both.pem").write_bytes(cert.read_bytes() + key.read_bytes())
    assert tls.context(str(tmp_path / "both.pem"), None)
    for one, other in ((key, cert), (cert, None), (cert, locked), (tmp_path / "none", key), (cert, tmp_path), (Path("/dev/null"), key)):
        with pytest.raises(UsageError):
            tls.context(str(one), str(other) if other else None)

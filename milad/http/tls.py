"""TLS for the server's sockets, by the stdlib's ssl: TLS 1.2 or newer, OpenSSL's own cipher choice. UsageError names the file."""

from __future__ import annotations

import ssl
from asyncio import sslproto

from ..errors import UsageError


def context(cert: str, key: str | None) -> ssl.SSLContext:
    """A server's context. cert: PEM, the chain with the server's certificate first; key: PEM, None: in cert's file."""
    # asyncio reserves as much for each connection, 256 kB by itself: idle ones would cost ten times what they need
    sslproto.SSLProtocol.max_size = 4096
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    made.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    made.set_alpn_protocols(["http/1.1"])
    load(made, cert, key)
    return made


def load(made: ssl.SSLContext, cert: str, key: str | None) -> None:
    """Reads the files (anew): new connections get them. On an error the context keeps what it has."""
    for path in {cert, key or cert}:
        try:
            with open(path, "rb"):
                pass
        except OSError as e:
            raise UsageError(f"{path}: {e.strerror}") from None
    trial = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    for one in (trial, made):                # a mismatch of the two files would leave `made` with half of them
        try:
            # a key with a passphrase: OpenSSL would ask at the terminal
            one.load_cert_chain(cert, key, password="")
        except (ssl.SSLError, ValueError, OSError) as e:
            raise UsageError(f"{cert}{f' and {key}' if key else ''}: no certificate with its key "
                             f"({getattr(e, 'reason', None) or e})") from None

"""Sockets to listen on. Whatever is wrong with an address is one UsageError line."""

from __future__ import annotations

import errno
import os
import socket
import stat
from typing import Any, Sequence

from ..errors import UsageError


def bind_tcp(host: str, port: int) -> list[socket.socket]:
    """Bound TCP sockets for a host name or address (IPv4, IPv6, "" or "*" for all). UsageError where that can't be."""
    if not 0 <= port <= 65535:
        raise UsageError(f"cannot listen on port {port}: ports are 0 to 65535")
    try:
        found = socket.getaddrinfo(None if host in ("", "*") else host.strip("[]"), port, type=socket.SOCK_STREAM,
                                   flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError, OverflowError) as e:
        raise UsageError(f"cannot listen on {host}: {getattr(e, 'strerror', None) or e}") from None
    made: list[socket.socket] = []
    for family, kind, proto, _, address in dict.fromkeys(found):
        try:
            made.append(_bind(family, kind, proto, address, made[0].getsockname()[1] if made and port == 0 else port))
        except OSError as e:
            if family == socket.AF_INET6 and made and e.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                continue                      # a name with both kinds of address on a machine without IPv6
            for sock in made:
                sock.close()
            shown = f"[{address[0]}]:{port}" if family == socket.AF_INET6 else f"{address[0]}:{port}"
            if e.errno == errno.EADDRINUSE:
                raise UsageError(f"cannot listen on {shown}: the port is in use (choose another with --port)") from None
            raise UsageError(f"cannot listen on {shown}: {e.strerror}") from None
    return made


def _bind(family: int, kind: int, proto: int, address: Sequence[Any], port: int) -> socket.socket:
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((address[0], port, *address[2:]))
        sock.listen(256)
    except OSError:
        sock.close()
        raise
    return sock


def bind_unix(path: str, mode: int = 0o660) -> socket.socket:
    """A bound Unix socket; a dead one left at `path` is replaced. UsageError where that can't be."""
    try:
        if stat.S_ISSOCK(os.stat(path).st_mode):
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(1)
                if probe.connect_ex(path) != errno.ECONNREFUSED:
                    raise UsageError(f"cannot listen on {path}: the socket is in use")
            os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError as e:
        raise UsageError(f"cannot listen on {path}: {e.strerror}") from None
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.bind(path)
        os.chmod(path, mode)
        sock.listen(256)
    except OSError as e:
        sock.close()
        raise UsageError(f"cannot listen on {path}: {e.strerror or e}") from None
    return sock

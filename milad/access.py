"""Who reaches the daemon's sockets: no address that other machines reach without keys, and a unix socket's group."""

from __future__ import annotations

import grp
import ipaddress
import socket
from typing import Any, Mapping

from .errors import UsageError


def is_local(address: str) -> bool:
    """A unix socket, or a name all of whose addresses are loopback."""
    if address.startswith("unix:"):
        return True
    if address in ("", "*"):
        return False
    try:
        found = {item[4][0] for item in socket.getaddrinfo(address.strip("[]"), None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        return False
    return bool(found) and all(ipaddress.ip_address(str(a).partition("%")[0]).is_loopback for a in found)


def check_exposed(address: str, value: Mapping[str, Any]) -> None:
    """UsageError where `address` is reached from outside and no key is asked for."""
    if not value["keys_file"] and not value["insecure_no_key"] and not is_local(address):
        raise UsageError(f"listening on {address or '*'} lets other machines in, and no key is asked for: give a keys_file "
                         "(`milad key add` makes one), or say --insecure-no-key")


def check_group(name: str) -> int:
    """The group's number."""
    try:
        return grp.getgrnam(name).gr_gid if not name.isdigit() else int(name)
    except KeyError:
        raise UsageError(f"socket_group: there is no group {name[:60]!r}") from None

"""Who may talk to the daemon: the Host and Origin checks and API keys.

A web page can make a browser send requests to a loopback server, under a name of its own (DNS rebinding) or across origins.
So Host must be a loopback name, the very address that was connected to, or a name that the user allowed; and an Origin must
be the daemon's own or allowed. Pure decisions on a request's head; it must not know routes.
"""

from __future__ import annotations

import ipaddress
from typing import Callable, Collection

from .wire import Request


def host_name(authority: str) -> str:
    """`authority` without port, brackets and the root's dot, in lower case."""
    if authority.startswith("["):
        return authority[1:].partition("]")[0].lower()
    return authority.partition(":")[0].lower().removesuffix(".")


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def host_allowed(request: Request, local: str, allowed: Collection[str]) -> bool:
    """`local`: the address connected to, "unix" for a local socket, which no web page reaches. HTTP/1.0 without Host comes
    from health checks, never from a browser."""
    if local == "unix" or request.version == (1, 0) and not request.host and request.get("host") is None:
        return True
    name = host_name(request.host)
    if name == "localhost" or name.endswith(".localhost") or name and name in {host_name(a) for a in allowed}:
        return True
    address = _address(name)
    return address is not None and (address.is_loopback or address == _address(local))


def origin_allowed(request: Request, allowed: Collection[str]) -> bool:
    """Without Origin it is no web page's; the daemon's own pages have its Host in theirs. `*` allows all but null."""
    origin = request.get("origin")
    if origin is None:
        return True
    origin = origin.lower()
    if any(origin == a.lower().rstrip("/") for a in allowed) or "*" in allowed and origin != "null":
        return True
    return bool(request.host) and origin in (f"http://{request.host.lower()}", f"https://{request.host.lower()}")


def keys_of(request: Request) -> list[str]:
    """The API keys that a request carries, as either vendor's SDK sends them."""
    found = []
    scheme, _, credentials = (request.get("authorization") or "").partition(" ")
    if scheme.lower() == "bearer" and credentials.strip():
        found.append(credentials.strip())
    if request.get("x-api-key"):
        found.append(request.get("x-api-key") or "")
    return found


Auth = Callable[[Request], "str | None"]

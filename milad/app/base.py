"""What the application's rooms share: its settings, the model that answers, a route."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Awaitable, Callable, Mapping, NamedTuple

from ..http import guard


@dataclass
class Settings:
    """What the daemon's options say of serving. May be replaced while serving (SIGHUP)."""
    keepalive_s: float = 5.0
    body_limit: int = 16 << 20
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    strict_model_names: bool = False
    auth: guard.Auth | None = None             # request -> the caller's name, None: no valid key; guard.key_auth makes one
    access_log: Callable[[str], None] | None = None
    metrics: Callable[[], str] | None = None   # Prometheus text
    status: Callable[[], dict[str, Any]] | None = None         # what runs, for people


@dataclass
class Served:
    """The model that answers."""
    id: str
    runner: Any                                # turn.Runner
    path: str = ""
    aliases: tuple[str, ...] = ()
    n_slots: int = 1
    created: int = 0                           # seconds since the epoch


class Route(NamedTuple):
    methods: Mapping[str, Callable[..., Awaitable[None]]]  # method -> handler(app, exchange, **path parameters); GET serves HEAD
    public: bool = False                       # no key needed

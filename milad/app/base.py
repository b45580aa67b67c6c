"""What the application's rooms share: its settings, the model that answers, a route."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Awaitable, Callable, ContextManager, Mapping, NamedTuple, Protocol

from ..http import guard

if TYPE_CHECKING:
    import asyncio


@dataclass
class Settings:
    """What the daemon's options say of serving. May be replaced while serving (SIGHUP)."""
    keepalive_s: float = 5.0
    body_limit: int = 16 << 20
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    strict_model_names: bool = False
    auth: guard.Auth | None = None             # request -> the caller's name, None: no valid key
    access_log: Callable[[str], None] | None = None
    metrics: Callable[[], str] | None = None   # Prometheus text
    status: Callable[[], dict[str, Any]] | None = None         # what runs, for people
    fault: Callable[[], str] = str             # what keeps a loaded model from answering, in a line; "": nothing


@dataclass
class Served:
    """The model that answers."""
    id: str
    runner: Any                                # turn.Runner
    path: str = ""
    aliases: tuple[str, ...] = ()
    n_slots: int = 1
    created: int = 0                           # seconds since the epoch


class Pool(Protocol):
    """The models besides Served: loaded when a request names them."""

    def ids(self) -> list[str]: ...

    def find(self, name: str) -> str | None:
        """The id that a name means, None: none of these models."""
        ...

    def loaded(self) -> list[Served]: ...

    def hold(self, id: str) -> ContextManager["asyncio.Future[Served]"]:
        """The model once it is loaded. It stays until the end of the block."""
        ...


class Route(NamedTuple):
    methods: Mapping[str, Callable[..., Awaitable[None]]]  # method -> handler(app, exchange, **path parameters); GET serves HEAD
    public: bool = False                       # no key needed

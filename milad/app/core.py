"""The application between the HTTP server and the model: which path is which route, who may call it, errors to bodies.

Owns the route table (WIRE.md's Endpoints), the checks that need a head only (Host, Origin, keys, method, media type), request
ids, CORS and the dialect of errors. What the routes do is in generate and info. Event loop's thread only; it must not know
sockets, framing or how a model works.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
from dataclasses import dataclass, field
from typing import Any, Iterator, Mapping
from urllib.parse import unquote

from .. import __version__, log
from ..errors import MiladError
from ..http import body, guard, sse
from ..http.base import Exchange, Handler, Reply
from ..http.wire import Request, WireError
from ..protocols.base import Protocol
from .base import Pool, Route, Served, Settings
from .generate import as_error
from .routes import PATTERNS, TABLE, protocols


@dataclass
class _Match:
    route: Route
    arguments: dict[str, str] = field(default_factory=dict)


def split_prefix(path: str) -> str:
    """`path` without /v1 and a slash at the end. Raises for /v1/v1: a client with the prefix in its base URL and in its path."""
    if path == "/v1" or path.startswith("/v1/"):
        path = path[3:]
        if path == "/v1" or path.startswith("/v1/"):
            raise MiladError("not_found", "the path has /v1 twice: the base URL is http://HOST:PORT for Anthropic clients and "
                             "http://HOST:PORT/v1 for OpenAI clients; set one of them without the other's /v1")
    return path.rstrip("/") or "/"


def dialect_of(exchange: Exchange) -> str:
    """Whose words an error should use: by the path's prefix, else by the headers."""
    path = exchange.target.partition("?")[0].removeprefix("/v1").removeprefix("/v1")
    for name in ("messages", "responses", "completions"):
        if path == f"/{name}" or path.startswith(f"/{name}/"):
            return name
    if path.startswith("/chat/") or exchange.request is None:
        return "chat"
    return "messages" if exchange.request.get("anthropic-version") is not None else "chat"


class App:
    """base.Application. `served` is None until a model is ready; then `loading` says how far it is (0..1)."""

    def __init__(self, settings: Settings | None = None, *, store: Any = None,
                 protocols_by_name: Mapping[str, Protocol] | None = None) -> None:
        self.settings = settings or Settings()
        self.store = store
        self.protocols = protocols_by_name if protocols_by_name is not None else protocols()
        self.served: Served | None = None
        self.pool: Pool | None = None          # further models
        self.loading = 0.0
        self.n_active = 0

    # base.Application

    def begin(self, exchange: Exchange) -> Handler:
        request = exchange.request
        assert request is not None
        exchange.request_id = "req_" + secrets.token_hex(12)
        settings = self.settings
        if not guard.host_allowed(request, exchange.local, settings.allowed_hosts):
            name = guard.host_name(request.host)[:100]
            raise MiladError("forbidden", f"this server does not answer to the host name {name!r}; allow it with allowed_hosts",
                             code="host_not_allowed")
        if not guard.origin_allowed(request, settings.allowed_origins):
            raise MiladError("forbidden", "web pages of this origin may not call this server; allow it with allowed_origins",
                             code="origin_not_allowed")
        if request.method == "OPTIONS":
            return self._options
        path = split_prefix(request.path)
        match = self._match(path)
        if settings.auth and not (match and match.route.public):
            caller = settings.auth(request)
            if caller is None:
                raise MiladError("auth", "a valid API key is needed: send Authorization: Bearer KEY or x-api-key: KEY",
                                 headers=(("WWW-Authenticate", "Bearer"),))
            exchange.client = caller
        if match is None:
            raise MiladError("not_found", f"there is no {request.path[:200]} here; see / for what is", code="unknown_path")
        return self._handler(exchange, request, match)

    def refuse(self, exchange: Exchange, error: Exception) -> Reply:
        exchange.request_id = exchange.request_id or "req_" + secrets.token_hex(12)
        status = 0
        if isinstance(error, WireError):
            status, exchange.label = error.status, error.rule
            error = MiladError("too_large" if status == 413 else "invalid", error.message, code=error.rule)
        elif not isinstance(error, MiladError):
            log.logger.error("%s: %s: %s", exchange.request_id, type(error).__name__, error, exc_info=error)
            error = as_error(error)
        protocol = self.protocols[dialect_of(exchange)]
        own_status, answer, fields = protocol.error(error, exchange.request_id)
        if type(error).status is not MiladError.status:
            status = error.status               # http.server's 408
        return self._reply(exchange, status or own_status, sse.dumps(answer), "application/json", (*error.headers, *fields))

    def done(self, exchange: Exchange) -> None:
        if self.settings.access_log:
            request = exchange.request
            asked = f"{request.method} {request.path}" if request else "unreadable"
            self.settings.access_log(f"{exchange.client} {asked} {exchange.status} {exchange.n_sent}B "
                                     f"{(exchange.ended_s - exchange.received_s) * 1000:.0f}ms {exchange.request_id}"
                                     f"{exchange.label and ' '}{exchange.label}{' (client left)' if exchange.disconnected else ''}")

    # For the routes

    def fields(self, exchange: Exchange) -> tuple[tuple[str, str], ...]:
        """What every answer carries."""
        mine = (("x-request-id", exchange.request_id), ("request-id", exchange.request_id), ("Server", f"milad/{__version__}"))
        origin = exchange.request.get("origin") if exchange.request else None
        if exchange.request is None or origin is None:
            return mine
        if not guard.origin_allowed(exchange.request, self.settings.allowed_origins):
            return (*mine, ("Vary", "Origin"))
        return (*mine, ("Vary", "Origin"), ("Access-Control-Allow-Origin", origin),
                ("Access-Control-Expose-Headers", "x-request-id, request-id, retry-after"))

    def _reply(self, exchange: Exchange, status: int, data: bytes, media: str,
               fields: tuple[tuple[str, str], ...] = ()) -> Reply:
        all_fields: dict[str, tuple[str, str]] = {}
        for name, value in (("Content-Type", media), *fields, *self.fields(exchange)):
            all_fields.setdefault(name.lower(), (name, value))
        return Reply(status, tuple(all_fields.values()), data)

    def reply(self, exchange: Exchange, value: Any, status: int = 200, media: str = "application/json",
              fields: tuple[tuple[str, str], ...] = ()) -> None:
        """Answers with JSON, or with text of another media type."""
        data = value.encode() if isinstance(value, str) else sse.dumps(value)
        exchange.reply(self._reply(exchange, status, data, media, fields))

    def ready(self) -> Served:
        """The model that answers; 503 while there is none."""
        if self.served is None:
            raise MiladError("unavailable", f"the model is loading ({self.loading:.0%})", retry_after_s=2)
        return self.served

    def known(self) -> list[str]:
        """Every name that means a model, the served one's first."""
        served = self.ready()
        return [served.id, *served.aliases, *(self.pool.ids() if self.pool else ())]

    @contextlib.contextmanager
    def hold(self, name: str) -> Iterator[tuple[str, "asyncio.Future[Served]"]]:
        """The id and, once it is loaded, the model that a request means by `name`; a name that is none means the served one."""
        served = self.ready()
        other = self.pool.find(name) if self.pool and name != served.id and name not in served.aliases else None
        if self.pool and other is not None:
            with self.pool.hold(other) as loading:
                yield other, loading
            return
        ready: asyncio.Future[Served] = asyncio.get_running_loop().create_future()
        ready.set_result(served)
        yield served.id, ready

    # Routing

    def _match(self, path: str) -> _Match | None:
        route = TABLE.get(path)
        if route:
            return _Match(route)
        for pattern, route in PATTERNS:
            found = re.fullmatch(pattern, path)
            if found:
                return _Match(route, {k: unquote(v) for k, v in found.groupdict().items()})
        return None

    def _handler(self, exchange: Exchange, request: Request, match: _Match) -> Handler:
        methods = match.route.methods
        handler = methods.get("GET" if request.method == "HEAD" else request.method)
        if handler is None and request.get("upgrade") is not None:
            raise MiladError("upgrade", "this server speaks HTTP/1.1 only: send a POST", headers=(("Upgrade", "HTTP/1.1"),))
        if handler is None:
            raise MiladError("method", f"{request.path[:200]} does not take {request.method[:20]}, but {allow(methods)}",
                             headers=(("Allow", allow(methods)),))
        if request.n_body != 0 and request.method in ("POST", "PUT", "PATCH"):
            body.check_type(request.get("content-type"))
            body.codings(request.get("content-encoding"))
        arguments = match.arguments

        async def handle(exchange: Exchange) -> None:
            await handler(self, exchange, **arguments)

        return handle

    async def _options(self, exchange: Exchange) -> None:
        """CORS preflights, whose Origin begin() has let in, and plain OPTIONS."""
        request = exchange.request
        assert request is not None
        match = None if request.target == "*" else self._match(split_prefix(request.path))
        methods = allow(match.route.methods if match else {"GET": None, "POST": None, "DELETE": None})
        fields = [("Allow", methods)]
        if request.get("origin") is not None:
            asked = request.get("access-control-request-headers") or ""
            fields += [("Access-Control-Allow-Methods", methods), ("Access-Control-Max-Age", "600"),
                       ("Access-Control-Allow-Headers", asked if re.fullmatch(r"[\w\-, ]{0,2000}", asked, re.A) else "")]
        exchange.reply(Reply(204, (*fields, *self.fields(exchange)), b""))


def allow(methods: Mapping[str, Any]) -> str:
    names = [*methods, "OPTIONS"]
    if "GET" in methods:
        names.insert(names.index("GET") + 1, "HEAD")
    return ", ".join(names)

"""The operator's rules around the application: which APIs are on, what each key may do, what is counted and logged.

An http.base.Application over app.App. It sees paths, names and bodies as bytes; it must not know what the APIs say.
"""

from __future__ import annotations

import re
from typing import Any, Iterable

from . import log
from .app import App
from .app.routes import PATTERNS, TABLE
from .errors import MiladError
from .http.base import Exchange, Handler, Reply
from .keys import Ring
from .metrics import Metrics

API_PATHS = {"chat": "/chat/", "completions": "/completions", "responses": "/responses", "messages": "/messages"}
GROUPS = {"openai": ("chat", "completions", "responses"), "anthropic": ("messages",)}
PROMPT_LOG_BYTES = 65536


def route_of(path: str) -> str:
    """The route's own path, parameters by name; "other" for what is none, so that clients make no labels."""
    path = path.removeprefix("/v1").rstrip("/") or "/"
    if path in TABLE:
        return path
    for pattern, _ in PATTERNS:
        if re.fullmatch(pattern, path):
            return re.sub(r"\(\?P<(\w+)>.*?\)", r"{\1}", pattern)
    return "other"


def apis(names: Iterable[str]) -> frozenset[str]:
    """The option `protocols` -> API names; nothing said: all."""
    found = {api for name in names for api in GROUPS.get(name, (name,))}
    return frozenset(found or API_PATHS)


class Gate:
    def __init__(self, app: App, metrics: Metrics) -> None:
        self.app = app
        self.metrics = metrics
        self.ring: Ring | None = None        # keys, where there are any
        self.apis = apis(())
        self.log_prompts = False

    def begin(self, exchange: Exchange) -> Handler:
        handler = self.app.begin(exchange)
        request = exchange.request
        assert request is not None
        path = request.path.removeprefix("/v1")
        for api, prefix in API_PATHS.items():
            if api not in self.apis and (path == prefix or path.startswith(prefix.rstrip("/") + "/")):
                raise MiladError("not_found", f"the {api} API is switched off here (option protocols)", code="api_off")
        if request.method != "POST":
            return handler

        async def held(exchange: Exchange) -> None:
            if self.log_prompts:
                log.logger.info("%s body: %s", exchange.request_id, exchange.body[:PROMPT_LOG_BYTES].decode("utf-8", "replace"))
            if self.ring is None:
                await handler(exchange)
            else:
                with self.ring.hold(exchange.client):
                    await handler(exchange)

        return held

    def refuse(self, exchange: Exchange, error: Any) -> Reply:
        return self.app.refuse(exchange, error)

    def done(self, exchange: Exchange) -> None:
        route = route_of(exchange.request.path) if exchange.request else "other"
        self.metrics.count(route, exchange.status, exchange.disconnected)
        self.app.done(exchange)

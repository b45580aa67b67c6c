"""The responses API's own routes: making responses that may be kept, and reading, listing and deleting the kept ones."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from .. import log
from ..conversation import Turn
from ..http.base import Exchange
from ..protocols import responses as api
from ..protocols.base import Encoder, Ident
from .generate import count, generate

if TYPE_CHECKING:
    from .core import App


async def responses(app: "App", exchange: Exchange) -> None:
    protocol: Any = app.protocols["responses"]
    store = app.store

    async def keep(turn: Turn, ident: Ident, encoder: Encoder) -> None:
        """Before the end of the answer is told: its reader may name it in the next request at once."""
        if store is None or not turn.meta.get("store"):
            return
        try:                                  # all of it in the thread: there may be 10,000 items
            await asyncio.to_thread(lambda: store.put(encoder.body(), api.input_items(turn, ident), turn.meta.get("previous")))
        except Exception as e:                # a full disk must not take the answer away
            log.logger.error("%s could not be stored: %s", ident.response_id, e)

    await generate(app, exchange, protocol, parse=lambda body: protocol.parse(body, store), keep=keep)


async def input_tokens(app: "App", exchange: Exchange) -> None:
    await count(app, exchange, app.protocols["responses"], resolve=app.store)


async def _kept(app: "App", id: str) -> dict[str, Any]:
    found = await asyncio.to_thread(app.store.get, id) if app.store is not None else None
    if found is None:
        raise api.not_found(id)
    return found


async def read(app: "App", exchange: Exchange, id: str) -> None:
    app.reply(exchange, await _kept(app, id))


async def delete(app: "App", exchange: Exchange, id: str) -> None:
    if app.store is None or not await asyncio.to_thread(app.store.delete, id):
        raise api.not_found(id)
    app.reply(exchange, api.deleted_body(id))


async def input_items(app: "App", exchange: Exchange, id: str) -> None:
    items = await asyncio.to_thread(app.store.input_items, id) if app.store is not None else None
    if items is None:
        raise api.not_found(id)
    query = exchange.request.query if exchange.request else ""
    app.reply(exchange, api.list_items(items, dict(parse_qsl(query))))


async def cancel(app: "App", exchange: Exchange, id: str) -> None:
    await _kept(app, id)
    raise api.not_cancellable(id)

"""The routes that only tell: models, health, properties, versions, and the text tools for people who debug prompts."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from .. import __version__
from ..errors import MiladError, invalid
from ..http.base import Exchange
from .base import Served
from .generate import off_loop, read_json

if TYPE_CHECKING:
    from .core import App


# Models


def model_object(served: Served, name: str = "") -> dict[str, Any]:
    """A model as OpenAI's, Anthropic's and vLLM's and llama-server's readers want it, in one object."""
    info, n_ctx = served.runner.model.info, served.runner.n_ctx
    created_at = _rfc3339(served.created)
    return {
        "id": name or served.id, "object": "model", "created": served.created, "owned_by": "milad",
        "type": "model", "display_name": name or served.id, "created_at": created_at,
        "max_model_len": n_ctx, "context_length": n_ctx, "max_input_tokens": n_ctx, "max_tokens": n_ctx,
        "aliases": list(served.aliases),
        "meta": {"n_ctx": n_ctx, "n_ctx_train": info.n_ctx_train, "n_vocab": info.n_vocab, "n_embd": info.n_embd,
                 "n_params": info.n_params, "size": info.file_bytes, "architecture": info.architecture,
                 "quantisation": info.quantisation}}


def unloaded_object(name: str) -> dict[str, Any]:
    """A model that the first request for it will load."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "milad", "type": "model", "display_name": name,
            "created_at": _rfc3339(0), "aliases": [], "meta": {}, "loaded": False}


def _rfc3339(seconds: int) -> str:
    import datetime
    return datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def codex_object(served: Served) -> dict[str, Any]:
    """Codex's ModelInfo: the fields without a default in openai/codex, codex-rs/protocol/src/openai_models.rs, and the window."""
    n_ctx = served.runner.n_ctx
    thinks = bool(getattr(served.runner.family, "thinks", False))
    return {
        "slug": served.id, "display_name": served.id, "description": "A local model served by milad",
        "supported_reasoning_levels": [{"effort": "medium", "description": "thinks"}] if thinks else [],
        **({"default_reasoning_level": "medium"} if thinks else {}),
        "shell_type": "shell_command", "visibility": "list", "supported_in_api": True, "priority": 0, "availability_nux": None,
        "upgrade": None, "base_instructions": "", "supports_reasoning_summaries": False, "support_verbosity": False,
        "default_verbosity": None, "apply_patch_tool_type": None, "truncation_policy": {"mode": "bytes", "limit": 10000},
        "supports_parallel_tool_calls": True, "context_window": n_ctx, "max_context_window": n_ctx,
        "experimental_supported_tools": [], "input_modalities": ["text"]}


async def models(app: "App", exchange: Exchange) -> None:
    served = app.ready()
    data = [model_object(one) for one in (served, *(app.pool.loaded() if app.pool else ()))]
    data += [unloaded_object(name) for name in (app.pool.ids() if app.pool else ()) if name not in {d["id"] for d in data}]
    answer = {"object": "list", "data": data, "has_more": False, "first_id": data[0]["id"], "last_id": data[-1]["id"]}
    if exchange.request and "client_version" in parse_qs(exchange.request.query, keep_blank_values=True):
        answer["models"] = [codex_object(one) for one in (served, *(app.pool.loaded() if app.pool else ()))]
    app.reply(exchange, answer)


async def model(app: "App", exchange: Exchange, name: str) -> None:
    served = app.ready()
    if name not in app.known():
        raise MiladError("not_found", f"the model {name[:100]!r} is not served here; served: " + ", ".join(app.known()),
                         param="model", code="model_not_found")
    if app.pool and app.pool.find(name):
        found = [model_object(one) for one in app.pool.loaded() if one.id == name]
        app.reply(exchange, found[0] if found else unloaded_object(name))
    else:
        app.reply(exchange, model_object(served, name))


# State


async def health(app: "App", exchange: Exchange) -> None:
    fault = app.settings.fault()
    if app.served and not fault:
        app.reply(exchange, {"status": "ok", "model": app.served.id})
    else:
        app.reply(exchange, {"status": "error" if fault else "loading", "progress": round(app.loading, 3),
                             "error": {"code": 503, "message": fault or "the model is loading", "type": "unavailable_error"}}, 503,
                  fields=(("Retry-After", "1"),))


async def props(app: "App", exchange: Exchange) -> None:
    served = app.ready()
    template = served.runner.model.metadata("tokenizer.chat_template")
    app.reply(exchange, {
        "default_generation_settings": {"n_ctx": served.runner.n_ctx}, "total_slots": served.n_slots,
        "model_path": served.path, "model_alias": served.id, "build_info": f"milad-{__version__}",
        "chat_template": template if isinstance(template, str) else "",
        "modalities": {"vision": False, "audio": False}, "family": getattr(served.runner.family, "name", "")})


async def version(app: "App", exchange: Exchange) -> None:
    app.reply(exchange, {"version": __version__})


async def metrics(app: "App", exchange: Exchange) -> None:
    if app.settings.metrics is None:
        raise MiladError("not_found", "there are no metrics here", code="unknown_path")
    app.reply(exchange, app.settings.metrics(), media="text/plain; version=0.0.4; charset=utf-8")


async def status(app: "App", exchange: Exchange) -> None:
    if app.settings.status is None:
        raise MiladError("not_found", "there is no status here", code="unknown_path")
    app.reply(exchange, app.settings.status())


async def hello(app: "App", exchange: Exchange) -> None:
    """What Claude Code asks at its start: any answer will do."""
    app.reply(exchange, {"version": __version__})


async def root(app: "App", exchange: Exchange) -> None:
    request = exchange.request
    base = f"http://{request.host}" if request and request.host else "http://127.0.0.1:8000"
    state = app.settings.fault() or (app.served.id if app.served else f"loading ({app.loading:.0%})")
    lines = [("milad", __version__), ("model", state), ("OpenAI base URL", f"{base}/v1"), ("Anthropic base URL", base)]
    if app.served:
        lines.append(("context", f"{app.served.runner.n_ctx} tokens"))
    if request and "text/html" in (request.get("accept") or ""):
        rows = "".join(f"<tr><th>{html.escape(k)}</th><td>{html.escape(v)}</td></tr>" for k, v in lines)
        page = ('<!doctype html><html lang="en"><meta charset="utf-8"><title>milad</title>'
                "<style>body{font:16px sans-serif;margin:3em}th{text-align:left;padding-right:2em}</style>"
                f"<h1>milad</h1><table>{rows}</table></html>\n")
        app.reply(exchange, page, media="text/html; charset=utf-8",
                  fields=(("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'"),))
    else:
        app.reply(exchange, "".join(f"{k}: {v}\n" for k, v in lines), media="text/plain; charset=utf-8")


# Text


_WORDS = {bool: "true or false", str: "a string", list: "an array"}


def _field(value: dict[str, Any], name: str, kind: type, default: Any = ...) -> Any:
    found = value.get(name)
    if found is None:
        if default is ...:
            raise invalid(name, f"{name} is missing")
        return default
    if not isinstance(found, kind) or kind is not bool and isinstance(found, bool):
        raise invalid(name, f"{name} must be {_WORDS[kind]}")
    return found


async def tokenize(app: "App", exchange: Exchange) -> None:
    served = app.ready()

    def work() -> list[Any]:
        value = read_json(app, exchange)
        return served.runner.tokenize(_field(value, "content", str), **{
            name: _field(value, name, bool, False) for name in ("parse_special", "add_special", "with_pieces")})

    app.reply(exchange, {"tokens": await off_loop(exchange, work)})


async def detokenize(app: "App", exchange: Exchange) -> None:
    served = app.ready()
    work = lambda: served.runner.detokenize(_field(read_json(app, exchange), "tokens", list))
    app.reply(exchange, {"content": await off_loop(exchange, work)})


async def apply_template(app: "App", exchange: Exchange) -> None:
    served = app.ready()

    def work() -> tuple[str, list[int]]:
        return served.runner.apply_template(app.protocols["chat"].parse(read_json(app, exchange)))

    prompt, tokens = await off_loop(exchange, work)
    app.reply(exchange, {"prompt": prompt, "tokens": tokens})

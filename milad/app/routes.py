"""The route table: every path that milad serves, without its optional /v1 (WIRE.md, Endpoints)."""

from __future__ import annotations

from typing import Mapping

from ..protocols import base
from . import generate, info
from .base import Route

TABLE: dict[str, Route] = {
    "/chat/completions": Route({"POST": generate.chat}),
    "/completions": Route({"POST": generate.completions}),
    "/responses": Route({"POST": generate.responses}),
    "/responses/input_tokens": Route({"POST": generate.input_tokens}),
    "/messages": Route({"POST": generate.messages}),
    "/messages/count_tokens": Route({"POST": generate.count_tokens}),
    "/models": Route({"GET": info.models}),
    "/health": Route({"GET": info.health}, public=True),
    "/healthz": Route({"GET": info.health}, public=True),
    "/readyz": Route({"GET": info.health}, public=True),
    "/props": Route({"GET": info.props}),
    "/version": Route({"GET": info.version}),
    "/metrics": Route({"GET": info.metrics}),
    "/tokenize": Route({"POST": info.tokenize}),
    "/detokenize": Route({"POST": info.detokenize}),
    "/apply-template": Route({"POST": info.apply_template}),
    "/api/hello": Route({"GET": info.hello}, public=True),
    "/": Route({"GET": info.root}, public=True),
}
PATTERNS: list[tuple[str, Route]] = [
    (r"/models/(?P<name>.+)", Route({"GET": info.model})),
]


def protocols() -> Mapping[str, base.Protocol]:
    """The APIs by name."""
    import importlib
    found = {}
    for name in ("chat", "completions", "messages", "responses"):
        try:
            module = importlib.import_module(f"..protocols.{name}", __package__)
        except ImportError:
            continue
        protocol = getattr(module, name.capitalize())()
        found[protocol.name] = protocol
    return found

"""The route table: every path that milad serves, without its optional /v1 (WIRE.md, Endpoints)."""

from __future__ import annotations

from typing import Mapping

from ..protocols import base
from ..protocols.chat import Chat
from ..protocols.completions import Completions
from ..protocols.messages import Messages
from ..protocols.responses import Responses
from . import generate, info, stored
from .base import Route

TABLE: dict[str, Route] = {
    "/chat/completions": Route({"POST": generate.chat}),
    "/completions": Route({"POST": generate.completions}),
    "/responses": Route({"POST": stored.responses}),
    "/responses/input_tokens": Route({"POST": stored.input_tokens}),
    "/messages": Route({"POST": generate.messages}),
    "/messages/count_tokens": Route({"POST": generate.count_tokens}),
    "/models": Route({"GET": info.models}),
    "/health": Route({"GET": info.health}, public=True),
    "/healthz": Route({"GET": info.health}, public=True),
    "/readyz": Route({"GET": info.health}, public=True),
    "/props": Route({"GET": info.props}),
    "/version": Route({"GET": info.version}),
    "/metrics": Route({"GET": info.metrics}),
    "/milad/status": Route({"GET": info.status}),
    "/tokenize": Route({"POST": info.tokenize}),
    "/detokenize": Route({"POST": info.detokenize}),
    "/apply-template": Route({"POST": info.apply_template}),
    "/api/hello": Route({"GET": info.hello}, public=True),
    "/": Route({"GET": info.root}, public=True),
}
PATTERNS: list[tuple[str, Route]] = [
    (r"/models/(?P<name>.+)", Route({"GET": info.model})),
    (r"/responses/(?P<id>[^/]+)", Route({"GET": stored.read, "DELETE": stored.delete})),
    (r"/responses/(?P<id>[^/]+)/input_items", Route({"GET": stored.input_items})),
    (r"/responses/(?P<id>[^/]+)/cancel", Route({"POST": stored.cancel})),
]


def protocols() -> Mapping[str, base.Protocol]:
    """The four APIs by name."""
    return {p.name: p for p in (Chat(), Completions(), Messages(), Responses())}

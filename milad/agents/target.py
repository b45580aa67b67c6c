"""Servers that agents can be pointed at: what answers at an address, which model it serves, how much one request may hold.

Everything is asked with the key and a short timeout, and costs no tokens. A model's training length is never taken for the
context of a request. Owns the kinds and their defaults. Blocking sockets; must not know any agent.
"""

from __future__ import annotations

import http.client
import json
import re
import ssl
from dataclasses import dataclass, field
from typing import Any, Mapping
from urllib.parse import quote, urlsplit

from ..errors import UsageError
from .base import DUMMY_KEY, Target

TIMEOUT_S = 2.0
MAX_BYTES = 4 << 20


@dataclass(frozen=True)
class Kind:
    name: str
    title: str
    url: str                                 # "" where there is no usual address
    key_env: str                             # "" where only --api-key-env names one
    start: str                               # how a person starts one
    widen: str                               # how a person gives requests more context


KINDS = {k.name: k for k in (
    Kind("milad", "milad", "http://127.0.0.1:8000", "MILAD_API_KEY", "`milad serve` starts it (or add --start)",
         "milad serve --ctx N"),
    Kind("llamacpp", "llama.cpp's server", "http://localhost:8080", "LLAMA_API_KEY", "`llama-server -m FILE --jinja` starts it",
         "llama-server -c N (shared by its -np slots)"),
    Kind("vllm", "vLLM", "http://localhost:8000", "VLLM_API_KEY", "`vllm serve MODEL` starts it", "vllm serve --max-model-len N"),
    Kind("ollama", "Ollama", "http://localhost:11434", "OLLAMA_API_KEY", "`ollama serve` starts it",
         "OLLAMA_CONTEXT_LENGTH=N ollama serve"),
    # No usual key: a real OPENAI_API_KEY goes to another address only where --api-key-env says so.
    Kind("openai", "an OpenAI-compatible server", "", "", "start it first", "see its manual"),
)}
ALIASES = {"llama.cpp": "llamacpp", "llama-cpp": "llamacpp", "llama-server": "llamacpp"}


def kind_of(name: str) -> Kind:
    found = KINDS.get(ALIASES.get(name, name))
    if found is None:
        raise UsageError(f"there is no --kind {name[:40]!r}; there are {', '.join((*KINDS, *ALIASES))}")
    return found


def root_of(url: str) -> str:
    """The base URL without /v1 and slashes at its end. UsageError for what is no http address."""
    text = url if "//" in url else "http://" + url
    try:
        parts = urlsplit(text)
        valid = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        valid = False
    if not valid or re.search(r"[\s\"'\\]", text) or parts.query or parts.fragment:
        raise UsageError(f"--url {url[:200]}: not an http:// or https:// address")
    if "@" in parts.netloc:
        raise UsageError("--url: a name and password in the address are not supported; say --api-key-env NAME")
    root = text.rstrip("/")
    return root[:-3].rstrip("/") if root.endswith("/v1") else root


# Asking


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]               # names in lower case
    body: bytes

    @property
    def value(self) -> Any:
        """The body as JSON; None where it is none."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            return None

    def get(self, *path: str) -> Any:
        """value[path[0]][path[1]]...; None where that is not there."""
        found = self.value
        for name in path:
            found = found.get(name) if isinstance(found, dict) else None
        return found

    @property
    def message(self) -> str:
        """The error's text, as every dialect has it."""
        error = self.get("error")
        text = error.get("message") if isinstance(error, dict) else error or self.get("detail")
        return " ".join(str(text or self.body[:200].decode("utf-8", "replace")).split())[:300]


class Down(Exception):
    """Nothing answers there; the text says why."""


def ask(root: str, path: str, key: str = "", body: Any = None, timeout_s: float = TIMEOUT_S) -> Answer:
    """GET, or POST where there is a body (bytes go as they are). Down where no HTTP answer comes in time."""
    parts = urlsplit(root)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    headers = {"Accept": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    if body is not None:
        headers["Content-Type"] = "application/json"
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    try:
        connection = kind(parts.hostname or "", parts.port, timeout=timeout_s)
        try:
            connection.request("GET" if body is None else "POST", quote(parts.path, safe="/%") + path, data, headers)
            reply = connection.getresponse()
            return Answer(reply.status, {k.lower(): v for k, v in reply.getheaders()}, reply.read(MAX_BYTES))
        finally:
            connection.close()
    except (OSError, http.client.HTTPException, ssl.SSLError, ValueError) as e:
        raise Down(getattr(e, "strerror", None) or str(e) or type(e).__name__) from e


def identify(root: str, key: str = "") -> tuple[str, str]:
    """(kind, version as it tells it) of what answers at `root`: each names itself somewhere. Down where nothing does."""
    props = ask(root, "/props", key)
    server = props.headers.get("server", "")
    build = str(props.get("build_info") or "")
    if server.startswith("milad/") or build.startswith("milad-"):
        return "milad", build[6:] or server[6:]
    if server.startswith("llama.cpp") or isinstance(props.get("default_generation_settings"), dict):
        return "llamacpp", build
    found = ask(root, "/api/version", key)               # Ollama's /version does not exist, vLLM's /api/version does not
    if found.status == 200 and found.get("version"):
        return "ollama", str(found.get("version"))
    found = ask(root, "/version", key)
    if found.status == 200 and found.get("version"):
        return "vllm", str(found.get("version"))
    return "openai", ""


# What it serves


@dataclass
class Server:
    """What a server told. `notes` are lines for a person."""
    kind: Kind
    root: str
    key: str = ""
    up: bool = True
    why_down: str = ""
    version: str = ""
    refused: str = ""                        # the key was: what the server said
    loading: float | None = None             # 0..1 while no model is ready
    models: list[dict[str, Any]] = field(default_factory=list)

    @property
    def ids(self) -> list[str]:
        return [m["id"] for m in self.models]


def inspect(kind: Kind, root: str, key: str) -> Server:
    """Asks for health and models. Never raises for what the server does."""
    server = Server(kind, root, key)
    try:
        found = ask(root, "/v1/models", key)
    except Down as e:
        server.up, server.why_down = False, str(e)
        return server
    if found.status in (401, 403):
        server.refused = f"{found.status}: {found.message}"
    elif found.status == 503:
        try:
            share = ask(root, "/health", key).get("progress")
        except Down:
            share = None
        server.loading = share if isinstance(share, (int, float)) else 0.0
    elif found.status == 200:
        data = found.get("data")
        server.models = [m for m in data if isinstance(m, dict) and isinstance(m.get("id"), str)] if isinstance(data, list) else []
    return server


def served(server: Server, wanted: str | None) -> str:
    """The id to ask for. UsageError where the server does not have the one wanted, or several and none is."""
    ids = server.ids
    if wanted is None:
        if not ids:
            raise UsageError(f"{server.root} lists no models: say --model NAME")
        if len(ids) > 1 and server.kind.name != "milad":
            raise UsageError(f"{server.root} serves several models; say which: "
                             + ", ".join(f"--model {i}" for i in ids[:12]) + (", ..." if len(ids) > 12 else ""))
        return ids[0]
    for model in server.models:
        names = [model["id"], *(a for a in model.get("aliases") or () if isinstance(a, str))]
        if wanted in names or server.kind.name == "ollama" and f"{wanted}:latest" in names:
            return wanted
    if ids and server.kind.name != "openai":
        raise UsageError(f"{server.root} does not serve {wanted[:80]!r}; it serves {', '.join(ids[:12])}")
    return wanted


def _positive(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def context_of(server: Server, model: str) -> int | None:
    """Tokens of one request, as the server really serves it; None where it does not tell. The training length never counts."""
    try:
        if server.kind.name in ("milad", "llamacpp"):
            props = ask(server.root, "/props", server.key)
            return _positive(props.get("default_generation_settings", "n_ctx"))
        if server.kind.name == "ollama":
            return _ollama_context(server, model)
    except Down:
        return None
    for entry in server.models:
        if entry["id"] == model:
            return _positive(entry.get("max_model_len")) or (
                None if server.kind.name == "vllm" else _positive(entry.get("context_length")) or _positive(entry.get("context_window")))
    return None


def _ollama_context(server: Server, model: str) -> int | None:
    """Of the loaded model (/api/ps: context_length), else what its Modelfile sets (/api/show: num_ctx)."""
    loaded = ask(server.root, "/api/ps", server.key).get("models")
    for entry in loaded if isinstance(loaded, list) else ():
        if isinstance(entry, dict) and model in (entry.get("name"), entry.get("model"), str(entry.get("name")).removesuffix(":latest")):
            if _positive(entry.get("context_length")):
                return entry["context_length"]
    told = ask(server.root, "/api/show", server.key, {"model": model}).get("parameters")
    found = re.search(r"^\s*num_ctx\s+(\d+)\s*$", told, re.M) if isinstance(told, str) else None
    return int(found[1]) if found else None


def has_api(server: Server, api: str) -> bool | None:
    """Is there an endpoint for `api` (messages, responses, chat)? Asked with an empty object, which no server generates
    from. None: it can't be told."""
    path = "/v1/chat/completions" if api == "chat" else f"/v1/{api}"
    try:
        return ask(server.root, path, server.key, {}).status not in (404, 405, 501)
    except Down:
        return None


def resolve(kind: Kind, root: str, *, model: str | None, ctx: int | None, key_env: str | None,
            environ: Mapping[str, str]) -> tuple[Target, Server]:
    """The target of a launch. Where nothing answers, `up` is False and the model is what was asked for, or "default".
    UsageError: an unset key variable, a refused key, a model that is not served."""
    name = key_env or kind.key_env
    key = environ.get(name, "").strip() if name else ""
    if key_env and not key:
        raise UsageError(f"--api-key-env {key_env}: that variable is not set")
    server = inspect(kind, root, key)
    if server.refused:
        raise UsageError(f"{root} refuses the key ({server.refused}); "
                         + (f"it came from ${name}" if key else f"put one into ${name or 'a variable'} and name it with --api-key-env"))
    if server.up and server.loading is None:
        model = served(server, model)
        ctx = ctx or context_of(server, model)
    return Target(kind.name, root, model or "default", ctx, key or DUMMY_KEY, name if key else "", server.up), server

"""OpenAI responses, the way in: POST /v1/responses and /v1/responses/input_tokens, and the bodies of the stored ones.

Items are read into Messages: a run of reasoning, assistant messages and calls is one assistant message; neighbouring outputs
are one tool message. Where earlier responses and items come from is the caller's `resolve` (the store). The stream is
responses_stream.py's. Pure.

Known deviations: truncation "auto" is accepted and never truncates; max_tool_calls, moderation, verbosity and summaries are
ignored; background, conversation and prompt templates are refused; encrypted_content is milad's own, and any is taken back.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from typing import Any, Callable, Mapping, Protocol as TypingProtocol, Sequence

from ..conversation import Message, Part, Thinking, Turn
from ..errors import MiladError, invalid
from .base import Ident
from .content import Reading, arguments_text, custom_arguments, join_leading
from .fields import INT32_MAX, MAX_NAME, Obj, bad, check_integer, check_json, check_text, kind_of
from .openai import error_reply
from .responses_stream import ResponsesEncoder
from .sampling import MAX_TOP_LOGPROBS, read_format, read_max_tokens, read_sampling, read_stops, read_thinking
from .tools import Tools, read_openai_choice, read_openai_tool

_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_OPAQUE = "milad1."
MAX_THOUGHT = 4 << 20    # bytes of thinking that an encrypted_content may inflate to
MAX_PAGE = 100           # OpenAI's, of input_items


class Resolver(TypingProtocol):
    """Stored responses: store.Store."""

    def history(self, response_id: str) -> Sequence[Mapping[str, Any]] | None:
        """Input and output items up to and including that response, oldest first; None: unknown."""
        ...

    def items(self, item_ids: Sequence[str]) -> Mapping[str, Mapping[str, Any]]:
        """By id, those that are known."""
        ...


class Responses:
    name = "responses"
    id_prefix = "resp_"

    def parse(self, body: Mapping[str, Any], resolve: Resolver | None = None) -> Turn:
        return self._parse(Obj(body), resolve, counting=False)

    def parse_count(self, body: Mapping[str, Any], resolve: Resolver | None = None) -> Turn:
        """input_tokens: the same request; everything may be missing."""
        return self._parse(Obj(body), resolve, counting=True)

    def count_body(self, n_tokens: int) -> dict[str, Any]:
        return {"object": "response.input_tokens", "input_tokens": n_tokens}

    def encoder(self, turn: Turn, ident: Ident) -> ResponsesEncoder:
        return ResponsesEncoder(turn, ident)

    def error(self, error: MiladError, request_id: str) -> tuple[int, dict[str, Any], list[tuple[str, str]]]:
        return error_reply(error, request_id)

    def _parse(self, top: Obj, resolve: Resolver | None, counting: bool) -> Turn:
        _refuse(top)
        ignored: dict[str, None] = {}
        new = _resolved(_input(top, counting), resolve)
        items = _history(top, resolve) + new
        tools = _tools(top, items, ignored)
        choice = read_openai_choice(tools, top)
        messages = _messages(top, items, Reading(ignored, tools.names))
        if not messages and not counting:
            raise top.error("input", "must have at least one item that says something")
        thinking, args = read_thinking(top)
        text = top.obj("text")
        include = tuple(v for v in top.items("include") if isinstance(v, str))
        top_logprobs = top.integer("top_logprobs", 0, MAX_TOP_LOGPROBS) or 0
        wants_logprobs = top_logprobs > 0 or "message.output_text.logprobs" in include
        store = top.boolean("store", True) is not False
        return Turn(
            api="responses", messages=messages, model=top.text("model", most=MAX_NAME), tools=tuple(tools.specs.values()),
            tool_choice=choice, parallel_tool_calls=top.boolean("parallel_tool_calls", True) is not False,
            declared_tools=bool(tools.declared), format=read_format(text.obj("format") if text else None),
            sampling=read_sampling(top), max_tokens=read_max_tokens(top, "max_output_tokens"), stop=read_stops(top, "stop"),
            top_logprobs=top_logprobs if wants_logprobs else None, thinking=thinking, template_args=args,
            stream=bool(top.boolean("stream")), ignored=tuple(ignored),
            meta={"echo": _echo(top, store), "store": store,
                  "input": [dict(check_json(i.data, i.path)) for i in new] if store else [],
                  "previous": top.text("previous_response_id") or None,
                  "encrypted": "reasoning.encrypted_content" in include})


def _refuse(top: Obj) -> None:
    if top.boolean("background"):
        raise top.error("background", "is not supported: responses are made while the request lasts")
    for key in ("conversation", "prompt"):
        if top.has(key):
            raise top.error(key, "is not supported: send the items in `input`, or previous_response_id")


# -- items ----------------------------------------------------------------------------------------------------------------


def _input(top: Obj, counting: bool) -> list[Obj]:
    """The request's own items; a string is one user message."""
    value = top.raw("input")
    if value is None:
        if counting:
            return []
        raise top.error("input", "is required: a string or an array of items")
    if isinstance(value, str):
        check_text(value, top.at("input"))
        return [Obj({"type": "message", "role": "user", "content": value}, top.at("input"))]
    if not isinstance(value, list):
        raise top.error("input", f"must be a string or an array of items, not {kind_of(value)}")
    return list(top.objs("input"))


def _history(top: Obj, resolve: Resolver | None) -> list[Obj]:
    previous = top.text("previous_response_id")
    if not previous:
        return []
    found = resolve.history(previous) if resolve is not None else None
    if found is None:
        raise invalid("previous_response_id", f"Previous response with id {previous[:80]!r} not found.",
                      "previous_response_not_found")
    return [Obj(item, f"previous_response_id.items[{i}]") for i, item in enumerate(found)]


def _kind(item: Obj) -> str:
    if item.has("type"):
        return item.text("type")
    if item.has("role"):
        return "message"
    if item.has("id"):
        return "item_reference"
    raise item.error("type", "is required")


def _resolved(items: Sequence[Obj], resolve: Resolver | None) -> list[Obj]:
    """The items, with what a reference names in its place."""
    names = [item.required_text("id") if _kind(item) == "item_reference" else None for item in items]
    wanted = [name for name in names if name is not None]
    found = resolve.items(wanted) if resolve is not None and wanted else {}
    for item, name in zip(items, names):
        if name is not None and name not in found:
            raise item.error("id", f"Item with id {name[:80]!r} not found.", "item_not_found")
    return [item if name is None else Obj(found[name], item.path) for item, name in zip(items, names)]


def _tools(top: Obj, items: Sequence[Obj], ignored: dict[str, None]) -> Tools:
    """`tools`, and what items bring along (Codex's additional_tools, the results of a client's tool search)."""
    tools = Tools(ignored)
    for owner in [top, *(i for i in items if _kind(i) in ("additional_tools", "tool_search_output"))]:
        for tool in owner.objs("tools"):
            read_openai_tool(tools, tool)
    return tools


def _messages(top: Obj, items: Sequence[Obj], reading: Reading) -> tuple[Message, ...]:
    out: list[Message] = []
    for item in items:
        kind = _kind(item)
        if kind == "message":
            role = _ROLES.get(item.required_text("role"))
            if role is None:
                raise item.error("role", f"must be one of {', '.join(_ROLES)}")
            for message in reading.message(role, item.raw("content"), item.at("content")):
                _append(out, message.role, message.parts)
        elif kind in _ITEMS:
            role, parts = _ITEMS[kind](item, reading)
            reading.unseen.clear()
            _append(out, role, tuple(parts))
        elif kind not in ("additional_tools", "tool_search_output"):
            reading.skip("item", kind)
    reading.check_end(out)
    return join_leading([top.text("instructions")], out)


def _append(out: list[Message], role: str, parts: Sequence[Part]) -> None:
    """A run of assistant items is one message, and so is a run of outputs; users' items stay apart."""
    if role in ("assistant", "tool"):
        if not parts:
            return
        if out and out[-1].role == role:
            out[-1] = Message(role, out[-1].parts + tuple(parts))
            return
    out.append(Message(role, tuple(parts)))


def _call(item: Obj, reading: Reading) -> tuple[str, list[Part]]:
    call_id = item.text("call_id") or item.text("id")
    if not call_id:
        raise item.error("call_id", "is required")
    name, namespace = item.required_text("name"), item.text("namespace") or None
    if item.text("type") == "custom_tool_call":
        return "assistant", [reading.call(call_id, name, custom_arguments(item.text("input")), True, namespace)]
    arguments = arguments_text(item.raw("arguments"), item.at("arguments"))
    return "assistant", [reading.call(call_id, name, arguments, False, namespace)]


def _output(item: Obj, reading: Reading) -> tuple[str, list[Part]]:
    call_id = item.required_text("call_id")
    return "tool", [reading.result(call_id, item.raw("output"), item.at("output"))]


def _reasoning(item: Obj, reading: Reading) -> tuple[str, list[Part]]:
    """Its content; else what milad's own encrypted_content holds; else the summary. All may be empty or null."""
    text = "".join(p.text("text") for p in item.objs("content"))
    text = text or opened(item.text("encrypted_content")) or "\n".join(p.text("text") for p in item.objs("summary"))
    return "assistant", [Thinking(text)] if text else []


_ITEMS: dict[str, Callable[[Obj, Reading], tuple[str, list[Part]]]] = {
    "function_call": _call, "custom_tool_call": _call, "function_call_output": _output, "custom_tool_call_output": _output,
    "reasoning": _reasoning}


def opened(sealed: str) -> str:
    """The thinking in an encrypted_content of ours; "" for anyone else's."""
    if not sealed.startswith(_OPAQUE):
        return ""
    try:
        inflate = zlib.decompressobj()
        return inflate.decompress(base64.urlsafe_b64decode(sealed[len(_OPAQUE):]), MAX_THOUGHT).decode()
    except (binascii.Error, zlib.error, ValueError):
        return ""


# -- what the response repeats --------------------------------------------------------------------------------------------


def _echo(top: Obj, store: bool) -> dict[str, Any]:
    """The request's fields as the response object shows them."""
    text = top.obj("text")
    reasoning = top.obj("reasoning")
    choice = top.raw("tool_choice")
    shown = {"format": {"type": "text"}, **{k: v for k, v in (text.data if text else {}).items() if v is not None}}
    top.choice("truncation", ("auto", "disabled"), "disabled")
    echo = {
        "background": False, "instructions": top.text("instructions") or None,
        "max_output_tokens": read_max_tokens(top, "max_output_tokens"),
        "max_tool_calls": top.integer("max_tool_calls", 0, INT32_MAX, clamp=True), "metadata": _metadata(top),
        "parallel_tool_calls": top.boolean("parallel_tool_calls", True),
        "previous_response_id": top.text("previous_response_id") or None,
        "prompt_cache_key": top.text("prompt_cache_key") or None,
        "reasoning": {"effort": None, "summary": None, **(reasoning.data if reasoning else {})},
        "safety_identifier": top.text("safety_identifier") or None, "service_tier": "default", "store": store,
        "temperature": top.number("temperature", 0, 2), "text": shown,
        "tool_choice": choice if choice is not None else "auto", "tools": [_shown(t) for t in top.items("tools")],
        "top_logprobs": top.integer("top_logprobs", 0, MAX_TOP_LOGPROBS) or 0, "top_p": top.number("top_p", 0, 1),
        "truncation": "disabled", "user": top.text("user") or None}
    for key in ("text", "reasoning", "tool_choice", "tools"):
        check_json(echo[key], key)
    return echo


def _shown(tool: Any) -> Any:
    """A function tool with the keys that the SDK's type requires."""
    if isinstance(tool, dict) and tool.get("type") == "function":
        return {"parameters": None, "strict": False, **tool}
    return tool


def _metadata(top: Obj) -> dict[str, str]:
    metadata = top.obj("metadata")
    if metadata is None:
        return {}
    return {check_text(k, metadata.path): check_text(v, metadata.at(k)) for k, v in metadata.data.items()}


# -- stored responses -----------------------------------------------------------------------------------------------------

_PREFIXES = {"message": "msg_", "function_call": "fc_", "custom_tool_call": "ctc_", "reasoning": "rs_"}


def input_items(turn: Turn, ident: Ident) -> list[dict[str, Any]]:
    """The request's own items as they are stored and listed: every one with an id and a type, contents as parts."""
    out = []
    for item in turn.meta["input"]:
        kind = _kind(Obj(item))
        full = {**item, "type": kind}
        if not full.get("id"):
            full["id"] = ident.new_id(_PREFIXES.get(kind, "item_"))
        if kind == "message":
            full.setdefault("status", "completed")
            if isinstance(full.get("content"), str):
                part = "output_text" if full.get("role") == "assistant" else "input_text"
                full["content"] = [{"type": part, "text": full["content"]}]
                if part == "output_text":
                    full["content"][0]["annotations"] = []
        out.append(full)
    return out


def list_items(items: Sequence[Mapping[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """GET .../input_items: limit (1..100, 20), order (asc, desc: the default), after (an item's id)."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise bad("order", "must be asc or desc")
    limit = query.get("limit", "20")
    n = check_integer(int(limit) if limit.isascii() and limit.isdigit() and len(limit) < 9 else -1, "limit", 1, MAX_PAGE)
    ordered = list(items if order == "asc" else reversed(items))
    after = query.get("after")
    if after:
        at = next((i for i, item in enumerate(ordered) if item.get("id") == after), None)
        if at is None:
            raise bad("after", f"no item {after[:80]!r}")
        ordered = ordered[at + 1:]
    page = ordered[:n]
    return {"object": "list", "data": page, "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None, "has_more": len(ordered) > n}


def deleted_body(response_id: str) -> dict[str, Any]:
    return {"id": response_id, "object": "response", "deleted": True}


def not_found(response_id: str) -> MiladError:
    return MiladError("not_found", f"Response with id '{response_id[:80]}' not found.", param="response_id")


def not_cancellable(response_id: str) -> MiladError:
    """For a stored response: it ended with its request."""
    return invalid("response_id", f"response '{response_id[:80]}' can't be cancelled: it has ended")

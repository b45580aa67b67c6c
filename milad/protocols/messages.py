"""Anthropic messages: POST /v1/messages and /v1/messages/count_tokens.

Stream: message_start once the prompt is admitted, then per block content_block_start, deltas, content_block_stop with
indices from 0 without gaps, then message_delta and message_stop; ping between. Blocks without any text are left out. Pure.

Known deviations: max_tokens may be missing; thinking.display and budgets are ignored, thinking always comes in full;
signatures are milad's own and any is taken back; a call whose arguments are no JSON object has
{"__unparsedToolInput": text} as its input in a plain body (the word Claude Code uses for it).
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from typing import Any, Mapping, Sequence

from ..conversation import Format, Message, ToolChoice, Turn
from ..errors import ContextOverflow, MiladError
from ..events import Block, BlockEnd, BlockStart, Delta, Event, Failure, Finish, Fold, Started, Usage
from .base import Frame, Ident, prompt_progress
from .chat import is_prefill
from .content import Reading, join_leading, merge_tools
from .fields import MAX_NAME, Obj, check_json, check_text
from .openai import message_of, retry_headers
from .sampling import read_format, read_max_tokens, read_sampling, read_stops, read_thinking
from .tools import Tools, arguments_of, parameters_of

_ERRORS = {
    "auth": "authentication_error", "forbidden": "permission_error", "not_found": "not_found_error",
    "too_large": "request_too_large", "rate_limited": "rate_limit_error", "overloaded": "overloaded_error",
    "internal": "api_error", "unavailable": "overloaded_error", "timeout": "timeout_error"}
_STOPS = {"stop": "end_turn", "stop_sequence": "stop_sequence", "length": "max_tokens",
          "context": "model_context_window_exceeded", "tool_calls": "tool_use"}
_UNPARSED = "__unparsedToolInput"


class Messages:
    name = "messages"
    id_prefix = "msg_"

    def parse(self, body: Mapping[str, Any]) -> Turn:
        top = Obj(body)
        ignored: dict[str, None] = {}
        tools, deferred, searched = _tools(top, ignored)
        choice, parallel = _choice(top, tools)
        reading = Reading(ignored, tools.names)
        messages = _messages(top, reading)
        if not searched:                                         # shown once a tool_reference made it available
            hidden = deferred - reading.references - {choice.name}
            tools.only(set(tools.specs) - hidden)
        thinking, args = read_thinking(top)
        return Turn(
            api="messages", messages=messages, model=top.text("model", most=MAX_NAME), tools=tuple(tools.specs.values()),
            tool_choice=choice, parallel_tool_calls=parallel, declared_tools=bool(tools.declared), format=_format(top),
            sampling=read_sampling(top), max_tokens=read_max_tokens(top, "max_tokens"),
            stop=read_stops(top, "stop_sequences"), prefill=is_prefill(messages), thinking=thinking, template_args=args,
            stream=bool(top.boolean("stream")), ignored=tuple(ignored))

    def parse_count(self, body: Mapping[str, Any]) -> Turn:
        """count_tokens: the same request without the fields about the answer."""
        return self.parse(body)

    def count_body(self, n_tokens: int) -> dict[str, Any]:
        return {"input_tokens": n_tokens}

    def encoder(self, turn: Turn, ident: Ident) -> "MessagesEncoder":
        return MessagesEncoder(turn, ident)

    def error(self, error: MiladError, request_id: str) -> tuple[int, dict[str, Any], list[tuple[str, str]]]:
        status = 529 if error.kind == "overloaded" else error.status
        return status, {"type": "error", "error": _error(error), "request_id": request_id}, retry_headers(error)


def _error(error: MiladError) -> dict[str, str]:
    """The words for an overflow are those on which Claude Code compacts."""
    if isinstance(error, ContextOverflow):
        message = f"prompt is too long: {error.n_tokens} tokens > {error.limit} maximum"
    else:
        message = message_of(error)
    return {"type": _ERRORS.get(error.kind, "invalid_request_error"), "message": message}


# -- in -------------------------------------------------------------------------------------------------------------------


def _messages(body: Obj, reading: Reading) -> tuple[Message, ...]:
    if not body.items("messages"):
        raise body.error("messages", "must be an array with at least one message")
    system = _system(body)
    out: list[Message] = []
    for message in body.objs("messages"):
        role = message.choice("role", ("user", "assistant", "system"), "")
        out += reading.message(role, message.raw("content"), message.at("content"))
    if out[-1].role == "assistant" and not out[-1].parts:
        out.pop()                                                # an empty prefill continues nothing
    reading.check_end(out)
    return join_leading(system, merge_tools(out))


def _system(body: Obj) -> list[str]:
    value = body.raw("system")
    if value is None or isinstance(value, str):
        return [check_text(value, body.at("system"))] if value else []
    texts = []
    for block in body.objs("system"):
        if block.text("type", "text") != "text":
            raise block.error("type", "only text is possible in system")
        texts.append(block.required_text("text"))
    return texts


def _tools(body: Obj, ignored: dict[str, None]) -> tuple[Tools, set[str], bool]:
    """(tools, names of those with defer_loading, whether a server-side tool search that milad can't run stands among them)."""
    tools = Tools(ignored)
    deferred: set[str] = set()
    searched = False
    for tool in body.objs("tools"):
        tools.count(tool.path)
        kind = tool.text("type", "custom")
        if kind != "custom" and not tool.has("input_schema"):
            searched = searched or kind.startswith("tool_search_tool")
            tools.skip(kind, tool.text("name"))
            continue
        name = tool.name()
        tools.add(name, tool.text("description"), parameters_of(tool, "input_schema"), strict=bool(tool.boolean("strict")))
        if tool.boolean("defer_loading"):
            deferred.add(name)
    return tools, deferred, searched


def _choice(body: Obj, tools: Tools) -> tuple[ToolChoice, bool]:
    """(choice, parallel calls allowed)."""
    choice = body.obj("tool_choice")
    if choice is None:
        return ToolChoice(), True
    parallel = not choice.boolean("disable_parallel_tool_use")
    kind = choice.choice("type", ("auto", "any", "tool", "none"), "")
    if kind == "any":
        return tools.required(choice.path), parallel
    if kind == "tool":
        return tools.named(choice.at("name"), choice.name()), parallel
    return ToolChoice(kind), parallel


def _format(body: Obj) -> Format:
    """output_config.format; output_format, as betas called it."""
    config = body.obj("output_config")
    return read_format((config.obj("format") if config else None) or body.obj("output_format"))


# -- out ------------------------------------------------------------------------------------------------------------------


def signature(text: str) -> str:
    """milad's own opaque value for a thinking block."""
    return "milad." + base64.urlsafe_b64encode(hashlib.sha256(text.encode("utf-8", "replace")).digest()[:24]).decode()


class MessagesEncoder:
    def __init__(self, turn: Turn, ident: Ident) -> None:
        self.folds: Sequence[Fold] = [Fold()]
        self._fold = self.folds[0]
        self._names = {t.name: t.api_name for t in turn.tools if t.api_name}
        self._ident = ident
        self._opened = 0                                         # content blocks so far
        self._open = False                                       # whether the fold's last block is one of them
        self._failed = False

    def event(self, choice: int, event: Event) -> list[Frame]:
        self._fold.take(event)
        if isinstance(event, Delta):
            return self._delta(event)
        if isinstance(event, BlockStart):
            return self._start(event)
        if isinstance(event, BlockEnd):
            return self._end(event)
        if isinstance(event, Started):
            message = {**self._message(), "content": [], "stop_reason": None, "stop_sequence": None}
            return [_frame("message_start", message=message)]
        if isinstance(event, Finish):
            delta = {"stop_reason": _STOPS[event.reason], "stop_sequence": event.stop_sequence}
            return [_frame("message_delta", delta=delta, usage=_usage(event.usage))]
        return self.failure(event.error) if isinstance(event, Failure) else []

    def keepalive(self) -> list[Frame]:
        return [_frame("ping", **prompt_progress(self.folds))]

    def failure(self, error: MiladError) -> list[Frame]:
        self._failed = True
        return [_frame("error", error=_error(error))]

    def end(self) -> list[Frame]:
        return [] if self._failed else [_frame("message_stop")]

    def _start(self, event: BlockStart) -> list[Frame]:
        """A call opens as soon as its name is known; text and thinking with their first character."""
        self._open = False
        if event.kind != "tool_call":
            return []
        return self._opening({"type": "tool_use", "id": f"toolu_{event.id}",
                              "name": self._names.get(event.name, event.name), "input": {}})

    def _opening(self, block: dict[str, Any]) -> list[Frame]:
        self._open = True
        self._opened += 1
        return [_frame("content_block_start", index=self._opened - 1, content_block=block)]

    def _delta(self, event: Delta) -> list[Frame]:
        if not event.text:
            return []
        kind = self._fold.blocks[event.index].kind
        if kind == "tool_call":
            return [self._change({"type": "input_json_delta", "partial_json": event.text})]
        thinking = kind == "thinking"
        frames: list[Frame] = []
        if not self._open:
            frames = self._opening({"type": "thinking", "thinking": "", "signature": ""} if thinking else
                                   {"type": "text", "text": ""})
        delta = {"type": "thinking_delta", "thinking": event.text} if thinking else {"type": "text_delta", "text": event.text}
        frames.append(self._change(delta))
        return frames

    def _change(self, delta: dict[str, Any]) -> Frame:
        return _frame("content_block_delta", index=self._opened - 1, delta=delta)

    def _end(self, event: BlockEnd) -> list[Frame]:
        if not self._open:
            return []
        self._open = False
        block = self._fold.blocks[event.index]
        frames: list[Frame] = []
        if block.kind == "thinking":
            frames.append(self._change({"type": "signature_delta", "signature": signature(block.text)}))
        elif block.kind == "tool_call":
            added = arguments_of(block.text, event.complete)[len(block.text):]
            if added:
                frames.append(self._change({"type": "input_json_delta", "partial_json": added}))
        return [*frames, _frame("content_block_stop", index=self._opened - 1)]

    # -- plain ------------------------------------------------------------------------------------------------------------

    def _message(self) -> dict[str, Any]:
        return {"id": self._ident.response_id, "type": "message", "role": "assistant", "model": self._ident.model,
                "usage": {**_usage(self._fold.usage), "service_tier": "standard"}}

    def body(self) -> dict[str, Any]:
        finish = self._fold.finish
        content = [self._block(b) for b in self._fold.blocks if b.text or b.kind == "tool_call"]
        return {**self._message(), "content": content, "stop_reason": _STOPS[finish.reason] if finish else None,
                "stop_sequence": finish.stop_sequence if finish else None}

    def _block(self, block: Block) -> dict[str, Any]:
        if block.kind == "text":
            return {"type": "text", "text": block.text}
        if block.kind == "thinking":
            return {"type": "thinking", "thinking": block.text, "signature": signature(block.text)}
        return {"type": "tool_use", "id": f"toolu_{block.id}", "name": self._names.get(block.name, block.name),
                "input": _input(block.text, block.complete)}


def _frame(kind: str, **data: Any) -> Frame:
    return kind, {"type": kind, **data}


def _usage(usage: Usage) -> dict[str, Any]:
    """input_tokens + cache_read_input_tokens is the whole prompt, as count_tokens reports it."""
    return {"input_tokens": usage.input_tokens - usage.cached_tokens, "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens, "output_tokens": usage.output_tokens,
            "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens}}


def _input(text: str, complete: bool) -> dict[str, Any]:
    """A call's arguments as an object; of a cut call what came whole, as the SDK reads the stream's pieces."""
    if not text.strip():
        return {}
    try:
        value = check_json(json.loads(text), "input")            # half surrogates and NaN would not be JSON again
    except (ValueError, RecursionError, MiladError):
        value = None if complete else partial_object(text)
    return value if isinstance(value, dict) else {_UNPARSED: text}


_TOKEN = re.compile(r'\s*(?:([{\[])|([}\]])|[:,]|"(?:[^"\\]|\\.)*"|true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?'
                    r"(?![\d.eE+-]))", re.DOTALL | re.ASCII)
_MAX_TRIES = 4           # after a key, its colon or a comma there is no whole value yet: at most three tokens back


def partial_object(text: str) -> Any:
    """The beginning of a JSON value, closed after its last whole member, as jiter's partial_mode does, which the SDK uses.
    None: not JSON."""
    stack: list[str] = []
    ends: list[tuple[int, str]] = []
    at = 0
    while True:
        token = _TOKEN.match(text, at)
        if token is None:
            break
        at = token.end()
        if token[1]:
            stack.append("}" if token[1] == "{" else "]")
        elif token[2] and (not stack or stack.pop() != token[2]):
            return None
        ends.append((at, "".join(reversed(stack))))
        if len(ends) > _MAX_TRIES:
            del ends[0]
    if text[at:].lstrip()[:1] not in ("", *'"-0123456789tfn'):   # no beginning of a token
        return None
    for end, closers in reversed(ends):
        try:
            return check_json(json.loads(text[:end] + closers), "input")
        except (ValueError, RecursionError, MiladError):
            continue
    return None

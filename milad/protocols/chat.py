"""OpenAI chat completions: POST /v1/chat/completions.

Stream: per choice one chunk with the role, then deltas of content, reasoning_content and tool_calls, then an empty delta
with finish_reason; after all choices usage where asked for, then [DONE]. Pure.
"""

from __future__ import annotations

from typing import Any, Mapping, Sequence

from ..conversation import Format, Message, Part, Thinking, ToolCall, Turn
from ..errors import MiladError
from ..events import BlockEnd, BlockStart, Delta, Event, Failure, Finish, Fold, Progress, Started
from .base import Frame, Ident, prompt_progress
from .content import Reading, arguments_text, custom_arguments, join_leading, merge_tools
from .fields import MAX_NAME, Obj
from .openai import error_object, error_reply, logprob_list, usage_object
from .sampling import (MAX_CHOICES, MAX_TOP_LOGPROBS, read_format, read_max_tokens, read_sampling, read_schema, read_stops,
                       read_thinking)
from .tools import FreeformInput, Tools, arguments_of, freeform_of, read_openai_choice, read_openai_tool

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool",
          "function": "tool"}
_FINISH = {"stop": "stop", "stop_sequence": "stop", "length": "length", "context": "length", "tool_calls": "tool_calls"}


class Chat:
    name = "chat"
    id_prefix = "chatcmpl-"

    def parse(self, body: Mapping[str, Any]) -> Turn:
        top = Obj(body)
        _refuse(top)
        ignored: dict[str, None] = {}
        tools = Tools(ignored)
        for tool in top.objs("tools"):
            read_openai_tool(tools, tool)
        choice = read_openai_choice(tools, top)
        messages = _messages(top, Reading(ignored, tools.names))
        prefill = is_prefill(messages)
        thinking, args = read_thinking(top)
        return Turn(
            api="chat", messages=messages, model=top.text("model", most=MAX_NAME), tools=tuple(tools.specs.values()),
            tool_choice=choice, parallel_tool_calls=top.boolean("parallel_tool_calls", True) is not False,
            declared_tools=bool(tools.declared), format=_format(top), sampling=read_sampling(top),
            max_tokens=read_max_tokens(top, "max_completion_tokens", "max_tokens"), stop=read_stops(top, "stop"),
            n=top.integer("n", 1, MAX_CHOICES) or 1, top_logprobs=_logprobs(top), prefill=prefill, thinking=thinking,
            template_args=args, stream=bool(top.boolean("stream")), ignored=tuple(ignored),
            meta={"include_usage": include_usage(top), "return_progress": top.boolean("return_progress") is True})

    def encoder(self, turn: Turn, ident: Ident) -> "ChatEncoder":
        return ChatEncoder(turn, ident)

    def error(self, error: MiladError, request_id: str) -> tuple[int, dict[str, Any], list[tuple[str, str]]]:
        return error_reply(error, request_id)


def include_usage(body: Obj) -> bool:
    options = body.obj("stream_options")
    return bool(options and options.boolean("include_usage"))


def _refuse(body: Obj) -> None:
    """Fields that would change the meaning and that nothing here can do."""
    for key in ("functions", "function_call"):
        if body.raw(key) not in (None, [], "none", "auto"):
            raise body.error(key, "is not supported: use tools and tool_choice")
    if body.has("audio") or any(m != "text" for m in body.items("modalities")):
        raise body.error("modalities", "only text is supported")


def _format(body: Obj) -> Format:
    """response_format; llama.cpp's `grammar` and `json_schema` as well."""
    if body.has("grammar"):
        text = body.text("grammar")
        return Format("gbnf" if "::=" in text else "lark", text=text)
    if body.has("json_schema") and not body.has("response_format"):
        return Format("json_schema", schema=read_schema(body, "json_schema"))
    return read_format(body.obj("response_format"))


def _logprobs(body: Obj) -> int | None:
    wanted = body.boolean("logprobs")
    top = body.integer("top_logprobs", 0, MAX_TOP_LOGPROBS)
    if top and not wanted:
        raise body.error("top_logprobs", "needs logprobs: true")
    return (top or 0) if wanted else None


def _messages(body: Obj, reading: Reading) -> tuple[Message, ...]:
    if not body.items("messages"):
        raise body.error("messages", "must be an array with at least one message")
    out: list[Message] = []
    for message in body.objs("messages"):
        role = _ROLES.get(message.required_text("role"))
        if role is None:
            raise message.error("role", f"must be one of {', '.join(_ROLES)}")
        path = message.at("content")
        if role == "tool":
            reading.unseen.clear()
            out.append(Message("tool", (reading.result(
                message.text("tool_call_id"), message.raw("content"), path, name=message.text("name", most=MAX_NAME)),)))
        elif role == "assistant":
            out += _assistant(message, reading)
        else:
            out += reading.message(role, message.raw("content"), path)
    if out and out[-1].role == "assistant" and not out[-1].parts:
        out.pop()                                                # an empty prefill continues nothing
    reading.check_end(out)
    return join_leading((), merge_tools(out))


def _assistant(message: Obj, reading: Reading) -> list[Message]:
    """Thinking, then text, then tool calls: the order in which a chat message's fields came about."""
    before: list[Part] = []
    thought = message.text("reasoning_content") or message.text("reasoning")
    if thought:
        before.append(Thinking(thought))
    calls: list[Part] = [_call(c, reading) for c in message.objs("tool_calls")]
    legacy = message.obj("function_call")
    if legacy is not None:
        calls.append(reading.call("", legacy.required_text("name"), arguments_text(legacy.raw("arguments"), legacy.at("arguments"))))
    content = message.raw("content")
    if not content and message.has("refusal"):
        content = message.text("refusal")
    messages = reading.message("assistant", content, message.at("content"), before)
    if calls:
        last = messages[-1]
        messages[-1] = Message(last.role, last.parts + tuple(calls))
    return messages


def _call(call: Obj, reading: Reading) -> ToolCall:
    custom = call.obj("custom")
    if custom is not None:
        return reading.call(call.text("id"), custom.required_text("name"), custom_arguments(custom.text("input")), custom=True)
    function = call.obj("function")
    if function is None:
        raise call.error("function", "is required")
    return reading.call(call.text("id"), function.required_text("name"),
                        arguments_text(function.raw("arguments"), function.at("arguments")))


def is_prefill(messages: Sequence[Message]) -> bool:
    """The assistant's own words at the end are continued; a call or thinking there is only history."""
    if not messages or messages[-1].role != "assistant":
        return False
    last = messages[-1]
    return bool(last.text) and not any(isinstance(p, ToolCall) for p in last.parts)


class _Choice:
    """Where one choice's stream stands."""

    __slots__ = ("role_sent", "calls", "done", "freeform")

    def __init__(self) -> None:
        self.role_sent = False
        self.calls: dict[int, int] = {}                          # block index -> tool_calls index
        self.freeform: FreeformInput | None = None
        self.done = False


class ChatEncoder:
    def __init__(self, turn: Turn, ident: Ident) -> None:
        self.folds: Sequence[Fold] = [Fold() for _ in range(turn.n)]
        self._choices = [_Choice() for _ in range(turn.n)]
        self._custom = {t.name: t.api_name or t.name for t in turn.tools if t.custom}
        self._names = {t.name: t.api_name for t in turn.tools if t.api_name}
        self._turn = turn
        self._ident = ident
        self._usage = bool(turn.meta.get("include_usage"))
        self._progress = bool(turn.meta.get("return_progress"))
        self._failed = False

    # -- stream -----------------------------------------------------------------------------------------------------------

    def event(self, choice: int, event: Event) -> list[Frame]:
        fold = self.folds[choice]
        fold.take(event)
        if isinstance(event, Delta):
            return self._delta(choice, fold, event)
        if isinstance(event, BlockStart):
            return self._start(choice, event) if event.kind == "tool_call" else []
        if isinstance(event, BlockEnd):
            return self._end(choice, fold, event) if event.index in self._choices[choice].calls else []
        if isinstance(event, Started):
            return self._role(choice)
        if isinstance(event, Finish):
            self._choices[choice].done = True
            return [*self._role(choice), self._chunk(choice, {}, _FINISH[event.reason])]
        if isinstance(event, Failure):
            return self.failure(event.error)
        return self.keepalive() if isinstance(event, Progress) and self._progress else []

    def keepalive(self) -> list[Frame]:
        """Some agents count only data chunks as life (Codex's and Qwen Code's habits): an empty delta."""
        choice = next((i for i, c in enumerate(self._choices) if not c.done), 0)
        role = self._role(choice)
        progress = prompt_progress(self.folds)
        if role and not progress:
            return role
        name, chunk = self._chunk(choice, {})
        return [*role, (name, {**chunk, **progress})]

    def failure(self, error: MiladError) -> list[Frame]:
        self._failed = True
        return [(None, {"error": error_object(error)})]

    def end(self) -> list[Frame]:
        if self._failed:
            return []
        frames: list[Frame] = []
        if self._usage:
            frames.append((None, {**self._head(), "choices": [], "usage": self._usage_object()}))
        return [*frames, (None, "[DONE]")]

    def _head(self) -> dict[str, Any]:
        ident = self._ident
        return {"id": ident.response_id, "object": "chat.completion.chunk", "created": ident.created, "model": ident.model,
                "system_fingerprint": None, "service_tier": "default"}

    def _chunk(self, choice: int, delta: dict[str, Any], finish: str | None = None,
               logprobs: dict[str, Any] | None = None) -> Frame:
        chunk = self._head()
        chunk["choices"] = [{"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": finish}]
        if self._usage:
            chunk["usage"] = None
        return None, chunk

    def _role(self, choice: int) -> list[Frame]:
        state = self._choices[choice]
        if state.role_sent:
            return []
        state.role_sent = True
        return [self._chunk(choice, {"role": "assistant", "content": ""})]

    def _delta(self, choice: int, fold: Fold, event: Delta) -> list[Frame]:
        kind = fold.blocks[event.index].kind
        if kind == "text":
            logprobs = {"content": logprob_list(event.logprobs), "refusal": None} if event.logprobs else None
            if not event.text and logprobs is None:
                return []
            return [self._chunk(choice, {"content": event.text}, None, logprobs)]
        if not event.text:
            return []
        if kind == "thinking":
            return [self._chunk(choice, {"reasoning_content": event.text})]
        return self._arguments(choice, event.index, event.text)

    def _arguments(self, choice: int, index: int, text: str) -> list[Frame]:
        state = self._choices[choice]
        if state.freeform is not None:
            text = state.freeform.feed(text)
            part: dict[str, Any] = {"custom": {"input": text}}
        else:
            part = {"function": {"arguments": text}}
        return [self._chunk(choice, {"tool_calls": [{"index": state.calls[index], **part}]})] if text else []

    def _start(self, choice: int, event: BlockStart) -> list[Frame]:
        state = self._choices[choice]
        state.calls[event.index] = at = len(state.calls)
        call = {"index": at, "id": f"call_{event.id}"}
        if event.name in self._custom:
            state.freeform = FreeformInput()
            call.update(type="custom", custom={"name": self._custom[event.name], "input": ""})
        else:
            state.freeform = None
            call.update(type="function",
                        function={"name": self._names.get(event.name, event.name), "arguments": ""})
        return [*self._role(choice), self._chunk(choice, {"tool_calls": [call]})]

    def _end(self, choice: int, fold: Fold, event: BlockEnd) -> list[Frame]:
        state = self._choices[choice]
        at = state.calls[event.index]
        if state.freeform is not None:
            text = state.freeform.end()
            return [self._chunk(choice, {"tool_calls": [{"index": at, "custom": {"input": text}}]})] if text else []
        text = fold.blocks[event.index].text
        added = arguments_of(text, event.complete)[len(text):]
        return [self._chunk(choice, {"tool_calls": [{"index": at, "function": {"arguments": added}}]})] if added else []

    # -- plain ------------------------------------------------------------------------------------------------------------

    def body(self) -> dict[str, Any]:
        ident = self._ident
        return {"id": ident.response_id, "object": "chat.completion", "created": ident.created, "model": ident.model,
                "choices": [self._choice_body(i, fold) for i, fold in enumerate(self.folds)],
                "usage": self._usage_object(), "system_fingerprint": None, "service_tier": "default"}

    def _usage_object(self) -> dict[str, Any]:
        usages = [f.usage for f in self.folds]
        return usage_object(usages, usages[:1])

    def _choice_body(self, index: int, fold: Fold) -> dict[str, Any]:
        calls = [self._call_body(b) for b in fold.blocks if b.kind == "tool_call"]
        text, thought = fold.text(), fold.text("thinking")
        message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None, "refusal": None,
                                   "annotations": []}
        if thought:
            message["reasoning_content"] = thought
        if calls:
            message["tool_calls"] = calls
        logprobs = None
        if self._turn.top_logprobs is not None:
            tokens = [t for b in fold.blocks if b.kind == "text" for t in b.logprobs]
            logprobs = {"content": logprob_list(tokens), "refusal": None}
        reason = fold.finish.reason if fold.finish else "length"
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": _FINISH[reason]}

    def _call_body(self, block: Any) -> dict[str, Any]:
        if block.name in self._custom:
            return {"id": f"call_{block.id}", "type": "custom",
                    "custom": {"name": self._custom[block.name], "input": freeform_of(block.text)}}
        return {"id": f"call_{block.id}", "type": "function",
                "function": {"name": self._names.get(block.name, block.name),
                             "arguments": arguments_of(block.text, block.complete)}}

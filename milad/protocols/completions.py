"""OpenAI's legacy completions: POST /v1/completions. A raw prompt, no roles, no tools.

Several prompts in one request become Turn.prompts; the app runs each as a Turn of its own and numbers the choices prompt by
prompt. echo comes as the first Delta of the choice, so nothing here knows of it. Pure.
"""

from __future__ import annotations

import codecs
from typing import Any, Mapping, Sequence, Union

from ..conversation import Format, Turn
from ..errors import MiladError
from ..events import Delta, Event, Failure, Finish, Fold, TokenLogprob
from .base import Frame, Ident, prompt_progress
from .chat import include_usage
from .fields import INT32_MAX, MAX_NAME, Obj, bad, check_integer, check_text, kind_of
from .openai import error_object, error_reply, finite, usage_object
from .sampling import (MAX_CHOICES, MAX_TOP_LOGPROBS, read_format, read_max_tokens, read_sampling, read_stops)

DEFAULT_MAX_TOKENS = 16  # OpenAI's
_FINISH = {"stop": "stop", "stop_sequence": "stop", "length": "length", "context": "length", "tool_calls": "stop"}

Prompt = Union[str, "tuple[int, ...]"]


class Completions:
    name = "completions"
    id_prefix = "cmpl-"

    def parse(self, body: Mapping[str, Any]) -> Turn:
        top = Obj(body)
        prompts = _prompts(top)
        n = top.integer("n", 1, MAX_CHOICES) or 1
        best_of = top.integer("best_of", 1, MAX_CHOICES)
        if best_of is not None and best_of > n:
            raise top.error("best_of", "is not supported beyond n")
        if n * len(prompts) > MAX_CHOICES:
            raise top.error("prompt", f"{len(prompts)} prompts times n = {n} are more than {MAX_CHOICES} choices")
        keys = ("max_tokens", "max_completion_tokens")
        max_tokens = read_max_tokens(top, *keys, least=0)
        if max_tokens is None and not any(top.has(k) for k in keys):
            max_tokens = DEFAULT_MAX_TOKENS
        return Turn(
            api="completions", prompt=prompts[0], prompts=prompts if len(prompts) > 1 else (), suffix=top.text("suffix"),
            model=top.text("model", most=MAX_NAME), format=_format(top), sampling=read_sampling(top), max_tokens=max_tokens,
            stop=read_stops(top, "stop"), n=n, top_logprobs=top.integer("logprobs", 0, MAX_TOP_LOGPROBS),
            echo=bool(top.boolean("echo")), stream=bool(top.boolean("stream")), meta={"include_usage": include_usage(top)})

    def encoder(self, turn: Turn, ident: Ident) -> "CompletionsEncoder":
        return CompletionsEncoder(turn, ident)

    def error(self, error: MiladError, request_id: str) -> tuple[int, dict[str, Any], list[tuple[str, str]]]:
        return error_reply(error, request_id)


def _format(body: Obj) -> Format:
    """Not OpenAI's, but servers' custom: response_format and `grammar` work here as in chat."""
    if body.has("grammar"):
        text = body.text("grammar")
        return Format("gbnf" if "::=" in text else "lark", text=text)
    return read_format(body.obj("response_format"))


def _prompts(body: Obj) -> tuple[Prompt, ...]:
    """A string, token ids, or a list of either."""
    value, path = body.raw("prompt"), body.at("prompt")
    if value is None:
        raise bad(path, "is required")
    if isinstance(value, str):
        return (check_text(value, path),)
    if not isinstance(value, list):
        raise bad(path, f"must be a string, token ids, or an array of these, not {kind_of(value)}")
    if not value:
        raise bad(path, "must not be empty")
    if not isinstance(value[0], (str, list)):
        return (_ids(value, path),)
    if len(value) > MAX_CHOICES:
        raise bad(path, f"has {len(value)} entries, more than {MAX_CHOICES}")
    return tuple(_ids(v, f"{path}[{i}]") if isinstance(v, list) else check_text(v, f"{path}[{i}]")
                 for i, v in enumerate(value))


def _ids(value: list[Any], path: str) -> tuple[int, ...]:
    if not value:
        raise bad(path, "must not be empty")
    return tuple(check_integer(v, f"{path}[{i}]", 0, INT32_MAX) for i, v in enumerate(value))


class _Logprobs:
    """The legacy arrays, token by token, for one choice."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0                                         # characters before the token that comes next

    def take(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        out: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token in tokens:
            out["tokens"].append(_spelling(token.data))
            scored = token.logprob == token.logprob              # the first token of an echoed prompt has none
            out["token_logprobs"].append(finite(token.logprob) if scored else None)
            out["top_logprobs"].append({_spelling(d): finite(p) for d, p in token.top} if scored else None)
            out["text_offset"].append(self._offset)
            self._offset += len(self._decoder.decode(token.data))
        return out


def _spelling(data: bytes) -> str:
    """OpenAI's: the text, or bytes:\\xe2\\x80 for part of a character."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{b:02x}" for b in data)


class CompletionsEncoder:
    def __init__(self, turn: Turn, ident: Ident) -> None:
        self._turn = turn
        self._ident = ident
        n = turn.n * max(1, len(turn.prompts))
        self.folds: Sequence[Fold] = [Fold() for _ in range(n)]
        self._logprobs = [_Logprobs() for _ in range(n)]
        self._usage = bool(turn.meta.get("include_usage"))
        self._failed = False

    def event(self, choice: int, event: Event) -> list[Frame]:
        self.folds[choice].take(event)
        if isinstance(event, Delta):
            logprobs = self._logprobs[choice].take(event.logprobs) if event.logprobs else None
            return [self._chunk(choice, event.text, None, logprobs)] if event.text or logprobs else []
        if isinstance(event, Finish):
            return [self._chunk(choice, "", _FINISH[event.reason])]
        return self.failure(event.error) if isinstance(event, Failure) else []

    def keepalive(self) -> list[Frame]:
        name, chunk = self._chunk(next((i for i, f in enumerate(self.folds) if f.finish is None), 0), "")
        return [(name, {**chunk, **prompt_progress(self.folds)})]

    def failure(self, error: MiladError) -> list[Frame]:
        self._failed = True
        return [(None, {"error": error_object(error)})]

    def end(self) -> list[Frame]:
        if self._failed:
            return []
        usage: list[Frame] = [(None, {**self._head(), "choices": [], "usage": self._usage_object()})] if self._usage else []
        return [*usage, (None, "[DONE]")]

    def _head(self) -> dict[str, Any]:
        ident = self._ident
        return {"id": ident.response_id, "object": "text_completion", "created": ident.created, "model": ident.model,
                "system_fingerprint": None}

    def _chunk(self, choice: int, text: str, finish: str | None = None, logprobs: dict[str, Any] | None = None) -> Frame:
        chunk = self._head()
        chunk["choices"] = [{"index": choice, "text": text, "logprobs": logprobs, "finish_reason": finish}]
        if self._usage:
            chunk["usage"] = None
        return None, chunk

    def _usage_object(self) -> dict[str, Any]:
        usages = [f.usage for f in self.folds]
        return usage_object(usages, usages[::self._turn.n])

    def body(self) -> dict[str, Any]:
        choices = []
        for i, fold in enumerate(self.folds):
            tokens = [t for b in fold.blocks for t in b.logprobs]
            logprobs = _Logprobs().take(tokens) if self._turn.top_logprobs is not None else None
            reason = fold.finish.reason if fold.finish else "length"
            choices.append({"index": i, "text": "".join(b.text for b in fold.blocks), "logprobs": logprobs,
                            "finish_reason": _FINISH[reason]})
        return {**self._head(), "choices": choices, "usage": self._usage_object()}

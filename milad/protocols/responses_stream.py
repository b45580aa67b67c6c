"""OpenAI responses, the way out: the event stream and the response object, from one list of output items.

created, in_progress; per item output_item.added, its parts and deltas, output_item.done; then completed, incomplete or
failed with the whole response. Items without any text are left out. Ids are given out when an item opens and never change.
Pure.
"""

from __future__ import annotations

import base64
import zlib
from typing import Any, Sequence

from ..conversation import ToolSpec, Turn
from ..errors import MiladError
from ..events import Block, BlockEnd, BlockStart, Delta, Event, Failure, Fold, Started, TokenLogprob
from .base import Frame, Ident, prompt_progress
from .openai import logprob_list, message_of
from .tools import FreeformInput, arguments_of, freeform_of

_CUT = ("length", "context")


def sealed(text: str) -> str:
    """Thinking as the opaque encrypted_content: clients that keep nothing send it back, responses.opened reads it."""
    return "milad1." + base64.urlsafe_b64encode(zlib.compress(text.encode("utf-8", "replace"), 1)).decode()


class _Item:
    """One output item: a block of the fold with its ids."""

    __slots__ = ("id", "index", "block", "spec", "kind", "freeform", "status")

    def __init__(self, item_id: str, index: int, block: Block, kind: str, spec: ToolSpec | None) -> None:
        self.id = item_id
        self.index = index
        self.block = block
        self.kind = kind                                         # message, reasoning, function_call, custom_tool_call
        self.spec = spec
        self.freeform = FreeformInput() if kind == "custom_tool_call" else None
        self.status = "in_progress"


class ResponsesEncoder:
    def __init__(self, turn: Turn, ident: Ident) -> None:
        self.folds: Sequence[Fold] = [Fold()]
        self._fold = self.folds[0]
        self._turn = turn
        self._ident = ident
        self._specs = {t.name: t for t in turn.tools}
        self._items: list[_Item] = []
        self._open: _Item | None = None
        self._sequence = 0
        self._created = False
        self._failed: MiladError | None = None

    # -- stream -----------------------------------------------------------------------------------------------------------

    def event(self, choice: int, event: Event) -> list[Frame]:
        self._fold.take(event)
        if isinstance(event, Delta):
            return self._delta(event)
        if isinstance(event, BlockStart):
            return self._start(event)
        if isinstance(event, BlockEnd):
            return self._end(event.complete)
        if isinstance(event, Started):
            return self._begin()
        return self.failure(event.error) if isinstance(event, Failure) else []

    def keepalive(self) -> list[Frame]:
        return self._begin() or [self._lifecycle("in_progress", **prompt_progress(self.folds))]

    def failure(self, error: MiladError) -> list[Frame]:
        self._failed = error
        if self._open is not None:
            self._open.status = "incomplete"
        return [*self._begin(), self._lifecycle("failed")]

    def end(self) -> list[Frame]:
        return [] if self._failed else [self._lifecycle(self._status())]

    def _begin(self) -> list[Frame]:
        if self._created:
            return []
        self._created = True
        return [self._lifecycle("created"), self._lifecycle("in_progress")]

    def _frame(self, kind: str, **data: Any) -> Frame:
        frame = {"type": kind, "sequence_number": self._sequence, **data}
        self._sequence += 1
        return kind, frame

    def _lifecycle(self, kind: str, **beside: Any) -> Frame:
        status = "in_progress" if kind == "created" else kind
        return self._frame(f"response.{kind}", response=self._response(status), **beside)

    def _start(self, event: BlockStart) -> list[Frame]:
        """A call opens as soon as its name is known; text and thinking with their first character."""
        self._open = None
        return self._opening(event.index) if event.kind == "tool_call" else []

    def _opening(self, at: int) -> list[Frame]:
        block = self._fold.blocks[at]
        spec = self._specs.get(block.name) if block.kind == "tool_call" else None
        kind, prefix = {"text": ("message", "msg_"), "thinking": ("reasoning", "rs_")}.get(
            block.kind, ("custom_tool_call", "ctc_") if spec is not None and spec.custom else ("function_call", "fc_"))
        item = _Item(self._ident.new_id(prefix), len(self._items), block, kind, spec)
        self._items.append(item)
        self._open = item
        frames = [self._frame("response.output_item.added", output_index=item.index, item=self._item(item, empty=True))]
        if kind in ("message", "reasoning"):
            frames.append(self._of(item, "response.content_part.added", content_index=0, part=self._part(item, "", [])))
        return frames

    def _of(self, item: _Item, kind: str, **data: Any) -> Frame:
        return self._frame(kind, item_id=item.id, output_index=item.index, **data)

    def _delta(self, event: Delta) -> list[Frame]:
        frames: list[Frame] = []
        logprobs: Sequence[TokenLogprob] = event.logprobs
        if self._open is None:
            if not event.text:
                return []
            frames = self._opening(event.index)
            logprobs = self._fold.blocks[event.index].logprobs   # those of tokens that had no text yet as well
        item = self._open
        assert item is not None
        if item.kind == "message":
            if event.text or logprobs:
                frames.append(self._of(item, "response.output_text.delta", content_index=0, delta=event.text,
                                       logprobs=logprob_list(logprobs)))
            return frames
        text = item.freeform.feed(event.text) if item.freeform is not None else event.text
        if not text:
            return frames
        if item.kind == "reasoning":
            frames.append(self._of(item, "response.reasoning_text.delta", content_index=0, delta=text))
        elif item.kind == "function_call":
            frames.append(self._of(item, "response.function_call_arguments.delta", delta=text))
        else:
            frames.append(self._of(item, "response.custom_tool_call_input.delta", delta=text))
        return frames

    def _end(self, complete: bool) -> list[Frame]:
        item, self._open = self._open, None
        if item is None:
            return []
        item.status = "completed" if complete else "incomplete"
        text = item.block.text
        if item.kind in ("message", "reasoning"):
            frames = self._text_done(item, text)
        elif item.kind == "function_call":
            frames = self._call_done(item, text)
        else:
            assert item.freeform is not None
            rest = item.freeform.end()
            frames = [self._of(item, "response.custom_tool_call_input.delta", delta=rest)] if rest else []
            frames.append(self._of(item, "response.custom_tool_call_input.done", input=freeform_of(text)))
        frames.append(self._frame("response.output_item.done", output_index=item.index, item=self._item(item)))
        return frames

    def _text_done(self, item: _Item, text: str) -> list[Frame]:
        logprobs = logprob_list(item.block.logprobs)
        done = self._of(item, "response.output_text.done", content_index=0, text=text, logprobs=logprobs) \
            if item.kind == "message" else self._of(item, "response.reasoning_text.done", content_index=0, text=text)
        return [done, self._of(item, "response.content_part.done", content_index=0, part=self._part(item, text, logprobs))]

    def _call_done(self, item: _Item, text: str) -> list[Frame]:
        whole = arguments_of(text, item.block.complete)
        added = whole[len(text):]
        frames = [self._of(item, "response.function_call_arguments.delta", delta=added)] if added else []
        frames.append(self._of(item, "response.function_call_arguments.done", name=self._name(item), arguments=whole))
        return frames

    # -- objects ----------------------------------------------------------------------------------------------------------

    def _name(self, item: _Item) -> str:
        return item.spec.api_name or item.spec.name if item.spec is not None else item.block.name

    def _part(self, item: _Item, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        if item.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _item(self, item: _Item, empty: bool = False) -> dict[str, Any]:
        """The item as added (empty) or as it stands."""
        text = "" if empty else item.block.text
        head = {"id": item.id, "type": item.kind, "status": item.status}
        if item.kind == "message":
            part = self._part(item, text, logprob_list(item.block.logprobs) if not empty else [])
            return {**head, "role": "assistant", "content": [] if empty else [part]}
        if item.kind == "reasoning":
            out = {**head, "summary": [], "content": [] if empty else [self._part(item, text, [])]}
            if self._turn.meta.get("encrypted"):
                out["encrypted_content"] = None if empty else sealed(text)
            return out
        out = {**head, "call_id": f"call_{item.block.id}", "name": self._name(item)}
        if item.kind == "custom_tool_call":
            out["input"] = freeform_of(text)
        else:
            out["arguments"] = arguments_of(text, item.block.complete) if not empty else ""
        if item.spec is not None and item.spec.namespace:
            out["namespace"] = item.spec.namespace
        return out

    def _status(self) -> str:
        finish = self._fold.finish
        if self._failed is not None:
            return "failed"
        if finish is None:
            return "in_progress"
        return "incomplete" if finish.reason in _CUT else "completed"

    def _response(self, status: str) -> dict[str, Any]:
        ident, failed = self._ident, self._failed
        over = status in ("completed", "incomplete", "failed")
        return {
            "id": ident.response_id, "object": "response", "created_at": ident.created, "status": status,
            "error": {"code": _code(failed), "message": message_of(failed)} if failed is not None else None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": ident.model, "output": [self._item(i) for i in self._items] if over else [],
            "usage": self._usage() if over else None, **self._turn.meta["echo"]}

    def _usage(self) -> dict[str, Any]:
        usage = self._fold.usage
        return {"input_tokens": usage.input_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
                "output_tokens": usage.output_tokens,
                "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
                "total_tokens": usage.input_tokens + usage.output_tokens}

    def body(self) -> dict[str, Any]:
        return self._response(self._status())


def _code(error: MiladError) -> str:
    """The codes that clients of response.failed know (Codex: context_length_exceeded)."""
    if error.kind == "overflow":
        return "context_length_exceeded"
    if error.kind in ("overloaded", "rate_limited"):
        return "rate_limit_exceeded"
    return "server_error" if error.status >= 500 else "invalid_prompt"

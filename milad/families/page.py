"""What renderers share: segments written in order, and views of a conversation that vendors' templates take for granted.

A control token is written as Special only by a family's own spelling; whatever a client sent is Plain. Knows no family.
"""

from __future__ import annotations

import json
import re
from typing import AbstractSet, Any, Iterable, Sequence

from ..conversation import IMAGE_NOTE, Image, Message, Part, Text, Thinking, ToolCall, ToolResult, ToolSpec
from .base import Plain, Segment, Special

REMINDER = ("<system-reminder>\n", "\n</system-reminder>")


def tojson(value: Any, indent: int | None = None) -> str:
    """The `tojson` of Hugging Face's templates: json.dumps without ASCII escapes and without HTML escapes."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


class Page:
    """Segments in order, neighbouring text joined.

    `soft` are a family's markers that only some of its vocabularies hold as one token (`<tool_call>`): own() writes them as
    Special where `specials` has them, else as text.
    """

    def __init__(self, specials: AbstractSet[str], soft: Sequence[str] = ()) -> None:
        self._parts: list[Segment] = []
        self._text: list[str] = []
        self._soft = [s for s in soft if s in specials]
        self._split = re.compile("(" + "|".join(map(re.escape, self._soft)) + ")") if self._soft else None
        self._specials = specials

    def mark(self, spelling: str) -> None:
        self._flush()
        self._parts.append(Special(spelling))

    def mark_if_known(self, spelling: str) -> None:
        """BOS and the like: nothing where the vocabulary lacks it."""
        if spelling in self._specials:
            self.mark(spelling)

    def text(self, text: str) -> None:
        """A client's words, or the family's without markers."""
        if text:
            self._text.append(text)

    def own(self, text: str) -> None:
        """The family's own words, soft markers in them as control tokens."""
        if self._split is None:
            self.text(text)
            return
        for i, part in enumerate(self._split.split(text)):
            if i % 2:
                self.mark(part)
            else:
                self.text(part)

    def segments(self) -> list[Segment]:
        self._flush()
        return self._parts

    def _flush(self) -> None:
        if self._text:
            self._parts.append(Plain("".join(self._text)))
            self._text.clear()


def split_system(messages: Sequence[Message]) -> tuple[str | None, list[Message]]:
    """(the leading system text or None, the rest). Several leading system messages are one, joined by a blank line."""
    n = 0
    while n < len(messages) and messages[n].role == "system":
        n += 1
    return ("\n\n".join(m.text for m in messages[:n]) if n else None), list(messages[n:])


def flatten(messages: Iterable[Message]) -> list[Message]:
    """One tool message per result, as templates count them."""
    out: list[Message] = []
    for m in messages:
        if m.role == "tool":
            out += [Message("tool", (p,)) for p in m.parts if isinstance(p, ToolResult)]
        else:
            out.append(m)
    return out


def merged(messages: Iterable[Message], roles: AbstractSet[str] = frozenset(("user", "assistant"))) -> list[Message]:
    """Same-role neighbours as one message, their texts joined by one newline (WIRE: families of strict alternation)."""
    out: list[Message] = []
    parts: list[Part] = []                 # of the last one
    spoke = False
    for m in messages:
        if out and m.role in roles and out[-1].role == m.role:
            if spoke and has_text(m):
                parts.append(Text("\n"))
            parts += m.parts
            spoke = spoke or has_text(m)
            continue
        if out:
            out[-1] = Message(out[-1].role, tuple(parts))
        out.append(m)
        parts, spoke = list(m.parts), has_text(m)
    if out:
        out[-1] = Message(out[-1].role, tuple(parts))
    return out


def reminded(messages: Iterable[Message]) -> list[Message]:
    """System messages as user messages wrapped in <system-reminder>; merged() then joins them to the turn beside."""
    return [Message("user", (Text(REMINDER[0] + m.text + REMINDER[1]),)) if m.role == "system" else m for m in messages]


def has_text(message: Message) -> bool:
    return any(isinstance(p, (Text, Image)) for p in message.parts)


def calls(message: Message) -> list[ToolCall]:
    return [p for p in message.parts if isinstance(p, ToolCall)]


def thinking(message: Message) -> str | None:
    """The thinking text, None where the message has none (redacted thinking can't be read)."""
    parts = [p.text for p in message.parts if isinstance(p, Thinking) and not p.redacted]
    return "\n".join(parts) if parts else None


def runs(message: Message) -> list[str | ToolCall]:
    """Text runs and calls in the order they stand; thinking left out, empty runs dropped."""
    out: list[str | ToolCall] = []
    for p in message.parts:
        if isinstance(p, ToolCall):
            out.append(p)
        elif isinstance(p, (Text, Image)):
            text = p.text if isinstance(p, Text) else IMAGE_NOTE
            if out and isinstance(out[-1], str):
                out[-1] += text
            else:
                out.append(text)
    return [r for r in out if r != ""]


def result_text(message: Message) -> str:
    """Of a flattened tool message. An error without words still says that it is one."""
    result = message.parts[0]
    assert isinstance(result, ToolResult)
    return result.text or ("error" if result.is_error else "")


def call_id(message: Message) -> str:
    result = message.parts[0]
    assert isinstance(result, ToolResult)
    return result.call_id


def arguments(call: ToolCall) -> Any:
    """The object or, failing that, the raw text."""
    parsed = call.parsed
    return call.arguments if parsed is None else parsed


def arguments_json(call: ToolCall, raw_text: bool = False) -> str:
    """The arguments as templates' tojson spells them. What is no object becomes a JSON string, or stays as it is (`raw_text`)."""
    parsed = call.parsed
    if parsed is None:
        return call.arguments if raw_text else tojson(call.arguments)
    try:
        return tojson(parsed)
    except RecursionError:
        return call.arguments


def tool_object(spec: ToolSpec) -> dict[str, Any]:
    """A tool as templates see it (OpenAI's nested form); no description where the client gave none."""
    function: dict[str, Any] = {"name": spec.name}
    if spec.description:
        function["description"] = spec.description
    function["parameters"] = spec.parameters
    return {"type": "function", "function": function}

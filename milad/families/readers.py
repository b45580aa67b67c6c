"""Readers of one tool call, fed character by character, so that every split of the output reads the same.

A reader says MORE until the call ended (DONE) or can't be one (FAIL); `rest` is then what it took in but does not own. It opens
the call at its Sink as soon as the name is known and passes the arguments on as they come, append-only.

Scanning is lexical (quotes and brackets): arguments come out as the model wrote them, also where they are no strict JSON.
"""

from __future__ import annotations

import json
from typing import Any, Callable, Protocol

MORE, DONE, FAIL = 0, 1, 2
SPACE = " \t\r\n"
CLOSER = {"{": "}", "[": "]"}
MAX_NAME = 256                     # characters; a longer "name" is no name


class Sink(Protocol):
    def begin(self, name: str, id: str = "") -> bool:
        """Opens the call; False where no such tool was declared (nothing is opened then)."""
        ...

    def arguments(self, text: str) -> None: ...


class Reader(Protocol):
    rest: str

    def char(self, c: str) -> int: ...

    def special(self, text: str) -> int:
        """A control token in the middle of the call."""
        ...

    def end(self) -> bool:
        """The output is over: whether the call is whole all the same."""
        ...


def spell(reader: Reader, text: str) -> int:
    """A control token inside a string is text."""
    for i, c in enumerate(text):
        status = reader.char(c)
        if status != MORE:
            reader.rest += text[i + 1:]
            return status
    return MORE


class Value:
    """One JSON value, lexically. char(c): MORE while inside, DONE when `c` was its last character, FAIL at a wrong bracket.
    For a bare word or number DONE comes at the delimiter, which is not part of it (`bare`)."""

    def __init__(self, first: str) -> None:
        self.quote = first == '"'
        self.stack = [CLOSER[first]] if first in CLOSER else []
        self.bare = not self.quote and not self.stack
        self._escaped = False

    def char(self, c: str) -> int:
        if self.quote:
            if self._escaped:
                self._escaped = False
            elif c == "\\":
                self._escaped = True
            elif c == '"':
                self.quote = False
                return MORE if self.stack else DONE
            return MORE
        if self.bare:
            return DONE if c in ",}]" or c in SPACE else MORE
        if c == '"':
            self.quote = True
        elif c in CLOSER:
            self.stack.append(CLOSER[c])
        elif c in "}]":
            if self.stack.pop() != c:
                return FAIL
            if not self.stack:
                return DONE
        return MORE


class JsonCall:
    """{"name": ..., "arguments" or "parameters": {...}} in any order of keys; other keys among `other` are passed over, and
    all that come after the arguments.

    `opened` True: the brace was read already. A missing last brace is forgiven: DONE comes at what stands in its place.
    """

    def __init__(self, sink: Sink, opened: bool = False, other: tuple[str, ...] = ("type", "id")) -> None:
        self.rest = ""
        self._sink = sink
        self._other = other
        self._step: Callable[[str], int] = self._key if opened else self._brace
        self._key_text = ""
        self._text: list[str] = []         # of the key or value being read
        self._value: Value | None = None
        self._begun = False
        self._held: str | None = None      # arguments that came before the name
        self._has_arguments = False
        self._stream = False

    def char(self, c: str) -> int:
        return self._step(c)

    def special(self, text: str) -> int:
        if self._value is not None and self._value.quote:
            return spell(self, text)
        self.rest = text
        return DONE if self._whole() else FAIL

    def end(self) -> bool:
        return self._whole()

    def _whole(self) -> bool:
        return self._begun and self._has_arguments and self._value is None

    def _fail(self, c: str) -> int:
        self.rest = c
        return DONE if self._whole() else FAIL

    def _brace(self, c: str) -> int:
        if c in SPACE:
            return MORE
        if c != "{":
            return self._fail(c)
        self._step = self._key
        return MORE

    def _key(self, c: str) -> int:
        if c in SPACE:
            return MORE
        if c != '"':
            return self._fail(c)
        self._value, self._text = Value(c), [c]
        self._step = self._in_key
        return MORE

    def _in_key(self, c: str) -> int:
        self._text.append(c)
        assert self._value is not None
        if self._value.char(c) != DONE:
            return MORE if len(self._text) <= MAX_NAME else self._fail(c)
        self._value = None
        self._key_text = _string("".join(self._text)) or ""
        if self._key_text not in ("name", "arguments", "parameters", *self._other) and not self._whole():
            return self._fail(c)
        self._step = self._colon
        return MORE

    def _colon(self, c: str) -> int:
        if c in SPACE:
            return MORE
        if c != ":":
            return self._fail(c)
        self._step = self._first
        return MORE

    def _first(self, c: str) -> int:
        """The first character of a value."""
        if c in SPACE:
            return MORE
        if c in ",}]:":
            return self._fail(c)
        if self._key_text == "name" and not self._begun:
            if c != '"':
                return self._fail(c)
        is_arguments = self._key_text in ("arguments", "parameters") and not self._has_arguments
        if is_arguments and c not in '{"n':
            return self._fail(c)
        self._value, self._text = Value(c), [c]
        self._stream = is_arguments and c == "{" and self._begun
        if self._stream:
            self._sink.arguments(c)
        self._step = self._in_value
        return MORE

    def _in_value(self, c: str) -> int:
        assert self._value is not None
        status = self._value.char(c)
        if status == FAIL:
            return self._fail(c)
        if self._stream:
            self._sink.arguments(c)
        elif not (status == DONE and self._value.bare):
            self._text.append(c)
        if status == MORE:
            if self._key_text == "name" and not self._begun and len(self._text) > MAX_NAME:
                return self._fail(c)
            return MORE
        bare, self._value = self._value.bare, None
        if not self._take_value(self._text if not self._stream else None):
            return self._fail(c)
        self._step = self._after
        return self._after(c) if bare else MORE

    def _take_value(self, text: list[str] | None) -> bool:
        """False: no call after all."""
        if self._key_text == "name" and not self._begun:
            name = _string("".join(text or ()))
            if name is None or not self._sink.begin(name):
                return False
            self._begun = True
            if self._held is not None:
                self._sink.arguments(self._held)
        elif self._key_text in ("arguments", "parameters") and not self._has_arguments:
            self._has_arguments = True
            if text is not None:
                raw = _arguments("".join(text))
                if raw is None:
                    self._has_arguments = False
                    return False
                if self._begun:
                    self._sink.arguments(raw)
                else:
                    self._held = raw
        return True

    def _after(self, c: str) -> int:
        if c in SPACE:
            return MORE
        if c == ",":
            self._step = self._key
            return MORE
        if c == "}" and self._begun:
            return DONE
        return self._fail(c)


def sound_json(value: Any) -> str:
    """JSON that is valid UTF-8: escapes where the value holds a lone surrogate. Raises ValueError for NaN, TypeError."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if sound(text) else json.dumps(value, allow_nan=False)


def sound(text: str) -> bool:
    """Whether it has no lone surrogate, so that it can be sent as UTF-8."""
    return text.isascii() or not any("\ud800" <= c <= "\udfff" for c in text)


def _string(literal: str) -> str | None:
    """A JSON string literal's text, None where it is none. Raw control characters are forgiven."""
    try:
        value = json.loads(literal, strict=False)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def _arguments(raw: str) -> str | None:
    """Arguments that were not streamed: an object as it stands, one inside a string unwrapped, null as {}."""
    if raw.startswith("{"):
        return raw
    if raw == "null":
        return "{}"
    inner = _string(raw)
    if inner is None:
        return None
    inner = inner.strip()
    if not inner:
        return "{}"
    return inner if inner.startswith("{") and inner.endswith("}") and sound(inner) else None

"""One call in Python's spelling, f(x=1, y="a"), read into JSON arguments. Each value goes out when it is whole."""

from __future__ import annotations

import ast
import json
import warnings
from typing import Any, Callable

from .readers import CLOSER, DONE, FAIL, MAX_NAME, MORE, SPACE, Sink, sound_json, spell

CLOSERS = {**CLOSER, "(": ")"}


class PyCall:
    """`in_list`: it stands in [...]; its parser looks after the separators. Built-in style f.call(...) counts as f."""

    def __init__(self, sink: Sink, in_list: bool = True) -> None:
        self.rest = ""
        self.in_list = in_list
        self._sink = sink
        self._step: Callable[[str], int] = self._name
        self._word = ""
        self._key = ""
        self._begun = False
        self._n = 0
        self._value: list[str] = []
        self._stack: list[str] = []
        self._quote = ""
        self._escaped = False

    def char(self, c: str) -> int:
        return self._step(c)

    def special(self, text: str) -> int:
        if self._quote:
            return spell(self, text)
        return self._fail(text)

    def end(self) -> bool:
        return False

    def _fail(self, rest: str) -> int:
        self.rest = rest
        return FAIL

    def _name(self, c: str) -> int:
        if c in SPACE and not self._word:
            return MORE
        if c == "(":
            name = self._word[:-5] if self._word.endswith(".call") else self._word
            if not name or not self._sink.begin(name):
                return self._fail(c)
            self._begun = True
            self._step = self._before_key
            return MORE
        if not (c.isalnum() or c in "_.-") or len(self._word) >= MAX_NAME:
            return self._fail(c)
        self._word += c
        return MORE

    def _before_key(self, c: str) -> int:
        if c in SPACE:
            return MORE
        if c == ")":
            return self._done()
        self._key = ""
        self._step = self._in_key
        return self._in_key(c)

    def _in_key(self, c: str) -> int:
        if c == "=" and self._key.strip(SPACE).isidentifier():
            self._key = self._key.strip(SPACE)
            self._value = []
            self._step = self._in_value
            return MORE
        if not (c.isalnum() or c in "_ \t") or len(self._key) >= MAX_NAME:
            return self._fail(c)
        self._key += c
        return MORE

    def _in_value(self, c: str) -> int:
        if self._quote:
            self._value.append(c)
            if self._escaped:
                self._escaped = False
            elif c == "\\":
                self._escaped = True
            elif c == self._quote:
                self._quote = ""
            return MORE
        if not self._stack and c in ",)":
            if not "".join(self._value).strip(SPACE):
                return self._fail(c)
            self._emit()
            if c == ")":
                return self._done()
            self._step = self._before_key
            return MORE
        if c in "\"'":
            self._quote = c
        elif c in CLOSERS:
            self._stack.append(CLOSERS[c])
        elif c in ")]}":
            if not self._stack or self._stack.pop() != c:
                return self._fail(c)
        self._value.append(c)
        return MORE

    def _emit(self) -> None:
        value = as_json("".join(self._value).strip(SPACE))
        self._sink.arguments(("{" if self._n == 0 else ", ") + json.dumps(self._key) + ": " + value)
        self._n += 1

    def _done(self) -> int:
        if self._n:
            self._sink.arguments("}")
        return DONE


def as_json(text: str) -> str:
    """A Python (or JSON) literal as JSON; a bare word or anything else as a string of its spelling."""
    try:
        return sound_json(literal(text))
    except (ValueError, TypeError, RecursionError):
        return sound_json(text)


def literal(text: str) -> Any:
    """A JSON or Python literal's value; the text itself where it is neither."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        pass
    try:
        with warnings.catch_warnings():          # "\d" in a literal is the model's affair
            warnings.simplefilter("ignore")
            return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text

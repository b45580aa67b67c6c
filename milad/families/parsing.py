"""The push parser that families share: text, thinking and tool calls out of a model's output.

Works character by character, so a feed's split can't change what is read; a control token is one step of its own. Markers
that the vocabulary holds as one token match only as that token, the others by text: what may still become one is held back.

A call that turns out to be none (malformed before its name is known, an undeclared tool) is text, markup and all. One that
breaks after its block opened ends incomplete and what follows is text. Families add their openers; nothing here knows one.
"""

from __future__ import annotations

from typing import AbstractSet, Callable, Iterable, Mapping

from ..conversation import Turn
from ..events import Event
from .blocks import Blocks
from .readers import DONE, FAIL, MORE, SPACE, Reader


class Markers:
    """Text markers, matched over characters."""

    def __init__(self, spellings: Iterable[str], specials: AbstractSet[str] = frozenset()) -> None:
        self.texts = tuple(s for s in spellings if s not in specials)
        self.first = frozenset(s[0] for s in self.texts)
        self.cand = ""                      # a beginning of some marker

    def char(self, c: str) -> tuple[str, str]:
        """(text that is no marker after all, the marker that `c` completed or "")."""
        if not self.cand and c not in self.first:
            return c, ""
        self.cand += c
        start = 0
        cand = self.cand
        while start < len(cand):
            tail = cand[start:]
            if any(m.startswith(tail) for m in self.texts):
                break
            start += 1
        self.cand = cand[start:]
        if self.cand in self.texts:
            marker, self.cand = self.cand, ""
            return cand[:start], marker
        return cand[:start], ""

    def flush(self) -> str:
        held, self.cand = self.cand, ""
        return held


class MarkupParser:
    """`openers`: marker -> the reader of the call that it opens. `think`: (begin, end) or None. `closer`: what may follow a call's
    own end (`</tool_call>`). `ignored`: control tokens that are no text (ends of turn)."""

    def __init__(self, turn: Turn, specials: AbstractSet[str], *,
                 openers: Mapping[str, Callable[["MarkupParser"], Reader]] | None = None,
                 think: tuple[str, str] | None = None, thinking_open: bool = False, closer: str = "",
                 one_newline: bool = False, ignored: AbstractSet[str] = frozenset()) -> None:
        self.out = Blocks()
        self.tools = {t.name: t for t in turn.tools}
        self.ids: set[str] = set()
        self._specials = specials
        self._openers = dict(openers or {}) if self.tools else {}
        self._think = think
        self._closer = closer
        self._one_newline = one_newline
        self._ignored = ignored
        self._text_marks = Markers([*self._openers, *(think[:1] if think else ())], specials)
        self._think_marks = Markers(think or (), specials)
        self._after_marks = Markers((closer,) if closer else (), specials)
        self._space = ""                    # white space held back at the end of text or thinking
        self._reader: Reader | None = None
        self._raw: list[str] = []           # of a call that has not opened yet, its marker first
        self._begun = False
        self._wrote = False                 # arguments of the open call
        self._mode: Callable[[str], None] = self._in_thinking if thinking_open else self._in_text

    # -- the interface ------------------------------------------------------------------------------------------------

    def feed(self, text: str, special: bool = False) -> list[Event]:
        if special:
            self._special(text)
        else:
            self._chars(text)
        return self.out.take()

    def finish(self, complete: bool) -> list[Event]:
        if self._mode == self._in_call:
            assert self._reader is not None
            if self._begun:
                self._close_call(complete and self._reader.end())
            else:
                self._not_a_call("")
        self._flush_marks()
        if self.out.kind in ("text", "thinking"):
            self.out.put(self.out.kind, self._space)
        elif self.out.index < 0 and not self.out.last and self._mode == self._in_text:
            self.out.put("text", self._space)
        self._space = ""
        self.out.close(complete)
        return self.out.take()

    # -- what a reader tells ------------------------------------------------------------------------------------------

    def begin(self, name: str, id: str = "") -> bool:
        if name not in self.tools:
            return False
        if self.out.kind == "text":
            self.out.put("text", self._kept_space())
        self._space = ""
        if id in self.ids:
            id = ""
        self.ids.add(id)
        self.out.open("tool_call", name, id)
        self._begun = True
        self._wrote = False
        return True

    def arguments(self, text: str) -> None:
        self._wrote = self._wrote or bool(text)
        self.out.put("tool_call", text)

    def _kept_space(self) -> str:
        """White space before a call that belongs to the text: the renderer puts the rest back."""
        if not self._one_newline:
            return ""
        return self._space[:-1] if self._space.endswith("\n") else self._space

    # -- modes --------------------------------------------------------------------------------------------------------

    def _chars(self, text: str) -> None:
        if self._mode == self._in_text and not self._text_marks.cand and self._text_marks.first.isdisjoint(text):
            body = text.strip(SPACE)        # the same as character by character, for text without a marker's beginning
            if body:
                start = text.index(body[0])
                for c in text[:start + 1]:
                    self._text_char(c)
                self.out.put("text", body[1:])
                text = text[start + len(body):]
            self._space += text
            return
        for c in text:
            self._mode(c)

    def _in_text(self, c: str) -> None:
        plain, marker = self._text_marks.char(c)
        for p in plain:
            self._text_char(p)
        if marker:
            self._marker(marker)

    def _text_char(self, c: str) -> None:
        if c in SPACE:
            self._space += c
            return
        if self._space:
            space, self._space = self._space, ""
            if self.out.kind != "text":
                space = "" if self.out.last == "tool_call" else space.lstrip("\n") if self.out.last == "thinking" else space
            self.out.put("text", space)
        self.out.put("text", c)

    def _marker(self, marker: str) -> None:
        """A marker in text, by text or by token."""
        if self._think is not None and marker == self._think[0]:
            if self.out.index < 0:
                self._space = ""
                self._mode = self._in_thinking
            else:
                for c in marker:
                    self._text_char(c)
            return
        self.start(self._openers[marker](self), marker)

    def _in_thinking(self, c: str) -> None:
        plain, marker = self._think_marks.char(c)
        for p in plain:
            self._thinking_char(p)
        if marker:
            self._thinking_marker(marker)

    def _thinking_char(self, c: str) -> None:
        if c in SPACE:
            if self.out.kind == "thinking" or self._space or c != "\n":
                self._space += c
            return
        self.out.put("thinking", self._space + c)
        self._space = ""

    def _thinking_marker(self, marker: str) -> None:
        assert self._think is not None
        if marker == self._think[1]:
            if self.out.kind == "thinking":
                self.out.put("thinking", self._space.rstrip("\n"))
                self.out.close()
            self._space = ""
            self.out.last = "thinking"
            self._mode = self._in_text
        elif self.out.index >= 0:            # an opening marker within; at the very start it repeats the prompt's
            for c in marker:
                self._thinking_char(c)

    def start(self, reader: Reader, raw: str) -> None:
        """A call may begin here; `raw` is its markup so far."""
        self._reader, self._raw, self._begun = reader, [raw], False
        self._mode = self._in_call

    def hand_over(self, reader: Reader) -> Reader:
        """From a reader that only found out which spelling this is, to the one that reads it."""
        self._reader = reader
        return reader

    def _in_call(self, c: str) -> None:
        assert self._reader is not None
        status = self._reader.char(c)
        if not self._begun:
            self._raw.append(c)
        if status != MORE:
            self._settle(status)

    def _settle(self, status: int, special: bool = False) -> None:
        assert self._reader is not None
        rest = self._reader.rest
        if self._begun:
            self._close_call(status == DONE)
            if status == FAIL:
                self._mode = self._in_text
        else:
            self._not_a_call(rest)
        if special and rest:
            self._special(rest)
        else:
            self._chars(rest)

    def _close_call(self, complete: bool) -> None:
        if complete and not self._wrote:
            self.out.put("tool_call", "{}")
        self.out.close(complete)
        self._mode = self._after_call

    def _not_a_call(self, rest: str) -> None:
        raw = "".join(self._raw)
        raw = raw[:len(raw) - len(rest)]
        self._raw = []
        self._mode = self._in_text
        for c in raw:
            self._text_char(c)

    def _after_call(self, c: str) -> None:
        """Between a call's end and what follows: white space and the closing marker are passed over."""
        if c in SPACE and not self._after_marks.cand:
            return
        plain, marker = self._after_marks.char(c)
        if marker:
            self._mode = self._in_text
        elif plain:
            self._mode = self._in_text
            self._chars(plain + self._after_marks.flush())

    # -- control tokens -----------------------------------------------------------------------------------------------

    def _special(self, text: str) -> None:
        if text in self._ignored:
            return
        if self._mode == self._in_call:
            assert self._reader is not None
            status = self._reader.special(text)
            if not self._begun:
                self._raw.append(text)
            if status != MORE:
                self._settle(status, True)
            return
        if self._mode == self._after_call and text == self._closer:
            self._leave_after()
            return
        self._flush_marks()
        if self._mode == self._in_thinking:
            if self._think is not None and text in self._think:
                self._thinking_marker(text)
                return
            for c in text:
                self._thinking_char(c)
        elif text in self._openers or self._think is not None and text == self._think[0]:
            self._marker(text)
        else:
            for c in text:
                self._text_char(c)

    def _flush_marks(self) -> None:
        """A beginning of a marker that will not complete is text."""
        if self._mode == self._after_call:
            self._leave_after()
        if self._mode == self._in_thinking:
            for c in self._think_marks.flush():
                self._thinking_char(c)
        elif self._mode == self._in_text:
            for c in self._text_marks.flush():
                self._text_char(c)

    def _leave_after(self) -> None:
        held = self._after_marks.flush()
        self._mode = self._in_text
        self._chars(held)

"""Mistral with the tekken vocabulary: [INST] turns, tools in [AVAILABLE_TOOLS], calls after [TOOL_CALLS].

Two generations, told apart by the template: v3 (Nemo: calls and results are JSON, the system text stands in the last user turn)
and v7 and later (Small 3.x, Devstral, Ministral: [SYSTEM_PROMPT], [TOOL_CALLS]name[CALL_ID]id[ARGS]{...}). The default system
text and, where the template has it, [THINK] are read out of the template.

Oracle: the vendors' templates. Nemo's drops the system text while the last message is a tool's result; ours keeps it in the last
user turn, as mistral-common does (encode_user_message with is_last). Ids become nine letters or digits, as the templates ask.
"""

from __future__ import annotations

import datetime
import hashlib
import re
from dataclasses import dataclass
from typing import AbstractSet, Mapping

from ..conversation import Message, Turn
from .base import CallMarkup, Parser, Segment
from .page import (Page, arguments, arguments_json, call_id, calls, flatten, merged, reminded, result_text, split_system, thinking,
                   tojson, tool_object)
from .parsing import MarkupParser
from .readers import FAIL, MAX_NAME, MORE, SPACE, JsonCall, Value, spell

BOS, EOS = "<s>", "</s>"
CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
THINK = ("[THINK]", "[/THINK]")
FALLBACK_DATE = "20 Jun 2025"            # Small 3.2's release; the templates have none of their own
MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


@dataclass(frozen=True)
class Mistral:
    v3: bool = False
    system: tuple[str, ...] = ()         # default system text: literals, and names of dates between them (odd places)
    ids: bool = True                     # [CALL_ID] in calls and results
    tools_first: bool = False            # after the system text instead of before the last user turn
    speaks: bool = False                 # text beside calls is kept
    thinks: bool = False
    name: str = "mistral"

    @classmethod
    def of(cls, template: str) -> "Mistral":
        if not template:
            return cls()
        first = "user_messages[-1]" not in template
        return cls("[SYSTEM_PROMPT]" not in template, default_system(template), "[CALL_ID]" in template, first, first,
                   THINK[0] in template)

    @property
    def thinking_markup(self) -> tuple[str, ...]:
        return THINK if self.thinks else ()

    def tools_by_default(self, model_name: str, n_params: int) -> bool:
        """Yes: every model of these generations was trained on tools; the smallest is 3B."""
        return True

    def stops(self, specials: AbstractSet[str]) -> tuple[str, ...]:
        return (EOS,)

    def call_grammar(self, turn: Turn) -> CallMarkup:
        if self.v3:
            return CallMarkup(style="json", begin=CALLS + "[", end="]", separator="", trigger=CALLS)
        # where the model writes [CALL_ID] of its own accord, a mask that knows none would only mislead it
        return CallMarkup(style="named", begin=CALLS, middle=ARGS, end="", separator="", trigger="" if self.ids else CALLS)

    def parser(self, turn: Turn, specials: AbstractSet[str]) -> Parser:
        return MistralParser(turn, specials, openers={CALLS: MistralCall}, think=THINK if self.thinks else None,
                             ignored=frozenset((EOS,)))

    # -- rendering ----------------------------------------------------------------------------------------------------

    def render(self, turn: Turn, specials: AbstractSet[str]) -> list[Segment]:
        page = Page(specials)
        page.mark_if_known(BOS)
        system, rest = split_system(turn.messages)
        messages = merged(flatten(reminded(rest) if self.v3 else rest))
        if not self.v3:
            if system is None:
                system = dated(self.system, turn.date) or None
            if system is not None:
                between(page, "SYSTEM_PROMPT", system)
            if self.tools_first and turn.tools:
                self._tools(page, turn)
        users = [i for i, m in enumerate(messages) if m.role == "user"]
        last_words = messages[users[-1]].text if users else ""
        for i, m in enumerate(messages):
            if m.role == "user":
                # the templates compare by value: a user turn with the last one's words gets the tools too
                if turn.tools and not self.tools_first and m.text == last_words:
                    self._tools(page, turn)
                lead = system + "\n\n" if self.v3 and system is not None and i == users[-1] else ""
                between(page, "INST", lead + m.text)
            elif m.role == "assistant":
                self._assistant(page, m)
                if not (turn.prefill and i == len(messages) - 1):
                    page.mark(EOS)
            elif m.role == "tool":
                self._result(page, m)
            else:
                between(page, "SYSTEM_PROMPT", m.text)
        if self.v3 and system is not None and not users:
            between(page, "INST", system)
        return page.segments()

    def _tools(self, page: Page, turn: Turn) -> None:
        if not self.v3:
            between(page, "AVAILABLE_TOOLS", tojson([tool_object(t) for t in turn.tools]))
            return
        listed = []
        for tool in turn.tools:
            function: Mapping[str, object] = tool_object(tool)["function"]
            pairs = [f'"{k}": "{v}"' if isinstance(v, str) else f'"{k}": {tojson(v)}' for k, v in function.items()]
            listed.append('{"type": "function", "function": {' + ", ".join(pairs) + "}}")
        between(page, "AVAILABLE_TOOLS", "[" + ", ".join(listed) + "]")

    def _assistant(self, page: Page, m: Message) -> None:
        called = calls(m)
        if self.thinks and thinking(m):
            between(page, "THINK", thinking(m) or "")
        if not called or self.speaks:
            page.text(m.text)
        if called and self.v3:
            page.mark(CALLS)
            page.text("[" + ", ".join(tojson({"name": c.name, "arguments": arguments(c)})[:-1] + f', "id": "{short_id(c.id)}"}}'
                                      for c in called) + "]")
            return
        for c in called:
            page.mark(CALLS)
            page.text(c.name)
            if self.ids:
                page.mark(CALL_ID)
                page.text(short_id(c.id))
            page.mark(ARGS)
            page.text(arguments_json(c, self.speaks))

    def _result(self, page: Page, m: Message) -> None:
        page.mark("[TOOL_RESULTS]")
        if self.v3:
            page.text('{"content": ' + result_text(m) + ', "call_id": "' + short_id(call_id(m)) + '"}')
        else:
            if self.ids:
                page.text(short_id(call_id(m)))
                page.mark("[TOOL_CONTENT]")
            page.text(result_text(m))
        page.mark("[/TOOL_RESULTS]")


def between(page: Page, tag: str, text: str) -> None:
    page.mark(f"[{tag}]")
    page.text(text)
    page.mark(f"[/{tag}]")


def short_id(id: str) -> str:
    """Nine letters or digits: the id itself, without an API's prefix, or else a digest of it."""
    bare = id.rsplit("_", 1)[-1]
    if len(bare) == 9 and bare.isascii() and bare.isalnum():
        return bare
    number = int.from_bytes(hashlib.sha256(id.encode("utf-8", "surrogatepass")).digest()[:8], "big")
    letters = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
    out = ""
    for _ in range(9):
        number, i = divmod(number, 62)
        out += letters[i]
    return out


def default_system(template: str) -> tuple[str, ...]:
    """The template's default_system_message: literals joined by + to names of dates, as (literal, name, literal, ...)."""
    found = re.search(r"set\s+default_system_message\s*=\s*", template)
    if not found:
        return ()
    part = re.compile(r"""\s*(?:"((?:[^"\\]|\\.)*)"|'((?:[^'\\]|\\.)*)'|(\w+))\s*(\+?)""", re.DOTALL)
    out: list[str] = []
    at, more = found.end(), True
    while more:
        m = part.match(template, at)
        if not m:
            return ()
        literal = m.group(1) if m.group(1) is not None else m.group(2)
        if (literal is None) != (len(out) % 2 == 1):
            return ()
        out.append(m.group(3) if literal is None else _unescaped(literal))
        at, more = m.end(), bool(m.group(4))
    return tuple(out)


def _unescaped(literal: str) -> str:
    return re.sub(r"\\(.)", lambda m: {"n": "\n", "t": "\t", "r": "\r"}.get(m.group(1), m.group(1)), literal, flags=re.DOTALL)


def dated(parts: tuple[str, ...], date: str) -> str:
    """`date` as "26 Jul 2024"; what is no such date stands as it is."""
    out = ""
    for i, part in enumerate(parts):
        out += part if i % 2 == 0 else iso(date or FALLBACK_DATE, -1 if part == "yesterday" else 0)
    return out


def iso(date: str, days: int) -> str:
    try:
        day, month, year = date.split()
        return str(datetime.date(int(year), MONTHS.index(month) + 1, int(day)) + datetime.timedelta(days))
    except (ValueError, OverflowError):
        return date


# -- parsing ----------------------------------------------------------------------------------------------------------

class MistralParser(MarkupParser):
    """Reads both generations' calls. In a JSON array `, {` goes on and `]` ends it."""

    def __init__(self, turn: Turn, specials: AbstractSet[str], **options: object) -> None:
        super().__init__(turn, specials, **options)     # type: ignore[arg-type]
        self.ids |= {short_id(c.id) for m in turn.messages for c in calls(m)}
        self.in_array = False
        self.specials = specials
        self._between = ""

    def _after_call(self, c: str) -> None:
        if c in SPACE or c == "," and self.in_array:
            self._between += c
            return
        held, self._between = self._between, ""
        if self.in_array and c == "{" and held.strip(SPACE) == ",":
            self.start(JsonCall(self, opened=True), held + c)
        elif self.in_array and c == "]" and not held.strip(SPACE):
            self.in_array = False
        else:
            self.in_array = False
            self._mode = self._in_text
            self._chars(held + c)

    def _leave_after(self) -> None:
        held, self._between = self._between, ""
        self.in_array = False
        self._mode = self._in_text
        self._chars(held)


class MistralCall:
    """After [TOOL_CALLS]: an array or object of JSON, or name, maybe [CALL_ID] id, [ARGS], arguments."""

    def __init__(self, parser: MarkupParser) -> None:
        assert isinstance(parser, MistralParser)
        self.rest = ""
        self._parser = parser
        self._name = ""
        self._id: str | None = None
        self._tag = ""
        self._begun = False
        self._value: Value | None = None

    def end(self) -> bool:
        return False

    def _fail(self, rest: str) -> int:
        self.rest = rest
        return FAIL

    def char(self, c: str) -> int:
        if self._value is not None:
            return self._in_value(c)
        if self._begun:
            return self._first(c)
        if self._tag:
            return self._in_tag(c)
        if c in "[{" and not self._name.strip(SPACE):
            self._parser.in_array = c == "["
            self._parser.hand_over(JsonCall(self._parser, opened=c == "{"))
            return MORE
        if c == "[":
            self._tag = c
            return MORE
        if c == "{" and self._id is None:
            return self._begin() or self._first(c)
        if self._id is None:
            self._name += c
        else:
            self._id += c
        return MORE if len(self._name) + len(self._id or "") <= MAX_NAME else self._fail(c)

    def special(self, text: str) -> int:
        if self._value is not None and self._value.quote:
            return spell(self, text)
        if self._begun or self._tag:
            return self._fail(text)
        return self._take_tag(text)

    def _in_tag(self, c: str) -> int:
        self._tag += c
        tags = [t for t in (CALL_ID, ARGS) if t not in self._parser.specials]
        if self._tag in tags:
            tag, self._tag = self._tag, ""
            return self._take_tag(tag)
        return MORE if any(t.startswith(self._tag) for t in tags) else self._fail(self._tag)

    def _take_tag(self, tag: str) -> int:
        if tag == CALL_ID and self._id is None and self._name.strip(SPACE) in self._parser.tools:
            self._id = ""
            return MORE
        if tag == ARGS:
            return self._begin(tag)
        return self._fail(tag)

    def _begin(self, rest: str = "{") -> int:
        id = (self._id or "").strip(SPACE)
        if not self._parser.begin(self._name.strip(SPACE), id if id.isalnum() else ""):
            return self._fail(rest)
        self._begun = True
        return MORE

    def _first(self, c: str) -> int:
        if c in SPACE:
            return MORE
        if c != "{":
            return self._fail(c)
        self._value = Value(c)
        self._parser.arguments(c)
        return MORE

    def _in_value(self, c: str) -> int:
        assert self._value is not None
        status = self._value.char(c)
        if status == FAIL:
            return self._fail(c)
        self._parser.arguments(c)
        return status

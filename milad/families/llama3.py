"""Llama 3, 3.1, 3.2, 3.3: headers and end-of-turn tokens, tools in the first user turn, results from `ipython`.

Calls are read in all spellings that these models use: bare JSON ({"name", "parameters"}), also after <|python_tag|>, several
separated by `;`; Python style [f(x=1), g()]; built-in style <|python_tag|>f.call(x="1"). Python arguments become JSON.
Oracle: the vendors' templates. Theirs raises on two calls in one turn; ours joins them by "; ", as the model writes them
(vLLM's llama3_json parser splits there). Theirs drops text beside a call; so does ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import AbstractSet

from ..conversation import Turn
from .base import CallMarkup, Parser, Segment
from .page import Page, arguments_json, calls, flatten, merged, result_text, split_system, tojson, tool_object
from .parsing import MarkupParser
from .pycall import PyCall
from .readers import FAIL, MORE, SPACE, JsonCall

BOS, EOT, EOM = "<|begin_of_text|>", "<|eot_id|>", "<|eom_id|>"
PYTHON = "<|python_tag|>"
STOPS = (EOT, EOM, "<|end_of_text|>")
FALLBACK_DATE = "26 Jul 2024"            # the templates' own
MIN_TOOL_PARAMS = 6_000_000_000

TOOLS = ("Given the following functions, please respond with a JSON for a function call with its proper arguments that best "
         "answers the given prompt.\n\nRespond in the format {\"name\": function name, \"parameters\": dictionary of argument name "
         "and its value}.Do not use variables.\n\n")


@dataclass(frozen=True)
class Llama3:
    dated: bool = True                   # 3.1 and later: a system turn with dates, always
    name: str = "llama3"
    thinks: bool = False
    thinking_markup: tuple[str, ...] = ()

    @classmethod
    def of(cls, template: str) -> "Llama3":
        return cls(not template or "Cutting Knowledge Date" in template)

    def tools_by_default(self, model_name: str, n_params: int) -> bool:
        """From 3.1 8B up: 1B and 3B answer small talk with calls, and Llama 3 (8B, 70B) was not trained on tools."""
        return self.dated and (n_params <= 0 or n_params >= MIN_TOOL_PARAMS)

    def stops(self, specials: AbstractSet[str]) -> tuple[str, ...]:
        return tuple(s for s in STOPS if s == EOT or s in specials)

    def call_grammar(self, turn: Turn) -> CallMarkup:
        return CallMarkup(style="json", begin="", end="", args_key="parameters", separator="; ", trigger='{"name": "')

    def parser(self, turn: Turn, specials: AbstractSet[str]) -> Parser:
        return Llama3Parser(turn, specials, openers={PYTHON: PythonTag, "{": opened_json, "[": PyCall},
                            ignored=frozenset(STOPS))

    def render(self, turn: Turn, specials: AbstractSet[str]) -> list[Segment]:
        page = Page(specials)
        page.mark_if_known(BOS)
        system, rest = split_system(turn.messages)
        messages = merged(flatten(rest))
        if self.dated:
            self._system(page, turn, system)
        elif system is not None:
            whole_turn(page, "system", system.strip())
        if turn.tools:
            first = messages.pop(0).text if messages and messages[0].role == "user" else ""
            header(page, "user")
            page.text(TOOLS)
            for tool in turn.tools:
                page.text(tojson(tool_object(tool), indent=4) + "\n\n")
            page.text(first.strip())
            page.mark(EOT)
        for i, m in enumerate(messages):
            last = turn.prefill and i == len(messages) - 1
            if m.role == "tool":
                whole_turn(page, "ipython", tojson(result_text(m)))
            elif m.role == "assistant" and calls(m):
                header(page, "assistant")
                page.text("; ".join('{"name": "' + c.name + '", "parameters": ' + arguments_json(c) + "}" for c in calls(m)))
                if not last:
                    page.mark(EOT)
            elif last:
                header(page, "assistant")
                page.text(m.text.lstrip())
            else:
                whole_turn(page, m.role, m.text.strip())
        if not turn.prefill:
            header(page, "assistant")
        return page.segments()

    def _system(self, page: Page, turn: Turn, system: str | None) -> None:
        header(page, "system")
        page.text(("Environment: ipython\n" if turn.tools else "") + "Cutting Knowledge Date: December 2023\nToday Date: "
                  + (turn.date or FALLBACK_DATE) + "\n\n" + (system or "").strip())
        page.mark(EOT)


def header(page: Page, role: str) -> None:
    page.mark("<|start_header_id|>")
    page.text(role)
    page.mark("<|end_header_id|>")
    page.text("\n\n")


def whole_turn(page: Page, role: str, text: str) -> None:
    header(page, role)
    page.text(text)
    page.mark(EOT)


# -- parsing ----------------------------------------------------------------------------------------------------------

def opened_json(sink: MarkupParser) -> JsonCall:
    return JsonCall(sink, opened=True)


class PythonTag:
    """After <|python_tag|>: a JSON call, a Python list of calls, or one bare call."""

    def __init__(self, parser: MarkupParser) -> None:
        self.rest = ""
        self._parser = parser

    def char(self, c: str) -> int:
        if c in SPACE:
            return MORE
        if c == "{":
            self._parser.hand_over(opened_json(self._parser))
            return MORE
        call = self._parser.hand_over(PyCall(self._parser, in_list=c == "["))
        return MORE if c == "[" else call.char(c)

    def special(self, text: str) -> int:
        self.rest = text
        return FAIL

    def end(self) -> bool:
        return False


class Llama3Parser(MarkupParser):
    """What may stand between calls: `;`, `,` or white space before the next object; `, name(` and `]` in a Python list."""

    _between = ""

    def _after_call(self, c: str) -> None:
        in_list = isinstance(self._reader, PyCall) and self._reader.in_list
        if c in SPACE or c in ";,":
            self._between += c
            return
        between, self._between = self._between, ""
        if in_list and c == "]":
            self._reader = JsonCall(self)      # the list is over; only objects may follow
            return
        mark = between.strip(SPACE)
        if in_list and mark == ",":
            self.start(PyCall(self), between)
            self._chars(c)
        elif not in_list and mark in ("", ";", ",") and c == "{":
            self.start(opened_json(self), between + c)
        else:
            self._mode = self._in_text
            self._chars(between + c)

    def _leave_after(self) -> None:
        between, self._between = self._between, ""
        self._mode = self._in_text
        self._chars(between)

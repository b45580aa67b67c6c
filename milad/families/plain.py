"""Plain: models without a chat format. Role names and text, no control tokens, no thinking.

    User: text
    Assistant: text

A system text stands first, unlabelled, tools under it (shown only where an option or a forced call asks). `--family plain` is the only way here: a file that fits no family is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import AbstractSet

from ..conversation import Turn
from ..events import Event
from .base import CallMarkup, Parser, Segment
from .page import Page, arguments_json, calls, flatten, merged, result_text, split_system, tojson, tool_object
from .parsing import MarkupParser
from .readers import JsonCall

LABELS = {"user": "User", "assistant": "Assistant", "system": "System", "tool": "Tool"}
TOOLS = ('To call one of these functions, answer with one JSON object {"name": ..., "arguments": {...}} and nothing else:')
STOPS = ("\nUser:", "\nSystem:", "\nTool:")


@dataclass(frozen=True)
class PlainText:
    name: str = "plain"
    thinks: bool = False
    thinking_markup: tuple[str, ...] = ()

    def tools_by_default(self, model_name: str, n_params: int) -> bool:
        return False

    def stops(self, specials: AbstractSet[str]) -> tuple[str, ...]:
        return STOPS

    def call_grammar(self, turn: Turn) -> CallMarkup:
        """A call is one bare JSON object."""
        return CallMarkup(style="json", begin="", end="", trigger='{"name": "')

    def parser(self, turn: Turn, specials: AbstractSet[str]) -> Parser:
        return PlainParser(turn, specials, openers={"{": opened_json})

    def render(self, turn: Turn, specials: AbstractSet[str]) -> list[Segment]:
        page = Page(specials)
        system, rest = split_system(turn.messages)
        if system:
            page.text(system + "\n\n")
        if turn.tools:
            page.text(TOOLS + "".join("\n" + tojson(tool_object(t)["function"]) for t in turn.tools) + "\n\n")
        messages = merged(flatten(rest))
        for i, m in enumerate(messages):
            text = result_text(m) if m.role == "tool" else m.text
            text += "".join(("\n" if text else "") + f'{{"name": "{c.name}", "arguments": {arguments_json(c)}}}' for c in calls(m))
            page.text(f"{LABELS[m.role]}:" + (" " + text if text else ""))
            if not (turn.prefill and i == len(messages) - 1):
                page.text("\n")
        if not turn.prefill:
            page.text("Assistant:")
        return page.segments()


class PlainParser(MarkupParser):
    """The blank that the model writes after `Assistant:` is no part of its answer; the renderer puts it back."""

    def feed(self, text: str, special: bool = False) -> list[Event]:
        first, self._first = self._first, self._first and not text
        return super().feed(text[1:] if first and text.startswith(" ") else text, special)

    _first = True


def opened_json(sink: MarkupParser) -> JsonCall:
    return JsonCall(sink, opened=True)

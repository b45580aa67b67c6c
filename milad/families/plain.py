"""Plain: models without a chat format. Role names and text, no control tokens, no tools, no thinking.

    User: text
    Assistant: text

A system text stands first, unlabelled. `--family plain` is the only way here: a file that fits no family is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import AbstractSet

from ..conversation import Turn
from .base import CallMarkup, Parser, Segment
from .page import Page, calls, flatten, merged, result_text, split_system
from .parsing import MarkupParser
from .readers import JsonCall

LABELS = {"user": "User", "assistant": "Assistant", "system": "System", "tool": "Tool"}
STOPS = ("\nUser:", "\nSystem:", "\nTool:")


@dataclass(frozen=True)
class PlainText:
    name: str = "plain"
    thinks: bool = False

    def tools_by_default(self, model_name: str, n_params: int) -> bool:
        return False

    def stops(self, specials: AbstractSet[str]) -> tuple[str, ...]:
        return STOPS

    def call_grammar(self, turn: Turn) -> CallMarkup:
        """A forced call is one bare JSON object."""
        return CallMarkup(style="json", begin="", end="", trigger='{"name":')

    def parser(self, turn: Turn, specials: AbstractSet[str]) -> Parser:
        forced = turn.tool_choice.mode in ("required", "named")
        return MarkupParser(turn, specials, openers={"{": opened_json} if forced else None)

    def render(self, turn: Turn, specials: AbstractSet[str]) -> list[Segment]:
        page = Page(specials)
        system, rest = split_system(turn.messages)
        if system:
            page.text(system + "\n\n")
        messages = merged(flatten(rest))
        for i, m in enumerate(messages):
            text = result_text(m) if m.role == "tool" else m.text
            text += "".join(f"\n[{c.name} {c.arguments}]" for c in calls(m))
            page.text(f"{LABELS[m.role]}:" + (" " + text if text else ""))
            if not (turn.prefill and i == len(messages) - 1):
                page.text("\n")
        if not turn.prefill:
            page.text("Assistant:")
        return page.segments()


def opened_json(sink: MarkupParser) -> JsonCall:
    return JsonCall(sink, opened=True)

"""Qwen3 (and QwQ, whose prompt opens the thinking): ChatML with <think> blocks and <tool_call> tools, no default system text.

History follows the vendor's rule: thinking of turns before the last user message is dropped; after it (a tool loop) it stays. With
thinking off the prompt ends in an empty think block. A prefill that is only thinking is continued inside its block.
Oracle: the vendor's template (tests/families).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import AbstractSet, Sequence

from ..conversation import Message, Thinking, Turn
from .base import CallMarkup, Parser, Segment
from .chatml import (CALLS, END, SOFT, STOPS, close_turn, open_turn, result_turn, system_turn, whole_turn, write_call)
from .page import Page, calls, flatten, has_text, runs, split_system, thinking
from .parsing import MarkupParser
from .readers import JsonCall

THINK, UNTHINK = "<think>", "</think>"
MIN_TOOL_PARAMS = 500_000_000


@dataclass(frozen=True)
class Qwen3:
    prompt_opens_thinking: bool = False    # QwQ, Qwen3-Thinking-2507: "<think>\n" ends the prompt
    name: str = "qwen3"
    thinks: bool = True

    @classmethod
    def of(cls, template: str) -> "Qwen3":
        return cls("assistant\\n<think>\\n' }}" in template)

    @property
    def thinking_markup(self) -> tuple[str, ...]:
        return (UNTHINK,) if self.prompt_opens_thinking else (THINK, UNTHINK)

    def tools_by_default(self, model_name: str, n_params: int) -> bool:
        """All of Qwen3 was trained on tools; the smallest, 0.6B, still calls well. n_params 0: unknown."""
        return n_params <= 0 or n_params >= MIN_TOOL_PARAMS

    def stops(self, specials: AbstractSet[str]) -> tuple[str, ...]:
        return tuple(s for s in STOPS if s == END or s in specials)

    def call_grammar(self, turn: Turn) -> CallMarkup:
        return CALLS

    def parser(self, turn: Turn, specials: AbstractSet[str]) -> Parser:
        opens = self.prompt_opens_thinking and turn.thinking is not False and not turn.prefill
        return MarkupParser(turn, specials, openers={"<tool_call>": JsonCall}, think=(THINK, UNTHINK),
                            thinking_open=opens or thinks_on(turn), closer="</tool_call>", one_newline=True,
                            ignored=frozenset(STOPS))

    def render(self, turn: Turn, specials: AbstractSet[str]) -> list[Segment]:
        page = Page(specials, SOFT)
        system, rest = split_system(turn.messages)
        system_turn(page, system, turn.tools)
        messages = flatten(rest)
        query = last_query(messages)
        for i, m in enumerate(messages):
            last = i == len(messages) - 1
            if m.role == "tool":
                result_turn(page, messages, i)
            elif m.role == "assistant":
                self._assistant(page, m, i > query, last, turn.prefill and last)
            else:
                whole_turn(page, m.role, m.text)
        if not turn.prefill:
            open_turn(page, "assistant")
            if self.prompt_opens_thinking:
                page.own(THINK + "\n" + (UNTHINK if turn.thinking is False else ""))
            elif turn.thinking is False:
                page.own(THINK + "\n\n" + UNTHINK + "\n\n")
        return page.segments()

    def _assistant(self, page: Page, m: Message, current: bool, last: bool, prefill: bool) -> None:
        open_turn(page, "assistant")
        if prefill and thinks_on_message(m):
            page.own(THINK + "\n")
            page.text((thinking(m) or "").lstrip("\n"))
            return
        thought, parts = think_apart(m)
        if current and (last or thought):
            page.own(THINK + "\n")
            page.text(thought.strip("\n"))
            page.own("\n" + UNTHINK + "\n\n")
            if parts and isinstance(parts[0], str):
                parts[0] = parts[0].lstrip("\n")
                parts = [p for p in parts if p != ""]
        for j, part in enumerate(parts):
            page.text("\n" if j else "")
            if isinstance(part, str):
                page.text(part)
            else:
                write_call(page, part, True)
        if not prefill:
            close_turn(page)


def last_query(messages: Sequence[Message]) -> int:
    """Index of the last user message that is no tool response in disguise; the last message's where there is none."""
    for i in range(len(messages) - 1, -1, -1):
        if messages[i].role == "user":
            text = messages[i].text
            if not (text.startswith("<tool_response>") and text.endswith("</tool_response>")):
                return i
    return len(messages) - 1


def think_apart(m: Message) -> tuple[str, list]:
    """(thinking, the text runs and calls). Without thinking parts, a client's own <think> markup in the text counts."""
    thought, parts = thinking(m), runs(m)
    if thought is not None:
        return thought, parts
    if UNTHINK in m.text:
        text = m.text
        content = text.split(UNTHINK)[-1].lstrip("\n")
        thought = text.split(UNTHINK)[0].rstrip("\n").split(THINK)[-1].lstrip("\n")
        return thought, ([content] if content else []) + calls(m)
    return "", parts


def thinks_on_message(m: Message) -> bool:
    return bool(m.parts) and isinstance(m.parts[-1], Thinking) and not has_text(m) and not calls(m)


def thinks_on(turn: Turn) -> bool:
    """A prefill that stops within its thinking."""
    return turn.prefill and bool(turn.messages) and thinks_on_message(turn.messages[-1])

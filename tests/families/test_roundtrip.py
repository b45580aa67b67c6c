"""What a family writes into history is what its parser reads from a model: rendered assistant turns parse back to their parts, so a
follow-up request repeats the tokens that were generated."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

import talks
import vendor
from milad import families
from milad.conversation import Thinking, ToolCall, Turn
from milad.families.base import Special
from milad.families.llama3 import Llama3
from milad.families.mistral import Mistral
from test_parse import check, split
from test_render import LLAMA, QWEN, SMALL

TOOLS = (talks.WEATHER, talks.TIME, talks.EDIT)
MULTILINE = talks.call("edit", '{"path": "a\\nb", "edits": [{"old": "é</tool_call>", "new": "\\"\\\\"}], "dry": false}', "bcdefghij")
FAMILIES = [*((n, families.choose("", frozenset(), n)) for n in families.NAMES), ("nemo", Mistral(v3=True)),
            ("devstral", Mistral(ids=False, tools_first=True, speaks=True)),
            ("ministral", Mistral(ids=False, tools_first=True, speaks=True, thinks=True))]
ANSWERS: dict[str, tuple[Any, ...]] = {
    "text": ("Hello\n\nthere <b>",), "call": (talks.CITY,), "two calls": (talks.CITY, MULTILINE), "no arguments": (talks.NOARGS,),
    "text and calls": ("I look.", talks.CITY, MULTILINE), "thinking": (Thinking("hm\n\nso"), "Yes"),
    "thinking and call": (Thinking("hm"), talks.CITY), "all": (Thinking("hm"), "I look.", talks.NOARGS, talks.CITY)}


@pytest.mark.parametrize("specials", [frozenset(), QWEN | LLAMA | SMALL], ids=["as text", "as tokens"])
@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("family", [f for _, f in FAMILIES], ids=[n for n, _ in FAMILIES])
def test_round_trip(family: Any, answer: str, specials: frozenset[str]) -> None:
    parts = ANSWERS[answer]
    called = [p for p in parts if isinstance(p, ToolCall)]
    if called and len(parts) > len(called) and (isinstance(family, (Llama3, Mistral)) and not getattr(family, "speaks", False)):
        pytest.skip("the vendor's template keeps no text beside a call")
    if not family.thinks:
        parts = tuple(p for p in parts if not isinstance(p, Thinking))
    before = Turn("chat", (talks.system("S"), talks.user("x")), tools=TOOLS)
    after = Turn("chat", before.messages + (talks.said(*parts),), tools=TOOLS, prefill=True)
    prompt, whole = vendor.text(family.render(before, specials)), family.render(after, specials)
    assert vendor.text(whole).startswith(prompt)
    output: list[tuple[str, bool]] = []
    at = 0
    for segment in whole:
        text = segment.text[max(0, len(prompt) - at):]
        at += len(segment.text)
        if text:
            output.append((text, isinstance(segment, Special) and segment.text in specials))
    for rng in (None, random.Random(1), random.Random(2)):
        parser = family.parser(before, specials)
        events = []
        for text, special in split(output, rng):
            events += parser.feed(text, special)
        blocks = check(events + parser.finish(True))
        assert [b[:2] if b[0] == "tool_call" else b for b in blocks] == [
            ("tool_call", p.name) if isinstance(p, ToolCall) else ("thinking", p.text) if isinstance(p, Thinking) else ("text", p)
            for p in parts]
        assert [json.loads(b[2]) for b in blocks if b[0] == "tool_call"] == [p.parsed for p in called]

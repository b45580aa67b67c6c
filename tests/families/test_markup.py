"""call_grammar() is true: the constraint made of it takes calls as the family itself writes them, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import talks
from milad import families
from milad.conversation import ToolChoice, Turn
from milad.families.mistral import Mistral

pytest.importorskip("llguidance")
FAMILIES = {**{n: families.choose("", frozenset(), n) for n in families.NAMES}, "nemo": Mistral(v3=True),
            "devstral": Mistral(ids=False, tools_first=True, speaks=True)}
TOOLS = (talks.WEATHER, talks.EDIT)


@pytest.fixture(scope="module")
def grammar(library: Path, default_model: Path) -> Any:
    from milad import capi
    from milad.grammar import Grammar
    model = capi.Model(str(default_model), vocab_only=True)
    yield model, Grammar(model)
    model.close()


def takes(grammar: Any, family: Any, mode: str, text: str) -> bool:
    """Whether all of `text` is allowed and may end there, for a model that writes every marker as text."""
    model, compiler = grammar
    turn = Turn("chat", (talks.user("x"),), tools=TOOLS, tool_choice=ToolChoice(mode), thinking=False)
    held = compiler.compile(turn, family)
    for token in [*model.tokenize(text), model.info.eos]:
        mask = held.mask()
        if mask is not None and not mask[token >> 3] >> (token & 7) & 1:
            return False
        held.accept(token)
    return True


@pytest.mark.parametrize("name", FAMILIES)
def test_takes_what_the_family_writes(grammar: Any, name: str) -> None:
    family = FAMILIES[name]
    before = Turn("chat", (talks.user("x"),), tools=TOOLS, thinking=False)
    after = replace(before, messages=before.messages + (talks.said(talks.CITY),), prefill=True)
    output = "".join(s.text for s in family.render(after, frozenset()))[len("".join(
        s.text for s in family.render(before, frozenset()))):].lstrip()
    if name == "qwen3":
        output = output.partition("</think>")[2].lstrip() if "</think>" in output else output
    output = output.replace("[CALL_ID]abcdefghi", "").replace(', "id": "abcdefghi"', "")     # ids: the daemon makes its own
    assert takes(grammar, family, "required", output)
    if family.call_grammar(before).trigger:
        assert takes(grammar, family, "auto", "Let me look. " + output)
        # where JSON of any kind may stand, another name is no call
        bare = name in ("llama3", "plain")
        assert takes(grammar, family, "auto", "Let me look. " + output.replace("get_weather", "get_wether")) == bare
        assert not takes(grammar, family, "auto", "Let me look. " + output.replace('"city"', '"town"').replace("=city", "=town"))
    assert not takes(grammar, family, "required", "x" + output)
    assert not takes(grammar, family, "required", output.replace("Zürich", "Zürich\x01").replace('"city"', '"town"').replace(
        "=city", "=town"))

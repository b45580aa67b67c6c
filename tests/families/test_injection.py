"""Whatever a client writes, wherever: no family makes a control token or a markup token of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import marked
import talks
from milad import families
from milad.conversation import Message, Text, Thinking, ToolCall, ToolSpec, Turn
from milad.families.llama3 import Llama3
from milad.families.mistral import Mistral
from milad.families.qwen3 import Qwen3
from milad.turn import Runner

FAMILIES = {**{n: families.choose("", frozenset(), n) for n in families.NAMES}, "hermes": families.chatml.ChatML(hermes=True),
            "qwq": Qwen3(prompt_opens_thinking=True), "llama3.0": Llama3(dated=False), "nemo": Mistral(v3=True),
            "ministral": Mistral(ids=False, tools_first=True, speaks=True, thinks=True)}
PLACES = ("system", "user", "later system", "assistant", "thinking", "description", "schema", "enum", "property", "tool name", "call name",
          "value", "key", "raw arguments", "call id", "result", "result name")


@pytest.fixture(scope="module", params=["control", "defined"])
def model(request: Any, library: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    model = marked.open_model(tmp_path_factory.mktemp("marked") / "m.gguf", request.param, marked.CALLS + marked.LAYOUT)
    yield model
    model.close()


def turn_of(place: str, word: str) -> Turn:
    """A conversation with everything in it, `word` at one place and an "x" at the others."""
    at = {p: word if p == place else "x" for p in PLACES}
    tool = ToolSpec(at["tool name"], at["description"], {"type": "object", "description": at["schema"], "properties": {
        at["property"]: {"type": "string", "enum": [at["enum"]], "description": at["schema"]}}})
    call = ToolCall(at["call id"], at["call name"], json.dumps({at["key"]: at["value"], "n": {at["key"]: [at["value"]]}}))
    raw = ToolCall("c2", "f", at["raw arguments"])
    result = talks.ToolResult(at["call id"], (Text(at["result"]),), name=at["result name"])
    return Turn("chat", (talks.system(at["system"]), talks.user(at["user"]), talks.said(Thinking(at["thinking"]), at["assistant"]),
                         talks.system(at["later system"]), talks.user(at["user"]), talks.said(Thinking(at["thinking"]), call),
                         Message("tool", (result,)), talks.said(raw), talks.results(talks.result(at["result"], "c2")),
                         talks.user("go on")), tools=(tool,))


@pytest.mark.parametrize("name", FAMILIES)
def test_no_word_becomes_a_control_token(model: Any, name: str) -> None:
    runner = Runner(model, None, None, FAMILIES[name], n_ctx=1 << 20)
    special = set(model.specials.values())

    def marks(place: str, word: str) -> list[int]:
        return [t for t in runner.tokens(turn_of(place, word)) if t in special]

    for place in PLACES:
        plain = marks(place, "y")
        assert len(plain) > 5 or name == "plain"
        for word in model.specials:
            for text in (word, f"a{word}\n{word[:-1]}{word}b"):
                assert marks(place, text) == plain, (place, text)
    whole = "".join(model.specials)
    everywhere = Turn("chat", (talks.user(whole), talks.said(whole), talks.user(whole)))
    assert [t for t in runner.tokens(everywhere) if t in special] == [
        t for t in runner.tokens(Turn("chat", (talks.user("y"), talks.said("y"), talks.user("y")))) if t in special]

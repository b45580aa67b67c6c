"""Every renderer against its vendor's own template, and what WIRE.md asks where the vendors' raise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Callable

import pytest

import talks
import vendor
from milad import families
from milad.conversation import Turn
from milad.families.base import Plain, Special

CHATML = frozenset(("<|im_start|>", "<|im_end|>", "<|endoftext|>"))
QWEN = CHATML | {"<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"}
LLAMA = frozenset(("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>",
                   "<|end_of_text|>"))


@pytest.fixture(scope="session")
def template(peer_source: Path) -> Callable[[str], str]:
    return lambda name: vendor.load(peer_source, name)


def same(template: str, turn: Turn, specials: frozenset[str], strip: str = "", **extra: object) -> None:
    family = families.choose(template, specials)
    ours = vendor.text(family.render(turn, specials))
    theirs = vendor.render(template, turn, **extra)
    assert ours == theirs


@pytest.mark.parametrize("name", [*talks.TALKS, *talks.PARALLEL, *talks.SPOKEN, *talks.MIDDLE, *talks.ROWS])
def test_qwen25(template: Callable[[str], str], name: str) -> None:
    turn = {**talks.TALKS, **talks.PARALLEL, **talks.SPOKEN, **talks.MIDDLE, **talks.ROWS}[name]
    same(template("Qwen-Qwen2.5-7B-Instruct"), turn, QWEN)


@pytest.mark.parametrize("name", [n for n, t in {**talks.TALKS, **talks.MIDDLE, **talks.ROWS}.items()
                                  if not any(m.role == "tool" for m in t.messages) and not t.tools])
def test_smollm2(default_model: Path, name: str) -> None:
    turn = {**talks.TALKS, **talks.MIDDLE, **talks.ROWS}[name]
    same(vendor.metadata(default_model, "tokenizer.chat_template"), turn, CHATML)


@pytest.mark.parametrize("name", [n for n, t in {**talks.TALKS, **talks.PARALLEL, **talks.SPOKEN, **talks.MIDDLE}.items() if t.tools])
def test_hermes(template: Callable[[str], str], name: str) -> None:
    turn = {**talks.TALKS, **talks.PARALLEL, **talks.SPOKEN}[name]
    # the vendor's template joins descriptions without asking whether there are any
    tools = tuple(replace(t, description=t.description or "D", parameters={**t.parameters, "properties": {
        k: {"description": "", **v} for k, v in t.parameters["properties"].items()
        if not isinstance(v.get("type"), list)}}) for t in turn.tools)
    same(template("NousResearch-Hermes-3-Llama-3.1-8B-tool_use"), replace(turn, tools=tools), QWEN | {"<|begin_of_text|>"},
         bos="<|begin_of_text|>")


LLAMA_TALKS = {**talks.TALKS, **talks.SPOKEN, **{k: v for k, v in talks.MIDDLE.items()}}
LLAMA_TALKS = {k: t for k, t in LLAMA_TALKS.items() if all(
    sum(type(p).__name__ == "ToolCall" for p in m.parts) < 2 for m in t.messages)}


@pytest.mark.parametrize("name", LLAMA_TALKS)
@pytest.mark.parametrize("which", ["meta-llama-Llama-3.1-8B-Instruct", "meta-llama-Llama-3.2-3B-Instruct",
                                   "meta-llama-Llama-3.3-70B-Instruct"])
def test_llama3(template: Callable[[str], str], which: str, name: str) -> None:
    same(template(which), LLAMA_TALKS[name], LLAMA, bos="<|begin_of_text|>")


def test_llama3_date(template: Callable[[str], str]) -> None:
    same(template("meta-llama-Llama-3.1-8B-Instruct"), replace(talks.TALKS["user"], date="1 Feb 2030"), LLAMA,
         bos="<|begin_of_text|>", date_string="1 Feb 2030")


def test_llama3_where_the_vendor_raises() -> None:
    family = families.choose("", frozenset(), "llama3")
    text = vendor.text(family.render(talks.PARALLEL["parallel"], LLAMA))
    assert '{"name": "get_weather", "parameters": {"city": "Zürich", "days": 2}}; {"name": "edit", "parameters": {' in text
    text = vendor.text(family.render(talks.ROWS["same roles"], LLAMA))
    assert "<|end_header_id|>\n\nenv\nwords<|eot_id|>" in text and "\n\na\nb<|eot_id|>" in text


EVERY = {**talks.TALKS, **talks.PARALLEL, **talks.SPOKEN, **talks.THOUGHT, **talks.MIDDLE, **talks.ROWS}


@pytest.mark.parametrize("name", families.NAMES)
def test_clients_write_no_control_token(name: str) -> None:
    """Specials are the family's own spellings, and as many as the same talk has with every client's text replaced by x."""
    family = families.choose("", frozenset(), name)
    everything = QWEN | LLAMA | {"[INST]", "[/INST]", "<s>", "</s>", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
                                 "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[ARGS]", "[CALL_ID]",
                                 "[TOOL_CONTENT]"}
    evil = "".join(sorted(everything))
    for other in (evil, evil + "\n", " " + evil):
        counts = []
        for word in ("x", other):
            turn = Turn("chat", (talks.system(word), talks.user(word), talks.said(word), talks.user(word),
                                 talks.said(talks.call("get_weather", '{"city": "%s"}' % word.replace("\n", ""))),
                                 talks.results(talks.result(word))),
                        tools=(replace(talks.WEATHER, description=word),))
            counts.append([s.text for s in family.render(turn, everything) if isinstance(s, Special)])
        assert counts[0] == counts[1]


@pytest.mark.parametrize("name", families.NAMES)
@pytest.mark.parametrize("talk", EVERY)
def test_every_talk_renders(name: str, talk: str) -> None:
    family = families.choose("", frozenset(), name)
    for turn in (EVERY[talk], replace(EVERY[talk], prefill=EVERY[talk].messages[-1].role == "assistant", thinking=False)):
        segments = family.render(turn, frozenset())
        assert segments and all(isinstance(s, (Plain, Special)) and s.text for s in segments)
        assert not any(isinstance(a, Plain) and isinstance(b, Plain) for a, b in zip(segments, segments[1:]))


@pytest.mark.parametrize("name", families.NAMES)
def test_prefill_is_continued(name: str) -> None:
    turn = Turn("chat", (talks.user("a"), talks.said("The answer")), prefill=True)
    assert vendor.text(families.choose("", frozenset(), name).render(turn, QWEN | LLAMA)).endswith("The answer")

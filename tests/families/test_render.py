"""Every renderer against its vendor's own template, and what WIRE.md asks where the vendors' raise."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Callable

import pytest

import talks
import vendor
from milad import families
from milad.conversation import Thinking, Turn
from milad.families.base import Plain, Special
from milad.families.mistral import Mistral

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


QWEN3_TALKS = {**talks.TALKS, **talks.PARALLEL, **talks.SPOKEN, **talks.THOUGHT, **talks.MIDDLE, **talks.ROWS}


@pytest.mark.parametrize("thinking", [None, True, False])
@pytest.mark.parametrize("name", QWEN3_TALKS)
def test_qwen3(template: Callable[[str], str], name: str, thinking: bool | None) -> None:
    same(template("Qwen-Qwen3-0.6B"), replace(QWEN3_TALKS[name], thinking=thinking), QWEN)


@pytest.mark.parametrize("name", [n for n, t in QWEN3_TALKS.items() if n not in talks.THOUGHT])
def test_qwen3_prefill_is_the_template_without_its_end(template: Callable[[str], str], name: str) -> None:
    turn = replace(QWEN3_TALKS[name], messages=QWEN3_TALKS[name].messages + (talks.said("So"),), prefill=True)
    text = template("Qwen-Qwen3-0.6B")
    ours = vendor.text(families.choose(text, QWEN).render(turn, QWEN))
    assert ours + "<|im_end|>\n" == vendor.render(text, turn)


def test_qwen3_prefilled_thinking_stays_open() -> None:
    turn = Turn("chat", (talks.user("a"), talks.said(Thinking("\nhm, "))), prefill=True)
    family = families.choose("", QWEN, "qwen3")
    assert vendor.text(family.render(turn, QWEN)).endswith("assistant\n<think>\nhm, ")


@pytest.mark.parametrize("name", [n for n in QWEN3_TALKS if n not in talks.THOUGHT])
def test_qwen3_coder(template: Callable[[str], str], name: str) -> None:
    same(template("Qwen3-Coder"), QWEN3_TALKS[name], QWEN)


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("name", ["user", "system", "multi", "unicode", "white", "system later", "same roles"])
def test_qwq_opens_the_thinking_in_its_prompt(template: Callable[[str], str], name: str, thinking: bool) -> None:
    same(template("Qwen-QwQ-32B"), replace(QWEN3_TALKS[name], thinking=thinking), QWEN)


def test_llama_3_without_dates() -> None:
    """Llama 3 (8B, 70B): no system turn of its own; meta-llama/Meta-Llama-3-8B-Instruct's template has nothing but the loop."""
    family = families.choose("{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>' }}", LLAMA)
    assert vendor.text(family.render(talks.TALKS["system"], LLAMA)) == (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|><|start_header_id|>user<|end_header_id|>"
        "\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n")
    assert not family.tools_by_default("Meta Llama 3 8B Instruct", 8_030_000_000)


NEMO = frozenset(("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
                  "[/TOOL_RESULTS]"))
SMALL = NEMO | {"[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[ARGS]", "[CALL_ID]", "[TOOL_CONTENT]"}
ALTERNATING = {**talks.TALKS, **talks.PARALLEL, **talks.SPOKEN}


@pytest.mark.parametrize("name", ALTERNATING)
def test_mistral_nemo(template: Callable[[str], str], name: str) -> None:
    """Where the last message is no user's, the vendor's template forgets the system text; ours is compared without it."""
    turn = ALTERNATING[name]
    if turn.messages[-1].role != "user" and turn.messages[0].role == "system":
        turn = replace(turn, messages=turn.messages[1:])
    same(template("mistralai-Mistral-Nemo-Instruct-2407"), turn, NEMO, bos="<s>", eos="</s>")


def test_mistral_nemo_keeps_the_system_text_in_a_tool_loop(template: Callable[[str], str]) -> None:
    family = families.choose(template("mistralai-Mistral-Nemo-Instruct-2407"), NEMO)
    turn = Turn("chat", (talks.system("S"), *talks.TALKS["call"].messages), tools=(talks.WEATHER,))
    first = vendor.text(family.render(replace(turn, messages=turn.messages[:2]), NEMO))
    assert "[INST]S\n\nw[/INST]" in first and vendor.text(family.render(turn, NEMO)).startswith(first)


def test_mistral_nemo_where_the_vendor_raises() -> None:
    family = Mistral(v3=True)
    text = vendor.text(family.render(talks.MIDDLE["system later"], NEMO))
    assert text.endswith("[INST]S\n\n<system-reminder>\nnow French\n</system-reminder>\nc[/INST]")
    text = vendor.text(family.render(talks.MIDDLE["system last"], NEMO))
    assert text == "<s>[INST]a\n<system-reminder>\nnow French\n</system-reminder>[/INST]"
    assert vendor.text(family.render(talks.ROWS["same roles"], NEMO)) == "<s>[INST]env\nwords[/INST]a\nb</s>[INST]c[/INST]"
    odd = Turn("chat", (talks.user("w"), talks.said(talks.call("get_time", "{}", "toolu_01ABCDEFGHIJ"))), tools=(talks.TIME,))
    assert re.search(r', "id": "[0-9A-Za-z]{9}"}]</s>$', vendor.text(family.render(odd, NEMO)))


@pytest.mark.parametrize("name", ALTERNATING)
def test_mistral_small(template: Callable[[str], str], name: str) -> None:
    same(template("Mistral-Small-3.2-24B-Instruct-2506"), ALTERNATING[name], SMALL, bos="<s>", eos="</s>", iso_date="2025-06-20")


@pytest.mark.parametrize("name", [*ALTERNATING, *talks.MIDDLE])
def test_devstral(template: Callable[[str], str], name: str) -> None:
    same(template("unsloth-mistral-Devstral-Small-2507"), {**ALTERNATING, **talks.MIDDLE}[name], SMALL, bos="<s>", eos="</s>")


@pytest.mark.parametrize("name", [n for n in ALTERNATING if n != "empty content"])
def test_ministral(template: Callable[[str], str], name: str) -> None:
    same(template("mistralai-Ministral-3-14B-Reasoning-2512"), ALTERNATING[name], SMALL, bos="<s>", eos="</s>")


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

"""Parsers: what each spelling of text, thinking and calls is read as, the same for every split of the output."""

from __future__ import annotations

import random
import re
import sys
from typing import Any, Iterable

import pytest

import talks
from milad import families
from milad.conversation import Thinking, ToolSpec, Turn
from milad.events import BlockEnd, BlockStart, Delta, Event
from milad.families.qwen3 import Qwen3

TOOLS = (talks.WEATHER, talks.TIME, talks.EDIT, ToolSpec("write", "", {"type": "object", "properties": {
    "path": {"type": "string"}, "text": {"type": "string"}, "n": {"type": "integer"}, "on": {"type": "boolean"},
    "list": {"type": "array"}, "maybe": {"type": ["string", "null"]}, "f": {"anyOf": [{"type": "number"}, {"type": "null"}]}}}))
TURN = Turn("chat", (talks.user("x"),), tools=TOOLS)
BARE = Turn("chat", (talks.user("x"),))
T, H = "text", "thinking"


def pieces(text: str, specials: Iterable[str]) -> list[tuple[str, bool]]:
    """As a tokenizer gives it: control tokens apart."""
    if not specials:
        return [(text, False)]
    split = re.split("(" + "|".join(re.escape(s) for s in sorted(specials, key=len, reverse=True)) + ")", text)
    return [(p, bool(i % 2)) for i, p in enumerate(split) if p]


def split(parts: list[tuple[str, bool]], random_: random.Random | None) -> list[tuple[str, bool]]:
    """Character by character, or at random."""
    out: list[tuple[str, bool]] = []
    for text, special in parts:
        at = 0
        while not special and at < len(text):
            n = random_.randint(1, 6) if random_ else 1
            out.append((text[at:at + n], False))
            at += n
        if special:
            out.append((text, True))
    return out


def check(events: list[Event]) -> list[tuple[Any, ...]]:
    """Blocks as (kind, text) or (kind, name, arguments); ends with ... where incomplete. Raises where the order is broken."""
    blocks: list[list[Any]] = []
    open_ = False
    for e in events:
        if isinstance(e, BlockStart):
            assert not open_ and e.index == len(blocks)
            blocks.append([e.kind, *([e.name] if e.kind == "tool_call" else []), ""])
            open_ = True
        elif isinstance(e, Delta):
            assert open_ and e.index == len(blocks) - 1 and e.text
            blocks[-1][-1] += e.text
        else:
            assert isinstance(e, BlockEnd) and open_ and e.index == len(blocks) - 1
            open_ = False
            if not e.complete:
                blocks[-1].append(...)
    assert not open_
    return [tuple(b) for b in blocks]


def run(name: str, parts: list[tuple[str, bool]], specials: Iterable[str], turn: Turn, complete: bool) -> list[tuple[Any, ...]]:
    parser = families.choose("", frozenset(), name).parser(turn, frozenset(specials))
    events: list[Event] = []
    for text, special in parts:
        events += parser.feed(text, special)
    return check(events + parser.finish(complete))


def read(name: str, text: str, specials: Iterable[str] = (), turn: Turn = TURN, complete: bool = True) -> list[tuple[Any, ...]]:
    """The blocks, after all splits agreed on them."""
    parts = pieces(text, specials)
    whole = run(name, parts, specials, turn, complete)
    assert run(name, split(parts, None), specials, turn, complete) == whole
    for seed in range(3):
        assert run(name, split(parts, random.Random(seed)), specials, turn, complete) == whole
    return whole


def call(name: str, arguments: str) -> tuple[Any, ...]:
    return ("tool_call", name, arguments)


W = '{"name": "get_weather", "arguments": {"city": "Zürich"}}'
HERMES = [
    ("Hello, world", [(T, "Hello, world")]),
    ("  \n", [(T, "  \n")]),
    ("", []),
    ("\n a \n\n", [(T, "\n a \n\n")]),
    (f"<tool_call>\n{W}\n</tool_call>", [call("get_weather", '{"city": "Zürich"}')]),
    (f"<tool_call>{W}</tool_call>", [call("get_weather", '{"city": "Zürich"}')]),
    (f"\n\n<tool_call>\n{W}\n</tool_call>\n", [call("get_weather", '{"city": "Zürich"}')]),
    (f"Let me look.\n<tool_call>\n{W}\n</tool_call>", [(T, "Let me look."), call("get_weather", '{"city": "Zürich"}')]),
    (f"Look:<tool_call>{W}</tool_call><tool_call>\n{W}</tool_call> done", [
        (T, "Look:"), call("get_weather", '{"city": "Zürich"}'), call("get_weather", '{"city": "Zürich"}'), (T, "done")]),
    ('<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>', [call("get_time", "{}")]),
    ('<tool_call>\n{"name": "get_time"}\n</tool_call>', [call("get_time", "{}")]),
    ('<tool_call>\n{"name": "get_time", "arguments": null}\n</tool_call>', [call("get_time", "{}")]),
    ('<tool_call>{"arguments" : { "a":"}{\\"" , "b":[1,{"c":"]"}]}, "name" :"write"}</tool_call>', [
        call("write", '{ "a":"}{\\"" , "b":[1,{"c":"]"}]}')]),
    ('<tool_call>{"name": "write", "parameters": {"text": "</tool_call><tool_call>\\u00e9"}}</tool_call>', [
        call("write", '{"text": "</tool_call><tool_call>\\u00e9"}')]),
    ('<tool_call>{"name": "write", "arguments": "{\\"n\\": 1}"}</tool_call>', [call("write", '{"n": 1}')]),
    ('<tool_call>{"type": "function", "id": 3, "name": "get_time", "arguments": {}}</tool_call>x', [call("get_time", "{}"), (T, "x")]),
    ('<tool_call>{"name": "get_time", "arguments": {}, "why": ["}"]}</tool_call>x', [call("get_time", "{}"), (T, "x")]),
    ('<tool_call>{"name": "get_time", "arguments": {}</tool_call>', [call("get_time", "{}")]),
    ('<tool_call>{"name": "nobody", "arguments": {}}</tool_call>', [(T, '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>')]),
    ('a <tool_call>nothing</tool_call> b', [(T, 'a <tool_call>nothing</tool_call> b')]),
    ('<tool_call>\n[1, 2]\n</tool_call>\n', [(T, '<tool_call>\n[1, 2]\n</tool_call>\n')]),
    (f"<tool_call>\n<tool_call>\n{W}\n</tool_call>", [(T, "<tool_call>"), call("get_weather", '{"city": "Zürich"}')]),
    ('<tool_call>{"city": "x", "name": "get_weather"}</tool_call>', [(T, '<tool_call>{"city": "x", "name": "get_weather"}</tool_call>')]),
    ("1 < 2 <tool <tool_cal", [(T, "1 < 2 <tool <tool_cal")]),
    ("\ud7ff\U0001f469\u200d\U0001f469", [(T, "\ud7ff\U0001f469\u200d\U0001f469")]),
]


@pytest.mark.parametrize("text,blocks", HERMES)
@pytest.mark.parametrize("specials", [(), ("<tool_call>", "</tool_call>", "<|im_end|>")])
def test_chatml(text: str, blocks: list[Any], specials: tuple[str, ...]) -> None:
    assert read("chatml", text, specials) == blocks


CUT = [
    ("some text", [(T, "some text", ...)]),
    ('<tool_call>{"name": "get_weather"', [("tool_call", "get_weather", "", ...)]),
    ('<tool_call>{"name": "get_weather", "arguments": {"city": "Z', [("tool_call", "get_weather", '{"city": "Z', ...)]),
    ('<tool_call>{"name": "get_weather", "arguments": {"city": "Z"}', [("tool_call", "get_weather", '{"city": "Z"}', ...)]),
    ('<tool_call>{"name": "get_weather", "arguments": {"city": "Z"}}', [("tool_call", "get_weather", '{"city": "Z"}')]),
    ('<tool_call>{"name": "get_wea', [(T, '<tool_call>{"name": "get_wea', ...)]),
]


@pytest.mark.parametrize("text,blocks", CUT)
def test_cut_by_a_limit(text: str, blocks: list[Any]) -> None:
    assert read("chatml", text, complete=False) == blocks


def test_a_call_broken_by_the_end_of_turn_is_incomplete() -> None:
    text = '<tool_call>{"name": "get_weather", "arguments": {"city": "Z'
    assert read("chatml", text) == [("tool_call", "get_weather", '{"city": "Z', ...)]
    text = '<tool_call>{"name": "get_weather", "arguments": {"a": ]} x'
    assert read("chatml", text) == [("tool_call", "get_weather", '{"a": ', ...), (T, "]} x")]


def test_without_tools_a_call_is_text() -> None:
    text = f"<tool_call>\n{W}\n</tool_call>"
    assert read("chatml", text, turn=BARE) == [(T, text)]


def test_a_marker_that_is_a_token_is_no_marker_as_text() -> None:
    text = f"<tool_call>\n{W}\n</tool_call>"
    specials = ("<tool_call>", "</tool_call>")
    assert run("chatml", [(text, False)], specials, TURN, True) == [(T, text)]
    assert run("chatml", split([(text, False)], None), specials, TURN, True) == [(T, text)]


def test_the_block_opens_with_its_name_and_arguments_stream() -> None:
    parser = families.choose("", frozenset(), "chatml").parser(TURN, frozenset())
    assert parser.feed('<tool_call>\n{"name": "get_weather') == []
    assert parser.feed('"') == [BlockStart(0, "tool_call", "", "get_weather")]
    assert parser.feed(', "arguments": {"ci') == [Delta(0, '{"ci')]
    assert parser.feed('ty": "') == [Delta(0, 'ty": "')]


def test_text_streams_without_delay() -> None:
    parser = families.choose("", frozenset(), "chatml").parser(TURN, frozenset())
    assert parser.feed("Hello") == [BlockStart(0, "text"), Delta(0, "Hello")]
    assert parser.feed(" there") == [Delta(0, " there")]
    assert parser.feed(" <tool") == []
    assert parser.feed("box>") == [Delta(0, " <toolbox>")]


P = '{"name": "get_weather", "parameters": {"city": "Zürich"}}'
Z = call("get_weather", '{"city": "Zürich"}')
LLAMA3 = [
    (P, [Z]),
    (f" \n{P}\n", [Z]),
    (W, [Z]),
    (f"<|python_tag|>{P}", [Z]),
    (f"{P}; {P}", [Z, Z]),
    (f"{P}\n{P};{P}", [Z, Z, Z]),
    (f"Sure:\n\n{P}", [(T, "Sure:"), Z]),
    (f"{P} and that", [Z, (T, "and that")]),
    ('{"type": "function", "name": "get_weather", "parameters": {"city": "Zürich"}}', [Z]),
    ('[get_weather(city="Zürich")]', [Z]),
    ("[get_weather(city='Zürich'), get_time(), write(n=1, on=True, list=[1, 'a', (2,)], maybe=None, text='a\\'\\n\"', f=1.5)]", [
        Z, call("get_time", "{}"),
        call("write", '{"n": 1, "on": true, "list": [1, "a", [2]], "maybe": null, "text": "a\'\\n\\"", "f": 1.5}')]),
    ("[write(on=true, maybe=null, text=bare)]", [call("write", '{"on": true, "maybe": null, "text": "bare"}')]),
    ('<|python_tag|>get_weather.call(city="Zürich")', [Z]),
    ('<|python_tag|>[get_weather(city="Zürich"), get_time()]', [Z, call("get_time", "{}")]),
    ("<|python_tag|>print(1)", [(T, "<|python_tag|>print(1)")]),
    ("[1, 2, 3] and {\"a\": 1}", [(T, "[1, 2, 3] and {\"a\": 1}")]),
    ("a list [get_weathers(x=1)]", [(T, "a list [get_weathers(x=1)]")]),
    ('{"name": "Bob", "parameters": {}}', [(T, '{"name": "Bob", "parameters": {}}')]),
    ('[get_time(), nobody(x=1)]', [call("get_time", "{}"), (T, ", nobody(x=1)]")]),
    ('[get_weather(city="Z', [("tool_call", "get_weather", "", ...)]),
    ('[write(text="\\ud800\\d")]', [call("write", '{"text": "\\ud800\\\\d"}')]),
]


@pytest.mark.parametrize("text,blocks", LLAMA3)
@pytest.mark.parametrize("specials", [(), ("<|python_tag|>", "<|eot_id|>")])
def test_llama3(text: str, blocks: list[Any], specials: tuple[str, ...]) -> None:
    assert read("llama3", text, specials) == blocks


QWEN3 = [
    ("<think>\nhm\n\n so\n</think>\n\nYes", [(H, "hm\n\n so"), (T, "Yes")]),
    ("<think>\n\n</think>\n\nYes", [(T, "Yes")]),
    ("\n<think>a</think>b<think>c</think>", [(H, "a"), (T, "b<think>c</think>")]),
    ("Yes </think> no", [(T, "Yes </think> no")]),
    ("<think>\nendless <tool_call> < </thin", [(H, "endless <tool_call> < </thin")]),
    (f"<think>\nhm\n</think>\n\n<tool_call>\n{W}\n</tool_call>", [(H, "hm"), call("get_weather", '{"city": "Zürich"}')]),
    (f"<think>\nhm\n</think>\n\nI look.\n\n<tool_call>\n{W}\n</tool_call>\n<tool_call>\n{W}\n</tool_call>", [
        (H, "hm"), (T, "I look.\n"), call("get_weather", '{"city": "Zürich"}'), call("get_weather", '{"city": "Zürich"}')]),
    ("<think>x</think>\n\n", [(H, "x")]),
    ("<think>\n\n</think>\n\n", []),
]


@pytest.mark.parametrize("text,blocks", QWEN3)
@pytest.mark.parametrize("specials", [(), ("<think>", "</think>", "<tool_call>", "</tool_call>")])
def test_qwen3(text: str, blocks: list[Any], specials: tuple[str, ...]) -> None:
    assert read("qwen3", text, specials) == blocks


def test_qwen3_thinking_without_tools_and_cut() -> None:
    assert read("qwen3", "<think>\nhm", turn=BARE, complete=False) == [(H, "hm", ...)]
    assert read("qwen3", f"<think>\nhm</think>{W}", turn=BARE) == [(H, "hm"), (T, W)]


def test_thinking_that_the_prompt_opened() -> None:
    prefilled = Turn("chat", (talks.user("x"), talks.said(Thinking("hm"))), tools=TOOLS, prefill=True)
    assert read("qwen3", " more\n</think>\n\nYes", turn=prefilled) == [(H, " more"), (T, "Yes")]
    for text in ("so\n</think>\n\nYes", "<think>\nso\n</think>\n\nYes"):
        for seed in range(4):
            parser = Qwen3(prompt_opens_thinking=True).parser(TURN, frozenset())
            events = [e for p, _ in split([(text, False)], random.Random(seed)) for e in parser.feed(p)]
            assert check(events + parser.finish(True)) == [(H, "so"), (T, "Yes")]


X = "<function=write>\n<parameter=path>\na.py\n</parameter>\n<parameter=n>\n 3\n</parameter>\n</function>"
XCALL = call("write", '{"path": "a.py", "n": 3}')
CODER = [
    (f"<tool_call>\n{X}\n</tool_call>", [XCALL]),
    (X, [XCALL]),
    (f"{X}\n</tool_call>", [XCALL]),
    (f"I look.\n\n{X}\n</tool_call>\n<tool_call>\n{X}\n</tool_call>", [(T, "I look."), XCALL, XCALL]),
    (f"I look. {X}{X} so", [(T, "I look."), XCALL, XCALL, (T, "so")]),
    ("<tool_call>\n<function=get_time>\n</function>\n</tool_call>", [call("get_time", "{}")]),
    ("<function=write><parameter=text>\n\n  if x < 3 && \"é\\\":\n\t</param>\n\n</parameter></function>", [
        call("write", '{"text": "\\n  if x < 3 && \\"é\\\\\\":\\n\\t</param>\\n"}')]),
    ("<function=write>\n<parameter=text>\n</parameter>\n<parameter=path></parameter>\n</function>", [
        call("write", '{"text": "", "path": ""}')]),
    ("<function=write><parameter=on>\nTrue\n</parameter><parameter=list>\n[1, {\"a\": null}]\n</parameter><parameter=maybe>\nnull\n"
     "</parameter><parameter=f>\n1.5\n</parameter><parameter=other>\n7\n</parameter></function>", [
         call("write", '{"on": true, "list": [1, {"a": null}], "maybe": null, "f": 1.5, "other": "7"}')]),
    ("<function=write><parameter=n>\nmany\n</parameter><parameter=maybe>\nyes\n</parameter><parameter=list>['a']</parameter></function>", [
        call("write", '{"n": "many", "maybe": "yes", "list": ["a"]}')]),
    ("<function=nobody>\n<parameter=a>\n1\n</parameter>\n</function>", [
        (T, "<function=nobody>\n<parameter=a>\n1\n</parameter>\n</function>")]),
    ("<tool_call>\n<function=nobody>\n</function>\n</tool_call>", [(T, "<tool_call>\n<function=nobody>\n</function>\n</tool_call>")]),
    ("<tool_call>\n<function=write>\n<parameter=n>\n1\n</parameter>\n</tool_call>", [call("write", '{"n": 1}')]),
    ("<tool_call>\n<function=write>\n<parameter=path>\na.p", [("tool_call", "write", '{"path": "a.p', ...)]),
    ("<tool_call>\n{\"name\": \"write\"}\n</tool_call>", [(T, "<tool_call>\n{\"name\": \"write\"}\n</tool_call>")]),
    ("a <function> b", [(T, "a <function> b")]),
]


@pytest.mark.parametrize("text,blocks", CODER)
@pytest.mark.parametrize("specials", [(), ("<tool_call>", "</tool_call>")])
def test_qwen3_coder(text: str, blocks: list[Any], specials: tuple[str, ...]) -> None:
    assert read("qwen3-coder", text, specials) == blocks


def test_qwen3_coder_streams_strings() -> None:
    parser = families.choose("", frozenset(), "qwen3-coder").parser(TURN, frozenset())
    assert parser.feed("<function=write>") == [BlockStart(0, "tool_call", "", "write")]
    assert parser.feed("\n<parameter=text>\n") == [Delta(0, '{"text": "')]
    assert parser.feed('line "one"') == [Delta(0, 'line \\"one\\"')]


MISTRAL = [
    (f"[TOOL_CALLS][{W}]", [call("get_weather", '{"city": "Zürich"}')]),
    (f"[TOOL_CALLS] [{W[:-1]}, \"id\": \"abcdefghi\"}}, {W}]", [call("get_weather", '{"city": "Zürich"}')] * 2),
    (f"[TOOL_CALLS]{W}", [call("get_weather", '{"city": "Zürich"}')]),
    (f"Sure.[TOOL_CALLS][{W}] ok", [(T, "Sure."), call("get_weather", '{"city": "Zürich"}'), (T, "ok")]),
    ('[TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]{"city": "Zürich"}', [call("get_weather", '{"city": "Zürich"}')]),
    ('[TOOL_CALLS]get_weather[ARGS]{"city": "Zürich"}[TOOL_CALLS]get_time[ARGS]{}', [
        call("get_weather", '{"city": "Zürich"}'), call("get_time", "{}")]),
    ('[TOOL_CALLS]get_weather{"city": "[TOOL_CALLS]"}', [call("get_weather", '{"city": "[TOOL_CALLS]"}')]),
    ('[TOOL_CALLS]nobody[ARGS]{"city": 1}', [(T, '[TOOL_CALLS]nobody[ARGS]{"city": 1}')]),
    ('[TOOL_CALLS][{"name": "nobody", "arguments": {}}]', [(T, '[TOOL_CALLS][{"name": "nobody", "arguments": {}}]')]),
    (f'[TOOL_CALLS][{W}, {{"name": "nobody"}}]', [call("get_weather", '{"city": "Zürich"}'), (T, ', {"name": "nobody"}]')]),
    ('[TOOL_CALLS]get_weather[ARGS]{"city": "Z', [("tool_call", "get_weather", '{"city": "Z', ...)]),
    ("[TOOL] and [TOOL_CALLS]", [(T, "[TOOL] and [TOOL_CALLS]")]),
]


@pytest.mark.parametrize("text,blocks", MISTRAL)
@pytest.mark.parametrize("specials", [(), ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "</s>")])
def test_mistral(text: str, blocks: list[Any], specials: tuple[str, ...]) -> None:
    assert read("mistral", text, specials) == blocks


def test_mistral_keeps_the_ids_that_the_model_wrote_unless_they_repeat() -> None:
    turn = Turn("chat", (talks.user("x"), talks.said(talks.call("get_time", "", "call_zzzzzzzzz"))), tools=TOOLS)
    parser = families.choose("", frozenset(), "mistral").parser(turn, frozenset())
    events = parser.feed("".join(f"[TOOL_CALLS]get_time[CALL_ID]{i}[ARGS]{{}}" for i in ("aaaaaaaaa", "aaaaaaaaa", "zzzzzzzzz")))
    assert [e.id for e in events if isinstance(e, BlockStart)] == ["aaaaaaaaa", "", ""]


def test_plain() -> None:
    assert read("plain", f"<think>x</think>{W}", turn=BARE) == [(T, f"<think>x</think>{W}")]
    assert read("plain", f" {W}") == [call("get_weather", '{"city": "Zürich"}')]
    assert read("plain", "  Hello ") == [(T, " Hello ")]


MARKERS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "<function=write>", "<parameter=text>", "<parameter=n>", "</parameter>",
           "</function>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[", "]", "{", "}", ",", '"', "\\", "\n", " ", ";",
           '{"name": "', "write", '"', ', "arguments": ', '{"text": "a"}', "get_time(", ")", "x=1", "'", "nobody", "é\U0001f469", "null",
           W, P, "[get_time()]", f"<tool_call>\n{W}\n</tool_call>", "<function=get_time>\n</function>\n</tool_call>", "<|im_end|>"]


@pytest.mark.parametrize("name", families.NAMES)
def test_fuzz(name: str) -> None:
    """Random markup through every split: no exception, the same blocks, in order and closed; without tools and thinking all is
    text, character for character."""
    rng = random.Random(20240726)
    family = families.choose("", frozenset(), name)
    for i in range(400):
        text = "".join(rng.choice(MARKERS) for _ in range(rng.randint(1, 14)))
        specials = frozenset(rng.sample(MARKERS[:13] + ["<|im_end|>"] if i % 2 else MARKERS, rng.randint(0, 6)))
        for complete in (True, False):
            blocks = read(name, text, specials, TURN, complete)
            for b in blocks:
                if b[0] == "tool_call" and b[-1] is not ...:
                    assert b[1] in {t.name for t in TOOLS}
                    assert b[2].startswith("{") and b[2].endswith("}")
        if not family.thinks and "<|im_end|>" not in text:
            blocks = read(name, text, specials, BARE)
            assert "".join(b[1] for b in blocks) == (text[1:] if name == "plain" and text[0] == " " else text)


@pytest.mark.parametrize("name", families.NAMES)
@pytest.mark.parametrize("unit", ["<tool_call>", "[", "{", '{"name": ', "<think>", "\n", "<function=", "[TOOL_CALLS]", "</thin",
                                  '{"name": "get_time", "x": ', '{"arguments": {'])
def test_hostile_output_takes_linear_work(name: str, unit: str) -> None:
    """Counted in Python calls, not in seconds: twice the output, at most about twice the calls."""
    def work(n: int) -> int:
        parser = families.choose("", frozenset(), name).parser(TURN, frozenset())
        count = 0

        def profile(frame: Any, event: str, arg: Any) -> None:
            nonlocal count
            count += event == "call"

        sys.setprofile(profile)
        try:
            for _ in range(n):
                parser.feed(unit)
            parser.finish(True)
        finally:
            sys.setprofile(None)
        return count

    assert work(400) <= 2.2 * work(200) + 100

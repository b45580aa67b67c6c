"""Freeform input out of streamed arguments, and names that must be unique."""

from __future__ import annotations

import json
import random

import pytest

from milad.protocols.fields import Obj
from milad.protocols.tools import FreeformInput, Tools, arguments_of, freeform_of, read_openai_tool

RAW = ["", "plain", '"', "\\", "\\\\\"", "line\nline\ttab\r", "é日🎉\u2028", "\x00\x1f", "\\u0041", '{"input": "x"}', "a" * 300]
ODD = ['{"input": 3}', '{"patch": "x"}', "[1]", "not json", "", " ", '{"input"', '{"input":', '{"inp', '{ "input" : "a"',
       '{"input": "a\\', '{"input": "a\\u12', '{"input": "a\\ud83c', '{"input": "\\ud83c\\ud83cx"}', '{"input": "\\udf89x"}',
       '{"input": "\\ud83c\\n"}', '{"input": "\\uzzzz"}', '{"input": "\\q"}', '{"input": "a", "more": "b"}', '{"input": "a"} x',
       " " * 100 + '{"input": "late"}', '{"a": 1, "input": "second"}', '{"input": "\\ud83cx']


def split(text: str, pieces: list[str]) -> str:
    reader = FreeformInput()
    return "".join(reader.feed(p) for p in pieces) + reader.end()


@pytest.mark.parametrize("raw", RAW)
@pytest.mark.parametrize("ascii_only", [True, False])
def test_raw_text_survives(raw: str, ascii_only: bool) -> None:
    for separators in ((", ", ": "), (",", ":")):
        assert freeform_of(json.dumps({"input": raw}, ensure_ascii=ascii_only, separators=separators)) == raw


@pytest.mark.parametrize("text", ODD + [json.dumps({"input": r}) for r in RAW])
def test_every_split_gives_the_same(text: str) -> None:
    whole = freeform_of(text)
    assert split(text, list(text)) == whole
    for i in range(len(text) + 1):
        assert split(text, [text[:i], text[i:]]) == whole
    whole.encode()                                               # never half a surrogate pair


def test_what_has_another_shape_comes_out_as_it_stands() -> None:
    assert freeform_of('{"a": 1, "input": "second"}') == "second" and freeform_of(" " * 100 + '{"input": "late"}') == "late"
    for text in ("not json", "[1]", '{"patch": "x"}', '{"input": 3}'):
        assert freeform_of(text) == text
    assert freeform_of('{"input": "\\ud83c\\udf89"}') == "🎉" and freeform_of('{"input": "\\ud83cx"}') == "\ufffdx"


@pytest.mark.parametrize("seed", range(30))
def test_random_text_in_random_pieces(seed: int) -> None:
    rng = random.Random(seed)
    raw = "".join(chr(rng.choice([rng.randrange(32, 127), rng.randrange(0x3000), rng.randrange(0x1F300, 0x1F600), 34, 92, 10]))
                  for _ in range(200))
    raw = raw.encode("utf-8", "replace").decode()
    text = json.dumps({"input": raw}, ensure_ascii=rng.random() < 0.5)
    pieces = []
    while text:
        n = rng.randrange(1, 9)
        pieces.append(text[:n])
        text = text[n:]
    assert split("", pieces) == raw


def test_no_arguments_are_an_object_only_where_the_call_is_whole() -> None:
    assert arguments_of("", True) == "{}" and json.loads(arguments_of(" \n", True)) == {}
    assert arguments_of("", False) == "" and arguments_of('{"a":1}', True) == '{"a":1}'


def test_names_are_unique_and_found_again() -> None:
    tools = Tools({})
    space = {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}, {"type": "custom", "name": "g"}]}
    for tool in (space, {"type": "function", "name": "f"}, {**space, "name": "m"}, {"type": "function", "function": {"name": "f"}}):
        read_openai_tool(tools, Obj(tool, "tools[0]"))
    assert len(set(tools.specs)) == 5 == len(tools.names)
    assert tools.find("f", "n") == "f" and tools.find("f", "m") == "m__f" and tools.find("f") == tools.names[None, "f"] != "f"
    back = {(s.namespace, s.api_name or s.name) for s in tools.specs.values()}
    assert back == {("n", "f"), ("n", "g"), (None, "f"), ("m", "f"), ("m", "g")}

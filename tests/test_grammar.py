"""Constrained decoding: walks through the masks, read back by the family's parser and by jsonschema."""

from __future__ import annotations

import json
import random
import re
from array import array
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Callable

import jsonschema
import numpy as np
import pytest

import tiny
from families.talks import user
from milad import capi, families
from milad.conversation import Format, ToolChoice, ToolSpec, Turn
from milad.engine.base import Done, Token
from milad.errors import MiladError
from milad.events import Fold
from milad.families.llama3 import Llama3
from milad.families.mistral import Mistral
from milad.families.qwen3 import Qwen3
from milad.output import Output

pytest.importorskip("llguidance")
from milad.grammar import Grammar  # noqa: E402

STR = {"type": "string", "maxLength": 12}
FIND = ToolSpec("find", "", {"type": "object", "properties": {
    "q": STR, "n": {"type": "integer", "minimum": -5, "maximum": 500}, "deep": {"type": "boolean"},
    "x": {"type": "number"}, "how": {"enum": ["fast", "slow \"er\"", "<b>"]}, "one": {"const": "only"},
    "tags": {"type": "array", "items": STR, "maxItems": 3},
    "at": {"type": "object", "properties": {"line": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["line"],
           "additionalProperties": False}}, "required": ["q", "n", "how", "at"], "additionalProperties": False})
REF = ToolSpec("ref-er", "", {"type": "object", "$defs": {"p": {"type": "object", "properties": {"k": {"enum": [1, 2]}},
                                                               "required": ["k"], "additionalProperties": False}},
                              "properties": {"p": {"$ref": "#/$defs/p"}, "maybe": {"anyOf": [{"type": "integer", "maximum": 9},
                                                                                            {"type": "null"}]}},
                              "required": ["p", "maybe"], "additionalProperties": False})
NONE = ToolSpec("now", "", {"type": "object", "properties": {}, "additionalProperties": False})
TOOLS = (FIND, REF, NONE)
SCHEMA = {"type": "object", "properties": {"name": STR, "age": {"type": "integer", "minimum": 0, "maximum": 200},
                                           "ok": {"type": ["boolean", "null"]},
                                           "list": {"type": "array", "items": {"enum": ["a", 1, None]}, "minItems": 1, "maxItems": 4}},
          "required": ["name", "age", "list"], "additionalProperties": False}

MAKERS: dict[str, Callable[[], Any]] = {
    "chatml": lambda: families.choose("", frozenset(), "chatml"), "qwen3": Qwen3,
    "qwq": lambda: Qwen3(prompt_opens_thinking=True), "qwen3-coder": lambda: families.choose("", frozenset(), "qwen3-coder"),
    "llama3": Llama3, "nemo": lambda: Mistral(v3=True), "small": lambda: Mistral(ids=True),
    "devstral": lambda: Mistral(ids=False, tools_first=True, speaks=True), "ministral": lambda: Mistral(ids=False, thinks=True),
    "plain": lambda: families.choose("", frozenset(), "plain")}
# The vocabulary's own idea of the markers: control tokens, user-defined ones, or text only.
MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]",
           "<|python_tag|>", "<|eot_id|>", "</s>"]
KINDS = {"control": 3, "defined": 4, "text": 0}


@pytest.fixture(scope="module")
def vocabularies(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """kind -> (model, its Grammar): 300 tokens each, so that walks visit everything soon."""
    made = {}
    for kind, number in KINDS.items():
        added = MARKERS if number else []
        words = tiny.SPECIALS + added + tiny.byte_characters() + [m.replace(" ", "") for m in tiny.MERGES] + ['"}', '":', "é"[:1]]
        words = list(dict.fromkeys(words))
        path = tmp_path_factory.mktemp("vocabulary") / f"{kind}.gguf"
        types = [3] * len(tiny.SPECIALS) + [number] * len(added) + [1] * (len(words) - len(tiny.SPECIALS) - len(added))
        tiny.write(path, vocab_only=True, extra={"tokenizer.ggml.tokens": words, "tokenizer.ggml.token_type": types,
                                                 "llama.vocab_size": len(words)})
        model = capi.Model(str(path), vocab_only=True)
        made[kind] = model, Grammar(model)
    yield made
    for model, _ in made.values():
        model.close()


def turn_of(**more: Any) -> Turn:
    return Turn("chat", (user("x"),), **more)


CLOSERS = ["</think>", "[/THINK]", "\n</parameter>\n", "\n</function>", '"', "}", "]", '"}', ",", ";"]


def allowed(model: Any, constraint: Any) -> np.ndarray:
    """A bool per token."""
    mask = constraint.mask()
    assert mask is not None and len(mask) == (model.info.n_vocab + 31) // 32 * 4
    return np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")[:model.info.n_vocab].astype(bool)


def walk(model: Any, constraint: Any, seed: int, most: int = 1500, ends: float = 0.5) -> tuple[list[int], bool]:
    """Tokens drawn from the masks, (tokens, whether the grammar let it end). What closes things is drawn more often."""
    rng = random.Random(seed)
    phrases = [model.tokenize(text, parse_special=True) for text in CLOSERS]
    phrase: list[int] = []
    tokens: list[int] = []
    while len(tokens) < most:
        bits = allowed(model, constraint)
        assert bits.any(), ("nothing is allowed", b"".join(map(model.token_bytes, tokens)))
        ending = [t for t in model.eog if bits[t]]
        others = [t for t in np.flatnonzero(bits).tolist() if t not in model.eog]
        if ending and (not others or rng.random() < ends):
            return tokens, True
        if not (phrase and bits[phrase[0]]) and rng.random() < 0.3:
            phrase = list(rng.choice([p for p in phrases if bits[p[0]]] or [[]]))
        tokens.append(phrase.pop(0) if phrase and bits[phrase[0]] else rng.choice(others))
        constraint.accept(tokens[-1])
    return tokens, False


def read(model: Any, family: Any, turn: Turn, tokens: list[int], ended: bool = True) -> Fold:
    """What the daemon would make of these tokens."""
    runner: Any = SimpleNamespace(model=model, family=family, specials=frozenset(model.specials),
                                  special_ids=frozenset(model.specials.values()))
    stops = tuple(s for s in family.stops(runner.specials) if s not in runner.specials)
    prepared: Any = SimpleNamespace(turn=turn, tokens=[0], stop_texts=stops, echo_only=False, length_reason="length")
    output, fold = Output(runner, prepared, 0), Fold()
    items = [Token(t, model.token_bytes(t)) for t in tokens] + [Done("stop" if ended else "length", 1, 0, len(tokens))]
    for item in items:
        for event in output.take([item]):
            fold.take(event)
    assert fold.finish is not None
    return fold


def calls_of(fold: Fold, tools: tuple[ToolSpec, ...]) -> list[tuple[str, Any]]:
    """The calls, each complete and valid against its tool's schema."""
    found = []
    by_name = {t.name: t for t in tools}
    for block in fold.blocks:
        if block.kind == "tool_call":
            assert block.complete
            value = json.loads(block.text)
            jsonschema.validate(value, dict(by_name[block.name].parameters))
            found.append((block.name, value))
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("mode", ["required", "named", "one", "auto"])
def test_calls_are_valid(vocabularies: Any, name: str, kind: str, mode: str) -> None:
    model, grammar = vocabularies[kind]
    family = MAKERS[name]()
    choice = ToolChoice("named", "ref-er") if mode == "named" else ToolChoice("auto" if mode == "auto" else "required")
    turn = turn_of(tools=TOOLS, tool_choice=choice, parallel_tool_calls=mode != "one")
    n_calls = n_ended = 0
    for seed in range(5):
        constraint = grammar.compile(turn, family)
        if constraint is None:
            assert mode == "auto" and not family.call_grammar(turn).trigger
            return
        if mode == "auto":              # random text hardly ever opens a call: the model does
            thought = family.thinking_markup[0] if len(family.thinking_markup) == 1 else ""
            trigger = model.tokenize(thought + family.call_grammar(turn).trigger, parse_special=True)
            for t in trigger:
                constraint.accept(t)
        else:
            trigger = []
        tokens, ended = walk(model, constraint, seed, ends=0.7)
        n_ended += ended
        if not ended:
            continue
        fold = read(model, family, turn, trigger + tokens)
        found = calls_of(fold, TOOLS)
        n_calls += len(found)
        assert found, fold.blocks
        assert mode == "auto" or not fold.text(), fold.blocks
        if mode == "named":
            assert {n for n, _ in found} == {"ref-er"}
        if mode == "one":
            assert len(found) == 1
        if mode != "auto":
            assert fold.finish.reason == "tool_calls"
    assert n_ended >= 3 and n_calls >= 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("thinking", [None, False])
@pytest.mark.parametrize("form", ["json_object", "json_schema", "regex", "lark", "gbnf"])
def test_formats_are_kept(vocabularies: Any, name: str, kind: str, thinking: bool | None, form: str) -> None:
    model, grammar = vocabularies[kind]
    family = MAKERS[name]()
    wanted = {"json_object": Format("json_object"), "json_schema": Format("json_schema", SCHEMA),
              "regex": Format("regex", text=r"[ab]{2,5}/\d+(\.\d{1,3})?"),
              "lark": Format("lark", text='start: WORD ("," WORD)*\nWORD: /[a-z]{1,4}/\n'),
              "gbnf": Format("gbnf", text='root ::= item (", " item)*\nitem ::= [a-z] [0-9]\n')}[form]
    turn = turn_of(format=wanted, thinking=thinking)
    n_ended = 0
    for seed in range(3):
        tokens, ended = walk(model, grammar.compile(turn, family), seed, most=600)
        if not ended:
            continue
        n_ended += 1
        text = read(model, family, turn, tokens).text()
        if form == "json_schema":
            jsonschema.validate(json.loads(text), SCHEMA)
        elif form == "json_object":
            assert isinstance(json.loads(text), dict)
        else:
            assert re.fullmatch({"regex": wanted.text, "lark": "[a-z]{1,4}(,[a-z]{1,4})*", "gbnf": "[a-z][0-9](, [a-z][0-9])*"}[form],
                                text, re.ASCII), text
    assert n_ended >= 2

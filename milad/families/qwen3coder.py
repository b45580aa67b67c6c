"""Qwen3-Coder: ChatML with tools in tags of its own; arguments stand as text between <parameter=name> tags.

    <tool_call>                 often missing in the model's output
    <function=name>
    <parameter=key>
    value
    </parameter>
    </function>
    </tool_call>

Values become JSON by the tool's schema: strings stream as they come; everything else waits for its end. Oracle of the renderer:
the vendor's template (tests/families); of types: Qwen's own qwen3coder_tool_parser (vLLM).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import AbstractSet, Any, Callable, Mapping, Sequence

from ..conversation import Message, ToolCall, ToolSpec, Turn, argument_types
from .base import CallMarkup, Parser, Segment
from .chatml import END, SOFT, STOPS, close_turn, open_turn, whole_turn
from .page import Page, calls, flatten, result_text, runs, split_system, tojson
from .parsing import Markers, MarkupParser
from .pycall import literal
from .readers import DONE, FAIL, MAX_NAME, MORE, SPACE, Value, sound_json, spell

FUNCTION = "<function="
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
TOOLS_SYSTEM = "You are Qwen, a helpful AI assistant that can interact with a computer to solve tasks."
TOOLS_END = ("\n</tools>\n\nIf you choose to call a tool ONLY reply in the following format with NO suffix:\n\n<tool_call>\n"
             "<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</parameter>\n<parameter="
             "example_parameter_2>\nvalue_2\n</parameter>\n</function>\n</tool_call>\n\n<IMPORTANT>\nReminder:\n- Function calls MUST "
             "follow the specified format: the tool calling block MUST begin with an opening <tool_call> tag and end with a closing "
             "</tool_call> tag.\n- Required parameters MUST be specified\n- You may provide optional reasoning for your function call "
             "in natural language BEFORE the function call, but NOT after\n- If there is no function call available, answer the "
             "question like normal with your current knowledge and do not tell the user about function calls\n</IMPORTANT>")


@dataclass(frozen=True)
class Qwen3Coder:
    name: str = "qwen3-coder"
    thinks: bool = False
    thinking_markup: tuple[str, ...] = ()

    def tools_by_default(self, model_name: str, n_params: int) -> bool:
        """Yes: the smallest is 30B-A3B and trained for agents."""
        return True

    def stops(self, specials: AbstractSet[str]) -> tuple[str, ...]:
        return tuple(s for s in STOPS if s == END or s in specials)

    def call_grammar(self, turn: Turn) -> CallMarkup:
        """<function=name> to </function> stand between begin and end."""
        return CallMarkup(style="xml", begin="<tool_call>\n", end="\n</tool_call>", trigger="<tool_call>")

    def parser(self, turn: Turn, specials: AbstractSet[str]) -> Parser:
        return MarkupParser(turn, specials, openers={"<tool_call>": lambda p: XmlCall(p, FUNCTION),
                                                     FUNCTION: lambda p: XmlCall(p, "")},
                            closer="</tool_call>", ignored=frozenset(STOPS))

    # -- rendering ----------------------------------------------------------------------------------------------------

    def render(self, turn: Turn, specials: AbstractSet[str]) -> list[Segment]:
        page = Page(specials, SOFT)
        system, rest = split_system(turn.messages)
        if system is not None or turn.tools:
            open_turn(page, "system")
            page.text(TOOLS_SYSTEM if system is None else system)
            if turn.tools:
                page.own("\n\n# Tools\n\nYou have access to the following tools:\n\n<tools>")
                for tool in turn.tools:
                    page.text(describe(tool))
                page.own(TOOLS_END)
            close_turn(page)
        messages = flatten(rest)
        for i, m in enumerate(messages):
            prefill = turn.prefill and i == len(messages) - 1
            if m.role == "tool":
                self._result(page, messages, i)
            elif m.role == "assistant" and calls(m):
                self._calls(page, m, prefill)
            elif prefill:
                open_turn(page, "assistant")
                page.text(m.text)
            else:
                whole_turn(page, m.role, m.text)
        if not turn.prefill:
            open_turn(page, "assistant")
        return page.segments()

    def _calls(self, page: Page, m: Message, prefill: bool) -> None:
        open_turn(page, "assistant", "")
        for part in runs(m):
            if isinstance(part, str):
                page.text("\n" + part.strip() + "\n" if part.strip() else "")
            else:
                page.own("\n<tool_call>\n")
                page.text(FUNCTION + part.name + ">\n" + xml_arguments(part) + "</function>\n")
                page.own("</tool_call>")
        if not prefill:
            close_turn(page)

    def _result(self, page: Page, messages: Sequence[Message], i: int) -> None:
        if i == 0 or messages[i - 1].role != "tool":
            open_turn(page, "user")
        page.own("<tool_response>\n")
        page.text(result_text(messages[i]))
        page.own("\n</tool_response>\n")
        if i == len(messages) - 1 or messages[i + 1].role != "tool":
            close_turn(page)


def xml_arguments(call: ToolCall) -> str:
    parsed = call.parsed
    if parsed is None:
        return call.arguments + "\n"
    return "".join(f"<parameter={key}>\n{_spelled(value)}\n</parameter>\n" for key, value in parsed.items())


def _spelled(value: Any) -> str:
    """As the template spells values: containers as JSON, the rest by str() (True, None)."""
    return tojson(value) if isinstance(value, (Mapping, list, tuple)) else str(value)


def _extra(schema: Any, handled: Sequence[str]) -> str:
    if not isinstance(schema, Mapping):
        return ""
    return "".join(f"\n<{key}>{_spelled(value)}</{key}>" for key, value in schema.items() if key not in handled)


def describe(tool: ToolSpec) -> str:
    """A tool as the template lists it."""
    text = f"\n<function>\n<name>{tool.name}</name>"
    if tool.description:
        text += f"\n<description>{tool.description.strip()}</description>"
    text += "\n<parameters>"
    properties = tool.parameters.get("properties")
    for key, schema in (properties.items() if isinstance(properties, Mapping) else ()):
        text += f"\n<parameter>\n<name>{key}</name>"
        if isinstance(schema, Mapping):
            if "type" in schema:
                text += f"\n<type>{schema['type']}</type>"
            if "description" in schema:
                text += f"\n<description>{str(schema['description']).strip()}</description>"
        text += _extra(schema, ("name", "type", "description")) + "\n</parameter>"
    return text + _extra(tool.parameters, ("type", "properties")) + "\n</parameters>\n</function>"


# -- parsing ----------------------------------------------------------------------------------------------------------

class XmlCall:
    """`expect`: what must come before the name ("" where the opener was <function= itself)."""

    def __init__(self, parser: MarkupParser, expect: str) -> None:
        self.rest = ""
        self._parser = parser
        self._expect = expect
        self._step: Callable[[str], int] = self._opening if expect else self._name
        self._word = ""
        self._types: Mapping[str, frozenset[str]] = {}
        self._kinds: frozenset[str] = frozenset()
        self._marks = Markers(())
        self._n = 0
        self._value: list[str] = []
        self._at_start = False
        self._streams = False
        self._json: Value | None = None
        self._open = False

    def char(self, c: str) -> int:
        return self._step(c)

    def special(self, text: str) -> int:
        if self._step in (self._in_value, self._key):
            return spell(self, text)
        self.rest = text
        if self._open and not self._word and text == "</tool_call>":
            return self._end_arguments()
        return FAIL

    def end(self) -> bool:
        return False

    def _fail(self, rest: str) -> int:
        self.rest = rest
        return FAIL

    def _opening(self, c: str) -> int:
        if c in SPACE and not self._word:
            return MORE
        self._word += c
        if not self._expect.startswith(self._word):
            return self._fail(self._word)
        if self._word == self._expect:
            self._word, self._step = "", self._name
        return MORE

    def _name(self, c: str) -> int:
        if c != ">":
            self._word += c
            return MORE if c not in "<\n" and len(self._word) <= MAX_NAME else self._fail(c)
        name = self._word.strip(SPACE).strip("\"'")
        if not self._parser.begin(name):
            return self._fail(c)
        self._open = True
        self._types = argument_types(self._parser.tools[name].parameters)
        self._word, self._step = "", self._between
        return MORE

    def _between(self, c: str) -> int:
        """Between parameters: one of three tags."""
        if c in SPACE and not self._word:
            return MORE
        self._word += c
        if self._word == "<parameter=":
            self._word, self._step = "", self._key
            return MORE
        if self._word == "</function>":
            self._word = ""
            return self._end_arguments()
        if self._word == "</tool_call>":
            self.rest = self._word
            return self._end_arguments()
        if any(t.startswith(self._word) for t in ("<parameter=", "</function>", "</tool_call>")):
            return MORE
        return self._fail(self._word)

    def _end_arguments(self) -> int:
        if self._n:
            self._parser.arguments("}")
        return DONE

    def _key(self, c: str) -> int:
        if c != ">":
            self._word += c
            return MORE if c not in "<\n" and len(self._word) <= MAX_NAME else self._fail("<parameter=" + self._word)
        key = self._word.strip(SPACE).strip("\"'")
        self._kinds = self._types.get(key) or frozenset(("string",))
        self._streams = "string" in self._kinds and "null" not in self._kinds
        self._json = None if "string" in self._kinds else Value("[")    # follows the quotes of a container
        self._marks = Markers(("\n</parameter>", "</parameter>"))
        self._value = []
        self._at_start = True
        self._word, self._step = "", self._in_value
        self._parser.arguments(("{" if self._n == 0 else ", ") + json.dumps(key, ensure_ascii=False) + ": "
                               + ('"' if self._streams else ""))
        self._n += 1
        return MORE

    def _in_value(self, c: str) -> int:
        plain, marker = self._marks.char(c)
        if self._at_start and plain:
            self._at_start = False
            plain = plain[1:] if plain[0] == "\n" else plain
        if marker and marker[0] != "\n" and self._in_json_string(plain):
            plain, marker = plain + marker, ""          # JSON writes no raw newline: a bare tag inside its strings is text
        elif not marker:
            self._in_json_string(plain)
        if self._streams and plain:
            self._parser.arguments(json.dumps(plain, ensure_ascii=False)[1:-1])
        elif plain:
            self._value.append(plain)
        if marker:
            self._parser.arguments('"' if self._streams else as_json("".join(self._value), self._kinds))
            self._step = self._between
        return MORE

    def _in_json_string(self, text: str) -> bool:
        """Follows a container's `text`: whether it ends inside a string."""
        for c in text if self._json is not None else "":
            if self._json.char(c) != MORE:
                self._json = None
                return False
        return self._json is not None and self._json.quote


def as_json(text: str, kinds: AbstractSet[str]) -> str:
    """A value's text as JSON of one of these types; a string where it fits none."""
    bare = text.strip(SPACE)
    if "null" in kinds and bare.lower() in ("null", "none"):
        return "null"
    if "string" in kinds:
        return sound_json(text)
    if "boolean" in kinds and bare.lower() in ("true", "false"):
        return bare.lower()
    if kinds & {"number", "integer"} and NUMBER.fullmatch(bare):
        return bare                 # as written: 1e400 is a number too
    value = literal(bare)
    try:
        fits = (isinstance(value, dict) and "object" in kinds or isinstance(value, list) and "array" in kinds
                or isinstance(value, (int, float)) and not isinstance(value, bool) and kinds & {"number", "integer"})
        return sound_json(value) if fits else sound_json(text)
    except (ValueError, TypeError, RecursionError):
        return sound_json(text)

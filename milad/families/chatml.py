"""ChatML: SmolLM2, Qwen2 and Qwen2.5 (tools in <tool_call>), Hermes 2 Pro and 3 (tools in a system turn of their own), and any
other model whose template writes <|im_start|>role.

Turns are `<|im_start|>role NEWLINE text <|im_end|> NEWLINE`. The default system text is the template's own, read out of it. Where
the template knows no tools they are spelled as Qwen2.5's does. Oracle: the vendors' templates (tests/families).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import AbstractSet, Any, Mapping, Sequence

from ..conversation import Message, ToolCall, ToolSpec, Turn
from .base import CallMarkup, Parser, Segment
from .page import Page, arguments_json, calls, flatten, result_text, runs, split_system, tojson, tool_object
from .parsing import MarkupParser
from .readers import JsonCall

START, END = "<|im_start|>", "<|im_end|>"
SOFT = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>", "<tools>", "</tools>")
STOPS = (END, "<|endoftext|>")
MIN_TOOL_PARAMS = 1_000_000_000

QWEN_TOOLS = ("# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function "
              "signatures within <tools></tools> XML tags:\n<tools>",
              "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
              "<tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\": <function-name>, \"arguments\": "
              "<args-json-object>}\n</tool_call>")

HERMES_TOOLS = ("You are a function calling AI model. You are provided with function signatures within <tools></tools> XML tags. "
                "You may call one or more functions to assist with the user query. Don't make assumptions about what values to "
                "plug into functions. Here are the available tools: <tools> ",
                " </tools>Use the following pydantic model json schema for each tool call you will make: {\"properties\": "
                "{\"name\": {\"title\": \"Name\", \"type\": \"string\"}, \"arguments\": {\"title\": \"Arguments\", \"type\": "
                "\"object\"}}, \"required\": [\"name\", \"arguments\"], \"title\": \"FunctionCall\", \"type\": \"object\"}}\n"
                "For each function call return a json object with function name and arguments within <tool_call></tool_call> "
                "XML tags as follows:\n<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-dict>}\n</tool_call>")


def default_system(template: str) -> str:
    """The system text that a template writes where the conversation has none: a literal between the markers."""
    for found in re.finditer(r"<\|im_start\|>system(?:\\n|\n)([^'\"{}<]+)<\|im_end\|>", template):
        return found.group(1).replace("\\n", "\n")
    return ""


@dataclass(frozen=True)
class ChatML:
    system: str = ""                       # default system text
    hermes: bool = False
    trained_on_tools: bool = True          # the template knows tools
    name: str = "chatml"
    thinks: bool = False
    thinking_markup: tuple[str, ...] = ()

    @classmethod
    def of(cls, template: str) -> "ChatML":
        return cls(default_system(template), "You are a function calling AI model" in template, "tool" in template)

    def tools_by_default(self, model_name: str, n_params: int) -> bool:
        """Yes where the template knows tools and the model is not too small: below one billion parameters (Qwen2.5-0.5B; SmolLM2's
        135M, 360M) schemas drown it and calls rarely parse. n_params 0: unknown, the template decides. Hermes by name, since its
        files carry the plain template beside the tool one."""
        name = model_name.lower()
        if "smollm" in name:
            return False
        return (self.trained_on_tools or "hermes" in name) and (n_params <= 0 or n_params >= MIN_TOOL_PARAMS)

    def stops(self, specials: AbstractSet[str]) -> tuple[str, ...]:
        return tuple(s for s in STOPS if s == END or s in specials)

    def call_grammar(self, turn: Turn) -> CallMarkup:
        return CALLS

    def parser(self, turn: Turn, specials: AbstractSet[str]) -> Parser:
        return MarkupParser(turn, specials, openers={"<tool_call>": JsonCall}, closer="</tool_call>", one_newline=not self.hermes,
                            ignored=frozenset(STOPS))

    # -- rendering ----------------------------------------------------------------------------------------------------

    def render(self, turn: Turn, specials: AbstractSet[str]) -> list[Segment]:
        page = Page(specials, SOFT)
        system, rest = split_system(turn.messages)
        if self.hermes:
            page.mark_if_known("<|begin_of_text|>")
        if self.hermes and turn.tools:
            open_turn(page, "system")
            hermes_tools(page, turn.tools)
            close_turn(page)
            if system is not None:
                whole_turn(page, "system", system)
        else:
            system_turn(page, system if system is not None else self.system or None, turn.tools)
        messages = flatten(rest)
        for i, m in enumerate(messages):
            last = i == len(messages) - 1
            if m.role == "tool":
                (self._hermes_result if self.hermes else result_turn)(page, messages, i)
            elif m.role == "assistant":
                open_turn(page, "assistant", "")
                assistant_runs(page, runs(m) if not (self.hermes and calls(m)) else list(calls(m)), self.hermes)
                if not (turn.prefill and last):
                    close_turn(page)
            else:
                whole_turn(page, m.role, m.text)
        if not turn.prefill:
            open_turn(page, "assistant")
        return page.segments()

    def _hermes_result(self, page: Page, messages: Sequence[Message], i: int) -> None:
        """A role of its own, and no newline after the last result's end of turn, as the vendor's template has it."""
        if i == 0 or messages[i - 1].role != "tool":
            open_turn(page, "tool")
        page.own("<tool_response>\n")
        page.text(result_text(messages[i]))
        last = i == len(messages) - 1
        page.own("\n</tool_response>" + ("" if last else "\n"))
        if last or messages[i + 1].role != "tool":
            page.mark(END)


CALLS = CallMarkup(style="json", begin="<tool_call>\n", end="\n</tool_call>", trigger="<tool_call>")


# -- pieces that qwen3 shares -----------------------------------------------------------------------------------------

def open_turn(page: Page, role: str, newline: str = "\n") -> None:
    page.mark(START)
    page.text(role + newline)


def close_turn(page: Page) -> None:
    page.mark(END)
    page.text("\n")


def whole_turn(page: Page, role: str, text: str) -> None:
    open_turn(page, role)
    page.text(text)
    close_turn(page)


def system_turn(page: Page, system: str | None, tools: Sequence[ToolSpec]) -> None:
    """The system text with the tools under it; nothing where there is neither."""
    if system is None and not tools:
        return
    open_turn(page, "system")
    page.text(system or "")
    if tools:
        page.own(("" if system is None else "\n\n") + QWEN_TOOLS[0])
        for tool in tools:
            page.text("\n" + tojson(tool_object(tool)))
        page.own(QWEN_TOOLS[1])
    close_turn(page)


def assistant_runs(page: Page, parts: Sequence[str | ToolCall], raw_text: bool = False) -> None:
    """After the bare role: each run on a line of its own. Without any the line stays empty."""
    for part in parts or [""]:
        page.text("\n")
        if isinstance(part, str):
            page.text(part)
        else:
            write_call(page, part, raw_text)


def write_call(page: Page, call: ToolCall, raw_text: bool = False) -> None:
    page.own("<tool_call>")
    page.text('\n{"name": "' + call.name + '", "arguments": ' + arguments_json(call, raw_text) + "}\n")
    page.own("</tool_call>")


def result_turn(page: Page, messages: Sequence[Message], i: int) -> None:
    """Results in a row share one user turn."""
    if i == 0 or messages[i - 1].role != "tool":
        open_turn(page, "user", "")
    page.own("\n<tool_response>\n")
    page.text(result_text(messages[i]))
    page.own("\n</tool_response>")
    if i == len(messages) - 1 or messages[i + 1].role != "tool":
        close_turn(page)


# -- Hermes' view of a tool -------------------------------------------------------------------------------------------

PYTHON_TYPES = {"string": "str", "number": "float", "integer": "int", "boolean": "bool"}


def python_type(schema: Any) -> str:
    """The vendor template's json_to_python_type, its `list[Union[]]` for every array included."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if isinstance(kind, str) and kind in PYTHON_TYPES:
        return PYTHON_TYPES[kind]
    if kind == "array":
        return "list[Union[]]"
    if kind == "object":
        extra = schema.get("additionalProperties")
        return f"dict[str, {python_type(extra)}]" if "additionalProperties" in schema else "dict"
    if isinstance(kind, (list, tuple)):
        return "Union[" + ",".join(python_type({"type": t}) for t in kind) + "]"
    return "Union[]" if kind is None else "Any"     # the vendor's macro has no end for a name it does not know ("null")


def hermes_tools(page: Page, tools: Sequence[ToolSpec]) -> None:
    page.own(HERMES_TOOLS[0])
    for i, tool in enumerate(tools):
        properties = tool.parameters.get("properties")
        properties = properties if isinstance(properties, Mapping) else {}
        page.text('{"type": "function", "function": {"name": "' + tool.name + '", "description": "' + tool.name + "("
                  + ", ".join(f"{k}: {python_type(v)}" for k, v in properties.items()) + ") - " + tool.description + "\n\n")
        for j, (key, schema) in enumerate(properties.items()):
            about = schema.get("description", "") if isinstance(schema, Mapping) else ""
            page.text(("    Args:\n" if j == 0 else "") + f"        {key}({python_type(schema)}): {str(about).strip()}")
        page.text('", "parameters": ' + (tojson(tool.parameters) if properties else "{}") + "}")
        page.text("\n" if i < len(tools) - 1 else "")
    page.own(HERMES_TOOLS[1])

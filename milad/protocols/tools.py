"""Tool definitions and choices of every protocol into ToolSpec and ToolChoice, and a freeform call's way back out.

What milad can't run (web_search, image_generation, tool types yet to come) is ignored and noted, never refused: agents
declare them whatever the server is. Names are unique as the model sees them: a namespaced tool whose name is taken gets its
namespace before it; what would read as markup (blanks, brackets, quotes) is "_" there, and the client's own on the way out. Pure.
"""

from __future__ import annotations

import json
import re
from typing import Any, Mapping

from ..conversation import ToolChoice, ToolSpec
from .fields import Obj, bad, check_json, kind_of

MAX_TOOLS = 1024         # declared, namespaces counted by their members; agents with every MCP server on send some hundred
CUSTOM_PARAMETERS: Mapping[str, Any] = {
    "type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"], "additionalProperties": False}

_UNSAFE = re.compile(r"[^\w.:/@+-]")                              # families write names bare, between tags of their own


class Tools:
    """Collects a request's tools."""

    def __init__(self, ignored: dict[str, None]) -> None:
        self.specs: dict[str, ToolSpec] = {}
        self.names: dict[tuple[str | None, str], str] = {}       # (namespace, client's name) -> ToolSpec.name
        self.unrunnable: set[str] = set()                        # types and names of what was ignored
        self.declared = 0
        self._ignored = ignored

    def add(self, name: str, description: str, parameters: Mapping[str, Any], *, custom: bool = False,
            grammar: tuple[str, str] | None = None, namespace: str | None = None, strict: bool = False) -> None:
        """Of two tools with one name and namespace the first stays."""
        if (namespace, name) in self.names:
            self._ignored[f"a second tool named {name[:40]}"] = None
            return
        safe = _UNSAFE.sub("_", name)
        seen = safe if safe not in self.specs else f"{_UNSAFE.sub('_', namespace)}__{safe}" if namespace else f"{safe}__2"
        while seen in self.specs:
            seen += "_"
        self.names[namespace, name] = seen
        self.specs[seen] = ToolSpec(seen, description, parameters, custom, grammar, namespace,
                                    name if seen != name else "", strict)

    def skip(self, kind: str, name: str = "") -> None:
        self._ignored[f"tool {kind[:40]}"] = None
        self.unrunnable |= {kind, name} - {""}

    def count(self, path: str) -> None:
        self.declared += 1
        if self.declared > MAX_TOOLS:
            raise bad(path, f"more than {MAX_TOOLS} tools are declared")

    def find(self, name: str, namespace: str | None = None) -> str | None:
        """ToolSpec.name of the client's name; without a namespace, any tool of that name."""
        seen = self.names.get((namespace, name))
        if seen is None and namespace is None:
            seen = next((s for (_, n), s in self.names.items() if n == name), None)
        return seen

    def only(self, keep: set[str]) -> None:
        self.specs = {n: s for n, s in self.specs.items() if n in keep}

    def named(self, path: str, name: str, namespace: str | None = None) -> ToolChoice:
        seen = self.find(name, namespace)
        if seen is not None:
            return ToolChoice("named", seen)
        if name in self.unrunnable:
            return ToolChoice()
        raise bad(path, f"names {name[:80]!r}, which is not among the tools")

    def required(self, path: str) -> ToolChoice:
        if self.specs:
            return ToolChoice("required")
        if self.unrunnable:                                      # only server tools: there is nothing to demand
            return ToolChoice()
        raise bad(path, "demands a tool call, but the request declares no tools")


def read_function(tools: Tools, owner: Obj, key: str = "parameters", namespace: str | None = None) -> None:
    """{name, description, parameters, strict}: missing or empty parameters are a tool without arguments."""
    tools.add(owner.name(), owner.text("description"), parameters_of(owner, key), namespace=namespace,
              strict=bool(owner.boolean("strict")))


def parameters_of(owner: Obj, key: str) -> Mapping[str, Any]:
    value = owner.raw(key)
    if value is None or value == {}:
        return {"type": "object", "properties": {}}
    if not isinstance(value, dict):
        raise owner.error(key, f"must be a JSON schema (an object), not {kind_of(value)}")
    return check_json(value, owner.at(key))


def read_custom(tools: Tools, owner: Obj, namespace: str | None = None) -> None:
    """A freeform tool: {name, description, format}. The grammar stands in format (responses) or format.grammar (chat)."""
    grammar = None
    form = owner.obj("format")
    if form is not None and form.text("type") == "grammar":
        inner = form.obj("grammar") or form
        grammar = (inner.choice("syntax", ("lark", "regex"), "lark"), inner.required_text("definition"))
    tools.add(owner.name(), owner.text("description"), CUSTOM_PARAMETERS, custom=True, grammar=grammar,
              namespace=namespace)


def read_openai_tool(tools: Tools, tool: Obj, namespace: str | None = None) -> None:
    """One entry of chat's or responses' `tools`: nested or flat functions, custom tools, namespaces, anything newer."""
    kind = tool.text("type", "function")
    if kind == "namespace" and namespace is None:
        name = tool.name()
        for member in tool.objs("tools"):
            read_openai_tool(tools, member, name)
        return
    tools.count(tool.path)
    if kind == "function":
        inner = tool.obj("function")
        if inner is None and not tool.has("name"):
            raise tool.error("function", "is required")
        read_function(tools, inner or tool, namespace=namespace)
    elif kind == "custom":
        read_custom(tools, tool.obj("custom") or tool, namespace)
    else:
        tools.skip(kind, tool.text("name"))


def read_openai_choice(tools: Tools, body: Obj, key: str = "tool_choice") -> ToolChoice:
    """auto, none, required; {type: function|custom|allowed_tools|...}, nested as chat does or flat as responses does."""
    value, path = body.raw(key), body.at(key)
    if value is None:
        return ToolChoice()
    if isinstance(value, str):
        if value == "required":
            return tools.required(path)
        if value not in ("auto", "none"):
            raise bad(path, "must be auto, none, required or an object")
        return ToolChoice(value)
    choice = Obj(value, path)
    kind = choice.required_text("type")
    if kind in ("function", "custom"):
        inner = choice.obj(kind) or choice
        return tools.named(inner.at("name"), inner.name(), inner.text("namespace") or None)
    if kind == "allowed_tools":
        return _allowed(tools, choice.obj("allowed_tools") or choice)
    return ToolChoice()                                          # a server tool: nothing that could be forced here


def _allowed(tools: Tools, choice: Obj) -> ToolChoice:
    """Only these may be called: the others are not shown."""
    mode = choice.choice("mode", ("auto", "required"), "auto")
    keep = set()
    for entry in choice.objs("tools"):
        inner = entry.obj("function") or entry.obj("custom") or entry
        seen = tools.find(inner.text("name"), inner.text("namespace") or None)
        if seen is not None:
            keep.add(seen)
    tools.only(keep)
    return ToolChoice() if mode == "auto" or not keep else tools.required(choice.path)


# -- out ------------------------------------------------------------------------------------------------------------------

_INPUT = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
MAX_PREFIX = 64          # characters within which {"input":" must have begun


class FreeformInput:
    """A freeform call's raw text out of its arguments {"input": "..."} as they stream: append-only, and joined the same for
    every split. Arguments of another shape come out whole at the end: `input` where the object has a string there, else
    the text as it stands."""

    def __init__(self) -> None:
        self._text = ""          # not yet read
        self._other: list[str] = []
        self._state = "before"   # before, inside, after, other

    def feed(self, text: str) -> str:
        if self._state == "after":
            return ""
        if self._state == "other":
            self._other.append(text)
            return ""
        self._text += text
        if self._state == "before":
            found = _INPUT.match(self._text)
            if found and found.end() <= MAX_PREFIX:
                self._state, self._text = "inside", self._text[found.end():]
            elif len(self._text) > MAX_PREFIX:
                self._state = "other"
        return self._string() if self._state == "inside" else ""

    def _string(self) -> str:
        """Decodes what is whole of the JSON string; keeps a cut escape."""
        out: list[str] = []
        text, i = self._text, 0
        while i < len(text):
            quote, slash = text.find('"', i), text.find("\\", i)
            stop = min(x for x in (quote, slash, len(text)) if x >= 0)
            out.append(text[i:stop])
            i = stop
            if stop == len(text):
                break
            if stop == quote:
                self._state, i = "after", len(text)
                break
            size, char = _escape(text, i)
            if not size:
                break
            out.append(char)
            i += size
        self._text = text[i:]
        return "".join(out)

    def end(self) -> str:
        """What is still held: the rest of a cut string, or arguments of another shape."""
        if self._state in ("before", "other"):
            held = self._text + "".join(self._other)
            self._text, self._other, self._state = "", [], "after"
            return freeform_text(held)
        self._text = ""
        return ""


def _escape(text: str, at: int) -> tuple[int, str]:
    """(length, character) of the escape at `at`; (0, "") where it is cut."""
    kind = text[at + 1:at + 2]
    if not kind:
        return 0, ""
    if kind != "u":
        return 2, _ESCAPES.get(kind, "\\" + kind)
    digits = text[at + 2:at + 6]
    if len(digits) < 4:
        return 0, ""
    code = _hex(digits)
    if code < 0:
        return 2, "\\u"
    if not 0xD800 <= code < 0xE000:
        return 6, chr(code)
    follow = text[at + 6:at + 12]
    if code < 0xDC00 and len(follow) < 6 and "\\u".startswith(follow[:2]):
        return 0, ""
    low = _hex(follow[2:]) if follow[:2] == "\\u" else -1
    if code < 0xDC00 and 0xDC00 <= low < 0xE000:
        return 12, chr(0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00))
    return 6, "\ufffd"


def _hex(digits: str) -> int:
    return int(digits, 16) if re.fullmatch("[0-9a-fA-F]{4}", digits) else -1


def freeform_text(arguments: str) -> str:
    """The raw input of arguments that did not begin as {"input": "..."}."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    if isinstance(value, dict) and isinstance(value.get("input"), str):
        return value["input"].encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return arguments


def arguments_of(text: str, complete: bool) -> str:
    """A call's arguments as they go out: none at all are {}. A cut call keeps what there was."""
    return text + "{}" if complete and not text.strip() else text


def freeform_of(arguments: str) -> str:
    """The same text that FreeformInput streams."""
    reader = FreeformInput()
    return reader.feed(arguments) + reader.end()

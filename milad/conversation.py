"""What a request says, in no vendor's words: the one type that every protocol parses into and every family renders.

All of it is frozen data. Parts keep their order, since thinking, text and tool calls of one turn come in an order that
matters. Tool arguments stay the raw text they were sent as, with a parsed view beside.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Mapping, Union


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Image:
    """A picture: bytes, or a URL that nobody fetches. No family sees one yet; `note` is what stands in its place."""
    media_type: str = ""
    data: bytes | None = None
    url: str | None = None


@dataclass(frozen=True)
class Thinking:
    text: str
    signature: str = ""
    redacted: bool = False


@dataclass(frozen=True)
class ToolCall:
    id: str
    name: str
    arguments: str               # raw text: usually a JSON object, sometimes "" or no JSON at all
    custom: bool = False         # a freeform tool: `arguments` is {"input": text} all the same
    namespace: str | None = None

    @property
    def parsed(self) -> dict[str, Any] | None:
        """The arguments as an object; {} for empty text; None where they are no JSON object."""
        if not self.arguments.strip():
            return {}
        try:
            value = json.loads(self.arguments)
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # NaN and half surrogates can't be rendered
        except (ValueError, RecursionError):
            return None
        return value if isinstance(value, dict) else None


@dataclass(frozen=True)
class ToolResult:
    call_id: str
    parts: tuple[Union[Text, Image], ...]
    is_error: bool = False
    name: str = ""               # of the tool, where the client or the history tells

    @property
    def text(self) -> str:
        return "".join(p.text if isinstance(p, Text) else IMAGE_NOTE for p in self.parts)


IMAGE_NOTE = "[image omitted: this model cannot see]"

Part = Union[Text, Image, Thinking, ToolCall, ToolResult]


@dataclass(frozen=True)
class Message:
    """role: system, user, assistant or tool. `tool` holds ToolResult parts only; a client's user message with tool
    results and text becomes a tool message followed by a user message."""
    role: str
    parts: tuple[Part, ...] = ()

    @property
    def text(self) -> str:
        """The Text parts, joined as they stand; images as their note."""
        return "".join(p.text if isinstance(p, Text) else IMAGE_NOTE if isinstance(p, Image) else "" for p in self.parts)


@dataclass(frozen=True)
class ToolSpec:
    name: str                                     # as the model sees it: unique within the turn
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    custom: bool = False                          # freeform: the model sees one string parameter `input`
    grammar: tuple[str, str] | None = None        # (lark|regex, text) of a freeform tool
    namespace: str | None = None                  # put back on the way out
    api_name: str = ""                            # the client's own name, when `name` had to differ
    strict: bool = False


def resolved(schema: Any, root: Any) -> Mapping[str, Any]:
    """`schema` behind its local $ref; {} where it is no object or points nowhere."""
    for _ in range(16):
        ref = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(ref, str):
            return schema if isinstance(schema, Mapping) else {}
        schema = root if ref.startswith("#") else None
        for key in ref[1:].split("/")[1:]:
            schema = schema.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(schema, Mapping) else None
    return {}


def argument_types(parameters: Any) -> dict[str, frozenset[str]]:
    """Argument -> the JSON types that a tool's schema allows it; an empty set where it names none."""
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    if not isinstance(properties, Mapping):
        return {}
    return {key: frozenset(_types(schema, parameters, [64])) for key, schema in properties.items()}


def _types(schema: Any, root: Any, budget: list[int]) -> set[str]:
    """budget: schemas that may still be looked at; references can branch without end."""
    budget[0] -= 1
    if budget[0] < 0:
        return set()
    schema = resolved(schema, root)
    kind = schema.get("type")
    found = {kind} if isinstance(kind, str) else {k for k in kind if isinstance(k, str)} if isinstance(kind, (list, tuple)) else set()
    for branch in ("anyOf", "oneOf", "allOf"):
        options = schema.get(branch)
        if isinstance(options, (list, tuple)):
            for option in options:
                found |= _types(option, root, budget)
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not found and isinstance(values, (list, tuple)):
        names = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null", dict: "object", list: "array"}
        found = {names[type(v)] for v in values if type(v) in names}
    return found


@dataclass(frozen=True)
class ToolChoice:
    mode: str = "auto"                            # auto, none, required, named
    name: str = ""


@dataclass(frozen=True)
class Format:
    """What the answer must look like. kind: text, json_object, json_schema, lark, gbnf, regex."""
    kind: str = "text"
    schema: Any = None                            # of json_schema
    text: str = ""                                # of lark, gbnf, regex
    name: str = ""


@dataclass(frozen=True)
class Sampling:
    """None: the client did not say; the daemon's options, then the model file, then defaults fill in."""
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Turn:
    """One request for a generation. Either `messages`, or `prompt` (legacy completions: raw text whose specials are
    parsed, or token ids)."""
    api: str                                      # chat, completions, responses, messages
    messages: tuple[Message, ...] = ()
    prompt: Union[str, tuple[int, ...], None] = None
    prompts: tuple[Union[str, tuple[int, ...]], ...] = ()  # several prompts (completions only; `prompt` is the first): each
                                                  # is a Turn of its own, answered as choices i * n .. i * n + n - 1
    suffix: str = ""                              # completions: what follows the text to be filled in
    model: str = ""                               # as the client named it
    tools: tuple[ToolSpec, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    declared_tools: bool = False                  # the request had any tool at all, runnable here or not
    format: Format = Format()
    sampling: Sampling = Sampling()
    max_tokens: int | None = None                 # None: the room left (completions: protocol says 16)
    stop: tuple[str, ...] = ()
    n: int = 1
    top_logprobs: int | None = None               # None: none; 0: the chosen token's only
    echo: bool = False                            # completions: the prompt comes back too
    prefill: bool = False                         # the last message is the assistant's and is continued
    thinking: bool | None = None                  # False: off; None or True: on where the family has it
    template_args: Mapping[str, Any] = field(default_factory=dict)  # chat_template_kwargs, e.g. reasoning_effort
    date: str = ""                                # "26 Jul 2024"; "": the template's own fallback
    stream: bool = False
    ignored: tuple[str, ...] = ()                 # parts, items and tools skipped: one log line
    meta: Mapping[str, Any] = field(default_factory=dict)  # the protocol's own echo fields; nobody else reads them

    @property
    def last_text(self) -> str:
        """The text of the last user or tool message."""
        for m in reversed(self.messages):
            if m.role == "user":
                return m.text
            if m.role == "tool":
                return "".join(p.text for p in m.parts if isinstance(p, ToolResult))
        return self.prompt if isinstance(self.prompt, str) else ""

"""Messages and content parts of every protocol into conversation's Messages.

The vendors' part kinds overlap (`text` and `input_text`, `image`, `image_url` and `input_image`), so one table reads them
all, wherever they stand. Unknown kinds are skipped and noted in Reading.ignored; a known kind that lacks its field is a 400.
What no model here can take in (pictures, sound, PDFs) becomes a note in the text, but for a user message that ends the
conversation, which is refused: there the person would get an answer about something the model never saw. Pure.
"""

from __future__ import annotations

import base64
import binascii
import json
from typing import Any, Callable, Iterable, Sequence

from ..conversation import Image, Message, Part, Text, Thinking, ToolCall, ToolResult
from ..errors import MiladError
from .fields import MAX_NAME, Obj, bad, check_json, check_text, kind_of

BILLING = "x-anthropic-billing-header:"  # Claude Code's first system block: it varies, and would break the prefix cache
MAX_FILE = 4 << 20                       # characters of a file inside a request that are decoded


class Reading:
    """What one request's messages share while they are read."""

    def __init__(self, ignored: dict[str, None], names: dict[tuple[str | None, str], str] | None = None) -> None:
        self.ignored = ignored
        self.calls: dict[str, str] = {}                          # call id -> tool name, for results that don't say
        self.names = {} if names is None else names              # (namespace, the client's name) -> ToolSpec.name
        self.references: set[str] = set()                        # tools that tool_reference parts made available
        self.unseen: list[MiladError] = []                       # of the message read last, outside tool results
        self._in_result = 0

    def skip(self, what: str, kind: Any) -> list[Part]:
        self.ignored[f"{what} {str(kind)[:40]}"] = None
        return []

    def blind(self, path: str, code: str, message: str) -> None:
        if not self._in_result:
            self.unseen.append(bad(path, message, code))

    def call(self, call_id: str, name: str, arguments: str, custom: bool = False, namespace: str | None = None) -> ToolCall:
        name = self.names.get((namespace, name), name)
        if call_id:
            self.calls[call_id] = name
        return ToolCall(call_id, name, arguments, custom, namespace)

    def result(self, call_id: str, value: Any, path: str, is_error: bool = False, name: str = "") -> ToolResult:
        """A tool's result from a string, parts, null or anything else (as its JSON text)."""
        self._in_result += 1
        try:
            if value is None or isinstance(value, (str, list)):
                parts = self.parts(value, path)
            else:
                parts = [Text(json.dumps(check_json(value, path), ensure_ascii=False))]
        finally:
            self._in_result -= 1
        kept = tuple(p for p in parts if isinstance(p, (Text, Image)))
        return ToolResult(call_id, kept, is_error, name or self.calls.get(call_id, ""))

    def parts(self, value: Any, path: str) -> list[Part]:
        """Content: a string, null, or an array of parts and strings."""
        if value is None or value == "":
            return []
        if isinstance(value, str):
            return [Text(check_text(value, path))]
        if not isinstance(value, list):
            raise bad(path, f"must be a string or an array of parts, not {kind_of(value)}")
        out: list[Part] = []
        for i, item in enumerate(value):
            at = f"{path}[{i}]"
            if isinstance(item, str):
                out += [Text(check_text(item, at))] if item else []
                continue
            part = Obj(item, at)
            kind = part.required_text("type")
            read = _PARTS.get(kind)
            out += read(part, self) if read is not None else self.skip("part", kind)
        return out

    def message(self, role: str, value: Any, path: str, before: Sequence[Part] = ()) -> list[Message]:
        """One message of a client's: system, user or assistant. Tool results in it become a tool message before it."""
        self.unseen.clear()
        parts = [*before, *self.parts(value, path)]
        results = [p for p in parts if isinstance(p, ToolResult)]
        out: list[Message] = []
        if results and role == "user":
            out.append(Message("tool", tuple(results)))
        allowed = _ALLOWED[role]
        kept = tuple(p for p in parts if isinstance(p, allowed))
        for part in parts:
            if not isinstance(part, allowed) and not (isinstance(part, ToolResult) and role == "user"):
                self.skip(f"in a {role} message, part", type(part).__name__)
        if kept or not out:
            out.append(Message(role, kept))
        return out

    def check_end(self, messages: Sequence[Message]) -> None:
        """Refuses what the model can't take in, in a user message that ends the conversation."""
        if messages and messages[-1].role == "user" and self.unseen:
            raise self.unseen[0]


_ALLOWED: dict[str, tuple[type, ...]] = {
    "system": (Text, Image), "user": (Text, Image), "assistant": (Text, Image, Thinking, ToolCall)}


def arguments_text(value: Any, path: str) -> str:
    """Tool arguments as raw text, whatever a client kept them as."""
    if value is None:
        return ""
    if isinstance(value, str):
        return check_text(value, path)
    return json.dumps(check_json(value, path), ensure_ascii=False)


def custom_arguments(text: str) -> str:
    """A freeform tool's input as the arguments of the function that the model sees."""
    return json.dumps({"input": text}, ensure_ascii=False)


def without_billing(text: str) -> str:
    """A system text whose first line is Claude Code's billing header, without that line."""
    if not text.startswith(BILLING):
        return text
    return text.partition("\n")[2].lstrip("\n")


def join_leading(system: Iterable[str], messages: Sequence[Message]) -> tuple[Message, ...]:
    """`system` texts and the leading system messages as one system message, joined by a blank line; later ones stay where
    they are."""
    texts = [without_billing(t) for t in system]
    n = 0
    while n < len(messages) and messages[n].role == "system":
        texts.append(without_billing(messages[n].text))
        n += 1
    joined = "\n\n".join(t for t in texts if t)
    head = (Message("system", (Text(joined),)),) if joined else ()
    return head + tuple(m for m in messages[n:] if m.role != "system" or m.text)


def merge_tools(messages: Iterable[Message]) -> list[Message]:
    """Neighbouring tool messages as one, so that every protocol's history has the same shape."""
    out: list[Message] = []
    for message in messages:
        if message.role == "tool" and out and out[-1].role == "tool":
            out[-1] = Message("tool", out[-1].parts + message.parts)
        else:
            out.append(message)
    return out


# -- parts ----------------------------------------------------------------------------------------------------------------


def _text_of(key: str) -> Callable[[Obj, Reading], list[Part]]:
    def read(part: Obj, reading: Reading) -> list[Part]:
        text = part.required_text(key)
        return [Text(text)] if text else []
    return read


def _thinking(part: Obj, reading: Reading) -> list[Part]:
    return [Thinking(part.required_text("thinking"), part.text("signature"))]


def _redacted(part: Obj, reading: Reading) -> list[Part]:
    return [Thinking("", part.text("data"), redacted=True)]


def _image_url(part: Obj, reading: Reading) -> list[Part]:
    """chat's image_url {url} (some clients send the bare string), responses' input_image {image_url | file_id}."""
    value = part.raw("image_url")
    if isinstance(value, dict):
        url = Obj(value, part.at("image_url")).required_text("url")
    elif value is None and part.has("file_id"):
        url = part.text("file_id")
    else:
        url = part.required_text("image_url")
    reading.blind(part.path, "unsupported_image", "this model cannot see images: send text only, or choose a vision model")
    return [Image(url=url[:200])]


def _image(part: Obj, reading: Reading) -> list[Part]:
    source = part.obj("source")
    if source is None:
        if part.has("image_url"):
            return _image_url(part, reading)
        raise part.error("source", "is required")
    reading.blind(part.path, "unsupported_image", "this model cannot see images: send text only, or choose a vision model")
    return [Image(source.text("media_type"))]


def _audio(part: Obj, reading: Reading) -> list[Part]:
    if part.obj("input_audio") is None:
        raise part.error("input_audio", "is required")
    reading.blind(part.path, "unsupported_audio", "this model cannot hear audio: send text only")
    return [Text("[audio omitted: this model cannot hear]")]


def _file(part: Obj, reading: Reading) -> list[Part]:
    """chat's file {file: {...}} and responses' input_file {...}: file_data is base64 or a data URL."""
    inner = part.obj("file") or part
    name = inner.text("filename")
    data = inner.text("file_data")
    if not data and not inner.has("file_id") and not inner.has("file_url"):
        raise inner.error("file_data", "is required")
    return _document_text(part, reading, name, _decoded(data.partition(",")[2] if data.startswith("data:") else data))


def _document(part: Obj, reading: Reading) -> list[Part]:
    source = part.obj("source")
    if source is None:
        raise part.error("source", "is required")
    title, kind = part.text("title"), source.text("type")
    if kind == "text":
        return _document_text(part, reading, title, source.required_text("data"))
    if kind == "content":
        head: list[Part] = [Text(f"[document {title}]\n")] if title else []
        return head + reading.parts(source.raw("content"), source.at("content"))
    data = source.required_text("data") if kind == "base64" else ""
    return _document_text(part, reading, title, _decoded(data))


def _document_text(part: Obj, reading: Reading, name: str, text: str | None) -> list[Part]:
    label = f"document {name}" if name else "document"
    if text is None:
        reading.blind(part.path, "unsupported_file", "this model reads text files only")
        return [Text(f"[{label} omitted: this model reads text files only]")]
    return [Text(f"[{label}]\n{text}\n")]


def _decoded(data: str) -> str | None:
    """Base64 of a UTF-8 text file, else None."""
    if not data or len(data) > MAX_FILE:
        return None
    try:
        text = base64.b64decode(data, validate=True).decode()
    except (binascii.Error, ValueError):
        return None
    return None if "\0" in text else text


def _search_result(part: Obj, reading: Reading) -> list[Part]:
    head = "\n".join(t for t in (part.text("title"), part.text("source")) if t)
    return [Text(f"[search result]\n{head}\n"), *reading.parts(part.raw("content"), part.at("content"))]


def _tool_reference(part: Obj, reading: Reading) -> list[Part]:
    """Claude Code's ToolSearch answers with these; the tool itself joins `tools`."""
    name = part.required_text("tool_name", MAX_NAME)
    reading.references.add(name)
    return [Text(f"[tool available: {name}]\n")]


def _tool_use(part: Obj, reading: Reading) -> list[Part]:
    return [reading.call(part.text("id"), part.required_text("name"),
                         arguments_text(part.raw("input"), part.at("input")))]


def _tool_result(part: Obj, reading: Reading) -> list[Part]:
    return [reading.result(part.required_text("tool_use_id"), part.raw("content"), part.at("content"),
                           bool(part.boolean("is_error")))]


_PARTS: dict[str, Callable[[Obj, Reading], list[Part]]] = {
    "text": _text_of("text"), "input_text": _text_of("text"), "output_text": _text_of("text"),
    "summary_text": _text_of("text"), "reasoning_text": _text_of("text"), "refusal": _text_of("refusal"),
    "thinking": _thinking, "redacted_thinking": _redacted,
    "image_url": _image_url, "input_image": _image_url, "image": _image, "input_audio": _audio,
    "file": _file, "input_file": _file, "document": _document, "search_result": _search_result,
    "tool_reference": _tool_reference, "tool_use": _tool_use, "tool_result": _tool_result,
}

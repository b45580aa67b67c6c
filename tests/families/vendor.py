"""The oracle of the renderers: vendors' Jinja templates as transformers renders them (sandboxed, trim_blocks, lstrip_blocks,
tojson without escapes, strftime_now, raise_exception), fed with our Turns put into OpenAI's shape. Knows no family of ours.
"""

from __future__ import annotations

import hashlib
import json
import struct
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from milad.conversation import Image, Text, Thinking, ToolCall, ToolResult, Turn

SHA256 = {
    "Qwen-Qwen2.5-7B-Instruct": "cd8e9439f0570856fd70470bf8889ebd8b5d1107207f67a5efb46e342330527f",
    "Qwen-Qwen3-0.6B": "87a2728cb8dc9fe424d624542f6060ec05a1d285ebbec578bb078900e33396b5",
    "Qwen3-Coder": "d287fb2edf144207f868ae1b282755dc19db2a3f1c5b3a3d57e9e5abffa98392",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": "7ce09d55d3690e06c70b5c07228cc7e8c99c43a23cdc027762be4011efcdea6c",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "7ce09d55d3690e06c70b5c07228cc7e8c99c43a23cdc027762be4011efcdea6c",
    "meta-llama-Llama-3.1-8B-Instruct": "e10ca381b1ccc5cf9db52e371f3b6651576caee0a630b452e2816b2d404d4b65",
    "meta-llama-Llama-3.2-3B-Instruct": "5816fce10444e03c2e9ee1ef8a4a1ea61ae7e69e438613f3b17b69d0426223a4",
    "meta-llama-Llama-3.3-70B-Instruct": "e10ca381b1ccc5cf9db52e371f3b6651576caee0a630b452e2816b2d404d4b65",
    "mistralai-Mistral-Nemo-Instruct-2407": "e4676cb56dffea7782fd3e2b577cfaf1e123537e6ef49b3ec7caa6c095c62272",
    "unsloth-mistral-Devstral-Small-2507": "039a4710e2aabaa79e85a233fa3daa4fbc030a4a8dc218cb7f34fb0c4b8c13b1",
    "mistralai-Ministral-3-14B-Reasoning-2512": "39f03c383413f531fd302c06c7e982ad98c83f0657a8339ae25478ccb81fdcda",
    "Qwen-QwQ-32B": "5ed15374ce53e19a7798710736a2c9fe41c79f7385e8421a2080d6575a80ef1b",
    "Mistral-Small-3.2-24B-Instruct-2506": "5b8f31f11198696548d544dbe424a3c1ef244d00a475f4e1bffb351fda085608",
}


def load(peer_source: Path, name: str) -> str:
    data = (peer_source / "models" / "templates" / f"{name}.jinja").read_bytes()
    assert hashlib.sha256(data).hexdigest() == SHA256[name], f"{name}: not the template that the tests were written for"
    return data.decode()


def metadata(path: Path, key: str) -> str:
    """A string of a GGUF file's metadata: key, type 8, length, text (the GGUF specification)."""
    with open(path, "rb") as file:
        data = file.read(8 << 20)
    at = data.index(key.encode()) + len(key)
    kind, n = struct.unpack_from("<IQ", data, at)
    assert kind == 8
    return data[at + 12:at + 12 + n].decode()


def _tojson(x: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


@lru_cache(maxsize=None)
def compiled(template: str) -> jinja2.Template:
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
    env.filters["tojson"] = _tojson
    return env.from_string(template)


def render(template: str, turn: Turn, *, date: str = "26 Jul 2024", iso_date: str = "2024-07-26", bos: str = "", eos: str = "",
           **extra: Any) -> str:
    """Raises jinja2.TemplateError where the vendor's template does."""
    arguments: dict[str, Any] = {"messages": messages(turn), "add_generation_prompt": not turn.prefill, "bos_token": bos,
                                 "eos_token": eos, "raise_exception": _raise,
                                 "strftime_now": lambda form: iso_date if form == "%Y-%m-%d" else date, **extra}
    if turn.tools:
        arguments["tools"] = [tool(t) for t in turn.tools]
    if turn.thinking is not None:
        arguments["enable_thinking"] = turn.thinking
    return compiled(template).render(**arguments)


def tool(spec: Any) -> dict[str, Any]:
    function = {"name": spec.name, "description": spec.description, "parameters": spec.parameters}
    if not spec.description:
        del function["description"]
    return {"type": "function", "function": function}


def messages(turn: Turn) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    for m in turn.messages:
        if m.role == "tool":
            out += [{"role": "tool", "tool_call_id": p.call_id, "content": p.text} for p in m.parts if isinstance(p, ToolResult)]
            continue
        one: dict[str, Any] = {"role": m.role, "content": "".join(
            p.text if isinstance(p, Text) else "[image omitted: this model cannot see]" for p in m.parts
            if isinstance(p, (Text, Image)))}
        thoughts = [p.text for p in m.parts if isinstance(p, Thinking)]
        if thoughts:
            one["reasoning_content"] = "\n".join(thoughts)
        called = [p for p in m.parts if isinstance(p, ToolCall)]
        if called:
            one["tool_calls"] = [{"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.parsed}}
                                 for c in called]
        out.append(one)
    return out


def text(segments: Any) -> str:
    return "".join(s.text for s in segments)

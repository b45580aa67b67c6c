"""A conversation's next request renders what came before identically: every recorded request and its follow-up."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

import marked
from milad import families
from milad.families.llama3 import Llama3
from milad.families.mistral import Mistral
from milad.turn import Defaults, Runner
from protocols.support import PROTOCOLS, cases, protocol_of

# Nemo's and Small's own formats put the tools before the last user turn: their prompts move with it.
FAMILIES = {"chatml": families.choose("", frozenset(), "chatml"), "qwen3": families.choose("", frozenset(), "qwen3"),
            "qwen3-coder": families.choose("", frozenset(), "qwen3-coder"), "llama3": Llama3(),
            "devstral": Mistral(ids=False, tools_first=True, speaks=True)}


def follow(protocol: str, body: dict[str, Any], call: bool) -> dict[str, Any] | None:
    """The same request after an answer and its reader's reply; None where it has no tool to call."""
    body = copy.deepcopy(body)
    if protocol == "messages":
        tool = next((t["name"] for t in body.get("tools") or [] if "input_schema" in t and not t.get("defer_loading")), None)
        body["messages"] += [{"role": "assistant", "content": [{"type": "text", "text": "Sure."}] + call * [
            {"type": "tool_use", "id": "toolu_1", "name": tool, "input": {"a": 1}}]}, {"role": "user", "content": call * [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "ok"}] + [{"type": "text", "text": "next"}]}]
    elif protocol == "chat":
        tool = next((t["function"]["name"] for t in body.get("tools") or [] if "function" in t), None)
        said: dict[str, Any] = {"role": "assistant", "content": "Sure."}
        if call:
            said["tool_calls"] = [{"id": "c1", "type": "function", "function": {"name": tool, "arguments": '{"a": 1}'}}]
        body["messages"] += [said, *call * [{"role": "tool", "tool_call_id": "c1", "content": "ok"}], {"role": "user", "content": "next"}]
    else:
        tool = next((t["name"] for t in body.get("tools") or [] if t.get("type") == "function"), None)
        before = body["input"] if isinstance(body["input"], list) else [{"role": "user", "content": body["input"]}]
        body["input"] = [*before, {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Sure."}]},
                         *call * [{"type": "function_call", "call_id": "c1", "name": tool, "arguments": '{"a": 1}'},
                                  {"type": "function_call_output", "call_id": "c1", "output": "ok"}], {"role": "user", "content": "next"}]
    return None if call and tool is None else body


@pytest.mark.parametrize("name", FAMILIES)
def test_the_first_prompt_begins_the_second(library: Path, tmp_path: Path, name: str) -> None:
    model = marked.open_model(tmp_path / "m.gguf", "control", marked.CALLS + marked.LAYOUT)
    runner = Runner(model, None, None, FAMILIES[name], n_ctx=1 << 20, defaults=Defaults(tools="on"))
    n_compared = 0
    for client, case in cases():
        protocol = protocol_of(case["path"])
        if case["body"] is None or protocol in (None, "completions") or "count_tokens" in case["path"]:
            continue
        first = PROTOCOLS[protocol].parse(copy.deepcopy(case["body"]))
        if first.prefill or name == "qwen3" and "<think>" in runner.apply_template(first)[0]:
            continue                            # Qwen3 drops earlier turns' thinking, as its template does
        prompt, tokens = runner.apply_template(first)
        for call in (False, True):
            body = follow(protocol, case["body"], call)
            if body is None:
                continue
            text, more = runner.apply_template(PROTOCOLS[protocol].parse(body))
            assert text.startswith(prompt) and more[:len(tokens) - 1] == tokens[:-1], (client, call)
            assert more[len(tokens) - 1] == tokens[-1] or name == "llama3"       # two newlines may join what follows
            n_compared += 1
    model.close()
    assert n_compared >= 60

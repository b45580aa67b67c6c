"""Whatever a client sends is a Turn or a MiladError of a 4xx kind: every field of every protocol with hostile values, and
seeded mutations of the recorded requests."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import asdict
from typing import Any, Iterator

import pytest

from milad.errors import MiladError
from milad.events import Event
from protocols.support import PROTOCOLS, cases, frames, generation, ident, protocol_of

BIG = 2**63
DEEP: Any = []
for _ in range(5000):
    DEEP = [DEEP]
HOSTILE: list[Any] = [
    -1, 0, 1, 2**31, BIG, -BIG - 1, 10**300, 1e308, -1e308, 0.5, float("nan"), float("inf"), float("-inf"), "5", "", "x" * 5000,
    "\ud800", "\0", True, False, None, [], {}, [None], [1], ["x"], [{}], [[]], {"": None}, {"type": None}, {"type": "text"},
    {"type": 3}, {"type": "function"}, {"type": "x" * 1000}, {"a": float("nan")}, ["x"] * 2000, DEEP, {"type": "tool", "name": "f"},
    {"type": "json_schema", "json_schema": {"schema": DEEP}}, {"effort": 3}, {"1": 1e309}, {"text": "\udfff"}]
SHALLOW = [v for v in HOSTILE if v is not DEEP and not (isinstance(v, dict) and "json_schema" in v)]
BASE: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "hi"}]},
    "completions": {"prompt": "hi"},
    "responses": {"input": "hi"},
    "messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5},
}
FIELDS: dict[str, tuple[str, ...]] = {
    "chat": ("messages", "tools", "tool_choice", "response_format", "logprobs", "top_logprobs", "max_completion_tokens",
             "functions", "function_call", "modalities", "audio", "reasoning_effort", "grammar", "json_schema"),
    "completions": ("prompt", "suffix", "best_of", "echo", "logprobs", "response_format", "grammar", "max_completion_tokens"),
    "responses": ("input", "instructions", "tools", "tool_choice", "text", "reasoning", "include", "max_output_tokens",
                  "previous_response_id", "store", "metadata", "truncation", "background", "conversation", "prompt",
                  "max_tool_calls", "top_logprobs", "prompt_cache_key", "safety_identifier"),
    "messages": ("messages", "system", "stop_sequences", "tools", "tool_choice", "output_config", "output_format", "metadata"),
}
SHARED = ("model", "stream", "stream_options", "n", "max_tokens", "temperature", "top_p", "top_k", "min_p", "repeat_penalty",
          "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "logit_bias", "stop", "user", "thinking",
          "chat_template_kwargs", "enable_thinking", "parallel_tool_calls", "service_tier", "unknown")
NESTED: dict[str, tuple[Any, ...]] = {  # where X stands, every hostile value is put
    "chat": ({"messages": "X"}, {"messages": ["X"]}, {"messages": [{"role": "X"}]},
             {"messages": [{"role": "user", "content": "X"}]}, {"messages": [{"role": "user", "content": ["X"]}]},
             {"messages": [{"role": "user", "content": [{"type": "text", "text": "X"}]}]},
             {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "X"}]}]},
             {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "X"}}]}]},
             {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": "X"}]}]},
             {"messages": [{"role": "user", "content": [{"type": "file", "file": "X"}]}]},
             {"messages": [{"role": "user", "content": [{"type": "file", "file": {"file_data": "X"}}]}]},
             {"messages": [{"role": "assistant", "tool_calls": "X"}]}, {"messages": [{"role": "assistant", "tool_calls": ["X"]}]},
             {"messages": [{"role": "assistant", "reasoning_content": "X"}]},
             {"messages": [{"role": "assistant", "function_call": "X"}]}, {"messages": [{"role": "assistant", "refusal": "X"}]},
             {"messages": [{"role": "assistant", "tool_calls": [{"id": "X", "function": {"name": "f", "arguments": ""}}]}]},
             {"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "X", "arguments": "X"}}]}]},
             {"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "custom": {"name": "f", "input": "X"}}]}]},
             {"messages": [{"role": "tool", "tool_call_id": "X", "content": "X"}]},
             {"tools": [{"type": "function", "function": "X"}]}, {"tools": [{"type": "X", "name": "X"}]},
             {"tools": [{"type": "function", "function": {"name": "X"}}]},
             {"tools": [{"type": "function", "function": {"name": "f", "parameters": "X", "description": "X", "strict": "X"}}]},
             {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "X", "properties": "X"}}}]},
             {"tools": [{"type": "custom", "custom": {"name": "f", "format": "X"}}]},
             {"tools": [{"type": "custom", "custom": {"name": "f", "format": {"type": "grammar", "grammar": "X"}}}]},
             {"tool_choice": {"type": "function", "function": {"name": "X"}}}, {"tool_choice": {"type": "X"}},
             {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "X", "tools": "X"}}},
             {"response_format": {"type": "json_schema", "json_schema": "X"}}, {"response_format": {"type": "regex", "pattern": "X"}},
             {"response_format": {"type": "json_schema", "json_schema": {"name": "X", "schema": "X"}}},
             {"stream_options": {"include_usage": "X"}}, {"logit_bias": {"1": "X"}}, {"logit_bias": [["X", 1]]},
             {"stop": ["X"]}, {"thinking": {"type": "X"}}, {"chat_template_kwargs": {"enable_thinking": "X"}}),
    "completions": ({"prompt": ["X"]}, {"prompt": [["X"]]}, {"prompt": ["a", "X"]}),
    "responses": ({"input": ["X"]}, {"input": [{"type": "X"}]}, {"input": [{"role": "X", "content": "X"}]},
                  {"input": [{"role": "user", "content": ["X"]}]}, {"input": [{"role": "user", "content": [{"type": "X"}]}]},
                  {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "X", "file_id": "X"}]}]},
                  {"input": [{"role": "user", "content": [{"type": "input_file", "file_data": "X", "filename": "X"}]}]},
                  {"input": [{"type": "function_call", "call_id": "X", "name": "f", "arguments": "X"}]},
                  {"input": [{"type": "function_call", "call_id": "c", "name": "X", "namespace": "X"}]},
                  {"input": [{"type": "custom_tool_call", "call_id": "c", "name": "f", "input": "X"}]},
                  {"input": [{"type": "function_call_output", "call_id": "X", "output": "X"}]},
                  {"input": [{"type": "reasoning", "content": "X", "summary": "X", "encrypted_content": "X"}]},
                  {"input": [{"type": "reasoning", "content": ["X"], "summary": [{"text": "X"}]}]},
                  {"input": [{"type": "item_reference", "id": "X"}]}, {"input": [{"type": "additional_tools", "tools": "X"}]},
                  {"input": [{"type": "additional_tools", "tools": ["X"]}]}, {"tools": ["X"]},
                  {"tools": [{"type": "namespace", "name": "X", "tools": "X"}]},
                  {"tools": [{"type": "namespace", "name": "n", "tools": ["X"]}]}, {"tools": [{"type": "function", "name": "X"}]},
                  {"tools": [{"type": "custom", "name": "f", "format": {"type": "grammar", "syntax": "X", "definition": "X"}}]},
                  {"text": {"format": "X"}}, {"text": {"format": {"type": "json_schema", "schema": "X"}}},
                  {"reasoning": {"effort": "X"}}, {"include": ["X"]}, {"metadata": {"a": "X"}},
                  {"tool_choice": {"type": "function", "name": "X"}}),
    "messages": ({"messages": ["X"]}, {"messages": [{"role": "X", "content": "X"}]}, {"messages": [{"role": "user", "content": ["X"]}]},
                 {"messages": [{"role": "user", "content": [{"type": "X"}]}]}, {"system": ["X"]}, {"system": [{"type": "text", "text": "X"}]},
                 {"messages": [{"role": "user", "content": [{"type": "image", "source": "X"}]}]},
                 {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "X", "media_type": "X"}}]}]},
                 {"messages": [{"role": "user", "content": [{"type": "document", "source": "X", "title": "X"}]}]},
                 {"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "content", "content": "X"}}]}]},
                 {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "X", "content": "X"}]}]},
                 {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "is_error": "X",
                                                             "content": ["X"]}]}]},
                 {"messages": [{"role": "user", "content": [{"type": "search_result", "title": "X", "source": "X", "content": "X"}]}]},
                 {"messages": [{"role": "user", "content": [{"type": "tool_reference", "tool_name": "X"}]}]},
                 {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "X", "name": "f", "input": "X"}]}]},
                 {"messages": [{"role": "assistant", "content": [{"type": "thinking", "thinking": "X", "signature": "X"}]}]},
                 {"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "X"}]}]},
                 {"tools": ["X"]}, {"tools": [{"name": "X", "type": "X"}]}, {"tools": [{"name": "f", "input_schema": "X"}]},
                 {"tools": [{"name": "f", "description": "X", "defer_loading": "X", "strict": "X"}]},
                 {"tool_choice": {"type": "X", "name": "X"}}, {"tool_choice": {"type": "auto", "disable_parallel_tool_use": "X"}},
                 {"output_config": {"format": "X", "effort": "X"}}, {"output_config": {"format": {"type": "json_schema", "schema": "X"}}},
                 {"thinking": {"type": "X", "budget_tokens": "X"}}, {"stop_sequences": ["X"]}),
}


def put(template: Any, value: Any) -> Any:
    if template == "X":
        return value
    if isinstance(template, dict):
        return {k: put(v, value) for k, v in template.items()}
    return [put(v, value) for v in template] if isinstance(template, list) else template


def check(name: str, body: Any) -> bool:
    """Parsed, or a 4xx whose words can be sent. True: parsed."""
    protocol = PROTOCOLS[name]
    try:
        turn = protocol.parse(body)
    except MiladError as e:
        assert 400 <= e.status < 500, e
        status, reply, headers = protocol.error(e, "req_1")
        assert 400 <= status < 500 and ("x-should-retry", "false") in headers
        json.dumps(reply, ensure_ascii=False).encode()
        assert len(json.dumps(reply)) < 3000
        return False
    assert turn.api == name and 1 <= turn.n <= 16 and len(turn.stop) <= 16
    assert turn.max_tokens is None or 0 <= turn.max_tokens < 2**31
    for number in (turn.sampling.temperature, turn.sampling.top_p, turn.sampling.min_p, turn.sampling.repeat_penalty):
        assert number is None or 0 <= number <= 10
    assert turn.sampling.seed is None or 0 <= turn.sampling.seed < 2**64
    json.dumps([asdict(m) for m in turn.messages], ensure_ascii=False).encode()  # no half surrogates left
    json.dumps(dict(turn.meta), ensure_ascii=False, allow_nan=False).encode()
    json.dumps([t.parameters for t in turn.tools], ensure_ascii=False, allow_nan=False).encode()
    return True


@pytest.mark.parametrize("name", PROTOCOLS)
def test_every_field_takes_every_value(name: str) -> None:
    for field in (*FIELDS[name], *SHARED):
        for value in HOSTILE:
            check(name, {**copy.copy(BASE[name]), field: value})
    for template in NESTED[name]:
        for value in HOSTILE:
            check(name, {**BASE[name], **put(template, value)})


NUMERIC: dict[str, tuple[str, ...]] = {
    "chat": ("n", "max_tokens", "max_completion_tokens", "top_logprobs", "seed"), "completions": ("n", "max_tokens", "logprobs",
                                                                                                "best_of", "seed"),
    "responses": ("max_output_tokens", "top_logprobs", "max_tool_calls", "seed"), "messages": ("max_tokens", "top_k")}


@pytest.mark.parametrize("name", PROTOCOLS)
def test_numbers_that_are_none_name_their_field(name: str) -> None:
    for field in (*NUMERIC[name], "temperature", "top_p", "presence_penalty"):
        for value in ("5", True, float("nan"), [], {}, float("inf")):
            if field == "top_logprobs" and value is True:
                continue
            with pytest.raises(MiladError) as e:
                PROTOCOLS[name].parse({**BASE[name], "logprobs": True if name == "chat" else None, field: value})
            assert e.value.param == field and field in e.value.message


@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_body_that_is_no_object(name: str) -> None:
    for body in (None, [], "x", 3, True):
        with pytest.raises(MiladError, match="JSON object"):
            PROTOCOLS[name].parse(body)


@pytest.mark.parametrize("name, body", [(n, c["body"]) for n, c in cases() if c["body"] is not None],
                         ids=[n for n, c in cases() if c["body"] is not None])
def test_recorded_requests_parse(name: str, body: dict[str, Any]) -> None:
    protocol = protocol_of(dict(cases())[name]["path"])
    assert protocol is not None and check(protocol, body)
    turn = PROTOCOLS[protocol].parse(copy.deepcopy(body))
    assert turn.messages or turn.prompt
    for stream in (False, True):
        encoder = PROTOCOLS[protocol].encoder(turn, ident(PROTOCOLS[protocol].id_prefix))
        kinds = ("text",) if protocol == "completions" else ("text", "thinking", "tool_call")
        names = tuple(t.name for t in turn.tools) or ("f",)
        events: list[Event] = generation(random.Random(name), tools=names, kinds=kinds)
        json.dumps([frames(encoder, [(0, e) for e in events]) if stream else None, encoder.body()], allow_nan=False)


def spots(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from spots(value[key], (*path, key))
    elif isinstance(value, list):
        for i, v in enumerate(value):
            yield from spots(v, (*path, i))


def mutate(rng: random.Random, body: Any) -> Any:
    """One to four changes: a value replaced, removed, doubled, renamed or wrapped."""
    body = copy.deepcopy(body)
    for _ in range(rng.randrange(1, 5)):
        paths = [p for p in spots(body) if p and "properties" not in p]
        if not paths:
            break
        path = rng.choice(paths)
        owner = body
        for step in path[:-1]:
            owner = owner[step]
        key = path[-1]
        how = rng.randrange(6)
        if how == 0:
            del owner[key]
        elif how == 1 and isinstance(owner, list):
            owner.insert(key, copy.deepcopy(owner[key]))
        elif how == 2 and isinstance(owner, dict):
            owner[rng.choice(["type", "role", "content", "name", "id", "text", "input", "x"])] = owner.pop(key)
        elif how == 3:
            owner[key] = rng.choice([[owner[key]], {"type": owner[key]}, {"content": owner[key]}])
        else:
            owner[key] = copy.deepcopy(rng.choice(SHALLOW))
    return body


@pytest.mark.parametrize("name", PROTOCOLS)
def test_mutated_requests(name: str) -> None:
    """2,000 mutations a protocol; about half still parse, so both ways are covered."""
    rng = random.Random(name)
    small = [c["body"] for _, c in cases() if c["body"] is not None and protocol_of(c["path"]) == name]
    small = [shrink(b) for b in small] + [put(t, "x") | BASE[name] | put(t, "x") for t in NESTED[name]]
    parsed = sum(check(name, mutate(rng, rng.choice(small))) for _ in range(2000))
    assert 100 < parsed < 1900


def shrink(body: Any) -> Any:
    """The request with short texts and few tools: mutations then hit its structure."""
    if isinstance(body, str):
        return body[:40]
    if isinstance(body, dict):
        return {k: shrink(v) for k, v in body.items()}
    return [shrink(v) for v in body[:8]] if isinstance(body, list) else body


def test_many_messages_and_many_tools() -> None:
    many = [{"role": "user" if i % 2 == 0 else "assistant", "content": "x"} for i in range(9999)]
    assert check("chat", {"messages": many}) and check("messages", {"messages": many, "max_tokens": 1})
    assert check("responses", {"input": many})
    tools = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(1000)]
    assert check("chat", {"messages": many[:1], "tools": tools})
    same = [{"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]}] * 1000
    assert check("responses", {"input": "x", "tools": same})

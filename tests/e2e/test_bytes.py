"""Text is bytes: a model that emits random tokens (half characters, markup, control tokens) through every protocol."""

from __future__ import annotations

import json
import random
from typing import Any, Callable

import pytest

from protocols.support import cases

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions", "responses": "/v1/responses", "messages": "/v1/messages"}
TOOLS = {"chat": [{"type": "function", "function": {"name": "f"}}], "responses": [{"type": "function", "name": "f"}],
         "messages": [{"name": "f", "input_schema": {}}]}
KEYS = {"chat": "max_tokens", "completions": "max_tokens", "responses": "max_output_tokens", "messages": "max_tokens"}


@pytest.fixture(scope="module", params=["qwen3", "llama3", "qwen3-coder"])
def noise(request: Any, start: Any, tiny: Callable[..., Any]) -> Any:
    return start(args=("--family", request.param, "--tools", "on", "--parallel", "4"), model=tiny(n_ctx=1024))


def body_of(protocol: str, seed: int, stream: bool, stop: list[str]) -> dict[str, Any]:
    asked: dict[str, Any] = {"prompt": "hello"} if protocol == "completions" else {"input": "hello", "store": False} \
        if protocol == "responses" else {"messages": [{"role": "user", "content": "hello"}]}
    if protocol in TOOLS and seed % 2:
        asked["tools"] = TOOLS[protocol]
    asked[{"messages": "stop_sequences", "responses": "unknown"}.get(protocol, "stop")] = stop
    if protocol == "chat" and seed % 3 == 0:
        asked.update(logprobs=True, top_logprobs=3)
    return {**asked, "temperature": 2.0, "top_k": 0, "top_p": 1.0, "seed": seed, KEYS[protocol]: 120, "stream": stream,
            **({"stream_options": {"include_usage": True}} if stream and protocol in ("chat", "completions") else {})}


def texts(protocol: str, answer: Any) -> tuple[str, Any]:
    """(the text of a plain body, its usage without what the cache spared)"""
    if protocol == "chat":
        return answer["choices"][0]["message"].get("content") or "", answer["usage"]["completion_tokens"]
    if protocol == "completions":
        return answer["choices"][0]["text"], answer["usage"]["completion_tokens"]
    if protocol == "responses":
        return "".join(p["text"] for i in answer["output"] if i["type"] == "message" for p in i["content"]), answer["usage"]["output_tokens"]
    return "".join(b["text"] for b in answer["content"] if b["type"] == "text"), answer["usage"]["output_tokens"]


def streamed(protocol: str, events: list[tuple[str, Any]]) -> tuple[str, Any]:
    values = [v for _, v in events if v != "[DONE]"]
    if protocol in ("chat", "completions"):
        assert events[-1][1] == "[DONE]"
        pieces = [c.get("delta", {}).get("content") or c.get("text") or "" for v in values for c in v["choices"]]
        return "".join(pieces), values[-1]["usage"]["completion_tokens"]
    if protocol == "responses":
        return "".join(v["delta"] for v in values if v["type"] == "response.output_text.delta"), values[-1]["response"]["usage"]["output_tokens"]
    usage = next(v["usage"] for v in values if v["type"] == "message_delta")
    return "".join(v["delta"]["text"] for v in values if v.get("delta", {}).get("type") == "text_delta"), usage["output_tokens"]


@pytest.mark.parametrize("protocol", PATHS)
def test_random_tokens(noise: Any, protocol: str) -> None:
    """Whole characters, valid JSON, the same streamed and plain; the daemon lives."""
    seen = ""
    for seed in range(12):
        stop = [["q", "\ufffd"], ["é", "xy"], []][seed % 3]
        status, _, data = noise.request("POST", PATHS[protocol], body_of(protocol, seed, False, stop))
        assert status == 200, data
        plain = texts(protocol, json.loads(data.decode("utf-8")))
        assert plain == streamed(protocol, noise.events(PATHS[protocol], body_of(protocol, seed, True, stop))), seed
        plain[0].encode("utf-8")                                    # no half surrogates
        if protocol != "responses":
            assert not any(s in plain[0] for s in stop)
        seen += plain[0]
    assert "<|im_end|>" not in seen or protocol == "completions"      # no end of turn is told; raw completions have no turns
    assert any(ord(c) > 127 for c in seen) and "\ufffd" in seen
    assert noise.process.poll() is None and "Traceback" not in noise.log


TEXTS = ("naïve 日本語 🎉👩‍👩‍👧", "a STOP b", "STO STOP", "<think>\nhm\n</think>\n\nso", "<tool_call>\n{\"name\": \"f\", \"arguments\": "
         "{\"a\": \"é🎉 </tool_call>\"}}\n</tool_call>", "<tool_cal x", "{\"name\": \"f\"", "<|im_", "</thinkSTOP", "x\n\n\n")


@pytest.fixture(scope="module", params=["token", "byte"])
def split(request: Any, start: Any) -> Any:
    script = [{"output": t, "when": {"last": f"^n{i}$"}, "split": request.param} for i, t in enumerate(TEXTS)]
    return start(script, ("--family", "qwen3", "--tools", "on", "--ctx", "2048"))


def test_every_split_reads_the_same(split: Any) -> None:
    """Text, stop strings and markup whole, token by token and byte by byte; streams say what plain answers say."""
    expected = [("naïve 日本語 🎉👩‍👩‍👧", None), ("a ", None), ("STO ", None), ("so", "hm"), ("", None), ("<tool_cal x", None),
                ("{\"name\": \"f\"", None), ("<|im_", None), ("</think", None), ("x\n\n\n", None)]
    for i, (text, thought) in enumerate(expected):
        body = {"messages": [{"role": "user", "content": f"n{i}"}], "stop": ["STOP"], "tools": TOOLS["chat"]}
        status, answer = split.json("POST", "/v1/chat/completions", body)
        message = answer["choices"][0]["message"]
        assert status == 200 and (message["content"] or "") == text and message.get("reasoning_content") == thought, answer
        if i == 4:
            assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"a": "é🎉 </tool_call>"}
        events = [v for _, v in split.events("/v1/chat/completions", {**body, "stream": True}) if v != "[DONE]"]
        deltas = [c["delta"] for v in events for c in v["choices"]]
        assert "".join(d.get("content") or "" for d in deltas) == text
        assert ("".join(d.get("reasoning_content") or "" for d in deltas) or None) == thought


COUNTED = [n for n, c in cases() if c["body"] is not None and c["path"].partition("?")[0].endswith(("/messages", "/responses"))]


def test_counting_is_what_the_request_uses(start: Any) -> None:
    """For every recorded request, and again when the model's own words came back and are remembered token by token."""
    daemon = start([{"output": "Hello, wörld 🎉 it is", "split": "byte"}], ("--tools", "on", "--ctx", "65536"))
    rng = random.Random(1)
    for name in COUNTED:
        case = dict(cases())[name]
        path, body = case["path"].partition("?")[0], {**case["body"], "stream": False}
        counter = path + ("/count_tokens" if path.endswith("messages") else "/input_tokens")
        if "previous_response_id" in body and body["previous_response_id"]:
            continue
        for _ in range(2):
            status, counted = daemon.json("POST", counter, body)
            assert status == 200, counted
            status, answer = daemon.json("POST", path, body)
            assert status == 200, answer
            usage = answer["usage"]
            used = usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)
            assert used == counted["input_tokens"], name
            key = "messages" if path.endswith("messages") else "input"
            before = body[key] if isinstance(body[key], list) else [{"role": "user", "content": body[key]}]
            said = [{"role": "assistant", "content": answer["content"]}] if key == "messages" else answer["output"]
            body = {**body, key: [*before, *said, {"role": "user", "content": f"and {rng.random()}"}]}

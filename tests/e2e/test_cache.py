"""The prompt is never computed twice: what the daemon reports and counts, over HTTP."""

from __future__ import annotations

import re
import threading

import pytest

BLOCK = 32


def computed(daemon) -> int:
    """Prompt tokens that went through the engine so far."""
    text = daemon.request("GET", "/metrics")[2].decode()
    return int(float(re.search(r'^milad_prompt_tokens_total\{source="computed"\} (\S+)$', text, re.M)[1]))


def test_eight_clients_pay_once_for_one_system_prompt(start):
    daemon = start(script=[{"output": "Yes."}], args=("--ctx", "8192", "--parallel", "8"))
    system = " ".join(f"Rule {i}: keep answers short and count to {i * 7}." for i in range(420))
    bodies = [{"messages": [{"role": "system", "content": system}, {"role": "user", "content": f"Question {i}: is {i} odd?"}]}
              for i in range(8)]
    replies: list = []
    threads = [threading.Thread(target=lambda b=b: replies.append(daemon.json("POST", "/v1/chat/completions", b))) for b in bodies]
    before = computed(daemon)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [status for status, _ in replies] == [200] * 8
    prompts = [body["usage"]["prompt_tokens"] for _, body in replies]
    assert min(prompts) > 5500
    shared = min(prompts) - 20
    assert computed(daemon) - before <= 1.1 * shared + sum(p - shared for p in prompts)


CALL = '<tool_call>\n{"name": "look", "arguments": {"place": "here"}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"place": {"type": "string"}}}


def chat_turns(daemon):
    """(prompt tokens, cached, output tokens) per turn of a growing chat with tool calls."""
    messages = [{"role": "user", "content": "Look around. " * 40}]
    tools = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]
    for turn in range(4):
        status, body = daemon.json("POST", "/v1/chat/completions", {"messages": messages, "tools": tools})
        assert status == 200, body
        usage = body["usage"]
        yield usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], usage["completion_tokens"]
        message = body["choices"][0]["message"]
        messages.append({k: message[k] for k in ("role", "content", "tool_calls") if message.get(k)})
        messages += [{"role": "tool", "tool_call_id": c["id"], "content": "a wall"} for c in message.get("tool_calls") or ()]
        messages.append({"role": "user", "content": f"Go on, {turn}."})


def messages_turns(daemon):
    """The same by the messages API, with cache_control that moves and content that changes its shape."""
    messages = [{"role": "user", "content": [{"type": "text", "text": "Look around. " * 40, "cache_control": {"type": "ephemeral"}}]}]
    tools = [{"name": "look", "input_schema": SCHEMA}]
    system = [{"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch={};"}, {"type": "text", "text": "Be brief."}]
    for turn in range(4):
        system[0] = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=1; cch={turn};"}
        status, body = daemon.json("POST", "/v1/messages", {"messages": messages, "tools": tools, "system": system,
                                                            "max_tokens": 500})
        assert status == 200, body
        usage = body["usage"]
        yield usage["input_tokens"] + usage["cache_read_input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]
        if isinstance(messages[0]["content"], list):
            messages[0] = {"role": "user", "content": messages[0]["content"][0]["text"]}
        messages.append({"role": "assistant", "content": body["content"]})
        calls = [b for b in body["content"] if b["type"] == "tool_use"]
        messages.append({"role": "user", "content": [
            *({"type": "tool_result", "tool_use_id": c["id"], "content": "a wall"} for c in calls),
            {"type": "text", "text": f"Go on, {turn}.", "cache_control": {"type": "ephemeral"}}]})


def responses_turns(daemon):
    """The same by the responses API, items sent back as they came."""
    items = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Look around. " * 40}]}]
    tools = [{"type": "function", "name": "look", "parameters": SCHEMA}]
    for turn in range(4):
        status, body = daemon.json("POST", "/v1/responses", {"input": items, "tools": tools, "store": False})
        assert status == 200, body
        usage = body["usage"]
        yield usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"], usage["output_tokens"]
        items += body["output"]
        items += [{"type": "function_call_output", "call_id": i["call_id"], "output": "a wall"}
                  for i in body["output"] if i["type"] == "function_call"]
        items.append({"role": "user", "content": f"Go on, {turn}."})


@pytest.mark.parametrize("turns", [chat_turns, messages_turns, responses_turns])
def test_a_growing_conversation_computes_only_what_is_new(start, turns):
    daemon = start(script=[{"output": "I look. " * 12 + CALL}, {"output": "It is a wall, I think. " * 8},
                           {"output": "Once more.\n" + CALL}, {"output": "Still a wall."}], args=("--tools", "on"))
    before = None
    for n_prompt, n_cached, n_output in turns(daemon):
        if before is not None:
            assert n_cached >= before - BLOCK, "the last turn's tokens were computed again"
        assert n_cached < n_prompt
        before = n_prompt + n_output


def test_a_restart_finds_the_prompt_on_disk(start, tmp_path):
    folder = tmp_path / "kv"
    body = {"messages": [{"role": "user", "content": " ".join(f"{i} apples" for i in range(400)) + ". How many?"}],
            "max_tokens": 12, "temperature": 0}
    answers = []
    for _ in range(2):
        daemon = start(args=("--kv-cache-dir", str(folder)))
        status, reply = daemon.json("POST", "/v1/chat/completions", body)
        assert status == 200
        answers.append((reply["choices"][0]["message"]["content"], reply["usage"]["prompt_tokens_details"]["cached_tokens"],
                        reply["usage"]["prompt_tokens"]))
        assert daemon.stop() == 0
    (first, n_cold, n_prompt), (second, n_warm, _) = answers
    assert second == first and n_cold == 0 and n_warm >= n_prompt - BLOCK - 1
    for path in folder.rglob("*"):              # damaged: a miss, never a wrong answer
        if path.is_file() and path.stat().st_size > 4096:
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
    daemon = start(args=("--kv-cache-dir", str(folder)))
    assert daemon.json("POST", "/v1/chat/completions", body)[1]["choices"][0]["message"]["content"] == first
    assert daemon.stop() == 0

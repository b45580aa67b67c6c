"""Tool calls that clients write anew still hit the cache up to the last generated token."""

from __future__ import annotations

TOOL = {"type": "function", "function": {"name": "read", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}}}
# spelled as no JSON encoder would: key order, blanks, escapes
CALL = '<tool_call>\n{"name":  "read", "arguments": {"path":"a\\u0062.txt",   "n": 1.0}}\n</tool_call>'


def test_a_tool_call_written_anew_is_known_by_its_meaning(start):
    daemon = start(script=[{"output": "I will look.\n" + CALL, "when": {"last": "^look"}}, {"output": "done"}],
                   args=("--tools", "on"))
    first = {"messages": [{"role": "user", "content": "look"}], "tools": [TOOL]}
    status, body = daemon.json("POST", "/v1/chat/completions", first)
    assert status == 200
    message = body["choices"][0]["message"]
    call = message["tool_calls"][0]
    n_first = body["usage"]["prompt_tokens"] + body["usage"]["completion_tokens"]
    for arguments in (call["function"]["arguments"], '{"n": 1.0, "path": "ab.txt"}'):
        history = {"role": "assistant", "content": message["content"],
                   "tool_calls": [{**call, "function": {"name": "read", "arguments": arguments}}]}
        second = {**first, "messages": [*first["messages"], history,
                                        {"role": "tool", "tool_call_id": call["id"], "content": "text of the file"}]}
        status, body2 = daemon.json("POST", "/v1/chat/completions", second)
        assert status == 200
        # all but the end token, which the template writes too
        assert body2["usage"]["prompt_tokens_details"]["cached_tokens"] >= n_first - 1
    changed = {**second, "messages": [*first["messages"], {**history, "tool_calls": [
        {**call, "function": {"name": "read", "arguments": '{"path": "other"}'}}]}, *second["messages"][2:]]}
    status, body3 = daemon.json("POST", "/v1/chat/completions", changed)
    assert body3["usage"]["prompt_tokens_details"]["cached_tokens"] < n_first - 1

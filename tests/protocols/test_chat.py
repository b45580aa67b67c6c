"""Chat completions: parsing, the stream's grammar, the official SDK as reader, plain = stream."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from milad.conversation import IMAGE_NOTE, Image, Text, Thinking
from milad.errors import ContextOverflow, MiladError
from milad.events import BlockEnd, BlockStart, Delta, Failure, Finish, Started, Usage
from protocols.support import PROTOCOLS, frames, generation, ident, interleave, openai_client

CHAT = PROTOCOLS["chat"]
TOOL = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}
PATCH = {"type": "custom", "custom": {"name": "patch", "format": {
    "type": "grammar", "grammar": {"syntax": "lark", "definition": "start: /x/"}}}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}


def parse(messages: Any = None, **more: Any) -> Any:
    return CHAT.parse({"messages": [{"role": "user", "content": "hi"}] if messages is None else messages, **more})


def fails(match: str, messages: Any = None, code: str | None = None, **more: Any) -> MiladError:
    with pytest.raises(MiladError, match=match) as e:
        parse(messages, **more)
    assert e.value.status == 400 and e.value.code == code
    return e.value


def roles(turn: Any) -> list[str]:
    return [m.role for m in turn.messages]


def test_leading_systems_join_and_later_ones_stay() -> None:
    turn = parse([{"role": "system", "content": "a"}, {"role": "developer", "content": [{"type": "text", "text": "b"}]},
                  {"role": "user", "content": "u"}, {"role": "system", "content": "late"}, {"role": "user", "content": "v"}])
    assert roles(turn) == ["system", "user", "system", "user"]
    assert turn.messages[0].text == "a\n\nb" and turn.messages[2].text == "late"


def test_billing_header_is_dropped_only_at_the_start() -> None:
    line = "x-anthropic-billing-header: cc_version=1; cch=2;"
    turn = parse([{"role": "system", "content": line}, {"role": "system", "content": f"keep {line}"},
                  {"role": "user", "content": line}])
    assert turn.messages[0].text == f"keep {line}" and turn.messages[1].text == line


@pytest.mark.parametrize("content", ["", None, [], "missing"])
def test_empty_content_is_fine(content: Any) -> None:
    message = {"role": "user"} if content == "missing" else {"role": "user", "content": content}
    assert parse([message]).messages[0].parts == ()


def test_assistant_history_keeps_the_order() -> None:
    turn = parse([{"role": "user", "content": "q"},
                  {"role": "assistant", "content": "t", "reasoning_content": "r", "tool_calls": [
                      {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}},
                      {"id": "call_2", "function": {"name": "g", "arguments": ""}},
                      {"id": "call_3", "function": {"name": "g", "arguments": "no json"}},
                      {"id": "call_4", "type": "custom", "custom": {"name": "patch", "input": "*** x"}}]},
                  {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "1"}, IMAGE]},
                  {"role": "tool", "tool_call_id": "call_2", "content": None},
                  {"role": "tool", "tool_call_id": "call_3"},
                  {"role": "tool", "tool_call_id": "call_4", "content": []}], tools=[TOOL])
    parts = turn.messages[1].parts
    assert parts[0] == Thinking("r") and parts[1] == Text("t")
    assert [p.parsed for p in parts[2:]] == [{"a": 1}, {}, None, {"input": "*** x"}] and parts[5].custom
    assert roles(turn) == ["user", "assistant", "tool"]
    results = turn.messages[2].parts
    assert [r.call_id for r in results] == ["call_1", "call_2", "call_3", "call_4"]
    assert [r.name for r in results] == ["f", "g", "g", "patch"]
    assert results[0].text == "1" + IMAGE_NOTE and results[1].parts == ()


def test_an_image_at_the_end_is_refused_and_elsewhere_a_note() -> None:
    error = fails("cannot see images", [{"role": "user", "content": [{"type": "text", "text": "see"}, IMAGE]}],
                  code="unsupported_image")
    assert error.param == "messages[0].content[1]"
    turn = parse([{"role": "user", "content": [IMAGE]}, {"role": "assistant", "content": "no"},
                  {"role": "user", "content": "and?"}])
    assert isinstance(turn.messages[0].parts[0], Image) and turn.messages[0].text == IMAGE_NOTE
    parse([{"role": "user", "content": [IMAGE]}, {"role": "user", "content": "followed"}])


def test_prefill() -> None:
    assert parse([{"role": "user", "content": "q"}, {"role": "assistant", "content": "Sure"}]).prefill
    assert roles(parse([{"role": "user", "content": "q"}, {"role": "assistant", "content": ""}])) == ["user"]
    call = {"role": "assistant", "content": "x", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": ""}}]}
    assert not parse([{"role": "user", "content": "q"}, call]).prefill


def test_unknown_parts_are_skipped_and_known_ones_need_their_field() -> None:
    turn = parse([{"role": "user", "content": [{"type": "hologram", "x": 1}, {"type": "text", "text": "t"}]}])
    assert turn.messages[0].text == "t" and turn.ignored == ("part hologram",)
    assert fails("is required", [{"role": "user", "content": [{"type": "text"}]}]).param == "messages[0].content[0].text"
    fails("url: is required", [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])
    fails("role: must be one of", [{"role": "boss", "content": "x"}])
    fails(r"content\[0\]: must be an object", [{"role": "user", "content": [3]}])
    fails("half of a surrogate pair", [{"role": "user", "content": "\ud800"}])


def test_files_are_read_as_text_where_they_are_text() -> None:
    turn = parse([{"role": "user", "content": [{"type": "file", "file": {
        "filename": "a.txt", "file_data": "data:text/plain;base64,aGVsbG8="}}]}])
    assert "hello" in turn.messages[0].text and "a.txt" in turn.messages[0].text
    fails("text files only", [{"role": "user", "content": [{"type": "file", "file": {"file_data": "/w=="}}]}],
          code="unsupported_file")


def test_tools_and_choices() -> None:
    turn = parse(tools=[TOOL, {"type": "function", "function": {"name": "bare"}}, PATCH, {"type": "web_search"}],
                 tool_choice={"type": "function", "function": {"name": "bare"}}, parallel_tool_calls=False)
    assert [t.name for t in turn.tools] == ["get_time", "bare", "patch"] and turn.declared_tools
    assert turn.tools[1].parameters == {"type": "object", "properties": {}}
    assert turn.tools[2].custom and turn.tools[2].grammar == ("lark", "start: /x/")
    assert turn.tool_choice.mode == "named" and turn.tool_choice.name == "bare" and not turn.parallel_tool_calls
    assert turn.ignored == ("tool web_search",)
    assert parse(tools=[TOOL], tool_choice="required").tool_choice.mode == "required"
    assert parse(tools=[{"type": "web_search"}], tool_choice="required").tool_choice.mode == "auto"
    only = parse(tools=[TOOL, PATCH], tool_choice={"type": "allowed_tools", "allowed_tools": {
        "mode": "required", "tools": [{"type": "function", "function": {"name": "get_time"}}]}})
    assert [t.name for t in only.tools] == ["get_time"] and only.tool_choice.mode == "required"
    fails("not among the tools", tools=[TOOL], tool_choice={"type": "function", "function": {"name": "none"}})
    fails("declares no tools", tool_choice="required")
    assert fails("must be a JSON schema", tools=[{"type": "function", "function": {"name": "f", "parameters": 3}}]
                 ).param == "tools[0].function.parameters"
    fails("more than 1024 tools", tools=[{"type": "function", "function": {"name": f"f{i}"}} for i in range(1025)])
    assert len(parse(tools=[TOOL, TOOL]).tools) == 1


def test_fields() -> None:
    turn = parse(model="m", temperature=1, top_p=0.5, top_k=-1, min_p=0.1, seed=-1, stop="x", max_tokens=7,
                 max_completion_tokens=9, n=2, logprobs=True, top_logprobs=3, stream=True,
                 logit_bias={"5": -100, "3": 2}, presence_penalty=-2, repetition_penalty=1.1,
                 stream_options={"include_usage": True}, chat_template_kwargs={"enable_thinking": False})
    s = turn.sampling
    assert (s.temperature, s.top_p, s.top_k, s.min_p, s.seed, s.presence_penalty, s.repeat_penalty) == \
        (1.0, 0.5, 0, 0.1, None, -2.0, 1.1)
    assert s.logit_bias == ((3, 2.0), (5, -100.0)) and turn.stop == ("x",) and turn.max_tokens == 9 and turn.n == 2
    assert turn.top_logprobs == 3 and turn.stream and turn.thinking is False and turn.meta["include_usage"]
    assert parse(max_tokens=-1).max_tokens is None and parse(max_tokens=2**63).max_tokens == 2**31 - 1
    assert parse(seed=-5).sampling.seed == 2**64 - 5 and parse(reasoning_effort="none").thinking is False
    assert parse(reasoning_effort="low").template_args == {"reasoning_effort": "low"}
    assert parse(stop=["a", "", "a", "b"]).stop == ("a", "b")
    fails("more than 16", stop=[str(i) for i in range(17)])
    fails("needs logprobs", top_logprobs=2)
    fails("functions: is not supported", functions=[{"name": "f"}])
    fails("only text", modalities=["text", "audio"])
    fails("no token id", logit_bias={"x": 1})


def test_formats() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    turn = parse(response_format={"type": "json_schema", "json_schema": {"name": "A", "schema": schema}})
    assert (turn.format.kind, turn.format.schema, turn.format.name) == ("json_schema", schema, "A")
    assert parse(response_format={"type": "json_object"}).format.kind == "json_object"
    assert parse(response_format={"type": "json_object", "schema": schema}).format.schema == schema
    assert parse(response_format={"type": "regex", "pattern": "a+"}).format.text == "a+"
    assert parse(grammar='root ::= "a"').format.kind == "gbnf" and parse(grammar="start: /a/").format.kind == "lark"
    fails("no known format", response_format={"type": "xml"})
    fails("schema: is required", response_format={"type": "json_schema", "json_schema": {"name": "A"}})


def check_grammar(stream: list[Any], n: int, usage: bool) -> None:
    """The order that clients count on."""
    *chunks, done = stream
    assert done == (None, "[DONE]")
    chunks = [c for name, c in chunks if name is None]
    if usage:
        assert chunks[-1]["choices"] == [] and chunks.pop()["usage"]["prompt_tokens"] > 0
        assert all(c["usage"] is None for c in chunks)
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    for i in range(n):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == i]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert not any("role" in c["delta"] for c in mine[1:])
        assert mine[-1]["delta"] == {} and mine[-1]["finish_reason"]
        assert all(c["finish_reason"] is None for c in mine[:-1])
        calls = [t for c in mine for t in c["delta"].get("tool_calls", [])]
        opened = [t["index"] for t in calls if "id" in t]
        assert opened == list(range(len(opened)))
        assert all(t["index"] == max(k["index"] for k in calls[:j + 1] if "id" in k) for j, t in enumerate(calls))
        assert all(set(t) <= {"index", "function", "custom"} for t in calls if "id" not in t)


@pytest.mark.parametrize("seed", range(60))
def test_stream_grammar_and_plain_body(seed: int) -> None:
    rng = random.Random(seed)
    n = rng.randrange(1, 4)
    turn = parse(tools=[TOOL, PATCH], n=n, logprobs=True, top_logprobs=2,
                 stream_options={"include_usage": rng.random() < 0.5})
    encoder = CHAT.encoder(turn, ident("chatcmpl-"))
    streams = [generation(rng, logprobs=True, tools=("get_time", "patch")) for _ in range(n)]
    stream = frames(encoder, interleave(rng, streams), rng)
    check_grammar(stream, n, turn.meta["include_usage"])
    body = json.loads(json.dumps(encoder.body(), allow_nan=False))
    for choice in body["choices"]:
        check_folded(choice, [c["choices"][0] for _, c in stream if isinstance(c, dict) and c["choices"]
                              and c["choices"][0]["index"] == choice["index"]])


def check_folded(choice: dict[str, Any], chunks: list[dict[str, Any]]) -> None:
    """Joined deltas are the plain message."""
    message = choice["message"]
    assert "".join(c["delta"].get("content", "") for c in chunks) == (message["content"] or "")
    assert "".join(c["delta"].get("reasoning_content", "") for c in chunks) == message.get("reasoning_content", "")
    logprobs = [t for c in chunks if c["logprobs"] for t in c["logprobs"]["content"]]
    assert logprobs == choice["logprobs"]["content"] and chunks[-1]["finish_reason"] == choice["finish_reason"]
    calls: list[dict[str, Any]] = []
    for part in (t for c in chunks for t in c["delta"].get("tool_calls", [])):
        if "id" in part:
            calls.append({"id": part["id"], "type": part["type"], part["type"]: dict(part[part["type"]])})
        else:
            (kind, piece), = ((k, v) for k, v in part.items() if k != "index")
            (key, text), = piece.items()
            calls[-1][kind][key] += text
    assert calls == message.get("tool_calls", [])


@pytest.mark.parametrize("seed", range(20))
def test_sdk_folds_the_stream_to_the_plain_body(seed: int) -> None:
    import openai
    turn = parse(tools=[TOOL])
    events = [(0, e) for e in generation(random.Random(seed), tools=("get_time",))]
    encoder = CHAT.encoder(turn, ident("chatcmpl-"))
    stream = frames(encoder, events)
    client = openai_client(lambda body: stream if body.get("stream") else encoder.body())
    args: Any = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    plain = client.chat.completions.create(**args)
    with client.chat.completions.stream(**args) as manager:
        kinds = [e.type for e in manager]
        if plain.choices[0].finish_reason == "length":           # the helper refuses answers that were cut
            with pytest.raises(openai.LengthFinishReasonError):
                manager.get_final_completion()
            return
        final = manager.get_final_completion()
    a, b = plain.choices[0], final.choices[0]
    assert (a.message.content or "") == (b.message.content or "") and a.finish_reason == b.finish_reason
    assert [(c.id, c.function.name, c.function.arguments) for c in a.message.tool_calls or ()] == \
        [(c.id, c.function.name, c.function.arguments) for c in b.message.tool_calls or ()]
    assert "chunk" in kinds


def test_no_arguments_are_an_empty_object_and_names_go_back() -> None:
    turn = parse(tools=[TOOL])
    encoder = CHAT.encoder(turn, ident())
    events = [Started(Usage(3, 1)), BlockStart(0, "tool_call", "ab", "get_time"), BlockEnd(0),
              Finish("tool_calls", Usage(3, 1, 2))]
    stream = frames(encoder, [(0, e) for e in events])
    deltas = [c["choices"][0]["delta"] for _, c in stream[:-1]]
    assert deltas[1]["tool_calls"] == [{"index": 0, "id": "call_ab", "type": "function",
                                        "function": {"name": "get_time", "arguments": ""}}]
    assert deltas[2]["tool_calls"] == [{"index": 0, "function": {"arguments": "{}"}}]
    message = encoder.body()["choices"][0]["message"]
    assert message["content"] is None and message["tool_calls"][0]["function"]["arguments"] == "{}"
    usage = encoder.body()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (3, 2, 5)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 1


def test_a_failure_is_no_clean_end_and_the_sdk_raises() -> None:
    import openai
    encoder = CHAT.encoder(parse(), ident())
    stream = encoder.keepalive() + encoder.event(0, Started(Usage(1))) + encoder.event(0, BlockStart(0, "text"))
    stream += encoder.event(0, Delta(0, "x")) + encoder.event(0, Failure(MiladError("internal", "engine fault")))
    stream += encoder.end()
    assert stream[0][1]["choices"][0]["delta"]["role"] == "assistant" and "error" in stream[-1][1]
    client = openai_client(lambda body: stream)
    with pytest.raises(openai.APIError, match="engine fault"):
        list(client.chat.completions.create(model="m", messages=[], stream=True))


def test_errors_in_the_sdk() -> None:
    import openai
    table = [(ContextOverflow(9000, 4096, "messages"), openai.BadRequestError), (MiladError("auth", "no"), openai.AuthenticationError),
             (MiladError("forbidden", "no"), openai.PermissionDeniedError), (MiladError("not_found", "no"), openai.NotFoundError),
             (MiladError("overloaded", "full", retry_after_s=90), openai.RateLimitError),
             (MiladError("internal", "x"), openai.InternalServerError)]
    for error, kind in table:
        client = openai_client(lambda body: CHAT.error(error, "req_1"))
        with pytest.raises(kind) as e:
            client.chat.completions.create(model="m", messages=[])
        assert e.value.body["type"] and e.value.body["message"]
    status, body, headers = CHAT.error(table[0][0], "r")
    assert status == 400 and body["error"]["code"] == "context_length_exceeded"
    assert body["error"]["message"] == ("This model's maximum context length is 4096 tokens. However, your request has 9000 "
                                        "tokens. Please reduce the length of the messages.")
    assert ("x-should-retry", "false") in headers
    assert ("Retry-After", "60") in CHAT.error(table[4][0], "r")[2]

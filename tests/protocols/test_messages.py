"""Anthropic messages: parsing, the event grammar, the official SDK as reader, plain = stream."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from milad.conversation import IMAGE_NOTE, Thinking
from milad.errors import ContextOverflow, MiladError
from milad.events import BlockEnd, BlockStart, Delta, Failure, Finish, Started, Usage
from milad.protocols.messages import partial_object
from protocols.support import PROTOCOLS, anthropic_client, case, frames, generation, ident

MESSAGES = PROTOCOLS["messages"]
TOOL = {"name": "get_time", "input_schema": {"type": "object", "properties": {}}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
BILLING = "x-anthropic-billing-header: cc_version=1.2; cch=abc;"


def parse(messages: Any = None, **more: Any) -> Any:
    return MESSAGES.parse({"max_tokens": 10, "messages": [{"role": "user", "content": "hi"}] if messages is None else messages, **more})


def fails(match: str, messages: Any = None, code: str | None = None, **more: Any) -> MiladError:
    with pytest.raises(MiladError, match=match) as e:
        parse(messages, **more)
    assert e.value.status == 400 and e.value.code == code
    return e.value


def shape(turn: Any) -> list[tuple[str, list[str]]]:
    return [(m.role, [type(p).__name__ for p in m.parts]) for m in turn.messages]


def test_system_string_blocks_and_the_billing_header() -> None:
    assert parse(system="s").messages[0].text == "s"
    blocks = [{"type": "text", "text": BILLING}, {"type": "text", "text": "a"}, {"type": "text", "text": f"b {BILLING}"}]
    assert parse(system=blocks).messages[0].text == f"a\n\nb {BILLING}"
    assert parse(system=BILLING).messages[0].role == "user"
    assert parse(system=f"{BILLING}\nYou are").messages[0].text == "You are"
    assert parse([{"role": "system", "content": "m"}, {"role": "user", "content": "u"}], system="s").messages[0].text == "s\n\nm"
    fails("only text", system=[{"type": "image"}])


def test_billing_values_do_not_change_the_turn() -> None:
    body = case("claude-code/01-first-turn")
    other = json.loads(json.dumps(body))
    other["system"][0]["text"] = "x-anthropic-billing-header: cc_version=9; cc_is_subagent=true; cch=ffff;"
    assert MESSAGES.parse(body) == MESSAGES.parse(other)


def test_the_shape_of_a_message_may_move_between_turns() -> None:
    """Claude Code's system message becomes a bare string and cache_control moves: the turns still share their beginning."""
    first = MESSAGES.parse(case("claude-code/01-first-turn"))
    second = MESSAGES.parse(case("claude-code/02-tool-result"))
    assert second.messages[:len(first.messages)] == first.messages
    assert [m.role for m in first.messages] == ["system", "user", "system"] and second.tools == first.tools
    assert [m.role for m in second.messages[3:]] == ["assistant", "tool"]


def test_tool_results_come_before_the_text_of_their_message() -> None:
    turn = parse([{"role": "user", "content": "q"},
                  {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": "any"},
                                                    {"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "two"},
                                                    {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": 1}},
                                                    {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
                                                    {"type": "tool_use", "id": "toolu_2", "name": "g"}]},
                  {"role": "user", "content": [{"type": "text", "text": "and"},
                                               {"type": "tool_result", "tool_use_id": "toolu_1", "content": "1"},
                                               {"type": "tool_result", "tool_use_id": "toolu_2", "is_error": True,
                                                "content": [{"type": "text", "text": "x"}, IMAGE]}]}])
    assert shape(turn) == [("user", ["Text"]), ("assistant", ["Thinking", "Thinking", "Text", "ToolCall", "ToolCall"]),
                           ("tool", ["ToolResult", "ToolResult"]), ("user", ["Text"])]
    results = turn.messages[2].parts
    assert [(r.name, r.text, r.is_error) for r in results] == [("f", "1", False), ("g", "x" + IMAGE_NOTE, True)]
    assert turn.messages[1].parts[0] == Thinking("t", "any") and turn.messages[1].parts[4].parsed == {}
    assert turn.ignored == ("part server_tool_use",)


@pytest.mark.parametrize("content", [None, "", [], 3, {"a": 1}])
def test_tool_results_of_any_kind(content: Any) -> None:
    turn = parse([{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": content}]}])
    assert shape(turn) == [("tool", ["ToolResult"])]


def test_images() -> None:
    fails("cannot see", [{"role": "user", "content": [IMAGE]}], code="unsupported_image")
    parse([{"role": "user", "content": [IMAGE]}, {"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}])
    result = {"type": "tool_result", "tool_use_id": "t", "content": [IMAGE]}
    parse([{"role": "user", "content": [result, {"type": "text", "text": "what is it?"}]}])
    fails("source: is required", [{"role": "user", "content": [{"type": "image"}]}])


def test_documents() -> None:
    part = {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "body"}}
    assert "body" in parse([{"role": "user", "content": [part]}]).messages[0].text
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERg=="}}
    assert "%PDF" in parse([{"role": "user", "content": [pdf]}]).messages[0].text  # text after all
    pdf["source"]["data"] = "/////w=="
    fails("text files only", [{"role": "user", "content": [pdf]}], code="unsupported_file")


def test_tools() -> None:
    server = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
    turn = parse(tools=[server, TOOL, {"name": "bare"}], tool_choice={"type": "any", "disable_parallel_tool_use": True})
    assert [t.name for t in turn.tools] == ["get_time", "bare"] and turn.declared_tools
    assert turn.tool_choice.mode == "required" and not turn.parallel_tool_calls
    assert parse(tools=[server], tool_choice={"type": "tool", "name": "web_search"}).tool_choice.mode == "auto"
    assert parse(tools=[TOOL], tool_choice={"type": "tool", "name": "get_time"}).tool_choice.name == "get_time"
    fails("not among", tools=[TOOL], tool_choice={"type": "tool", "name": "x"})
    fails("type: must be one of", tools=[TOOL], tool_choice={"type": "required"})


def test_deferred_tools_wait_for_their_reference() -> None:
    names = lambda name: [t.name for t in MESSAGES.parse(case(name)).tools]  # noqa: E731
    assert "DeferredToolPlaceholder" not in names("claude-code/01-first-turn")
    assert "WebSearch" in names("claude-code/17-tool-reference-after-toolsearch")
    deferred = {**TOOL, "defer_loading": True}
    assert not parse(tools=[deferred]).tools
    assert parse(tools=[deferred, {"type": "tool_search_tool_regex_20251119", "name": "tool_search"}]).tools


def test_fields() -> None:
    turn = parse(stop_sequences=["a", "b"], temperature=0, top_k=5, thinking={"type": "disabled"}, metadata={"user_id": "x"},
                 output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}}, stream=True)
    assert turn.stop == ("a", "b") and turn.sampling.temperature == 0.0 and turn.sampling.top_k == 5
    assert turn.thinking is False and turn.format.schema == {"type": "object"} and turn.stream
    assert parse(thinking={"type": "enabled", "budget_tokens": -1}).thinking is True
    assert parse([{"role": "user", "content": "q"}, {"role": "assistant", "content": "{"}]).prefill
    fails("role: must be one of", [{"role": "tool", "content": "x"}])
    fails("at least one message", messages=[])
    fails("max_tokens", max_tokens=0)


def check_grammar(stream: list[Any]) -> None:
    """message_start, blocks one after the other with indices 0, 1, ..., message_delta, message_stop; ping anywhere."""
    assert all(name == data["type"] for name, data in stream)
    events = [d for n, d in stream if n != "ping"]
    assert [events[0]["type"], events[-2]["type"], events[-1]["type"]] == ["message_start", "message_delta", "message_stop"]
    assert events[0]["message"]["content"] == [] and events[0]["message"]["stop_reason"] is None
    open_kind, expected, signed = None, 0, False
    fits = {"text": {"text_delta"}, "thinking": {"thinking_delta", "signature_delta"}, "tool_use": {"input_json_delta"}}
    for event in events[1:-2]:
        assert event["index"] == expected
        if event["type"] == "content_block_start":
            assert open_kind is None
            open_kind, signed = event["content_block"]["type"], False
        elif event["type"] == "content_block_delta":
            kind = event["delta"]["type"]
            assert kind in fits[open_kind] and not signed
            signed = kind == "signature_delta"
        else:
            assert event["type"] == "content_block_stop" and open_kind and signed == (open_kind == "thinking")
            open_kind, expected = None, expected + 1
    assert open_kind is None and events[-2]["delta"]["stop_reason"]


@pytest.mark.parametrize("seed", range(60))
def test_grammar_and_sdk_accumulation(seed: int) -> None:
    rng = random.Random(seed)
    encoder = MESSAGES.encoder(parse(tools=[TOOL]), ident("msg_"))
    events = [(0, e) for e in generation(rng, tools=("get_time",))]
    stream = frames(encoder, events, rng)
    check_grammar(stream)
    body = json.loads(json.dumps(encoder.body(), allow_nan=False))
    for block in body["content"]:
        if "__unparsedToolInput" in block.get("input", ()):      # the SDK refuses to read such a stream
            return
    client = anthropic_client(lambda b: stream if b.get("stream") else body)
    args: Any = {"model": "m", "max_tokens": 10, "messages": [{"role": "user", "content": "hi"}]}
    plain = client.messages.create(**args)
    with client.messages.stream(**args) as helper:
        final = helper.get_final_message()
    assert plain.to_dict()["content"] == [strip(b) for b in final.to_dict()["content"]]
    assert (plain.stop_reason, plain.stop_sequence, plain.id) == (final.stop_reason, final.stop_sequence, final.id)
    assert plain.usage.output_tokens == final.usage.output_tokens
    assert plain.usage.input_tokens + plain.usage.cache_read_input_tokens == \
        final.usage.input_tokens + final.usage.cache_read_input_tokens == events[-1][1].usage.input_tokens


def strip(block: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in block.items() if k != "parsed_output"}


@pytest.mark.parametrize("reason, stop", [("stop", "end_turn"), ("length", "max_tokens"), ("stop_sequence", "stop_sequence"),
                                          ("tool_calls", "tool_use"), ("context", "model_context_window_exceeded")])
def test_stop_reasons(reason: str, stop: str) -> None:
    encoder = MESSAGES.encoder(parse(), ident())
    stream = frames(encoder, [(0, Started(Usage(5))), (0, Finish(reason, Usage(5, 0, 1), "X" if stop == reason else None))])
    assert stream[-2][1]["delta"]["stop_reason"] == stop == encoder.body()["stop_reason"]


def test_empty_blocks_leave_no_gap_and_no_arguments_are_an_object() -> None:
    encoder = MESSAGES.encoder(parse(), ident())
    events = [Started(Usage(1)), BlockStart(0, "text"), BlockEnd(0), BlockStart(1, "tool_call", "ab", "f"), BlockEnd(1),
              BlockStart(2, "text"), Delta(2, ""), Delta(2, "x"), BlockEnd(2), Finish("tool_calls", Usage(1, 0, 3))]
    stream = frames(encoder, [(0, e) for e in events])
    check_grammar(stream)
    assert [b["type"] for b in encoder.body()["content"]] == ["tool_use", "text"]
    assert {"type": "input_json_delta", "partial_json": "{}"} in [d.get("delta") for _, d in stream]


@pytest.mark.parametrize("arguments", ['{"a": NaN}', '{"a": 1e999}', '{"a": "\\ud800"}', "[1]", "junk"])
def test_arguments_that_are_no_json_object(arguments: str) -> None:
    encoder = MESSAGES.encoder(parse(), ident())
    frames(encoder, [(0, e) for e in (Started(Usage(1)), BlockStart(0, "tool_call", "i", "f"), Delta(0, arguments), BlockEnd(0),
                                      Finish("tool_calls", Usage(1)))])
    json.dumps(encoder.body(), allow_nan=False, ensure_ascii=False).encode()
    assert encoder.body()["content"][0]["input"] == {"__unparsedToolInput": arguments}


@pytest.mark.parametrize("seed", range(40))
def test_a_cut_call_reads_as_the_sdk_reads_it(seed: int) -> None:
    from jiter import from_json
    rng = random.Random(seed)

    def value(depth: int) -> Any:
        kind = rng.randrange(8 if depth else 6)
        if kind < 6:
            return [None, True, -12.5e3, 0, 'a "q" \\ é\n{[', "7"][kind]
        items = [value(depth - 1) for _ in range(rng.randrange(4))]
        return items if kind == 6 else {f"k{i}": v for i, v in enumerate(items)}
    text = json.dumps({f"k{i}": value(3) for i in range(4)}, ensure_ascii=seed % 2 == 0, indent=rng.choice([None, 1]))
    for end in range(1, len(text) + 1):
        assert partial_object(text[:end]) == from_json(text[:end].encode(), partial_mode=True), text[:end]


def test_a_beginning_that_is_no_json_is_no_object() -> None:
    for text in ("x", "{a", "}", '{"a": 1]', '{"a" "b" "c" "d" "e" "f"'):
        assert partial_object(text) is None
    assert partial_object("[1, 2") == [1, 2]


def test_errors_in_the_sdk() -> None:
    import anthropic
    table = [(ContextOverflow(9000, 4096), anthropic.BadRequestError, "prompt is too long: 9000 tokens > 4096 maximum"),
             (MiladError("auth", "no"), anthropic.AuthenticationError, "no"),
             (MiladError("not_found", "no"), anthropic.NotFoundError, "no"),
             (MiladError("too_large", "big"), anthropic.APIStatusError, "big"),
             (MiladError("rate_limited", "slow"), anthropic.RateLimitError, "slow"),
             (MiladError("overloaded", "full", retry_after_s=3), anthropic.InternalServerError, "full"),
             (MiladError("invalid", "is bad", param="system[0]"), anthropic.BadRequestError, r"system\[0\]: is bad")]
    for error, kind, words in table:
        client = anthropic_client(lambda body: MESSAGES.error(error, "req_1"))
        with pytest.raises(kind, match=words) as e:
            client.messages.create(model="m", max_tokens=1, messages=[])
        assert e.value.body["request_id"] == "req_1"
    assert MESSAGES.error(table[5][0], "r")[0] == 529 and MESSAGES.error(table[3][0], "r")[0] == 413


def test_an_error_in_the_stream_raises_in_the_sdk() -> None:
    import anthropic
    encoder = MESSAGES.encoder(parse(), ident())
    stream = encoder.keepalive() + encoder.event(0, Started(Usage(1)))
    stream += encoder.event(0, Failure(MiladError("internal", "engine fault"))) + encoder.end()
    assert stream[-1][0] == "error"
    client = anthropic_client(lambda body: stream)
    with pytest.raises(anthropic.APIStatusError, match="engine fault"):
        list(client.messages.create(model="m", max_tokens=1, messages=[], stream=True))


def test_count_tokens_in_the_sdk() -> None:
    client = anthropic_client(lambda body: MESSAGES.count_body(7))
    assert client.messages.count_tokens(model="m", messages=[{"role": "user", "content": "x"}]).input_tokens == 7
    body = case("claude-code/26-count-tokens-tools")
    assert MESSAGES.parse_count(body).tools == MESSAGES.parse({**body, "max_tokens": 5}).tools

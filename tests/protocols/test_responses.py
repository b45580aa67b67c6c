"""Responses, the way in: items, tools, echo fields, stored history, listings."""

from __future__ import annotations

from typing import Any

import pytest

from milad.conversation import IMAGE_NOTE, Thinking
from milad.errors import MiladError
from milad.protocols.responses import deleted_body, input_items, list_items, opened
from milad.protocols.responses_stream import sealed
from protocols.support import PROTOCOLS, case, ident

RESPONSES = PROTOCOLS["responses"]
TOOL = {"type": "function", "name": "get_time", "parameters": {"type": "object", "properties": {}}, "strict": False}
PATCH = {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}}
SPACE = {"type": "namespace", "name": "agents", "description": "d", "tools": [
    {"type": "function", "name": "spawn", "parameters": {}}, {"type": "function", "name": "get_time"}]}
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}


class Stored:
    def history(self, response_id: str) -> Any:
        return [{"role": "user", "content": "first"},
                {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
                 "content": [{"type": "output_text", "text": "answer", "annotations": []}]}] if response_id == "resp_1" else None

    def items(self, item_ids: Any) -> Any:
        call = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "f", "arguments": "{}"}
        return {"fc_1": call} if "fc_1" in item_ids else {}


def parse(given: Any = "hi", **more: Any) -> Any:
    return RESPONSES.parse({"input": given, **more}, Stored())


def fails(match: str, given: Any = "hi", code: str | None = None, **more: Any) -> MiladError:
    with pytest.raises(MiladError, match=match) as e:
        parse(given, **more)
    assert e.value.status == 400 and e.value.code == code
    return e.value


def shape(turn: Any) -> list[tuple[str, list[str]]]:
    return [(m.role, [type(p).__name__ for p in m.parts]) for m in turn.messages]


def test_input_kinds() -> None:
    assert shape(parse("")) == [("user", [])] and parse("x").messages[0].text == "x"
    fails("input: is required", None)
    fails("at least one item", [])
    fails("must be a string or an array", 3)
    assert parse([], instructions="only").messages[0].role == "system"


def test_leading_systems_join_with_the_instructions() -> None:
    turn = parse([{"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "d"}]},
                  {"role": "system", "content": "s"}, {"role": "user", "content": "u"},
                  {"role": "developer", "content": "late"}], instructions="i")
    assert [(m.role, m.text) for m in turn.messages] == [("system", "i\n\nd\n\ns"), ("user", "u"), ("system", "late")]


def test_a_run_of_assistant_items_is_one_message() -> None:
    turn = parse([{"role": "user", "content": "q"},
                  {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
                  {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
                  {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{\"a\": 1}"},
                  {"type": "custom_tool_call", "call_id": "call_2", "name": "patch", "input": "*** x\n"},
                  {"type": "function_call_output", "call_id": "call_1", "output": "1"},
                  {"type": "custom_tool_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "2"}, IMAGE]},
                  {"type": "web_search_call", "id": "ws_1"}])
    assert shape(turn) == [("user", ["Text"]), ("assistant", ["Thinking", "Text", "ToolCall", "ToolCall"]),
                           ("tool", ["ToolResult", "ToolResult"])]
    call = turn.messages[1].parts[3]
    assert call.custom and call.parsed == {"input": "*** x\n"}
    assert [(r.name, r.text) for r in turn.messages[2].parts] == [("f", "1"), ("patch", "2" + IMAGE_NOTE)]
    assert turn.ignored == ("item web_search_call",)


@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}, "", None, "no json", "[1]", 5])
def test_arguments_of_any_kind(arguments: Any) -> None:
    assert shape(parse([{"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}]))


def test_items_that_lack_what_they_need() -> None:
    fails(r"input\[0\].call_id: is required", [{"type": "function_call_output", "output": "x"}])
    fails(r"input\[0\].name: is required", [{"type": "function_call", "call_id": "c", "arguments": "{}"}])
    fails(r"input\[0\].type: is required", [{}])
    fails("role: must be one of", [{"type": "message", "role": "tool", "content": "x"}])
    for empty in ({"summary": []}, {"summary": [], "content": None, "encrypted_content": None}, {"encrypted_content": "junk"},
                  {"content": [], "encrypted_content": ""}, {"encrypted_content": "milad1.%%%"}):
        parse([{"type": "reasoning", **empty}, {"role": "user", "content": "x"}])


def test_our_encrypted_content_comes_back_as_thinking() -> None:
    assert opened(sealed("tiefe Gedanken 🎉")) == "tiefe Gedanken 🎉" and opened("RU5DUllQVEVE") == ""
    item = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "content": None}
    assert parse([item]).messages[0].parts == (Thinking("s"),)
    assert parse([{**item, "encrypted_content": sealed("t")}]).messages[0].parts == (Thinking("t"),)


def test_a_sealed_bomb_stays_small() -> None:
    import base64
    import zlib
    bomb = "milad1." + base64.urlsafe_b64encode(zlib.compress(b"a" * (64 << 20), 9)).decode()
    assert len(opened(bomb)) <= 4 << 20


def test_images() -> None:
    fails("cannot see", [{"role": "user", "content": [IMAGE]}], code="unsupported_image")
    parse([{"role": "user", "content": [IMAGE]}, {"role": "user", "content": "x"}])
    parse([{"type": "function_call_output", "call_id": "c", "output": [IMAGE]}])


def test_tools_namespaces_and_names() -> None:
    turn = parse(tools=[TOOL, PATCH, SPACE, {"type": "web_search"}, {"type": "tool_search", "execution": "client"}])
    assert [(t.name, t.namespace, t.api_name) for t in turn.tools] == [
        ("get_time", None, ""), ("patch", None, ""), ("spawn", "agents", ""), ("agents__get_time", "agents", "get_time")]
    assert turn.tools[1].custom and turn.tools[1].grammar == ("lark", "start: /x/") and turn.declared_tools
    assert set(turn.ignored) == {"tool web_search", "tool tool_search"}
    turn = parse([{"type": "function_call", "call_id": "c", "namespace": "agents", "name": "get_time", "arguments": ""},
                  {"type": "function_call_output", "call_id": "c", "output": ""}], tools=[TOOL, SPACE])
    assert turn.messages[0].parts[0].name == "agents__get_time" == turn.messages[1].parts[0].name
    assert parse(tools=[TOOL], tool_choice={"type": "function", "name": "get_time"}).tool_choice.name == "get_time"
    assert parse(tools=[PATCH], tool_choice={"type": "custom", "name": "patch"}).tool_choice.name == "patch"
    assert parse(tools=[{"type": "web_search"}], tool_choice={"type": "web_search"}).tool_choice.mode == "auto"


def test_additional_tools_item() -> None:
    turn = RESPONSES.parse(case("codex/13-additional-tools-item"))
    names = {(t.namespace, t.name) for t in turn.tools}
    assert {("functions", "exec"), ("functions", "wait"), ("clock", "sleep")} <= names and not turn.parallel_tool_calls


def test_codex_turns_share_their_beginning() -> None:
    first, second = (RESPONSES.parse(case(f"codex/{n}")) for n in ("01-first-turn", "02-tool-result"))
    assert second.messages[:len(first.messages)] == first.messages and first.tools == second.tools
    assert [m.role for m in first.messages] == ["system", "user", "user"]
    assert [m.role for m in second.messages[3:]] == ["assistant", "tool"]


def test_previous_responses_and_references() -> None:
    turn = parse("more", previous_response_id="resp_1")
    assert [(m.role, m.text) for m in turn.messages] == [("user", "first"), ("assistant", "answer"), ("user", "more")]
    error = fails("not found", previous_response_id="resp_x", code="previous_response_not_found")
    assert error.param == "previous_response_id"
    with pytest.raises(MiladError, match="not found"):
        RESPONSES.parse({"input": "x", "previous_response_id": "resp_1"})
    turn = parse([{"type": "item_reference", "id": "fc_1"}, {"type": "function_call_output", "call_id": "call_1", "output": "o"}])
    assert shape(turn) == [("assistant", ["ToolCall"]), ("tool", ["ToolResult"])]
    assert turn.meta["input"][0]["type"] == "function_call"
    fails("not found", [{"id": "msg_unknown"}], code="item_not_found")


def test_fields() -> None:
    turn = parse(max_output_tokens=1, temperature=1.5, store=False, metadata={"a": "b"}, stream=True, top_logprobs=2,
                 include=["reasoning.encrypted_content"], reasoning={"effort": "none"}, truncation="auto",
                 text={"format": {"type": "json_schema", "name": "A", "schema": {"type": "object"}}, "verbosity": "low"})
    assert turn.max_tokens == 1 and turn.sampling.temperature == 1.5 and turn.thinking is False and turn.top_logprobs == 2
    assert turn.format.kind == "json_schema" and turn.meta["encrypted"] and not turn.meta["store"] and parse().meta["store"]
    echo = turn.meta["echo"]
    assert echo["metadata"] == {"a": "b"} and echo["text"]["verbosity"] == "low" and echo["truncation"] == "disabled"
    assert parse(include=["message.output_text.logprobs"]).top_logprobs == 0 and parse().top_logprobs is None
    fails("background: is not supported", background=True)
    fails("conversation: is not supported", conversation="c")
    fails("truncation: must be one of", truncation="middle")
    fails(r"metadata.a: must be a string", metadata={"a": 1})


def test_input_tokens() -> None:
    assert RESPONSES.parse_count({}).messages == ()
    assert RESPONSES.parse_count({"input": "x", "instructions": "i"}).messages == parse("x", instructions="i").messages
    assert RESPONSES.count_body(3) == {"object": "response.input_tokens", "input_tokens": 3}


def test_input_items_are_completed_and_listed_in_pages() -> None:
    turn = parse([{"role": "user", "content": "q"}, {"type": "function_call_output", "call_id": "c", "output": "o"},
                  {"role": "assistant", "content": "a"},
                  {"type": "message", "id": "msg_x", "role": "user", "content": [{"type": "input_text", "text": "z"}]}])
    items = input_items(turn, ident())
    assert all(i["id"] and i["type"] for i in items) and items[3]["id"] == "msg_x"
    assert items[0]["content"] == [{"type": "input_text", "text": "q"}] and items[2]["content"][0]["type"] == "output_text"
    page = list_items(items, {"limit": "3"})
    assert [i["id"] for i in page["data"]] == [i["id"] for i in items[:0:-1]] and page["has_more"]
    rest = list_items(items, {"after": page["last_id"]})
    assert [i["id"] for i in rest["data"]] == [items[0]["id"]] and not rest["has_more"]
    assert list_items(items, {"order": "asc"})["first_id"] == items[0]["id"]
    assert list_items([], {})["data"] == []
    for bad in ({"limit": "0"}, {"limit": "101"}, {"limit": "x"}, {"limit": "²"}, {"order": "up"}, {"after": "nope"}):
        with pytest.raises(MiladError):
            list_items(items, bad)
    assert deleted_body("resp_1") == {"id": "resp_1", "object": "response", "deleted": True}

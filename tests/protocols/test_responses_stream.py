"""Responses, the way out: a state machine over the events, the official SDK's types and accumulation, plain = stream."""

from __future__ import annotations

import json
import random
from functools import lru_cache
from typing import Any

import pytest

from milad.errors import MiladError
from milad.events import BlockEnd, BlockStart, Delta, Failure, Finish, Started, TokenLogprob, Usage
from protocols.support import PROTOCOLS, frames, generation, ident, openai_client
from protocols.test_responses import PATCH, SPACE, TOOL

RESPONSES = PROTOCOLS["responses"]
NAMES = ("get_time", "patch", "spawn", "agents__get_time")
LAST = ("response.completed", "response.incomplete", "response.failed")


def parse(**more: Any) -> Any:
    return RESPONSES.parse({"input": "hi", "tools": [TOOL, PATCH, SPACE], **more})


class Machine:
    """Folds a stream by what the SDK's event types say, and asserts their order, indices and ids."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self.open: dict[str, Any] | None = None
        self.part: dict[str, Any] | None = None
        self.final: dict[str, Any] | None = None
        self.n = 0
        self.begun = self.whole = False                          # whole: the open item's text or arguments are done

    def take(self, name: str, event: dict[str, Any]) -> None:
        kind = event["type"]
        assert name == kind and event["sequence_number"] == self.n and self.final is None
        self.n += 1
        if kind == "response.created":
            assert self.n == 1 and event["response"]["status"] == "in_progress" and event["response"]["output"] == []
            self.id = event["response"]["id"]
        elif kind == "response.in_progress":
            assert event["response"]["id"] == self.id and event["response"]["status"] == "in_progress"
            self.begun = True
        elif kind in LAST:
            self.finish(kind, event["response"])
        else:
            assert self.begun and event["output_index"] == len(self.items) - (0 if kind.endswith("item.added") else 1)
            if kind.endswith((".delta", "_text.done", "arguments.done", "input.done")):
                assert not self.whole
                self.whole = kind.endswith(".done")
            getattr(self, kind[len("response."):].replace(".", "_"))(event)

    def finish(self, kind: str, response: dict[str, Any]) -> None:
        assert response["id"] == self.id and response["status"] == kind[len("response."):]
        assert (response["incomplete_details"] is not None) == (kind == "response.incomplete")
        assert (response["error"] is not None) == (kind == "response.failed")
        if kind != "response.failed":
            assert self.open is None
        assert response["output"] == self.items
        self.final = response

    def output_item_added(self, event: dict[str, Any]) -> None:
        assert self.open is None and event["item"]["status"] == "in_progress" and event["item"]["id"]
        self.items.append(json.loads(json.dumps(event["item"])))
        self.whole = False
        self.open = self.items[-1]

    def inside(self, event: dict[str, Any], *kinds: str) -> dict[str, Any]:
        assert self.open is not None and event["item_id"] == self.open["id"] and self.open["type"] in kinds
        return self.open

    def content_part_added(self, event: dict[str, Any]) -> None:
        item = self.inside(event, "message", "reasoning")
        assert event["content_index"] == len(item["content"]) and self.part is None and event["part"]["text"] == ""
        item["content"].append(json.loads(json.dumps(event["part"])))
        self.part = item["content"][-1]

    def text(self, event: dict[str, Any], kind: str) -> dict[str, Any]:
        assert self.part is not None and event["content_index"] == 0 and self.inside(event, kind)
        return self.part

    def output_text_delta(self, event: dict[str, Any]) -> None:
        part = self.text(event, "message")
        part["text"] += event["delta"]
        part["logprobs"] += event["logprobs"]

    def output_text_done(self, event: dict[str, Any]) -> None:
        part = self.text(event, "message")
        assert (event["text"], event["logprobs"]) == (part["text"], part["logprobs"])

    def reasoning_text_delta(self, event: dict[str, Any]) -> None:
        self.text(event, "reasoning")["text"] += event["delta"]

    def reasoning_text_done(self, event: dict[str, Any]) -> None:
        assert self.text(event, "reasoning")["text"] == event["text"]

    def content_part_done(self, event: dict[str, Any]) -> None:
        assert self.whole and event["content_index"] == 0 and event["part"] == self.part and self.inside(event, "message", "reasoning")
        self.part = None

    def function_call_arguments_delta(self, event: dict[str, Any]) -> None:
        self.inside(event, "function_call")["arguments"] += event["delta"]

    def function_call_arguments_done(self, event: dict[str, Any]) -> None:
        item = self.inside(event, "function_call")
        assert event["arguments"] == item["arguments"] and event["name"] == item["name"]

    def custom_tool_call_input_delta(self, event: dict[str, Any]) -> None:
        self.inside(event, "custom_tool_call")["input"] += event["delta"]

    def custom_tool_call_input_done(self, event: dict[str, Any]) -> None:
        assert event["input"] == self.inside(event, "custom_tool_call")["input"]

    def output_item_done(self, event: dict[str, Any]) -> None:
        assert self.open is not None and self.part is None and self.whole
        assert event["item"]["status"] in ("completed", "incomplete")
        self.open["status"] = event["item"]["status"]
        if self.open["type"] == "reasoning" and "encrypted_content" in event["item"]:
            assert event["item"]["encrypted_content"]
            self.open["encrypted_content"] = event["item"]["encrypted_content"]
        assert event["item"] == self.open
        if self.open["type"] == "message":
            assert all(p["annotations"] == [] for p in self.open["content"])
        if self.open["type"] == "reasoning":
            assert self.open["summary"] == []
        self.open = None


@lru_cache
def event_type() -> Any:
    from openai.types.responses import ResponseStreamEvent
    from pydantic import TypeAdapter
    return TypeAdapter(ResponseStreamEvent)


@pytest.mark.parametrize("seed", range(80))
def test_the_machine_folds_the_stream_to_the_plain_body(seed: int) -> None:
    rng = random.Random(seed)
    turn = parse(include=["reasoning.encrypted_content", "message.output_text.logprobs"] if seed % 2 else [])
    encoder = RESPONSES.encoder(turn, ident("resp_"))
    stream = frames(encoder, [(0, e) for e in generation(rng, tools=NAMES, logprobs=bool(seed % 2))], rng)
    machine, adapter = Machine(), event_type()
    for name, event in stream:
        machine.take(name, event)
        read = adapter.validate_python(event)                    # every field that the SDK's type requires, with its type
        assert read.type == name
    body = json.loads(json.dumps(encoder.body(), allow_nan=False))
    assert machine.final == body
    reason = encoder.folds[0].finish.reason
    assert body["status"] == ("incomplete" if reason in ("length", "context") else "completed")
    ids = [i["id"] for i in body["output"]]
    assert len(set(ids)) == len(ids)
    prefix = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_", "custom_tool_call": "ctc_"}
    assert all(i["id"].startswith(prefix[i["type"]]) for i in body["output"])


def test_the_machine_refuses_what_it_should() -> None:
    """Dropping, doubling or swapping events, and changing an id or an index, is noticed."""
    rng, stream = random.Random(5), []
    while len(stream) <= 12:                                     # long enough that there is something to break
        stream = frames(RESPONSES.encoder(parse(), ident()), [(0, e) for e in generation(rng, tools=NAMES, reason="stop")])

    def accepts(events: list[Any]) -> bool:
        machine = Machine()
        try:
            for i, (name, event) in enumerate(events):
                machine.take(name, {**event, "sequence_number": i})
        except (AssertionError, AttributeError, KeyError, IndexError, TypeError):
            return False
        return machine.final is not None

    assert accepts(stream)
    for i in range(len(stream) - 1):
        if stream[i][0] not in ("response.in_progress",):
            assert not accepts(stream[:i] + stream[i + 1:]), stream[i]
        if stream[i][0] != stream[i + 1][0]:
            assert not accepts(stream[:i] + [stream[i + 1], stream[i]] + stream[i + 2:])
        for key, value in (("output_index", 9), ("item_id", "x"), ("content_index", 3)):
            if key in stream[i][1]:
                assert not accepts(stream[:i] + [(stream[i][0], {**stream[i][1], key: value})] + stream[i + 1:])


@pytest.mark.parametrize("seed", range(25))
def test_the_sdk_accumulates_the_same(seed: int) -> None:
    rng = random.Random(seed)
    encoder = RESPONSES.encoder(parse(), ident("resp_"))
    stream = frames(encoder, [(0, e) for e in generation(rng, tools=NAMES, reason="stop")], rng)
    body = encoder.body()
    client = openai_client(lambda b: stream if b.get("stream") else body)
    plain = client.responses.create(model="m", input="hi")
    with client.responses.stream(model="m", input="hi") as helper:
        final = helper.get_final_response()
    assert plain.output_text == final.output_text == encoder.folds[0].text()
    assert [i.to_dict(exclude_unset=True) for i in plain.output] == [
        {k: v for k, v in i.to_dict(exclude_unset=True).items() if k not in ("parsed_arguments",)} | (
            {"content": [{k: v for k, v in c.items() if k != "parsed"} for c in i.to_dict(exclude_unset=True)["content"]]}
            if i.type == "message" else {}) for i in final.output]
    assert plain.usage.total_tokens == final.usage.total_tokens


def run(turn: Any, *events: Any) -> tuple[Any, list[Any]]:
    encoder = RESPONSES.encoder(turn, ident("resp_"))
    return encoder, frames(encoder, [(0, e) for e in events])


def test_namespaces_go_back() -> None:
    encoder, stream = run(parse(), Started(Usage(2)), BlockStart(0, "tool_call", "ab", "agents__get_time"), BlockEnd(0),
                          Finish("tool_calls", Usage(2, 0, 1)))
    item = encoder.body()["output"][0]
    assert (item["name"], item["namespace"], item["call_id"], item["arguments"]) == ("get_time", "agents", "call_ab", "{}")
    assert stream[2][1]["item"]["namespace"] == "agents" and stream[2][1]["item"]["arguments"] == ""


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_a_custom_call_streams_raw_text(size: int) -> None:
    text = '*** Begin\n+"quoted" \\ é 🎉\t'
    for ascii_only in (True, False):
        arguments = json.dumps({"input": text}, ensure_ascii=ascii_only)
        pieces = [arguments[i:i + size] for i in range(0, len(arguments), size)]
        encoder, stream = run(parse(), Started(Usage(2)), BlockStart(0, "tool_call", "ab", "patch"),
                              *(Delta(0, p) for p in pieces), BlockEnd(0), Finish("tool_calls", Usage(2, 0, 1)))
        deltas = [e["delta"] for n, e in stream if n == "response.custom_tool_call_input.delta"]
        assert "".join(deltas) == text == encoder.body()["output"][0]["input"]
        assert size > 3 or len(deltas) > 5


def test_a_cut_answer_is_incomplete() -> None:
    encoder, stream = run(parse(), Started(Usage(2)), BlockStart(0, "tool_call", "ab", "get_time"), Delta(0, '{"a'),
                          BlockEnd(0, complete=False), Finish("length", Usage(2, 0, 1)))
    assert stream[-1][0] == "response.incomplete"
    body = encoder.body()
    assert body["incomplete_details"] == {"reason": "max_output_tokens"} and body["output"][0]["status"] == "incomplete"


def test_a_fault_is_response_failed() -> None:
    encoder, stream = run(parse(), Started(Usage(2)), BlockStart(0, "text"), Delta(0, "half"),
                          Failure(MiladError("internal", "engine fault")))
    assert stream[-1][0] == "response.failed"
    response = stream[-1][1]["response"]
    assert response["error"] == {"code": "server_error", "message": "engine fault"}
    assert response["output"][0]["content"][0]["text"] == "half" and response["output"][0]["status"] == "incomplete"
    early = RESPONSES.encoder(parse(), ident())
    assert [n for n, _ in early.failure(MiladError("overloaded", "x"))] == ["response.created", "response.in_progress",
                                                                             "response.failed"]


def test_keepalive_before_the_start_opens_the_stream_once() -> None:
    encoder = RESPONSES.encoder(parse(), ident())
    stream = encoder.keepalive() + encoder.keepalive() + encoder.event(0, Started(Usage(1)))
    assert [n for n, _ in stream] == ["response.created", "response.in_progress", "response.in_progress"]
    assert [e["sequence_number"] for _, e in stream] == [0, 1, 2]


def test_logprobs_of_tokens_without_text_are_not_lost() -> None:
    turn = parse(include=["message.output_text.logprobs"])
    encoder, stream = run(turn, Started(Usage(1)), BlockStart(0, "text"), Delta(0, "", (TokenLogprob(b"\xc3", -1.0),)),
                          Delta(0, "é", (TokenLogprob(b"\xa9", -2.0),)), BlockEnd(0), Finish("stop", Usage(1, 0, 2)))
    machine = Machine()
    for name, event in stream:
        machine.take(name, event)
    assert len(machine.items[0]["content"][0]["logprobs"]) == 2

"""The four APIs from the outside: recorded requests and the official SDKs against a daemon that plays a script."""

from __future__ import annotations

import json
from typing import Any

import pytest

from protocols.support import cases, protocol_of
from protocols.test_hostile import BASE, FIELDS, SHARED, SHALLOW

CALL = '<tool_call>\n{"name": "get_time", "arguments": {"zone": "UTC"}}\n</tool_call>'
PATCH = '<tool_call>\n{"name": "patch", "arguments": {"input": "*** Begin\\n+\\"é\\""}}\n</tool_call>'
SCRIPT: list[dict[str, Any]] = [
    {"output": f"Let me look. {CALL}", "when": {"last": "time"}},
    {"output": CALL + CALL.replace("UTC", "CET"), "when": {"last": "two"}},
    {"output": PATCH, "when": {"last": "patch"}, "split": "byte"},
    {"output": "It is noon. 日本🎉", "when": {"last": "noon"}},
    {"output": "Hello, wörld 🎉", "when": {"last": "^(?!(.|\\n)*(time|two|patch|noon))"}},  # lines take turns where several match
]
PARAMETERS = {"type": "object", "properties": {"zone": {"type": "string"}}}
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions", "responses": "/v1/responses",
         "messages": "/v1/messages"}


@pytest.fixture(scope="module")
def scripted(start: Any) -> Any:
    return start(SCRIPT, ("--tools", "on", "--ctx", "65536", "--parallel", "2"))


@pytest.fixture(scope="module")
def small(start: Any) -> Any:
    return start(SCRIPT, ("--ctx", "256"))


@pytest.fixture(scope="module")
def oai(scripted: Any) -> Any:
    import openai
    return openai.OpenAI(api_key="x", base_url=scripted.url + "/v1", max_retries=0)


@pytest.fixture(scope="module")
def claude(scripted: Any) -> Any:
    import anthropic
    return anthropic.Anthropic(api_key="x", base_url=scripted.url, max_retries=0)


@pytest.mark.parametrize("name", [n for n, c in cases() if c["body"] is not None])
def test_recorded_requests_get_an_answer(scripted: Any, name: str) -> None:
    case = dict(cases())[name]
    streams = (False,) if "count_tokens" in case["path"] else (False, True)
    for stream in streams:
        headers = {k: v for k, v in case["headers"] if k.lower() in ("authorization", "anthropic-version", "accept")}
        status, _, body = scripted.request(case["method"], case["path"], {**case["body"], "stream": stream}, headers)
        assert status == 200, body[:500]


@pytest.mark.parametrize("protocol", PATHS)
def test_no_value_of_any_field_is_a_5xx(scripted: Any, protocol: str) -> None:
    for field in (*FIELDS[protocol], *SHARED):
        for value in SHALLOW:
            if field in ("max_tokens", "stream") and value is True:
                continue
            data = json.dumps({**BASE[protocol], "max_tokens": 5, "max_output_tokens": 5, field: value}).encode()
            status, _, body = scripted.request("POST", PATHS[protocol], data)
            assert 200 <= status < 500, (field, value, body[:300])


def test_chat_tool_loop(oai: Any) -> None:
    tools: Any = [{"type": "function", "function": {"name": "get_time", "parameters": PARAMETERS}}]
    messages: list[Any] = [{"role": "user", "content": "what time is it?"}]
    with oai.chat.completions.stream(model="m", messages=messages, tools=tools) as stream:
        streamed = stream.get_final_completion().choices[0]
    plain = oai.chat.completions.create(model="m", messages=messages, tools=tools).choices[0]
    assert plain.finish_reason == streamed.finish_reason == "tool_calls" and plain.message.content == streamed.message.content
    call = plain.message.tool_calls[0]
    assert call.function.name == "get_time" and json.loads(call.function.arguments) == {"zone": "UTC"}
    assert streamed.message.tool_calls[0].function.arguments == call.function.arguments
    assert call.id.startswith("call_") and call.id != streamed.message.tool_calls[0].id
    messages += [plain.message, {"role": "tool", "tool_call_id": call.id, "content": "noon"}]
    assert oai.chat.completions.create(model="m", messages=messages, tools=tools).choices[0].message.content == "It is noon. 日本🎉"


def test_two_calls_and_at_most_one(oai: Any) -> None:
    tools: Any = [{"type": "function", "function": {"name": "get_time", "parameters": PARAMETERS}}]
    ask = lambda **more: oai.chat.completions.create(  # noqa: E731
        model="m", messages=[{"role": "user", "content": "two"}], tools=tools, **more).choices[0].message.tool_calls
    assert [json.loads(c.function.arguments)["zone"] for c in ask()] == ["UTC", "CET"] and len({c.id for c in ask()}) == 2
    assert len(ask(parallel_tool_calls=False)) == 1
    assert not ask(tool_choice="none")


def test_several_choices_and_prompts(oai: Any) -> None:
    chunks = list(oai.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}], n=3, stream=True,
                                              stream_options={"include_usage": True}))
    texts = ["".join(c.choices[0].delta.content or "" for c in chunks if c.choices and c.choices[0].index == i) for i in range(3)]
    assert texts == ["Hello, wörld 🎉"] * 3 and chunks[-1].usage.completion_tokens % 3 == 0
    done = oai.completions.create(model="m", prompt=["noon", "y"], n=2, max_tokens=40)
    assert [c.text for c in done.choices] == ["It is noon. 日本🎉"] * 2 + ["Hello, wörld 🎉"] * 2
    assert [c.index for c in done.choices] == [0, 1, 2, 3]
    echoed = oai.completions.create(model="m", prompt="noon", echo=True, max_tokens=3, logprobs=1).choices[0]
    assert echoed.text.startswith("noon") and echoed.finish_reason == "length"
    assert echoed.logprobs.token_logprobs[0] is None and len(echoed.logprobs.tokens) == len(echoed.logprobs.text_offset)


def test_messages_tool_loop_and_counting(claude: Any) -> None:
    tools: Any = [{"name": "get_time", "input_schema": PARAMETERS}]
    messages: list[Any] = [{"role": "user", "content": "what time is it?"}]
    asked: Any = {"model": "m", "messages": messages, "tools": tools, "system": "Be short."}
    with claude.messages.stream(max_tokens=100, **asked) as stream:
        streamed = stream.get_final_message()
    plain = claude.messages.create(max_tokens=100, **asked)
    assert plain.stop_reason == streamed.stop_reason == "tool_use"
    assert [b.type for b in plain.content] == [b.type for b in streamed.content] == ["text", "tool_use"]
    use = plain.content[1]
    assert use.input == streamed.content[1].input == {"zone": "UTC"} and use.id.startswith("toolu_")
    counted = claude.messages.count_tokens(**asked).input_tokens
    for usage in (plain.usage, streamed.usage):
        assert usage.input_tokens + usage.cache_read_input_tokens == counted
    messages += [{"role": "assistant", "content": plain.content},
                 {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "noon"}]}]
    assert claude.messages.create(max_tokens=100, **asked).content[0].text == "It is noon. 日本🎉"


def test_responses_tool_loop_by_previous_response(oai: Any) -> None:
    tools: Any = [{"type": "function", "name": "get_time", "parameters": PARAMETERS, "strict": False}]
    first = oai.responses.create(model="m", input="what time is it?", tools=tools)
    call = first.output[1]
    assert [i.type for i in first.output] == ["message", "function_call"] and call.arguments == '{"zone": "UTC"}'
    with oai.responses.stream(model="m", previous_response_id=first.id, tools=tools, input=[
            {"type": "function_call_output", "call_id": call.call_id, "output": "noon"}]) as stream:
        second = stream.get_final_response()
    assert second.output_text == "It is noon. 日本🎉" and second.previous_response_id == first.id
    assert second.usage.input_tokens > first.usage.input_tokens
    again = oai.responses.retrieve(second.id)
    assert again.output_text == second.output_text and again.status == "completed"
    listed = oai.responses.input_items.list(second.id, order="asc").data
    assert [i.type for i in listed] == ["function_call_output"]
    counted = oai.responses.input_tokens.count(model="m", input="what time is it?", tools=tools)
    assert counted.input_tokens == first.usage.input_tokens
    oai.responses.delete(first.id)
    import openai
    with pytest.raises(openai.NotFoundError):
        oai.responses.retrieve(first.id)
    for gone in (first.id, "resp_unknown"):
        with pytest.raises(openai.BadRequestError) as e:
            oai.responses.create(model="m", input="x", previous_response_id=gone)
        assert e.value.code == "previous_response_not_found"
    with pytest.raises(openai.BadRequestError):
        oai.responses.cancel(second.id)


def test_store_false_is_honoured(oai: Any) -> None:
    import openai
    made = oai.responses.create(model="m", input="x", store=False)
    assert made.store is False
    with pytest.raises(openai.NotFoundError):
        oai.responses.retrieve(made.id)


def test_a_custom_tool_streams_its_raw_input(oai: Any) -> None:
    tools: Any = [{"type": "custom", "name": "patch"}]
    events = list(oai.responses.create(model="m", input="patch", tools=tools, stream=True))
    deltas = [e.delta for e in events if e.type == "response.custom_tool_call_input.delta"]
    item = events[-1].response.output[0]
    assert "".join(deltas) == item.input == '*** Begin\n+"é"' and item.type == "custom_tool_call" and len(deltas) > 3
    follow = [{"role": "user", "content": "patch"}, item.to_dict(),
              {"type": "custom_tool_call_output", "call_id": item.call_id, "output": "noon"}]
    assert oai.responses.create(model="m", input=follow, tools=tools).output_text == "It is noon. 日本🎉"


@pytest.mark.parametrize("stream", [False, True])
def test_an_overflow_is_a_400_before_the_stream(small: Any, stream: bool) -> None:
    long = "word " * 2000
    bodies = {"chat": {"messages": [{"role": "user", "content": long}]}, "completions": {"prompt": long},
              "responses": {"input": long}, "messages": {"messages": [{"role": "user", "content": long}], "max_tokens": 5}}
    for protocol, body in bodies.items():
        status, headers, data = small.request("POST", PATHS[protocol], {**body, "stream": stream})
        error = json.loads(data)["error"]
        assert status == 400 and headers["content-type"].startswith("application/json")
        assert headers["x-should-retry"] == "false" and headers.get("x-request-id") or headers.get("request-id")
        if protocol == "messages":
            assert error["type"] == "invalid_request_error" and error["message"].startswith("prompt is too long: ")
            assert error["message"].endswith(" tokens > 256 maximum")
        else:
            assert error["code"] == "context_length_exceeded"
            assert error["message"].startswith("This model's maximum context length is 256 tokens. However, your request has ")


def test_every_recorded_path_has_a_protocol() -> None:
    assert {protocol_of(c["path"]) for _, c in cases() if c["body"] is not None} == set(PATHS)


@pytest.mark.parametrize("api", ["responses", "chat"])
@pytest.mark.parametrize("streamed", [False, True])
def test_the_agents_sdk_runs_its_tool_loop(scripted: Any, api: str, streamed: bool) -> None:
    agents = pytest.importorskip("agents", reason="openai-agents is not installed")
    import asyncio

    import openai
    seen: list[str] = []

    @agents.function_tool
    def get_time(zone: str) -> str:
        """The time."""
        seen.append(zone)
        return "noon"

    async def run() -> Any:
        agents.set_tracing_disabled(True)
        client = openai.AsyncOpenAI(api_key="x", base_url=scripted.url + "/v1", max_retries=0)
        kind = agents.OpenAIResponsesModel if api == "responses" else agents.OpenAIChatCompletionsModel
        agent = agents.Agent(name="a", instructions="Be short.", tools=[get_time], model=kind(model="m", openai_client=client))
        if not streamed:
            return (await agents.Runner.run(agent, "what time is it?")).final_output
        result = agents.Runner.run_streamed(agent, "what time is it?")
        async for _ in result.stream_events():
            pass
        return result.final_output

    assert asyncio.run(run()) == "It is noon. 日本🎉" and seen == ["UTC"]

"""Constrained output of the real default model, from the outside: a hot model keeps every contract."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable

import jsonschema
import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PERSON = {"type": "object", "properties": {
    "name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
    "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 2}},
    "required": ["name", "age", "tags"], "additionalProperties": False}
PING = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["n"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "add_person", "parameters": PERSON}},
         {"type": "function", "function": {"name": "ping", "parameters": PING}}]
SCHEMAS = {"add_person": PERSON, "ping": PING}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}
HOT = {"messages": [{"role": "user", "content": "Invent a person."}], "temperature": 1.5, "top_p": 1, "top_k": 0, "max_tokens": 300}


@pytest.fixture(scope="module")
def hot(start: Any) -> Any:
    pytest.importorskip("llguidance")
    return start(args=("--parallel", "8", "--ctx", "1024"))


def each_seed(daemon: Any, body: dict[str, Any], check: Callable[[dict[str, Any]], None], n: int = 50) -> None:
    def one(seed: int) -> dict[str, Any]:
        status, answer = daemon.json("POST", "/v1/chat/completions", {**body, "seed": seed})
        assert status == 200, answer
        return answer

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(one, range(n)))
    for answer in answers:
        check(answer)
    assert len({json.dumps(a["choices"][0]["message"].get("content") or a["choices"][0]["message"]["tool_calls"][0]["function"])
                for a in answers}) > n // 2


def test_fifty_hot_answers_are_valid(hot: Any) -> None:
    def check(answer: dict[str, Any]) -> None:
        choice = answer["choices"][0]
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(choice["message"]["content"]), PERSON)

    each_seed(hot, {**HOT, "response_format": FORMAT}, check)


@pytest.mark.parametrize("choice", ["required", "named"])
def test_fifty_hot_calls_are_valid(hot: Any, choice: str) -> None:
    named = {"type": "function", "function": {"name": "add_person"}}

    def check(answer: dict[str, Any]) -> None:
        assert answer["choices"][0]["finish_reason"] == "tool_calls"
        calls = [c["function"] for c in answer["choices"][0]["message"]["tool_calls"]]
        for call in calls:
            jsonschema.validate(json.loads(call["arguments"]), SCHEMAS[call["name"]])
        assert calls and (choice != "named" or [c["name"] for c in calls] == ["add_person"])

    each_seed(hot, {**HOT, "tools": TOOLS, "tool_choice": "required" if choice == "required" else named,
                    "parallel_tool_calls": False}, check)


def test_everything_at_once(start: Any) -> None:
    """A grammar with drafts, too little memory for all (preemption), several choices, stop strings and logprobs."""
    pytest.importorskip("llguidance")
    items = {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 25, "maxItems": 25}
    body = {**HOT, "n": 3, "logprobs": True, "top_logprobs": 2, "temperature": 1.0, "stop": ["@@"], "max_tokens": 400,
            "response_format": {"type": "json_schema", "json_schema": {"name": "l", "schema": {
                "type": "object", "properties": {"l": items}, "required": ["l"], "additionalProperties": False}}}}
    answers = []
    for args in (("--speculate", "--kv-memory", "7M"), ("--no-speculate",)):
        daemon = start(args=("--parallel", "12", "--ctx", "512", "--kv-type", "q8_0", *args))
        with ThreadPoolExecutor(4) as pool:
            answers.append(list(pool.map(lambda seed: daemon.json("POST", "/v1/chat/completions", {**body, "seed": seed}), range(3))))
        counts = dict(line.split() for line in daemon.request("GET", "/metrics")[2].decode().splitlines() if line.startswith("milad_"))
        if "--speculate" in args:
            assert float(counts["milad_preemptions_total"]) > 0
    for (status, answer), (_, plain) in zip(*answers):
        assert status == 200, answer
        for choice, same in zip(answer["choices"], plain["choices"]):
            text = choice["message"]["content"]
            assert choice["finish_reason"] == "stop" and len(json.loads(text)["l"]) == 25
            said = choice["logprobs"]["content"]
            assert b"".join(bytes(t["bytes"]) for t in said).decode() == text and all(1 <= len(t["top_logprobs"]) <= 2 for t in said)
            assert text == same["message"]["content"]      # drafts and preemption change nothing
    first = answers[0][0][1]["choices"][0]["message"]["content"]
    _, cut = daemon.json("POST", "/v1/chat/completions", {**body, "seed": 0, "n": 1, "stop": ['"blue"']})
    assert cut["choices"][0]["message"]["content"] == first.partition('"blue"')[0] and cut["choices"][0]["finish_reason"] == "stop"


def test_every_protocol_says_what_it_can_not_hold(hot: Any) -> None:
    bad = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=a)"}}}
    asked = {"role": "user", "content": "x"}
    for path, body, param in (
            ("/v1/chat/completions", {"messages": [asked], "response_format": {"type": "json_schema", "json_schema": {
                "name": "n", "schema": bad}}}, "response_format"),
            ("/v1/responses", {"input": "x", "text": {"format": {"type": "json_schema", "name": "n", "schema": bad}}}, "text.format"),
            ("/v1/messages", {"messages": [asked], "max_tokens": 9, "output_config": {"format": {"type": "json_schema", "schema": bad}}},
             "output_config.format")):
        for stream in (False, True):
            status, headers, data = hot.request("POST", path, {**body, "stream": stream})
            assert status == 400 and headers["x-should-retry"] == "false" and b"can't be followed" in data, data
            assert json.loads(data)["error"].get("param", param) == param
    relaxed = {"messages": [asked], "max_tokens": 60, "tools": [{"type": "function", "function": {"name": "f", "parameters": bad}}],
               "tool_choice": "required"}
    status, answer = hot.json("POST", "/v1/chat/completions", relaxed)
    assert status == 200 and "schema of tool f is relaxed" in hot.log


def test_without_the_library(start: Any, tmp_path: Path) -> None:
    """Answers go on as ever; what would need it is a 400 that names it."""
    (tmp_path / "llguidance").mkdir()
    (tmp_path / "llguidance" / "__init__.py").write_text("raise ImportError('not here')\n")
    daemon = start([{"output": "Hi"}], ("--tools", "on"), env={"PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))})
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
    assert daemon.json("POST", "/v1/chat/completions", {**asked, "tools": TOOLS})[0] == 200
    for more, param in (({"response_format": {"type": "json_object"}}, "response_format"), ({"tools": TOOLS, "tool_choice": "required"},
                                                                                           "tool_choice")):
        for stream in (False, True):
            status, answer = daemon.json("POST", "/v1/chat/completions", {**asked, **more, "stream": stream})
            error = answer["error"]
            assert status == 400 and "milad[grammar]" in error["message"] and error["param"] == param, answer
            assert error["code"] == "grammar_unavailable"
    status, answer = daemon.json("POST", "/v1/messages", {**asked, "max_tokens": 9, "tools": [{"name": "f", "input_schema": PING}],
                                                          "tool_choice": {"type": "any"}})
    assert status == 400 and "milad[grammar]" in answer["error"]["message"]


def test_the_sdks_parse_what_they_asked_for(hot: Any) -> None:
    """Structured outputs of the official clients, streamed and plain, and the agents SDK's output_type beside a tool."""
    import asyncio
    from typing import Literal, Optional, Union

    import anthropic
    import openai
    import pydantic

    class Closed(pydantic.BaseModel):
        """Past flake: open to more properties, a small model goes on until max_tokens cuts it."""
        model_config = pydantic.ConfigDict(extra="forbid")

    class Cat(Closed):
        kind: Literal["cat"]
        lives: Literal[7, 9]

    class Dog(Closed):
        kind: Literal["dog"]
        good: bool

    class Pet(Closed):
        pet: Union[Cat, Dog]
        colour: Literal["red", "schwarz-weiß 🐈", "\"quoted\""]
        owner: Optional[Literal["me", "you"]]

    oai = openai.OpenAI(api_key="x", base_url=hot.url + "/v1", max_retries=0)
    claude = anthropic.Anthropic(api_key="x", base_url=hot.url, max_retries=0)
    asked: Any = [{"role": "user", "content": "Invent a pet."}]
    seen = [oai.chat.completions.parse(model="m", messages=asked, response_format=Pet, temperature=1.5).choices[0].message.parsed,
            oai.responses.parse(model="m", input="A pet.", text_format=Pet, temperature=1.5).output_parsed,
            claude.messages.parse(model="m", max_tokens=200, messages=asked, output_format=Pet).parsed_output]
    with oai.chat.completions.stream(model="m", messages=asked, response_format=Pet) as stream:
        seen.append(stream.get_final_completion().choices[0].message.parsed)
    with oai.responses.stream(model="m", input="A pet.", text_format=Pet) as stream:
        seen.append(stream.get_final_response().output_parsed)
    with claude.messages.stream(model="m", max_tokens=200, messages=asked, output_format=Pet) as stream:
        seen.append(stream.get_final_message().parsed_output)
    call = oai.chat.completions.parse(model="m", messages=asked, tools=[openai.pydantic_function_tool(Pet)], tool_choice="required",
                                      parallel_tool_calls=False).choices[0].message.tool_calls[0]
    seen.append(call.function.parsed_arguments)
    used = claude.messages.create(model="m", max_tokens=200, messages=asked, tool_choice={"type": "tool", "name": "pet",
                                  "disable_parallel_tool_use": True}, tools=[{"name": "pet", "input_schema": Pet.model_json_schema()}])
    seen.append(Pet.model_validate(used.content[0].input))
    assert used.stop_reason == "tool_use" and len(seen) == 8 and all(isinstance(p, Pet) for p in seen)

    agents = pytest.importorskip("agents", reason="openai-agents is not installed")

    @agents.function_tool
    def look(name: str) -> str:
        """Looks."""
        return name

    async def run(kind: Any) -> Any:
        agents.set_tracing_disabled(True)
        client = openai.AsyncOpenAI(api_key="x", base_url=hot.url + "/v1", max_retries=0)
        agent = agents.Agent(name="a", instructions="Be short.", tools=[look], output_type=Pet, model=kind(model="m", openai_client=client))
        return (await agents.Runner.run(agent, "Invent a pet.", max_turns=3)).final_output

    for kind in (agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel):
        assert isinstance(asyncio.run(run(kind)), Pet)

"""The scripted core under the real engine: which line plays, in what pieces, at what pace, with what end."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any, Iterator

import pytest

from milad.engine.base import WAIT, Batch, Done, Fault, Request, SamplerArgs, Token
from milad.engine.loop import Engine
from milad.errors import MiladError, UsageError
from milad.scripted import ScriptedModel, open_model, read_script


class Info:
    n_vocab = 300
    eot = 257
    eos = 256


class ByteModel:
    """A vocabulary of the 256 bytes, <eos> 256, <eot> 257 and a few words."""
    info = Info()
    eog = frozenset({256, 257})
    specials = {"<eos>": 256, "<eot>": 257, "<call>": 260}
    words = {258: b"hello", 259: b" world"}

    def tokenize(self, text: Any, *, add_bos: bool = False, parse_special: bool = False) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        table = {w: t for t, w in self.words.items()}
        if parse_special:
            table.update({k.encode(): t for k, t in self.specials.items()})
        out = []
        while data:
            word = max((w for w in table if data.startswith(w)), key=len, default=None)
            out.append(table[word] if word else data[0])
            data = data[len(word) if word else 1:]
        return out

    def token_bytes(self, token: int) -> bytes:
        if token < 256:
            return bytes((token,))
        return self.words.get(token) or next((k.encode() for k, t in self.specials.items() if t == token), b"?")

    def is_control(self, token: int) -> bool:
        return token in (256, 257)

    def close(self) -> None:
        pass


def script(tmp_path: Path, *lines: Any) -> str:
    path = tmp_path / "script.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return str(path)


def model(path: str, clock: Any = time.monotonic) -> ScriptedModel:
    return ScriptedModel(ByteModel(), path, read_script(path), clock=clock)


def play(m: ScriptedModel, max_tokens: int = 100, constraint: Any = None, **begin: Any) -> list[Any]:
    """One generation through the real engine: its items."""
    context = m.context(n_blocks=8)
    engine = Engine(m, context, post=lambda f, *a: f(*a), n_ctx=128)
    items: list[Any] = []
    ended = threading.Event()

    def sink(new: list[Any]) -> None:
        items.extend(new)
        if isinstance(new[-1], (Done, Fault)):
            ended.set()

    where = {"tools": False, "path": "/v1/chat/completions", "last": "", **begin}
    engine.submit(Request([1, 2, 3], max_tokens, SamplerArgs(), frozenset({256, 257}), sink, constraint=constraint,
                          play=context.begin(**where)))
    assert ended.wait(10)
    assert engine.stop()
    return items


def text(items: list[Any]) -> bytes:
    return b"".join(i.data for i in items if isinstance(i, Token))


def test_lines_play_once_then_the_last_repeats(tmp_path: Path) -> None:
    m = model(script(tmp_path, {"output": "one"}, "", {"output": "two"}))
    assert [text(play(m)) for _ in range(4)] == [b"one", b"two", b"two", b"two"]


@pytest.mark.parametrize("when,begin,matches", [
    ({"tools": True}, {"tools": True}, True), ({"tools": True}, {"tools": False}, False),
    ({"tools": False}, {"tools": False}, True), ({"tools": None}, {"tools": True}, True),
    ({"path": "/v1/messages"}, {"path": "/v1/messages?beta=true"}, True), ({"path": "/v1/messages"}, {"path": "/messages"}, True),
    ({"path": "/messages"}, {"path": "/v1/messages"}, True), ({"path": "/v1/messages"}, {"path": "/v1/responses"}, False),
    ({"last": "b+"}, {"last": "abbc"}, True), ({"last": "^b"}, {"last": "abbc"}, False),
    ({"last": "x", "tools": True}, {"last": "x", "tools": False}, False), ({}, {}, True), (None, {}, True)])
def test_when(tmp_path: Path, when: Any, begin: Any, matches: bool) -> None:
    m = model(script(tmp_path, {"output": "specific", "when": when}))
    where = {"tools": False, "path": "/v1/completions", "last": "", **begin}
    if matches:
        assert m.begin(**where).line.output == "specific"
    else:
        with pytest.raises(MiladError) as e:
            m.begin(**where)
        assert e.value.kind == "internal" and "script.jsonl" in e.value.message


def test_repeats_the_last_that_matches_not_the_last_of_all(tmp_path: Path) -> None:
    m = model(script(tmp_path, {"output": "t1", "when": {"tools": True}}, {"output": "t2", "when": {"tools": True}},
                     {"output": "any"}))
    plain = {"path": "/v1/messages", "last": ""}
    assert [m.begin(tools=True, **plain).line.output for _ in range(5)] == ["t1", "t2", "any", "any", "any"]
    m = model(script(tmp_path, {"output": "any"}, {"output": "t", "when": {"tools": True}}))
    assert m.begin(tools=True, **plain).line.output == "any"
    assert m.begin(tools=False, **plain).line.output == "any"
    assert [m.begin(tools=True, **plain).line.output for _ in range(2)] == ["t", "t"]


def test_split_token_and_byte(tmp_path: Path) -> None:
    output = "hello world<call>é!"
    m = model(script(tmp_path, {"output": output}, {"output": output, "split": "byte"}))
    items = play(m)
    assert [i.id for i in items if isinstance(i, Token)] == [258, 259, 260, 0xC3, 0xA9, 0x21]
    assert items[-1] == Done("stop", 3, 0, 7)
    items = play(m)
    assert text(items) == output.encode()
    assert [i.data for i in items if isinstance(i, Token)] == [bytes((b,)) for b in b"hello world"] + [b"<call>"] + \
        [bytes((b,)) for b in "é!".encode()]
    assert items[-1].n_output == 16


def test_limits_and_stop_tokens_hold(tmp_path: Path) -> None:
    m = model(script(tmp_path, {"output": "abcdef"}, {"output": "abc<eot>def"}, {"output": "x" * 1000}))
    items = play(m, max_tokens=3)
    assert text(items) == b"abc" and items[-1].reason == "length"
    items = play(m)
    assert text(items) == b"abc" and items[-1] == Done("stop", 3, 0, 4)
    items = play(m, max_tokens=5000)
    assert items[-1].reason == "context" and items[-1].n_output == 125


def test_fail_after(tmp_path: Path) -> None:
    m = model(script(tmp_path, {"output": "abcdef", "fail_after": 2}, {"output": "abc", "fail_after": 0}))
    items = play(m)
    assert text(items) == b"ab" and isinstance(items[-1], Fault) and "line 1" in str(items[-1].error)
    items = play(m)
    assert text(items) == b"" and isinstance(items[-1], Fault)


def test_pace(tmp_path: Path) -> None:
    now = [100.0]
    m = model(script(tmp_path, {"output": "abc", "delay_ms": 500, "token_delay_ms": 20}), clock=lambda: now[0])
    context = m.context(n_blocks=8)
    sampler = SamplerArgs(play=context.begin(tools=False, path="/", last=""))
    batch = Batch(None, [], [sampler])              # the scripted core looks at samplers only
    batch.rows = [1, 0, 0, 0]
    got = []
    for _ in range(2000):
        out = context.step(batch)[0]
        if out.end:
            break
        if out.token == WAIT:
            assert out.due > now[0]
            now[0] = out.due
        else:
            got.append((round(now[0] - 100.0, 6), out.data))
    assert got == [(0.5, b"a"), (0.52, b"b"), (0.54, b"c")]


def test_delays_leave_others_alone_and_do_not_spin(tmp_path: Path) -> None:
    m = model(script(tmp_path, {"output": "slow", "delay_ms": 200}, {"output": "fast"}))
    context = m.context(n_blocks=8)
    engine = Engine(m, context, post=lambda f, *a: f(*a), n_ctx=128)
    order: list[str] = []
    ended = threading.Event()

    def sink(name: str) -> Any:
        def take(items: list[Any]) -> None:
            if isinstance(items[-1], Done):
                order.append(name)
                if len(order) == 2:
                    ended.set()
        return take

    for name in ("slow", "fast"):
        engine.submit(Request([1], 9, SamplerArgs(), frozenset({257}), sink(name),
                              play=context.begin(tools=False, path="/", last="")))
    assert ended.wait(10)
    assert order == ["fast", "slow"]
    assert context.stat()["n_steps"] < 30
    assert engine.stop()


class Mask:
    n_masks = n_accepted = 0

    def mask(self) -> bytes:
        self.n_masks += 1
        return bytes(40)            # allows nothing

    def accept(self, token: int) -> None:
        self.n_accepted += 1
        raise ValueError("not allowed")


def test_masks_are_built_and_not_applied(tmp_path: Path) -> None:
    mask = Mask()
    assert text(play(model(script(tmp_path, {"output": "abc"})), constraint=mask)) == b"abc"
    assert mask.n_masks == 4 and not mask.n_accepted


@pytest.mark.parametrize("line,says", [
    ("{", "line 2"), ("[]", "object"), ({}, "output"), ({"output": 5}, "output"), ({"output": "", "wenn": {}}, "wenn"),
    ({"output": "", "when": []}, "when"), ({"output": "", "when": {"tool": True}}, "when.tool"),
    ({"output": "", "when": {"tools": 1}}, "when.tools"), ({"output": "", "when": {"last": "("}}, "when.last"),
    ({"output": "", "when": {"path": 5}}, "when.path"), ({"output": "", "split": "word"}, "split"),
    ({"output": "", "delay_ms": -1}, "delay_ms"), ({"output": "", "delay_ms": "5"}, "delay_ms"),
    ({"output": "", "delay_ms": float("nan")}, "delay_ms"), ({"output": "", "token_delay_ms": True}, "token_delay_ms"),
    ({"output": "", "fail_after": 1.5}, "fail_after"), ({"output": "", "fail_after": -1}, "fail_after"), ("[" * 100000, "line 2")])
def test_bad_lines_are_named(tmp_path: Path, line: Any, says: str) -> None:
    with pytest.raises(UsageError) as e:
        read_script(script(tmp_path, {"output": "a"}, line))
    assert "line 2" in str(e.value) and says in str(e.value)


def test_bad_files(tmp_path: Path) -> None:
    for make in (lambda p: None, lambda p: p.write_bytes(b"\xff\xfe"), lambda p: p.write_text("\n \n"), lambda p: p.mkdir()):
        path = tmp_path / "bad.jsonl"
        make(path)
        with pytest.raises(UsageError) as e:
            read_script(str(path))
        assert "bad.jsonl" in str(e.value) and "\n" not in str(e.value)
        if path.is_file():
            path.unlink()


@pytest.fixture
def real(tmp_path: Path, tiny: Any, library: Path) -> Iterator[ScriptedModel]:
    from milad import capi

    m = open_model(script(tmp_path, {"output": "<think>\nhm</think>hello world<|im_end|>ignored"},
                          {"output": "héllo ☃ 12", "split": "byte"}), lambda: capi.Model(tiny(), vocab_only=True))
    yield m
    m.close()


def test_over_a_real_vocabulary(real: ScriptedModel) -> None:
    items = play(real)
    assert text(items).startswith(b"<think>\nhm</think>hello world<|im_end|>ignored"[:len(text(items))])
    items = play(real)
    assert text(items) == "héllo ☃ 12".encode() and items[-1].reason == "stop"
    assert [i.data for i in items if isinstance(i, Token)] == [bytes((b,)) for b in "héllo ☃ 12".encode()]

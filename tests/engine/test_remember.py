"""Remembered generations: prompts that come back get their own tokens, and nothing else ever changes."""

from __future__ import annotations

import random
from array import array

import pytest

from milad.conversation import Message, Text, Thinking, ToolCall
from milad.engine import remember
from milad.engine.remember import Memory, fingerprint

# tokens 1..: single letters; 100..: pieces of several; 200: the end of a turn; 201, 202: headers; 203: control, spelled "ab"
PIECES = {i: bytes((96 + i,)) for i in range(1, 27)} | {100: b"ab", 101: b"abc", 102: b"bc", 103: b"cd", 104: b"bcd", 105: b""}
CONTROL = {200: b"<end>", 201: b"<user>", 202: b"<assistant>", 203: b"ab"}
BY_TEXT = sorted((v, k) for k, v in PIECES.items() if v)


def token_bytes(t: int) -> bytes:
    return PIECES.get(t) or CONTROL.get(t, b"")


def memory() -> Memory:
    return Memory(token_bytes, CONTROL.__contains__, frozenset({200}))


def note(m: Memory, prompt: list[int], made: list[int]) -> None:
    m.note(array("i", prompt + made), len(prompt))


def test_other_tokens_of_the_same_bytes_become_the_generated_ones() -> None:
    m = memory()
    note(m, [201, 1, 202], [101, 4, 200])                               # "abcd"
    assert m.splice([201, 1, 202, 100, 103, 200, 201, 5, 202]) == [201, 1, 202, 101, 4, 200, 201, 5, 202]
    assert m.n_spliced == 1


def test_only_after_the_same_prompt() -> None:
    m = memory()
    note(m, [201, 1, 202], [101, 4, 200])
    for other in ([201, 2, 202, 100, 103, 200], [201, 1, 1, 202, 100, 103], [201, 1], [201, 1, 202], []):
        assert m.splice(other) == other


def test_turns_follow_each_other() -> None:
    m = memory()
    first = [201, 1, 202]
    note(m, first, [101, 4, 200])
    second = m.splice(first + [100, 103, 200, 201, 2, 202])
    note(m, second, [1, 102, 4, 200])
    third = m.splice(first + [100, 103, 200, 201, 2, 202] + [100, 103, 200, 201, 3, 202])
    assert third == first + [101, 4, 200, 201, 2, 202, 1, 102, 4, 200, 201, 3, 202]


def test_as_far_as_both_have_a_boundary() -> None:
    m = memory()
    note(m, [202], [1, 102, 4, 5])                                      # a bc d e
    assert m.splice([202, 100, 103, 5, 9]) == [202, 1, 102, 4, 5, 9]
    assert m.splice([202, 100, 103, 6]) == [202, 1, 102, 4, 6]          # another word follows
    assert m.splice([202, 100, 3, 200]) == [202, 1, 102, 200]
    assert m.splice([202, 100, 200]) == [202, 100, 200]                 # ends inside a generated token
    assert m.splice([202, 7, 8]) == [202, 7, 8]


def test_text_never_becomes_a_control_token_nor_the_reverse() -> None:
    m = memory()
    note(m, [202], [203, 3, 200])                                       # control, then "c"
    assert m.splice([202, 100, 3, 200]) == [202, 100, 3, 200]
    m = memory()
    note(m, [202], [100, 3, 200])
    assert m.splice([202, 203, 3, 200]) == [202, 203, 3, 200]
    m = memory()
    note(m, [202], [1, 203, 3])
    assert m.splice([202, 1, 1, 2, 3]) == [202, 1, 1, 2, 3]


def test_the_longest_of_several_generations_wins() -> None:
    m = memory()
    note(m, [202], [101, 200])
    note(m, [202], [1, 102, 4, 200])
    assert m.splice([202, 100, 103, 200]) == [202, 1, 102, 4, 200]
    assert m.splice([202, 100, 3, 200, 9]) == [202, 101, 200, 9]


def test_random_prompts_keep_their_bytes_and_control_tokens() -> None:
    r = random.Random(5)

    def tokenize(text: bytes) -> list[int]:
        out = []
        while text:
            fits = [(p, t) for p, t in BY_TEXT if text.startswith(p)]
            piece, token = r.choice(fits)
            out.append(token)
            text = text[len(piece):]
        return out

    def words() -> bytes:
        return bytes(r.choice(b"abcd") for _ in range(r.randrange(8)))

    def spelled(tokens: list[int]) -> list[object]:
        out: list[object] = [b""]
        for t in tokens:
            if t in CONTROL:
                out += [t, b""]
            else:
                out[-1] += token_bytes(t)
        return out

    n_spliced = 0
    for _ in range(400):
        m = memory()
        texts = [(words(), words()) for _ in range(4)]
        prompt: list[int] = []
        for user, answer in texts:
            source = []
            for u, a in texts[:texts.index((user, answer))]:
                source += [201, *tokenize(u), 202, *tokenize(a), 200]
            source += [201, *tokenize(user), 202]
            prompt = m.splice(source)
            assert spelled(prompt) == spelled(source)
            note(m, prompt, tokenize(answer if r.random() < 0.8 else words()) + [200])
        n_spliced += m.n_spliced
    assert n_spliced > 100


def test_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remember, "MAX_TOKENS", 100)
    m = memory()
    for i in range(50):
        note(m, [202, i], [i] * 10)
        assert m.n_tokens == sum(len(e.tokens) for es in m._entries.values() for e in es) <= 100
    assert len(m._entries) == len(m._prompts) == 10 and sum(m._lengths.values()) == 10
    for i in range(9):
        note(m, [202], [i] * 2)
    assert len(m._entries[remember._key(array("i", [202]))]) == remember.MAX_SAME
    assert m.n_tokens == sum(len(e.tokens) for es in m._entries.values() for e in es)


def call(arguments: str, name: str = "f") -> Message:
    return Message("assistant", (Text("so "), ToolCall("1", name, arguments)))


def test_fingerprints() -> None:
    same = {fingerprint(call(a)) for a in ('{"a":1,"b":[2]}', '{ "b": [2], "a": 1 }')}
    assert len(same) == 1 and None not in same
    assert fingerprint(call('{"a":1}')) != fingerprint(call('{"a":2}')) != fingerprint(call('{"a":2}', "g"))
    assert fingerprint(call("no json")) is not None
    assert fingerprint(Message("assistant", (Thinking("hm"), Text("a")))) is None
    assert fingerprint(Message("assistant")) is None


def test_a_turn_known_by_its_meaning() -> None:
    m = memory()
    print_ = fingerprint(call('{"a": 1}'))
    note(m, [201, 202], [1, 2, 3, 200])
    m.tag([201, 202], 0, print_)
    back = [201, 202, 1, 9, 2, 9, 3, 200, 201, 5, 202]                  # other bytes: the JSON was written anew
    assert m.splice(back) == back
    assert m.splice(back, [fingerprint(call('{"a": 2}'))]) == back
    assert m.splice(back, [None]) == back
    assert m.splice(back, [fingerprint(call('{"a":1}'))]) == [201, 202, 1, 2, 3, 200, 201, 5, 202]
    assert m.splice(back[:7], [print_]) == back[:7]                     # the turn has not ended there

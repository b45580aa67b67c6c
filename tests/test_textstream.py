"""Characters out of bytes and stop strings, at every split."""

import random

import pytest

from milad.textstream import StopFilter, Utf8Joiner


def splits(items, rng):
    at = 0
    while at < len(items):
        n = rng.randint(1, 4)
        yield items[at:at + n]
        at += n


def test_utf8_any_split_equals_whole():
    rng = random.Random(7)
    for _ in range(500):
        data = bytes(rng.choice([rng.randrange(256), 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x80, 65]) for _ in range(rng.randint(0, 20)))
        joiner = Utf8Joiner()
        out = "".join(joiner.feed(p) for p in splits(data, rng)) + joiner.flush()
        assert out == data.decode("utf-8", "replace")


def test_half_a_character_at_the_end_is_one_replacement():
    joiner = Utf8Joiner()
    assert joiner.feed("é".encode()[:1]) == "" and joiner.holding
    assert joiner.flush() == "\ufffd"
    assert joiner.feed(b"ok") == "ok"


def naive(text, stops):
    """The definition: the match that ends first, then the one that begins first."""
    found = [(text.find(s) + len(s), text.find(s), s) for s in stops if s in text]
    if not found:
        return text, None
    _, at, stop = min(found)
    return text[:at], stop


@pytest.mark.parametrize("seed", range(40))
def test_stops_at_every_split(seed):
    rng = random.Random(seed)
    for _ in range(100):
        stops = ["".join(rng.choice("ab\n") for _ in range(rng.randint(1, 4))) for _ in range(rng.randint(1, 4))]
        text = "".join(rng.choice("ab\nc") for _ in range(rng.randint(0, 24)))
        stream = StopFilter(stops)
        out = ""
        for piece in splits(text, rng):
            out += stream.feed(piece)
            assert text.startswith(out)
        matched = stream.matched
        if matched is None:
            out += stream.flush()
        assert (out, matched) == naive(text, stops)


def test_nothing_of_a_stop_leaks_and_a_false_start_is_flushed():
    stream = StopFilter(["END!"])
    assert stream.feed("abcEN") == "abc"
    assert stream.feed("x") == "ENx"
    assert stream.feed("END") == ""
    assert stream.flush() == "END"

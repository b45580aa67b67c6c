"""Bodies: media types, content codings within bounds, and the JSON that is accepted."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import tracemalloc
import zlib

import pytest

from milad.errors import MiladError
from milad.http import body


def refusal(call, *args) -> MiladError:
    with pytest.raises(MiladError) as caught:
        call(*args)
    return caught.value


@pytest.mark.parametrize("content_type", ["application/json", "Application/JSON; charset=UTF-8", "application/json;charset=\"utf-8\"",
                                          "application/vnd.x+json", "text/json", " application/json ; x=y"])
def test_json_types(content_type: str) -> None:
    body.check_type(content_type)


@pytest.mark.parametrize("content_type", [None, "", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x",
                                          "application/jsonx", "application/json, text/plain", "json", "application/json; charset=latin-1"])
def test_other_types_are_415(content_type: str | None) -> None:
    error = refusal(body.check_type, content_type)
    assert error.status == 415 and ("application/json" in error.message or "charset" in error.message)


DATA = json.dumps({"text": "héllo " * 50}).encode()


def raw_deflate(data: bytes) -> bytes:
    stream = zlib.compressobj(wbits=-15)
    return stream.compress(data) + stream.flush()


@pytest.mark.parametrize("data, encoding", [
    (DATA, None), (DATA, ""), (DATA, "identity"), (gzip.compress(DATA), "gzip"), (gzip.compress(DATA), "X-GZIP"),
    (gzip.compress(DATA[:40]) + gzip.compress(DATA[40:]), "gzip"), (zlib.compress(DATA), "deflate"), (raw_deflate(DATA), "deflate"),
    (gzip.compress(zlib.compress(DATA)), "deflate, gzip"), (gzip.compress(DATA), "identity, gzip"),
])
def test_content_codings(data: bytes, encoding: str | None) -> None:
    assert body.parse(data, encoding) == json.loads(DATA)


def test_zstd_where_the_interpreter_has_it() -> None:
    zstd = pytest.importorskip("compression.zstd")
    assert body.parse(zstd.compress(DATA), "zstd") == json.loads(DATA)
    assert refusal(body.decode, zstd.compress(b"x" * 10**7), "zstd", 1000).status == 413
    assert refusal(body.decode, zstd.compress(DATA)[:-3], "zstd", 10**6).status == 400


def test_zstd_elsewhere_names_the_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "_zstd", None)
    error = refusal(body.codings, "zstd")
    assert error.status == 415 and "zstd" in error.message


@pytest.mark.parametrize("encoding", ["br", "gzip, br", "compress", "gzip gzip", "gzip,gzip,gzip,gzip"])
def test_unknown_codings_are_415(encoding: str) -> None:
    assert refusal(body.codings, encoding).status == 415


@pytest.mark.parametrize("data, encoding", [
    (DATA, "gzip"), (gzip.compress(DATA)[:-9], "gzip"), (gzip.compress(DATA) + b"x", "gzip"), (b"", "gzip"), (DATA, "deflate"),
    (zlib.compress(DATA) + b"x", "deflate"), (zlib.compress(DATA)[:-5], "deflate"), (gzip.compress(DATA), "deflate, gzip"),
])
def test_broken_codings_are_400(data: bytes, encoding: str) -> None:
    assert refusal(body.parse, data, encoding).status == 400


def test_members_without_number_are_refused() -> None:
    """Each member costs a copy of the rest: a quadratic bomb of 16 MiB would take hours."""
    member = gzip.compress(b"")
    assert body.decode(member * 64, "gzip", 10) == b""
    assert refusal(body.decode, member * 800_000, "gzip", 10).status == 400


def test_a_bomb_is_413_and_never_inflated() -> None:
    bomb = gzip.compress(b"[" * 200_000_000, 9)
    tracemalloc.start()
    assert refusal(body.parse, bomb, "gzip", 1 << 20).status == 413
    assert refusal(body.parse, gzip.compress(bomb), "gzip, gzip", 1 << 20).status == 413
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20
    assert body.decode(gzip.compress(b"x" * 1000), "gzip", 1000) == b"x" * 1000
    assert refusal(body.decode, gzip.compress(b"x" * 1001), "gzip", 1000).status == 413


@pytest.mark.parametrize("data, what", [
    (b"", "empty"), (b"  \n", "empty"), (b"[]", "object"), (b"1", "object"), (b'"a"', "object"), (b"null", "object"), (b"{", "JSON"),
    (b"{}x", "JSON"), (b"{'a':1}", "JSON"), (b'{"a":NaN}', "NaN"), (b'{"a":Infinity}', "Infinity"), (b'{"a":-Infinity}', "Infinity"),
    (b'{"a":1e999}', "large"), (b'{"a":-1e999}', "large"), (b'{"a":' + b"1" * 301 + b"}", "301 digits"), (b'{"a":' + b"1" * 5000 + b"}", "digits"),
    (b'{"a":"\xff"}', "UTF-8"), (b'{"a":"\xed\xa0\x80"}', "UTF-8"), (b'{"a":"\xc0\x80"}', "UTF-8"), ('{"a":1}'.encode("utf-16"), "UTF-8"),
    (b'{"a":"\\ud800"}', "surrogate"), (b'{"\\uDC00":1}', "surrogate"), (b'{"a":[{"b":"x\\ud83d"}]}', "a[0].b"), (b'{"a":"\\ude00\\ud83d"}', "surrogate"),
    (b'{"a":' * 300 + b"1" + b"}" * 300, "deeper"), (b'{"a":' + b"[" * 200 + b"]" * 200 + b"}", "deeper"),
    (b'{"a":' + b"[" * 100_000, "deeper"), (b'{"a":"\x00"}', "JSON"), (b'{"a":1,}', "JSON"), (b'{"a":01}', "JSON"),
], ids=lambda v: repr(v)[:40])
def test_bad_json_is_400(data: bytes, what: str) -> None:
    error = refusal(body.parse, data)
    assert error.status == 400 and what in error.message


@pytest.mark.parametrize("data, value", [
    (b'{"a":1,"a":2}', {"a": 2}), (b'\xef\xbb\xbf{"a":1}', {"a": 1}), (b' {"a":"\\ud83d\\ude00"} ', {"a": "😀"}), (b'{"a":"\\\\ud800"}', {"a": "\\ud800"}),
    (b'{"a":9223372036854775808,"b":-0,"c":1e308}', {"a": 2**63, "b": 0, "c": 1e308}), (b'{"a":"\\u0000"}', {"a": "\0"}),
    (b'{"a":' + b"[" * 199 + b"]" * 199 + b"}", None), (b'{"a":' + b"1" * 300 + b"}", None),
])
def test_odd_json_that_is_fine(data: bytes, value: dict | None) -> None:
    parsed = body.parse(data)
    assert parsed == (json.loads(data) if value is None else value)


def test_random_bytes_never_raise_anything_else() -> None:
    rng = random.Random(7)
    good = b'{"a":[1,2.5,"x\\u00e9",{"b":null}],"c":true}'
    for _ in range(3000):
        data = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        encoding = rng.choice([None, "gzip", "deflate", "gzip, deflate"])
        if encoding == "gzip" and rng.random() < 0.8:
            data = bytearray(gzip.compress(bytes(data)))
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            assert isinstance(body.parse(bytes(data), encoding, 1000), dict)
        except MiladError as e:
            assert e.status in (400, 413)


def test_a_thread_leaves_the_loop_alive() -> None:
    """Not a timing: the loop gets at least one turn while 2 MiB of the worst numbers are parsed."""
    data = b'{"a":[' + b"1," * (1 << 20) + b"1]}"

    async def main() -> int:
        turns = 0
        task = asyncio.ensure_future(asyncio.to_thread(body.parse, data))
        while not task.done():
            await asyncio.sleep(0)
            turns += 1
        await task
        return turns

    assert asyncio.run(main()) > 3

"""A request's body: from its bytes and its Content headers to one JSON object, or a MiladError that says what is wrong.

Owns media types, content codings with a bound on what they inflate to, and the JSON that is accepted: strict UTF-8, an object
at the top, bounded depth, no NaN or infinities, no integers beyond 300 digits, no half surrogate pairs. It must not know
fields of any API. Pure: `parse` may take long for large bodies, so callers run it in a thread. json.loads holds the GIL all
the same: other streams stall for about 4 ms per MB of ordinary prompts, 30 ms per MB of the worst text (`[],[],[],...`).
"""

from __future__ import annotations

import json
import re
import zlib
from typing import Any, Callable

from ..errors import MiladError, invalid

try:                                          # Python 3.14 on
    from compression import zstd as _zstd
except ImportError:
    _zstd = None

MAX_DEPTH = 200                               # client bodies nest up to about 20; schemas in tools a few more
MAX_DIGITS = 300                              # beyond a double's range; int() itself stops at 4300 or not at all (3.10.6)
MAX_CODINGS = 3
MAX_MEMBERS = 64                              # of one gzip or zstd body: each costs a copy of what follows it
_JSON_TYPE = re.compile(r"(?:application|text)/(?:json|[!#$&^_.+\w-]+\+json)", re.A)
_HALF_PAIR = re.compile("[\ud800-\udfff]")


def check_type(content_type: str | None) -> None:
    """415 unless the header says JSON in UTF-8: anything a web page may post without a preflight is refused."""
    media, *parameters = (content_type or "").split(";")
    if not _JSON_TYPE.fullmatch(media.strip().lower()):
        said = f"not {content_type!r}" if content_type else "and the request has none"
        raise MiladError("media_type", f"the body must be JSON: send Content-Type: application/json, {said}")
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip().lower() == "charset" and value.strip().strip('"').lower() not in ("utf-8", "utf8", "us-ascii"):
            raise MiladError("media_type", f"the body's charset must be utf-8, not {value.strip()!r}")


def codings(content_encoding: str | None) -> list[str]:
    """The codings to undo, last applied first. 415 for one that is not known here."""
    names = [n.strip().lower() for n in (content_encoding or "").split(",") if n.strip()]
    names = [n for n in names if n != "identity"]
    for name in names:
        if name not in _DECODERS:
            raise MiladError("media_type", f"the content encoding {name[:40]!r} is unknown; known are {', '.join(_DECODERS)}")
        if name == "zstd" and _zstd is None:
            raise MiladError("media_type", "the content encoding 'zstd' needs a server on Python 3.14; send gzip or none")
    if len(names) > MAX_CODINGS:
        raise MiladError("media_type", f"at most {MAX_CODINGS} content encodings")
    return names[::-1]


def _inflate(data: bytes, limit: int, make: Callable[[], Any], n_members: int = 1) -> bytes:
    """Streams of one of zlib's or zstd's decompressors (`make`), as many in a row as the format allows."""
    out = b""
    for _ in range(n_members):
        stream = make()
        out += stream.decompress(data, limit + 1 - len(out))
        if len(out) > limit:
            raise _TooLong
        if not stream.eof:
            raise ValueError("it ends early")
        data = stream.unused_data
        if not data:
            return out
    raise ValueError("there is more after its end")


def _gunzip(data: bytes, limit: int) -> bytes:
    return _inflate(data, limit, lambda: zlib.decompressobj(31), MAX_MEMBERS)  # RFC 1952, 2.2


def _deflate(data: bytes, limit: int) -> bytes:
    """zlib's format, as RFC 9110, 8.4.1.2 says, or the bare deflate that some clients send."""
    try:
        return _inflate(data, limit, zlib.decompressobj)
    except zlib.error:
        return _inflate(data, limit, lambda: zlib.decompressobj(-15))


def _unzstd(data: bytes, limit: int) -> bytes:
    return _inflate(data, limit, _zstd.ZstdDecompressor, MAX_MEMBERS)  # RFC 8878, 3: frames in a row


class _TooLong(Exception):
    pass


_DECODERS: dict[str, Callable[[bytes, int], bytes]] = {
    "gzip": _gunzip, "x-gzip": _gunzip, "deflate": _deflate, "zstd": _unzstd}
_BROKEN = (ValueError, zlib.error) if _zstd is None else (ValueError, zlib.error, _zstd.ZstdError)


def decode(data: bytes, content_encoding: str | None, limit: int) -> bytes:
    """`data` with its content codings undone, at most `limit` bytes (413)."""
    for name in codings(content_encoding):
        try:
            data = _DECODERS[name](data, limit)
        except _TooLong:
            raise MiladError("too_large", f"the body inflates to more than {limit} bytes") from None
        except _BROKEN as e:
            raise invalid(None, f"the body is not valid {name}: {e}") from None
    return data


def _constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def _float(text: str) -> float:
    value = float(text)
    if value - value != 0:
        raise ValueError(f"the number {text[:40]} is too large")
    return value


def _int(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


_loads = json.JSONDecoder(parse_constant=_constant, parse_float=_float, parse_int=_int).decode


def _too_deep(value: Any) -> bool:
    """Whether containers nest deeper than MAX_DEPTH: one level of the tree after the other."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [v for x in level for v in (x.values() if type(x) is dict else x) if type(v) is dict or type(v) is list]
        if not level:
            return False
    return True


def _half_pair(value: Any, path: str) -> str | None:
    """The JSON path of a string that is no text, because half a surrogate pair is in it."""
    if isinstance(value, str):
        return path if _HALF_PAIR.search(value) else None
    if isinstance(value, dict):
        for key, item in value.items():
            if _HALF_PAIR.search(key):
                return path or "body"
            found = _half_pair(item, f"{path}.{key}" if path else key)
            if found is not None:
                return found
    elif isinstance(value, list):
        for i, item in enumerate(value):
            found = _half_pair(item, f"{path}[{i}]")
            if found is not None:
                return found
    return None


def parse(data: bytes, content_encoding: str | None = None, limit: int = 16 << 20) -> dict[str, Any]:
    """The JSON object that a body holds; MiladError for anything else. Of duplicate keys the last counts."""
    data = decode(data, content_encoding, limit)
    try:
        text = data.decode()
    except UnicodeDecodeError as e:
        raise invalid(None, f"the body is not valid UTF-8: byte {e.start}") from None
    if not text.strip():
        raise invalid(None, "the body is empty; a JSON object is needed")
    try:
        value = _loads(text[1:] if text[0] == "\ufeff" else text)
    except RecursionError:
        raise invalid(None, f"the body's JSON nests deeper than {MAX_DEPTH} levels") from None
    except ValueError as e:
        raise invalid(None, f"the body is not valid JSON: {e}") from None
    if not isinstance(value, dict):
        raise invalid(None, "the body must be a JSON object")
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH and _too_deep(value):
        raise invalid(None, f"the body's JSON nests deeper than {MAX_DEPTH} levels")
    if b"\\ud" in data or b"\\uD" in data:
        path = _half_pair(value, "")
        if path is not None:
            raise invalid(path, f"{path}: half of a surrogate pair is not text")
    return value

"""Server-sent events as bytes (WHATWG HTML, 9.2): frames of a protocol's encoder in, valid UTF-8 out.

An event is an optional `event:` line and one `data:` line, since compact JSON holds no line break. Pure; it must not know
sockets or what the frames mean.
"""

from __future__ import annotations

import json
import re
from typing import Any, Iterable, Union

CONTENT_TYPE = "text/event-stream; charset=utf-8"

_encoder = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)
if getattr(json.encoder, "c_make_encoder", None):
    # as JSONEncoder.iterencode makes it for each value anew, which is most of a small chunk's time; what goes out is never circular
    _pieces = json.encoder.c_make_encoder(None, _encoder.default, json.encoder.encode_basestring, None, ":", ",", False, False, False)

    def _compact(value: Any) -> str:
        return "".join(_pieces(value, 0))
else:
    _compact = _encoder.encode
_SURROGATE = re.compile("[\ud800-\udfff]")


def _finite(value: Any) -> Any:
    """`value` with what JSON can't say (NaN, infinities) as null: RFC 8259, 6."""
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return value


def dumps(value: Any) -> bytes:
    """Compact JSON in UTF-8. Half a surrogate pair becomes U+FFFD, a number that is none becomes null."""
    try:
        text = _compact(value)
    except ValueError:
        text = _compact(_finite(value))
    try:
        return text.encode()
    except UnicodeEncodeError:
        return _SURROGATE.sub("\ufffd", text).encode()


def encode(frames: Iterable[tuple[Union[str, None], Union[dict, str]]]) -> bytes:
    """Frames of protocols.base as one piece for one write; b"" for none."""
    out = []
    for name, data in frames:
        if name is not None:
            out.append(b"event: " + name.encode() + b"\n")
        out.append(b"data: " + (data.encode() if type(data) is str else dumps(data)) + b"\n\n")
    return b"".join(out)

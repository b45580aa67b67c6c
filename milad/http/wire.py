"""HTTP/1.1, the server's side of one connection, without I/O: bytes in, events out; answers in, bytes out.

Owns the grammar of RFC 9112 and the framing of RFC 9110, strictly: what two readers could understand differently is refused
and the connection closed, since a proxy in front might have read it the other way. Reading and writing are two machines over
the tables below; `Connection.next` is the only way in, and turns what the readers refuse into WireError. Any other
exception is a bug here. It must not know sockets, clocks, routes or JSON.

    reading   line -> fields -> length ----------------------> done -> (start_next) line
                            \\-> size -> chunk -> crlf -> size /
                             \\          \\-> trailers --------/
    writing   idle -> (send_continue) -> send_head -> send_data* -> send_end -> (start_next) idle

One request is given out at a time: what a client pipelines behind it stays in the buffer (`n_buffered`: the server stops
reading when it grows) until start_next.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Callable, Iterable, Union

TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"                       # RFC 9110, 5.6.2
# request-line = method SP request-target SP HTTP-version; exactly one SP each (RFC 9112, 3). A target is visible ASCII
# without a fragment (RFC 9112, 3.2).
REQUEST_LINE = re.compile(rb"(" + TOKEN + rb") ([!-~]+) HTTP/([0-9])\.([0-9])")
# field-line = field-name ":" OWS field-value OWS; no space before the colon (RFC 9112, 5.1), no line folding (5.2); CR, LF, NUL
# never, other controls only HTAB (RFC 9110, 5.5).
FIELD_LINE = re.compile(rb"(" + TOKEN + rb"):[ \t]*((?:[!-~\x80-\xff]+(?:[ \t]+[!-~\x80-\xff]+)*)?)[ \t]*")
# Host = uri-host [ ":" port ] (RFC 9110, 7.2; RFC 3986, 3.2.2)
HOST = re.compile(r"(?:\[[0-9A-Fa-f:.]+(?:%25[0-9A-Za-z._~-]+)?\]|[0-9A-Za-z._~%!$&'()*+,;=-]*)(?::[0-9]{0,5})?")
ABSOLUTE = re.compile(r"[Hh][Tt][Tt][Pp][Ss]?://([^/?@]*)(.*)")  # absolute-form (RFC 9112, 3.2.2)
# chunk-size [ chunk-ext ] (RFC 9112, 7.1 and 7.1.1)
CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,16})((?:[ \t]*;[ \t]*" + TOKEN + rb"(?:[ \t]*=[ \t]*(?:" + TOKEN
                        + rb'|"(?:[\t !#-\[\]-~\x80-\xff]|\\[\t -~\x80-\xff])*"))?)*)')
METHOD_START = frozenset(b"!#$%&'*+-.^_`|~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")

# Everything that is refused: rule -> (status, why). tests/http/test_wire.py holds the rules where h11 is laxer.
RULES = {
    "not_http": (400, "this is not HTTP; is the client speaking TLS to a plain port?"),
    "bare_lf": (400, "lines end with CR LF (RFC 9112, 2.2)"),
    "request_line": (400, "malformed request line (RFC 9112, 3)"),
    "version": (505, "only HTTP/1.0 and HTTP/1.1 are spoken here (RFC 9110, 15.6.6)"),
    "target": (400, "malformed request target (RFC 9112, 3.2)"),
    "target_long": (414, "the request target is too long (RFC 9110, 15.5.15)"),
    "field": (400, "malformed header line (RFC 9112, 5)"),
    "fold": (400, "folded header lines are obsolete (RFC 9112, 5.2)"),
    "head_long": (431, "the header section is too long (RFC 6585, 5)"),
    "head_many": (431, "too many header lines (RFC 6585, 5)"),
    "host": (400, "one valid Host header is required (RFC 9112, 3.2)"),
    "length": (400, "Content-Length must be one plain decimal number (RFC 9110, 8.6)"),
    "length_and_coding": (400, "Content-Length together with Transfer-Encoding (RFC 9112, 6.3)"),
    "coding": (400, "the only transfer coding understood is chunked, once, on HTTP/1.1 (RFC 9112, 6.1)"),
    "expect": (417, "the only expectation understood is 100-continue (RFC 9110, 10.1.1)"),
    "body_long": (413, "the body is too large (RFC 9110, 15.5.14)"),
    "chunk_line": (400, "malformed chunk (RFC 9112, 7.1)"),
    "chunk_end": (400, "chunk data does not end where its size says (RFC 9112, 7.1)"),
    "chunk_small": (400, "the body is cut into too many tiny chunks"),
    "cut": (400, "the connection ended inside the request (RFC 9112, 8)"),
}

REASONS = {
    100: "Continue", 200: "OK", 204: "No Content", 304: "Not Modified", 400: "Bad Request", 401: "Unauthorized", 403: "Forbidden",
    404: "Not Found", 405: "Method Not Allowed", 408: "Request Timeout", 409: "Conflict", 413: "Content Too Large",
    414: "URI Too Long", 415: "Unsupported Media Type", 417: "Expectation Failed", 422: "Unprocessable Content",
    426: "Upgrade Required", 429: "Too Many Requests", 431: "Request Header Fields Too Large", 500: "Internal Server Error",
    501: "Not Implemented", 503: "Service Unavailable", 504: "Gateway Timeout", 505: "HTTP Version Not Supported",
    529: "Overloaded",
}


@dataclass(frozen=True)
class Limits:
    """In bytes, but for `fields`. A body may use `free_chunks` chunks of any size; beyond those they average `small_chunk`."""
    target: int = 8192
    head: int = 32768
    fields: int = 100
    body: int = 16 << 20
    chunk_line: int = 1024
    chunk_lines: int = 65536                  # of all extensions of one body
    free_chunks: int = 4096
    small_chunk: int = 16


class WireError(Exception):
    """What the client sent breaks `rule`; answer with `status`, then close."""

    def __init__(self, rule: str, detail: str = "") -> None:
        self.status, why = RULES[rule]
        self.rule = rule
        self.message = f"{why}: {detail}" if detail else why
        super().__init__(self.message)


class _Refused(Exception):
    """Inside the readers only."""


@dataclass(frozen=True)
class Request:
    """A request's head. Names in `fields` are lower case, values decoded as Latin-1; path and query as sent."""
    method: str
    target: str
    path: str
    query: str
    version: tuple[int, int]
    fields: tuple[tuple[str, str], ...]
    host: str                                 # of the absolute target, else of Host; "" where HTTP/1.0 sent none
    n_body: int | None                        # None: chunked
    expects_continue: bool
    close: bool                               # the client wants, or HTTP/1.0 means, one request per connection

    def get(self, name: str) -> str | None:
        """The values of a field, joined as a list (RFC 9110, 5.3); None where it was not sent."""
        values = [v for n, v in self.fields if n == name]
        return ", ".join(values) if values else None


@dataclass(frozen=True)
class Data:
    data: bytes


@dataclass(frozen=True)
class End:
    """The request is complete."""


@dataclass(frozen=True)
class Closed:
    """The client ended the connection between requests."""


Event = Union[Request, Data, End, Closed]


def _digits(text: str) -> int | None:
    """1*DIGIT as a number; None for anything else. More than 18 digits: a number beyond every limit."""
    if not re.fullmatch(r"[0-9]+", text):
        return None
    text = text.lstrip("0") or "0"
    return int(text) if len(text) <= 18 else 10 ** 18


class Connection:
    def __init__(self, limits: Limits = Limits()) -> None:
        self.limits = limits
        self.body_limit = limits.body         # of the present request; may be changed once its head is out
        self.error: WireError | None = None
        self.request: Request | None = None   # the present one, also where its body is refused by its length
        self._buffer = bytearray()
        self._eof = False
        self._writing = "idle"
        self._reset()

    def _reset(self) -> None:
        self._read: Callable[[], Event | bool] = self._read_line
        self._scanned = 0                     # of the buffer, without a line end
        self._skipped = False                 # the empty line that may stand before a request line
        self._n_head = 0
        self._fields: list[tuple[str, str]] = []
        self._start: tuple[str, str, tuple[int, int]] = ("", "", (1, 1))
        self._left = 0                        # of a body with a length, or of the present chunk
        self._n_body = self._n_chunks = self._n_chunk_lines = 0
        self._close = False
        self._framing = "none"                # of the response: none, length, chunked, close
        self._out_left = 0
        self.request = None
        self.body_limit = self.limits.body

    # Reading

    def feed(self, data: bytes) -> None:
        """More bytes from the client; b"" is the end of them."""
        if not data:
            self._eof = True
        elif not self.error:
            self._buffer += data

    def next(self) -> Event | None:
        """The next event; None: feed more (or start_next, once the request is complete). Raises WireError, then for ever."""
        if self.error:
            raise self.error
        try:
            while True:
                event = self._read()
                if event is True:             # a state ended without an event
                    continue
                if event is not False:
                    return event              # type: ignore[return-value]
                if not self._eof or self._read == self._read_done:
                    return None
                if self._read == self._read_line and not self._buffer:
                    return Closed()
                raise _Refused("cut")
        except _Refused as refused:
            self.error = WireError(*refused.args)
            self._buffer.clear()
            raise self.error from None

    @property
    def n_buffered(self) -> int:
        return len(self._buffer)

    @property
    def target(self) -> str:
        """Of the request whose line was read last; "" where none was."""
        return self._start[1]

    @property
    def idle(self) -> bool:
        """Nothing of a request is here yet."""
        return self._read == self._read_line and not self._buffer

    @property
    def reading_body(self) -> bool:
        return self.request is not None and self._read != self._read_done

    def _line(self, limit: int, rule: str) -> bytes | None:
        """The next line of at most `limit` bytes, without its CR LF; None: not all here. The same for every split."""
        end = self._buffer.find(b"\n", self._scanned, limit + 2)
        if end < 0:
            if len(self._buffer) >= limit + 2:
                raise _Refused(rule)
            self._scanned = len(self._buffer)
            return None
        if end == 0 or self._buffer[end - 1] != 13:
            raise _Refused("bare_lf")
        line = bytes(self._buffer[:end - 1])
        del self._buffer[:end + 1]
        self._scanned = 0
        return line

    def _read_line(self) -> bool:
        if self._buffer and self._buffer[0] not in METHOD_START and self._buffer[0] not in b"\r\n":
            raise _Refused("not_http")
        line = self._line(self.limits.target + 64, "target_long")
        if line is None:
            return False
        if not line and not self._skipped:    # RFC 9112, 2.2: one empty line before a request is ignored
            self._skipped = True
            return True
        match = REQUEST_LINE.fullmatch(line)
        if not match:
            raise _Refused("request_line")
        method, target, version = match[1].decode(), match[2].decode(), (int(match[3]), int(match[4]))
        if version not in ((1, 0), (1, 1)):
            raise _Refused("version", f"HTTP/{version[0]}.{version[1]}")
        if len(target) > self.limits.target:
            raise _Refused("target_long", f"at most {self.limits.target} bytes")
        self._start = (method, target, version)
        self._n_head = len(line)
        self._read = self._read_fields
        return True

    def _field(self) -> tuple[str, str] | bool:
        """One field line; True at the empty line that ends the section."""
        line = self._line(max(self.limits.head - self._n_head, 0), "head_long")
        if line is None:
            return False
        if not line:
            return True
        self._n_head += len(line) + 2
        if len(self._fields) >= self.limits.fields:
            raise _Refused("head_many", f"at most {self.limits.fields}")
        match = FIELD_LINE.fullmatch(line)
        if not match:
            raise _Refused("fold" if line[0] in b" \t" else "field")
        return match[1].decode().lower(), match[2].decode("latin-1")

    def _read_fields(self) -> Event | bool:
        field = self._field()
        if isinstance(field, tuple):
            self._fields.append(field)
            return True
        return self._head() if field else False

    def _head(self) -> Request:
        method, target, version = self._start
        authority, path = self._split_target(method, target)
        hosts = [v for n, v in self._fields if n == "host"]
        # RFC 9112, 3.2: exactly one on HTTP/1.1; RFC 9112, 3.2.2: an absolute target's authority replaces it
        if len(hosts) > 1 or not hosts and version == (1, 1) or any(not HOST.fullmatch(h) for h in hosts):
            raise _Refused("host")
        n_body = self._framing_of(version)
        tokens = {t.strip(" \t").lower() for n, v in self._fields if n == "connection" for t in v.split(",")}
        expect = [v.lower() for n, v in self._fields if n == "expect"] if version == (1, 1) else []
        if expect not in ([], ["100-continue"]):
            raise _Refused("expect")
        path, _, query = path.partition("?")
        self._close = "close" in tokens or version == (1, 0)
        self.request = Request(method, target, path, query, version, tuple(self._fields),
                               authority if authority is not None else hosts[0] if hosts else "",
                               n_body, bool(expect) and n_body != 0, self._close)
        if n_body is not None and n_body > self.body_limit:
            raise _Refused("body_long", f"at most {self.body_limit} bytes")
        self._left = n_body or 0
        self._read = self._read_size if n_body is None else self._read_length
        return self.request

    def _split_target(self, method: str, target: str) -> tuple[str | None, str]:
        """(authority or None, path with query), by the forms of RFC 9112, 3.2."""
        if "#" in target:
            raise _Refused("target", "a fragment")
        if target[0] == "/" or target == "*" and method == "OPTIONS":
            return None, target
        match = ABSOLUTE.fullmatch(target)
        if not match or not HOST.fullmatch(match[1]) or method == "CONNECT":
            raise _Refused("target")
        return match[1], match[2] if match[2].startswith("/") else "/" + match[2]

    def _framing_of(self, version: tuple[int, int]) -> int | None:
        """RFC 9112, 6.3, with everything doubtful refused: the body's length, None for chunked."""
        lengths = [v for n, v in self._fields if n == "content-length"]
        codings = [v for n, v in self._fields if n == "transfer-encoding"]
        if codings:
            if lengths:
                raise _Refused("length_and_coding")
            if version == (1, 0) or len(codings) > 1 or codings[0].lower() != "chunked":
                raise _Refused("coding")
            return None
        if not lengths:
            return 0
        n_body = _digits(lengths[0])
        if len(lengths) > 1 or n_body is None:
            raise _Refused("length")
        return n_body

    def _take(self) -> Data | None:
        """What the buffer has of the `_left` bytes of body that come next."""
        n = min(self._left, len(self._buffer))
        if not n:
            return None
        with memoryview(self._buffer) as view:
            data = bytes(view[:n])
        del self._buffer[:n]
        self._left -= n
        return Data(data)

    def _read_length(self) -> Event | bool:
        if self._left:
            return self._take() or False
        return self._end()

    def _read_size(self) -> bool:
        line = self._line(self.limits.chunk_line, "chunk_line")
        if line is None:
            return False
        match = CHUNK_LINE.fullmatch(line)
        if not match:
            raise _Refused("chunk_line")
        self._left = int(match[1], 16)
        self._n_body += self._left
        self._n_chunks += 1
        self._n_chunk_lines += len(match[2])
        if self._n_body > self.body_limit:
            raise _Refused("body_long", f"at most {self.body_limit} bytes")
        if self._n_chunk_lines > self.limits.chunk_lines:
            raise _Refused("chunk_line", "too many extensions")
        if self._n_chunks > self.limits.free_chunks + self._n_body // self.limits.small_chunk:
            raise _Refused("chunk_small")
        if self._left:
            self._read = self._read_chunk
        else:
            self._fields, self._n_head = [], 0
            self._read = self._read_trailers
        return True

    def _read_chunk(self) -> Event | bool:
        data = self._take()
        if not self._left:
            self._read = self._read_crlf
        return data or False

    def _read_crlf(self) -> bool:
        if not b"\r\n".startswith(self._buffer[:2]):
            raise _Refused("chunk_end")
        if len(self._buffer) < 2:
            return False
        del self._buffer[:2]
        self._read = self._read_size
        return True

    def _read_trailers(self) -> Event | bool:
        field = self._field()                 # RFC 9110, 6.5.1: read, checked and dropped
        if isinstance(field, tuple):
            self._fields.append(field)
            return True
        return self._end() if field else False

    def _end(self) -> End:
        self._read = self._read_done
        return End()

    def _read_done(self) -> bool:
        return False

    # Writing

    @property
    def keep_alive(self) -> bool:
        """Whether another request may follow, once the answer is written."""
        return not (self._close or self.error or self._eof or self.reading_body)

    def send_continue(self) -> bytes:
        """100 Continue, where the client waits for it (RFC 9110, 10.1.1); else nothing."""
        if self._writing == "idle" and self.request and self.request.expects_continue and self.reading_body:
            self._writing = "continued"
            return b"HTTP/1.1 100 Continue\r\n\r\n"
        return b""

    def send_head(self, status: int, fields: Iterable[tuple[str, str]], length: int | None, close: bool = False) -> bytes:
        """The answer's head with its framing and Connection fields. `length` None: unknown, so chunked, or on HTTP/1.0 up to the
        close. Raises ValueError for a field that would break the line or the framing."""
        if self._writing == "body":
            raise ValueError("a second head")
        request = self.request
        old = request is not None and request.version == (1, 0)
        head_only = request is not None and request.method == "HEAD"
        lines = [f"HTTP/1.1 {status} {REASONS.get(status, 'Unknown')}"]
        for name, value in fields:
            if "\r" in value or "\n" in value or "\0" in value or name.lower() in FRAMING:
                raise ValueError(f"response field {name}")
            lines.append(f"{name}: {value}")
        if status == 204 or status == 304:    # RFC 9110, 15.3.5 and 15.4.5: no body, no length
            self._framing, self._out_left = "none", 0
        elif length is not None:
            self._framing, self._out_left = ("none", 0) if head_only else ("length", length)
            lines.append(f"Content-Length: {length}")
        elif old:
            self._framing = "none" if head_only else "close"
            close = True
        else:
            self._framing = "none" if head_only else "chunked"
            lines.append("Transfer-Encoding: chunked")
        if close or not self.keep_alive:      # RFC 9112, 9.6
            self._close = True
            lines.append("Connection: close")
        self._writing = "body"
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")

    def send_data(self, data: bytes) -> bytes:
        """A piece of the answer's body, framed. Raises ValueError beyond the promised length."""
        if self._framing == "chunked":
            return b"%x\r\n%b\r\n" % (len(data), data) if data else b""
        if self._writing != "body":
            raise ValueError("data without a head")
        if self._framing == "none":
            return b""
        if self._framing == "length":
            if len(data) > self._out_left:
                raise ValueError("more data than Content-Length")
            self._out_left -= len(data)
        return data

    def send_end(self) -> bytes:
        if self._writing != "body" or self._out_left:
            raise ValueError("the answer is not complete")
        self._writing = "done"
        return b"0\r\n\r\n" if self._framing == "chunked" else b""

    def start_next(self) -> None:
        """After send_end and End, where keep_alive holds: on to what the client sent meanwhile."""
        if self._writing != "done" or not self.keep_alive:
            raise ValueError("not between requests")
        self._reset()
        self._writing = "idle"


FRAMING = frozenset({"content-length", "transfer-encoding", "connection"})

"""What the server and the application know of each other: one Exchange per request, one Reply per plain answer.

The server owns sockets, time and framing and calls an Application; the application owns routes and bodies and writes through
the Exchange. Interfaces and data only.
"""

from __future__ import annotations

from typing import Awaitable, Callable, NamedTuple, Protocol, Union

from ..errors import MiladError
from .wire import Request, WireError


class Reply(NamedTuple):
    """A plain answer. The server adds Date, Content-Length and Connection."""
    status: int
    fields: tuple[tuple[str, str], ...]
    body: bytes


class Exchange(Protocol):
    """One request and its answer. The event loop's thread only. After `disconnected` every write is dropped."""
    request: Request | None                   # None: its head was not readable
    target: str                               # also where only the request line was readable; "" without one
    body: bytes                               # all of it, content codings not undone
    peer: str                                 # the client's address, "unix" for a local socket
    local: str                                # the address that the client connected to, or "unix"
    body_limit: int                           # begin() may change it
    request_id: str                           # set by begin()
    client: str                               # who asks, for fairness and the log: a key's name, else peer; set by begin()
    label: str                                # for the access log: what the handler knows of the request
    received_s: float                         # loop time of the head
    ended_s: float                            # loop time of the answer's end; 0 before it
    status: int                               # 0 until an answer started
    n_sent: int                               # bytes of answer body
    disconnected: bool                        # the client is gone
    draining: bool                            # the daemon ends: a cancelled handler says so to its client

    @property
    def stalled(self) -> bool:
        """The client does not read: await drain() before writing more."""
        ...

    def reply(self, reply: Reply) -> None:
        """The whole answer."""
        ...

    def start(self, status: int, fields: tuple[tuple[str, str], ...]) -> None:
        """The head of a streamed answer, sent at once."""
        ...

    def write(self, data: bytes) -> None:
        """One piece of it, one write to the socket."""
        ...

    async def drain(self) -> None:
        """Returns when the client has read enough (at once unless `stalled`)."""
        ...

    def end(self, data: bytes = b"") -> None:
        """The last piece and the clean end of a streamed answer. A handler that leaves without it cuts the connection."""
        ...


Handler = Callable[[Exchange], Awaitable[None]]


class Application(Protocol):
    def begin(self, exchange: Exchange) -> Handler:
        """Called with the head, before the body is read: what answers it. Raises MiladError for what can be refused already."""
        ...

    def refuse(self, exchange: Exchange, error: Union[MiladError, WireError, Exception]) -> Reply:
        """The answer for an error, in the dialect that the request suggests. Other exceptions are bugs: a 500 and a log line."""
        ...

    def done(self, exchange: Exchange) -> None:
        """The answer ended or was cut."""
        ...

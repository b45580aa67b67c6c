"""What a protocol is: JSON in, Turn out; events in, the vendor's stream or body out.

Protocols know nothing of families, sockets, clocks or randomness: ids and times come in by Ident. One instance of Encoder
serves one response.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Mapping, Protocol as TypingProtocol, Sequence, Union

from ..conversation import Turn
from ..errors import MiladError
from ..events import Event, Fold

# One SSE event: (event name or None, its JSON object, or literal text such as "[DONE]").
Frame = tuple[Union[str, None], Union[dict, str]]


@dataclass(frozen=True)
class Ident:
    response_id: str                   # with the protocol's prefix
    created: int                       # seconds since the epoch
    model: str                         # the served id
    new_id: Callable[[str], str]       # prefix -> a fresh id, e.g. new_id("fc_")
    n_ctx: int = 0


class Encoder(TypingProtocol):
    def event(self, choice: int, event: Event) -> list[Frame]:
        """Frames for one event of choice 0..n-1 (the encoder takes the event into that choice's Fold itself)."""
        ...

    def keepalive(self) -> list[Frame]:
        """A sign of life; it carries prompt_progress() where the prompt is still read."""
        ...

    def failure(self, error: MiladError) -> list[Frame]:
        """The protocol's own error event, after the first byte."""
        ...

    def end(self) -> list[Frame]:
        """After every choice's Finish: what closes the stream ([DONE], message_stop, response.completed)."""
        ...

    def body(self) -> dict[str, Any]:
        """The plain answer, from the same folds."""
        ...

    folds: Sequence[Fold]


class Protocol(TypingProtocol):
    name: str
    id_prefix: str                     # of response_id

    def parse(self, body: Mapping[str, Any]) -> Turn:
        """Raises errors.MiladError naming the field."""
        ...

    def encoder(self, turn: Turn, ident: Ident) -> Encoder: ...

    def error(self, error: MiladError, request_id: str) -> tuple[int, dict[str, Any], list[tuple[str, str]]]:
        """(status, body, headers such as Retry-After, x-should-retry)."""
        ...


def prompt_progress(folds: Sequence[Fold]) -> dict[str, Any]:
    """{"prompt_progress": ...} of the first choice whose prompt waits or is read, else {}: tokens in all, of them from the cache,
    and done (llama.cpp's names, of its server's return_progress), and the place in the queue, 0 while it is read."""
    for fold in folds:
        if fold.progress is not None:
            p = fold.progress
            return {"prompt_progress": {"total": p.total, "cache": p.cached, "processed": p.done, "queued": p.queued}}
    return {}

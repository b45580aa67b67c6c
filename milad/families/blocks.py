"""Blocks on their way out of a parser: opened, filled and closed in order, deltas joined per feed. Knows no markup."""

from __future__ import annotations

from ..events import BlockEnd, BlockStart, Delta, Event


class Blocks:
    """At most one block is open; `kind` is its kind, "" when none is. `last` is the kind of the block before that."""

    def __init__(self) -> None:
        self.index = -1
        self.kind = ""
        self.last = ""
        self._events: list[Event] = []
        self._text: list[str] = []

    def put(self, kind: str, text: str) -> None:
        """Text into the open block of that kind, opening one where another or none is open."""
        if not text:
            return
        if self.kind != kind:
            self.open(kind)
        self._text.append(text)

    def open(self, kind: str, name: str = "", id: str = "") -> None:
        self.close()
        self.index += 1
        self.kind = kind
        self._events.append(BlockStart(self.index, kind, id, name))

    def close(self, complete: bool = True) -> None:
        if self.kind:
            self._flush()
            self._events.append(BlockEnd(self.index, complete))
            self.last, self.kind = self.kind, ""

    def take(self) -> list[Event]:
        self._flush()
        events, self._events = self._events, []
        return events

    def _flush(self) -> None:
        if self._text:
            self._events.append(Delta(self.index, "".join(self._text)))
            self._text.clear()

"""Text that arrives in pieces: whole characters out of bytes, and stop strings that may lie across pieces. Pure."""

from __future__ import annotations

import codecs
from typing import Iterable


class Utf8Joiner:
    """Bytes in, whole characters out. A character split over tokens is held until whole; what can't become one is U+FFFD."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes) -> str:
        return self._decoder.decode(data)

    def flush(self) -> str:
        """The end, or a control token: a held part of a character becomes one U+FFFD."""
        text = self._decoder.decode(b"", True)
        self._decoder.reset()
        return text

    @property
    def holding(self) -> bool:
        return bool(self._decoder.getstate()[0])


class StopFilter:
    """Finds the first stop string in a stream. Holds back only what may still become one; nothing of a stop leaks.

    Of several that match, the one that ends first wins, and of those the one that begins first: the same whatever the
    split, since matching goes by characters.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self.stops = tuple(dict.fromkeys(s for s in stops if s))
        self._first = frozenset(s[0] for s in self.stops)
        self._longest = max(map(len, self.stops), default=0)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """What may go out now. After a match `matched` is set and nothing more comes."""
        if not self.stops:
            return text
        if self.matched is not None:
            return ""
        text = self._held + text
        hit = self._find(text)
        if hit is not None:
            at, self.matched = hit
            self._held = ""
            return text[:at]
        keep = self._suffix(text)
        self._held = text[len(text) - keep:] if keep else ""
        return text[:len(text) - keep]

    def flush(self) -> str:
        """The end: a prefix that never completed is text after all."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str) -> tuple[int, str] | None:
        best: tuple[int, int, str] | None = None
        for stop in self.stops:
            at = text.find(stop)
            if at >= 0:
                candidate = (at + len(stop), at, stop)
                if best is None or candidate < best:
                    best = candidate
        return None if best is None else (best[1], best[2])

    def _suffix(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start] in self._first:
                tail = text[start:]
                if any(s.startswith(tail) for s in self.stops):
                    return len(tail)
        return 0

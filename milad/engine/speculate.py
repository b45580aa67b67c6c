"""Prompt-lookup drafts: when the last tokens stood earlier in the sequence, what followed there is guessed to follow again.

The core verifies a guess in one step, one row per guessed token; the sampler's draw depends on (seed, position) and the row's
logits alone, so what is kept is bit for bit what plain decoding gives. Edits and quotes come several tokens a step.

How many are worth guessing: the i-th is kept with about rate ** i (rate: this sequence's share of guesses kept), and costs a
row where a kept one saves a token's part of a step. A sequence whose guesses fail is left alone for a while, longer each time.
Pure.
"""

from __future__ import annotations

from array import array
from typing import Any

from .pace import Pace
from .sequence import Sequence

N_GRAM = 3
MAX_DRAFT = 12
FIRST_RATE = 0.6
MAX_REST = 64           # steps without guesses after failures


class _Index:
    """Where each n-gram of a sequence's tokens was last followed by something."""

    __slots__ = ("where", "n_indexed", "rate", "rest", "next_rest")

    def __init__(self) -> None:
        self.where: dict[tuple[int, ...], int] = {}
        self.n_indexed = N_GRAM         # tokens[:n_indexed] are followed up
        self.rate = FIRST_RATE
        self.rest = 0
        self.next_rest = 1

    def find(self, tokens: array) -> int:
        """The place after the latest earlier occurrence of the last N_GRAM tokens; 0: there is none."""
        n = len(tokens)
        where = self.where
        for at in range(self.n_indexed, n):
            where[tokens[at - 3], tokens[at - 2], tokens[at - 1]] = at
        self.n_indexed = max(self.n_indexed, n)
        return where.get((tokens[n - 3], tokens[n - 2], tokens[n - 1]), 0) if n >= N_GRAM else 0


class Speculator:
    def __init__(self, pace: Pace) -> None:
        self._pace = pace

    def draft(self, seq: Sequence, most: int, n_running: int) -> Any:
        """At most `most` tokens guessed to follow seq's last one; empty: none are worth it."""
        index: _Index | None = seq.drafter
        if index is None:
            index = seq.drafter = _Index()
        if index.rest > 0:
            index.rest -= 1
            return ()
        cost = self._pace.draft_cost(n_running)
        most = min(most, MAX_DRAFT, self._pace.draft_rows(n_running))
        n, worth = 0, index.rate
        while n < most and worth > cost:
            n += 1
            worth *= index.rate
        if n == 0:
            if worth <= cost:                           # not worth it now; conditions change
                index.rest = MAX_REST
                index.rate = max(index.rate, FIRST_RATE)
            return ()
        at = index.find(seq.tokens)
        return seq.tokens[at:at + n] if at else ()

    def note(self, seq: Sequence, n_drafted: int, n_accepted: int) -> None:
        index: _Index = seq.drafter
        tried = min(n_drafted, n_accepted + 1)          # those after the first wrong one say nothing
        for i in range(tried):
            index.rate += 0.15 * ((i < n_accepted) - index.rate)
        if n_accepted == 0:
            index.rest = index.next_rest
            index.next_rest = min(MAX_REST, 2 * index.next_rest)
        else:
            index.next_rest = 1

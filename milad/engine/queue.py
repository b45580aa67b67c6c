"""Who waits for a place, and who is next: FIFO within a client, the least served client first. Pure.

Rules
- Preempted sequences come back before anybody new, oldest first, and nobody overtakes one that is ready but does not fit.
- Among clients the one with the fewest running sequences is next, then the one served longest ago: one client's thirty
  requests don't starve another's one.
- A sequence whose next blocks another one is computing (wait_key) is passed over until they are there.
"""

from __future__ import annotations

from collections import deque
from typing import Callable, Iterator

from .sequence import Sequence


class Queue:
    def __init__(self) -> None:
        self._clients: dict[str, deque[Sequence]] = {}
        self._resumed: list[Sequence] = []
        self._served: dict[str, int] = {}       # of clients that wait: when (a count) one of theirs was last taken
        self._n_served = 0
        self._n = 0

    def __len__(self) -> int:
        return self._n

    def __iter__(self) -> Iterator[Sequence]:
        """In the order of arrival, preempted ones first."""
        yield from self._resumed
        yield from sorted((s for q in self._clients.values() for s in q), key=lambda s: s.order)

    def add(self, seq: Sequence) -> None:
        self._clients.setdefault(seq.request.client, deque()).append(seq)
        self._n += 1

    def add_preempted(self, seq: Sequence) -> None:
        self._resumed.append(seq)
        self._resumed.sort(key=lambda s: s.order)
        self._n += 1

    def remove(self, seq: Sequence) -> None:
        if seq in self._resumed:
            self._resumed.remove(seq)
        else:
            waiting = self._clients[seq.request.client]
            waiting.remove(seq)
            if not waiting:
                del self._clients[seq.request.client]
        self._n -= 1

    def taken(self, seq: Sequence) -> None:
        """remove(), because a place was given to it."""
        self.remove(seq)
        self._n_served += 1
        self._served[seq.request.client] = self._n_served
        if len(self._served) > 1000:            # clients long gone
            oldest = sorted(self._served, key=self._served.__getitem__)[:500]
            for client in oldest:
                del self._served[client]

    def next(self, ready: Callable[[Sequence], bool], running: dict[str, int]) -> Sequence | None:
        """The sequence to start next among those that are `ready`. running: sequences with a place, by client."""
        for seq in self._resumed:
            if ready(seq):
                return seq
        best, best_rank = None, (0, 0, 0)
        for client, waiting in self._clients.items():
            rank = (running.get(client, 0), self._served.get(client, 0), waiting[0].order)
            if best is not None and rank >= best_rank:
                continue
            for seq in waiting:
                if ready(seq):
                    best, best_rank = seq, rank
                    break
        return best

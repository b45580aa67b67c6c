"""Prefixes on their way from the second tier into the cache, while their sequences wait in the queue. Pure.

Rules
- One ticket per waiting sequence, no more than there are free places. Loaded blocks are held for the sequence until it starts
  and takes them from the cache like any others; what can't be loaded is computed.
- They never take a block that a running sequence needs: those get theirs back first.
"""

from __future__ import annotations

from typing import Any, Callable

from ..errors import EngineFault
from .base import BLOCK
from .blocks import BYTES, ROOT, Blocks
from .sequence import Sequence

PER_STEP = 16           # blocks written into the arena between two steps of running streams


class _Fetch:
    __slots__ = ("ticket", "held")

    def __init__(self, ticket: Any) -> None:
        self.ticket = ticket
        self.held: list[int] = []


class Fetches:
    def __init__(self, blocks: Blocks, tier: Any, write: Callable[[int, bytes], None], pending: dict[bytes, Sequence]) -> None:
        """tier: disk.Disk or alike. pending: the scheduler's map of blocks that are about to be known."""
        self._blocks = blocks
        self._tier = tier
        self._write = write
        self._pending = pending
        self._fetches: dict[Sequence, _Fetch] = {}

    def __len__(self) -> int:
        return len(self._fetches)

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._fetches

    def tables(self) -> list[list[int]]:
        return [f.held for f in self._fetches.values()]

    def ready(self, seq: Sequence, may_start: bool) -> bool:
        """Whether seq need not wait (any longer) for the disk; starts reading where there is something and a place."""
        fetch = self._fetches.get(seq)
        if fetch is not None:
            return fetch.ticket.cancelled or fetch.ticket.done and not fetch.ticket.loaded
        if seq.fetched or seq.scoring or not seq.keys:
            return True
        if not may_start:               # the free places are promised to those that are being fetched for
            return False
        keys, limit = seq.keys, min(len(seq.keys), (len(seq.tokens) - 1) // BLOCK)
        known: list[int] = []
        while len(known) < limit and (block := self._blocks.lookup(keys[len(known)])) is not None:
            known.append(block)
        first = len(known)
        n = self._tier.probe(keys[:limit], first) if first < limit else 0
        seq.fetched = True
        if n == 0:
            return True
        data = seq.tokens.tobytes()
        run = range(first, first + n)
        fetch = self._fetches[seq] = _Fetch(self._tier.fetch(
            [keys[i] for i in run], [keys[i - 1] if i else ROOT for i in run], [data[i * BYTES:(i + 1) * BYTES] for i in run]))
        for block in known:             # or the newcomers would take their place
            self._blocks.hold(block)
            fetch.held.append(block)
        for i in run:
            self._pending.setdefault(keys[i], seq)
        return False

    def land(self, n_active: int) -> None:
        """Moves what was loaded into the arena; n_active sequences run and may want a block each."""
        room = PER_STEP if n_active else 1 << 30
        for seq, fetch in self._fetches.items():
            ticket = fetch.ticket
            while ticket.loaded and room:
                if self._blocks.n_available <= n_active:
                    ticket.cancelled = True
                if ticket.cancelled:
                    ticket.loaded.clear()
                    break
                i = ticket.n_taken
                payload = self._tier.take(ticket)
                block = self._blocks.allocate()
                try:
                    self._write(block, payload)
                except EngineFault:         # a miss like any other
                    self._blocks.release(block)
                    ticket.cancelled = True
                    continue
                fetch.held.append(self._blocks.register(block, ticket.parents[i], ticket.datas[i], ticket.keys[i]))
                self._unlist(seq, ticket.keys[i:i + 1])
                room -= 1
            if ticket.cancelled or ticket.done and not ticket.loaded:
                self._unlist(seq, ticket.keys)

    def drop(self, seq: Sequence) -> None:
        """seq started or ended: its blocks are the cache's again."""
        fetch = self._fetches.pop(seq, None)
        if fetch is not None:
            fetch.ticket.cancelled = True
            self._unlist(seq, fetch.ticket.keys)
            self._blocks.release_all(fetch.held)

    def give_back(self) -> bool:
        """Lets go of the youngest sequence's blocks for one that runs. False: there are none."""
        for seq in reversed(self._fetches):
            if self._fetches[seq].held:
                self.drop(seq)
                return True
        return False

    def _unlist(self, seq: Sequence, keys: list[bytes]) -> None:
        for key in keys:
            if self._pending.get(key) is seq:
                del self._pending[key]

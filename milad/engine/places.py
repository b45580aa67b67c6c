"""Who has a place in the engine and which blocks: admission, preemption, and what the prefix cache learns. Pure policy.

Rules
- A sequence starts when there is a place (`parallel`) and blocks for all of its tokens; it takes from the prefix cache what is
  there. A prompt whose next blocks another sequence is computing waits in the queue for them instead of computing them twice;
  so does one whose blocks are being read from the second tier.
- No block left for a running stream: the youngest sequence (an idle one before others) gives its blocks back, which stay
  cached, and waits at the head of the queue. The oldest is never preempted, so every admitted sequence ends.

Engine thread only.
"""

from __future__ import annotations

from array import array
from typing import Any, Callable

from .base import BLOCK
from .blocks import ROOT, Blocks, chain, chain_keys
from .fetch import Fetches
from .queue import Queue
from .sequence import ACTIVE, QUEUED, Sequence


BESIDE = 16             # free blocks that stay beside a running stream's own: to touch memory far away stops it for a moment


class Places:
    def __init__(self, blocks: Blocks, *, n_ctx: int, parallel: int, copy: Callable[[int, int, int], None], tier: Any = None,
                 write: Callable[[int, bytes], None] | None = None) -> None:
        """copy, write: the context's kv_copy and kv_write. tier: disk.Disk or alike, the cache's second tier."""
        if blocks.n_blocks * BLOCK < n_ctx:
            raise ValueError(f"{blocks.n_blocks} blocks hold fewer than the {n_ctx} tokens of one request")
        self.blocks = blocks
        self.parallel = parallel
        self.queue = Queue()
        self.active: list[Sequence] = []            # by order of arrival
        self.idle: list[Sequence] = []              # of them: decoding, but paused by a slow reader
        self.pending: dict[bytes, Sequence] = {}    # keys of blocks that a sequence is about to compute or to fetch
        self.running: dict[str, int] = {}           # client -> active sequences
        self.fetches = Fetches(blocks, tier, write, self.pending) if tier is not None and blocks.cache else None
        self.n_preempted = self.n_cached = 0
        self._copy = copy
        self._stuck: tuple[Sequence | None, int, int] = None, 0, 0      # who did not fit, and when: no need to try again

    def add(self, seq: Sequence) -> None:
        if self.blocks.cache:
            chain_keys(seq.keys, seq.tokens)
            rest = seq.tokens[len(seq.keys) * BLOCK:]
            if rest:
                seq.tail_key = chain(seq.keys[-1] if seq.keys else ROOT, rest.tobytes())
        self.queue.add(seq)

    def admit(self, now: float) -> list[Sequence]:
        """Gives places to whom they can be given; returns them."""
        if self.fetches:
            self.fetches.land(len(self.active))
        started: list[Sequence] = []
        while self.queue:
            full = len(self.active) >= self.parallel
            if full:
                self.idle = [s for s in self.active if s.paused and s.n_left == 1]
                if not self.idle:
                    break
            seq = self.queue.next(self._ready, self.running)
            if seq is None or (seq, self.blocks.n_available, len(self.active)) == self._stuck:
                break
            if full:
                self._preempt()
            if not self._start(seq, now):
                self._stuck = seq, self.blocks.n_available, len(self.active)
                break
            started.append(seq)
        return started

    def remove(self, seq: Sequence, seal: bool = True) -> None:
        """seq ends, wherever it is. seal: what it computed last may be kept, too."""
        if seq.state == ACTIVE:
            self.leave(seq, seal)
        else:
            self.queue.remove(seq)
        if self.fetches:
            self.fetches.drop(seq)

    def is_served(self, seq: Sequence) -> bool:
        """A queued seq for which its next blocks are being computed or read: it waits for them, not for its turn."""
        return seq.wait_key is not None and seq.wait_key in self.pending or bool(self.fetches) and seq in self.fetches

    def _ready(self, seq: Sequence) -> bool:
        if seq.paused and seq.admitted:
            return False
        fetches = self.fetches
        if self.pending and not (fetches is not None and seq in fetches):
            if seq.wait_key is not None and seq.wait_key in self.pending:
                return False
            seq.wait_key = self._shared_key(seq)
            if seq.wait_key is not None:
                return False
        if fetches is None or len(self.active) >= self.parallel:
            return True
        return fetches.ready(seq, len(self.active) + len(fetches) < self.parallel)

    def _shared_key(self, seq: Sequence) -> bytes | None:
        """The last block of seq's prompt, counted from what is cached on, that an active sequence is about to compute."""
        shared = None
        for key in seq.keys:
            if key in self.pending:
                shared = key
            elif shared is not None or self.blocks.lookup(key) is None:
                return shared
        return seq.tail_key if seq.tail_key in self.pending else shared

    def _start(self, seq: Sequence, now: float) -> bool:
        """Gives seq its blocks, cached ones first. False: they don't fit now."""
        blocks = self.blocks
        n = len(seq.tokens)
        most = min(n - 1, seq.n_scored - 1) if seq.scoring else n - 1      # the last token's row is always computed
        data = seq.tokens.tobytes() if blocks.cache and most > 0 else b""
        found = blocks.match(seq.keys, data, most) if data else []
        n_total = (n - 1) // BLOCK + 1
        reserve = len(self.active)                          # each may soon want one more
        idle = sum(1 for b in found if not blocks.refs(b))
        if blocks.n_available - idle < n_total - len(found) + reserve:
            if self.active or blocks.n_available - idle < n_total - len(found):
                return bool(self.fetches and self.fetches.give_back()) and self._start(seq, now)
        for block in found:
            blocks.hold(block)
        seq.table.extend(found)
        seq.n_registered = len(found)
        seq.n_computed = len(found) * BLOCK
        if data:
            self._start_partial(seq, data[4 * seq.n_computed:4 * most], n_total)
        beside = BESIDE * len(self.active)
        left = [blocks.allocate() for _ in range(beside)] if blocks.n_free >= n_total - len(seq.table) + beside else []
        while len(seq.table) < n_total:
            seq.table.append(blocks.allocate())             # n_available said that there is one
        blocks.release_all(left)
        self._started(seq, now)
        return True

    def _start_partial(self, seq: Sequence, rest: bytes, n_total: int) -> None:
        """Copies the leading tokens of the block that goes on most alike."""
        if not rest:
            return
        blocks = self.blocks
        source, n_tokens = blocks.partial(seq.keys[seq.n_registered - 1] if seq.n_registered else ROOT, rest)
        if n_tokens == 0:
            return
        idle = not blocks.refs(source)
        if idle and blocks.n_available - 1 < n_total - len(seq.table):
            return                                          # there is no room beside the block it would be copied from
        blocks.hold(source)
        block = blocks.allocate()
        self._copy(source, block, n_tokens)
        blocks.release(source)
        seq.table.append(block)
        seq.n_computed += n_tokens

    def _started(self, seq: Sequence, now: float) -> None:
        self.queue.taken(seq)
        if self.fetches:
            self.fetches.drop(seq)
        seq.state = ACTIVE
        client = seq.request.client
        self.running[client] = self.running.get(client, 0) + 1
        self.active.append(seq)
        self.active.sort(key=lambda s: s.order)
        if seq.request.cacheable:
            for key in seq.keys[seq.n_registered:]:
                self.pending.setdefault(key, seq)
            if seq.tail_key is not None and seq.n_output == 0 and seq.n_left > 1:
                self.pending.setdefault(seq.tail_key, seq)
        self.n_cached += seq.n_computed
        if not seq.admitted:
            seq.admitted = True
            seq.n_cached = seq.n_computed
            seq.started_at = now

    def grow(self, seq: Sequence) -> None:
        """One more block, if need be of others; may preempt seq itself."""
        while True:
            block = self.blocks.allocate()
            if block is not None:
                seq.table.append(block)
                return
            if self.fetches and self.fetches.give_back():
                continue
            self._preempt()
            if seq.state != ACTIVE:
                return

    def _preempt(self) -> None:
        """Sends the youngest active sequence back to the queue, an idle one before others."""
        seq = (self.idle or self.active)[-1]
        self.leave(seq)
        seq.state = QUEUED
        seq.wait_key = None
        seq.fetched = False
        self.queue.add_preempted(seq)
        self.n_preempted += 1

    def leave(self, seq: Sequence, seal: bool = True) -> None:
        """Gives an active sequence's place and blocks back; what it computed stays cached."""
        self.active.remove(seq)
        if seq in self.idle:
            self.idle.remove(seq)
        client = seq.request.client
        self.running[client] -= 1
        if not self.running[client]:
            del self.running[client]
        for key in (*seq.keys[seq.n_registered:], seq.tail_key):
            if self.pending.get(key) is seq:
                del self.pending[key]
        if seal:
            self._seal(seq)
        self.blocks.release_all(seq.table)
        seq.table = array("i")
        seq.n_registered = seq.n_computed = 0

    def _seal(self, seq: Sequence) -> None:
        """Makes the tokens of the last, partial block known."""
        i = seq.n_registered
        part = seq.tokens[i * BLOCK:min(seq.n_computed, (i + 1) * BLOCK)]
        if part and seq.request.cacheable and self.blocks.cache:
            self.blocks.register(seq.table[i], seq.keys[i - 1] if i else ROOT, part.tobytes(), None)

    def computed(self, seq: Sequence) -> None:
        """Makes newly full blocks known to the cache; at the end of the prompt also its last, partial one."""
        blocks = self.blocks
        if not blocks.cache or not seq.request.cacheable:
            return
        n_full = seq.n_computed // BLOCK
        if n_full > seq.n_registered:
            chain_keys(seq.keys, seq.tokens)
            for i in range(seq.n_registered, n_full):
                key = seq.keys[i]
                self.pending.pop(key, None)
                seq.table[i] = blocks.register(seq.table[i], seq.keys[i - 1] if i else ROOT,
                                               seq.tokens[i * BLOCK:(i + 1) * BLOCK].tobytes(), key)
                seq.n_registered = i + 1
        if seq.n_output == 0 and seq.n_computed == seq.n_prompt:
            self.pending.pop(seq.tail_key, None)
            self._seal(seq)

    def check(self) -> None:
        """The invariants between steps; AssertionError where one fails."""
        self.blocks.check([*(s.table for s in self.active), *(self.fetches.tables() if self.fetches else ())])
        for seq in self.active:
            assert seq.state == ACTIVE and seq.n_computed < len(seq.tokens)
            assert len(seq.table) * BLOCK >= seq.n_computed
            assert seq.n_registered <= seq.n_computed // BLOCK
            assert seq.n_output == len(seq.tokens) - seq.n_prompt
        assert len(self.active) <= self.parallel and sum(self.running.values()) == len(self.active)
        for key, seq in self.pending.items():
            assert seq.state == ACTIVE and key in (*seq.keys[seq.n_registered:], seq.tail_key) or self.fetches and seq in self.fetches
        for seq in self.queue:
            assert seq.state == QUEUED and not seq.table

"""Seeded random schedules against the naive engine: arrivals, cancels, pauses, preemptions, evictions, drafts, a second
tier that loses blocks, faults, interrupts.

Invariants after every step: no block owned twice, free + cached + held = total. At the end every sequence that was not
cancelled or failed has the naive engine's text, and no block is held. MILAD_SCHEDULES sets how many run (default 1000).
"""

from __future__ import annotations

import os
import random

import pytest

from fake import FakeContext
from milad.engine.base import BLOCK, Done, Fault, SamplerArgs
from milad.engine.blocks import Blocks
from milad.engine.disk import Ticket
from milad.engine.pace import Pace
from milad.engine.sequence import ENDED, Sequence
from test_scheduler import Bench, prompt

N = int(os.environ.get("MILAD_SCHEDULES", "1000"))
CHUNK = 100


def schedule(seed: int) -> None:
    r = random.Random(seed)
    n_ctx = r.choice((64, 160, 320))
    tier = Tier(seed) if r.random() < 0.5 else None
    b = Bench(n_blocks=-(-n_ctx // BLOCK) + r.choice((0, 1, 3, 10, 40)), n_ctx=n_ctx, parallel=r.choice((1, 2, 4, 8)),
              max_rows=r.choice((8, 24, 64)), cache=r.random() < 0.9, speculate=r.random() < 0.5, tier=tier,
              pace=Pace() if r.random() < 0.7 else Pace(0.001))
    b.context.random = random.Random(seed)
    b.context.fault_rate = r.choice((0.0, 0.0, 0.01))
    b.context.interrupt_rate = r.choice((0.0, 0.0, 0.05))
    b.context.write_fault_rate = r.choice((0.0, 0.0, 0.1))
    families = [prompt(seed * 10 + i, n_ctx) for i in range(3)]
    seqs: list[Sequence] = []
    cancelled: set[Sequence] = set()
    for _ in range(r.randrange(3, 14)):
        for _ in range(r.choice((1, 1, 2, 4))):
            seqs.append(arrival(b, r, families, seqs))
        for _ in range(r.choice((0, 1, 3, 10, 30))):
            b.step()
            if tier is not None:
                tier.work()
            seq = r.choice(seqs)
            what = r.random()
            if what < 0.03 and seq.state != ENDED:
                b.scheduler.cancel(seq)
                cancelled.add(seq)
            elif what < 0.08:
                seq.paused = True
            elif what < 0.2:
                seq.paused = False
    for seq in seqs:
        seq.paused = False
    b.run()
    for _ in range(10_000):
        if tier is None or not b.scheduler.n_live:
            break
        tier.work()
        b.run()
    assert b.scheduler.n_live == 0 and b.scheduler.blocks.n_available == b.scheduler.blocks.n_blocks
    assert not b.scheduler.places.pending and not b.scheduler.places.running
    for seq in seqs:
        if seq in cancelled:
            assert not [i for i in b.items[seq] if isinstance(i, (Done, Fault))]
        elif isinstance(b.done(seq), Fault):
            assert b.context.fault_rate or seq.request.deadline is not None
        else:
            b.assert_right(seq)


def arrival(b: Bench, r: random.Random, families: list[list[int]], seqs: list[Sequence]) -> Sequence:
    """A new prompt, a prefix of a shared one with a tail of its own, an exact repeat, or the next turn of an older sequence."""
    kind = r.random()
    if kind < 0.2 and seqs:
        tokens = list(r.choice(seqs).request.tokens)
    elif kind < 0.4 and seqs:
        old = r.choice(seqs)
        tokens = list(old.tokens) + prompt(r.randrange(1000), r.randrange(1, 20))
    else:
        tokens = r.choice(families)[:r.randrange(0, b.n_ctx - 1)] + prompt(r.randrange(1000), r.randrange(1, 30))
    tokens = tokens[:b.n_ctx - 1 - r.choice((0, 5, 30))]
    sampler = SamplerArgs(seed=r.randrange(6), repeat_penalty=1.1 if r.random() < 0.1 else 1.0)
    return b.add(tokens, r.choice((1, 4, 20, 60)), sampler=sampler, client=r.choice("abc"),
                 score_prompt=r.random() < 0.1, cacheable=r.random() < 0.9,
                 deadline=b.now + r.choice((0.1, 1.0)) if r.random() < 0.1 else None)


@pytest.mark.parametrize("first", range(0, N, CHUNK))
def test_schedules(first: int) -> None:
    for seed in range(first, min(N, first + CHUNK)):
        try:
            schedule(seed)
        except BaseException:
            print(f"schedule({seed})")
            raise


class Tier:
    """A second tier without threads: it loads some blocks at each look, and loses, refuses or delays others."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.files: dict[bytes, tuple[bytes, bytes, bytes]] = {}        # shared by all arenas of a schedule
        self.tickets: list[Ticket] = []
        self.n_read = 0

    def attach(self, blocks: Blocks, context: FakeContext) -> None:
        self.context = context
        blocks.on_full = lambda block, key, parent, data: self.keep(block, key, parent, data)
        blocks.on_evict = lambda block, key, parent, data: self.keep(block, key, parent, data)

    def busy(self) -> None:
        """disk.Disk's."""

    def keep(self, block: int, key: bytes, parent: bytes, data: bytes) -> None:
        if self.random.random() < 0.8:
            self.files[key] = parent, data, self.context.kv_read(block)

    def probe(self, keys: list[bytes], first: int) -> int:
        n = first
        while n < len(keys) and keys[n] in self.files:
            n += 1
        return n - first

    def fetch(self, keys: list[bytes], parents: list[bytes], datas: list[bytes]) -> Ticket:
        self.tickets.append(Ticket(keys, parents, datas))
        return self.tickets[-1]

    def take(self, ticket: Ticket) -> bytes:
        ticket.n_taken += 1
        return ticket.loaded.popleft()

    def work(self) -> None:
        for ticket in list(self.tickets):
            for _ in range(self.random.choice((0, 1, 5))):
                i = ticket.n_taken + len(ticket.loaded)
                if i == len(ticket.keys) or ticket.cancelled or self.random.random() < 0.02 or ticket.keys[i] not in self.files:
                    ticket.done = True
                    self.tickets.remove(ticket)
                    break
                parent, data, payload = self.files[ticket.keys[i]]
                assert (parent, data) == (ticket.parents[i], ticket.datas[i])
                ticket.loaded.append(payload)
                self.n_read += 1
        if self.files and self.random.random() < 0.1:
            del self.files[self.random.choice(list(self.files))]

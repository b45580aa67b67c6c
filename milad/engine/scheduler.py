"""Which rows the next step computes: plan() makes a batch, commit() takes its outputs. Pure policy.

Rules
- Running streams first, one row each (more where drafts are verified), then prompt chunks fill what Pace allows: half for the
  oldest prompt, half for the shortest, so that a short one need not wait for a long one and the long one always moves.
- A sequence starts when there is a place (`parallel`) and blocks for all of its tokens; it takes from the prefix cache what is
  there. A prompt whose next blocks another sequence is computing waits in the queue for them instead of computing them twice.
- No block left for a running stream: the youngest sequence (a paused one before others) gives its blocks back, which stay
  cached, and waits at the head of the queue. The oldest is never preempted, so every admitted sequence ends.
- Items for the readers collect on the sequences; take() hands them out once per step.

Engine thread only. Knows Blocks, Queue, Pace; must not know threads, clocks (`now` is handed in), tokenizers or the core.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from math import ceil
from typing import Any, Callable

from ..errors import EngineFault, MiladError
from .base import BLOCK, WAIT, Admitted, Batch, Done, Fault, Item, Output, Prefill, SamplerArgs, Scored, Token
from .blocks import ROOT, Blocks, chain_keys
from .fetch import Fetches
from .pace import Pace
from .queue import Queue
from .sequence import ACTIVE, ENDED, QUEUED, Sequence

SCORE_ROWS = 64         # prompt rows with logits per step: each wants n_vocab floats of scratch
SERVICE_S = 5.0         # of one sequence, before any has ended


@dataclass
class Part:
    """One sequence's rows of a plan, positions n_computed onwards, and its outputs."""
    sequence: Sequence
    n_rows: int
    first: int                          # index of its first output
    n_outputs: int
    drafts: Any = ()                    # tokens after the first row, guessed


@dataclass
class Plan:
    batch: Batch
    parts: list[Part]
    n_decode: int                       # rows of running streams
    n_drafts: int                       # rows of guessed tokens beside them
    n_prefill: int                      # prompt rows


class Scheduler:
    """add / cancel / resume sequences; plan / commit / fail steps; take the items."""

    def __init__(self, blocks: Blocks, *, n_ctx: int, parallel: int, max_rows: int, token_bytes: Callable[[int], bytes],
                 copy: Callable[[int, int, int], None], pace: Pace | None = None, speculate: Any = None,
                 on_end: Callable[[Sequence], None] | None = None, tier: Any = None,
                 write: Callable[[int, bytes], None] | None = None) -> None:
        """copy, write: the context's kv_copy and kv_write. tier: disk.Disk or alike, the cache's second tier."""
        if blocks.n_blocks * BLOCK < n_ctx:
            raise ValueError(f"{blocks.n_blocks} blocks hold fewer than the {n_ctx} tokens of one request")
        self.blocks = blocks
        self.n_ctx = n_ctx
        self.parallel = parallel
        self.max_rows = max_rows
        self.pace = pace or Pace()
        self.queue = Queue()
        self.active: list[Sequence] = []            # by order of arrival
        self.n_preempted = self.n_prefilled = self.n_cached = self.n_generated = self.n_drafted = self.n_accepted = 0
        self._token_bytes = token_bytes
        self._copy = copy
        self._speculate = speculate
        self._on_end = on_end
        self._pending: dict[bytes, Sequence] = {}   # keys of blocks that an active sequence is about to compute
        self._running: dict[str, int] = {}          # client -> active sequences
        self._fetches = Fetches(blocks, tier, write, self._pending) if tier is not None and blocks.cache else None
        self._idle: list[Sequence] = []             # decoding, but paused by a slow reader
        self._touched: list[Sequence] = []
        self._n_added = 0
        self._deadline = float("inf")               # the earliest in the queue
        self._service_s = SERVICE_S

    # -- coming and going -------------------------------------------------------------------------------------------------

    def add(self, seq: Sequence) -> None:
        self._n_added += 1
        seq.order = self._n_added
        if self.blocks.cache:
            chain_keys(seq.keys, seq.tokens)
        self.queue.add(seq)
        if seq.request.deadline is not None:
            self._deadline = min(self._deadline, seq.request.deadline)

    def cancel(self, seq: Sequence) -> None:
        """Between steps: its blocks are free at once, what was computed stays cached. No further items."""
        if seq.state == QUEUED:
            self.queue.remove(seq)
            self._end(seq)
        elif seq.state == ACTIVE:
            self._leave(seq)
            self._end(seq)
        seq.items.clear()

    @property
    def n_live(self) -> int:
        return len(self.active) + len(self.queue)

    def retry_after_s(self) -> int:
        """When a place will be free, as far as the last sequences tell: 1 .. 60."""
        return max(1, min(60, ceil(self._service_s / self.parallel)))

    def wake_at(self) -> float | None:
        """When plan() may have something to do without anybody's coming or going; None: never."""
        times = [s.due for s in self.active if not s.paused or s.n_left > 1]
        if self.queue and self._deadline < float("inf"):
            times.append(self._deadline)
        return min(times, default=None)

    def take(self) -> list[tuple[Sequence, list[Item]]]:
        """What happened since the last call, per sequence in order."""
        taken = []
        for seq in self._touched:
            if seq.items:
                taken.append((seq, seq.items))
                seq.items = []
        self._touched.clear()
        return taken

    def _emit(self, seq: Sequence, item: Item) -> None:
        if not seq.items:
            self._touched.append(seq)
        seq.items.append(item)

    # -- planning ---------------------------------------------------------------------------------------------------------

    def plan(self, now: float) -> Plan | None:
        """The next step, or None: nothing can run before wake_at() or somebody's coming."""
        if now >= self._deadline:
            self._expire(now)
        if self._fetches:
            self._fetches.land(len(self.active))
        if self.queue:
            self._admit(now)
        rows: list[int] = []
        plan = Plan(Batch(array("i"), [], []), [], 0, 0, 0)
        decoding: list[Sequence] = []
        prefilling: list[Sequence] = []
        self._idle.clear()
        for seq in self.active:
            if seq.due > now:
                continue
            if len(seq.tokens) - seq.n_computed > 1 or seq.scoring:
                prefilling.append(seq)
            else:                       # paused is read once: another thread sets it at any time
                (self._idle if seq.paused else decoding).append(seq)
        for seq in decoding:            # preemption takes idle ones and the youngest: never one that is planned already
            if seq.state == ACTIVE and plan.n_decode + plan.n_drafts < self.max_rows:
                self._plan_decode(plan, rows, seq, len(decoding))
        room = self.pace.rows(plan.n_decode, self.max_rows - plan.n_decode - plan.n_drafts)
        prefilling = [s for s in prefilling if s.state == ACTIVE]
        if prefilling and room > 0:
            self._plan_prefill(plan, rows, prefilling, room)
        if not plan.parts:
            return None
        plan.batch.rows = array("i", rows)
        return plan

    def _plan_decode(self, plan: Plan, rows: list[int], seq: Sequence, n_decoding: int) -> None:
        at = seq.n_computed
        if at // BLOCK >= len(seq.table):
            self._grow(seq)
            if seq.state != ACTIVE:                     # preempted itself
                return
        if seq.constraint is not None and not self._mask(seq):
            return
        drafts: Any = ()
        if self._speculate is not None and seq.speculates:
            drafts = self._drafts(plan, seq, n_decoding)
        batch = plan.batch
        index, first = len(batch.tables), len(batch.samplers)
        batch.tables.append(seq.table)
        batch.samplers.append(seq.sampler)
        rows += (seq.tokens[at], at, index, first)
        for i, token in enumerate(drafts, 1):
            batch.samplers.append(seq.sampler)
            rows += (token, at + i, index, first + i)
        plan.n_decode += 1
        plan.n_drafts += len(drafts)
        plan.parts.append(Part(seq, 1 + len(drafts), first, 1 + len(drafts), drafts))

    def _drafts(self, plan: Plan, seq: Sequence, n_decoding: int) -> Any:
        """Guessed tokens to verify in this step: as many as the sequence may still generate and blocks hold."""
        most = min(seq.max_tokens - seq.n_output - 1, self.n_ctx - len(seq.tokens) - 1,
                   self.max_rows - plan.n_drafts - n_decoding)
        drafts = self._speculate.draft(seq, most, n_decoding) if most > 0 else ()
        while drafts and (seq.n_computed + len(drafts)) // BLOCK >= len(seq.table):
            if self.blocks.n_available <= len(self.active):
                return drafts[:len(seq.table) * BLOCK - 1 - seq.n_computed]
            seq.table.append(self.blocks.allocate())
        return drafts

    def _mask(self, seq: Sequence) -> bool:
        try:
            seq.sampler.mask = seq.constraint.mask()
            return True
        except Exception as e:      # the grammar library's own errors: they end this sequence only
            self._fault(seq, EngineFault(f"the grammar of this request failed: {e}"))
            return False

    def _plan_prefill(self, plan: Plan, rows: list[int], prefilling: list[Sequence], room: int) -> None:
        shortest = min(prefilling, key=lambda s: s.n_left)
        order = [prefilling[0]] + [s for s in (shortest, *prefilling) if s is not prefilling[0]]
        shares: dict[int, int] = {}
        half = (room + 1) // 2
        for seq, most in ((prefilling[0], half), (shortest, room - half), *((s, room) for s in order)):
            given = shares.get(seq.order, 0)
            more = min(most, seq.n_left - given, room)
            if more > 0:
                shares[seq.order] = given + more
                room -= more
        for seq in prefilling:
            if seq.order in shares:
                self._plan_chunk(plan, rows, seq, shares[seq.order])

    def _plan_chunk(self, plan: Plan, rows: list[int], seq: Sequence, n: int) -> None:
        start = seq.n_computed
        scoring = seq.scoring
        if scoring:
            n = min(n, SCORE_ROWS)
        last = start + n == len(seq.tokens)
        if not last and n >= BLOCK:
            n -= (start + n) % BLOCK        # whole blocks: the next chunk begins at a tile
        if last and seq.constraint is not None and not self._mask(seq):
            return
        batch = plan.batch
        index, first = len(batch.tables), len(batch.samplers)
        batch.tables.append(seq.table)
        tokens = seq.tokens
        for at in range(start, start + n):
            output = -1
            if at == len(tokens) - 1:
                output = len(batch.samplers)
                batch.samplers.append(seq.sampler)
            elif scoring and at + 1 < seq.n_prompt and at + 1 >= seq.n_scored:
                output = len(batch.samplers)
                batch.samplers.append(SamplerArgs(n_top=max(0, seq.sampler.n_top), forced=tokens[at + 1]))
            rows += (tokens[at], at, index, output)
        plan.n_prefill += n
        plan.parts.append(Part(seq, n, first, len(batch.samplers) - first))

    # -- places and blocks ------------------------------------------------------------------------------------------------

    def _admit(self, now: float) -> None:
        while True:
            seq = self.queue.next(self._ready, self._running)
            if seq is None:
                break
            if len(self.active) >= self.parallel:
                self._idle = [s for s in self.active if s.paused and s.n_left == 1]
                if not self._idle:
                    break
                self._preempt()
            if not self._start(seq, now):
                break
        for i, seq in enumerate(self.queue):
            if seq.position != i + 1 and not seq.admitted:
                seq.position = i + 1
                self._emit(seq, Prefill(0, seq.n_prompt, 0, i + 1))

    def _ready(self, seq: Sequence) -> bool:
        if seq.paused and seq.admitted:
            return False
        fetches = self._fetches
        if self._pending and seq.keys and not (fetches is not None and seq in fetches):
            if seq.wait_key is not None and seq.wait_key in self._pending:
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
            if key in self._pending:
                shared = key
            elif shared is not None or self.blocks.lookup(key) is None:
                break
        return shared

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
                return bool(self._fetches and self._fetches.give_back()) and self._start(seq, now)
        for block in found:
            blocks.hold(block)
        seq.table.extend(found)
        seq.n_registered = len(found)
        seq.n_computed = len(found) * BLOCK
        if data:
            self._start_partial(seq, data[4 * seq.n_computed:4 * most], n_total)
        while len(seq.table) < n_total:
            seq.table.append(blocks.allocate())             # n_available said that there is one
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
        if self._fetches:
            self._fetches.drop(seq)
        seq.state = ACTIVE
        client = seq.request.client
        self._running[client] = self._running.get(client, 0) + 1
        self.active.append(seq)
        self.active.sort(key=lambda s: s.order)
        if seq.request.cacheable:
            for key in seq.keys[seq.n_registered:]:
                self._pending.setdefault(key, seq)
        self.n_cached += seq.n_computed
        if not seq.admitted:
            seq.admitted = True
            seq.n_cached = seq.n_computed
            seq.started_at = now
            self._emit(seq, Admitted(seq.n_prompt, seq.n_cached))

    def _grow(self, seq: Sequence) -> None:
        """One more block, if need be of others; may preempt seq itself."""
        while True:
            block = self.blocks.allocate()
            if block is not None:
                seq.table.append(block)
                return
            if self._fetches and self._fetches.give_back():
                continue
            self._preempt()
            if seq.state != ACTIVE:
                return

    def _preempt(self) -> None:
        """Sends the youngest active sequence back to the queue, an idle one before others."""
        seq = (self._idle or self.active)[-1]
        self._leave(seq)
        seq.state = QUEUED
        seq.wait_key = None
        self.queue.add_preempted(seq)
        self.n_preempted += 1

    def _leave(self, seq: Sequence, seal: bool = True) -> None:
        """Gives an active sequence's place and blocks back; what it computed stays cached."""
        self.active.remove(seq)
        if seq in self._idle:
            self._idle.remove(seq)
        client = seq.request.client
        self._running[client] -= 1
        if not self._running[client]:
            del self._running[client]
        for key in seq.keys[seq.n_registered:]:
            if self._pending.get(key) is seq:
                del self._pending[key]
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

    def _end(self, seq: Sequence) -> None:
        seq.state = ENDED
        if self._fetches:
            self._fetches.drop(seq)
        if self._on_end is not None:
            self._on_end(seq)

    def _expire(self, now: float) -> None:
        self._deadline = float("inf")
        for seq in list(self.queue):
            deadline = seq.request.deadline
            if deadline is None or seq.admitted:
                continue
            if deadline <= now:
                self.queue.remove(seq)
                self._end(seq)
                self._emit(seq, Fault(MiladError("overloaded", "the request waited for its turn longer than its deadline",
                                                 retry_after_s=self.retry_after_s())))
            else:
                self._deadline = min(self._deadline, deadline)

    # -- results ----------------------------------------------------------------------------------------------------------

    def commit(self, plan: Plan, outputs: list[Output], now: float) -> None:
        """Takes what a step computed. Sequences that ended meanwhile stay as they are."""
        self.n_prefilled += plan.n_prefill
        for part in plan.parts:
            seq = part.sequence
            if seq.state != ACTIVE:
                continue
            if part.drafts:
                self._commit_drafts(seq, part, outputs, now)
                continue
            if part.n_rows == 1 and seq.n_left == 1 and not seq.scoring:
                output = outputs[part.first]
                if output.token == WAIT:
                    seq.due = output.due
                    continue
                seq.n_computed += 1
                if seq.n_computed % BLOCK == 0 or seq.n_output == 0:
                    self._computed(seq)
                self._token(seq, output, now)
            else:
                self._commit_chunk(seq, part, outputs, now)

    def _commit_chunk(self, seq: Sequence, part: Part, outputs: list[Output], now: float) -> None:
        n = seq.n_computed + part.n_rows
        outs = outputs[part.first:part.first + part.n_outputs]
        final = outs.pop() if n == len(seq.tokens) else None
        waits = final is not None and final.token == WAIT
        seq.n_computed = n - waits
        self._computed(seq)
        if seq.scoring:
            self._scored(seq, outs)
        if seq.n_output == 0:
            self._emit(seq, Prefill(seq.n_computed, seq.n_prompt, seq.n_cached))
        if waits:
            seq.due = final.due
        elif final is not None:
            self._token(seq, final, now)

    def _scored(self, seq: Sequence, outs: list[Output]) -> None:
        seq.n_scored = max(seq.n_scored, 1)
        for out in outs:
            self._emit(seq, Scored(seq.tokens[seq.n_scored], out.logprob, out.top))
            seq.n_scored += 1

    def _commit_drafts(self, seq: Sequence, part: Part, outputs: list[Output], now: float) -> None:
        """Keeps tokens up to and including the first that differs from its draft: what plain decoding would have drawn."""
        n_accepted = 0
        for i in range(part.n_outputs):
            output = outputs[part.first + i]
            seq.n_computed += 1
            if seq.n_computed % BLOCK == 0:
                self._computed(seq)
            kept = i < len(part.drafts) and output.token == part.drafts[i]
            n_accepted += kept
            if not self._token(seq, output, now) or not kept:
                break
        self.n_drafted += len(part.drafts)
        self.n_accepted += n_accepted
        self._speculate.note(seq, len(part.drafts), n_accepted)

    def _computed(self, seq: Sequence) -> None:
        """Makes newly full blocks known to the cache; at the end of the prompt also its last, partial one."""
        blocks = self.blocks
        if not blocks.cache or not seq.request.cacheable:
            return
        n_full = seq.n_computed // BLOCK
        if n_full > seq.n_registered:
            chain_keys(seq.keys, seq.tokens)
            for i in range(seq.n_registered, n_full):
                key = seq.keys[i]
                self._pending.pop(key, None)
                seq.table[i] = blocks.register(seq.table[i], seq.keys[i - 1] if i else ROOT,
                                               seq.tokens[i * BLOCK:(i + 1) * BLOCK].tobytes(), key)
                seq.n_registered = i + 1
        elif seq.n_output == 0 and seq.n_computed == seq.n_prompt:
            self._seal(seq)

    def _token(self, seq: Sequence, out: Output, now: float) -> bool:
        """Takes a drawn token. False: the sequence ended with it."""
        token = out.token
        if out.fault is not None or token < 0:
            self._fault(seq, EngineFault(out.fault or "no token is possible: the logits are not finite or the grammar allows none"))
            return False
        seq.tokens.append(token)
        seq.n_output += 1
        self.n_generated += 1
        if token in seq.stop_ids or out.end:
            return self._finish(seq, "stop", now)
        if seq.constraint is not None and seq.play is None:
            try:
                seq.constraint.accept(token)
            except Exception as e:
                self._fault(seq, EngineFault(f"the grammar of this request failed: {e}"))
                return False
        self._emit(seq, Token(token, self._token_bytes(token) if out.data is None else out.data, out.logprob, out.top))
        if seq.n_output >= seq.max_tokens:
            return self._finish(seq, "length", now)
        if len(seq.tokens) >= self.n_ctx:
            return self._finish(seq, "context", now)
        return True

    def _finish(self, seq: Sequence, reason: str, now: float) -> bool:
        self._service_s += 0.2 * (min(600.0, now - seq.started_at) - self._service_s)
        self._leave(seq)
        self._end(seq)
        self._emit(seq, Done(reason, seq.n_prompt, seq.n_cached, seq.n_output))
        return False

    def _fault(self, seq: Sequence, error: Exception) -> None:
        self._leave(seq, seal=False)
        self._end(seq)
        self._emit(seq, Fault(error))

    def fail(self, sequences: list[Sequence], error: Exception) -> None:
        """A step failed, or everything ends: these sequences end with a Fault, what earlier steps computed stays known."""
        for seq in sequences:
            if seq.state == QUEUED:
                self.queue.remove(seq)
                self._end(seq)
                self._emit(seq, Fault(error))
            elif seq.state == ACTIVE:
                self._fault(seq, error)

    def check(self) -> None:
        """The invariants between steps; AssertionError where one fails."""
        self.blocks.check([*(s.table for s in self.active), *(self._fetches.tables() if self._fetches else ())])
        for seq in self.active:
            assert seq.state == ACTIVE and seq.n_computed < len(seq.tokens)
            assert len(seq.table) * BLOCK >= seq.n_computed
            assert seq.n_registered <= seq.n_computed // BLOCK
            assert seq.n_output == len(seq.tokens) - seq.n_prompt
        assert len(self.active) <= self.parallel
        for key, seq in self._pending.items():
            assert seq.state == ACTIVE and key in seq.keys[seq.n_registered:] or seq in self._fetches
        for seq in self.queue:
            assert seq.state == QUEUED and not seq.table

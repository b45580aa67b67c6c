"""Which rows the next step computes: plan() makes a batch, commit() takes its outputs. Pure policy.

Rules
- Running streams first, one row each (more where drafts are verified), then prompt chunks fill what Pace allows: half for the
  oldest prompt, half for the shortest, so that a short one need not wait for a long one and the long one always moves.
- Who runs and on which blocks is Places' business.
- Items for the readers collect on the sequences; take() hands them out once per step.

Engine thread only. Knows Places and Pace; must not know threads, clocks (`now` is handed in), tokenizers or the core.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, Callable

from ..errors import EngineFault, MiladError
from .base import BLOCK, WAIT, Admitted, Batch, Done, Fault, Item, Output, Prefill, SamplerArgs, Scored, Token
from .blocks import Blocks
from .pace import Pace
from .places import Places
from .sequence import ACTIVE, ENDED, Sequence

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
        self.places = Places(blocks, n_ctx=n_ctx, parallel=parallel, copy=copy, tier=tier, write=write)
        self.blocks = blocks
        self.active = self.places.active            # by order of arrival
        self.queue = self.places.queue
        self.n_ctx = n_ctx
        self.max_rows = max_rows
        self.pace = pace or Pace()
        self.n_prefilled = self.n_generated = self.n_drafted = self.n_accepted = 0
        self._token_bytes = token_bytes
        self._speculate = speculate
        self._tier = tier
        self._on_end = on_end
        self._touched: list[Sequence] = []
        self._n_added = 0
        self._deadline = float("inf")               # the earliest in the queue
        self._service_s = SERVICE_S

    # -- coming and going -------------------------------------------------------------------------------------------------

    def add(self, seq: Sequence) -> None:
        self._n_added += 1
        seq.order = self._n_added
        self.places.add(seq)
        if seq.request.deadline is not None:
            self._deadline = min(self._deadline, seq.request.deadline)

    def cancel(self, seq: Sequence) -> None:
        """Between steps: its blocks are free at once, what was computed stays cached. No further items."""
        if seq.state != ENDED:
            self._end(seq)
        seq.items.clear()

    @property
    def n_live(self) -> int:
        return len(self.active) + len(self.queue)

    def retry_after_s(self) -> int:
        """When a place will be free, as far as the last sequences tell: 1 .. 60."""
        return max(1, min(60, ceil(self._service_s / self.places.parallel)))

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
        if self.queue:
            self._admit(now)
        rows: list[int] = []
        plan = Plan(Batch(array("i"), [], []), [], 0, 0, 0)
        decoding: list[Sequence] = []
        prefilling: list[Sequence] = []
        idle = self.places.idle
        idle.clear()
        for seq in self.active:
            if seq.due > now:
                continue
            if len(seq.tokens) - seq.n_computed > 1 or seq.scoring:
                prefilling.append(seq)
            else:                       # paused is read once: another thread sets it at any time
                (idle if seq.paused else decoding).append(seq)
        for seq in decoding:            # preemption takes idle ones and the youngest: never one that is planned already
            if seq.state == ACTIVE and plan.n_decode + plan.n_drafts < self.max_rows:
                self._plan_decode(plan, rows, seq, len(decoding))
        prefilling = [s for s in prefilling if s.state == ACTIVE]
        room = self.max_rows - plan.n_decode - plan.n_drafts
        if prefilling and room > 0:
            self._plan_prefill(plan, rows, prefilling, room)
        if not plan.parts:
            return None
        plan.batch.rows = array("i", rows)
        if self._tier is not None:
            self._tier.busy()
        return plan

    def _plan_decode(self, plan: Plan, rows: list[int], seq: Sequence, n_decoding: int) -> None:
        at = seq.n_computed
        if at // BLOCK >= len(seq.table):
            self.places.grow(seq)
            if seq.state != ACTIVE:                     # preempted itself
                return
        if seq.constraint is not None and not self._mask(seq):
            return
        drafts: Any = ()
        batch = plan.batch
        index, first = len(batch.tables), len(batch.samplers)
        batch.tables.append(seq.table)
        batch.samplers.append(seq.sampler)
        rows += (seq.tokens[at], at, index, first)
        if self._speculate is not None and seq.speculates:
            drafts, samplers = self._masked(seq, self._drafts(plan, seq, n_decoding))
            batch.samplers += samplers
            for i, token in enumerate(drafts, 1):
                rows += (token, at + i, index, first + i)
        plan.n_decode += 1
        plan.n_drafts += len(drafts)
        plan.parts.append(Part(seq, 1 + len(drafts), first, 1 + len(drafts), drafts))

    def _drafts(self, plan: Plan, seq: Sequence, n_decoding: int) -> Any:
        """Guessed tokens to verify in this step: as many as the sequence may still generate and blocks hold."""
        most = min(seq.max_tokens - seq.n_output - 1, self.n_ctx - len(seq.tokens) - 1,
                   self.max_rows - plan.n_drafts - n_decoding)
        drafts = self._speculate.draft(seq, most, n_decoding) if most > 0 else ()
        for i, token in enumerate(drafts):
            if token in seq.stop_ids:
                drafts = drafts[:i]         # the row before it draws it; none is needed after
                break
        while drafts and (seq.n_computed + len(drafts)) // BLOCK >= len(seq.table):
            if self.blocks.n_available <= len(self.active):
                return drafts[:len(seq.table) * BLOCK - 1 - seq.n_computed]
            seq.table.append(self.blocks.allocate())
        return drafts

    def _masked(self, seq: Sequence, drafts: Any) -> tuple[Any, list[SamplerArgs]]:
        """The drafts with the samplers of their rows: what a grammar allows differs from row to row."""
        if seq.constraint is None:
            return drafts, [seq.sampler] * len(drafts)
        if not drafts:
            return drafts, []
        try:
            ahead = seq.constraint.copy()
            samplers: list[SamplerArgs] = []
            mask = seq.sampler.mask
            for i, token in enumerate(drafts):
                if mask is not None and not mask[token >> 3] >> (token & 7) & 1:
                    return drafts[:i], samplers     # it can't be drawn, nor what would follow it
                ahead.accept(token)
                mask = ahead.mask()
                samplers.append(replace(seq.sampler, mask=mask))
            return drafts, samplers
        except Exception:                   # a grammar that can't look ahead decodes plainly
            seq.speculates = False
            return (), []

    def _mask(self, seq: Sequence) -> bool:
        try:
            seq.sampler.mask = seq.constraint.mask()
            return True
        except MiladError as e:     # a limit of the grammar, in the client's words
            self._fault(seq, e)
            return False
        except Exception as e:      # the grammar library's own errors: they end this sequence only
            self._fault(seq, EngineFault(f"the grammar of this request failed: {e}"))
            return False

    def _plan_prefill(self, plan: Plan, rows: list[int], prefilling: list[Sequence], room: int) -> None:
        shortest = min(prefilling, key=lambda s: s.n_left)
        room = self.pace.rows(plan.n_decode, plan.n_drafts, (prefilling[0].n_computed + shortest.n_computed) // 2, room)
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

    def _admit(self, now: float) -> None:
        for seq in self.places.admit(now):
            if not seq.announced:
                seq.announced = True
                self._emit(seq, Admitted(seq.n_prompt, seq.n_cached))
        for i, seq in enumerate(self.queue):
            if seq.position != i + 1 and not seq.admitted:
                seq.position = i + 1
                self._emit(seq, Prefill(0, seq.n_prompt, 0, i + 1))

    def _end(self, seq: Sequence, seal: bool = True) -> None:
        self.places.remove(seq, seal)
        seq.state = ENDED
        if self._on_end is not None:
            self._on_end(seq)

    def _expire(self, now: float) -> None:
        self._deadline = float("inf")
        for seq in list(self.queue):
            deadline = seq.request.deadline
            if deadline is None or seq.admitted:
                continue
            if deadline <= now and self.places.is_served(seq):
                self._deadline = min(self._deadline, now + 1.0)
            elif deadline <= now:
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
                    self.places.computed(seq)
                self._token(seq, output, now)
            else:
                self._commit_chunk(seq, part, outputs, now)

    def _commit_chunk(self, seq: Sequence, part: Part, outputs: list[Output], now: float) -> None:
        n = seq.n_computed + part.n_rows
        outs = outputs[part.first:part.first + part.n_outputs]
        final = outs.pop() if n == len(seq.tokens) else None
        waits = final is not None and final.token == WAIT
        seq.n_computed = n - waits
        self.places.computed(seq)
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
                self.places.computed(seq)
            kept = i < len(part.drafts) and output.token == part.drafts[i]
            n_accepted += kept
            if not self._token(seq, output, now) or not kept:
                break
        self.n_drafted += len(part.drafts)
        self.n_accepted += n_accepted
        self._speculate.note(seq, len(part.drafts), n_accepted)

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
        self._end(seq)
        self._emit(seq, Done(reason, seq.n_prompt, seq.n_cached, seq.n_output))
        return False

    def _fault(self, seq: Sequence, error: Exception) -> None:
        self._end(seq, seal=False)
        self._emit(seq, Fault(error))

    def fail(self, sequences: list[Sequence], error: Exception) -> None:
        """A step failed, or everything ends: these sequences end with a Fault, what earlier steps computed stays known."""
        for seq in sequences:
            if seq.state != ENDED:
                self._fault(seq, error)

"""The one engine thread: takes what arrives, plans, steps, commits, and tells the readers, once per step.

Rules
- Only this thread touches the scheduler and the context; others leave notes in the inbox. The step runs without the GIL.
- Idle means blocked on a condition: no polling. Delays (scripted plays, deadlines) are slept to, not spun.
- A step that fails ends the sequences that it held and nobody else; an error of the scheduler's own ends all sequences and
  starts with empty books. Either way the thread goes on.
- All items of a step go out in one post(deliver, batch), when the next step begins or nothing is left to do: post is Mailbox.post
  or anything alike; sinks are called on its side only, and never after their handle's cancel().
- A step whose every row belongs to cancelled sequences is interrupted; no other row is ever lost to a cancellation.
"""

from __future__ import annotations

import threading
import time
from typing import Any, Callable

from .. import log
from ..errors import ContextOverflow, EngineFault, MiladError
from .base import Context, Fault, Interrupted, Item, Model, Request
from .blocks import Blocks, chain_keys
from .disk import Disk
from .pace import Pace
from .remember import Memory
from .scheduler import Plan, Scheduler
from .sequence import ENDED, QUEUED, Sequence
from .speculate import Speculator

STALL_S = 60            # a step that takes longer hangs, as far as anybody can tell
MIN_SLEEP_S = 0.0005    # below this the clock's own grain makes waiting pointless


class _Handle:
    """base.Handle."""

    def __init__(self, engine: "Engine", seq: Sequence) -> None:
        self._engine = engine
        self._seq = seq

    def cancel(self) -> None:
        self._seq.cancelled = True
        self._engine._note(self._seq, stop=True)

    def pause(self) -> None:
        self._seq.paused = True

    def resume(self) -> None:
        self._seq.paused = False
        self._engine._note(None)


class Engine:
    """submit() requests, stats(), drain(), stop(). The thread starts with the object."""

    def __init__(self, model: Model, context: Context, *, post: Callable[..., Any], n_ctx: int, parallel: int = 4,
                 queue_limit: int = 64, step_rows: int | None = None, step_ms: float | None = None, cache: bool = True,
                 speculate: bool = False, disk_dir: str | None = None, disk_bytes: int = 0, kv_type: str = "f16",
                 clock: Callable[[], float] = time.monotonic) -> None:
        """n_ctx: tokens of one request, prompt and answer. parallel: sequences that run at once; queue_limit: that may wait
        beside them. step_rows: most rows of a step; step_ms: a step's target while somebody reads a stream (None: follows
        the decode speed). cache False: no prefix is kept. speculate: verify n-gram drafts. disk_dir, disk_bytes: where and how
        much of the cache outlives the process; kv_type: what the context was opened with."""
        self.n_ctx = n_ctx
        self.parallel = parallel
        self.queue_limit = queue_limit
        self.heartbeat = clock()        # when the thread last came round
        self.busy = False               # it does not sleep
        self._model = model
        self._context = context
        self._post = post
        self._clock = clock
        self._cache = cache
        self._speculate = speculate
        special = frozenset(model.specials.values())    # user-defined tokens are markup, too: never made of text
        self.remember = Memory(model.token_bytes, lambda t: t in special or model.is_control(t), frozenset(model.eog))
        self._disk: Disk | None = None
        if disk_dir and disk_bytes > 0 and cache and context.block_bytes:
            self._disk = Disk(disk_dir, disk_bytes, fingerprint=model.info.fingerprint, kv_type=kv_type, layout=context.layout,
                              block_bytes=context.block_bytes, wake=lambda: self._note(None))
        self._step_s = step_ms / 1000 if step_ms else None
        self._max_rows = min(context.max_rows, step_rows or context.max_rows)
        if not 1 <= parallel <= self._max_rows:
            raise ValueError(f"parallel {parallel} is not within 1 .. {self._max_rows} rows of a step")
        self._wake = threading.Condition()
        self._inbox: list[Sequence] = []
        self._cancels: list[Sequence] = []
        self._noted = False             # something changed since the notes were taken
        self._live: set[Sequence] = set()   # submitted and not ended
        self._stopping: MiladError | None = None
        self._draining = False
        self._stepping: tuple[Sequence, ...] = ()
        self._n_steps = self._n_faults = self._n_interrupted = 0
        self._step_total_s = 0.0
        self._rows_last: tuple[int, int] = (0, 0)
        self._scheduler = self._new_scheduler()
        self._thread = threading.Thread(target=self._run, name="milad-engine", daemon=True)
        self._thread.start()

    def _new_scheduler(self) -> Scheduler:
        pace = Pace(self._step_s)
        scheduler = Scheduler(
            Blocks(self._context.n_blocks, cache=self._cache), n_ctx=self.n_ctx, parallel=self.parallel,
            max_rows=self._max_rows, token_bytes=self._model.token_bytes, copy=self._context.kv_copy,
            pace=pace, speculate=Speculator(pace) if self._speculate else None, on_end=self._ended,
            tier=self._disk, write=self._context.kv_write)
        if self._disk is not None:
            self._disk.attach(scheduler.blocks, self._context)
        return scheduler

    # -- any thread -------------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> _Handle:
        """Queues a request. Raises ContextOverflow where it can never fit, MiladError overloaded (with retry_after_s) where the
        queue is full, unavailable while the engine drains."""
        n = len(request.tokens)
        if n + 1 > self.n_ctx:
            raise ContextOverflow(n, self.n_ctx)
        if n == 0:
            raise MiladError("invalid", "the prompt is empty: it has no tokens")
        seq = Sequence(request, self.n_ctx)
        if self._cache:
            chain_keys(seq.keys, seq.tokens)        # here and not in the engine's thread, which others wait for
        handle = _Handle(self, seq)
        seq.handle = handle
        if self.stalled_s() >= STALL_S:
            raise MiladError("unavailable", f"the engine has been in one step for {self.stalled_s():.0f} s and takes nothing new",
                             retry_after_s=10)
        with self._wake:
            if self._stopping or self._draining:
                raise MiladError("unavailable", "the server is shutting down")
            if len(self._live) >= self.parallel + self.queue_limit:
                raise MiladError("overloaded", f"{len(self._live)} requests are running or waiting, which is all this server takes",
                                 retry_after_s=self._scheduler.retry_after_s())
            self._live.add(seq)
            self._inbox.append(seq)
            self._noted = True
            self._wake.notify_all()
        return handle

    def _note(self, seq: Sequence | None, stop: bool = False) -> None:
        """Wakes the thread; seq: was cancelled."""
        with self._wake:
            if seq is not None:
                self._cancels.append(seq)
            self._noted = True
            stepping = self._stepping
            self._wake.notify_all()
        if stop and stepping and all(s.cancelled for s in stepping):
            self._context.interrupt()

    def stalled_s(self) -> float:
        """How long the thread has not come round, in a step or elsewhere; 0 when idle."""
        return max(0.0, self._clock() - self.heartbeat) if self.busy else 0.0

    def drain(self, timeout_s: float) -> bool:
        """Takes nothing new and waits for what runs. False: some of it still does."""
        end = time.monotonic() + timeout_s
        with self._wake:
            self._draining = True
            while self._live:
                left = end - time.monotonic()
                if left <= 0 or not self._thread.is_alive():
                    return False
                self._wake.wait(left)
        return True

    def stop(self, timeout_s: float = 5.0) -> bool:
        """Ends every sequence with a Fault and the thread with them. The context may be closed afterwards if this returns
        True; False: a step hangs."""
        with self._wake:
            self._stopping = MiladError("unavailable", "the server is shutting down")
            self._wake.notify_all()
        self._context.interrupt()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def stats(self) -> dict[str, Any]:
        """Counters and gauges for /metrics and /props; read without a lock, each value is true by itself."""
        s, b = self._scheduler, self._scheduler.blocks
        pace = s.pace
        reading = [q for q in list(s.active) if q.n_output == 0]
        stats = {
            "n_running": len(s.active), "n_queued": max(0, len(self._live) - len(s.active)), "parallel": self.parallel,
            "queue_limit": self.queue_limit, "n_ctx": self.n_ctx, "n_steps": self._n_steps, "n_faults": self._n_faults,
            "n_interrupted": self._n_interrupted, "step_s_total": self._step_total_s,
            "n_prompt_tokens": s.n_prefilled, "n_cached_tokens": s.places.n_cached, "n_generated_tokens": s.n_generated,
            "n_reading": sum(q.n_prompt for q in reading), "n_read": sum(min(q.n_computed, q.n_prompt) for q in reading),
            "n_read_cached": sum(q.n_cached for q in reading),
            "n_preempted": s.places.n_preempted, "n_drafted": s.n_drafted, "n_accepted": s.n_accepted,
            "n_blocks": b.n_blocks, "n_blocks_free": b.n_free, "n_blocks_cached": b.n_cached,
            "n_blocks_held": b.n_blocks - b.n_available, "n_evicted": b.n_evicted,
            "decode_step_s": pace.decode_s or 0.0, "prefill_row_s": pace.row_s or 0.0, "stalled_s": self.stalled_s(),
        }
        if self._disk is not None:
            stats["disk"] = self._disk.stats()
        return stats

    def sequences(self) -> list[dict[str, Any]]:
        """What runs and waits, oldest first, for a person: numbers and clients' names, no prompts."""
        s = self._scheduler
        try:
            found = [*s.active, *s.queue]
        except RuntimeError:    # the queue moves
            found = list(s.active)
        return [{"order": q.order, "client": q.request.client, "state": "queued" if q.state == QUEUED else "paused" if q.paused
                 else "prefill" if q.n_left > 1 else "decode", "n_prompt": q.n_prompt, "n_cached": q.n_cached,
                 "n_computed": q.n_computed, "n_output": q.n_output, "n_blocks": len(q.table)} for q in found]

    def dump(self) -> str:
        """What runs, for a person (SIGUSR1, /metrics?debug): lines of text, no prompts."""
        s = self._scheduler
        lines = [f"{k} {v}" for k, v in self.stats().items()]
        lines.append(f"busy {self.busy}, last step {self._rows_last[0]} decode and {self._rows_last[1]} prefill rows")
        lines += [repr(q) for q in list(s.active)]
        try:
            lines += [repr(q) for q in s.queue]
        except RuntimeError:    # it changed meanwhile
            lines.append("(the queue is moving)")
        return "\n".join(lines)

    # -- the engine thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            self.heartbeat = self._clock()
            self.busy = True
            try:
                if not self._take_notes():
                    return
                if not self._scheduler.active:
                    self._deliver()     # no step to wait for, and newcomers' blocks may be long in coming from the disk
                plan = self._scheduler.plan(self._clock())
                if plan is not None:
                    self._step(plan)
                else:
                    self._deliver()
            except Exception as e:      # a bug of ours: nobody may hang on it
                self._reset(e)
                continue
            if plan is None and not (self._disk is not None and self._disk.idle()):
                self._sleep()

    def _take_notes(self) -> bool:
        """Moves the inbox into the scheduler. False: the thread shall end."""
        with self._wake:
            inbox, self._inbox = self._inbox, []
            cancels, self._cancels = self._cancels, []
            self._noted = False
            stopping = self._stopping
        scheduler = self._scheduler
        for seq in inbox:
            if seq.cancelled:
                seq.state = ENDED
                self._ended(seq)
            else:
                scheduler.add(seq)
        for seq in cancels:
            if seq.state != ENDED:
                scheduler.cancel(seq)
        if stopping is None:
            return True
        scheduler.fail([*scheduler.active, *scheduler.queue], stopping)
        self._deliver()
        if self._disk is not None:
            self._disk.close()
        return False

    def _sleep(self) -> None:
        """Until somebody comes, goes or resumes, or a delay is over."""
        with self._wake:
            if self._noted or self._stopping:
                return
            wake_at = self._scheduler.wake_at()
            self.busy = False
            if wake_at is None:
                self._wake.wait()
            else:
                self._wake.wait(max(MIN_SLEEP_S, wake_at - self._clock()))

    def _step(self, plan: Plan) -> None:
        sequences = [p.sequence for p in plan.parts]
        with self._wake:
            self._stepping = tuple(sequences)
            if self._cancels:           # came since the notes were taken: the plan may be about to compute for nobody
                self._stepping = ()
                return
        self._deliver()                 # now: the readers' side runs while the step computes, and doesn't hold the plan up
        start = self.heartbeat = self._clock()
        try:
            outputs = self._context.step(plan.batch)
        except Interrupted:
            self._n_interrupted += 1
            return
        except Exception as e:
            self._n_faults += 1
            log.logger.error("a step of %d sequences failed: %s", len(sequences), e, exc_info=not isinstance(e, EngineFault))
            error = e if isinstance(e, EngineFault) else EngineFault(f"{type(e).__name__}: {e}")
            self._scheduler.fail(sequences, error)
            return
        finally:
            self._stepping = ()
            now = self.heartbeat = self._clock()
        self._n_steps += 1
        self._step_total_s += now - start
        self._rows_last = plan.n_decode, plan.n_prefill
        self._scheduler.pace.note(plan.n_decode, plan.n_drafts, plan.n_prefill, now - start)
        self._scheduler.commit(plan, outputs, now)

    def _deliver(self) -> None:
        taken = self._scheduler.take()
        if not taken:
            return
        try:
            self._post(_deliver, taken)
        except RuntimeError:            # the event loop is closed: nobody reads any more
            for seq, _ in taken:
                seq.cancelled = True
                if seq.state != ENDED:
                    self._scheduler.cancel(seq)

    def _ended(self, seq: Sequence) -> None:
        if seq.n_output and seq.request.cacheable:
            self.remember.note(seq.tokens, seq.n_prompt)
        with self._wake:
            self._live.discard(seq)
            self._wake.notify_all()

    def _reset(self, error: Exception) -> None:
        """The scheduler failed: every sequence ends, the next ones start with empty books."""
        self._n_faults += 1
        log.logger.error("the scheduler failed: %s", error, exc_info=True)
        with self._wake:
            sequences = [s for s in self._live if s not in self._inbox]
            self._live.difference_update(sequences)
            self._wake.notify_all()
        batch = self._scheduler.take()      # what ended before is whole
        self._scheduler = self._new_scheduler()
        for seq in sequences:
            seq.state = ENDED
            batch.append((seq, [Fault(EngineFault(f"{type(error).__name__}: {error}"))]))
        try:
            self._post(_deliver, batch)
        except RuntimeError:
            pass


def _deliver(batch: list[tuple[Sequence, list[Item]]]) -> None:
    """On post's side: hands the items to their sinks."""
    for seq, items in batch:
        if seq.cancelled:
            continue
        try:
            seq.request.sink(items)
        except Exception:
            log.logger.exception("a reader of the engine's items failed")

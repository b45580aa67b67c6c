"""The engine thread over the fake core: delivery, cancellation, faults, idling, draining, stopping."""

from __future__ import annotations

import queue
import resource
import threading
import time
from typing import Any, Iterator

import pytest

from fake import EOS, FakeContext, FakeModel, naive
from milad.engine.base import WAIT, Admitted, Done, Fault, Interrupted, Output, Request, SamplerArgs, Token
from milad.engine.loop import Engine
from milad.errors import ContextOverflow, EngineFault, MiladError
from test_scheduler import prompt

N_CTX = 256


class Gate(FakeContext):
    """A fake core whose steps can be held until the test lets them go; interrupt() ends a held step."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.open = threading.Event()
        self.open.set()
        self.inside = threading.Event()
        self.error: Exception | None = None
        self.n_interrupts = 0

    def step(self, batch: Any) -> list[Output]:
        self.inside.set()
        while not self.open.wait(0.002):
            if self.interrupted:
                self.interrupted = False
                self.n_interrupts += 1
                raise Interrupted
        self.inside.clear()
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return super().step(batch)


class Reader:
    """One submitted request's items, put together as they come."""

    def __init__(self, engine: Engine, tokens: list[int], max_tokens: int = 20, seed: int = 0, **options: Any) -> None:
        self.items: list[Any] = []
        self.ended = threading.Event()
        self.request = Request(tokens, max_tokens, SamplerArgs(seed=seed), frozenset({EOS}), self._sink, **options)
        self.handle = engine.submit(self.request)

    def _sink(self, items: list[Any]) -> None:
        self.items += items
        if isinstance(items[-1], (Done, Fault)):
            self.ended.set()

    def wait(self) -> Any:
        assert self.ended.wait(10), "the sequence never ended"
        return self.items[-1]

    def assert_right(self) -> None:
        done = self.wait()
        tokens, reason, n_output = naive(self.request.tokens, self.request.max_tokens, N_CTX, self.request.sampler)
        assert [i.id for i in self.items if isinstance(i, Token)] == tokens
        assert isinstance(done, Done) and (done.reason, done.n_output) == (reason, n_output)


@pytest.fixture
def context() -> Gate:
    return Gate(40, 64)


@pytest.fixture
def engine(context: Gate) -> Iterator[Engine]:
    e = Engine(FakeModel(), context, post=lambda f, *a: f(*a), n_ctx=N_CTX, parallel=3, queue_limit=4)
    yield e
    context.open.set()
    assert e.stop()


def until(condition: Any) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.001)


def test_many_at_once_equal_naive(engine: Engine) -> None:
    readers: list[Reader] = []
    for i in range(30):
        while True:
            try:
                readers.append(Reader(engine, prompt(i % 7, 20 + 7 * i), 30, i))
                break
            except MiladError as e:
                assert e.kind == "overloaded"
                time.sleep(0.001)
    for reader in readers:
        reader.assert_right()
    assert engine.stats()["n_blocks_held"] == 0


def test_one_post_per_step_carries_everybody(context: Gate) -> None:
    posts: queue.Queue[Any] = queue.Queue()
    context.open.clear()
    e = Engine(FakeModel(), context, post=lambda f, *a: posts.put((f, a)), n_ctx=N_CTX, parallel=3)
    try:
        readers = [Reader(e, prompt(i, 5), 4, i) for i in range(3)]
        until(context.inside.is_set)
        context.open.set()
        assert e.drain(10)
        n = posts.qsize()
        assert n <= context.n_steps + 2
        assert not any(r.items for r in readers), "sinks are called on post's side only"
        while not posts.empty():
            f, a = posts.get()
            f(*a)
        for reader in readers:
            reader.assert_right()
    finally:
        assert e.stop()


def test_overflow_and_full_queue(engine: Engine, context: Gate) -> None:
    with pytest.raises(ContextOverflow) as overflow:
        Reader(engine, prompt(1, N_CTX))
    assert (overflow.value.n_tokens, overflow.value.limit) == (N_CTX, N_CTX)
    context.open.clear()
    readers = [Reader(engine, prompt(i, 10), 5, i) for i in range(7)]
    with pytest.raises(MiladError) as full:
        Reader(engine, prompt(9, 10))
    assert full.value.kind == "overloaded" and 1 <= full.value.retry_after_s <= 60
    context.open.set()
    for reader in readers:
        reader.assert_right()
    Reader(engine, prompt(9, 10)).assert_right()


def test_cancel_interrupts_a_step_of_its_own_only(engine: Engine, context: Gate) -> None:
    context.open.clear()
    alone = Reader(engine, prompt(1, 200), 20)
    until(context.inside.is_set)
    alone.handle.cancel()
    until(lambda: engine.stats()["n_running"] == 0 and engine.stats()["n_queued"] == 0)
    assert context.n_interrupts == 1 and engine.stats()["n_blocks_held"] == 0
    assert not [i for i in alone.items if isinstance(i, (Token, Done, Fault))]
    context.open.set()
    Reader(engine, prompt(1, 200), 20).assert_right()


def test_cancel_disturbs_nobody_else(engine: Engine, context: Gate) -> None:
    first, second = Reader(engine, prompt(1, 20), 200, 7), Reader(engine, prompt(2, 20), 200, 8)
    context.inside.clear()
    context.open.clear()
    n_before = context.n_interrupts
    if context.inside.wait(0.2):
        first.handle.cancel()
        time.sleep(0.02)
        assert context.n_interrupts == n_before or first.ended.is_set() or second.ended.is_set()
    context.open.set()
    second.assert_right()


def test_a_fault_ends_its_step_only(engine: Engine, context: Gate) -> None:
    context.error = EngineFault("out of luck")
    lost = Reader(engine, prompt(1, 20))
    assert "out of luck" in str(lost.wait().error)
    context.error = ZeroDivisionError("a bug")
    lost = Reader(engine, prompt(2, 20))
    assert isinstance(lost.wait().error, EngineFault)
    Reader(engine, prompt(1, 20)).assert_right()
    assert engine.stats()["n_faults"] == 2


@pytest.mark.parametrize("part", ["plan", "add"])
def test_a_bug_of_the_scheduler_ends_nothing_but_its_sequences(engine: Engine, context: Gate, part: str) -> None:
    def broken(_: object) -> None:
        raise IndexError("books")

    context.open.clear()
    running = Reader(engine, prompt(1, 20))
    until(context.inside.is_set)
    setattr(engine._scheduler, part, broken)
    newcomer = Reader(engine, prompt(3, 20))
    context.open.set()
    assert isinstance(running.wait(), (Fault, Done)) and isinstance(newcomer.wait(), Fault)
    Reader(engine, prompt(2, 20)).assert_right()
    until(lambda: not engine._live)


def test_a_bug_of_the_memory_is_not_met_twice(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> None:
        raise IndexError("memory")

    with monkeypatch.context() as patch:
        patch.setattr(engine.remember, "note", broken)
        assert isinstance(Reader(engine, prompt(1, 20), 1).wait(), Fault)
    Reader(engine, prompt(2, 20)).assert_right()
    until(lambda: not engine._live)


def test_what_ended_before_a_bug_of_the_scheduler_arrives_whole(engine: Engine, context: Gate) -> None:
    """Its last items wait for the next step, which never comes."""
    def broken(now: float) -> None:
        raise IndexError("books")

    scheduler = engine._scheduler
    commit = scheduler.commit

    def last(*args: Any) -> None:
        commit(*args)
        scheduler.plan = broken

    context.open.clear()
    reader = Reader(engine, prompt(1, 20), 1)
    until(context.inside.is_set)
    scheduler.commit = last
    context.open.set()
    reader.assert_right()
    Reader(engine, prompt(2, 20)).assert_right()


def test_an_end_does_not_wait_for_who_comes_next(engine: Engine, context: Gate) -> None:
    """A newcomer's blocks may be long in coming from the disk."""
    plan = engine._scheduler.plan
    told: list[bool] = []

    def slow(now: float) -> Any:
        told.append(reader.ended.is_set())
        return plan(now)

    context.open.clear()
    reader = Reader(engine, prompt(1, 20), 1)
    until(context.inside.is_set)
    engine._scheduler.plan = slow
    context.open.set()
    reader.assert_right()
    until(lambda: told)
    assert told[0]


def test_a_reader_that_fails_disturbs_nobody(engine: Engine) -> None:
    def sink(items: list[Any]) -> None:
        raise KeyError("reader")

    engine.submit(Request(prompt(1, 20), 5, SamplerArgs(), frozenset({EOS}), sink))
    Reader(engine, prompt(2, 20)).assert_right()


def test_pause_and_resume(engine: Engine) -> None:
    reader = Reader(engine, prompt(5, 40), 100, 2)
    reader.handle.pause()
    until(lambda: not engine.busy)
    reader.handle.resume()
    reader.assert_right()


def test_idle_and_paused_take_no_cpu(engine: Engine, context: Gate) -> None:
    Reader(engine, prompt(5, 40)).assert_right()
    paused = Reader(engine, prompt(6, 40), 200, 2)
    paused.handle.pause()
    time.sleep(0.05)
    steps = context.n_steps
    before = resource.getrusage(resource.RUSAGE_SELF)
    time.sleep(0.4)
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert after.ru_nvcsw - before.ru_nvcsw < 20, "the engine polls"
    assert context.n_steps == steps
    paused.handle.resume()
    paused.assert_right()


def test_delays_are_slept_to(engine: Engine, context: Gate) -> None:
    start = time.monotonic()
    inner = context.step

    def step(batch: Any) -> list[Output]:
        calls.append(time.monotonic())
        outputs = inner(batch)
        return [Output(WAIT, due=start + 0.2)] if time.monotonic() < start + 0.2 else outputs

    calls: list[float] = []
    context.step = step
    reader = Reader(engine, prompt(1, 20), 5)
    reader.assert_right()
    assert sum(t < start + 0.2 for t in calls) <= 2


def test_drain_then_stop(context: Gate) -> None:
    e = Engine(FakeModel(), context, post=lambda f, *a: f(*a), n_ctx=N_CTX)
    running = Reader(e, prompt(1, 20), 30)
    assert e.drain(10)
    running.assert_right()
    with pytest.raises(MiladError) as refused:
        Reader(e, prompt(1, 20))
    assert refused.value.kind == "unavailable"
    assert e.stop()


def test_stop_ends_everybody(context: Gate) -> None:
    e = Engine(FakeModel(), context, post=lambda f, *a: f(*a), n_ctx=N_CTX, parallel=1)
    context.open.clear()
    readers = [Reader(e, prompt(i, 20), 30) for i in range(3)]
    until(context.inside.is_set)
    assert not e.drain(0.01)
    assert e.stop()
    for reader in readers:
        fault = reader.wait()
        assert isinstance(fault, Fault) and fault.error.kind == "unavailable"


def test_a_closed_event_loop_ends_the_work(context: Gate) -> None:
    def post(*args: Any) -> None:
        raise RuntimeError("Event loop is closed")

    e = Engine(FakeModel(), context, post=post, n_ctx=N_CTX)
    Reader(e, prompt(1, 20), 200)
    until(lambda: not e._live)
    assert e.stop()


def test_nothing_new_is_taken_while_a_step_hangs(engine: Engine, context: Gate) -> None:
    context.open.clear()
    reader = Reader(engine, prompt(1, 20))
    until(context.inside.is_set)
    engine._clock = lambda: time.monotonic() + 70
    with pytest.raises(MiladError) as refused:
        Reader(engine, prompt(2, 20))
    assert refused.value.kind == "unavailable"
    engine._clock = time.monotonic
    context.open.set()
    reader.assert_right()
    Reader(engine, prompt(2, 20)).assert_right()


def test_dump_and_heartbeat(engine: Engine, context: Gate) -> None:
    context.open.clear()
    reader = Reader(engine, prompt(1, 20))
    until(context.inside.is_set)
    time.sleep(0.01)
    assert engine.busy and engine.stalled_s() > 0
    assert "sequence 1 active" in engine.dump()
    context.open.set()
    reader.assert_right()
    until(lambda: not engine.busy)
    assert engine.stalled_s() == 0
    assert isinstance(reader.items[0], Admitted) or isinstance(reader.items[1], Admitted)

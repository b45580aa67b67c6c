"""scheduler, blocks and queue against the naive engine: the same text, books that balance after every step."""

from __future__ import annotations

import random
import sys
from array import array
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fake import EOS, FakeContext, FakeModel, naive                                             # noqa: E402
from milad.engine.base import (BLOCK, Admitted, Done, Fault, Interrupted, Output, Prefill, Request, SamplerArgs, Scored,  # noqa: E402
                               Token, WAIT)
from milad.engine.blocks import Blocks, chain_keys, common_tokens                               # noqa: E402
from milad.engine.pace import Pace                                                              # noqa: E402
from milad.engine.scheduler import Scheduler                                                    # noqa: E402
from milad.engine.sequence import ENDED, Sequence                                               # noqa: E402
from milad.engine.speculate import Speculator                                                   # noqa: E402
from milad.errors import EngineFault                                                            # noqa: E402


class Bench:
    """A scheduler over the fake core, driven step by step without a thread."""

    def __init__(self, *, n_blocks: int = 64, n_ctx: int = 512, parallel: int = 4, max_rows: int = 64, cache: bool = True,
                 speculate: bool = False, pace: Pace | None = None, tier: Any = None) -> None:
        pace = pace or Pace()
        self.context = FakeContext(n_blocks, max_rows)
        self.n_ctx = self.context.n_ctx = n_ctx
        self.scheduler = Scheduler(Blocks(n_blocks, cache=cache), n_ctx=n_ctx, parallel=parallel, max_rows=max_rows,
                                   token_bytes=FakeModel().token_bytes, copy=self.context.kv_copy, pace=pace,
                                   speculate=Speculator(pace) if speculate else None, tier=tier,
                                   write=self.context.kv_write)
        if tier is not None:
            tier.attach(self.scheduler.blocks, self.context)
        self.items: dict[Sequence, list[Any]] = {}
        self.plans: list[Any] = []
        self.now = 0.0

    def add(self, tokens: list[int], max_tokens: int = 20, **options: Any) -> Sequence:
        sampler = options.pop("sampler", None) or SamplerArgs(seed=options.pop("seed", 0))
        stops = options.pop("stop_ids", frozenset({EOS}))
        request = Request(list(tokens), max_tokens, sampler, stops, lambda items: None, **options)
        seq = Sequence(request, self.n_ctx)
        self.items[seq] = []
        self.scheduler.add(seq)
        return seq

    def step(self) -> bool:
        """False: there was nothing to do."""
        self.now += 0.01
        plan = self.scheduler.plan(self.now)
        self.plans.append(plan)
        if plan is not None:
            assert plan.n_decode + plan.n_drafts + plan.n_prefill == len(plan.batch.rows) // 4
            try:
                self.scheduler.commit(plan, self.context.step(plan.batch), self.now)
            except Interrupted:
                pass
            except EngineFault as e:
                self.scheduler.fail([p.sequence for p in plan.parts], e)
        for seq, items in self.scheduler.take():
            assert items
            self.items[seq] += items
        self.scheduler.places.check()
        return plan is not None

    def run(self, most: int = 10_000) -> None:
        while self.step():
            most -= 1
            assert most, "the schedule does not end"

    def tokens(self, seq: Sequence) -> list[int]:
        return [i.id for i in self.items[seq] if isinstance(i, Token)]

    def done(self, seq: Sequence) -> Any:
        return self.items[seq][-1] if self.items[seq] else None

    def assert_right(self, seq: Sequence) -> None:
        r = seq.request
        tokens, reason, n_output = naive(r.tokens, r.max_tokens, self.n_ctx, r.sampler, r.stop_ids)
        assert self.tokens(seq) == tokens
        done = self.done(seq)
        assert isinstance(done, Done) and (done.reason, done.n_output, done.n_prompt) == (reason, n_output, len(r.tokens))


def prompt(seed: int, n: int) -> list[int]:
    r = random.Random(seed)
    return [r.randrange(2, 60) for _ in range(n)]


def test_one_sequence_equals_naive() -> None:
    for n in (1, 2, 31, 32, 33, 64, 100, 200):
        b = Bench(max_rows=40)
        seq = b.add(prompt(n, n), 50)
        b.run()
        b.assert_right(seq)
        kinds = [type(i) for i in b.items[seq]]
        assert kinds[0] is Prefill and Admitted in kinds[:2] if kinds[0] is Prefill else kinds[0] is Admitted
        assert b.scheduler.blocks.n_available == 64


def test_known_prompt_computes_its_last_token_only() -> None:
    for n in (5, 31, 32, 33, 64, 65, 100):
        b = Bench()
        first = b.add(prompt(7, n), 5)
        b.run()
        before = b.context.n_rows
        again = b.add(prompt(7, n), 5)
        b.step()
        assert b.context.n_rows - before == 1
        b.run()
        b.assert_right(first)
        b.assert_right(again)
        assert b.done(again).n_cached == n - 1


def test_repeat_while_the_first_still_runs() -> None:
    b = Bench()
    b.add(prompt(7, 70), 60, stop_ids=frozenset())
    b.step()
    b.step()
    before = b.context.n_rows
    again = b.add(prompt(7, 70), 3)
    b.step()
    assert b.context.n_rows - before == 2
    b.run()
    b.assert_right(again)


def test_next_turn_reuses_prompt_and_answer() -> None:
    b = Bench()
    first = b.add(prompt(1, 90), 40)
    b.run()
    turn = first.request.tokens + b.tokens(first) + prompt(2, 10)
    second = b.add(turn, 10)
    b.run()
    b.assert_right(second)
    assert b.done(second).n_cached >= 90 + len(b.tokens(first)) - 1


def test_eight_clients_one_system_prompt() -> None:
    b = Bench(n_blocks=64, n_ctx=800, parallel=8)
    system = prompt(3, 600)
    seqs = [b.add(system + prompt(100 + i, 20), 10, client=str(i)) for i in range(8)]
    b.run()
    for seq in seqs:
        b.assert_right(seq)
    assert b.scheduler.n_prefilled <= 600 + 8 * (20 + BLOCK)


@pytest.mark.parametrize("n", [1, 5, 31, 32, 33, 200])
def test_choices_of_one_prompt_compute_it_once(n: int) -> None:
    b = Bench(parallel=4)
    seqs = [b.add(prompt(3, n), 8, seed=i) for i in range(4)]
    while any(not s.n_output for s in seqs):
        b.step()
    n_decoded = sum(s.n_output for s in seqs)
    assert b.context.n_rows <= n - 1 + n_decoded
    b.run()
    for seq in seqs:
        b.assert_right(seq)


def test_followers_go_on_when_their_leader_is_cancelled() -> None:
    b = Bench(n_blocks=64, n_ctx=800, parallel=3)
    system = prompt(3, 600)
    leader, *others = [b.add(system + [i + 2], 10) for i in range(3)]
    for _ in range(3):
        b.step()
    assert len(b.scheduler.active) == 1
    b.scheduler.cancel(leader)
    b.run()
    for seq in others:
        b.assert_right(seq)
    assert b.scheduler.n_prefilled <= 600 + 3 * BLOCK


def test_preempted_sequences_resume_with_the_same_text() -> None:
    b = Bench(n_blocks=8, n_ctx=256, parallel=4)
    seqs = [b.add(prompt(i, 40), 150, seed=i, stop_ids=frozenset()) for i in range(4)]
    b.run()
    for seq in seqs:
        b.assert_right(seq)
    assert b.scheduler.places.n_preempted > 0


def test_running_streams_get_a_row_in_every_step() -> None:
    b = Bench(n_blocks=64, n_ctx=1200, parallel=4, pace=Pace())
    short = b.add(prompt(40, 10), 60, seed=11, stop_ids=frozenset())
    while not b.tokens(short):
        b.step()
    b.add(prompt(1, 1000), 5)
    for _ in range(20):
        if short.state == ENDED:
            break
        n = short.n_output
        b.step()
        assert short.n_output == n + 1
        assert b.plans[-1].n_prefill <= 32
    b.run()


def test_short_prompt_passes_a_long_one() -> None:
    b = Bench(n_blocks=64, n_ctx=1200, max_rows=64)
    long = b.add(prompt(1, 1000), 5)
    b.step()
    short = b.add(prompt(2, 60), 5, stop_ids=frozenset())
    for _ in range(4):
        b.step()
    assert b.tokens(short) and not b.tokens(long)
    b.run()


def test_one_client_does_not_starve_another() -> None:
    b = Bench(parallel=2)
    many = [b.add(prompt(i, 30), 10, client="greedy", seed=i) for i in range(30)]
    one = b.add(prompt(99, 30), 10, client="patient")
    ended = 0
    while one.state != ENDED:
        b.step()
    ended = sum(s.state == ENDED for s in many)
    assert ended <= 4
    b.run()
    for seq in (*many, one):
        b.assert_right(seq)


def ended_in_order(b: Bench, seqs: list[Sequence]) -> list[Sequence]:
    order: list[Sequence] = []
    while b.step():
        order += [s for s in seqs if s.state == ENDED and s not in order]
    return order


def test_clients_take_turns() -> None:
    b = Bench(parallel=1)
    first = [b.add(prompt(i, 30), 5, client="first", seed=i) for i in range(3)]
    second = [b.add(prompt(9 + i, 30), 5, client="second", seed=i) for i in range(3)]
    assert ended_in_order(b, first + second) == [s for pair in zip(first, second) for s in pair]


def test_who_runs_less_comes_first() -> None:
    b = Bench(parallel=2)
    never = frozenset[int]()
    long = b.add(prompt(1, 30), 100, client="busy", stop_ids=never)
    short = b.add(prompt(2, 30), 5, client="other", stop_ids=never)
    b.step()
    waiting = [b.add(prompt(3 + i, 30), 5, client=c, stop_ids=never) for i, c in enumerate(("busy", "other", "other"))]
    order = ended_in_order(b, [long, short, *waiting])
    assert order == [short, waiting[1], waiting[2], waiting[0], long]


def test_a_prompt_loses_its_blocks_to_a_running_stream_in_the_plan_itself() -> None:
    b = Bench(n_blocks=13, n_ctx=400, parallel=2, max_rows=4)
    old = b.add(prompt(1, 31), 120, stop_ids=frozenset())
    while old.n_output < 1:
        b.step()
    young = b.add(prompt(2, 345), 5, seed=1, stop_ids=frozenset())      # 11 blocks beside old's one: one is left
    b.run()
    assert b.scheduler.places.n_preempted
    b.assert_right(old)
    b.assert_right(young)


def test_fifo_within_a_client() -> None:
    b = Bench(parallel=1)
    seqs = [b.add(prompt(i, 30), 5, seed=i) for i in range(6)]
    order: list[Sequence] = []
    while b.step():
        order += [s for s in seqs if s.state == ENDED and s not in order]
    assert order == seqs


def test_cancel_everywhere() -> None:
    b = Bench(parallel=1)
    running, queued = b.add(prompt(1, 300), 50), b.add(prompt(2, 30), 50)
    b.step()
    assert not b.tokens(running)
    b.scheduler.cancel(running)                     # in prefill
    b.scheduler.cancel(queued)                      # in the queue
    assert not b.step()
    assert b.scheduler.blocks.n_available == 64 and b.scheduler.n_live == 0
    decoding = b.add(prompt(1, 30), 50, seed=3, stop_ids=frozenset())
    while not b.tokens(decoding):
        b.step()
    n = len(b.items[decoding])
    b.scheduler.cancel(decoding)
    assert not b.step() and len(b.items[decoding]) == n
    again = b.add(prompt(1, 300), 5)                # what the cancelled one computed stays known
    b.run()
    assert b.done(again).n_cached >= 64
    b.assert_right(again)


def test_pause_keeps_the_place_and_resumes_alike() -> None:
    b = Bench()
    seq = b.add(prompt(5, 40), 60, seed=2, stop_ids=frozenset())
    while len(b.tokens(seq)) < 3:
        b.step()
    seq.paused = True
    assert not b.step() and not b.step()
    assert b.scheduler.wake_at() is None
    seq.paused = False
    b.run()
    b.assert_right(seq)


def test_paused_sequences_do_not_hold_the_last_place() -> None:
    b = Bench(parallel=1)
    slow = b.add(prompt(5, 40), 60, seed=2, stop_ids=frozenset())
    while len(b.tokens(slow)) < 3:
        b.step()
    slow.paused = True
    other = b.add(prompt(6, 40), 10)
    b.run()
    b.assert_right(other)
    slow.paused = False
    b.run()
    b.assert_right(slow)


def test_deadline_in_the_queue() -> None:
    b = Bench(parallel=1)
    b.add(prompt(1, 300), 50)
    late = b.add(prompt(2, 30), 50, deadline=0.025)
    b.step()
    assert not [i for i in b.items[late] if isinstance(i, Fault)]
    b.step()
    b.step()
    fault = b.done(late)
    assert isinstance(fault, Fault) and fault.error.kind == "overloaded" and 1 <= fault.error.retry_after_s <= 60
    b.run()


def test_no_deadline_for_who_waits_for_a_leader_s_blocks() -> None:
    b = Bench(n_ctx=500)
    b.add(prompt(1, 400), 5)
    follower = b.add(prompt(1, 400), 5, deadline=0.015)
    b.run()
    b.assert_right(follower)
    assert b.done(follower).n_cached == 399 and b.now > 0.05


def test_prompt_logprobs() -> None:
    b = Bench(n_blocks=16, n_ctx=400, parallel=2)
    for n in (1, 2, 40, 150):
        b.add(prompt(n, n), 5)
        b.run()                                     # cached now, and bypassed
        seq = b.add(prompt(n, n), 5, score_prompt=True, sampler=SamplerArgs(n_top=0))
        b.run()
        scored = [i for i in b.items[seq] if isinstance(i, Scored)]
        assert [i.id for i in scored] == prompt(n, n)[1:]
        assert all(i.logprob == -1.0 - i.id / 100 for i in scored)
        kinds = [type(i) for i in b.items[seq]]
        assert Scored not in kinds[kinds.index(Token):] if Token in kinds else True
        assert kinds.index(Admitted) < (kinds.index(Scored) if scored else len(kinds))
        b.assert_right(seq)


def test_limits() -> None:
    b = Bench(n_ctx=64)
    for seed in range(20):
        seq = b.add(prompt(seed, 60), 1 + seed % 8, seed=seed)
        b.run()
        b.assert_right(seq)
    full = b.add(prompt(1, 63), 9)
    b.run()
    assert b.done(full).n_output == 1


def test_penalties_see_the_whole_history() -> None:
    b = Bench(parallel=2)
    seqs = [b.add(prompt(i, 50), 30, sampler=SamplerArgs(repeat_penalty=1.2, seed=i)) for i in range(3)]
    b.run()
    for seq in seqs:            # the fake core checks the history's length at every row
        assert isinstance(b.done(seq), Done)


def test_waits_until_due_without_rows() -> None:
    b = Bench()
    seq = b.add(prompt(1, 40), 5)
    original = b.context.step
    b.context.step = lambda batch: [Output(WAIT, due=1.0) for _ in original(batch)]
    b.step()
    assert not b.step() and b.scheduler.wake_at() == 1.0
    b.context.step = original
    b.now = 1.0
    b.run()
    b.assert_right(seq)


class _Grammar:
    """Allows everything; fails at the n-th call."""

    def __init__(self, fails_at: int) -> None:
        self.n = 0
        self.fails_at = fails_at
        self.accepted: list[int] = []

    def mask(self) -> bytes | None:
        self.n += 1
        if self.n == self.fails_at:
            raise ValueError("no such rule")
        return b"\xff" * 8

    def accept(self, token: int) -> None:
        self.accepted.append(token)


def test_constraint_is_asked_before_and_told_after_each_token() -> None:
    b = Bench()
    good, bad = _Grammar(0), _Grammar(3)
    seqs = [b.add(prompt(1, 40), 12, seed=4, constraint=c, stop_ids=frozenset()) for c in (good, bad)]
    b.run()
    b.assert_right(seqs[0])
    assert good.accepted == b.tokens(seqs[0])
    assert isinstance(b.done(seqs[1]), Fault) and "no such rule" in str(b.done(seqs[1]).error)


class _Thirds:
    """Allows a token where (token + how many came before) is no multiple of 3."""

    def __init__(self, n: int = 0) -> None:
        self.n = n
        self.n_copies = 0

    def mask(self) -> bytes:
        return sum(1 << t for t in range(60) if (t + self.n) % 3).to_bytes(8, "little")

    def accept(self, token: int) -> None:
        if not (token + self.n) % 3:
            raise ValueError("not allowed")
        self.n += 1

    def copy(self) -> "_Thirds":
        self.n_copies += 1
        return _Thirds(self.n)


def test_drafts_under_a_grammar() -> None:
    texts: dict[bool, list[list[int]]] = {False: [], True: []}
    n_accepted = n_copies = 0
    for speculate in (False, True):
        for seed in range(8):
            b = Bench(speculate=speculate)
            grammar = _Thirds()
            seq = b.add([5, 6, 7, 8, 9, 10] * 6, 80, seed=seed, constraint=grammar, stop_ids=frozenset())
            b.run()
            texts[speculate].append(b.tokens(seq))
            assert isinstance(b.done(seq), Done) and all((t + i) % 3 for i, t in enumerate(b.tokens(seq)))
            n_accepted += b.scheduler.n_accepted
            n_copies += grammar.n_copies
    assert texts[False] == texts[True] and n_accepted and n_copies


def test_a_fault_ends_the_step_s_sequences_only() -> None:
    b = Bench(parallel=2)
    first = b.add(prompt(1, 40), 30)
    b.context.fault_rate = 1.0
    b.step()
    assert isinstance(b.done(first), Fault)
    b.context.fault_rate = 0.0
    second = b.add(prompt(1, 40), 30)
    b.run()
    b.assert_right(second)


def test_common_tokens() -> None:
    r = random.Random(1)
    for _ in range(300):
        a = [r.randrange(3) for _ in range(r.randrange(12))]
        c = [r.randrange(3) for _ in range(r.randrange(12))]
        want = next((i for i, (x, y) in enumerate(zip(a, c)) if x != y), min(len(a), len(c)))
        assert common_tokens(array("i", a).tobytes(), array("i", c).tobytes()) == want


def test_keys_depend_on_everything_before() -> None:
    keys: list[bytes] = []
    tokens = array("i", prompt(1, 100))
    chain_keys(keys, tokens)
    assert len(keys) == 3 and len(set(keys)) == 3
    tokens.extend(prompt(2, 60))                    # no export is left behind
    grown = list(keys)
    chain_keys(grown, tokens)
    assert grown[:3] == keys and len(grown) == 5
    other = array("i", tokens)
    other[0] += 1
    changed: list[bytes] = []
    chain_keys(changed, other)
    assert not set(changed) & set(grown)


def test_heads_of_prefixes_live_longest() -> None:
    b = Bench(n_blocks=8, n_ctx=256, parallel=1)
    b.add(prompt(1, 150), 1)
    b.run()
    b.add(prompt(2, 100), 1)
    b.run()
    again = b.add(prompt(1, 150), 1)
    b.run()
    assert b.done(again).n_cached == 4 * BLOCK      # the tail was evicted, the head is there


def test_drafts_change_nothing_but_the_number_of_steps() -> None:
    n_steps = {}
    for speculate in (False, True):
        b = Bench(n_blocks=64, n_ctx=512, parallel=2, speculate=speculate)
        seqs = [b.add(prompt(i, 30), 200, seed=i, stop_ids=frozenset()) for i in range(6)]
        b.run()
        for seq in seqs:
            b.assert_right(seq)
        n_steps[speculate] = b.context.n_steps
    assert b.scheduler.n_accepted > 0.3 * b.scheduler.n_drafted > 100
    assert n_steps[True] < 0.95 * n_steps[False]     # whatever the seeds


def test_drafted_tokens_are_cached_like_others() -> None:
    b = Bench(speculate=True)
    first = b.add([5, 6, 7, 8, 9] * 6, 150, seed=2, stop_ids=frozenset())
    b.run()
    assert b.scheduler.n_accepted
    again = b.add(list(first.tokens) + [3, 4], 5)
    b.run()
    b.assert_right(again)
    assert b.done(again).n_cached == len(first.tokens) - 1


def test_drafts_end_with_the_turn_and_the_limits() -> None:
    for n_ctx, most in ((64, 100), (512, 7), (512, 100)):
        b = Bench(n_ctx=n_ctx, speculate=True)
        for seed in range(12):
            seq = b.add([5, 6, 7, 8, 9] * 6, most, seed=seed)
            b.run()
            b.assert_right(seq)


def test_partial_blocks_with_one_beginning_stay_apart() -> None:
    b = Bench(parallel=1)
    common = prompt(1, 8)
    for tail in (3, 4, 5):
        b.add(common + [tail] * 10, 1)
        b.run()
    n_cached = b.scheduler.blocks.n_cached
    assert n_cached == 3
    for tail in (3, 4, 5):                          # each is found again, and repeats take no room of their own
        again = b.add(common + [tail] * 10, 1)
        b.run()
        assert b.done(again).n_cached == 17
    assert b.scheduler.blocks.n_cached == n_cached


def test_arena_smaller_than_a_request_is_refused() -> None:
    with pytest.raises(ValueError):
        Bench(n_blocks=7, n_ctx=256)

"""pace against a made-up machine: steps beside a stream come out at one length, whatever stands before the prompt."""

from __future__ import annotations

import random
import statistics

import pytest

from milad.engine import pace as pace_module
from milad.engine.pace import Pace


class Machine:
    """How long a step takes."""

    def __init__(self, decode_s: float, row_s: float, depth_s: float, draft_s: float = 0.0) -> None:
        self.decode_s, self.row_s, self.depth_s, self.draft_s = decode_s, row_s, depth_s, draft_s
        self.random = random.Random(1)

    def step_s(self, n_drafts: int, n_prefill: int, depth: int) -> float:
        exact = self.decode_s + n_drafts * self.draft_s + n_prefill * (self.row_s + depth * self.depth_s)
        return exact * self.random.uniform(0.95, 1.15)

    def prefill(self, pace: Pace, n_tokens: int, at: int = 0, n_drafts: int = 0) -> list[float]:
        """The steps' lengths while a prompt prefills beside a stream."""
        steps = []
        while at < n_tokens:
            rows = pace.rows(1, n_drafts, at, min(511, n_tokens - at))
            assert 1 <= rows <= n_tokens - at
            steps.append(self.step_s(n_drafts, rows, at))
            pace.note(1, n_drafts, rows, steps[-1])
            at += rows
        return steps

    def decode(self, pace: Pace, n: int = 50) -> None:
        for _ in range(n):
            pace.rows(1, 0, 0, 0)
            pace.note(1, 0, 0, self.step_s(0, 0, 0))
            pace.note(1, 4, 0, self.step_s(4, 0, 0))


FAST = dict(decode_s=0.002, row_s=0.0002, depth_s=0.00000015, draft_s=0.0003)
SLOW = dict(decode_s=0.05, row_s=0.002, depth_s=0.0000002, draft_s=0.002)


@pytest.mark.parametrize("machine", [FAST, SLOW])
@pytest.mark.parametrize("at", [0, 5000])
@pytest.mark.parametrize("n_drafts", [0, 4])
def test_a_streams_longest_gap_stays_near_its_median(machine: dict[str, float], at: int, n_drafts: int) -> None:
    pace, m = Pace(), Machine(**machine)
    m.decode(pace)
    m.prefill(pace, 6000)                       # a shallow prompt first: the deep one's first chunk must not be planned by its rows
    steps = m.prefill(pace, at + 6000, at, n_drafts)
    assert max(steps) <= 2.5 * statistics.median(steps)
    target = max(pace_module.STRETCH * m.decode_s, pace_module.LEAST_S)
    assert 0.6 * target <= statistics.median(steps) <= 1.3 * target


def test_alone_a_prompt_takes_all_and_step_s_is_kept() -> None:
    pace, m = Pace(0.1), Machine(**FAST)
    assert pace.rows(0, 0, 0, 512) == 512 and pace.rows(1, 0, 0, 512) == pace_module.FIRST_ROWS
    m.decode(pace)
    m.prefill(pace, 3000)
    assert 0.07 <= statistics.median(m.prefill(pace, 3000)) <= 0.13

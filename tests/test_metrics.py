"""Counters and histograms: edges, NaN, labels, and that a watched runner is the runner."""

from __future__ import annotations

import asyncio
import math
import re
from types import SimpleNamespace

from milad import metrics
from milad.events import BlockStart, Delta


def test_histograms():
    h = metrics.Histogram((1.0, 2.0))
    for value in (0.0, 1.0, 1.5, 2.0, 3.0, math.nan, -1.0):
        h.observe(value)
    text = "\n".join(metrics._histogram("h", "x", h))
    assert re.findall(r'le="(\S+)"} (\d+)', text) == [("1", "2"), ("2", "4"), ("+Inf", "5")] and "h_count 5" in text and "h_sum 7.5" in text
    assert h.quantile(0.5) == 2.0 and metrics.Histogram((1.0,)).quantile(0.5) == 0.0


def test_numbers_and_labels():
    assert [metrics._number(v) for v in (1, 1.5, math.nan, math.inf, -math.inf, True, 1e20)] == ["1", "1.5", "0", "0", "0", "1", "1e+20"]
    assert metrics._labels({"a": 'x"y\\z\n'}) == '{a="x\\"y\\\\z\\n"}'


def test_while_loading():
    text = metrics.prometheus(metrics.Metrics(), None, 0.25, 3)
    assert "milad_ready 0" in text and "milad_load_progress 0.25" in text and "milad_connections 3" in text
    assert metrics.status(metrics.Metrics(), None, 0.25, 3)["state"] == "loading"


class Run:
    def __init__(self, batches):
        self.batches = batches
        self.closed = False

    async def read(self, reader):
        for batch in self.batches:
            reader(batch)

    def close(self):
        self.closed = True

    cancel = close


def test_a_watched_run_counts_first_and_further_text_by_choice():
    counted = metrics.Metrics()
    run = Run([[(0, BlockStart(0, "text"))], [(0, Delta(0, "a"))], [(0, Delta(0, "b")), (1, Delta(0, "x"))], [(1, Delta(0, "y"))]])
    runner = SimpleNamespace(run=lambda prepared: run, n_ctx=7)
    watched = counted.watch(runner)

    async def read():
        got = []
        events = watched.run(None)
        await events.read(got.append)
        events.close()
        return got

    assert len(asyncio.run(read())) == 4 and run.closed and watched.n_ctx == 7
    assert sum(counted.ttft.counts) == 2 and sum(counted.gap.counts) == 2

"""Drives a core's context by hand, for tests of the forward pass: rows in, raw logits out."""

from __future__ import annotations

from array import array
from typing import Any, Sequence

import numpy as np

from milad.engine.base import BLOCK, Batch, SamplerArgs


def table(first: int, n_tokens: int) -> array:
    """A block table for n_tokens from block `first` on."""
    return array("i", range(first, first + (n_tokens + BLOCK - 1) // BLOCK))


def step(context: Any, n_vocab: int, rows: Sequence[tuple[int, int, int, bool]], tables: list[array]) -> np.ndarray:
    """One step of (token, position, sequence, wanted) rows; the wanted rows' logits [n, n_vocab]."""
    flat, n = array("i"), 0
    for token, position, sequence, wanted in rows:
        flat.extend((token, position, sequence, n if wanted else -1))
        n += wanted
    logits = array("f", bytes(4 * n * n_vocab)) if n else None
    context.step(Batch(flat, tables, [SamplerArgs() for _ in range(n)]), logits)
    return np.array(logits, dtype=np.float32).reshape(n, n_vocab) if n else np.zeros((0, n_vocab), np.float32)


def run(context: Any, n_vocab: int, tokens: Sequence[int], blocks: array, cuts: Sequence[int], start: int = 0,
        wanted: Any = None) -> np.ndarray:
    """Logits of tokens[start:] in steps that end at `cuts` (and at the end). wanted: positions; None: all."""
    out = []
    for end in [c for c in cuts if c > start] + [len(tokens)]:
        if end <= start:
            continue
        rows = [(tokens[p], p, 0, wanted is None or p in wanted) for p in range(start, end)]
        out.append(step(context, n_vocab, rows, [blocks]))
        start = end
    return np.concatenate(out)


def score(context: Any, tokens: Sequence[int], blocks: array, targets: dict[int, int], n_top: int = 0) -> dict[int, Any]:
    """Teacher-forced: position -> Output for targets[position], the token that follows it. Steps of at most max_rows."""
    found = {}
    for begin in range(0, len(tokens), context.max_rows):
        flat, samplers, wanted = array("i"), [], []
        for p in range(begin, min(begin + context.max_rows, len(tokens))):
            flat.extend((tokens[p], p, 0, len(samplers) if p in targets else -1))
            if p in targets:
                samplers.append(SamplerArgs(forced=targets[p], n_top=n_top))
                wanted.append(p)
        found.update(zip(wanted, context.step(Batch(flat, [blocks], samplers))))
    return found

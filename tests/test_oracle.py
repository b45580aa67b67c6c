"""Logits against other people's implementations: transformers on tiny models (F32), llama.cpp on the default model."""

from __future__ import annotations

import json
import math
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import oracle_cases
import steps
from milad.engine.base import BLOCK

DATA = Path(__file__).resolve().parent / "data"


def close(got: np.ndarray, want: np.ndarray, tolerance: float) -> bool:
    """NaN anywhere is not close."""
    return got.shape == want.shape and bool(np.all(np.abs(got - want) <= tolerance))


def test_close_refuses_nan() -> None:
    assert close(np.zeros(2), np.zeros(2), 0)
    assert not close(np.array([0, np.nan]), np.zeros(2), 1) and not close(np.zeros(2), np.array([0, np.nan]), 1)
    assert not close(np.zeros(2), np.full(2, 2e-3), 1e-3)


@pytest.mark.parametrize("name", oracle_cases.CASES)
def test_transformers(name: str, library: Path, tiny: Any) -> None:
    from milad import capi

    path = tiny(**oracle_cases.CASES[name])
    with np.load(DATA / "tiny-oracle.npz") as stored:
        want, meta = stored[name], json.loads(str(stored["meta"]))
    assert oracle_cases.checksum(path) == meta["checksums"][name], "other weights than the oracle's: run scripts/make-oracle"
    model = capi.Model(path)
    n_vocab, tokens = model.info.n_vocab, oracle_cases.tokens(model.info.n_vocab)
    context = model.context(n_blocks=6, n_threads=2, max_rows=128, kv_type="f32")
    blocks, positions = steps.table(0, len(tokens)), oracle_cases.POSITIONS
    prefill = steps.run(context, n_vocab, tokens, blocks, [])
    assert close(prefill[positions], want, 1e-3)
    decode = steps.run(context, n_vocab, tokens, steps.table(3, len(tokens)), list(range(1, len(tokens))))
    assert close(decode[positions], want, 1e-3)
    assert np.array_equal(prefill, decode)
    rounded = model.context(n_blocks=3, max_rows=128)  # keys and values in F16: 2^-11 of their size
    assert close(steps.run(rounded, n_vocab, tokens, blocks, [])[positions], want, 1e-2)
    model.close()


@pytest.fixture(scope="module")
def smollm(library: Path, default_model: Path) -> Any:
    from milad import capi

    model = capi.Model(default_model)
    yield model
    model.close()


@pytest.mark.parametrize("kv_type,mean_limit", [("f16", 0.08), ("bf16", 0.08), ("q8_0", 0.1)])
def test_llama_cpp_teacher_forced(smollm: Any, kv_type: str, mean_limit: float) -> None:
    oracle = json.loads((DATA / "smollm2-q4_1.json").read_text())
    differences, wrong, clear = [], [], 0
    context = smollm.context(n_blocks=16, n_threads=2, kv_type=kv_type)
    for c in oracle["completions"]:
        first, tokens = len(c["prompt_ids"]), c["prompt_ids"] + c["ids"]
        targets = {first - 1 + i: t for i, t in enumerate(c["ids"])}
        found = steps.score(context, tokens[:-1], steps.table(0, len(tokens)), targets, n_top=1)
        for i, (logprob, second) in enumerate(zip(c["logprob"], c["second"])):
            out = found[first - 1 + i]
            differences.append(abs(out.logprob - logprob))
            if logprob - second[1] > 0.5:
                clear += 1
                if out.top[0][0] != c["ids"][i]:
                    wrong.append((c["prompt"], i, out.top))
    context.close()
    assert len(differences) > 100 and clear > 50
    assert not wrong
    assert sum(differences) / len(differences) <= mean_limit, max(differences)


@pytest.mark.parametrize("kv_type", ["f16", "bf16", "q8_0"])
def test_llama_cpp_perplexity(smollm: Any, kv_type: str) -> None:
    """As llama.cpp's llama-perplexity: chunks of 2048 tokens, each scored on its second half; 14.18 there."""
    tokens = smollm.tokenize((DATA / "perplexity.txt").read_bytes())
    context = smollm.context(n_blocks=2048 // BLOCK, n_threads=2, kv_type=kv_type)
    total, n = 0.0, 0
    for begin in range(0, len(tokens) // 2048 * 2048, 2048):
        chunk = tokens[begin:begin + 2048]
        targets = {p: chunk[p + 1] for p in range(1024, 2047)}
        found = steps.score(context, chunk, array("i", range(64)), targets)
        total -= sum(o.logprob for o in found.values())
        n += len(found)
    context.close()
    assert n == 6 * 1023
    assert math.exp(total / n) == pytest.approx(14.18, rel=0.01)

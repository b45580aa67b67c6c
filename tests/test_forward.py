"""The forward pass against itself: a row's logits are the same bits alone or beside others, in one chunk or many, on one thread or
two, over copied or moved blocks; on every weight type, key and value type and instruction set.

Run as a program it prints a digest per way of computing (the tests start it with MILAD_ISA set, which is read once per process).
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from array import array
from pathlib import Path
from typing import Any, Callable, Iterator

import numpy as np
import pytest

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import steps  # noqa: E402
from milad.engine.base import BLOCK, Batch, Interrupted, SamplerArgs  # noqa: E402
from milad.errors import EngineFault  # noqa: E402


def digest(logits: np.ndarray) -> str:
    assert np.all(np.isfinite(logits))
    return hashlib.sha256(logits.tobytes()).hexdigest()[:16]


def beside_others(context: Any, n_vocab: int, tokens: list[int], n_blocks: int) -> np.ndarray:
    """tokens one by one, each in a step with eight other sequences that are anywhere."""
    out = []
    per = n_blocks // 9
    tables = [array("i", range(s * per, (s + 1) * per)) for s in range(9)]
    for p, token in enumerate(tokens):
        rows = [((token * 7 + s) % n_vocab, (p * 5 + s) % len(tokens), s, s % 3 == 0) for s in range(1, 5)]
        mine = len([r for r in rows if r[3]])
        rows.append((token, p, 0, True))
        rows += [((token + s) % n_vocab, (p + 31 * s) % len(tokens), s, False) for s in range(5, 9)]
        out.append(steps.step(context, n_vocab, rows, tables)[mine])
    return np.stack(out)


def ways(model: Any, tokens: list[int], kv_type: str) -> Iterator[tuple[str, np.ndarray]]:
    """(name, logits of every position) for each way of computing them."""
    n, n_vocab = len(tokens), model.info.n_vocab
    need = (n + BLOCK - 1) // BLOCK
    cut = n // 2 // BLOCK * BLOCK + 13  # inside a block
    seven = [n * i // 7 for i in range(1, 7)]
    for n_threads in (1, 2):
        context = model.context(n_blocks=9 * need, n_threads=n_threads, max_rows=512, kv_type=kv_type)
        shuffled = array("i", [(i * 7 + 3) % (9 * need) for i in range(need)])
        yield f"one chunk, {n_threads} threads", steps.run(context, n_vocab, tokens, shuffled, [])
        yield f"seven chunks, {n_threads} threads", steps.run(context, n_vocab, tokens, steps.table(need, n), seven)
        yield f"one by one, {n_threads} threads", steps.run(context, n_vocab, tokens, steps.table(0, n), list(range(n)))
        yield f"beside eight others, {n_threads} threads", beside_others(context, n_vocab, tokens, 9 * need)
        # Only some logits wanted: the last layer skips the rest.
        some = set(range(0, n, 3)) | {n - 1}
        got = np.zeros((n, n_vocab), np.float32)
        got[sorted(some)] = steps.run(context, n_vocab, tokens, steps.table(need, n), seven, wanted=some)
        rest = sorted(set(range(n)) - some)
        got[rest] = steps.run(context, n_vocab, tokens, steps.table(need, n), [40], wanted=set(rest))
        yield f"in two halves, {n_threads} threads", got
        # A partly matching block: copy its first tokens, share the blocks before, compute the rest.
        first = steps.run(context, n_vocab, tokens, steps.table(0, n), [])[:cut]
        other = [*tokens[:cut], *((t + 1) % n_vocab for t in tokens[cut:])]
        steps.run(context, n_vocab, other, steps.table(0, n), [])
        shared = array("i", [*range(cut // BLOCK), *range(2 * need, 3 * need - cut // BLOCK)])
        context.kv_copy(cut // BLOCK, 2 * need, cut % BLOCK)
        yield (f"from a copied block, {n_threads} threads",
               np.concatenate([first, steps.run(context, n_vocab, tokens, shared, seven, start=cut)]))
        # Blocks read out, as the disk tier does, and written elsewhere.
        for i in range(cut // BLOCK):
            context.kv_write(4 * need + i, context.kv_read(i))
        context.kv_copy(2 * need, 4 * need + cut // BLOCK, BLOCK)
        moved = array("i", range(4 * need, 5 * need))
        yield (f"from moved blocks, {n_threads} threads",
               np.concatenate([first, steps.run(context, n_vocab, tokens, moved, [], start=cut)]))
        context.close()


def digests(path: str, n_tokens: int, kv_type: str) -> dict[str, str]:
    from milad import capi

    model = capi.Model(path)
    tokens = [int(t) for t in np.random.default_rng(5).integers(0, model.info.n_vocab, n_tokens)]
    found = {name: digest(logits) for name, logits in ways(model, tokens, kv_type)}
    model.close()
    return found


def check_ways(path: Path, n_tokens: int, kv_type: str = "f16", isa: str = "") -> None:
    command = [sys.executable, __file__, str(path), str(n_tokens), kv_type]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | ({"MILAD_ISA": isa} if isa else {}))
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert len(found) == 14
    assert len(set(found.values())) == 1, found


TYPES = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL"]


@pytest.mark.parametrize("weight_type", TYPES)
def test_batch_invariance_of_types(weight_type: str, library: Path, tiny: Callable[..., Path]) -> None:
    wide = weight_type.endswith("_K")
    check_ways(tiny(weight_type=weight_type, n_embd=256 if wide else 64, n_ff=512 if wide else 160, seed=11,
                    embd_type="Q8_0" if weight_type.startswith("Q") else ""), 100)


@pytest.mark.parametrize("isa", ["c", "avx2"])
@pytest.mark.parametrize("weight_type", ["F32", "Q4_1", "BF16", "Q6_K"])
def test_batch_invariance_of_instruction_sets(isa: str, weight_type: str, library: Path, tiny: Callable[..., Path]) -> None:
    check_ways(tiny(weight_type=weight_type, n_embd=256, n_head=4, head_dim=64, n_ff=512, seed=12), 80, isa=isa)


@pytest.mark.parametrize("options", [
    dict(arch="qwen2", seed=1), dict(arch="qwen3", head_dim=32, seed=2), dict(rope="llama3", tied=False, seed=3),
    dict(n_head=7, n_head_kv=1, head_dim=20, seed=4)], ids=lambda o: o.get("arch", "llama"))
@pytest.mark.parametrize("kv_type", ["f16", "q8_0", "bf16"])
def test_batch_invariance_of_architectures(options: dict[str, Any], kv_type: str, library: Path, tiny: Callable[..., Path]) -> None:
    check_ways(tiny(n_ctx=1024, **options), 300, kv_type)


def test_batch_invariance_of_the_default_model(library: Path, default_model: Path) -> None:
    check_ways(default_model, 70)


@pytest.fixture(scope="module")
def small(library: Path, tiny: Callable[..., Path]) -> Iterator[Any]:
    from milad import capi

    model = capi.Model(tiny(seed=21))
    yield model
    model.close()


def test_interrupt_before_a_step(small: Any) -> None:
    context = small.context(n_blocks=2)
    context.interrupt()
    row = array("i", [1, 0, 0, -1])
    with pytest.raises(Interrupted):
        context.step(Batch(row, [array("i", [0])], []))
    context.step(Batch(row, [array("i", [0])], []))
    assert context.stat()["n_steps"] == 1 and context.stat()["n_rows"] == 1


def test_interrupt_during_a_step(library: Path, default_model: Path) -> None:
    from milad import capi

    model = capi.Model(default_model)
    context = model.context(n_blocks=32, n_threads=1, max_rows=1024)
    rows = array("i", [x for p in range(1000) for x in (100 + p, p, 0, -1)])
    begun = threading.Event()

    def interrupt() -> None:
        begun.wait()
        context.interrupt()

    thread = threading.Thread(target=interrupt)
    thread.start()
    begun.set()
    with pytest.raises(Interrupted):  # a second's work, interrupted at its start or within
        context.step(Batch(rows, [array("i", range(32))], []))
    thread.join()
    assert context.stat()["n_rows"] == 0
    context.step(Batch(rows[:4], [array("i", range(32))], []))
    model.close()


ROW = dict(token=1, position=0, sequence=0, output=-1)


@pytest.mark.parametrize("rows,tables,n_outputs,words", [
    ([], [[0]], 0, "0 rows"),
    ([ROW | dict(token=-1)], [[0]], 0, "row 0: token -1"),
    ([ROW | dict(token=286)], [[0]], 0, "token 286 is not within 0..285"),
    ([ROW | dict(position=-1)], [[0]], 0, "position -1"),
    ([ROW | dict(position=32)], [[0]], 0, "position 32 is outside the 1 blocks"),
    ([ROW | dict(position=2**31 - 1)], [[0]], 0, "position 2147483647"),
    ([ROW, ROW], [[0]], 0, "row 1: position 0 follows 0"),
    ([ROW, ROW | dict(position=2)], [[0]], 0, "position 2 follows 0"),
    ([ROW | dict(sequence=1)], [[0]], 0, "sequence 1"),
    ([ROW | dict(sequence=-1)], [[0]], 0, "sequence -1"),
    ([ROW], [[4]], 0, "blocks[0] = 4 is not within 0..3"),
    ([ROW], [[-1]], 0, "blocks[0] = -1"),
    ([ROW], [[0, 1, 2, 3, 0]], 0, "5 blocks of an arena of 4"),
    ([ROW], [[]], 0, "outside the 0 blocks"),
    ([ROW], [], 0, "0 sequences"),
    ([ROW], [[0], [0]], 0, "block 0 is listed 2 times"),
    ([ROW], [[0, 0]], 0, "block 0 is listed 2 times"),
    ([ROW | dict(output=0)], [[0]], 0, "output 0 is not within"),
    ([ROW | dict(output=-2)], [[0]], 0, "output -2"),
    ([ROW], [[0]], 1, "output 0 has no row"),
    ([ROW], [[0]], 2, "2 outputs"),
    ([ROW | dict(output=0), ROW | dict(position=1, output=0)], [[0]], 1, "output 0 has a row already"),
])
def test_refuses(small: Any, rows: list[dict[str, int]], tables: list[list[int]], n_outputs: int, words: str) -> None:
    context = small.context(n_blocks=4, max_rows=8)
    flat = array("i", [r[k] for r in rows for k in ("token", "position", "sequence", "output")])
    with pytest.raises(EngineFault) as e:
        context.step(Batch(flat, [array("i", t) for t in tables], [SamplerArgs() for _ in range(n_outputs)]))
    assert words in str(e.value)
    context.step(Batch(array("i", [1, 0, 0, -1]), [array("i", [0])], []))
    context.close()


def test_shared_blocks_are_readable(small: Any) -> None:
    context = small.context(n_blocks=4)
    context.step(Batch(array("i", [x for p in range(32) for x in (p, p, 0, -1)]), [array("i", [0])], []))
    rows = array("i", [1, 32, 0, 0, 1, 32, 1, 1])
    a, b = context.step(Batch(rows, [array("i", [0, 1]), array("i", [0, 2])], [SamplerArgs(n_top=3), SamplerArgs(n_top=3)]))
    assert a == b and len(a.top) == 3
    context.close()


def test_more_rows_than_a_chunk(small: Any) -> None:
    """A step of more rows than scratch holds at once (512) goes through in parts."""
    tokens = [(p * 31) % 286 for p in range(1100)]
    context = small.context(n_blocks=80, max_rows=2000)
    whole = steps.run(context, 286, tokens, steps.table(0, 1100), [])
    parts = steps.run(context, 286, tokens, steps.table(40, 1100), [100, 600, 601])
    assert np.array_equal(whole, parts)
    context.close()


def test_non_finite_logits(library: Path, tiny: Callable[..., Path]) -> None:
    """One sequence's NaN is reported as no token and stays its own."""
    from milad import capi

    embd = np.random.default_rng(1).standard_normal((286, 64), dtype=np.float32)
    embd[7] = np.nan
    model = capi.Model(tiny(tensors={"token_embd.weight": embd}, tied=False))
    context = model.context(n_blocks=2)
    rows = array("i", [7, 0, 0, 0, 9, 0, 1, 1])
    bad, good = context.step(Batch(rows, [array("i", [0]), array("i", [1])], [SamplerArgs(), SamplerArgs(temperature=1, seed=3)]))
    assert bad.token == -1 and 0 <= good.token < 286
    model.close()


@pytest.mark.parametrize("n_blocks,max_rows,words", [
    (0, 8, "n_blocks 0"), (-1, 8, "n_blocks -1"), (4, 0, "max_rows 0"), (4, 4097, "max_rows 4097"), (2**31 - 1, 8, "")])
def test_refuses_contexts(small: Any, n_blocks: int, max_rows: int, words: str) -> None:
    from milad.errors import UsageError

    try:
        small.context(n_blocks=n_blocks, max_rows=max_rows).close()
    except UsageError as e:
        assert words in str(e)
    else:
        assert not words  # 2^31 blocks may be address space to be had


@pytest.mark.parametrize("call", [
    lambda c: c.kv_copy(0, 4, 1), lambda c: c.kv_copy(-1, 0, 1), lambda c: c.kv_copy(0, 1, 33), lambda c: c.kv_copy(0, 1, -1),
    lambda c: c.kv_read(4), lambda c: c.kv_write(0, b""), lambda c: c.kv_write(4, bytes(c.block_bytes))])
def test_refuses_blocks(small: Any, call: Callable[[Any], Any]) -> None:
    context = small.context(n_blocks=4)
    with pytest.raises(EngineFault):
        call(context)
    context.close()


@pytest.mark.parametrize("kv_type", ["f16", "q8_0", "f32", "bf16"])
def test_block_round_trip(small: Any, kv_type: str) -> None:
    context = small.context(n_blocks=4, kv_type=kv_type)
    data = np.random.default_rng(2).integers(0, 255, context.block_bytes, dtype=np.uint8).tobytes()
    context.kv_write(2, data)
    assert context.kv_read(2) == data and context.kv_read(1) == bytes(context.block_bytes)
    context.kv_copy(2, 3, 32)
    assert context.kv_read(2) == data
    context.close()


if __name__ == "__main__":
    print(json.dumps(digests(sys.argv[1], int(sys.argv[2]), sys.argv[3])))

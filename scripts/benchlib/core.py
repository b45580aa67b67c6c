"""One timed run of milad's core, in a process of its own: python -m benchlib.core FILE THREADS KIND N DEPTH BATCH READS

Prints JSON: tokens/s, and what a share of the limit needs. KIND: prefill (N tokens in one go) or decode (N steps). READS: 1 probes what
memory gives before and after each repetition and keeps those beside which it gave what it gives at the end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from array import array
from typing import Any

from . import peer


STEADY = 1.15       # reads of the same memory differ by at most this factor


def steady(reads: list[float]) -> bool:
    return max(reads) <= STEADY * min(reads)


def measure(file: Any, threads: int, kind: str, n: int, depth: int = 0, batch: int = 1, reads: bool = False) -> dict[str, Any]:
    done = peer.run([sys.executable, "-m", "benchlib.core", file, threads, kind, n, depth, batch, int(reads)], stdout=subprocess.PIPE,
                    cwd=peer.ROOT / "scripts", env={**os.environ, "PYTHONPATH": f"{peer.ROOT}:{peer.ROOT / 'scripts'}"})
    return json.loads(done.stdout)


def main(file: str, threads: int, kind: str, n: int, depth: int, batch: int, with_reads: int) -> dict[str, Any]:
    from milad import capi, loader
    from milad.engine.base import BLOCK, Batch, SamplerArgs
    model = capi.Model(file, n_threads=threads)
    per = -(-(depth + n + 8) // BLOCK)
    context = model.context(n_blocks=per * batch, n_threads=threads, kv_type=loader.kv_type("auto"))
    tables = [array("i", range(i * per, (i + 1) * per)) for i in range(batch)]
    greedy, n_vocab = SamplerArgs(), model.info.n_vocab

    def feed(sequence: int, first: int, count: int) -> None:
        at = first
        while at < first + count:
            rows = array("i")
            size = min(context.max_rows, first + count - at)
            for i in range(at, at + size):
                rows.extend((i * 7919 % n_vocab, i, 0, 0 if i == at + size - 1 else -1))
            context.step(Batch(rows, [tables[sequence]], [greedy]))
            at += size

    def decode(first: int, count: int) -> None:
        tokens = [1] * batch
        for i in range(count):
            rows = array("i")
            for s in range(batch):
                rows.extend((tokens[s], first + i, s, s))
            tokens = [o.token for o in context.step(Batch(rows, tables, [greedy] * batch))]

    for s in range(batch):
        if depth:
            feed(s, 0, depth)
    (feed(0, depth, min(n, 64)) if kind == "prefill" else decode(depth, 4))           # warm
    rates: list[float] = []
    reads = [capi.probe("bandwidth", threads)] if with_reads else []
    for _ in range(3 if kind == "decode" or n * (depth + 512) < 4_000_000 else 1):
        start = time.perf_counter()
        feed(0, depth, n) if kind == "prefill" else decode(depth, n)
        rates.append(n * (1 if kind == "prefill" else batch) / (time.perf_counter() - start))
        if with_reads:
            reads.append(capi.probe("bandwidth", threads))
    best = max(range(len(rates)), key=rates.__getitem__)
    beside = {}
    if with_reads:                      # the host may have moved the cores: only what was measured as the last read was
        good = [i for i in range(len(rates)) if steady([reads[i], reads[i + 1], reads[-1]])]
        best = max(good, key=rates.__getitem__) if good else best
        beside = {"steady": bool(good), "read": max(reads[best], reads[best + 1]), "last_read": reads[-1]}
    info = model.info
    kv = context.block_bytes / BLOCK * (depth + n / 2)
    shared = info.n_vocab * info.n_embd
    return {**beside, "rate": rates[best], "weight_bytes": info.weight_bytes, "kv_bytes": kv, "layer_params": info.n_params - shared,
            "file_bytes": info.file_bytes, "isa": context.stat()["isa"], "threads": threads}


if __name__ == "__main__":
    a = sys.argv
    print(json.dumps(main(a[1], int(a[2]), a[3], int(a[4]), int(a[5]), int(a[6]), int(a[7]))))

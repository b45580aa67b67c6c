"""`milad bench`: how fast this model runs on this machine, and how near to the machine's limits. One screen."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from array import array
from typing import Any, Callable, Sequence

from .. import catalogue
from ..engine.base import BLOCK, Batch, SamplerArgs
from ..errors import UsageError
from . import flags

PROMPT, ANSWER, DEPTH = 512, 64, 4096


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Run it on an idle machine: another program on a core shows in every figure."
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("-c", "--config", metavar="FILE", help="milad.conf to read")
    flags.add(parser, ("model", "threads", "kv_type", "repack", "models_dir"))


def run(parsed: argparse.Namespace) -> int:
    from .. import capi, loader
    options = {name: v.value for name, v in flags.effective(parsed).items()}
    name, path = catalogue.resolve(options["model"][0] if options["model"] else None)
    say = (lambda text: print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)) if sys.stderr.isatty() else lambda text: None
    say("loading")
    start = time.perf_counter()
    model = capi.Model(os.fspath(path), n_threads=options["threads"] or 0, repack=options["repack"])
    load_s = time.perf_counter() - start
    try:
        if not model.info.has_weights:
            raise UsageError(f"{path} holds a vocabulary only: there is nothing to measure")
        result = {"model": name, "load_s": load_s, **_measure(model, options["threads"] or 0, loader.kv_type(options["kv_type"]), say)}
    finally:
        model.close()
    say("")
    print(json.dumps(result) if parsed.json else _table(result))
    return 0


def _measure(model: Any, threads: int, kv_type: str, say: Callable[[str], None]) -> dict[str, Any]:
    """Probe of a limit before each figure; every figure the best of three."""
    from .. import capi
    info = model.info
    deep = info.n_ctx_train >= DEPTH + PROMPT
    n_blocks = ((DEPTH if deep else 0) + PROMPT + ANSWER) // BLOCK + 2
    context = model.context(n_blocks=n_blocks, n_threads=threads, kv_type=kv_type)
    n_threads = context.stat()["n_threads"]
    table = [array("i", range(n_blocks))]
    kv_token = context.block_bytes / BLOCK
    rows: list[dict[str, Any]] = []
    try:
        for depth in (0, DEPTH) if deep else (0,):
            if depth:
                say(f"filling {depth} tokens")
                _feed(context, table, 0, depth)
            say(f"prompt of {PROMPT} at {depth}")
            peak = capi.probe("bf16" if info.quantisation == "BF16" else "f32" if info.quantisation[0] == "F" else "int8", n_threads)
            rate = max(PROMPT / _timed(_feed, context, table, depth, PROMPT) for _ in range(1 if depth else 3))
            ops = 2 * (info.n_params - info.n_vocab * info.n_embd)
            rows.append({"what": f"prompt of {PROMPT}", "depth": depth, "tokens_per_s": rate,
                         "of_limit": rate * ops / peak if not depth else None, "limit": "arithmetic"})
            say(f"answer of {ANSWER} at {depth}")
            bandwidth = capi.probe("bandwidth", n_threads)
            at = depth + PROMPT
            rate = max(ANSWER / _timed(_decode, context, table, at, ANSWER) for _ in range(3))
            bandwidth = max(bandwidth, capi.probe("bandwidth", n_threads))
            n_bytes = info.weight_bytes + kv_token * (at + ANSWER / 2)
            rows.append({"what": "answer", "depth": at, "tokens_per_s": rate, "of_limit": rate * n_bytes / bandwidth,
                         "limit": "memory"})
        return {"isa": context.stat()["isa"], "threads": n_threads, "kv_type": kv_type, "weights_bytes": info.weight_bytes,
                "kv_bytes_per_token": kv_token, "bandwidth_bytes_per_s": bandwidth, "rows": rows}
    finally:
        context.close()


def _timed(work: Callable[..., None], *arguments: Any) -> float:
    start = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - start


def _feed(context: Any, tables: Sequence[array], first: int, count: int) -> None:
    at = first
    while at < first + count:
        rows = array("i")
        for i in range(at, min(at + context.max_rows, first + count)):
            rows.extend((1 + i % 97, i, 0, -1))
        at += len(rows) // 4
        rows[-1] = 0
        context.step(Batch(rows, list(tables), [SamplerArgs()]))


def _decode(context: Any, tables: Sequence[array], first: int, count: int) -> None:
    token = 1
    for i in range(first, first + count):
        token = context.step(Batch(array("i", (token, i, 0, 0)), list(tables), [SamplerArgs()]))[0].token


def _table(result: dict[str, Any]) -> str:
    lines = [f"{result['model']}: {result['isa']}, {result['threads']} threads, keys and values in {result['kv_type']}; loaded in "
             f"{result['load_s']:.1f} s; memory reads {result['bandwidth_bytes_per_s'] / 1e9:.0f} GB/s", "",
             f"{'':24}{'tokens before':>14}{'tokens/s':>11}{'of the limit':>16}"]
    for row in result["rows"]:
        share = "" if row["of_limit"] is None else f"{row['of_limit']:.0%} {row['limit']}"
        lines.append(f"{row['what']:24}{row['depth']:>14,}{row['tokens_per_s']:>11.1f}{share:>16}")
    return "\n".join(lines)

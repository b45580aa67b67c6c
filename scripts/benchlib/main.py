"""The benchmark's groups, cell by cell, interleaved; what is printed and saved."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable

from . import build, core, files, peer, report, serve

UNSTEADY = 4        # rounds thrown away, for each one asked for, before what comes is taken
GROUPS = ("smollm2", "1b", "depth", "batch", "busy", "serve", "python")


class Run:
    """What was asked for, and the rows so far."""

    def __init__(self, rounds: int, with_peer: bool, threads: tuple[int, ...]) -> None:
        self.rounds, self.with_peer, self.threads = rounds, with_peer, threads
        self.rows: list[dict[str, Any]] = []

    def cell(self, group: str, name: str, threads: int, ours: Callable[[], dict[str, Any]], theirs: Callable[[], float] | None,
             limit: str = "", share: Callable[[dict[str, Any], float], float] | None = None, unit: str = "tokens/s") -> None:
        """Rounds of ours and peer; medians of the ratios within a round, and of shares of the limit, which is probed before and after ours.
        Where ours brings its own reads of memory (decode), a round counts if they and one after the peer agree: a virtual machine's cores
        move between dies, and memory with them (native/lab)."""
        from milad import capi
        rates, others, ratios, shares, reads = [], [], [], [], []
        n_unsteady, most_unsteady, arithmetic = 0, UNSTEADY * self.rounds, limit in capi.PROBES and limit != "bandwidth"
        while len(rates) < self.rounds:
            before = capi.probe(limit, threads) if arithmetic else 0.0
            mine = ours()
            top = max(before, capi.probe(limit, threads)) if arithmetic else mine.get("read", 0.0)
            picky = "read" in mine and n_unsteady < most_unsteady
            if picky and not mine["steady"]:
                n_unsteady += 1         # before the peer: it may take half a minute
                continue
            other = theirs() if theirs and self.with_peer else None
            if picky and other is not None and not core.steady([mine["read"], mine["last_read"], capi.probe("bandwidth", threads)]):
                n_unsteady += 1
                continue
            rates.append(mine["rate"])
            if "read" in mine:
                reads.append(mine["read"])
            if share:
                shares.append(share(mine, top))
            if other is not None:
                others.append(other)
                ratios.append(mine["rate"] / other)
        row = {"group": group, "name": name, "threads": threads, "unit": unit, "milad": statistics.median(rates),
               "peer": statistics.median(others) if others else None, "ratio": statistics.median(ratios) if ratios else None,
               "share": statistics.median(shares) if shares else None, "limit": limit,
               "read_GBps": round(statistics.median(reads) / 1e9, 1) if reads else None, "unsteady_rounds": n_unsteady,
               "steady": n_unsteady < most_unsteady}
        self.rows.append(row)
        print(report.line(row), flush=True)


def decode_share(mine: dict[str, Any], bandwidth: float) -> float:
    """Bytes that a step must read, against the read bandwidth of the same minute."""
    return mine["rate"] * (mine["weight_bytes"] + mine["kv_bytes"]) / bandwidth


def prefill_share(mine: dict[str, Any], operations: float) -> float:
    """Multiply-adds of the layers' matrices (two operations each), against the peak of the same minute."""
    return mine["rate"] * 2 * mine["layer_params"] / operations


def matrices(run: Run, group: str, names: tuple[str, ...], wanted: set[str]) -> None:
    for name in names:
        if wanted and name not in wanted:
            continue
        file = files.file(name)
        kind = "bf16" if name.endswith("BF16") else "int8"
        n = 32 if group == "1b" else 128
        for threads in run.threads:
            run.cell(group, f"{name} decode {n}", threads, lambda: core.measure(file, threads, "decode", n, reads=True),
                     lambda: peer.bench(file, threads, 0, n, 0), "bandwidth", decode_share)
            run.cell(group, f"{name} prefill 512", threads, lambda: core.measure(file, threads, "prefill", 512),
                     lambda: peer.bench(file, threads, 512, 0, 0), kind, prefill_share)


def depth(run: Run, wanted: set[str]) -> None:
    for name in ("smollm2-Q4_1",):
        file = files.file(name)
        run.cell("depth", f"{name} decode 64 at 4096", 2, lambda: core.measure(file, 2, "decode", 64, 4096, reads=True),
                 lambda: peer.bench(file, 2, 0, 64, 4096), "bandwidth", decode_share)
        run.cell("depth", f"{name} prefill 512 at 4096", 2, lambda: core.measure(file, 2, "prefill", 512, 4096),
                 lambda: peer.bench(file, 2, 512, 0, 4096))


def batches(run: Run, wanted: set[str]) -> None:
    for n in (1, 4, 8, 16):
        file = files.file("smollm2-Q4_1")
        run.cell("batch", f"smollm2-Q4_1 decode, {n} sequences", 2, lambda: core.measure(file, 2, "decode", 64, 16, n, reads=True),
                 lambda: peer.batched(file, 2, n))


def busy(run: Run, wanted: set[str]) -> None:
    """Decode on two threads while another program holds one core; the share is of one thread's speed beside it."""
    file = files.file("smollm2-Q4_1")

    def beside(measure: Callable[[], Any]) -> Any:
        hog = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        try:
            return measure()
        finally:
            hog.kill()
            hog.wait()

    run.cell("busy", "smollm2-Q4_1 decode 128 beside a program", 2,
             lambda: beside(lambda: {**core.measure(file, 2, "decode", 128),
                                     "one": core.measure(file, 1, "decode", 128)["rate"]}),
             lambda: beside(lambda: peer.bench(file, 2, 0, 128, 0)), "one thread",
             lambda mine, _: mine["rate"] / mine["one"])


def serving(run: Run, wanted: set[str]) -> None:
    """Each server fresh in each round; the peer's beside ours only in time, never at once."""
    file = files.file("smollm2-Q4_1")
    found: dict[str, list[list[float]]] = {}

    def note(name: str, side: int, value: float) -> None:
        found.setdefault(name, [[], []])[side].append(value)

    for _ in range(run.rounds):
        sides = [(0, serve.milad(file, "--parallel", "16"))]
        if run.with_peer:
            sides.append((1, serve.llama_server(file, "-c", str(16 * 8192), "-np", "16", "--no-webui")))
        for side, context in sides:
            with context as (server, ready):
                note("ready, s", side, ready)
                note("resident when ready, MB", side, server.resident() / 1e6)
                note("idle, share of a core", side, serve.idle_cpu(server))
                for name, seconds in serve.chat(server).items():
                    note({"cold_s": "first token of a 5,800-token chat, s", "repeat_s": "the same again, s",
                          "next_turn_s": "its next turn, s"}[name], side, seconds)
                for n in (1, 4, 8, 16):
                    note(f"{n} streams together, tokens/s", side, serve.streams(server, n))
                note("resident after, MB", side, server.resident() / 1e6)
    for name, (ours, theirs) in found.items():
        better = (lambda a, b: a / b) if "tokens/s" in name else (lambda a, b: b / a if a else None)
        ratios = [r for r in (better(a, b) for a, b in zip(ours, theirs)) if r is not None]
        row = {"group": "serve", "name": name, "threads": 2, "unit": "", "milad": statistics.median(ours),
               "peer": statistics.median(theirs) if theirs else None, "ratio": statistics.median(ratios) if ratios else None,
               "share": None, "limit": ""}
        run.rows.append(row)
        print(report.line(row), flush=True)


def python(run: Run, wanted: set[str]) -> None:
    """The daemon's own cost per streamed token: everything but the model."""
    file = files.file("smollm2-Q4_1")
    for name, (path, body) in serve.PROTOCOLS.items():
        for n in (4, 1):
            costs: list[dict[str, float]] = []

            def measure() -> dict[str, Any]:
                costs.append(serve.python_cost(file, path, body, n=n))
                return {"rate": costs[-1]["user"]}

            run.cell("python", f"{name}, a streamed token, {n} stream{'s' * (n > 1)}", 1, measure, None, unit="us of Python")
            for part, unit in (("kernel", "us of the kernel"), ("loop", "us of the event loop's thread, kernel included")):
                run.rows[-1][f"{part}_us"] = middle = statistics.median(c[part] for c in costs)
                print(f"{'':42} {'':>7} {middle:>10.3g}  {unit}", flush=True)


def main(arguments: list[str], doc: str) -> int:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, usage=argparse.SUPPRESS)
    parser.add_argument("--only", default="smollm2,serve,python")
    parser.add_argument("--files", default="", help="file names of the groups smollm2 and 1b")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, action="append", choices=(1, 2), help="of the groups smollm2 and 1b (default: 1 and 2)")
    parser.add_argument("--json")
    parser.add_argument("--svg")
    parser.add_argument("--no-peer", action="store_true")
    parsed = parser.parse_args(arguments)
    wanted = set(parsed.only.split(","))
    if wanted - set(GROUPS):
        parser.error(f"unknown group {', '.join(sorted(wanted - set(GROUPS)))}; there are {', '.join(GROUPS)}")
    names = set(filter(None, parsed.files.split(",")))
    if names - set(files.SMOLLM2 + files.ONE_B):
        parser.error(f"unknown file {', '.join(sorted(names - set(files.SMOLLM2 + files.ONE_B)))}")
    build.environment()
    try:
        build.library()
    except build.BuildError as e:
        sys.exit(f"bench: {e}")
    run = Run(parsed.rounds, not parsed.no_peer, tuple(parsed.threads or (1, 2)))
    print(report.head(), flush=True)
    for group, work in (("smollm2", lambda: matrices(run, "smollm2", files.SMOLLM2, names)),
                        ("1b", lambda: matrices(run, "1b", files.ONE_B, names)), ("depth", lambda: depth(run, names)),
                        ("batch", lambda: batches(run, names)), ("busy", lambda: busy(run, names)), ("serve", lambda: serving(run, names)),
                        ("python", lambda: python(run, names))):
        if group in wanted:
            work()
    result = {"time": time.strftime("%Y-%m-%dT%H:%M:%S"), "machine": report.machine(), "rounds": run.rounds, "rows": run.rows}
    if parsed.json:
        Path(parsed.json).write_text(json.dumps(result, indent=1) + "\n")
    if parsed.svg:
        Path(parsed.svg).write_text(report.svg(run.rows))
    return 0

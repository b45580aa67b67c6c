"""`milad pull`: fetches a model of the catalogue, of a hub, or of a URL into the models folder."""

from __future__ import annotations

import argparse
import re
import sys
import time
from typing import Callable

from .. import catalogue, hub, loader
from ..errors import UsageError
from . import flags


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", default=catalogue.DEFAULT.name,
                        help=f"a name of the catalogue ({', '.join(catalogue.BY_NAME)}), hf:ORG/REPO, hf:ORG/REPO:QUANT, "
                             f"hf:ORG/REPO:FILE.gguf, or a URL (default: {catalogue.DEFAULT.name})")
    parser.add_argument("--sha256", metavar="HEX", default="", help="what the file's SHA-256 must be, where the source does not say it")
    parser.add_argument("-c", "--config", metavar="FILE", help="the milad.conf to read")
    parser.epilog = ("What is cut off goes on with the same command. HF_ENDPOINT: another hub; HF_TOKEN: the token for it.\n\n"
                     "example:  milad pull hf:unsloth/Qwen3-0.6B-GGUF:Q8_0")
    flags.add(parser, ("models_dir",))


def run(parsed: argparse.Namespace) -> int:
    folder = loader.models_folder({n: v.value for n, v in flags.effective(parsed).items()})

    def say(line: str) -> None:
        print(f"milad: {line}", file=sys.stderr)

    if parsed.sha256 and not re.fullmatch(r"[0-9a-fA-F]{64}", parsed.sha256):
        raise UsageError("--sha256 takes 64 hexadecimal digits", 2)
    if parsed.name.startswith("hf:") or "://" in parsed.name:
        path = hub.pull(parsed.name, folder, sha256=parsed.sha256, say=say, progress=bar)
    else:
        path = catalogue.pull(parsed.name, folder=folder, say=say)
    print(path)
    return 0


def bar(name: str) -> Callable[[int, int], None]:
    """Bytes, speed and time left, on a terminal."""
    if not sys.stderr.isatty():
        return lambda done, total: None
    start, first, shown = time.monotonic(), [-1], [0.0]

    def show(done: int, total: int) -> None:
        now = time.monotonic()
        first[0] = done if first[0] < 0 else first[0]
        if now - shown[0] < 0.1 and done != total:
            return
        shown[0] = now
        rate = max(0, done - first[0]) / max(1e-3, now - start)
        text = f"{catalogue.size_text(done)}"
        if total:
            n = 24 * done // total
            left = f", {(total - done) / rate:.0f} s left" if rate else ""
            text = f"[{'#' * n}{'.' * (24 - n)}] {done / total:4.0%} {text} of {catalogue.size_text(total)}, {catalogue.size_text(rate)}/s{left}"
        end = "\r\x1b[K" if done == total else ""
        print(f"\r\x1b[K{name[:30]} {text}{end}", end="", file=sys.stderr, flush=True)

    return show

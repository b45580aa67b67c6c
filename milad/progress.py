"""Progress bars: on a terminal's stderr, nothing elsewhere."""

from __future__ import annotations

import sys
from typing import Callable


def bar(what: str, stream=None) -> Callable[[float], None]:
    """show(0..1); the line is wiped at 1."""
    out = stream or sys.stderr
    if not out.isatty():
        return lambda share: None
    width = 30

    def show(share: float) -> None:
        share = min(1.0, max(0.0, share))
        done = int(width * share)
        print("\r\x1b[K" if share >= 1 else f"\r{what} [{'#' * done}{'.' * (width - done)}] {share:4.0%}", end="", file=out,
              flush=True)
    return show

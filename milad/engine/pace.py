"""How many prompt rows and drafts a step may take beside running streams, from how long steps took. Pure.

Rule: while anyone reads a stream, a step with prefill takes at most STRETCH times a plain decode step (or step_s, where the
operator says one), so that a stream's longest gap stays below 3 times its median.
"""

from __future__ import annotations

STRETCH = 2.0       # of 3 allowed: the rest is for jitter
MIN_ROWS = 8        # prefill always moves
FIRST_ROWS = 32     # before anything was measured
FIRST_COST = 0.3    # of a draft's row, likewise
SMOOTH = 0.2


class Pace:
    def __init__(self, step_s: float | None = None) -> None:
        self.step_s = step_s
        self.decode_s: float | None = None      # of a step without prefill
        self.row_s: float | None = None         # what one prompt row adds
        self.draft_s: float | None = None       # what one draft's row adds

    def rows(self, n_running: int, room: int) -> int:
        """Prompt rows for the next step; room: what fits the batch at all."""
        if n_running == 0:
            return room
        if self.row_s is None:
            return min(room, FIRST_ROWS)
        decode_s = self.decode_s if self.decode_s is not None else self.row_s * n_running
        target = self.step_s if self.step_s is not None else STRETCH * decode_s
        rows = max(MIN_ROWS, int((target - decode_s) / self.row_s))
        if rows > 16:
            rows -= rows % 8
        return min(room, rows)

    def draft_cost(self, n_running: int) -> float:
        """What verifying a guess costs, as a share of what a plain step spends on one token."""
        if self.draft_s is None or self.decode_s is None:
            return FIRST_COST
        return self.draft_s * n_running / max(self.decode_s, 1e-9)

    def draft_rows(self, n_running: int) -> int:
        """Most drafts of one sequence's: those of all together keep the step within its target."""
        if not self.draft_s or self.decode_s is None:
            return FIRST_ROWS // n_running
        return int((STRETCH - 1) * self.decode_s / self.draft_s / n_running)

    def note(self, n_decode: int, n_drafts: int, n_prefill: int, step_s: float) -> None:
        """How long a step took. n_decode: rows of running streams, without the n_drafts verified beside them."""
        if step_s <= 0:
            return
        if n_prefill:
            if n_decode or self.row_s is None:          # large chunks alone are cheaper by the row than small ones beside streams
                decode_s = min(self.decode_s or 0.0, 0.9 * step_s) if n_decode else 0.0
                self.row_s = _smooth(self.row_s, (step_s - decode_s) / n_prefill)
        elif n_drafts:
            if self.decode_s is not None:
                self.draft_s = _smooth(self.draft_s, max(0.0, step_s - self.decode_s) / n_drafts)
        else:
            self.decode_s = _smooth(self.decode_s, step_s)


def _smooth(old: float | None, new: float) -> float:
    return new if old is None else old + SMOOTH * (min(new, 4 * old) - old) if old > 0 else new

"""How many prompt rows and drafts a step may take beside running streams, from how long steps took. Pure.

Rules
- While anyone reads a stream, all steps with prefill aim at one length, so that the stream's longest gap stays near its median:
  STRETCH times a plain decode step, but no less than LEAST_S (or step_s, where the operator says one).
- A prompt row costs more the more stands before it: its cost is kept per DEPTH tokens.
"""

from __future__ import annotations

STRETCH = 2.0
LEAST_S = 0.02      # faster than anyone reads; in smaller pieces a deep prompt pays the fixed costs of a step several times over
MIN_ROWS = 8        # prefill always moves
FIRST_ROWS = 32     # before anything was measured
FIRST_COST = 0.3    # of a draft's row, likewise
DEPTH = 1024
SMOOTH = 0.2


class Pace:
    def __init__(self, step_s: float | None = None) -> None:
        self.step_s = step_s
        self.decode_s: float | None = None      # of a step without prefill
        self.row_s: float | None = None         # what one prompt row added, as last measured
        self.draft_s: float | None = None       # what one draft's row adds
        self._row_s: dict[int, float] = {}      # what one prompt row adds, by its depth
        self._depth = 0                         # of the step that was planned last

    def rows(self, n_running: int, n_drafts: int, depth: int, room: int) -> int:
        """Prompt rows for the next step. depth: how many tokens stand before them; room: what fits the batch at all."""
        self._depth = depth // DEPTH
        if n_running == 0:
            return room
        row_s = self._expected()
        if row_s is None:
            return min(room, FIRST_ROWS)
        decode_s = self.decode_s if self.decode_s is not None else row_s * n_running
        target = self.step_s if self.step_s is not None else max(STRETCH * decode_s, LEAST_S)
        rows = max(MIN_ROWS, int((target - decode_s - n_drafts * (self.draft_s or 0.0)) / row_s))
        if rows > 16:
            rows -= rows % 8
        return min(room, rows)

    def _expected(self) -> float | None:
        """A prompt row's cost at the planned depth. Where none was measured: the nearest one's, grown with the depth at most."""
        if not self._row_s:
            return None
        near = min(self._row_s, key=lambda d: abs(d - self._depth))
        return self._row_s[near] * max(1.0, (self._depth + 1) / (near + 1))

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
            known = self._row_s.get(self._depth)
            if n_decode or known is None:               # large chunks alone are cheaper by the row than small ones beside streams
                others_s = (self.decode_s or 0.0) + n_drafts * (self.draft_s or 0.0) if n_decode else 0.0
                self.row_s = self._row_s[self._depth] = _smooth(known, max(step_s - others_s, 0.1 * step_s) / n_prefill)
        elif n_drafts:
            if self.decode_s is not None:
                self.draft_s = _smooth(self.draft_s, max(0.0, step_s - self.decode_s) / n_drafts)
        else:
            self.decode_s = _smooth(self.decode_s, step_s)


def _smooth(old: float | None, new: float) -> float:
    return new if old is None else old + SMOOTH * (min(new, 4 * old) - old) if old > 0 else new

"""Grammars at work: what a sequence may say next, as the engine asks for it (engine.base.Constraint).

MaskConstraint follows one llguidance matcher; CallWatch lets text go free until a call opens. Both belong to one sequence and the
engine's thread. The library is not imported here: matchers are handed in.
"""

from __future__ import annotations

from typing import Any, Iterable

from . import log
from .engine.base import Model
from .errors import invalid

_MAX_COPIES = 256                   # of one compiled grammar


class MaskConstraint:
    """One sequence's way through a grammar (engine.base.Constraint). Tokens that its mask forbids must not be accepted."""

    def __init__(self, matcher: Any, n_words: int, param: str, first: bytes | None = None,
                 family: "_Copies | None" = None) -> None:
        self.family = family or _Copies()
        self._matcher = matcher
        self._n_words = n_words
        self._param = param
        self._next = first                  # the next mask, where it is known

    def prepare(self, model: Model) -> str:
        """Computes the first mask and looks behind what the grammar forces at its start. Returns the problem, "" for none."""
        if not self._matcher.is_error():
            self._next = self._matcher.compute_bitmask()[:self._n_words * 4]
        if not self._matcher.is_error():
            ahead = self._matcher.deep_copy()
            forced = ahead.compute_ff_bytes()
            if forced and ahead.try_consume_tokens(model.tokenize(forced)):
                ahead.compute_bitmask()
            if ahead.is_error():
                return first_line([ahead.get_error()])
        return first_line([self._matcher.get_error()]) if self._matcher.is_error() else ""

    def mask(self) -> bytes | None:
        """The allowed next tokens. Over a limit: MiladError where the client was promised the form, else all are allowed."""
        if self._next is None:
            self._next = self._matcher.compute_bitmask()[:self._n_words * 4]
        if not self._matcher.is_error():
            return self._next
        self.family.spent = True
        problem = first_line([self._matcher.get_error()])
        if self._param:
            raise invalid(self._param, f"the grammar can't be followed any further: {problem}")
        log.once("grammar error", "a grammar of tool calls hit a limit and no longer holds: %s", problem)
        return None

    def accept(self, token: int) -> None:
        self._next = None
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)

    def feed(self, tokens: list[int]) -> bool:
        """Accepts tokens that came without a mask; False: they don't fit."""
        self._next = None
        return self._matcher.try_consume_tokens(tokens) == len(tokens)

    @property
    def over(self) -> bool:
        """All is said, or a limit was hit."""
        return self._matcher.is_accepting() or self._matcher.is_error()

    def copy(self, param: str | None = None) -> "MaskConstraint":
        self.family.n_made += 1
        return MaskConstraint(self._matcher.deep_copy(), self._n_words, self._param if param is None else param, self._next,
                              self.family)


class CallWatch:
    """Auto mode (engine.base.Constraint): free text costs nothing and is held to nothing; from the moment a call opens until it ends
    the masks are those of `calls`. opening: texts that open one, each with what of it `calls` wants to see; special: the token."""

    def __init__(self, model: Model, calls: MaskConstraint, opening: tuple[tuple[bytes, bytes], ...], special: int | None) -> None:
        self._model = model
        self._calls = calls
        self._opening = opening
        self._special = special
        self._longest = max((len(text) for text, _ in opening), default=0)
        self._tail = b""
        self._open: MaskConstraint | None = None

    def mask(self) -> bytes | None:
        return self._open.mask() if self._open is not None else None

    def accept(self, token: int) -> None:
        if self._open is not None:
            self._open.accept(token)
            if self._open.over:
                self._open = None
        elif token == self._special:
            self._begin(b"")
        elif self._opening and not self._model.is_control(token):
            seen = self._tail + self._model.token_bytes(token)
            self._tail = seen[-self._longest:]
            for text, shown in self._opening:
                at = seen.find(text)
                if at >= 0:
                    self._begin(shown + seen[at + len(text):])
                    break

    def _begin(self, text: bytes) -> None:
        """A call is open and `text` of it is there already; where that is none of ours it stays free text."""
        self._tail = b""
        opened = self._calls.copy()
        if not text or opened.feed(self._model.tokenize(text)):
            self._open = None if opened.over else opened

    def copy(self) -> "CallWatch":
        made = CallWatch(self._model, self._calls, self._opening, self._special)
        made._tail = self._tail
        made._open = self._open.copy() if self._open is not None else None
        return made


class _Copies:
    """What copies of one matcher share: the library's automaton, which grows with use and counts against its limits."""

    def __init__(self) -> None:
        self.spent = False
        self.n_made = 0

    def fresh(self) -> bool:
        return not self.spent and self.n_made < _MAX_COPIES


def first_line(messages: Iterable[str]) -> str:
    for message in messages:
        for line in message.splitlines():
            if line.startswith("NoExtension"):
                return "no output satisfies it"
            if line.strip():
                return line.strip()[:300]
    return "no reason given"

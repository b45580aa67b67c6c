"""One generation as the scheduler sees it: its tokens, how far they are computed, and the blocks that hold them.

tokens grows by one per generated token; the keys and values of tokens[:n_computed] are in the blocks of `table`. So one
uncomputed token means decoding, more mean prefill, also after a preemption, when n_computed starts again.

Pure data. `cancelled` and `paused` are set by any thread (single stores), everything else belongs to the engine's thread.
"""

from __future__ import annotations

from array import array
from dataclasses import replace

from .base import Item, Request

QUEUED, ACTIVE, ENDED = range(3)


class Sequence:
    __slots__ = ("request", "tokens", "n_prompt", "max_tokens", "sampler", "constraint", "stop_ids", "play",
                 "state", "order", "table", "keys", "n_registered", "n_computed", "n_cached", "n_scored", "n_output",
                 "admitted", "announced", "due", "wait_key", "position", "started_at", "cancelled", "paused", "items", "handle", "drafter",
                 "speculates", "fetched", "tail_key")

    def __init__(self, request: Request, n_ctx: int) -> None:
        self.request = request
        self.tokens = array("i", request.tokens)
        self.n_prompt = len(self.tokens)
        self.max_tokens = max(1, request.max_tokens)
        sampler = replace(request.sampler, play=request.play, n_prompt=self.n_prompt)
        penalised = (sampler.repeat_penalty != 1.0 or sampler.presence_penalty != 0.0 or sampler.frequency_penalty != 0.0)
        sampler.history = self.tokens if penalised else None    # the row is always the last token when it is sampled
        self.sampler = sampler
        self.constraint = request.constraint
        self.stop_ids = request.stop_ids
        self.play = request.play
        self.state = QUEUED
        self.order = 0              # of arrival; kept over preemptions, so the oldest is never preempted
        self.table = array("i")
        self.keys: list[bytes] = []
        self.n_registered = 0       # leading blocks of the table that the prefix cache knows
        self.n_computed = 0
        self.n_cached = 0
        self.n_scored = 0           # prompt tokens whose logprob was delivered, the first counted without one
        self.n_output = 0
        self.admitted = False       # it had a place at least once
        self.announced = False      # its Admitted was delivered
        self.due = 0.0              # no row before this time (scripted delays)
        self.wait_key: bytes | None = None      # in the queue: the block that another sequence is computing for both
        self.tail_key: bytes | None = None      # of the prompt's last, partial block
        self.fetched = False        # the second tier was asked
        self.position = -1          # in the queue, as last reported
        self.started_at = 0.0
        self.cancelled = False
        self.paused = False
        self.items: list[Item] = []
        self.handle: object = None
        self.drafter: object = None
        self.speculates = not penalised and self.play is None   # penalties: each row would need a history of its own

    @property
    def n_left(self) -> int:
        """Tokens to compute before the next one can be drawn."""
        return len(self.tokens) - self.n_computed

    @property
    def scoring(self) -> bool:
        return self.request.score_prompt and self.n_scored < self.n_prompt

    def __repr__(self) -> str:
        return (f"<sequence {self.order} {('queued', 'active', 'ended')[self.state]}{' paused' * self.paused} prompt "
                f"{self.n_prompt} cached {self.n_cached} computed {self.n_computed} output {self.n_output} "
                f"blocks {len(self.table)}>")

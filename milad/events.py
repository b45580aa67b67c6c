"""What a generation yields, and the fold of it into a message.

One order holds: Started, then for each block BlockStart, Delta*, BlockEnd (blocks never overlap, indices 0, 1, 2, ...),
Progress anywhere before the first BlockStart, then one Finish or one Failure. Streams and plain bodies are both written from
these events through Fold, so they cannot disagree.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Union

from .errors import MiladError


@dataclass(frozen=True)
class TokenLogprob:
    data: bytes                                            # the token's bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...] = ()              # best first
    token: int = -1


@dataclass(frozen=True)
class Usage:
    input_tokens: int = 0                                  # all of the prompt, cached or not
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True)
class Started:
    """The prompt is admitted; its length is final, `cached_tokens` what the cache spared."""
    usage: Usage


@dataclass(frozen=True)
class Progress:
    done: int
    total: int
    cached: int
    queued: int = 0                                        # position in the queue; 0: running


@dataclass(frozen=True)
class BlockStart:
    index: int
    kind: str                                              # text, thinking, tool_call
    id: str = ""                                           # tool calls: unique; protocols prefix it
    name: str = ""                                         # tool calls: ToolSpec.name


@dataclass(frozen=True)
class Delta:
    index: int
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class BlockEnd:
    index: int
    complete: bool = True                                  # False: cut by a limit or a fault


@dataclass(frozen=True)
class Finish:
    """reason: stop (end of turn), stop_sequence, length (the client's number), context (the room ran out), tool_calls."""
    reason: str
    usage: Usage
    stop_sequence: str | None = None


@dataclass(frozen=True)
class Failure:
    error: MiladError


Event = Union[Started, Progress, BlockStart, Delta, BlockEnd, Finish, Failure]


@dataclass
class Block:
    kind: str
    id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)        # appending to a string would copy it for every token
    complete: bool = False
    logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def text(self) -> str:
        if len(self.pieces) > 1:
            self.pieces[:] = ["".join(self.pieces)]
        return self.pieces[0] if self.pieces else ""


@dataclass
class Fold:
    """Events so far as one answer. `take` appends; the fields are the plain body's material."""
    blocks: list[Block] = field(default_factory=list)
    usage: Usage = Usage()
    finish: Finish | None = None
    failure: Failure | None = None
    progress: Progress | None = None                       # while the prompt is read

    def take(self, event: Event) -> None:
        if isinstance(event, Delta):
            block = self.blocks[event.index]
            if event.text:
                block.pieces.append(event.text)
            block.logprobs += event.logprobs
        elif isinstance(event, BlockStart):
            if event.index != len(self.blocks):
                raise ValueError(f"block {event.index} out of order")
            self.blocks.append(Block(event.kind, event.id, event.name))
        elif isinstance(event, BlockEnd):
            self.blocks[event.index].complete = event.complete
        elif isinstance(event, Progress):
            self.progress = event if event.done < event.total else None
        elif isinstance(event, Started):
            self.usage = event.usage
        elif isinstance(event, Finish):
            self.finish = event
            self.usage = event.usage
        elif isinstance(event, Failure):
            self.failure = event

    def text(self, kind: str = "text") -> str:
        return "".join(b.text for b in self.blocks if b.kind == kind)

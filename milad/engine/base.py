"""The engine's vocabulary: what the core offers (capi and the scripted core both provide it), what a generation asks for and
what it gets back. Data and interfaces only; pure.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any, Callable, NamedTuple, Protocol, Union

BLOCK = 32                                  # tokens per KV block: MILAD_KV_BLOCK
WAIT = -2                                   # Output.token: nothing yet, plan the row again (scripted core's delays)


@dataclass
class SamplerArgs:
    """One output's sampler: milad_sampler as Python data. Mutable so that a sequence keeps one and updates it."""
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    n_top: int = -1                         # -1: no logprobs; 0..20 alternatives
    seed: int = 0                           # 0 .. 2**64-1
    bias_ids: array | None = None           # array('i')
    bias: array | None = None               # array('f')
    history: array | None = None            # array('i'): tokens up to and including the row; only needed for penalties
    n_prompt: int = 0
    forced: int = -1
    mask: bytes | None = None               # (n_vocab + 31) // 32 * 4 bytes, little-endian words, bit set = allowed
    play: Any = None                        # the scripted core's script line; the real core ignores it


@dataclass
class Batch:
    """milad_batch. rows: flat array('i') of (token, position, sequence, output) quadruples."""
    rows: array
    tables: list[array]                     # per sequence: array('i') of block ids
    samplers: list[SamplerArgs]             # per output


class Output(NamedTuple):
    token: int                              # -1: none possible (mask, non-finite logits); WAIT
    logprob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()
    data: bytes | None = None               # scripted: the text of the step, instead of the token's bytes
    fault: str | None = None                # scripted fail_after: this sequence fails
    due: float = 0.0                        # with WAIT: the time.monotonic() before which asking again is pointless
    end: bool = False                       # scripted: the turn ends here, whatever the token


@dataclass(frozen=True)
class ModelInfo:
    """milad_model_info."""
    architecture: str
    quantisation: str
    n_vocab: int
    n_ctx_train: int
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_ff: int
    bos: int
    eos: int
    eot: int
    unk: int
    pad: int
    add_bos: bool
    add_eos: bool
    has_weights: bool
    n_params: int
    file_bytes: int
    weight_bytes: int
    fingerprint: int


class Model(Protocol):
    """An opened model file. Any thread."""
    path: str
    info: ModelInfo

    def metadata(self, key: str | None = None) -> Any:
        """The value under key (None: absent), or all as a dict."""
        ...

    def tokenize(self, text: Union[str, bytes], *, add_bos: bool = False, parse_special: bool = False) -> list[int]: ...

    def token_bytes(self, token: int) -> bytes:
        """Cached. Control tokens: their spelling."""
        ...

    def is_control(self, token: int) -> bool: ...

    @property
    def eog(self) -> frozenset[int]:
        """Tokens that end a generation."""
        ...

    @property
    def specials(self) -> dict[str, int]:
        """Spelling -> id of control and user-defined tokens."""
        ...

    def context(self, *, n_blocks: int, n_threads: int = 0, max_rows: int = 512, kv_type: str = "f16") -> "Context": ...

    def close(self) -> None: ...


class Context(Protocol):
    """The KV arena and the forward pass. One thread at a time, but for interrupt()."""
    n_blocks: int
    block_bytes: int                        # what kv_read returns; 0: blocks can't be kept outside
    layout: str                             # what else makes two contexts' blocks differ: instruction set, build
    max_rows: int

    def step(self, batch: Batch) -> list[Output]:
        """Outputs in the samplers' order. Raises errors.EngineFault; `Interrupted` after interrupt()."""
        ...

    def kv_copy(self, src: int, dst: int, n_tokens: int) -> None: ...

    def kv_read(self, block: int) -> bytes: ...

    def kv_write(self, block: int, data: bytes) -> None: ...

    def interrupt(self) -> None: ...

    def stat(self) -> dict[str, Any]: ...

    def begin(self, *, tools: bool, path: str, last: str) -> Any:
        """Chooses what a generation plays: None on the real core; the scripted core's next matching line, or raises MiladError
        (kind internal, naming the script) where none matches."""
        ...

    def close(self) -> None: ...


class Interrupted(Exception):
    """A step was interrupted; nothing of its batch counts as computed."""


class Constraint(Protocol):
    """Keeps one sequence inside a grammar. Engine thread only (after construction)."""

    def mask(self) -> bytes | None:
        """The allowed next tokens, or None: all."""
        ...

    def accept(self, token: int) -> None: ...

    def copy(self) -> "Constraint":
        """For speculation: advances without touching the original."""
        ...


@dataclass
class Request:
    """One sequence to generate, as turn hands it to the engine."""
    tokens: list[int]                       # the prompt, at least one
    max_tokens: int                         # >= 1; the engine clamps it to the room left
    sampler: SamplerArgs
    stop_ids: frozenset[int]
    sink: Callable[[list["Item"]], None]    # called on the engine's `post` side (the event loop), once per step at most
    constraint: Constraint | None = None
    score_prompt: bool = False              # prompt logprobs: Scored items for tokens 1.. before the first Token
    client: str = ""                        # for fairness between clients
    deadline: float | None = None           # time.monotonic() by which it must have left the queue
    play: Any = None                        # Context.begin's
    cacheable: bool = True


class Token(NamedTuple):
    """A generated token. The one that ends the turn (in stop_ids) is counted, and delivered as Done only."""
    id: int
    data: bytes
    logprob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()


class Scored(NamedTuple):
    """A prompt token's logprob given what stands before it."""
    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Admitted(NamedTuple):
    n_prompt: int
    n_cached: int


class Prefill(NamedTuple):
    """Where a sequence stands before its first token. queued: position in the queue, 0 = running."""
    done: int
    total: int
    cached: int
    queued: int = 0


class Done(NamedTuple):
    """reason: stop (a stop id), length (max_tokens as asked), context (the room ran out), cancelled."""
    reason: str
    n_prompt: int
    n_cached: int
    n_output: int


class Fault(NamedTuple):
    error: Exception                        # MiladError or EngineFault


Item = Union[Token, Scored, Admitted, Prefill, Done, Fault]


class Handle(Protocol):
    """What submit returns. Any thread."""

    def cancel(self) -> None:
        """Stops within a step; no further items."""
        ...

    def pause(self) -> None:
        """A slow reader: keeps the blocks, takes no steps until resume()."""
        ...

    def resume(self) -> None: ...

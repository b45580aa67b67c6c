"""How long one request's context is and how many KV blocks the arena holds, from the options, the model and the memory. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from .engine.base import BLOCK
from .errors import UsageError

MIN_CTX = 64


def kv_token_bytes(n_heads: int, head_dim: int, kv_type: str) -> int:
    """Bytes of one token's keys and values. n_heads: layers x kv heads. q8_0 (native/src/kv.h): a byte a value, two for each 64
    dimensions of keys and eight."""
    if kv_type == "q8_0":
        return n_heads * (-(-head_dim // 4) * 4 + head_dim + 2 * -(-head_dim // 64) + 8)
    return n_heads * head_dim * 4


@dataclass(frozen=True)
class Sizes:
    n_ctx: int                  # tokens of one request
    n_blocks: int               # of the arena
    parallel: int
    notes: tuple[str, ...]      # warnings for the person


def choose(*, ctx: int | None, parallel: int, kv_memory: int | None, n_ctx_train: int, bytes_per_token: int,
           available: int) -> Sizes:
    """The arena holds parallel requests of n_ctx tokens if the memory allows, and never less than one whole request.

    available: bytes free once the weights are loaded. bytes_per_token: of one token's keys and values, all layers; 0 (the
    scripted core): memory is no limit."""
    notes: list[str] = []
    if ctx is not None and n_ctx_train and ctx > n_ctx_train:
        notes.append(f"--ctx {ctx} is beyond the {n_ctx_train} tokens that the model was trained on: answers may degrade there")
    wanted = ctx or n_ctx_train or 4096
    if not bytes_per_token:
        return Sizes(wanted, parallel * (_blocks(wanted) + 1) + 1, parallel, tuple(notes))
    budget = kv_memory if kv_memory is not None else available // 2
    fits = budget // bytes_per_token // BLOCK * BLOCK
    n_ctx = wanted
    if fits < wanted + BLOCK:
        if ctx is not None:
            need = (_blocks(ctx) + 1) * BLOCK * bytes_per_token
            raise UsageError(f"--ctx {ctx} needs {need >> 20} MiB for one request's keys and values, "
                             f"{budget >> 20} MiB are {'allowed' if kv_memory is not None else 'to be had'}; "
                             "a smaller --ctx, a larger --kv-memory or --kv-type q8_0 helps")
        n_ctx = max(0, fits - BLOCK)
        if n_ctx < MIN_CTX:
            raise UsageError(f"{budget >> 20} MiB for keys and values are too few for this model: "
                             f"{(MIN_CTX + BLOCK) * bytes_per_token >> 20} MiB is the least")
        notes.append(f"the context is {n_ctx} of the model's {wanted} tokens, as the memory allows (--kv-memory, --kv-type q8_0)")
    n_blocks = min(parallel * (_blocks(n_ctx) + 1), max(budget // (bytes_per_token * BLOCK), _blocks(n_ctx) + 1))
    return Sizes(n_ctx, int(n_blocks), parallel, tuple(notes))


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK)

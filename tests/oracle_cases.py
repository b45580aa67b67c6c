"""Tiny models whose logits transformers has computed (tests/data/tiny-oracle.npz, made by scripts/make-oracle).

A case is the options of tests/tiny.py. The tokens and the positions whose logits are kept are the same for all cases; 80 tokens
span three KV blocks and, at n_ctx 512 / 4, the wavelengths that scaled RoPE treats differently.
"""

from __future__ import annotations

import zlib
from typing import Any

import gguf
import numpy as np

N_TOKENS = 80
POSITIONS = [0, 1, 5, 31, 32, 63, 64, 79]


def llama3_divisors(n_rot: int, base: float, factor: float, low: float, high: float, n_ctx: int) -> np.ndarray:
    """The rope_freqs tensor that means what the llama3 keys say (Llama 3.1's rope scaling, huggingface.co/docs rope_utils)."""
    wave = 2 * np.pi * base ** (np.arange(0, n_rot, 2) / n_rot)
    smooth = (n_ctx / wave - low) / (high - low)
    mixed = 1 / ((1 - smooth) / factor + smooth)
    return np.where(wave < n_ctx / high, 1.0, np.where(wave > n_ctx / low, factor, mixed)).astype(np.float32)


CASES: dict[str, dict[str, Any]] = {
    "llama-tied": dict(arch="llama", seed=1),
    "llama-untied": dict(arch="llama", tied=False, seed=2),
    "llama-head-dim": dict(arch="llama", head_dim=24, n_head=4, n_head_kv=1, seed=3),
    "llama-llama3-keys": dict(arch="llama", rope="llama3", seed=4),
    "llama-llama3-tensor": dict(arch="llama", seed=4, tensors={
        "rope_freqs.weight": llama3_divisors(16, 10000.0, 4.0, 1.0, 4.0, 128)}),
    "llama-linear": dict(arch="llama", rope="linear", seed=5),
    "llama-yarn": dict(arch="llama", rope="yarn", seed=6),
    "qwen2": dict(arch="qwen2", n_head=4, n_head_kv=2, seed=7),
    "qwen3": dict(arch="qwen3", head_dim=32, n_head=4, n_head_kv=2, tied=False, rope_base=1e6, seed=8),
}


def tokens(n_vocab: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(99).integers(0, n_vocab, N_TOKENS)]


def checksum(path: Any) -> int:
    """Of the weights: tells a changed random stream or tests/tiny.py from a wrong forward pass."""
    reader = gguf.GGUFReader(str(path))
    crc = 0
    for t in sorted(reader.tensors, key=lambda t: t.name):
        crc = zlib.crc32(np.ascontiguousarray(t.data).tobytes(), crc)
    return crc

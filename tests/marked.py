"""Small vocabularies whose markers are control tokens, user-defined ones or plain text: byte-level, about 300 tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Iterable

import tiny

KINDS = {"control": 3, "defined": 4, "text": 0}     # GGUF token types
CALLS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]",
         "<|python_tag|>", "<|eot_id|>", "</s>")
LAYOUT = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|end_of_text|>", "<s>", "[INST]", "[/INST]",
          "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
          "[TOOL_CONTENT]", "<tool_response>", "</tool_response>", "<tools>", "</tools>")


def open_model(path: Path, kind: str, markers: Iterable[str] = CALLS) -> Any:
    """A capi.Model without weights; the caller closes it."""
    from milad import capi
    added = list(markers) if KINDS[kind] else []
    words = list(dict.fromkeys([*tiny.SPECIALS, *added, *tiny.byte_characters(), *(m.replace(" ", "") for m in tiny.MERGES), '"}', '":']))
    types = [3] * len(tiny.SPECIALS) + [KINDS[kind]] * len(added) + [1] * (len(words) - len(tiny.SPECIALS) - len(added))
    tiny.write(path, vocab_only=True, extra={"tokenizer.ggml.tokens": words, "tokenizer.ggml.token_type": types,
                                             "llama.vocab_size": len(words)})
    return capi.Model(str(path), vocab_only=True)

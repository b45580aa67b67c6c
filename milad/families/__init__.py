"""One file per model family: rendering and parsing side by side. choose() says which one a model file wants.

First the template's fingerprint (vendors' templates known by heart), then markers in the template, then, without a template,
control tokens of the vocabulary. What fits nothing is refused: a wrong format answers badly without an error.
"""

from __future__ import annotations

import hashlib
from typing import AbstractSet, Callable, Mapping

from ..errors import UsageError
from .base import Family
from .chatml import ChatML
from .llama3 import Llama3
from .mistral import Mistral
from .plain import PlainText
from .qwen3 import Qwen3
from .qwen3coder import Qwen3Coder

# name -> the family as a template (or "") wants it
FAMILIES: Mapping[str, Callable[[str], Family]] = {
    "chatml": ChatML.of,
    "qwen3": Qwen3.of,
    "qwen3-coder": lambda template: Qwen3Coder(),
    "llama3": Llama3.of,
    "mistral": Mistral.of,
    "plain": lambda template: PlainText(),
}
NAMES = tuple(FAMILIES)

# fingerprint() of a vendor's template -> family, where markers alone might mislead one day
FINGERPRINTS: Mapping[str, str] = {
    "6e76f0d0a1bfb2ef34f110bc376575127fca30189268db50eb63b9b7c352ac45": "chatml",  # SmolLM2
    "bce94d5dd17510b01c40eaeee06f7ea78bca2c56970ebf5a5a2f23eb8b08116f": "chatml",  # Qwen2
    "705d5782da398f5ce4bb10e19b2358aba0bd78710233d5f1811d7068cba1b58a": "chatml",  # Qwen2.5
    "342b81c0f0136db839bc815c9766263c03d5daa49afbba52846435a45d93add3": "chatml",  # Hermes 2 Pro, 3 (tool_use)
    "ccd61ecea6aa8406e336da83f2f71e500777096cdb0391303614e7331e6087b0": "qwen3",  # Qwen3
    "b8d83881ad3579973064c056101b6edef6c983abe2d4aa1419d622aa4e0be1e5": "qwen3",  # QwQ
    "29ffcce183435a4225839e91744d547adf40ea27463934245117ff9b58199825": "qwen3-coder",  # Qwen3-Coder
    "ea1f9d8a898a0ce5c37d64d87ec10cfde63b10355b6c315d60fbd1c7068d429d": "llama3",  # Llama 3.1, 3.3
    "6a181be8efdd87eac842323932a095e853dd3fa234718ebb0371cd4f05be1c01": "llama3",  # Llama 3.2
    "edc2b71010347aa2e154cc8c178ab71ac865044e480d17e01f0b68d4da5215bd": "mistral",  # Mistral Nemo
    "d4b8a8af48a63ef783d81670ca0f016757a17e59916d4cdcbc58a857584e2859": "mistral",  # Mistral Small 3.2
    "3dd98e10b0effc585178d42b96732b9e0b6449bb321b5a34e8dba0ef243b8c93": "mistral",  # Devstral (Unsloth)
    "b4ebcb2836dc4ee0c49c8a48b3e41f462b8fb41c2f57ce3a469b441fd00fd2e7": "mistral",  # Ministral 3 Reasoning
}


def fingerprint(template: str) -> str:
    """sha256 of the template with every run of white space as one blank: editors and converters change only those."""
    return hashlib.sha256(" ".join(template.split()).encode("utf-8", "surrogatepass")).hexdigest()


def choose(template: str | None, specials: AbstractSet[str], name: str = "") -> Family:
    """The family of a model file. `name` (--family) overrides; UsageError where nothing fits or no family is called so."""
    template = template or ""
    if name:
        if name not in FAMILIES:
            raise UsageError(f"no family is called {name!r}; there are: {', '.join(NAMES)}")
        return FAMILIES[name](template)
    found = FINGERPRINTS.get(fingerprint(template)) or (by_markers(template) if template else by_vocabulary(specials))
    if not found:
        what = "its chat template is of no family known here" if template else "it has no chat template and no known control tokens"
        raise UsageError(f"can't tell how to talk to this model: {what}; name one with --family: {', '.join(NAMES)}")
    return FAMILIES[found](template)


def by_markers(template: str) -> str:
    if "<|im_start|>" in template:
        thinks, xml = "<think>" in template, "<function=" in template
        if xml:
            return "" if thinks else "qwen3-coder"      # both: Qwen3.5, Nemotron 3 and others with a layout of their own
        return "qwen3" if thinks and "<tool_call>" in template else "chatml"
    if "<|start_header_id|>" in template:
        return "llama3"
    if "[INST]" in template and ("[TOOL_CALLS]" in template or "[SYSTEM_PROMPT]" in template):
        return "mistral"
    return ""


def by_vocabulary(specials: AbstractSet[str]) -> str:
    for token, family in (("<|im_start|>", "chatml"), ("<|start_header_id|>", "llama3"), ("[TOOL_CALLS]", "mistral")):
        if token in specials:
            return family
    return ""

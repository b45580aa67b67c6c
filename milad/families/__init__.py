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
FINGERPRINTS: Mapping[str, str] = {}


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

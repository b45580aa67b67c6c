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
from .plain import PlainText

# name -> the family as a template (or "") wants it
FAMILIES: Mapping[str, Callable[[str], Family]] = {
    "chatml": ChatML.of,
    "llama3": Llama3.of,
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
        return "chatml"
    if "<|start_header_id|>" in template:
        return "llama3"
    return ""


def by_vocabulary(specials: AbstractSet[str]) -> str:
    for token, family in (("<|im_start|>", "chatml"), ("<|start_header_id|>", "llama3")):
        if token in specials:
            return family
    return ""

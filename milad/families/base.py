"""What a model family is: how a conversation is spelled for it and how its output is read back.

A family renders segments, never one string: Text is tokenised with special tokens off, so nothing a user, a file or a tool
result carries can become a control token. Families know nothing of protocols or the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import AbstractSet, Protocol, Union

from ..conversation import Turn
from ..events import Event


@dataclass(frozen=True)
class Special:
    """A control token by its spelling (`<|im_start|>`). A vocabulary that lacks it gets it as ordinary text, with one warning."""
    text: str


@dataclass(frozen=True)
class Plain:
    text: str


Segment = Union[Special, Plain]


class Parser(Protocol):
    """Reads one generation. Events: BlockStart, Delta, BlockEnd only; indices from 0."""

    def feed(self, text: str, special: bool = False) -> list[Event]:
        """`text`: any split of the output's characters. `special`: text is the spelling of one control token."""
        ...

    def finish(self, complete: bool) -> list[Event]:
        """Flushes what was held and closes the open block. complete False: cut by a limit; an open call ends incomplete."""
        ...


class Family(Protocol):
    name: str
    thinks: bool                           # has a thinking mode
    thinking_markup: tuple[str, ...]       # (open, close) as the model writes them; (close,) where the prompt opens it; ()

    def tools_by_default(self, model_name: str, n_params: int) -> bool:
        """Whether policy `auto` shows tools to such a model: it was trained on them and is large enough."""
        ...

    def render(self, turn: Turn, specials: AbstractSet[str]) -> list[Segment]:
        """The whole prompt, ending where the model goes on (the assistant's header, or the text of a prefill). No BOS unless
        the vendor's template itself spells it; `specials` are the control tokens that the vocabulary has."""
        ...

    def parser(self, turn: Turn, specials: AbstractSet[str]) -> Parser: ...

    def stops(self, specials: AbstractSet[str]) -> tuple[str, ...]:
        """Spellings that end a turn: ids where in `specials`, else matched as text."""
        ...

    def call_grammar(self, turn: Turn) -> "CallMarkup":
        """How this family spells a tool call, for constrained decoding."""
        ...


@dataclass(frozen=True)
class CallMarkup:
    """A call's spelling around JSON: `begin` + name + `middle` + arguments + `end`; `separator` between calls.
    style json: {"name": ..., "<args_key>": {...}} between begin and end. style named: begin name middle arguments end.
    style xml: the family's own tags between begin and end. trigger: text whose appearance means that a call opened (auto mode):
    a beginning of `begin`, or, where that is empty, of the JSON itself."""
    style: str
    begin: str
    end: str
    middle: str = ""
    args_key: str = "arguments"
    separator: str = "\n"
    trigger: str = ""
    array: bool = False                    # calls stand in one JSON array after `begin`

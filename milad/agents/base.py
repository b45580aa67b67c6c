"""What the agents' files share: the server that an agent is pointed at, and the plan of one launch.

Rules
- An agent gets environment and flags. Where that is not enough, files of milad's own, 0600, in milad's state folder. The
  user's own files are never edited.
- `fixed` is what the launch is about: address, key, model. `usual` is all else; there a value that the user's environment
  has already wins.

Pure data: nothing here asks the network, writes or runs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Mapping

DUMMY_KEY = "milad"                          # for servers that ask for none: most agents refuse to start without one
PATIENT_MS = 1_800_000                       # for servers that are silent while they read a long prompt


@dataclass(frozen=True)
class Target:
    """A server, the model it serves and what one request may hold."""
    kind: str                                # a name of target.KINDS
    root: str                                # base URL without /v1 and without a slash at the end
    model: str
    context: int | None = None               # tokens of one request, prompt and answer; None: nobody said
    key: str = DUMMY_KEY
    key_env: str = ""                        # the variable that the key came from; "" for the dummy
    up: bool = True

    @property
    def v1(self) -> str:
        return self.root + "/v1"

    @property
    def silent(self) -> bool:
        """May send nothing for minutes. milad sends its protocols' signs of life."""
        return self.kind != "milad"

    @property
    def output(self) -> int | None:
        """Tokens that an agent may ask for as an answer, so that a prompt keeps most of the context."""
        return None if self.context is None else max(1024, min(32_000, self.context // 4))


@dataclass
class Plan:
    """One launch: the command line, what the environment gains and loses, the private files it needs."""
    command: list[str]
    fixed: dict[str, str] = field(default_factory=dict)
    usual: dict[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()
    files: dict[Path, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def added(self, user: Mapping[str, str]) -> dict[str, str]:
        """What the launch adds to the user's environment."""
        return {**self.fixed, **{k: v for k, v in self.usual.items() if k not in user}}

    def environment(self, user: Mapping[str, str]) -> dict[str, str]:
        """The agent's whole environment."""
        kept = {k: v for k, v in user.items() if k not in self.unset}
        return {**kept, **self.added(user)}


@dataclass(frozen=True)
class Agent:
    """One coding agent. plan(target, arguments, folder, user's environment): `folder` is where private files may go."""
    name: str
    title: str
    program: str
    install: str                             # the command that a person types
    api: str                                 # messages, responses or chat: what it asks the server in
    plan: Callable[[Target, list[str], Path, Mapping[str, str]], Plan]
    window: int = 32_768                     # context below which it is of little use
    version: tuple[str, ...] = ("--version",)


def pretty(value: Any) -> str:
    """A JSON file's text."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"

"""Coding agents and the servers that they can be pointed at: one file per agent, what it is and what one launch of it needs.

base has the plan of a launch, target the servers, shell the paste-ready form, run the process. Nothing here knows the daemon.
"""

from __future__ import annotations

import importlib

from ..errors import UsageError
from .base import Agent

NAMES = ("claude", "codex", "opencode", "pi", "qwen", "aider", "copilot", "goose")


def find(name: str) -> Agent:
    """The agent of that name; UsageError lists those there are."""
    if name not in NAMES:
        raise UsageError(f"there is no agent {name[:40]!r}; there are {', '.join(NAMES)}")
    return importlib.import_module(f".{name}", __package__).AGENT

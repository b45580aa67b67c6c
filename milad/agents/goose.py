"""Goose: chat completions, all by environment (as its documentation has it; not run here). It joins host and path itself."""

from __future__ import annotations

from pathlib import Path
from typing import Mapping
from urllib.parse import urlsplit

from .base import Agent, Plan, Target


def plan(target: Target, arguments: list[str], folder: Path, user: Mapping[str, str]) -> Plan:
    parts = urlsplit(target.v1)
    usual = {"GOOSE_TELEMETRY_ENABLED": "false"}
    if target.context is not None:
        usual["GOOSE_CONTEXT_LIMIT"] = str(target.context)
    if target.silent:
        usual["OPENAI_TIMEOUT"] = "1800"
    return Plan([AGENT.program, *(arguments or ["session"])],
                {"GOOSE_PROVIDER": "openai", "GOOSE_MODEL": target.model, "OPENAI_HOST": f"{parts.scheme}://{parts.netloc}",
                 "OPENAI_BASE_PATH": f"{parts.path.lstrip('/')}/chat/completions", "OPENAI_API_KEY": target.key},
                usual, ("OPENAI_BASE_URL",))


AGENT = Agent("goose", "Goose", "goose", "brew install block-goose-cli", "chat", plan)

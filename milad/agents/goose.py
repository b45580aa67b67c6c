"""Goose: chat completions, all by environment. It joins host and path itself.

It gives up on a stream that is idle for 150 s, comments not counted, and on a request after 600 s: other servers than milad need
longer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Mapping
from urllib.parse import urlsplit

from .base import PATIENT_MS, Agent, Plan, Target


def plan(target: Target, arguments: list[str], folder: Path, user: Mapping[str, str]) -> Plan:
    parts = urlsplit(target.v1)
    usual = {"GOOSE_TELEMETRY_ENABLED": "false"}
    if target.context is not None:
        usual["GOOSE_CONTEXT_LIMIT"] = str(target.context)
    if target.silent:
        usual["OPENAI_TIMEOUT"] = usual["GOOSE_STREAM_TIMEOUT"] = str(PATIENT_MS // 1000)
    return Plan([AGENT.program, *(arguments or ["session"])],
                {"GOOSE_PROVIDER": "openai", "GOOSE_MODEL": target.model, "OPENAI_HOST": f"{parts.scheme}://{parts.netloc}",
                 "OPENAI_BASE_PATH": f"{parts.path.lstrip('/')}/chat/completions", "OPENAI_API_KEY": target.key},
                usual, ("OPENAI_BASE_URL",))


AGENT = Agent("goose", "Goose", "goose", "brew install block-goose-cli", "chat", plan)

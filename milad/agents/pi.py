"""pi: chat completions. It takes providers from files only: a private extension, loaded by flag, registers one beside the user's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Mapping

from .base import Agent, Plan, Target

KEY = "MILAD_AGENT_KEY"


def plan(target: Target, arguments: list[str], folder: Path, user: Mapping[str, str]) -> Plan:
    model: dict[str, Any] = {"id": target.model, "name": target.model, "reasoning": False, "input": ["text"],
                             "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
                             "contextWindow": target.context or 32768, "maxTokens": target.output or 8192}
    provider = {"name": target.kind, "baseUrl": target.v1, "apiKey": f"${KEY}", "api": "openai-completions", "models": [model]}
    path = folder / "milad.mjs"
    text = f'export default (pi) => pi.registerProvider("milad", {json.dumps(provider, indent=2, ensure_ascii=False)});\n'
    return Plan([AGENT.program, "--extension", str(path), "--provider", "milad", "--model", target.model, *arguments],
                {KEY: target.key}, {"PI_TELEMETRY": "0", "PI_SKIP_VERSION_CHECK": "1", "PI_OFFLINE": "1"}, files={path: text})


AGENT = Agent("pi", "pi", "pi", "npm install -g @earendil-works/pi-coding-agent", "chat", plan, window=16_384)

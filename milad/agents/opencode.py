"""OpenCode: chat completions, by a configuration in its environment that goes over the user's opencode.json.

The key is not in that text: OpenCode fills {env:NAME} in. What the user's own OPENCODE_CONFIG_CONTENT says beside provider and
model stays.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Mapping

from ..errors import UsageError
from .base import PATIENT_MS, Agent, Plan, Target

KEY = "MILAD_AGENT_KEY"
CONTENT = "OPENCODE_CONFIG_CONTENT"


def plan(target: Target, arguments: list[str], folder: Path, user: Mapping[str, str]) -> Plan:
    options: dict[str, Any] = {"baseURL": target.v1, "apiKey": "{env:" + KEY + "}", "timeout": False}
    if target.silent:
        options.update(headerTimeout=PATIENT_MS, chunkTimeout=PATIENT_MS)
    model: dict[str, Any] = {"name": target.model, "tool_call": True}
    if target.context is not None:
        model["limit"] = {"context": target.context, "output": target.output}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": target.kind, "options": options, "models": {target.model: model}}
    ours: dict[str, Any] = {"model": f"milad/{target.model}", "small_model": f"milad/{target.model}",
                            "provider": {"milad": provider}, "autoupdate": False, "share": "disabled"}
    theirs = _theirs(user.get(CONTENT, ""))
    ours = {**ours, **{k: v for k, v in theirs.items() if k not in ("model", "small_model", "provider")}}
    ours["provider"] = {**theirs.get("provider", {}), **ours["provider"]}
    return Plan([AGENT.program, *arguments], {CONTENT: json.dumps(ours, ensure_ascii=False), KEY: target.key})


def _theirs(text: str) -> dict[str, Any]:
    if not text.strip():
        return {}
    try:
        value = json.loads(text)
    except ValueError as e:
        raise UsageError(f"{CONTENT} in your environment is no JSON: {e}") from e
    if not isinstance(value, dict) or not isinstance(value.get("provider", {}), dict):
        raise UsageError(f"{CONTENT} in your environment is no OpenCode configuration")
    return value


AGENT = Agent("opencode", "OpenCode", "opencode", "npm install -g opencode-ai", "chat", plan)

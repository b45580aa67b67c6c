"""Codex CLI: Responses API, by -c flags over whatever the user's config.toml says.

Codex stops for good when a prompt does not fit, so it must know the true window; it compacts by the usage it is told.
A provider's retries and idle timeout are its own settings; `wire_api = "chat"` is gone since 0.17x.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Mapping

from .base import PATIENT_MS, Agent, Plan, Target

KEY = "MILAD_AGENT_KEY"


def plan(target: Target, arguments: list[str], folder: Path, user: Mapping[str, str]) -> Plan:
    provider: dict[str, Any] = {"name": target.kind, "base_url": target.v1, "env_key": KEY, "wire_api": "responses",
                                "supports_websockets": False}
    if target.silent:
        provider["stream_idle_timeout_ms"] = PATIENT_MS
    settings: dict[str, Any] = {"model": target.model, "model_provider": "milad"}
    settings.update({f"model_providers.milad.{k}": v for k, v in provider.items()})
    if target.context is not None:
        settings["model_context_window"] = target.context
        settings["model_auto_compact_token_limit"] = target.context * 3 // 4
    settings.update({"web_search": "disabled", "check_for_update_on_startup": False})
    flags = [part for k, v in settings.items() for part in ("-c", f"{k}={json.dumps(v, ensure_ascii=False)}")]
    return Plan([AGENT.program, *flags, *arguments], {KEY: target.key})


AGENT = Agent("codex", "Codex CLI", "codex", "npm install -g @openai/codex", "responses", plan)

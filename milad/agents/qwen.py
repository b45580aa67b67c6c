"""Qwen Code: chat completions. Address and key by environment; how it signs in and the window by a private settings file that
takes the place of the system's (QWEN_CODE_SYSTEM_SETTINGS_PATH) and goes over the user's settings.json.

It waits 120 s for a head and 240 s for an event: other servers than milad need longer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Mapping

from .base import PATIENT_MS, Agent, Plan, Target, pretty


def plan(target: Target, arguments: list[str], folder: Path, user: Mapping[str, str]) -> Plan:
    generation: dict[str, Any] = {}
    usual: dict[str, str] = {}
    if target.context is not None:
        generation["contextWindowSize"] = target.context
        usual["QWEN_CODE_MAX_OUTPUT_TOKENS"] = str(target.output)
    if target.silent:
        generation["timeout"] = PATIENT_MS
        usual["QWEN_STREAM_IDLE_TIMEOUT_MS"] = usual["QWEN_STREAM_MAX_LIFETIME_MS"] = str(PATIENT_MS)
    path = folder / "settings.json"
    settings = {"security": {"auth": {"selectedType": "openai"}}, "model": {"name": target.model, "generationConfig": generation},
                "general": {"enableAutoUpdate": False, "disableAutoUpdate": True}, "privacy": {"usageStatisticsEnabled": False},
                "telemetry": {"enabled": False}}
    return Plan([AGENT.program, "--auth-type", "openai", "--model", target.model, *arguments],
                {"OPENAI_BASE_URL": target.v1, "OPENAI_API_KEY": target.key, "OPENAI_MODEL": target.model,
                 "QWEN_CODE_SYSTEM_SETTINGS_PATH": str(path)},
                usual, ("QWEN_MODEL",), files={path: pretty(settings)})


AGENT = Agent("qwen", "Qwen Code", "qwen", "npm install -g @qwen-code/qwen-code", "chat", plan)

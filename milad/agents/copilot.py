"""GitHub Copilot CLI with a provider of one's own (`copilot help providers`): chat completions, all by environment."""

from __future__ import annotations

from pathlib import Path
from typing import Mapping

from .base import Agent, Plan, Target


def plan(target: Target, arguments: list[str], folder: Path, user: Mapping[str, str]) -> Plan:
    usual = {"COPILOT_OFFLINE": "true", "COPILOT_AUTO_UPDATE": "false"}
    if target.context is not None:
        usual["COPILOT_PROVIDER_MAX_PROMPT_TOKENS"] = str(target.context - (target.output or 0))
        usual["COPILOT_PROVIDER_MAX_OUTPUT_TOKENS"] = str(target.output)
    return Plan([AGENT.program, *arguments],
                {"COPILOT_PROVIDER_TYPE": "openai", "COPILOT_PROVIDER_BASE_URL": target.v1,
                 "COPILOT_PROVIDER_API_KEY": target.key, "COPILOT_MODEL": target.model},
                usual, ("COPILOT_PROVIDER_BEARER_TOKEN", "COPILOT_PROVIDER_API_KEY_COMMAND", "COPILOT_PROVIDER_MODEL_ID",
                       "COPILOT_PROVIDER_WIRE_MODEL"))


AGENT = Agent("copilot", "Copilot CLI", "copilot", "npm install -g @github/copilot", "chat", plan)

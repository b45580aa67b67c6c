"""aider: chat completions without tools, by flags; a private file tells it the model's window, so that it neither warns nor asks."""

from __future__ import annotations

from pathlib import Path
from typing import Mapping

from .base import Agent, Plan, Target, pretty


def plan(target: Target, arguments: list[str], folder: Path, user: Mapping[str, str]) -> Plan:
    name = f"openai/{target.model}"
    flags = ["--model", name, "--weak-model", name, "--editor-model", name, "--openai-api-base", target.v1,
             "--no-show-model-warnings"]
    made = Plan([AGENT.program, *flags, *arguments], {"OPENAI_API_KEY": target.key, "OPENAI_API_BASE": target.v1},
                {"AIDER_CHECK_UPDATE": "false", "AIDER_ANALYTICS": "false"})
    if target.context is not None:
        path = folder / "model-metadata.json"
        made.files[path] = pretty({name: {
            "max_input_tokens": target.context, "max_tokens": target.output, "max_output_tokens": target.output,
            "input_cost_per_token": 0, "output_cost_per_token": 0, "litellm_provider": "openai", "mode": "chat"}})
        made.command[1:1] = ["--model-metadata-file", str(path)]
    return made


AGENT = Agent("aider", "aider", "aider", "pipx install aider-chat", "chat", plan, window=8192)

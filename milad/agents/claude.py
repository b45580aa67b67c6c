"""Claude Code: Messages API at the server's root, by environment; address and models by --settings as well, since the `env` of a
user's settings.json goes over the environment (the key does not: arguments are everybody's to read).

The variables and their effects are measured with version 2.1.332 (issue 6's tests run it):
- an unknown model is taken for one of 1M tokens unless CLAUDE_CODE_MAX_CONTEXT_TOKENS says otherwise
- it compacts at context - CLAUDE_CODE_MAX_OUTPUT_TOKENS - 13,000 (65536 and 16384: at 36,000; 65536 and 8192: at 44,000), and
  begins with 12,600: the default of 32000 leaves a window of 64k nothing, so an eighth of the window is set
- the attribution header is a text at the very start of the system prompt that changes between requests: it empties prefix caches
- servers that take system messages at the start only (llama.cpp, vLLM) need the two mid_conv capabilities off
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Mapping

from .base import PATIENT_MS, Agent, Plan, Target

MODELS = ("ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_OPUS_MODEL", "ANTHROPIC_DEFAULT_SONNET_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL",
          "ANTHROPIC_DEFAULT_FABLE_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL")
# Other ways to a model, and keys that are no business of this server.
ELSEWHERE = ("ANTHROPIC_API_KEY", "CLAUDE_CODE_OAUTH_TOKEN", "CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX",
             "CLAUDE_CODE_USE_FOUNDRY")


def plan(target: Target, arguments: list[str], folder: Path, user: Mapping[str, str]) -> Plan:
    usual = {"CLAUDE_CODE_ATTRIBUTION_HEADER": "0", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
    if target.context is not None:
        usual["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] = str(target.context)
        usual["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] = str(max(4096, min(32_000, target.context // 8)))
    if target.kind in ("llamacpp", "vllm"):
        usual["CLAUDE_CODE_MODEL_CAPABILITIES"] = "-mid_conv_system,-mid_conv_tool_change"
    if target.kind in ("llamacpp", "vllm", "ollama"):
        usual["CLAUDE_STREAM_IDLE_TIMEOUT_MS"] = usual["API_TIMEOUT_MS"] = str(PATIENT_MS)
    where = {"ANTHROPIC_BASE_URL": target.root, **{name: target.model for name in MODELS}}
    return Plan([AGENT.program, "--settings", json.dumps({"env": where}, ensure_ascii=False), *arguments],
                {**where, "ANTHROPIC_AUTH_TOKEN": target.key}, usual, ELSEWHERE)


AGENT = Agent("claude", "Claude Code", "claude", "npm install -g @anthropic-ai/claude-code", "messages", plan,
              window=49_152)

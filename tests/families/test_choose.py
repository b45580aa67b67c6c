"""Which family a model file gets, and whether it is shown tools."""

from __future__ import annotations

from pathlib import Path

import pytest

import vendor
from milad import families
from milad.errors import UsageError

EXPECTED = {
    "Qwen-Qwen2.5-7B-Instruct": "chatml", "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": "chatml",
    "Qwen-Qwen3-0.6B": "qwen3", "Qwen-QwQ-32B": "qwen3", "Qwen3-Coder": "qwen3-coder",
    "meta-llama-Llama-3.1-8B-Instruct": "llama3", "meta-llama-Llama-3.2-3B-Instruct": "llama3",
    "meta-llama-Llama-3.3-70B-Instruct": "llama3", "mistralai-Mistral-Nemo-Instruct-2407": "mistral",
    "Mistral-Small-3.2-24B-Instruct-2506": "mistral", "unsloth-mistral-Devstral-Small-2507": "mistral",
    "mistralai-Ministral-3-14B-Reasoning-2512": "mistral"}
OTHERS = ["google-gemma-2-2b-it", "microsoft-Phi-3.5-mini-instruct", "openai-gpt-oss-120b", "Qwen3.5-4B", "GLM-4.6",
          "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "CohereForAI-c4ai-command-r-plus-tool_use", "google-gemma-4-31B-it"]


@pytest.mark.parametrize("name", EXPECTED)
def test_vendors_templates(peer_source: Path, name: str) -> None:
    template = vendor.load(peer_source, name)
    assert families.FINGERPRINTS[families.fingerprint(template)] == EXPECTED[name]
    respaced = template.replace("\n", "\r\n").replace("  ", " ") + "\n"
    assert families.fingerprint(respaced) == families.fingerprint(template)
    assert families.choose(template, frozenset()).name == EXPECTED[name]
    assert families.by_markers(template) == EXPECTED[name]


def test_default_model(default_model: Path) -> None:
    family = families.choose(vendor.metadata(default_model, "tokenizer.chat_template"), frozenset())
    assert family.name == "chatml" and family.system == "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    assert not family.tools_by_default("SmolLM2 135M Instruct", 134_515_008)


@pytest.mark.parametrize("name", OTHERS)
def test_others_are_refused(peer_source: Path, name: str) -> None:
    template = (peer_source / "models" / "templates" / f"{name}.jinja").read_text()
    with pytest.raises(UsageError) as error:
        families.choose(template, frozenset(("<|im_start|>", "<|start_header_id|>")))
    assert all(n in str(error.value) for n in families.NAMES) and "--family" in str(error.value)


def test_without_a_template_the_vocabulary_decides() -> None:
    assert families.choose("", frozenset(("<|im_start|>",))).name == "chatml"
    assert families.choose(None, frozenset(("<|start_header_id|>",))).name == "llama3"
    assert families.choose(None, frozenset(("[INST]", "[TOOL_CALLS]"))).name == "mistral"
    with pytest.raises(UsageError, match="--family"):
        families.choose(None, frozenset(("<|endoftext|>",)))


def test_override() -> None:
    for name in families.NAMES:
        assert families.choose("{{ anything }}", frozenset(), name).name == name
    with pytest.raises(UsageError, match="chatml"):
        families.choose("", frozenset(), "chatgpt")


@pytest.mark.parametrize("template,name,n_params,shown", [
    ("Qwen-Qwen2.5-7B-Instruct", "Qwen2.5 7B Instruct", 7_600_000_000, True),
    ("Qwen-Qwen2.5-7B-Instruct", "Qwen2.5 1.5B Instruct", 1_540_000_000, True),
    ("Qwen-Qwen2.5-7B-Instruct", "Qwen2.5 0.5B Instruct", 494_000_000, False),
    ("Qwen-Qwen2.5-7B-Instruct", "", 0, True),
    ("Qwen-Qwen3-0.6B", "Qwen3 0.6B", 596_000_000, True),
    ("Qwen3-Coder", "Qwen3 Coder 30B A3B", 30_500_000_000, True),
    ("NousResearch-Hermes-3-Llama-3.1-8B-tool_use", "Hermes 3", 8_000_000_000, True),
    ("meta-llama-Llama-3.1-8B-Instruct", "Llama 3.1 8B", 8_030_000_000, True),
    ("meta-llama-Llama-3.2-3B-Instruct", "Llama 3.2 3B", 3_210_000_000, False),
    ("meta-llama-Llama-3.2-3B-Instruct", "Llama 3.2 1B", 1_240_000_000, False),
    ("mistralai-Mistral-Nemo-Instruct-2407", "Mistral Nemo", 12_200_000_000, True),
    ("Mistral-Small-3.2-24B-Instruct-2506", "Mistral Small", 23_600_000_000, True),
])
def test_tools_by_default(peer_source: Path, template: str, name: str, n_params: int, shown: bool) -> None:
    assert families.choose(vendor.load(peer_source, template), frozenset()).tools_by_default(name, n_params) is shown

"""The family for each name in Hugging Face's `architectures`, one line for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanovllm.models.config import ModelFamily
from nanovllm.models.llama import LLAMA
from nanovllm.models.mistral import MISTRAL
from nanovllm.models.qwen2 import QWEN2
from nanovllm.models.qwen3 import QWEN3

_FAMILIES: dict[str, ModelFamily] = {
    "Qwen3ForCausalLM": QWEN3,
    "Qwen2ForCausalLM": QWEN2,
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": MISTRAL,
}


def register_model(architecture: str, family: ModelFamily) -> None:
    """Load models with the name `architecture` in config.json's `architectures` as `family`."""
    if not isinstance(family, ModelFamily):
        raise TypeError(f"family must be a ModelFamily, not {family!r}")
    _FAMILIES[architecture] = family


def supported_architectures() -> list[str]:
    """Return the names that `get_family` knows, sorted."""
    return sorted(_FAMILIES)


def get_family(architecture: str, raw: Mapping[str, Any] | None = None) -> ModelFamily:
    """Return the family of `architecture`; ValueError with the supported names if there is none.

    raw: the content of config.json, for the error.
    """
    if architecture not in _FAMILIES:
        raise ValueError(
            f"architecture {architecture!r} is not supported{_kind(architecture, raw or {})}; "
            f"supported: {', '.join(supported_architectures())}. Use a model of one of these; if this one "
            "computes its layers like one of them, register_model of nanovllm.models.registry adds it"
        )
    return _FAMILIES[architecture]


def _kind(architecture: str, raw: Mapping[str, Any]) -> str:
    """What kind of model it is, if that is the reason why it is not supported."""
    if "moe" in architecture.lower() or {"num_experts", "num_local_experts", "n_routed_experts"} & raw.keys():
        return ", because it is a mixture of experts"
    if {"vision_config", "audio_config"} & raw.keys() or "ConditionalGeneration" in architecture:
        return ", because it reads images or sound, or has an encoder"
    return ", because Gemma's norms and windows differ" if architecture.startswith("Gemma") else ""

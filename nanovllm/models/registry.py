"""The family for each name in Hugging Face's `architectures`, one line for each."""

from __future__ import annotations

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


def get_family(architecture: str) -> ModelFamily:
    """Return the family of `architecture`; ValueError with the supported names if there is none."""
    if architecture not in _FAMILIES:
        raise ValueError(
            f"architecture {architecture!r} is not supported; "
            f"supported: {', '.join(supported_architectures())}"
        )
    return _FAMILIES[architecture]

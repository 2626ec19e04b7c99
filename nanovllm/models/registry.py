"""Which family reads which of Hugging Face's `architectures`. One line for each."""

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
    """Make `architecture`, a name as in config.json's `architectures`, load as `family`."""
    if not isinstance(family, ModelFamily):
        raise TypeError(f"family must be a ModelFamily, not {family!r}")
    _FAMILIES[architecture] = family


def supported_architectures() -> list[str]:
    """Return the names that `get_family` knows, sorted."""
    return sorted(_FAMILIES)


def get_family(architecture: str) -> ModelFamily:
    """Return the family of `architecture`; ValueError that lists the supported names when there is none."""
    if architecture not in _FAMILIES:
        raise ValueError(
            f"architecture {architecture!r} is not supported; "
            f"supported: {', '.join(supported_architectures())}"
        )
    return _FAMILIES[architecture]

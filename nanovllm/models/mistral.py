"""Mistral: Llama without biases; a sliding window on every layer unless the config has null."""

from __future__ import annotations

from nanovllm.models.config import HFConfig, ModelFamily
from nanovllm.models.llama import LLAMA


def mistral_window(hf: HFConfig) -> int | None:
    """The sliding window; a missing key means 4,096, null means none."""
    window: int | None = hf.raw.get("sliding_window", 4096)
    return window


MISTRAL = ModelFamily(
    defaults={
        **LLAMA.defaults,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096 * 32,
    },
    sliding_window=mistral_window,
)

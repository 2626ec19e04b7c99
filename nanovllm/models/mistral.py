"""Mistral: Llama without biases; a window on every layer unless the config says null."""

from __future__ import annotations

from nanovllm.models.config import HFConfig, ModelFamily


def mistral_window(hf: HFConfig) -> int | None:
    """The sliding window; an absent key is not the same as null."""
    window: int | None = hf.raw.get("sliding_window", 4096)
    return window


MISTRAL = ModelFamily(
    defaults={
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 4096 * 32,
        "rms_norm_eps": 1e-6,
        "eos_token_id": 2,
    },
    sliding_window=mistral_window,
)

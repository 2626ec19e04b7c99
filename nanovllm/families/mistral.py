"""Mistral: Llama without biases; a sliding window on every layer unless the config has null."""

from __future__ import annotations

from nanovllm.families.llama import LLAMA
from nanovllm.formats.config_json.values import window_length
from nanovllm.models.config import FULL, SLIDING, ModelFamily

MISTRAL = ModelFamily(
    defaults={
        **LLAMA.defaults,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096 * 32,
    },
    kinds=lambda hf: (FULL if window_length(hf) is None else SLIDING,),
)

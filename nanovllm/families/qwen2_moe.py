"""Qwen2-MoE and Qwen1.5-MoE: biases on query, key and value, and an expert that every token goes to."""

from __future__ import annotations

from collections.abc import Sequence

from nanovllm.families.qwen2 import max_window_layers, windows
from nanovllm.families.qwen3_moe import QWEN3_MOE, MoEFamily
from nanovllm.formats.config_json.values import check_windows
from nanovllm.models.config import HFConfig


def _kinds(hf: HFConfig) -> Sequence[str]:
    """Every other one of the first layers has the window, if the config enables it."""
    check_windows(hf)
    return windows(hf, lambda layer: layer % 2 == 0 and layer < max_window_layers(hf))


QWEN2_MOE = MoEFamily(
    defaults={
        **QWEN3_MOE.defaults,
        "intermediate_size": 5632,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts_per_tok": 4,
        "num_experts": 60,
        "qkv_bias": True,
    },
    qkv_bias="qkv_bias",
    kinds=_kinds,
)

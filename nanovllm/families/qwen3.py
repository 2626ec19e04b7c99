"""Qwen3: RMSNorm on each query and key head, optional attention biases and sliding window."""

from __future__ import annotations

from nanovllm.families.qwen2 import QWEN_DEFAULTS, qwen_kinds
from nanovllm.models.config import ModelFamily

QWEN3 = ModelFamily(
    defaults=QWEN_DEFAULTS | {"head_dim": 128},
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm="head",
    kinds=qwen_kinds,
)

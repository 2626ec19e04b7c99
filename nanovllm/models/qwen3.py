"""Qwen3: RMSNorm on each query and key head, optional attention biases and sliding window."""

from __future__ import annotations

from nanovllm.models.config import ModelFamily
from nanovllm.models.qwen2 import QWEN_DEFAULTS, qwen_kinds

QWEN3 = ModelFamily(
    defaults=QWEN_DEFAULTS | {"head_dim": 128},
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm="head",
    kinds=qwen_kinds,
)

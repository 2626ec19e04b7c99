"""Llama 2 and 3.x: the plain decoder, with optional biases everywhere."""

from __future__ import annotations

from nanovllm.models.config import ModelFamily

LLAMA = ModelFamily(
    defaults={
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "eos_token_id": 2,
    },
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    mlp_bias="mlp_bias",
)

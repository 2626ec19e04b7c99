"""ERNIE 4.5, dense: Llama whose rotary embedding turns neighbouring elements; biases by one key."""

from __future__ import annotations

from nanovllm.models.config import ModelFamily

ERNIE = ModelFamily(
    defaults={
        "vocab_size": 103424,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 18,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    },
    qkv_bias="use_bias",
    o_bias="use_bias",
    mlp_bias="use_bias",
    interleaved=True,
)

"""GGUF files of LFM2, dense and with experts, made of a folder by the rules of llama.cpp's converter."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf_hybrids import of_folder, write

from tools.write_gguf import Encode, encode_as

ARCHITECTURES = {"lfm2": "lfm2", "lfm2_moe": "lfm2moe"}
PLAIN = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.embedding_norm.weight": "token_embd_norm.weight",
    "lm_head.weight": "output.weight",
}
NAMES = {
    "operator_norm.weight": "attn_norm.weight",
    "ffn_norm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.out_proj.weight": "attn_output.weight",
    "self_attn.q_layernorm.weight": "attn_q_norm.weight",
    "self_attn.k_layernorm.weight": "attn_k_norm.weight",
    "conv.conv.weight": "shortconv.conv.weight",
    "conv.in_proj.weight": "shortconv.in_proj.weight",
    "conv.out_proj.weight": "shortconv.out_proj.weight",
    "feed_forward.w1.weight": "ffn_gate.weight",
    "feed_forward.w3.weight": "ffn_up.weight",
    "feed_forward.w2.weight": "ffn_down.weight",
    "feed_forward.gate.weight": "ffn_gate_inp.weight",
    "feed_forward.expert_bias": "exp_probs_b.bias",
    "feed_forward.experts.w1": "ffn_gate_exps.weight",
    "feed_forward.experts.w3": "ffn_up_exps.weight",
    "feed_forward.experts.w2": "ffn_down_exps.weight",
}


def stored_name(name: str) -> str:
    """The name in a file of a tensor of `of_folder`."""
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    return PLAIN[name] if match is None else f"blk.{match[1]}.{NAMES[match[2]]}"


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """What a file of the model in `folder` holds, by its names: taps without their dimension of 1."""
    return {
        stored_name(name): tensor.squeeze(1) if name.endswith("conv.conv.weight") else tensor
        for name, tensor in of_folder(folder).items()
    }


def width(config: dict[str, Any]) -> int:
    """That of an MLP, as it is stated in a file."""
    size: int = config["intermediate_size"]
    if config.get("block_auto_adjust_ff_dim"):
        size, multiple = (
            int(config["block_ffn_dim_multiplier"] * int(2 * size / 3)),
            config["block_multiple_of"],
        )
        size = multiple * ((size + multiple - 1) // multiple)
    return size


def settings(config: dict[str, Any]) -> dict[str, Any]:
    """The keys below the architecture's name."""
    heads = config["num_key_value_heads"]
    found = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": width(config),
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": [0 if kind == "conv" else heads for kind in config["layer_types"]],
        "attention.layer_norm_rms_epsilon": config["norm_eps"],
        "rope.freq_base": float(config["rope_parameters"]["rope_theta"]),
        "vocab_size": config["vocab_size"],
        "shortconv.l_cache": config["conv_L_cache"],
    }
    if config.get("head_dim"):
        found |= dict.fromkeys(("attention.key_length", "attention.value_length"), config["head_dim"])
    if "num_experts" in config:
        found |= {
            "expert_count": config["num_experts"],
            "expert_used_count": config["num_experts_per_tok"],
            "expert_feed_forward_length": config["moe_intermediate_size"],
            "leading_dense_block_count": config["num_dense_layers"],
            "expert_gating_func": 2,
        }
    return found


def write_lfm2(
    folder: Path,
    path: Path,
    encode: Encode | str = "F32",
    tensors: dict[str, torch.Tensor | None] | None = None,
    **changes: Any,
) -> Path:
    """The model in `folder` as llama.cpp's converter writes it. tensors: others, or None for one that is left
    out. changes: other keys, "__" for a dot; None leaves one out."""
    config = json.loads((folder / "config.json").read_text())
    matrices = encode_as(encode) if isinstance(encode, str) else encode

    def encoded(name: str, values: np.ndarray) -> tuple[np.ndarray, Any]:
        return (encode_as("F32") if "shortconv.conv" in name else matrices)(name, values)

    keys = settings(config) | {key.replace("__", "."): value for key, value in changes.items()}
    found = stored_tensors(folder) | (tensors or {})
    return write(
        path,
        {name: tensor for name, tensor in found.items() if tensor is not None},
        ARCHITECTURES[config["model_type"]],
        {key: value for key, value in keys.items() if value is not None},
        encoded,
    )

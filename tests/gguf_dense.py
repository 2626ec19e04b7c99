"""GGUF files of SmolLM3, Granite, OLMo 2 and 3 and Phi-3, made of a folder by the rules of llama.cpp's
converter, whose keys and tensors they have.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf_hybrids import write as write_tensors
from safetensors.torch import load_file, save_file

from nanovllm.models.registry import open_checkpoint
from tools.write_gguf import NAMES, Encode, encode_as, interleaved

ARCHITECTURES = {"smollm3": "smollm3", "granite": "granite", "granitemoehybrid": "granite"}
ARCHITECTURES |= {"olmo2": "olmo2", "olmo3": "olmo2", "phi3": "phi3"}
PERMUTED = ("smollm3", "granite")
OWN_NAMES = {
    "olmo2": {
        "post_attention_layernorm": "post_attention_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
    "phi3": {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
    "granite": {"shared_mlp.output_linear": "ffn_down"},
}
SCALES = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}


def settings(config: dict[str, Any], architecture: str) -> dict[str, Any]:
    """The keys below the architecture's name."""
    rope = config["rope_parameters"]
    full, size = rope.get("full_attention", rope), config["hidden_size"] // config["num_attention_heads"]
    found = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": float(full["rope_theta"]),
    }
    if architecture in PERMUTED:
        found |= {"vocab_size": config["vocab_size"], "rope.dimension_count": size}
    if architecture == "granite":
        found |= {key: float(config[name]) for key, name in SCALES.items()}
    if config["model_type"] == "granitemoehybrid":
        layers = config["num_hidden_layers"]
        found |= {"attention.head_count_kv": [config["num_key_value_heads"]] * layers, "expert_count": 0}
        found |= {"ssm.conv_kernel": 4, "rope.scaling.finetuned": True}
    if config["model_type"] == "olmo3":
        found |= olmo3(config, full)
    if architecture == "phi3":
        found |= phi3(config, rope)
    return found


def olmo3(config: dict[str, Any], full: dict[str, Any]) -> dict[str, Any]:
    local = config["rope_parameters"]["sliding_attention"]["rope_theta"]
    found = {
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config["layer_types"]],
        "rope.freq_base_swa": float(local),
    }
    if full["rope_type"] == "yarn":
        found |= {"rope.scaling.type": "yarn", "rope.scaling.factor": float(full["factor"])}
        found["rope.scaling.original_context_length"] = full["original_max_position_embeddings"]
        if "attention_factor" in full:
            found["rope.scaling.yarn_attn_factor"] = full["attention_factor"]
    return found


def phi3(config: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    original, heads = config["original_max_position_embeddings"], config["num_attention_heads"]
    found = {
        "rope.scaling.original_context_length": original,
        "rope.dimension_count": int(rope["partial_rotary_factor"] * config["hidden_size"]) // heads,
        "attention.sliding_window": config["sliding_window"] or 0,
    }
    if rope["rope_type"] == "longrope":
        ratio = max(1.0, config["max_position_embeddings"] / original)
        found["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(ratio) / math.log(original))
    return found


def stored_as(name: str, config: dict[str, Any], architecture: str) -> dict[str, slice]:
    """The names in a file of a tensor of transformers, and their rows."""
    module, _, kind = name.rpartition(".")
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", module)
    own, prefix = (module, "") if match is None else (match[2], f"blk.{match[1]}.")
    if own == "shared_mlp.input_linear":
        half = config["shared_intermediate_size"]
        rows = {"ffn_gate": slice(0, half), "ffn_up": slice(half, 2 * half)}
    else:
        rows = {(NAMES | OWN_NAMES.get(architecture, {}))[own]: slice(None)}
    return {f"{prefix}{stored}.{kind}": part for stored, part in rows.items()}


def write(
    folder: Path, path: Path, encode: Encode | str = "F32", dense: Path | None = None, **changes: Any
) -> Path:
    """The model in `folder` as llama.cpp's converter writes it. dense: a folder for the same model with the
    values that the file has. changes: keys below the architecture, "__" for a dot; None leaves one out."""
    config = json.loads((folder / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    encode = encode_as(encode) if isinstance(encode, str) else encode
    keys = settings(config, architecture) | {key.replace("__", "."): each for key, each in changes.items()}
    values: dict[str, torch.Tensor] = {}
    stored: dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        data, kind = encode(name, np.ascontiguousarray(tensor.float().numpy()))
        values[name] = (
            torch.from_numpy(gguf.quants.dequantize(data, kind).copy()) if data.ndim > 1 else tensor
        )
        for heads, part in (("attention_heads", "q_proj"), ("key_value_heads", "k_proj")):
            if architecture in PERMUTED and part in name:
                data = interleaved(data, config[f"num_{heads}"])
        stored |= {key: (data[rows], kind) for key, rows in stored_as(name, config, architecture).items()}
    if dense is not None:
        dense.mkdir()
        (dense / "config.json").write_text((folder / "config.json").read_text())
        save_file(values, dense / "model.safetensors", {"format": "pt"})
    tensors = {name: torch.from_numpy(np.ascontiguousarray(data)) for name, (data, _) in stored.items()}
    if architecture == "phi3" and config["rope_parameters"]["rope_type"] == "longrope":
        for which in ("long", "short"):
            factors = torch.tensor(config["rope_parameters"][f"{which}_factor"])
            tensors[f"rope_factors_{which}.weight"] = factors
    kept = {key: each for key, each in keys.items() if each is not None}

    def made(name: str, data: np.ndarray) -> tuple[np.ndarray, gguf.GGMLQuantizationType]:
        return data, stored[name][1] if name in stored else gguf.GGMLQuantizationType.F32

    return write_tensors(path, tensors, architecture, kept, made)


def named(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder or a file by their names."""
    with open_checkpoint(path).tensors() as found:
        return {name: tensor[:].float() for name, tensor in found.items()}

"""GGUF files of Qwen3-Next and Qwen3.5, made of a model's folder by the rules of llama.cpp's converter."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file

from tools.write_gguf import Encode, encode_as

ARCHITECTURES = {"qwen3_next": "qwen3next", "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe"}
ADDED_ONE = ("input_layernorm", "post_attention_layernorm", "q_norm", "k_norm", "model.norm")
NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_ba.weight": "ssm_ba.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.shared_expert.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_expert.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_expert.down_proj.weight": "ffn_down_shexp.weight",
    "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
    "mlp.experts.gate_proj": "ffn_gate_exps.weight",
    "mlp.experts.up_proj": "ffn_up_exps.weight",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
    "mlp.experts.gate_up_proj": "ffn_gate_up_exps.weight",
}
PLAIN = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def of_folder(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a folder in float32; the experts of a layer as one tensor."""
    found: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if match := re.fullmatch(r"(.*experts)\.(\d+)\.(\w+)\.weight", name):
            experts.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = tensor.float()
        else:
            found[name] = tensor.float()
    for name, each in experts.items():
        found[name] = torch.stack([each[index] for index in sorted(each)])
    for name in [name for name in found if name.endswith("experts.gate_up_proj")]:
        gate, up = found.pop(name).chunk(2, dim=1)
        found |= {name.replace("gate_up", "gate"): gate, name.replace("gate_up", "up"): up}
    return found


def tiled(tensor: torch.Tensor, config: dict[str, Any], size: int) -> torch.Tensor:
    """Rows of value heads in the order of the files of Qwen3.5."""
    heads = config["linear_num_key_heads"]
    ratio = config["linear_num_value_heads"] // heads
    return tensor.reshape(heads, ratio, size, *tensor.shape[1:]).transpose(0, 1).reshape(tensor.shape)


def converted(name: str, tensor: torch.Tensor, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The stored tensors of one of transformers; `name` without model.layers.N."""
    is_next = config["model_type"] == "qwen3_next"
    key_heads, size = config["linear_num_key_heads"], config["linear_value_head_dim"]
    keys = key_heads * config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] * size
    last = name.removeprefix("linear_attn.")
    if name.removesuffix(".weight").endswith(ADDED_ONE):
        tensor = tensor + 1
    elif last == "in_proj_qkvz.weight":
        dk, own = config["linear_key_head_dim"], values // key_heads
        grouped = tensor.reshape(key_heads, -1, tensor.shape[1]).split([dk, dk, own, own], dim=1)
        q, k, v, z = (each.reshape(-1, tensor.shape[1]) for each in grouped)
        return {"attn_qkv.weight": torch.cat([q, k, v]), "attn_gate.weight": z}
    elif last == "A_log":
        tensor = -tensor.exp()
    elif last == "conv1d.weight":
        tensor = tensor.squeeze(1)
    if not is_next and last in ("in_proj_qkv.weight", "conv1d.weight"):
        qk, v = tensor.split([2 * keys, values])
        tensor = torch.cat([qk, tiled(v, config, size)])
    elif not is_next and last in ("in_proj_b.weight", "in_proj_a.weight", "A_log", "dt_bias"):
        tensor = tiled(tensor, config, 1)
    elif not is_next and last == "in_proj_z.weight":
        tensor = tiled(tensor, config, size)
    elif not is_next and last == "out_proj.weight":
        tensor = tiled(tensor.T, config, size).T
    if name.endswith(".bias"):
        return {NAMES[f"{name[:-5]}.weight"].replace(".weight", ".bias"): tensor}
    return {NAMES[name]: tensor}


def settings(config: dict[str, Any]) -> dict[str, Any]:
    """The keys below the architecture's name."""
    values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    rope = config["rope_parameters"]
    found = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": int(config["head_dim"] * rope.get("partial_rotary_factor", 0.25)),
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": config["linear_num_value_heads"],
        "ssm.inner_size": values,
        "full_attention_interval": config.get("full_attention_interval") or 4,
    }
    if config["model_type"] != "qwen3_next":
        found["rope.dimension_sections"] = [11, 11, 10, 0]
    if config["model_type"] != "qwen3_5_moe_text":
        found["feed_forward_length"] = config["intermediate_size"]
    if "num_experts" in config:
        found |= {
            "expert_count": config["num_experts"],
            "expert_used_count": config["num_experts_per_tok"],
            "expert_feed_forward_length": config["moe_intermediate_size"],
            "expert_shared_feed_forward_length": config["shared_expert_intermediate_size"],
        }
    return found


def stored_tensors(folder: Path, mtp: bool = False) -> dict[str, torch.Tensor]:
    """What a file of the model in `folder` holds, by its names. mtp: and a layer of speculation."""
    config = json.loads((folder / "config.json").read_text())
    found: dict[str, torch.Tensor] = {}
    for name, tensor in of_folder(folder).items():
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
        if match is None:
            found |= {PLAIN[name]: tensor + 1 if name.endswith(".norm.weight") else tensor}
        else:
            own = converted(match[2], tensor, config)
            found |= {f"blk.{match[1]}.{stored}": each for stored, each in own.items()}
    if mtp:
        layer, size = config["num_hidden_layers"], config["hidden_size"]
        own = {name: torch.ones(size, size) for name in ("attn_q", "attn_k", "nextn.eh_proj")}
        own |= {name: torch.ones(size) for name in ("attn_norm", "nextn.enorm", "post_attention_norm")}
        found |= {f"blk.{layer}.{name}.weight": each for name, each in own.items()}
    return found


def write(
    path: Path,
    tensors: dict[str, torch.Tensor],
    architecture: str,
    keys: dict[str, Any],
    encode: Encode | str = "F32",
) -> Path:
    """A file with these tensors and keys."""
    encode = encode_as(encode) if isinstance(encode, str) else encode
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        add = {float: writer.add_float32, bool: writer.add_bool, str: writer.add_string}
        add.get(type(value), writer.add_array if isinstance(value, list) else writer.add_uint32)(
            f"{architecture}.{key}", value
        )
    for name, tensor in tensors.items():
        plain = name.endswith(
            ("_norm.weight", "ssm_a", ".bias", "gate_inp.weight", "inp_shexp.weight", "conv1d.weight")
        )
        values = tensor.contiguous().numpy()
        data, kind = encode_as("F32")(name, values) if plain else encode(name, values)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_hybrid(
    folder: Path, path: Path, encode: Encode | str = "F32", mtp: bool = False, **changes: Any
) -> Path:
    """The model in `folder` as llama.cpp's converter writes it. changes: other keys, "__" for a dot."""
    config = json.loads((folder / "config.json").read_text())
    keys = settings(config) | {key.replace("__", "."): value for key, value in changes.items()}
    if mtp:
        keys |= {"block_count": config["num_hidden_layers"] + 1, "nextn_predict_layers": 1}
    return write(path, stored_tensors(folder, mtp), ARCHITECTURES[config["model_type"]], keys, encode)

"""Write a model folder in Hugging Face format as a GGUF file: Llama, Mistral, Qwen2, Qwen3 or Qwen3-MoE.

    python -m tools.write_gguf path/to/Qwen3-0.6B model.gguf --type Q8_0 --pre qwen2

Matrices get the type, and float32 where their rows do not fit its blocks; all other tensors are float32.
--pre names how texts are split (tokenizer.ggml.pre), as llama.cpp names it. Without it the file holds the
whole tokenizer.json (tokenizer.huggingface.json), which nanovllm reads and llama.cpp does not.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from nanovllm.models.registry import open_checkpoint

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
WRITABLE = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
# (the name of a tensor in the file, its values) -> its bytes [rows, ...], its type
Encode = Callable[[str, np.ndarray], "tuple[np.ndarray, gguf.GGMLQuantizationType]"]


def encode_as(stored_as: str) -> Encode:
    """Quantise matrices to a type of WRITABLE."""
    kind, plain = gguf.GGMLQuantizationType[stored_as], gguf.GGMLQuantizationType.F32

    def encode(name: str, values: np.ndarray) -> tuple[np.ndarray, gguf.GGMLQuantizationType]:
        fits = values.ndim > 1 and values.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
        return (gguf.quants.quantize(values, kind), kind) if fits else (values, plain)

    return encode


def write_gguf(
    folder: str | Path,
    path: str | Path,
    encode: Encode | str = "F32",
    pre: str | None = None,
    tensors_in_part: int = 0,
    **changes: Any,
) -> Path:
    """Write the model in `folder` to `path`, and return the first file.

    encode: a type of WRITABLE, or a function. tensors_in_part: split the model into files with at most so
    many tensors. changes: more keys, or other values, under the architecture's name.
    """
    checkpoint = open_checkpoint(folder)
    config = checkpoint.config()
    architecture = ARCHITECTURES[config["architectures"][0]]
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=tensors_in_part)
    for key, value in (settings(config) | changes).items():
        _add(writer, f"{architecture}.{key}", value)
    add_tokenizer(writer, Path(folder), config, pre)
    encode = encode_as(encode) if isinstance(encode, str) else encode
    with checkpoint.tensors() as tensors:
        tied = config.get("tie_word_embeddings", False)
        for name, some in together(tensors).items():
            if name == "lm_head.weight" and tied:
                continue
            values = np.stack([each[:].float().numpy() for each in some])
            values = values if ".experts." in name else values[0]
            if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
                heads = config["num_key_value_heads" if "k_proj" in name else "num_attention_heads"]
                values = interleaved(values, heads)
            stored = gguf_name(name)
            data, kind = encode(stored, np.ascontiguousarray(values))
            writer.add_tensor(stored, data, raw_dtype=kind)
    factors = llama3_factors(config)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    parts = sorted(Path(path).parent.glob(f"{Path(path).stem}-00001-of-*.gguf"))
    return parts[0] if tensors_in_part and parts else Path(path)


def together(tensors: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The experts of a layer in a list, under the name without their numbers; all others alone."""
    found: dict[str, list[Any]] = {}
    for name in sorted(tensors, key=lambda name: [int(each) for each in re.findall(r"\d+", name)]):
        found.setdefault(re.sub(r"(\.experts)\.\d+", r"\1", name), []).append(tensors[name])
    return found


def gguf_name(name: str) -> str:
    """The name in a file of a tensor of transformers."""
    module, _, kind = name.rpartition(".")
    if module.startswith("model.layers."):
        _, _, layer, rest = module.split(".", 3)
        return f"blk.{layer}.{NAMES[rest]}.{kind}"
    return f"{NAMES[module]}.{kind}"


def interleaved(values: np.ndarray, heads: int) -> np.ndarray:
    """The rows of queries or keys as in Llama's files: those that rotate together are neighbours."""
    halves = values.reshape(heads, 2, -1, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def settings(config: dict[str, Any]) -> dict[str, Any]:
    """The keys below the architecture's name."""
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    found = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config.get("num_key_value_heads") or heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.dimension_count": head_dim,
        "rope.freq_base": float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
        "vocab_size": config["vocab_size"],
    }
    experts = {
        "expert_count": config.get("num_experts") or config.get("num_local_experts"),
        "expert_used_count": config.get("num_experts_per_tok"),
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
        "expert_weights_norm": config.get("norm_topk_prob"),
    }
    found |= {key: value for key, value in experts.items() if value is not None}
    kind = rope.get("rope_type", rope.get("type"))
    if kind in ("linear", "yarn"):
        found |= {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
    if kind == "yarn":
        found["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    return found


def llama3_factors(config: dict[str, Any]) -> np.ndarray | None:
    """What Llama 3.1 divides its frequencies by, [head_dim / 2]."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type") != "llama3":
        return None
    size = settings(config)["attention.key_length"]
    theta, low, high = settings(config)["rope.freq_base"], rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * theta ** -(np.arange(0, size, 2) / size) / (2 * np.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path, config: dict[str, Any], pre: str | None) -> None:
    """Add the tokenizer of a folder with tokenizer.json and tokenizer_config.json, if it has them."""
    ids = {"bos": config.get("bos_token_id"), "eos": config.get("eos_token_id")}
    for name, value in ids.items():
        first = value[0] if isinstance(value, list) else value
        if first is not None:
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", first)
    if not (folder / "tokenizer.json").is_file():
        return
    content = json.loads((folder / "tokenizer.json").read_text())
    stated = json.loads((folder / "tokenizer_config.json").read_text())
    vocab, added = content["model"]["vocab"], content["added_tokens"]
    by_id = {index: token for token, index in vocab.items()} | {each["id"]: each["content"] for each in added}
    size = max(config["vocab_size"], *(index + 1 for index in by_id))
    special = {each["id"]: CONTROL if each["special"] else USER_DEFINED for each in added}
    types = [special.get(index, NORMAL if index in by_id else UNUSED) for index in range(size)]
    writer.add_tokenizer_model("llama" if content["model"].get("byte_fallback") else "gpt2")
    writer.add_tokenizer_pre(pre or "default")
    writer.add_token_list([by_id.get(index, f"[PAD{index}]") for index in range(size)])
    writer.add_token_types(types)
    merges = content["model"]["merges"]
    writer.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in merges])
    if pre is None:
        writer.add_string("tokenizer.huggingface.json", (folder / "tokenizer.json").read_text())
    names = {each["content"]: each["id"] for each in added} | vocab
    pad = stated.get("pad_token")
    if (pad["content"] if isinstance(pad, dict) else pad) in names:
        writer.add_pad_token_id(names[pad["content"] if isinstance(pad, dict) else pad])
    writer.add_add_bos_token(bool(stated.get("add_bos_token", False)))
    if isinstance(stated.get("chat_template"), str):
        writer.add_chat_template(stated["chat_template"])


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    add.get(type(value), writer.add_array)(key, value)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("path")
    parser.add_argument("--type", default="Q8_0", choices=WRITABLE)
    parser.add_argument("--pre")
    args = parser.parse_args()
    with torch.inference_mode():
        print(write_gguf(args.folder, args.path, args.type, args.pre))


if __name__ == "__main__":
    main()

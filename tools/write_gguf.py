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
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from nanovllm.kernels.activation import Activation
from nanovllm.models.config import HFConfig, ModelConfig
from nanovllm.models.registry import get_family, load_model_config, open_checkpoint
from nanovllm.quantization.config import QuantConfig

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
_ENDS = ("eos", "eot", "eom")  # keys of tokens that end an answer
_ROPES = ("default", "linear", "yarn", "llama3")
_MSCALES = ("attention_factor", "mscale", "mscale_all_dim")  # `check` compares what they give
_SAMPLING = {
    **{"temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"},
    "repetition_penalty": "penalty_repeat",
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
    many tensors. changes: more keys, or other values, under the architecture's name. ValueError or
    ModelLoadError, and no file, for a model that a file cannot state.
    """
    checkpoint, model = open_checkpoint(folder), load_model_config(folder)
    config = checkpoint.config()
    if model.architecture not in ARCHITECTURES:
        raise ValueError(f"{folder}: {model.architecture} is none of {', '.join(ARCHITECTURES)}")
    architecture = ARCHITECTURES[model.architecture]
    try:
        check(model)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=tensors_in_part)
    for key, value in (settings(config, model) | changes).items():
        _add(writer, f"{architecture}.{key}", value)
    add_tokenizer(writer, Path(folder), config, model, pre)
    add_sampling(writer, checkpoint.generation())
    encode = encode_as(encode) if isinstance(encode, str) else encode
    with checkpoint.tensors() as tensors:
        for name, some in together(tensors).items():
            if name == "lm_head.weight" and model.tie_word_embeddings:
                continue
            values = np.stack([each[:].float().numpy() for each in some])
            values = values if ".experts." in name else values[0]
            if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
                values = interleaved(values, model.num_kv_heads if "k_proj" in name else model.num_heads)
            stored = gguf_name(name)
            data, kind = encode(stored, np.ascontiguousarray(values))
            writer.add_tensor(stored, data, raw_dtype=kind)
    factors = llama3_factors(model)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    parts = (
        sorted(Path(path).parent.glob(f"{Path(path).stem}-?????-of-?????.gguf")) if tensors_in_part else []
    )
    files = parts or [Path(path)]
    if not changes:
        try:
            compare(Path(folder), files[0])
        except Exception:
            for file in files:
                file.unlink()
            raise
    return files[0]


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


def check(model: ModelConfig) -> None:
    """Raise ValueError that names what these files cannot state of a model."""
    rope, specs = model.spec(0).rope, {model.spec(layer) for layer in range(model.num_layers)}
    wrong: dict[str, bool] = {
        "layers that differ, such as windows in some of them": len(specs) > 1,
        f"the activation {model.activation.value}": model.activation is not Activation.SILU,
        "dual chunk attention": model.dual_chunk is not None,
        "weights that are quantised already": type(model.quant) is not QuantConfig,
        "more than three end-of-sequence tokens": len(model.eos_token_ids) > len(_ENDS),
    }
    if rope is not None:
        plain = replace(rope, attention_factor=None, mscale=None, mscale_all_dim=None)
        scaled, untouched = (each.kind.attention_factor(each) for each in (rope, plain))
        bounds = rope.low_freq_factor, rope.high_freq_factor
        wrong |= {
            f"rope type {rope.rope_type!r}": rope.rope_type not in _ROPES,
            f"yarn's attention factor {scaled:.4g}, which is not {untouched:.4g}": scaled != untouched,
            "yarn without truncate": rope.rope_type == "yarn" and not rope.truncate,
            "llama3's low_freq_factor and high_freq_factor that are not 1 and 4": (
                rope.rope_type == "llama3" and bounds != (1.0, 4.0)
            ),
        }
    if found := [what for what, is_wrong in wrong.items() if is_wrong]:
        raise ValueError(f"a GGUF file of this architecture cannot state {' and '.join(found)}")


def settings(config: Mapping[str, Any], model: ModelConfig) -> dict[str, Any]:
    """The keys below the architecture's name. config: the content of config.json."""
    spec, rope = model.spec(0), model.spec(0).rope
    assert rope is not None
    known = HFConfig(config, get_family(model.architecture).defaults)
    found = {
        "block_count": model.num_layers,
        "context_length": known.integer("max_position_embeddings"),
        "embedding_length": model.hidden_size,
        "feed_forward_length": model.intermediate_size,
        "attention.head_count": spec.num_heads,
        "attention.head_count_kv": spec.num_kv_heads,
        "attention.key_length": spec.head_dim,
        "attention.value_length": spec.head_dim,
        "attention.layer_norm_rms_epsilon": model.rms_norm_eps,
        "rope.dimension_count": spec.head_dim,
        "rope.freq_base": rope.theta,
        "vocab_size": model.vocab_size,
    }
    if model.moe is not None:
        found |= {
            "expert_count": model.moe.num_experts,
            "expert_used_count": model.moe.top_k,
            "expert_feed_forward_length": model.moe.width,
            "expert_weights_norm": model.moe.normalised,
        }
    if spec.window is not None:
        found["attention.sliding_window"] = spec.window
    if rope.rope_type in ("linear", "yarn"):
        found |= {"rope.scaling.type": rope.rope_type, "rope.scaling.factor": float(rope.factor)}
    if rope.rope_type == "yarn":
        found |= {
            "rope.scaling.original_context_length": int(rope.original_max_position),
            "rope.scaling.yarn_beta_fast": float(rope.beta_fast),
            "rope.scaling.yarn_beta_slow": float(rope.beta_slow),
        }
    return found


def llama3_factors(model: ModelConfig) -> np.ndarray | None:
    """What Llama 3.1 divides its frequencies by, [head_dim / 2]."""
    size, rope = model.spec(0).head_dim, model.spec(0).rope
    if rope is None or rope.rope_type != "llama3":
        return None
    low, high = rope.low_freq_factor, rope.high_freq_factor
    turns = rope.original_max_position * rope.theta ** -(np.arange(0, size, 2) / size) / (2 * np.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / rope.factor + smooth)).astype(np.float32)


def add_sampling(writer: gguf.GGUFWriter, generation: Mapping[str, Any]) -> None:
    """Add the sampling parameters of generation_config.json."""
    if generation.get("do_sample") is False:
        generation = {"temperature": 0.0}
    for name, key in _SAMPLING.items():
        if (value := generation.get(name)) is not None:
            add = writer.add_int32 if name == "top_k" else writer.add_float32
            add(f"general.sampling.{key}", value)


def compare(folder: Path, path: Path) -> None:
    """Raise ValueError that names what of the model in `folder` the file at `path` does not give again."""
    one, other = load_model_config(folder), load_model_config(path)

    def stated(model: ModelConfig) -> dict[str, Any]:
        specs = [model.spec(layer) for layer in range(model.num_layers)]
        ropes = [spec.rope and replace(spec.rope, **dict.fromkeys(_MSCALES)) for spec in specs]
        moe, left = model.moe, ("architecture", "dtype", "quant", "attention", "moe", "max_model_len")
        return {key: value for key, value in vars(model).items() if key not in left} | {
            "attention": [replace(spec, rope=rope) for spec, rope in zip(specs, ropes, strict=True)],
            "moe": moe and replace(moe, step=1, dense=frozenset()),
            "experts": moe and [moe.has_experts(layer) for layer in range(model.num_layers)],
        }

    before, after = stated(one), stated(other)
    if {*one.eos_token_ids} <= {*other.eos_token_ids}:  # a file's answers end at more: tokens known by text
        after["eos_token_ids"] = before["eos_token_ids"]
    if found := [key for key in before if before[key] != after[key]]:
        differ = "; ".join(f"{key} {before[key]!r}, not {after[key]!r}" for key in found)
        raise ValueError(f"{folder}: a GGUF file cannot state all of it: {differ}")


def add_tokenizer(
    writer: gguf.GGUFWriter, folder: Path, config: dict[str, Any], model: ModelConfig, pre: str | None
) -> None:
    """Add the tokens that begin and end texts, and the tokenizer of a folder with tokenizer.json and
    tokenizer_config.json, if it has them."""
    eos = config.get("eos_token_id")
    first = eos[0] if isinstance(eos, list) and eos else eos
    ends = sorted(model.eos_token_ids, key=lambda token_id: token_id != first)
    bos = config.get("bos_token_id")
    ids = dict(zip(_ENDS, ends, strict=False)) | ({} if bos is None else {"bos": bos})
    for name, value in ids.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", value)
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
    template = stated.get("chat_template")
    if (folder / "chat_template.jinja").is_file():
        template = (folder / "chat_template.jinja").read_text("utf-8")
    if isinstance(template, str):
        writer.add_chat_template(template)


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

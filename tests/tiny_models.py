"""Tiny random checkpoints that transformers writes, and their outputs computed by transformers.

The weights are so large that greedy choices are far apart, and no weight is 0 or 1.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_families import MORE_FAMILIES
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

FAMILIES: dict[str, tuple[type, type]] = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "qwen2_moe": (Qwen2MoeConfig, Qwen2MoeForCausalLM),
    "mixtral": (MixtralConfig, MixtralForCausalLM),
}
MOE_FAMILIES = ("qwen3_moe", "qwen2_moe", "mixtral")
VOCAB_SIZE = 97


def write_tiny_model(
    folder: Path,
    family: str = "qwen3",
    *,
    seed: int = 0,
    dtype: str = "float32",
    max_shard_size: str = "1GB",
    **overrides: Any,
) -> Path:
    """Write a checkpoint of `family` with the config changed by `overrides`; return `folder`."""
    config_class, model_class = (FAMILIES.get(family) or MORE_FAMILIES[family])[:2]
    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
    }
    if family in ("qwen3", "qwen3_moe"):
        settings["head_dim"] = 16
    if family == "mistral":
        settings["sliding_window"] = None
    if family == "mixtral":
        settings["head_dim"] = 8  # without it transformers scales no rope
    if family in MOE_FAMILIES:
        settings |= {"num_experts": 10, "num_experts_per_tok": 3, "intermediate_size": 24}
    if family in ("qwen3_moe", "qwen2_moe"):
        settings |= {"moe_intermediate_size": 24, "intermediate_size": 48, "norm_topk_prob": True}
    if family == "qwen2_moe":
        settings["shared_expert_intermediate_size"] = 40
    if family in MORE_FAMILIES:
        settings |= MORE_FAMILIES[family][2]
    model = model_class(config_class(**settings | overrides))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = (
                name.endswith(("norm.weight", "router.scale", "per_expert_scale")) or "layernorm" in name
            )
            if family.startswith("qwen3_5") or family == "qwen3_next":  # whose norms multiply by 1 + w
                is_norm = name.endswith("linear_attn.norm.weight")
            if family == "muse_glimmer":
                is_norm = name.endswith("language_model.norm.weight")
            parameter.normal_(1.0 if is_norm else 0.0, 0.2, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.normal_(1.0, 0.2, generator=generator)
            if name.endswith(("e_score_correction_bias", "feed_forward.expert_bias")):
                buffer.normal_(0.0, 0.2, generator=generator)
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=max_shard_size)
    if family == "olmo_hybrid":
        _split_convolutions(folder, model.config)
    return folder


def _split_convolutions(folder: Path, config: Any) -> None:
    """As in the released files: transformers 5.24 writes three parts of equal length, whatever they hold."""
    file = folder / "model.safetensors"
    tensors, names = load_file(file), [f"{part}_conv1d.weight" for part in "qkv"]
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    for first in [name for name in tensors if name.endswith(names[0])]:
        own = [first.replace(names[0], name) for name in names]
        whole = torch.cat([tensors[name] for name in own])
        tensors |= dict(zip(own, map(torch.clone, whole.tensor_split([keys, 2 * keys])), strict=True))
    save_file(tensors, file, {"format": "pt"})


def edit_json(path: Path, remove: tuple[str, ...] = (), **changes: Any) -> None:
    """Change keys of a JSON file in place, adding and removing."""
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if key not in remove}))


@lru_cache(maxsize=4)
def transformers_model(folder: Path) -> PreTrainedModel:
    """Load `folder` with transformers, in float32 on the CPU, with the attention that knows softcaps."""
    [name] = json.loads((folder / "config.json").read_text())["architectures"]
    maker = getattr(transformers, name) if name.startswith("Muse") else AutoModelForCausalLM
    model: PreTrainedModel = maker.from_pretrained(folder, attn_implementation="eager")
    return model.float().eval()


@torch.inference_mode()
def transformers_logits(folder: Path, token_ids: list[int]) -> torch.Tensor:
    """Return transformers' logits [len(token_ids), vocab] for one sequence."""
    return transformers_model(folder)(torch.tensor([token_ids])).logits[0]


@torch.inference_mode()
def transformers_greedy(
    folder: Path, token_ids: list[int], max_tokens: int, guess: list[int] | None = None
) -> list[int]:
    """Return the `max_tokens` tokens that transformers decodes greedily, end-of-sequence ignored.

    guess: what they may be. If each is what transformers chooses after the ones before it, as one pass tells,
    they are; else they are decoded one by one.
    """
    if guess is not None and len(guess) == max_tokens:
        logits = transformers_logits(folder, [*token_ids, *guess[:-1]])
        if logits[len(token_ids) - 1 :].argmax(-1).tolist() == guess:
            return guess
    cache, ids, output = None, torch.tensor([token_ids]), []
    for _ in range(max_tokens):
        result = transformers_model(folder)(ids, past_key_values=cache, use_cache=True)
        cache = result.past_key_values
        ids = result.logits[:, -1:].argmax(-1)
        output.append(int(ids))
    return output


def transformers_answers(
    folder: Path, prompts: list[list[int]], max_tokens: int, guesses: list[list[int]]
) -> list[list[int]]:
    """Return `transformers_greedy` of each prompt; guesses: what an engine answered."""
    pairs = zip(prompts, guesses, strict=True)
    return [transformers_greedy(folder, prompt, max_tokens, guess) for prompt, guess in pairs]

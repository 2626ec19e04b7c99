"""Random checkpoints of each family, with outliers as real models have them, written by transformers.

Matrices are normal, of variance 1 / inputs, and 1 in 256 of their rows is 4 times as large. 1 in 128 of the
hidden channels, the same in all layers, is an outlier: it is 20 times as large in the embedding, if that is
not the LM head, and 4 times in what attention and MLP add to the stream. Norms' weights are log-normal with
sigma 0.4; 1 in 128 of them is another 4 times as large, and in the last norm the outlier channels' are a
tenth. LM heads have a deviation of 3 / sqrt(hidden), embeddings that are none of 1 (Gemma's after their
factor), and routers of 4 / sqrt(hidden), so that the last of four experts, which is often a close choice,
weighs little. Gemma's embeddings are not tied: random layers hide the token too little, and nothing but it
would be predicted.

With a `peak` all norms' weights of the outlier channels are so many times as large, the last norm's too. Then
few channels decide everything: scores are peaked, and one rounded number moves all answers of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Sizes:
    """Of a checkpoint."""

    layers: int
    hidden: int
    vocab: int

    def kinds(self, every: int) -> list[str]:
        """Every `every`-th layer has full attention, the others a window."""
        return [_SLIDING if (layer + 1) % every else _FULL for layer in range(self.layers)]


@dataclass(frozen=True)
class Family:
    """The names of transformers' classes, and what a config has besides the common settings."""

    name: str
    settings: Callable[[Sizes], dict[str, Any]] = field(default=lambda sizes: {})
    config: str = ""  # of the config, if it is another name
    attention: str = "sdpa"
    offset: float = 0.0  # the norms' weights are this much smaller than what they multiply by


def _experts(sizes: Sizes) -> dict[str, Any]:
    return {
        **{
            "mlp_only_layers": [],
            "decoder_sparse_step": 1,
            "num_experts": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 4,
            "norm_topk_prob": True,
        },
        "moe_intermediate_size": sizes.hidden,
    }


def _gemma(sizes: Sizes, every: int) -> dict[str, Any]:
    return {
        **{"query_pre_attn_scalar": 64, "sliding_window": 32},
        "layer_types": sizes.kinds(every),
    }


_GRANITE = {
    **{"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1},
    "logits_scaling": 1.0,
}
_ROPES = {
    _FULL: {"rope_type": "default", "rope_theta": 1e6},
    _SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}
FAMILIES = {
    "llama": Family("Llama"),
    "mistral": Family("Mistral", lambda sizes: {"sliding_window": None}),
    "qwen2": Family("Qwen2"),
    "qwen3": Family("Qwen3"),
    "olmo2": Family("Olmo2"),
    "olmo3": Family("Olmo3", lambda sizes: {"sliding_window": 32, "layer_types": sizes.kinds(4)}),
    "smollm3": Family("SmolLM3", lambda sizes: {"tie_word_embeddings": True}),
    "phi3": Family("Phi3"),
    "gemma2": Family(
        "Gemma2",
        lambda sizes: _gemma(sizes, 2) | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        attention="eager",
        offset=1.0,
    ),
    "gemma3": Family(
        "Gemma3", lambda sizes: _gemma(sizes, 6) | {"rope_parameters": _ROPES}, "Gemma3Text", offset=1.0
    ),
    "gemma4": Family(
        "Gemma4",
        lambda sizes: {
            **{"layer_types": [*sizes.kinds(6)[:-1], _FULL], "final_logit_softcapping": 30.0},
            **{"sliding_window": 32, "global_head_dim": 128, "num_global_key_value_heads": 2},
            **{"attention_k_eq_v": True, "hidden_size_per_layer_input": 0},
        },
        "Gemma4Text",
    ),
    "glm": Family("Glm"),
    "glm4": Family("Glm4"),
    "exaone4": Family("Exaone4", lambda sizes: {"sliding_window": 32, "sliding_window_pattern": 4}),
    "granite": Family("Granite", lambda sizes: _GRANITE),
    "granite4": Family(
        "GraniteMoeHybrid",
        lambda sizes: {
            **_GRANITE,
            **{"num_local_experts": 0, "shared_intermediate_size": 3 * sizes.hidden, "mamba_n_heads": 4},
            **{"layer_types": [_FULL] * sizes.layers, "position_embedding_type": "rope"},
            **{"mamba_d_head": sizes.hidden // 2},
        },
    ),
    "ernie": Family("Ernie4_5", lambda sizes: {"use_bias": False}),
    "gpt_oss": Family(
        "GptOss",
        lambda sizes: {
            **{"sliding_window": 32, "num_local_experts": 8, "num_experts_per_tok": 4},
            **{"intermediate_size": sizes.hidden, "layer_types": sizes.kinds(2)},
        },
        attention="eager",
    ),
    "qwen3_moe": Family("Qwen3Moe", _experts),
    "qwen2_moe": Family(
        "Qwen2Moe", lambda sizes: _experts(sizes) | {"shared_expert_intermediate_size": sizes.hidden}
    ),
    "mixtral": Family(
        "Mixtral", lambda sizes: _experts(sizes) | {"intermediate_size": sizes.hidden, "sliding_window": None}
    ),
}


def make_model(family: Family, sizes: Sizes) -> PreTrainedModel:
    """A model whose weights are anything."""
    settings: dict[str, Any] = {
        **{"vocab_size": sizes.vocab, "hidden_size": sizes.hidden, "intermediate_size": 3 * sizes.hidden},
        **{"num_hidden_layers": sizes.layers, "num_attention_heads": sizes.hidden // 64, "head_dim": 64},
        **{"num_key_value_heads": max(1, sizes.hidden // 256), "max_position_embeddings": 4096},
        **{"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0, "tie_word_embeddings": False},
    }
    config = getattr(transformers, f"{family.config or family.name}Config")
    with torch.device("meta"):
        made = config(**settings | family.settings(sizes))
        model: PreTrainedModel = getattr(transformers, f"{family.name}ForCausalLM")(made)
    model.to_empty(device="cpu").tie_weights()
    return model.to(torch.bfloat16)


@torch.no_grad()
def write_checkpoint(folder: Path, model: PreTrainedModel, offset: float, seed: int, peak: float = 1) -> None:
    """Fill the weights as this module's text says, and write them."""
    generator = torch.Generator().manual_seed(seed)
    hidden, family = model.config.hidden_size, type(model).__name__
    outliers = torch.randperm(hidden, generator=generator)[: max(1, hidden // 128)]
    for name, parameter in model.named_parameters():
        weight = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            _fill_norm(weight, generator)
            if peak > 1 and len(weight) == hidden:
                weight[outliers] *= peak
            elif name == "model.norm.weight":
                weight[outliers] /= 10
            weight -= offset
        elif weight.dim() == 1 or name.endswith("bias"):
            weight *= 0.1
        elif "embed_tokens" in name and not model.config.tie_word_embeddings:
            weight[:, outliers] *= 20
            weight *= hidden**-0.5 if "Gemma" in family else 1.0
        elif name.endswith(("mlp.gate.weight", "router.weight")):
            weight *= 4 * hidden**-0.5
        elif "embed_tokens" in name or "lm_head" in name:
            weight *= 3 * hidden**-0.5
        else:  # [..., outputs, inputs], but the experts of gpt-oss are transposed
            matrix = weight.transpose(-1, -2) if "GptOss" in family and weight.dim() == 3 else weight
            matrix *= matrix.shape[-1] ** -0.5
            matrix[..., 7::256, :] *= 4
            if any(each in name for each in ("o_proj", "down_proj", "output_linear")):
                matrix[..., outliers, :] *= 4
        parameter.copy_(weight)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.fill_(1.0)
    model.save_pretrained(folder)


def _fill_norm(weight: torch.Tensor, generator: torch.Generator) -> None:
    weight.mul_(0.4).exp_()
    weight[torch.randperm(len(weight), generator=generator)[: len(weight) // 128]] *= 4

"""Tiny random checkpoints with a head that classifies, and what transformers computes with them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import edit_json, write_tiny_model
from torch import nn
from transformers import AutoModel

from nanovllm import LLM, PoolingParams, demo_model_path

PROMPTS = [
    [5, 9, 17, 3, 44, 8, 61, 2, 90, 13, 7, 7, 21, 35, 1, 64, 11, 12, 13, 92],
    [21, 35, 1],
    [5, 9, 17, 3, 44, 8, 61, 2, 90, 13, 7, 33],
    [7],
]
NEAR: dict[str, Any] = {"atol": 1e-4, "rtol": 1e-4}
PLAIN = PoolingParams(use_activation=False)
SEQUENCE, TOKENS = "Qwen3ForSequenceClassification", "Qwen3ForTokenClassification"


def write_head_model(
    folder: Path,
    family: str,
    architecture: str,
    *,
    labels: int = 3,
    seed: int = 1,
    decoder: Mapping[str, Any] | None = None,
    pad_token_id: int | None = None,
) -> Path:
    """Write a model of `architecture`: the decoder of a tiny model of `family`, changed by `decoder`, and a
    random head."""
    whole = write_tiny_model(folder / "decoder", family, seed=seed, **(decoder or {}))
    config = transformers.AutoConfig.from_pretrained(whole)
    config.id2label = {index: f"label {index}" for index in range(labels)}
    config.get_text_config().pad_token_id = pad_token_id
    model = getattr(transformers, architecture).from_pretrained(whole, config=config)
    _randomise(model.score, seed)
    model.float().save_pretrained(folder / "classifier")
    return folder / "classifier"


def write_reward_model(
    folder: Path, architecture: str, labels: int, **settings: Any
) -> tuple[Path, nn.Sequential]:
    """Write a reward model of Qwen, whose class is in no library; return its folder and its head."""
    write_tiny_model(folder, "qwen2", **settings)
    edit_json(folder / "config.json", architectures=[architecture])
    tensors = load_file(folder / "model.safetensors")
    size = len(tensors["model.norm.weight"])
    score = nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, labels))
    _randomise(score, 3)
    del tensors["lm_head.weight"]
    tensors |= {f"score.{name}": each.detach() for name, each in score.named_parameters()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder, score


def write_demo(folder: Path, labels: int) -> Path:
    """The demo model with a random head in place of its LM head, and its tokenizer."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        demo_model_path(), num_labels=labels
    )
    _randomise(model.score, 5)
    model.float().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(demo_model_path()) / name, folder)
    return folder


def _randomise(score: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in score.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)


@torch.inference_mode()
def transformers_values(folder: Path, prompts: list[list[int]]) -> list[torch.Tensor]:
    """transformers' logits of each prompt alone, [labels] or [tokens, labels]."""
    [name] = json.loads((folder / "config.json").read_text())["architectures"]
    model = getattr(transformers, name).from_pretrained(folder, attn_implementation="eager").float().eval()
    return [model(torch.tensor([prompt])).logits[0] for prompt in prompts]


def plain_values(llm: LLM, prompts: list[list[int]], **options: Any) -> list[torch.Tensor]:
    """What the head makes of each prompt, or of each of its tokens."""
    head = llm.model_config.head
    task = "token_classify" if head.each_token else "classify"
    outputs = llm.encode(prompts, PLAIN, use_tqdm=False, pooling_task=task, **options)
    return [each.outputs.data for each in outputs]


def same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    pairs = list(zip(found, wanted, strict=True))
    return all(one.shape == other.shape and torch.allclose(one, other, **NEAR) for one, other in pairs)


def hidden_states(folder: Path, prompts: list[list[int]]) -> list[torch.Tensor]:
    with torch.inference_mode():
        model = AutoModel.from_pretrained(folder, attn_implementation="eager").float().eval()
        return [model(torch.tensor([prompt])).last_hidden_state[0] for prompt in prompts]
